"""Device and host memory of steps under `cairn.torch.offload`."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.offloading.offload import Offload
from executor_support import no_collector
from offload_support import KIB, TIERS, Chain, build, moved, place, same, step, trace


@pytest.mark.parametrize("resident", [4 * KIB, 12 * KIB])
def test_what_is_out_is_freed_and_what_is_fetched_is_bounded(resident: int) -> None:
    x, model = torch.randn(1024, requires_grad=True), Chain()
    alive: list[int] = []
    with ct.offload(x, min_bytes=0, resident_bytes=resident) as saved:
        loss = model(x).sum()
    (store,) = saved._stores.values()
    assert model.alive() <= resident + 4096
    limit = resident + 4096  # one that is needed at once, beyond what may be fetched ahead
    make_resident = store._make_resident

    def noting(entry: Any) -> None:
        make_resident(entry)
        alive.append(store._resident_bytes)

    store._make_resident = noting  # type: ignore[method-assign]
    loss.backward()
    assert alive and max(alive) <= limit
    outs, ins = moved(saved, "offload"), moved(saved, "prefetch")
    assert outs == sorted(outs) and ins == sorted(ins, reverse=True)
    assert 8 - resident // 4096 == len(ins) <= len(outs) <= 8


def peak_needed(tier: str) -> int:
    saved = ct.offload(tier=tier, min_bytes=0)
    with saved:
        loss = Chain()(torch.randn(1024, requires_grad=True)).sum()
    needed = saved.offloaded_bytes
    del loss
    return needed


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("short", [0, 1])
def test_what_exceeds_the_host_budget_stays(kind: str, short: int, tmp_path: Path) -> None:
    tier = place(kind, tmp_path)
    needed = peak_needed(tier)
    assert needed == 8 * 4096
    x = torch.randn(1024, requires_grad=True)
    saved = ct.offload(x, tier=tier, min_bytes=0, resident_bytes=0, host_budget=needed - short)
    for _ in range(2):
        with saved:
            loss = Chain()(x).sum()
        assert saved.offloaded_bytes == (needed if short == 0 else needed - 4096)
        assert saved.capacity_bytes <= needed - short
        loss.backward()
        grad, x.grad = x.grad, None
        Chain()(x).sum().backward()
        assert grad is not None and torch.equal(grad, x.grad)
        x.grad = None


def test_no_host_memory_at_all() -> None:
    x = torch.randn(1024, requires_grad=True)
    with ct.offload(min_bytes=0, host_budget=0) as saved:
        loss = Chain()(x).sum()
    loss.backward()
    assert (saved.capacity_bytes, trace(saved)) == (0, [])


def test_training_under_a_cap_of_the_system(tmp_path: Path) -> None:
    """Plain training dies in a process that gets 45 MiB; with the file it finishes, with the same gradients."""
    program = textwrap.dedent("""
        import ctypes, resource, sys, threading, torch
        import cairn.torch as ct
        from torch import nn
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Tanh()) for _ in range(12)))
        x = torch.randn(2048, 256)
        way, room, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        saved = ct.offload(model, x, tier=f"file:{folder}", resident_bytes="8MiB")
        def step(x):
            if way == "plain":
                model(x).square().mean().backward()
            else:
                with saved:
                    loss = model(x).square().mean()
                loss.backward()
        step(x[:512])
        model.zero_grad()
        used = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData")) << 10
        if room:
            resource.setrlimit(resource.RLIMIT_DATA, (used + (room << 20),) * 2)
        try:
            for _ in range(2):
                step(x)
            print(sum(p.grad.double().sum().item() for p in model.parameters()))
        except RuntimeError as error:
            print("dead" if "can't allocate memory" in str(error) else error)
    """)

    def run(way: str, room: int) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, way, str(room), str(tmp_path)],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("plain", 45) == "dead\n"
    assert run("offload", 45) == run("plain", 0) != "dead\n"


def settle(saved: Offload) -> None:
    """Waits until the threads are done with copies that nobody wants any more."""
    deadline = time.monotonic() + 20
    while any(store.transfers._copy_streams.unfinished() for store in saved._stores.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("kind", TIERS)
def test_fifty_steps_leave_nothing_without_the_collector(kind: str, tmp_path: Path) -> None:
    model, x = build("attention")
    others = set(threading.enumerate())
    with no_collector():
        saved = ct.offload(model, x, tier=place(kind, tmp_path), min_bytes=0, resident_bytes=8 * KIB)
        counts, capacities = [], set()
        for _ in range(50):
            with saved:
                loss = model(x).sum()
            if len(counts) % 3:
                loss.backward()
            del loss
            settle(saved)
            counts.append(len(gc.get_objects()))
            capacities.add(saved.capacity_bytes)
        assert min(counts[-10:]) < min(counts[10:20]) + 15  # a leak of an object a step would be 30
        assert len(capacities) == 1
        gone = weakref.ref(saved)
        del saved
        assert gone() is None
        assert set(threading.enumerate()) <= others


def test_one_stream_for_both_directions() -> None:
    others = set(threading.enumerate())
    model, x = build("attention")
    expected = step(model, x, contextlib.nullcontext())
    saved = ct.offload(model, x, min_bytes=0, resident_bytes=0, streams=1)
    assert same(expected, step(model, x, saved))
    assert len(set(threading.enumerate()) - others) == 1


def test_a_graph_outlives_the_context() -> None:
    x = torch.randn(1024, requires_grad=True)
    with ct.offload(min_bytes=0, resident_bytes=0):
        loss = Chain()(x).sum()
    loss.backward()
    assert x.grad is not None
