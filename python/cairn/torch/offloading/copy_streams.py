"""Asynchronous copies between a device and a tier, in two copy streams: out (offload) and in (prefetch).

A copy stream makes its copies one after the other. **Copies start in the order in which they were submitted**, in both
streams together, as in a schedule. A copy starts when

* its stream is free,
* all copies that were submitted before it have started, and
* the copies on which it depends have ended: those that write what it reads, or that use the place where it writes.

With a shared link there is one stream for both directions.

* `ThreadCopyStreams`: a background thread for each stream, started when first needed. For the CPU. `StagedCopyStreams`
  do the same for a CUDA device and a tier that the device cannot copy to, such as a file. The threads refer to the
  `CopyQueue`, not to the object that owns them. So copy streams that are no longer used are collected, and that ends
  their threads.
* `CudaCopyStreams`: two CUDA streams, for pinned host memory. They serve all steps. Nothing is allocated on them,
  because the caching allocator reuses memory of a stream for that stream only. Tensors belong to the computing stream,
  and events order the streams. To wait for a copy means that the computing stream waits.

A copy keeps its tensors alive until it has ended and someone has waited for it. So memory is freed by the thread and
the stream that compute: where the plan frees it, and in the order in which measurements see it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from cairn import format_bytes

from ..base.errors import TransferFailed, Unsupported
from .tiers import CHUNK_BYTES, HostTier, Tier

OUT, IN = "offload", "prefetch"  # as the operations of a schedule are called

Piece = tuple[int, torch.Tensor]  # where in the slab, and the bytes on the device


class Copy:
    """One copy between the slab and a device."""

    def __init__(self, kind: str, what: Any, pieces: Sequence[Piece], span: range, after: Sequence[Copy]) -> None:
        self.kind, self.what = kind, what
        self.pieces, self.span = tuple(pieces), span
        self.nbytes = sum(piece.numel() for _, piece in pieces)
        self.after = tuple(after)
        self.unwanted = False  # nobody needs it any more: it need not be made
        self.ended = False
        self.failure: TransferFailed | None = None
        self.event: Any = None  # CUDA event: the copy is made

    def error(self, tier: Tier, reason: str) -> TransferFailed:
        """The error for a copy that was not made."""
        to = "to" if self.kind == OUT else "from"
        text = f"copying {self.what} ({format_bytes(self.nbytes)}, {self.nbytes} bytes) {to} {tier.name} {reason}"
        error = TransferFailed(text)
        error.what, error.nbytes = self.what, self.nbytes
        return error


class CopyQueue:
    """The queue of copies, shared by the copy streams and their threads."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.changed = threading.Condition()
        self.waiting: deque[Copy] = deque()
        self.running: list[Copy] = []
        self.trace: list[tuple[str, Any]] = []
        self.failure: TransferFailed | None = None  # the first of this step
        self.is_closed = False

    def take(self, kinds: Sequence[str]) -> Copy | None:
        """Waits, in a stream's thread, for a copy that may start. None when the queue is closed."""
        with self.changed:
            while True:
                copy = self.waiting[0] if self.waiting else None
                if copy is None and self.is_closed:
                    return None
                if copy is not None and copy.kind in kinds and all(other.ended for other in copy.after):
                    self.waiting.popleft()
                    self.running.append(copy)
                    copy.after = ()
                    if not self.is_off(copy):
                        self.trace.append((copy.kind, copy.what))
                    self.changed.notify_all()
                    return copy
                self.changed.wait()

    def end(self, copy: Copy, is_whole: bool, error: BaseException | None) -> None:
        """Records that a copy has ended: whole, cancelled, or with an error."""
        with self.changed:
            if error is not None and self.failure is None:
                self.failure = copy.error(self.tier, f"failed: {error}")
                self.failure.__cause__ = error.with_traceback(None)
                copy.failure = self.failure
            elif not is_whole:
                copy.failure = self._cancelled(copy)
            self.running.remove(copy)
            copy.ended = True
            self.changed.notify_all()

    def is_off(self, copy: Copy) -> bool:
        """Whether a copy is cancelled."""
        return copy.unwanted or self.is_closed or self.failure is not None

    def _cancelled(self, copy: Copy) -> TransferFailed:
        if self.failure is None:
            return copy.error(self.tier, "was cancelled")
        error = copy.error(self.tier, f"was cancelled, for an earlier copy of this step failed: {self.failure.message}")
        error.__cause__ = self.failure.__cause__
        return error


class ThreadCopyStreams:
    """Copy streams that are background threads. `move` makes a copy piece by piece: an iterator that may end early."""

    def __init__(self, tier: Tier, move: Callable[[Tier, Copy], Iterator[None]], shared: bool) -> None:
        self._queue = CopyQueue(tier)
        self._move = move
        self._kinds = [(OUT, IN)] if shared else [(OUT,), (IN,)]
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end, self._queue, self._threads, self._process)

    @property
    def has_failed(self) -> bool:
        """Whether a copy failed since the last restart."""
        return self._queue.failure is not None

    @property
    def trace(self) -> list[tuple[str, Any]]:
        """The copies, in the order in which they started."""
        return self._queue.trace

    def submit(self, copy: Copy) -> None:
        """Has a copy made as soon as it may start."""
        self.require_usable()
        queue = self._queue
        for kinds in self._kinds[len(self._threads) :]:
            thread = threading.Thread(
                target=_work, args=(queue, kinds, self._move), name="cairn-" + "-".join(kinds), daemon=True
            )
            with _small_stack():
                thread.start()
            self._threads.append(thread)
        with queue.changed:
            queue.waiting.append(copy)
            queue.changed.notify_all()

    def wait(self, copy: Copy) -> None:
        """Returns when a copy has ended. Raises TransferFailed if it was not made."""
        self.require_usable(closed=True)
        with self._queue.changed:
            while not copy.ended:
                self._queue.changed.wait()
        copy.pieces = ()
        if copy.failure is not None:
            raise _again(copy.failure)

    def drop(self, copy: Copy) -> None:
        """Nobody wants this copy any more. Takes no lock, so that a destructor may call it."""
        copy.unwanted = True
        copy.pieces = ()  # a thread that is at it holds on to them by itself

    def release(self) -> None:
        """Nobody wants the step's copies any more: gives back what only they hold; dropped, they hold nothing here."""

    def unfinished(self) -> list[Copy]:
        """The copies that have not ended."""
        with self._queue.changed:
            return [*self._queue.running, *self._queue.waiting]

    def restart(self) -> None:
        """Cancels what has not been copied, waits until nothing is, and forgets failures and the trace."""
        self.require_usable()
        queue = self._queue
        with queue.changed:
            for copy in (*queue.running, *queue.waiting):
                copy.unwanted = True
            while queue.running or queue.waiting:
                queue.changed.wait()
            queue.failure, queue.trace = None, []

    def close(self) -> None:
        """Cancels what has not been copied and ends the threads."""
        self._end()

    def require_usable(self, closed: bool = False) -> None:
        """Raises Unsupported in another process than the one that made the streams, and when they are closed."""
        _require(self._process, self._queue.is_closed and not closed)


@contextlib.contextmanager
def _small_stack() -> Iterator[None]:
    """Threads that start inside get a stack of 1 MiB: the usual 8 MiB count where the system limits a process."""
    before = threading.stack_size(1 << 20)
    try:
        yield
    finally:
        threading.stack_size(before)


def _require(process: int, is_closed: bool) -> None:
    if os.getpid() != process:
        raise Unsupported(
            f"offloading was set up in process {process} and cannot go on in its fork {os.getpid()}: set it up after "
            "the fork"
        )
    if is_closed:
        raise Unsupported("offloading was closed and cannot be used any more")


def _work(queue: CopyQueue, kinds: Sequence[str], move: Callable[[Tier, Copy], Iterator[None]]) -> None:
    """The loop of a stream's thread."""
    while (copy := queue.take(kinds)) is not None:
        is_whole, error = False, None
        try:
            is_whole = _make(queue, copy, move)
        except BaseException as caught:  # whatever it is, those who wait must hear of it
            error = caught
        queue.end(copy, is_whole, error)
        del copy, error  # a thread that waits holds nothing


def _make(queue: CopyQueue, copy: Copy, move: Callable[[Tier, Copy], Iterator[None]]) -> bool:
    """Makes a copy; False if it was called off."""
    if queue.is_off(copy):
        return False
    return all(not queue.is_off(copy) for _ in move(queue.tier, copy))


def _end(queue: CopyQueue, threads: list[threading.Thread], process: int) -> None:
    """Ends the threads; also when the streams are collected, and when the interpreter ends."""
    if os.getpid() != process:
        return  # a fork has no threads of its parent
    with queue.changed:
        queue.is_closed = True
        queue.changed.notify_all()
    if threading.current_thread() not in threads:  # the collector may run in one of them, which then has the lock
        for thread in threads:
            thread.join()


def _again(failure: TransferFailed) -> TransferFailed:
    """An error of its own for everyone who waits, for tracebacks hold on to frames."""
    error = TransferFailed(failure.message)
    error.what, error.nbytes = failure.what, failure.nbytes
    error.__cause__ = failure.__cause__
    return error


# -- how a thread moves bytes --------------------------------------------------------------------------------


def move_host(tier: Tier, copy: Copy) -> Iterator[None]:
    """Between a tier and tensors of the CPU."""
    transfer = tier.write if copy.kind == OUT else tier.read
    for offset, piece in copy.pieces:
        address = piece.data_ptr()
        for first in range(0, piece.numel(), CHUNK_BYTES):
            transfer(offset + first, address + first, min(CHUNK_BYTES, piece.numel() - first))
            yield


class StagedMove:
    """Between a tier and tensors of a CUDA device, by way of a small pinned buffer for each copy stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stages = {kind: _Stage(device) for kind in (OUT, IN)}

    def __call__(self, tier: Tier, copy: Copy) -> Iterator[None]:
        stage = self._stages[copy.kind]
        with torch.cuda.device(self._device), torch.cuda.stream(stage.stream):
            stage.stream.wait_event(copy.event)
            for offset, piece in copy.pieces:
                for first in range(0, piece.numel(), CHUNK_BYTES):
                    stage.move(tier, copy.kind, offset + first, piece[first : first + CHUNK_BYTES])
                    yield


class _Stage:
    """A stream and a pinned buffer."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._buffer = _pinned(CHUNK_BYTES)

    def move(self, tier: Tier, kind: str, offset: int, piece: torch.Tensor) -> None:
        staged = self._buffer[: piece.numel()]
        if kind == OUT:
            staged.copy_(piece, non_blocking=True)
            self.stream.synchronize()
            tier.write(offset, staged.data_ptr(), piece.numel())
        else:
            tier.read(offset, staged.data_ptr(), piece.numel())
            piece.copy_(staged, non_blocking=True)
            self.stream.synchronize()


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)  # of a power of two nothing is wasted


class StagedCopyStreams(ThreadCopyStreams):
    """Background threads for a CUDA device and a tier that it cannot copy to directly: copies go through a buffer."""

    def __init__(self, tier: Tier, device: torch.device, shared: bool) -> None:
        self._device = device
        super().__init__(tier, StagedMove(device), shared)

    def submit(self, copy: Copy) -> None:
        copy.event = torch.cuda.current_stream(self._device).record_event()
        super().submit(copy)


# -- streams of a CUDA device --------------------------------------------------------------------------------


class CudaCopyStreams:
    """Copy streams that are CUDA streams, between a device and pinned host memory."""

    has_failed = False  # what a stream cannot do ends the device's context

    def __init__(self, tier: HostTier, device: torch.device, shared: bool) -> None:
        self._tier, self._device = tier, device
        out = torch.cuda.Stream(device)
        self._streams = {OUT: out, IN: out if shared else torch.cuda.Stream(device)}
        self._unfinished: list[Copy] = []
        self._process = os.getpid()
        self._is_closed = False
        self.trace: list[tuple[str, Any]] = []

    def submit(self, copy: Copy) -> None:
        """Issues a copy behind the work that the computing stream has now."""
        self.require_usable()
        computing = torch.cuda.current_stream(self._device)  # inside of the `with` it would be the other one
        stream = self._streams[copy.kind]
        stream.wait_stream(computing)
        for other in copy.after:
            stream.wait_event(other.event)
        with torch.cuda.stream(stream):
            for offset, piece in copy.pieces:
                self._move(copy.kind, offset, piece)
            copy.event = stream.record_event()
        copy.after = ()
        self.trace.append((copy.kind, copy.what))
        self._unfinished.append(copy)

    def _move(self, kind: str, offset: int, piece: torch.Tensor) -> None:
        first = 0
        for host in self._tier.spans(offset, piece.numel()):
            device = piece[first : first + host.numel()]
            first += host.numel()
            if kind == OUT:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)

    def wait(self, copy: Copy) -> None:
        """Order the copy before all computations from here on."""
        self.require_usable(closed=True)
        torch.cuda.current_stream(self._device).wait_event(copy.event)
        copy.pieces, copy.ended = (), True

    def drop(self, copy: Copy) -> None:
        """Nobody wants this copy any more; it keeps its tensors until it has ended."""

    def release(self) -> None:
        """Nobody wants the step's copies any more: gives memory back that only they hold, once they have ended."""
        with contextlib.suppress(RuntimeError):  # of a device that failed
            for stream in set(self._streams.values()):
                stream.synchronize()
        self._unfinished = []

    def unfinished(self) -> list[Copy]:
        """The copies that may not have ended."""
        self._unfinished = [copy for copy in self._unfinished if not copy.event.query()]
        return self._unfinished

    def restart(self) -> None:
        """Waits for copies that were not waited for, and clears the trace.

        Later computations run after the other copies anyway, and so do the next step's copies.
        """
        self.require_usable()
        if any(copy.pieces for copy in self.unfinished()):
            self.release()
        self._unfinished, self.trace = [], []

    def close(self) -> None:
        """Waits until nothing is copied."""
        if not self._is_closed and os.getpid() == self._process:
            self._is_closed = True
            self.release()

    def __del__(self) -> None:
        self.close()

    def require_usable(self, closed: bool = False) -> None:
        """Raises Unsupported in another process than the one that made the streams, and when they are closed."""
        _require(self._process, self._is_closed and not closed)


CopyStreams = ThreadCopyStreams | CudaCopyStreams


def copy_streams_for(tier: Tier, device: torch.device, shared: bool) -> CopyStreams:
    """The copy streams between a tier and a device."""
    if device.type == "cpu":
        return ThreadCopyStreams(tier, move_host, shared)
    if device.type != "cuda":
        raise Unsupported(f"offloading from {device} is not supported: tensors of the CPU and of CUDA devices are")
    return (
        CudaCopyStreams(tier, device, shared) if isinstance(tier, HostTier) else StagedCopyStreams(tier, device, shared)
    )
