"""Copies of buffers that lie as the buffers do.

Buffers may share a storage: rows of one tensor, halves of a table. What was recorded of a block finds one behind the
other, and what is written through one is read through another. So a storage is copied as a whole, once, and each copy
lies in it where its buffer lies in the buffer's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..base import _compat, memory
from ..base.layouts import Look


def copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies without history, in storages of the same sizes; those of one storage are in one storage again."""
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
            copies.append(Look.of(tensor).seen(storages[key], 0))
    return copies


def with_neighbours(indices: Iterable[int], tensors: Sequence[torch.Tensor | None]) -> set[int]:
    """These, and all that share a storage with one of them."""
    found = set(indices)
    keys = [0 if tensor is None else _compat.storage_key(tensor) for tensor in tensors] if found else []
    wanted = {keys[index] for index in found} - {0}
    return found | {index for index, key in enumerate(keys) if key in wanted}


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """So that a clone has the same storage, too."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
