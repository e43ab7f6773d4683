"""Texts that the library writes: reports, and traces of schedules."""

from __future__ import annotations

import ctypes
from typing import Any

from . import _structs
from ._calls import Call
from ._document import FilePath, file_write
from ._errors import InvalidSchedule
from ._library import lib
from ._problem import Problem, problem_pointer
from ._schedule import Schedule, schedule_pointer
from ._simulate import RECORDED, BudgetLike, budget_bytes, simulate


def reported(function: Any, *arguments: Any) -> str:
    """The text of one of the library's reports."""
    parts: list[bytes] = []
    call = Call()

    def write(_context: Any, text: Any, length: int) -> None:
        parts.append(ctypes.string_at(text, length))

    call.run(function, *arguments, _structs.Sink(write=_structs.WriteCallback(call.protect(write))))
    call.finish()
    return b"".join(parts).decode()


def trace(problem: Problem, schedule: Schedule, budget: BudgetLike = RECORDED) -> str:
    """A timeline as JSON that https://ui.perfetto.dev opens: three lanes, device and host memory.

    Parameters
    ----------
    problem
        The problem that the schedule was made for.
    schedule
        What to draw.
    budget
        Device memory, bytes or text; None for no limit; by default the one that the schedule records.

    Returns
    -------
    str
        The JSON.

    Raises
    ------
    InvalidSchedule
        There is no timeline of a schedule that is not valid.
    Mismatch
        The schedule was made for another problem.
    """
    replay = simulate(problem, schedule, budget)
    if replay.violation is not None:
        raise InvalidSchedule(replay.violation, replay)
    return reported(lib.cairn_report_trace, problem_pointer(problem), schedule_pointer(schedule), budget_bytes(budget))


def save_trace(path: FilePath, problem: Problem, schedule: Schedule, budget: BudgetLike = RECORDED) -> None:
    """Write ``trace`` to a file.

    Parameters
    ----------
    path
        The file.
    problem
        The problem that the schedule was made for.
    schedule
        What to draw.
    budget
        Device memory, bytes or text; None for no limit; by default the one that the schedule records.

    Raises
    ------
    InvalidSchedule
        There is no timeline of a schedule that is not valid.
    Mismatch
        The schedule was made for another problem.
    """
    file_write(path, trace(problem, schedule, budget))
