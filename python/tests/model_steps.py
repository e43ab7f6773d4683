"""A model with one training step of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass
class Step:
    """A model and one training step of it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_fn: Callable[[Any], Tensor] | None = None
    blocks: Any = "auto"

    def loss(self) -> Tensor:
        output = self.model(*self.args, **self.kwargs)
        return output.loss if self.loss_fn is None else self.loss_fn(output)

    @property
    def sample(self) -> dict[str, Any]:
        """As keyword arguments of cairn.torch.verify."""
        return {"args": self.args, "kwargs": self.kwargs, "loss_fn": self.loss_fn}

    @property
    def profiling(self) -> dict[str, Any]:
        """As keyword arguments of cairn.torch.profile."""
        return {**self.sample, "blocks": self.blocks}


def classification(model: nn.Module, images: Tensor, classes: int) -> Step:
    target = torch.randint(classes, (len(images),))
    return Step(model.train(), (images,), {}, lambda output: F.cross_entropy(output, target))


def squared(model: nn.Module, *args: Tensor) -> Step:
    return Step(model.train(), args, {}, lambda output: output.square().mean())
