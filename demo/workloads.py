"""The two networks that the demo trains, and their real data, which comes with Python and with scikit-learn.

Everything is seeded: two runs of the same workload see the same weights, batches and dropout masks, so that their
losses can be compared bit for bit.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and batches of (input, target) without end."""

    model: nn.Module
    blocks: nn.ModuleList
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation around a skip connection; halves the image where channels change."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = 1 if out == channels else 2
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.skip(x) + self.norm2(self.conv2(y)))


class ResidualNetwork(nn.Module):
    """A deep residual network for images of one channel and ten classes; widths: the channels of its blocks."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1)
        inputs = [widths[0], *widths]
        self.blocks = nn.ModuleList(ResidualBlock(a, b) for a, b in zip(inputs, widths, strict=False))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class TransformerBlock(nn.Module):
    """Causal self-attention and a four times wider perceptron, each behind a layer normalisation, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
        weights = self.dropout(scores.masked_fill(mask, float("-inf")).softmax(-1))
        return self.projection((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharacterModel(nn.Module):
    """A small GPT over characters."""

    def __init__(self, vocabulary: int, length: int, depth: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _digit_batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(images), (size,), generator=generator)
        yield F.interpolate(images[chosen], size=(32, 32), mode="bilinear"), labels[chosen]


def _text_batches(text: Tensor, size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
        windows = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def cnn(widths: Sequence[int] = (32,) * 32, batch: int = 16) -> Workload:
    """A residual network on handwritten digits (scikit-learn's, scaled to 32x32)."""
    torch.manual_seed(0)
    model = ResidualNetwork(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Workload(model, model.blocks, F.cross_entropy, optimizer, _digit_batches(batch))


def gpt(depth: int = 16, width: int = 128, batch: int = 8, length: int = 256) -> Workload:
    """A character GPT on the text of Python's own help topics."""
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([alphabet[character] for character in text])
    torch.manual_seed(0)
    model = CharacterModel(len(alphabet), length, depth, width, heads=4, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Workload(model, model.blocks, loss, optimizer, _text_batches(encoded, batch, length))


WORKLOADS: dict[str, Callable[[], Workload]] = {"cnn": cnn, "gpt": gpt}
