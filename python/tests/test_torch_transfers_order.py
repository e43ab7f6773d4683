"""Transfers return at once, copy in the order of submission, and keep to their places in the slab."""

from __future__ import annotations

import time
from pathlib import Path

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base._compat import StorageRef
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.offloading.transfers import TensorGroup, Transfers
from torch import Tensor
from transfers_support import (
    MIB,
    Gate,
    again,
    count_own_threads_fixture,  # noqa: F401
    gate_fixture,  # noqa: F401
    numbers,
    threads,
    transfers_fixture,  # noqa: F401
)

# -- order ---------------------------------------------------------------------------------------------------


def test_offload_and_prefetch_return_at_once(gate: Gate) -> None:
    group = gate.transfers.offload("x", [numbers(10)], 0)
    group.prefetch()
    gate.reached("x")
    gate.open()
    assert torch.equal(group.tensors()[0], numbers(10))
    assert gate.transfers.trace == [("offload", "x"), ("prefetch", "x")]


def test_both_lanes_copy_at_once_in_the_order_of_submission(gate: Gate) -> None:
    gate.open()
    first = gate.transfers.offload("first", [numbers(10)], 0)
    first.wait_out()
    gate._tier.gate.clear()
    second = gate.transfers.offload("second", [numbers(10)], 40)
    first.prefetch()
    third = gate.transfers.offload("third", [numbers(10)], 80)
    gate.reached("first", "second", "first")  # out and in at once, and the third waits for its lane
    gate.open()
    for group in (first, second, third):
        assert torch.equal(group.tensors()[0], numbers(10))
    kinds = ["offload", "offload", "prefetch", "offload", "prefetch", "prefetch"]
    assert gate.transfers.trace == list(
        zip(kinds, ["first", "second", "first", "third", "second", "third"], strict=True)
    )


def test_one_lane_where_the_link_is_shared() -> None:
    gate = Gate(shared_link=True)
    first = gate.transfers.offload("first", [numbers(10)], 0)
    gate.open()
    first.wait_out()
    gate._tier.gate.clear()
    second = gate.transfers.offload("second", [numbers(10)], 40)
    first.prefetch()
    gate.reached("first", "second")
    assert threads() == ["cairn-offload-prefetch"]
    gate.open()
    assert all(torch.equal(group.tensors()[0], numbers(10)) for group in (first, second))
    gate.transfers.close()


def test_a_place_is_written_again_when_it_has_been_read(gate: Gate) -> None:
    first = gate.transfers.offload("first", [numbers(10)], 0)
    first.prefetch()
    first.discard()
    second = gate.transfers.offload("second", [numbers(10, start=5)], 20)
    gate.reached("first")
    gate.open()
    assert torch.equal(second.tensors()[0], numbers(10, start=5))
    assert torch.equal(first.tensors()[0], numbers(10))


def test_a_copy_that_is_dropped_keeps_its_memory_until_it_has_ended(transfers: Transfers) -> None:
    sent = numbers(1000)
    storage = StorageRef(sent)
    group = transfers.offload("x", [sent], 0)
    group.prefetch()
    del sent, group
    again(transfers.offload("y", [numbers(1000)], 2000))
    transfers.begin_step()
    assert not storage.alive()


def test_a_step_that_failed_leaves_nothing_on_the_device(transfers: Transfers) -> None:
    source = numbers(100_000)
    storage = StorageRef(source)
    group = transfers.offload("a", [source], 0)
    group.prefetch()
    del source, group
    transfers.release()
    deadline = time.monotonic() + 10
    while storage.alive() and time.monotonic() < deadline:  # a thread may be at it
        time.sleep(0.001)
    assert not storage.alive()


@pytest.mark.parametrize("seed", range(4))
def test_random_transfers(seed: int, transfers: Transfers) -> None:
    """As a schedule would: groups come, return and go in any order, and the trace is the order of the calls."""
    torch.manual_seed(seed)
    groups: dict[int, tuple[TensorGroup, Tensor]] = {}
    calls = []
    for number in range(60):
        place = int(torch.randint(8, ()))
        if place not in groups:
            sent = torch.randn(int(torch.randint(1, 20_000, ())))
            groups[place] = transfers.offload(number, [sent], place * 80_000), sent.clone()
            calls.append(("offload", number))
            if torch.rand(()) < 0.5:
                groups[place][0].wait_out()
                sent.fill_(0)
                groups[place][0]._versions.clear()
        else:
            group, expected = groups[place]
            group.prefetch()
            calls.append(("prefetch", group.key))
            if torch.rand(()) < 0.5:
                group.discard()
                del groups[place]
            assert torch.equal(group.tensors()[0], expected)
    for group, _ in groups.values():
        group.wait_out()
    assert transfers.trace == calls


# -- places in the slab --------------------------------------------------------------------------------------


def test_places(transfers: Transfers) -> None:
    first = transfers.offload("first", [numbers(25)], 100)
    assert transfers.used_spans() == [range(100, 200)]
    for offset in (1, 100, 199):
        with pytest.raises(ValueError, match="where first is"):
            transfers.offload("second", [numbers(25)], offset)
    second = transfers.offload("second", [numbers(25)], 200)
    assert transfers.used_spans() == [range(100, 200), range(200, 300)]
    first.discard()
    first.discard()
    assert transfers.used_spans() == [range(200, 300)]
    with pytest.raises(ValueError, match="discarded"):
        first.prefetch()
    del second
    assert transfers.used_spans() == []


@pytest.mark.parametrize("offset", [-4, 8 * MIB - 396])
def test_outside_of_the_slab(offset: int, transfers: Transfers) -> None:
    with pytest.raises(ValueError, match=r"which has 8388608 \(8.00 MiB\)"):
        transfers.offload("x", [numbers(100)], offset)
    transfers.offload("x", [numbers(100)], 8 * MIB - 400).wait_out()


def test_another_device(tmp_path: Path) -> None:
    transfers = Transfers(open_tier("host", 10), "cpu")
    with pytest.raises(ct.Unsupported, match="on meta cannot be offloaded"):
        transfers.offload("x", [torch.ones(1, device="meta")], 0)
    with pytest.raises(ct.Unsupported, match="offloading from meta"):
        Transfers(open_tier("host", 0), "meta")
