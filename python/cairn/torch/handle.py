"""`apply`: puts a plan to work on a model, and takes it off again."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from .base import _compat, memory
from .base.errors import Unsupported
from .base.patched_forward import PatchedForward
from .compiled.compiled_model import known
from .head.replacements import Replacements
from .offloading.tiers import check_tier_opens
from .planning.arguments import check_call, check_plan
from .planning.shape_plans import ShapePlan, ShapePlans, Source
from .reporting.report import Report, explain
from .rerun_state.sharded import refuse_tensor_parallel
from .runtime.executor import Executor
from .runtime.step_transfers import PlanTier

if TYPE_CHECKING:
    from .planning.plan import Plan

#: The model itself holds its handle, by what takes over its forward.
_handles: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


class Handle:
    """A plan that is applied to a model; returned by `apply` and by `handle`.

    As a context manager, it removes the plan at the end.
    """

    def __init__(self, model: nn.Module, shapes: ShapePlans, executor: Executor) -> None:
        self.shapes = shapes
        self.executor = executor
        self._model = weakref.ref(model)

    @property
    def plan(self) -> Plan:
        """The plan that the latest step followed."""
        return self.shapes.current.plan

    @property
    def plans(self) -> list[ShapePlan]:
        """The plans by shape; the one that was used last is the last."""
        return self.shapes.all

    @property
    def is_applied(self) -> bool:
        """False once the plan was removed."""
        return self.executor.is_attached

    def remove(self) -> None:
        """Restore the model exactly. Steps whose forward has run can still be finished. May be called twice.

        Raises
        ------
        RecomputationError
            On an accelerator, if a block computed other values in the last step; the model is restored all the same.
        """
        self._detach()
        self.executor.check_recomputations()

    def _detach(self) -> None:
        self.executor.detach()
        self.shapes.watch(None)
        model = self._model()
        if model is not None and handle(model) is self:
            del _handles[model]

    def report(self) -> Report:
        """The plan and its measurements, as `cairn.torch.report(model)`.

        Raises
        ------
        ValueError
            The plan was removed.
        """
        self.executor.check_recomputations()
        if self._model() is None or not self.is_applied:
            raise ValueError("this plan is no longer applied to a model")
        watch = self.shapes.watched_by
        measured = None if watch is None else watch.measured(self.plan)
        return dataclasses.replace(explain(self.plan, measured, self.plans), notes=tuple(self.executor.notes))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        if error is None:
            self.executor.check_recomputations()

    def __repr__(self) -> str:
        model = self._model()
        state = "applied" if self.is_applied else "removed"
        return f"<plan for {self.plan.model_name if model is None else type(model).__name__}, {state}>"


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    on_shape_change: str = "error",
) -> Handle:
    """Put a plan to work: from now on, the model's training steps follow it.

    In place; nothing is renamed or wrapped. Loss, gradients, buffers and random state are bit for bit those of plain
    training. Copies and pickles of the model are without the plan. Calls without gradients run as usual, and so do
    calls in evaluation mode if the plan is for training.

    Parameters
    ----------
    model : nn.Module
        The model that the plan was made for, or another one of the same architecture.
    plan : Plan
        Made by `plan`, or loaded by `Plan.load`.
    preserve_rng_state : bool
        Restore the state of random generators for a recomputation, as in `torch.utils.checkpoint`.
    determinism_check : {"default", "values", "none"}
        "default" compares samples of outputs; on accelerators samples of saved tensors as well, without waiting for the
        device: a difference raises RecomputationError in the next step. "values" compares the values of all saved
        tensors, but for the seeds of kernels: slow, for finding out what differs. "none" compares nothing.
    on_shape_change : {"error", "nearest"}
        A step whose inputs are larger than the plan's raises PlanMismatch ("error"), or follows the plan all the same:
        exact, but perhaps not within the budget ("nearest"). To plan again takes a profile, which `checkpoint` has.

    Returns
    -------
    Handle
        Its `remove` restores the model. It is a context manager, too.

    Raises
    ------
    PlanMismatch
        The plan is for another model.
    Unsupported
        The model cannot follow a plan.
    ValueError
        A plan is at work on the model already.
    TierUnavailable
        The plan offloads to a file that cannot be made.

    Examples
    --------
    >>> with ct.apply(model, ct.Plan.load("plan.json")):
    ...     loss_fn(model(x)).backward()
    """
    refuse_compiled(model)
    return apply_by_shape(model, plan, None, on_shape_change, preserve_rng_state, determinism_check)


def refuse_planned(model: nn.Module) -> None:
    """Raises ValueError where a plan is applied to a model, Unsupported where one is to a part of it."""
    if handle(model) is not None:
        raise ValueError(
            f"a plan is applied to this {type(model).__name__} already; remove it first "
            "(cairn.torch.handle(model).remove())"
        )
    refuse_planned_modules(model)


def refuse_compiled(model: nn.Module) -> None:
    """Raises Unsupported for what `compile` has returned, which follows a plan of its own."""
    inside = _compat.compiled_inside(model)
    if inside is not None and _compat.has_wrapped_calls(model):
        raise Unsupported(
            f"cairn.torch.compile has compiled this {type(inside).__name__} as a whole, by a plan of its own: plan the "
            "model itself, or give it to cairn.torch.compile again, for another budget"
        )
    if known(model) is not None:
        raise Unsupported(
            f"blocks of this {type(model).__name__} are compiled by cairn.torch.compile, whose plan is at work: plan "
            "a copy of the model (copy.deepcopy), which is without them"
        )


def refuse_planned_modules(model: nn.Module) -> None:
    """Raises Unsupported where a plan is at work on a part of a model that has none itself, or on what it is in."""
    for name, part in model.named_modules():
        forward = vars(part).get("forward")
        if isinstance(forward, PatchedForward) and forward.carries_out_a_plan:
            kind = type(model).__name__
            where = f"{name}, a part of this {kind}" if name else f"a model of which this {kind} is a part"
            raise Unsupported(f"a plan is at work on {where}: remove it first")


def apply_by_shape(
    model: nn.Module,
    plan: Plan,
    source: Source | None,
    on_shape_change: str,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
) -> Handle:
    """`apply`, with something to make further plans from."""
    check_call(model, None)
    check_plan(plan)
    refuse_planned(model)
    refuse_tensor_parallel(model)
    plan.check_fits(model)
    replacements = Replacements.from_json(plan.replacements)
    replacements.check_proofs()
    shapes = ShapePlans(model, plan, on_shape_change, source)
    executor = Executor(
        model,
        plan.stages,
        plan.executed_ops,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        guide=shapes,
        in_eval=not plan.fingerprint["training"],
        selective=plan.selective_options,
        transfer_plan=plan.transfer_plan,
        plan_tier=_plan_tier_of(plan, memory.device_of(model)),
        replacements=replacements,
        kept=plan.kept_because.keys(),
        restored_blocks=plan.restored_blocks,
    )
    shapes.current.prepared = executor.first
    applied = Handle(model, shapes, executor)
    executor.attach(applied)
    _handles[model] = weakref.ref(applied)
    return applied


def _plan_tier_of(plan: Plan, device: torch.device) -> PlanTier | None:
    """For a model on a device, which may be another one of those that the plan was made for."""
    if not plan.tier:
        return None
    check_tier_opens(plan.tier)
    shared = bool(plan.problem["machine"]["shared_link"]) if plan.offloads else device.type == "cpu"
    return PlanTier(plan.tier, plan.host_budget_bytes, device, shared)


def handle(model: nn.Module) -> Handle | None:
    """The handle of the plan that is at work on a model.

    Parameters
    ----------
    model : nn.Module
        Any model.

    Returns
    -------
    Handle or None
        None if no plan is at work, for which `report` raises.
    """
    check_call(model, None)
    reference = _handles.get(model)
    return None if reference is None else reference()


@contextlib.contextmanager
def set_aside(*models: nn.Module) -> Iterator[None]:
    """Without the plans that are at work on some models, for the body of a with statement."""
    plans = [(model, handle(model)) for model in models]
    applied = [(model, each) for model, each in plans if each is not None and each.is_applied]
    for model, each in applied:
        _stop(model, each)
    try:
        yield
    finally:
        for model, each in applied:
            if handle(model) is None:  # else the body has put another one to work
                _start(model, each)


@contextlib.contextmanager
def replacing(model: nn.Module) -> Iterator[None]:
    """The plan that is at work on a model makes room for another one; it comes back if the body fails."""
    old = handle(model)
    if old is None or not old.is_applied:
        yield
        return
    _stop(model, old)
    try:
        yield
    except BaseException:
        _start(model, old)
        raise
    old.shapes.watch(None)


class SuspendablePlan:
    """A plan that is applied to a model in turns with others: it keeps the recordings of its first step.

    It releases its offload tier in between, because the tiers of several plans may be too large.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self._applied = model, apply(model, plan)
        _stop(model, self._applied)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Applies the plan for the body of a with statement, with its tier opened beforehand."""
        _start(self._model, self._applied)
        try:
            self._applied.executor.open_plan_tier()
            yield
        finally:
            _stop(self._model, self._applied)


def _start(model: nn.Module, applied: Handle) -> None:
    applied.executor.attach(applied)
    _handles[model] = weakref.ref(applied)


def _stop(model: nn.Module, applied: Handle) -> None:
    applied.executor.detach()
    del _handles[model]
