"""`cairn.torch.offload`: steps bit for bit as without it, in less memory; failures that leave the next step sound."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cairn.torch as ct
import fake_streams
import pytest
import random_networks
import torch
import torch_models
from cairn.torch.offloading.copy_streams import CudaCopyStreams
from offload_support import KIB, NETWORKS, TIERS, Result, build, grads, moved, place, same, step
from torch import Tensor, nn


@functools.cache
def can_autocast(name: str) -> bool:
    """Whether plain torch runs a network in half precision: that of LSTMs is for some processors only."""
    model, x = build(name)
    try:
        step(model, x, contextlib.nullcontext(), autocast=True)
    except RuntimeError as error:
        assert name == "recurrent" and "primitive" in str(error)
        return False
    return True


@pytest.mark.parametrize("resident", [None, 0, 20 * KIB])
@pytest.mark.parametrize("kind", [*TIERS, "streams"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_bit_for_bit_the_plain_ones(
    name: str, kind: str, resident: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "streams":
        fake_streams.install(monkeypatch)
        monkeypatch.setattr("cairn.torch.offloading.transfers.copy_streams_for", CudaCopyStreams)
    plain_model, x = build(name)
    model, _ = build(name)
    saved = ct.offload(model, x, tier=place(kind, tmp_path), min_bytes=0, resident_bytes=resident)
    for autocast in (False, can_autocast(name), False):
        expected = step(plain_model, x, contextlib.nullcontext(), autocast)
        assert same(expected, step(model, x, saved, autocast))
        assert saved.offloaded_bytes == 0 < saved.capacity_bytes
        assert (resident == 0) <= (len(moved(saved, "prefetch")) > 1)


class Parts(nn.Module):
    """Parts of one storage that count their writes each by itself, one written after another was saved."""

    def __init__(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.linear, self.cut = nn.Linear(64, 128), cut

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.cut(self.linear(x))
        return a.sigmoid_() * b.tanh_() + x


class Cells(nn.Module):
    """Recurrent cells one after the other; their gates are such parts."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            state = cell(x)
            x = state[0] + state[1] if isinstance(state, tuple) else state
        return x


class Packed(nn.Module):
    """Of packed sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, **options)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.view(32, 8, 64), torch.arange(32, 24, -1))
        return self.lstm(packed)[0].data


#: What is written after autograd has saved it, without a word: by the function that saves it, or in another part.
LATE = {
    "unsafe_chunk": lambda: Parts(lambda y: y.unsafe_chunk(2, 1)),
    "unsafe_split": lambda: Parts(lambda y: y.unsafe_split(64, 1)),
    "LSTMCell": lambda: Cells(nn.LSTMCell),
    "GRUCell": lambda: Cells(nn.GRUCell),
    "LSTM of packed sequences": Packed,
    "LSTM with projections": lambda: Packed(proj_size=16),
    "RReLU": lambda: nn.Sequential(nn.Linear(64, 64), nn.RReLU(), nn.Linear(64, 64), nn.RReLU()),
    "RReLU in place": lambda: nn.Sequential(nn.Linear(64, 64), nn.RReLU(inplace=True), nn.Linear(64, 64)),
}


@pytest.mark.parametrize("kind", [*TIERS, "streams"])
@pytest.mark.parametrize("name", LATE)
def test_what_is_written_after_it_was_saved(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "streams":
        fake_streams.install(monkeypatch)
        monkeypatch.setattr("cairn.torch.offloading.transfers.copy_streams_for", CudaCopyStreams)
    torch.manual_seed(0)
    model, x = LATE[name](), torch.randn(256, 64)
    saved = ct.offload(model, tier=place(kind, tmp_path), min_bytes=0, resident_bytes=0)
    expected = step(model, x, contextlib.nullcontext())
    assert all(same(expected, step(model, x, saved)) for _ in range(3))
    assert saved.capacity_bytes > 0


def test_threads_send_what_they_have_saved_themselves(tmp_path: Path) -> None:
    saved, results = ct.offload(tier=place("file", tmp_path), min_bytes=0), {}

    def work(number: int) -> None:
        x = torch.full((1000,), float(number), requires_grad=True)
        with saved:
            loss = x.sin().exp().sum()
        loss.backward()
        assert x.grad is not None
        results[number] = x.grad

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, found in results.items():
        x = torch.full((1000,), float(number), requires_grad=True)
        x.sin().exp().sum().backward()
        assert x.grad is not None and torch.equal(found, x.grad)
    assert len(results) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("resident", [0, 20 * KIB, None])
@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_on_a_cuda_device(name: str, kind: str, resident: int | None, tmp_path: Path) -> None:
    model, x = build(name)
    model, x = model.cuda(), x.detach().cuda()
    initial = copy.deepcopy(model.state_dict())
    saved = ct.offload(model, x, tier=place(kind, tmp_path), min_bytes=0, resident_bytes=resident)
    results = []
    with torch.backends.cudnn.flags(deterministic=True):
        for context in (contextlib.nullcontext(), saved, saved):
            model.load_state_dict(initial)
            results.append(step(model, x, context))
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert saved.offloaded_bytes == 0 < saved.capacity_bytes


def outcome(model: nn.Module, loss_of: Callable[[], Tensor], context: Any) -> Result | str:
    """As `step`, or what error it ended in."""
    torch.manual_seed(1)
    try:
        with context:
            loss = loss_of()
        if loss.requires_grad:
            loss.backward()
    except RuntimeError as error:
        return "written in place" if "inplace operation" in str(error) else str(error)
    return [loss.detach(), *grads(model), *(b.clone() for b in model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("seed", range(60))
def test_random_networks_that_write_in_place(seed: int, tmp_path: Path) -> None:
    """Errors included: those of plain training, and no others."""
    results = []
    for offloading in (False, True):
        torch.manual_seed(seed)
        choose = random.Random(seed)
        model, x = random_networks.Network(seed), torch.randn(6, 6)
        named = [model] if choose.random() < 0.5 else []
        where, resident = place(choose.choice(TIERS), tmp_path), choose.choice([0, 200, 1000, None])
        saved = ct.offload(*named, tier=where, min_bytes=0, resident_bytes=resident, streams=choose.choice([1, 2]))
        results.append(outcome(model, functools.partial(model, x), saved if offloading else contextlib.nullcontext()))
    one, other = results
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
    else:
        assert same(*([t if t is None else t.nan_to_num() for t in result] for result in (one, other)))


@pytest.mark.parametrize("name", {**torch_models.ALL, **torch_models.ODD})
def test_models(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sample = torch_models.made(name)
    initial = copy.deepcopy(sample.model.state_dict())
    results = []
    for context in (
        contextlib.nullcontext(),
        ct.offload(sample.model, tier=f"file:{tmp_path}", min_bytes=0, resident_bytes=0),
    ):
        sample.model.load_state_dict(initial)
        sample.model.zero_grad()
        results.append(outcome(sample.model, sample.loss, context))
    assert not isinstance(results[0], str) and not isinstance(results[1], str)
    assert same(*results)
