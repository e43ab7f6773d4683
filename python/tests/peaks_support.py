"""Predicted peaks against measured ones."""

from __future__ import annotations

from typing import Any

import cairn.torch as ct
import torch
from torch import nn

UNLIMITED = 2**40


def assert_exact(model: nn.Module, x: torch.Tensor, share: float = 0.97, blocks: Any = "layers.*") -> None:
    """At several budgets no step takes more than was predicted, or less than that share of it."""
    profile = ct.profile(model, x, passes=1, blocks=blocks)
    top = ct.plan(profile, UNLIMITED)
    for fraction in (0, 0.5, 1):
        budget = top.least_budget_bytes + int(fraction * max(0, top.plain_peak_bytes - top.least_budget_bytes))
        plan = ct.plan(profile, budget)
        found = ct.verify(model, plan, x)
        for predicted, step in (
            (plan.created_peak_bytes, found.created),
            (plan.accumulated_peak_bytes, found.accumulated),
        ):
            assert share * predicted <= step.peak_bytes <= predicted
