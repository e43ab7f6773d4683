"""A plan's memory that exists before a step, and memory of a step that its plan does not count; in bytes."""

from __future__ import annotations

from torch import nn

from ..base import _compat, memory
from ..base.stage_measure import IN_ATTRIBUTES, SIDE_OUTPUTS, STATE
from ..rerun_state.attributes import plain_tensors
from .plan import Plan


def resident_of(plan: Plan, gradient_bytes: int) -> int:
    """The part of a plan's memory that exists before the step, with `gradient_bytes`; attributes not counted."""
    given = int(plan.problem["input_bytes"])
    if plan.scope == "activations":
        return given
    state = sum(size for name, size in plan.resident.items() if name in STATE and name != IN_ATTRIBUTES)
    return state + gradient_bytes + given


class AttributeMemory:
    """Memory of tensors in attributes of modules and objects of hooks at the beginning of a step: kept or replaced."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._is_step, self._left_bytes = plan.scope == "step", plan.resident.get(SIDE_OUTPUTS, 0)
        self._counted_bytes = plan.resident.get(IN_ATTRIBUTES, 0)
        counts = self._left_bytes + self._counted_bytes > 0 or not self._is_step
        self._storages = _storages_in_attributes(model) if counts else {}

    def uncounted(self, model: nn.Module, sees_going: bool) -> int:
        """At the end of the step: bytes to add to the resident memory and to a meter's rise.

        The meter has counted new tensors. sees_going: it has also counted the tensors that were freed.
        """
        there = memory.storages(tensor for tensor, _ in plain_tensors(model)) if self._storages else {}
        sizes = {ref.key: ref.nbytes for ref in self._storages.values()}
        gone = sum(size for key, size in sizes.items() if key not in there)
        if not self._is_step:  # what else replaces something is not counted
            return min(gone, self._left_bytes) if sees_going else -max(0, gone - self._left_bytes)
        stays = min(sum(sizes.values()) - gone, self._counted_bytes)
        return stays + (min(gone, self._counted_bytes + self._left_bytes) if sees_going else 0)


def _storages_in_attributes(model: nn.Module) -> dict[int, _compat.StorageRef]:
    tensors = (tensor for tensor, _ in plain_tensors(model))
    return {ref.key: ref for ref in map(_compat.StorageRef, filter(memory.has_storage, tensors))}


def gradient_bytes_of(model: nn.Module) -> int:
    """Bytes of the gradients that exist now."""
    return memory.unique_bytes(p.grad for p in model.parameters() if p.is_leaf and p.grad is not None)


def uncounted_bytes(plan: Plan, model: nn.Module, gradient_bytes: int) -> int:
    """Bytes that a step has added to `gradient_bytes` of gradients, if the plan does not count gradients.

    A meter counts each when it is created, so to subtract all of them from its peak may subtract too much, never too
    little.
    """
    return gradient_bytes_of(model) - gradient_bytes if plan.scope == "activations" else 0
