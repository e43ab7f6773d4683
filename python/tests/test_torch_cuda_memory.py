"""What is measured on a CUDA device, with the counters of its caching allocator played."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch import memory

CUDA = torch.device("cuda", 0)
MIB = 1 << 20


class Allocator:
    """The counters of the caching allocator: what it was asked for, and what it took."""

    def __init__(self, backend: str = "native") -> None:
        self._backend = backend
        self._counters = {name: {"current": 0, "peak": 0} for name in ("requested_bytes", "allocated_bytes")}

    def take(self, asked: int, taken: int) -> None:
        """Memory is asked for, or given back (negative)."""
        asked = asked if self._backend == "native" else 0  # others do not count that
        for counter, size in zip(self._counters.values(), (asked, taken), strict=True):
            counter["current"] += size
            counter["peak"] = max(counter["peak"], counter["current"])

    def reset(self, device: Any = None) -> None:
        for counter in self._counters.values():
            counter["peak"] = counter["current"]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stats(device: Any = None) -> dict[str, Any]:
            return {name: {"all": dict(counter)} for name, counter in self._counters.items()}

        monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: self._backend)


def test_what_tensors_ask_for_adds_up_whatever_blocks_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    allocator.take(100 * MIB, 101 * MIB)
    allocator.install(monkeypatch)
    meter = memory.meter_for(CUDA)
    with meter:
        base = meter.mark()
        allocator.take(1500, 2048)
        allocator.take(11 * MIB, 12 * MIB)  # a free block whole
        full = meter.mark()
        allocator.take(-11 * MIB, -12 * MIB)
        empty = meter.mark()
    assert [meter.level(mark) for mark in (base, full, empty)] == [0, 11 * MIB + 1500, 1500]
    assert meter.peak(base, full) == meter.peak(base, empty) == 11 * MIB + 1500
    assert meter.peak(full, empty, fresh=True) == 11 * MIB + 1500
    assert meter.excess == pytest.approx((113 * MIB + 2048) / (111 * MIB + 1500) - 1)


def test_what_must_fit_is_what_the_allocator_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    allocator.install(monkeypatch)
    meter = memory.meter_for(CUDA, taken=True)
    with meter:
        base = meter.mark()
        allocator.take(11 * MIB, 12 * MIB)
        allocator.take(-11 * MIB, -12 * MIB)
        end = meter.mark()
    assert meter.peak(base, end) == 12 * MIB
    assert meter.level(end) == meter.excess == 0


def test_an_allocator_that_counts_only_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator("cudaMallocAsync")
    allocator.install(monkeypatch)
    meter = memory.meter_for(CUDA)
    with meter:
        base = meter.mark()
        allocator.take(3 * MIB, 3 * MIB)
        end = meter.mark()
    assert meter.peak(base, end) == meter.level(end) == 3 * MIB
    assert meter.excess == 0


def test_nothing_was_ever_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator().install(monkeypatch)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: {})
    meter = memory.meter_for(CUDA)
    with meter:
        assert meter.peak(meter.mark(), meter.mark()) == 0


def test_plans_leave_room_for_what_the_allocator_takes_beyond() -> None:
    step = torch_models.made("cnn")
    profile = ct.profile(step.model, **step.sample, passes=1)
    budget = ct.plan(profile, "1GiB")
    wasteful = ct.plan(dataclasses.replace(profile, excess=0.05), "1GiB")
    more = wasteful.reserve_bytes - budget.reserve_bytes
    assert more == int(0.05 * budget.plain_peak_bytes)
    assert wasteful.least_budget_bytes - budget.least_budget_bytes == more
    assert ct.Profile.from_json(dataclasses.replace(profile, excess=0.05).to_json()).excess == 0.05
