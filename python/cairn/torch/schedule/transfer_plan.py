"""Makes a `TransferPlan` of a schedule with offloading: when transfers start, who waits for them, where copies lie.

The simulator starts operations in the order of the list. Computations and transfers run at the same time. The device
memory of a value is free when the value is dropped and its last copy to the host has ended. A training step computes in
the order of the list and copies in the background. It does what the simulator did if three things are known. All three
follow from the list and the sizes:

* *Starts.* The list may have a prefetch behind a computation though only the order keeps it from starting together with
  it. A step issues transfers between computations. So such a prefetch is moved before the computation, if both fit in
  the budget together.
* *Waits.* A value that is dropped while it is being offloaded takes device memory until its copy has ended. An
  operation waits for such copies, the earliest first, until there is room for it. It also waits for the offloads of
  values that it removes itself.
* *Places.* All host copies lie in one slab of host memory. A copy has its place there from its offload to its discard.
  All lifetimes are known beforehand, so each copy gets the lowest free place (first fit). The slab is as large as the
  places reach. Several orders of placing are tried, and the smallest slab is taken.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..base.memory import first_free
from .peak_parts import Replay
from .program import DISCARD, OFFLOAD, ON_VALUES, PREFETCH, Value

Op = Sequence[Any]

TRANSFERS = (OFFLOAD, PREFETCH, DISCARD)


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """A schedule with transfers, ready to run; see the top of this file.

    ops: the operations, each prefetch where it is issued.
    waits: by position, the position of an offload: it and all before it must have ended.
    places: by the position of an offload, the place of its copy in the slab.
    host_peak_bytes: most bytes on the host at once; slab_bytes is more where lifetimes leave gaps.
    """

    ops: tuple[Op, ...]
    waits: Mapping[int, int]
    places: Mapping[int, range]
    slab_bytes: int
    host_peak_bytes: int


def has_transfers(ops: Sequence[Op]) -> bool:
    """Whether the schedule offloads anything."""
    return any(op[0] == "offload" for op in ops)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that a schedule transfers, and how long the link is busy (the busier lane, if it has two)."""

    to_host_bytes: int
    to_device_bytes: int
    busy_ns: int


def traffic_of(chain: Mapping[str, Any], ops: Sequence[Op]) -> Traffic:
    """The traffic of a schedule of a chain with a machine."""
    replay, machine = Replay(chain), chain["machine"]
    totals, times = {"offload": 0, "prefetch": 0}, {"offload": 0, "prefetch": 0}
    rates = {"offload": machine["to_host_bytes_per_s"], "prefetch": machine["to_device_bytes_per_s"]}
    for op in ops:
        replay.run(op)
        if op[0] in totals:
            size = replay.value_bytes(op[1], op[2], replay.host[op[1], op[2]])
            totals[op[0]] += size
            times[op[0]] += machine["latency_ns"] + -(-size * 10**9 // rates[op[0]])
    busy = sum(times.values()) if machine["shared_link"] else max(times.values())
    return Traffic(totals["offload"], totals["prefetch"], busy)


def peak_with_transfers(chain: Mapping[str, Any], transfer_plan: TransferPlan) -> tuple[int, int, int]:
    """The position of the peak, its bytes, and those of them that are dropped and still being offloaded.

    A value that is dropped while it is being offloaded counts until an operation waits for its copy. So the peak is an
    upper bound, whatever the speed of the link.
    """
    memory, best = _Memory(chain, 0), (0, 0, 0)
    for position, op in enumerate(transfer_plan.ops):
        memory.perform(position, op, transfer_plan.waits.get(position, -1))
        if memory.most > best[1]:
            best = position, memory.most, memory.leaving_bytes
    return best


def transfer_plan_of(chain: Mapping[str, Any], ops: Sequence[Op], budget: int) -> TransferPlan:
    """The transfer plan of a schedule that the simulator has accepted under this budget."""
    moved = _early_prefetches(chain, [tuple(op) for op in ops], budget)
    places, peak = _places(chain, moved)
    slab = _slab_bytes(places)
    return TransferPlan(tuple(moved), _waits(chain, moved, budget), places, slab, peak)


# -- memory along the list -----------------------------------------------------------------------------------


class _Memory:
    """Device memory along a list. Values that are dropped while being offloaded count until an operation waits."""

    def __init__(self, chain: Mapping[str, Any], budget: int) -> None:
        self._replay, self.budget = Replay(chain), budget
        self._leaving: dict[Value, int] = {}  # values that are being offloaded: position of the offload
        self._dropped: dict[int, int] = {}  # bytes of those that are dropped, by the position of their offload
        self.most = 0  # peak while the last operation ran

    @property
    def leaving_bytes(self) -> int:
        """Bytes of values that are dropped and still being offloaded."""
        return sum(self._dropped.values())

    def perform(self, position: int, op: Op, waits_for: int | None = None) -> int | None:
        """Performs an operation, and returns the position of the last offload that it waits for.

        waits_for: that position, where it is known already.
        """
        removed = self.removed_by(op)
        before = self._replay.level() if op[0] != "drop" else 0  # a drop only frees memory
        sizes = {value: self._size(value) for value in removed}
        result, workspace = self._replay.run(op)
        if op[0] == "drop":
            for value in removed & self._leaving.keys():
                self._dropped[self._leaving[value]] = sizes[value]
        waits = [self._leaving[value] for value in removed if value in self._leaving and op[0] != "drop"]
        if op[0] == "offload":
            self._leaving[op[1], op[2]] = position
        for value in removed:
            self._leaving.pop(value, None)
        self.most = max(before, self._replay.level(), before + result + workspace)
        if waits_for is not None:
            self._dropped = {offload: size for offload, size in self._dropped.items() if offload > waits_for}
        elif op[0] not in ("drop", "offload", "discard"):
            waits += self._make_room()
        self.most += self.leaving_bytes
        return max(waits, default=None)

    def _size(self, value: Value) -> int:
        kind, stage = value
        return self._replay.value_bytes(kind, stage, self._replay.saved.get(stage, 0))

    def _make_room(self) -> Iterator[int]:
        for offload in sorted(self._dropped):
            if self.most + self.leaving_bytes <= self.budget:
                return
            del self._dropped[offload]
            yield offload

    def copied(self) -> _Memory:
        """A copy in the same state."""
        copied = copy.copy(self)
        copied._replay = self._replay.copied()
        copied._leaving, copied._dropped = dict(self._leaving), dict(self._dropped)
        return copied

    def may_prefetch(self, value: Value) -> bool:
        """Whether the value has a copy on the host, and none on the device."""
        replay, (kind, stage) = self._replay, value
        return value in replay.host and stage not in (replay.outputs if kind == "output" else replay.saved)

    def removed_by(self, op: Op) -> set[Value]:
        """The values whose device copies an operation removes."""
        if op[0] == "drop":
            return {(op[1], op[2])}
        if op[0] == "forward_drop":
            return {("output", op[1] - 1)}
        if op[0] == "backward":
            below = {("output", op[1] - 1)} if op[1] - 1 in self._replay.outputs else set()
            return {("saved", op[1]), *below}
        return set()


def _waits(chain: Mapping[str, Any], ops: Sequence[Op], budget: int) -> dict[int, int]:
    memory, waits = _Memory(chain, budget), {}
    for position, op in enumerate(ops):
        offload = memory.perform(position, op)
        if offload is not None:
            waits[position] = offload
    return waits


# -- starts --------------------------------------------------------------------------------------------------


def _early_prefetches(chain: Mapping[str, Any], ops: Sequence[Op], budget: int) -> list[Op]:
    """Moves each prefetch before the computation that precedes it, where both fit in the budget together."""
    moved: list[Op] = []
    computation = -1  # position of the last computation in `moved`
    before = _Memory(chain, budget)  # device memory at that position
    for op in ops:
        if op[0] == "prefetch" and computation >= 0 and _may_start_with(before, moved[computation:], op):
            before.perform(computation, op)
            moved.insert(computation, op)
            computation += 1
            continue
        moved.append(op)
        if op[0] not in ON_VALUES:
            for position in range(max(computation, 0), len(moved) - 1):
                before.perform(position, moved[position])
            computation = len(moved) - 1
    return moved


def _may_start_with(before: _Memory, ops: Sequence[Op], prefetch: Op) -> bool:
    """Whether a prefetch may start together with the first of the operations before it, a computation."""
    value = tuple(prefetch[1:])
    if any(op[0] in TRANSFERS or (op[0] == "drop" and tuple(op[1:]) == value) for op in ops[1:]):
        return False
    memory = before.copied()
    if value in memory.removed_by(ops[0]) or not memory.may_prefetch(value):
        return False
    waits = [memory.perform(0, prefetch), memory.perform(1, ops[0])]
    return waits == [None, None] and memory.most <= memory.budget


# -- places --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lifetime:
    """The lifetime of a copy on the host: two positions of the list."""

    begin: int
    end: int
    size: int


def _lifetimes(chain: Mapping[str, Any], ops: Sequence[Op]) -> list[_Lifetime]:
    replay, begun, lifetimes = Replay(chain), {}, []
    for position, op in enumerate(ops):
        replay.run(op)
        if op[0] == "offload":
            value = (op[1], op[2])
            begun[value] = position, replay.value_bytes(*value, replay.host[value])
        elif op[0] == "discard":
            begin, size = begun.pop((op[1], op[2]))
            lifetimes.append(_Lifetime(begin, position, size))
    lifetimes += [_Lifetime(begin, len(ops), size) for begin, size in begun.values()]
    return sorted(lifetimes, key=lambda lifetime: lifetime.begin)


def _places(chain: Mapping[str, Any], ops: Sequence[Op]) -> tuple[dict[int, range], int]:
    """Places by the position of the offload, and the most bytes on the host at once."""
    lifetimes = _lifetimes(chain, ops)
    peak = max(
        (sum(s.size for s in lifetimes if s.begin <= lifetime.begin < s.end) for lifetime in lifetimes), default=0
    )
    orders: list[Callable[[_Lifetime], Any]] = [
        lambda lifetime: lifetime.begin,
        lambda lifetime: (lifetime.begin - lifetime.end, lifetime.begin),
        lambda lifetime: (-lifetime.size, lifetime.begin),
        lambda lifetime: (-lifetime.end, lifetime.begin),
    ]
    placements = (_first_fit(sorted(lifetimes, key=order)) for order in orders)
    return min(placements, key=_slab_bytes), peak


def _slab_bytes(places: Mapping[int, range]) -> int:
    return max((place.stop for place in places.values()), default=0)


def _first_fit(lifetimes: Sequence[_Lifetime]) -> dict[int, range]:
    """The place of each copy: the first range that is free during its lifetime."""
    placed: list[tuple[_Lifetime, range]] = []
    for lifetime in lifetimes:
        used = (place for other, place in placed if other.begin < lifetime.end and lifetime.begin < other.end)
        offset = first_free(used, lifetime.size)
        placed.append((lifetime, range(offset, offset + lifetime.size)))
    return {lifetime.begin: place for lifetime, place in placed}
