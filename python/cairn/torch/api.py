"""The main public calls: `checkpoint`, which profiles, plans and applies in one; `check_checkpoint`; `report`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from cairn import MemoryLimit, NoSchedule
from torch import nn

from .._budget import Budget
from .base.errors import PlanMismatch, warn
from .compiled.compiled_model import CompiledReport, known
from .handle import Handle, apply_by_shape, handle, refuse_compiled, replacing, set_aside
from .monitor.watch import Watch
from .offloading.tiers import check_tier_opens
from .planning.arguments import (
    APPLY_OPTIONS,
    PLAN_OPTIONS,
    PROFILE_OPTIONS,
    check_apply_options,
    check_budget,
    check_call,
    check_names,
    check_plan_options,
    check_profile_options,
    check_watching,
    host_budget_of,
    refuse_torch_compiled,
    solver_options,
    sorted_options,
)
from .planning.plan import Plan
from .planning.rank_plans import plan_of_ranks
from .planning.shape_plans import Source
from .planning.step_profile import Profile
from .planning.task import plan
from .profiler import profile
from .reporting.report import Report
from .rerun_state.sharded import ranks_of

#: What is asked of a profile that training makes holds for those that it makes anew for other shapes.
REPROFILING_OPTIONS = ("loss_fn", "inside", "outside", "holds_output")


def checkpoint(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Any = "auto",
    check_steps: int = 2,
    strict: bool = False,
    **options: Any,
) -> nn.Module:
    """Make a model train within a byte budget: profile, plan and apply in one call.

    Loss, gradients, buffers and random state stay bit for bit those of plain training. The model is changed in place;
    nothing is renamed or wrapped. A plan that was applied to it is replaced.

    Parameters
    ----------
    model : nn.Module
        The model, on its device, in training mode.
    args, kwargs
        Sample arguments of the model in the training loop; a single tensor counts as a tuple of one. Give the largest
        batch of the training.
    budget : int, str or cairn.Budget
        Peak of allocated memory over the whole step, in bytes: parameters, gradients, optimizer state and inputs
        included. "8GiB", "80%" (of the device), or "auto" (what is free).
    check_steps : int
        The number of training steps to measure with each plan. A step over the budget warns, and when the optimizer
        steps a new plan is made with a larger reserve.
    strict : bool
        A measured step over the budget raises BudgetExceeded instead.
    **options
        loss_fn, optimizer, blocks, keep, passes, inside, outside, holds_output and progress as for `profile`;
        host_budget, tier, link, solver, scope, gradients, allow, and the options of solvers, as for `plan`;
        preserve_rng_state, determinism_check and on_shape_change as for `apply`. The default of on_shape_change is
        "replan": a step whose inputs are larger than all planned ones gets a plan of its own when it begins.

    Returns
    -------
    nn.Module
        The same module.

    Raises
    ------
    InfeasibleBudget
        No plan fits. The error names the least budget that works and its parts. The model and its earlier plan stay
        unchanged.
    Unsupported
        Exact results cannot be guaranteed for the model or its step; the message names the reason.

    Examples
    --------
    >>> model = ct.checkpoint(model, x, budget="8GiB", loss_fn=loss_fn, optimizer=optimizer)
    >>> loss_fn(model(x)).backward()
    """
    _applied(model, args, kwargs, budget, check_steps, strict, options)
    return model


def _applied(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    budget: Any,
    check_steps: int,
    strict: bool,
    options: Mapping[str, Any],
) -> Handle:
    check_call(model, kwargs, options.get("loss_fn"), args)
    check_checkpoint(budget, {**options, "check_steps": check_steps, "strict": strict})
    refuse_compiled(model)
    to_profile, to_plan, left = sorted_options(options)
    check_tier_opens(to_plan.get("tier", "host"))
    measured = profile(model, args, kwargs, **to_profile)
    first_plan = plan_of_ranks(functools.partial(plan, measured, **to_plan), budget, ranks_of(model))
    left = {"on_shape_change": "replan", **left}
    again_as: dict[str, Any] = {name: to_profile[name] for name in REPROFILING_OPTIONS if name in to_profile}
    again_as["progress"] = to_profile.get("progress") or False  # no line among what a training loop prints

    def again(*args: Any, **others: Any) -> Profile:
        """Holds no optimizer: a training loop may make another one, and the state of the first goes with it."""
        return profile(*args, **{**others, **again_as}).with_optimizer_of(measured)

    given = budget if isinstance(budget, Budget) else Budget()
    limit = dataclasses.replace(given, total=first_plan.budget_bytes)
    source = Source(again, functools.partial(plan, budget=limit, **to_plan), measured)
    with replacing(model):
        applied = apply_by_shape(model, first_plan, source, **left)
    shapes = weakref.ref(applied.shapes)

    def plan_again(missed: Plan, by_bytes: int) -> None:
        current = shapes()
        try:
            if current is not None:
                current.correct(missed, by_bytes)
        except (NoSchedule, MemoryLimit, PlanMismatch) as error:
            warn(f"the plan stays as it is: {error}")

    if check_steps > 0:
        applied.shapes.watch(Watch(check_steps, strict, plan_again))
    return applied


def check_checkpoint(budget: Any, options: Mapping[str, Any]) -> None:
    """Raises for a budget, or for options, that `checkpoint` does not take."""
    known = [*PROFILE_OPTIONS, *PLAN_OPTIONS, *APPLY_OPTIONS, "budget", "check_steps", "strict", *solver_options()]
    check_names(options, known, "checkpoint")
    check_budget(budget)
    to_profile, to_plan, left = sorted_options(options)
    check_watching(options.get("check_steps", 2), options.get("strict", False))
    check_profile_options(to_profile)
    check_plan_options({**to_plan, "host_budget": host_budget_of(budget, to_plan.get("host_budget"))})
    check_apply_options(left)


def report(model: nn.Module) -> Report | CompiledReport:
    """The plan of a model, and its measurements.

    Parameters
    ----------
    model : nn.Module
        A model after `checkpoint` or `apply`, or one that `compile` returned.

    Returns
    -------
    Report or CompiledReport
        Print it, or take `to_json()`.

    Raises
    ------
    ValueError
        The model has no plan, or torch.compile(backend="cairn") made it, which keeps no report.
    RecomputationError
        On an accelerator, a block computed other values in the last step.

    Examples
    --------
    >>> print(ct.report(model))
    """
    compiled = known(model)
    if compiled is not None and compiled.report is not None:
        return compiled.report
    applied = handle(model)
    if applied is None:
        refuse_torch_compiled(model)
        raise ValueError(f"no plan is applied to this {type(model).__name__}; see cairn.torch.checkpoint")
    return applied.report()


@contextlib.contextmanager
def budget(
    model: nn.Module, total: Any, sample_args: Any = (), sample_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Handle]:
    """`checkpoint` for the body of a with statement; afterwards the model is as it was, with the plan that it had.

    Parameters
    ----------
    model : nn.Module
        The model.
    total : int, str or cairn.Budget
        The budget, as for `checkpoint`.
    sample_args, sample_kwargs
        The sample, as `args` and `kwargs` of `checkpoint`.
    **options
        Those of `checkpoint`. No steps are checked unless check_steps= says so.

    Yields
    ------
    Handle
        The plan at work.

    Examples
    --------
    >>> with ct.budget(model, "8GiB", x, loss_fn=loss_fn):
    ...     loss_fn(model(x)).backward()
    """
    check_call(model, sample_kwargs, options.get("loss_fn"), sample_args)
    check_steps, strict = options.pop("check_steps", 0), options.pop("strict", False)
    with set_aside(model):
        applied = _applied(model, sample_args, sample_kwargs, total, check_steps, strict, options)
        try:
            yield applied
        finally:
            applied.remove()
