"""`estimate`: memory and time of a training step, without its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from cairn import ProgressCallback
from torch import nn

from ..base.budgets import size_bytes
from ..base.choices import ACCUMULATED, CREATED
from ..base.errors import InfeasibleBudget
from ..planning import arguments
from ..planning.plan import Plan
from ..planning.step_profile import Profile
from ..planning.task import Task
from ..resizing import CannotResize
from . import batches
from .devices import DeviceModel, device_model
from .fake_step import FakeStep
from .result import Estimate, EstimatePoint

POINTS = 6


def estimate(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | DeviceModel = "cuda",
    memory: int | str | None = None,
    shard: int = 1,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    budgets: int | Sequence[Any] = POINTS,
    largest_batch: bool = True,
    dim: int = 0,
    gradients: str = ACCUMULATED,
    blocks: Any = "auto",
    inside: bool = True,
    holds_output: bool = True,
    progress: ProgressCallback | Literal[False] | None = None,
) -> Estimate:
    """Estimate a training step's memory and time, plain and under `checkpoint`, without running it.

    The step runs on fake tensors, which have shapes and no numbers. So the model may lie on `meta`, may be of any size,
    and needs no device. The estimate covers the plain step and the plans that `checkpoint` would make.

    Parameters
    ----------
    model, args, kwargs
        The model and a sample of what the training loop calls it with, on `meta` or anywhere; of the sample, shapes and
        types count. A single tensor may stand for a tuple of one.
    device : str or DeviceModel
        "cuda" or "cpu" chooses the kernels. A device's name ("H100", "A100", "L4", ...) or a `DeviceModel` also gives
        its memory and its rates, from which times are computed.
    memory : int or str, optional
        The memory that the step may use, such as "80GiB". The named device's memory if None.
    shard : int
        The number of devices over which FSDP2 shards the model. Sizes and the sample are those of one device.
    loss_fn, targets
        `loss_fn(output)` computes the loss where the model does not; `loss_fn(output, targets)` if `targets` is given.
    optimizer : torch.optim.Optimizer, optional
        Its state and its step are counted; it is not stepped.
    budgets : int or list
        The number of points of the curve, from the least budget to that of the plain step; or the budgets.
    largest_batch : bool
        Also search for the largest batch within the memory, which takes a few more profiles.
    dim : int
        The dimension of the sample that is the batch.
    gradients, blocks, inside, holds_output, progress
        As for `plan` and `profile`.

    Returns
    -------
    Estimate
        Prints as a table; `to_json` gives plain data.

    Raises
    ------
    Unsupported
        A branch or a shape depends on a tensor's numbers; the message names the operator and the line.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     model = GPT2LMHeadModel(GPT2Config())
    >>> ids = torch.zeros(8, 1024, dtype=torch.long)
    >>> print(ct.estimate(model, kwargs={"input_ids": ids, "labels": ids}, device="A100"))
    """
    described = device_model(device)
    memory_bytes = described.memory_bytes if memory is None else size_bytes(memory, "memory")
    check_targets = targets is not None and callable(loss_fn)
    arguments.check_call(model, kwargs, None if check_targets else loss_fn, args)
    arguments.check_optimizer(model, optimizer)
    arguments.check_choice("gradients", gradients, (ACCUMULATED, CREATED))
    arguments.check_count("shard", shard, 1)
    sample = (arguments.positional(args), dict(kwargs or {}), targets)
    options = {"blocks": blocks, "inside": inside, "holds_output": holds_output, "progress": progress}
    step = FakeStep(model, sample, loss_fn, optimizer, described, shard, dim, options)
    profile = step.profiled(step.batch)
    task = _task(profile, gradients)
    points = _curve(task, budgets)
    plain = next(point for point in reversed(points) if isinstance(point, Plan))
    within = task.plans([memory_bytes])[0] if memory_bytes is not None else None
    largest = plain_largest = None
    notes = list(profile.notes)
    if largest_batch and memory_bytes is not None:
        try:
            largest, plain_largest = _largest(step, memory_bytes, gradients)
        except CannotResize as error:
            notes.append(f"the largest batch was not searched: {error}")
    return Estimate(
        model_name=profile.model_name,
        parameter_count=sum({id(p): p.numel() for p in model.parameters()}.values()),
        device=described.name,
        rates=described.rates,
        memory_bytes=memory_bytes,
        shard=shard,
        batch=step.batch,
        gradients=gradients,
        plain_peak_bytes=plain.plain_peak_bytes,
        least_budget_bytes=plain.least_budget_bytes,
        plain_ns=plain.plain_ns if described.has_times else None,
        points=tuple(_point(plan, described.has_times) for plan in points if isinstance(plan, Plan)),
        within=_point(within, described.has_times) if isinstance(within, Plan) else None,
        largest_batch=largest,
        largest_plain_batch=plain_largest,
        resident=plain.resident,
        notes=tuple(notes),
        profile=profile,
    )


def _task(profile: Profile, gradients: str) -> Task:
    return Task(profile, "step", gradients, "auto", {}, None)


def _curve(task: Task, budgets: Any) -> list[Plan | InfeasibleBudget]:
    wanted = list(dict.fromkeys(task.even_budgets(budgets))) if isinstance(budgets, int) else list(budgets)
    highest = task.even_budgets(2)[-1]
    return task.plans([*wanted, *([] if isinstance(budgets, int) else [highest])])


def _point(plan: Plan, has_times: bool) -> EstimatePoint:
    return EstimatePoint(plan.budget_bytes, plan.peak_bytes, plan.overhead, plan.step_ns if has_times else None)


def _largest(step: FakeStep, memory_bytes: int, gradients: str) -> tuple[int, int]:
    """The largest batch with a plan, and the largest with nothing recomputed."""
    needs: dict[int, list[int]] = {}

    def needed(batch: int, most: bool) -> int:
        if batch not in needs:
            needs[batch] = _task(step.profiled(batch), gradients).even_budgets(2)
        return needs[batch][most]

    first = step.batch, 2 * step.batch
    plainly = batches.largest(lambda batch: needed(batch, True), first, memory_bytes)
    return batches.largest(lambda batch: needed(batch, False), list(needs), memory_bytes), plainly
