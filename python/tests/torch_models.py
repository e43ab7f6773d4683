"""Small models of every kind that the tests train, each with its sample step. Seeded by the caller."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass
class Step:
    """A model and one training step of it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_fn: Callable[[Any], Tensor] | None = None
    blocks: Any = "auto"

    def loss(self) -> Tensor:
        output = self.model(*self.args, **self.kwargs)
        return output.loss if self.loss_fn is None else self.loss_fn(output)

    @property
    def sample(self) -> dict[str, Any]:
        """As keyword arguments of cairn.torch.verify."""
        return {"args": self.args, "kwargs": self.kwargs, "loss_fn": self.loss_fn}

    @property
    def profiling(self) -> dict[str, Any]:
        """As keyword arguments of cairn.torch.profile."""
        return {**self.sample, "blocks": self.blocks}


def classification(model: nn.Module, images: Tensor, classes: int) -> Step:
    target = torch.randint(classes, (len(images),))
    return Step(model.train(), (images,), {}, lambda output: F.cross_entropy(output, target))


def cnn() -> Step:
    """Unlike layers in a Sequential, one of them in place."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return classification(model, torch.randn(8, 3, 64, 64), 10)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.reduce = nn.Sequential(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width))
        self.spatial = nn.Sequential(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width))
        self.expand = nn.Sequential(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.reduce(x))
        y = self.expand(self.relu(self.spatial(y)))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, head."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width))
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        channels, layers = width, []
        for stage, count in enumerate(blocks):
            for index in range(count):
                layers.append(Bottleneck(channels, width * 2**stage, 2 if stage and not index else 1))
                channels = 4 * width * 2**stage
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.relu(self.stem(images)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def resnet(blocks: tuple[int, ...] = (2, 2, 1, 1), width: int = 16, batch: int = 4, size: int = 96) -> Step:
    return classification(ResNet(blocks, width, 20), torch.randn(batch, 3, size, size), 20)


def vgg(width: int = 16, batch: int = 4, size: int = 64) -> Step:
    """Plain layers in a Sequential, activations in place."""
    layers: list[nn.Module] = []
    before = 3
    for factor in (1, 1, 0, 2, 2, 0, 4, 4, 0):
        if not factor:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [
            nn.Conv2d(before, factor * width, 3, padding=1),
            nn.BatchNorm2d(factor * width),
            nn.ReLU(inplace=True),
        ]
        before = factor * width
    layers += [nn.Flatten(), nn.Linear(before * (size // 8) ** 2, 128), nn.ReLU(inplace=True), nn.Dropout()]
    return classification(nn.Sequential(*layers, nn.Linear(128, 20)), torch.randn(batch, 3, size, size), 20)


class Branches(nn.Module):
    """Not a chain: two branches meet, an early value is read again at the end, a layer runs twice."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.left, self.right = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.twice = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Tanh())
        self.leave = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        early = torch.relu(self.enter(x))
        y = self.left(early) * torch.sigmoid(self.right(early))
        y = self.twice(self.twice(y)) * scale
        return {"value": self.leave(y) + early, "unused": y.detach().sum()}


def branches() -> Step:
    x, scale = torch.randn(1024, 64), torch.rand(128)
    return Step(Branches().train(), (x,), {"scale": scale}, lambda output: output["value"].square().mean())


class Layers(nn.Module):
    """A transformer as it is written by hand: lists of layers, and functions between them."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.inward = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outward = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, inward in enumerate(self.inward):
            parts = inward(self.norms[2 * layer](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
            x = x + F.dropout(self.outward[layer](seen.transpose(1, 2).flatten(2)), 0.1, self.training)
            x = x + F.dropout(
                self.down[layer](F.gelu(self.up[layer](self.norms[2 * layer + 1](x)))), 0.1, self.training
            )
        return x


def layers() -> Step:
    return Step(Layers().train(), (torch.randn(8, 64, 64),), {}, lambda output: output.square().mean())


class Convolutions(nn.Module):
    """The same of convolutions, some of it in place."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width if i else 3, width, 3, padding=1) for i in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(5))
        self.leave = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.relu(norm(conv(x)), inplace=place % 2 == 1)
            if place == 2:
                x = F.dropout2d(F.max_pool2d(x, 2), 0.2, self.training)
        return self.leave(x.mean((2, 3)))


def convolutions() -> Step:
    return classification(Convolutions(), torch.randn(4, 3, 48, 48), 10)


# -- with something odd about memory -------------------------------------------------------------------------


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


# -- Hugging Face, randomly initialised ----------------------------------------------------------------------


class Encoding(nn.Module):
    """A variational autoencoder: what its last encoder block saves itself is saved outside of blocks, too."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.mean, self.deviation = nn.Linear(64, 16), nn.Linear(64, 16)
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, deviation = self.mean(h), self.deviation(h)
        return self.decoder(mean + torch.randn_like(mean) * (deviation / 2).exp()), mean, deviation


def encoding() -> Step:
    x = torch.rand(512, 256)

    def loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        made, mean, deviation = output
        return F.mse_loss(made, x) - 0.5 * (1 + deviation - mean**2 - deviation.exp()).mean()

    return Step(Encoding().train(), (x,), {}, loss)


class Skipping(nn.Module):
    """A U-Net: what its transposed convolutions return is copied into something larger, and nobody keeps it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Sequential:
            first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
            rest = nn.BatchNorm2d(after), nn.ReLU(inplace=True)
            return nn.Sequential(first, nn.BatchNorm2d(after), nn.ReLU(inplace=True), second, *rest)

        self.down = nn.ModuleList([twice(3, width), twice(width, 2 * width)])
        self.middle, self.leave = twice(2 * width, 4 * width), nn.Conv2d(width, 3, 1)
        sizes = ((4 * width, 2 * width), (2 * width, width))
        self.up = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, 2) for before, after in sizes)
        self.joined = nn.ModuleList(twice(before, after) for before, after in sizes)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([skipped.pop(), up(x)], 1))
        return self.leave(x)


def unet(layout: torch.memory_format = torch.contiguous_format) -> Step:
    images, target = torch.randn(2, 3, 64, 64).contiguous(memory_format=layout), torch.randint(3, (2, 64, 64))
    model = Skipping().train().to(memory_format=layout)
    return Step(model, (images,), {}, lambda output: F.cross_entropy(output, target))


def gpt2(layers: int = 3, width: int = 128, vocabulary: int = 1000, length: int = 128) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=vocabulary,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    tokens = torch.randint(vocabulary, (2, length))
    return Step(GPT2LMHeadModel(config).train(), (), {"input_ids": tokens, "labels": tokens})


def bert() -> Step:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=3, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=1000
    )
    tokens = torch.randint(1000, (4, 64))
    mask = torch.ones_like(tokens)
    return Step(BertForMaskedLM(config).train(), (), {"input_ids": tokens, "labels": tokens, "attention_mask": mask})


def llama() -> Step:
    """The embedding is the head's weight."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=344,
        vocab_size=1000,
        tie_word_embeddings=True,
        use_cache=False,
    )
    tokens = torch.randint(1000, (2, 128))
    return Step(LlamaForCausalLM(config).train(), (), {"input_ids": tokens, "labels": tokens})


def mixtral() -> Step:
    """Experts chosen by a router."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=500,
        num_local_experts=4,
        use_cache=False,
    )
    tokens = torch.randint(500, (2, 128))
    return Step(MixtralForCausalLM(config).train(), (), {"input_ids": tokens, "labels": tokens})


def t5() -> Step:
    """Encoder and decoder: a value that all decoder blocks read, and biases that the first block hands to the rest."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=2,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_heads=4,
        vocab_size=500,
        use_cache=False,
        decoder_start_token_id=0,
    )
    tokens = torch.randint(500, (4, 64))
    return Step(T5ForConditionalGeneration(config).train(), (), {"input_ids": tokens, "labels": tokens})


def vit() -> Step:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4, hidden_size=96, num_attention_heads=3, intermediate_size=384, image_size=64, patch_size=8
    )
    labels = torch.zeros(4, dtype=torch.long)
    kwargs = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": labels}
    return Step(ViTForImageClassification(config).train(), (), kwargs)


PLAIN = {"cnn": cnn, "resnet": resnet, "vgg": vgg, "branches": branches}
HUGGING_FACE = {"gpt2": gpt2, "bert": bert, "llama": llama, "mixtral": mixtral, "t5": t5, "vit": vit}
ALL = {**PLAIN, **HUGGING_FACE}
ODD = {
    "recurrent": recurrent,
    "recurrent-residual": functools.partial(recurrent, residual=True),
    "flattened": functools.partial(flattened, False),
    "flattened-saving": functools.partial(flattened, True),
    "flattened-penalized": functools.partial(flattened, False, Penalized),
    "pooled": pooled,
    "returning": returning,
    "tabled": tabled,
    "shared": shared,
    "joined": joined,
    "complex": complex_numbers,
    "rotated": rotated,
    "encoding": encoding,
    "encoding-apart": lambda: dataclasses.replace(encoding(), blocks=["encoder", "mean", "deviation", "decoder"]),
    "branches-apart": lambda: dataclasses.replace(branches(), blocks=["enter", "left", "right", "twice", "leave"]),
    "layers": layers,
    "layers-apart": lambda: dataclasses.replace(layers(), blocks="*.*"),
    "convolutions": convolutions,
    "unet": unet,
    "unet-channels-last": functools.partial(unet, torch.channels_last),
    "listing": functools.partial(listing, False),
    "listing-chain": functools.partial(listing, True),
    "widening": functools.partial(widening, False),
    "widening-saving": functools.partial(widening, True),
    **{name: functools.partial(around, name) for name in AROUND},
}


# -- no chains, or with something that is changed while the step runs ------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Interleaved(nn.Module):
    """Two streams take turns in the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        for layer in self.layers:
            x, y = layer(x), layer(y)
        return x + y


class Growing(nn.Module):
    """Reads everything that was made before it, in one list, as DenseNet's layers do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 8, 3, padding=1)

    def forward(self, earlier: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(earlier, 1))))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.leave = nn.ModuleList(Growing(16 + 8 * i) for i in range(4)), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(found))
        return self.leave(torch.cat(found, 1).mean((2, 3)))


class Doubled(nn.Module):
    """Its backward does not need what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x * 2))


class Paired(nn.Module):
    """The gradients of the last layer's two outputs are one, that of their sum."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.left(x)) + y, torch.sigmoid(self.right(y)) * x

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Paired.Layer(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            x, y = layer(x, y)
        return x + y


class Overwriting(nn.Module):
    """Adds to what its layers have read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Doubled() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x += layer(x)
        return x


class Remembering(nn.Module):
    """Puts a new tensor in the place of its buffer in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.inner(x + self.mean)


class Conditioned(nn.Module):
    """Shifts by the embedding of a class."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.classes, self.linear = nn.Embedding(1000, width), nn.Linear(width, width)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + self.classes(label)[:, None])


class Lending(nn.Module):
    """The embedding of the first layer runs once more behind all layers, as in diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Conditioned() for _ in range(3))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, label)
        return x * self.layers[0].classes(label)[:, None]


def reconstructing() -> Step:
    """The loss takes more in its forward than in its backward."""
    widths = (128, 64, 32, 64, 128)
    layers = [
        part for width, after in zip(widths, widths[1:], strict=False) for part in (nn.Linear(width, after), nn.Tanh())
    ]
    x = torch.rand(2048, 128)
    return Step(nn.Sequential(*layers[:-1]).train(), (x,), {}, lambda output: 2 * F.mse_loss(output, x))


def squared(model: nn.Module, *args: Tensor) -> Step:
    return Step(model.train(), args, {}, lambda output: output.square().mean())


TANGLED = {
    "interleaved": lambda: squared(Interleaved(), torch.randn(512, 64)),
    "dense": lambda: squared(Dense(), torch.randn(4, 16, 32, 32)),
    "paired": lambda: squared(Paired(), torch.randn(1024, 64)),
    "overwriting": lambda: squared(Overwriting(), torch.randn(512, 64)),
    "remembering": lambda: squared(nn.Sequential(*(Remembering() for _ in range(3))), torch.randn(512, 64)),
    "lending": lambda: squared(Lending(), torch.randn(4, 64, 32), torch.randint(1000, (4,))),
    "reconstructing": reconstructing,
    "sparse": lambda: squared(
        nn.Sequential(nn.Embedding(100, 64, sparse=True), *(Residual() for _ in range(3))), torch.randint(100, (16, 32))
    ),
}


def made(name: str) -> Step:
    """One of all these, by its name. Where its package is missing, the test that asks is skipped."""
    if name in HUGGING_FACE:
        import pytest  # here, for benchmarks do without

        pytest.importorskip("transformers")
    return (ALL | ODD | TANGLED)[name]()


class Stateful(nn.Module):
    """Begins with the state that its last forward has left, which is no small tensor."""

    def __init__(self, is_set: bool = False) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(64, 64) for _ in range(2))
        self.state: torch.Tensor | None = torch.randn(64, 64) if is_set else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.cells:
            x = cell(x, self.state)
        self.state = x.detach()
        return x
