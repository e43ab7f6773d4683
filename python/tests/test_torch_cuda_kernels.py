"""Which kernels run on a CUDA device, in the forward and again in the thread of its backward."""

# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch import _compat, operators
from executor_support import blocks, every_block, planned, store_all
from torch import Tensor, nn

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
