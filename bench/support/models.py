"""Models of real size for the training benchmarks, randomly initialised; the small ones are those of the tests."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from plain_models import Layers
from torch_models import ALL, Bottleneck, Step, classification

__all__ = ["LARGE", "MODELS", "Layers", "Step", "gpt2_small", "mlp", "resnet50", "vgg16", "vit_small"]


class _Head(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def resnet50(batch: int = 4, size: int = 160) -> Step:
    """As a Sequential of stem, bottlenecks and head, so that checkpoint_sequential can run it."""
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    layers: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            layers.append(Bottleneck(channels, 64 * 2**stage, 2 if stage and not index else 1))
            channels = 256 * 2**stage
    model = nn.Sequential(stem, *layers, _Head(channels, 1000))
    return classification(model, torch.randn(batch, 3, size, size), 1000)


def vgg16(batch: int = 4, size: int = 128) -> Step:
    """With BatchNorm; each convolution with its normalisation and activation is one element."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()))
        before = width
    layers += [nn.Flatten(), nn.Linear(before * (size // 32) ** 2, 512), nn.ReLU(), nn.Linear(512, 1000)]
    return classification(nn.Sequential(*layers), torch.randn(batch, 3, size, size), 1000)


def gpt2_small(batch: int = 2, length: int = 256) -> Step:
    """12 layers, tied embedding of 50,257 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False, loss_type="ForCausalLM")).train()
    tokens = torch.randint(50257, (batch, length))
    return Step(model, (), {"input_ids": tokens, "labels": tokens})


def vit_small(batch: int = 8, size: int = 160) -> Step:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, image_size=size)
    labels = torch.zeros(batch, dtype=torch.long)
    return Step(
        ViTForImageClassification(config).train(),
        (),
        {"pixel_values": torch.randn(batch, 3, size, size), "labels": labels},
    )


def mlp(depth: int = 32, width: int = 512, batch: int = 2048) -> Step:
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    x = torch.randn(batch, width)
    return Step(nn.Sequential(*layers).train(), (x,), {}, lambda output: F.mse_loss(output, x))


LARGE: dict[str, Callable[..., Step]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "gpt2-small": gpt2_small,
    "vit-small": vit_small,
    "mlp": mlp,
}
MODELS: dict[str, Callable[..., Step]] = {
    **{f"tiny-{name}": make for name, make in ALL.items()},
    "tiny-mlp": functools.partial(mlp, depth=4, width=64, batch=64),
    **LARGE,
}
