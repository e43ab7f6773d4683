"""Cross entropy in less memory is PyTorch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import memory
from cairn.torch.head import loss
from head_support import (
    CLASSES,
    ROWS,
    same_bits,
    small_chunks_fixture,  # noqa: F401
)
from torch.nn import functional as F


def _targets(ignored: int = -100) -> torch.Tensor:
    target = torch.randint(CLASSES, (ROWS,))
    target[3] = target[17] = ignored
    return target


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "another index ignored": {"ignore_index": 7},
    "weights": {"weight": torch.rand(CLASSES) + 0.5},
    "weights, none": {"weight": torch.rand(CLASSES) + 0.5, "reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "old names": {"size_average": False},
}


def _both(function: Callable[..., torch.Tensor], logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    inputs = logits.detach().clone().requires_grad_()
    loss = function(inputs * 1, *args, **kwargs)
    loss.backward(torch.full_like(loss, 0.3))
    return loss, inputs.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.usefixtures("small_chunks")
def test_cross_entropy_is_pytorchs(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    options = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in LOSSES[kind].items()}
    logits, target = torch.randn(ROWS, CLASSES, dtype=dtype) * 5, _targets(options.get("ignore_index", -100))
    for own, plain in zip(
        _both(ct.cross_entropy, logits, target, **options),
        _both(F.cross_entropy, logits, target, **options),
        strict=True,
    ):
        assert same_bits(own, plain)


@pytest.mark.parametrize(
    ("logits", "target"),
    [
        (torch.randn(4, 5, 6), torch.randint(5, (4, 6))),
        (torch.randn(5), torch.tensor(2)),
        (torch.randn(4, 5), torch.rand(4, 5).softmax(1)),
        (torch.full((4, 5), float("inf")), torch.randint(5, (4,))),
        (torch.randn(4, 5), torch.full((4,), -100)),
        (torch.randn(5, 4).t(), torch.randint(5, (4,))),
    ],
    ids=["more dimensions", "one row", "probabilities", "infinite", "all ignored", "transposed"],
)
def test_other_forms_are_pytorchs(logits: torch.Tensor, target: torch.Tensor) -> None:
    for own, plain in zip(_both(ct.cross_entropy, logits, target), _both(F.cross_entropy, logits, target), strict=True):
        assert same_bits(own, plain)


def test_few_rows_at_a_time_fit_a_cache_and_many_fill_a_device() -> None:
    def rows(count: int, device: str) -> int:
        return loss._rows_at_a_time(torch.empty_strided((count, 50257), (50257, 1), device=device))

    assert rows(64, "cpu") == 2**21 // (4 * 50257)
    assert rows(32768, "meta") == 2**28 // (4 * 50257)
    assert rows(1024, "meta") == 1024 // 16
    assert rows(16, "meta") == rows(64, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(ROWS, CLASSES).to(dtype), _targets()
    with torch.autocast("cpu", torch.bfloat16):
        own, plain = _both(ct.cross_entropy, logits, target), _both(F.cross_entropy, logits, target)
    assert all(map(same_bits, own, plain))


@pytest.mark.usefixtures("small_chunks")
def test_what_was_saved_may_come_back_with_other_strides() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(ROWS, CLASSES), _targets()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.t().contiguous().t() if t.dim() == 2 else t):
        own = _both(ct.cross_entropy, logits, target)
    assert all(map(same_bits, own, _both(F.cross_entropy, logits, target)))


@pytest.mark.usefixtures("small_chunks")
def test_the_graph_may_be_kept_and_differentiated() -> None:
    torch.manual_seed(0)
    target, first = _targets(), torch.randn(ROWS, CLASSES)
    found = []
    for function in (ct.cross_entropy, F.cross_entropy):
        logits = first.clone().requires_grad_()
        loss = function(logits, target)
        once = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        again = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        (differentiable,) = torch.autograd.grad(loss, logits, create_graph=True)
        (second,) = torch.autograd.grad(differentiable.square().sum(), logits, retain_graph=True)
        last = torch.autograd.grad(loss, logits)[0]
        found.append([once, again, differentiable, second, last])
    assert all(map(same_bits, *found))


def test_invalid_calls_fail_as_pytorchs() -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    for target in (torch.tensor([0, 1, 2, 9]), torch.tensor([0, 1]), torch.rand(4)):
        with pytest.raises((RuntimeError, ValueError, IndexError)) as plain:
            F.cross_entropy(logits, target)
        with pytest.raises(plain.type):
            ct.cross_entropy(logits, target)


def test_the_backward_makes_no_copies_of_the_logits() -> None:
    logits, target = torch.randn(512, 8000, requires_grad=True), torch.randint(8000, (512,))
    size = logits.numel() * 4
    meter = memory.CpuMeter()
    with meter:
        begin = meter.mark()
        loss = ct.cross_entropy(logits * 1, target)
        forward = meter.mark()
        (grad,) = torch.autograd.grad(loss, logits)
        end = meter.mark()
        del grad, loss
    assert meter.level(forward) - meter.level(begin) == pytest.approx(size, rel=0.01)
    assert meter.peak(forward, end) - meter.level(begin) < 2.1 * size  # logits * 1 has a gradient of its own
