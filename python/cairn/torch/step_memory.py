"""What of a plan's memory is there around a step, and what a step adds that its plan does not count. All in bytes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .base import _compat, memory
from .base.stage_measure import IN_ATTRIBUTES, LEFT_BESIDE, STATE
from .context.attributes import plain_tensors
from .plan import Plan


def resident_of(plan: Plan, gradient_bytes: int, found_bytes: int) -> int:
    """What of a plan's memory is there before the step begins, with gradients of so many bytes, and with what was found
    in attributes then.
    """
    if plan.scope == "activations":
        return int(plan.problem["input_bytes"])
    state = sum(size for name, size in plan.resident.items() if name in STATE and name != IN_ATTRIBUTES)
    return state + found_bytes + gradient_bytes + int(plan.problem["input_bytes"])


class Found:
    """What a step finds in attributes of modules, and may replace."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        counts = plan.scope == "activations" or IN_ATTRIBUTES in plan.resident
        tensors = [tensor for tensor, _ in plain_tensors(model)] if counts else []
        self._storages = list(map(_compat.StorageRef, filter(memory.has_storage, tensors)))
        self._left_bytes = plan.resident.get(LEFT_BESIDE, 0)
        self.nbytes = min(sum(_sizes(self._storages).values()), plan.resident.get(IN_ATTRIBUTES, 0))

    def replaced_bytes(self, model: nn.Module) -> int:
        """Of this, what no attribute has any more. A meter that has not seen it come, or is used where someone else
        still holds it, does not see it go.
        """
        there = memory.storages(tensor for tensor, _ in plain_tensors(model)) if self._storages else {}
        gone = sum(size for key, size in _sizes(self._storages).items() if key not in there)
        return max(0, gone - self._left_bytes)


def _sizes(storages: Iterable[_compat.StorageRef]) -> dict[int, int]:
    return {ref.key: ref.nbytes for ref in storages}


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
    if LEFT_BESIDE not in plan.resident:
        return 0
    left = memory.unique_bytes(tensor for tensor, _ in plain_tensors(model))
    return min(left, plan.resident[LEFT_BESIDE])
