"""Models whose blocks are compiled one by one; `checkpointed` of the blocks keep their inputs alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """Tokens to the loss of predicting each from those before it; `body` runs the blocks."""

    def __init__(self, blocks: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(blocks)
        self.checkpointed = 0

    def run(self, index: int, *args: torch.Tensor) -> torch.Tensor:
        """One block, checkpointed or not."""
        block = self.blocks[index]
        found: torch.Tensor = (
            checkpoint(block, *args, use_reentrant=False) if index < self.checkpointed else block(*args)
        )
        return found

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks in a row."""
        for index in range(len(self.blocks)):
            x = self.run(index, x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.body(self.embed(ids))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Attending(nn.Module):
    """Attention over all positions, a GELU between two products, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        batch, length, width = x.shape
        mixed = self.mix(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)), approximate="tanh")), 0.1)


class Experts(nn.Module):
    """Each token goes to the expert that scores highest: how many there are of each is known only when it runs."""

    def __init__(self, width: int, count: int = 2) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        tokens = self.norm(x).flatten(0, 1)
        best, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            index = torch.nonzero(chosen == number).squeeze(-1)
            out = out.index_add(0, index, best[index].unsqueeze(-1) * expert(tokens[index]))
        return x + out.view_as(x)


class Decoding(nn.Module):
    """Attention to a memory, and a GELU between two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.both = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """[batch, length, width], and the memory, to the first's shape."""
        query = self.query(self.first(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.both(memory).chunk(2, -1))
        seen = F.scaled_dot_product_attention(query, key, value)
        x = x + F.dropout(seen.transpose(1, 2).flatten(2), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class Gated(nn.Module):
    """Normalization by the mean square, rotated positions, heads that share keys and values, and a gated product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(2, width // 32)
        self.shared, size = max(1, self.heads // 2), width // self.heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.both = (nn.Linear(width, n * size, bias=False) for n in (self.heads, 2 * self.shared))
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(3 * width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        seen = self.first(x)
        query = self.rotated(self.query(seen).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        key, value = (t.unflatten(-1, (self.shared, -1)).transpose(1, 2) for t in self.both(seen).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(query, self.rotated(key), value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        seen = self.second(x)
        return x + self.down(F.silu(self.gate(seen)) * self.up(seen))

    @staticmethod
    def rotated(x: torch.Tensor) -> torch.Tensor:
        """Pairs of numbers turned by angles that grow with the position."""
        first, second = x.chunk(2, -1)
        rates = 10_000 ** -torch.linspace(0, 1, first.shape[-1])
        angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), rates)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )


class Convolving(nn.Module):
    """A convolution of each feature by itself, then two products with a GELU between them, and a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near, self.norm = nn.Conv1d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        seen = self.norm(self.near(x.transpose(1, 2)).transpose(1, 2))
        return x + self.scale * self.down(F.gelu(self.up(seen)))


class EncoderDecoder(Blocks):
    """Half of the blocks encode, the others decode; every block ends with a graph break of the model."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """The decoder reads what the encoder made of the same tokens.

        Each has a copy of them: a value that several blocks read more than once has its gradients added in another
        order where blocks are compiled, by any backend.
        """
        half, start, x = len(self.blocks) // 2, x.clone(), x.clone()
        for index in range(half):
            x = self.run(index, x)
            torch._dynamo.graph_break()
        memory, x = x, start
        for index in range(half, len(self.blocks)):
            x = self.run(index, x, memory)
            torch._dynamo.graph_break()
        return x


def made(name: str, layers: int, width: int, vocabulary: int) -> Blocks:
    """A model by name, each time with the same weights."""
    torch.manual_seed(0)
    kinds: dict[str, list[Any]] = {
        "mixture": [Experts],
        "encoder-decoder": [Attending, Decoding],
        "gated": [Gated],
        "convolutions": [Convolving],
    }
    classes = kinds.get(name, [Attending])
    blocks = [classes[index * len(classes) // layers](width) for index in range(layers)]
    return (EncoderDecoder if name == "encoder-decoder" else Blocks)(blocks, width, vocabulary)


NAMES = ("gpt", "mixture", "encoder-decoder", "sharded", "gated", "convolutions")
