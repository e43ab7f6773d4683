"""What tests of traces share: traced steps, and schedules of them."""

# ruff: noqa: E402

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import torch_models
from torch import nn

SEED = 5


def make(name: str) -> torch_models.Step:
    """Smaller ones where whole graphs would take long."""
    if name == "gpt2":
        pytest.importorskip("transformers")
        return torch_models.gpt2(layers=2, width=64, vocabulary=200, length=64)
    if name == "resnet":
        return torch_models.resnet((1, 1, 1), 8, 4, 64)
    return torch_models.made(name)


class Plain:
    """A plain step of a copy of the model: what a traced one must give, bit for bit."""

    def __init__(self, step: torch_models.Step) -> None:
        other = torch_models.Step(copy.deepcopy(step.model), step.args, step.kwargs, step.loss_fn)
        torch.manual_seed(SEED)
        self.loss = other.loss()
        self.loss.backward()
        self.model, self.random = other.model, torch.get_rng_state()

    def check(self, given: ct.Step, model: nn.Module) -> None:
        assert torch.equal(given.loss, self.loss)
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        assert set(given.grads) == set(grads)
        for name, grad in grads.items():
            assert torch.equal(given.grads[name], grad), name
        for (name, mine), theirs in zip(model.state_dict().items(), self.model.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), name
        assert torch.equal(torch.get_rng_state(), self.random)


def run_from(traced: ct.Traced, model: nn.Module, state: dict[str, Any], verified: Any) -> ct.Step:
    model.load_state_dict(state)
    torch.manual_seed(SEED)
    return traced.run(verified)


def solved(traced: ct.Traced, share: float, solver: str = "graph-search", **options: Any) -> cairn.Verified:
    """A schedule whose budget lies between the solver's least and storing everything."""
    limits = cairn.limits(traced.graph, solver=solver)
    budget = int(limits.least_bytes + share * (limits.store_all_bytes - limits.least_bytes))
    if solver == "graph-search":
        options.setdefault("iterations", 40)
    schedule = cairn.solve(traced.graph, budget, solver=solver, **options).require()
    return cairn.verify(traced.graph, schedule, budget)


class Small(nn.Module):
    """A function with a weight."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.table = nn.Embedding(8, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


@pytest.fixture(name="linear")
def linear_fixture() -> tuple[nn.Module, ct.Traced]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).train()
    return model, ct.trace(model, torch.randn(4, 8), loss_fn=lambda y: y.square().mean(), passes=1)
