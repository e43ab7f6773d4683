"""What tests of hooks on a block's parts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cairn.torch.base.patched_forward import PatchedForward
from selective_support import WIDTH, profile_of
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


def taken_over_modules(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(vars(part).get("forward"), PatchedForward)]


#: Nothing that is looked at: what a plan cannot know.
hidden_state: dict[str, Any] = {"calls": 0, "of no known value": object()}
