"""Arguments, parameters, buffers and outputs that change between forward and backward: restored, or refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from cairn.torch.base.errors import RecomputationError, Unsupported
from executor_models import INPUT, STAGES, WIDTH, Layer, Net, loss_of, net
from executor_support import (
    assert_same,
    backward,
    blocks,
    differing,
    drop,
    every_block,
    from_input,
    is_valid,
    outside,
    planned,
    results,
    save,
    store_all,
    train,
    wild,
)
from refusals_support import refused, sound_afterwards
from torch import Tensor, nn
from torch.nn.utils import parametrize


def test_a_mutated_keyword_argument() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        scale = torch.ones(WIDTH)
        loss = model(INPUT, scale=scale).square().mean()
        scale.mul_(2)
        with refused(RecomputationError, "'scale'", "layers.0", "in place"):
            loss.backward()
        sound_afterwards(model)


def test_a_mutated_tensor_in_a_nested_argument() -> None:
    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            return super().forward(x) if scale is None else super().forward(x, scale=scale["list"][1])

    model = net(layer=Takes)
    with planned(model, STAGES, every_block(STAGES)):
        scale = torch.ones(WIDTH)
        loss = model(INPUT, scale={"list": [0, scale]}).square().mean()
        scale.add_(1)
        with refused(RecomputationError, "['list'][1]", "scale", "layers.4"):
            loss.backward()
        sound_afterwards(model)


def test_a_mutated_tensor_inside_an_object() -> None:
    class Bag:
        def __init__(self, scale: Tensor) -> None:
            self.scale = scale

    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            return super().forward(x) if scale is None else super().forward(x, scale=scale.scale)

    model = net(layer=Takes)
    with planned(model, STAGES, every_block(STAGES)):
        bag = Bag(torch.ones(WIDTH))
        loss = model(INPUT, scale=bag).square().mean()
        bag.scale.add_(1)
        with refused(RecomputationError, "Bag.scale", "layers.4"):
            loss.backward()
        with refused(Unsupported, "Bag.scale", "layers.0"):
            model(INPUT, scale=Bag(torch.ones(WIDTH, requires_grad=True)))
        sound_afterwards(model)


def test_a_block_that_writes_into_an_object() -> None:
    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            y = super().forward(x)
            if scale is not None:
                scale.last = y
            return y

    class Bag:
        last: Tensor | None = None

    model = net(layer=Takes)
    with planned(model, STAGES, every_block(STAGES)):
        with refused(Unsupported, "layers.0", "Bag"):
            model(INPUT, scale=Bag())
        sound_afterwards(model)
    assert_same(model, lambda m: m(INPUT, scale=Bag()).square().mean(), STAGES, store_all(STAGES))


def test_a_mutated_list_of_numbers_is_the_old_one_again() -> None:
    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            scale.append(1)
            return super().forward(x) * scale[0]

    def loss(model: nn.Module) -> Tensor:
        factors = [3.0]
        value = model(INPUT, scale=factors).square().mean()
        factors[0] = 5.0
        assert len(factors) == 6
        return value

    assert_same(net(layer=Takes), loss, STAGES, from_input(STAGES))


def test_a_mutated_positional_argument() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3))).train()
    stages = blocks("0", "1", "2")
    with planned(model, stages, from_input(stages)):
        x = INPUT.clone()
        loss = model(x).square().mean()
        x.add_(1)
        with refused(RecomputationError, "args[0]", "'0'"):
            loss.backward()
        sound_afterwards(model)


def test_a_parameter_changed_between_forward_and_backward() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with planned(model, STAGES, from_input(STAGES)):
        train(model, loss_of)
        loss = loss_of(model)
        optimizer.step()
        with refused(RuntimeError, "inplace"):
            loss.backward()
        sound_afterwards(model)
        loss = model(INPUT).sum()  # the head's own backward does not read its weight's old value
        with torch.no_grad():
            model.layers[4].up.weight.mul_(2)
        with refused(RecomputationError, "up.weight", "layers.4"):
            loss.backward()
        assert issubclass(RecomputationError, RuntimeError)  # as what autograd raises in plain training
        sound_afterwards(model)


@pytest.mark.parametrize("how", ["functional call", "parameter", "buffer"])
def test_what_is_replaced_between_forward_and_backward_is_there_for_the_backward(how: str) -> None:
    def results(model: Any) -> list[Tensor]:
        torch.manual_seed(1)
        layer = model.layers[4]
        weight = layer.up.weight
        if how == "functional call":
            others = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}
            loss = torch.func.functional_call(model, others, (INPUT,)).square().mean()
            return [loss, *torch.autograd.grad(loss, list(others.values())), *model.buffers()]
        loss = model(INPUT).square().mean()
        if how == "parameter":
            layer.up.weight = nn.Parameter(torch.zeros_like(weight))
        else:
            for part in model.modules():
                for name, buffer in part.named_buffers(recurse=False):
                    setattr(part, name, torch.zeros_like(buffer))
        loss.backward()
        assert layer.up.weight is weight or layer.up.weight.grad is None
        layer.up.weight = weight
        return [loss, *(p.grad for p in model.parameters()), *model.buffers()]

    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)):
        for _ in range(2):
            assert all(map(torch.equal, results(model), results(plain)))
            model.zero_grad()
            plain.zero_grad()
        sound_afterwards(model)


class Scaled(nn.Module):
    """A parametrization that autograd saves tensors for."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.tanh(weight).square().mean()


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.up, "weight", Scaled())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class CallingTwice(Net):
    """Each layer is called twice, with the weights of the first call where the model says so."""

    is_cached = True

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.enter(x)
        with parametrize.cached() if self.is_cached else contextlib.nullcontext():
            for layer in self.layers:
                x = layer(layer(x))
        return self.leave(x)


def test_weights_that_are_cached_in_the_forward_are_computed_again_in_the_backward() -> None:
    model, plain = net(layer=Parametrized), net(layer=Parametrized)
    with planned(model, STAGES, from_input(STAGES)):
        for step in range(2):
            found = []
            for one in (model, plain):
                torch.manual_seed(step)
                with parametrize.cached():
                    loss = loss_of(one)
                loss.backward()
                found.append(results(one, loss))
            assert not differing(*found)
        found = []
        for one in (model, plain):
            with parametrize.cached():  # in the backward, too
                loss = loss_of(one)
                loss.backward()
            found.append(results(one, loss))
        assert not differing(*found)
        sound_afterwards(model)


def test_weights_of_an_earlier_call_are_there_when_a_block_runs_again() -> None:
    torch.manual_seed(0)
    model = CallingTwice(2, Parametrized).train()
    stages = [outside("before"), *blocks(*(f"layers.{i // 2}" for i in range(4))), outside("after")]
    for ops in (every_block(stages), from_input(stages), wild(stages, 2)):
        assert_same(model, loss_of, stages, ops)
    model.is_cached = False
    assert_same(model, loss_of, stages, from_input(stages))


def test_a_training_flag_changed_between_forward_and_backward() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        loss = loss_of(model)
        model.eval()
        with refused(RecomputationError, "training flag", "layers.0"):
            loss.backward()
        model.train()
        sound_afterwards(model)


def test_a_large_buffer_changed_between_forward_and_backward() -> None:
    class Reads(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(64, 512))

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return super().forward(x * self.table[0, :WIDTH])

    model = net(layer=Reads)
    with planned(model, STAGES, from_input(STAGES)):
        train(model, loss_of)
        loss = loss_of(model)
        model.layers[2].table.add_(1)
        with refused(RecomputationError, "'table'", "layers.2"):
            loss.backward()
        sound_afterwards(model)


def test_a_block_that_changes_its_input() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.relu_(x))

    model = net(layer=Changes)
    with planned(model, STAGES, from_input(STAGES)), refused(Unsupported, "layers.0", "args[0]", "in place"):
        loss_of(model)
    assert_same(model, loss_of, STAGES, store_all(STAGES))


def test_a_kept_tensor_that_is_mutated_later() -> None:
    """Torch's own check does not look behind hooks; ours does."""
    shown: dict[nn.Module, Tensor] = {}  # by what ran last

    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            shown[self] = self.linear(x)
            return shown[self].sin()

    model = net(layer=Shows)
    ops = [save(1), save(2), save(3), drop("saved", 3), save(3), save(4), save(5), save(6), save(7)]
    ops += [backward(stage) for stage in range(7, 0, -1)]
    assert is_valid(STAGES, ops)
    with planned(model, STAGES, ops):
        loss = loss_of(model)
        with torch.no_grad():
            shown[model.layers[1]].mul_(2)
        with refused(RuntimeError, "inplace"):
            loss.backward()
