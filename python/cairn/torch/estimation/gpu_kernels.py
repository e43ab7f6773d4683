"""The GPU's kernels for the two functions that save other tensors on a GPU than on the CPU.

Fake tensors claim to lie on the CPU, so torch's functions choose the CPU's kernels. Dropout saves a mask of floats on
the CPU and of booleans on a GPU. Attention with dropout saves all probabilities on the CPU; on a GPU it is one fused
kernel, which does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class GpuKernels(TorchFunctionMode):
    """Calls the GPU's kernels instead of the CPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (functional.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if function is functional.scaled_dot_product_attention:
            return _attention(function, *args, **kwargs)
        return function(*args, **kwargs)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> torch.Tensor:
    dropped = torch.native_dropout(input, p, training if train is None else train)[0]
    return input.copy_(dropped) if inplace else dropped


def _attention(function: Any, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    before, after = args[:4], args[5:]  # dropout_p is the fifth
    if len(args) > 4:
        return function(*before, 0.0, *after, **kwargs)
    return function(*args, dropout_p=0.0, **kwargs)
