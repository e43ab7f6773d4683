"""`compile`: a model that torch.compile compiles, with a byte budget for its training step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from cairn import parse_duration
from torch import nn

from .base import _compat, clock, memory
from .base.choices import CREATED
from .base.errors import BudgetExceeded, InfeasibleBudget, PlanMismatch, Unsupported, VerificationFailed
from .base.layouts import saving_nothing
from .base.progress import reported_progress
from .compiled.backend import Backend, device_of_inputs, raising
from .compiled.captured import compiled_with
from .compiled.compiled_model import (
    ROUNDS,
    CompiledModel,
    StepResult,
    differences,
    given_bytes,
    known,
    warn_of_capture,
)
from .compiled.compiled_plan import CompiledPlan
from .compiled.host_memory import HostMemory
from .compiled.region_plan import RegionPlan
from .compiled.request import DEFAULT_KERNELS, GRADIENTS, KERNELS, OFFLOADING_OPTIONS, OPTIONS, Request
from .compiling_regions import RegionRequest, compile_regions, has_compiled_modules
from .handle import refuse_planned, set_aside
from .planning.arguments import (
    check_budget,
    check_call,
    check_choice,
    check_flag,
    check_names,
    check_optimizer,
    check_plan_options,
    host_budget_of,
    positional,
)
from .planning.offload_plans import Destination, destination
from .profiling.optimizer import OptimizerMemory, measure_optimizer, unwrapped
from .profiling.profileable import check_gradients, device_of, refuse_distributed
from .profiling.sample import Sample


def compile(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Any = "auto",
    kernels: str = DEFAULT_KERNELS,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    gradients: str = CREATED,
    holds_output: bool = True,
    regions: Any = "auto",
    host_budget: Any = None,
    tier: str = "host",
    link: Any = None,
    prove: bool = True,
    plan: CompiledPlan | RegionPlan | None = None,
    solver: str = "auto",
    time_limit: str = "3s",
    progress: Any = None,
    **others: Any,
) -> nn.Module:
    """Compile a model so that its training step fits in a byte budget.

    The forward is captured as one graph, which AOTAutograd extends by its backward. The graph solvers decide which
    results are kept and which the backward recomputes; the compiled step is run and measured before this returns.

    Parameters
    ----------
    model : nn.Module
        Left as it is; the compiled model shares its parameters.
    args, kwargs
        A sample of what the training loop calls the model with; a tensor may stand for a tuple of one.
    budget : int, str or cairn.Budget
        Peak of the whole step in bytes: parameters, gradients, optimizer state and inputs included.
    kernels : {"inductor", "eager"}
        "eager" runs torch's operators one by one: loss, gradients, buffers and random state are bit for bit those of
        training without compilation. "inductor" generates fused kernels, whose bits differ.
    loss_fn : callable, optional
        Makes the loss of the model's output, where the model does not; its memory is counted.
    optimizer : torch.optim.Optimizer, optional
        Its state and its step are counted; it is not stepped.
    gradients : {"created", "accumulated"}
        Whether every step creates its gradients, or steps may add to existing ones, which takes more.
    holds_output : bool
        Whether the training loop has the model's output during the backward.
    regions : {"auto", True, False} or blocks
        True compiles every block by itself, in place, and autograd runs the step; blocks are found as by `profile`, or
        named as for its `blocks`. False captures the model as one graph. "auto" does so where Dynamo can and no block
        is compiled already.
    host_budget, tier, link
        As for `plan`: how much may be offloaded, where to, and how fast the link is.
    prove : bool
        With eager kernels: run one step without compilation too, and compare bit for bit.
    plan : CompiledPlan or RegionPlan, optional
        One that was made before for the same step, in place of a budget; nothing is solved then.
    solver, time_limit
        The solver, and how long it may search: in all for one graph, and each time that it is called for blocks that
        are compiled one by one.
    progress : callable or False, optional
        Told what is being done; False for nothing.
    **others
        Refused, with the nearest name that there is.

    Returns
    -------
    nn.Module
        What torch.compile returns; the model itself where its blocks are compiled. `cairn.torch.report` of it says what
        was planned and measured.

    Raises
    ------
    InfeasibleBudget
        No schedule fits; the error names a budget that works: the least one with eager kernels.
    ValueError
        A plan is applied to the model already.
    Unsupported
        The model is a wrapper, such as DistributedDataParallel, or its parameters are in parts. With ``regions=False``,
        Dynamo cannot capture the model as one graph; the message names the operation and the line.
    PlanMismatch
        `plan` was made for another step.
    BudgetExceeded
        The step that follows `plan` takes more than the plan's budget.
    VerificationFailed
        With eager kernels, a result differs from training without compilation.

    Examples
    --------
    >>> model = ct.compile(model, x, budget="8GiB", loss_fn=loss_fn, optimizer=optimizer)
    """
    check_names(others, list(inspect.signature(compile).parameters)[:-1], "compile")
    check_call(model, kwargs, loss_fn, args)
    check_optimizer(model, optimizer)
    refuse_distributed(model, "compile")
    model = _inside(model)
    if known(model) is None:
        refuse_planned(model)
    request = Request(budget, kernels, gradients, holds_output, solver, time_limit, type(model).__name__)
    request.has_regions = True
    if plan is not None:
        _follow(request, plan, regions)
    of_blocks = plan if isinstance(plan, RegionPlan) else None
    _check(request)
    sample = Sample(model, positional(args), dict(kwargs or {}), loss_fn, request.holds_output)
    check_gradients(sample)
    device = device_of(sample)
    to = _destination(request, plan, host_budget, tier, link, device)
    with sample.released(), reported_progress(progress, "compile") as reporter, sample.preserved(device):
        reporter.begin("measuring the optimizer and the loss")
        with set_aside(model) if known(model) is not None else contextlib.nullcontext():
            _measure_around(request, sample, device, measure_optimizer(unwrapped(optimizer)))
        is_whole = of_blocks is None and (plan is not None or not has_compiled_modules(model))
        if regions is False or (regions == "auto" and is_whole):
            try:
                return _compiled(model, sample, device, request, prove, reporter)
            except Unsupported:
                if regions is False or plan is not None:
                    raise
        blocks = "auto" if regions is True else regions
        by_block = RegionRequest(
            budget=request.budget,
            kernels=request.kernels,
            optimizer=optimizer,
            gradients=request.gradients,
            holds_output=request.holds_output,
            prove=prove,
            solver=solver,
            time_limit=time_limit,
            blocks=blocks,
            to=to,
            optimizer_peak_bytes=request.optimizer_peak_bytes,
            plan=of_blocks,
        )
        resident_bytes = _resident_bytes(request, sample, device)
        compile_regions(sample, device, resident_bytes, by_block, reporter)
    return model


def _inside(model: nn.Module) -> nn.Module:
    """The model itself, if `compile` has returned this one, or a copy is. Raises Unsupported if torch.compile has."""
    inside = _compat.compiled_inside(model)
    if inside is None:
        return model
    if not _compat.has_wrapped_calls(model):
        raise Unsupported(
            f"torch.compile has compiled this {type(inside).__name__} already: give the model itself to "
            "cairn.torch.compile, which takes the place of torch.compile, or name Cairn as its backend: "
            "torch.compile(model, backend='cairn')"
        )
    return inside


def _destination(
    request: Request,
    plan: CompiledPlan | RegionPlan | None,
    host_budget: Any,
    tier: str,
    link: Any,
    device: torch.device,
) -> Destination | None:
    """Where values may be offloaded to, by the arguments or the plan; for one graph the request has it too."""
    host_budget = host_budget_of(request.budget, host_budget)
    check_plan_options({"host_budget": host_budget, "tier": tier, "link": link})
    to = destination(host_budget, tier, link, device)
    if plan is not None:
        if to is not None:
            raise ValueError("a plan has its own host budget: pass plan= or host_budget=, not both")
        to = None if plan.machine is None else Destination(plan.tier, plan.machine)
    request.host = None if to is None else HostMemory(to, device)
    return to


def backend(module: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Any = None, **others: Any) -> Any:
    """Compile a graph for `torch.compile(model, backend="cairn", options={"budget": "8GiB"})`.

    Parameters
    ----------
    module, inputs
        The graph that Dynamo captured, and what it is called with.
    **others
        Refused: torch passes mode= here.
    options : dict
        budget (required), kernels, optimizer, gradients, holds_output, host_budget, tier, link, solver and time_limit,
        as for `compile`.

    Returns
    -------
    The compiled graph. Each of its calls raises the error of options that are refused, or InfeasibleBudget, which names
    a budget that works: Dynamo would wrap an error that is raised here.
    """
    try:
        backend = Backend(_request_of(options, others, inputs))
    except Exception as error:
        return raising(error)
    backend.is_of_one_graph = True
    return backend(module, inputs)


def _request_of(options: Any, others: Mapping[str, Any], inputs: Sequence[Any]) -> Request:
    """The request of `torch.compile(backend="cairn")`, by its options."""
    given = {name: value for name, value in others.items() if value is not None}
    if given:
        raise Unsupported(f'backend="cairn" takes options= alone, not {", ".join(given)}=')
    named = dict(options or {})
    check_names(named, (*OPTIONS, *OFFLOADING_OPTIONS), 'torch.compile(backend="cairn", options=...)')
    if "budget" not in named:
        raise TypeError('torch.compile(backend="cairn") needs options={"budget": "8GiB"}, or bytes')
    optimizer, host_budget = named.pop("optimizer", None), named.pop("host_budget", None)
    tier, link = named.pop("tier", "host"), named.pop("link", None)
    request = Request(**named)
    _check(request)
    check_optimizer(None, optimizer)
    _destination(request, None, host_budget, tier, link, device_of_inputs(inputs))
    if optimizer is not None:
        taken = measure_optimizer(unwrapped(optimizer))
        request.resident["optimizer state"], request.optimizer_step_bytes = taken.state_bytes, taken.step_bytes
    return request


def _follow(request: Request, plan: CompiledPlan | RegionPlan, regions: Any) -> None:
    """Lets a plan decide in place of a budget."""
    if not isinstance(plan, (CompiledPlan, RegionPlan)):
        raise TypeError(
            "plan must be a CompiledPlan or a RegionPlan, as their load returns, or as ct.report(model) has it, not a "
            f"{type(plan).__name__}"
        )
    if request.budget != "auto":
        raise ValueError("a plan has its own budget: pass plan= or budget=, not both")
    if isinstance(plan, RegionPlan) and regions not in ("auto", True):
        raise ValueError("the plan names the blocks that are compiled: pass plan= without regions=")
    if isinstance(plan, CompiledPlan) and regions not in ("auto", False):
        raise ValueError(
            f"the plan is for a model captured as one graph, and regions={regions!r} compiles blocks one by one: "
            "pass plan= without regions="
        )
    if request.kernels not in (plan.kernels, DEFAULT_KERNELS):
        raise PlanMismatch(f"the plan was made for kernels={plan.kernels!r}, this is {request.kernels!r}")
    request.budget, request.kernels, request.gradients = plan.budget_bytes, plan.kernels, plan.gradients
    if isinstance(plan, RegionPlan):
        request.holds_output = plan.holds_output
    else:
        request.plan = plan


def _check(request: Request) -> None:
    """Refuses settings that make no sense, by name and value."""
    check_budget(request.budget)
    check_choice("kernels", request.kernels, KERNELS)
    check_choice("gradients", request.gradients, GRADIENTS)
    check_flag("holds_output", request.holds_output)
    parse_duration(request.time_limit)


def _compiled(
    model: nn.Module, sample: Sample, device: torch.device, request: Request, prove: bool, reporter: Any
) -> nn.Module:
    """Compiles, and corrects the plan by what the whole step takes."""
    peaks: list[int] = []
    for _ in range(ROUNDS):
        reporter.begin("capturing, planning and compiling")
        backend = Backend(dataclasses.replace(request))
        backend.measures_graphs = (
            request.kernels != "eager"
        )  # their graphs take what is predicted: only the step is measured
        compiled = compiled_with(backend, model, request.kernels)
        compiled_model = CompiledModel(model, compiled, sample, device)
        compiled_model.backend, compiled_model.resident_bytes = backend, _resident_bytes(request, sample, device)
        compiled_model.optimizer_peak_bytes = request.optimizer_peak_bytes
        measured = compiled_model.prepared_step()
        if backend.plans and measured.peak_bytes > backend.plans[-1].budget_bytes:
            measured = compiled_model.compiled_step()  # a first call may allocate memory that stays
        backend.measures_graphs = True  # graphs of other shapes, later
        if not backend.plans:
            raise Unsupported("the captured graph has no backward: does the model's output need gradients?")
        plan = backend.plans[-1]
        peak = max(measured.peak_bytes, compiled_model.optimizer_peak_bytes)
        peaks.append(peak)
        if peak <= plan.budget_bytes:
            is_compared = prove and request.kernels == "eager"
            plain = compiled_model.plain_step_to_compare(is_compared, plan.plain_peak_bytes, reporter)
            differing = None if plain is None else differences(plain, measured)
            if differing:
                _explain(differing, compiled_model, measured)
            last = dataclasses.replace(plan, measured_peak_bytes=peak)
            compiled_model.make_report((*backend.plans[:-1], last), None, measured, peak, plain, differing)
            return compiled
        if request.plan is not None:
            raise BudgetExceeded.of_given_plan(peak, plan.budget_bytes)
        request.correction_bytes = plan.correction_bytes - request.step_correction_bytes
        request.step_correction_bytes += peak - plan.peak_bytes
    parts, reserve = {**plan.resident, **plan.at_peak}, plan.reserve_bytes
    raise InfeasibleBudget.of_measured_step(plan.budget_bytes, peaks, reserve, parts, plan.peak_at, request.remedy)


def _explain(differing: Sequence[str], compiled_model: CompiledModel, measured: StepResult) -> None:
    """Warns where torch's capture is what makes the difference; raises where it is the plan.

    A model may take another branch while it is captured: those of transformers make other attention masks then. And
    AOTAutograd traces some backwards otherwise than autograd runs them: sums under autocast.
    """

    def without_plan(module: Any, inputs: Any) -> Any:
        return _compat.compiled_without_plan(module, inputs)

    captured: Any = torch.compile(compiled_model.model, backend=without_plan, fullgraph=True, dynamic=False)
    with _compat.capture_settings():
        compiled_model.step(captured, may_compile=True)
        reference = compiled_model.step(captured)
    if differences(reference, measured):
        raise VerificationFailed(f"the compiled step is not that of the model: {'; '.join(differing)}")
    warn_of_capture(differing)


def _measure_around(request: Request, sample: Sample, device: torch.device, optimizer: OptimizerMemory) -> None:
    """Measure what a step needs outside the graph: optimizer state, the optimizer's step, a loss outside the model."""
    model = sample.model
    there = [*model.parameters(), *model.buffers()]
    if optimizer.state_bytes:
        request.resident["optimizer state"] = optimizer.state_bytes
    parameters = memory.dense_bytes(p for p in model.parameters() if p.requires_grad)
    step = memory.unique_bytes(there) + parameters + optimizer.state_bytes + optimizer.step_bytes
    request.optimizer_peak_bytes = step + given_bytes(sample, device)
    if sample.loss_fn is not None:
        request.loss_ns, request.loss_workspace_bytes = _loss_costs(sample, device)


def _resident_bytes(request: Request, sample: Sample, device: torch.device) -> int:
    """On the device before the step begins."""
    model = sample.model
    resident = memory.unique_bytes([*model.parameters(), *model.buffers()]) + given_bytes(sample, device)
    if request.gradients != CREATED:
        resident += memory.dense_bytes(p for p in model.parameters() if p.requires_grad)
    return resident + sum(request.resident.values())


def _loss_costs(sample: Sample, device: torch.device) -> tuple[int, int]:
    """Time and workspace of the loss on the model's output, forward and backward."""
    with saving_nothing():  # and gradients on, for the model may take some itself
        output = sample.output()
    roots: list[torch.Tensor] = []

    def as_leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.detach().requires_grad_()
            roots.append(value)
        return value

    output = _compat.tree_map(as_leaf, output)
    meter = memory.meter_for(device)
    with memory.not_collecting(), meter:
        first, began = meter.mark(), clock.read()
        loss = sample.loss(output)
        if loss is not None and loss.requires_grad:
            loss.backward()
        taken, last = clock.now(device) - began, meter.mark()
        del loss
        for root in roots:
            root.grad = None
    return taken, meter.rise(first, last)
