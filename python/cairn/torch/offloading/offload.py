"""Offloads saved tensors without a plan: `with ct.offload(model): loss = ...`.

A better `torch.autograd.graph.save_on_cpu`. Saved tensors are copied to a tier while the forward goes on. The backward
prefetches them.

* *Storages are copied*, each once for every version that is saved. A saved tensor is kept as a view of a storage.
  Sizes, strides and dtypes stay, so the same kernels run, and results are bit for bit those of plain training.
* *A copy begins* when the function that saved the tensor has ended, because some functions, such as RReLU, write to
  what they have saved. The sequence number of the next function tells. Tensors that share a storage without being
  views, as `unsafe_chunk` makes them, are not offloaded: each has its own version counter, so the version of the
  storage is unknown.
* *Left alone* are parameters, buffers and other tensors that stay in memory anyway; they are known by their storages.
  So are small tensors, and tensors that are not plain bytes.
* *Resident.* The newest storages stay on the device, up to `resident_bytes`, because the backward begins with them.
  When a storage gets too old for that, the forward waits until its copy has ended, and frees it. In the backward,
  storages are prefetched in the reverse order as far as `resident_bytes` allows. A storage that someone else keeps in
  memory is not copied back.
* *In-place changes.* With hooks, autograd does not check versions itself. So each saved tensor has a record of its
  version. If it was changed in place, the backward raises the error of plain training.
* *A graph that is kept* (`retain_graph`, double backward): a copy stays in the tier until its last reader is gone.
  Prefetched storages that were used and are still needed are freed to make room, the oldest first.

The autograd graph owns the saved tensors, these own their storages, and these the tier. Nothing points back: freeing
the graph frees everything.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

import torch

from ..._units import size_bytes
from ..base import _compat, memory
from ..base.errors import TierUnavailable, Unsupported
from ..base.layouts import ByteView
from .tiers import Tier, open_tier
from .transfers import TensorGroup, Transfers, is_movable

MIN_BYTES = 1 << 20
_LEAST_RESIDENT_BYTES = 64 << 20
_GROWTH_BYTES = 16 << 20
_THE_END = 1 << 64  # after all marks of autograd's history


class Offload(contextlib.ContextDecorator):
    """Where saved tensors are offloaded to; made by `offload`. Enter it around every forward, and keep it between
    steps.

    It is also a decorator of a function that runs a forward. A backward may run inside or outside.
    """

    def __init__(
        self,
        left_alone: Iterable[torch.Tensor | torch.nn.Module],
        tier: str,
        host_budget: int | None,
        min_bytes: int,
        resident_bytes: int | None,
        streams: int,
    ) -> None:
        if streams not in (1, 2):
            raise ValueError(f"streams is {streams!r}; it is 2, one for each direction, or 1 for both")
        self._left_alone = list(left_alone)
        for each in self._left_alone:
            if not isinstance(each, (torch.Tensor, torch.nn.Module)):
                raise TypeError(
                    f"offload takes modules and tensors by position, each by itself, not {type(each).__name__}"
                )
        self._tier, self._host_budget = tier, _HostBudget(host_budget)
        self._min_bytes, self._resident_bytes, self._shared = min_bytes, resident_bytes, streams == 1
        self._stores: dict[torch.device, _Store] = {}
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._static: frozenset[int] = frozenset()
        self._lock = threading.RLock()
        self._is_closed = False
        open_tier(tier, 0).close()  # what is wrong with it is an error here

    def __enter__(self) -> Offload:
        if self._is_closed:
            raise Unsupported("this offload was closed; make another one")
        with self._lock:
            for store in self._stores.values():
                store.begin()
            self._static = frozenset(map(_compat.storage_id, filter(is_movable, self._tensors_left_alone())))
            hooks = _compat.saved_tensors_hooks(self._pack, _unpack)
            hooks.__enter__()
            self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__()
        with self._lock:
            for store in self._stores.values():
                store.send(before=_THE_END)

    @property
    def offloaded_bytes(self) -> int:
        """How many bytes are offloaded now."""
        return sum(len(span) for store in self._stores.values() for span in store.transfers.used_spans())

    @property
    def capacity_bytes(self) -> int:
        """How many bytes of the tier it has taken so far; a later step uses them again."""
        return sum(store.transfers.tier.capacity_bytes for store in self._stores.values())

    def close(self) -> None:
        """Free the memory of the tier. Backwards that still need tensors in it fail."""
        self._is_closed = True
        for store in self._stores.values():
            store.transfers.close()

    def _tensors_left_alone(self) -> Iterable[torch.Tensor]:
        for each in self._left_alone:
            if isinstance(each, torch.nn.Module):
                yield from each.parameters()
                yield from each.buffers()
            else:
                yield each

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        """Called by autograd with each tensor that it saves."""
        if not self._is_moved(tensor):
            return _Kept(tensor)
        with self._lock:
            entry = self._store(tensor.device).entry(tensor)
        return _Kept(tensor) if entry is None else _Moved(tensor, entry)

    def _is_moved(self, tensor: torch.Tensor) -> bool:
        whole = tensor.untyped_storage().nbytes() if is_movable(tensor) else 0
        base = tensor if tensor._base is None else tensor._base
        if whole < max(self._min_bytes, 1) or base.numel() * base.element_size() < whole:
            return False  # of a storage in parts, as `unsafe_chunk` makes them, each counts its own writes
        return not (base.is_leaf and base.requires_grad) and _compat.storage_id(tensor) not in self._static

    def _store(self, device: torch.device) -> _Store:
        if device not in self._stores:
            transfers = Transfers(open_tier(self._tier, 0, device), device, self._shared)
            self._stores[device] = _Store(transfers, self._host_budget, self._resident_bytes, self._lock)
        return self._stores[device]


def offload(
    *left_alone: torch.nn.Module | torch.Tensor,
    tier: str = "host",
    host_budget: int | str | None = None,
    min_bytes: int | str = MIN_BYTES,
    resident_bytes: int | str | None = None,
    streams: int = 2,
) -> Offload:
    """A context in which saved tensors are offloaded, and fetched back for the backward.

    Results are bit for bit those without it. Create it once and enter it in every step: it keeps its tier's memory.

    Parameters
    ----------
    *left_alone : nn.Module or torch.Tensor
        The model, whose parameters and buffers are not offloaded, and other tensors that stay in memory anyway, such as
        inputs and targets. Leaves that require gradients need not be given.
    tier : str
        "host", or "file:PATH": a file in the folder of that path (in it, if it is a folder). On the CPU only a file is
        other memory.
    host_budget : int or str, optional
        The most to offload at a time, in bytes; tensors that do not fit stay on the device. None: no limit but the
        tier's free space.
    min_bytes : int or str
        Storages smaller than this stay on the device.
    resident_bytes : int or str, optional
        The most bytes of offloaded tensors on the device at a time, being copied out or prefetched. None: 64 MiB, or
        twice the largest storage if that is more.
    streams : {2, 1}
        2: copies out and back run at the same time; 1: they take turns.

    Returns
    -------
    Offload
        The context.

    Raises
    ------
    TierUnavailable
        The tier has not enough memory; also in the forward, when the tier must grow.
    TransferFailed
        In the forward or the backward, when a copy failed. The next step works.

    Examples
    --------
    >>> saved = ct.offload(model)
    >>> for x, y in batches:
    ...     with saved:
    ...         loss = loss_fn(model(x), y)
    ...     loss.backward()
    """
    return Offload(
        left_alone,
        tier,
        None if host_budget is None else size_bytes(host_budget, "host_budget"),
        size_bytes(min_bytes, "min_bytes"),
        None if resident_bytes is None else size_bytes(resident_bytes, "resident_bytes"),
        streams,
    )


# -- what the graph gets -------------------------------------------------------------------------------------


class _Saved:
    """Stands for a saved tensor in autograd's graph."""

    __slots__ = ("_writes",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._writes = _compat.WriteDetector(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor, for autograd."""
        if self._writes.has_changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "tensor that was saved inside cairn.torch.offload was written afterwards"
            )
        return self._tensor()

    def _tensor(self) -> torch.Tensor:
        raise NotImplementedError


class _Kept(_Saved):
    """A saved tensor that stays in memory."""

    __slots__ = ("_kept",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._kept = tensor.detach()  # its place in the graph would be a cycle

    def _tensor(self) -> torch.Tensor:
        return self._kept


class _Moved(_Saved):
    """A saved tensor whose storage is moved."""

    __slots__ = ("_entry", "_view")

    def __init__(self, tensor: torch.Tensor, entry: _Entry) -> None:
        super().__init__(tensor)
        self._entry, self._view = entry, ByteView.of(tensor)

    def _tensor(self) -> torch.Tensor:
        whole = self._entry.store.fetch(self._entry)
        return self._view.tensor_in(whole, int(whole.storage_offset()))


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.unpack()


# -- the storages --------------------------------------------------------------------------------------------


class _Entry:
    """One storage in one state, wherever it is."""

    def __init__(
        self, store: _Store, number: int, tensor: torch.Tensor, whole: torch.Tensor, group: TensorGroup
    ) -> None:
        self.store, self.number, self.group = store, number, group
        self.nbytes = whole.numel()
        self.origin = _compat.StorageRef(tensor)  # its identity is given to no other storage while this is here
        self.version = _compat.saved_version(tensor)
        self.whole: torch.Tensor | None = whole  # its bytes, while they are resident
        self.prefetched: _compat.StorageRef | None = None  # the storage that it came back in
        self.thread, self.made_by = threading.get_ident(), _compat.history_mark()  # the function has a lower number
        self.is_prefetching = self.was_used = False

    @property
    def is_resident(self) -> bool:
        """Whether it takes device memory, because it is on the device or being prefetched."""
        return self.whole is not None or self.is_prefetching

    def evict(self) -> None:
        """Frees the bytes on the device, once their copy is in the tier."""
        if self.is_prefetching:
            self.finish_prefetch()
        self.group.send()
        self.group.wait_out()
        self.whole = None

    def prefetch(self) -> None:
        """Begins to prefetch the bytes, unless someone else still has the storage on the device."""
        for known in (self.prefetched, self.origin):
            storage = None if known is None else known.storage()
            if storage is not None and storage.nbytes() == self.nbytes:
                self.whole = memory.bytes_of(storage, self.store.transfers.device)
                return
        self.group.prefetch()
        self.is_prefetching = True

    def finish_prefetch(self) -> torch.Tensor:
        """The bytes of a resident storage; waits for the prefetch."""
        if self.whole is None:
            self.is_prefetching = False
            (self.whole,) = self.group.tensors()
            self.prefetched = _compat.StorageRef(self.whole)
        return self.whole

    def __del__(self) -> None:
        if self.is_resident:
            self.store.gone.append(self.nbytes)


class _HostBudget:
    """The rest of the host budget, for all devices together."""

    def __init__(self, limit: int | None) -> None:
        self._left = limit

    def grant(self, least: int, wish: int) -> int:
        """From `least` to `wish` bytes; 0 if there are not as many."""
        if self._left is None:
            return wish
        granted = min(wish, self._left) if least <= self._left else 0
        self._left -= granted
        return granted

    def give_back(self, count: int) -> None:
        """Returns bytes that were granted."""
        if self._left is not None:
            self._left += count


class _Store:
    """The storages of one device that were saved, newest last, and the slab where their copies are."""

    def __init__(
        self, transfers: Transfers, budget: _HostBudget, resident_bytes: int | None, lock: threading.RLock
    ) -> None:
        self.transfers = transfers
        self.gone: deque[int] = deque()  # sizes of resident entries that were dropped
        self._budget, self._lock = budget, lock
        self._fixed_limit, self._largest = resident_bytes, 0
        self._resident_bytes = 0
        self._entries: list[weakref.ref[_Entry]] = []  # by number
        self._resident: dict[int, weakref.ref[_Entry]] = {}  # in the order in which they became it
        self._unsent: list[weakref.ref[_Entry]] = []
        self._by_storage: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()

    def begin(self) -> None:
        """Before a forward: forgets what is gone, and failures."""
        while self._entries and self._entries[-1]() is None:
            self._entries.pop()
        if self.transfers.has_failed or not self._entries:
            self.transfers.begin_step()
            self._entries, self._resident, self._resident_bytes, self._unsent = [], {}, 0, []
            self._by_storage.clear()
            self.gone.clear()

    def entry(self, tensor: torch.Tensor) -> _Entry | None:
        """The host copy of a tensor's storage in its present state; None if there is no room for it."""
        self.send(before=_compat.history_mark())
        key = _compat.storage_id(tensor)
        known = self._by_storage.get(key)
        if known is not None and known.version == _compat.saved_version(tensor):
            return known
        whole = memory.bytes_of(tensor.untyped_storage(), self.transfers.device)
        offset = self._room(whole.numel())
        if offset is None:
            return None
        number = len(self._entries)
        group = self.transfers.packed(f"saved storage {number}", [whole], offset)
        entry = self._by_storage[key] = _Entry(self, number, tensor, whole, group)
        self._entries.append(weakref.ref(entry))
        self._unsent.append(weakref.ref(entry))
        self._make_resident(entry)
        return entry

    def send(self, before: int) -> None:
        """Sends what functions have saved that are through: one may still write to what it saves while it runs.

        `before` is the mark of now, at which the function that saves next has begun. An entry that has the same mark
        was saved by that one, too.
        """
        waiting, here = [entry for each in self._unsent if (entry := each()) is not None], threading.get_ident()
        for entry in waiting:
            if entry.thread == here and entry.made_by < before:  # marks are of one thread's history
                entry.group.send()
        self._unsent = [weakref.ref(entry) for entry in waiting if not entry.group.is_sent]
        while self._is_over() and (oldest := self._oldest(lambda each: each.group.is_sent)) is not None:
            self._evict(oldest)

    def fetch(self, entry: _Entry) -> torch.Tensor:
        """The bytes of a storage, with those that will be wanted next on their way."""
        with self._lock:
            if not entry.is_resident:
                self._make_resident(entry)
                entry.prefetch()
            self._fetch_ahead(entry.number)
            whole = entry.finish_prefetch()
            entry.was_used = True
            while self._is_over() and (oldest := self._oldest(lambda each: each.was_used and each is not entry)):
                self._evict(oldest)
            return whole

    def _fetch_ahead(self, number: int) -> None:
        for reference in reversed(self._entries[:number]):
            entry = reference()
            if entry is None or entry.is_resident:
                continue
            if self._is_over(entry.nbytes):
                return
            self._make_resident(entry)
            entry.prefetch()

    def _make_resident(self, entry: _Entry) -> None:
        self._resident_bytes += entry.nbytes
        self._largest = max(self._largest, entry.nbytes)
        self._resident[entry.number] = weakref.ref(entry)

    def _evict(self, entry: _Entry) -> None:
        entry.evict()
        del self._resident[entry.number]
        self._resident_bytes -= entry.nbytes

    def _oldest(self, may_go: Callable[[_Entry], bool]) -> _Entry | None:
        for number, reference in list(self._resident.items()):
            entry = reference()
            if entry is None:
                del self._resident[number]
            elif may_go(entry):
                return entry
        return None

    def _is_over(self, more: int = 0) -> bool:
        """Whether the resident bytes, with `more` in addition, exceed the limit."""
        while self.gone:
            self._resident_bytes -= self.gone.popleft()
        limit = self._fixed_limit
        if limit is None:
            limit = max(_LEAST_RESIDENT_BYTES, 2 * self._largest)
        return self._resident_bytes + more > limit

    # -- room in the slab ------------------------------------------------------------------------------------

    def _room(self, count: int) -> int | None:
        """The first free place in the slab. The slab grows if it must and may."""
        place = self.transfers.free_place(count)
        return place if place + count <= self.transfers.tier.capacity_bytes or self._grow(place + count) else None

    def _grow(self, least: int) -> bool:
        tier = self.transfers.tier
        before = tier.capacity_bytes
        wish = max(least, before + max(_GROWTH_BYTES, before // 8))
        granted = self._budget.grant(least - before, wish - before)
        if granted == 0:
            return False
        try:
            _grow_to(tier, before + granted, least)
        finally:
            self._budget.give_back(before + granted - tier.capacity_bytes)
        return True


def _grow_to(tier: Tier, wish: int, least: int) -> None:
    """Makes a tier as large as is wished, or else as large as it must be."""
    try:
        tier.grow(wish)
    except TierUnavailable:
        if wish == least:
            raise
        tier.grow(least)
