"""Small models with something odd about their memory, each with its sample step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from model_steps import Step, classification
from plain_models import Bottleneck
from torch import Tensor, nn
from torch.nn import functional as F


class Recurrent(nn.Module):
    """An LSTM's output does not lie in memory as the gradient that comes back for it does."""

    def __init__(self, width: int, residual: bool) -> None:
        super().__init__()
        self.lstm, self.residual = nn.LSTM(width, width, batch_first=True), residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x)[0]
        return x + y if self.residual else y


class Viewed(nn.Module):
    """Between its body and its head is nothing but a view of what the body returned."""

    def __init__(self, body: list[nn.Module], view: Callable[[Tensor], Tensor], head: nn.Module) -> None:
        super().__init__()
        self.body, self.view, self.head = nn.Sequential(*body), view, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.view(self.body(x)))


class Penalized(Viewed):
    """What the body returned is part of the loss, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        penalty = x.square().mean()
        return self.head(self.view(x)) + penalty


def flattened(saves: bool, kind: type[Viewed] = Viewed) -> Step:
    """Images in front of linear layers; with an activation at the end, the body saves what it returns itself."""
    norm = [nn.ReLU, functools.partial(nn.BatchNorm2d, 16)]
    body = [
        nn.Sequential(nn.Conv2d(16 if i else 3, 16, 3, padding=1), *(make() for make in norm[:: -1 if saves else 1]))
        for i in range(4)
    ]
    head = nn.Sequential(nn.Linear(16 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 10))
    return classification(kind(body, lambda x: x.flatten(1), head), torch.randn(16, 3, 32, 32), 10)


def pooled() -> Step:
    """The first token of sequences goes to the head."""
    body = [nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.LayerNorm(64)) for _ in range(4)]
    head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return classification(Viewed(body, lambda x: x[:, 0], head), torch.randn(32, 128, 64), 10)


def recurrent(residual: bool = False) -> Step:
    model = nn.Sequential(nn.Linear(8, 64), *(Recurrent(64, residual) for _ in range(4)), nn.Linear(64, 3))
    return Step(model.train(), (torch.randn(32, 20, 8),), {}, lambda output: output.square().mean())


class Returning(nn.Module):
    """Each layer returns a copy of its result too, which nobody reads."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Copying(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


class Copying(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.down(torch.tanh(self.up(x)))
        return y, y.t().contiguous()


def returning() -> Step:
    return Step(Returning().train(), (torch.randn(1024, 64),), {}, lambda output: output.square().mean())


class Tabled(nn.Module):
    """Reads a table that it never writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.rand(256, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * self.table)


def tabled() -> Step:
    model = nn.Sequential(*(Tabled(64) for _ in range(6)))
    return Step(model.train(), (torch.randn(8, 256, 64),), {}, lambda output: output.square().mean())


class Shared(nn.Module):
    """One layer, run several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.leave = nn.ModuleList([Bottleneck(32, 8, 1)]), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.layers[0](x)
        return self.leave(x.mean((2, 3)))


def shared() -> Step:
    return classification(Shared(), torch.randn(4, 32, 16, 16), 4)


class Joined(nn.Module):
    """Weights of which several are one in their product, so that their gradients are parts of one tensor. A part of the
    head's weight is the embedding, whose gradient waits.
    """

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, width)
            self.parts = nn.ParameterList(torch.randn(width, width) / 8 for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = F.linear(self.norm(x), torch.cat(list(self.parts))).chunk(3, -1)
            return x + self.leave(torch.tanh(q * k) * v.sigmoid())

    def __init__(self, width: int = 64, vocabulary: int = 500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width // 2)
        self.enter = nn.Linear(width // 2, width)
        self.layers = nn.ModuleList(Joined.Block(width) for _ in range(3))
        self.rest = nn.Parameter(torch.randn(width // 2, vocabulary) / 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return x @ torch.cat([self.embedding.weight.t(), self.rest])


def joined() -> Step:
    tokens = torch.randint(500, (2, 32))
    return Step(Joined().train(), (tokens,), {}, lambda y: F.cross_entropy(y.flatten(0, 1), tokens.flatten()))


class Complex(nn.Module):
    """Blocks that hand on complex numbers."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / 8)

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight
            return x + torch.complex(torch.tanh(y.real), torch.sin(y.imag)) * y.conj().abs()

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Complex.Block(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def complex_numbers() -> Step:
    return Step(Complex().train(), (torch.randn(256, 64, dtype=torch.complex64),), {}, lambda y: y.abs().mean())


class Rotation(nn.Module):
    """Saves its argument as complex numbers, and complex numbers as real ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pairs = (len(x), -1, 2)
        turned = torch.view_as_complex(self.linear(x).view(pairs)) * torch.view_as_complex(x.view(pairs)).conj()
        return torch.view_as_real(turned).pow(2).flatten(1).tanh() + (x * torch.fft.fft(x).imag).tanh()


def rotated() -> Step:
    model = nn.Sequential(*(Rotation(64) for _ in range(5)))
    return Step(model.train(), (torch.randn(512, 64),), {}, lambda y: y.square().mean())


class Around(nn.Module):
    """Sums lead around blocks: the gradients of these ways wait for each other."""

    def __init__(self, widths: tuple[int, ...], ways: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.blocks, self.ways = nn.ModuleList(map(Perceptron, widths, widths[1:])), ways

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for block in self.blocks:
            x = block(x)
            for earlier in (begin for begin, end in self.ways if end == len(made)):
                other = made[earlier]
                x = x + (other if other.shape == x.shape else other.mean(1, keepdim=True))
            made.append(x)
        return x


class Listing(nn.Module):
    """Collects what its blocks return in a list, which goes when it returns."""

    def __init__(self, is_chain: bool, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6))
        self.is_chain = is_chain

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for block in self.blocks:
            made.append(block(x))
            x = made[-1] if self.is_chain else x + made[-1]
        return x * 2


def listing(is_chain: bool) -> Step:
    return Step(Listing(is_chain).train(), (torch.randn(512, 128),), {}, lambda y: y.square().mean())


class Holding(nn.Module):
    """Its blocks save what they return, and the caller holds it: or other blocks read it, with what came between."""

    class Block(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.linear = nn.Linear(before, after)

        def forward(self, *inputs: Tensor) -> Tensor:
            return torch.tanh(self.linear(torch.cat(inputs, -1)))

    def __init__(self, is_read: bool, width: int = 128) -> None:
        super().__init__()
        self.down = nn.ModuleList(Holding.Block(width, width) for _ in range(4))
        self.up = nn.ModuleList(Holding.Block(2 * width if is_read else width, width) for _ in range(4))
        self.is_read = is_read

    def forward(self, x: Tensor) -> Any:
        made = []
        for block in self.down:
            made.append(x)
            x = block(x)
        for block in self.up:
            x = block(x, made.pop()) if self.is_read else block(x)
        return x, made


def holding(is_read: bool) -> Step:
    return Step(Holding(is_read).train(), (torch.randn(512, 128),), {}, lambda output: output[0].square().mean())


class Widening(nn.Module):
    """The peak lies in the last block's own forward, which makes what the caller holds."""

    class Last(nn.Module):
        def __init__(self, width: int, saves: bool) -> None:
            super().__init__()
            self.linear, self.saves = nn.Linear(width, 16 * width), saves

        def forward(self, x: Tensor) -> Tensor:
            wide = self.linear(x)
            lower, higher = wide + 1, wide * 3
            return (lower + higher).relu() if self.saves else lower + higher

    def __init__(self, saves: bool, width: int = 64) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks, Widening.Last(width, saves))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def widening(saves: bool) -> Step:
    return Step(Widening(saves).train(), (torch.randn(512, 64),), {}, torch.mean)


class Quantized(nn.Module):
    """Blocks that leave a loss of one number, in the storage of all its terms on a CPU, in the place of None."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
            self.codes = nn.Embedding(16, width)
            self.commitment: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            z = self.inner(x)
            q = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
            self.commitment = F.mse_loss(z, q.detach())
            return x + torch.tanh(self.outer(z + (q - z).detach()))

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Quantized.Block(width) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, y: Tensor) -> Tensor:
        return y.square().mean() + sum(block.commitment for block in self.blocks)


class Featured(nn.Module):
    """Blocks that leave a large tensor for the loss."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
            self.feature: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.feature = torch.tanh(self.inner(x))
            return x + torch.tanh(self.outer(self.feature))

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Featured.Block(width) for _ in range(4)))

    def forward(self, x: Tensor) -> Any:
        return self.blocks(x)

    def loss(self, y: Tensor) -> Tensor:
        return y.square().mean() + sum(block.feature.square().mean() for block in self.blocks)


def featured() -> Step:
    model = Featured().train()
    return Step(model, (torch.randn(1024, 32),), {}, model.loss)


def quantized() -> Step:
    model = Quantized().train()
    return Step(model, (torch.randn(1024, 32),), {}, model.loss)


class Perceptron(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(before, 2 * after), nn.Linear(2 * after, after)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


AROUND = {
    "around-one": ((256, 256, 64, 64, 64, 256, 256), ((1, 5),)),
    "around-nested": ((64, 256, 128, 64, 64, 128, 256), ((1, 6), (2, 5), (3, 4))),
    "around-all": ((512, 32, 32, 32, 512), ((0, 4),)),
    "around-other-sizes": ((64, 64, 512, 64, 64), ((1, 3), (2, 4))),
}


def around(name: str) -> Step:
    widths, ways = AROUND[name]
    return Step(Around(widths, ways).train(), (torch.randn(512, widths[0]),), {}, lambda y: y.square().mean())
