"""Transfers: what comes back is what went out, and the memory of what is out is freed."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base._compat import StorageRef
from cairn.torch.offloading import tiers
from cairn.torch.offloading.host_copies import HostCopies
from cairn.torch.offloading.tiers import open_tier
from cairn.torch.offloading.transfers import Layout, Transfers, group_bytes
from torch import Tensor
from transfers_support import (
    MIB,
    TIERS,
    Gate,
    again,
    count_own_threads_fixture,  # noqa: F401
    gate_fixture,  # noqa: F401
    numbers,
    transfers_fixture,  # noqa: F401
    where,
)

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
    copies.wait_out(7)
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
    assert transfers.used_spans() == []


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
