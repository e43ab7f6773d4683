"""Small models that are no chains, or change something while a step runs."""

from __future__ import annotations

import torch
from model_steps import Step
from torch import Tensor, nn
from torch.nn import functional as F


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
