"""What tests of plans share."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from torch import nn

UNLIMITED = 2**40


def profiled(step: torch_models.Step, **options: Any) -> ct.Profile:
    return ct.profile(step.model, **{**step.profiling, **options}, passes=1)


def least_of(step: torch_models.Step) -> int:
    """What a profile finds, and some more: the next one may have other options, by their times."""
    return ct.plan(profiled(step), UNLIMITED).least_budget_bytes * 102 // 100


def linear_chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)) for _ in range(6)))


class Arguments:
    gradient_checkpointing, bf16, fp16, label_smoothing_factor = False, False, False, 0.0
