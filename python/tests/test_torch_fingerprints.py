"""Fingerprints tell tensors apart and take next to no memory."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cairn.torch.base import memory
from cairn.torch.base.tensor_fingerprints import _sum, fingerprint

pytestmark = pytest.mark.usefixtures("seeded")
SHOWN = [lambda t: t, lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:, None].expand(-1, 3, -1), lambda t: t > 0]


@pytest.mark.parametrize("shown", SHOWN)
def test_fingerprints_tell_tensors_apart_and_take_next_to_no_memory(shown: Any) -> None:
    tensor = torch.randn(512, 512)
    other = tensor.clone()
    other[300, 100].neg_()
    assert fingerprint(shown(tensor)) == fingerprint(shown(tensor.clone())) != fingerprint(shown(other))
    looked_at, meter = shown(tensor), memory.CpuMeter()
    with meter:
        begin = meter.mark()
        fingerprint(looked_at)
        end = meter.mark()
    assert meter.peak(begin, end) - meter.level(begin) <= 2**14


@pytest.mark.parametrize("shown", SHOWN)
def test_fingerprints_wait_for_an_accelerator_once(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the CPU stands for it."""
    waited = []
    monkeypatch.setattr("cairn.torch.base.tensor_fingerprints._checksum", _sum)
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: waited.append(tensor) or tensor.item())
    tensor = torch.randn(512, 512)
    other = tensor.clone()
    other[300, 100].neg_()
    assert fingerprint(shown(tensor)) == fingerprint(shown(tensor.clone())) != fingerprint(shown(other))
    assert len(waited) == 3


def test_sums_of_wide_elements_tell_every_single_bit() -> None:
    numbers = torch.arange(1, 2**16 + 4, dtype=torch.int64)
    known = _sum(numbers)
    for index in (0, 1, 7, 2**15 - 1, 2**16 - 1, 2**16 + 2):
        for bit in (0, 31, 62, 63):
            other = numbers.clone()
            other[index] ^= -(2**63) if bit == 63 else 2**bit
            assert _sum(other) != known
