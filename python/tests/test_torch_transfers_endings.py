"""Transfers end with their steps, the interpreter and forks, and leave nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.offloading.transfers import TensorGroup, Transfers
from executor_support import no_collector
from transfers_support import (
    MIB,
    TIERS,
    Gate,
    count_own_threads_fixture,  # noqa: F401
    gate_fixture,  # noqa: F401
    numbers,
    threads,
    transfers_fixture,  # noqa: F401
    where,
)


@pytest.mark.parametrize("kind", TIERS)
def test_fifty_steps_leave_nothing_without_the_collector(kind: str, tmp_path: Path) -> None:
    with no_collector():
        transfers = Transfers(open_tier(where(kind, tmp_path), MIB), "cpu")
        counts = []
        for _ in range(50):
            transfers.begin_step()
            groups = [transfers.offload(i, [numbers(100), numbers(50)], 600 * i) for i in range(5)]
            for group in groups:
                group.wait_out()
            for group in reversed(groups):
                group.prefetch()
                group.discard()
                group.tensors()
            del group, groups
            counts.append(len(gc.get_objects()))
            assert transfers.used_spans() == [] and len(threads()) == 2
        assert min(counts[-10:]) < min(counts[5:15]) + 15  # a leak of an object a step would be 35
        gone = weakref.ref(transfers)
        del transfers
        assert gone() is None and threads() == []


def test_threads_end_when_closed_and_waiting_copies_are_called_off(gate: Gate) -> None:
    groups = [gate.transfers.offload(i, [numbers(10)], 40 * i) for i in range(3)]
    gate.reached(0)
    threading.Timer(0.05, gate.open).start()
    gate.transfers.close()
    gate.transfers.close()
    assert threads() == []
    with pytest.raises(ct.TransferFailed, match="copying 2 .* was cancelled"):
        groups[2].wait_out()
    with pytest.raises(ct.Unsupported, match="was closed"):
        groups[0].prefetch()
    with pytest.raises(ct.Unsupported, match="was closed"):
        gate.transfers.offload("x", [numbers(10)], 0)


def test_dropped_parcels_are_not_copied(gate: Gate) -> None:
    groups = [gate.transfers.offload(i, [numbers(10)], 40 * i) for i in range(3)]
    gate.reached(0)
    last = groups.pop()
    groups.clear()
    gate.open()
    last.wait_out()
    assert gate.transfers.trace == [("offload", 0), ("offload", 2)]


PROGRAM = """
import torch
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.offloading.transfers import Transfers
transfers = Transfers(open_tier({where!r}, 1 << 26), "cpu")
groups = [transfers.offload(i, [torch.ones(1 << 20)], i << 22) for i in range(16)]
print("made")
"""


@pytest.mark.parametrize("kind", TIERS)
def test_the_interpreter_ends_while_copies_are_under_way(kind: str, tmp_path: Path) -> None:
    program = PROGRAM.format(where=where(kind, tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")
    assert list(tmp_path.iterdir()) == []


def in_fork(transfers: Transfers, group: TensorGroup, answers: Any) -> None:
    for attempt in (
        lambda: transfers.offload("y", [numbers(10)], 400),
        lambda: group.prefetch(),
        lambda: group.wait_out(),
        lambda: transfers.begin_step(),
    ):
        try:
            attempt()
            answers.put("went through")
        except ct.Unsupported as error:
            answers.put(str(error))
    transfers.close()


def test_a_fork_refuses(transfers: Transfers) -> None:
    group = transfers.offload("x", [numbers(10)], 0)
    group.wait_out()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=in_fork, args=(transfers, group, answers))
    child.start()
    said = [answers.get() for _ in range(4)]
    child.join(20)
    assert child.exitcode == 0
    assert all("set it up after the fork" in text for text in said), said
    assert torch.equal(group.tensors()[0], numbers(10))


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


def test_a_fork_does_not_have_the_slab() -> None:
    """Else workers that load data would each get a copy of it."""
    tier = open_tier("host", 4 * MIB)
    [piece] = tier.spans(0, 4 * MIB)
    address = piece.data_ptr()
    assert mapped(address)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(mapped(address)))
    child.start()
    assert answers.get() is False
    child.join(20)
    assert child.exitcode == 0


def test_the_file_is_no_memory_of_the_process(tmp_path: Path) -> None:
    """64 MiB go out and come back, 4 MiB at a time, in a process that may have 24 MiB more than it has."""
    program = textwrap.dedent(f"""
        import ctypes, resource, torch
        from cairn.torch.offloading.tiers import open_tier
        from cairn.torch.offloading.transfers import Transfers
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
        transfers = Transfers(open_tier("file:{tmp_path}/slab", 1 << 26), "cpu")
        transfers.offload("start the threads", [torch.ones(1)], 0).wait_out()
        used = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData")) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + (24 << 20),) * 2)
        groups = []
        for i in range(16):
            groups.append(transfers.offload(i, [torch.full((1 << 20,), float(i))], i << 22))
            groups[-1].wait_out()
        for i, group in enumerate(groups):
            assert torch.equal(group.tensors()[0], torch.full((1 << 20,), float(i)))
        try:
            torch.ones(1 << 23)
        except RuntimeError:
            print("capped")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "capped\n"), done.stderr
