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
class Assumptions:
    """What a chain's sizes assume about its schedule. A schedule for which this holds keeps to its predicted peak.

    Stages count from 1.

    Attributes
    ----------
    counted_twice
        Stages whose output counts with the stage and with the code that holds it.
    repeated
        Stages whose resident outputs are computed more than once.
    recomputed_unsaved
        Those of `repeated` that are recomputed without saving; the next stage reads the recomputed output.
    released_early
        Saved copies and outputs that the schedule frees before they end in plain training, by stage and name.
    early
        Stages whose first run counts the memory of `HeldInForward`.
    late_bytes
        By how much the peak elsewhere is above what the chain counts; the last stage counts it.
    read_by_recomputation
        Stages whose outputs stay, although no stage saves them, because later stages are recomputed from them.
    """

    counted_twice: frozenset[int] = frozenset()
    repeated: frozenset[int] = frozenset()
    recomputed_unsaved: frozenset[int] = frozenset()
    released_early: frozenset[tuple[int, str]] = frozenset()
    early: frozenset[int] = frozenset()
    late_bytes: int = 0
    read_by_recomputation: frozenset[int] = frozenset()

    def __or__(self, other: Assumptions) -> Assumptions:
        return Assumptions(
            self.counted_twice | other.counted_twice,
            self.repeated | other.repeated,
            self.recomputed_unsaved | other.recomputed_unsaved,
            self.released_early | other.released_early,
            self.early | other.early,
            max(self.late_bytes, other.late_bytes),
            self.read_by_recomputation | other.read_by_recomputation,
        )


NO_ASSUMPTIONS = Assumptions()  # every saved value stays until its backward


def depends(stage: StageMeasure) -> bool:
    """Whether the sizes of a stage depend on the schedule."""
    held = stage.also_held_bytes or stage.pinned_bytes or stage.added_bytes
    return bool(held or stage.passing_bytes or stage.made_copies or stage.listed)


def safe_assumptions(stages: Sequence[StageMeasure]) -> Assumptions:
    """Assumptions that hold for every schedule, except about outputs that later code holds or that are recomputed."""
    counted_twice = frozenset(number for number, stage in enumerate(stages, 1) if stage.resident_saved_bytes)
    repeated = frozenset(number for number, stage in enumerate(stages, 1) if stage.pinned_bytes)
    early = frozenset(range(1, len(stages) + 1))
    released_early = _copies_released_early({}, stages) | _listed_outputs(stages)
    return Assumptions(
        counted_twice, repeated, released_early=released_early, early=early, read_by_recomputation=passing(stages)
    )


def passing(stages: Sequence[StageMeasure]) -> frozenset[int]:
    """The stages whose outputs are freed before the backward, unless the next stages are recomputed from them."""
    return frozenset(number for number, stage in enumerate(stages, 1) if stage.passing_bytes)


def assumptions_of(ops: Sequence[Op], stages: Sequence[StageMeasure]) -> Assumptions:
    """The assumptions that hold for a schedule, `early` and `late_bytes` left empty."""
    kept = _kept(ops)
    always = {number for number, (_, until) in kept.items() if until == number}
    held = (
        number
        for number, stage in enumerate(stages, 1)
        if (stage.also_held_bytes and releases_early(ops, number))
        or (stage.resident_saved_bytes and number not in always)
    )
    listed = (pair for pair in _listed_outputs(stages) if not _stays_in_forward(ops, pair[0], stages[pair[0] - 1]))
    pinned = {number for number, stage in enumerate(stages, 1) if stage.pinned_bytes}
    repeated, recomputed_unsaved = (pinned & numbers for numbers in _repeated(ops))
    return Assumptions(
        frozenset(held),
        frozenset(repeated),
        frozenset(recomputed_unsaved),
        _copies_released_early(kept, stages) | frozenset(listed),
        read_by_recomputation=passing(stages) - _saved_with_next(ops),
    )


def _saved_with_next(ops: Sequence[Op]) -> set[int]:
    """The stages that run once and save everything, if the next stage does so too; none of their values is moved."""
    runs = collections.Counter(op[1] for op in ops if op[0] in FORWARDS)
    keep = {op[1] for op in ops if op[0] == FORWARD_SAVE and runs[op[1]] == 1 and not any(op[2:])}
    keep -= {op[2] for op in ops if op[0] not in (*FORWARDS, BACKWARD)}
    return {number for number in keep if number + 1 in keep}


def _repeated(ops: Sequence[Op]) -> tuple[set[int], set[int]]:
    """The stages that run more than once, and those that are recomputed without saving."""
    run: set[int] = set()
    repeated: set[int] = set()
    recomputed_unsaved: set[int] = set()
    for op in ops:
        if op[0] not in FORWARDS:
            continue
        if op[1] in run:
            repeated.add(op[1])
            recomputed_unsaved |= {op[1]} if op[0] != FORWARD_SAVE else set()
        run.add(op[1])
    return repeated, recomputed_unsaved


def _listed_outputs(stages: Sequence[StageMeasure]) -> frozenset[tuple[int, str]]:
    """The stages of which outputs are listed, with their names."""
    names = {name for stage in stages for name in stage.listed}
    return frozenset(pair for pair in _named(stages, range(1, len(stages) + 1)) if pair[1] in names)


def _named(stages: Sequence[StageMeasure], numbers: Iterable[int]) -> frozenset[tuple[int, str]]:
    """Stages with their names."""
    return frozenset((number, shown(stages[number - 1].name, stages[number - 1].call)) for number in numbers)


def _stays_in_forward(ops: Sequence[Op], number: int, stage: StageMeasure) -> bool:
    """Whether the first run of a stage stores a value that contains its output and stays until the forward ends."""
    left, removed_at = _first_result(ops, number)
    if removed_at < next((position for position, op in enumerate(ops) if op[0] == BACKWARD), len(ops)):
        return False
    return left == SAVED or (left == OUTPUT and not stage.left_bytes)  # `left_bytes` are in no output of the chain


def _first_result(ops: Sequence[Op], number: int) -> tuple[str, int]:
    """The value that the first run of a stage stores, and the position of its removal: after the last one if never."""
    left = ""
    for position, op in enumerate(ops):
        if not left and op[0] in FORWARDS and op[1] == number:
            left = SAVED if op[0] == FORWARD_SAVE else OUTPUT
        elif (op[0] == DROP and (op[1], op[2]) == (left, number)) or (
            op[0] == FORWARD_DROP and left == OUTPUT and op[1] == number + 1
        ):
            return left, position
    return left, len(ops)


def _copies_released_early(kept: Kept, stages: Sequence[StageMeasure]) -> frozenset[tuple[int, str]]:
    """The saved copies of parameters that a schedule frees too early.

    That is before the autocast region ends, or, if several stages save one copy, before the stage's own backward.
    kept: for each stage, the option that it keeps, and until which stage's backward.
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


def releases_early(ops: Sequence[Op], stage: int) -> bool:
    """Whether a schedule removes the value of a stage's first run before the backward of the next stage."""
    behind = (position for position, op in enumerate(ops) if op[0] == BACKWARD and op[1] == stage + 1)
    return _first_result(ops, stage)[1] < next(behind, len(ops))


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


class HeldInForward:
    """Memory held during the forward: autocast's copies and outputs in lists, under a chain's assumptions."""

    def __init__(self, stages: Sequence[StageMeasure], assumed: Assumptions) -> None:
        released_early = assumed.released_early | _named(stages, passing(stages) - assumed.read_by_recomputation)
        self.uncounted: list[int] = []  # for each stage: bytes there when it first runs that no saved bytes have
        self._shared: list[set[str]] = []  # what it saves and an earlier one holds
        self._bytes: dict[str, int] = {}
        held: set[str] = set()
        gone = {name for _, name in released_early}  # no parameter has the name of a stage
        for number, stage in enumerate(stages, 1):
            listed = sum(size for name, size in stage.listed.items() if name in gone)
            copies = sum(size for name, size in self._bytes.items() if name not in held)
            self.uncounted.append(copies + max(0, listed - stage.listed_slack_bytes))
            mine = {name for name in stage.copies_held() if (number, name) not in released_early}
            self._shared.append(mine & held)
            self._bytes.update(stage.made_copies)
            held |= mine

    def count(self, number: int, stage: StageMeasure, described: dict[str, Any], assumed: Assumptions) -> None:
        """Counts them in a stage of a chain."""
        is_last = number == len(self.uncounted)
        late = assumed.late_bytes if is_last else 0
        more = late + (self.uncounted[number - 1] if is_last or number in assumed.early else 0)
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
