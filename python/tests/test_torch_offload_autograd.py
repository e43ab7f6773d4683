"""`cairn.torch.offload` with kept graphs, double backward, checkpointing, hooks and threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.offloading.offload import Offload
from offload_support import (
    KIB,
    Result,
    build,
    context_fixture,  # noqa: F401
    grads,
    same,
    step,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def both(context: Offload, run: Callable[[nn.Module, Tensor, Any], Result]) -> None:
    results = []
    for each in (contextlib.nullcontext(), context):
        model, x = build("attention")
        torch.manual_seed(2)
        results.append(run(model, x, each))
    assert same(*results)
    assert context.offloaded_bytes == 0 < context.capacity_bytes


def test_retain_graph(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        with within:
            loss = model(x).square().sum()
        first = []
        for _ in range(2):
            loss.backward(retain_graph=True)
            first += grads(model)
        loss.backward()
        return first + grads(model)

    both(context, run)


def test_a_kept_graph_makes_way_for_itself() -> None:
    """What a kept graph has read is not resident for ever."""
    model, x = build("attention")
    saved = ct.offload(model, x, min_bytes=0, resident_bytes=10 * KIB)
    with saved:
        loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    (store,) = saved._stores.values()
    live = [e for reference in store._entries if (e := reference()) is not None]
    assert sum(e.nbytes for e in live if e.whole is not None) <= 10 * KIB < sum(e.nbytes for e in live)


def test_double_backward(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        x = x.clone().requires_grad_()
        with within:
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            loss = grad.square().sum()
        loss.backward()
        return [*grads(model), x.grad]

    both(context, run)


def test_parts_of_the_gradient(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        with within:
            middle = model[0](x)
            loss = model[1](middle).square().sum()
        (grad,) = torch.autograd.grad(loss, middle, retain_graph=True)
        return [grad, *torch.autograd.grad(loss, list(model.parameters()))]

    both(context, run)


def test_several_forwards_before_the_backwards(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        losses = []
        for scale in (1, 2, 3):
            with within:
                losses.append(model(x * scale).square().sum())
        for index in (1, 0, 2):
            losses[index].backward()
        return grads(model)

    both(context, run)


@pytest.mark.parametrize("resident", [20 * KIB, 50 * KIB])
def test_a_forward_after_storages_of_an_earlier_one_were_fetched_ahead(resident: int) -> None:
    context = ct.offload(min_bytes=0, resident_bytes=resident)

    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        losses: list[Tensor] = []
        for what in (None, None, 1, None, 2, 0):
            if what is None:
                with within:
                    losses.append(model(x * len(losses)).square().sum())
            else:
                losses[what].backward()
        return grads(model)

    both(context, run)
    (store,) = context._stores.values()
    store._is_over()
    assert store._resident_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside(context: Offload, reentrant: bool) -> None:
    """The inputs of what is recomputed are then offloaded."""

    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        x = x.clone().requires_grad_()
        with within:
            for layer in model:
                x = checkpoint(layer, x * 1, use_reentrant=reentrant)
            loss = x.square().sum()
        loss.backward()
        return grads(model)

    both(context, run)


def test_other_hooks_inside_have_their_way(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        with within:
            with torch.autograd.graph.save_on_cpu():
                x = model[0](x)
            loss = model[1](x).square().sum()
        loss.backward()
        return grads(model)

    both(context, run)


def test_as_a_decorator_and_entered_twice(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        def forward() -> Tensor:
            return model(x).square().sum()

        forward = context(forward) if within is context else forward
        with within:
            forward().backward()
        return grads(model)

    both(context, run)


def test_models_in_threads(tmp_path: Path) -> None:
    saved = ct.offload(tier=f"file:{tmp_path}", min_bytes=0, resident_bytes=KIB)
    model, x = build("tower")
    expected = step(model, x, contextlib.nullcontext())[:-1]
    wrong = []

    def train() -> None:
        mine, x = model_of_thread()
        for _ in range(5):
            mine.zero_grad()
            with saved:
                loss = mine(x).float().square().mean()
            loss.backward()
            if not same(expected, [loss.detach(), *grads(mine), None]):
                wrong.append(1)

    lock = threading.Lock()

    def model_of_thread() -> tuple[nn.Module, Tensor]:
        with lock:
            return build("tower")

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and saved.offloaded_bytes == 0
