"""Inputs of other shapes for a model whose blocks are compiled one by one.

Dynamo compiles a block anew for other shapes. A plan covers every step whose inputs are nowhere larger than those that
it was made for. A `ShapeGuard` replaces the forward of the model. Before a step with larger inputs, it asks for another
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..base import ranks
from ..base.errors import PlanMismatch
from ..base.patched_forward import PatchedForward
from ..planning.shapes import described, is_covered, sized
from .accumulation import AccumulationWarning

MAX_PLANS = 8  # of one model, for inputs that grow


class ShapeGuard(PatchedForward):
    """Replaces the forward of a model: before each step, checks the shapes of its inputs, and looks for gradients.

    shapes: descriptions of the inputs that the plan was made for. gradients: which it was made for. plan_for: makes a
    plan for larger arguments.
    """

    carries_out_a_plan = False

    def __init__(
        self,
        model: nn.Module,
        shapes: Sequence[str],
        gradients: str,
        plan_for: Callable[[tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        self._shapes, self._plan_for = shapes, plan_for
        self._parameters, self._accumulation = list(model.parameters()), AccumulationWarning(gradients)
        self._covered: set[tuple[Any, ...]] = set()
        super().__init__(model, self._checked)

    def _checked(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self.module
        if model is None or not model.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._accumulation.check(self._parameters)
        key = tuple((tensor.dtype, tensor.shape) for tensor in sized((args, kwargs)))
        if key in self._covered:
            return forward(*args, **kwargs)
        if is_covered(described(args, kwargs), self._shapes):
            self._covered.add(key)
            return forward(*args, **kwargs)
        self._plan_for(args, kwargs)
        return model.forward(*args, **kwargs)  # under the new plan's guard


def refuse_growth(shapes: Sequence[str], planned: Sequence[str], plans: int) -> None:
    """Raises PlanMismatch where another plan for larger inputs must not be made."""
    why = ""
    if plans >= MAX_PLANS:
        why = f"{plans} plans were made for inputs that grew"
    elif ranks.several():
        why = "a plan is not made by one rank alone"
    if why:
        raise PlanMismatch(
            f"the plan was made for inputs {', '.join(planned)}; this step has {', '.join(shapes)}, and {why}: give "
            "the largest inputs that you train with as the sample of cairn.torch.compile"
        )
