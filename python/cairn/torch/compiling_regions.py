"""`compile` for models that are no single graph: every block is compiled by itself, by the option that a plan has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .base import _compat
from .base.errors import BudgetExceeded, InfeasibleBudget, PlanMismatch, VerificationFailed
from .base.progress import reported_progress
from .compiled.compiled_model import (
    ROUNDS,
    CompiledModel,
    StepResult,
    differences,
    given_bytes,
    known,
    warn_of_capture,
)
from .compiled.region_levels import UNPLANNED, Level
from .compiled.region_options import RegionPass
from .compiled.region_plan import RegionPlan, is_single_level, levels_of, options_of
from .compiled.region_shapes import ShapeGuard, refuse_growth
from .compiled.regions import Regions, modules_of
from .compiled.request import remedies
from .handle import Handle, apply_by_shape, set_aside
from .planning.fingerprint import fingerprint_of
from .planning.offload_plans import Destination
from .planning.plan import Plan
from .planning.shapes import described
from .planning.step_profile import Profile
from .planning.task import Task
from .profiler import ProfileSettings, profile_by
from .profiling import call_trace, discovery
from .profiling.profileable import check_differentiable, check_model
from .profiling.sample import Sample
from .rerun_state.sharded import is_any

MEASUREMENTS = 3  # of a step that ranks share and that takes more than its budget


class RegionModel(CompiledModel):
    """A model whose blocks are compiled, in place."""

    def __init__(self, model: nn.Module, regions: Regions, sample: Sample, device: torch.device) -> None:
        super().__init__(model, model, sample, device)
        self.regions, self._given_bytes = regions, 0
        self.profile: Profile | None = None
        self.request: RegionRequest | None = None
        self._handle: Handle | None = None
        self._guard: ShapeGuard | None = None
        self._plans_made = 0
        self._followed: tuple[Plan, Mapping[str, Level]] | None = None

    def serves(self, sample: Sample, request: RegionRequest) -> bool:
        """Whether what was measured holds for another request: only its budget, or how it is planned, differs."""
        own, profile = self.request, self.profile
        if own is None or profile is None or request.plan is not None or sample.loss_fn is not self.sample.loss_fn:
            return False
        now = fingerprint_of(self.model, sample.args, sample.kwargs)
        is_same = all(now[key] == profile.fingerprint[key] for key in ("parameters", "dtype", "training", "inputs"))
        others = {name: getattr(request, name) for name in ("budget", "prove", "to", "time_limit")}
        return is_same and dataclasses.replace(own, **others, plan=None) == request

    def use(self, sample: Sample, resident_bytes: int) -> None:
        """Measure steps of this sample from now on. resident_bytes: what is on the device before its step."""
        self.sample, self.resident_bytes = sample, resident_bytes
        self._given_bytes = given_bytes(sample, self.device)

    def plain_step(self) -> StepResult:
        """One step of the model without compilation."""
        with self.regions.disabled(), set_aside(self.model):
            return self.step(self.model)

    def task(self, miss_bytes: int = 0, *, runs_once: bool = False, chosen: Sequence[int] = ()) -> Task:
        """Plans of the step for any budget; `miss_bytes` more stay free.

        runs_once: no block is recomputed as a whole, and nothing is offloaded. chosen: the options of the stages,
        where they are decided.
        """
        request, profile = self.request, self.profile
        assert profile is not None and request is not None
        profile = profile.run_once() if runs_once else profile
        profile = profile.with_options(chosen) if chosen else profile
        to = None if runs_once else request.to
        options = {"time_limit": request.time_limit}
        profile = profile.corrected(miss_bytes)
        return Task(profile, "step", request.gradients, request.solver, options, to, request.remedy)

    def _plan(self, miss_bytes: int) -> tuple[Plan, dict[str, Level]]:
        """The plan for the budget, with the partition of each block.

        Autograd runs a single-level plan by itself. Where none fits, and where values may be offloaded, blocks are
        recomputed as wholes as well. All runs of a block have one partition: a recomputation then saves the same
        tensors as the first run. Where the solver chose several, the schedule is made anew. Ranks that share the model
        take the plan of the first, or its error.
        """
        if not self.sample.ranks:
            return self._own_plan(miss_bytes)
        plan: Any = None
        if self.sample.ranks.is_first():
            try:
                plan = self._own_plan(miss_bytes)
            except Exception as error:  # which all ranks raise
                plan = error.with_traceback(None)
        plan = self.sample.ranks.of_first(plan)
        if isinstance(plan, Exception):
            raise plan
        return plan

    def _own_plan(self, miss_bytes: int) -> tuple[Plan, dict[str, Level]]:
        """The plan by this process's own measurements."""
        assert self.profile is not None and self.request is not None
        stages = self.profile.stages
        first, runs_once = self._solved(miss_bytes)
        levels = levels_of(first, stages)
        chosen, plan = options_of(levels, stages), first
        if chosen != first.chosen_options or not (runs_once or first.is_plain):
            plan = self.task(miss_bytes, runs_once=runs_once, chosen=chosen).plan(self.request.budget)
        of_wholes = self.task().least_budget()  # with blocks that are recomputed as wholes
        known_least = filter(None, (first.least_budget_bytes, plan.least_budget_bytes, of_wholes))
        plan = dataclasses.replace(
            plan,
            least_budget_bytes=min(known_least),
            lower_bound_ns=first.lower_bound_ns,
            plain_peak_bytes=first.plain_peak_bytes,
            plain_ns=first.plain_ns,
        )
        return plan, levels

    def _solved(self, miss_bytes: int) -> tuple[Plan, bool]:
        """The plan for the budget, in which each run of a block may have its own option; whether each runs once."""
        request, failures = self.request, []
        assert request is not None
        for runs_once in (True, False) if request.to is None else (False,):
            [plan] = self.task(miss_bytes, runs_once=runs_once).plans([request.budget])
            if isinstance(plan, Plan):
                return plan, runs_once
            failures.append(plan)
        raise min(failures, key=lambda failure: failure.least_bytes or 0)

    def plans(self, wanted: int | Sequence[Any]) -> list[Plan | InfeasibleBudget]:
        """Plans for budgets, or for a number of them between the least that works and that of keeping everything."""
        task = self.task()
        budgets = task.even_budgets(wanted) if isinstance(wanted, int) else wanted
        plans = task.plans(budgets)
        if task.to is not None:
            return plans
        once = self.task(runs_once=True).plans(budgets)
        return [other if isinstance(plan, InfeasibleBudget) else plan for plan, other in zip(once, plans, strict=True)]

    def follow(self, plan: Plan, levels: Mapping[str, Level]) -> None:
        """Make the model's steps follow a plan."""
        self.unplan()
        self._followed = plan, levels
        self.regions.set_levels(levels)
        if not is_single_level(plan):
            self._handle = apply_by_shape(self.model, plan, None, "error")
        self._guard = ShapeGuard(self.model, plan.fingerprint["inputs"], plan.gradients, self._plan_for)

    def _plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Profile a step whose inputs are larger than the plan's, and plan it within the same budget."""
        shapes, profile = described(args, kwargs), self.profile
        assert self.request is not None and profile is not None
        request = dataclasses.replace(self.request, plan=None)
        refuse_growth(shapes, profile.fingerprint["inputs"], self._plans_made)
        before = self.sample, self.profile, self.resident_bytes, self._given_bytes
        other = Sample(self.model, args, kwargs, self.sample.loss_fn, request.holds_output)
        self.use(other, self.resident_bytes - self._given_bytes + given_bytes(other, self.device))
        try:
            with (
                self.sample.released(),
                reported_progress(False, "compile") as reporter,
                self.sample.preserved(self.device),
            ):
                self.regions.partitions.forget_loaded()
                self._profile(request, reporter)
                self.fit(request, reporter)
        except BaseException as error:
            self.sample, self.profile, self.resident_bytes, self._given_bytes = before
            if isinstance(error, InfeasibleBudget):
                raise error.for_shapes(shapes, "") from None
            raise
        self._plans_made += 1

    def _profile(self, request: RegionRequest, reporter: Any) -> None:
        """Profiles the sample's step, without a plan."""
        self.unplan()
        self.regions.set_levels({})
        try:
            reporter.begin("compiling blocks, and measuring their options")
            self._compile_all()
            self.profile = _profiled(self, request)
        except BaseException:
            if self._followed is not None:
                self.follow(*self._followed)
            raise

    def _compile_all(self) -> None:
        """Run a forward that compiles all blocks. In a profiled one, each call of the compiler's code is observed."""
        with self.sample.preserved(self.device) as parameters:
            self.sample.watch(parameters)

    def unplan(self) -> None:
        """Remove the executor of the plan, which recomputes whole blocks and offloads, and the shape guard."""
        if self._guard is not None:
            self._guard.remove()
        applied, self._handle, self._guard = self._handle, None, None
        if applied is not None:
            applied.remove()

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Restore the model. If the body of a with statement fails, the regions and their plan are back."""
        self.unplan()
        try:
            with self.regions.removed():
                yield
        except BaseException:
            assert self._followed is not None
            self.follow(*self._followed)
            raise

    def fit(self, request: RegionRequest, reporter: Any) -> None:
        """Plans for a budget, runs the step and measures it; again where it takes more than was predicted.

        If no plan fits, the model keeps the plan that it had.
        """
        before = self.request, self._followed
        self.request = request
        try:
            self._fit(request, reporter)
        except BaseException:
            self.request = before[0]
            if before[1] is not None:
                self.follow(*before[1])
            raise

    def _fit(self, request: RegionRequest, reporter: Any) -> None:
        miss_bytes, peaks = 0, []
        for _ in range(ROUNDS):
            reporter.begin("planning, and measuring the step")
            plan, levels = self._plan(miss_bytes)
            self.optimizer_peak_bytes = plan.optimizer_peak_bytes
            self.follow(plan, levels)
            measured, peak = self._measured(plan.budget_bytes)
            if peak <= plan.budget_bytes:
                self._explain(plan, levels, measured, peak, request, reporter)
                return
            miss_bytes += peak - plan.peak_bytes
            peaks.append(peak)
        raise _over(plan, peaks, request.remedy)

    def _measured(self, budget_bytes: int) -> tuple[StepResult, int]:
        """A step that compiles nothing, and its peak: the largest of any rank, the optimizer's step included.

        Ranks whose step takes more than the budget measure it again: a buffer that gloo frees in a thread of its own
        is counted as if it stayed, in some steps.
        """
        steps = [self._step_and_peak()]
        while self.sample.ranks and steps[-1][1] > budget_bytes and len(steps) < MEASUREMENTS:
            steps.append(self._step_and_peak())
        return min(steps, key=lambda step: step[1])

    def _step_and_peak(self) -> tuple[StepResult, int]:
        measured = self.settled_step()
        return measured, self.sample.ranks.largest(max(measured.peak_bytes, self.optimizer_peak_bytes))

    def follow_plan(self, plan: RegionPlan, request: RegionRequest, reporter: Any) -> None:
        """Follow a plan that was made before, and measure the step."""
        reporter.begin("compiling blocks by the plan, and measuring the step")
        self.request, self.profile = request, plan.profile
        self.optimizer_peak_bytes = max(plan.plan.optimizer_peak_bytes, request.optimizer_peak_bytes)
        self.follow(plan.plan, plan.levels)
        measured, peak = self._measured(plan.budget_bytes)
        if missed := self.sample.ranks.largest(self.regions.partitions.missed):
            raise PlanMismatch(
                f"the plan was made for other blocks: {missed} of their graphs are not those of the plan; compile with "
                "a budget again"
            )
        if peak > plan.budget_bytes:
            raise BudgetExceeded.of_given_plan(peak, plan.budget_bytes)
        self._explain(plan.plan, dict(plan.levels), measured, peak, request, reporter)

    def _explain(
        self,
        plan: Plan,
        levels: dict[str, Level],
        measured: StepResult,
        peak: int,
        request: RegionRequest,
        reporter: Any,
    ) -> None:
        """Compares with the step without compilation, and makes the report."""
        is_compared = request.prove and request.kernels == "eager"
        plain = self.plain_step_to_compare(is_compared, plan.plain_peak_bytes, reporter)
        differing = None if plain is None else differences(plain, measured)
        if self.sample.ranks.largest(len(differing or ())):
            self._refuse_or_warn(differing or (), measured)
        assert self.profile is not None
        region_plan = RegionPlan(
            plan,
            levels,
            request.kernels,
            self.regions.compilations,
            self.profile,
            tuple(self.regions.names),
            self.regions.schedules(levels),
            peak,
            tuple(_notes(self.regions)),
        )
        self.make_report((), region_plan, measured, peak, plain, differing)

    def _refuse_or_warn(self, differing: Sequence[str], measured: StepResult) -> None:
        """Warn where torch's capture makes the difference, and raise where the plan does."""
        levels = {name: region.code.backend.levels[region.option] for name, region in self.regions.items()}
        with set_aside(self.model):
            self.regions.set_levels(dict.fromkeys(levels, UNPLANNED))
            try:
                reference = self.settled_step()
            finally:
                self.regions.set_levels(levels)
        wrong = differences(reference, measured)
        if self.sample.ranks.largest(len(wrong)):
            described = "; ".join(wrong or differing) or "on another rank"
            raise VerificationFailed(f"the step with compiled blocks is not that of the model: {described}")
        if differing:
            warn_of_capture(differing)

    def settled_step(self) -> StepResult:
        """One step in which nothing is compiled."""
        changed = 1
        while changed:
            before = self.regions.compilations
            measured = self.compiled_step(may_compile=True)
            changed = self.sample.ranks.largest(self.regions.compilations - before)
        is_missing = self.sample.ranks.largest(int(measured.peak_bytes == self.resident_bytes))
        return self.compiled_step() if is_missing else measured


@dataclasses.dataclass(frozen=True)
class RegionRequest:
    """The arguments of `compile`; `blocks` is as for `profile`.

    optimizer_peak_bytes: the peak of the optimizer's step. plan: one that was made before, in place of a budget.
    """

    budget: Any
    kernels: str
    optimizer: torch.optim.Optimizer | None
    gradients: str
    holds_output: bool
    prove: bool
    solver: str
    time_limit: str
    blocks: Any
    to: Destination | None = None
    optimizer_peak_bytes: int = 0
    plan: RegionPlan | None = None

    @property
    def remedy(self) -> str:
        """Arguments that may lower the least budget, for an error."""
        return remedies(self.kernels, self.to is not None, "regions= that cut the model finer")


def has_compiled_modules(model: nn.Module) -> bool:
    """Whether blocks of a model are compiled, or sharded, one by one already."""
    return any(
        _compat.compiled_inside(part) is not None or _compat.is_compiled_in_place(part) or is_any([part])
        for part in model.modules()
    )


def compile_regions(
    sample: Sample, device: torch.device, resident_bytes: int, request: RegionRequest, reporter: Any
) -> None:
    """Compiles the blocks of a sample's model in place, each by the option that a plan within the budget has for it.

    resident_bytes: what is on the device before a step begins.
    """
    model, plan = sample.model, request.plan
    if plan is not None:
        plan.check_fits(model, sample.args, sample.kwargs)
    before = known(model)
    replaced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(before, RegionModel):
        if before.serves(sample, request):
            before.use(sample, resident_bytes)
            before.fit(request, reporter)
            return
        replaced = before.removed()
    regions = Regions(model, request.kernels, device, () if plan is None else plan.partitions)
    compiled = RegionModel(model, regions, sample, device)
    compiled.use(sample, resident_bytes)
    compiled.request = request
    with replaced:
        _install(compiled, request, reporter)


def _install(compiled: RegionModel, request: RegionRequest, reporter: Any) -> None:
    """Compile the blocks of a model in place, within a budget or by a plan. If that fails, the model is restored."""
    model, regions, plan = compiled.model, compiled.regions, request.plan
    try:
        reporter.begin("finding blocks")
        regions.disable_in_place_compilation()
        if plan is not None:
            regions.install(_named(model, plan.blocks))
            compiled.follow_plan(plan, request, reporter)
            return
        regions.install(modules_of(_blocks(compiled.sample, request.blocks, compiled.device)))
        compiled._profile(request, reporter)
        compiled.fit(request, reporter)
    except BaseException:
        compiled.unplan()
        regions.remove()
        raise


def _named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The blocks of a plan. Raises PlanMismatch where the model has none of that name."""
    check_model(model)
    modules = dict(model.named_modules())
    lacking = [name for name in names if name not in modules]
    if lacking:
        raise PlanMismatch(f"the plan was made for a model with a block {lacking[0]!r}: compile with a budget again")
    return [modules[name] for name in names]


def _over(plan: Plan, peaks: Sequence[int], remedy: str) -> InfeasibleBudget:
    """The error for a step that took more than its budget. peaks: those measured, in bytes, the plan's last."""
    parts, reserve = dict(plan.resident), plan.reserve_bytes
    return InfeasibleBudget.of_measured_step(plan.budget_bytes, peaks, reserve, parts, "measured step", remedy)


def _profiled(compiled: RegionModel, request: RegionRequest) -> Profile:
    """The profile of a step whose blocks are compiled, with their options."""
    sample, regions = compiled.sample, compiled.regions
    return profile_by(
        ProfileSettings(option_pass=functools.partial(RegionPass, regions)),
        compiled.model,
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
    with sample.preserved(device) as parameters, sample.stateless():
        check_model(sample.model)
        observed = call_trace.trace(sample.model, lambda: check_differentiable(sample), parameters)
        return discovery.find_blocks(sample.model, observed, wanted)


def _notes(regions: Regions) -> Sequence[str]:
    """Which graphs are cut as torch does, and why."""
    uncut = dict.fromkeys(reason for code in regions.codes for reason in code.backend.not_planned)
    return [f"a graph keeps all that torch saves: {reason}" for reason in uncut]
