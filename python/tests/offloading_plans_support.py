"""What tests of offloading plans share."""

from __future__ import annotations

from pathlib import Path

import cairn.torch as ct
import pytest
import torch
from executor_support import blocks
from torch import Tensor, nn
from torch_models import ALL, Step


@pytest.fixture(name="tier", params=["host", "file"])
def tier_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "host" if request.param == "host" else f"file:{tmp_path}"


def network(depth: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)))


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> Tensor:
    return model(X).square().mean()


STAGES = tuple(blocks(*"01234"))


def profile_of(step: Step) -> ct.Profile:
    return ct.profile(step.model, **step.sample, inside=False, passes=1)


@pytest.fixture(name="vgg", scope="module")
def vgg_fixture() -> tuple[Step, ct.Profile]:
    torch.manual_seed(0)
    step = ALL["vgg"]()
    return step, profile_of(step)
