"""What a run that follows a recording must notice."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import cairn.torch as ct
import pytest
import torch
from cairn.torch import profiler
from cairn.torch.base import _compat
from cairn.torch.base._compat import dict_contents, tensor_guards
from cairn.torch.base.errors import RecomputationError
from cairn.torch.runtime.single_runs import Part
from cairn.torch.selective.recompute import Sample
from executor_support import (
    Op,
    backward,
    differing,
    every_block,
    keep,
    no_collector,
    planned,
    results,
    train,
)
from inside_blocks import Batch, Hidden, count_recordings, hidden
from inside_support import (
    ROWS,
    WIDTH,
    Mlp,
    Net,
    in_part,
    inside_of,
    loss_of,
    mean_square,
    net,
    opened,
    profile_of,
    sample,
    save,
)
from torch import Tensor, nn
from torch.nn import functional as F


class Inner:
    """A part of a configuration, or something that a call passes."""

    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope

    def get(self) -> float:
        return self.slope


class Steeper(Inner):
    @property
    def slope(self) -> float:  # type: ignore[override]
        return 0.75


@dataclasses.dataclass
class Sloped:
    """Something else that a call passes."""

    slope: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    """Has no attributes but those that are declared."""

    slope: float = 1.0


class Bare:
    """The same, and is no dataclass, so that it is passed on as it is."""

    __slots__ = ("slope",)

    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope


class Pair(NamedTuple):
    slope: Any


class Steepness(enum.Enum):
    FLAT, STEEP = 0.5, 1.0

    @property
    def slope(self) -> float:
        return float(self.value)


class Config:
    """What a layer may have its constants from."""

    def __init__(self) -> None:
        self.slope, self.names = 0.5, ("tanh", "sin")
        self.inner, self.more, self.named = Inner(), {"slopes": [1.0, 2.0]}, 1.0


def _halved(x: Tensor) -> Tensor:
    return x / 2


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _slope_of(how: Any) -> float:
    """What a call says in one of many ways."""
    if callable(how):
        return float(how())
    if isinstance(how, (dict, list, tuple)):
        return _slope_of(how["slope"] if isinstance(how, dict) else how[0])
    if isinstance(how, (int, float)):
        return {bool: 3.0, int: 2.0}.get(type(how), float(how))
    return float(how.start if isinstance(how, slice) else how.slope)


def _times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


class Turned(nn.Tanh):
    """What a part may become."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 2)


class Frozen(dict[str, float]):
    """Settings that nothing may change any more, as diffusers' models have."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise Exception("these are frozen")

    __setitem__ = update


class FrozenInOrder(collections.OrderedDict[str, float]):
    """The same, that can be copied."""

    update = Frozen.update


class Configured(Mlp):
    """Depends on whatever a layer may depend on beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.function, self.is_wide = Config(), _halved, False
        self.slopes, self.options = [1.0], collections.OrderedDict(slope=1.0)
        self.pieces = nn.ModuleList([nn.Tanh(), nn.Sigmoid()])
        self.count, self.zero, self.built_in, self.turn = 1, 0.0, F.gelu, _times(1.0)
        self.functions, self.table = [torch.sin, _halved], {"first": _times(1.0), "n": 1}
        self.partial, self.bare, self.slotted = functools.partial(torch.mul, other=1.0), Bare(), Slotted()
        self.pair, self.kind, self.bares = Pair(1.0), Steepness.STEEP, [Bare(), Bare()]
        self.inner_parts, self.namespace = [nn.Hardtanh(-9.0, 9.0)], types.SimpleNamespace(turn=_halved, slope=1.0)
        self.frozen, self.ordered = Frozen(slope=1.0), FrozenInOrder(slope=1.0)
        self.register_buffer("shift", torch.full((4 * WIDTH,), 0.1))

    def act(self, x: Tensor, factor: float = 1.0) -> Tensor:
        name = self.config.names[0]
        y = getattr(torch, name)(self.function(x) * self.config.slope * factor)
        y = y * self.slopes[0] * self.options["slope"] * self.config.inner.slope * self.config.more["slopes"][0]
        y = self.steep(self.listed(y * getattr(self, "extra", 1.0) * self.frozen["slope"] * self.ordered["slope"]))
        return self.pieces[0](y + self.shift) * (x.exp() if self.is_wide else x.sin())

    def listed(self, x: Tensor) -> Tensor:
        x = self.partial(self.functions[1](self.functions[0](x)))
        return self.inner_parts[0](self.table["first"](self.turn(x))) * self.namespace.slope

    def steep(self, x: Tensor) -> Tensor:
        slope = self.bare.slope * self.slotted.slope * self.pair.slope * self.kind.slope * self.bares[1].slope
        slope *= {bool: 2.0, int: 1.0, float: 3.0}[type(self.count)] * math.copysign(1.0, self.zero)
        return self.built_in(x * slope)

    def forward(self, x: Tensor, factor: float = 1.0, scale: Tensor | None = None, how: Any = 1.0) -> Tensor:
        x = x if scale is None else x * scale
        factor = factor * _slope_of(how)
        return x + self.dropout(self.down(self.dropout(self.act(self.up(self.norm(x)), factor))))


def _set(name: str, value: Any) -> Callable[[Configured], None]:
    def change(layer: Configured) -> None:
        owner, _, last = name.rpartition(".")
        setattr(
            layer.get_submodule(owner) if owner and owner != "config" else layer.config if owner else layer, last, value
        )

    return change


def _set_field(name: str) -> Callable[[Configured], None]:
    return lambda layer: setattr(getattr(layer, name), "slope", 0.5)


def _set_variable(function: Any, value: float) -> None:
    function.__closure__[0].cell_contents = value


def _swap_pieces(layer: Configured) -> None:
    layer.pieces[0], layer.pieces[1] = layer.pieces[1], layer.pieces[0]


_CHANGES: dict[str, Callable[[Configured], Any]] = {
    "a number": _set("dropout.p", 0.5),
    "a number of an object": _set("config.slope", 0.75),
    "a name of an object": _set("config.names", ("sin", "tanh")),
    "a function": _set("function", _doubled),
    "a truth value": _set("is_wide", True),
    "another object": lambda layer: setattr(layer, "config", Config()),
    "a part": _swap_pieces,
    "a training flag": lambda layer: layer.dropout.eval(),
    "an item of a list": lambda layer: layer.slopes.__setitem__(0, 0.5),
    "an item of a dict": lambda layer: layer.options.update(slope=0.5),
    "an item of a dict that refuses changes": lambda layer: dict.__setitem__(layer.frozen, "slope", 0.5),
    "an item of one that can be copied": lambda layer: layer.ordered.__setitem__("slope", 0.5),
    "a number of an object's object": lambda layer: setattr(layer.config.inner, "slope", 0.75),
    "an item deep in an object": lambda layer: layer.config.more["slopes"].__setitem__(0, 0.75),
    "an attribute that was not there": _set("extra", 0.5),
    "a number that becomes a tensor": _set("scale", torch.ones(3)),
    "an item that becomes a tensor": lambda layer: layer.slopes.__setitem__(0, torch.ones(4 * WIDTH)),
    "a hook": lambda layer: layer.up.register_forward_hook(lambda module, args, output: output * 2),
    "a hook before": lambda layer: layer.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a function in C": _set("built_in", torch.sin),
    "a function with another variable": lambda layer: setattr(layer, "turn", _times(0.5)),
    "a variable of a function": lambda layer: _set_variable(layer.turn, 0.5),
    "a function in a list": lambda layer: layer.functions.__setitem__(1, _doubled),
    "a function in a dict of other things": lambda layer: layer.table.update(first=_times(0.5)),
    "a partial function": lambda layer: setattr(layer, "partial", functools.partial(torch.mul, other=0.5)),
    "an argument of a partial function": lambda layer: layer.partial.keywords.update(other=0.5),
    "a method of one layer": lambda layer: setattr(layer, "steep", torch.sin),
    "the forward of one part": lambda layer: setattr(layer.pieces[0], "forward", lambda x: torch.tanh(x * 2)),
    "the class of a part": lambda layer: setattr(layer.pieces[0], "__class__", Turned),
    "the class of an object": lambda layer: setattr(layer.config.inner, "__class__", Steeper),
    "1 that becomes True": _set("count", True),
    "1 that becomes 1.0": _set("count", 1.0),
    "the sign of zero": _set("zero", -0.0),
    "a number that becomes none": _set("zero", float("nan")),
    "a field in slots": _set_field("bare"),
    "a field in slots of a dataclass": _set_field("slotted"),
    "a field in slots in a list": lambda layer: setattr(layer.bares[1], "slope", 0.5),
    "another object with slots": lambda layer: setattr(layer, "bare", Bare(0.5)),
    "another named tuple": _set("pair", Pair(0.5)),
    "another member of an enumeration": _set("kind", Steepness.FLAT),
    "an attribute of a module in a list": lambda layer: setattr(layer.inner_parts[0], "max_val", 0.01),
    "a module in a list": lambda layer: layer.inner_parts.__setitem__(0, nn.Hardtanh(-9.0, 0.01)),
    "a field of a namespace": lambda layer: setattr(layer.namespace, "slope", 0.5),
    "a frozen parameter": lambda layer: layer.norm.requires_grad_(False),
    "a frozen bias": lambda layer: layer.down.bias.requires_grad_(False),
    "a bias that is taken away": lambda layer: setattr(layer.down, "bias", None),
    "a parameter where there was none": lambda layer: setattr(layer.dropout, "extra", nn.Parameter(torch.ones(2))),
    "a buffer where there was none": lambda layer: layer.up.register_buffer("extra", torch.ones(2)),
    "a part where there was none": lambda layer: layer.up.add_module("extra", nn.Identity()),
}


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is recomputed, nothing is compared, as on devices where that would cost time."""
    monkeypatch.setattr(Sample, "of", lambda self, tensor: (0, 0))


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_to_a_block_between_steps_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = profile_of(Configured)
    plain, other = net(Configured), net(Configured)
    inside = inside_of(found)
    with planned(other, found.refs, in_part(found.refs, inside, 99), inside=inside):
        for step in range(3):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        count = count_recordings(monkeypatch)
        assert not differing(train(plain, loss_of, 3), train(other, loss_of, 3)) and not count
        for model in (plain, other):
            _CHANGES[what](model.layers[1])  # type: ignore[arg-type]
        for step in range(4, 7):
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
        assert len(count) == 1, what  # of the one layer


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing tells whether dicts have changed, and torch not whether tensors look the same."""
    monkeypatch.setattr(tensor_guards, "_guards", None)
    monkeypatch.setattr(dict_contents, "tells_changes", lambda number: False)
    for known in (_compat.number_of_contents, _compat.number_at):
        known.cache_clear()
    yield
    for known in (_compat.number_of_contents, _compat.number_at):
        known.cache_clear()


@pytest.mark.usefixtures("unsampled", "untold")
@pytest.mark.parametrize("what", ["a number", "an item of a list", "1 that becomes True", "a frozen bias"])
def test_a_change_is_noticed_where_torch_tells_less(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_a_change_to_a_block_between_steps_is_noticed(what, monkeypatch)


def test_numbers_of_dicts_that_overlook_a_change_are_not_used() -> None:
    def ours(names: dict[str, Any], counted: Iterator[int] = itertools.count()) -> int:  # noqa: B008
        return next(counted)

    def overlooking(names: dict[str, Any]) -> int:
        return ours(names) if "value" in names else -1

    def failing(names: dict[str, Any]) -> int:
        raise RuntimeError

    def own(names: dict[str, Any], counted: dict[int, Iterator[int]] = {}) -> int:  # noqa: B006
        return next(counted.setdefault(id(names), itertools.count()))

    assert _compat.tells_changes(ours)
    for number in (len, id, overlooking, failing, own):
        assert not _compat.tells_changes(number)  # type: ignore[arg-type]


def test_looks_that_hold() -> None:
    def tensors(**other: Any) -> list[Tensor | None]:
        how = {"size": (3, 4), "dtype": torch.float32, "requires_grad": True, **other}
        return [torch.zeros(2), None, torch.zeros(**how)]

    looks = _compat.TensorGuard(tensors())
    assert not looks.hold(tensors()[:2]) and not looks.hold(tensors()[1:]) and not looks.hold(tensors()[::-1])
    for other in ({"size": (4, 3)}, {"dtype": torch.float64}, {"requires_grad": False}, {"device": "meta"}):
        assert not looks.hold(tensors(**other))
    assert not looks.hold([*tensors()[:2], torch.zeros(4, 3, requires_grad=True).t()])
    assert not _compat.TensorGuard([torch.zeros(2)]).hold([None])
    doubled = _compat.TensorGuard([torch.zeros(2)] * 2)
    assert not doubled.hold([torch.zeros(2)] * 2)  # told too rarely, never wrongly


SETTINGS, SLOPE = {"slope": 1.0, "slopes": [1.0]}, 1.0


SETTING, OTHER_FILE = Config(), types.ModuleType("settings")


OTHER_FILE.SLOPE, OTHER_FILE.turn = 1.0, _halved  # type: ignore[attr-defined]


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
    slope, turner = 1.0, _halved

    class GlobalsAndClosures(Mlp):
        """Depends on what is neither an attribute of its own nor an argument."""

        factor, factors = 1.0, (1.0, 1.0)

        @staticmethod
        def turn(by: float) -> None:
            nonlocal slope, turner
            slope, turner = by, turner if by != 2.0 else _doubled

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
    "a function of another file": lambda patch, layer, setting: patch.setattr(OTHER_FILE, "turn", _doubled),
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
    with opened(other, layer=layer) as executor:
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
    with opened(other, layer=Configured):
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
    with opened(other, layer=Configured):
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
    with opened(other, layer=Configured):
        for step in range(6):
            if step == 3 and isinstance(how, dict):
                how["slope"] = 0.5
            elif step == 3:
                how.slope = 0.5
            results = [train(model, lambda m: mean_square(m(sample(), how=how)), step) for model in (plain, other)]
            assert not differing(*results)


class Sharing(Mlp):
    """Has weights and buffers that may be one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("first", torch.full((4 * WIDTH,), 0.5))
        self.register_buffer("second", torch.full((4 * WIDTH,), 1.5))
        self.share()

    def share(self) -> None:
        self.gate.weight, self.last.weight, self.second = self.up.weight, self.down.weight, self.first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)) * self.first) * torch.sigmoid(self.gate(x) * self.second.to(x.dtype))
        return x + torch.sin(self.down(y)) * torch.cos(self.last(torch.tanh(y)))


class Parted(Sharing):
    """Has two of each."""

    def share(self) -> None:
        pass


def _untie(layer: Any) -> None:
    layer.gate.weight = nn.Parameter(layer.up.weight.detach() * 0.5)


def _untie_data(layer: Any) -> None:
    layer.last.weight = nn.Parameter(layer.down.weight.detach())  # shares the storage
    layer.last.weight.data = layer.down.weight.detach() * 0.5


def _tie_data(layer: Any) -> None:
    layer.gate.weight.data = layer.up.weight.data


def _swap_weights(layer: Any) -> None:
    layer.up.weight, layer.gate.weight = layer.gate.weight, layer.up.weight


_SHARES: dict[str, tuple[type[Sharing], Callable[[Any], Any]]] = {
    "a weight that is shared no more": (Sharing, _untie),
    "data that are shared no more": (Sharing, _untie_data),
    "a buffer that is shared no more": (Sharing, lambda layer: setattr(layer, "second", layer.first * 3)),
    "a weight that becomes shared": (Parted, lambda layer: setattr(layer.gate, "weight", layer.up.weight)),
    "data that become shared": (Parted, _tie_data),
    "a buffer that becomes shared": (Parted, lambda layer: setattr(layer, "second", layer.first)),
    "weights that are swapped": (Parted, _swap_weights),
    "a weight that another block shares": (Parted, lambda layer: None),
    "a buffer in another layout": (Parted, lambda layer: setattr(layer, "second", torch.arange(8.0 * WIDTH)[::2])),
    "a buffer of another shape": (Parted, lambda layer: setattr(layer, "second", torch.full((1,), 2.0))),
    "a buffer of another type": (Parted, lambda layer: setattr(layer, "second", layer.second.double().mul(2))),
}


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("option", [1, 2, 99])
@pytest.mark.parametrize("what", _SHARES)
def test_weights_that_are_shared_or_no_more_are_noticed(what: str, option: int) -> None:
    layer, change = _SHARES[what]
    plain, other = net(layer), net(layer)
    with opened(other, option, layer):
        for step in range(6):
            for model in (plain, other) if step == 3 else ():
                change(model.layers[1])
                if what == "a weight that another block shares":
                    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr, assignment]
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step)), step


@pytest.mark.usefixtures("unsampled")
def test_a_change_to_a_part_that_was_put_in_is_noticed() -> None:
    plain, other = net(), net()
    with opened(other) as executor:
        for step in range(8):
            for model in (plain, other) if step in (2, 4, 6) else ():
                layer: Any = model.layers[1]
                if step == 2:
                    layer.dropout, layer.norm = nn.Dropout(0.25), nn.LayerNorm(WIDTH)
                elif step == 4:
                    layer.dropout.p = 0.5
                else:
                    layer.norm.requires_grad_(False)
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert len(executor.notes) == (step in (2, 4)), step  # recorded again; as another run in step 6


@pytest.mark.parametrize("is_opened", [False, True])
def test_the_statistics_of_a_part_that_was_put_in_are_written_once(is_opened: bool) -> None:
    plain, other = net(Batch), net(Batch)
    found = profile_of(Batch)
    inside, n = inside_of(found), len(found.refs)
    ops = [keep(s) if s in inside else save(s) for s in range(1, n + 1)]
    for stage in range(n, 0, -1):
        ops += [save(stage)] * (stage in inside) + [backward(stage)]
    with planned(other, found.refs, in_part(found.refs, inside, 99) if is_opened else ops, inside=inside) as executor:
        for step in range(5):
            for model in (plain, other) if step == 2 else ():
                model.layers[1].batch = nn.BatchNorm1d(4 * WIDTH)  # type: ignore[union-attr, assignment]
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert len(executor.notes) == (is_opened and step == 2)  # it is recorded again


class Image(nn.Module):
    """Whose layout in memory is that of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.sin(self.inner(x)))
        return self.outer(y * y.transpose(1, 2).cos().transpose(1, 2)).contiguous()


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("option", [1, 2, 99])
def test_weights_in_another_layout_are_noticed(option: int) -> None:
    def images() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Image(), Image(), Image(), nn.Flatten())

    def loss(model: nn.Module) -> Tensor:
        return mean_square(model(sample(24).view(6, 4, 4, 4)))

    plain, other = images(), images()
    found = profiler.profile(images(), sample(24).view(6, 4, 4, 4), loss_fn=mean_square, passes=1)
    inside = inside_of(found)
    with planned(other, found.refs, in_part(found.refs, inside, option), inside=inside):
        for step in range(6):
            for model in (plain, other) if step == 3 else ():
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            assert not differing(train(plain, loss, step), train(other, loss, step))


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
    with opened(other):
        for step in range(6):
            count = count_recordings(monkeypatch)
            results = [train(model, lambda model, step=step: loss(model, step >= 3), step) for model in (plain, other)]
            assert not differing(*results)
            assert len(count) == (3 if step in (0, 3) else 0)  # blocks


@pytest.mark.parametrize("what", ["parameter", "flag"])
def test_a_followed_run_that_must_run_again_refuses_what_has_changed(what: str) -> None:
    hidden["calls"] = 0
    model = net(Hidden)
    with opened(model, layer=Hidden) as executor:
        for step in range(2):
            train(model, loss_of, step)
        hidden["calls"] = 1  # what is recomputed will be wrong, so that all is run again
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
    with opened(other, layer=Impatient):
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
    inside, n = inside_of(found), len(found.refs)
    for kept in ((2,), (3,), (4,), (2, 4), (2, 3), (3, 4)):
        ops: list[Op] = [save(s, 3) if s in kept else keep(s) if s in inside else save(s) for s in range(1, n + 1)]
        for stage in range(n, 0, -1):
            ops += [save(stage)] * (stage in inside and stage not in kept) + [backward(stage)]
        for compute_loss in (loss_of, twice, part):
            plain, other = net(), net()
            with planned(other, found.refs, ops, inside=inside) as executor:
                program = executor.first.settings.program
                assert [s for s in inside if program.lasting[s]] == list(kept)
                for step in range(3):
                    assert not differing(train(plain, compute_loss, step), train(other, compute_loss, step))


def test_a_part_goes_with_the_last_tensor_that_autograd_holds() -> None:
    model = net()
    with no_collector(), opened(model):
        for step in range(3):
            train(model, loss_of, step)
        assert not [each for each in gc.get_objects() if type(each) is Part]
        loss = loss_of(model)
        assert sum(type(each) is Part for each in gc.get_objects()) == 3
        del loss
        assert not [each for each in gc.get_objects() if type(each) is Part]


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


@pytest.mark.parametrize("how", ["most is kept", "least is kept", "run again"])
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
    inside = inside_of(found)
    parts = in_part(found.refs, inside, 1 if how == "most is kept" else 99)
    with planned(other, found.refs, every_block(found.refs) if how == "run again" else parts, inside=inside):
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
