"""What of a plan's memory is there around a step, and what a step adds that its plan does not count. All in bytes."""

from __future__ import annotations

from torch import nn

from .base import memory
from .base.stage_measure import IN_ATTRIBUTES, LEFT_BESIDE
from .context.attributes import plain_tensors
from .plan import Plan
from .step_profile import STATE


def resident_of(plan: Plan, gradient_bytes: int, found_bytes: int) -> int:
    """What of a plan's memory is there before the step begins, with gradients of so many bytes, and with what was found
    in attributes then.
    """
    if plan.scope == "activations":
        return int(plan.problem["input_bytes"])
    state = sum(size for name, size in plan.resident.items() if name in STATE and name != IN_ATTRIBUTES)
    return state + found_bytes + gradient_bytes + int(plan.problem["input_bytes"])


def found_bytes_of(plan: Plan, model: nn.Module) -> int:
    """What is in attributes of the model's modules now, of what the plan counts as such."""
    return _in_attributes(plan, model, IN_ATTRIBUTES)


def gradient_bytes_of(model: nn.Module) -> int:
    """Bytes of the gradients that exist now."""
    return memory.unique_bytes(p.grad for p in model.parameters() if p.is_leaf and p.grad is not None)


def uncounted_bytes(plan: Plan, model: nn.Module, gradient_bytes: int) -> int:
    """What a step has added to the gradients of so many bytes, where the plan does not count gradients.

    A meter sees them as they come, so taking all of them off its peak can take too much, never too little.
    """
    return gradient_bytes_of(model) - gradient_bytes if plan.scope == "activations" else 0


def left_bytes(plan: Plan, model: nn.Module) -> int:
    """What of a plan's memory an earlier step has left beside the blocks' results, for this one to replace."""
    return _in_attributes(plan, model, LEFT_BESIDE)


def _in_attributes(plan: Plan, model: nn.Module, name: str) -> int:
    if name not in plan.resident:
        return 0
    left = memory.unique_bytes(tensor for tensor, _ in plain_tensors(model))
    return min(left, plan.resident[name])
