"""Selective recomputation in steps and loops that are not like the profiled one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.torch import profiler
from cairn.torch.base._compat import StorageRef
from cairn.torch.base.errors import RecomputationError
from cairn.torch.selective.block_runs import SelectiveOptions
from executor_support import (
    differing,
    no_collector,
    planned,
    train,
)
from selective_blocks import Attention, Batch, Custom, Hidden, InPlace, Square, Views, assert_same, hidden
from selective_support import (
    ROWS,
    WIDTH,
    Mlp,
    Net,
    by_option,
    loss_of,
    net,
    options_of,
    profile_of,
    sample,
    selectively_planned,
)
from torch import Tensor, nn
from torch.nn import functional as F


def compare(change: Callable[[Net, int], None], steps: int = 4, notes: str = "") -> None:
    """Trains plain and selectively_planned, with a change to the model before each step."""
    plain, other = net(), net()
    with selectively_planned(other) as executor:
        for step in range(steps):
            change(plain, step)
            change(other, step)
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert all(notes in note for note in executor.notes) if notes else not executor.notes


def test_attributes_that_change_between_steps() -> None:
    def change(model: Net, step: int) -> None:
        for layer in model.layers:
            layer.dropout.p = (0.25, 0.5, 0.1, 0.1)[step]
            layer.scale = (0.5, 0.5, 0.5, 0.75)[step]

    compare(change, notes="was recorded again, which takes time: the attribute '")


def test_a_part_that_is_replaced() -> None:
    def change(model: Net, step: int) -> None:
        if step == 2:
            torch.manual_seed(7)
            model.layers[1].up = nn.Linear(WIDTH, 4 * WIDTH)
            model.layers[2].dropout = nn.Dropout(0.5)

    compare(change, notes="was recorded again")


def test_frozen_parameters() -> None:
    def change(model: Net, step: int) -> None:
        model.layers[1].requires_grad_(step != 1)
        model.enter.requires_grad_(step != 2)

    plain, other = net(), net()
    with selectively_planned(other):
        for step in range(4):
            change(plain, step)
            change(other, step)
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))


def test_a_block_that_does_something_else_is_run_again() -> None:
    hidden["calls"] = 0
    plain, other = net(Hidden), net(Hidden)
    with selectively_planned(other, layer=Hidden) as executor:
        for step in range(4):
            hidden["calls"] = step
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            again = any("was recomputed as a whole" in note for note in executor.notes)
            assert again == (step % 2 == 1)


class HiddenMore(Mlp):
    """Saves more tensors, or fewer, in every other run."""

    def act(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * 2) * x.exp()
        return (y, y.sin().cos(), x * 2)[hidden["calls"] % 3]


def test_a_block_that_saves_more_or_fewer_tensors_is_run_again() -> None:
    hidden["calls"] = 0
    plain, other = net(HiddenMore), net(HiddenMore)
    with selectively_planned(other, layer=HiddenMore) as executor:
        for step in range(6):
            hidden["calls"] = step
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert bool(executor.notes) == (step % 3 != 0)


def test_smaller_inputs() -> None:
    def loss(rows: int) -> Callable[[nn.Module], Tensor]:
        return lambda model: model(sample(rows)).square().mean()

    plain, other = net(), net()
    with selectively_planned(other) as executor:
        for step, rows in enumerate((ROWS, 24, ROWS, 24, 7)):
            assert not differing(train(plain, loss(rows), step), train(other, loss(rows), step))
            assert not executor.notes


def test_another_graph_than_profiled_runs_again() -> None:
    found = profile_of(Mlp)
    selective = {
        s: SelectiveOptions("0" * 16, one.asked, one.draws, one.decisions) for s, one in options_of(found).items()
    }
    plain, other = net(), net()
    with planned(other, found.refs, by_option(found.refs, selective, 3), selective=selective) as executor:
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert all("does something else than while it was profiled" in note for note in executor.notes)
            assert len(executor.notes) == 3


def test_a_proof_that_fails_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = net(), net()
    monkeypatch.setattr("cairn.torch.selective.block_runs.fingerprint", lambda tensor: 0)
    with selectively_planned(other) as executor:
        assert not differing(train(plain, loss_of), train(other, loss_of))
        assert len(executor.notes) == 3
        monkeypatch.undo()
        assert not differing(train(plain, loss_of, 1), train(other, loss_of, 1))
        assert all("did not give the same tensors again" in note for note in executor.notes)


def test_retained_graphs_two_losses_and_double_backward() -> None:
    def twice(model: nn.Module) -> Tensor:
        y = model(sample())
        y.square().mean().backward(retain_graph=True)
        return y.exp().mean()

    def penalty(model: nn.Module) -> Tensor:
        x = sample().requires_grad_()
        loss = model(x).square().mean()
        [gradient] = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    def part(model: nn.Module) -> Tensor:
        y = model(sample())
        torch.autograd.grad(y.sum(), model.layers[2].down.weight, retain_graph=True)  # type: ignore[index, union-attr]
        return y.square().mean()

    for compute_loss in (twice, penalty, part):
        plain, other = net(), net()
        with selectively_planned(other):
            for step in range(2):
                assert not differing(train(plain, compute_loss, step), train(other, compute_loss, step))


def test_several_forwards_before_a_backward_and_accumulation() -> None:
    def several(model: nn.Module) -> Tensor:
        return sum(model(sample(seed=seed)).square().mean() for seed in range(3))  # type: ignore[return-value]

    assert_same(Mlp, several)


def test_autocast() -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(sample()).float().square().mean() + model(sample(seed=2)).float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        found = profiler.profile(net(), sample(), loss_fn=lambda y: y.float().square().mean(), passes=1)
    selective = options_of(found)
    for option in range(1, max(len(one.decisions) for one in selective.values())):
        plain, other = net(), net()
        with planned(other, found.refs, by_option(found.refs, selective, option), selective=selective):
            for step in range(3):
                assert not differing(train(plain, loss, step), train(other, loss, step))


def test_backward_inside_autocast() -> None:
    plain, other = net(), net()
    with selectively_planned(other):
        for step in range(2):
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                a = loss_of(plain)
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                b = loss_of(other)
            with torch.autocast("cpu", torch.bfloat16):
                a.backward()
                b.backward()
            pairs = zip(plain.parameters(), other.parameters(), strict=True)
            assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


class Fails(Mlp):
    def act(self, x: Tensor) -> Tensor:
        y = super().act(x)
        if x.shape[0] == 13:
            raise KeyError("as asked")
        return y


def test_exceptions_leave_the_next_step_sound() -> None:
    plain, other = net(Fails), net(Fails)
    with selectively_planned(other, layer=Fails) as executor:
        for step in range(3):
            with pytest.raises(KeyError):
                other(sample(13))
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert not executor.notes

    def broken(grad: Tensor) -> Tensor:
        raise KeyError("in the backward")

    with selectively_planned(other, layer=Fails):
        hook = other.layers[1].norm.weight.register_hook(broken)  # type: ignore[union-attr]
        with pytest.raises(KeyError):
            loss_of(other).backward()
        hook.remove()
        for model in (plain, other):
            model.zero_grad()
        assert not differing(train(plain, loss_of, 5), train(other, loss_of, 5))


def test_removal_between_forward_and_backward() -> None:
    plain, other = net(), net()
    expected = train(plain, loss_of)
    with selectively_planned(other):
        torch.manual_seed(0)
        loss = loss_of(other)
    loss.backward()
    assert all(torch.equal(p.grad, expected[f"gradient of {n}"]) for n, p in other.named_parameters())
    assert not differing(train(plain, loss_of, 1), train(other, loss_of, 1))


class Shows(Mlp):
    """Returns something from selective, too."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = self.up(self.norm(x))
        return x + self.dropout(self.down(self.act(hidden))), hidden


class Changed(nn.Module):
    """Writes into what a block saved or was given, after it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks, self.what = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Shows()]), "nothing"

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y, hidden = self.blocks[0](x)
        with torch.no_grad():
            if self.what == "saved":
                hidden.view(-1)[3:5].add_(1.0)
            elif self.what == "argument":
                x.add_(1.0)
        return y


@pytest.mark.parametrize("what", ["saved", "argument", "nothing"])
def test_changes_in_place_after_the_block_ran(what: str) -> None:
    torch.manual_seed(0)
    model = Changed()
    found = profiler.profile(model, sample(), loss_fn=lambda y: y.square().mean(), passes=1)
    selective = options_of(found)
    assert selective, [stage.closed or stage.keep_reason for stage in found.stages]
    expected = train(model, loss_of)
    model.zero_grad()
    model.what = what
    for option in range(1, len(next(iter(selective.values())).decisions)):
        with planned(model, found.refs, by_option(found.refs, selective, option), selective=selective) as executor:
            for _ in range(2):
                try:
                    assert not differing(expected, train(model, loss_of))  # as if nothing had been written
                    assert what == "saved" or not executor.notes
                except (RuntimeError, RecomputationError) as error:
                    assert "modified" in str(error) and what != "nothing"
                model.zero_grad()


class Outputs(Mlp):
    """Saves outputs of operations, of a function in Python among them."""

    def act(self, x: Tensor) -> Tensor:
        y = torch.exp(x.sigmoid().neg().mul_(0.5))
        return Square.apply(F.relu(y) + y.softmax(-1)) + x.exp().tanh()


@pytest.mark.parametrize("option", [1, 99])
@pytest.mark.parametrize("layer", [Mlp, InPlace, Batch, Custom, Views, Attention, Outputs])
def test_memory_is_flat_without_the_collector(layer: Callable[[], nn.Module], option: int) -> None:
    model = net(layer)
    counts, alive = [], []
    profile_of(layer)
    with no_collector():
        with selectively_planned(model, option, layer):
            for step in range(50):
                refs: list[StorageRef] = []
                hook = model.layers[1].up.register_forward_hook(  # type: ignore[union-attr]
                    lambda m, a, y, refs=refs: refs.append(StorageRef(y))
                ) if layer is not Attention else None  # fmt: skip
                train(model, loss_of, step)
                alive += [ref.alive() for ref in refs]
                if hook is not None:
                    hook.remove()
                if step in (9, 49):
                    counts.append(len(gc.get_objects()))
        assert gc.collect() < 200 and not any(alive)
    assert counts[1] - counts[0] < 50


def test_a_graph_that_is_dropped_frees_everything() -> None:
    model = net()
    with selectively_planned(model):
        train(model, loss_of)
        refs: list[StorageRef] = []
        hook = model.layers[1].up.register_forward_hook(lambda m, a, y: refs.append(StorageRef(y)))  # type: ignore[union-attr]
        with no_collector():
            loss = loss_of(model)
            assert refs
            del loss
            assert not any(ref.alive() for ref in refs)
            hook.remove()
