"""Fingerprints of tensors: numbers that almost surely differ where two tensors of one shape do, by a bit or more.

They are computed while a step runs within its budget, so they need almost no memory. A tensor without gaps in memory is
read in place. Another tensor is split into halves until the pieces are small enough to be copied. An accelerator
computes the sums, and the host waits for it once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from . import _compat, memory

_PIECE_ELEMENTS = 2048  # of copies
_SPREAD_ELEMENTS = 256
_CHUNK_ELEMENTS = 2**16  # of an accelerator's memory, copied or added up at once
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> int:
    """The fingerprint of a tensor; 0 for tensors that cannot be read."""
    if not memory.can_be_read(tensor):
        return 0
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (_checksum if tensor.is_cpu else _sum)(_stored(plain.detach().resolve_neg()))


@torch.no_grad()
def spread(tensor: torch.Tensor) -> bytes | None:
    """Some numbers from all over a tensor, at almost no cost; None if reading them would wait for a device."""
    if not tensor.is_cpu or not memory.can_be_read(tensor):
        return None
    flat = _stored(tensor.detach())
    if not flat.is_contiguous():
        return fingerprint(tensor).to_bytes(8, "little")
    step = flat.numel() // _SPREAD_ELEMENTS | 1  # odd, not to come to the same columns again and again
    some = flat.view(-1)[::step].contiguous()
    return _compat.bytes_at(some.data_ptr(), some.nbytes)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in memory, each once, in the order of its strides."""
    strides = tensor.stride()
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _pieces(tensor: torch.Tensor, copied: int) -> Iterator[torch.Tensor]:
    """Parts of a tensor one after the other, each without gaps. Parts that are copied have a limited size."""
    if tensor.is_contiguous():
        yield tensor
    elif tensor.numel() <= copied:
        yield tensor.contiguous()
    else:
        dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
        half = tensor.size(dim) // 2
        yield from _pieces(tensor.narrow(dim, 0, half), copied)
        yield from _pieces(tensor.narrow(dim, half, tensor.size(dim) - half), copied)


def _checksum(tensor: torch.Tensor) -> int:
    """A checksum of the bytes in host memory."""
    value = 0
    for piece in _pieces(tensor, _PIECE_ELEMENTS):
        nbytes = piece.numel() * piece.element_size()
        value = zlib.crc32(_compat.reader_of(nbytes)(piece.data_ptr()), value)
    return value


def _sum(tensor: torch.Tensor) -> int:
    """A sum of the elements' bits, weighted by their places. Odd weights keep all 64 bits."""
    weights = torch.arange(1, 2 * min(_CHUNK_ELEMENTS, tensor.numel()) + 1, 2, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor, _CHUNK_ELEMENTS):
        flat = piece.view(-1)
        flat = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
        for chunk in flat.view(_INTEGERS[flat.element_size()]).split(_CHUNK_ELEMENTS):
            total.mul_(31).add_((chunk.to(torch.int64) * weights[: chunk.numel()]).sum())
    return int(total)
