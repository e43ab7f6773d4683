"""Measures a training step stage by stage, in one forward and one backward in which the blocks save nothing.

The model runs as ever, but every block that is reached is run alone (`block_meter.py`), and then a function that saves
nothing takes its place in the graph. So no more memory is needed than for the blocks' outputs, one block's saved
tensors and what lies outside blocks, and the surroundings are measured in the graph in which they really run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base import _compat, memory
from ..base.blocks import Block, intercepted
from ..base.layouts import Layout, Layouts, bytes_of, layouts_of, layouts_of_all, without_waiting
from ..base.stage_measure import HIDDEN_BEHIND, IN_ATTRIBUTES, LEFT_BESIDE, OVERWRITTEN, SLACK_BYTES, StageMeasure
from ..base.stages import shown
from ..base.tree import tensors_in, tensors_inside
from ..rerun_state.kv_caches import refuse_learned_caches
from ..rerun_state.module_state import LARGE_BYTES, OF_EVERY_MODULE
from ..rerun_state.preserve import Randomness
from . import gradient_lifetimes, isolated_block
from .block_meter import BlockMeter, Created, parameters_of, peak_without
from .cast_copies import Copies
from .parameter_users import Owners, UsedOutside
from .sample import Sample, backward_of
from .side_outputs import Beside

LOSS_BYTES = 4

#: How gradients lie of a block's outputs and of what it leaves beside them, by its name and the number of its call.
Arriving = Mapping[tuple[str, int], Layouts]


@dataclasses.dataclass
class StepMeasure:
    """All stages in order, and what is resident beside them."""

    stages: list[StageMeasure]
    pinned: dict[str, int]  # outputs of blocks that are read or held later on, by name
    blocks: list[StageMeasure]  # the stages that are blocks
    input_grad_bytes: int  # gradients of the step's input
    surroundings: list[StageMeasure | None]  # what runs before each block and after the last, where it is a stage
    arriving: Arriving
    is_settled: bool  # blocks were measured with what `arriving` and `used_outside` say
    used_outside: UsedOutside
    excess: float = 0.0  # of the meter
    is_rehearsed: bool = True  # there was memory to recompute each block once after the forward


# -- the pass that measures memory ---------------------------------------------------------------------------


@dataclasses.dataclass
class _Moment:
    """A mark, with what blocks' outputs, by storage, and gradients handed to or by blocks take at it."""

    mark: int
    outputs: dict[int, int]
    grads_bytes: int = 0
    replaced_bytes: int = 0  # of what was found in attributes, and replaced since the step began, outside of blocks

    @property
    def outputs_bytes(self) -> int:
        return sum(self.outputs.values())


@dataclasses.dataclass
class _Segment:
    """What runs outside blocks before the first, between two, or after the last of them."""

    begin: _Moment
    end: _Moment | None = None
    backward_begin: _Moment | None = None
    backward_end: _Moment | None = None
    returned: _Moment | None = None  # of the last one: when the model's forward has returned
    saved_bytes: int = 0  # of what it made, what goes in the backward, or is taken to
    replacing: dict[int, int] = dataclasses.field(default_factory=dict)  # `_stand_for_found` when it has run


class _InAttribute(NamedTuple):
    """A tensor that nobody registered, as it was found in an attribute: hooks compute weights there."""

    names: dict[str, Any]
    name: str
    tensor: weakref.ref[torch.Tensor]
    storage: int  # its identity, and its bytes; 0 of what has none
    nbytes: int

    def is_there(self) -> bool:
        """Whether the attribute still stands for it."""
        return self.names.get(self.name) is self.tensor()

    def now(self) -> Iterator[_InAttribute]:
        """What the attribute has now, if that is a tensor."""
        yield from _of_attribute(self.names, self.name)


@dataclasses.dataclass
class _Run:
    """One call of a block."""

    stage: StageMeasure
    alone: BlockMeter
    inputs: dict[int, int]  # bytes by storage of the inputs that have a gradient
    chained: bool  # it reads exactly what the block before it returned
    main: dict[int, int] = dataclasses.field(default_factory=dict)  # of them, those on the chain
    chained_to: bool = False  # the next block reads exactly what this one returned
    is_held: bool = False  # what runs after it, outside of blocks, may hold its output
    viewed: set[int] = dataclasses.field(default_factory=set)  # outputs that the next block reads, by views of them
    outputs: list[_compat.StorageRef] = dataclasses.field(default_factory=list)
    made: set[int] = dataclasses.field(default_factory=set)  # those that are new, and no arguments that it hands on
    tensors: list[tuple[weakref.ref[torch.Tensor], tuple[Any, ...], int]] = dataclasses.field(default_factory=list)
    pinned: set[int] = dataclasses.field(default_factory=set)  # outputs resident to the end of the step
    accumulated_change: int = 0  # of what waits for gradients of others, where they are added to existing ones
    left_bytes: int = 0  # of what it left beside its result, and nobody else returned
    replaced_bytes: int = 0  # of what it found in attributes and saved, and has alone, for others stand there since
    unused: set[int] = dataclasses.field(default_factory=set)  # its parameters that it does not use, by identity
    unread: set[int] = dataclasses.field(default_factory=set)  # outputs that the next block does not read
    saved_outputs: set[int] = dataclasses.field(default_factory=set)  # outputs that autograd saves
    held_outputs: set[int] = dataclasses.field(default_factory=set)  # outputs that it holds itself, or anyone for it
    alive: dict[int, int] = dataclasses.field(default_factory=dict)  # outputs of earlier blocks, while this one runs
    arguments: list[torch.Tensor] = dataclasses.field(default_factory=list)  # resident as long as a backward reads them
    read: list[_compat.VersionWitness] = dataclasses.field(default_factory=list)  # what it was passed, and buffers
    computed: list[_InAttribute] = dataclasses.field(default_factory=list)  # what it found in attributes, and left
    handed: list[tuple[int, Layout]] = dataclasses.field(default_factory=list)  # of inputs, by their storages
    arrived: _Moment | None = None
    arriving: Layouts = ()

    def returned(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that this run returned and nobody changed."""
        identity = isolated_block.identity(tensor)
        return any(identity == known and tensor._version == version for _, known, version in self.tensors)


class MemoryPass:
    """One forward and backward under a meter; see the top of this file."""

    def __init__(
        self,
        sample: Sample,
        blocks: Sequence[Block],
        owners: Owners,
        device: torch.device,
        arriving: Arriving | None = None,
        copies: Sequence[Copies] = (),
    ) -> None:
        self._sample, self._blocks, self._owners, self._device = sample, blocks, owners, device
        self._arriving, self._copies = arriving or {}, copies
        self._meter = memory.meter_for(device)
        self._there = _static_storages(sample)  # no other storage gets the identity of one that a step replaces
        self._static = {ref.key for ref in self._there}
        self._runs: list[_Run] = []
        self._segments: list[_Segment] = []
        self._calls: dict[int, int] = {}
        self._random_state: int | None = None  # before the last block, fingerprinted
        self._created = Created(self._meter)
        self._held: dict[int, int] = {}
        self._gone: dict[int, int] = {}  # the mark at which an output went, by storage
        self._is_backward = False  # of the step
        self._place = 0  # how many blocks' backwards are to come
        self._reached: dict[int, int] = {}  # `_place` when the step's backward reaches a parameter of blocks
        #: gradients that were added to those of blocks: mark, and what goes where gradients are created, or exist
        self._added: list[tuple[int, int, int]] = []
        self._kept_bytes = 0  # large gradients that hooks have kept
        self._left: set[int] = set()  # those of blocks that leave something beside their results
        self._found_bytes = 0  # in attributes of modules, before the step
        self._found: list[_InAttribute] = []  # of that, what an attribute itself still stands for
        self._found_places: list[_InAttribute] = []  # all of those
        self._replaced_bytes = 0  # so much of it was replaced outside of blocks

    def run(self) -> StepMeasure:
        handles = [
            p.register_post_accumulate_grad_hook(self._accumulated)
            for p in self._sample.model.parameters()
            if p.requires_grad and p.is_leaf
        ]
        torch.clear_autocast_cache()
        replaced = _stored(self._sample.model)  # if it went meanwhile, the step would rise by the difference alone
        there = memory.storages(replaced).items()
        self._found_bytes = sum(size for key, size in there if size > LARGE_BYTES and key not in self._static)
        named = (found for module in self._sample.model.modules() for found in _in_attributes(module))
        self._found = [found for found in named if self._counts(found)]
        self._found_places = list(self._found)
        try:
            with self._meter:
                self._step()
        finally:
            for handle in handles:
                handle.remove()
        del replaced
        return self._evaluate()

    def _counts(self, found: _InAttribute) -> bool:
        return found.nbytes > LARGE_BYTES and found.storage not in self._static

    def _without_replaced(self) -> int:
        """Bytes of what was found, and which no attribute stands for any more; it is looked for no longer."""
        sizes = {found.storage: found.nbytes for found in self._found}
        self._found = [found for found in self._found if found.is_there()]
        there = {found.storage for found in self._found}
        return sum(size for key, size in sizes.items() if key not in there)

    def _stand_for_found(self) -> dict[int, int]:
        """By the storage of what attributes have now: the bytes of what they had before the step, resident."""
        return {now.storage: found.nbytes for found in self._found_places for now in found.now()}

    def _end_segment(self) -> None:
        """What ran outside of blocks has ended."""
        self._replaced_bytes += self._without_replaced()
        self._segments[-1].replacing = self._stand_for_found()
        self._segments[-1].end = self._moment()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        is_shared = self._owners.is_shared(parameter)
        if self._is_backward and self._owners.is_in_blocks(parameter):
            self._reached[id(parameter)] = self._place
            if self._owners.is_used_in_blocks(parameter) and not is_shared:
                parameter.grad = None  # if by what a block left beside its result, counted where it runs alone
        if parameter.grad is not None and not is_shared:
            self._created.note(parameter.grad)
        elif parameter.grad is not None and self._is_backward:
            size = memory.storage_bytes(parameter.grad)
            first, after = self._owners.come_before(parameter, self._place)
            if first:
                self._added.append((self._meter.mark(), size, size if after else 2 * size))

    def _step(self) -> None:
        self._segments.append(_Segment(self._moment()))
        with intercepted(self._blocks, self._handle, self._sample.replaced.during_block):
            output, loss = self._sample.forward(self._returned)
        self._note_held(False)
        self._end_segment()
        self._keep_overwritten()
        for run in self._runs:
            if run.chained_to:
                run.pinned |= {ref.key for ref in run.outputs if ref.alive()}
        self._held = memory.storages(tensors_in((output, loss)))
        left = self._note_left()
        torch.clear_autocast_cache()
        self._segments[-1].backward_begin = self._moment()
        self._place = len(self._runs)
        self._is_backward, beside = True, Beside(list(self._sample.model.modules()))
        backward_of(output, loss)
        self._segments[0].backward_end = self._moment()
        self._kept_bytes = sum(ref.nbytes for ref in beside.storages(self._static).values())
        del output, loss, left
        for parameter in self._sample.model.parameters():
            parameter.grad = None

    def _returned(self) -> None:
        self._segments[-1].returned = self._moment()

    def _moment(self, grads_bytes: int = 0) -> _Moment:
        alive = {ref.key: ref.nbytes for run in self._runs for ref in run.outputs if ref.alive()}
        return _Moment(self._meter.mark(), alive, grads_bytes, self._replaced_bytes)

    # blocks

    def _handle(self, block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._end_segment()
        call = self._calls.get(id(block), 0)
        self._calls[id(block)] = call + 1
        refuse_learned_caches(block.name, (*args, *kwargs.values()))
        arguments = isolated_block.Arguments(args, kwargs, block.has_gradients_inside)
        arguments.refuse_iterators(block.name)
        stage = StageMeasure(block.name, "block", block.class_name, call)
        state = Randomness(self._device).torch_fingerprint()
        stage.random_state_is_new, self._random_state = state != self._random_state, state
        alone = BlockMeter(self._meter, stage, block, self._device, self._known_layouts(block, call), self._static)
        hooks, shared = isolated_block.Hooks(), self._owners.waiting(block, call)
        computed = [found for part in block.parts() for found in _in_attributes(part)]
        output = alone.run(function, arguments, hooks, shared, self._created)
        run = _Run(stage, alone, memory.storages(arguments.differentiable), self._is_chained(arguments))
        self._note_held(run.chained)
        self._note_readings(run, arguments)
        self._note_weight_grads(run, shared, block)
        if run.alone.beside.layouts:
            self._left |= set(map(id, parameters_of(block)))
        self._remember_outputs(run, output, arguments)
        run.read = list(map(_compat.VersionWitness, [*arguments.tensors, *_large_buffers(block, stage)]))
        run.computed = [found for found in computed if found.is_there()]
        self._without_replaced()  # what the block replaced is counted as left by it
        self._runs.append(run)
        self._segments.append(_Segment(self._moment()))
        handed = layouts_of(arguments.differentiable, run.alone.leaving)
        run.handed = [
            (_compat.storage_id(tensor), layout)
            for tensor, layout in zip(arguments.differentiable, handed, strict=True)
            if layout is not None and memory.has_storage(tensor)
        ]
        self._join(len(self._runs) - 1, hooks)
        self._sample.teller.one_done()
        return output

    def _known_layouts(self, block: Block, call: int) -> Layouts:
        return self._arriving.get((block.name, call), ())

    def _is_chained(self, arguments: isolated_block.Arguments) -> bool:
        """The gradient's way leads to the block before and to nothing else that was made since then."""
        if not self._runs:
            return False
        last = self._runs[-1]
        older = {key for run in self._runs[:-1] for key in run.inputs} | set(last.inputs)
        older |= {ref.key for run in self._runs[:-1] for ref in run.outputs}
        from_last = [t for t in arguments.differentiable if last.returned(t)]
        others = [t for t in arguments.differentiable if not last.returned(t)]
        return bool(from_last) and all(_compat.storage_id(t) in older for t in others if memory.has_storage(t))

    def _note_held(self, chained: bool) -> None:
        """Whether what ran since the last block still has its output: autograd may have saved it there."""
        if self._runs and not chained:
            self._runs[-1].is_held = any(ref.alive() for ref in self._runs[-1].outputs)

    def _note_readings(self, run: _Run, arguments: isolated_block.Arguments) -> None:
        """What earlier blocks returned and is still there: read here, or held by the caller.

        What the block before returned, and this one reads by a view of it, is handed on by what runs between them.
        """
        read = {_compat.storage_id(t) for t in arguments.tensors if memory.has_storage(t)}
        for earlier in self._runs:
            alive = {ref.key: ref.nbytes for ref in earlier.outputs if ref.alive()}
            if run.chained and earlier is self._runs[-1]:
                earlier.unread = {ref.key for ref in earlier.outputs} - read
                run.alive |= {key: size for key, size in alive.items() if key not in read}
                continue
            viewed = set(run.inputs) & set(alive) if earlier is self._runs[-1] else set()
            earlier.viewed |= viewed
            earlier.pinned |= (read & set(alive)) - viewed
            run.alive |= {key: size for key, size in alive.items() if key not in viewed}
        if run.chained:
            self._runs[-1].chained_to = True
        returned = {ref.key for earlier in self._runs for ref in earlier.outputs}
        run.arguments = [
            t
            for t in arguments.tensors
            if memory.has_storage(t) and _compat.storage_id(t) not in returned | self._static
        ]

    def _keep_overwritten(self) -> None:
        """A block cannot be run again from what was changed after it ran."""
        for run in self._runs:
            replaced = {found.storage: found.nbytes for found in run.computed if not found.is_there()}
            counted = self._static | memory.storages(run.arguments).keys()
            run.replaced_bytes = sum(size for key, size in replaced.items() if key in run.alone.saved - counted)
            if replaced or any(witness.has_changed() for witness in run.read):
                run.stage.keep_reason = run.stage.keep_reason or OVERWRITTEN
            run.read.clear()
            run.computed.clear()

    def _note_left(self) -> list[Any]:
        """What blocks left beside their results, and is there until their next runs replace it.

        It is given back to be held during the backward. Where the loss alone still has it, a block that is kept has it,
        too, until its own.
        """
        known, left = self._known | self._held.keys(), []
        for run in self._runs:
            refs = [ref for key, ref in run.alone.left.items() if ref.alive() and key not in known]
            run.left_bytes = sum(ref.nbytes for ref in refs)
            run.stage.added_bytes = sum(ref.nbytes for ref in refs if ref.key in run.alone.added)
            known |= {ref.key for ref in refs}
            left += [ref.storage() for ref in refs]
        return left

    def _note_weight_grads(self, run: _Run, shared: Sequence[nn.Parameter], block: Block) -> None:
        """Those that the block leaves; of a parameter that a later stage uses too, there is one already."""
        stage, there = run.stage, {id(p) for p in shared}
        for parameter, size in run.alone.weight_grads:
            if id(parameter) not in there:
                stage.weight_grad_bytes += size
                run.accumulated_change += size if self._owners.is_shared(parameter) else 0
            if self._owners.ends_wait(parameter, block, stage.call):
                run.accumulated_change -= size
        got = {id(parameter) for parameter, _ in run.alone.weight_grads} - there
        run.unused = {id(p) for p in parameters_of(block)} - run.alone.leaves - got

    def _remember_outputs(self, run: _Run, output: Any, arguments: isolated_block.Arguments) -> None:
        read = set(memory.storages(arguments.tensors))
        returned = memory.storages(tensors_in(output))
        run.made = returned.keys() - self._static - read
        run.stage.output_bytes = sum(size for key, size in returned.items() if key in run.made)
        run.saved_outputs = run.alone.saved_outputs(output)
        run.held_outputs = run.alone.held_outputs(output)
        fresh = [t for t in tensors_in(output) if memory.has_storage(t)]
        refs = {ref.key: ref for ref in map(_compat.StorageRef, fresh)}
        known = self._static | set(run.inputs) | {ref.key for r in self._runs for ref in r.outputs}
        run.outputs = [ref for key, ref in refs.items() if key not in known]
        run.tensors = [
            (
                weakref.ref(t, functools.partial(self._note_gone, _compat.storage_id(t))),
                isolated_block.identity(t),
                t._version,
            )
            for t in fresh
        ]

    def _note_gone(self, storage: int, _: weakref.ref[torch.Tensor]) -> None:
        """An output is about to go."""
        if self._meter.is_here():
            self._gone[storage] = self._meter.mark()

    def _join(self, index: int, hooks: isolated_block.Hooks) -> None:
        """Takes the readings at a block's place in the backward, where gradients of its inputs are made."""
        run, before, after = self._runs[index], self._segments[index], self._segments[index + 1]
        there: list[_compat.StorageRef | None] = []

        def arrived(grads: Sequence[torch.Tensor | None]) -> None:
            present = [g for g in grads if g is not None]
            run.stage.grad_bytes = memory.unique_bytes(present)
            run.arriving = layouts_of_all(grads)
            there.extend(_compat.StorageRef(g) if g is not None and memory.has_storage(g) else None for g in grads)
            run.arrived = after.backward_end = self._moment(run.stage.grad_bytes)
            run.pinned |= {ref.key for ref in run.outputs if ref.alive()}

        def begun() -> None:
            for layout, ref in zip(run.arriving, there, strict=True):
                if layout is not None and ref is not None:
                    layout.waits = ref.alive()
            there.clear()
            before.backward_begin, self._place = self._moment(), index
            run.arguments.clear()  # what runs before the block has made them, and they go in its backward

        hooks.arrived, hooks.begun = arrived, begun

    # what it all means

    def _evaluate(self) -> StepMeasure:
        for measured in self._runs:
            measured.alone.read()
            measured.arriving = [*measured.arriving, *measured.alone.beside.layouts]
        self._find_main_inputs()
        for before, behind in zip(self._segments, self._runs, strict=False):
            if before.backward_begin is not None:
                handed = [layout for key, layout in behind.handed if key in behind.main]
                before.backward_begin.grads_bytes = bytes_of(handed)
        stages: list[StageMeasure] = []
        surroundings: list[StageMeasure | None] = []
        self._made_between = 0
        for index, segment in enumerate(self._segments):
            run = self._runs[index] if index < len(self._runs) else None
            main = run.main if run is not None else {}
            is_stage = self._is_stage(index, segment, main)
            surroundings.append(self._outside_stage(index, segment, main) if is_stage else None)
            stages += [stage for stage in surroundings[-1:] if stage is not None]
            if run is not None:
                self._finish_block(index, run)
                self._keep_hidden(run, self._runs[:index])
                stages.append(run.stage)
        self._count_rises_between(surroundings)
        self._count_waiting(surroundings)
        pinned: dict[str, int] = {}
        for run in self._runs:  # a block that runs twice has two outputs
            if size := _bytes_of(run, run.pinned):
                output = f"output of {shown(run.stage.name)}"
                pinned[output] = pinned.get(output, 0) + size
        kept = self._kept_bytes + sum(run.alone.kept_bytes for run in self._runs)
        if left := kept + sum(run.left_bytes + run.stage.leftover_bytes for run in self._runs):
            pinned[LEFT_BESIDE] = left
        if (others := self._found_bytes - left) > SLACK_BYTES:
            pinned[IN_ATTRIBUTES] = others
        if self._made_between > SLACK_BYTES:
            pinned["made between blocks"] = self._made_between
        input_grad = self._runs[0].alone.grad_bytes(self._static) if self._runs and surroundings[0] is None else 0
        used = self._used_outside()
        settled = all(map(_is_settled, self._runs)) and used == self._owners.outside
        self._pass_layouts_on()
        arriving = {(run.stage.name, run.stage.call): run.arriving for run in self._runs}
        blocks = [run.stage for run in self._runs]
        return StepMeasure(
            stages, pinned, blocks, input_grad, surroundings, arriving, settled, used, self._meter.excess
        )

    def _used_outside(self) -> UsedOutside:
        """Which parameters of blocks were used outside of blocks."""
        places = {key: place for key, place in self._reached.items() if key not in self._left}
        unused = {(run.stage.name, run.stage.call, key) for run in self._runs for key in run.unused & places.keys()}
        return UsedOutside(places, unused)

    def _pass_layouts_on(self) -> None:
        """A block that handed its gradient on as it lay will do so with another layout, too (residual streams do)."""
        for before, run in zip(reversed(self._runs[:-1]), reversed(self._runs), strict=False):
            handed_on = run.alone.leaving == without_waiting(run.alone.arriving)
            if before.chained_to and not _is_settled(run) and handed_on:
                before.arriving = without_waiting(run.arriving)

    def _find_main_inputs(self) -> None:
        """Inputs on the chain: those that no other block reads."""
        readers = collections.Counter(key for run in self._runs for key in run.inputs)
        for run in self._runs:
            run.main = {key: size for key, size in run.inputs.items() if readers[key] == 1}

    @functools.cached_property
    def _lasting(self) -> Set[int]:
        """The outputs of blocks that are still there when the backward begins."""
        begin = self._segments[-1].backward_begin
        return begin.outputs.keys() if begin is not None else set()

    @functools.cached_property
    def _pinned(self) -> set[int]:
        """The outputs of blocks that are there to the end of the step."""
        return {key for run in self._runs for key in run.pinned}

    @functools.cached_property
    def _known(self) -> set[int]:
        """The outputs of blocks, and what is there during the whole step."""
        return {ref.key for run in self._runs for ref in run.outputs} | self._static

    def _outside_bytes(self, moment: _Moment) -> int:
        return self._meter.level(moment.mark) - moment.outputs_bytes - moment.grads_bytes

    def _growth(self, segment: _Segment) -> int:
        """What the forward of a segment adds outside of blocks, beyond what it replaces."""
        begin, end = segment.begin, segment.end
        assert end is not None
        return self._outside_bytes(end) - self._outside_bytes(begin) - (end.replaced_bytes - begin.replaced_bytes)

    def _is_stage(self, index: int, segment: _Segment, main: dict[int, int]) -> bool:
        if index == len(self._runs):
            return True
        growth = self._growth(segment)
        if index and self._runs[index].chained:
            segment.saved_bytes = max(0, growth)
            self._made_between += segment.saved_bytes
            return False
        takes = growth > SLACK_BYTES or self._takes_for_the_moment(index)
        return bool(index) or takes or not set(main) <= self._static

    def _takes_for_the_moment(self, index: int) -> bool:
        """Whether a segment takes more, in its forward or its backward, than is there before or after it."""
        segment = self._segments[index]
        ways: list[tuple[_Moment | None, _Moment | None]] = [(segment.begin, segment.end)]
        if not self._has_others_backward(index):
            ways.append((segment.backward_begin, segment.backward_end))
        there = [(first.mark, last.mark) for first, last in ways if first and last and first.mark <= last.mark]
        meter = self._meter
        return any(meter.peak(a, b) - max(meter.level(a), meter.level(b)) > SLACK_BYTES for a, b in there)

    def _has_others_backward(self, index: int) -> bool:
        """Whether a segment's backward has that of what the block behind left beside its result, which counts there."""
        return any(layout is not None for run in self._runs[index : index + 1] for layout in run.alone.beside.layouts)

    def _outside_stage(self, index: int, segment: _Segment, main: dict[int, int]) -> StageMeasure:
        assert segment.end is not None
        stage = StageMeasure(self._outside_name(index), "outside", keep_reason="outside blocks")
        before = self._runs[index - 1 : index] if index else []
        made = sum(max(0, n - segment.replacing.get(key, 0)) for key, n in main.items() if key not in self._known)
        viewed = sum(
            _bytes_of(run, run.viewed & self._left_by(run)) for run in before
        )  # handed on beside what it makes
        stage.output_bytes = made + viewed
        growth = self._growth(segment)
        copies = self._copies_of(stage, 2 * index)
        segment.saved_bytes = max(growth - copies.unsaved_bytes, made, 0)
        stage.saved_bytes = segment.saved_bytes + viewed
        left = sum(_bytes_of(run, self._left_by(run)) for run in before)  # counted here, not by the block
        self._read_outside_forward(index, segment, stage)
        stage.forward_rise_bytes += left
        stage.forward_only_rise_bytes = stage.forward_rise_bytes - stage.saved_bytes + stage.output_bytes
        if index < len(self._runs):
            stage.grad_bytes = self._runs[index].alone.grad_bytes(main)
        else:
            stage.held_bytes = sum(size for key, size in self._held.items() if key not in self._known)
            stage.output_bytes = stage.grad_bytes = LOSS_BYTES
        self._read_outside_backward(segment, stage)
        stage.saved_bytes += sum(_bytes_of(run, self._left_by(run) & (self._lasting - run.viewed)) for run in before)
        return stage

    def _copies_of(self, stage: StageMeasure, place: int) -> Copies:
        """Autocast's copies of parameters that a stage makes."""
        copies = self._copies[place] if place < len(self._copies) else Copies()
        stage.made_copies, stage.saved_copies = copies.made, copies.saved
        return copies

    def _left_by(self, run: _Run) -> set[int]:
        """The outputs that no block needs: what runs next, outside of blocks, reads them, and may hold or hand them on.

        Where the block saves one itself, that is so only if nobody holds it.
        """
        if run.chained_to:
            return set()
        return {ref.key for ref in run.outputs if ref.key in run.made} - run.pinned - self._also_held(run)

    def _also_held(self, run: _Run) -> set[int]:
        """The outputs that the block saves itself, and that what runs next, outside of blocks, holds or hands on."""
        return run.saved_outputs & (self._lasting | run.viewed)

    def _read_outside_forward(self, index: int, segment: _Segment, stage: StageMeasure) -> None:
        """By how much the forward of a segment rises above what the chain has when it begins.

        Of earlier blocks' outputs, what the caller lists is there at the peak. What the block before read is mostly
        gone at once, when its output takes the name of that. Its output is the chain's: a schedule that keeps it has it
        to the end. So are those that are resident to the end, for blocks save them, which they do not do here.
        """
        begin, end, returned = segment.begin, segment.end, segment.returned
        assert end is not None
        meter, middle = self._meter, returned or end
        stage.listed, level = self._found_by(index, segment)
        missing = self._pinned_but_gone(begin, begin, middle)
        stage.forward_rise_bytes = meter.peak(begin.mark, middle.mark) - level + missing
        if returned is not None:
            missing = self._pinned_but_gone(begin, returned, end)
            rest = meter.peak(returned.mark, end.mark) - level + missing + sum(stage.listed.values())
            stage.listed_slack_bytes = max(0, rest - stage.forward_rise_bytes)
            stage.forward_rise_bytes = max(rest, stage.forward_rise_bytes)

    def _found_by(self, index: int, segment: _Segment) -> tuple[dict[str, int], int]:
        """What the caller lists of what is there when a segment is at its peak, and the level at which it begins."""
        begin, middle = segment.begin, segment.returned or segment.end
        assert middle is not None
        just_made = {ref.key for run in self._runs[index - 1 : index] for ref in run.outputs}
        there = {key: size for key, size in begin.outputs.items() if key not in just_made}
        stays = {key for key in there if key in middle.outputs or self._is_at_peak(key, begin.mark, middle.mark)}
        listed, others = self._passing(there, there.keys() - stays)
        return listed, self._meter.level(begin.mark) - others

    def _passing(self, there: Mapping[int, int], gone: Set[int] = frozenset()) -> tuple[dict[str, int], int]:
        """What of earlier blocks' outputs goes before the backward begins: of what these have in what they leave, bytes
        by block, and bytes of the rest, with what is `gone` too soon.
        """
        listed: dict[str, int] = {}
        others = 0
        for key, size in there.items():
            if key in self._makers and key not in gone:
                listed[self._makers[key]] = listed.get(self._makers[key], 0) + size
            elif key not in self._lasting and key not in self._pinned:
                others += size
        return listed, others

    def _pinned_but_gone(self, begin: _Moment, first: _Moment, last: _Moment) -> int:
        """Bytes of pinned outputs that were there in the beginning, but are not when most is between two moments."""
        gone = begin.outputs.keys() & self._pinned - last.outputs.keys()
        return sum(begin.outputs[key] for key in gone if not self._is_at_peak(key, first.mark, last.mark))

    def _is_at_peak(self, key: int, first: int, last: int) -> bool:
        """Whether an output that goes between two marks is there when most is."""
        gone = self._gone.get(key, first)
        return first < gone <= last and self._meter.peak(first, gone) == self._meter.peak(first, last)

    @functools.cached_property
    def _makers(self) -> dict[int, str]:
        """By the outputs that go before the backward begins, and that a block has in what it leaves, its name."""
        found: dict[int, str] = {}
        for run in self._runs:
            left = run.made - run.unread if run.chained_to else run.made & run.saved_outputs
            found |= dict.fromkeys(left - self._lasting - self._pinned, shown(run.stage.name, run.stage.call))
        return found

    def _read_outside_backward(self, segment: _Segment, stage: StageMeasure) -> None:
        begin, end, meter = segment.backward_begin, segment.backward_end, self._meter
        if begin is None or end is None or end.mark < begin.mark:
            return
        base = self._outside_bytes(begin) + begin.outputs_bytes + stage.grad_bytes
        created, accumulated = self._going_in(begin, end)
        saved = {key for run in self._runs for key in run.saved_outputs}
        gone = [(self._gone.get(key, 0), -size) for key, size in begin.outputs.items() if key in saved]
        stays = [(mark, size) for mark, size in gone if begin.mark < mark <= end.mark]  # a block that is kept has them
        stage.backward_rise_bytes = peak_without(meter, begin.mark, end.mark, sorted([*created, *stays])) - base
        rise = peak_without(meter, begin.mark, end.mark, sorted([*accumulated, *stays])) - base
        stage.accumulated_backward_rise_bytes = rise

    def _count_rises_between(self, surroundings: Sequence[StageMeasure | None]) -> None:
        """What runs between two blocks and is no stage rises with the block behind it in the forward, and with the one
        before it in the backward. What such segments make is resident, also where it is not there yet, or no longer.
        """
        made_bytes = 0  # by this segment and those behind it
        for index in reversed(range(len(self._runs))):
            if surroundings[index] is None:
                made_bytes += self._segments[index].saved_bytes
                self._count_forward_between(index, made_bytes)
                if index:
                    self._count_backward_between(index, made_bytes)

    def _count_forward_between(self, index: int, made_bytes: int) -> None:
        segment, behind, meter = self._segments[index], self._runs[index].stage, self._meter
        assert segment.end is not None
        peak = meter.peak(segment.begin.mark, segment.end.mark)
        if peak <= meter.level(segment.begin.mark):  # with what the block before read, and that goes at once
            return
        listed, level = self._found_by(index, segment)
        gone = sum(size for name, size in listed.items() if name not in behind.listed)
        behind.between_forward_rise_bytes = max(0, peak - level - made_bytes + gone)

    def _count_backward_between(self, index: int, made_bytes: int) -> None:
        segment, before, meter = self._segments[index], self._runs[index - 1].stage, self._meter
        begin, end = segment.backward_begin, segment.backward_end
        if begin is None or end is None or end.mark < begin.mark or self._has_others_backward(index):
            return
        created, accumulated = self._going_in(begin, end)
        rise, rise_adding = (
            peak_without(meter, begin.mark, end.mark, going) - (meter.level(end.mark) - sum(size for _, size in going))
            for going in (created, accumulated)
        )
        before.between_backward_rise_bytes = max(0, rise - made_bytes)
        before.accumulated_between_backward_rise_bytes = max(0, rise_adding - made_bytes)

    def _count_waiting(self, surroundings: Sequence[StageMeasure | None]) -> None:
        """What runs between two blocks and is no stage counts with the block behind it."""
        changes: list[tuple[StageMeasure, int, int]] = []
        for index, (segment, outside) in enumerate(zip(self._segments, surroundings, strict=True)):
            created, accumulated = self._change_of(segment)
            if outside is not None:
                changes.append((outside, created, accumulated))
                created = accumulated = 0
            if index < len(self._runs):
                own = self._change_at(index)
                waits = self._runs[index].accumulated_change
                changes.append((self._runs[index].stage, created + own, accumulated + own + waits))
        gradient_lifetimes.count(*zip(*changes, strict=True))

    def _change_of(self, segment: _Segment) -> tuple[int, int]:
        """By how much what is there outside of blocks changes in the backward of a segment, beyond what it had saved:
        where the step creates its gradients, and where it adds to existing ones.
        """
        begin, end = segment.backward_begin, segment.backward_end
        if begin is None or end is None or end.mark < begin.mark:
            return 0, 0
        change = self._outside_bytes(end) - self._outside_bytes(begin) + segment.saved_bytes
        created, accumulated = self._going_in(begin, end)
        return change - sum(size for _, size in created), change - sum(size for _, size in accumulated)

    def _going_in(self, begin: _Moment, end: _Moment) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """What goes between two moments of the backward, and is there to the end of the pass: marks and bytes, where
        the step creates its gradients and where it adds to existing ones.
        """
        added = [found for found in self._added if begin.mark < found[0] <= end.mark]
        gone = [pair for pair in self._created.gone if begin.mark < pair[0] <= end.mark]
        return [(mark, size) for mark, size, _ in added], sorted([*gone, *((mark, size) for mark, _, size in added)])

    def _change_at(self, index: int) -> int:
        """The same at a block: gradients that arrived and wait for others, and those of inputs beside the chain."""
        before, after = self._segments[index].backward_begin, self._segments[index + 1].backward_end
        if before is None or after is None:
            return 0
        return self._outside_bytes(before) - self._outside_bytes(after)

    def _outside_name(self, index: int) -> str:
        if not self._runs:
            return "the model"
        if index == 0:
            return f"before {shown(self._runs[0].stage.name)}"
        if index == len(self._runs):
            return f"after {shown(self._runs[-1].stage.name)}"
        return f"between {shown(self._runs[index - 1].stage.name)} and {shown(self._runs[index].stage.name)}"

    def _finish_block(self, index: int, run: _Run) -> None:
        stage = run.stage
        self._copies_of(stage, 2 * index + 1)
        stage.input_bytes = sum(run.inputs.values())
        stage.listed, held = self._passing(run.alive)
        stage.forward_rise_bytes += held
        stage.forward_only_rise_bytes += held
        apart, left = (run.pinned | run.unread) & run.made, self._left_by(run)  # not the chain's to keep
        if apart or (run.is_held and run.saved_outputs):
            stage.travel_bytes, stage.output_travels = 0, False
        elif run.is_held:  # the rest can travel
            stage.output_is_held, stage.output_travels = True, False
            stage.travel_bytes = max(0, stage.travel_bytes - stage.output_bytes)
        elif left:
            gone = _bytes_of(run, left - run.saved_outputs)
            stage.travel_bytes, stage.output_travels = max(0, stage.travel_bytes - gone), False
        stage.output_bytes -= _bytes_of(run, apart | left)
        stage.pinned_bytes = _bytes_of(run, run.pinned & run.made)
        stage.pinned_saved_bytes = _bytes_of(run, run.pinned & run.made & run.saved_outputs)
        stage.left_bytes = _bytes_of(run, left - apart)
        stage.left_saved_bytes = _bytes_of(run, (left - apart) & run.saved_outputs)
        not_saved = _bytes_of(run, (apart | left) - run.saved_outputs)  # gone before the backward that was measured
        stage.saved_bytes -= not_saved
        stage.backward_rise_bytes += not_saved
        stage.accumulated_backward_rise_bytes += not_saved
        if stays := run.left_bytes + stage.leftover_bytes:
            # resident: nothing that saving adds, once it has replaced what was there, or sending frees
            stage.saved_bytes = max(stage.saved_bytes - (stays - stage.added_bytes), stage.output_bytes)
            stage.travel_bytes = 0
        if run.replaced_bytes:
            stage.saved_bytes += run.replaced_bytes
            stage.travel_bytes = 0
        if not run.chained_to:
            stage.also_held_bytes = _bytes_of(run, (self._also_held(run) & run.made) - run.pinned)
        else:
            stage.grad_bytes = self._arriving_at(run, self._runs[index + 1])
            stage.passing_bytes = _bytes_of(run, {key for key in run.made - apart if self._passes(index, key)})
        if run.arrived is None:
            stage.keep_reason = stage.keep_reason or "has no part in the loss"

    def _passes(self, index: int, key: int) -> bool:
        """Whether an output of a block that the next one reads goes before the backward, for neither holds it."""
        run, following = self._runs[index], self._runs[index + 1].alone
        return key in self._makers and key not in run.held_outputs | following.held_inputs

    @staticmethod
    def _arriving_at(run: _Run, following: _Run) -> int:
        """Bytes of the gradients that a block gets: of what the next one reads, as that gives them, and of what goes to
        others alone, as they were in the step.
        """
        read = {ref.key for ref in run.outputs if ref.key in following.main}
        others = _bytes_of(run, {ref.key for ref in run.outputs} - read)
        chained = following.alone.grad_bytes(read)
        return max(chained, min(run.stage.grad_bytes, chained + others))

    def _keep_hidden(self, run: _Run, before: Sequence[_Run]) -> None:
        """Whose output a block holds past autograd can neither take it away nor send it."""
        for earlier in before:
            if _bytes_of(earlier, run.alone.hidden):
                earlier.stage.keep_reason = earlier.stage.keep_reason or HIDDEN_BEHIND
                earlier.stage.travel_bytes, earlier.stage.output_travels = 0, False


def _is_settled(run: _Run) -> bool:
    """Whether the block was measured alone with gradients that lie as those that arrived."""
    return len(run.alone.arriving) != len(run.arriving) or list(run.alone.arriving) == list(run.arriving)


def _large_buffers(block: Block, stage: StageMeasure) -> list[torch.Tensor]:
    """Those that the block does not write itself; of small ones every run has copies."""
    named = ((name, buffer) for part in block.parts() for name, buffer in part._buffers.items() if buffer is not None)
    return [b for name, b in named if memory.storage_bytes(b) > LARGE_BYTES and name not in stage.writes_buffers]


def _in_attributes(module: nn.Module) -> Iterator[_InAttribute]:
    names = vars(module)
    for name in names:
        yield from _of_attribute(names, name)


def _of_attribute(names: dict[str, Any], name: str) -> Iterator[_InAttribute]:
    value = names.get(name)
    if type(value) is torch.Tensor:
        has_one = memory.has_storage(value)
        storage, size = (_compat.storage_id(value), memory.storage_bytes(value)) if has_one else (0, 0)
        yield _InAttribute(names, name, weakref.ref(value), storage, size)


def _bytes_of(run: _Run, keys: set[int]) -> int:
    return sum(ref.nbytes for ref in run.outputs if ref.key in keys)


def _stored(model: nn.Module) -> list[torch.Tensor]:
    """What steps have left in attributes of modules, and of objects there; without its history."""
    values = [value for m in model.modules() for name, value in vars(m).items() if name not in OF_EVERY_MODULE]
    return [tensor.detach() for value in values for _, tensor in tensors_inside(value)]


def _static_storages(sample: Sample) -> list[_compat.StorageRef]:
    tensors = [*sample.model.parameters(), *sample.model.buffers(), *sample.static_tensors()]
    return [_compat.StorageRef(tensor) for tensor in tensors if memory.has_storage(tensor)]
