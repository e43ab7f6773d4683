"""The values of a training step under a schedule: records of blocks, their outputs, and copies in the tier."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..base import _compat
from ..schedule.program import DISCARD, DROP, OFFLOAD, OUTPUT, SAVED, Op, Value
from ..selective.saved_tensors import Lease
from .block_records import Argument, BlockRun, Outputs, Returned
from .offloaded_tensors import OffloadableTensors
from .step_settings import Settings, Trace
from .step_transfers import StepTransfers


class StepValues:
    """The values of one step, on the device and in the tier. The schedule drops, offloads and prefetches them.

    Methods that free memory, from the smallest part of a value to all of it:

    * `_release`: the tensors of an output, once no operation reads them;
    * `_drop`: the device copy of a value, as the schedule asks; its copy in the tier stays;
    * `_free`: the saved tensors of a value on the device, and its outputs;
    * `_discard`: the copy in the tier, as the schedule asks;
    * `_drop_host_copy`: the copy in the tier of a value whose graph is freed;
    * `abandon`: all copies in the tier, when the step has failed.
    """

    def __init__(self, settings: Settings, trace: Trace, step_transfers: StepTransfers | None) -> None:
        self._settings, self._program, self._trace = settings, settings.program, trace
        self._step_transfers = step_transfers
        self._offloadable: dict[Value, OffloadableTensors] = {}  # values that are offloaded
        self._not_offloaded: set[Value] = set()  # values to be offloaded that stay on the device instead
        self._blocks: dict[int, BlockRun] = {}
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self._outputs: dict[Value, Outputs] = {}
        self._read_by_next: dict[int, frozenset[int]] = {}  # by stage: indices of its outputs that the next stage reads
        #: By stage: indices of its outputs that share storage with its arguments.
        self._passed_through: dict[int, frozenset[int]] = {}
        self._returned: dict[int, list[Returned]] = {}

    def name(self, stage: int) -> str:
        """The name of a stage, for messages."""
        return str(self._program.ref(stage))

    def _arguments(self, stage: int, leaves: Sequence[torch.Tensor]) -> list[Argument]:
        """Where a recomputation of the block finds each of its tensor arguments."""
        if not self._program.executed[stage]:
            return list(map(Argument.kept, leaves))
        returned = self._returned.pop(stage - 1, [])
        outputs = self._outputs_before(stage)
        arguments = [Argument.located(leaf, returned, outputs) for leaf in leaves]
        self._read_by_next[stage - 1] = frozenset(a.output for a in arguments if a.output >= 0)
        for value in ((OUTPUT, stage - 1), (SAVED, stage - 1)):
            if value in self._outputs:
                self._outputs[value].keep_only(self._read_by_next[stage - 1])
            if value in self._offloadable:
                self._offloadable[value].keep_only(self._read_by_next[stage - 1])
        return arguments

    def _outputs_before(self, stage: int) -> Outputs | None:
        if self._step_transfers is not None:
            self._complete_prefetch((OUTPUT, stage - 1))
            self._complete_prefetch((SAVED, stage - 1))
        return self._outputs_there(stage)

    def _outputs_there(self, stage: int) -> Outputs | None:
        """The outputs of the stage before that are on the device now. Does not wait for prefetches."""
        return self._outputs.get((OUTPUT, stage - 1)) or self._outputs.get((SAVED, stage - 1))

    def _produce(self, op: Op, output: Any) -> None:
        product = op.product
        if product is not None and self._program.executed[op.stage + 1]:
            passed = self._passed_through.get(op.stage, frozenset())
            self._outputs[product] = Outputs(output, self._read_by_next.get(op.stage), passed)

    def _drop(self, value: Value) -> None:
        """Drops the device copy of a value, unless the value stays on the device instead of being offloaded."""
        if value not in self._not_offloaded:
            self._complete_prefetch(value)
            if value in self._offloadable:
                self._offloadable[value].empty()
                self._release(value)
            else:
                self._free(value)

    def _free(self, value: Value) -> None:
        kind, stage = value
        if kind == SAVED and stage in self._blocks:
            first, recompute_state = self._blocks[stage].first, self._blocks[stage].recompute_state
            for holder in first.alive() if first is not None else ():
                holder.empty()
            if recompute_state is not None:
                recompute_state.recompute = None
        self._release(value)

    def _release(self, value: Value) -> None:
        """Releases an output. That of a native stage stays as long as the next stage may read it."""
        kind, stage = value
        if kind == SAVED and not self._program.executed[stage] and self._is_leased(stage + 1):
            return
        if value in self._not_offloaded:
            return
        if value in self._offloadable and self._step_transfers is not None and self._step_transfers.is_arriving(value):
            self._offloadable[value].has_readers = False
        self._outputs.pop(value, None)

    def _is_leased(self, stage: int) -> bool:
        lease = self._leases.get(stage)
        return lease is not None and lease() is not None

    # -- transfers -------------------------------------------------------------------------------------------

    def _wait(self, position: int) -> None:
        if self._step_transfers is not None:
            self._step_transfers.wait(position)

    def _perform_on_value(self, position: int, op: Op) -> None:
        value, step_transfers = op.subject, self._step_transfers
        if op.kind == DROP:
            self._drop(value)
        elif op.kind == OFFLOAD:
            self._offload(position, value)
        elif op.kind == DISCARD:
            self._discard(value)
        elif step_transfers is not None and step_transfers.holds(value):
            step_transfers.prefetch(value)

    def _offload(self, position: int, value: Value) -> None:
        if self._step_transfers is None:
            self._not_offloaded.add(value)
            return
        self._complete_prefetch(value)
        offloadable = self._offloadable_of(value, self._step_transfers.device)
        if not offloadable.tensors:
            if value in self._outputs and self._outputs[value].tensors:  # they stay, all of them
                self._not_offloaded.add(value)
            return  # otherwise the block did not run, or its graph is freed
        if self._step_transfers.offload(position, value, offloadable.tensors):
            self._offloadable[value] = offloadable
            offloadable.tensors = []
        else:
            self._not_offloaded.add(value)
            self._trace.notes.append(f"what '{self.name(value[1])}' made is larger than planned, and stays there")

    def _offloadable_of(self, value: Value, device: torch.device) -> OffloadableTensors:
        kind, stage = value
        block = self._blocks.get(stage) if kind == SAVED else None
        if block is None:
            return OffloadableTensors(None, (), self._outputs.get(value), device)
        given = {_compat.storage_key(a.tensor) for a in block.arguments if a.tensor is not None}
        before = self._outputs_there(stage)
        outputs = {_compat.storage_key(tensor) for tensor in before.tensors.values()} if before else set()
        return OffloadableTensors(
            block, self._resident | block.copies | given | outputs, self._outputs.get(value), device
        )

    @functools.cached_property
    def _resident(self) -> frozenset[int]:
        return self._settings.resident()

    def _drop_host_copy(self, value: Value) -> None:
        """Drops the copy of a value in the tier: nothing will read it any more."""
        self._not_offloaded.discard(value)
        self._offloadable.pop(value, None)
        if self._step_transfers is not None:
            self._step_transfers.drop(value)

    def _discard(self, value: Value) -> None:
        self._not_offloaded.discard(value)
        if self._step_transfers is not None and self._step_transfers.holds(value):
            self._step_transfers.discard(value)
        if self._step_transfers is None or not self._step_transfers.is_arriving(value):
            self._offloadable.pop(value, None)

    def _complete_prefetch(self, value: Value) -> None:
        """Waits for the prefetch of a value, and puts its tensors back; does nothing if none is under way."""
        step_transfers = self._step_transfers
        if step_transfers is None or not step_transfers.is_arriving(value):
            return
        outputs = self._offloadable[value].unpack(step_transfers.take(value))
        if outputs is not None:
            self._outputs[value] = outputs
        if not step_transfers.holds(value):
            del self._offloadable[value]
        else:
            self._offloadable[value].has_readers = True

    def abandon(self) -> None:
        """Called when the step has failed: frees the tier for the next step."""
        if self._step_transfers is not None:
            self._step_transfers.close()
        self._step_transfers, self._offloadable = None, {}
