"""The solvers that there are."""

from __future__ import annotations

import ctypes
import difflib
import functools
from dataclasses import dataclass, fields
from typing import Any

from . import _structs
from ._errors import BadInput
from ._library import lib, text_of
from ._options import option_types
from ._units import encoded


@dataclass(frozen=True)
class SolverInfo:
    """A solver, as ``cairn solvers`` lists it.

    Attributes
    ----------
    name
        The name for ``solve(solver=...)``.
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
        Built in, and its library can be loaded.
    optimal_in
        Class of schedules in which its answer is optimal; None for none, "all" for everything.
    summary
        Its method, in one line.
    source
        Authors, year, section; None where it has none.
    cost
        Time and memory, in words.
    options
        Names of its own options; ``auto`` has those of all solvers.
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
    """The solver at an address of the library's static memory."""
    info = _structs.SolverInfo.from_address(address)
    values: dict[str, Any] = {}
    for name in (field_.name for field_ in fields(SolverInfo) if field_.name != "options"):
        value = getattr(info, name)
        values[name] = value if isinstance(value, bool) else text_of(value) or None
    own = tuple(name.replace("-", "_") for name in option_types() if has_option(values["name"], name))
    return SolverInfo(**values, options=own)


def has_option(solver: str, option: str) -> bool:
    """Whether an option is one of a solver's own."""
    solvers: bool = lib.cairn_solver_has_option(solver.encode(), option.replace("_", "-").encode())
    return solvers


def solvers() -> tuple[SolverInfo, ...]:
    """All solvers, in the order of the documentation.

    Returns
    -------
    tuple of SolverInfo
        What each takes, promises and costs.
    """
    solvers: list[SolverInfo] = []
    while pointer := lib.cairn_solver_at(len(solvers)):
        solvers.append(_solver_at(ctypes.addressof(pointer.contents)))
    return tuple(solvers)


def check_solver(name: str) -> None:
    """Raises BadInput, and says what was probably meant, where there is no such solver."""
    encoded(name, "solver")
    names = [solver.name for solver in solvers()]
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    meant = f'did you mean "{near[0]}"? ' if near else ""
    raise BadInput(f'there is no solver "{name}"; {meant}cairn.solvers() lists them', path="solver")
