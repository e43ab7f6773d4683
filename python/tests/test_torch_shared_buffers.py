"""Buffers of a block in one storage (rows of one tensor, halves of a table) at every budget, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import cairn.torch as ct
import pytest
import torch
from cairn.torch.rerun_state.buffer_copies import copied, with_neighbours
from torch import Tensor, nn

WIDTH = 32
SHARES = (0.0, 0.15, 0.3, 0.5, 0.8)  # of the way from the least budget to what plain training takes


class Layer(nn.Module):
    """A block whose buffers differ; `mixed` makes what goes into its second projection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.mixed(torch.nn.functional.gelu(self.up(x)))))


class Rows(Layer):
    """Positions in two rows of one tensor, as `triu_indices` gives them."""

    def start(self) -> None:
        self.entries = nn.Parameter(torch.randn(WIDTH * (WIDTH - 1) // 2) * 0.1)
        rows, columns = torch.triu_indices(WIDTH, WIDTH, 1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def mixed(self, x: Tensor) -> Tensor:
        upper = torch.zeros(WIDTH, WIDTH)
        upper[self.rows, self.columns] = self.entries
        return x @ (upper - upper.T)


class Halves(Layer):
    """A rotary table's halves; the second, a view of the first by another name, is registered as well."""

    def start(self) -> None:
        table = torch.rand(2, WIDTH)
        self.register_buffer("cosine", table[0])
        self.register_buffer("sine", table[1])
        self.register_buffer("again", table[1])

    def mixed(self, x: Tensor) -> Tensor:
        return x * self.cosine + x.roll(WIDTH // 2, -1) * self.sine * self.again


class EverySecond(Layer):
    """One buffer that lies between numbers of somebody else, and one that repeats a number."""

    def start(self) -> None:
        self.register_buffer("scale", torch.rand(WIDTH, 2)[:, 1])
        self.register_buffer("shift", torch.rand(3)[1:2].expand(WIDTH))

    def mixed(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale) + torch.cos(x * self.shift)


class Transposed(Layer):
    """A matrix, its transpose and its diagonal."""

    def start(self) -> None:
        matrix = torch.randn(WIDTH, WIDTH) * 0.2
        self.register_buffer("matrix", matrix)
        self.register_buffer("turned", matrix.T)
        self.register_buffer("diagonal", matrix.diagonal())

    def mixed(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.matrix) + torch.cos(x @ self.turned) * self.diagonal


class Overlapping(Layer):
    """One is written, the other sees it."""

    def start(self) -> None:
        both = torch.zeros(WIDTH + 4)
        self.register_buffer("first", both[:WIDTH])
        self.register_buffer("last", both[4:])

    def mixed(self, x: Tensor) -> Tensor:
        before = x * self.last.clone()
        with torch.no_grad():
            self.first += x.mean(0)
        return torch.sin(before + x * self.last.clone())


class Named(Layer):
    """What is written through a buffer is read through a tensor that nobody registered, and after that."""

    def start(self) -> None:
        both = torch.zeros(2, WIDTH)
        self.register_buffer("seen", both[0])
        self.register_buffer("steps", both[1])

    def mixed(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.copy_(x.mean(0))
            self.steps += 1
        return torch.sin(x - self.seen.clone()) / self.steps.clone()


class Complex(Layer):
    """The numbers of one are the pairs of the other."""

    def start(self) -> None:
        turns = torch.polar(torch.ones(WIDTH // 2), torch.rand(WIDTH // 2))
        self.register_buffer("turns", turns)
        self.register_buffer("pairs", torch.view_as_real(turns))

    def mixed(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.turns
        return torch.sin(torch.view_as_real(turned) * self.pairs).flatten(-2)


class Statistics(Layer):
    """Batch statistics, which kernels write without counting, in halves of one tensor."""

    def start(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)
        both = torch.stack((torch.zeros(WIDTH), torch.ones(WIDTH)))
        self.norm.register_buffer("running_mean", both[0])
        self.norm.register_buffer("running_var", both[1])

    def mixed(self, x: Tensor) -> Tensor:
        return self.norm(x)


def in_one_table(layers: nn.Sequential) -> None:
    """The blocks' own buffers are rows of one table, of which each block knows its own alone."""
    table = torch.rand(len(layers), WIDTH)
    for row, layer in zip(table, layers, strict=True):
        layer.register_buffer("scale", row)


class OneRow(Layer):
    def start(self) -> None:
        self.register_buffer("scale", torch.zeros(WIDTH))

    def mixed(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)


KINDS = (Rows, Halves, EverySecond, Transposed, Overlapping, Named, Complex, Statistics, OneRow)


def made(kind: Callable[[], Layer]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(kind() for _ in range(3)))
    if kind is OneRow:
        in_one_table(layers)
    return layers


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_in_one_storage_are_exact_at_every_budget(kind: type[Layer]) -> None:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    want = steps(made(kind), x)
    profile = ct.profile(made(kind), x, loss_fn=lambda y: y.square().mean())
    free = ct.plan(profile, "1TiB")
    for share in SHARES:
        budget = free.least_budget_bytes + int(share * (free.plain_peak_bytes - free.least_budget_bytes))
        model = made(kind)
        with ct.apply(model, ct.plan(profile, budget)):
            got = steps(model, x)
        assert all(map(torch.equal, want, got)), f"other values at {share:.0%}"


def test_copies_share_a_storage_where_the_buffers_do() -> None:
    table = torch.arange(12.0).view(3, 4)
    buffers = [table[0], table[:, 1::2], torch.ones(2), table.conj()]
    copies = copied(buffers)
    assert all(map(torch.equal, buffers, copies))
    assert [(t.stride(), t.storage_offset()) for t in copies] == [(t.stride(), t.storage_offset()) for t in buffers]
    copies[0].fill_(7)
    assert copies[1][0].eq(7).all()
    assert copies[2].eq(1).all()
    assert table[0, 0] == 0


def test_what_shares_a_storage_is_copied_together() -> None:
    table, alone = torch.zeros(4, 4), torch.zeros(4)
    assert with_neighbours([1], [table[0], table[1], alone, None]) == {0, 1}
    assert with_neighbours([2], [table[0], table[1], alone, None]) == {2}
    assert with_neighbours([], [table, None]) == set()
