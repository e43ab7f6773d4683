"""Exceptions: one class per status of the C library, under the same name, plus what Python adds."""

from __future__ import annotations

import builtins
from typing import Any

from ._replay import Replay, Violation


class Error(Exception):
    """Base of everything that Cairn raises on purpose.

    Positions and texts that do not apply are None.

    Attributes
    ----------
    code
        Name of the status in C and on the command line, such as ``"bad_input"``.
    message
        The reason, without the position.
    line
        1-based line in the text that was read.
    column
        1-based column in that line, in bytes.
    offset
        0-based byte offset in that text.
    index
        What is at fault: a stage (1-based), or a node or an operation (0-based).
    path
        JSON path of the field at fault, such as ``"stages[3].options[0].saved_bytes"``.
    file
        The file that was read or written.
    """

    code = "error"

    def __init__(
        self,
        message: str,
        *,
        line: int | None = None,
        column: int | None = None,
        offset: int | None = None,
        index: int | None = None,
        path: str | None = None,
        file: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column
        self.offset = offset
        self.index = index
        self.path = path
        self.file = file

    def __str__(self) -> str:
        place = self.file or ""
        if self.line is not None and place:
            place += f":{self.line}" if self.column is None else f":{self.line}:{self.column}"
        elif self.line is not None:
            place = f"line {self.line}" if self.column is None else f"line {self.line}, column {self.column}"
        path = self.path if self.path and self.path not in self.message else ""
        return ": ".join(part for part in (place, path, self.message) if part)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[Error], args: tuple[Any, ...], state: dict[str, Any]) -> Error:
    """Unpickles an exception whose constructor takes keywords (errors are passed between processes)."""
    base: Any = cls
    while not hasattr(builtins, base.__name__):  # the one that lays out the object, not the first with a __new__
        base = base.__base__
    error: Error = base.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class NoMemory(Error, MemoryError):
    """An allocation failed."""

    code = "no_memory"


class BadArgument(Error, ValueError):
    """An argument breaks a function's contract."""

    code = "bad_argument"


class BadInput(Error, ValueError):
    """A problem, a schedule or the value of an option is not valid."""

    code = "bad_input"


class Parse(Error, ValueError):
    """Text is not well-formed JSON."""

    code = "parse"


class Overflow(Error, OverflowError):
    """A number, or a sum of sizes or times, passes 2^63 - 1."""

    code = "overflow"


class TooLarge(Error, ValueError):
    """A stated limit (stages, nodes, operations, file size) is exceeded."""

    code = "too_large"


class Mismatch(Error, ValueError):
    """A schedule does not belong to this problem."""

    code = "mismatch"


class Unsupported(Error, ValueError):
    """The solver cannot handle this problem, or does not take an option."""

    code = "unsupported"


class Unavailable(Error, RuntimeError):
    """A part that was not built into the library, or was not found."""

    code = "unavailable"


class MemoryLimit(Error, MemoryError):
    """The solver would need more memory than it may use (option ``memory_limit``)."""

    code = "memory_limit"


class Cancelled(Error):
    """The progress callback asked to stop before there was an answer."""

    code = "cancelled"


class Io(Error, OSError):
    """A file could not be written."""

    code = "io"


class Callback(Error, RuntimeError):
    """A callback reported failure."""

    code = "callback"


class Internal(Error, RuntimeError):
    """A defect in Cairn; please report it."""

    code = "internal"


class InvalidSchedule(Error, ValueError):
    """A schedule breaks a rule of the format or exceeds the budget.

    Attributes
    ----------
    violation
        Which rule, at which operation.
    replay
        What the simulator said (``replay.valid`` is False).
    """

    code = "invalid_schedule"
    violation: Violation
    replay: Replay

    def __init__(self, violation: Violation, replay: Replay) -> None:
        super().__init__(f"{violation.code}: {violation.message}", index=violation.op)
        self.violation = violation
        self.replay = replay


class NoSchedule(Error):
    """There is no schedule to go on with.

    Attributes
    ----------
    solution
        The answer without a schedule; None when the error did not come from one.
    """

    code = "unknown"

    def __init__(self, message: str, *, solution: Any = None) -> None:
        super().__init__(message)
        self.solution = solution


class InfeasibleBudget(NoSchedule):
    """No schedule fits in the budget.

    Attributes
    ----------
    budget_bytes
        The budget that was asked for.
    least_bytes
        The least budget that works; None when it is not known.
    solution
        The answer that said so; None when the error did not come from one.
    """

    code = "infeasible"

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int | None = None,
        least_bytes: int | None = None,
        solution: Any = None,
    ) -> None:
        super().__init__(message, solution=solution)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes


#: Status name in C -> exception.
BY_CODE: dict[str, type[Error]] = {
    cls.code: cls
    for cls in (
        NoMemory,
        BadArgument,
        BadInput,
        Parse,
        Overflow,
        TooLarge,
        Mismatch,
        Unsupported,
        Unavailable,
        MemoryLimit,
        Cancelled,
        Io,
        Callback,
        Internal,
    )
}
