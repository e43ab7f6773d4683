"""The simulator's result for a schedule, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Violation:
    """The first rule that a schedule breaks.

    Attributes
    ----------
    code
        Which rule, such as ``"over_budget"``.
    op
        Position of the operation at fault, from 0; None when no single one is.
    message
        A sentence.
    needed_bytes
        What an operation over the budget needs, bytes; else None.
    free_bytes
        What the budget leaves it, bytes; else None.
    """

    code: str
    op: int | None
    message: str
    needed_bytes: int | None = None
    free_bytes: int | None = None


class Span(NamedTuple):
    """When an operation occupied its lane.

    Attributes
    ----------
    op
        Position in the list, from 0.
    lane
        "compute", "to_host" or "to_device".
    start_ns
        Nanoseconds from the start of the step.
    end_ns
        Nanoseconds from the start of the step.
    """

    op: int
    lane: str
    start_ns: int
    end_ns: int


class MemoryPoint(NamedTuple):
    """Memory in use from a time on.

    Attributes
    ----------
    time_ns
        Nanoseconds from the start of the step.
    device_bytes
        Bytes on the device, fixed ones included.
    host_bytes
        Bytes on the host.
    """

    time_ns: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Replay:
    """The result of a simulation. When the schedule is not valid, the numbers are None.

    Attributes
    ----------
    valid
        No rule is broken, and the budget holds.
    makespan_ns
        End of the last operation, nanoseconds.
    peak_bytes
        Largest device memory at any time, bytes.
    host_peak_bytes
        Largest host memory at any time, bytes.
    compute_ns
        Time of all computations, nanoseconds.
    recompute_ns
        Of those that are not the first of their stage or node, nanoseconds.
    stall_ns
        Makespan less all compute time, nanoseconds.
    violation
        The first rule that is broken; None when valid.
    timeline
        Computations and transfers in list order, if asked for.
    memory
        Device and host memory over time, if asked for.
    """

    valid: bool
    makespan_ns: int | None
    peak_bytes: int | None
    host_peak_bytes: int | None
    compute_ns: int | None
    recompute_ns: int | None
    stall_ns: int | None
    violation: Violation | None
    timeline: tuple[Span, ...] | None = field(default=None, repr=False)
    memory: tuple[MemoryPoint, ...] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields that ``cairn verify --json`` prints, as JSON values."""
        names = ("valid", "makespan_ns", "peak_bytes", "host_peak_bytes", "recompute_ns", "stall_ns")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        violation = None if self.violation is None else asdict(self.violation)
        values["violation"] = violation and {name: violation[name] for name in ("code", "op", "message")}
        return values
