"""`CompiledPlan`: the plan of one compiled training step, as data that saves, loads and prints."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import cairn
from cairn import format_budget, format_bytes, format_ns

from ..base.errors import PlanMismatch
from ..base.plan_files import read_plan, write_json

FORMAT, VERSION = "cairn-compiled-plan", 1
_LARGEST = 6  # parts of a peak that a report names


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """A schedule of a step's joint graph, its memory and its time. Sizes in bytes, times in nanoseconds.

    Attributes
    ----------
    kernels : str
        "eager" (operators run one by one) or "inductor".
    budget_bytes, reserve_bytes : int
        The budget, and the part of it that the plan leaves free for memory that was not measured.
    gradients : str
        "created" if every step creates its gradients, "accumulated" if steps may add to existing ones.
    peak_bytes : int
        Predicted peak of the step.
    measured_peak_bytes : int or None
        Peak of the compiled step when it was run while planning.
    plain_peak_bytes, plain_ns : int
        Predicted for the same graph with nothing recomputed.
    least_budget_bytes : int or None
        About the least budget, as the search for this plan saw it; None if it saw none. With inductor's kernels it is
        an estimate, and code for it may take more.
    step_ns, lower_bound_ns, gap :
        Predicted time; no schedule of the problem within the budget, its reserve left free, is predicted to be faster
        than the bound; the relative distance between the two.
    recomputed : int
        The number of calls that the backward recomputes.
    problem, schedule : dict
        The joint graph as a `cairn-graph`, and its `cairn-schedule`.
    resident, at_peak : dict
        Memory that is resident during the whole step, and the parts of the peak, bytes by name.
    peak_at : str
        The operator during which memory has its peak.
    correction_bytes : int
        Part of the predicted peak: the excess of an earlier compilation of this step over its prediction.
    tier : str
        Where values are offloaded: "host" or "file:PATH".
    host_budget_bytes, host_bytes : int
        The most that may be offloaded at a time (0: nothing), and what the plan needs of it.
    """

    model_name: str
    device: str
    kernels: str
    budget_bytes: int
    reserve_bytes: int
    gradients: str
    peak_bytes: int
    measured_peak_bytes: int | None
    plain_peak_bytes: int
    plain_ns: int
    least_budget_bytes: int | None
    step_ns: int
    lower_bound_ns: int | None
    gap: float | None
    solver: str
    outcome: str
    recomputed: int
    problem: Mapping[str, Any]
    schedule: Mapping[str, Any]
    resident: Mapping[str, int]
    at_peak: Mapping[str, int]
    peak_at: str
    correction_bytes: int = 0
    notes: tuple[str, ...] = ()
    tier: str = "host"
    host_budget_bytes: int = 0
    host_bytes: int = 0

    @property
    def overhead(self) -> float:
        """Predicted extra time, as a share of the step with nothing recomputed."""
        return self.step_ns / self.plain_ns - 1 if self.plain_ns else 0.0

    @property
    def recomputed_results(self) -> int:
        """How many of the problem's results are computed more than once."""
        runs = Counter(op[1] for op in self.schedule["ops"] if op[0] == "compute")
        return sum(count > 1 for count in runs.values())

    @property
    def graph(self) -> cairn.Graph:
        """The problem, for the solvers and the command line."""
        return cairn.Graph.from_json(json.dumps(self.problem))

    @property
    def machine(self) -> cairn.Machine | None:
        """The host budget and the link; None if nothing may be offloaded."""
        return self.graph.machine

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self), "notes": list(self.notes)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompiledPlan:
        """Read a plan that `save` wrote.

        Raises
        ------
        PlanMismatch
            The file is no plan of a compiled step, or of another version.
        """
        data = read_plan(path, FORMAT, VERSION)
        names = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in data.items() if name in names}
        try:
            return cls(**{**values, "notes": tuple(data.get("notes", ()))})
        except TypeError as error:
            raise PlanMismatch(f"{path} has not the fields of {FORMAT} {VERSION}: {error}") from None

    def __str__(self) -> str:
        lines = [f"{self.model_name} on {self.device}: compiled step, {self.kernels} kernels (whole step)"]
        least = "" if self.least_budget_bytes is None else f"; the least is {self._least()}"
        reserve = f"of which {format_bytes(self.reserve_bytes)} stay in reserve"
        lines.append(f"  budget      {format_bytes(self.budget_bytes)}, {reserve}{least}")
        plain = f"with nothing recomputed {format_bytes(self.plain_peak_bytes)}"
        lines.append(f"  peak        {format_bytes(self.peak_bytes)} predicted; {plain}")
        bound = "" if self.gap is None else f", at most {100 * self.gap:.1f} % from the optimum of the graph"
        time = f"{format_ns(self.step_ns)} predicted, {100 * self.overhead:+.1f} % against nothing recomputed"
        lines.append(f"  time        {time}{bound} ({self.solver})")
        if self.measured_peak_bytes is not None:
            off = 100 * (self.peak_bytes / self.measured_peak_bytes - 1)
            lines.append(f"  measured    {format_bytes(self.measured_peak_bytes)} (predicted {off:+.2f} %)")
        share = f"{self.recomputed_results} of {len(self.problem['nodes'])} results"
        lines.append(f"  recomputed  {share}, by {self.recomputed} calls in the backward")
        if self.host_budget_bytes:
            host = f"{format_bytes(self.host_bytes)} of {format_bytes(self.host_budget_bytes)}"
            lines.append(f"  offloaded   {host} of {self.tier} memory")
        lines += ["", f"  what makes up the peak (during the {self.peak_at}):"]
        lines += [f"  {format_bytes(size):>12}  {name}" for name, size in self._largest()]
        return "\n".join([*lines, *(f"  note        {note}" for note in self.notes)])

    def _least(self) -> str:
        least = format_budget(self.least_budget_bytes or 0)
        return f"about {least}" if self.kernels == "eager" else f"estimated at {least} before code is generated"

    def _largest(self) -> list[tuple[str, int]]:
        parts = sorted({**self.resident, **self.at_peak}.items(), key=lambda part: -part[1])
        rest = sum(size for _, size in parts[_LARGEST:])
        return [*parts[:_LARGEST], *([("others", rest)] if rest else [])]
