"""Offloads tensors to a tier and prefetches them, while something else is computed.

    transfers = Transfers(open_tier("host", 1 << 30), "cpu")
    group = transfers.offload("name", tensors, offset=0)  # begins to copy their storages out
    group.wait_out()                                       # the copy has ended: the tensors may be freed now
    group.prefetch()                                       # allocates, and begins to copy in
    tensors = group.tensors()                              # the same values, in new storages
    group.discard()                                        # its place in the slab is free

A `TensorGroup` is the tensors of one value on their way to a tier and back. It copies each storage behind the tensors
once, and of it the bytes that the tensors span. The tensors that come back have the sizes, strides and dtypes of the
originals, and share storages where those did. Their addresses are equal modulo 64 bytes (512 on CUDA), so that the same
kernels run. The caller says where each group lies in the slab.

A copy that fails raises in the thread that waits for it or for a later copy. All later copies of the step are
cancelled. `begin_step` starts over without the failure.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from cairn import format_bytes

from ..base import _compat, memory
from ..base.errors import Unsupported
from ..base.layouts import ByteView
from .copy_streams import IN, OUT, Copy, Piece, copy_streams_for
from .tiers import Tier

#: Bytes: what kernels look at, and no more than the allocator gives. On CUDA, cuBLAS looks at 256 to choose a kernel.
ALIGNMENT = {"cpu": 64, "cuda": 512}
_LARGEST_ITEM = 16


# -- what a group consists of -------------------------------------------------------------------------------


@dataclasses.dataclass
class _Storage:
    """The bytes of a storage that some tensors span, and how far behind a multiple of ALIGNMENT they lie."""

    storage: torch.UntypedStorage
    device: torch.device
    first: int = 0
    end: int = 0

    def include(self, first: int, end: int) -> None:
        """Some more bytes, not none."""
        if self.first < self.end:
            first, end = min(self.first, first), max(self.end, end)
        self.first, self.end = first, end

    @property
    def lead(self) -> int:
        base = self.storage.data_ptr()
        return ((base if base % _LARGEST_ITEM == 0 else 0) + self.first) % ALIGNMENT[self.device.type]

    def bytes(self) -> torch.Tensor:
        """The bytes of the storage, as a tensor that keeps it alive."""
        alias = torch.empty(0, dtype=torch.uint8, device=self.device)
        return alias.set_(self.storage, self.first, (self.end - self.first,), (1,))


@dataclasses.dataclass(frozen=True)
class _PrefetchBuffer:
    """The memory on the device into which one storage is prefetched."""

    count: int
    lead: int


class Layout:
    """The bytes of a group of tensors, and the views that make the tensors from a copy of these bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.storages: list[_Storage] = []
        index: dict[int, int] = {}
        self.owners: list[int] = []  # which storage each tensor has
        for tensor in tensors:
            require_movable(tensor)
            key = index.setdefault(_compat.storage_id(tensor), len(self.storages))
            if key == len(self.storages):
                self.storages.append(_Storage(tensor.untyped_storage(), tensor.device))
            if tensor.numel() > 0:
                self.storages[key].include(*_span(tensor))
            self.owners.append(key)
        self.views = [
            ByteView.of(tensor, self.storages[owner].first) for tensor, owner in zip(tensors, self.owners, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes to copy, which are also the bytes in the slab."""
        return sum(each.end - each.first for each in self.storages)


def group_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that a group of these tensors takes in the slab: the spanned bytes of each storage, once."""
    return Layout(list(tensors)).nbytes


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain bytes that can be moved to or from a device that transfers know."""
    return memory.can_be_offloaded(tensor) and tensor.device.type in ("cpu", "cuda")


def require_movable(tensor: torch.Tensor) -> None:
    """Raises Unsupported, naming the tensor, if it cannot be moved."""
    if not is_movable(tensor):
        raise Unsupported(
            f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device} cannot be offloaded: only plain "
            "dense tensors can"
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first to the last of a tensor's elements, of which there are some."""
    item = tensor.element_size()
    first = int(tensor.storage_offset()) * item
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first, first + (last + 1) * item


# -- groups -------------------------------------------------------------------------------------------------


class _Place:
    """A part of the slab that is in use as long as this object exists."""

    __slots__ = ("__weakref__", "span", "what")

    def __init__(self, span: range, what: Any) -> None:
        self.span, self.what = span, what


class TensorGroup:
    """Tensors on their way out, in the slab, or on their way back; see the top of this file.

    A group that is dropped gives up its place as after `discard`.
    """

    def __init__(self, transfers: Transfers, key: Any, tensors: Sequence[torch.Tensor], place: _Place, layout: Layout):
        self.key, self.bytes = key, layout.nbytes
        self._transfers, self._copy_streams = transfers, transfers._copy_streams
        self._step = transfers._step
        self._place: _Place | None = place
        self._views = list(zip(layout.views, layout.owners, strict=True))
        self._buffers = [_PrefetchBuffer(each.end - each.first, each.lead) for each in layout.storages]
        self._device = transfers.device
        self._versions = [_compat.WriteDetector(tensor) for tensor in tensors]
        self._to_send = _pieces(place, [each.bytes() for each in layout.storages])
        self._out: Copy | None = None
        self._in: Copy | None = None
        self._arriving: list[torch.Tensor] = []

    @property
    def is_sent(self) -> bool:
        """Whether the copy out has begun, or is over."""
        return self._out is not None

    def send(self) -> None:
        """Begins to copy out; `Transfers.offload` has done so."""
        if self._out is None and self._place is not None:
            pieces, self._to_send = self._to_send, []
            self._out = self._transfers._submit(OUT, self.key, pieces, self._place.span)

    def wait_out(self, *, is_free: bool = False) -> None:
        """Waits until the copy out has ended, and drops the references to the tensors.

        For a CUDA device it is the current stream that waits. Raises TransferFailed if the copy was not made.

        is_free: from here on the memory of the tensors may be written, as generated code does that reuses memory.
        """
        self._require_current()
        assert self._out is not None, "not sent"
        self._copy_streams.wait(self._out)
        if is_free:
            self._versions = []

    @property
    def is_intact(self) -> bool:
        """Whether the tensors that went out have not been changed in place since: else the copy may be of either."""
        return not any(detector.has_changed() for detector in self._versions)

    def prefetch(self) -> None:
        """Allocates the memory that the tensors come back to, and begins to copy."""
        self._require_current()
        if self._in is not None:
            return
        if self._place is None:
            raise ValueError(f"{self.key} is no longer in the offload tier: it was discarded")
        self._arriving = [self._allocate(buffer) for buffer in self._buffers]
        targets = [
            whole[buffer.lead : buffer.lead + buffer.count]
            for whole, buffer in zip(self._arriving, self._buffers, strict=True)
        ]
        pieces = _pieces(self._place, targets)
        assert self._out is not None, "not sent"
        self._in = self._transfers._submit(IN, self.key, pieces, self._place.span, (self._out,))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors again, when they have come back; they belong to the caller, and another `prefetch` makes others.

        Raises TransferFailed if a copy was not made, and RuntimeError if the tensors that went out were changed since.
        """
        self.prefetch()
        assert self._in is not None
        coming, self._in = self._in, None
        wholes, self._arriving = self._arriving, []
        self._copy_streams.wait(coming)
        if not self.is_intact:
            raise RuntimeError(f"a tensor of {self.key} was modified by an inplace operation after it was offloaded")
        return [view.tensor_in(wholes[owner], self._buffers[owner].lead) for view, owner in self._views]

    def discard(self) -> None:
        """Frees the place in the slab for later groups. May be called again."""
        self._place, self._to_send = None, []
        if self._in is None and self._out is not None:
            self._copy_streams.drop(self._out)

    def __del__(self) -> None:
        for copy in (getattr(self, "_out", None), getattr(self, "_in", None)):
            if copy is not None:
                self._copy_streams.drop(copy)

    def _allocate(self, buffer: _PrefetchBuffer) -> torch.Tensor:
        return torch.empty(buffer.lead + buffer.count, dtype=torch.uint8, device=self._device)

    def _require_current(self) -> None:
        if self._step != self._transfers._step:
            raise Unsupported(f"{self.key} was offloaded in a step that is over")


def _pieces(place: _Place, parts: Sequence[torch.Tensor]) -> list[Piece]:
    """Where in the slab the parts of a group go: one behind the other."""
    pieces, offset = [], place.span.start
    for part in parts:
        pieces.append((offset, part))
        offset += part.numel()
    return pieces


# -- transfers -----------------------------------------------------------------------------------------------


class Transfers:
    """Asynchronous copies between a device and a tier.

    Attributes
    ----------
    tier
        The tier. It is closed together with the transfers.
    device
        The device.
    """

    def __init__(self, tier: Tier, device: torch.device | str, shared_link: bool = False) -> None:
        self.tier, self.device = tier, torch.empty(0, device=device).device  # with its number
        self._copy_streams = copy_streams_for(tier, self.device, shared_link)
        self._places: list[weakref.ref[_Place]] = []
        self._lock = threading.RLock()
        self._step = 0

    @property
    def has_failed(self) -> bool:
        """Whether a copy of this step failed, so that no others are made until the next one."""
        return self._copy_streams.has_failed

    @property
    def trace(self) -> list[tuple[str, Any]]:
        """The copies of this step in the order in which they started: ("offload" or "prefetch", key)."""
        return self._copy_streams.trace

    def offload(self, group_key: Any, tensors: Iterable[torch.Tensor], offset: int) -> TensorGroup:
        """Begins to copy tensors to this place in the slab.

        The tensors must not be written until the copy has ended. If another copy still uses the place, of a group that
        was discarded, this one begins after it.

        Raises ValueError if the place is not free, or not in the slab.
        """
        group = self.packed(group_key, tensors, offset)
        group.send()
        return group

    def packed(self, group_key: Any, tensors: Iterable[torch.Tensor], offset: int) -> TensorGroup:
        """Like `offload`, but the copy starts when the group is sent. Until then the tensors may be written."""
        self._copy_streams.require_usable()
        listed = list(tensors)
        layout = Layout(listed)
        for tensor in listed:
            if tensor.device != self.device:
                raise ValueError(f"{group_key} has a tensor on {tensor.device}; these transfers are for {self.device}")
        with self._lock:
            place = self._take(range(offset, offset + layout.nbytes), group_key)
            return TensorGroup(self, group_key, listed, place, layout)

    def offload_anywhere(self, group_key: Any, tensors: Iterable[torch.Tensor]) -> TensorGroup:
        """Like `offload`, to the first free range of the slab. The tier grows if there is none."""
        listed = list(tensors)
        count = group_bytes(listed)
        offset = self.free_place(count)
        self.tier.grow(offset + count)
        return self.offload(group_key, listed, offset)

    def free_place(self, count: int) -> int:
        """The first byte of the first free place for `count` bytes, which may end behind the slab's end."""
        return memory.first_free(self.used_spans(), count)

    def used_spans(self) -> list[range]:
        """The parts of the slab where groups are, ascending."""
        with self._lock:
            return sorted((place.span for place in self._live()), key=lambda span: span.start)

    def begin_step(self) -> None:
        """Starts over: cancels copies under way, and clears the failure and the trace. Earlier groups are void."""
        self._copy_streams.restart()
        with self._lock:
            self._step += 1
            self._places = []

    def release(self) -> None:
        """Frees the device memory that copies hold. Called when a step has failed, after its groups were dropped."""
        self._copy_streams.release()

    def close(self) -> None:
        """Ends the threads and closes the tier. May be called again."""
        self._copy_streams.close()
        self.tier.close()

    def _take(self, span: range, key: Any) -> _Place:
        if span.start < 0 or span.stop > self.tier.capacity_bytes:
            raise ValueError(
                f"{key} would lie at bytes {span.start} to {span.stop} of the offload tier, which has "
                f"{self.tier.capacity_bytes} ({format_bytes(self.tier.capacity_bytes)})"
            )
        live = self._live()
        for other in live:
            if _overlap(span, other.span):
                raise ValueError(
                    f"{key} would lie at bytes {span.start} to {span.stop} of the offload tier, where "
                    f"{other.what} is (bytes {other.span.start} to {other.span.stop})"
                )
        place = _Place(span, key)
        self._places = [weakref.ref(each) for each in (*live, place)]
        return place

    def _live(self) -> list[_Place]:
        return [place for reference in self._places if (place := reference()) is not None]

    def _submit(self, kind: str, key: Any, pieces: list[Piece], span: range, after: tuple[Copy, ...] = ()) -> Copy:
        if kind == OUT:  # not before those that still use the place
            after = tuple(copy for copy in self._copy_streams.unfinished() if _overlap(span, copy.span))
        copy = Copy(kind, key, pieces, span, after)
        self._copy_streams.submit(copy)
        return copy


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
