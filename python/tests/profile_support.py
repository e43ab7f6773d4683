"""What tests of profiles share."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from torch import nn


def profiled(step: torch_models.Step, **options: Any) -> ct.Profile:
    return ct.profile(step.model, **{**step.profiling, **options}, passes=1)


def block_names(profile: ct.Profile) -> list[str]:
    return [stage.name for stage in profile.stages if stage.kind == "block"]


class Loop(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Leaves(nn.Linear):
    """A block with a loss of its own, left in an attribute."""

    penalty: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.weight.square().mean() + x.mean()
        return super().forward(x).tanh()
