"""Truth values as bits, for masks on the CPU that are kept from a forward to its backward: an eighth of a byte each."""

from __future__ import annotations

import torch

from .._library import lib

#: How many values lie in a byte where masks are packed.
PER_BYTE = 8


def pack(mask: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor of truth values on the CPU, in the order in which they lie in memory."""
    count = mask.numel()
    packed = torch.empty((count + PER_BYTE - 1) // PER_BYTE, dtype=torch.uint8)
    lib.cairn_bits_pack(mask.data_ptr(), count, packed.data_ptr())
    return packed


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """So many values again, in one dimension."""
    mask = torch.empty(count, dtype=torch.bool)
    lib.cairn_bits_unpack(packed.data_ptr(), count, mask.data_ptr())
    return mask
