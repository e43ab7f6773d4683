"""Solves a profile's chain, and counts what autograd holds of blocks' outputs outside of blocks.

Problem. What runs behind a block, outside of blocks, may have autograd save the block's output. Then that stays from
the block's first run to the backward of what runs behind it, whatever a schedule does. Where the block does not save it
itself, it is counted with what runs behind (`measure.py`). Where it does (a block that ends with a ReLU), both have one
tensor as long as the schedule keeps what the first run left, and counting it twice would be too much by all of it. Once
the schedule lets go of that and runs the block again, there are two.

So such outputs are counted once at first. If the schedule that is found lets go of one too early, that output is
counted *apart*, with what runs behind it and with the block, and the chain is solved again. An output that is counted
apart is counted at least as often as it is there, and one that is not is kept by the schedule as long as it is held: so
every answer keeps to its peak. The number of outputs apart only grows, so this ends, mostly at once. Where it ends
without an answer, within a budget for which there is one, the schedule of the least budget is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import cairn

from .profiler import Profile
from .program import BACKWARD, DROP, FORWARD_SAVE, FORWARDS, OUTPUT, SAVED


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a solver says for one budget, and of which problem; `least_bytes` is the least budget with a schedule."""

    apart: frozenset[int]
    problem: Mapping[str, Any]
    solution: cairn.Solution
    least_bytes: int | None


class Chains:
    """The chain of a profile, with any outputs counted apart."""

    def __init__(self, profile: Profile, scope: str, gradients: str, solver: str, options: Mapping[str, Any]) -> None:
        self._profile, self._asked = profile, (scope, gradients)
        self._options = {"solver": solver, **options}
        self._held = [number for number, stage in enumerate(profile.stages, 1) if stage.also_held_bytes]
        self._made: dict[frozenset[int], tuple[Mapping[str, Any], cairn.Chain]] = {}
        self.problem, self.chain = self._counted(frozenset())

    def _counted(self, apart: frozenset[int]) -> tuple[Mapping[str, Any], cairn.Chain]:
        """The problem in which the outputs of these stages are counted apart."""
        if apart not in self._made:
            problem = self._profile.chain(*self._asked, apart)
            self._made[apart] = problem, cairn.Chain.from_json(json.dumps(problem))
        return self._made[apart]

    def solved(self, budgets: Sequence[int]) -> list[Answer]:
        """An answer for each budget."""
        found = cairn.solve_many(self.chain, budgets, **self._options) if budgets else []
        return [self._settled(budget, solution) for budget, solution in zip(budgets, found, strict=True)]

    @property
    def least_bytes(self) -> int | None:
        """The least budget with a schedule."""
        return self._least[1] if self._held else cairn.limits(self.chain, **self._options).least_bytes

    @functools.cached_property
    def _least(self) -> tuple[frozenset[int], int | None]:
        """What is counted apart at the least budget, and that budget."""
        apart: frozenset[int] = frozenset()
        while True:
            chain = self._counted(apart)[1]
            size = cairn.limits(chain, **self._options).least_bytes
            found = apart if size is None else apart | self._let_go(cairn.solve(chain, size, **self._options))
            if found == apart:
                return apart, size
            apart = found

    def _settled(self, budget: int, solution: cairn.Solution) -> Answer:
        """The first answer, or one in which all is counted apart that its schedule lets go of."""
        if not self._held:
            return Answer(frozenset(), self.problem, solution, solution.least_bytes)
        apart: frozenset[int] = frozenset()
        least_apart, least_bytes = self._least
        while True:
            found = apart | self._let_go(solution)
            if solution.schedule is None and least_bytes is not None and least_bytes <= budget:
                found, budget = least_apart, least_bytes
            if found == apart:
                return Answer(apart, self._counted(apart)[0], solution, least_bytes)
            apart = found
            solution = cairn.solve(self._counted(apart)[1], budget, **self._options)

    def _let_go(self, solution: cairn.Solution) -> frozenset[int]:
        """The stages whose output, as the first run left it, a schedule removes while it is held outside of blocks."""
        ops = () if solution.schedule is None else solution.schedule.ops
        return frozenset(stage for stage in self._held if lets_go(ops, stage))


def lets_go(ops: Sequence[Sequence[Any]], stage: int) -> bool:
    """Whether a schedule removes what the first run of a stage left before the backward of the next stage."""
    first = None
    for op in ops:
        if op[0] in FORWARDS and op[1] == stage and first is None:
            first = SAVED if op[0] == FORWARD_SAVE else OUTPUT
        elif op[0] == DROP and (op[1], op[2]) == (first, stage):
            return True
        elif op[0] == BACKWARD and op[1] == stage + 1:
            return False
    return False
