"""Transfers that fail are clear errors, and the next step begins sound."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cairn.torch as ct
import fake_streams
import pytest
import torch
from cairn.torch.base._compat import StorageRef
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.offloading.transfers import Transfers
from executor_support import no_collector
from transfers_support import (
    MIB,
    Gate,
    again,
    count_own_threads_fixture,  # noqa: F401
    gate_fixture,  # noqa: F401
    numbers,
    transfers_fixture,  # noqa: F401
)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Transfers]:
    made = Transfers(open_tier(f"file:{tmp_path / 'slab'}", MIB), "cpu")
    yield made
    made.close()


def test_short_writes_and_reads_go_on(on_disk: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[: max(1, len(data) // 2)], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: read(fd, [into[0][:7]], offset))
    assert torch.equal(again(on_disk.offload("x", [numbers(2500)], 3))[0], numbers(2500))


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def nothing(*_: Any) -> int:
    return 0


def other(*_: Any) -> int:
    raise ValueError("something else")


@pytest.mark.parametrize(
    ("fault", "words"),
    [(full, "No space left on device"), (nothing, "nothing could be written at byte 40 of 1048576"), (other, "else")],
)
def test_a_failing_copy_out(
    fault: Callable[..., int], words: str, on_disk: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = on_disk.offload("first", [numbers(10)], 0)
    first.wait_out()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fault)
        second = on_disk.offload("second", [numbers(25)], 40)
        with pytest.raises(ct.TransferFailed) as caught:
            second.wait_out()
    for part in ("copying second (100 B, 100 bytes) to file:", str(on_disk.tier.name), words):
        assert part in str(caught.value)
    assert (caught.value.what, caught.value.nbytes) == ("second", 100)
    third = on_disk.offload("third", [numbers(10)], 200)
    for group in (third, first):  # nothing more is copied in this step
        with pytest.raises(ct.TransferFailed, match=f"copying {group.key} .* was cancelled.*copying second"):
            group.tensors()
    on_disk.begin_step()
    assert torch.equal(again(on_disk.offload("next", [numbers(10)], 0))[0], numbers(10))
    assert on_disk.trace == [("offload", "next"), ("prefetch", "next")]


def test_a_failing_copy_in(on_disk: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    group = on_disk.offload("x", [numbers(25)], 0)
    group.wait_out()
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", full)
        group.prefetch()
        with pytest.raises(ct.TransferFailed, match="copying x .* from file:.*No space"):
            group.tensors()
    on_disk.begin_step()
    with pytest.raises(ct.Unsupported, match="x was offloaded in a step that is over"):
        group.prefetch()


def test_errors_hold_on_to_nothing(on_disk: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    with no_collector():
        source = numbers(1000)
        storage = StorageRef(source)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            group = on_disk.offload("x", [source], 0)
            with pytest.raises(ct.TransferFailed):
                group.wait_out()
        del source, group
        on_disk.begin_step()
        assert not storage.alive()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread_can_be_started(on_disk: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            on_disk.offload("x", [numbers(10)], 0)
    on_disk.begin_step()
    assert torch.equal(again(on_disk.offload("x", [numbers(10)], 0))[0], numbers(10))


def test_a_step_begins_while_copies_are_under_way(gate: Gate) -> None:
    groups = [gate.transfers.offload(i, [numbers(10)], 40 * i) for i in range(4)]
    gate.reached(0)
    threading.Timer(0.05, gate.open).start()
    gate.transfers.begin_step()
    assert gate.transfers.trace == [] and gate.transfers.used_spans() == []
    new = gate.transfers.offload("new", [numbers(10, start=3)], 0)
    assert torch.equal(again(new)[0], numbers(10, start=3))
    with pytest.raises(ct.Unsupported):
        groups[1].wait_out()


@pytest.mark.parametrize("transfers", ["streams", "one stream"], indirect=True)
def test_a_step_begins_without_waiting_for_the_device(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a copy is under way that nobody has waited for: it has memory that is another's then."""
    groups = [transfers.offload(i, [numbers(10, start=i)], 40 * i) for i in range(3)]
    come_back = list(map(again, groups))
    with monkeypatch.context() as patched:
        patched.delattr(fake_streams.Stream, "synchronize")
        transfers.begin_step()
    sent = transfers.offload("next", [numbers(10, start=7)], 0)
    dropped = transfers.offload("dropped", [numbers(10)], 40)
    assert torch.equal(again(sent)[0], numbers(10, start=7))
    assert [int(tensor[0]) for [tensor] in come_back] == [0, 1, 2]
    del dropped
    transfers.begin_step()
    assert not transfers._copy_streams.unfinished()
