"""Tiers and transfers: what comes back is what went out, in the order of submission, and failures are clear."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cairn
import cairn.torch as ct
import fake_streams
import pytest
import torch
from cairn.torch.base import budgets
from cairn.torch.base._compat import StorageRef
from cairn.torch.base.cgroups import memory_limits
from cairn.torch.offloading import tiers
from cairn.torch.offloading.copy_streams import StagedLanes, StreamLanes
from cairn.torch.offloading.host_copies import HostCopies
from cairn.torch.offloading.link import _Loaded, measure_link
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.offloading.transfers import Layout, TensorGroup, Transfers, group_bytes
from executor_support import no_collector
from torch import Tensor

MIB = 1 << 20
TIERS = ("host", "file")


_others: set[threading.Thread] = set()  # those that tests before this one have left


@pytest.fixture(autouse=True)
def count_own_threads() -> None:
    _others.clear()
    _others.update(threading.enumerate())


def threads() -> list[str]:
    """The threads that copy, of this test alone."""
    mine = set(threading.enumerate()) - _others
    return [thread.name for thread in mine if thread.name.startswith("cairn-")]


def where(kind: str, folder: Path) -> str:
    return "host" if kind == "host" else f"file:{folder / 'slab'}"


@pytest.fixture(params=[*TIERS, "streams", "one stream", "staged"])
def transfers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    """Transfers of the CPU to both tiers, and as a CUDA device makes them: on two streams, on one, through a buffer."""
    lanes = {"streams": StreamLanes, "one stream": StreamLanes, "staged": StagedLanes}.get(request.param)
    if lanes is not None:
        fake_streams.install(monkeypatch)
        monkeypatch.setattr("cairn.torch.offloading.transfers.lanes_for", lanes)
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


# -- what comes back -----------------------------------------------------------------------------------------


def geometries() -> dict[str, list[Tensor]]:
    big = torch.randn(300, 200)
    bf16 = torch.randn(2, 3, 5, 7).to(torch.bfloat16)
    complexes = torch.randn(40, dtype=torch.complex64)
    return {
        "dense": [torch.randn(13, 7)],
        "channels_last": [bf16.to(memory_format=torch.channels_last)],
        "transposed": [big.t()],
        "part": [big[3:50, 1:]],
        "every second": [big[::2, 1::3]],
        "expanded": [torch.randn(5, 1).expand(5, 9)],
        "views of one storage": [big, big.t(), big[7], big.view(-1)[17:19]],
        "the same twice": [bf16, bf16],
        "two parts of one storage": [big[250:], big[:10]],
        "seen as bytes": [big.view(torch.uint8)[0, 3:], big[0, 2:]],
        "conjugated": [complexes.conj(), complexes.conj().imag],
        "empty": [torch.empty(0, 4), torch.empty(3, 0)],
        "empty parts": [big[300:], big[290:], big[:0]],
        "empty, beyond its storage": [torch.empty(0).as_strided((0,), (1,), 5)],
        "scalar": [torch.tensor(3.5, dtype=torch.float64)],
        "booleans": [torch.rand(33) < 0.5, torch.randint(9, (4, 4))],
        "not aligned": [torch.frombuffer(bytearray(range(33)), dtype=torch.int32, count=8, offset=1)],
        "with history": [torch.randn(4, requires_grad=True) * 2],
        "a parameter": [torch.nn.Parameter(torch.randn(3))],
        "nothing": [],
    }


@pytest.mark.parametrize("name", geometries())
def test_what_comes_back_is_what_went_out(name: str, transfers: Transfers) -> None:
    sent = geometries()[name]
    group = transfers.offload(name, sent, 64)
    assert group.bytes == group_bytes(sent)
    for received in (again(group), again(group)):
        assert len(received) == len(sent)
        for before, after in zip(sent, received, strict=True):
            assert torch.equal(before, after)
            assert (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype)
            assert (before.is_conj(), before.is_neg()) == (after.is_conj(), after.is_neg())
            assert not after.requires_grad and type(after) is Tensor
        assert sharing(sent) == sharing(received)
        assert not set(storages(sent)) & set(storages(received))


def storages(tensors: list[Tensor]) -> list[int]:
    return [t.untyped_storage()._cdata for t in tensors]


def sharing(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first one with the same storage."""
    keys = storages(tensors)
    return [keys.index(key) for key in keys]


@pytest.mark.parametrize("name", ["part", "two parts of one storage", "seen as bytes", "dense"])
def test_tensors_lie_as_they_did(name: str, transfers: Transfers) -> None:
    """Kernels look at addresses within a cache line."""
    sent = geometries()[name]
    received = again(transfers.offload(name, sent, 0))
    assert [t.data_ptr() % 64 for t in sent] == [t.data_ptr() % 64 for t in received]


def test_on_cuda_they_lie_as_they_did_within_what_libraries_look_at() -> None:
    tensor = numbers(512)[48:112]  # 192 bytes behind the storage's beginning
    [storage] = Layout([tensor]).storages
    base = tensor.untyped_storage().data_ptr()
    assert storage.lead == (base + 192) % 64
    assert dataclasses.replace(storage, device=torch.device("cuda")).lead == (base + 192) % 512


def test_results_on_another_device_stay_there() -> None:
    copies = HostCopies(torch.device("cpu"))
    results = [None, numbers(1000), torch.empty(3, device="meta"), numbers(10, 5)]
    copies.offload(7, results)
    copies.leave(7)
    assert copies.peak_bytes == 4040
    copies.prefetch(7)
    found = copies.take(7)
    assert found[0] is None and found[2] is results[2]
    assert all(torch.equal(found[i], results[i]) for i in (1, 3))
    copies.close()


def test_only_what_the_tensors_span_is_moved() -> None:
    big = torch.randn(1000, 1000)
    assert group_bytes([big[10:12]]) == 2 * 4000
    assert group_bytes([big[10:12], big[14:15]]) == 5 * 4000
    assert group_bytes([big, big.t(), big[3]]) == 4_000_000


def test_several_chunks(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.torch.offloading.copy_streams.CHUNK_BYTES", 1000)
    monkeypatch.setattr(tiers, "CHUNK_BYTES", 300)
    sent = [numbers(12345), numbers(777)]
    assert all(map(torch.equal, sent, again(transfers.offload("x", sent, 5))))


def test_a_tier_that_grew() -> None:
    tier = open_tier("host", 1001)
    transfers = Transfers(tier, "cpu")
    first = transfers.offload("first", [numbers(200)], 100)
    tier.grow(5003)
    second = transfers.offload("second", [numbers(1000)], 902)  # across the seam
    assert torch.equal(again(first)[0], numbers(200))
    assert torch.equal(again(second)[0], numbers(1000))


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).as_subclass(Wrapped),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["sparse", "subclass", "meta", "quantized", "nested"],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_is_no_plain_tensor_is_refused(make: Callable[[], Tensor], transfers: Transfers) -> None:
    with pytest.raises(ct.Unsupported, match="cannot be offloaded"):
        transfers.offload("x", [torch.ones(3), make()], 0)
    assert transfers.taken() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", TIERS)
def test_on_a_cuda_device(kind: str, tmp_path: Path) -> None:
    """Sources are overwritten as soon as they may be, while products keep the device busy."""
    transfers = Transfers(open_tier(where(kind, tmp_path), 64 * MIB, "cuda"), "cuda")
    busy = torch.randn(2048, 2048, device="cuda")
    for step in range(3):
        transfers.begin_step()
        groups = []
        for i in range(8):
            for _ in range(4):
                busy = (busy @ busy).tanh()
            sent = torch.full((1 << 20,), float(8 * step + i), device="cuda")
            groups.append(transfers.offload(i, [sent.view(1024, 1024).t(), sent[5:9]], i << 22))
            groups[-1].wait_out()
            sent.fill_(-1)
            groups[-1]._versions.clear()  # written on purpose
            del sent
        for i, group in reversed(list(enumerate(groups))):
            group.prefetch()
            group.discard()
            busy = (busy @ busy).tanh()
            whole, part = group.tensors()
            assert whole.stride() == (1, 1024) and whole.untyped_storage()._cdata == part.untyped_storage()._cdata
            assert bool((whole == 8 * step + i).all())
    transfers.close()


# -- when memory comes back ----------------------------------------------------------------------------------


def test_the_source_is_freed_when_it_is_out(transfers: Transfers) -> None:
    source = numbers(1000)
    alive = weakref.ref(source.untyped_storage())
    group = transfers.offload("x", [source], 0)
    storage = StorageRef(source)
    del source, alive
    group.wait_out()
    assert not storage.alive()


def test_the_source_lives_as_long_as_its_copy_needs_it(gate: Gate) -> None:
    source = numbers(1000)
    storage = StorageRef(source)
    group = gate.transfers.offload("x", [source], 0)
    del source
    gate.reached("x")
    assert storage.alive()
    gate.open()
    assert torch.equal(again(group)[0], numbers(1000))
    assert not storage.alive()


def test_what_came_back_belongs_to_the_caller(transfers: Transfers) -> None:
    group = transfers.offload("x", [numbers(10)], 0)
    received = again(group)
    storage = StorageRef(received[0])
    del received
    assert not storage.alive()


def test_a_change_after_offloading_is_noticed(transfers: Transfers) -> None:
    source = numbers(10)
    group = transfers.offload("x", [source.view(2, 5)], 0)
    group.wait_out()
    assert group.is_intact
    source.add_(1)
    assert not group.is_intact
    with pytest.raises(RuntimeError, match="x was modified by an inplace operation"):
        group.tensors()


# -- order ---------------------------------------------------------------------------------------------------


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


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()
    gate.transfers.close()


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
    assert transfers.taken() == [range(100, 200)]
    for offset in (1, 100, 199):
        with pytest.raises(ValueError, match="where first is"):
            transfers.offload("second", [numbers(25)], offset)
    second = transfers.offload("second", [numbers(25)], 200)
    assert transfers.taken() == [range(100, 200), range(200, 300)]
    first.discard()
    first.discard()
    assert transfers.taken() == [range(200, 300)]
    with pytest.raises(ValueError, match="discarded"):
        first.prefetch()
    del second
    assert transfers.taken() == []


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


# -- tiers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TIERS)
def test_host_budget(kind: str, tmp_path: Path) -> None:
    open_tier(where(kind, tmp_path), 1000, host_budget=1000).close()
    with pytest.raises(ct.TierUnavailable, match=r"needs 1001 B \(1001 bytes\).*host_budget leaves 1000 B"):
        open_tier(where(kind, tmp_path), 1001, host_budget=1000)
    tier = open_tier(where(kind, tmp_path), 0, host_budget="1KiB")
    tier.grow(1024)
    with pytest.raises(ct.TierUnavailable, match="host_budget"):
        tier.grow(1025)
    assert tier.capacity_bytes == 1024
    assert open_tier(where(kind, tmp_path), 0, host_budget=0).capacity_bytes == 0


def test_more_host_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 5000)
    tier = open_tier("host", 3000)
    with pytest.raises(ct.TierUnavailable, match=r"5001 bytes.*5000 bytes\) are available.*tier='file:PATH'"):
        tier.grow(8001)
    tier.grow(8000)
    assert tier.capacity_bytes == 8000


def test_limits_of_control_groups(tmp_path: Path) -> None:
    files = {
        "self": "4:cpu:/a\n3:blkio,memory:/box/inner\n0::/work\n",
        "memory/box/inner/memory.limit_in_bytes": "5000\n",
        "memory/box/inner/memory.usage_in_bytes": "4000\n",
        "memory/box/inner/memory.stat": "cache 7\ninactive_file 1\ntotal_inactive_file 1500\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "9000\n",
        "work/memory.max": "8000\n",
        "work/memory.current": "100\n",
        "memory.max": "max\n",
        "memory.current": "1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limits(tmp_path / "self", tmp_path) == [(5000, 2500), (8000, 100)]
    assert memory_limits(tmp_path / "none", tmp_path) == []


def test_a_file_is_as_large_as_it_was_asked_for_and_leaves_nothing(tmp_path: Path) -> None:
    tier = open_tier(f"file:{tmp_path / 'slab'}", 3 * MIB + 17)
    descriptors = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    (found,) = [d for d in descriptors if d.is_symlink() and str(tmp_path) in os.readlink(d)]
    assert found.stat().st_size == 3 * MIB + 17
    assert found.stat().st_blocks * 512 >= 3 * MIB + 17  # really there
    assert list(tmp_path.iterdir()) == []
    tier.close()
    tier.close()
    assert not found.exists()


def test_a_folder_is_a_place_for_a_file(tmp_path: Path) -> None:
    assert open_tier(f"file:{tmp_path}", 100).capacity_bytes == 100


def test_no_place_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ct.TierUnavailable, match=f"{tmp_path}/no/slab.*No such file") as caught:
        open_tier(f"file:{tmp_path}/no/slab", 100)
    assert caught.value.file == f"{tmp_path}/no/slab"
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("text", ["disk", "file:", "file", ""])
def test_no_such_tier(text: str) -> None:
    with pytest.raises(ct.Unsupported, match="'host' or 'file:PATH'"):
        open_tier(text, 100)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(tmp_path), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"a small disk cannot be mounted: {os.strerror(ctypes.get_errno())}")
    yield tmp_path
    libc.umount2(bytes(tmp_path), 2)  # MNT_DETACH: a file may still be open


def test_a_full_disk_is_an_error_when_the_tier_is_opened(small_disk: Path) -> None:
    with pytest.raises(ct.TierUnavailable) as caught:
        open_tier(f"file:{small_disk}/slab", MIB + 1)
    for part in ("1048577 bytes", f"{small_disk}/slab", "1048576 bytes) are free", "No space left on device"):
        assert part in str(caught.value)
    tier = open_tier(f"file:{small_disk}/slab", MIB // 2)  # all of the disk is free again
    with pytest.raises(ct.TierUnavailable):
        tier.grow(2 * MIB)
    assert tier.capacity_bytes == MIB // 2
    tier.grow(MIB)


def test_a_file_larger_than_the_system_allows(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(ct.TierUnavailable, match="File too large"):
            open_tier(f"file:{tmp_path}/slab", MIB + 1)
        open_tier(f"file:{tmp_path}/slab", MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- failures ------------------------------------------------------------------------------------------------


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
    assert gate.transfers.trace == [] and gate.transfers.taken() == []
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
    assert not transfers._lanes.unfinished()


# -- endings -------------------------------------------------------------------------------------------------


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
            assert transfers.taken() == [] and len(threads()) == 2
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


# -- the link ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", TIERS)
def test_the_link_is_measured(kind: str, cached: bool, tmp_path: Path) -> None:
    link = measure_link("cpu", where(kind, tmp_path), cached=cached)
    assert 0 <= link.slowdown <= 1
    assert 1e6 < link.to_host_bytes_per_s < 1e12 and 1e6 < link.to_device_bytes_per_s < 1e12
    assert 0 <= link.latency_ns < 1e9
    assert link.machine(1 << 30) == cairn.Machine(
        1 << 30, link.to_host_bytes_per_s, link.to_device_bytes_per_s, True, link.latency_ns
    )
    assert threads() == []


def test_slow_and_fast_copies_tell_rate_and_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {64 << 10: 0.5, 16 << 20: 4.5}
    monkeypatch.setattr("cairn.torch.offloading.link._times", lambda _, count, __: (seconds[count], 2 * seconds[count]))
    link = measure_link(cached=False)
    rate = ((16 << 20) - (64 << 10)) / 4
    assert (link.to_host_bytes_per_s, link.to_device_bytes_per_s) == (int(rate), int(rate / 2))
    assert link.latency_ns == pytest.approx((0.5 - 65536 / rate + 1 - 65536 / (rate / 2)) / 2 * 1e9, abs=2)


def test_copies_beside_a_computation_count_where_the_cache_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.torch.offloading.link._times", lambda _, count, __: (count / 1e9, count / 1e9))
    loaded = _Loaded((64 << 10) / 1e9 + (255 << 16) / 5e8, (64 << 10) / 1e9 + (255 << 16) / 2.5e8, 0.25)
    monkeypatch.setattr("cairn.torch.offloading.link._loaded", lambda _: loaded)
    beside = measure_link()
    assert beside.to_host_bytes_per_s == pytest.approx(5e8, rel=1e-6)
    assert beside.to_device_bytes_per_s == pytest.approx(2.5e8, rel=1e-6)
    assert measure_link(cached=False).to_host_bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert beside.slowdown == 0.25


def test_what_is_measured_without_the_cache_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy out is followed by one flush and one advice to forget, before the copy in."""
    done: list[str] = []
    plainly = os.preadv
    monkeypatch.setattr("os.fdatasync", lambda file: done.append("flush"))
    monkeypatch.setattr("os.posix_fadvise", lambda *_: done.append("forget"))
    monkeypatch.setattr("os.preadv", lambda *args: done.append("read") or plainly(*args))
    measure_link("cpu", f"file:{tmp_path}", cached=False)
    first = done[: done.index("read")]
    assert first == ["flush", "forget"]
    assert done.count("flush") == done.count("forget") == 16  # two sizes, the median of seven, and one before
    done.clear()
    measure_link("cpu", f"file:{tmp_path}")
    assert set(done) == {"read"}


def test_a_folder_that_is_not_there_is_no_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ct.TierUnavailable, match="no folder"):
        open_tier(f"file:{tmp_path}/none/", 4096, host_budget=None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    open_tier("file:~", 4096, host_budget=None).close()
