"""Backwards that run in another thread than the forward, as autograd's do for every CUDA device."""

# ruff: noqa: E402

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from executor_support import blocks, differing, every_block, from_input, planned, train, wild
from offloading_support import FAST, carried_out, inputs_offloaded, offloading
from torch import Tensor, nn

STAGES = tuple(blocks(*"01234"))
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def backwards() -> Iterator[concurrent.futures.Executor]:
    """A thread that lives on."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def another_thread(backwards: concurrent.futures.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backward of a tensor runs there."""
    backward = Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda *args: backwards.submit(backward, *args).result())


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)))


def loss_of(model: nn.Module) -> Tensor:
    return model(X).float().square().mean()


def under_autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model)


def with_another_device_and_type(model: nn.Module) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("cpu"):
            return loss_of(model) + torch.ones(()).to(X)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("loss", [loss_of, under_autocast, with_another_device_and_type])
@pytest.mark.parametrize("ops", [every_block(STAGES), from_input(STAGES), wild(STAGES, 1), wild(STAGES, 2)])
@pytest.mark.usefixtures("another_thread")
def test_whole_blocks_run_again(ops: Any, loss: Callable[[nn.Module], Tensor]) -> None:
    plain, other = network(), network()
    with planned(other, STAGES, ops) as executor:
        for step in range(3):
            assert not differing(train(plain, loss, step), train(other, loss, step))
            assert not executor.notes


@pytest.mark.parametrize("make", [offloading, inputs_offloaded])
@pytest.mark.usefixtures("another_thread")
def test_values_are_offloaded(make: Any) -> None:
    plain, other = network(), network()
    with carried_out(other, STAGES, make(STAGES)) as (executor, _, _):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes


@pytest.mark.parametrize("name", ["gpt2", "resnet", "tabled"])
@pytest.mark.parametrize("host", [None, "1GiB"])
def test_plans_with_parts(name: str, host: str | None, backwards: concurrent.futures.Executor) -> None:
    step = torch_models.made(name)
    profile = ct.profile(step.model, **step.sample, passes=1)
    step_transfers = {} if host is None else {"host_budget": host, "link": FAST}
    budget = ct.sweep(profile, 4, **step_transfers)[1].budget_bytes
    plan = ct.plan(profile, budget, **step_transfers)

    def gradients(surroundings: Any) -> list[Tensor]:
        found = []
        with surroundings as handle:
            for seed in range(3):
                torch.manual_seed(seed)
                step.model.zero_grad()
                backwards.submit(step.loss().backward).result()
                found += [p.grad.clone() for p in step.model.parameters() if p.grad is not None]
                assert handle is None or not handle.executor.notes
        return found

    plain = gradients(contextlib.nullcontext())
    assert all(map(torch.equal, plain, gradients(ct.apply(step.model, plan))))
