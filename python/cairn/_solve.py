"""Solving for one budget or several, and whether a solver takes a problem."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import _structs
from ._calls import Call, ProgressCallback
from ._errors import Unavailable, Unsupported
from ._library import lib
from ._machine import Machine
from ._option_set import OptionSet, OptionValue, chosen_options, warn_of_unused
from ._problem import Problem, problem_pointer
from ._schedule import Schedule
from ._simulate import budget_bytes
from ._solution import Solution, solution_of
from ._solvers import check_solver
from ._units import Size, listed


@dataclass(frozen=True)
class Acceptance:
    """Whether a solver takes a problem. True or False as a condition.

    Attributes
    ----------
    accepted
        It does.
    code
        "unsupported" or "unavailable" where it does not.
    reason
        A sentence where it does not.
    """

    accepted: bool
    code: str | None = None
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.accepted


def solver_accepts(
    solver: str, problem: Problem, *, machine: Machine | None = None, **options: OptionValue
) -> Acceptance:
    """Whether a solver takes this problem with these options (those of ``solve``), and if not, why.

    Parameters
    ----------
    solver
        A name of ``solvers()``.
    problem
        A Chain or a Graph.
    machine
        Replaces the problem's.
    **options
        Those of ``solve``.

    Returns
    -------
    Acceptance
        True or False as a condition; with the reason.

    Raises
    ------
    BadInput
        There is no such solver or option.
    """
    check_solver(solver)
    chosen = OptionSet()
    chosen.set_machine(machine)
    for name, value in options.items():
        chosen.set(name, value)
    try:
        lib.check(lib.cairn_solver_accepts, solver.encode(), problem_pointer(problem), chosen.pointer)
    except (Unsupported, Unavailable) as error:
        return Acceptance(False, error.code, error.message)
    return Acceptance(True)


def solve(
    problem: Problem,
    budget: Size | None = None,
    *,
    solver: str = "auto",
    machine: Machine | None = None,
    progress: ProgressCallback | None = None,
    **options: OptionValue,
) -> Solution:
    """Find a schedule within a budget. Infeasible is an answer, not an error: see ``Solution.require``.

    The interpreter lock is released meanwhile, and Ctrl-C stops it: the KeyboardInterrupt then carries the best answer
    so far as ``solution`` (None where there is none).

    Parameters
    ----------
    problem
        A Chain or a Graph.
    budget
        Device memory, bytes or text such as "8GiB", fixed bytes and the input included; None for no limit.
    solver
        A name of ``solvers()``.
    machine
        Replaces the problem's; the schedule then records it.
    progress
        Called now and then from the calling thread. Its exceptions are raised here; a true result stops the search
        with the best answer so far.
    options
        Those of ``options()``, such as ``slots=1000``, ``time_limit="2s"``, ``minimize="memory"``.

    Returns
    -------
    Solution
        The outcome, the schedule (None if infeasible), makespan, peak, and a lower bound.

    Raises
    ------
    BadInput
        A budget or an option is not valid.
    Unsupported
        The solver cannot handle this problem, or does not take an option.
    Unavailable
        The solver was not built in.
    MemoryLimit
        The solver would need more memory than it may use.
    Cancelled
        Stopped before there was an answer.

    Examples
    --------
    >>> solution = cairn.solve(chain, "5GiB")
    >>> schedule = solution.require()
    """
    chosen = chosen_options(solver, machine, options)
    if budget is not None or options.get("minimize") != "memory":
        chosen.set_budget(budget)
    call = Call(progress)
    [solution] = _solved(call, problem, 1, lib.cairn_solve, chosen.pointer)
    call.finish(solution)
    warn_of_unused(solver, options)
    assert solution is not None  # a call without a solution has failed
    return solution


def solve_many(
    problem: Problem,
    budgets: Iterable[Size | None],
    *,
    solver: str = "auto",
    machine: Machine | None = None,
    progress: ProgressCallback | None = None,
    **options: OptionValue,
) -> list[Solution]:
    """Solve for several budgets at once: what serves all of them (tables of a dynamic program, say) is made once.

    Arguments and errors as in ``solve``; the solutions are in the order of the budgets.

    Parameters
    ----------
    problem
        A Chain or a Graph.
    budgets
        Each as in ``solve``.
    solver
        A name of ``solvers()``.
    machine
        Replaces the problem's.
    progress
        As in ``solve``.
    **options
        Those of ``options()``.

    Returns
    -------
    list of Solution
        In the order of the budgets.

    Raises
    ------
    Error
        As ``solve``.
    """
    chosen = chosen_options(solver, machine, options)
    limits = [budget_bytes(budget) for budget in listed(budgets, "budgets", "sizes")]
    array = _structs.array_type(ctypes.c_int64, len(limits))(*limits)
    call = Call(progress)
    count = len(limits)
    solutions = _solved(call, problem, count, lib.cairn_solve_many, chosen.pointer, array, count)
    call.finish(solutions)
    warn_of_unused(solver, options)
    return [solution for solution in solutions if solution is not None]


def _solved(
    call: Call, problem: Problem, count: int, function: Callable[..., int], *inputs: Any
) -> list[Solution | None]:
    """Calls what fills arrays of schedules and infos, and takes these over. None where the call failed."""
    schedules = _structs.array_type(ctypes.POINTER(_structs.Schedule), count)()
    infos = _structs.array_type(_structs.Info, count)()
    for info in infos:
        info.checkpoint_count = -1
    call.run(function, problem_pointer(problem), *inputs, schedules, infos)
    try:
        return [
            None if call.failed else solution_of(info, problem, Schedule._adopt(problem, pointer) if pointer else None)
            for pointer, info in zip(schedules, infos, strict=True)
        ]
    finally:
        for info in infos:
            lib.cairn_info_clear(ctypes.byref(info))
