"""Small models of every kind that the tests train, each with its sample step, by name. Seeded by the caller."""

from __future__ import annotations

import dataclasses
import functools

import torch
from hugging_face_models import bert, encoding, gpt2, llama, mixtral, t5, unet, vit
from model_steps import Step, classification, squared
from odd_models import (
    AROUND,
    Penalized,
    around,
    complex_numbers,
    featured,
    flattened,
    holding,
    joined,
    listing,
    pooled,
    quantized,
    recurrent,
    returning,
    rotated,
    shared,
    tabled,
    widening,
)
from plain_models import Bottleneck, Branches, Layers, branches, cnn, convolutions, layers, resnet, vgg
from tangled_models import (
    Dense,
    Interleaved,
    Lending,
    Overwriting,
    Paired,
    Remembering,
    Residual,
    Stateful,
    reconstructing,
)
from torch import nn

__all__ = [
    "ALL",
    "Bottleneck",
    "Branches",
    "HUGGING_FACE",
    "Layers",
    "ODD",
    "PLAIN",
    "Residual",
    "Stateful",
    "Step",
    "TANGLED",
    "around",
    "branches",
    "classification",
    "cnn",
    "featured",
    "gpt2",
    "holding",
    "layers",
    "made",
    "quantized",
    "recurrent",
    "resnet",
    "shared",
    "vgg",
]

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
