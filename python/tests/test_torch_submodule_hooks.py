"""Hooks that are in force in some calls of a block's parts: they see what is dropped, and leave nothing behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.torch.selective import recompute, submodule_hooks
from cairn.torch.selective.block_graph import BlockGraph
from cairn.torch.selective.block_runs import SelectiveBlock
from cairn.torch.selective.recompute import Recipe, TensorRecompute
from executor_support import differing, results, train
from selective_support import WIDTH, loss_of, net, options_of, profile_of, selectively_planned
from submodule_hooks_support import Act, Own, Parts, hidden_state, mildest, taken_over_modules
from torch import Tensor, nn


class Twice(Parts):
    """Calls a part several times, of which some save otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.act(x).mean()
        return super().forward(self.act(x) + shift)


class Nested(Act):
    """A part that calls itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(x) if depth == 0 else torch.sin(self(x, depth - 1)) * x


class Within(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.act = Nested()


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x) * x
        raise ValueError(y.shape)


class Careful(Parts):
    """Goes on when a part fails."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = Raising()

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            x = self.failing(x)
        return super().forward(x)


class Direct(Parts):
    """Calls a part's forward, not the part, and of another one only what it holds."""

    def middle(self, x: Tensor) -> Tensor:
        return self.act.forward(torch.nn.functional.linear(self.norm(x), self.up.weight))


def _handled(model: nn.Module) -> list[str]:
    """The parts that have handlers; blocks have them anyway."""
    return [name for name in taken_over_modules(model) if name.count(".") > 1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what hooks in parts have seen."""
    shapes: list[tuple[int, ...]] = []

    def hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        return original(lambda tensor: shapes.append(tuple(tensor.shape)) or pack(tensor), unpack)

    original = submodule_hooks.saved_tensors_hooks
    monkeypatch.setattr(submodule_hooks, "saved_tensors_hooks", hooks)
    return shapes


@pytest.mark.parametrize("layer", [Parts, Twice, Within, Careful, Direct, Own], ids=lambda layer: layer.__name__)
def test_every_option_is_the_plain_step(layer: Callable[[], nn.Module], seen: list[tuple[int, ...]]) -> None:
    options = max(len(stage.options) for stage in profile_of(layer).stages)
    assert options > 2, [stage.closed for stage in profile_of(layer).stages]
    for option in range(1, options):
        plain, other = net(layer), net(layer)
        with selectively_planned(other, option, layer) as executor:
            for step in range(4):
                assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
                assert not executor.notes
    assert seen or layer is Own


def test_hooks_see_little_more_than_what_is_dropped(seen: list[tuple[int, ...]]) -> None:
    selective = options_of(profile_of(Parts))
    model = net(Parts)
    with selectively_planned(model, mildest(Parts), Parts):
        train(model, loss_of)
        assert not seen and not _handled(model)  # recorded, under hooks on all of it
        train(model, loss_of)
        chosen = [one.decisions[mildest(Parts)] for one in selective.values()]
        dropped = sum(len(decisions) - decisions.count("k") for decisions in chosen)
        assert dropped <= len(seen) < sum(map(len, chosen))
        assert _handled(model)


def test_off_the_cpu_hooks_see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[tuple[BlockGraph, Recipe]] = []
    original = recompute.compile_recipe

    def compiled(graph: BlockGraph, decisions: str, *others: Any) -> Recipe:
        graphs.append((graph, original(graph, decisions, *others)))
        return graphs[-1][1]

    monkeypatch.setattr("cairn.torch.selective.block_runs.compile_recipe", compiled)
    model = net(Parts)
    with selectively_planned(model, mildest(Parts), Parts):
        train(model, loss_of)
    graph, recipe = graphs[0]
    assert recipe.calls and len(recipe.items) < len(graph.packs)
    away = [dataclasses.replace(pack, device=torch.device("cuda", 0)) for pack in graph.packs]
    recipe = original(dataclasses.replace(graph, packs=away), recipe.decisions, recipe.order)
    assert recipe.calls is None and len(recipe.items) == len(away) == recipe.hooks_cost


def test_what_is_done_with_a_planned_model_finds_no_handlers() -> None:
    plain, other = net(Parts), net(Parts)
    keys = [sorted(vars(part)) for part in other.modules()]
    with selectively_planned(other, mildest(Parts), Parts):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        assert _handled(other) and other.state_dict().keys() == plain.state_dict().keys()
        for made in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
            assert not taken_over_modules(made)
            assert not differing(train(copy.deepcopy(plain), loss_of, 3), train(made, loss_of, 3))
        assert not differing(train(plain, loss_of, 3), train(other, loss_of, 3))
    assert [sorted(vars(part)) for part in other.modules()] == keys
    assert not differing(train(plain, loss_of, 4), train(other, loss_of, 4))


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_run_that_cannot_be_recomputed_alone_is_recomputed_whole_under_the_same_hooks(
    is_removed: bool, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, ...]]
) -> None:
    plain, other = net(Parts), net(Parts)
    with selectively_planned(other, mildest(Parts), Parts) as executor:
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        expected = train(plain, loss_of, 3)
        torch.manual_seed(3)
        seen.clear()
        loss, forward = loss_of(other), len(seen)
        if is_removed:
            executor.detach()
            assert not taken_over_modules(other)
        monkeypatch.setattr(TensorRecompute, "tensor", lambda *anything: None)
        loss.backward()
        assert len(seen) == 2 * forward and not differing(expected, results(other, loss))
        assert is_removed == (not taken_over_modules(other))


def test_a_second_backward_runs_blocks_again_under_the_same_hooks() -> None:
    def step(model: nn.Module, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return results(model, loss)

    plain, other = net(Parts), net(Parts)
    with selectively_planned(other, mildest(Parts), Parts):
        for seed in range(4):
            assert not differing(step(plain, seed), step(other, seed))


def test_a_part_that_saves_otherwise_than_before_runs_the_block_again() -> None:
    class Hidden(Act):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if hidden_state["calls"] == 0 else torch.sin(x) * x * torch.cos(x)

    class WithHidden(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.act = Hidden()

    hidden_state["calls"] = 0
    plain, other = net(WithHidden), net(WithHidden)
    with selectively_planned(other, mildest(WithHidden), WithHidden) as executor:
        for step, hidden in enumerate((0, 0, 0, 1, 1, 0)):
            hidden_state["calls"] = hidden
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert bool(executor.notes) == bool(hidden)


class Joined(Parts):
    """Calls two parts through a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = self.run_both

    def run_both(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))

    def middle(self, x: Tensor) -> Tensor:
        return self.both(self.norm(x))


_COMPILE: dict[str, Callable[[Any], Any]] = {
    "a part": lambda layer: setattr(layer, "act", torch.compile(layer.act, backend="eager")),
    "a part in place": lambda layer: layer.act.compile(backend="eager"),
    "a function that calls parts": lambda layer: setattr(layer, "both", torch.compile(layer.both, backend="eager")),
}


@pytest.mark.parametrize("what", _COMPILE)
def test_parts_that_are_compiled_after_planning_run_compiled(what: str) -> None:
    plain, other = net(Joined), net(Joined)
    with selectively_planned(other, mildest(Joined), Joined) as executor:
        for step in range(7):
            if step == 3:
                assert "layers.0.act" in _handled(other)
                for layer in other.layers:
                    _COMPILE[what](layer)
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert all("was recorded again" in note for note in executor.notes) if step == 3 else not executor.notes


def test_threads_that_run_no_block_find_no_hooks(seen: list[tuple[int, ...]]) -> None:
    model = net(Parts)
    with selectively_planned(model, mildest(Parts), Parts):
        for step in range(2):
            train(model, loss_of, step)
        count, found = len(seen), []
        x = torch.ones(2, WIDTH, requires_grad=True)
        thread = threading.Thread(target=lambda: found.append(model.layers[0].act(x)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], Act()(x)) and len(seen) == count
        found[0].sum().backward()


def test_a_recording_that_was_found_wrong_is_followed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(Parts)
    followed: list[Any] = []
    original = SelectiveBlock.following
    monkeypatch.setattr(SelectiveBlock, "following", lambda *args: followed.append(original(*args)) or followed[-1])
    with selectively_planned(model, mildest(Parts), Parts) as executor:
        with monkeypatch.context() as context:
            context.setattr("cairn.torch.selective.block_runs.fingerprint", lambda tensor: 0)
            train(model, loss_of)
            assert len(executor.notes) == 3  # blocks
        followed.clear()
        train(model, loss_of, 1)
        assert followed == [None] * 3 and len(executor.notes) == 3
