"""Copies of buffers that share storages as the buffers do.

Several buffers may share a storage, such as rows of one tensor or halves of a table. A write through one is then read
through another. So each storage is copied once, as a whole, and each copied buffer has the same offset in the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..base import _compat, memory
from ..base.layouts import ByteView


def copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Detached copies in storages of the same sizes; tensors that share a storage share its copy."""
    keys = list(map(_compat.storage_key, tensors))
    are_apart = len(set(keys)) == len(keys)
    storages: dict[int, torch.Tensor] = {}
    copies = []
    with torch.no_grad():
        for tensor, key in zip(tensors, keys, strict=True):
            if not key or not memory.can_be_offloaded(tensor) or (are_apart and _fills_its_storage(tensor)):
                copies.append(tensor.clone())
                continue
            if key not in storages:
                storages[key] = memory.bytes_of(tensor.untyped_storage(), tensor.device).clone()
            copies.append(ByteView.of(tensor).tensor_in(storages[key], 0))
    return copies


def with_neighbours(indices: Iterable[int], tensors: Sequence[torch.Tensor | None]) -> set[int]:
    """The given indices, and those of all tensors that share a storage with one of them."""
    result = set(indices)
    keys = [0 if tensor is None else _compat.storage_key(tensor) for tensor in tensors] if result else []
    wanted = {keys[index] for index in result} - {0}
    return result | {index for index, key in enumerate(keys) if key in wanted}


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """The whole storage as a tensor, so that its clone has the same size."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
