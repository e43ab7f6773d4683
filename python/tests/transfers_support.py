"""What tests of tiers and transfers share: transfers of every kind, and a tier whose copies wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_streams
import pytest
import torch
from cairn.torch.offloading import tiers
from cairn.torch.offloading.copy_streams import CudaCopyStreams, StagedCopyStreams
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.offloading.transfers import TensorGroup, Transfers
from torch import Tensor

MIB = 1 << 20
TIERS = ("host", "file")
_others: set[threading.Thread] = set()  # those that tests before this one have left


@pytest.fixture(name="count_own_threads", autouse=True)
def count_own_threads_fixture() -> None:
    _others.clear()
    _others.update(threading.enumerate())


def threads() -> list[str]:
    """The threads that copy, of this test alone."""
    mine = set(threading.enumerate()) - _others
    return [thread.name for thread in mine if thread.name.startswith("cairn-")]


def where(kind: str, folder: Path) -> str:
    return "host" if kind == "host" else f"file:{folder / 'slab'}"


@pytest.fixture(name="transfers", params=[*TIERS, "streams", "one stream", "staged"])
def transfers_fixture(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Transfers]:
    """Transfers of the CPU to both tiers, and as a CUDA device makes them: on two streams, on one, through a buffer."""
    lanes = {"streams": CudaCopyStreams, "one stream": CudaCopyStreams, "staged": StagedCopyStreams}.get(request.param)
    if lanes is not None:
        fake_streams.install(monkeypatch)
        monkeypatch.setattr("cairn.torch.offloading.transfers.copy_streams_for", lanes)
    tier = open_tier(where("file" if request.param in ("file", "staged") else "host", tmp_path), 8 * MIB)
    made = Transfers(tier, "cpu", shared_link=request.param == "one stream")
    yield made
    made.close()


def again(group: TensorGroup) -> list[Tensor]:
    group.wait_out()
    group.prefetch()
    return group.tensors()


def numbers(count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count, dtype=torch.float32)


class Gate:
    """Transfers whose copies stop until they are let through."""

    def __init__(self, capacity_bytes: int = MIB, shared_link: bool = False) -> None:
        self.transfers = Transfers(GatedTier(capacity_bytes), "cpu", shared_link)
        assert isinstance(self.transfers.tier, GatedTier)
        self._tier = self.transfers.tier

    def open(self) -> None:
        self._tier.gate.set()

    def reached(self, *keys: str) -> None:
        """Waits until copies of these have started, and checks that no others have."""
        deadline = time.monotonic() + 20
        while len(self.transfers.trace) < len(keys) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert [key for _, key in self.transfers.trace] == list(keys)


class GatedTier(tiers.HostTier):
    def __init__(self, capacity_bytes: int) -> None:
        self.gate = threading.Event()
        super().__init__(torch.device("cpu"), None)
        self.grow(capacity_bytes)

    def write(self, offset: int, address: int, count: int) -> None:
        assert self.gate.wait(20)
        super().write(offset, address, count)

    def read(self, offset: int, address: int, count: int) -> None:
        assert self.gate.wait(20)
        super().read(offset, address, count)


@pytest.fixture(name="gate")
def gate_fixture() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()
    gate.transfers.close()
