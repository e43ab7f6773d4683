"""Schedules: immutable lists of operations for one problem."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from . import _structs
from ._document import Document, FilePath, loaded
from ._library import Handle, lib, number_of, text_of
from ._machine import Machine, machine_of, machine_struct
from ._ops import Op, op_struct, op_tuple
from ._problem import Problem, problem_pointer
from ._units import encoded, integer, json_bytes, listed


def schedule_pointer(schedule: Any) -> Any:
    """The cairn_schedule * of an argument, or a TypeError that says what to give."""
    if isinstance(schedule, Schedule):
        return schedule.pointer
    hint = "; a Solution has one as its attribute schedule" if hasattr(schedule, "outcome") else ""
    raise TypeError(f"schedule must be a cairn.Schedule, not {type(schedule).__name__}{hint}")


class Schedule(Document):
    """An immutable list of operations for one problem. Made by solvers, from_ops, from_json and load.

    Schedules are equal when their hashes are: over the problem's hash, the machine and the operations.
    They may be shared between threads, copied (a copy is the same object) and pickled (with their problem).
    """

    __slots__ = ("_problem",)
    _writer = "cairn_schedule_write"
    _problem: Problem

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a Schedule is made by cairn.solve, Schedule.from_ops, Schedule.from_json or Schedule.load")

    @classmethod
    def _adopt(cls, problem: Problem, pointer: Any) -> Schedule:
        schedule = object.__new__(cls)
        schedule._own(Handle(pointer, lib.cairn_schedule_free))
        schedule._problem = problem
        return schedule

    @classmethod
    def from_ops(
        cls,
        problem: Problem,
        ops: Iterable[Sequence[Any]],
        *,
        solver: str | None = None,
        budget_bytes: int | None = None,
        makespan_ns: int | None = None,
        peak_bytes: int | None = None,
        lower_bound_ns: int | None = None,
        machine: Machine | None = None,
    ) -> Schedule:
        """A schedule from operations, written as in files: ``("forward_save", 1, 0)``, ``("drop", "output", 2)``.

        Indices are checked here; ``simulate`` and ``verify`` check the meaning of operations. The other arguments are
        recorded with them and checked by ``verify``: budget and peak in bytes, times in nanoseconds. A machine replaces
        the problem's.

        Raises
        ------
        BadInput
            An operation is malformed or out of range; ``index`` of the error is its position.
        """
        info = _structs.ScheduleInfo(
            solver=None if solver is None else encoded(solver, "solver"),
            **{
                name: _structs.NONE if value is None else integer(value, name, least=0)
                for name, value in (
                    ("budget_bytes", budget_bytes),
                    ("makespan_ns", makespan_ns),
                    ("peak_bytes", peak_bytes),
                    ("lower_bound_ns", lower_bound_ns),
                )
            },
        )
        if machine is not None:
            info.machine = ctypes.pointer(machine_struct(machine))
        builder = ctypes.POINTER(_structs.Builder)()
        lib.check(lib.cairn_builder_new, None, problem_pointer(problem), ctypes.byref(builder))
        try:
            is_chain = problem.kind == "chain"
            for position, op in enumerate(listed(ops, "ops", "operations")):
                lib.check(lib.cairn_builder_add, builder, op_struct(op, position, is_chain))
            pointer = ctypes.POINTER(_structs.Schedule)()
            lib.check(lib.cairn_builder_finish, builder, ctypes.byref(info), ctypes.byref(pointer))
            return cls._adopt(problem, pointer)
        finally:
            lib.cairn_builder_free(builder)

    @property
    def _info(self) -> _structs.ScheduleInfo:
        info: _structs.ScheduleInfo = lib.cairn_schedule_info_of(self.pointer).contents
        return info

    @property
    def problem(self) -> Problem:
        """The problem that it was made for."""
        return self._problem

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operations, as in files. Stages count from 1, nodes from 0."""
        if "ops" not in self._views:
            is_chain = self._problem.kind == "chain"
            array = lib.cairn_schedule_ops(self.pointer)
            self._views["ops"] = tuple(op_tuple(array[i], is_chain) for i in range(len(self)))
        ops: tuple[Op, ...] = self._views["ops"]
        return ops

    def __len__(self) -> int:
        """Number of operations."""
        return int(lib.cairn_schedule_count(self.pointer))

    @property
    def solver(self) -> str | None:
        """Name of the solver that made it, if recorded."""
        return text_of(self._info.solver) or None

    @property
    def budget_bytes(self) -> int | None:
        """Recorded budget, bytes."""
        return number_of(self._info.budget_bytes)

    @property
    def makespan_ns(self) -> int | None:
        """Recorded makespan, nanoseconds."""
        return number_of(self._info.makespan_ns)

    @property
    def peak_bytes(self) -> int | None:
        """Recorded peak of device memory, bytes."""
        return number_of(self._info.peak_bytes)

    @property
    def lower_bound_ns(self) -> int | None:
        """Recorded bound on every makespan within the budget, nanoseconds."""
        return number_of(self._info.lower_bound_ns)

    @property
    def machine(self) -> Machine | None:
        """The machine that replaces the problem's; None when it is the problem's."""
        return machine_of(self._info.machine)

    @property
    def hash(self) -> str:
        """Hash of the problem's hash, the machine and the operations: "sha256:" and 64 hexadecimal digits."""
        return text_of(lib.cairn_schedule_hash(self.pointer))

    @property
    def problem_hash(self) -> str:
        """Hash of the problem that it was made for."""
        return text_of(lib.cairn_schedule_problem_hash(self.pointer))

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule.from_json, (self._problem, self.to_json())

    def __repr__(self) -> str:
        return f"<cairn.Schedule {self.solver or 'by hand'}: {len(self)} operations, {self.hash[:19]}>"

    def to_json(self) -> str:
        """The schedule as a cairn-schedule file, ending in a newline."""
        return super().to_json()

    @classmethod
    def from_json(cls, problem: Problem, text: str | bytes) -> Schedule:
        """Reads a cairn-schedule file's text.

        Raises
        ------
        Mismatch
            It names another problem's hash.
        Parse, BadInput, TooLarge
            The text is not a schedule; the error says where.
        """
        data = json_bytes(text)
        pointer = ctypes.POINTER(_structs.Schedule)()
        lib.check(lib.cairn_schedule_read, None, problem_pointer(problem), data, len(data), ctypes.byref(pointer))
        return cls._adopt(problem, pointer)

    @classmethod
    def load(cls, problem: Problem, path: FilePath) -> Schedule:
        """Reads a cairn-schedule file.

        Raises
        ------
        OSError
            The file cannot be read.
        Error
            As from_json, with the file in the error.
        """
        return loaded(path, functools.partial(cls.from_json, problem))
