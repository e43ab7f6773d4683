"""Memory of an optimizer: its state, even before its first step has created it, and the peak of its step.

The optimizer itself is never stepped. A copy with a clone of the largest parameter of each group takes two steps under
a meter. Their memory is scaled to all parameters, on the assumption that state is proportional to them. In training,
the state that optimizers have created is read after their steps.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from ..base import memory
from ..base.errors import Unsupported
from ..base.tree import tensors_in
from ..rerun_state.guards import is_constant

UNMEASURED = "leave optimizer= out, and leave room for its state by cairn.Budget(reserve=)"


@dataclasses.dataclass(frozen=True)
class OptimizerMemory:
    """Bytes that an optimizer keeps between steps, and the most that its step takes on top."""

    state_bytes: int = 0
    step_bytes: int = 0


class KeptStates:
    """The state of a model's optimizers, as their steps create it."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()

    def note(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
        """Read the state of an optimizer that has stepped; returns whether its size has changed."""
        entries, size = self._states.get(optimizer, (0, 0))
        if len(optimizer.state) == entries and not needs_closure(optimizer):  # such keep more with every step
            return False
        kept = _state_of(optimizer, model)
        self._states[optimizer] = len(optimizer.state), kept
        return kept != size

    @property
    def bytes(self) -> int:
        """Bytes of state of all optimizers that exist."""
        return sum(size for _, size in self._states.values())

    @property
    def can_be_measured(self) -> bool:
        """Whether a profile can be made with each of them."""
        return not any(map(needs_closure, self._states))


def _state_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> int:
    """Bytes on the model's device that an optimizer keeps for the model's parameters."""
    device = memory.device_of(model)
    entries = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    return memory.unique_bytes(t for t in tensors_in(entries) if t.device == device)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the model itself, any number of times, as LBFGS does."""
    kind: Any = type(optimizer)
    return _takes_closure(kind)


@functools.lru_cache(maxsize=64)
def _takes_closure(kind: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside wrappers such as accelerate's, whose copies would write to it and step it."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def measure_optimizer(optimizer: torch.optim.Optimizer | None) -> OptimizerMemory:
    """The memory of `optimizer` once every parameter with a gradient has its state."""
    if optimizer is None:
        return OptimizerMemory()
    state = memory.unique_bytes(tensors_in(list(optimizer.state.values())))
    step = 0
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad]
        if not parameters:
            continue
        largest = max(parameters, key=memory.storage_bytes)
        probe = _probe(optimizer, group, largest)
        share = memory.storage_bytes(largest) or 1
        missing = sum(memory.storage_bytes(p) for p in parameters if p not in optimizer.state)
        state += missing * probe.state_bytes // share
        at_once = sum(memory.storage_bytes(p) for p in parameters) if _works_on_all(group, largest) else share
        step = max(step, at_once * probe.step_bytes // share)
    return OptimizerMemory(state, step)


def _works_on_all(group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether temporaries of all parameters exist together (torch's "foreach" implementations)."""
    if group.get("fused"):
        return False
    chosen = group.get("foreach")
    return parameter.device.type == "cuda" if chosen is None else bool(chosen)


def _probe(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> OptimizerMemory:
    """Two steps of a copy of the optimizer on a clone of one parameter."""
    meter = memory.meter_for(parameter.device)
    with meter:
        clone = torch.nn.Parameter(torch.zeros_like(parameter, requires_grad=False))
        clone.grad = torch.full_like(clone, 1e-3)
        if isinstance(optimizer, torch.optim.SparseAdam):  # which takes no others
            clone.grad = clone.grad.to_sparse(1)
        single = _copy_for(optimizer, group, clone)
        before = meter.mark()
        try:
            single.step()
        except (AttributeError, RuntimeError) as error:
            raise Unsupported(
                f"a copy of the {type(optimizer).__name__} cannot step ({error}): {UNMEASURED}"
            ) from error
        between = meter.mark()
        single.step()
        after = meter.mark()
        kept = memory.unique_bytes(tensors_in(list(single.state.values())))
        del single, clone
    first = meter.rise(before, between) - kept
    second = meter.rise(between, after)
    return OptimizerMemory(kept, max(first, second, 0))


def _copy_for(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.nn.Parameter
) -> torch.optim.Optimizer:
    single = copy.copy(optimizer)  # of most classes it has state and groups alone, not the numbers that they add
    vars(single).update(copy.deepcopy({name: value for name, value in vars(optimizer).items() if is_constant(value)}))
    vars(single).pop("step", None)  # a learning-rate scheduler's wrapper would step the original
    for name, value in vars(single).items():
        if isinstance(value, OrderedDict) and "hook" in name:
            setattr(single, name, OrderedDict())
    single.param_groups = [{**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": [parameter]}]
    single.state = defaultdict(dict)
    return single
