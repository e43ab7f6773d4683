"""Memory of a piece of a training step: levels and peaks of the allocator, and sizes by unique storage.

On the CPU the allocator's events are read (workspaces of kernels included); on CUDA the caching allocator's counters.
The caching allocator allocates more than is requested: it rounds up, and it does not split a larger free block if
little would remain, which depends on earlier frees. Requested bytes do not depend on that, and they add up. So steps
are measured and planned in requested bytes, and the excess is measured separately (`Meter.excess`). Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from . import _compat

MARK_PREFIX = "cairn.mark."


# -- sizes by unique storage ---------------------------------------------------------------------------------


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model lies now: on an accelerator, if any of it does."""
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def has_storage(tensor: torch.Tensor) -> bool:
    """False for layouts without one storage of their own (sparse and the like)."""
    return tensor.layout is torch.strided and not tensor.is_meta


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are in memory at its `data_ptr`.

    They are not for a wrapper around other tensors, and in a step on fake tensors.
    """
    if _compat.is_faked():
        return False
    is_plain = type(tensor) in _compat.PLAIN_CLASSES or not hasattr(tensor, "__tensor_flatten__")
    return is_plain and has_storage(tensor) and tensor.numel() > 0


def is_at_hand(tensor: torch.Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return tensor.is_cpu


def can_be_offloaded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is only bytes in one storage, so that a copy of these bytes is a copy of the tensor."""
    is_plain = type(tensor) in _compat.PLAIN_CLASSES and not tensor.is_quantized and not tensor.is_nested
    return is_plain and has_storage(tensor)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor: a rank's part of a tensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def of_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has. The sizes of a DTensor are those of the whole."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return part


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage behind a tensor on this rank, as its allocator was asked for them."""
    tensor = of_this_rank(tensor)
    if not has_storage(tensor):
        return tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes()


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All of a storage as bytes, in a tensor that keeps it alive."""
    alias = torch.empty(0, dtype=torch.uint8, device=device)
    return alias.set_(storage, 0, (storage.nbytes(),), (1,))


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage, each storage once."""
    return {_compat.storage_id(t): storage_bytes(t) for t in tensors if has_storage(t)}


def unique_bytes(tensors: Iterable[torch.Tensor], without: Iterable[int] = ()) -> int:
    """Bytes of the storages of tensors, each once. Storages in `without` do not count."""
    left_out = set(without)
    return sum(size for key, size in storages(tensors).items() if key not in left_out)


def whole_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of new tensors of the same shapes, those of a sharded tensor as a whole."""
    return sum(t.numel() * t.element_size() for t in tensors)


def dense_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of new tensors of the same shapes on this rank."""
    return whole_bytes(map(of_this_rank, tensors))


def give_back() -> None:
    """Give freed memory back to the system, if the C library can.

    A metered step leaves the heap in pieces. Without this, the heap would grow with every step.
    """
    _compat.trim_heap()


def first_free(used: Iterable[range], size: int) -> int:
    """The beginning of the first free range of `size` bytes. used: the ranges that are in use."""
    end = 0
    for span in sorted(used, key=lambda span: span.start):
        if span.start - end >= size:
            break
        end = max(end, span.stop)
    return end


# -- meters --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def not_collecting() -> Iterator[None]:
    """Switch the garbage collector off for the body: a collection would count as released memory, and takes time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Meter:
    """Levels and peaks of allocated memory between marks, relative to where the meter was entered.

    Used as a context manager around everything that it measures: what is allocated inside must be released inside,
    else later readings of the CPU's allocator are wrong. Readings are available after it was left.
    """

    def __enter__(self) -> Meter:
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        raise NotImplementedError

    def mark(self) -> int:
        """Marks this moment; returns the number by which readings refer to it."""
        raise NotImplementedError

    def level(self, mark: int) -> int:
        """Bytes allocated at a mark."""
        return self._levels[mark]

    def peak(self, first: int, last: int) -> int:
        """Most bytes allocated from mark `first` to mark `last`."""
        return self._levels[first] if first == last else max(self._peaks[first:last])

    def rise(self, first: int, last: int) -> int:
        """By how much the peak from mark `first` to mark `last` is above the level at `first`, in bytes."""
        return self.peak(first, last) - self.level(first)

    is_of_cpu = False
    was_interrupted = False
    excess = 0.0  # the share by which the allocator had taken more, at most, than it was asked for

    def is_here(self) -> bool:
        """Whether this thread may mark moments."""
        return True

    _levels: list[int]
    _peaks: list[int]  # from each mark to the next


class CpuMeter(Meter):
    """Adds up the events of the CPU's allocator in the thread that entered it, scratch of kernels included.

    An interruptible one gives way to another, and to the profilers of torch.
    """

    _in_thread: ClassVar[threading.local] = threading.local()  # its meter that runs: there can be but one in each

    def __init__(self, interruptible: bool = False) -> None:
        self._recorder = _compat.AllocatorEvents()
        self._marks = 0
        self._interruptible = interruptible

    def __enter__(self) -> CpuMeter:
        CpuMeter.give_way()
        if _compat.profiler_is_active():
            raise RuntimeError("memory cannot be measured while a profiler is active")
        self._recorder.start()
        if self._interruptible:
            _before_profilers.begin()
        CpuMeter._in_thread.running = self
        return self

    @staticmethod
    def give_way() -> None:
        """Ends the meter that runs in this thread, if it is interruptible."""
        running: CpuMeter | None = getattr(CpuMeter._in_thread, "running", None)
        if running is not None and running._interruptible:
            running.__exit__()
            running.was_interrupted = True

    def is_here(self) -> bool:
        return getattr(CpuMeter._in_thread, "running", None) is self

    def mark(self) -> int:
        self._recorder.mark(f"{MARK_PREFIX}{self._marks}")
        self._marks += 1
        return self._marks - 1

    def __exit__(self, *exc: object) -> None:
        if not self.is_here():
            self.was_interrupted = True
            return
        CpuMeter._in_thread.running = None
        self._recorder.stop(MARK_PREFIX)
        if self._interruptible:
            _before_profilers.end()
        self._levels, self._peaks = [], []
        level = 0
        for event in self._recorder.events:
            if isinstance(event, str):
                self._levels.append(level)
                self._peaks.append(level)
                continue
            level += event
            if self._peaks:
                self._peaks[-1] = max(self._peaks[-1], level)


_before_profilers = _compat.BeforeProfilers(CpuMeter.give_way)


class CudaMeter(Meter):
    """Reads the caching allocator's counters; they are kept on the host, so no synchronisation is needed.

    A device has one counter of peaks, which is reset at each mark. Several meters may run, for models that train in
    turns, so the counter's value before a reset is passed to all of them.

    taken: count allocated instead of requested bytes.
    """

    _running: ClassVar[weakref.WeakSet[CudaMeter]] = weakref.WeakSet()
    _turn: ClassVar[threading.Lock] = threading.Lock()  # one thread's at a time

    def __init__(self, device: torch.device, taken: bool = False) -> None:
        self._device = device
        # an allocator that counts only what it takes does not round
        counts_both = torch.cuda.get_allocator_backend() == "native"
        self._counter = "requested_bytes" if counts_both and not taken else "allocated_bytes"
        self._level = self._peak = 0  # now, and since the last mark

    def __enter__(self) -> CudaMeter:
        self._levels, self._peaks = [], []
        with CudaMeter._turn:
            CudaMeter._running.add(self)
        self._begin_section()
        self._start, self.excess = self._level, 0.0  # what was before is of no importance
        return self

    def mark(self) -> int:
        peak = self._begin_section()
        if self._levels:
            self._peaks.append(peak - self._start)
        self._levels.append(self._level - self._start)
        return len(self._levels) - 1

    def __exit__(self, *exc: object) -> None:
        self.mark()
        self._levels.pop()
        with CudaMeter._turn:
            CudaMeter._running.discard(self)

    def _begin_section(self) -> int:
        """Reset the counter of peaks, and return the peak of the section that ends."""
        with CudaMeter._turn:
            counters = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
            for meter in CudaMeter._running:
                if meter._device == self._device:
                    meter._see(counters)
            torch.cuda.reset_peak_memory_stats(self._device)
            peak, self._peak = self._peak, self._level
        return peak

    def _see(self, counters: Mapping[str, Any]) -> None:
        if not counters:  # before anything was allocated
            return
        asked, taken = counters[self._counter]["all"], counters["allocated_bytes"]["all"]
        if asked["peak"] > 0:
            self.excess = max(self.excess, taken["peak"] / asked["peak"] - 1)
        self._level, self._peak = asked["current"], max(self._peak, asked["peak"])


#: Makes the meters of a step on fake tensors, where one runs.
fake_meter: contextvars.ContextVar[Callable[[], Meter] | None] = contextvars.ContextVar("fake_meter", default=None)


def is_cpu_faked() -> bool:
    """Whether a step runs on fake tensors, which stand for tensors on the CPU."""
    faked = fake_meter.get()
    return faked is not None and faked().is_of_cpu


def stand_in(nbytes: int) -> Any:
    """A tensor that stands for memory of a virtual CPU that no operator allocates; None elsewhere."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu") if is_cpu_faked() else None


def meter_for(device: torch.device, interruptible: bool = False, taken: bool = False) -> Meter:
    """A meter of the device's allocator; an interruptible one gives way when another is wanted.

    taken: measure the bytes that must fit into the device, instead of those that tensors request.
    """
    faked = fake_meter.get()
    if faked is not None:
        return faked()
    return CudaMeter(device, taken) if device.type == "cuda" else CpuMeter(interruptible)


# -- what libraries keep -------------------------------------------------------------------------------------


def library_bytes(device: torch.device) -> int:
    """Bytes of cuBLAS's workspaces on a device, after this thread and autograd's have computed a matrix product.

    Each thread has a workspace of its own, and all have it when this returns. If deterministic algorithms are requested
    and cuBLAS is not configured for them, no thread can compute a product, and there is no workspace.
    """
    if device.type != "cuda":
        return 0
    _compat.clear_workspaces()
    before = torch.cuda.memory_allocated(device)
    with contextlib.suppress(RuntimeError):
        _multiply(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def _multiply(device: torch.device) -> None:
    """A matrix product and its backward; the thread of the backward warns of a device that it has not met."""
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        factor = torch.ones((1, 1), device=device, requires_grad=True)
        torch.autograd.grad(factor @ factor, factor, torch.ones((1, 1), device=device))
