"""Streams of a CUDA device played by the CPU: what is done on a side stream happens as late as it may.

The computing stream works at once. A copy on a side stream waits in a queue until something that needs it is done: an
event of its stream is waited for, or the stream is synchronized. So what is missing in the order of streams shows, and
so does memory that goes back before a copy has ended: a queued copy holds no tensors, as a device does not. That a side
stream waits for what was computed so far cannot show in this way, and is asked for.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cairn.torch.base._compat import StorageRef
from torch import Tensor

_copy = Tensor.copy_


class Event:
    """A point in a stream's queue."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self._done = stream, False

    def happen(self) -> None:
        self._done = True

    def query(self) -> bool:
        return self._done

    def require(self) -> None:
        while not self._done:
            self.stream.queue.popleft()()


class Stream:
    """A side stream, or the one that computes."""

    def __init__(self, device: Any = None, computes: bool = False) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self._computes = computes
        self.follows = computes  # it has waited for the computing stream since its last submission ended

    def do(self, work: Callable[[], None]) -> None:
        if self._computes:
            work()
        else:
            self.queue.append(work)

    def record_event(self) -> Event:
        event = Event(self)
        self.do(event.happen)
        self.follows = self._computes
        return event

    def wait_event(self, event: Event) -> None:
        self.follows |= event.stream._computes
        self.do(event.require)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        while self.queue:
            self.queue.popleft()()


def _queued_copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    looks = [(StorageRef(t), t.storage_offset(), t.numel()) for t in (target, source)]
    del target, source

    def work() -> None:
        assert all(storage.alive() for storage, _, _ in looks), "memory was given back before its copy ended"
        ends = [
            torch.empty(0, dtype=torch.uint8).set_(ref.storage(), first, (count,), (1,)) for ref, first, count in looks
        ]
        _copy(*ends)

    return work


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts these streams in the place of CUDA's."""
    computing, here = Stream(computes=True), threading.local()

    def current(device: Any = None) -> Stream:
        return getattr(here, "stream", computing)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, here.stream = current(), stream
        try:
            yield
        finally:
            here.stream = before

    def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return _copy(target, source)
        assert current().follows, "a copy does not wait for what was computed before it"
        current().do(_queued_copy(target, source))
        return target

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(
        "cairn.torch.offloading.copy_streams._pinned", lambda count: torch.empty(count, dtype=torch.uint8)
    )
    monkeypatch.setattr(Tensor, "copy_", copy)
