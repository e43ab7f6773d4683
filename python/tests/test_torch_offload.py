"""`cairn.torch.offload`: steps bit for bit as without it, in less memory; failures that leave the next step sound."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cairn.torch as ct
import fake_streams
import pytest
import random_networks
import torch
import torch_models
from cairn.torch.base._compat import StorageRef, saved_tensor_hooks_are_active
from cairn.torch.offloading.copy_streams import StreamLanes
from cairn.torch.offloading.offload import Offload
from executor_support import no_collector
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

TIERS = ("host", "file")
KIB = 1 << 10


def place(kind: str, folder: Path) -> str:
    return f"file:{folder}" if kind == "file" else "host"


# -- networks ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Views of one storage, a mask, softmax, dropout, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("mask", torch.ones(24, 24).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, -1e9).softmax(-1)
        return x + self.out(nn.functional.dropout(weights, 0.2) @ v)


class Tower(nn.Module):
    """Shared weights and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = nn.functional.relu(self.again(x.tanh()), inplace=True)
        return self.first(x)


def convolutions() -> nn.Module:
    layers = []
    for _ in range(2):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention": (lambda: nn.Sequential(Attention(), Attention()), lambda: torch.randn(4, 24, 16)),
    "convolutions": (
        convolutions,
        lambda: torch.randn(4, 4, 16, 16).to(memory_format=torch.channels_last).requires_grad_(),
    ),
    "tower": (Tower, lambda: torch.randn(40, 16)),
    "recurrent": (lambda: nn.LSTM(16, 16, 2, dropout=0.1), lambda: torch.randn(9, 5, 16)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, sample = NETWORKS[name]
    return model(), sample()


Result = list[Tensor | None]


def step(model: nn.Module, x: Tensor, context: Any, autocast: bool = False) -> Result:
    """Loss, gradients, buffers and random state after a step."""
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    with context, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(x)
        loss = (output[0] if isinstance(output, tuple) else output).float().square().mean()
        del output
    loss.backward()
    grads = [None if p.grad is None else p.grad.clone() for p in (*model.parameters(), x)]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


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


def same(one: Result, other: Result) -> bool:
    return len(one) == len(other) and all(
        a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def trace(saved: Offload) -> list[tuple[str, Any]]:
    """The copies that were begun, as soon as none waits."""
    for store in saved._stores.values():
        line = getattr(store.transfers._lanes, "_line", None)
        if line is not None:
            with line.changed:
                assert line.changed.wait_for(lambda line=line: not line.waiting, timeout=30)
    return [each for store in saved._stores.values() for each in store.transfers.trace]


def moved(saved: Offload, kind: str) -> list[int]:
    return [int(key.split()[-1]) for name, key in trace(saved) if name == kind]


# -- exactness -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [None, 0, 20 * KIB])
@pytest.mark.parametrize("kind", [*TIERS, "streams"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_bit_for_bit_the_plain_ones(
    name: str, kind: str, resident: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "streams":
        fake_streams.install(monkeypatch)
        monkeypatch.setattr("cairn.torch.offloading.transfers.lanes_for", StreamLanes)
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
        monkeypatch.setattr("cairn.torch.offloading.transfers.lanes_for", StreamLanes)
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


class Strides(torch.autograd.Function):
    seen: list[tuple[Any, ...]] = []

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return sum(t.sum() for t in tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Strides.seen = [geometry(t) for t in ctx.saved_tensors]
        again = [geometry(t) for t in ctx.saved_tensors]
        assert again == Strides.seen
        return tuple(grad.expand(t.shape) for t in ctx.saved_tensors)


def geometry(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.data_ptr() % 64


def test_saved_tensors_look_as_they_did() -> None:
    base = torch.randn(6, 8, 4, 4, requires_grad=True) * 1
    tensors = [
        base.to(memory_format=torch.channels_last),
        base[2:, 1::2],
        base.transpose(0, 1),
        base.expand(2, 6, 8, 4, 4),
    ]
    expected = [geometry(t) for t in tensors]
    with ct.offload(min_bytes=0, resident_bytes=0) as saved:
        loss = Strides.apply(*tensors)
    del tensors, base
    loss.backward()
    assert Strides.seen == expected
    assert len(moved(saved, "offload")) == 2  # of three views one storage


def test_one_copy_of_each_state_of_a_storage() -> None:
    x = torch.randn(1000, requires_grad=True)
    with ct.offload(min_bytes=0, resident_bytes=0) as saved:
        h = x * 2
        loss = (h * h + h.sin() + h.cos() + h[3:10].exp().sum()).sum()
        assert moved(saved, "offload") == [0]  # h; the result of exp waits until another function saves
        with torch.no_grad():
            h.mul_(1)
        squares = (h * h).sum()
    del loss, squares
    assert moved(saved, "offload") == [0, 1, 2]


def test_parameters_buffers_and_what_is_named_stay() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval()), torch.randn(4, 8)
    with ct.offload(model, x, min_bytes=0) as saved:
        loss = model(x).sum()
    assert moved(saved, "offload") == [0]  # what the normalisation reads
    with ct.offload(x, min_bytes=0) as saved:
        y = torch.nn.functional.linear(x, model[0].weight.t().t())  # a view of a leaf is known without the model
    assert trace(saved) == []
    del loss, y


def test_what_someone_keeps_is_not_copied_back() -> None:
    x = torch.randn(100)
    weight = torch.randn(100, requires_grad=True)
    with ct.offload(min_bytes=0, resident_bytes=0) as saved:
        loss = (weight * x).sum()
    loss.backward()
    assert weight.grad is not None and torch.equal(weight.grad, x)
    assert (moved(saved, "offload"), moved(saved, "prefetch")) == ([0], [])


def test_small_storages_stay() -> None:
    x = torch.randn(2048, requires_grad=True)
    for least, count in (("8KiB", 1), (8193, 0)):
        with ct.offload(min_bytes=least) as saved:
            (x * 1).exp().sum()
        assert len(trace(saved)) <= count == (0 if least == 8193 else 1)


class Wrapped(Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_is_not_plain_bytes_stays() -> None:
    sparse = torch.eye(4).to_sparse()
    x = torch.randn(4, 4, requires_grad=True)
    with ct.offload(min_bytes=0, resident_bytes=0) as saved:
        loss = torch.sparse.mm(sparse, x).sum() + (x.as_subclass(Wrapped) * torch.ones(4, 4).as_subclass(Wrapped)).sum()
    assert trace(saved) == []
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 4), 2.0))


# -- writes in place -----------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda h: h.add_(1),
    "a view": lambda h: h[2:3].zero_(),
    "without gradients": lambda h: h.detach().mul_(2),
}


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("resident", [0, None])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("least", [0, 1 << 20])
def test_a_saved_tensor_that_is_written_is_an_error(
    change: str, resident: int | None, output: bool, least: int
) -> None:
    for context in (contextlib.nullcontext(), ct.offload(min_bytes=least, resident_bytes=resident)):
        x = torch.randn(5, requires_grad=True)
        with context:
            h = (x * 1).exp() if output else x * 1
            loss = h.sum() if output else h.sin().sum()
            CHANGES[change](h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_before_saving_is_none() -> None:
    x = torch.randn(5, requires_grad=True)
    with ct.offload(min_bytes=0, resident_bytes=0):
        h = (x * 1).add_(1).relu_()
        loss = (h * h).sum()
    loss.backward()
    assert x.grad is not None
    grad, x.grad = x.grad, None
    ((x * 1).add_(1).relu_() ** 2).sum().backward()
    assert torch.equal(grad, x.grad)


# -- other ways to differentiate -----------------------------------------------------------------------------


@pytest.fixture(params=[0, 6 * KIB, None])
def context(request: pytest.FixtureRequest) -> Offload:
    return ct.offload(min_bytes=0, resident_bytes=request.param)


def both(context: Offload, run: Callable[[nn.Module, Tensor, Any], Result]) -> None:
    results = []
    for each in (contextlib.nullcontext(), context):
        model, x = build("attention")
        torch.manual_seed(2)
        results.append(run(model, x, each))
    assert same(*results)
    assert context.offloaded_bytes == 0 < context.capacity_bytes


def grads(model: nn.Module) -> Result:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_retain_graph(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        with within:
            loss = model(x).square().sum()
        first = []
        for _ in range(2):
            loss.backward(retain_graph=True)
            first += grads(model)
        loss.backward()
        return first + grads(model)

    both(context, run)


def test_a_kept_graph_makes_way_for_itself() -> None:
    """What a kept graph has read is not resident for ever."""
    model, x = build("attention")
    saved = ct.offload(model, x, min_bytes=0, resident_bytes=10 * KIB)
    with saved:
        loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    (store,) = saved._stores.values()
    live = [e for reference in store._entries if (e := reference()) is not None]
    assert sum(e.nbytes for e in live if e.whole is not None) <= 10 * KIB < sum(e.nbytes for e in live)


def test_double_backward(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        x = x.clone().requires_grad_()
        with within:
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            loss = grad.square().sum()
        loss.backward()
        return [*grads(model), x.grad]

    both(context, run)


def test_parts_of_the_gradient(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        with within:
            middle = model[0](x)
            loss = model[1](middle).square().sum()
        (grad,) = torch.autograd.grad(loss, middle, retain_graph=True)
        return [grad, *torch.autograd.grad(loss, list(model.parameters()))]

    both(context, run)


def test_several_forwards_before_the_backwards(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        losses = []
        for scale in (1, 2, 3):
            with within:
                losses.append(model(x * scale).square().sum())
        for index in (1, 0, 2):
            losses[index].backward()
        return grads(model)

    both(context, run)


@pytest.mark.parametrize("resident", [20 * KIB, 50 * KIB])
def test_a_forward_after_storages_of_an_earlier_one_were_fetched_ahead(resident: int) -> None:
    context = ct.offload(min_bytes=0, resident_bytes=resident)

    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        losses: list[Tensor] = []
        for what in (None, None, 1, None, 2, 0):
            if what is None:
                with within:
                    losses.append(model(x * len(losses)).square().sum())
            else:
                losses[what].backward()
        return grads(model)

    both(context, run)
    (store,) = context._stores.values()
    store._is_over()
    assert store._resident_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside(context: Offload, reentrant: bool) -> None:
    """Offloaded are then the inputs of what is run again."""

    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        x = x.clone().requires_grad_()
        with within:
            for layer in model:
                x = checkpoint(layer, x * 1, use_reentrant=reentrant)
            loss = x.square().sum()
        loss.backward()
        return grads(model)

    both(context, run)


def test_other_hooks_inside_have_their_way(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        with within:
            with torch.autograd.graph.save_on_cpu():
                x = model[0](x)
            loss = model[1](x).square().sum()
        loss.backward()
        return grads(model)

    both(context, run)


def test_as_a_decorator_and_entered_twice(context: Offload) -> None:
    def run(model: nn.Module, x: Tensor, within: Any) -> Result:
        def forward() -> Tensor:
            return model(x).square().sum()

        forward = context(forward) if within is context else forward
        with within:
            forward().backward()
        return grads(model)

    both(context, run)


def test_models_in_threads(tmp_path: Path) -> None:
    saved = ct.offload(tier=f"file:{tmp_path}", min_bytes=0, resident_bytes=KIB)
    model, x = build("tower")
    expected = step(model, x, contextlib.nullcontext())[:-1]
    wrong = []

    def train() -> None:
        mine, x = model_of_thread()
        for _ in range(5):
            mine.zero_grad()
            with saved:
                loss = mine(x).float().square().mean()
            loss.backward()
            if not same(expected, [loss.detach(), *grads(mine), None]):
                wrong.append(1)

    lock = threading.Lock()

    def model_of_thread() -> tuple[nn.Module, Tensor]:
        with lock:
            return build("tower")

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and saved.offloaded_bytes == 0


# -- memory --------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Eight storages of 4 KiB are saved, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        self.storages = []
        for _ in range(8):
            x = x.tanh()
            self.storages.append(StorageRef(x))
        return x

    def alive(self) -> int:
        return sum(4096 for storage in self.storages if storage.alive())


@pytest.mark.parametrize("resident", [4 * KIB, 12 * KIB])
def test_what_is_out_is_freed_and_what_is_fetched_is_bounded(resident: int) -> None:
    x, model = torch.randn(1024, requires_grad=True), Chain()
    alive: list[int] = []
    with ct.offload(x, min_bytes=0, resident_bytes=resident) as saved:
        loss = model(x).sum()
    (store,) = saved._stores.values()
    assert model.alive() <= resident + 4096
    limit = resident + 4096  # one that is needed at once, beyond what may be fetched ahead
    admit = store._admit

    def noting(entry: Any) -> None:
        admit(entry)
        alive.append(store._resident_bytes)

    store._admit = noting  # type: ignore[method-assign]
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
    while any(store.transfers._lanes.unfinished() for store in saved._stores.values()):
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


# -- failures ------------------------------------------------------------------------------------------------


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fault", ["pwrite", "preadv"])
def test_a_failing_copy(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("attention")
    expected = step(model, x, contextlib.nullcontext())
    saved = ct.offload(model, x, tier=f"file:{tmp_path}", min_bytes=0, resident_bytes=8 * KIB)
    assert same(expected, step(model, x, saved))
    with monkeypatch.context() as patched:
        patched.setattr(os, fault, full)
        with pytest.raises(ct.TransferFailed, match=f"copying saved storage .*{tmp_path}.*No space left on device"):
            step(model, x, saved)
    for _ in range(2):
        assert same(expected, step(model, x, saved))


def test_a_failing_copy_and_the_graph_of_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read that was not written: what the failed step has left behind is refused by name."""
    model, x = build("attention")
    saved = ct.offload(model, x, tier=f"file:{tmp_path}", min_bytes=0, resident_bytes=8 * KIB)
    with saved:
        earlier = model(x).sum()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ct.TransferFailed):
            step(model, x, saved)
    with pytest.raises((ct.TransferFailed, ct.Unsupported), match="cancelled|step that is over"):
        earlier.backward(retain_graph=True)  # what it passes before it fails stays
    step(model, x, saved)
    with pytest.raises(ct.Unsupported, match="step that is over"):
        earlier.backward()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("attention")
    expected = step(model, x, contextlib.nullcontext())
    saved = ct.offload(model, x, tier=f"file:{tmp_path}", min_bytes=0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ct.TierUnavailable, match=f"{tmp_path}.*are free: No space left on device"):
            step(model, x, saved)
    assert same(expected, step(model, x, saved))


def test_an_exception_in_the_forward_and_in_the_backward(context: Offload) -> None:
    model, x = build("attention")
    expected = step(model, x, contextlib.nullcontext())

    def stop(*_: Any) -> None:
        raise KeyError("stop")

    for where in (model[1].register_forward_hook, model[0].out.weight.register_hook):
        handle = where(stop)
        with pytest.raises(KeyError):
            step(model, x, context)
        handle.remove()
        assert same(expected, step(model, x, context))
        assert not saved_tensor_hooks_are_active()


def test_a_closed_one_refuses() -> None:
    x = torch.randn(1024, requires_grad=True)
    saved = ct.offload(min_bytes=0, resident_bytes=0)
    with saved:
        loss = Chain()(x).sum()
    saved.close()
    saved.close()
    with pytest.raises(ct.Unsupported, match="was closed"):
        loss.backward()
    with pytest.raises(ct.Unsupported, match="was closed"), saved:
        pass


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"tier": "disk"}, ct.Unsupported, "'host' or 'file:PATH'"),
        ({"tier": "file:/nonexistent/slab"}, ct.TierUnavailable, "/nonexistent/slab"),
        ({"host_budget": -1}, ValueError, "host_budget is -1; at least 0"),
        ({"host_budget": "50%"}, ValueError, 'host_budget: "50%" is not a size'),
        ({"min_bytes": "much"}, ValueError, 'min_bytes: "much" is not a size'),
        ({"streams": 3}, ValueError, "streams is 3"),
        ({"resident_bytes": 0.5}, TypeError, "resident_bytes .* 0.5"),
    ],
)
def test_bad_options(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        ct.offload(**options)


@pytest.mark.parametrize("given", ["64MiB", [torch.ones(2)], torch.float32])
def test_what_cannot_be_left_alone(given: Any) -> None:
    with pytest.raises(TypeError, match=f"modules and tensors by position, .* not {type(given).__name__}"):
        ct.offload(torch.ones(2), given)


def test_where_torch_forbids_hooks(context: Offload) -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        context,
    ):
        pass
