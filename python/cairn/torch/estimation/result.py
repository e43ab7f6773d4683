"""`Estimate`: the result of `estimate`, as data and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cairn import format_bytes, format_ns

from ..planning.step_profile import Profile


@dataclasses.dataclass(frozen=True)
class EstimatePoint:
    """A plan within a budget.

    Attributes
    ----------
    budget_bytes, peak_bytes : int
        The budget, and the peak of the step within it.
    extra_time : float
        Extra time as a share of the plain step's time, by the model of the device.
    step_ns : int or None
        Nanoseconds, where the device has rates.
    """

    budget_bytes: int
    peak_bytes: int
    extra_time: float
    step_ns: int | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated memory and time of a training step. Sizes are bytes on one device.

    Attributes
    ----------
    parameter_count : int
        Parameters of the whole model.
    device, rates : str
        The device, and its rates, from which times are computed.
    memory_bytes : int or None
        The memory that the step may use.
    batch : int
        The batch of the sample.
    plain_peak_bytes : int
        Peak of the step with nothing recomputed.
    least_budget_bytes : int
        The least budget that `checkpoint` can keep to.
    plain_ns : int or None
        Time of the plain step by the model of the device; None without rates.
    points : tuple of EstimatePoint
        The curve between the two, least budget first.
    within : EstimatePoint or None
        The plan within the memory; None where none fits, or no memory was given.
    largest_batch, largest_plain_batch : int or None
        The largest batch within the memory, with a plan and with nothing recomputed; 0 where not even 1 fits.
    resident : dict
        Memory that is held during the whole step, bytes by name.
    profile : Profile
        For `plan`, `sweep` and `explain`.
    """

    model_name: str
    parameter_count: int
    device: str
    rates: str
    memory_bytes: int | None
    shard: int
    batch: int
    gradients: str
    plain_peak_bytes: int
    least_budget_bytes: int
    plain_ns: int | None
    points: tuple[EstimatePoint, ...]
    within: EstimatePoint | None
    largest_batch: int | None
    largest_plain_batch: int | None
    resident: Mapping[str, int]
    notes: tuple[str, ...]
    profile: Profile = dataclasses.field(repr=False, compare=False)

    @property
    def fits(self) -> bool | None:
        """Whether the step fits in the memory; None where none was given."""
        return None if self.memory_bytes is None else self.within is not None

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON, without the profile."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "profile")
        data = {name: getattr(self, name) for name in fields}
        data["points"] = [dataclasses.asdict(point) for point in self.points]
        data["within"] = None if self.within is None else dataclasses.asdict(self.within)
        data["resident"], data["notes"] = dict(self.resident), list(self.notes)
        return {"format": "cairn-torch-estimate", "version": 1, **data}

    def __str__(self) -> str:
        over = f", sharded over {self.shard} devices, each" if self.shard > 1 else ""
        lines = [f"{self.model_name}, {_count(self.parameter_count)} parameters{over} on {self.device}: estimate"]
        step = "" if self.plain_ns is None else f", at least {format_ns(self.plain_ns)} a step"
        lines.append(f"  batch {self.batch:<7}{format_bytes(self.plain_peak_bytes)} with nothing recomputed{step}")
        lines.append(f"               {format_bytes(self.least_budget_bytes)} is the least budget that works")
        lines += self._within()
        lines += ["", f"  {'budget':>12} {'peak':>12} {'extra time':>11}" + ("       step" if self.plain_ns else "")]
        for point in self.points:
            time = "" if point.step_ns is None else f" {format_ns(point.step_ns):>10}"
            sizes = f"{format_bytes(point.budget_bytes):>12} {format_bytes(point.peak_bytes):>12}"
            lines.append(f"  {sizes} {100 * point.extra_time:>9.1f} %{time}")
        counted = f"times by {self.rates}" if self.rates else "time in FLOPs, and 100 of them for a byte that is moved"
        lines += [f"  {counted}", "", "  during the whole step:"]
        lines += [f"  {format_bytes(size):>12}  {name}" for name, size in sorted(self.resident.items(), key=_by_size)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _within(self) -> list[str]:
        if self.memory_bytes is None:
            return []
        room = format_bytes(self.memory_bytes)
        fit = f"does not fit in {room}" if self.within is None else f"fits in {room}, {_extra(self.within)}"
        lines = [f"  {fit}"]
        if self.largest_batch is not None:
            lines.append(f"  largest batch in {room}: {self.largest_batch}; plainly {self.largest_plain_batch}")
        return lines


def _extra(point: EstimatePoint) -> str:
    return "with nothing recomputed" if point.extra_time <= 0 else f"with {100 * point.extra_time:.1f} % extra time"


def _by_size(part: tuple[str, int]) -> int:
    return -part[1]


def _count(number: int) -> str:
    for unit, name in ((10**9, " billion"), (10**6, " million")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
