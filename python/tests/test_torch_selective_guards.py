"""What a run that follows a recording must notice."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cairn.torch.base import _compat
from cairn.torch.base._compat import dict_contents, tensor_guards
from executor_support import differing, planned, train
from guards_support import (
    Bare,
    Config,
    Configured,
    Inner,
    Pair,
    Steepness,
    Turned,
    doubled_of,
    times,
    unsampled_fixture,  # noqa: F401
)
from selective_blocks import count_recordings
from selective_support import WIDTH, by_option, loss_of, net, options_of, profile_of
from torch import Tensor, nn


class Steeper(Inner):
    @property
    def slope(self) -> float:  # type: ignore[override]
        return 0.75


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
    "a function": _set("function", doubled_of),
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
    "a function with another variable": lambda layer: setattr(layer, "turn", times(0.5)),
    "a variable of a function": lambda layer: _set_variable(layer.turn, 0.5),
    "a function in a list": lambda layer: layer.functions.__setitem__(1, doubled_of),
    "a function in a dict of other things": lambda layer: layer.table.update(first=times(0.5)),
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


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_to_a_block_between_steps_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = profile_of(Configured)
    plain, other = net(Configured), net(Configured)
    selective = options_of(found)
    with planned(other, found.refs, by_option(found.refs, selective, 99), selective=selective):
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
