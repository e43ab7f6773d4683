"""Known numbers of fake tensors: small tensors of integers and booleans that do not depend on trained parameters.

Positions, masks and counts decide branches: transformers, for example, make no attention mask where every position
counts. Such tensors come from the caller's sample, or from `arange` and similar operators. A fake tensor of integers
therefore carries its numbers, as long as the numbers of all arguments of the operators that made it are known.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base import _compat

MOST_ELEMENTS = 1 << 20
_NAME = "_cairn_numbers"


class _Unknown(Exception):
    """An argument has no numbers."""


def give(fake: torch.Tensor, tensor: torch.Tensor) -> None:
    """Attach a tensor's numbers to its fake, if it is a small tensor of integers or booleans."""
    if _may_have(fake) and not tensor.is_meta and not _compat.is_fake(tensor):
        with _compat.without_dispatch_modes():
            setattr(fake, _NAME, tensor.detach().to("cpu", copy=True))


def _may_have(tensor: torch.Tensor) -> bool:
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    return is_whole and tensor.numel() <= MOST_ELEMENTS


def computed(function: Any, args: Any, kwargs: Any) -> Any:
    """An operator's result for the known numbers of its arguments; None if some are not known."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return None
    try:
        real_args, real_kwargs = _compat.tree_map_only(torch.Tensor, _numbers_of, (args, kwargs))
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
    """Attach an operator's numbers to the fake that it returned, if they are known."""
    if isinstance(result, torch.Tensor) and _compat.is_fake(result) and _may_have(result):
        setattr(result, _NAME, computed(function, args, kwargs))
