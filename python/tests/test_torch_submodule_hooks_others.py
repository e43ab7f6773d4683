"""Whatever others do with a block's parts, steps stay exact and copies are plain."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.torch.base.patched_forward import PatchedForward
from cairn.torch.selective import submodule_hooks
from executor_support import differing, train
from selective_support import WIDTH, loss_of, mean_square, net, sample, selectively_planned
from submodule_hooks_support import Act, Parts, hidden_state, mildest, taken_over_modules
from torch import Tensor, nn


class Wide(Parts):
    """Calls something between two parts that are hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(4)))
        self.again = Act()

    def middle(self, x: Tensor) -> Tensor:
        y = self.between(super().middle(x))
        if hidden_state["calls"]:
            hidden_state["calls"](self)
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
    with selectively_planned(other, mildest(layer), layer):
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
    with selectively_planned(model, mildest(layer), layer):
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
    with selectively_planned(model, mildest(Parts), Parts):
        for step in range(4):
            if step == 2:
                for each in (plain, model):
                    each.layers[0].act.register_forward_hook(snapshot)  # type: ignore[union-attr, operator]
            assert not differing(train(plain, loss_of, step), train(model, loss_of, step))
    assert len(made) == 4 and all("forward" not in vars(each) for each in made)


def test_tensors_of_a_settled_block_can_be_swapped() -> None:
    plain, other = net(Parts), net(Parts)
    swap, before = torch.__future__, torch.__future__.get_swap_module_params_on_conversion()
    with selectively_planned(other, mildest(Parts), Parts):
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
    with selectively_planned(other, mildest(Parts), Parts):
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
    hidden_state["calls"] = 0
    plain, other = net(Wide), net(Wide)
    with selectively_planned(other, option, Wide) as executor:

        def disturb(layer: nn.Module) -> None:
            if layer is not other.layers[1]:
                return
            hidden_state["calls"] = 0
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
        hidden_state["calls"] = disturb
        with torch.random.fork_rng() if what != "removal" else contextlib.nullcontext():
            found = train(other, loss, 4)
        hidden_state["calls"] = 0
        if what == "removal":
            assert not differing(expected, found)
    assert not taken_over_modules(other)


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
