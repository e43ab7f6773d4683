"""Measures one block alone: a run that saves everything, its backward, and a run that saves nothing.

The run that saves nothing comes last, and the model continues with its result. So side outputs of the block, such as a
loss in an attribute, have an autograd graph that still exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.blocks import Block
from ..base.layouts import Layout, Layouts, bytes_of, layouts_of, layouts_of_all
from ..base.stage_measure import (
    CHANGES_INPUT,
    HOLDS_UNTRACKED,
    OWN_HOOKS,
    READS_HISTORY,
    SLACK_BYTES,
    TAKES_OUT,
    StageMeasure,
)
from ..base.tensor_fingerprints import fingerprint
from ..base.tree import tensors_in
from ..rerun_state.attributes import Attributes
from ..rerun_state.preserve import Buffers, Randomness
from ..rerun_state.side_effects import SideEffects
from . import isolated_block
from .captured_inputs import leaves_behind, places_of, refuse
from .side_outputs import ArrivingLayouts, SideOutputs, hidden_from_collectors
from .untracked_tensors import untracked_storages


class ParameterGradients:
    """The gradients of parameters, in the order in which they arrive.

    Some gradients are parts of one tensor, if the parameters were concatenated. With accumulation, that tensor is freed
    after its last part was added to an existing gradient. A part that has reached no parameter may wait for another
    gradient; as long as there is one, the tensor is counted as resident.
    """

    def __init__(self, meter: memory.Meter) -> None:
        self._meter = meter
        self._parts: dict[int, int] = {}  # by storage: bytes of the parts that have come
        self.gone: list[tuple[int, int]] = []  # marks and bytes of tensors that are freed where gradients exist

    def note(self, gradient: torch.Tensor) -> None:
        """Record that a parameter has received its gradient."""
        size, key = memory.storage_bytes(gradient), _compat.storage_key(gradient)
        parts = self._parts[key] = self._parts.get(key, 0) + gradient.numel() * gradient.element_size()
        if not key or parts >= size:
            self.gone.append((self._meter.mark(), size))

    def take_since(self, count: int) -> list[tuple[int, int]]:
        """Remove the tensors that are freed after the first `count`, and release the gradients."""
        taken = self.gone[count:]
        del self.gone[count:]
        self._parts.clear()
        return taken


class BlockMeter:
    """The measurement of one block; see the top of this file. `read` evaluates it after the meter has closed."""

    def __init__(
        self,
        meter: memory.Meter,
        stage: StageMeasure,
        block: Block,
        device: torch.device,
        arriving: Layouts = (),
        static: Collection[int] = (),
    ) -> None:
        self._meter, self._stage, self._block, self._device = meter, stage, block, device
        self._static = static  # storages that are there during the whole step
        self.arriving = arriving  # layouts of the gradients of outputs and side outputs
        self.leaving: list[Layout | None] = []  # how those of the inputs lie
        self.side_output_gradients = ArrivingLayouts(())  # gradients of side outputs in the step's backward
        self.left: dict[int, _compat.StorageRef] = {}  # large storages of side outputs of the run in the step
        #: The storages of `left` that the block saves and that exist together with those of a recomputation.
        self.added: set[int] = set()
        self.kept_bytes = 0  # large gradients that hooks have kept
        self.saved: frozenset[int] = frozenset()  # storages that autograd saves
        self.untracked: set[int] = set()  # storages that custom functions hold outside of autograd's saved tensors
        self._holds_input = False  # one of `untracked` is an input or an output
        self._is_to_take_own = False  # the block has saved-tensor hooks of its own, which were not replaced
        #: Side outputs of a run that saves which exist together with those of a recomputation; whether it saves them.
        self._added: list[tuple[_compat.StorageRef, bool]] = []
        self._marks: dict[str, int] = {}
        self._gone: list[tuple[int, int]] = []  # marks and bytes of gradients that are freed where gradients exist
        self.grads: dict[int, dict[int, int]] = {}  # bytes of the inputs' gradients by storage, by storage of the input
        self.weight_grads: list[tuple[nn.Parameter, int]] = []  # bytes of the gradients that parameters got
        self.leaves: set[int] = set()  # the identities of leaves to which its graph hands gradients
        self._saved_outputs: set[int] = set()  # which of the tensors in the output autograd saves
        self._held_outputs: set[int] = set()  # which of them anything holds when the block has returned them
        self.held_inputs: set[int] = set()  # storages of arguments that it holds until its backward
        self._handed_bytes = 0
        self._visible_bytes = 0  # side outputs of a run that saves

    def run(
        self,
        function: Callable[..., Any],
        arguments: isolated_block.Arguments,
        hooks: isolated_block.Hooks,
        pending: Sequence[nn.Parameter],
        created: ParameterGradients,
    ) -> Any:
        """Run the block both ways, and return its output, connected to the model's autograd graph by a bridge.

        pending: parameters that have a gradient when the block's backward begins. created: records the gradients that
        parameters receive.
        """
        replay = Rewinding(self._block, self._device)
        versions = [(t, t._version) for t in arguments.tensors if not t.is_inference()]
        attributes = Attributes(
            self._block.all_modules(), with_large=True
        )  # what was there is released by no run that saves
        side_effects = SideEffects(self._block.all_modules())
        with hidden_from_collectors():
            fingerprints = self.run_saving(function, arguments, pending, created)
            if fingerprints is None:
                attributes.restore()
                replay.rewind()
                self._stage.captured = captured_by(self._block, function, arguments, self._device)
                fingerprints = self.run_saving(function, arguments, pending, created)
        if fingerprints is None:
            refuse(self._block.name, arguments.captured, self._block.all_modules())
        replay.record_first_run(self._stage)
        change = side_effects.change()
        if change is not None:
            self._stage.keep(f"changes {change} which could not be restored")
        if arguments.writes_captured or any(t._version != version for t, version in versions):
            self._stage.keep_reason = CHANGES_INPUT
        if self._holds_input:
            self._stage.keep(HOLDS_UNTRACKED)
        if attributes.have_history():
            replay.rewind()
            if self._count_again(function, arguments) != self._stage.saved_count:
                self._stage.keep(READS_HISTORY)
        if attributes.lost_any(arguments.captured):
            self._stage.keep(TAKES_OUT)
            attributes.restore()
        attributes.detach()
        del attributes, side_effects  # the run below then frees the attributes that it replaces, as in a step
        replay.rewind()
        output = self._run_plainly(function, arguments, hooks)
        if fingerprints != [fingerprint(t) for t in tensors_in(output)]:
            self._stage.keep("does not give the same result when it is recomputed")
        replay.finish()
        return output

    def saved_outputs(self, output: Any) -> set[int]:
        """The storages of the output that autograd saves."""
        return _storages_at(self._saved_outputs, output)

    def held_outputs(self, output: Any) -> set[int]:
        """The storages of the output that stay until the backward, held by the block or by others."""
        return _storages_at(self._held_outputs, output)

    # saving everything

    def run_saving(
        self,
        function: Callable[..., Any],
        arguments: isolated_block.Arguments,
        pending: Sequence[nn.Parameter],
        created: ParameterGradients,
        saving: Callable[[], isolated_block.MeasuringHooks] | None = None,
    ) -> list[int] | None:
        """Run forward and backward, and return fingerprints of the output.

        None if the block has captured inputs, so that it has no backward alone. `saving` makes the pack hooks, if not
        everything is saved.
        """
        torch.clear_autocast_cache()  # else copies of earlier code would be freed during this run
        self._mark("base")
        saved = isolated_block.SavedTensors(self._device, self._block.has_own_hooks) if saving is None else saving()
        side_outputs = SideOutputs(self._block.all_modules())
        with saved.recording():
            uses = _compat.storage_uses(filter(memory.has_storage, arguments.tensors))
            leaving: list[torch.Tensor | None] = []  # kept to the end: code that computed weights may run behind it
            args, kwargs = arguments.source(
                isolated_block.Hooks(arrived=self._noting(arguments.differentiable, leaving))
            )
            saved.given(args, kwargs)
            result = arguments.run(function, args, kwargs)
        del args, kwargs
        self._mark("forward")
        now = _compat.storage_uses(filter(memory.has_storage, arguments.tensors))
        self.held_inputs = {key for key, count in now.items() if count == float("inf") or count > uses.get(key, 0)}
        roots = [*isolated_block.differentiable(result), *side_outputs.tensors(result)]
        if arguments.has_earlier_nodes(roots):
            return None
        self.leaves = leaves_behind(roots)
        del roots
        torch.clear_autocast_cache()
        self._mark("saved")
        self._added = [(ref, ref.key in saved.storages) for ref in side_outputs.added()]
        self._stage.saved_count = saved.count
        self._is_to_take_own = isinstance(saved, isolated_block.SavedTensors) and saved.sees_own_hooks
        tensors = list(tensors_in(result))
        self.untracked = untracked_storages(tensors).difference(self._static)
        self.saved = frozenset(saved.storages)
        held = self.saved | self.untracked
        self._saved_outputs = {
            i for i, t in enumerate(tensors) if memory.has_storage(t) and _compat.storage_id(t) in held
        }
        self._record_offloadable(saved, arguments, tensors)
        fingerprints = [fingerprint(t) for t in tensors]
        new_outputs, self.arriving = side_outputs.root(result, self.arriving)
        del saved
        handed = [*self.arriving, *layouts_of(pending)]
        self._handed_bytes = bytes_of(handed)
        hooks = isolated_block.Hooks(begun=lambda: self._mark("begun"))
        root = isolated_block.sink([*new_outputs, *pending], hooks, handed) if new_outputs else None
        refs = [(i, _compat.StorageRef(t)) for i, t in enumerate(tensors) if memory.has_storage(t)]
        del result, new_outputs, tensors
        self._held_outputs = {i for i, ref in refs if ref.alive()}
        first, backward = len(created.gone), SideOutputs(self._block.all_modules())
        if root is not None:
            with isolated_block.as_in_backward(self._device):
                root.backward()
        del root
        self._mark("end")
        leaving.clear()
        self._gone = created.take_since(first)
        self.kept_bytes = sum(ref.nbytes for ref in backward.storages(self._static).values())
        self._take_weight_grads()
        self._mark("after")
        there = {*self._static, *memory.storages(arguments.tensors)}
        self._visible_bytes = sum(ref.nbytes for ref in side_outputs.storages(there).values())
        return fingerprints

    def _take_weight_grads(self) -> None:
        """Record the gradients of parameters, each storage once, and release them."""
        counted: set[int] = set()
        for parameter in parameters_of(self._block):
            if parameter.grad is not None:
                key, size = _compat.storage_key(parameter.grad), memory.storage_bytes(parameter.grad)
                self.weight_grads.append((parameter, 0 if key in counted else size))
                counted |= {key} - {0}
                parameter.grad = None

    def _record_offloadable(
        self, saved: isolated_block.MeasuringHooks, arguments: isolated_block.Arguments, outputs: Sequence[torch.Tensor]
    ) -> None:
        """Bytes that the executor can offload: of all saved tensors with the output, and of the output alone."""
        given = memory.storages(arguments.tensors)
        returned = {key: size for key, size in memory.storages(outputs).items() if key not in given}
        sizes = {key: size for key, size in {**saved.sizes, **returned}.items() if key not in given}
        self._holds_input = not self.untracked.isdisjoint({*given, *returned})
        plain = all(t.device == self._device and memory.can_be_offloaded(t) for t in outputs)
        plain = plain and not any(key in self._static for key in returned)
        plain = plain and self.untracked.isdisjoint({*given, *sizes})
        self._stage.output_is_offloadable = plain and bool(returned)
        if plain and not saved.stays:
            self._stage.offloadable_bytes = sum(size for key, size in sizes.items() if key not in self._static)

    def _mark(self, name: str) -> None:
        self._marks[name] = self._meter.mark()

    def _noting(
        self, inputs: Sequence[torch.Tensor], leaving: list[torch.Tensor | None]
    ) -> Callable[[Sequence[torch.Tensor | None]], None]:
        def arrived(grads: Sequence[torch.Tensor | None]) -> None:
            leaving.extend(grads)
            self.leaving = layouts_of_all(grads)
            for tensor, grad in zip(inputs, grads, strict=True):
                if grad is not None and memory.has_storage(tensor):
                    sizes = self.grads.setdefault(_compat.storage_id(tensor), {})
                    sizes[_compat.storage_key(grad) or id(grad)] = memory.storage_bytes(grad)

        return arrived

    def grad_bytes(self, inputs: Iterable[int]) -> int:
        """Bytes of the gradients of inputs, each storage once."""
        sizes = {key: size for name in inputs for key, size in self.grads.get(name, {}).items()}
        return sum(sizes.values())

    # saving nothing

    def _count_again(self, function: Callable[..., Any], arguments: isolated_block.Arguments) -> int:
        """The number of saved tensors of a run that sees the previous run's side outputs with their autograd graph."""
        attributes, count = Attributes(self._block.all_modules()), itertools.count()
        takes_own = self._block.has_own_hooks

        def counting(tensor: torch.Tensor) -> Layout:
            next(count)
            return Layout(tensor)

        own = _compat.InnerHooks(lambda pack, unpack: (counting, Layout.tensor) if takes_own else (pack, unpack))
        with hidden_from_collectors(), _compat.saved_tensors_hooks(counting, Layout.tensor), own:
            args, kwargs = arguments.source(isolated_block.Hooks())
            arguments.run(function, args, kwargs)
        attributes.restore()
        return next(count)

    def _run_plainly(
        self, function: Callable[..., Any], arguments: isolated_block.Arguments, hooks: isolated_block.Hooks
    ) -> Any:
        self._mark("plain base")
        there = [ref.storage() for ref, _ in self._added]
        with arguments.saving_nothing():
            args, kwargs = arguments.source(isolated_block.Hooks())
            side_outputs, lent = SideOutputs(self._block.all_modules()), arguments.with_container_copies(args, kwargs)
            result = arguments.run(function, args, kwargs)
        self.side_output_gradients = ArrivingLayouts(side_outputs.tensors(result))
        passed = memory.storages((*arguments.tensors, *tensors_in(result)))
        self.left = side_outputs.storages({*passed, *self._static})
        added = side_outputs.added()
        keeps = [saves for _, saves in self._added] if len(added) == len(self._added) else [True] * len(added)
        self.added = {ref.key for ref, is_kept in zip(added, keeps, strict=True) if is_kept}
        del args, kwargs
        self._mark("plain end")
        del there
        torch.clear_autocast_cache()
        self._mark("bridge base")
        output = isolated_block.bridge(result, arguments.differentiable, hooks, self.leaving)
        self._mark("bridge end")
        lent.apply_changes(self._block.name, result, output)
        self._mark("plain left")  # the result and its graph, which holds what its functions hide from autograd
        return output

    # readings

    def read(self) -> None:
        """Set the measured values of the stage; its output's bytes must be known."""
        self.read_saving()
        stage, meter, at = self._stage, self._meter, self._marks
        base = meter.level(at["plain base"])
        stage.forward_only_rise_bytes = meter.peak(at["plain base"], at["plain end"]) - base
        left = sum(ref.nbytes for ref in self.left.values())
        bridge = meter.level(at["bridge end"]) - meter.level(at["bridge base"])  # made here, and in no training step
        untracked = meter.level(at["plain left"]) - base - stage.output_bytes - left - bridge
        if untracked > SLACK_BYTES:
            outside = (
                f"keeps {untracked} bytes outside what autograd saves, in attributes of custom functions or elsewhere"
            )
            stage.keep(OWN_HOOKS if self._is_to_take_own else outside)
            stage.offloadable_bytes = 0
        else:
            stage.untracked_bytes = max(0, untracked)

    def read_saving(self) -> None:
        """Set the values measured by the run that saves."""
        stage, meter, at = self._stage, self._meter, self._marks
        base = meter.level(at["base"])
        stage.saved_bytes = max(meter.level(at["saved"]) - base, stage.output_bytes)
        stage.forward_rise_bytes = meter.peak(at["base"], at["forward"]) - base
        leftover = meter.level(at["after"]) - base - self._visible_bytes
        stage.leftover_bytes = leftover if leftover > SLACK_BYTES else 0
        if "begun" in at:
            full = base + stage.saved_bytes + self._handed_bytes
            stage.backward_rise_bytes = meter.peak(at["begun"], at["end"]) - full
            accumulated = peak_without(meter, at["begun"], at["end"], self._gone)
            stage.accumulated_backward_rise_bytes = accumulated - full


def captured_by(
    block: Block, function: Callable[..., Any], arguments: isolated_block.Arguments, device: torch.device
) -> list[str]:
    """Turn a block's captured inputs into arguments, and return the place of each."""
    state, attributes = Rewinding(block, device), Attributes(block.all_modules(), with_large=True)
    with hidden_from_collectors():
        arguments.capture(function)
    places = places_of(arguments.captured, block.all_modules())
    attributes.restore()
    state.rewind()
    return places


def _storages_at(places: Collection[int], output: Any) -> set[int]:
    """The storages of those tensors of an output that are at these places."""
    tensors = enumerate(tensors_in(output))
    return {_compat.storage_id(t) for i, t in tensors if i in places and memory.has_storage(t)}


def parameters_of(block: Block) -> list[nn.Parameter]:
    """The parameters of a block's modules, each once."""
    return list({id(p): p for module in block.modules for p in module.parameters()}.values())


def peak_without(meter: memory.Meter, first: int, last: int, going: Sequence[tuple[int, int]]) -> int:
    """The peak if this many bytes were freed at each of these marks."""
    peaks, start, gone = [], first, 0
    for mark, size in going:
        peaks.append(meter.peak(start, mark) - gone)
        start, gone = mark, gone + size
    return max([*peaks, meter.peak(start, last) - gone])


# -- running twice -------------------------------------------------------------------------------------------


class Rewinding:
    """Makes a second run of a block repeat the first, and records a reason if that is impossible."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self._device = device
        self._before = Randomness(device)
        self._buffers = [Buffers(module) for module in block.modules]
        self._borrowed = [Buffers(module) for module in block.borrowed]

    def record_first_run(self, stage: StageMeasure) -> None:
        self._after = Randomness(self._device)
        stage.random = self._before.torch_differs(self._after)
        stage.writes_buffers = [name for buffers in self._buffers for name in buffers.written()]
        foreign = self._before.foreign_differs(self._after)
        if foreign:
            stage.keep_reason = f"draws from {' and '.join(foreign)}, which is not replayed"
        written = [name for buffers in self._borrowed for name in buffers.changed()]
        if written:
            stage.keep_reason = (
                f"writes buffers of modules that are no part of it ({', '.join(dict.fromkeys(written))})"
            )

    def rewind(self) -> None:
        self._before.restore_torch()
        for buffers in (*self._buffers, *self._borrowed):
            buffers.restore()

    def finish(self) -> None:
        self._after.restore_torch()
