"""Solves a profile's chain, and counts what autograd holds of blocks' outputs outside of blocks.

Problem. Code after a block, outside of blocks, may save the block's output for the backward, or pass a view of it to
the next block. The output then stays from the block's forward to the backward of that code, whatever a schedule does.
If the block does not save its output itself, it counts with that code (`measure.py`). If it does (a block that ends
with a ReLU), both share one tensor as long as the schedule keeps the forward's, and counting it twice would be wrong.
Once the schedule drops it and recomputes the block, there are two tensors.

So such outputs count once at first. If the resulting schedule drops one too early, that output is counted *apart*, with
the code after it and with the block, and the chain is solved again. An output counted apart counts at least as often as
it exists, and the schedule keeps every other one as long as it is held, so every answer keeps to its peak. The number
of outputs apart only grows, so this ends, mostly at once. If it ends without an answer, although the budget allows
one, the schedule of the least budget is used.

Outputs that are resident to the end of the step, because other blocks read them or the caller holds them, are treated
in the same way: if the block saves them itself, they count once, as long as the schedule keeps the forward's. They
count from the beginning of the step, so a block that runs only once counts that much less while it makes them.

Memory held outside of blocks during the forward (autocast's copies of parameters, outputs of blocks in a list) is
treated in the same way: it counts with the stages that save it, until a schedule drops it (`dependent_counts.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import cairn

from ..schedule.dependent_counts import AS_PLAIN, Counted, Lingering, depends, first_runs, passing, supposed_by
from ..schedule.executed import as_performed, excess_bytes
from .step_profile import Profile

Op = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The solution for one budget, and its problem; `least_bytes` is the least budget with a schedule."""

    counted: Counted
    problem: Mapping[str, Any]
    solution: cairn.Solution
    least_bytes: int | None


@dataclasses.dataclass(frozen=True)
class _Least:
    """The least budget with a schedule, and what a solver says for it."""

    bytes: int | None
    counted: Counted
    solution: cairn.Solution | None = None


class Chains:
    """Solves a profile's chain until what it supposes is true of the schedule."""

    def __init__(self, profile: Profile, scope: str, gradients: str, solver: str, options: Mapping[str, Any]) -> None:
        self._profile, self._asked = profile, (scope, gradients)
        self._options = {"solver": solver, **options}
        self._depends = any(map(depends, profile.stages))
        self._made: dict[Counted, tuple[Mapping[str, Any], cairn.Chain]] = {}
        self.problem, self.chain = self._counting(AS_PLAIN)

    def _counting(self, counted: Counted) -> tuple[Mapping[str, Any], cairn.Chain]:
        """The problem that supposes this."""
        if counted not in self._made:
            problem = self._profile.chain(*self._asked, counted)
            self._made[counted] = problem, cairn.Chain.from_json(json.dumps(problem))
        return self._made[counted]

    def solved(self, budgets: Sequence[int]) -> list[Answer]:
        """An answer for each budget."""
        solutions = cairn.solve_many(self.chain, budgets, **self._options) if budgets else []
        return [self._settled(budget, solution) for budget, solution in zip(budgets, solutions, strict=True)]

    @property
    def least_bytes(self) -> int | None:
        """The least budget with a schedule."""
        return self._least.bytes if self._depends else cairn.limits(self.chain, **self._options).least_bytes

    @functools.cached_property
    def _least(self) -> _Least:
        counted = AS_PLAIN
        while True:
            chain = self._counting(counted)[1]
            size = cairn.limits(chain, **self._options).least_bytes
            if size is None:
                return _Least(None, counted)
            solution = cairn.solve(chain, size, **self._options)
            extended = self._more(counted, solution, size)
            if extended == counted:
                return _Least(self._peak(counted, solution, size), counted, solution)
            counted = extended

    def _peak(self, counted: Counted, solution: cairn.Solution, least_bytes: int) -> int:
        """The answer of the least budget's schedule, which may drop less than was supposed."""
        exact, solution = self._exact(counted, solution)
        if solution.schedule is None or exact == counted:
            return least_bytes
        return int(cairn.simulate(self._counting(exact)[1], solution.schedule, None).peak_bytes or 0)

    def _settled(self, budget: int, solution: cairn.Solution) -> Answer:
        """The first answer that is as was supposed."""
        if not self._depends:
            return Answer(AS_PLAIN, self.problem, solution, solution.least_bytes)
        counted, least = AS_PLAIN, self._least
        while True:
            if solution.schedule is None and least.solution is not None and (least.bytes or 0) <= budget:
                counted, solution = least.counted, least.solution
            extended = self._more(counted, solution, budget)
            if extended == counted:
                counted, solution = self._exact(counted, solution)
                return Answer(counted, self._counting(counted)[0], solution, least.bytes)
            counted = extended
            solution = cairn.solve(self._counting(counted)[1], budget, **self._options)

    def _more(self, counted: Counted, solution: cairn.Solution, budget: int) -> Counted:
        """The suppositions, and those that a schedule needs in addition; stages count early only if there are none."""
        if solution.schedule is None:
            return counted
        ops = solution.schedule.ops
        extended = counted | supposed_by(ops, self._profile.stages)
        if extended.wanted != counted.wanted:  # a solver that may have others for nothing would run from those
            extended |= Counted(wanted=passing(self._profile.stages))
        if extended != counted:
            return extended
        lingering = _lingering(self._profile, counted)
        first = first_runs(self._counting(counted)[0], ops)[0] if lingering else {}
        return counted | Counted(
            early=frozenset(stage for stage, size in lingering.items() if first[stage] + size > budget)
        )

    def _exact(self, counted: Counted, solution: cairn.Solution) -> tuple[Counted, cairn.Solution]:
        """The solution as one of the problem that supposes no more than what is true of its schedule."""
        if solution.schedule is None:
            return counted, solution
        ops = solution.schedule.ops
        exact = counted_for(self._profile, self._asked, ops, counted.apart)
        schedule = cairn.Schedule.from_ops(self._counting(exact)[1], ops)
        return exact, dataclasses.replace(solution, schedule=schedule)


def counted_for(profile: Profile, asked: tuple[str, str], ops: Sequence[Op], apart: frozenset[int]) -> Counted:
    """The suppositions of a chain for a schedule, with some outputs apart."""
    counted = supposed_by(ops, profile.stages) | Counted(apart)
    lingering, performed = _lingering(profile, counted), as_performed(ops, profile.refs)
    if not lingering and performed == [(op, 0) for op in ops]:
        return counted
    problem = profile.chain(*asked, counted)
    first, last, peak = first_runs(problem, ops)
    most = max([peak, *(first[stage] + size for stage, size in lingering.items())]) + excess_bytes(
        problem, ops, performed
    )
    return counted | Counted(late_bytes=most - last if most > peak else 0)


def _lingering(profile: Profile, counted: Counted) -> dict[int, int]:
    """By stage: bytes that exist when it first runs, but that the chain counts with the last stage or not at all."""
    uncounted = Lingering(profile.stages, counted).uncounted[:-1]
    return {stage: size for stage, size in enumerate(uncounted, 1) if size and stage not in counted.early}
