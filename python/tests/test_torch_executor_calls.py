"""Kinds of forward and of backward under a schedule."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executor_models import INPUT, STAGES, WIDTH, Layer, Net, loss_of, net
from executor_support import (
    Op,
    assert_same,
    backward,
    blocks,
    differing,
    every_block,
    expected_runs,
    from_input,
    keep,
    outside,
    planned,
    results,
    save,
    store_all,
    train,
    wild,
)
from torch import Tensor, nn


def test_inactive_without_gradients_and_in_evaluation() -> None:
    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)) as executor:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                torch.manual_seed(0)
                expected = plain(INPUT)
                torch.manual_seed(0)
                assert torch.equal(expected, model(INPUT))
        plain.eval(), model.eval()
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == []
        plain.train(), model.train()
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == expected_runs(STAGES, from_input(STAGES))


def test_active_in_evaluation_if_planned_for_it() -> None:
    model, plain = net().eval(), net().eval()
    ops = from_input(STAGES)
    with planned(model, STAGES, ops, in_eval=True) as executor:
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == expected_runs(STAGES, ops)


def test_several_forwards_before_a_backward() -> None:
    def loss(model: nn.Module) -> Tensor:
        first, second, third = (model(INPUT * k) for k in (1, 2, 3))
        return (first * third).mean() + second.square().mean()

    for ops in (from_input(STAGES), wild(STAGES, 1)):
        assert_same(net(), loss, STAGES, ops)


def test_forwards_whose_backwards_come_in_another_order() -> None:
    def run(model: nn.Module) -> dict[str, Any]:
        torch.manual_seed(5)
        first, second = loss_of(model), model(2 * INPUT).square().mean()
        first.backward()
        second.backward()
        return results(model, first + second)

    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)):
        assert not differing(run(plain), run(model))


def test_under_no_grad_in_parts() -> None:
    class Partly(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            with torch.no_grad():
                x = self.layers[1](self.layers[0](self.enter(x)))
            for layer in self.layers[2:]:
                x = layer(x)
            return self.leave(x)

    torch.manual_seed(0)
    model = Partly().train()
    for ops in (every_block(STAGES), from_input(STAGES), wild(STAGES, 2)):
        assert_same(model, loss_of, STAGES, ops, in_order=False)


class Holds(nn.Module):
    def __init__(self, value: nn.Module) -> None:
        super().__init__()
        self.value = value


@dataclasses.dataclass
class Pair:
    hidden: Tensor
    other: dict[str, Any]


class Structured(nn.Module):
    """Takes and returns nested containers, keywords, None and things that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, pair: Pair, extra: list[Tensor | None], *, flag: str, offset: Tensor) -> tuple[Any, ...]:
        assert flag == "yes" and extra[1] is None
        hidden = self.layer(pair.hidden) + offset + extra[0] * pair.other["weight"][0]
        return Pair(hidden, {"weight": (pair.other["weight"][0] * 2, 1.5), "name": "x"}), None, hidden.detach().sum()


class StructuredNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Structured() for _ in range(4))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        pair, offset = Pair(x * self.weight, {"weight": (self.weight * 3, 0)}), torch.linspace(0, 1, WIDTH)
        for layer in self.layers:
            pair, nothing, total = layer(pair, [offset, None], flag="yes", offset=offset)
            assert nothing is None and not total.requires_grad
        return pair.hidden * pair.other["weight"][0]


@pytest.mark.parametrize("seed", range(4))
def test_nested_arguments_and_results(seed: int) -> None:
    torch.manual_seed(0)
    stages = blocks(*(f"layers.{i}" for i in range(4)))
    assert_same(StructuredNet().train(), loss_of, stages, wild(stages, seed))


def test_views_between_blocks() -> None:
    """What a model does with an output in between, if only to look at it differently, does not keep it."""

    class Reshaping(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for layer in self.layers:
                x = layer(x).view(4, 4, WIDTH).transpose(0, 1).transpose(0, 1).reshape(16, WIDTH)
            return self.leave(x)

    torch.manual_seed(0)
    assert_same(Reshaping().train(), loss_of, STAGES, from_input(STAGES))


def test_an_output_changed_in_place_before_the_next_block() -> None:
    class InPlace(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for layer in self.layers:
                x = layer(x)
                x += 1
            return self.leave(x)

    torch.manual_seed(0)
    for seed in range(4):
        assert_same(InPlace().train(), loss_of, STAGES, wild(STAGES, seed))


def test_an_output_that_skips_blocks() -> None:
    class Skipping(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = first = self.layers[0](self.enter(x))
            for layer in self.layers[1:]:
                x = layer(x, scale=first)
            return self.leave(x + first)

    torch.manual_seed(0)
    for seed in range(4):
        assert_same(Skipping().train(), loss_of, STAGES, wild(STAGES, seed))


def test_outputs_that_only_the_loss_reads() -> None:
    class Auxiliary(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return torch.tanh(x).exp(), y, y.sigmoid().mean()

    class Sums(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x, total = self.enter(x), torch.zeros(())
            for index, layer in enumerate(self.layers):
                early, x, late = layer(x)
                total = total + early.mean() * (index % 2) + late
            return total

    torch.manual_seed(0)
    model = Sums(layer=Auxiliary).train()
    for seed in range(6):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))
    assert_same(model, loss_of, STAGES, from_input(STAGES))


def test_detached_between_blocks() -> None:
    class Detaching(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            outputs = []
            for layer in self.layers:
                x = layer(x.detach())
                outputs.append(x)
            return torch.stack(outputs)

    torch.manual_seed(0)
    for ops in (from_input(STAGES), every_block(STAGES), wild(STAGES, 1)):
        assert_same(Detaching().train(), loss_of, STAGES, ops, in_order=False)


def test_layers_that_save_nothing() -> None:
    class Rolls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.roll(1, 0) + 1

    layers = [Layer(), Rolls(), Rolls(), Layer(), Rolls()]
    model = net(layer=lambda: layers.pop())
    for seed in range(6):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))
    assert_same(model, loss_of, STAGES, from_input(STAGES))


def test_blocks_that_do_not_run_or_run_more_often() -> None:
    class Irregular(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for index in (0, 3, 3, 1):
                x = self.layers[index](x)
            return self.leave(x)

    torch.manual_seed(0)
    plain, model = Irregular().train(), None
    for seed in range(6):
        plain, model = Irregular().train(), None
        model = copy.deepcopy(plain)
        with planned(model, STAGES, wild(STAGES, seed)) as executor:
            assert not differing(train(plain, loss_of), train(model, loss_of))
            assert any("more often" in note for note in executor.notes)
            assert any("did not run" in note for note in executor.notes)


def test_the_whole_model_as_one_block() -> None:
    stages = blocks("")
    model, plain = net(), net()
    ops = [keep(1), save(1), backward(1)]
    with planned(model, stages, ops) as executor:
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == [("forward_keep", 1), ("forward_save", 1)]


def test_parts_of_a_sequential() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Layer(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    for stages in (blocks("0-1", "2", "3-4"), [*blocks("0-1"), outside("2"), *blocks("3-4")]):
        for ops in (from_input(stages), every_block(stages)):
            assert_same(model.train(), loss_of, stages, ops)


def both(stages: Any, ops: list[Op], run: Callable[[nn.Module], Any], model: Callable[[], nn.Module] = net) -> None:
    """Something done to a plain and to a planned model gives the same."""
    plain, other = model(), model()
    with planned(other, stages, ops):
        torch.manual_seed(3)
        expected = run(plain), results(plain, torch.zeros(()))
        torch.manual_seed(3)
        actual = run(other), results(other, torch.zeros(()))
    assert not differing(expected[1], actual[1])
    for first, second in zip(expected[0] or (), actual[0] or (), strict=True):
        assert torch.equal(first, second)


ALL_KINDS = pytest.mark.parametrize(
    "ops", [store_all(STAGES), every_block(STAGES), from_input(STAGES), *(wild(STAGES, seed) for seed in range(4))]
)


@ALL_KINDS
def test_retain_graph(ops: list[Op]) -> None:
    def run(model: nn.Module) -> None:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    both(STAGES, ops, run)


@ALL_KINDS
def test_two_losses(ops: list[Op]) -> None:
    class TwoHeads(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for layer in self.layers[:3]:
                x = layer(x)
            middle = x
            for layer in self.layers[3:]:
                x = layer(x)
            return middle.square().mean(), self.leave(x).square().mean()  # type: ignore[return-value]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return TwoHeads().train()

    def early_first(model: nn.Module) -> None:
        early, late = model(INPUT)
        early.backward(retain_graph=True)
        late.backward()

    def late_first(model: nn.Module) -> None:
        early, late = model(INPUT)
        late.backward(retain_graph=True)
        early.backward()

    def only_early(model: nn.Module) -> None:
        model(INPUT)[0].backward()

    for run in (early_first, late_first, only_early):
        both(STAGES, ops, run, model)


@ALL_KINDS
def test_autograd_grad(ops: list[Op]) -> None:
    def run(model: nn.Module) -> Any:
        assert isinstance(model, Net)
        x = INPUT.clone().requires_grad_()
        loss = model(x).square().mean()
        upper = torch.autograd.grad(loss, list(model.layers[3].parameters()), retain_graph=True)
        whole = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        loss.backward(inputs=list(model.layers[1].parameters()))
        return [*upper, *whole]

    both(STAGES, ops, run)


@ALL_KINDS
def test_batched_gradients(ops: list[Op]) -> None:
    def run(model: nn.Module) -> Any:
        x = INPUT.clone().requires_grad_()
        y = model(x)
        return torch.autograd.grad(y, x, torch.stack([y.detach(), y.detach() + 1]), is_grads_batched=True)

    both(STAGES, ops, run, lambda: net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())))


@ALL_KINDS
def test_double_backward(ops: list[Op]) -> None:
    def run(model: nn.Module) -> Any:
        x = INPUT.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().mean().backward()
        return [gradient, x.grad]

    both(STAGES, ops, run)


def test_a_second_backward_without_retain_graph_is_torchs_error() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        loss = loss_of(model)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        plain = net()
        train(plain, loss_of)
        model.zero_grad(), plain.zero_grad()
        model.load_state_dict(plain.state_dict())
        assert not differing(train(plain, loss_of), train(model, loss_of))


def test_only_an_inner_tensor_is_used() -> None:
    """The loss reads a tensor from inside of a block, and no block's output."""

    class Leaking(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            inner: list[Tensor] = []
            handle = self.layers[3].up.register_forward_hook(lambda module, args, output: inner.append(output))  # type: ignore[union-attr]
            super().forward(x)
            handle.remove()
            return inner[0]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Leaking().train()

    for seed in range(4):
        both(STAGES, wild(STAGES, seed), lambda m: loss_of(m).backward(), model)
    both(STAGES, from_input(STAGES), lambda m: loss_of(m).backward(), model)


@pytest.mark.parametrize("frozen", [("enter", "layers.0", "layers.1"), ("layers.2",), ("layers.3", "layers.4"), ()])
def test_frozen_parameters(frozen: tuple[str, ...]) -> None:
    model = net()
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0].startswith(frozen) and frozen:
            parameter.requires_grad_(False)
    for ops in (every_block(STAGES), from_input(STAGES), wild(STAGES, 0), wild(STAGES, 1)):
        assert_same(model, loss_of, STAGES, ops, in_order=False)


def test_nothing_is_run_again_for_parts_without_gradients() -> None:
    model = net()
    for part in (model.enter, *model.layers[:3]):
        part.requires_grad_(False)
    with planned(model, STAGES, every_block(STAGES)) as executor:
        train(model, loss_of)
        assert [stage for kind, stage in executor.trace if kind == "forward_save"] == [6, 5]
    model.requires_grad_(False)
    with planned(model, STAGES, every_block(STAGES)) as executor:
        loss_of(model)
        assert executor.trace == []  # a run without gradients is no stage


def test_tied_parameters() -> None:
    model = net()
    model.layers[3].up = model.layers[0].up
    model.layers[4].down.weight = model.layers[1].down.weight
    for seed in range(4):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))
