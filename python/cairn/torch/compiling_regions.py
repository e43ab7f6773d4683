"""`compile` for models that are no single graph: every block is compiled by itself, by the option that a plan has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from cairn import format_budget, format_bytes, format_ns
from torch import nn

from .base import _compat
from .base.budgets import free_bytes
from .base.errors import InfeasibleBudget, VerificationFailed, warn
from .compiled.compiled_model import CompiledModel, CompiledReport, StepResult, differences, known, remember
from .compiled.region_code import Level
from .compiled.region_options import RegionPass, level_of
from .compiled.regions import Regions
from .planning.fingerprint import fingerprint_of
from .planning.plan import Plan
from .planning.step_profile import Profile
from .planning.task import Task
from .profiler import How, profile_by
from .profiling import call_trace, discovery
from .profiling.profileable import check_differentiable, check_model
from .profiling.sample import Sample
from .rerun_state.sharded import is_any

ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class RegionPlan:
    """What was decided for the blocks of a step that are compiled one by one.

    Attributes
    ----------
    plan : Plan
        The chain of blocks, and the schedule: an option for each.
    kernels : str
        "eager" (operators run one by one) or "inductor".
    graphs : int
        How many graphs were compiled.
    measured_peak_bytes : int or None
        Peak of the step when it was run while planning.
    notes : tuple of str
        What is not as asked for.
    """

    plan: Plan
    kernels: str
    graphs: int
    measured_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """What the step may take."""
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
        """The least budget that works."""
        return self.plan.least_budget_bytes

    @property
    def overhead(self) -> float:
        """Predicted extra time, as a share of the step with nothing recomputed."""
        return self.plan.overhead

    @property
    def levels(self) -> dict[str, Level]:
        """The option of each block that does not keep everything."""
        return levels_of(self.plan)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        others = {"kernels": self.kernels, "graphs": self.graphs, "measured_peak_bytes": self.measured_peak_bytes}
        return {"plan": self.plan.to_json(), **others, "notes": list(self.notes)}

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
        return "\n".join([*lines, "", *self._table(), *(f"  note        {note}" for note in self.notes)])

    def _table(self) -> list[str]:
        width = max(len(str(ref)) for ref in self.plan.stages)
        lines = [f"  {'stage':<{width}}  {'saves':>12} {'of':>12} {'forward':>10} {'backward':>10}"]
        for number, (ref, chosen) in enumerate(zip(self.plan.stages, _chosen(self.plan), strict=True)):
            options = self.plan.problem["stages"][number]["options"]
            option = options[chosen]
            sizes = f"{format_bytes(option['saved_bytes']):>12} {format_bytes(options[0]['saved_bytes']):>12}"
            times = f"{format_ns(option['forward_ns']):>10} {format_ns(option['backward_ns']):>10}"
            lines.append(f"  {ref!s:<{width}}  {sizes} {times}")
        return lines


def _chosen(plan: Plan) -> list[int]:
    """The option of each stage by which it is saved last."""
    saved_by = {op[1]: op[2] if len(op) > 2 else 0 for op in plan.ops if op[0] == "forward_save"}
    return [saved_by.get(number, 0) for number in range(1, len(plan.stages) + 1)]


def levels_of(plan: Plan) -> dict[str, Level]:
    """The option of each block that does not keep everything."""
    found = {}
    for number, (ref, chosen) in enumerate(zip(plan.stages, _chosen(plan), strict=True), 1):
        if chosen:
            found[ref.name] = level_of(plan.inside[str(number)]["options"][chosen])
    return found


class RegionModel(CompiledModel):
    """A model whose blocks are compiled, in place."""

    def __init__(self, model: nn.Module, regions: Regions, sample: Sample, device: torch.device) -> None:
        super().__init__(model, model, sample, device)
        self.regions = regions
        self.profile: Profile | None = None
        self.request: RegionRequest | None = None

    def serves(self, sample: Sample, request: RegionRequest) -> bool:
        """Whether what was measured holds for another request: only its budget differs."""
        own, profile = self.request, self.profile
        if own is None or profile is None or sample.loss_fn is not self.sample.loss_fn:
            return False
        now = fingerprint_of(self.model, sample.args, sample.kwargs)
        is_same = all(now[key] == profile.fingerprint[key] for key in ("parameters", "dtype", "training", "inputs"))
        return is_same and dataclasses.replace(own, budget=request.budget, prove=request.prove) == request

    def plain_step(self) -> StepResult:
        """One step of the model without compilation."""
        with self.regions.off():
            return self.step(self.model)

    def task(self, miss_bytes: int = 0) -> Task:
        """Plans of the step for any budget; `miss_bytes` more stay free."""
        assert self.profile is not None and self.request is not None
        once = self.profile.run_once().corrected(miss_bytes)
        return Task(once, "step", self.request.gradients, self.request.solver, {}, None)

    def fit(self, request: RegionRequest, teller: Any) -> None:
        """Plans for a budget, runs the step and measures it; again where it takes more than was predicted."""
        miss_bytes = 0
        for _ in range(ROUNDS):
            teller.begin("planning, and measuring the step")
            plan = self.task(miss_bytes).plan(request.budget)
            self.optimizer_peak_bytes = plan.optimizer_peak_bytes
            self.regions.follow(levels_of(plan))
            measured = self.settled_step()
            peak = max(measured.peak_bytes, plan.optimizer_peak_bytes)
            if peak <= plan.budget_bytes:
                self._explain(plan, measured, peak, request, teller)
                return
            miss_bytes += peak - plan.peak_bytes
        name = "measured step"
        raise InfeasibleBudget.make(plan.budget_bytes, peak, plan.reserve_bytes, dict(plan.resident), name, name)

    def _explain(self, plan: Plan, measured: StepResult, peak: int, request: RegionRequest, teller: Any) -> None:
        """Compares with the step without compilation, and makes the report."""
        plain = _plain(self, plan, request, teller)
        found = None if plain is None else differences(plain, measured)
        if found and request.kernels == "eager":
            raise VerificationFailed(f"the step with compiled blocks is not that of the model: {'; '.join(found)}")
        made = RegionPlan(plan, request.kernels, self.regions.compilations, peak, tuple(_notes(self.regions)))
        plain_peak = None if plain is None else max(plain.peak_bytes, plan.optimizer_peak_bytes)
        plain_ns = None if plain is None else plain.step_ns
        self.report = CompiledReport((), peak, measured.step_ns, plain_peak, plain_ns, found, made)
        remember(self.model, self)

    def settled_step(self) -> StepResult:
        """One step in which nothing is compiled."""
        before = -1
        while before != self.regions.compilations:
            before = self.regions.compilations
            found = self.compiled_step(may_compile=True)
        return self.compiled_step() if found.peak_bytes == self.resident_bytes else found


@dataclasses.dataclass(frozen=True)
class RegionRequest:
    """What is asked for: as for `compile`; `blocks` as for `profile`."""

    budget: Any
    kernels: str
    optimizer: torch.optim.Optimizer | None
    gradients: str
    holds_output: bool
    prove: bool
    solver: str
    blocks: Any


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether blocks of a model are compiled, or sharded, one by one already."""
    return any(
        _compat.compiled_inside(part) is not None or _compat.is_compiled_in_place(part) or is_any([part])
        for part in model.modules()
    )


def compile_regions(
    sample: Sample, device: torch.device, resident_bytes: int, request: RegionRequest, teller: Any
) -> None:
    """Compiles the blocks of a sample's model in place, each by the option that a plan within the budget has for it.

    resident_bytes: what is on the device before a step begins.
    """
    model = sample.model
    before = known(model)
    if isinstance(before, RegionModel):
        if before.serves(sample, request):
            before.resident_bytes = resident_bytes
            before.fit(request, teller)
            return
        before.regions.remove()
    regions = Regions(model, request.kernels, device)
    made = RegionModel(model, regions, sample, device)
    made.resident_bytes, made.request = resident_bytes, request
    try:
        teller.begin("finding blocks")
        regions.set_compiled_aside()
        regions.install(_blocks(sample, request.blocks, device))
        made.profile = _profiled(made, request, teller)
        made.fit(request, teller)
    except BaseException:
        regions.remove()
        raise


def _profiled(made: RegionModel, request: RegionRequest, teller: Any) -> Profile:
    """The profile of a step whose blocks are compiled, with their options."""
    teller.begin("compiling blocks, and measuring their options")
    sample, regions = made.sample, made.regions
    return profile_by(
        How(options=functools.partial(RegionPass, regions)),
        made.model,
        sample.args,
        sample.kwargs,
        loss_fn=sample.loss_fn,
        optimizer=request.optimizer,
        blocks=regions.modules,
        outside=False,
        holds_output=request.holds_output,
        progress=False,
    )


def _blocks(sample: Sample, wanted: Any, device: torch.device) -> list[Any]:
    with sample.untouched(device) as parameters, sample.stateless():
        check_model(sample.model)
        observed = call_trace.trace(sample.model, lambda: check_differentiable(sample), parameters)
        return discovery.find_blocks(sample.model, observed, wanted)


def _plain(made: RegionModel, plan: Plan, request: RegionRequest, teller: Any) -> StepResult | None:
    """A step without compilation, where it is wanted and fits."""
    if not request.prove or request.kernels != "eager":
        return None
    if plan.plain_peak_bytes > free_bytes(made.device) + made.resident_bytes:
        size = format_bytes(plan.plain_peak_bytes)
        warn(f"not proved: a step without a plan takes {size}, more than the device has free")
        return None
    teller.begin("comparing with the step without compilation")
    return made.plain_step()


def _notes(regions: Regions) -> Sequence[str]:
    """Which graphs are cut as torch does, and why."""
    uncut = dict.fromkeys(reason for code in regions.codes for backend in code.backends for reason in backend.uncut)
    return [f"a graph keeps all that torch saves: {reason}" for reason in uncut]
