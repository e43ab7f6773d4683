"""The report of a plan on a model, block by block, predicted and measured, as text and as data."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cairn import format_budget, format_bytes, format_ns

from ..base import clock
from ..base.stages import BLOCK, listed, sentences
from ..planning.arguments import check_plan
from ..planning.measured_step import Measured
from ..planning.plan import Plan
from ..planning.shape_plans import ShapePlan
from ..schedule.peak_parts import grouped
from ..schedule.transfer_plan import traffic_of

NOTEWORTHY_SHARE = 0.01  # of a peak


@dataclasses.dataclass(frozen=True)
class Row:
    """One stage of the plan. forwards: the number of its forward runs in a step.

    option: the option of its last saving forward; 0 keeps everything. Sizes and times are those of this option.
    """

    name: str
    kind: str
    action: str
    forwards: int
    option: int
    saved_bytes: int
    output_bytes: int
    forward_ns: int
    backward_ns: int


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """Offloading in a step. `link_busy` is the share of the predicted time in which the busier lane copies."""

    tier: str
    host_budget_bytes: int
    host_bytes: int  # size of the slab in the tier
    host_peak_bytes: int  # most bytes in it at once; less than the slab where lifetimes leave gaps
    to_host_bytes: int
    to_device_bytes: int
    link_busy: float

    @classmethod
    def of(cls, plan: Plan) -> Offloaded | None:
        """From a plan; None if it offloads nothing."""
        if plan.transfer_plan is None:
            return None
        traffic = traffic_of(plan.problem, plan.transfer_plan.ops)
        return cls(
            plan.tier,
            plan.host_budget_bytes,
            plan.host_bytes,
            plan.transfer_plan.host_peak_bytes,
            traffic.to_host_bytes,
            traffic.to_device_bytes,
            traffic.busy_ns / plan.step_ns if plan.step_ns else 0.0,
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """A plan explained: print it, or take `to_json()`.

    Attributes
    ----------
    plan : Plan
        The plan that is explained.
    rows : tuple
        One for each stage: its action, sizes in bytes, times in nanoseconds.
    composition : dict
        The tensors in memory at the peak: bytes by name.
    peak_at : str
        When memory peaks.
    measured
        The measured peak and time of the first steps; None before.
    shapes : tuple
        The plans by shape.
    offloading
        The offloaded bytes and the use of the link; None if nothing is offloaded.
    notes : tuple of str
        Deviations of the latest steps from the plan.
    """

    plan: Plan
    rows: tuple[Row, ...]
    composition: Mapping[str, int]
    peak_at: str
    measured: Measured | None = None
    shapes: tuple[ShapePlan, ...] = ()  # the plans of the model by shape, this one among them
    offloading: Offloaded | None = None
    notes: tuple[str, ...] = ()  # what was not as planned in the latest step

    @property
    def predicted_peak_bytes(self) -> int:
        """The predicted peak of the kind of step that was measured; without a measurement, the higher one."""
        if self.measured is None:
            return self.plan.peak_bytes
        return self.plan.accumulated_peak_bytes if self.measured.gradients_existed else self.plan.created_peak_bytes

    @property
    def floor_at(self) -> str:
        """When memory peaks at the least budget; empty where the optimizer's step sets it."""
        return "" if self.plan.floor is None else self.plan.floor.text

    @property
    def floor(self) -> dict[str, int]:
        """The composition of that peak, bytes by name."""
        moment = self.plan.floor
        blocks = [str(ref) for ref in self.plan.stages if ref.is_block]
        return {} if moment is None else {part.name: part.bytes for part in grouped(moment.parts, blocks)}

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        plan = self.plan
        data: dict[str, Any] = {
            name: getattr(plan, name)
            for name in (
                "model_name",
                "device",
                "scope",
                "budget_bytes",
                "reserve_bytes",
                "least_budget_bytes",
                "gradients",
                "peak_bytes",
                "accumulated_peak_bytes",
                "created_peak_bytes",
                "plain_peak_bytes",
                "optimizer_peak_bytes",
                "step_ns",
                "plain_ns",
                "lower_bound_ns",
                "solver",
                "outcome",
                "overhead",
            )
        }
        data["plan_hash"] = plan.hash
        data["peak_at"], data["composition_bytes"] = self.peak_at, dict(self.composition)
        data["offloading"] = None if self.offloading is None else dataclasses.asdict(self.offloading)
        data["floor_at"], data["floor_bytes"] = self.floor_at, dict(self.floor)
        data["measured"] = None if self.measured is None else dataclasses.asdict(self.measured)
        data["shapes"] = [_shape_data(entry) for entry in self.shapes]
        data["notes"] = list(self.notes)
        data["stages"] = [dataclasses.asdict(row) for row in self.rows]
        return data

    def __str__(self) -> str:
        sections = [[*self._head(), *self._by_shape()], self._peak(), self._floor(), self._table()]
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def _head(self) -> list[str]:
        plan, scope = self.plan, "whole step" if self.plan.scope == "step" else "activations only"
        budget, reserve, peak, created, plain = (
            format_bytes(size)
            for size in (
                plan.budget_bytes,
                plan.reserve_bytes,
                plan.accumulated_peak_bytes,
                plan.created_peak_bytes,
                plan.plain_peak_bytes,
            )
        )
        lines = [
            f"{plan.model_name} on {plan.device}: {'plain' if plan.is_plain else 'planned'} step ({scope})",
            f"  budget      {budget}, of which {reserve} stay in reserve; the least that works is "
            f"{format_budget(plan.least_budget_bytes)}",
            f"  peak        {peak} predicted, {created} in a step that creates its gradients; plain {plain}",
            f"  time        {format_ns(plan.step_ns)} predicted, {100 * plan.overhead:+.1f} % against the plain step"
            + self._bound(),
        ]
        lines += self._offloading_lines()
        if self.measured is not None:
            error = 100 * (self.predicted_peak_bytes / self.measured.peak_bytes - 1)
            peak = f"{format_bytes(self.measured.peak_bytes)} (predicted {error:+.2f} %) in the first steps"
            lines.append(f"  measured    {peak}; {format_ns(self.measured.step_ns)}, measuring included")
            lines += self._times_off(self.measured)
            lines += self._output_not_held(self.measured)
        return lines + [f"  deviations  {note}" for note in _together(self.notes)]

    def _times_off(self, measured: Measured) -> list[str]:
        """Advice if the predicted time is far from the measured one."""
        if_more = "the machine was busy, or measuring took most of a short step"
        told = clock.far_apart(self.plan.step_ns, measured.step_ns, "profile again, the machine was busy", if_more)
        return [f"  times off   {sentence}" for sentence in told]

    def _output_not_held(self, measured: Measured) -> list[str]:
        """Advice if the training loop frees an output that the plan counts: a plan could use less memory."""
        dropped, spared = measured.dropped_bytes, self.predicted_peak_bytes - measured.peak_bytes
        is_noteworthy = dropped > NOTEWORTHY_SHARE * measured.peak_bytes and 2 * spared >= dropped
        if not (self.plan.holds_output and is_noteworthy):
            return []
        return [
            f"  not held    the loop lets go of the model's output, {format_bytes(dropped)}, which the plan counts: "
            "plan with holds_output=False"
        ]

    def _offloading_lines(self) -> list[str]:
        link = self.offloading
        if link is None:
            return []
        out, back, taken, budget, used = map(
            format_bytes,
            (
                link.to_host_bytes,
                link.to_device_bytes,
                link.host_bytes,
                link.host_budget_bytes,
                link.host_peak_bytes,
            ),
        )
        gaps = f", of which {used} are used at once" if link.host_bytes > link.host_peak_bytes else ""
        return [
            f"  offloads    {out} out and {back} back in a step; the link is busy {100 * link.link_busy:.0f} % of it",
            f"              offload tier ({link.tier}): {taken} of {budget}{gaps}",
        ]

    def _by_shape(self) -> list[str]:
        if len(self.shapes) < 2:
            return []
        lines = ["  shapes      each step follows the plan for the smallest inputs that cover its own:"]
        for entry in self.shapes:
            plan, inputs = entry.plan, ", ".join(entry.shapes)
            lines.append(
                f"    {inputs}: {format_bytes(plan.peak_bytes)} predicted, {100 * plan.overhead:+.1f} %, "
                f"{_MADE[entry.made]}{' (this plan)' if plan is self.plan else ''}"
            )
        return lines

    def _bound(self) -> str:
        bound = self.plan.lower_bound_ns
        if bound is None or not self.plan.step_ns:
            return f" ({self.plan.solver})"
        gap = 100 * (1 - bound / self.plan.step_ns)
        most = math.ceil(10 * gap - 1e-6) / 10  # rounded up, but for noise
        text = f"at most {most:.1f} % from the optimum" if gap >= 0.05 else "less than 0.1 % from the optimum"
        text = "proved optimal" if gap <= 0 else text
        return f", {text} ({self.plan.solver})"

    def _peak(self) -> list[str]:
        lines = [f"  what makes up the peak (during the {self.peak_at}):"]
        return lines + [f"    {format_bytes(size):>12}  {name}" for name, size in self.composition.items()]

    def _floor(self) -> list[str]:
        """The reasons why the least budget is not lower."""
        floor = self.floor
        if not floor:
            return [] if self.plan.offloads else ["  the floor is set by the optimizer's step"]
        lines = [f"  what sets the floor, {format_bytes(sum(floor.values()))} (during the {self.floor_at}):"]
        lines += [f"    {format_bytes(size):>12}  {name}" for name, size in floor.items()]
        ran = self.plan.replacements.get("runs", {})
        heading = ["  modules outside blocks:"] if ran else []
        return lines + heading + [f"    {stage}: {what}" for stage, what in ran.items()]

    def _table(self) -> list[str]:
        width, wide = (max(len(getattr(row, name)) for row in self.rows) for name in ("name", "action"))
        wide = max(wide, 16)
        lines = [
            f"  {'stage':<{width}}  {'action':<{wide}} {'saves':>12} {'output':>13} {'forward':>10} {'backward':>10}"
        ]
        for row in self.rows:
            output = format_bytes(row.output_bytes)
            if row.kind == BLOCK and not row.output_bytes:
                output = "counted after"  # later code holds it anyway
            sizes = f"{format_bytes(row.saved_bytes):>12} {output:>13}"
            times = f"{format_ns(row.forward_ns):>10} {format_ns(row.backward_ns):>10}"
            lines.append(f"  {row.name:<{width}}  {row.action:<{wide}} {sizes} {times}")
        lines += _options(self.plan, self.rows)
        lines += _ranges(self.rows)
        return lines + [f"  {sentence}" for sentence in sentences(self.plan.kept_because.items(), "always kept")]


_MADE = {"given": "planned beforehand", "estimate": "planned by an estimate", "measurement": "planned by measuring"}


def _shape_data(entry: ShapePlan) -> dict[str, Any]:
    plan = entry.plan
    numbers = {name: getattr(plan, name) for name in ("peak_bytes", "step_ns", "overhead", "hash")}
    return {"inputs": entry.shapes, "made": entry.made, **numbers}


def explain(plan: Plan, measured: Measured | None = None, shapes: Sequence[ShapePlan] = ()) -> Report:
    """The report of a plan, without a model.

    Parameters
    ----------
    plan : Plan
        The plan.
    measured, shapes
        What `cairn.torch.report` adds: measurements of first steps, and plans by shape.

    Returns
    -------
    Report
        Print it, or take `to_json()`.
    """
    check_plan(plan)
    blocks = [str(ref) for ref in plan.stages if ref.is_block]
    moment = plan.peak_moment()
    if plan.optimizer_peak_bytes >= moment.bytes:
        composition = {
            **plan.resident,
            "gradients just made, temporaries, what the caller holds": plan.optimizer_peak_bytes
            - sum(plan.resident.values()),
        }
        at = "optimizer's step"
        return Report(plan, _rows(plan), composition, at, measured, tuple(shapes), Offloaded.of(plan))
    parts = {part.name: part.bytes for part in grouped(moment.parts, blocks)}
    return Report(plan, _rows(plan), parts, moment.text, measured, tuple(shapes), Offloaded.of(plan))


def _together(notes: Iterable[str]) -> list[str]:
    """Join notes that say the same of several blocks: "'a' was recomputed" and "'b' was recomputed"."""
    blocks: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):  # there is one for each time
        name, _, rest = note[1:].partition("' ") if note.startswith("'") else ("", "", note)
        blocks.setdefault(rest, []).append(name)
    return [f"{listed(names)}{': each' if len(names) > 1 else ''} {rest}".strip() for rest, names in blocks.items()]


def _rows(plan: Plan) -> tuple[Row, ...]:
    runs = Counter(op[1] for op in plan.ops if op[0].startswith("forward"))
    offloads = {(op[1], op[2]) for op in plan.ops if op[0] == "prefetch"}
    rows = []
    stages = zip(plan.stages, plan.problem["stages"], plan.chosen_options, strict=True)
    for number, (ref, stage, chosen) in enumerate(stages, 1):
        option = stage["options"][chosen]
        shifted = plan.shifted_ns[number - 1][chosen] if plan.shifted_ns else 0
        rows.append(
            Row(
                name=str(ref),
                kind=ref.kind,
                action=_action(ref.is_block, bool(stage["no_recompute"]), runs[number], chosen)
                + _is_offloaded(number, offloads),
                forwards=runs[number],
                option=chosen,
                saved_bytes=option["saved_bytes"],
                output_bytes=stage["output_bytes"],
                forward_ns=option["forward_ns"] - shifted,
                backward_ns=option["backward_ns"] + shifted,
            )
        )
    return tuple(rows)


def _action(is_block: bool, pinned: bool, forwards: int, option: int) -> str:
    if not is_block:
        return "outside blocks"
    selective = f"option {option}" if option else ""
    if forwards == 1:
        return "always kept" if pinned else selective or "kept"
    recomputed = "recomputed" if forwards == 2 else f"recomputed {forwards - 1} x"
    return f"{recomputed}, {selective}" if selective else recomputed


def _is_offloaded(stage: int, offloads: set[tuple[str, int]]) -> str:
    parts = [
        text for kind, text in (("saved", "offloaded"), ("output", "output offloaded")) if (kind, stage) in offloads
    ]
    return "".join(f", {text}" for text in parts)


def _options(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """The operators that options recompute. Blocks that recompute the same are counted together."""
    blocks = sum(ref.is_block for ref in plan.stages)
    counts: Counter[tuple[int, str]] = Counter()
    for number, row in enumerate(rows, 1):
        if row.option:
            counts[row.option, plan.selective[str(number)]["recomputes"][row.option]] += 1
    return [f"  option {k} in {n} of {blocks} blocks: recomputes {what}" for (k, what), n in sorted(counts.items())]


def _ranges(rows: Sequence[Row]) -> list[str]:
    """The meaning of the name of a block of several children, by the first one."""
    for row in rows:
        found = re.match(r"((?:.*\.)?)(\d+)-(\d+)\b", row.name) if row.kind == BLOCK else None
        if found:
            name, prefix, first, last = found[0], *found.groups()
            return [f"  {name} is one block: the modules from {prefix}{first} to {prefix}{last}"]
    return []
