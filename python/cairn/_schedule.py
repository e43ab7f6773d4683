"""Schedules, the simulator that judges them, and what was verified."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterable, Sequence
from typing import Any, Final

from . import _structs
from ._calls import Call
from ._document import Document, FilePath, file_read, file_write, naming, written
from ._errors import BadInput, InvalidSchedule
from ._library import Handle, lib, number_of, text_of
from ._problem import Machine, Problem, machine_of, machine_struct, problem_pointer
from ._replay import MemoryPoint, Replay, Span, Violation
from ._units import Size, encoded, integer, json_bytes, listed, size_bytes

#: One operation as in files: ("forward_save", 1, 0), ("backward", 1), ("drop", "output", 2), ("compute", 7).
Op = tuple[str | int, ...]


def schedule_pointer(schedule: Any) -> Any:
    """The cairn_schedule * of an argument, or a TypeError that says what to give."""
    if isinstance(schedule, Schedule):
        return schedule.pointer
    hint = "; a Solution has one as its attribute schedule" if hasattr(schedule, "outcome") else ""
    raise TypeError(f"schedule must be a cairn.Schedule, not {type(schedule).__name__}{hint}")


class Recorded(enum.Enum):
    """Type of RECORDED."""

    RECORDED = "recorded"

    def __repr__(self) -> str:
        return "cairn.RECORDED"


#: As a budget: the one that the schedule records, or none where it records none.
RECORDED: Final = Recorded.RECORDED

#: Bytes, text such as "8GiB", None for no budget, or RECORDED.
BudgetLike = Size | Recorded | None

_VALUES = ("output", "saved")


def _op_names() -> tuple[str, ...]:
    names: list[str] = []
    while (name := lib.cairn_op_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


_OP_NAMES = _op_names()
_OP_CODES = {name: code for code, name in enumerate(_OP_NAMES)}
_FORWARD_SAVE = _OP_CODES["forward_save"]
_MOVES = frozenset(_OP_CODES[name] for name in ("drop", "offload", "prefetch", "discard"))


def budget_bytes(budget: BudgetLike) -> int:
    """A budget as the C library takes it."""
    if budget is None or (isinstance(budget, str) and budget == "none"):
        return _structs.NONE
    if isinstance(budget, Recorded):
        return _structs.RECORDED
    return size_bytes(budget, "budget")


def _op_shape(code: int, is_chain: bool) -> str:
    if code in _MOVES and is_chain:
        return f'("{_OP_NAMES[code]}", "output" or "saved", index)'
    return f'("{_OP_NAMES[code]}", index{", option" if code == _FORWARD_SAVE else ""})'


def _op_struct(op: Sequence[Any], position: int, is_chain: bool) -> _structs.Op:
    def refuse(message: str) -> BadInput:
        return BadInput(message, index=position, path=f"ops[{position}]")

    if isinstance(op, (str, bytes)) or not isinstance(op, Sequence) or not op:
        raise refuse(f"an operation is a tuple such as ('backward', 1), not {op!r}")
    code = _OP_CODES.get(op[0]) if isinstance(op[0], str) else None
    if code is None:
        raise refuse(f"{op[0]!r} is not an operation; there are {', '.join(_OP_NAMES)}")
    rest = list(op[1:])
    value = option = 0
    if code in _MOVES and is_chain:
        if len(rest) != 2 or rest[0] not in _VALUES:
            raise refuse(f"{op!r}: expected {_op_shape(code, is_chain)}")
        value = _VALUES.index(rest.pop(0))
    elif code == _FORWARD_SAVE and len(rest) == 2:
        option = integer(rest.pop(), "option", f"ops[{position}]")
    if len(rest) != 1:
        raise refuse(f"{op!r}: expected {_op_shape(code, is_chain)}")
    index = integer(rest[0], "index", f"ops[{position}]")
    if not 0 <= option < 2**16 or not 0 <= index < 2**31:
        raise refuse(f"{op!r}: index or option out of range")
    return _structs.Op(code, value, option, index)


def _op_tuple(op: _structs.Op, is_chain: bool) -> Op:
    name = _OP_NAMES[op.code]
    if op.code == _FORWARD_SAVE:
        return name, op.index, op.option
    if is_chain and op.code in _MOVES:
        return name, _VALUES[op.value], op.index
    return name, op.index


class Schedule(Document):
    """An immutable list of operations for one problem. Made by solvers, from_ops, from_json and load.

    Schedules are equal when their hashes are: over the problem's hash, the machine and the operations.
    They may be shared between threads, copied (a copy is the same object) and pickled (with their problem).
    """

    __slots__ = ("_problem",)
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

        Indices are checked here; what the operations mean is up to ``simulate`` and ``verify``. The rest is recorded
        beside them and checked by ``verify``: budget and peak in bytes, times in nanoseconds. A machine replaces the
        problem's.

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
                lib.check(lib.cairn_builder_add, builder, _op_struct(op, position, is_chain))
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
            self._views["ops"] = tuple(_op_tuple(array[i], is_chain) for i in range(len(self)))
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
        return written(lib.cairn_schedule_write, self.pointer)

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
        with naming(path):
            return cls.from_json(problem, file_read(path))


_LANES = ("compute", "to_host", "to_device")


def _replay_of(
    replay: _structs.Replay, timeline: list[Span] | None = None, memory: list[MemoryPoint] | None = None
) -> Replay:
    violation = None
    if not replay.valid:
        found = replay.violation
        violation = Violation(
            text_of(lib.cairn_violation_name(found.code)),
            number_of(found.op),
            text_of(found.message),
            number_of(found.needed_bytes),
            number_of(found.free_bytes),
        )
    return Replay(
        bool(replay.valid),
        number_of(replay.makespan_ns),
        number_of(replay.peak_bytes),
        number_of(replay.host_peak_bytes),
        number_of(replay.compute_ns),
        number_of(replay.recompute_ns),
        number_of(replay.stall_ns),
        violation,
        None if timeline is None else tuple(timeline),
        None if memory is None else tuple(memory),
    )


def simulate(problem: Problem, schedule: Schedule, budget: BudgetLike = RECORDED, *, timeline: bool = False) -> Replay:
    """Replay a schedule and say what it takes. A broken rule is a result: ``replay.valid`` is False.

    Parameters
    ----------
    problem
        The problem that the schedule was made for.
    schedule
        What to replay.
    budget
        Device memory, bytes or text; None for no limit; by default the one that the schedule records.
    timeline
        Also collect ``replay.timeline`` and ``replay.memory``.

    Returns
    -------
    Replay
        Makespan in nanoseconds, peaks in bytes, and the violation if a rule is broken.

    Raises
    ------
    Mismatch
        The schedule was made for another problem.

    Examples
    --------
    >>> cairn.simulate(chain, schedule, budget="5GiB").peak_bytes
    """
    limit = budget_bytes(budget)
    replay = _structs.Replay()
    if not timeline:
        lib.check(
            lib.cairn_simulate,
            None,
            problem_pointer(problem),
            schedule_pointer(schedule),
            limit,
            None,
            ctypes.byref(replay),
        )
        return _replay_of(replay)
    spans: list[Span] = []
    points: list[MemoryPoint] = []
    call = Call()

    def on_op(_context: Any, position: int, _op: Any, lane: int, start_ns: int, end_ns: int) -> None:
        spans.append(Span(position, _LANES[lane], start_ns, end_ns))

    def on_memory(_context: Any, time_ns: int, device_bytes: int, host_bytes: int) -> None:
        points.append(MemoryPoint(time_ns, device_bytes, host_bytes))

    observer = _structs.Observer(
        op=_structs.OpCallback(call.protect(on_op)), memory=_structs.MemoryCallback(call.protect(on_memory))
    )
    call.run(
        lib.cairn_simulate,
        problem_pointer(problem),
        schedule_pointer(schedule),
        limit,
        ctypes.byref(observer),
        ctypes.byref(replay),
    )
    call.finish()
    return _replay_of(replay, spans, points)


class Verified:
    """A schedule that the simulator accepted for its problem and budget: what executors take. Made by ``verify`` only.

    Attributes
    ----------
    problem
        The problem.
    schedule
        The schedule.
    replay
        What the simulator found.
    budget_bytes
        The budget that it was verified under, bytes; None for none.
    """

    __slots__ = ("__weakref__", "_handle", "budget_bytes", "problem", "replay", "schedule")
    _handle: Handle
    problem: Problem
    schedule: Schedule
    replay: Replay
    budget_bytes: int | None

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a Verified is made by cairn.verify")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Verified is immutable: {name} cannot be set")

    def __copy__(self) -> Verified:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Verified:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return verify, (self.problem, self.schedule, self.budget_bytes)

    @property
    def pointer(self) -> Any:
        """The cairn_verified * in C, for callers of other C functions; valid as long as this object."""
        return self._handle.pointer

    def __repr__(self) -> str:
        return f"<cairn.Verified {self.schedule!r}>"


def verify(problem: Problem, schedule: Schedule, budget: BudgetLike = RECORDED) -> Verified:
    """Replay a schedule and compare makespan and peak with the recorded ones.

    Parameters
    ----------
    problem
        The problem that the schedule was made for.
    schedule
        What to judge.
    budget
        Device memory, bytes or text; None for no limit; by default the one that the schedule records.

    Returns
    -------
    Verified
        What executors take.

    Raises
    ------
    InvalidSchedule
        A rule is broken, or the budget does not hold; ``violation`` of the error says which and where.
    Mismatch
        The schedule was made for another problem.

    Examples
    --------
    >>> verified = cairn.verify(chain, solution.require(), "5GiB")
    """
    limit = budget_bytes(budget)
    replay = _structs.Replay()
    pointer = ctypes.POINTER(_structs.Verified)()
    lib.check(
        lib.cairn_verify,
        None,
        problem_pointer(problem),
        schedule_pointer(schedule),
        limit,
        ctypes.byref(pointer),
        ctypes.byref(replay),
    )
    found = _replay_of(replay)
    if found.violation is not None:
        raise InvalidSchedule(found.violation, found)
    verified = object.__new__(Verified)
    for name, value in (
        ("_handle", Handle(pointer, lib.cairn_verified_free)),
        ("problem", problem),
        ("schedule", schedule),
        ("replay", found),
        ("budget_bytes", schedule.budget_bytes if limit == _structs.RECORDED else number_of(limit)),
    ):
        object.__setattr__(verified, name, value)
    return verified


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
