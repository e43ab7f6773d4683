"""Random state, autocast, hooks and other surroundings of recomputed blocks."""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
import threading
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import memory
from cairn.torch.base._compat import TORCH_VERSION, default_device
from cairn.torch.base.errors import Unsupported
from cairn.torch.rerun_state import module_state
from executor_models import INPUT, STAGES, WIDTH, Layer, Net, loss_of, net
from executor_support import (
    assert_same,
    differing,
    every_block,
    expected_runs,
    from_input,
    group_of_one,
    persistent,
    planned,
    train,
    wild,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def test_random_state_is_not_preserved_if_asked() -> None:
    model = net()
    torch.manual_seed(0)
    loss = loss_of(model)
    state = torch.get_rng_state()
    with planned(model, STAGES, from_input(STAGES)):
        torch.manual_seed(0)
        loss = loss_of(model)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
    with planned(model, STAGES, from_input(STAGES), preserve_rng_state=False):
        torch.manual_seed(0)
        loss_of(model).backward()
        assert not torch.equal(torch.get_rng_state(), state)


def test_autocast_around_forward_alone_and_inside_the_model() -> None:
    class Mixed(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for index, layer in enumerate(self.layers):
                with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
                    x = layer(x.float())
            return self.leave(x)

    torch.manual_seed(0)
    model = Mixed().train()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(INPUT).float().square().mean()

    for ops in (from_input(STAGES), wild(STAGES, 1)):
        assert_same(model, loss, STAGES, ops)
        assert_same(model, loss_of, STAGES, ops)


def test_backend_switches_around_forward_alone() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(1, 2, 8, 3 * WIDTH).chunk(3, -1)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return x + y.reshape(16, WIDTH) + torch.zeros(WIDTH).to(x)

    def loss(model: nn.Module) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.device("cpu"):
            return loss_of(model)

    assert_same(net(layer=Attention), loss, STAGES, from_input(STAGES))


#: What is set for the forward alone: the attribute, its value there, and whose it is.
SWITCHED = {
    "float32 of all": ("fp32_precision", "tf32", torch.backends),
    "float32 of matrix products": ("fp32_precision", "tf32", torch.backends.cuda.matmul),
    "float32 of convolutions": ("fp32_precision", "ieee", getattr(torch.backends.cudnn, "conv", None)),
    "float16 sums": ("allow_fp16_reduced_precision_reduction", False, torch.backends.cuda.matmul),
    "bfloat16 sums": ("allow_bf16_reduced_precision_reduction", False, torch.backends.cuda.matmul),
    "float16 accumulation": ("allow_fp16_accumulation", True, torch.backends.cuda.matmul),
    "oneDNN": ("enabled", False, torch.backends.mkldnn),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_later_runs_find_the_switches_of_the_forward(name: str) -> None:
    attribute, wanted, owner = SWITCHED[name]
    if not hasattr(owner, attribute):
        pytest.skip("this torch has no such switch")
    before, found = getattr(owner, attribute), queue.SimpleQueue()  # a list would be put back
    model = net()
    model.layers[1].up.register_forward_hook(lambda module, args, output: found.put(getattr(owner, attribute)))
    with planned(model, STAGES, every_block(STAGES)):
        try:
            setattr(owner, attribute, wanted)
            loss = loss_of(model)
        finally:
            setattr(owner, attribute, before)
        loss.backward()
    assert [found.get_nowait(), found.get_nowait()] == [wanted, wanted]
    assert getattr(owner, attribute) == before


@pytest.mark.parametrize("how", ["nowhere", "in a context", "for the thread"])
def test_where_new_tensors_are_made_is_known(how: str) -> None:
    try:
        torch.set_default_device("meta" if how == "for the thread" else None)
        with torch.device("meta") if how == "in a context" else contextlib.nullcontext():
            assert default_device() == torch.empty(0).device
    finally:
        torch.set_default_device(None)


def test_power_iteration_sees_its_old_vectors() -> None:
    """A buffer that a block reads and writes."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    for seed in range(4):
        assert_same(net(layer=layer), loss_of, STAGES, wild(STAGES, seed))


def test_buffers_that_are_written_with_what_they_hold() -> None:
    """As observers of quantization, whose zero point does not move: a write that is counted is none of the caller's."""

    class Observes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int32))
            self.register_buffer("table", torch.ones(64, 512))

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            self.zero_point.copy_(torch.zeros(1, dtype=torch.int32))
            self.table.fill_(1.0)
            return super().forward((x - self.zero_point) * self.table[0, :WIDTH])

    assert_same(net(layer=Observes), loss_of, STAGES, from_input(STAGES), steps=3)


def test_a_large_buffer_that_is_written() -> None:
    class Counts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(64, 512))

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            self.table += 1
            return super().forward(x * self.table[0, :WIDTH])

    assert_same(net(layer=Counts), loss_of, STAGES, from_input(STAGES), steps=3)


@pytest.mark.parametrize("seed", range(4))
def test_buffers_on_a_device_are_compared_in_the_first_step_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing waits for the device, for which the CPU stands here; what is written without being counted is seen."""

    class Drifts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.ones(WIDTH))
            self.is_moving = False

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x * self.gain.clone(), scale=scale)
            if self.is_moving:
                self.gain.data.mul_(0.9)
            return y

    compared, same = [], module_state.same_bits
    monkeypatch.setattr(memory, "is_at_hand", lambda tensor: False)
    monkeypatch.setattr(module_state, "same_bits", lambda *pair: compared.append(pair) or same(*pair))
    model, plain = net(layer=Drifts), net(layer=Drifts)
    with planned(model, STAGES, wild(STAGES, seed) if seed else from_input(STAGES)):
        for step in range(4):
            for layer in (*model.layers, *plain.layers):
                layer.is_moving = step == 2
            compared.clear()
            assert not differing(train(plain, loss_of, step), train(model, loss_of, step))
            assert bool(compared) == (step == 0)


def test_forward_hooks_of_a_block_run_once_and_inner_ones_again() -> None:
    model, noted, calls = net(), [], queue.SimpleQueue()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        noted.append(name)
        calls.put(name)

    model.layers[1].register_forward_hook(functools.partial(note, "block"))
    model.layers[1].up.register_forward_hook(functools.partial(note, "inner"))
    with planned(model, STAGES, every_block(STAGES)):
        train(model, loss_of)
    assert [calls.get_nowait() for _ in range(calls.qsize())] == ["inner", "block", "inner"]
    assert noted == ["inner", "block"]  # what later runs of it fill is put back


def test_anomaly_detection() -> None:
    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)), torch.autograd.set_detect_anomaly(True):
        assert not differing(train(plain, loss_of), train(model, loss_of))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    with group_of_one(tmp_path):
        model, plain = net(), net()
        ops = from_input(STAGES)
        with planned(model, STAGES, ops) as executor:
            pair = DistributedDataParallel(plain), DistributedDataParallel(model)
            for step in range(3):
                assert not differing(*(train(one, loss_of, step) for one in pair))
                assert executor.trace == expected_runs(STAGES, ops)


shards = pytest.mark.skipif(TORCH_VERSION < (2, 7), reason="fully_shard needs streams there, which the CPU has not")


@shards
@pytest.mark.parametrize("seed", range(3))
def test_fully_sharded_blocks(tmp_path: Path, seed: int) -> None:
    """A block that is recomputed before its backward asks for its parameters, and a run that saves nothing gives them
    back.
    """
    from torch.distributed.fsdp import fully_shard

    def shard(model: Net) -> Net:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model

    def results(model: Net, step: int) -> list[Tensor]:
        torch.manual_seed(step)
        loss = loss_of(model)
        loss.backward()
        found = [loss.detach(), *(p.grad.full_tensor() for p in model.parameters()), *model.buffers()]
        model.zero_grad()
        return [tensor.clone() for tensor in found]

    with group_of_one(tmp_path):
        model, plain = net(), shard(net())
        ops = (from_input(STAGES), wild(STAGES, 1), persistent(STAGES, 2))[seed]
        with planned(model, STAGES, ops) as executor:
            shard(model)
            for step in range(2):
                assert all(map(torch.equal, results(plain, step), results(model, step)))
                assert executor.trace == expected_runs(STAGES, ops)


@shards
def test_a_sharded_model_is_planned(tmp_path: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with group_of_one(tmp_path):
        model = net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)))
        for layer in model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))  # casts the model's input, too
        options = {"loss_fn": torch.sum, "passes": 1, "blocks": "layers.*"}
        profile = ct.profile(model, INPUT, **options)
        plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
        assert not plan.is_plain and ct.verify(model, plan, INPUT, loss_fn=torch.sum).ok
        model = net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        for module in (model.layers[0][0], *model.layers, model):
            fully_shard(module)
        with pytest.raises(Unsupported, match=r"Linear inside of block 'layers\.0' is sharded by itself"):
            ct.profile(model, INPUT, **options)


def test_full_backward_hooks_run_once() -> None:
    model, calls = net(), []
    model.layers[1].register_full_backward_hook(lambda module, before, after: calls.append(1))
    with planned(model, STAGES, from_input(STAGES)):
        train(model, loss_of)
    assert len(calls) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_a_block(reentrant: bool) -> None:
    class Inner(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return x + checkpoint(super().forward, x, use_reentrant=reentrant)

    model = net(layer=Inner)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.track_running_stats = False  # torch's own checkpoint updates them twice
    for seed in range(3):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))


class Stashes(torch.autograd.Function):
    """Keeps a tensor outside of what autograd saves, and reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.stash = x.cos()
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert torch.equal(ctx.saved_tensors[0], ctx.saved_tensors[0])
        return grad * ctx.stash


def test_custom_functions() -> None:
    class Custom(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return Stashes.apply(super().forward(x))

    for seed in range(3):
        assert_same(net(layer=Custom), loss_of, STAGES, wild(STAGES, seed))


def test_models_in_threads() -> None:
    failures: list[Any] = []

    def work(seed: int) -> None:
        torch.manual_seed(seed)
        plain = Net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())).train()
        model = copy.deepcopy(plain)
        with planned(model, STAGES, wild(STAGES, seed)):
            for _ in range(20):
                for one in (plain, model):
                    loss_of(one).backward()
        if any(not torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)):
            failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
