"""Hooks that are in force in some calls of a block's parts: they see what is dropped, and leave nothing behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
import random
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cairn.torch import profiler
from cairn.torch.base.patched_forward import PatchedForward
from cairn.torch.profiling import overhead
from cairn.torch.selective import recompute, submodule_hooks
from cairn.torch.selective.block_graph import BlockGraph
from cairn.torch.selective.block_runs import OpenedBlock
from cairn.torch.selective.recompute import Recipe, TensorRecompute
from cairn.torch.selective.submodule_calls import CALL_COST, Call, covering
from cairn.torch.selective.submodule_hooks import noted
from executor_support import differing, results, train
from inside_support import WIDTH, inside_of, loss_of, mean_square, net, opened, profile_of, sample
from torch import Tensor, nn


class Act(nn.Module):
    """An activation of several cheap operations."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(x + 0.04 * x.pow(3)))


class Parts(nn.Module):
    """All of whose operations but one lie in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.dropout = Act(), nn.Dropout(0.25)
        self.then = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return self.act(self.up(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.then(x + self.dropout(self.down(self.middle(x)))))


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


class Own(Parts):
    """A part has a forward of its own, which is not touched."""

    def __init__(self) -> None:
        super().__init__()
        self.act.forward = _steeper  # type: ignore[method-assign]


def _steeper(x: Tensor) -> Tensor:
    return torch.tanh(x * 2) * x


def mildest(layer: Callable[[], nn.Module]) -> int:
    """The option that drops least."""
    options = next(stage.options for stage in profile_of(layer).stages if stage.options)
    return max(range(1, len(options)), key=lambda option: options[option].decisions.count("k"))


def _handled(model: nn.Module) -> list[str]:
    """The parts that have handlers; blocks have them anyway."""
    return [name for name in _taken_over(model) if name.count(".") > 1]


def _taken_over(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(vars(part).get("forward"), PatchedForward)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what hooks in parts have seen."""
    shapes: list[tuple[int, ...]] = []

    def hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        return original(lambda tensor: shapes.append(tuple(tensor.shape)) or pack(tensor), unpack)

    original = submodule_hooks.saved_tensors_hooks
    monkeypatch.setattr(submodule_hooks, "saved_tensors_hooks", hooks)
    return shapes


# -- steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [Parts, Twice, Within, Careful, Direct, Own], ids=lambda layer: layer.__name__)
def test_every_option_is_the_plain_step(layer: Callable[[], nn.Module], seen: list[tuple[int, ...]]) -> None:
    options = max(len(stage.options) for stage in profile_of(layer).stages)
    assert options > 2, [stage.closed for stage in profile_of(layer).stages]
    for option in range(1, options):
        plain, other = net(layer), net(layer)
        with opened(other, option, layer) as executor:
            for step in range(4):
                assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
                assert not executor.notes
    assert seen or layer is Own


def test_hooks_see_little_more_than_what_is_dropped(seen: list[tuple[int, ...]]) -> None:
    inside = inside_of(profile_of(Parts))
    model = net(Parts)
    with opened(model, mildest(Parts), Parts):
        train(model, loss_of)
        assert not seen and not _handled(model)  # recorded, under hooks on all of it
        train(model, loss_of)
        chosen = [one.options[mildest(Parts)] for one in inside.values()]
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
    with opened(model, mildest(Parts), Parts):
        train(model, loss_of)
    graph, recipe = graphs[0]
    assert recipe.calls and len(recipe.items) < len(graph.packs)
    away = [dataclasses.replace(pack, device=torch.device("cuda", 0)) for pack in graph.packs]
    recipe = original(dataclasses.replace(graph, packs=away), recipe.decisions, recipe.order)
    assert recipe.calls is None and len(recipe.items) == len(away) == recipe.hooks_cost


def test_what_is_done_with_a_planned_model_finds_no_handlers() -> None:
    plain, other = net(Parts), net(Parts)
    keys = [sorted(vars(part)) for part in other.modules()]
    with opened(other, mildest(Parts), Parts):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        assert _handled(other) and other.state_dict().keys() == plain.state_dict().keys()
        for made in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
            assert not _taken_over(made)
            assert not differing(train(copy.deepcopy(plain), loss_of, 3), train(made, loss_of, 3))
        assert not differing(train(plain, loss_of, 3), train(other, loss_of, 3))
    assert [sorted(vars(part)) for part in other.modules()] == keys
    assert not differing(train(plain, loss_of, 4), train(other, loss_of, 4))


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_run_that_cannot_be_recomputed_alone_is_recomputed_whole_under_the_same_hooks(
    is_removed: bool, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, ...]]
) -> None:
    plain, other = net(Parts), net(Parts)
    with opened(other, mildest(Parts), Parts) as executor:
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        expected = train(plain, loss_of, 3)
        torch.manual_seed(3)
        seen.clear()
        loss, forward = loss_of(other), len(seen)
        if is_removed:
            executor.detach()
            assert not _taken_over(other)
        monkeypatch.setattr(TensorRecompute, "tensor", lambda *anything: None)
        loss.backward()
        assert len(seen) == 2 * forward and not differing(expected, results(other, loss))
        assert is_removed == (not _taken_over(other))


def test_a_second_backward_runs_blocks_again_under_the_same_hooks() -> None:
    def step(model: nn.Module, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return results(model, loss)

    plain, other = net(Parts), net(Parts)
    with opened(other, mildest(Parts), Parts):
        for seed in range(4):
            assert not differing(step(plain, seed), step(other, seed))


def test_a_part_that_saves_otherwise_than_before_runs_the_block_again() -> None:
    class Hidden(Act):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if _hidden["calls"] == 0 else torch.sin(x) * x * torch.cos(x)

    class WithHidden(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.act = Hidden()

    _hidden["calls"] = 0
    plain, other = net(WithHidden), net(WithHidden)
    with opened(other, mildest(WithHidden), WithHidden) as executor:
        for step, hidden in enumerate((0, 0, 0, 1, 1, 0)):
            _hidden["calls"] = hidden
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert bool(executor.notes) == bool(hidden)


#: Nothing that is looked at: what a plan cannot know.
_hidden: dict[str, Any] = {"calls": 0, "of no known value": object()}


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
    with opened(other, mildest(Joined), Joined) as executor:
        for step in range(7):
            if step == 3:
                assert "layers.0.act" in _handled(other)
                for layer in other.layers:
                    _COMPILE[what](layer)
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert all("was recorded again" in note for note in executor.notes) if step == 3 else not executor.notes


def test_threads_that_run_no_block_find_no_hooks(seen: list[tuple[int, ...]]) -> None:
    model = net(Parts)
    with opened(model, mildest(Parts), Parts):
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
    original = OpenedBlock.following
    monkeypatch.setattr(OpenedBlock, "following", lambda *args: followed.append(original(*args)) or followed[-1])
    with opened(model, mildest(Parts), Parts) as executor:
        with monkeypatch.context() as context:
            context.setattr("cairn.torch.selective.block_runs.fingerprint", lambda tensor: 0)
            train(model, loss_of)
            assert len(executor.notes) == 3  # blocks
        followed.clear()
        train(model, loss_of, 1)
        assert followed == [None] * 3 and len(executor.notes) == 3


# -- whatever others do with parts --------------------------------------------------------------------------------


class Wide(Parts):
    """Calls something between two parts that are hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(4)))
        self.again = Act()

    def middle(self, x: Tensor) -> Tensor:
        y = self.between(super().middle(x))
        if _hidden["calls"]:
            _hidden["calls"](self)
        return self.again(y)


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.sin(x) * x


class Bound(Act):
    """Has a forward of another kind than most."""

    forward = functools.partialmethod(Act.forward)  # type: ignore[assignment]


class Replacing(Act):
    """Goes on with another forward after its first call."""

    def forward(self, x: Tensor) -> Tensor:
        self.forward = self.rest  # type: ignore[method-assign]
        return super().forward(x)

    def rest(self, x: Tensor) -> Tensor:
        return 0.25 * x * (1 + torch.tanh(x + 0.04 * x.pow(3)))


class Copied(Act):
    """Copies itself by its own means."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        vars(new).update({key: copy.deepcopy(value, memo) for key, value in vars(self).items()})
        return new


def _with_act(act: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        made = Parts()
        made.act = act()  # type: ignore[assignment]
        return made

    return layer


@pytest.mark.parametrize("act", [Static, Bound, Replacing, Copied], ids=lambda act: act.__name__)
def test_parts_of_every_kind(act: Callable[[], nn.Module]) -> None:
    layer = _with_act(act)
    plain, other = net(layer), net(layer)
    with opened(other, mildest(layer), layer):
        for step in range(6):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))


@pytest.mark.parametrize("how", ["part", "block"])
def test_copies_of_modules_that_copy_themselves_are_plain(how: str) -> None:
    class Whole(Copied, Parts):  # type: ignore[misc]
        forward = Parts.forward

        def __init__(self) -> None:
            Parts.__init__(self)

    layer = _with_act(Copied) if how == "part" else Whole
    model, plain = net(layer), net(layer)
    with opened(model, mildest(layer), layer):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(model, loss_of, step))
        made = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        assert not made(sample()).any()
        again = copy.deepcopy(made)
        assert not any(parameter.any() for parameter in again.parameters()) and not again(sample()).any()
    if how == "part":
        restored = pickle.loads(pickle.dumps(made.layers[0].act))
        assert not restored.weight.any() and not restored(torch.ones(2)).any()


def test_copies_that_are_made_while_a_block_is_recorded_are_plain() -> None:
    made: list[Any] = []

    def snapshot(module: nn.Module, args: Any, output: Tensor) -> None:
        made.append(copy.deepcopy(module))

    model, plain = net(Parts), net(Parts)
    with opened(model, mildest(Parts), Parts):
        for step in range(4):
            if step == 2:
                for each in (plain, model):
                    each.layers[0].act.register_forward_hook(snapshot)  # type: ignore[union-attr, operator]
            assert not differing(train(plain, loss_of, step), train(model, loss_of, step))
    assert len(made) == 4 and all("forward" not in vars(each) for each in made)


def test_tensors_of_a_settled_block_can_be_swapped() -> None:
    plain, other = net(Parts), net(Parts)
    swap, before = torch.__future__, torch.__future__.get_swap_module_params_on_conversion()
    with opened(other, mildest(Parts), Parts):
        for step in range(6):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        try:
            swap.set_swap_module_params_on_conversion(True)
            for model in (plain, other):
                model.load_state_dict({name: value * 1.5 for name, value in net(Parts).state_dict().items()})
        finally:
            swap.set_swap_module_params_on_conversion(before)
        for step in range(6, 9):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))


_REPLACE: dict[str, Callable[[Any], Any]] = {
    "by one that does not know it": lambda act: setattr(act, "forward", types.MethodType(Act.forward, act)),
    "by one that passes on": lambda act: setattr(act, "forward", functools.partial(act.forward)),
    "and put back": lambda act: (setattr(act, "forward", torch.sin), delattr(act, "forward")),
}


@pytest.mark.parametrize("what", _REPLACE)
def test_a_forward_that_somebody_replaces_leaves_nothing_of_a_plan_behind(what: str) -> None:
    plain, other = net(Parts), net(Parts)
    with opened(other, mildest(Parts), Parts):
        for step in range(6):
            if step == 3:
                for model in (plain, other):
                    _REPLACE[what](model.layers[1].act)  # type: ignore[union-attr]
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        pickle.dumps(other.state_dict())
    assert [sorted(vars(part)) for part in other.modules()] == [sorted(vars(part)) for part in plain.modules()]
    assert not differing(train(plain, loss_of, 6), train(other, loss_of, 6))


@pytest.mark.parametrize("option", [1, 2, 3])
@pytest.mark.parametrize("what", ["removal", "another thread's recording"])
def test_what_others_do_within_a_run_is_of_no_harm(what: str, option: int) -> None:
    _hidden["calls"] = 0
    plain, other = net(Wide), net(Wide)
    with opened(other, option, Wide) as executor:

        def disturb(layer: nn.Module) -> None:
            if layer is not other.layers[1]:
                return
            _hidden["calls"] = 0
            if what == "removal":
                executor.detach()
                return
            thread = threading.Thread(target=lambda: mean_square(other(sample(32))).backward())
            thread.start()
            thread.join()
            for parameter in other.parameters():
                parameter.grad = None

        for step in range(4):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        torch.manual_seed(4)
        generator = torch.get_rng_state()

        def loss(model: nn.Module) -> Tensor:
            torch.set_rng_state(generator)
            return loss_of(model)

        expected = train(plain, loss, 4)
        _hidden["calls"] = disturb
        with torch.random.fork_rng() if what != "removal" else contextlib.nullcontext():
            found = train(other, loss, 4)
        _hidden["calls"] = 0
        if what == "removal":
            assert not differing(expected, found)
    assert not _taken_over(other)


def test_handlers_stay_as_long_as_somebody_wants_them() -> None:
    part, other = Act(), Act()
    one, two = submodule_hooks.Handlers(), submodule_hooks.Handlers()
    one.hold([part, other])
    one.hold([part])
    two.hold([part])
    one.release()
    assert isinstance(vars(part)["forward"], PatchedForward) and "forward" not in vars(other)
    one.hold([other])  # by a run that is still under way
    assert "forward" not in vars(other)
    two.release()
    assert vars(part).keys() == vars(Act()).keys() == vars(other).keys()
    one.open()
    one.hold([other])
    assert isinstance(vars(other)["forward"], PatchedForward)
    one.release()


# -- where hooks are in force -------------------------------------------------------------------------------------


def _random_calls(choose: random.Random, first: int, end: int, depth: int = 0) -> list[Call]:
    """Some calls between two numbers of saved tensors, those within others before them."""
    found: list[Call] = []
    places = sorted(choose.randint(first, end) for _ in range(2 * choose.randint(0, 3)))
    for low, high in zip(places[::2], places[1::2], strict=True):
        inner = _random_calls(choose, low, high, depth + 1) if depth < 3 else []
        found += [*inner, Call(len(found) + 100 * depth, 0, low, high)]
    return found


def _cheapest(calls: Sequence[Call], wanted: Sequence[int]) -> float:
    """What it costs at least to have hooks in force wherever a wanted tensor is saved, of all ways to choose."""
    best = float("inf")
    for count in range(len(calls) + 1):
        for chosen in itertools.combinations(calls, count):
            apart = all(a.end <= b.first or b.end <= a.first for a, b in itertools.combinations(chosen, 2))
            holds = all(any(call.first <= index < call.end for call in chosen) for index in wanted)
            if apart and holds:
                best = min(best, sum(call.end - call.first + CALL_COST for call in chosen))
    return best


def test_calls_cover_what_is_wanted_at_the_least_cost() -> None:
    choose, found_some = random.Random(5), 0
    for _ in range(400):
        count = choose.randint(1, 30)
        calls = _random_calls(choose, 0, count)[-9:]
        wanted = sorted(choose.sample(range(count), min(count, choose.randint(1, 4))))
        least, found = _cheapest(calls, wanted), covering(calls, wanted, count)
        if found is None:
            assert least >= count
            continue
        found_some += 1
        assert sum(call.end - call.first + CALL_COST for call in found) == least < count
        assert all(sum(call.first <= index < call.end for call in found) == 1 for index in wanted)
        assert found == sorted(found, key=lambda call: call.first)
    assert found_some > 20


def test_calls_are_noted_in_the_order_in_which_they_end() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Act(), Own()

        def forward(self, x: Tensor) -> Tensor:
            self.save(1)
            self.one(x)
            self.save(2)
            return self.one(self.two(x))

        def save(self, count: int) -> None:
            saved[0] += count

    saved, calls = [0], list[Call]()
    outer = Outer()
    parts, before = list(outer.modules()), [dict(vars(part)) for part in outer.modules()]
    x = torch.zeros(2, WIDTH)
    with noted(parts, lambda: saved[0], calls):
        thread = threading.Thread(target=lambda: outer(x))
        thread.start()
        thread.join()
        assert not calls
        saved[0] = 0
        outer(x)
        outer.one(x)
    by_name = [(next(n for n, p in outer.named_modules() if p is parts[call.part]), *call[1:]) for call in calls]
    assert [each for each in by_name if each[0] in ("one", "two", "")] == [
        ("one", 0, 1, 1),
        ("two", 0, 3, 3),
        ("one", 1, 3, 3),
        ("", 0, 0, 3),
        ("one", 2, 3, 3),
    ]
    assert [vars(part) for part in parts] == before
    with pytest.raises(ZeroDivisionError), noted(parts, lambda: 0, calls):
        raise ZeroDivisionError
    assert [vars(part) for part in parts] == before


def test_hooks_count_in_what_options_are_said_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead.Cost, "of_part", lambda self, hooks: 10**9 * hooks)
    profile = profiler.profile(net(Parts), sample(), loss_fn=mean_square, passes=1)
    [stage, *_] = [stage for stage in profile.stages if stage.options]
    hooks = [(option.forward_ns - stage.forward_ns) // 10**9 for option in stage.options[1:]]
    assert all(0 < count <= len(stage.options[0].decisions) for count in hooks) and min(hooks) < max(hooks)
