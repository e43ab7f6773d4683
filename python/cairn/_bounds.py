"""Least memory, lower bounds of the makespan, and the largest batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from . import _structs
from ._calls import Call, ProgressCallback
from ._library import lib, number_of, text_of
from ._machine import Machine
from ._option_set import OptionSet, OptionValue, chosen_options, warn_of_unused
from ._problem import Problem, problem_pointer
from ._units import Size, integer


def _called(
    progress: ProgressCallback | None,
    function: Callable[..., int],
    problem: Problem,
    chosen: OptionSet,
    result: ctypes.Structure,
    *inputs: int,
) -> Call:
    """Calls a function of the library that fills `result`. The caller finishes the call."""
    call = Call(progress)
    call.run(function, problem_pointer(problem), chosen.pointer, *inputs, ctypes.byref(result))
    return call


@dataclass(frozen=True)
class Limits:
    """Least memory, and what storing everything takes.

    Attributes
    ----------
    least_bytes
        Least budget at which the solver succeeds, bytes; None: at none.
    least_is_exact
        No schedule at all needs less.
    least_lower_bytes
        Proved lower bound on what any schedule needs, bytes.
    store_all_bytes
        Peak of storing everything, bytes.
    store_all_ns
        Makespan of storing everything, nanoseconds.
    """

    least_bytes: int | None
    least_is_exact: bool
    least_lower_bytes: int | None
    store_all_bytes: int | None
    store_all_ns: int | None


def limits(
    problem: Problem,
    solver: str = "auto",
    *,
    machine: Machine | None = None,
    progress: ProgressCallback | None = None,
    **options: OptionValue,
) -> Limits:
    """The least memory with which a solver succeeds, and the memory and time of storing everything.

    Parameters
    ----------
    problem
        A Chain or a Graph.
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
    Limits
        Bytes, and nanoseconds of storing everything.

    Raises
    ------
    Error
        As ``solve``.

    Examples
    --------
    >>> cairn.limits(chain).least_bytes
    """
    if "budget" in options:
        raise TypeError("limits takes no budget: it tells the least one, and the one from which on all is stored")
    chosen = chosen_options(solver, machine, options)
    limits = _structs.Limits()
    _called(progress, lib.cairn_limits_of, problem, chosen, limits).finish()
    warn_of_unused(solver, options)
    return Limits(
        number_of(limits.least_bytes),
        limits.least_is_exact,
        number_of(limits.least_lower_bytes),
        number_of(limits.store_all_bytes),
        number_of(limits.store_all_ns),
    )


@dataclass(frozen=True)
class Bound:
    """A proved lower bound.

    Attributes
    ----------
    lower_bound_ns
        No schedule within the budget has a smaller makespan, nanoseconds; None: nothing is proved.
    method
        How it was proved.
    least_lower_bytes
        Every schedule needs at least this; more than the budget: there is none within it.
    """

    lower_bound_ns: int | None
    method: str
    least_lower_bytes: int | None


#: Options that mean nothing to a bound, as on the command line.
_OF_SOLVERS = ("solver", "iterations", "seed", "minimize", "objective")


def bound(
    problem: Problem,
    budget: Size | None,
    *,
    machine: Machine | None = None,
    progress: ProgressCallback | None = None,
    **options: OptionValue,
) -> Bound:
    """A lower bound on the makespan of every schedule within a budget. Arguments and errors as in ``solve``.

    Parameters
    ----------
    problem
        A Chain or a Graph.
    budget
        Device memory, bytes or text; None for no limit.
    machine
        Replaces the problem's.
    progress
        As in ``solve``.
    **options
        Those of ``options()`` that do not belong to solvers, such as ``time_limit``.

    Returns
    -------
    Bound
        Nanoseconds that no schedule within the budget can beat.

    Raises
    ------
    Error
        As ``solve``.
    """
    for name in _OF_SOLVERS:
        if name in options:
            raise TypeError(f"bound takes no {name}: no solver is asked")
    chosen = chosen_options("auto", machine, options)
    chosen.set_budget(budget)
    result = _structs.Bound()
    _called(progress, lib.cairn_bound_of, problem, chosen, result).finish()
    return Bound(number_of(result.lower_bound_ns), text_of(result.method), number_of(result.least_lower_bytes))


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch, and a proof about larger ones.

    Attributes
    ----------
    batch
        The largest batch with a schedule; None if even 1 has none.
    refuted_batch
        Neither this batch nor any larger one is possible; None if nothing is proved.
    budget_bytes
        The budget, bytes.
    makespan_ns
        Of the schedule for ``batch``, nanoseconds.
    peak_bytes
        Its peak, bytes.
    recompute_ns
        Time that it spends on recomputation, nanoseconds.
    forward_ns
        One forward at ``batch``, which ``recompute_ns`` does not exceed, nanoseconds.
    solver
        The solver that made the schedule.
    stopped_early
        The time limit or the progress callback ended the search; the batch is the largest so far.
    """

    batch: int | None
    refuted_batch: int | None
    budget_bytes: int | None
    makespan_ns: int | None
    peak_bytes: int | None
    recompute_ns: int | None
    forward_ns: int | None
    solver: str | None
    stopped_early: bool

    @property
    def proved(self) -> bool:
        """Whether no larger batch is possible."""
        return self.refuted_batch == (self.batch or 0) + 1


def max_batch(
    problem: Problem,
    budget: Size,
    batch: int,
    *,
    solver: str = "auto",
    machine: Machine | None = None,
    progress: ProgressCallback | None = None,
    **options: OptionValue,
) -> MaxBatch:
    """Finds the largest batch that fits a budget when recomputation may take as long as one forward.

    Parameters
    ----------
    problem
        A Chain, or a Graph with ``backward_begins_at``, measured at a batch.
    budget
        Device memory, bytes or text such as "16GB".
    batch
        The batch at which the problem was measured. At others, sizes and times are scaled in proportion, except
        fixed bytes (``Problem.scaled``).
    solver
        The solver that makes the schedules.
    machine
        Replaces the problem's.
    progress
        As in ``solve``; a true result ends the search with the largest batch so far.
    options
        Those of ``options()``; ``time_limit`` holds for the whole search.

    Returns
    -------
    MaxBatch
        The largest batch with a schedule, and a proof about larger ones.

    Raises
    ------
    BadInput
        No budget, or a graph without ``backward_begins_at``.
    Overflow
        There is no largest batch.
    Cancelled
        Stopped before there was a schedule.

    Examples
    --------
    >>> cairn.max_batch(chain, "16GiB", batch=32).batch
    """
    chosen = chosen_options(solver, machine, options)
    chosen.set_budget(budget)
    measured = integer(batch, "batch", least=1)
    result = _structs.MaxBatch()
    call = _called(progress, lib.cairn_max_batch_of, problem, chosen, result, measured)
    made = MaxBatch(
        number_of(result.batch),
        number_of(result.refuted_batch),
        number_of(result.budget_bytes),
        number_of(result.makespan_ns),
        number_of(result.peak_bytes),
        number_of(result.recompute_ns),
        number_of(result.forward_ns),
        text_of(result.solver) or None,
        result.stopped_early,
    )
    call.finish(made)
    warn_of_unused(solver, options)
    return made
