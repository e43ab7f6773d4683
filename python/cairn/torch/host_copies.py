"""Copies of storages in host memory: pinned for CUDA; for the CPU outside torch's allocator, so that they do not count.

Transfers are performed one after the other, where a schedule has them in its list; nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _compat
from .operators import shown


class HostCopy:
    """The tensors of one value on the host, each storage once."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._bytes: dict[int, torch.Tensor] = {}
        self._shown: list[tuple[int, tuple[Any, ...]] | None] = []
        for tensor in tensors:
            self._shown.append(self._take(tensor) if isinstance(tensor, torch.Tensor) else None)

    def _take(self, tensor: torch.Tensor) -> tuple[int, tuple[Any, ...]]:
        key = _compat.storage_id(tensor)
        if key not in self._bytes:
            raw = _raw(tensor)
            self._bytes[key] = _host_bytes(raw.numel(), tensor.device).copy_(raw)
            self._device = tensor.device
        return key, (tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Host memory that it takes, bytes."""
        return sum(each.numel() for each in self._bytes.values())

    def on_device(self) -> list[Any]:
        """The tensors again, in new storages."""
        fresh = {key: torch.empty_like(each, device=self._device).copy_(each) for key, each in self._bytes.items()}
        return [None if each is None else shown(fresh[each[0]], *each[1]) for each in self._shown]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _host_bytes(count: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(bytearray(max(count, 1)), dtype=torch.uint8)[:count]
