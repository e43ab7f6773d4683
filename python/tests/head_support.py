"""What tests of the head share."""

from __future__ import annotations

import cairn.torch as ct
import pytest
import torch

ROWS, CLASSES, WIDTH = 40, 300, 16


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(_bits(first), _bits(second))


@pytest.fixture(name="small_chunks")
def small_chunks_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ct.head.loss, "CHUNK_BYTES", 3 * 4 * CLASSES)
