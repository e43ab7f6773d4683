"""What is measured on a CUDA device, with the counters of its caching allocator played."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.base import budgets, memory
from cairn.torch.base.errors import TierUnavailable
from cairn.torch.offloading.link import measure_link
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.profiling import overhead, profileable

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

    @property
    def taken(self) -> int:
        return self._counters["allocated_bytes"]["current"]

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
    allocator.take(100 * MIB, 150 * MIB)
    allocator.take(0, -49 * MIB)
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


def test_meters_of_models_that_train_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees the peaks that the others' marks end, and what was there before it in none."""
    allocator = Allocator()
    allocator.install(monkeypatch)
    first, second = memory.meter_for(CUDA), memory.meter_for(CUDA, taken=True)
    with first:
        begins = first.mark()
        allocator.take(5 * MIB, 6 * MIB)
        allocator.take(-4 * MIB, -5 * MIB)
        with second:
            begin = second.mark()
            allocator.take(2 * MIB, 3 * MIB)
            allocator.take(-2 * MIB, -3 * MIB)
            end = second.mark()
        allocator.take(1 * MIB, 1 * MIB)
        ends = first.mark()
    assert first.peak(begins, ends) == 5 * MIB and first.level(ends) == 2 * MIB
    assert second.peak(begin, end) == 3 * MIB and second.level(end) == 0


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


def test_what_libraries_keep_is_what_a_product_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    allocator.take(3 * MIB, 3 * MIB)
    ones = torch.ones

    def made(size: Any, device: Any, requires_grad: bool = False) -> Any:
        allocator.take(8 * MIB, 8 * MIB)  # what the threads that use it keep
        return ones(size, requires_grad=requires_grad)

    monkeypatch.setattr(torch, "ones", made)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocator.taken)
    assert memory.library_bytes(torch.device("cpu")) == 0
    assert memory.library_bytes(CUDA) == 16 * MIB

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Deterministic behavior was enabled, but cuBLAS is not configured for it")

    monkeypatch.setattr(torch, "ones", refused)
    assert memory.library_bytes(CUDA) == 0


@pytest.mark.parametrize(
    ("model", "sample", "found"),
    [
        (["cuda:0"], ["cuda:0", "cpu"], "cuda:0"),  # the lengths of packed sequences
        (["cuda:0"], ["cpu"], "cuda:0"),  # which the model moves itself
        (["cpu"], ["cpu"], "cpu"),
        ([], ["cpu"], "cpu"),
        ([], ["cpu", "cuda:1"], "cuda:1"),
        (["cpu"], ["cuda:0"], None),
        (["cuda:0", "cpu"], ["cuda:0"], None),
        (["cuda:0"], ["cuda:1"], None),
    ],
)
def test_a_sample_may_lie_on_the_host_in_part(model: list[str], sample: list[str], found: str | None) -> None:
    placed, given = ([SimpleNamespace(device=torch.device(d), dim=lambda: 1) for d in of] for of in (model, sample))
    step = SimpleNamespace(model=SimpleNamespace(parameters=lambda: placed, buffers=list), static_tensors=lambda: given)
    with contextlib.nullcontext() if found else pytest.raises(ct.Unsupported, match="several devices"):
        assert profileable.device_of(step) == torch.device(found or "cpu")


# -- budgets, and the host's memory ----------------------------------------------------------------------------


def test_a_process_that_may_have_a_part_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * MIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * MIB, 80 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * MIB)
    share = [1.0]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share[0], raising=False)
    assert (budgets.total_bytes(CUDA), budgets.free_bytes(CUDA)) == (80 * MIB, 62 * MIB)
    share[0] = 0.5
    assert (budgets.total_bytes(CUDA), budgets.free_bytes(CUDA)) == (40 * MIB, 30 * MIB)
    assert budgets.resolve("50%", CUDA) == 20 * MIB
    share[0] = 0.1
    assert budgets.free_bytes(CUDA) == 0
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert budgets.free_bytes(CUDA) == 62 * MIB


class Runtime:
    """CUDA's: it pins nothing, and remembers that for whoever asks next."""

    def __init__(self) -> None:
        self.has_failed = False

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        self.has_failed = True
        return 2

    def launch(self, *_: Any, **__: Any) -> None:
        """A kernel."""
        if self.has_failed:
            self.has_failed = False
            raise RuntimeError("CUDA error: out of memory")


def test_a_slab_that_cannot_be_pinned_is_an_error_here_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    with pytest.raises(TierUnavailable, match="cannot be pinned"):
        open_tier("host", MIB, CUDA)
    assert not runtime.has_failed


def test_pinning_uses_no_device_but_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    current, used = [torch.device("cuda", 0)], []

    @contextlib.contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def call(*_: Any) -> int:
        used.append(current[-1])
        return 0

    runtime = SimpleNamespace(cudaHostRegister=call, cudaHostUnregister=call)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    other = torch.device("cuda", 1)
    open_tier("host", MIB, other).close()
    assert used == [other, other]


def test_a_default_device_is_for_the_model_alone() -> None:
    """What a plan needs on the host is made there. (The default is one on which nothing works.)"""
    with torch.device("meta"):
        overhead.cost.cache_clear()
        with torch.device("cpu"):
            step = torch_models.made("gpt2")
        profile = ct.profile(step.model, **step.sample, passes=1)
        points = ct.sweep(profile, 3, host_budget="1GiB", link="20GB/s")
        made = ct.plan(profile, points[1].budget_bytes, host_budget="1GiB", link="20GB/s")
        assert ct.verify(step.model, made, **step.sample).ok
        assert measure_link("cpu").to_host_bytes_per_s > 1


class Masked(torch.nn.Module):
    """A block with a small buffer that autograd saves, and nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.register_buffer("mask", torch.rand(240, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.mask


def test_copies_of_buffers_that_nobody_compares_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device they stay until a block's backward, for comparing would wait. (Here the CPU stands for it.)"""
    model = torch.nn.Sequential(*(Masked() for _ in range(6)))
    x, copied = torch.randn(240, 64), "random states and buffers to replay"

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    before = ct.profile(model, x, loss_fn=loss_fn, passes=1).resident[copied]
    monkeypatch.setattr(memory, "is_at_hand", lambda tensor: False)
    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    assert profile.resident[copied] - before >= 7 * model[0].mask.nbytes
    for point in ct.sweep(profile, 4):
        assert ct.verify(model, ct.plan(profile, point.budget_bytes), x, loss_fn=loss_fn).ok


def test_a_step_of_training_takes_until_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))), torch.randn(16, 32)
    ct.checkpoint(model, x, loss_fn=torch.sum, budget="1GiB", passes=1)
    monkeypatch.setattr("cairn.torch.base.clock.wait_for", lambda device: time.sleep(0.05))
    model(x).sum().backward()
    measured = ct.report(model).measured
    assert measured is not None and measured.step_ns >= 50_000_000
