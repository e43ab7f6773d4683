"""Whether tensors still look as they did, by torch.compile's own guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class TensorGuard:
    """Classes, shapes, strides, types and devices of tensors, which of them need gradients, and which are missing."""

    __slots__ = ("_are_missing", "_check")

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._are_missing = [tensor is None for tensor in tensors]
        self._check = _metadata_check([tensor for tensor in tensors if tensor is not None])

    def hold(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether other tensors surely have the same metadata; False if unknown, or if a tensor occurs twice."""
        if self._check is None or len(tensors) != len(self._are_missing):
            return False
        if True not in self._are_missing:
            return self._check(*tensors)  # which tells if one is missing now
        are_missing = [tensor is None for tensor in tensors]
        return are_missing == self._are_missing and self._check(*[t for t in tensors if t is not None])


def _metadata_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    guards: Any = getattr(_guards, "TensorGuards", None)
    try:
        check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) else None
    except (AttributeError, RuntimeError, SystemError, TypeError):
        return None


_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
