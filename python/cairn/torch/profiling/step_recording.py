"""Runs the step that is measured: one forward and one backward, in which no block keeps its saved tensors.

1. Each block that the forward reaches is measured alone (`block_meter.py`): forward and backward, with all its saved
   tensors. These are freed at once.
2. In the model's autograd graph the block is replaced by a function that saves nothing and has the same output.
3. The code outside blocks (a *segment*: before the first block, between two, or after the last) runs in the model's own
   graph. So it is measured as it is in training.

The step needs the memory of the blocks' outputs, of one block's saved tensors, and of the segments: less than a plain
step. `measure.py` evaluates the marks that are set here.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.blocks import Block, intercepted
from ..base.layouts import Layouts, layouts_of, layouts_of_all
from ..base.stage_measure import OVERWRITTEN, StageMeasure
from ..base.tree import tensors_in
from ..rerun_state.kv_caches import refuse_learned_caches
from ..rerun_state.module_state import LARGE_BYTES
from ..rerun_state.preserve import Randomness
from ..rerun_state.sharded import reshard, shard_bytes
from . import isolated_block
from .block_meter import BlockMeter, ParameterGradients, parameters_of
from .cast_copies import Copies
from .parameter_users import ParameterUsers
from .sample import Sample, backward_of
from .side_outputs import SideOutputs
from .step_records import (
    Arriving,
    BlockRun,
    InAttribute,
    MemoryMark,
    Segment,
    in_attributes,
    large_buffers,
    static_storages,
    stored,
)


class StepRecording:
    """One forward and backward under a meter; see the top of this file."""

    def __init__(
        self,
        sample: Sample,
        blocks: Sequence[Block],
        parameter_users: ParameterUsers,
        device: torch.device,
        arriving: Arriving | None = None,
        copies: Sequence[Copies] = (),
    ) -> None:
        self._sample, self._blocks, self._parameter_users, self._device = sample, blocks, parameter_users, device
        self._arriving, self._copies = arriving or {}, copies
        self._meter = memory.meter_for(device)
        reshard(sample.model)
        self._there = static_storages(sample)  # references, so that no new storage gets the identity of a freed one
        self._static = {ref.key for ref in self._there}
        self._shards = shard_bytes(sample.model)
        self._runs: list[BlockRun] = []
        self._segments: list[Segment] = []
        self._calls: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # by block: numbers of calls
        self._random_state: int | None = None  # before the last block, fingerprinted
        self._created = ParameterGradients(self._meter)
        self._held: dict[int, int] = {}
        self._gone: dict[int, int] = {}  # the mark at which an output was freed, by storage
        self._is_backward = False  # the step's backward is running
        self._place = 0  # number of blocks whose backward is still to come
        self._reached: dict[int, int] = {}  # by parameter of a block: `_place` when the step's backward reached it
        #: gradients added to those of blocks: mark, bytes freed where the step creates gradients, and where they exist
        self._added: list[tuple[int, int, int]] = []
        self._kept_bytes = 0  # large gradients that hooks have kept
        self._left: set[int] = set()  # parameters of blocks that have side outputs, by identity
        self._attribute_bytes = 0  # tensors in attributes of modules before the step
        self._in_attributes: list[InAttribute] = []  # of these, the ones that the attribute still has
        self._attributes_before: list[InAttribute] = []  # all of them
        self._replaced_bytes = 0  # of these, bytes that were replaced outside of blocks

    def record(self) -> None:
        handles = [
            p.register_post_accumulate_grad_hook(self._accumulated)
            for p in self._sample.model.parameters()
            if p.requires_grad and p.is_leaf
        ]
        torch.clear_autocast_cache()
        replaced = stored(self._sample.model)  # kept alive: a free in the step would hide as much of its rise
        there = memory.storages(replaced).items()
        self._attribute_bytes = sum(size for key, size in there if size > LARGE_BYTES and key not in self._static)
        named = (item for module in self._sample.model.modules() for item in in_attributes(module))
        self._in_attributes = [item for item in named if self._counts(item)]
        self._attributes_before = list(self._in_attributes)
        try:
            with self._meter:
                self._step()
        finally:
            for handle in handles:
                handle.remove()
        del replaced

    def _counts(self, item: InAttribute) -> bool:
        return item.nbytes > LARGE_BYTES and item.storage not in self._static

    def _without_replaced(self) -> int:
        """Bytes of tensors in attributes, from before the step, that were replaced since the last call."""
        sizes = {item.storage: item.nbytes for item in self._in_attributes}
        self._in_attributes = [item for item in self._in_attributes if item.is_there()]
        there = {item.storage for item in self._in_attributes}
        return sum(size for key, size in sizes.items() if key not in there)

    def _replaced_attributes(self) -> dict[int, int]:
        """For each storage that an attribute has now: bytes of the tensor that it had before the step."""
        return {now.storage: item.nbytes for item in self._attributes_before for now in item.now()}

    def _end_segment(self) -> None:
        """Closes the current segment."""
        self._replaced_bytes += self._without_replaced()
        self._segments[-1].replacing = self._replaced_attributes()
        self._segments[-1].end = self._moment()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        is_shared = self._parameter_users.is_shared(parameter)
        if self._is_backward and self._parameter_users.is_in_blocks(parameter):
            self._reached[id(parameter)] = self._place
            if self._parameter_users.is_used_in_blocks(parameter) and not is_shared:
                parameter.grad = None  # the gradient of a side output is counted where the block runs alone
        if parameter.grad is not None and not is_shared:
            self._created.note(parameter.grad)
        elif parameter.grad is not None and self._is_backward:
            size = memory.storage_bytes(parameter.grad)
            first, after = self._parameter_users.gradients_around(parameter, self._place)
            if first:
                self._added.append((self._meter.mark(), size, size if after else 2 * size))

    def _step(self) -> None:
        self._segments.append(Segment(self._moment()))
        with intercepted(self._blocks, self._handle, self._sample.replaced.during_block):
            output, loss = self._sample.forward(self._returned)
        self._record_held(False)
        self._end_segment()
        self._keep_overwritten()
        for run in self._runs:
            if run.chained_to:
                run.pinned |= {ref.key for ref in run.outputs if ref.alive()}
        self._held = memory.storages(tensors_in((output, loss)))
        left = self._record_side_outputs()
        torch.clear_autocast_cache()
        self._segments[-1].backward_begin = self._moment()
        self._place = len(self._runs)
        self._is_backward, side_outputs = True, SideOutputs(list(self._sample.model.modules()))
        backward_of(output, loss)
        self._segments[0].backward_end = self._moment()
        self._kept_bytes = sum(ref.nbytes for ref in side_outputs.storages(self._static).values())
        del output, loss, left
        self._sample.drop_gradients()

    def _returned(self) -> None:
        self._segments[-1].returned = self._moment()

    def _moment(self, grads_bytes: int = 0) -> MemoryMark:
        alive = {ref.key: ref.nbytes for run in self._runs for ref in run.outputs if ref.alive()}
        return MemoryMark(self._meter.mark(), alive, grads_bytes, self._replaced_bytes)

    def _handle(self, block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._end_segment()
        call = next(self._calls[id(block)])
        refuse_learned_caches(block.name, (*args, *kwargs.values()))
        arguments = isolated_block.Arguments(args, kwargs, block)
        arguments.refuse_iterators(block.name)
        stage = StageMeasure(block.name, "block", block.class_name, call)
        state = Randomness(self._device).torch_fingerprint()
        stage.random_state_is_new, self._random_state = state != self._random_state, state
        block_meter = BlockMeter(
            self._meter, stage, block, self._device, self._known_layouts(block, call), self._static
        )
        hooks, shared = isolated_block.Hooks(), self._parameter_users.with_pending_gradients(block, call)
        computed = [item for part in block.all_modules() for item in in_attributes(part)]
        output = block_meter.run(function, arguments, hooks, shared, self._created)
        run = BlockRun(stage, block_meter, memory.storages(arguments.differentiable), self._is_chained(arguments))
        self._record_held(run.chained)
        self._record_readings(run, arguments)
        self._record_weight_grads(run, shared, block)
        if run.block_meter.side_output_gradients.layouts:
            self._left |= set(map(id, parameters_of(block)))
        self._remember_outputs(run, output, arguments)
        run.read = list(map(_compat.WriteDetector, [*arguments.tensors, *large_buffers(block, stage)]))
        run.computed = [item for item in computed if item.is_there()]
        self._without_replaced()  # tensors that the block replaced are counted as its side outputs
        self._runs.append(run)
        self._segments.append(Segment(self._moment()))
        input_grad_layouts = layouts_of(arguments.differentiable, run.block_meter.leaving)
        run.input_grad_layouts = [
            (_compat.storage_id(tensor), layout)
            for tensor, layout in zip(arguments.differentiable, input_grad_layouts, strict=True)
            if layout is not None and memory.has_storage(tensor)
        ]
        self._join(len(self._runs) - 1, hooks)
        self._sample.reporter.one_done()
        return output

    def _known_layouts(self, block: Block, call: int) -> Layouts:
        return self._arriving.get((block.name, call), ())

    def _is_chained(self, arguments: isolated_block.Arguments) -> bool:
        """Whether the gradients of its inputs go to the block before it, and to nothing else made since then."""
        if not self._runs:
            return False
        last = self._runs[-1]
        older = {key for run in self._runs[:-1] for key in run.inputs} | set(last.inputs)
        older |= {ref.key for run in self._runs[:-1] for ref in run.outputs}
        from_last = [t for t in arguments.differentiable if last.returned(t)]
        others = [t for t in arguments.differentiable if not last.returned(t)]
        return bool(from_last) and all(_compat.storage_id(t) in older for t in others if memory.has_storage(t))

    def _record_held(self, chained: bool) -> None:
        """Notes whether the last block's output is still alive after the segment: autograd may have saved it there."""
        if self._runs and not chained:
            self._runs[-1].is_held = any(ref.alive() for ref in self._runs[-1].outputs)

    def _record_readings(self, run: BlockRun, arguments: isolated_block.Arguments) -> None:
        """Notes which outputs of earlier blocks are alive: this block reads them, or the caller holds them.

        An output of the block before that this one reads through a view counts as handed on by the segment between.
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
        """Marks blocks as kept if tensors that they read were changed later: they cannot be recomputed from these."""
        for run in self._runs:
            replaced = {item.storage: item.nbytes for item in run.computed if not item.is_there()}
            counted = self._static | memory.storages(run.arguments).keys()
            run.replaced_bytes = sum(size for key, size in replaced.items() if key in run.block_meter.saved - counted)
            if replaced or any(detector.has_changed() for detector in run.read):
                run.stage.keep(OVERWRITTEN)
            run.read.clear()
            run.computed.clear()

    @functools.cached_property
    def _known(self) -> set[int]:
        """The outputs of blocks, and storages that are resident during the whole step."""
        return {ref.key for run in self._runs for ref in run.outputs} | self._static

    def _record_side_outputs(self) -> list[Any]:
        """Counts the side outputs of blocks. They are resident until the next step replaces them.

        Returns their storages, to be held during the backward: where only the loss holds a side output, a block that is
        kept holds it, too, until its own backward.
        """
        known, left = self._known | self._held.keys(), []
        for run in self._runs:
            refs = [ref for key, ref in run.block_meter.left.items() if ref.alive() and key not in known]
            run.left_bytes = sum(ref.nbytes for ref in refs)
            run.stage.added_bytes = sum(ref.nbytes for ref in refs if ref.key in run.block_meter.added)
            known |= {ref.key for ref in refs}
            left += [ref.storage() for ref in refs]
        return left

    def _record_weight_grads(self, run: BlockRun, shared: Sequence[nn.Parameter], block: Block) -> None:
        """Counts the weight gradients that the block creates. A parameter that a later stage uses has one already."""
        stage, there = run.stage, {id(p) for p in shared}
        shards = self._shards_of(block)
        for parameter, whole in run.block_meter.weight_grads:
            size = min(whole, shards.get(id(parameter), whole))
            run.reducing_bytes += whole if id(parameter) in shards else 0
            if id(parameter) not in there:
                stage.weight_grad_bytes += size
                run.accumulated_change += size if self._parameter_users.is_shared(parameter) else 0
            if self._parameter_users.ends_pending(parameter, block, stage.call):
                run.accumulated_change -= size
        got = {id(parameter) for parameter, _ in run.block_meter.weight_grads} - there
        run.unused = {id(p) for p in parameters_of(block)} - run.block_meter.leaves - got

    def _shards_of(self, block: Block) -> dict[int, int]:
        """By identity of each gathered parameter of a block: what a rank keeps of its gradient when it is reduced."""
        return {
            id(parameter): self._shards[part, name]
            for part in (block.all_modules() if self._shards else ())
            for name, parameter in part.named_parameters(recurse=False)
            if (part, name) in self._shards
        }

    def _remember_outputs(self, run: BlockRun, output: Any, arguments: isolated_block.Arguments) -> None:
        read = set(memory.storages(arguments.tensors))
        returned = memory.storages(tensors_in(output))
        run.new_outputs = returned.keys() - self._static - read
        run.stage.output_bytes = sum(size for key, size in returned.items() if key in run.new_outputs)
        run.saved_outputs = run.block_meter.saved_outputs(output)
        run.held_outputs = run.block_meter.held_outputs(output)
        fresh = [t for t in tensors_in(output) if memory.has_storage(t)]
        refs = {ref.key: ref for ref in map(_compat.StorageRef, fresh)}
        known = self._static | set(run.inputs) | {ref.key for r in self._runs for ref in r.outputs}
        run.outputs = [ref for key, ref in refs.items() if key not in known]
        run.tensors = [
            (
                weakref.ref(t, functools.partial(self._record_freed, _compat.storage_id(t))),
                isolated_block.identity(t),
                t._version,
            )
            for t in fresh
        ]

    def _record_freed(self, storage: int, _: weakref.ref[torch.Tensor]) -> None:
        """Notes the mark at which an output is freed."""
        if self._meter.is_here():
            self._gone[storage] = self._meter.mark()

    def _join(self, index: int, hooks: isolated_block.Hooks) -> None:
        """Sets the hooks that take readings at a block's place in the step's backward."""
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
                    layout.is_held_by_others = ref.alive()
            there.clear()
            before.backward_begin, self._place = self._moment(), index
            run.arguments.clear()  # the segment before the block made them, and its backward frees them

        hooks.arrived, hooks.begun = arrived, begun
