"""From a schedule with transfers to the list that a compiled step performs.

A generated graph starts transfers and waits for them between its calls. The list says where:

* What cannot be offloaded stays on the device: outputs, which their callers hold, and values that are not plain tensors
  of the device.
* The simulator starts a prefetch together with the computation before it where both fit. A graph makes one call after
  the other, so the prefetch comes before that computation.
* An operation "leave" waits until a value that was dropped is on the host; its memory is free only then. It comes where
  an operation needs the memory, and at the end of the forward, the earliest copy first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import cairn
import torch

from ..base._compat import size_hint

Op = tuple[str, int]


def without_transfers_of(staying: Set[int], kept: Set[int], ops: Iterable[Sequence[Any]]) -> list[Op]:
    """The list in which some values stay on the device instead of being offloaded.

    kept: those that must exist to the end of the step.
    """
    listed = [(str(op[0]), int(op[1])) for op in ops]
    stay = {v for name, v in listed if name == "offload" and v in staying}
    made: list[Op] = []
    for position, (name, v) in enumerate(listed):
        if v in stay and name == "drop":
            comes_by = _comes_by(listed[position + 1 :], v)
            if comes_by == "compute" or (comes_by == "" and v not in kept):
                made.append((name, v))
        elif v not in stay or name == "compute":
            made.append((name, v))
    return made


def is_plain(value: Any, device: torch.device) -> bool:
    """Whether a value is a tensor of a device that consists of a known number of bytes."""
    if not isinstance(value, torch.Tensor) or value.device != device or value.is_quantized:
        return False
    return value.layout is torch.strided and all(isinstance(size, int) for size in value.shape)


def _comes_by(ops: Iterable[Op], v: int) -> str:
    """The operation that makes the next device copy of a value; empty if none does."""
    return next((name for name, other in ops if other == v and name in ("prefetch", "compute")), "")


def look_of(value: torch.Tensor) -> tuple[list[int], list[int], torch.dtype, torch.device]:
    """Sizes, strides, type and device of a value."""
    return [*map(size_hint, value.shape)], [*map(size_hint, value.stride())], value.dtype, value.device


def moved_bytes(value: torch.Tensor) -> int:
    """What a copy of a value takes on the host: the bytes that the tensor spans."""
    shape, strides, *_ = look_of(value)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * value.element_size() if all(shape) else 0


def performed(ops: Iterable[Sequence[Any]], graph: cairn.Graph, budget_bytes: int, end: int) -> list[Op]:
    """The list with waits, prefetches where they start, and "fetch" for the last prefetch of a copy.

    After its last prefetch, a copy's place on the host is free. end: the node that ends the forward.
    """
    memory, listed = _Memory(graph, budget_bytes), [(str(op[0]), int(op[1])) for op in ops]
    for position, (name, v) in enumerate(listed):
        if name == "compute":
            memory.compute(v, everything_leaves=v == end)
        elif name == "offload":
            memory.offload(v)
        elif name == "drop":
            memory.drop(v)
        elif name == "prefetch":
            memory.prefetch(v, "prefetch" if _is_copied_again(listed[position + 1 :], v) else "fetch")
    return memory.made


class _Memory:
    """Device memory along a list, and the list as it is performed."""

    def __init__(self, graph: cairn.Graph, budget_bytes: int) -> None:
        self._nodes, self._budget = graph.nodes, budget_bytes
        self.made: list[Op] = []
        self._level = graph.fixed_bytes
        self._leaving: dict[int, int] = {}  # values that are being offloaded and not dropped: when that began
        self._dropped: dict[int, int] = {}  # values that are dropped and not known to be on the host: the same
        self._computation = -1  # where the last computation is in `made`
        self._beside = 0  # memory that is free while it runs
        self._since: set[int] = set()  # values that were dropped since it began

    def compute(self, v: int, everything_leaves: bool) -> None:
        if v in self._dropped:
            self._leave(v)
        size = self._nodes[v].bytes
        needed = size + max(0, self._nodes[v].workspace_bytes)
        self._make_room(self._budget + 1 if everything_leaves else needed)
        self._computation, self._since = len(self.made), set()
        self._beside = self._budget - self._in_use() - needed
        self._level += size
        self.made.append(("compute", v))

    def offload(self, v: int) -> None:
        self._leaving[v] = len(self.made)
        self._computation = -1  # transfers keep their order
        self.made.append(("offload", v))

    def drop(self, v: int) -> None:
        self._level -= self._nodes[v].bytes
        self._since.add(v)
        if v in self._leaving:
            self._dropped[v] = self._leaving.pop(v)

    def prefetch(self, v: int, name: str) -> None:
        size = self._nodes[v].bytes
        if self._computation >= 0 and size <= self._beside and v not in self._since and v not in self._dropped:
            self.made.insert(self._computation, (name, v))
            self._computation += 1
            self._beside -= size
        else:
            self._computation = -1
            if v in self._dropped:
                self._leave(v)
            self._make_room(size)
            self.made.append((name, v))
        self._level += size

    def _make_room(self, needed: int) -> None:
        while self._dropped and self._in_use() + needed > self._budget:
            self._leave(min(self._dropped, key=self._dropped.__getitem__))

    def _leave(self, v: int) -> None:
        del self._dropped[v]
        self.made.append(("leave", v))

    def _in_use(self) -> int:
        return self._level + sum(self._nodes[v].bytes for v in self._dropped)


def _is_copied_again(ops: Iterable[Op], v: int) -> bool:
    """Whether the same copy on the host is read once more."""
    return next((name == "prefetch" for name, other in ops if other == v and name in ("prefetch", "discard")), False)


class HostPlaces:
    """The slab of host memory as a step fills it: each copy at the first free place, until its last arrival."""

    def __init__(self) -> None:
        self._places: dict[int, range] = {}
        self.most_bytes = 0

    def take(self, v: int, size: int) -> None:
        """A copy begins."""
        end = 0
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if place.start - end >= size:
                break
            end = max(end, place.stop)
        self._places[v] = range(end, end + size)
        self.most_bytes = max(self.most_bytes, end + size)

    def free(self, v: int) -> None:
        """A copy is no longer needed."""
        del self._places[v]
