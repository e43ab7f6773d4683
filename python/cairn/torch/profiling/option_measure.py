"""Finds and measures the options inside the blocks of a profiled step.

One block of each kind is opened: it is recorded twice (`block_graph.py`), which gives the times of its operations and
shows whether it does the same twice; the choices along the hull are found (`block_options.py`); each is proved by
rebuilding every tensor that it does not keep and comparing it in full with what autograd saved, which also gives its
time; and each runs forward and backward alone under a meter, as the executor will run it, which gives its bytes.
An operation that does not give the same result again is not replayed, and the choices are found anew. Blocks of the
same kind, which by their own recorded operations do the same, share what was measured.

Bytes and times are differences to a run of the same kind that keeps everything, added to what was measured of the stage
in its surroundings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from ..base import _compat, clock, memory
from ..base.blocks import Block, intercepted
from ..base.layouts import Layouts
from ..base.progress import Teller
from ..base.stage_measure import KEEP, OptionMeasure, StageMeasure
from ..base.tensor_fingerprints import fingerprint
from ..base.tree import Tree
from ..rerun_state.attributes import Attributes
from ..rerun_state.constant_guards import Constants
from ..rerun_state.guards import is_noted
from ..rerun_state.rng_and_autocast import RandomState, no_autocast, with_generator
from ..selective.block_graph import BlockGraph, BlockRecorder
from ..selective.block_options import candidates, thinned
from ..selective.recompute import Rebuild, Recipe, compile_recipe
from . import isolated_block, overhead
from .block_meter import BlockMeter, Created, Rewinding, captured_by, parameters_of
from .measure import StepMeasure
from .parameter_users import Owners
from .sample import Sample, backward_of
from .side_outputs import Beside, collecting_apart

PROOFS = 3  # rebuilds of each choice: as many times, of which the median counts
LONG_NS = 500_000_000  # what takes longer is done and timed once
LEAST_BYTES = 4096  # an option that saves less is not worth having
MAX_OPTIONS = 12  # keep everything among them, of a block that saves no more than a part of the step
PARTS = 12  # of what a step saves: options of a block lie no further apart
ATTEMPTS = 8  # at choices without the operations that turned out not to give the same again

Function = Callable[..., Any]


class OptionPass:
    """One forward of the model in which one block of each kind is opened; see the top of this file."""

    def __init__(
        self, sample: Sample, blocks: Sequence[Block], measured: StepMeasure, owners: Owners, device: torch.device
    ) -> None:
        self._sample, self._blocks, self._measured = sample, blocks, measured
        self._owners, self._device = owners, device
        self._found: dict[Any, _Opening] = {}
        self._index = 0
        self._calls: dict[int, int] = {}
        self._part_bytes = sum(stage.saved_bytes for stage in measured.stages) // PARTS

    def run(self) -> None:
        """Adds options to the measured stages, or says why there are none."""
        with intercepted(self._blocks, self._handle, self._sample.replaced.during_block):
            output, loss = self._sample.forward()
        backward_of(output, loss)
        del output, loss
        for parameter in self._sample.model.parameters():
            parameter.grad = None

    def _handle(self, block: Block, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self._measured.blocks[self._index]
        self._index += 1
        call = self._calls.get(id(block), 0)
        self._calls[id(block)] = call + 1
        arguments = isolated_block.Arguments(args, kwargs, block.has_gradients_inside)
        if stage.captured:
            captured_by(block, function, arguments, self._device)
        if block.is_compiled:
            stage.closed = "is compiled"
        elif stage.may_be_opened:
            with collecting_apart():
                self._open(stage, block, call, function, arguments)
        with arguments.saving_nothing():
            args, kwargs = arguments.source(isolated_block.Hooks())
            lent = arguments.lent(args, kwargs)
            result = arguments.run(function, args, kwargs)
        self._sample.teller.one_done()
        output = isolated_block.bridge(result, arguments.differentiable, isolated_block.Hooks())
        lent.hand_back(block.name, result, output)
        return output

    def _open(
        self, stage: StageMeasure, block: Block, call: int, function: Function, arguments: isolated_block.Arguments
    ) -> None:
        arriving = self._measured.arriving.get((block.name, call), ())
        run = _BlockRuns(block, function, arguments, self._device, arriving)
        with run.rewound():
            graph = run.recorded(saving=False)
            kind = (stage.signature(), graph.digest(), graph.closed)
            if kind not in self._found:
                run.waiting = self._owners.waiting(block, call)
                run.shared = {id(p) for p in parameters_of(block) if self._owners.is_shared(p)}
                self._found[kind] = _Opening(run, stage, graph, self._part_bytes, self._sample.teller)
        self._found[kind].describe(stage)


class _BlockRuns:
    """Runs one call of a block alone, as often as is needed, each time the same."""

    def __init__(
        self,
        block: Block,
        function: Function,
        arguments: isolated_block.Arguments,
        device: torch.device,
        arriving: Layouts,
    ) -> None:
        self.block, self.function, self.arguments, self.device = block, function, arguments, device
        self.arriving = arriving  # how gradients lie of the outputs, and of what is left beside them
        self.waiting: Sequence[torch.nn.Parameter] = ()  # that have a gradient when the block's own arrives
        self.shared: Set[int] = frozenset()  # the identities of parameters whose gradients wait for others
        self.devices = (device,) if with_generator(device) else ()
        self._rewinding = Rewinding(block, device)
        self._attributes = Attributes(block.parts(), with_large=True)  # each run replaces the same

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """A context after which generators, buffers and attributes are as before it."""
        try:
            yield
        finally:
            self.rewind()

    def rewind(self) -> None:
        self._rewinding.rewind()
        self._attributes.restore()

    def parameters(self) -> list[torch.Tensor | None]:
        return [p for part in self.block.parts() for p in part._parameters.values()]

    def buffers(self) -> list[torch.Tensor | None]:
        return [b for part in self.block.parts() for b in part._buffers.values()]

    def recorded(self, saving: bool, asked: list[int] | None = None) -> BlockGraph:
        """The operations of a run; with `saving`, a backward too, which notes in which order tensors are asked for."""
        self.rewind()
        constants, buffers, beside = Constants(self.block.parts()), self.buffers(), Beside(self.block.parts())
        args, kwargs = self.arguments.source(isolated_block.Hooks())
        leaves, parts = Tree.of((args, kwargs)).leaves, self.block.parts()
        recorder = BlockRecorder(leaves, self.parameters(), self.buffers(), parts, timed=self.device)
        count, has_ended = 0, False
        holds = saving or self.block.has_gradients_inside

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal count
            with recorder.paused():
                recorder.pack(tensor)
                count += 1
                return count - 1, tensor.detach() if holds else None

        def unpack(held: Any) -> torch.Tensor:
            if has_ended and asked is not None:
                asked.append(held[0])
            elif not has_ended:
                recorder.read(held[0])
            return held[1]

        with _compat.saved_tensors_hooks(pack, unpack), recorder:
            result = self.arguments.run(self.function, args, kwargs)
        has_ended = True
        graph = recorder.graph(result)
        if not constants.hold(parts, list(map(vars, parts))):
            graph.closed = graph.closed or f"changes {constants.difference(parts)} in every run"
        for (module, name), value in self._attributes.filled():
            if is_noted(value):  # and so would have to be as it was
                kind = type(module).__name__
                graph.closed = graph.closed or f"changes the attribute '{name}' of {kind} in every run"
        if any(now is not before for now, before in zip(self.buffers(), buffers, strict=True)):
            graph.closed = graph.closed or "puts other tensors in the place of its buffers"
        if saving and not graph.closed:
            self.backward(*beside.root(result, self.arriving))
        torch.clear_autocast_cache()
        return graph

    def backward(self, made: list[torch.Tensor], grads: Layouts) -> None:
        root = isolated_block.sink(made, isolated_block.Hooks(), grads)
        made.clear()
        with isolated_block.as_in_backward(self.device):
            root.backward()
        for parameter in parameters_of(self.block):
            parameter.grad = None


class _Opening:
    """What was found inside one kind of block."""

    def __init__(
        self,
        run: _BlockRuns,
        stage: StageMeasure,
        graph: BlockGraph,
        part_bytes: int,
        teller: Teller,
    ) -> None:
        self._run, self._stage, self._part_bytes = run, stage, part_bytes
        self._teller = teller
        self.asked: list[int] = []
        self.options: list[OptionMeasure] = []
        self.digest = graph.digest()
        self.draws = sorted({op.packs_before for op in graph.operations if op.random})
        self.reason = graph.closed or self._find(stage)
        del self._run, self._teller

    def describe(self, stage: StageMeasure) -> None:
        """Tells a stage what was found."""
        stage.closed = self.reason
        if not self.reason:
            stage.digest, stage.asked, stage.draws = self.digest, list(self.asked), list(self.draws)
            stage.options = [_moved(option, self._stage, stage) for option in self.options]

    def _find(self, stage: StageMeasure) -> str:
        graph = self._run.recorded(saving=True, asked=self.asked)
        again = self._run.recorded(saving=False)
        if graph.digest() != again.digest() or graph.digest() != self.digest:
            return "does not do the same operations when it is run again"
        for op, other in zip(graph.operations, again.operations, strict=True):
            op.nanoseconds = min(op.nanoseconds, other.nanoseconds)
        proved = _Proofs(self._run, graph, self.asked, self._part_bytes).choices()
        if len(proved) < 2:
            return "has no saved tensor that could be rebuilt"
        for recipe, took in proved[1:] if self._run.device.type == "cpu" else ():
            took.saving_ns += overhead.cost().of_part(recipe.hooks_cost)
            took.rebuilding_ns += overhead.cost().of_rebuilding(len(recipe.order))
        measured = self._metered(proved)
        copied = memory.unique_bytes(b for b in self._run.buffers() if b is not None)
        options = [_option(stage, measured[0], proved[i], m, copied if i else 0) for i, m in enumerate(measured)]
        parts = stage.saved_bytes // max(1, self._part_bytes)
        self.options = _thinned(_pareto(options), MAX_OPTIONS + parts)
        return "" if len(self.options) > 1 else "has no option that takes less"

    def _metered(self, proved: Sequence[tuple[Recipe, _Took]]) -> list[tuple[StageMeasure, _Took]]:
        self._teller.more(len(proved))
        measured = []
        for recipe, took in proved:
            measured.append((_Metered(self._run, recipe).stage, took))
            self._teller.one_done()
        return measured


def _option(
    stage: StageMeasure,
    everything: tuple[StageMeasure, _Took],
    proved: tuple[Recipe, _Took],
    measured: tuple[StageMeasure, _Took],
    copied_bytes: int,
) -> OptionMeasure:
    """The stage with an option: what was measured of it, and by how much the option differs from keeping everything.

    Buffers, `copied_bytes`, are copied before the block first runs.
    """
    base, found = everything[0], measured[0]
    recipe, took = proved
    return OptionMeasure(
        decisions=recipe.decisions,
        saved_bytes=max(stage.saved_bytes + found.saved_bytes - base.saved_bytes, stage.output_bytes),
        forward_rise_bytes=stage.forward_rise_bytes + found.forward_rise_bytes - base.forward_rise_bytes + copied_bytes,
        backward_rise_bytes=stage.backward_rise_bytes + found.backward_rise_bytes - base.backward_rise_bytes,
        accumulated_backward_rise_bytes=stage.accumulated_backward_rise_bytes
        + found.accumulated_backward_rise_bytes
        - base.accumulated_backward_rise_bytes,
        forward_ns=stage.forward_ns + took.saving_ns,
        backward_ns=stage.backward_ns + took.rebuilding_ns,
        travel_bytes=stage.travel_bytes + found.travel_bytes - base.travel_bytes
        if min(stage.travel_bytes, found.travel_bytes, base.travel_bytes) > 0
        else 0,
        rebuilds=_described(recipe),
    )


def _moved(option: OptionMeasure, measured: StageMeasure, stage: StageMeasure) -> OptionMeasure:
    """An option of a stage that was measured, for one of the same signature."""
    travels = min(option.travel_bytes, stage.travel_bytes) > 0
    accumulated = stage.accumulated_backward_rise_bytes - measured.accumulated_backward_rise_bytes
    return dataclasses.replace(
        option,
        saved_bytes=max(option.saved_bytes + stage.saved_bytes - measured.saved_bytes, stage.output_bytes),
        forward_rise_bytes=option.forward_rise_bytes + stage.forward_rise_bytes - measured.forward_rise_bytes,
        backward_rise_bytes=option.backward_rise_bytes + stage.backward_rise_bytes - measured.backward_rise_bytes,
        accumulated_backward_rise_bytes=option.accumulated_backward_rise_bytes + accumulated,
        travel_bytes=max(0, option.travel_bytes + stage.travel_bytes - measured.travel_bytes) if travels else 0,
    )


def _described(recipe: Recipe) -> str:
    """What an option runs again, for people: the operations, most frequent first."""
    names: dict[str, int] = {}
    for function in recipe.code.operations:
        name = getattr(function, "__name__", str(function)).lstrip("_")
        name = str(function).removeprefix("aten.").partition(".")[0] if "." in str(function) else name
        names[name] = names.get(name, 0) + 1
    listed = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in listed)


def _pareto(options: list[OptionMeasure]) -> list[OptionMeasure]:
    """Without the options that another one beats in bytes and time; the first, which keeps everything, stays."""
    less = [option for option in options[1:] if option.saved_bytes + LEAST_BYTES < options[0].saved_bytes]
    kept = [option for option in less if not any(_beats(other, option) for other in less)]
    return [options[0], *sorted(kept, key=lambda option: (-option.saved_bytes, option.time_ns))]


def _beats(other: OptionMeasure, option: OptionMeasure) -> bool:
    """Whether it takes no more of anything, and less of something: what is slower may still peak lower."""
    ours, theirs = (
        (o.saved_bytes, o.forward_rise_bytes, o.backward_rise_bytes, o.accumulated_backward_rise_bytes, o.time_ns)
        for o in (option, other)
    )
    return ours != theirs and all(a <= b for a, b in zip(theirs, ours, strict=True))


def _thinned(options: list[OptionMeasure], at_most: int) -> list[OptionMeasure]:
    """At most so many, among them those that set what a step takes at least: the one that saves least, which is the
    last, and those that peak lowest.
    """
    stay = {id(min(options, key=_peak)), id(min(options, key=_accumulated_peak))}
    return thinned(options, at_most, lambda option: (option.saved_bytes, option.time_ns), stay)


def _peak(option: OptionMeasure) -> tuple[int, int]:
    """Of a block with nothing beside it; of equal ones, the fastest."""
    return max(option.forward_rise_bytes, option.saved_bytes + option.backward_rise_bytes), option.time_ns


def _accumulated_peak(option: OptionMeasure) -> tuple[int, int]:
    peak = max(option.forward_rise_bytes, option.saved_bytes + option.accumulated_backward_rise_bytes)
    return peak, option.time_ns


# -- proving -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Took:
    """Times of an option beyond those of keeping everything."""

    saving_ns: int = 0
    rebuilding_ns: int = 0


class _NotTheSame(Exception):
    """A tensor did not come out as it was saved."""

    def __init__(self, pack: int) -> None:
        super().__init__(pack)
        self.pack = pack


class _Proofs:
    """Rebuilds what choices do not keep from the saved tensors of one run, and compares."""

    def __init__(self, run: _BlockRuns, graph: BlockGraph, asked: Sequence[int], part_bytes: int) -> None:
        self._run, self._graph, self._asked, self._part_bytes = run, graph, asked, part_bytes

    def choices(self) -> list[tuple[Recipe, _Took]]:
        """The choices with their times; the first keeps everything."""
        for _ in range(ATTEMPTS):
            try:
                return self._try()
            except _NotTheSame as error:
                self._rule_out(error.pack)
        return []

    def _rule_out(self, pack: int) -> None:
        """The operation that made a tensor, or the ones before it, must not be replayed."""
        use = self._graph.packs[pack].use
        assert use is not None
        operation = self._graph.operations[self._graph.values[use.value].operation]
        operation.reason = operation.reason or "does not give the same result again"

    def _try(self) -> list[tuple[Recipe, _Took]]:
        self._run.rewind()
        saved: list[torch.Tensor] = []
        states = [RandomState(self._run.devices)]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            states.append(RandomState(self._run.devices))
            return saved[-1]

        args, kwargs = self._run.arguments.source(isolated_block.Hooks())
        where = _Where(Tree.of((args, kwargs)).leaves, self._run.parameters(), self._run.buffers())
        with _compat.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._run.arguments.run(self._run.function, args, kwargs)
        torch.clear_autocast_cache()
        if len(saved) != len(self._graph.packs):
            return []
        found = candidates(self._graph, self._part_bytes)
        recipes = [compile_recipe(self._graph, choice.decisions, self._asked) for choice in found]
        return [(recipe, self._proved(recipe, saved, states, where)) for recipe in recipes]

    def _proved(
        self, recipe: Recipe, saved: Sequence[torch.Tensor], states: Sequence[RandomState], where: _Where
    ) -> _Took:
        took: list[_Took] = []
        if set(recipe.decisions) == {KEEP}:
            return _Took()
        for _ in range(PROOFS):
            rebuild, now = Rebuild(recipe), _Took()
            for index, tensor in enumerate(saved):
                began = self._now()
                rebuild.saved(index, tensor)
                if index + 1 in recipe.states:
                    RandomState(self._run.devices)
                now.saving_ns += self._now() - began
            for count in recipe.states:
                rebuild.take_state(count, states[count])
            # as in a backward, where some operations (oneDNN's LSTM) leave out what only a backward would read
            with no_autocast((self._run.device.type,)), torch.no_grad():
                self._rebuild_all(rebuild, saved, where, now)
            took.append(now)
            if now.rebuilding_ns > LONG_NS:
                break
        return _Took(
            int(statistics.median(t.saving_ns for t in took)), int(statistics.median(t.rebuilding_ns for t in took))
        )

    def _rebuild_all(self, rebuild: Rebuild, saved: Sequence[torch.Tensor], where: _Where, took: _Took) -> None:
        for index in rebuild.recipe.order:
            began = self._now()
            again = rebuild.tensor(index, where)
            took.rebuilding_ns += self._now() - began
            if again is None or not _same(again, saved[index]):
                raise _NotTheSame(index)
            del again

    def _now(self) -> int:
        clock.wait_for(self._run.device)
        return clock.read()


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit, in the same layout."""
    if first.stride() != second.stride() or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first, second) or fingerprint(first) == fingerprint(second)


@dataclasses.dataclass
class _Where:
    """What was there before the block, while it is proved."""

    arguments: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor | None]

    def argument(self, index: int) -> torch.Tensor:
        return self.arguments[index].detach()

    def parameter(self, index: int) -> torch.Tensor:
        found = self.parameters[index]
        assert found is not None
        return found

    def buffer(self, index: int) -> torch.Tensor:
        found = self.buffers[index]
        assert found is not None
        return found


# -- metering ------------------------------------------------------------------------------------------------


class _Metered:
    """One option's forward and backward, alone, under a meter."""

    def __init__(self, run: _BlockRuns, recipe: Recipe) -> None:
        run.rewind()
        self.stage = StageMeasure(run.block.name, "block")
        meter = memory.meter_for(run.device)
        static = memory.storages(t for t in (*run.parameters(), *run.buffers()) if t is not None)
        created = Created(meter)
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: created.note(p.grad))
            for p in parameters_of(run.block)
            if p.requires_grad and p.is_leaf and id(p) not in run.shared
        ]
        alone = BlockMeter(meter, self.stage, run.block, run.device, run.arriving, static)
        try:
            with meter:
                alone.run_saving(run.function, run.arguments, run.waiting, created, lambda: _Saved(run, recipe))
        finally:
            for handle in handles:
                handle.remove()
        alone.read_saving()


class _Saved:
    """Pack hooks that keep and rebuild as the executor does."""

    def __init__(self, run: _BlockRuns, recipe: Recipe) -> None:
        self.count = 0
        self.storages: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.stays = False
        self._run, self._recipe, self._rebuild = run, recipe, Rebuild(recipe)
        self._leaves: list[torch.Tensor] = []
        if 0 in recipe.states:
            self._rebuild.take_state(0, RandomState(run.devices))

    def recording(self) -> Any:
        return _compat.saved_tensors_hooks(self._pack, self._unpack)

    def given(self, args: Any, kwargs: Any) -> None:
        """The arguments that the block is called with."""
        self._leaves = [t.detach() for t in Tree.of((args, kwargs)).leaves]

    def _pack(self, tensor: torch.Tensor) -> Any:
        index = self.count
        self.count += 1
        keep = self._rebuild.saved(index, tensor)
        if self.count in self._recipe.states:
            self._rebuild.take_state(self.count, RandomState(self._run.devices))
        held = tensor if keep else self._rebuild.held().get(index)
        if held is not None and held.device == self._run.device:
            self.sizes.update(memory.storages([held]))
            self.stays |= not memory.can_travel(held)
        return index, tensor.detach() if keep else None

    def _unpack(self, held: tuple[int, torch.Tensor | None]) -> torch.Tensor:
        index, tensor = held
        if tensor is not None:
            return tensor
        rebuilt = self._rebuild.tensor(index, _Where(self._leaves, self._run.parameters(), self._run.buffers()))
        assert rebuilt is not None
        return rebuilt
