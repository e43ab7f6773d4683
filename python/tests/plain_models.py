"""Small convolutional and plain models, each with its sample step."""

from __future__ import annotations

import torch
from model_steps import Step, classification
from torch import Tensor, nn
from torch.nn import functional as F


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

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.inward = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outward = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, inward in enumerate(self.inward):
            parts = inward(self.norms[2 * layer](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
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
