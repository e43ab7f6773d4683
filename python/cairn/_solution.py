"""Answers of solvers."""

from __future__ import annotations

import ctypes
import enum
import json
from dataclasses import dataclass, field
from typing import Any

from . import _structs
from ._errors import InfeasibleBudget, NoSchedule
from ._library import lib, number_of, text_of
from ._problem import Problem
from ._report import reported
from ._schedule import Schedule
from ._units import format_budget, format_bytes


class Outcome(str, enum.Enum):
    """The outcome of a solver. Members compare equal to their names as text."""

    optimal = "optimal"  #: proved for the problem as stated
    feasible = "feasible"  #: a schedule within the budget
    infeasible = "infeasible"  #: the solver has none; ``least_bytes`` says what would do
    unknown = "unknown"  #: time, memory or iterations ended before there was an answer

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Solution:
    """The answer of a solver. Fields are those of ``cairn solve --json``, and two more; None where one does not apply.

    Attributes
    ----------
    outcome
        Whether there is an answer, and whether it is optimal.
    solver
        The solver that gave the answer (``auto`` names the one it chose).
    budget_bytes
        The budget, bytes; None for none.
    makespan_ns
        Time of the step, nanoseconds, from the simulator.
    peak_bytes
        Largest device memory, bytes, from the simulator.
    host_peak_bytes
        Largest host memory, bytes, from the simulator.
    lower_bound_ns
        No schedule of the problem within the budget is faster, nanoseconds.
    gap
        (makespan - bound) / makespan.
    least_bytes
        Least budget at which this solver succeeds, bytes.
    least_is_exact
        No schedule at all needs less.
    least_lower_bytes
        Proved lower bound on what any schedule needs, bytes.
    store_all_bytes
        Peak of storing everything, bytes.
    store_all_ns
        Makespan of storing everything, nanoseconds.
    reason
        Why this solver, or why there is no answer.
    optimal_in
        Class of schedules in which the answer is proved optimal, such as "persistent".
    recompute_ns
        Time of the forwards that are not the first of their stage or node, nanoseconds.
    stall_ns
        Makespan less all compute time, nanoseconds.
    solve_ns
        Time of the call, nanoseconds; work that several budgets share counts for the first.
    solver_peak_bytes
        Memory that the solver used, bytes.
    checkpoints
        Indices of the layers that a selection solver keeps.
    objective_bytes
        The objective of a selection solver, bytes.
    iterations
        Iterations of a search that is limited by work.
    stopped_early
        Ended by the time limit or by the progress callback, with the best answer so far.
    problem
        The problem.
    schedule
        The answer's schedule; None when the outcome is infeasible or unknown.
    """

    outcome: Outcome
    solver: str
    budget_bytes: int | None
    makespan_ns: int | None
    peak_bytes: int | None
    host_peak_bytes: int | None
    lower_bound_ns: int | None
    gap: float | None
    least_bytes: int | None
    least_is_exact: bool
    least_lower_bytes: int | None
    store_all_bytes: int | None
    store_all_ns: int | None
    reason: str | None
    optimal_in: str | None
    recompute_ns: int | None
    stall_ns: int | None
    solve_ns: int | None
    solver_peak_bytes: int | None
    checkpoints: tuple[int, ...] | None
    objective_bytes: int | None
    iterations: int | None
    stopped_early: bool
    problem: Problem = field(repr=False)
    schedule: Schedule | None = field(repr=False)

    @property
    def found(self) -> bool:
        """Whether there is an answer: a schedule, or the checkpoints of a selection solver."""
        return self.outcome in (Outcome.optimal, Outcome.feasible)

    def require(self) -> Schedule:
        """The schedule; an error if there is none.

        Raises
        ------
        InfeasibleBudget
            Nothing fits in the budget; ``least_bytes`` of the error is the least budget that works.
        NoSchedule
            The search was stopped before there was an answer, or the solver makes no schedules.
        """
        if self.schedule is not None:
            return self.schedule
        if self.outcome is not Outcome.infeasible:
            raise NoSchedule(self.reason or f"{self.solver} found no schedule before it was stopped", solution=self)
        raise InfeasibleBudget(
            self._infeasible_text(), budget_bytes=self.budget_bytes, least_bytes=self.least_bytes, solution=self
        )

    def _infeasible_text(self) -> str:
        budget = (
            "without a limit"
            if self.budget_bytes is None
            else f"within {_exact_text(format_bytes(self.budget_bytes), self.budget_bytes)}"
        )
        if self.least_bytes is None:
            return f"{self.solver} finds no schedule {budget}; {self.reason}"
        least = _exact_text(format_budget(self.least_bytes), self.least_bytes)
        if self.least_is_exact:
            return f"no schedule stays {budget}: the least that works is {least}"
        return f"{self.solver} finds no schedule {budget}: the least that it found is {least}"

    def to_dict(self) -> dict[str, Any]:
        """The object that ``cairn solve --json`` prints, as JSON values."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _JSON_FIELDS}
        values["outcome"] = self.outcome.value
        values["checkpoints"] = None if self.checkpoints is None else list(self.checkpoints)
        return values

    def to_json(self) -> str:
        """``to_dict`` as one line of JSON."""
        return json.dumps(self.to_dict())

    def report(self) -> str:
        """A table for people: budget, peak, time, overhead against storing everything, what is recomputed."""
        schedule = None if self.schedule is None else self.schedule.pointer
        return reported(lib.cairn_report_answer, self.problem.pointer, schedule, ctypes.byref(info_of(self)))


def _exact_text(rounded: str, count: int) -> str:
    """A size as text, and its bytes where the text rounds them."""
    return f"{count} bytes" if count < 1024 else f"{rounded} ({count} bytes)"


_NUMBERS = (
    "budget_bytes",
    "makespan_ns",
    "peak_bytes",
    "host_peak_bytes",
    "lower_bound_ns",
    "least_bytes",
    "least_lower_bytes",
    "store_all_bytes",
    "store_all_ns",
    "recompute_ns",
    "stall_ns",
    "solve_ns",
    "solver_peak_bytes",
    "objective_bytes",
    "iterations",
)
_JSON_FIELDS = (
    "outcome",
    "solver",
    "budget_bytes",
    "makespan_ns",
    "peak_bytes",
    "host_peak_bytes",
    "lower_bound_ns",
    "gap",
    "least_bytes",
    "least_is_exact",
    "least_lower_bytes",
    "store_all_bytes",
    "store_all_ns",
    "reason",
    "optimal_in",
    "recompute_ns",
    "stall_ns",
    "solve_ns",
    "solver_peak_bytes",
    "checkpoints",
    "objective_bytes",
)
_OUTCOMES = tuple(Outcome)


def solution_of(info: _structs.Info, problem: Problem, schedule: Schedule | None) -> Solution:
    checkpoints = None
    if info.checkpoint_count >= 0:
        checkpoints = tuple(info.checkpoints[: info.checkpoint_count]) if info.checkpoint_count else ()
    return Solution(
        outcome=Outcome(text_of(lib.cairn_outcome_name(info.outcome))),
        solver=text_of(info.solver),
        gap=None if info.gap < 0 else info.gap,
        least_is_exact=info.least_is_exact,
        reason=text_of(info.reason) or None,
        optimal_in=text_of(info.optimal_in) or None,
        checkpoints=checkpoints,
        stopped_early=info.stopped_early,
        problem=problem,
        schedule=schedule,
        **{name: number_of(getattr(info, name)) for name in _NUMBERS},
    )


def info_of(solution: Solution) -> _structs.Info:
    """The answer as the C library's reports take it."""
    checkpoints = solution.checkpoints or ()
    info = _structs.Info(
        outcome=_OUTCOMES.index(solution.outcome),
        solver=solution.solver.encode(),
        gap=-1.0 if solution.gap is None else solution.gap,
        least_is_exact=solution.least_is_exact,
        reason=(solution.reason or "").encode(),
        optimal_in=(solution.optimal_in or "").encode(),
        checkpoint_count=-1 if solution.checkpoints is None else len(checkpoints),
        checkpoints=_structs.array_type(ctypes.c_int32, len(checkpoints))(*checkpoints),
        stopped_early=solution.stopped_early,
    )
    for name in _NUMBERS:
        value = getattr(solution, name)
        setattr(info, name, _structs.NONE if value is None else value)
    return info
