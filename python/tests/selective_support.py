"""Blocks of which a part is kept: a small model, its profile, and its training by one option of each block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from cairn.torch import profiler
from cairn.torch.base.stages import StageRef
from cairn.torch.planning.step_profile import Profile
from cairn.torch.selective.block_runs import SelectiveOptions
from executor_support import Op, backward, planned
from torch import Tensor, nn

WIDTH, ROWS = 16, 64


class Mlp(nn.Module):
    """Dropout between operations that are kept, and an activation of several cheap operations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.scale = nn.Dropout(0.25), 0.5

    def act(self, x: Tensor) -> Tensor:
        return self.scale * x * (1 + torch.tanh(x + 0.04 * x.pow(3)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.dropout(self.act(self.up(self.norm(x))))))


class Net(nn.Module):
    """Blocks of one kind between an embedding and a head; the blocks may be one and the same."""

    def __init__(self, layer: Callable[[], nn.Module], count: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, **kwargs)
        return self.leave(x)


_profiles: dict[Any, Profile] = {}


def net(layer: Callable[[], nn.Module] = Mlp) -> Net:
    torch.manual_seed(0)
    return layer() if isinstance(layer, type) and issubclass(layer, Net) else Net(layer)


def sample(rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def loss_of(model: nn.Module) -> Tensor:
    return mean_square(model(sample()))


def profile_of(layer: Callable[[], nn.Module] = Mlp, **options: Any) -> Profile:
    key = (layer, str(options))
    if key not in _profiles:
        _profiles[key] = profiler.profile(net(layer), sample(), loss_fn=mean_square, passes=1, **options)
    return _profiles[key]


def options_of(found: Profile) -> dict[int, SelectiveOptions]:
    return {
        number: SelectiveOptions(
            s.digest, tuple(s.asked), tuple(s.draws), tuple(option.decisions for option in s.options)
        )
        for number, s in enumerate(found.stages, 1)
        if s.options
    }


def save(stage: int, option: int = 0) -> Op:
    return ("forward_save", stage, option)


def by_option(stages: tuple[StageRef, ...], selective: dict[int, SelectiveOptions], option: int) -> list[Op]:
    """Every block by an option, or by its last one."""
    last = {number: len(found.decisions) - 1 for number, found in selective.items()}
    n = len(stages)
    ops = [save(s, min(option, last.get(s, 0))) for s in range(1, n + 1)]
    return ops + [backward(s) for s in range(n, 0, -1)]


@contextlib.contextmanager
def selectively_planned(
    model: nn.Module, option: int = 99, layer: Callable[[], nn.Module] = Mlp, **options: Any
) -> Any:
    found = profile_of(layer)
    selective = options_of(found)
    with planned(
        model, found.refs, by_option(found.refs, selective, option), selective=selective, **options
    ) as executor:
        yield executor
