"""What tests of guards share: blocks to change, and switches for how they are compared."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cairn.torch.selective.recompute import Sample
from selective_support import WIDTH, Mlp
from torch import Tensor, nn
from torch.nn import functional as F


class Inner:
    """A part of a configuration, or something that a call passes."""

    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope

    def get(self) -> float:
        return self.slope


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


def halved(x: Tensor) -> Tensor:
    return x / 2


def doubled_of(x: Tensor) -> Tensor:
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


def times(by: float) -> Callable[[Tensor], Tensor]:
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
        self.config, self.function, self.is_wide = Config(), halved, False
        self.slopes, self.options = [1.0], collections.OrderedDict(slope=1.0)
        self.pieces = nn.ModuleList([nn.Tanh(), nn.Sigmoid()])
        self.count, self.zero, self.built_in, self.turn = 1, 0.0, F.gelu, times(1.0)
        self.functions, self.table = [torch.sin, halved], {"first": times(1.0), "n": 1}
        self.partial, self.bare, self.slotted = functools.partial(torch.mul, other=1.0), Bare(), Slotted()
        self.pair, self.kind, self.bares = Pair(1.0), Steepness.STEEP, [Bare(), Bare()]
        self.inner_parts, self.namespace = [nn.Hardtanh(-9.0, 9.0)], types.SimpleNamespace(turn=halved, slope=1.0)
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


@pytest.fixture(name="unsampled")
def unsampled_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is recomputed, nothing is compared, as on devices where that would cost time."""
    monkeypatch.setattr(Sample, "of", lambda self, tensor: (0, 0))
