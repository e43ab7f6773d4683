"""Which saved tensors `cairn.torch.offload` moves, how they look afterwards, and writes to them in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import pytest
import torch
from offload_support import moved, trace
from torch import Tensor, nn

# -- exactness -----------------------------------------------------------------------------------------------


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
