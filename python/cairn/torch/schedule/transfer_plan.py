"""When the transfers of a schedule start, what waits for them, and where on the host their copies lie.

In the simulator, operations start in the order of the list, computations and copies run side by side, and memory comes
back when the last copy out of it has ended. A process that computes in the order of the list and copies in the
background does the same if three things are known, which follow from the list and the sizes:

* *Starts.* A prefetch that the list has behind a computation may start with it, for nothing but the order holds it
  back. The process issues transfers between computations, so such a prefetch is moved before the computation, where
  both fit in the budget together.
* *Waits.* A copy that is dropped while it travels is still there until it has left. An operation waits for as many of
  these, the earliest first, as it takes to make room for it; and for the copies of what it removes itself.
* *Places.* A copy on the host has a place in one slab from its offload to its discard: the lowest free one. All
  lifetimes are known, so the slab is as large as these places reach; of several orders of placing, the best counts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .peak_parts import Replay
from .program import DISCARD, OFFLOAD, ON_VALUES, PREFETCH, Value

Op = Sequence[Any]

TRANSFERS = (OFFLOAD, PREFETCH, DISCARD)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a copy lies in the slab."""

    offset: int
    size: int

    def overlaps(self, other: Place) -> bool:
        """Whether a byte belongs to both."""
        return self.offset < other.offset + other.size and other.offset < self.offset + self.size


@dataclasses.dataclass(frozen=True)
class Itinerary:
    """A list of operations with transfers; see the top of this file.

    ops: the list, prefetches where they are issued.
    waits: by position, the position of the last offload that must have left the device before.
    places: by the position of an offload.
    host_peak_bytes: most bytes on the host at once; slab_bytes is more where lifetimes leave gaps.
    """

    ops: tuple[Op, ...]
    waits: Mapping[int, int]
    places: Mapping[int, Place]
    slab_bytes: int
    host_peak_bytes: int


def has_transfers(ops: Sequence[Op]) -> bool:
    """Whether anything travels."""
    return any(op[0] == "offload" for op in ops)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a list's transfers move, and how long the link is busy with it (the busier of two lanes)."""

    to_host_bytes: int
    to_device_bytes: int
    busy_ns: int


def traffic_of(chain: Mapping[str, Any], ops: Sequence[Op]) -> Traffic:
    """Of a chain with a machine."""
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


def peak_with_transfers(chain: Mapping[str, Any], itinerary: Itinerary) -> tuple[int, int, int]:
    """Where the most memory is taken, how much, and how much of it is on its way out.

    Copies that are dropped while they travel count until somebody waits for them: it cannot be more than this.
    """
    memory, best = _Memory(chain, 0), (0, 0, 0)
    for position, op in enumerate(itinerary.ops):
        memory.perform(position, op, itinerary.waits.get(position, -1))
        if memory.most > best[1]:
            best = position, memory.most, memory.leaving_bytes
    return best


def itinerary_of(chain: Mapping[str, Any], ops: Sequence[Op], budget: int) -> Itinerary:
    """What a process has to know to carry out a list that the simulator has accepted under this budget."""
    moved = _early_prefetches(chain, [tuple(op) for op in ops], budget)
    places, peak = _places(chain, moved)
    slab = max((place.offset + place.size for place in places.values()), default=0)
    return Itinerary(tuple(moved), _waits(chain, moved, budget), places, slab, peak)


# -- memory along the list -----------------------------------------------------------------------------------


class _Memory:
    """What is on the device along a list, copies on their way out included until somebody waits for them."""

    def __init__(self, chain: Mapping[str, Any], budget: int) -> None:
        self._replay, self.budget = Replay(chain), budget
        self._leaving: dict[Value, int] = {}  # copies that are being offloaded: by which operation
        self._dropped: dict[int, int] = {}  # bytes of those that are dropped, by their offload
        self.most = 0  # while the last operation ran

    @property
    def leaving_bytes(self) -> int:
        """What was dropped while it was on its way out, and is there still."""
        return sum(self._dropped.values())

    def perform(self, position: int, op: Op, waits_for: int | None = None) -> int | None:
        """Performs an operation; returns the offload that it waits for, unless that is given."""
        removed = self.removed_by(op)
        before = self._replay.level() if op[0] != "drop" else 0  # what leaves takes no more than it did
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
        """Another one, in the same state."""
        made = copy.copy(self)
        made._replay = self._replay.copied()
        made._leaving, made._dropped = dict(self._leaving), dict(self._dropped)
        return made

    def may_prefetch(self, value: Value) -> bool:
        """Whether there is a copy on the host, and none on the device."""
        replay, (kind, stage) = self._replay, value
        return value in replay.host and stage not in (replay.outputs if kind == "output" else replay.saved)

    def removed_by(self, op: Op) -> set[Value]:
        """The copies on the device that an operation removes."""
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
    """Moves prefetches before the computation behind which they stand, where the two fit in the budget together."""
    moved: list[Op] = []
    computation = -1  # where the last one stands in `moved`
    before = _Memory(chain, budget)  # as it is there
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
    """Whether a prefetch behind these operations may start with the first of them, a computation."""
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
class _Stay:
    """A copy on the host, between two positions of the list."""

    begin: int
    end: int
    size: int


def _stays(chain: Mapping[str, Any], ops: Sequence[Op]) -> list[_Stay]:
    replay, begun, stays = Replay(chain), {}, []
    for position, op in enumerate(ops):
        replay.run(op)
        if op[0] == "offload":
            value = (op[1], op[2])
            begun[value] = position, replay.value_bytes(*value, replay.host[value])
        elif op[0] == "discard":
            begin, size = begun.pop((op[1], op[2]))
            stays.append(_Stay(begin, position, size))
    stays += [_Stay(begin, len(ops), size) for begin, size in begun.values()]
    return sorted(stays, key=lambda stay: stay.begin)


def _places(chain: Mapping[str, Any], ops: Sequence[Op]) -> tuple[dict[int, Place], int]:
    """Places by offload, and the most bytes at once."""
    stays = _stays(chain, ops)
    peak = max((sum(s.size for s in stays if s.begin <= stay.begin < s.end) for stay in stays), default=0)
    orders: list[Callable[[_Stay], Any]] = [
        lambda stay: stay.begin,
        lambda stay: (stay.begin - stay.end, stay.begin),
        lambda stay: (-stay.size, stay.begin),
        lambda stay: (-stay.end, stay.begin),
    ]
    found = (_first_fit(sorted(stays, key=order)) for order in orders)
    return min(found, key=lambda places: max((p.offset + p.size for p in places.values()), default=0)), peak


def _first_fit(stays: Sequence[_Stay]) -> dict[int, Place]:
    placed: list[tuple[_Stay, Place]] = []
    for stay in stays:
        taken = sorted(
            (place for other, place in placed if other.begin < stay.end and stay.begin < other.end),
            key=lambda place: place.offset,
        )
        offset = 0
        for place in taken:
            if offset + stay.size <= place.offset:
                break
            offset = max(offset, place.offset + place.size)
        placed.append((stay, Place(offset, stay.size)))
    return {stay.begin: place for stay, place in placed}
