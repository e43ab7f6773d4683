"""Estimates of steps that are never run, against steps that are."""

# ruff: noqa: E402

from __future__ import annotations

import json
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.base import memory
from cairn.torch.base.stage_measure import PARAMETERS
from cairn.torch.estimation import batches
from cairn.torch.estimation.sharding import GATHERED, sharded
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("seeded")


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(x)))


def mlp(width: int = 64, layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Residual(width) for _ in range(layers)))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def measured_bytes(step: torch_models.Step, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Peak of two plain steps that create their gradients, of which the second finds the optimizer's state."""
    model = step.model
    step.loss()  # what only a first step allocates
    resident = memory.unique_bytes([*model.parameters(), *model.buffers()])
    given = memory.unique_bytes(t for t in (*step.args, *step.kwargs.values()) if isinstance(t, torch.Tensor))
    meter = memory.CpuMeter()
    with memory.not_collecting(), meter:
        first = meter.mark()
        for _ in range(2):
            output = model(*step.args, **step.kwargs)
            loss = output.loss if step.loss_fn is None else step.loss_fn(output)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            del loss
            model.zero_grad()
        last = meter.mark()
        del output
        if optimizer is not None:
            optimizer.state.clear()
    return resident + given + meter.peak(first, last) - meter.level(first)


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "vit"])
def test_bytes_of_a_plain_step(name: str) -> None:
    step = torch_models.made(name)
    sample = {"kwargs": step.kwargs, "loss_fn": step.loss_fn, "inside": False, "blocks": step.blocks}
    found = ct.estimate(step.model, step.args, device="cpu", gradients="created", **sample)
    assert found.plain_peak_bytes == pytest.approx(measured_bytes(step), rel=0.02)


def test_optimizers_state_and_step_are_counted() -> None:
    model, x = mlp(), torch.randn(512, 64)
    adam = torch.optim.Adam(model.parameters(), foreach=False)
    found = ct.estimate(model, x, device="cpu", loss_fn=mean_square, optimizer=adam, gradients="created", inside=False)
    step = torch_models.Step(model, (x,), {}, mean_square)
    assert found.plain_peak_bytes == pytest.approx(measured_bytes(step, adam), rel=0.02)
    assert found.resident["optimizer state"] == pytest.approx(2 * memory.dense_bytes(model.parameters()), rel=0.01)


def test_curve_is_that_of_plans_for_the_measured_step() -> None:
    step = torch_models.made("gpt2")
    found = ct.estimate(step.model, kwargs=step.kwargs, device="cpu", budgets=3, inside=False)
    profile = ct.profile(step.model, kwargs=step.kwargs, passes=1, outside=False, inside=False)
    top = ct.plan(profile, 2**40)
    assert found.plain_peak_bytes == pytest.approx(top.plain_peak_bytes, rel=0.02)
    assert found.least_budget_bytes == pytest.approx(top.least_budget_bytes, rel=0.02)
    extra = [point.extra_time for point in found.points]
    assert extra == sorted(extra, reverse=True) and extra[-1] == 0 < extra[0]


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        return x + F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1, self.training)


@pytest.mark.parametrize("block", [Residual, Attending])
def test_points_of_the_curve_are_peaks_of_measured_steps(block: Any) -> None:
    model, x = nn.Sequential(*(block(32) for _ in range(4))), torch.randn(8, 64, 32)
    step = torch_models.Step(model, (x,), {}, mean_square)
    found = ct.estimate(model, x, device="cpu", loss_fn=mean_square, gradients="created", budgets=3, inside=False)
    low, middle, high = found.points
    assert low.peak_bytes < middle.peak_bytes < high.peak_bytes == found.plain_peak_bytes
    assert found.plain_peak_bytes == pytest.approx(measured_bytes(step), rel=0.02)
    for point in (low, middle):
        plan = ct.plan(found.profile, point.budget_bytes, gradients="created")
        with ct.apply(model, plan):
            assert measured_bytes(step) == pytest.approx(point.peak_bytes, rel=0.02)
    ct.checkpoint(model, x, budget="1GiB", loss_fn=mean_square, gradients="created", inside=False, passes=1)
    handle = ct.handle(model)
    assert handle is not None and handle.plan.least_budget_bytes == pytest.approx(low.budget_bytes, rel=0.02)


class Squared(torch.autograd.Function):
    """A function of its own, as Bloom's GELU is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(Squared.apply(self.wide(x)))


class Caching(nn.Module):
    """Keys and values are appended to empty tensors that each call makes from Python."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        k, v = (torch.cat([torch.tensor([]), new], -2) for new in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Dropping(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.narrow(F.dropout(F.gelu(self.wide(x)), 0.1)), 0.1)


@pytest.mark.parametrize("block", [Residual, Attending, OwnFunction, Caching, Dropping])
def test_options_inside_blocks_are_those_of_a_measured_profile(block: Any) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), *(block(32) for _ in range(3))), torch.randn(8, 64, 32)
    found = ct.estimate(model, x, device="cpu", loss_fn=mean_square, gradients="created").profile
    measured = ct.profile(model, x, loss_fn=mean_square, passes=1, outside=False)
    for estimated, stage in zip(found.stages, measured.stages, strict=True):
        names = ("closed", "digest", "asked", "draws", "random_state_is_new")
        assert [getattr(estimated, name) for name in names] == [getattr(stage, name) for name in names]
        assert bool(estimated.options) == bool(stage.options)
    step = torch_models.Step(model, (x,), {}, mean_square)
    least, measured_least = (ct.plan(p, "1GiB", gradients="created").least_budget_bytes for p in (found, measured))
    assert least <= 1.02 * measured_least  # options that are only just worth their measured time come and go
    plan = ct.plan(found, least, gradients="created")
    assert plan.selective_options
    with ct.apply(model, plan):
        assert measured_bytes(step) == pytest.approx(plan.peak_bytes, rel=0.02)


def test_models_on_meta_and_their_own_tensors_stay() -> None:
    with torch.device("meta"):
        model = mlp()
    before = dict(model.named_parameters())
    x = torch.randn(32, 64)
    found = ct.estimate(model, torch.empty(32, 64, device="meta"), device="cpu", loss_fn=mean_square, inside=False)
    assert all(now is before[name] for name, now in model.named_parameters())
    real = ct.estimate(mlp(), x, device="cpu", loss_fn=mean_square, inside=False)
    assert found.plain_peak_bytes == real.plain_peak_bytes
    assert found.points == real.points


def test_random_state_and_grads_are_left_alone() -> None:
    model = nn.Sequential(mlp(), nn.Dropout(0.5), mlp())
    state = torch.get_rng_state()
    ct.estimate(model, torch.randn(8, 64, generator=torch.Generator()), loss_fn=mean_square, inside=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_largest_batch_is_where_the_next_one_needs_more() -> None:
    model, x, memory_bytes = mlp(), torch.randn(4, 64), 2 << 20
    asked: dict[str, Any] = {"device": "cpu", "loss_fn": mean_square, "inside": False}
    found = ct.estimate(model, x, memory=memory_bytes, **asked)
    assert found.largest_batch is not None and found.largest_plain_batch is not None
    assert found.largest_plain_batch < found.largest_batch
    for batch, is_plain in ((found.largest_batch, False), (found.largest_plain_batch, True)):
        for size, fits in ((batch, True), (batch + 1, False)):
            point = ct.estimate(model, torch.randn(size, 64), **asked).points[-1 if is_plain else 0]
            assert (point.budget_bytes <= memory_bytes) is fits


def test_search_for_a_batch_follows_a_bent_line() -> None:
    def needed(batch: int) -> int:
        return 100 + 10 * batch + max(0, 3 * (batch - 50))

    assert batches.largest(needed, (1, 2), 1000) == 80
    assert batches.largest(needed, (64, 128), 150) == 5
    assert batches.largest(needed, (4, 8), 90) == 0


def test_search_for_a_batch_goes_on_where_the_optimizer_makes_the_peak() -> None:
    assert batches.largest(lambda batch: max(500, 10 * batch), (4, 8), 1000) == 100


def test_targets_are_resized_and_closures_are_named() -> None:
    model, x, y = nn.Sequential(mlp(), nn.Linear(64, 10)), torch.randn(4, 64), torch.zeros(4, dtype=torch.long)
    asked: dict[str, Any] = {"device": "cpu", "memory": "8MiB", "inside": False}
    assert ct.estimate(model, x, loss_fn=F.cross_entropy, targets=y, **asked).largest_batch
    found = ct.estimate(model, x, loss_fn=lambda output: F.cross_entropy(output, y), **asked)
    assert found.largest_batch is None
    assert any("pass what the loss compares the output with as targets=" in note for note in found.notes)


def test_targets_that_are_inputs_count_once() -> None:
    model, x = mlp(), torch.randn(256, 64)
    found = ct.estimate(model, x, device="cpu", loss_fn=lambda output: F.l1_loss(output, x), inside=False)
    assert found.profile.input_bytes == x.nbytes


# -- sharding ------------------------------------------------------------------------------------------------


def test_sharded_sizes() -> None:
    model, x = nn.Sequential(mlp(64, 3), nn.Linear(64, 10, bias=False)), torch.randn(128, 64)
    whole = ct.estimate(model, x, loss_fn=mean_square, blocks="0.*", inside=False).profile
    part = sharded(whole, model, 4)
    block = memory.dense_bytes(model[0][0].parameters())
    head = 64 * 10 * 4
    assert part.resident[PARAMETERS] == 3 * block // 4 + 3 * 64 * 4  # of ten rows, the fullest device has three
    assert part.resident[GATHERED] == head
    assert part.gradient_bytes == part.resident[PARAMETERS]
    for index, (before, after) in enumerate(zip(whole.stages, part.stages, strict=True)):
        assert after.saved_bytes == before.saved_bytes
        if before.kind == "block":
            assert after.weight_grad_bytes == block // 4
            assert after.forward_rise_bytes - before.forward_rise_bytes == block * 2
            assert after.backward_rise_bytes - before.backward_rise_bytes == block * (1 + (index > 0) + (index < 2))
    assert sharded(whole, model, 1) is whole


# -- devices -------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_stated_device() -> None:
    model, x = nn.Sequential(nn.Linear(512, 512, bias=False)), torch.randn(256, 512)
    device = ct.DeviceModel("slow", flops=1e9, bandwidth="1TB/s")
    found = ct.estimate(model, x, device=device, loss_fn=mean_square)
    products = 2 * (2 * 256 * 512 * 512)  # forward, and the gradient of the weight
    assert found.plain_ns == pytest.approx(products, rel=0.01)
    assert ct.estimate(model, x, device="cuda", loss_fn=mean_square).plain_ns is None


def test_gpus_keep_masks_of_dropout_as_truth_values() -> None:
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), torch.randn(64, 64, requires_grad=True)
    saved = {
        device: sum(s.saved_bytes for s in ct.estimate(model, x, device=device, loss_fn=mean_square).profile.stages[:2])
        for device in ("cpu", "cuda")
    }
    assert saved["cuda"] < saved["cpu"]


@pytest.mark.parametrize("is_of_cpu", [True, False])
def test_random_states_take_memory_of_the_cpu_alone(is_of_cpu: bool) -> None:
    token = memory.fake_meter.set(lambda: types.SimpleNamespace(is_of_cpu=is_of_cpu))  # type: ignore[arg-type, return-value]
    try:
        assert (memory.stand_in(5056) is not None) == is_of_cpu
    finally:
        memory.fake_meter.reset(token)


def test_autocast_casts() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))), torch.randn(512, 64)

    def saved() -> int:
        found = ct.estimate(model, x, device="cuda", loss_fn=mean_square, inside=False)
        return sum(stage.saved_bytes for stage in found.profile.stages if stage.kind == "block")

    whole = saved()
    with torch.autocast("cpu", torch.bfloat16):  # torch switches that of CUDA off where there is none
        assert saved() < 0.7 * whole


# -- what cannot be estimated --------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        if x.sum() > 0:
            x = -x
        return x


def test_branches_on_numbers_are_named_by_their_line() -> None:
    with pytest.raises(ct.Unsupported, match=r"_local_scalar_dense.* at .*test_torch_estimate.*if x.sum\(\) > 0"):
        ct.estimate(Branching(), torch.randn(4, 64), loss_fn=mean_square)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not mask.all():
            x = x[mask.nonzero().squeeze(1)]
        return self.layers(x)


def test_branches_on_numbers_of_the_sample_are_followed() -> None:
    x, mask = torch.randn(64, 64), torch.arange(64) < 32
    saved = []
    for given in (mask, torch.ones(64, dtype=torch.bool)):
        found = ct.estimate(Counting(), (x, given), loss_fn=mean_square, inside=False, device="cpu")
        saved.append(sum(stage.saved_bytes for stage in found.profile.stages if stage.kind == "block"))
    assert saved[0] == pytest.approx(saved[1] / 2, rel=0.05)


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(ct.Unsupported, match="recurrent layers cannot be estimated"):
        ct.estimate(nn.LSTM(8, 8), torch.randn(4, 2, 8), loss_fn=lambda output: output[0].mean())


@pytest.mark.parametrize(
    "mistake, error, words",
    [
        ({"device": "H1000"}, ValueError, "one of V100"),
        ({"memory": 0.5}, TypeError, "not a ratio"),
        ({"shard": 0}, ValueError, "shard"),
        ({"gradients": "new"}, ValueError, "gradients"),
    ],
)
def test_mistakes_are_named(mistake: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ct.estimate(mlp(), torch.randn(4, 64), loss_fn=mean_square, **mistake)


def test_prints_and_serialises() -> None:
    model, x = mlp(), torch.randn(64, 64)
    found = ct.estimate(model, x, device="A100", memory="1GiB", loss_fn=mean_square, shard=2, inside=False, budgets=2)
    text = str(found)
    for words in ("sharded over 2 devices", "A100", "19.5 TFLOP/s", "largest batch in 1.00 GiB", "extra time"):
        assert words in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["plain_peak_bytes"] == found.plain_peak_bytes and len(data["points"]) == 2
    assert found.fits is True
    assert ct.estimate(model, x, memory="1MiB", loss_fn=mean_square, largest_batch=False, inside=False).fits is False
