"""Solves a profile's chain, and counts what autograd holds of blocks' outputs outside of blocks.

Problem. Code after a block, outside of blocks, may save the block's output for the backward, or pass a view of it to
the next block. The output then stays from the block's forward to the backward of that code, whatever a schedule does.
If the block does not save its output itself, it counts with that code (`measure.py`). If it does (a block that ends
with a ReLU), both share one tensor as long as the schedule keeps the forward's, and counting it twice would be wrong.
Once the schedule drops it and recomputes the block, there are two tensors.

So such outputs count once at first. If the resulting schedule drops one too early, that output is counted *twice*, with
the code after it and with the block, and the chain is solved again. An output counted twice counts at least as often as
it exists, and the schedule keeps every other one as long as it is held, so every answer keeps to its peak. The number
of outputs counted twice only grows, so this ends, mostly at once. If it ends without an answer, although the budget
allows one, the schedule of the least budget is used.

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

from ..schedule.dependent_counts import (
    NO_ASSUMPTIONS,
    Assumptions,
    HeldInForward,
    assumptions_of,
    depends,
    first_runs,
    passing,
)
from ..schedule.executed import as_performed, excess_bytes
from .step_profile import Profile

Op = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The solution for one budget, and its problem; `least_bytes` is the least budget with a schedule."""

    assumed: Assumptions
    problem: Mapping[str, Any]
    solution: cairn.Solution
    least_bytes: int | None


@dataclasses.dataclass(frozen=True)
class _Least:
    """The least budget with a schedule, its assumptions and solution."""

    bytes: int | None
    assumed: Assumptions
    solution: cairn.Solution | None = None


class Chains:
    """Solves a profile's chain again until its assumptions hold for the schedule."""

    def __init__(self, profile: Profile, scope: str, gradients: str, solver: str, options: Mapping[str, Any]) -> None:
        self._profile, self._scope_and_gradients = profile, (scope, gradients)
        self._options = {"solver": solver, **options}
        self._depends = any(map(depends, profile.stages))
        self._made: dict[Assumptions, tuple[Mapping[str, Any], cairn.Chain]] = {}
        self.problem, self.chain = self._problem_under(NO_ASSUMPTIONS)

    def _problem_under(self, assumed: Assumptions) -> tuple[Mapping[str, Any], cairn.Chain]:
        """The problem under these assumptions."""
        if assumed not in self._made:
            problem = self._profile.chain(*self._scope_and_gradients, assumed)
            self._made[assumed] = problem, cairn.Chain.from_json(json.dumps(problem))
        return self._made[assumed]

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
        assumed = NO_ASSUMPTIONS
        while True:
            chain = self._problem_under(assumed)[1]
            size = cairn.limits(chain, **self._options).least_bytes
            if size is None:
                return _Least(None, assumed)
            solution = cairn.solve(chain, size, **self._options)
            extended = self._more(assumed, solution, size)
            if extended == assumed:
                return _Least(self._peak(assumed, solution, size), assumed, solution)
            assumed = extended

    def _peak(self, assumed: Assumptions, solution: cairn.Solution, least_bytes: int) -> int:
        """The peak of the least budget's schedule, which may drop less than was assumed."""
        exact, solution = self._exact(assumed, solution)
        if solution.schedule is None or exact == assumed:
            return least_bytes
        return int(cairn.simulate(self._problem_under(exact)[1], solution.schedule, None).peak_bytes or 0)

    def _settled(self, budget: int, solution: cairn.Solution) -> Answer:
        """The first answer for whose schedule the assumptions hold."""
        if not self._depends:
            return Answer(NO_ASSUMPTIONS, self.problem, solution, solution.least_bytes)
        assumed, least = NO_ASSUMPTIONS, self._least
        while True:
            if solution.schedule is None and least.solution is not None and (least.bytes or 0) <= budget:
                assumed, solution = least.assumed, least.solution
            extended = self._more(assumed, solution, budget)
            if extended == assumed:
                assumed, solution = self._exact(assumed, solution)
                return Answer(assumed, self._problem_under(assumed)[0], solution, least.bytes)
            assumed = extended
            solution = cairn.solve(self._problem_under(assumed)[1], budget, **self._options)

    def _more(self, assumed: Assumptions, solution: cairn.Solution, budget: int) -> Assumptions:
        """The assumptions with those that the schedule needs; `early` stages are added only if it needs no others."""
        if solution.schedule is None:
            return assumed
        ops = solution.schedule.ops
        extended = assumed | assumptions_of(ops, self._profile.stages)
        if extended.read_by_recomputation != assumed.read_by_recomputation:
            # All at once: the solver would recompute from the outputs that still cost nothing.
            extended |= Assumptions(read_by_recomputation=passing(self._profile.stages))
        if extended != assumed:
            return extended
        lingering = _lingering(self._profile, assumed)
        first = first_runs(self._problem_under(assumed)[0], ops)[0] if lingering else {}
        return assumed | Assumptions(
            early=frozenset(stage for stage, size in lingering.items() if first[stage] + size > budget)
        )

    def _exact(self, assumed: Assumptions, solution: cairn.Solution) -> tuple[Assumptions, cairn.Solution]:
        """The solution, for the problem whose assumptions are exactly those that hold for its schedule."""
        if solution.schedule is None:
            return assumed, solution
        ops = solution.schedule.ops
        exact = assumptions_for(self._profile, self._scope_and_gradients, ops, assumed.counted_twice)
        schedule = cairn.Schedule.from_ops(self._problem_under(exact)[1], ops)
        return exact, dataclasses.replace(solution, schedule=schedule)


def assumptions_for(
    profile: Profile, scope_and_gradients: tuple[str, str], ops: Sequence[Op], counted_twice: frozenset[int]
) -> Assumptions:
    """The assumptions that hold for a schedule, with some outputs counted twice."""
    assumed = assumptions_of(ops, profile.stages) | Assumptions(counted_twice)
    lingering, performed = _lingering(profile, assumed), as_performed(ops, profile.refs)
    if not lingering and performed == [(op, 0) for op in ops]:
        return assumed
    problem = profile.chain(*scope_and_gradients, assumed)
    first, last, peak = first_runs(problem, ops)
    most = max([peak, *(first[stage] + size for stage, size in lingering.items())]) + excess_bytes(
        problem, ops, performed
    )
    return assumed | Assumptions(late_bytes=most - last if most > peak else 0)


def _lingering(profile: Profile, assumed: Assumptions) -> dict[int, int]:
    """By stage: bytes that exist when it first runs, but that the chain counts with the last stage or not at all."""
    uncounted = HeldInForward(profile.stages, assumed).uncounted[:-1]
    return {stage: size for stage, size in enumerate(uncounted, 1) if size and stage not in assumed.early}
