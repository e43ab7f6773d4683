"""Integers and truth values of a step on fake tensors that do not depend on what it trains: they are computed for real.

Positions, masks and counts steer what a model does next: transformers make no attention mask where all positions count.
They come from the caller's sample, or are made by `arange` and the like. So a small tensor of integers has its numbers
beside it, as long as all operators on the way to it had those of their arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..base import _compat

MOST_ELEMENTS = 1 << 20
_NAME = "_cairn_numbers"


class _Unknown(Exception):
    """An argument has no numbers."""


def give(fake: torch.Tensor, tensor: torch.Tensor) -> None:
    """Lets a fake have the numbers of a tensor, if it may."""
    if _may_have(fake) and not tensor.is_meta and not _compat.is_fake(tensor):
        with _compat.without_dispatch_modes():
            setattr(fake, _NAME, tensor.detach().to("cpu", copy=True))


def _may_have(tensor: torch.Tensor) -> bool:
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    return is_whole and tensor.numel() <= MOST_ELEMENTS


def computed(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns for the numbers of its arguments; None if these are not known."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return None
    try:
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, _numbers_of, (args, kwargs))
    except _Unknown:
        return None
    with _compat.without_dispatch_modes(), torch.no_grad():
        return function(*real_args, **real_kwargs)


def _numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    numbers = getattr(tensor, _NAME, None) if _compat.is_fake(tensor) else tensor
    if numbers is None:
        raise _Unknown
    return numbers


def follow(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Lets what an operator has returned have its numbers, if they are known."""
    if isinstance(result, torch.Tensor) and _compat.is_fake(result) and _may_have(result):
        setattr(result, _NAME, computed(function, args, kwargs))
