"""Exceptions in forwards and backwards leave the next step sound."""

from __future__ import annotations

import pytest
import torch
from cairn.torch.base.errors import RecomputationError
from cairn.torch.runtime.executor import Executor
from executor_models import STAGES, Layer, loss_of, net
from executor_support import Op, differing, every_block, from_input, no_collector, planned, results, train, wild
from refusals_support import refused, sound_afterwards
from torch import Tensor


class Fails(Layer):
    where = ""

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if Fails.where == "forward":
            raise KeyboardInterrupt
        if Fails.where == "again" and torch._C._current_graph_task_id() != -1:
            raise MemoryError("again")
        if Fails.where == "backward" and y.requires_grad:
            y.register_hook(_fail)
        return y


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "where, error", [("forward", KeyboardInterrupt), ("again", MemoryError), ("backward", ZeroDivisionError)]
)
@pytest.mark.parametrize("ops", [every_block(STAGES), from_input(STAGES), wild(STAGES, 3)])
def test_an_exception_leaves_the_next_step_sound(where: str, error: type[BaseException], ops: list[Op]) -> None:
    layers = [Layer(), Layer(), Fails(), Layer(), Layer()]
    model = net(layer=lambda: layers.pop())
    with planned(model, STAGES, ops), no_collector():
        state = torch.get_rng_state()
        Fails.where = where
        try:
            with pytest.raises(error):
                train(model, loss_of)
        finally:
            Fails.where = ""
        del state
        sound_afterwards(model)


def test_a_failed_backward_cannot_be_continued() -> None:
    layers = [Layer(), Layer(), Fails(), Layer(), Layer()]
    model = net(layer=lambda: layers.pop())
    with planned(model, STAGES, from_input(STAGES)):
        loss = loss_of(model)
        Fails.where = "again"
        try:
            with pytest.raises(MemoryError):
                loss.backward(retain_graph=True)
        finally:
            Fails.where = ""
        with refused(RecomputationError, "run the forward again"):
            loss.backward()


def test_buffers_and_random_state_survive_a_failing_run() -> None:
    layers = [Layer(), Layer(), Fails(), Layer(), Layer()]
    model = net(layer=lambda: layers.pop())
    with planned(model, STAGES, from_input(STAGES)):
        torch.manual_seed(0)
        loss = loss_of(model)
        before = results(model, loss)
        Fails.where = "again"
        try:
            with pytest.raises(MemoryError):
                loss.backward()
        finally:
            Fails.where = ""
        after = results(model, loss)
        changed = differing(before, after)
        assert all(name.startswith("gradient") for name in changed)


def test_detaching_between_forward_and_backward() -> None:
    model, plain = net(), net()
    executor = Executor(model, STAGES, from_input(STAGES))
    executor.attach()
    torch.manual_seed(0)
    loss = loss_of(model)
    executor.detach()
    loss.backward()
    assert not differing(train(plain, loss_of), results(model, loss))
