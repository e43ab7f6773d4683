"""Solves a profile's chain, and counts what autograd holds of blocks' outputs outside of blocks.

Problem. What runs behind a block, outside of blocks, may have autograd save the block's output, or hand a view of it to
the next block. Then that stays from the block's first run to the backward of what runs behind it, whatever a schedule
does. Where the block does not save it itself, it is counted with what runs behind (`measure.py`). Where it does (a
block that ends with a ReLU), both have one tensor as long as the schedule keeps what the first run left, and counting
it twice would be too much by all of it. Once the schedule lets go of that and runs the block again, there are two.

So such outputs are counted once at first. If the schedule that is found lets go of one too early, that output is
counted *apart*, with what runs behind it and with the block, and the chain is solved again. An output that is counted
apart is counted at least as often as it is there, and one that is not is kept by the schedule as long as it is held: so
every answer keeps to its peak. The number of outputs apart only grows, so this ends, mostly at once. Where it ends
without an answer, within a budget for which there is one, the schedule of the least budget is taken.

In the same way, outputs that are resident to the end of the step, for other blocks read them or the caller holds them,
and that the block saves itself are counted once, as long as the schedule keeps what the first run left. They count from
the beginning of the step, so a block that runs only once takes as much less while it makes them.

What is held outside of blocks while the forward lasts, autocast's copies of parameters and outputs of blocks in a list,
is counted in the same way: with the stages that save it, until a schedule is found to let go of it
(`dependent_counts.py`).
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
    """What a solver says for one budget, and of which problem; `least_bytes` is the least budget with a schedule."""

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
        """Of the least budget's schedule; it may let go of less than was supposed."""
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
        """What was supposed, and what else a schedule needs; a stage counts early only if there is nothing else."""
        if solution.schedule is None:
            return counted
        ops = solution.schedule.ops
        extended = counted | supposed_by(ops, self._profile.stages)
        if extended.wanted != counted.wanted:  # a solver that may have others for nothing would run from those
            extended |= Counted(wanted=passing(self._profile.stages))
        if extended != counted:
            return extended
        beside = _beside(self._profile, counted)
        first = first_runs(self._counting(counted)[0], ops)[0] if beside else {}
        return counted | Counted(
            early=frozenset(stage for stage, size in beside.items() if first[stage] + size > budget)
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
    """What a chain, of a scope and with gradients as asked, must suppose for a schedule, and some outputs apart."""
    counted = supposed_by(ops, profile.stages) | Counted(apart)
    beside, performed = _beside(profile, counted), as_performed(ops, profile.refs)
    if not beside and performed == [(op, 0) for op in ops]:
        return counted
    problem = profile.chain(*asked, counted)
    first, last, peak = first_runs(problem, ops)
    most = max([peak, *(first[stage] + size for stage, size in beside.items())]) + excess_bytes(problem, ops, performed)
    return counted | Counted(late_bytes=most - last if most > peak else 0)


def _beside(profile: Profile, counted: Counted) -> dict[int, int]:
    """By stage: what is there when it first runs that the chain counts with the last stage, if with any."""
    uncounted = Lingering(profile.stages, counted).uncounted[:-1]
    return {stage: size for stage, size in enumerate(uncounted, 1) if size and stage not in counted.early}
