"""Which kernels run on a CUDA device, in the forward and again in the thread of its backward."""

# ruff: noqa: E402

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.base import _compat, operators
from executor_support import blocks, every_block, planned, store_all
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F

STAGES = blocks("0", "1")


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))


X = torch.randn(1, 2, 8, 8)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters seem to be on CUDA."""
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")


@pytest.fixture
def choosing() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        yield


def test_what_cudnn_would_choose_anew_does_not_run_again(on_cuda: None, choosing: None) -> None:
    model = convolutions()
    with planned(model, STAGES, every_block(STAGES)), pytest.raises(ct.Unsupported, match="cudnn.benchmark"):
        model(X)
    with planned(model, STAGES, store_all(STAGES)):
        model(X).sum().backward()
    with pytest.raises(ct.Unsupported, match="cudnn.benchmark"):
        ct.profile(model, X, loss_fn=torch.sum, passes=1)


def test_what_cudnn_chooses_by_rule_does(on_cuda: None) -> None:
    model = convolutions()
    with planned(model, STAGES, every_block(STAGES)):
        model(X).sum().backward()


def test_cudnn_may_choose_where_nothing_is_its_own(choosing: None) -> None:
    model = convolutions()
    with planned(model, STAGES, every_block(STAGES)):
        model(X).sum().backward()


@pytest.mark.skipif(_compat.TORCH_VERSION < (2, 13), reason="some are of later releases")
def test_operations_without_an_order_are_known_by_their_names() -> None:
    def is_known(name: str) -> Any:
        return hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_")

    assert all(map(is_known, operators.UNORDERED))


def test_a_graph_has_operations_without_an_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Summing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + torch.zeros_like(y).index_add(0, torch.arange(len(y)) // 2, y).tanh()

    model, x = nn.Sequential(Summing(8, 8), nn.Tanh()), torch.randn(8, 8)
    monkeypatch.setattr(operators, "_is_on_cuda", lambda tensor: True)
    nodes = ct.trace(model, x, loss_fn=torch.sum, passes=1).graph.nodes
    once = [node.name.rpartition(": ")[2] for node in nodes if node.no_recompute]
    assert once == ["index_add"]


# -- inside blocks: operations that only CUDA has, on the CPU ------------------------------------------------

ATEN = torch.ops.aten


@pytest.fixture
def library() -> Iterator[Library]:
    """To register kernels in."""
    with torch.library._scoped_library("aten", "IMPL") as opened:
        yield opened


def recomputed(profile: ct.Profile) -> str:
    """What the options of blocks recompute."""
    return ", ".join(option.recomputes for stage in profile.stages for option in stage.options)


def sound_in_training(model: nn.Module, plan: ct.Plan, x: Tensor) -> bool:
    """As in the first steps, in which all that is recomputed is compared."""
    with ct.apply(model, plan) as handle:
        for _ in range(2):
            model(x).sum().backward()
            if handle.executor.notes:
                return False
    return ct.verify(model, plan, x, loss_fn=torch.sum).ok


class Attention(nn.Linear):
    """A layer with the attention that is chosen for float32."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = super().forward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
        return x + torch.tanh(mixed.transpose(1, 2).flatten(2))


def attention_kernels(library: Library) -> None:
    """Without dropout: the seed and the offset are returned as they were allocated."""
    found_there = itertools.count(1)

    def forward(q: Tensor, k: Tensor, v: Tensor, bias: None, *options: Any, scale: None = None) -> Any:
        seed, offset = (ATEN.full.default((), next(found_there), dtype=torch.int64) for _ in range(2))
        return *ATEN._scaled_dot_product_flash_attention_for_cpu.default(q, k, v), seed, offset

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, *saved: Any, scale: None = None) -> Any:
        grads = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(grad, q, k, v, *saved[:2], 0.0, False)
        return *grads, None

    library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")


def test_seeds_that_no_kernel_has_written(library: Library) -> None:
    attention_kernels(library)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Attention(32, 96) for _ in range(3))), torch.randn(2, 64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert "attention" in recomputed(profile)
    plan = ct.plan(profile, ct.sweep(profile, 4)[1].budget_bytes)
    assert sound_in_training(model, plan, x)
    stages = blocks("0", "1", "2")
    with planned(model, stages, every_block(stages), determinism_check="values"):
        model(x).sum().backward()


class Normalised(nn.Conv2d):
    """A convolution whose output is normalised, and cut off in place."""

    def __init__(self) -> None:
        super().__init__(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        norm, y = self.norm, super().forward(x)
        y = ATEN.cudnn_batch_norm(y, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5)[0]
        return torch.tanh(F.relu(y, inplace=True))


def normalising_kernels(library: Library, reserve_bytes: int) -> None:
    def forward(*arguments: Any) -> Any:
        reserve = ATEN.zeros.default((reserve_bytes,), dtype=torch.uint8)
        return *ATEN.native_batch_norm.default(*arguments), reserve

    def backward(x: Tensor, grad: Tensor, weight: Tensor, *saved: Any) -> Any:
        *statistics, epsilon, _ = saved
        given = grad, x, weight, *statistics, True, epsilon, [True] * 3
        return ATEN.native_batch_norm_backward.default(*given)

    library.impl("cudnn_batch_norm", forward, "CPU")
    library.impl("cudnn_batch_norm_backward", backward, "CPU")


@pytest.mark.parametrize("reserve_bytes", [0, 64])
def test_statistics_are_not_written_again(library: Library, reserve_bytes: int) -> None:
    """What the kernel reserves for its backward may be anything; where it reserves something it runs once."""
    normalising_kernels(library, reserve_bytes)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Normalised() for _ in range(4))), torch.randn(4, 8, 16, 16)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert ("cudnn_batch_norm" in recomputed(profile)) == (reserve_bytes == 0)
    plan = ct.plan(profile, ct.sweep(profile, 4)[1].budget_bytes)
    assert sound_in_training(model, plan, x)
