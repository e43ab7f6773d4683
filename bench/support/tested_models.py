"""The models that the tests train, each with its loss, as a function of keyword arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

TESTS = Path(__file__).parents[2] / "python" / "tests"
Made = tuple[nn.Module, dict[str, Any]]


class WithLoss(nn.Module):
    """A model, and the loss of one step of a test."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any], torch.Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The loss."""
        output = self.model(*args, **kwargs)
        loss: torch.Tensor = output.loss if self.loss_fn is None else self.loss_fn(output)
        return loss


def tested_models() -> dict[str, Callable[[], Made]]:
    """A function that makes each model and its inputs, by name.

    Names that end in "-apart" are the same models with other blocks named, so they are left out.
    """
    sys.path.insert(0, str(TESTS))
    try:
        import torch_models as models
    finally:
        sys.path.remove(str(TESTS))

    def maker(name: str) -> Callable[[], Made]:
        def made() -> Made:
            step = models.made(name)
            return WithLoss(step.model, step.loss_fn), {"args": step.args, "kwargs": step.kwargs}

        return made

    return {name: maker(name) for name in (models.ALL | models.ODD | models.TANGLED) if not name.endswith("-apart")}
