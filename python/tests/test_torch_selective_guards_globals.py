"""A change to globals, closures, classes or arguments of a call fails the guard of a recorded run."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from executor_support import differing, train
from guards_support import (
    Bare,
    Config,
    Configured,
    Inner,
    Pair,
    Slotted,
    Steepness,
    doubled_of,
    halved,
    unsampled_fixture,  # noqa: F401
)
from selective_blocks import count_recordings
from selective_support import ROWS, WIDTH, Mlp, loss_of, mean_square, net, sample, selectively_planned
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass
class Sloped:
    """Something else that a call passes."""

    slope: float = 1.0


SETTINGS, SLOPE = {"slope": 1.0, "slopes": [1.0]}, 1.0
SETTING, OTHER_FILE = Config(), types.ModuleType("settings")
OTHER_FILE.SLOPE, OTHER_FILE.turn = 1.0, halved  # type: ignore[attr-defined]


def _sloped(x: Tensor) -> Tensor:
    return _HOW(x * SLOPE)


def _steeper(x: Tensor) -> Tensor:
    return _HOW(x * SLOPE * 2)


_HOW = functools.partial(torch.mul, other=1.0)


class Settled:
    """A class whose attributes are settings; its methods read others."""

    slope: ClassVar[float] = 1.0
    slopes: ClassVar[dict[str, float]] = {"a": 1.0}

    def __call__(self) -> float:
        return SETTING.more["slopes"][1] * SETTINGS["slopes"][0]  # type: ignore[index,no-any-return]


SETTLED = Settled()
ARGUMENTS, PIECE = argparse.Namespace(slope=1.0), nn.Module()
PIECE.inner, PIECE.slope = nn.Identity(), 1.0
PIECE.inner.slope = 1.0


class Only:
    """One object for all, that a method of the class gives."""

    slope: float = 1.0
    one: ClassVar[Only | None] = None

    @classmethod
    def get(cls) -> Any:
        cls.one = cls.one or cls()
        return cls.one


def _by_default(slopes: dict[str, float] = {"a": 1.0}, *, setting: Config = SETTING) -> float:  # noqa: B006
    return slopes["a"] * setting.inner.slope


def _by_others() -> float:
    """What code finds behind objects, modules, defaults and texts."""
    slope = ARGUMENTS.slope * SETTING.inner.slope * PIECE.slope * PIECE.inner.slope
    return slope * _by_default() * Only.get().slope * getattr(SETTING, "named")  # noqa: B009


class Scaled(torch.autograd.Function):
    """Reads a global."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 2.0 * OTHER_FILE.SLOPE
        return x * ctx.slope

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.slope


def _softer(x: Tensor, softplus: Callable[[Tensor], Tensor] = F.softplus) -> Tensor:
    return softplus(x * 2)


class ScaledMore(Scaled):
    """Another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 3.0
        return x * ctx.slope


def _act_otherwise(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(Scaled.apply(_sloped(x * 2))) * x.sin()


def _forward_otherwise(layer: Any, x: Tensor) -> Tensor:
    return x + layer.dropout(layer.down(layer.dropout(layer.act(layer.up(layer.norm(x) * 2)))))


def _normalize_otherwise(layer: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x * 2 + 1e-3, layer.normalized_shape, layer.weight, layer.bias, 0.01)


def _hook_all(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output * 2 if isinstance(module, nn.LayerNorm) else None


def _with(setting: list[float]) -> type[Mlp]:
    slope, turner = 1.0, halved

    class GlobalsAndClosures(Mlp):
        """Depends on what is neither an attribute of its own nor an argument."""

        factor, factors = 1.0, (1.0, 1.0)

        @staticmethod
        def turn(by: float) -> None:
            nonlocal slope, turner
            slope, turner = by, turner if by != 2.0 else doubled_of

        @property
        def squared(self) -> float:
            return setting[0] ** 2

        def act(self, x: Tensor) -> Tensor:
            x = x * SETTINGS["slope"] * SETTING.slope * self.factor * self.factors[1] * self.squared * slope
            x = x * Settled.slope * Settled.slopes["a"] * SETTLED() * _by_others()
            x = OTHER_FILE.turn(F.softplus(turner(x)))
            return torch.tanh(Scaled.apply(_sloped(x))) * x.sin()

    return GlobalsAndClosures


_CHANGES_ELSEWHERE: dict[str, Callable[[pytest.MonkeyPatch, type[Any], list[float]], Any]] = {
    "a global": lambda patch, layer, setting: patch.setitem(globals(), "SLOPE", 0.5),
    "an item of a global dict": lambda patch, layer, setting: patch.setitem(SETTINGS, "slope", 0.5),
    "an attribute of a global object": lambda patch, layer, setting: patch.setattr(SETTING, "slope", 0.25),
    "what a global object's method reads": lambda patch, layer, setting: patch.setitem(SETTINGS, "slopes", [0.5]),
    "an argument of the command line": lambda patch, layer, setting: patch.setattr(ARGUMENTS, "slope", 0.5),
    "an attribute of an object of a global object": lambda patch, layer, setting: patch.setattr(
        SETTING.inner, "slope", 0.25
    ),
    "an attribute of a global module": lambda patch, layer, setting: patch.setattr(PIECE, "slope", 0.5),
    "an attribute of a global module's part": lambda patch, layer, setting: patch.setattr(PIECE.inner, "slope", 0.5),
    "an item of a default": lambda patch, layer, setting: patch.setitem(_by_default.__defaults__[0], "a", 0.5),  # type: ignore[index]
    "an attribute of what a method gives": lambda patch, layer, setting: patch.setattr(Only.get(), "slope", 0.5),
    "an attribute that a text names": lambda patch, layer, setting: patch.setattr(SETTING, "named", 0.5),
    "an item deep in a global object": lambda patch, layer, setting: patch.setitem(SETTING.more, "slopes", [1.0, 1.0]),
    "an attribute of the layer's class": lambda patch, layer, setting: patch.setattr(layer, "factor", 0.5),
    "a tuple of the layer's class": lambda patch, layer, setting: patch.setattr(layer, "factors", (1.0, 0.5)),
    "an attribute of another class": lambda patch, layer, setting: patch.setattr(Settled, "slope", 0.5),
    "an item of another class's dict": lambda patch, layer, setting: patch.setitem(Settled.slopes, "a", 0.5),
    "a number of another file": lambda patch, layer, setting: patch.setattr(OTHER_FILE, "SLOPE", 0.5),
    "a list in a closure": lambda patch, layer, setting: setting.__setitem__(0, 0.5),
    "a number in a closure": lambda patch, layer, setting: layer.turn(0.5),
    "a function in a closure": lambda patch, layer, setting: layer.turn(2.0),
    "a function of the file": lambda patch, layer, setting: patch.setitem(globals(), "_sloped", _steeper),
    "a class of the file": lambda patch, layer, setting: patch.setitem(globals(), "Scaled", ScaledMore),
    "an object of the file": lambda patch, layer, setting: patch.setitem(globals(), "SETTING", Config()),
    "a function of another file": lambda patch, layer, setting: patch.setattr(OTHER_FILE, "turn", doubled_of),
    "a function of torch": lambda patch, layer, setting: patch.setattr(F, "softplus", _softer),
    "a method of the layer's class": lambda patch, layer, setting: patch.setattr(layer, "act", _act_otherwise),
    "a property": lambda patch, layer, setting: patch.setattr(layer, "squared", property(lambda layer: 0.25)),
    "the forward": lambda patch, layer, setting: patch.setattr(Mlp, "forward", _forward_otherwise),
    "a forward in front": lambda patch, layer, setting: patch.setattr(layer, "forward", _forward_otherwise),
    "the forward of parts": lambda patch, layer, setting: patch.setattr(nn.LayerNorm, "forward", _normalize_otherwise),
    "a hook of every module": lambda patch, layer, setting: patch.setitem(
        nn.modules.module._global_forward_hooks, 10**6, _hook_all
    ),
}


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("what", _CHANGES_ELSEWHERE)
def test_a_change_elsewhere_between_steps_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = [1.0]
    layer = _with(setting)
    plain, other = net(layer), net(layer)
    with selectively_planned(other, layer=layer) as executor:
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        count = count_recordings(monkeypatch)
        assert not differing(train(plain, loss_of, 3), train(other, loss_of, 3)) and not count
        _CHANGES_ELSEWHERE[what](monkeypatch, layer, setting)
        for step in range(4, 7):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            again = sum("was recorded again" in note for note in executor.notes)
            assert again == (3 if step == 4 else 0), what  # blocks
        assert len(count) == 3


def _scales(rows: int = ROWS) -> Tensor:
    return torch.linspace(0.5, 1.5, rows * WIDTH).view(rows, WIDTH)


_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "an argument's size": lambda model: model(sample(24), scale=_scales(24)),
    "an argument's type": lambda model: model(sample(), scale=_scales().half()),
    "an argument's strides": lambda model: model(sample(), scale=_scales().t().contiguous().t()),
    "an argument that needs a gradient": lambda model: model(sample(), scale=_scales().requires_grad_()),
    "an argument with a history": lambda model: model(sample(), scale=_scales().requires_grad_() * 1),
    "one tensor less": lambda model: model(sample()),
    "a number": lambda model: model(sample(), scale=_scales(), factor=1.5),
    "a slice": lambda model: model(sample(), scale=_scales(), how=slice(2, 3)),
    "a function": lambda model: model(sample(), scale=_scales(), how=lambda: 1.5),
    "a dict": lambda model: model(sample(), scale=_scales(), how={"slope": 1.5}),
}


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("what", _CALLS)
def test_another_call_between_steps_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_ever(model: nn.Module) -> Tensor:
        return mean_square(model(sample(), scale=_scales()))

    def changed(model: nn.Module) -> Tensor:
        return mean_square(_CALLS[what](model))

    plain, other = net(Configured), net(Configured)
    with selectively_planned(other, layer=Configured):
        for step in range(3):
            assert not differing(train(plain, as_ever, step), train(other, as_ever, step))
        count = count_recordings(monkeypatch)
        for step in range(3, 9):
            compute_loss = changed if step % 3 == 2 else as_ever
            assert not differing(train(plain, compute_loss, step), train(other, compute_loss, step))
        assert len(count) == 3  # blocks


_WAYS: dict[str, Callable[[float], Any]] = {
    "a truth value or a number": lambda value: True if value == 1 else 1,
    "a number of one type or another": lambda value: 1 if value == 1 else 1.0,
    "a slice": lambda value: slice(int(10 * value), 20),
    "a function": lambda value: lambda: value,
    "a partial function": lambda value: functools.partial(float, value),
    "a bound method": lambda value: Inner(value).get,
    "an object": Inner,
    "a dataclass": Sloped,
    "a dict": lambda value: {"slope": value},
    "a dict of another class": lambda value: collections.OrderedDict(slope=value),
    "a tuple": lambda value: (value, value),
    "an object with slots": Bare,
    "a dataclass with slots": Slotted,
    "an object with slots in a list": lambda value: [Bare(value), 0.0],
    "an object with slots in a named tuple": lambda value: Pair(Bare(value)),
    "a member of an enumeration": Steepness,
    "a method of a dict": lambda value: functools.partial({"slope": value}.get, "slope"),
}


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("what", _WAYS)
def test_what_a_call_says_is_noticed_however_it_says_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = net(Configured), net(Configured)
    count = count_recordings(monkeypatch, Configured)
    with selectively_planned(other, layer=Configured):
        for step, value in enumerate((1.0, 1.0, 0.5, 0.5, 1.0, 0.5)):
            how = _WAYS[what](value)
            results = [
                train(model, lambda m, how=how: mean_square(m(sample(), how=how)), step) for model in (plain, other)
            ]
            assert not differing(*results)
        assert len(count) == 6  # blocks, twice


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize(
    "what", ["an object", "a dataclass", "a dict of another class", "an object with slots", "a dataclass with slots"]
)
def test_what_changes_in_something_passed_is_noticed(what: str) -> None:
    plain, other = net(Configured), net(Configured)
    how = _WAYS[what](1.0)
    with selectively_planned(other, layer=Configured):
        for step in range(6):
            if step == 3 and isinstance(how, dict):
                how["slope"] = 0.5
            elif step == 3:
                how.slope = 0.5
            results = [train(model, lambda m: mean_square(m(sample(), how=how)), step) for model in (plain, other)]
            assert not differing(*results)
