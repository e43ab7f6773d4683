"""A warning of steps that add to existing gradients, for plans of steps that create them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..base.choices import ACCUMULATED
from ..base.errors import warn


class AccumulationWarning:
    """Warns once if a step adds to existing gradients although its plan does not count them.

    gradients: which the plan is for: "created" or "accumulated".
    """

    def __init__(self, gradients: str) -> None:
        self._is_due = gradients != ACCUMULATED

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Before a step: look for gradients of its parameters."""
        if not self._is_due or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad and parameter.grad is not None for parameter in parameters):
            self._is_due = False
            warn(
                "this compiled step adds to gradients that exist, which its plan does not count: pass "
                'gradients="accumulated", or set gradients to None before each step'
            )
