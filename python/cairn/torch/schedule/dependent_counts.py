"""Memory of a step whose stage in the chain depends on the schedule.

* The output of a block that the caller, or code after the block outside of blocks, holds as well (`chains.py`).
* Autocast's copies of parameters. A copy exists from the first stage that makes it to the end of the autocast region,
  at the end of the forward, and as long as a graph holds it. A stage that keeps its forward's saved tensors until its
  backward counts the copies among them, except those that an earlier stage holds as well. All other copies count with
  the last stage's forward, or with that of an *early* stage, if that gives a higher peak.
* Outputs of blocks that the caller holds, for example in a list, when later stages run forward. A stage that keeps its
  forward's output has them in that. Those of other stages count like autocast's copies.
* Operations that the executor performs later than the list says, and outputs that the caller holds while they are
  recomputed (`executed.py`). If they raise the peak, that counts with the last stage.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.stage_measure import StageMeasure
from ..base.stages import shown
from .peak_parts import Replay
from .program import BACKWARD, DROP, FORWARD_DROP, FORWARD_SAVE, FORWARDS, OUTPUT, SAVED

Op = Sequence[Any]
Kept = dict[int, tuple[int, int]]  # by stage: the option, and the stage whose backward it stays for


@dataclasses.dataclass(frozen=True)
class Counted:
    """Suppositions of a chain; a schedule for which they hold keeps to its peak. Stages count from 1."""

    apart: frozenset[int] = frozenset()  # stages whose output is counted with those who hold it, too
    repeated: frozenset[int] = frozenset()  # stages that make their resident outputs more than once
    again: frozenset[int] = frozenset()  # those of them that then hand on what they have made
    let_go: frozenset[tuple[int, str]] = frozenset()  # saved copies and outputs that are gone early, by stage and name
    early: frozenset[int] = frozenset()  # stages that count what else is there when they first run
    late_bytes: int = 0  # what more is taken elsewhere than by the last stage; counted there
    wanted: frozenset[int] = frozenset()  # stages whose outputs stay although no stage saves them: others run from them

    def __or__(self, other: Counted) -> Counted:
        return Counted(
            self.apart | other.apart,
            self.repeated | other.repeated,
            self.again | other.again,
            self.let_go | other.let_go,
            self.early | other.early,
            max(self.late_bytes, other.late_bytes),
            self.wanted | other.wanted,
        )


AS_PLAIN = Counted()  # all that stages save stays


def depends(stage: StageMeasure) -> bool:
    """Whether what a stage counts depends on the schedule."""
    held = stage.also_held_bytes or stage.pinned_bytes or stage.added_bytes
    return bool(held or stage.passing_bytes or stage.made_copies or stage.listed)


def all_let_go(stages: Sequence[StageMeasure]) -> Counted:
    """Suppositions for every schedule, without outputs that later code holds, or that are recomputed."""
    apart = frozenset(number for number, stage in enumerate(stages, 1) if stage.resident_saved_bytes)
    repeated = frozenset(number for number, stage in enumerate(stages, 1) if stage.pinned_bytes)
    early = frozenset(range(1, len(stages) + 1))
    let_go = _let_go({}, stages) | _listed(stages)
    return Counted(apart, repeated, let_go=let_go, early=early, wanted=passing(stages))


def passing(stages: Sequence[StageMeasure]) -> frozenset[int]:
    """The stages whose outputs go before the backward, unless the next stages are recomputed from them."""
    return frozenset(number for number, stage in enumerate(stages, 1) if stage.passing_bytes)


def supposed_by(ops: Sequence[Op], stages: Sequence[StageMeasure]) -> Counted:
    """Suppositions that hold for a schedule, without early stages."""
    kept = _kept(ops)
    always = {number for number, (_, until) in kept.items() if until == number}
    held = (
        number
        for number, stage in enumerate(stages, 1)
        if (stage.also_held_bytes and lets_go(ops, number)) or (stage.resident_saved_bytes and number not in always)
    )
    listed = (pair for pair in _listed(stages) if not _stays(ops, pair[0], stages[pair[0] - 1]))
    pinned = {number for number, stage in enumerate(stages, 1) if stage.pinned_bytes}
    repeated, again = (pinned & numbers for numbers in _repeated(ops))
    let_go, wanted = _let_go(kept, stages) | frozenset(listed), passing(stages) - _only_kept(ops)
    return Counted(frozenset(held), frozenset(repeated), frozenset(again), let_go, wanted=wanted)


def _only_kept(ops: Sequence[Op]) -> set[int]:
    """The stages that run once and keep everything, as the next one does, and of which nothing is moved."""
    runs = collections.Counter(op[1] for op in ops if op[0] in FORWARDS)
    keep = {op[1] for op in ops if op[0] == FORWARD_SAVE and runs[op[1]] == 1 and not any(op[2:])}
    keep -= {op[2] for op in ops if op[0] not in (*FORWARDS, BACKWARD)}
    return {number for number in keep if number + 1 in keep}


def _repeated(ops: Sequence[Op]) -> tuple[set[int], set[int]]:
    """The stages that run more than once, and those that are recomputed without saving."""
    run: set[int] = set()
    repeated: set[int] = set()
    again: set[int] = set()
    for op in ops:
        if op[0] not in FORWARDS:
            continue
        if op[1] in run:
            repeated.add(op[1])
            again |= {op[1]} if op[0] != FORWARD_SAVE else set()
        run.add(op[1])
    return repeated, again


def _listed(stages: Sequence[StageMeasure]) -> frozenset[tuple[int, str]]:
    """The stages of which outputs are listed, with their names."""
    names = {name for stage in stages for name in stage.listed}
    return frozenset(pair for pair in _named(stages, range(1, len(stages) + 1)) if pair[1] in names)


def _named(stages: Sequence[StageMeasure], numbers: Iterable[int]) -> frozenset[tuple[int, str]]:
    """Stages with their names."""
    return frozenset((number, shown(stages[number - 1].name, stages[number - 1].call)) for number in numbers)


def _stays(ops: Sequence[Op], number: int, stage: StageMeasure) -> bool:
    """Whether the first run of a stage leaves something that has its output, and that stays until the forward ends."""
    left, removed_at = _left(ops, number)
    if removed_at < next((position for position, op in enumerate(ops) if op[0] == BACKWARD), len(ops)):
        return False
    return left == SAVED or (left == OUTPUT and not stage.left_bytes)  # what is left is in no output of the chain


def _left(ops: Sequence[Op], number: int) -> tuple[str, int]:
    """The value that the first run of a stage leaves, and where it is removed: behind the last operation if never."""
    left = ""
    for position, op in enumerate(ops):
        if not left and op[0] in FORWARDS and op[1] == number:
            left = SAVED if op[0] == FORWARD_SAVE else OUTPUT
        elif (op[0] == DROP and (op[1], op[2]) == (left, number)) or (
            op[0] == FORWARD_DROP and left == OUTPUT and op[1] == number + 1
        ):
            return left, position
    return left, len(ops)


def _let_go(kept: Kept, stages: Sequence[StageMeasure]) -> frozenset[tuple[int, str]]:
    """The saved copies that are gone too early where stages keep these options until these stages' backwards: before
    the region ends; or, if several stages save one, before the stage's own backward.
    """
    users = collections.Counter(name for stage in stages for name in stage.copies_held())
    return frozenset(
        (number, name)
        for number, stage in enumerate(stages, 1)
        for name in stage.copies_held()
        if number not in kept
        or name not in stage.copies_held(kept[number][0])
        or (users[name] > 1 and kept[number][1] > number)
    )


def lets_go(ops: Sequence[Op], stage: int) -> bool:
    """Whether a schedule removes what the first run of a stage left before the backward of the next stage."""
    behind = (position for position, op in enumerate(ops) if op[0] == BACKWARD and op[1] == stage + 1)
    return _left(ops, stage)[1] < next(behind, len(ops))


def _kept(ops: Sequence[Op]) -> Kept:
    """The values of first runs that still exist when the forward ends, by stage."""
    kept: Kept = {}
    run: set[int] = set()
    done = 0  # the stage whose backward was the last
    for op in ops:
        if op[0] in FORWARDS and op[1] not in run:
            run.add(op[1])
            if op[0] == FORWARD_SAVE:
                kept[op[1]] = op[2] if len(op) > 2 else 0, op[1]
        elif op[0] == DROP and op[1] == SAVED and op[2] in kept and not done:
            del kept[op[2]]
        elif op[0] == DROP and op[1] == SAVED and op[2] in kept:
            kept[op[2]] = kept[op[2]][0], max(kept[op[2]][1], done)
        elif op[0] == BACKWARD:
            done = op[1]
    return kept


class Lingering:
    """Autocast's copies and listed outputs, for a chain that supposes that some of them are let go."""

    def __init__(self, stages: Sequence[StageMeasure], counted: Counted) -> None:
        let_go = counted.let_go | _named(stages, passing(stages) - counted.wanted)
        self.uncounted: list[int] = []  # for each stage: bytes there when it first runs that no saved bytes have
        self._shared: list[set[str]] = []  # what it saves and an earlier one holds
        self._bytes: dict[str, int] = {}
        held: set[str] = set()
        gone = {name for _, name in let_go}  # no parameter has the name of a stage
        for number, stage in enumerate(stages, 1):
            listed = sum(size for name, size in stage.listed.items() if name in gone)
            copies = sum(size for name, size in self._bytes.items() if name not in held)
            self.uncounted.append(copies + max(0, listed - stage.listed_slack_bytes))
            mine = {name for name in stage.copies_held() if (number, name) not in let_go}
            self._shared.append(mine & held)
            self._bytes.update(stage.made_copies)
            held |= mine

    def count(self, number: int, stage: StageMeasure, described: dict[str, Any], counted: Counted) -> None:
        """Counts them in a stage of a chain."""
        is_last = number == len(self.uncounted)
        late = counted.late_bytes if is_last else 0
        more = late + (self.uncounted[number - 1] if is_last or number in counted.early else 0)
        described["forward_only_workspace_bytes"] += more
        for index, option in enumerate(described["options"]):
            shared = sum(self._bytes[name] for name in self._shared[number - 1] & stage.copies_held(index))
            option["saved_bytes"] -= shared
            option["forward_workspace_bytes"] += shared + more
            option["backward_workspace_bytes"] += shared + late


def first_runs(problem: Mapping[str, Any], ops: Sequence[Op]) -> tuple[dict[int, int], int, int]:
    """The most memory while each stage first runs, while the last one's backward does, and at all."""
    replay, last, peak = Replay(problem), 0, 0
    first: dict[int, int] = {}
    for op in ops:
        there = replay.most_during(op)
        peak = max(peak, there)
        if op[0] in FORWARDS:
            first.setdefault(int(op[1]), there)
        elif op[0] == BACKWARD and op[1] == len(replay.stages):
            last = there
    return first, last, peak
