"""The simulator that judges schedules, and what was verified."""

from __future__ import annotations

import ctypes
import enum
from typing import Any, Final

from . import _structs
from ._calls import Call
from ._errors import InvalidSchedule
from ._library import Handle, lib, number_of, text_of
from ._problem import Problem, problem_pointer
from ._replay import MemoryPoint, Replay, Span, Violation
from ._schedule import Schedule, schedule_pointer
from ._units import Size, size_bytes


class Recorded(enum.Enum):
    """Type of RECORDED."""

    RECORDED = "recorded"

    def __repr__(self) -> str:
        return "cairn.RECORDED"


#: As a budget: the one that the schedule records, or none where it records none.
RECORDED: Final = Recorded.RECORDED
#: Bytes, text such as "8GiB", None for no budget, or RECORDED.
BudgetLike = Size | Recorded | None


def budget_bytes(budget: BudgetLike) -> int:
    """A budget as the C library takes it."""
    if budget is None or (isinstance(budget, str) and budget == "none"):
        return _structs.NONE
    if isinstance(budget, Recorded):
        return _structs.RECORDED
    return size_bytes(budget, "budget")


_LANES = ("compute", "to_host", "to_device")


def _replay_of(
    replay: _structs.Replay, timeline: list[Span] | None = None, memory: list[MemoryPoint] | None = None
) -> Replay:
    violation = None
    if not replay.valid:
        broken = replay.violation
        violation = Violation(
            text_of(lib.cairn_violation_name(broken.code)),
            number_of(broken.op),
            text_of(broken.message),
            number_of(broken.needed_bytes),
            number_of(broken.free_bytes),
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
        The simulator's result.
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
    violation = _replay_of(replay)
    if violation.violation is not None:
        raise InvalidSchedule(violation.violation, violation)
    verified = object.__new__(Verified)
    for name, value in (
        ("_handle", Handle(pointer, lib.cairn_verified_free)),
        ("problem", problem),
        ("schedule", schedule),
        ("replay", violation),
        ("budget_bytes", schedule.budget_bytes if limit == _structs.RECORDED else number_of(limit)),
    ):
        object.__setattr__(verified, name, value)
    return verified
