"""Solving, limits, bounds, and what solvers and options there are."""

from __future__ import annotations

import ctypes
import difflib
import enum
import functools
import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from . import _structs
from ._calls import Call, ProgressCallback
from ._errors import BadInput, InfeasibleBudget, NoSchedule, Unavailable, Unsupported
from ._library import Handle, lib, number_of, text_of
from ._problem import Machine, Problem, machine_struct, problem_pointer
from ._schedule import Schedule, budget_bytes, reported
from ._units import Size, encoded, format_budget, format_bytes, integer, listed


class Outcome(str, enum.Enum):
    """What was found. Members compare equal to their names as text."""

    optimal = "optimal"  #: proved for the problem as stated
    feasible = "feasible"  #: a schedule within the budget
    infeasible = "infeasible"  #: the solver has none; ``least_bytes`` says what would do
    unknown = "unknown"  #: nothing was found before time, memory or iterations ended

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Solution:
    """What a solver answered. Fields are those of ``cairn solve --json``, and two more; None where one does not apply.

    Attributes
    ----------
    outcome
        What was found.
    solver
        The solver that gave the answer (``auto`` names whom it chose).
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
        What the call took, nanoseconds; of several budgets, the first counts for all that they share.
    solver_peak_bytes
        Memory that the solver took, bytes.
    checkpoints
        Indices of the layers that a selection solver keeps.
    objective_bytes
        What a selection solver minimized, bytes.
    iterations
        Of a search that work limits, so many at most.
    stopped_early
        Ended by the time limit or by the progress callback, with the best answer so far.
    problem
        What was solved.
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
        """The schedule, or an error that says what would do.

        Raises
        ------
        InfeasibleBudget
            Nothing fits in the budget; ``least_bytes`` of the error is the least that works.
        NoSchedule
            The search was stopped before anything was found, or the solver makes no schedules.
        """
        if self.schedule is not None:
            return self.schedule
        if self.outcome is not Outcome.infeasible:
            raise NoSchedule(self.reason or f"{self.solver} found no schedule before it was stopped", solution=self)
        raise InfeasibleBudget(
            self._infeasible_text(), budget_bytes=self.budget_bytes, least_bytes=self.least_bytes, solution=self
        )

    def _infeasible_text(self) -> str:
        budget = "without a limit" if self.budget_bytes is None else f"within {_size_text(self.budget_bytes)}"
        if self.least_bytes is None:
            return f"{self.solver} finds no schedule {budget}; {self.reason}"
        least = f"{format_budget(self.least_bytes)} ({self.least_bytes} bytes)"
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


def _size_text(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)"


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


def _solution_of(info: _structs.Info, problem: Problem, schedule: Schedule | None) -> Solution:
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


#: What an option may be set to: a number in the option's unit (bytes, bytes per second, nanoseconds), text as on the
#: command line, True or False for a flag; None leaves it unset.
OptionValue = int | str | bool | None


class _OptionSet:
    """A cairn_options with its values set."""

    def __init__(self) -> None:
        pointer = ctypes.POINTER(_structs.Options)()
        lib.check(lib.cairn_options_new, None, ctypes.byref(pointer))
        self._handle = Handle(pointer, lib.cairn_options_free)

    @property
    def pointer(self) -> Any:
        return self._handle.pointer

    def set(self, name: str, value: OptionValue) -> None:
        """Sets one option through the library's parser."""
        key = name.replace("_", "-")
        kind = _option_types().get(key)
        if kind is None:
            raise TypeError(_no_such_option(name))
        if value is None:
            return
        if key == "solver" and isinstance(value, str):
            check_solver(value)
        if isinstance(value, bool) and kind == "flag":
            value = "true" if value else "false"
        if isinstance(value, str):
            lib.check(lib.cairn_options_set, self.pointer, key.encode(), encoded(value, name))
        elif isinstance(value, bool) or not hasattr(value, "__index__") or kind not in _EXAMPLES:
            raise TypeError(f"{name} must be {_EXAMPLES.get(kind, 'text')}, not {value!r}")
        else:
            lib.check(lib.cairn_options_set_int, self.pointer, key.encode(), integer(value, name))

    def set_machine(self, machine: Machine | None) -> None:
        """Overrides the problem's machine."""
        if machine is None:
            return
        machine_struct(machine)
        self.set("host_budget", machine.host_bytes)
        self.set("to_host", machine.to_host_bytes_per_s)
        self.set("to_device", machine.to_device_bytes_per_s)
        self.set("latency", machine.latency_ns)
        self.set("shared_link", machine.shared_link)

    def set_budget(self, budget: Size | None) -> None:
        """Sets the budget; None is none."""
        limit = budget_bytes(budget)
        self.set("budget", "none" if limit == _structs.NONE else limit)


_EXAMPLES = {
    "size": "an integer number of bytes or text such as '8GiB'",
    "rate": "an integer number of bytes per second or text such as '12GB/s'",
    "duration": "an integer number of nanoseconds or text such as '500ms'",
    "count": "an integer",
}
_TYPE_NAMES = ("size", "rate", "duration", "count", "choice", "text", "flag")


@dataclass(frozen=True)
class OptionInfo:
    """An option of ``solve``.

    Attributes
    ----------
    name
        As a keyword argument, such as "time_limit".
    type
        "size" (bytes), "rate" (bytes per second), "duration" (nanoseconds), "count", "choice", "text" or "flag".
    min
        Least number, inclusive.
    max
        Largest number, inclusive.
    choices
        Of a "choice".
    fallback
        What holds when it is not set, in words.
    help
        One line.
    """

    name: str
    type: str
    min: int
    max: int
    choices: tuple[str, ...]
    fallback: str
    help: str


def _option_of(info: _structs.OptionInfo) -> OptionInfo:
    choices = text_of(info.choices)
    return OptionInfo(
        text_of(info.name).replace("-", "_"),
        _TYPE_NAMES[info.type],
        info.min,
        info.max,
        tuple(choices.split("|")) if choices else (),
        text_of(info.fallback),
        text_of(info.help),
    )


def options() -> tuple[OptionInfo, ...]:
    """The options that ``solve``, ``limits`` and ``bound`` take by keyword.

    Returns
    -------
    tuple of OptionInfo
        Name, type, help and default of each.
    """
    found: list[OptionInfo] = []
    while pointer := lib.cairn_option_at(len(found)):
        found.append(_option_of(pointer.contents))
    return tuple(found)


@functools.cache
def _option_types() -> dict[str, str]:
    """Name of an option, as on the command line, to its type."""
    return {option.name.replace("_", "-"): option.type for option in options()}


def _no_such_option(name: str) -> str:
    names = [option.replace("-", "_") for option in _option_types()]
    near = difflib.get_close_matches(name, names, n=1)
    return f"there is no option {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    )


@dataclass(frozen=True)
class SolverInfo:
    """A solver, as ``cairn solvers`` lists it.

    Attributes
    ----------
    name
        What ``solve(solver=...)`` takes.
    takes_chains
        Whether it takes chains.
    takes_graphs
        Whether it takes graphs.
    needs_machine
        Only problems with a machine.
    minimizes_memory
        Takes part in ``minimize="memory"``, not in ``minimize="time"``.
    exhaustive
        Brute force, for tiny problems only.
    available
        Built in, and found at run time.
    optimal_in
        Class of schedules in which its answer is optimal; None for none, "all" for everything.
    summary
        What it does, one line.
    source
        Authors, year, section; None where it has none.
    cost
        Time and memory, in words.
    options
        Names of those that are its own; ``auto`` has those of all.
    """

    name: str
    takes_chains: bool
    takes_graphs: bool
    needs_machine: bool
    minimizes_memory: bool
    exhaustive: bool
    available: bool
    optimal_in: str | None
    summary: str
    source: str | None
    cost: str
    options: tuple[str, ...]


@functools.cache
def _solver_at(address: int) -> SolverInfo:
    """What the library has at an address, where it stays."""
    info = _structs.SolverInfo.from_address(address)
    values: dict[str, Any] = {}
    for name in (field_.name for field_ in fields(SolverInfo) if field_.name != "options"):
        value = getattr(info, name)
        values[name] = value if isinstance(value, bool) else text_of(value) or None
    own = tuple(name.replace("-", "_") for name in _option_types() if has_option(values["name"], name))
    return SolverInfo(**values, options=own)


def has_option(solver: str, option: str) -> bool:
    """Whether an option is one of a solver's own."""
    found: bool = lib.cairn_solver_has_option(solver.encode(), option.replace("_", "-").encode())
    return found


def solvers() -> tuple[SolverInfo, ...]:
    """All solvers, in the order of the documentation.

    Returns
    -------
    tuple of SolverInfo
        What each takes, promises and costs.
    """
    found: list[SolverInfo] = []
    while pointer := lib.cairn_solver_at(len(found)):
        found.append(_solver_at(ctypes.addressof(pointer.contents)))
    return tuple(found)


def check_solver(name: str) -> None:
    """Raises BadInput, and says what was probably meant, where there is no such solver."""
    encoded(name, "solver")
    names = [solver.name for solver in solvers()]
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    meant = f'did you mean "{near[0]}"? ' if near else ""
    raise BadInput(f'there is no solver "{name}"; {meant}cairn.solvers() lists them', path="solver")


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
    chosen = _OptionSet()
    chosen.set_machine(machine)
    for name, value in options.items():
        chosen.set(name, value)
    try:
        lib.check(lib.cairn_solver_accepts, solver.encode(), problem_pointer(problem), chosen.pointer)
    except (Unsupported, Unavailable) as error:
        return Acceptance(False, error.code, error.message)
    return Acceptance(True)


def _chosen(solver: str, machine: Machine | None, values: dict[str, OptionValue]) -> _OptionSet:
    chosen = _OptionSet()
    chosen.set("solver", solver)
    chosen.set_machine(machine)
    for name, value in values.items():
        chosen.set(name, value)
    return chosen


def _warn_of_unused(solver: str, values: dict[str, OptionValue]) -> None:
    """Of what was set, what the solver, which refused nothing, has no use for."""
    types = _option_types()
    for name, value in values.items():
        if value is None or types.get(name.replace("_", "-")) == "choice":  # which was not refused
            continue
        if has_option("auto", name) and not has_option(solver, name):
            owners = ", ".join(info.name for info in solvers() if name in info.options)
            warnings.warn(f"{solver} has no use for {name}; these have: {owners}", stacklevel=3)


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
        Called now and then from the calling thread. What it raises comes out here; a true result stops the
        search with the best answer so far.
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
        Stopped before anything was found.

    Examples
    --------
    >>> solution = cairn.solve(chain, "5GiB")
    >>> schedule = solution.require()
    """
    chosen = _chosen(solver, machine, options)
    if budget is not None or options.get("minimize") != "memory":
        chosen.set_budget(budget)
    call = Call(progress)
    [solution] = _solved(call, problem, 1, lib.cairn_solve, chosen.pointer)
    call.finish(solution)
    _warn_of_unused(solver, options)
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
    chosen = _chosen(solver, machine, options)
    limits = [budget_bytes(budget) for budget in listed(budgets, "budgets", "sizes")]
    array = _structs.array_type(ctypes.c_int64, len(limits))(*limits)
    call = Call(progress)
    count = len(limits)
    solutions = _solved(call, problem, count, lib.cairn_solve_many, chosen.pointer, array, count)
    call.finish(solutions)
    _warn_of_unused(solver, options)
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
            None if call.failed else _solution_of(info, problem, Schedule._adopt(problem, pointer) if pointer else None)
            for pointer, info in zip(schedules, infos, strict=True)
        ]
    finally:
        for info in infos:
            lib.cairn_info_clear(ctypes.byref(info))


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
    """How little memory a solver can do with, and what storing everything takes.

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
    chosen = _chosen(solver, machine, options)
    found = _structs.Limits()
    call = Call(progress)
    call.run(lib.cairn_limits_of, problem_pointer(problem), chosen.pointer, ctypes.byref(found))
    call.finish()
    _warn_of_unused(solver, options)
    return Limits(
        number_of(found.least_bytes),
        found.least_is_exact,
        number_of(found.least_lower_bytes),
        number_of(found.store_all_bytes),
        number_of(found.store_all_ns),
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
        Those of ``options()``.

    Returns
    -------
    Bound
        Nanoseconds that no schedule within the budget can beat.

    Raises
    ------
    Error
        As ``solve``.
    """
    chosen = _chosen("auto", machine, options)
    chosen.set_budget(budget)
    found = _structs.Bound()
    call = Call(progress)
    call.run(lib.cairn_bound_of, problem_pointer(problem), chosen.pointer, ctypes.byref(found))
    call.finish()
    return Bound(number_of(found.lower_bound_ns), text_of(found.method), number_of(found.least_lower_bytes))


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch, and what is proved about larger ones.

    Attributes
    ----------
    batch
        The largest for which a schedule was found; None: not even 1.
    refuted_batch
        Neither this batch nor any larger one is possible; None: nothing is proved.
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
        Whose schedule it is.
    stopped_early
        By the time limit or the progress callback: the largest so far.
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
        The batch at which the problem was measured. At others, sizes and times are as many times larger, fixed
        bytes are not (``Problem.scaled``).
    solver
        Whose schedules count.
    machine
        Replaces the problem's.
    progress
        As in ``solve``; a true result ends the search with the largest batch so far.
    options
        Those of ``options()``; ``time_limit`` holds for the whole search.

    Returns
    -------
    MaxBatch
        The largest batch with a schedule, and what is proved about larger ones.

    Raises
    ------
    BadInput
        No budget, or a graph that does not say where its backward begins.
    Overflow
        There is no largest batch.
    Cancelled
        Stopped before anything was found.

    Examples
    --------
    >>> cairn.max_batch(chain, "16GiB", batch=32).batch
    """
    chosen = _chosen(solver, machine, options)
    chosen.set_budget(budget)
    measured = integer(batch, "batch", least=1)
    found = _structs.MaxBatch()
    call = Call(progress)
    call.run(lib.cairn_max_batch_of, problem_pointer(problem), chosen.pointer, measured, ctypes.byref(found))
    made = MaxBatch(
        number_of(found.batch),
        number_of(found.refuted_batch),
        number_of(found.budget_bytes),
        number_of(found.makespan_ns),
        number_of(found.peak_bytes),
        number_of(found.recompute_ns),
        number_of(found.forward_ns),
        text_of(found.solver) or None,
        found.stopped_early,
    )
    call.finish(made)
    _warn_of_unused(solver, options)
    return made
