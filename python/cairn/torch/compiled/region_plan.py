"""The plan of a step whose blocks are compiled one by one: a partition for each block, and a schedule."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import cairn
from cairn import format_budget, format_bytes, format_ns
from torch import nn

from ..base.errors import PlanMismatch
from ..base.plan_files import read_plan, write_json
from ..base.stage_measure import StageMeasure
from ..planning.fingerprint import fingerprint_of
from ..planning.plan import Plan, chain_of
from ..planning.step_profile import Profile
from .partitions import SavedPartition
from .region_levels import EVERYTHING, Level, level_of, level_text

FORMAT, VERSION = "cairn-region-plan", 1


@dataclasses.dataclass(frozen=True)
class RegionPlan:
    """The plan of a step whose blocks are compiled one by one.

    Attributes
    ----------
    plan : Plan
        The chain of blocks, and the schedule.
    levels : mapping
        The partition of each block that does not keep everything.
    kernels : str
        "eager" (operators run one by one) or "inductor".
    graphs : int
        How many graphs were compiled.
    profile : Profile
        What was measured of the blocks, for plans within other budgets.
    blocks : tuple of str
        The modules that are compiled, by name.
    partitions : tuple of SavedPartition
        The schedules of the blocks' graphs at these levels.
    measured_peak_bytes : int or None
        Peak of the step when it was run while planning.
    notes : tuple of str
        What is not as asked for.
    """

    plan: Plan
    levels: Mapping[str, Level]
    kernels: str
    graphs: int
    profile: Profile = dataclasses.field(repr=False)
    blocks: tuple[str, ...] = ()
    partitions: tuple[SavedPartition, ...] = dataclasses.field(default=(), repr=False)
    measured_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """The budget of the step, bytes."""
        return self.plan.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step."""
        return self.plan.peak_bytes

    @property
    def plain_peak_bytes(self) -> int:
        """Predicted for the same step with nothing recomputed."""
        return self.plan.plain_peak_bytes

    @property
    def least_budget_bytes(self) -> int:
        """The least budget for which there is a plan."""
        return self.plan.least_budget_bytes

    @property
    def overhead(self) -> float:
        """Predicted extra time, as a share of the step with nothing recomputed."""
        return self.plan.overhead

    @property
    def is_single_level(self) -> bool:
        """Whether every block runs once in the forward and once in the backward, so that autograd runs the step."""
        return is_single_level(self.plan)

    @property
    def gradients(self) -> str:
        """Whether every step creates its gradients ("created"), or steps may add to existing ones ("accumulated")."""
        return self.plan.gradients

    @property
    def holds_output(self) -> bool:
        """Whether the training loop has the model's output during the backward."""
        return self.plan.holds_output

    @property
    def tier(self) -> str:
        """Where values are offloaded: "host" or "file:PATH"."""
        return self.plan.tier

    @property
    def machine(self) -> cairn.Machine | None:
        """The host budget and the link; None if nothing may be offloaded."""
        return chain_of(self.plan.problem).machine if self.plan.tier else None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["plan"], fields["profile"] = self.plan.to_json(), self.profile.to_json()
        fields["levels"] = {name: level_text(level) for name, level in self.levels.items()}
        fields["partitions"] = [dataclasses.asdict(each) for each in self.partitions]
        return {"format": FORMAT, "version": VERSION, **fields}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RegionPlan:
        """Read a plan that `save` wrote.

        Raises
        ------
        PlanMismatch
            The file is no plan of compiled blocks, or of another version, or was changed.
        """
        data = read_plan(path, FORMAT, VERSION)
        try:
            return cls(
                plan=Plan.from_json(data["plan"]),
                levels={name: level_of(text) for name, text in data["levels"].items()},
                kernels=data["kernels"],
                graphs=data["graphs"],
                profile=Profile.from_json(data["profile"]),
                blocks=tuple(data["blocks"]),
                partitions=tuple(map(SavedPartition.from_json, data["partitions"])),
                measured_peak_bytes=data["measured_peak_bytes"],
                notes=tuple(data["notes"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanMismatch(f"{path} has not the fields of {FORMAT} {VERSION}: {error!r}") from None

    def check_fits(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises PlanMismatch if the plan was made for another model, other inputs, or another torch or device."""
        now = fingerprint_of(model, args, kwargs)
        for field, expected in self.plan.fingerprint.items():
            if field in now and now[field] != expected:
                raise PlanMismatch(f"{self.plan.made_for(field, now[field])}: compile with a budget again")

    def __str__(self) -> str:
        plan = self.plan
        reserve, least = f"{format_bytes(plan.reserve_bytes)} stay in reserve", format_budget(plan.least_budget_bytes)
        plain, time = format_bytes(plan.plain_peak_bytes), f"{format_ns(plan.step_ns)} predicted"
        lines = [
            f"{plan.model_name} on {plan.device}: compiled blocks, {self.kernels} kernels, {self.graphs} graphs",
            f"  budget      {format_bytes(plan.budget_bytes)}, of which {reserve}; the least that works is {least}",
            f"  peak        {format_bytes(plan.peak_bytes)} predicted; with nothing recomputed {plain}",
            f"  time        {time}, {100 * plan.overhead:+.1f} % against nothing recomputed ({plan.solver})",
        ]
        if self.measured_peak_bytes is not None:
            off = 100 * (plan.peak_bytes / self.measured_peak_bytes - 1)
            lines.append(f"  measured    {format_bytes(self.measured_peak_bytes)} (predicted {off:+.2f} %)")
        if plan.offloads:
            host = f"{format_bytes(plan.host_bytes)} of {format_bytes(plan.host_budget_bytes)}"
            lines.append(f"  offloaded   {host} of {plan.tier} memory")
        return "\n".join([*lines, "", *self._table(), *(f"  note        {note}" for note in self.notes)])

    def _table(self) -> list[str]:
        width = max(len(str(ref)) for ref in self.plan.stages)
        lines = [f"  {'stage':<{width}}  {'saves':>12} {'of':>12} {'forward':>10} {'backward':>10}"]
        runs = collections.Counter(op[1] for op in self.plan.ops if op[0].startswith("forward"))
        offloaded = {op[2] for op in self.plan.ops if op[0] == "offload"}
        for number, (ref, chosen) in enumerate(zip(self.plan.stages, self.plan.chosen_options, strict=True), 1):
            option = self.plan.problem["stages"][number - 1]["options"][chosen]
            stage = self.profile.stages[number - 1]
            everything = max(stage.saved_bytes, stage.output_bytes)
            sizes = f"{format_bytes(option['saved_bytes']):>12} {format_bytes(everything):>12}"
            times = f"{format_ns(option['forward_ns']):>10} {format_ns(option['backward_ns']):>10}"
            whole = f"  recomputed {runs[number] - 1} x" * (runs[number] > 1) + "  offloaded" * (number in offloaded)
            lines.append(f"  {ref!s:<{width}}  {sizes} {times}{whole}")
        return lines


def is_single_level(plan: Plan) -> bool:
    """Whether every stage runs once in the forward and once in the backward, and nothing is offloaded."""
    return len(plan.ops) == 2 * len(plan.stages)


def levels_of(plan: Plan, stages: Sequence[StageMeasure]) -> dict[str, Level]:
    """The level of each block that does not keep everything. All calls of a block have the same level.

    stages: the measurements of the plan's stages.
    """
    chosen: dict[str, list[Level]] = {}
    common: dict[str, list[Level]] = {}
    for stage, number in zip(stages, plan.chosen_options, strict=True):
        levels = _levels(stage)
        chosen.setdefault(stage.name, []).append(levels[number])
        common[stage.name] = [level for level in common.get(stage.name, levels) if level in levels]
    levels_by_block = {name: _common_level(levels, common[name]) for name, levels in chosen.items()}
    return {name: level for name, level in levels_by_block.items() if level != EVERYTHING}


def options_of(levels: Mapping[str, Level], stages: Sequence[StageMeasure]) -> list[int]:
    """The number of each stage's option at the level of its block."""
    return [_levels(stage).index(levels.get(stage.name, EVERYTHING)) for stage in stages]


def _levels(stage: StageMeasure) -> list[Level]:
    return [EVERYTHING, *(level_of(option.decisions) for option in stage.options[1:])]


def _common_level(chosen: Sequence[Level], common: Sequence[Level]) -> Level:
    """The level that keeps least; if some calls of the block have no such option, the next lower one that all have."""
    least = min(chosen, key=_sort_key)
    below = [level for level in common if _sort_key(level) <= _sort_key(least)]
    return max(below, key=_sort_key) if below else min(common, key=_sort_key)


def _sort_key(level: Level) -> tuple[float, float]:
    return level.kept, level.peak
