"""Masks packed as bits, for CPU masks that are kept from a forward to its backward: one bit for each number."""

from __future__ import annotations

import torch

from ..._library import lib
from ..base import memory

#: How many numbers lie in a byte where masks are packed.
PER_BYTE = 8
_WIDTHS = 2, 4, 8


def can_pack(numbers: torch.Tensor) -> bool:
    """Whether `pack` accepts a tensor: booleans or floating-point numbers on the CPU, without gaps in memory."""
    is_on_cpu = memory.is_cpu_faked() or (numbers.is_cpu and memory.can_be_read(numbers))
    if not is_on_cpu or not numbers.is_contiguous():
        return False
    return numbers.dtype is torch.bool or (numbers.is_floating_point() and numbers.element_size() in _WIDTHS)


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Which numbers are not zero, in the order in which they lie in memory. Fake ones give memory without contents."""
    count = numbers.numel()
    packed = torch.empty((count + PER_BYTE - 1) // PER_BYTE, dtype=torch.uint8, device="cpu")
    if not memory.is_cpu_faked():
        lib.cairn_bits_pack(numbers.data_ptr(), numbers.element_size(), count, packed.data_ptr())
    return packed


def unpack(packed: torch.Tensor, pair: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Fills a tensor without gaps, in the order of memory: `pair[0]` where a number was zero, `pair[1]` elsewhere."""
    if not memory.is_cpu_faked():
        lib.cairn_bits_unpack(packed.data_ptr(), into.numel(), pair.data_ptr(), into.element_size(), into.data_ptr())
    return into
