"""From a schedule with transfers to the list of operations that a compiled step performs.

A generated graph starts transfers and waits for them between its calls. The list says where:

* Some values stay on the device: outputs, which their callers hold, and values that cannot be copied as bytes.
* The simulator starts a prefetch together with the computation before it if both fit. A graph makes one call after the
  other, so the prefetch comes before that computation.
* An operation "wait" waits until a dropped value is on the host. Its device memory is free only then. It comes where
  an operation needs that memory, and at the end of the forward. The earliest copy is awaited first.
* An operation "last_prefetch" is the last prefetch of a copy. The copy's host memory is free afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import cairn
import torch

from ..base._compat import size_hint
from ..base.memory import first_free

Op = tuple[str, int]


def without_transfers_of(not_offloaded: Set[int], kept: Set[int], ops: Iterable[Sequence[Any]]) -> list[Op]:
    """The operations of a schedule without the transfers of some values, which stay on the device instead.

    not_offloaded: these values. kept: values that must be on the device at the end of the step.
    """
    listed = [(str(op[0]), int(op[1])) for op in ops]
    kept_on_device = {v for name, v in listed if name == "offload" and v in not_offloaded}
    remaining: list[Op] = []
    for position, (name, v) in enumerate(listed):
        if v in kept_on_device and name == "drop":
            next_copy = _next_copy(listed[position + 1 :], v)
            if next_copy == "compute" or (next_copy == "" and v not in kept):
                remaining.append((name, v))
        elif v not in kept_on_device or name == "compute":
            remaining.append((name, v))
    return remaining


def is_plain(value: Any, device: torch.device) -> bool:
    """Whether a value is a strided tensor on a device with static sizes: one that can be copied as bytes."""
    if not isinstance(value, torch.Tensor) or value.device != device or value.is_quantized:
        return False
    return value.layout is torch.strided and all(isinstance(size, int) for size in value.shape)


def _next_copy(ops: Iterable[Op], v: int) -> str:
    """The name of the operation that makes the next device copy of a value; empty if none does."""
    return next((name for name, other in ops if other == v and name in ("prefetch", "compute")), "")


def layout_of(value: torch.Tensor) -> tuple[list[int], list[int], torch.dtype, torch.device]:
    """Sizes, strides, dtype and device of a value."""
    return [*map(size_hint, value.shape)], [*map(size_hint, value.stride())], value.dtype, value.device


def moved_bytes(value: torch.Tensor) -> int:
    """Host memory that a copy of a value takes: the bytes from the tensor's first element to its last."""
    return spanned_elements(value) * value.element_size()


def spanned_elements(value: torch.Tensor) -> int:
    """The number of elements in memory from the tensor's first one to its last one."""
    shape, strides, *_ = layout_of(value)
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0


def performed(ops: Iterable[Sequence[Any]], graph: cairn.Graph, budget_bytes: int, end: int) -> list[Op]:
    """The operations of a schedule as a graph performs them: with "wait" and "last_prefetch", see the top of this file.

    end: the node that ends the forward.
    """
    memory, listed = _DeviceMemory(graph, budget_bytes), [(str(op[0]), int(op[1])) for op in ops]
    for position, (name, v) in enumerate(listed):
        if name == "compute":
            memory.compute(v, waits_for_all=v == end)
        elif name == "offload":
            memory.offload(v)
        elif name == "drop":
            memory.drop(v)
        elif name == "prefetch":
            memory.prefetch(v, "prefetch" if _is_copied_again(listed[position + 1 :], v) else "last_prefetch")
    return memory.ops


class _DeviceMemory:
    """Follows device memory along the operations of a schedule, and writes the list `ops` that is performed."""

    def __init__(self, graph: cairn.Graph, budget_bytes: int) -> None:
        self._nodes, self._budget = graph.nodes, budget_bytes
        self.ops: list[Op] = []
        self._level = graph.fixed_bytes
        self._offloading: dict[int, int] = {}  # values that are being offloaded, not yet dropped: position in `ops`
        self._dropped: dict[int, int] = {}  # dropped values that may not be on the host yet: the same
        self._computation = -1  # position of the latest computation in `ops`; -1: a transfer came after it
        self._free_meanwhile = 0  # bytes that are free while it runs
        self._since: set[int] = set()  # values dropped since it began

    def compute(self, v: int, waits_for_all: bool) -> None:
        if v in self._dropped:
            self._wait_for(v)
        size = self._nodes[v].bytes
        needed = size + max(0, self._nodes[v].workspace_bytes)
        self._make_room(self._budget + 1 if waits_for_all else needed)
        self._computation, self._since = len(self.ops), set()
        self._free_meanwhile = self._budget - self._in_use() - needed
        self._level += size
        self.ops.append(("compute", v))

    def offload(self, v: int) -> None:
        self._offloading[v] = len(self.ops)
        self._computation = -1  # transfers keep their order
        self.ops.append(("offload", v))

    def drop(self, v: int) -> None:
        self._level -= self._nodes[v].bytes
        self._since.add(v)
        if v in self._offloading:
            self._dropped[v] = self._offloading.pop(v)

    def prefetch(self, v: int, name: str) -> None:
        size = self._nodes[v].bytes
        if self._computation >= 0 and size <= self._free_meanwhile and v not in self._since and v not in self._dropped:
            self.ops.insert(self._computation, (name, v))
            self._computation += 1
            self._free_meanwhile -= size
        else:
            self._computation = -1
            if v in self._dropped:
                self._wait_for(v)
            self._make_room(size)
            self.ops.append((name, v))
        self._level += size

    def _make_room(self, needed: int) -> None:
        while self._dropped and self._in_use() + needed > self._budget:
            self._wait_for(min(self._dropped, key=self._dropped.__getitem__))

    def _wait_for(self, v: int) -> None:
        del self._dropped[v]
        self.ops.append(("wait", v))

    def _in_use(self) -> int:
        return self._level + sum(self._nodes[v].bytes for v in self._dropped)


def _is_copied_again(ops: Iterable[Op], v: int) -> bool:
    """Whether a later prefetch reads the same copy on the host."""
    return next((name == "prefetch" for name, other in ops if other == v and name in ("prefetch", "discard")), False)


class HostSlab:
    """The slab of host memory during a step. Each copy takes the first free range, until its last prefetch has arrived.

    most_bytes: the size that the slab needs.
    """

    def __init__(self) -> None:
        self._used: dict[int, range] = {}
        self.most_bytes = 0

    def take(self, v: int, size: int) -> None:
        """Take the first free range of `size` bytes for the copy of a value."""
        start = first_free(self._used.values(), size)
        self._used[v] = range(start, start + size)
        self.most_bytes = max(self.most_bytes, start + size)

    def free(self, v: int) -> None:
        """Free the range of a value's copy."""
        del self._used[v]
