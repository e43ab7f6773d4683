"""What changes around a step, or between its forward and its backward, is noticed or has no effect."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base.errors import RecomputationError
from cairn.torch.runtime.single_runs import SelectiveRun
from executor_support import Op, backward, differing, every_block, keep, no_collector, planned, results, train
from guards_support import Configured, Turned
from selective_blocks import Hidden, count_recordings, hidden
from selective_support import (
    WIDTH,
    Mlp,
    Net,
    by_option,
    loss_of,
    mean_square,
    net,
    options_of,
    profile_of,
    sample,
    save,
    selectively_planned,
)
from torch import Tensor, nn


@pytest.mark.parametrize("what", ["autocast's cache", "deterministic algorithms", "default type"])
def test_other_surroundings_between_steps_are_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def surroundings(changed: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=not changed or what != "autocast's cache"):
            torch.set_default_dtype(torch.float64 if changed and what == "default type" else torch.float32)
            torch.use_deterministic_algorithms(changed and what == "deterministic algorithms")
            try:
                yield
            finally:
                torch.set_default_dtype(torch.float32)
                torch.use_deterministic_algorithms(False)

    def loss(model: nn.Module, changed: bool) -> Tensor:
        x = sample()
        with surroundings(changed):
            return mean_square(model(x).float())

    plain, other = net(), net()
    with selectively_planned(other):
        for step in range(6):
            count = count_recordings(monkeypatch)
            results = [train(model, lambda model, step=step: loss(model, step >= 3), step) for model in (plain, other)]
            assert not differing(*results)
            assert len(count) == (3 if step in (0, 3) else 0)  # blocks


@pytest.mark.parametrize("what", ["parameter", "flag"])
def test_a_followed_run_that_must_run_again_refuses_what_has_changed(what: str) -> None:
    hidden["calls"] = 0
    model = net(Hidden)
    with selectively_planned(model, layer=Hidden) as executor:
        for step in range(2):
            train(model, loss_of, step)
        hidden["calls"] = 1  # what is recomputed will be wrong, so that all is recomputed
        loss = loss_of(model)
        bias = model.layers[1].norm.bias  # type: ignore[union-attr]
        if what == "parameter":
            with torch.no_grad():
                bias.add_(1.0)  # type: ignore[operator]
        else:
            model.layers[1].dropout.eval()  # type: ignore[union-attr, operator]
        with pytest.raises(RecomputationError, match="modified in place|training flag"):
            loss.backward()
        assert executor.notes


class Impatient(Mlp):
    """Takes a gradient inside its own forward, at times."""

    def act(self, x: Tensor) -> Tensor:
        y = super().act(x)
        if hidden["calls"]:
            torch.autograd.grad(y.sum(), x)
        return y


def test_a_gradient_inside_a_followed_run_is_refused() -> None:
    hidden["calls"] = 0
    plain, other = net(Impatient), net(Impatient)
    with selectively_planned(other, layer=Impatient):
        for step in range(2):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        hidden["calls"] = 1
        with pytest.raises(ct.Unsupported, match="inside its own forward"):
            other(sample())
        hidden["calls"] = 0
        assert not differing(train(plain, loss_of, 2), train(other, loss_of, 2))


def test_blocks_of_which_parts_stay_between_blocks_that_the_list_runs_again() -> None:
    """Twice through the graph, and through a part of it: what the list looks after and what it does not, in turns."""

    def twice(model: nn.Module) -> Tensor:
        y = model(sample())
        y.square().mean().backward(retain_graph=True)
        return y.exp().mean()

    def part(model: nn.Module) -> Tensor:
        y = model(sample())
        torch.autograd.grad(y.sum(), model.layers[1].down.weight, retain_graph=True)  # type: ignore[index, union-attr]
        return y.square().mean()

    found = profile_of(Mlp)
    selective, n = options_of(found), len(found.refs)
    for kept in ((2,), (3,), (4,), (2, 4), (2, 3), (3, 4)):
        ops: list[Op] = [save(s, 3) if s in kept else keep(s) if s in selective else save(s) for s in range(1, n + 1)]
        for stage in range(n, 0, -1):
            ops += [save(stage)] * (stage in selective and stage not in kept) + [backward(stage)]
        for compute_loss in (loss_of, twice, part):
            plain, other = net(), net()
            with planned(other, found.refs, ops, selective=selective) as executor:
                program = executor.first.settings.program
                assert [s for s in selective if program.autograd_only[s]] == list(kept)
                for step in range(3):
                    assert not differing(train(plain, compute_loss, step), train(other, compute_loss, step))


def test_a_part_goes_with_the_last_tensor_that_autograd_holds() -> None:
    model = net()
    with no_collector(), selectively_planned(model):
        for step in range(3):
            train(model, loss_of, step)
        assert not [each for each in gc.get_objects() if type(each) is SelectiveRun]
        loss = loss_of(model)
        assert sum(type(each) is SelectiveRun for each in gc.get_objects()) == 3
        del loss
        assert not [each for each in gc.get_objects() if type(each) is SelectiveRun]


_BETWEEN: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda layer: None,
    "other data": lambda layer: setattr(layer.up.weight, "data", layer.up.weight.data * 2),
    "other data of a norm": lambda layer: setattr(layer.norm.weight, "data", layer.norm.weight.data * 2),
    "data that are written": lambda layer: layer.up.weight.data.mul_(2),
    "data of a norm that are written": lambda layer: layer.norm.weight.data.mul_(2),
    "data of a buffer that are written": lambda layer: layer.shift.data.mul_(3),
    "other data of a buffer": lambda layer: setattr(layer.shift, "data", layer.shift.data * 3),
    "another part": lambda layer: setattr(layer, "up", nn.Linear(WIDTH, 4 * WIDTH)),
    "another part without parameters": lambda layer: layer.pieces.__setitem__(0, nn.Sigmoid()),
    "another parameter": lambda layer: setattr(layer.up, "weight", nn.Parameter(layer.up.weight.detach() * 2)),
    "another buffer": lambda layer: setattr(layer, "shift", layer.shift * 3),
    "an attribute": lambda layer: setattr(layer, "scale", 2.0) or setattr(layer, "count", True),
    "an item of a list": lambda layer: layer.slopes.__setitem__(0, 2.0),
    "a function": lambda layer: setattr(layer, "built_in", torch.sin),
    "a forward": lambda layer: setattr(layer.pieces[0], "forward", lambda x: torch.tanh(x * 2)),
    "a class": lambda layer: setattr(layer.pieces[0], "__class__", Turned),
    "a hook": lambda layer: layer.up.register_forward_hook(lambda module, args, output: output * 2),
    "a training flag": lambda layer: layer.dropout.eval(),
    "a frozen parameter": lambda layer: layer.norm.weight.requires_grad_(False),
}


@pytest.mark.parametrize("how", ["most is kept", "least is kept", "recomputed"])
@pytest.mark.parametrize("what", _BETWEEN)
def test_a_change_between_forward_and_backward_is_refused_or_of_no_effect(what: str, how: str) -> None:
    def step(model: Net) -> dict[str, Any]:
        torch.manual_seed(5)
        loss = loss_of(model)
        _BETWEEN[what](model.layers[1])
        loss.backward()
        return results(model, loss)

    plain, other = net(Configured), net(Configured)
    found = profile_of(Configured)
    selective = options_of(found)
    parts = by_option(found.refs, selective, 1 if how == "most is kept" else 99)
    with planned(other, found.refs, every_block(found.refs) if how == "recomputed" else parts, selective=selective):
        for seed in range(2):
            assert not differing(train(plain, loss_of, seed), train(other, loss_of, seed))
        torch.manual_seed(9)
        expected = step(plain)
        try:
            torch.manual_seed(9)
            found_now = step(other)
        except RecomputationError as error:
            assert what != "nothing" and "'layers.1'" in str(error)
        else:
            assert not differing(expected, found_now)
