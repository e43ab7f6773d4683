"""Inputs of a sample after its step was planned: what is held of them, and the tensors that stand for them later.

A training loop has inputs of its own, and a plan counts those of one step. So the tensors of the sample must not stay
on the device. Floating-point tensors are large, and any values of their range do for a comparison of two steps: only
their description is held. All others (token ids, lengths, masks) may be valid with these values alone: they are held
on the host.
"""

from __future__ import annotations

import dataclasses

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class _Held:
    """A tensor, mostly on the host, and the device that it came from."""

    tensor: torch.Tensor
    device: torch.device

    def made(self) -> torch.Tensor:
        """The tensor, or a copy on its device."""
        return self.tensor.detach().to(self.device).requires_grad_(self.tensor.requires_grad)


@dataclasses.dataclass(frozen=True)
class _Described:
    """A description of a tensor. `low` and `high` are its least and its largest value."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    low: float
    high: float

    def made(self) -> torch.Tensor:
        """A tensor of this description with other values, the same ones each time."""
        values = torch.rand(self.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        made.copy_(values.mul_(self.high - self.low).add_(self.low))
        return made.requires_grad_(self.requires_grad)


InputRecord = _Held | _Described


def record_of(tensor: torch.Tensor, is_of_model: bool) -> InputRecord:
    """What is held of a tensor: a parameter or a buffer of the model itself is."""
    if is_of_model:
        return _Held(tensor, tensor.device)
    values = tensor.detach()
    if _is_describable(values):
        low, high = (float(value) for value in torch.aminmax(values))
        if low > float("-inf") and high < float("inf"):  # false for NaN
            fields = values.shape, values.stride(), values.dtype, values.device
            return _Described(*fields, tensor.requires_grad, low, high)
    return _Held(values.cpu().requires_grad_(tensor.requires_grad), values.device)


def _is_describable(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dtype in _DTYPES
    return is_plain and tensor.numel() > 0 and all(tensor.stride(i) or size == 1 for i, size in enumerate(tensor.shape))
