"""Weights that are shared, swapped or laid out otherwise fail the guard of a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.torch import profiler
from executor_support import backward, differing, keep, planned, train
from guards_support import unsampled_fixture  # noqa: F401
from selective_blocks import Batch
from selective_support import (
    WIDTH,
    Mlp,
    by_option,
    loss_of,
    mean_square,
    net,
    options_of,
    profile_of,
    sample,
    save,
    selectively_planned,
)
from torch import Tensor, nn


class Sharing(Mlp):
    """Has weights and buffers that may be one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("first", torch.full((4 * WIDTH,), 0.5))
        self.register_buffer("second", torch.full((4 * WIDTH,), 1.5))
        self.share()

    def share(self) -> None:
        self.gate.weight, self.last.weight, self.second = self.up.weight, self.down.weight, self.first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)) * self.first) * torch.sigmoid(self.gate(x) * self.second.to(x.dtype))
        return x + torch.sin(self.down(y)) * torch.cos(self.last(torch.tanh(y)))


class Parted(Sharing):
    """Has two of each."""

    def share(self) -> None:
        pass


def _untie(layer: Any) -> None:
    layer.gate.weight = nn.Parameter(layer.up.weight.detach() * 0.5)


def _untie_data(layer: Any) -> None:
    layer.last.weight = nn.Parameter(layer.down.weight.detach())  # shares the storage
    layer.last.weight.data = layer.down.weight.detach() * 0.5


def _tie_data(layer: Any) -> None:
    layer.gate.weight.data = layer.up.weight.data


def _swap_weights(layer: Any) -> None:
    layer.up.weight, layer.gate.weight = layer.gate.weight, layer.up.weight


_SHARES: dict[str, tuple[type[Sharing], Callable[[Any], Any]]] = {
    "a weight that is shared no more": (Sharing, _untie),
    "data that are shared no more": (Sharing, _untie_data),
    "a buffer that is shared no more": (Sharing, lambda layer: setattr(layer, "second", layer.first * 3)),
    "a weight that becomes shared": (Parted, lambda layer: setattr(layer.gate, "weight", layer.up.weight)),
    "data that become shared": (Parted, _tie_data),
    "a buffer that becomes shared": (Parted, lambda layer: setattr(layer, "second", layer.first)),
    "weights that are swapped": (Parted, _swap_weights),
    "a weight that another block shares": (Parted, lambda layer: None),
    "a buffer in another layout": (Parted, lambda layer: setattr(layer, "second", torch.arange(8.0 * WIDTH)[::2])),
    "a buffer of another shape": (Parted, lambda layer: setattr(layer, "second", torch.full((1,), 2.0))),
    "a buffer of another type": (Parted, lambda layer: setattr(layer, "second", layer.second.double().mul(2))),
}


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("option", [1, 2, 99])
@pytest.mark.parametrize("what", _SHARES)
def test_weights_that_are_shared_or_no_more_are_noticed(what: str, option: int) -> None:
    layer, change = _SHARES[what]
    plain, other = net(layer), net(layer)
    with selectively_planned(other, option, layer):
        for step in range(6):
            for model in (plain, other) if step == 3 else ():
                change(model.layers[1])
                if what == "a weight that another block shares":
                    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr, assignment]
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step)), step


@pytest.mark.usefixtures("unsampled")
def test_a_change_to_a_part_that_was_put_in_is_noticed() -> None:
    plain, other = net(), net()
    with selectively_planned(other) as executor:
        for step in range(8):
            for model in (plain, other) if step in (2, 4, 6) else ():
                layer: Any = model.layers[1]
                if step == 2:
                    layer.dropout, layer.norm = nn.Dropout(0.25), nn.LayerNorm(WIDTH)
                elif step == 4:
                    layer.dropout.p = 0.5
                else:
                    layer.norm.requires_grad_(False)
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert len(executor.notes) == (step in (2, 4)), step  # recorded again; as another run in step 6


@pytest.mark.parametrize("is_opened", [False, True])
def test_the_statistics_of_a_part_that_was_put_in_are_written_once(is_opened: bool) -> None:
    plain, other = net(Batch), net(Batch)
    found = profile_of(Batch)
    selective, n = options_of(found), len(found.refs)
    ops = [keep(s) if s in selective else save(s) for s in range(1, n + 1)]
    for stage in range(n, 0, -1):
        ops += [save(stage)] * (stage in selective) + [backward(stage)]
    with planned(
        other, found.refs, by_option(found.refs, selective, 99) if is_opened else ops, selective=selective
    ) as executor:
        for step in range(5):
            for model in (plain, other) if step == 2 else ():
                model.layers[1].batch = nn.BatchNorm1d(4 * WIDTH)  # type: ignore[union-attr, assignment]
            assert not differing(train(plain, loss_of, step), train(other, loss_of, step))
            assert len(executor.notes) == (is_opened and step == 2)  # it is recorded again


class Image(nn.Module):
    """Whose layout in memory is that of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.sin(self.inner(x)))
        return self.outer(y * y.transpose(1, 2).cos().transpose(1, 2)).contiguous()


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("option", [1, 2, 99])
def test_weights_in_another_layout_are_noticed(option: int) -> None:
    def images() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Image(), Image(), Image(), nn.Flatten())

    def loss(model: nn.Module) -> Tensor:
        return mean_square(model(sample(24).view(6, 4, 4, 4)))

    plain, other = images(), images()
    found = profiler.profile(images(), sample(24).view(6, 4, 4, 4), loss_fn=mean_square, passes=1)
    selective = options_of(found)
    with planned(other, found.refs, by_option(found.refs, selective, option), selective=selective):
        for step in range(6):
            for model in (plain, other) if step == 3 else ():
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            assert not differing(train(plain, loss, step), train(other, loss, step))
