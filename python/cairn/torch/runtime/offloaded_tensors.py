"""Packs the tensors of a value for offloading, and restores them after the prefetch."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence

import torch

from ..base import _compat, memory
from .block_records import BlockRun, Outputs


class OffloadableTensors:
    """The tensors of a value that are offloaded.

    These are saved tensors in holders, inputs from which other saved tensors are recomputed, and outputs.

    block: the run that the holders belong to, if any. staying: storages that stay on the device anyway. Tensors that
    are not on the device are not offloaded. Nor are outputs that the block was passed: others hold them, too.
    """

    def __init__(
        self, block: BlockRun | None, staying: Container[int], outputs: Outputs | None, device: torch.device
    ) -> None:
        def stays(tensor: torch.Tensor) -> bool:
            return tensor.device != device or _compat.storage_key(tensor) in staying

        self._first = None if block is None else block.first
        self._recompute_state = None if block is None else block.recompute_state
        self._tensor_recompute = None if self._recompute_state is None else self._recompute_state.recompute
        full = [] if self._first is None else [(h, h.tensor) for h in self._first.alive() if h.tensor is not None]
        sent = [holder for holder, tensor in full if not stays(tensor)]
        self._holders = list(map(weakref.ref, sent))
        self._staying = [weakref.ref(holder) for holder, tensor in full if stays(tensor)]
        tensors = [holder.tensor for holder in sent if holder.tensor is not None]
        written = [holder.is_written for holder in sent]
        self._held: list[int] = []
        if self._tensor_recompute is not None:
            held = {i: t for i, t in self._tensor_recompute.held().items() if not stays(t)}
            self._held = list(held)
            tensors += held.values()
            written += map(self._tensor_recompute.is_written, held)
        outputs = Outputs(()) if outputs is None else outputs
        going = {i: t for i, t in outputs.tensors.items() if i not in outputs.passed and not stays(t)}
        self._outputs = list(going)
        self._staying_outputs = outputs.only(outputs.tensors.keys() - going)
        tensors += going.values()
        written += [not outputs.is_intact(index) for index in going]
        self._written = written
        self._detectors = [_compat.WriteDetector(tensor) for tensor in tensors]
        #: The tensors to copy, by `.data`: their version counters are watched here. Inputs of recomputed tensors are
        #: read through views of their storages, so these storages are copied whole, and come last.
        self.tensors = [tensor.data for tensor in tensors] + [
            memory.bytes_of(tensor.untyped_storage(), tensor.device) for tensor in tensors[len(sent) :]
        ]
        self.has_readers = True  # of the outputs

    def keep_only(self, wanted: frozenset[int]) -> None:
        """Drops the outputs on the device that the next stage does not read."""
        self._staying_outputs.keep_only(wanted)

    def empty(self) -> None:
        """Drops what the block saved in its latest run, except tensors that are not offloaded."""
        staying = {reference() for reference in self._staying}
        for holder in self._first.alive() if self._first is not None else ():
            if holder not in staying:
                holder.empty()
        if self._recompute_state is not None and self._recompute_state.recompute is not self._tensor_recompute:
            self._recompute_state.recompute = None
        elif self._tensor_recompute is not None:
            self._tensor_recompute.release(self._held)

    def unpack(self, tensors: Sequence[torch.Tensor]) -> Outputs | None:
        """Puts prefetched tensors back into the holders and the recipe; returns the outputs."""
        written = [was or now.has_changed() for was, now in zip(self._written, self._detectors, strict=True)]
        for index, reference in enumerate(self._holders):
            holder = reference()
            if holder is not None:
                holder.fill(tensors[index])
                holder.version = -1 if written[index] else holder.version
        count = len(self._holders)
        if self._recompute_state is not None:
            self._recompute_state.recompute = self._tensor_recompute
        if self._tensor_recompute is not None:
            for position, index in enumerate(self._held, count):
                self._tensor_recompute.hold(index, tensors[position], written[position])
        if not (self._outputs or self._staying_outputs.tensors) or not self.has_readers:
            return None
        count += len(self._held)
        outputs = dict(zip(self._outputs, tensors[count : len(written)], strict=True))
        gone = {o for o, w in zip(self._outputs, written[count:], strict=True) if w}
        return Outputs.from_prefetch(outputs, gone, self._staying_outputs)
