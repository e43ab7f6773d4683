"""Every solver at several budgets: the trade-off curves of a problem, as a table, as CSV or as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _structs
from ._bounds import limits
from ._calls import ProgressCallback
from ._document import FilePath
from ._errors import BadInput, MemoryLimit, NoMemory, Unavailable, Unsupported
from ._library import lib
from ._machine import Machine
from ._option_set import OptionValue
from ._problem import Problem
from ._report import reported
from ._solution import Solution, info_of
from ._solve import solve_many, solver_accepts
from ._solvers import check_solver, has_option, solvers
from ._units import Size, integer, listed, unit_of

BUDGETS_MAX = 1000  # as on the command line
#: Options of other calls, and what `compare` has instead.
_MEANT = {"budget": "budgets", "solver": "only", "solvers": "only"}


@dataclass(frozen=True)
class Comparison:
    """Answers of several solvers to one problem, at the same budgets.

    Attributes
    ----------
    problem
        What was solved.
    solutions
        Name of a solver to its solutions, in the order of the budgets.
    left_out
        Name of a solver that was not asked to the reason.
    """

    problem: Problem
    solutions: dict[str, list[Solution]]
    left_out: dict[str, str]

    def table(self) -> str:
        """A table for people, one line for each answer; of auto, with the solver that it chose: "auto: chain-weak"."""
        return self._report(lib.cairn_report_comparison, "{asked}: {chosen}")

    def csv(self) -> str:
        """Comma-separated values: a header, then integers; what does not apply is empty. auto stands as "auto"."""
        return self._report(lib.cairn_report_csv, "{asked}")

    def _report(self, function: object, label: str) -> str:
        infos = []
        for name, answers in self.solutions.items():
            for info in map(info_of, answers):
                chosen = info.solver.decode()
                if chosen != name:
                    info.solver = label.format(asked=name, chosen=chosen).encode()[: _structs.Info.solver.size - 1]
                infos.append(info)
        return reported(function, _structs.array_type(_structs.Info, len(infos))(*infos), len(infos))

    def overheads(self, solver: str) -> list[float | None]:
        """Time over that of storing everything, less 1, at each budget; None where there is no schedule."""
        return [
            None if answer.makespan_ns is None else _over(answer.makespan_ns, answer)
            for answer in self.solutions[solver]
        ]

    def plot(self, path: FilePath) -> None:
        """Draws overheads against budgets, a line for each solver and one for the lower bound. Needs matplotlib.

        Budgets without a limit are not drawn. The format is that of the file's ending.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from None
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        unit, unit_bytes = unit_of(
            s.budget_bytes for answers in self.solutions.values() for s in answers if s.budget_bytes
        )
        for solver, answers in self.solutions.items():
            points = [
                (solution.budget_bytes / unit_bytes, 100 * overhead)
                for solution, overhead in zip(answers, self.overheads(solver), strict=True)
                if overhead is not None and solution.budget_bytes is not None
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), marker=".", label=solver)
        bounds = [(budget / unit_bytes, 100 * bound) for budget, bound in self._bounds()]
        if bounds:
            axes.plot(*zip(*bounds, strict=True), "--", color="gray", label="lower bound")
        axes.set(xlabel=f"budget, {unit}", ylabel="extra time, %", title=self.problem.name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(os.fspath(path))

    def _bounds(self) -> list[tuple[int, float]]:
        """Budget and the best of all lower bounds there."""
        best: dict[int, float] = {}
        for answers in self.solutions.values():
            for solution in answers:
                if solution.budget_bytes is not None and solution.lower_bound_ns is not None:
                    bound = _over(solution.lower_bound_ns, solution)
                    best[solution.budget_bytes] = max(bound, best.get(solution.budget_bytes, bound))
        return sorted(best.items())


def _over(time_ns: int, solution: Solution) -> float:
    return time_ns / solution.store_all_ns - 1 if solution.store_all_ns else 0.0


def compare(
    problem: Problem,
    budgets: int | Iterable[Size | None] = 10,
    *,
    only: Iterable[str] | None = None,
    machine: Machine | None = None,
    progress: ProgressCallback | None = None,
    **options: OptionValue,
) -> Comparison:
    """Ask every available solver that takes the problem, as ``cairn compare`` does.

    Parameters
    ----------
    problem
        A Chain or a Graph.
    budgets
        A number of budgets, at most 1,000, evenly spaced from the least memory to that of storing everything; or
        the budgets: bytes, text such as "8GiB", None for no limit.
    only
        Names of solvers; None: all that take the problem, brute force where it is small enough.
    machine
        Replaces the problem's.
    progress
        As in ``solve``.
    options
        Those of ``options()``, such as ``time_limit="2s"`` for each solver at each budget. An option that only
        some solvers have is passed to those.

    Returns
    -------
    Comparison
        Answers by solver and budget; a table, comma-separated values, or a picture.

    Raises
    ------
    BadInput
        No budgets, or too many, or one that is no size.
    Unsupported
        No solver takes an option for this problem.

    Examples
    --------
    >>> print(cairn.compare(chain, budgets=5).table())
    """
    for name in _MEANT.keys() & options:
        raise TypeError(f"compare has no option {name!r}; did you mean {_MEANT[name]!r}?")
    wanted = [solver.name for solver in solvers()] if only is None else listed(only, "only", "names of solvers")
    for name in wanted:
        check_solver(name)
    anyone = solver_accepts("auto", problem, machine=machine, **options)
    if not anyone:
        raise Unsupported(anyone.reason or "no solver takes the problem")
    chosen: list[Size | None]
    if not isinstance(budgets, Iterable):
        chosen = _evenly(problem, _count(budgets), machine, progress, options)
    else:
        chosen = listed(budgets, "budgets", "sizes, or how many there shall be")
    if not chosen:
        raise BadInput("the list is empty", path="budgets")
    answers: dict[str, list[Solution]] = {}
    left_out: dict[str, str] = {}
    for name in wanted:
        own = {key: value for key, value in options.items() if has_option(name, key) or not has_option("auto", key)}
        taken = solver_accepts(name, problem, machine=machine, **own)
        if not taken:
            left_out[name] = taken.reason or ""
            continue
        try:
            answers[name] = solve_many(problem, chosen, solver=name, machine=machine, progress=progress, **own)
        except (MemoryLimit, NoMemory, Unavailable, Unsupported) as error:
            left_out[name] = error.message
    return Comparison(problem, answers, left_out)


def _count(budgets: Any) -> int:
    count = integer(budgets, "budgets", least=1)
    if count > BUDGETS_MAX:
        raise BadInput(f"budgets is {count}, how many there shall be: at most {BUDGETS_MAX}; a size stands in a list")
    return count


def _evenly(
    problem: Problem,
    count: int,
    machine: Machine | None,
    progress: ProgressCallback | None,
    options: dict[str, OptionValue],
) -> list[Size | None]:
    ends = limits(problem, "auto", machine=machine, progress=progress, **options)
    high = ends.store_all_bytes or 0
    low = high if ends.least_bytes is None else ends.least_bytes
    span = max(0, high - low)
    return [low + (span * i // (count - 1) if count > 1 else 0) for i in range(count)]
