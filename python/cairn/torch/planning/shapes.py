"""The shapes of a step's inputs, and by how much they have grown."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base.errors import Unsupported
from ..base.tree import tensors_in

STEPS_PER_DOUBLING = 8  # of a size, when shapes are rounded up

Shape = tuple[str, tuple[int, ...]]  # type and sizes of a tensor

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def sized(value: Any) -> list[torch.Tensor]:
    """The tensors that a plan is made for: single numbers, such as a divisor of the loss, do not change it."""
    tensors = [t for t in tensors_in(value) if t.dim() > 0]
    if any(t.is_nested for t in tensors):
        raise Unsupported(
            "a nested tensor among the model's arguments has no sizes that a plan could be made for: pass its values "
            "and offsets, or pad it, and make it nested inside the model"
        )
    return tensors


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Type and shape of every tensor in a model's arguments, as in a plan's fingerprint: "float32[8, 3, 32, 32]"."""
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in sized((args, dict(kwargs)))]


def names_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The parameters of a model's forward that are given such tensors, in alphabetical order."""
    parameters = [p for p in inspect.signature(type(model).forward).parameters.values() if p.kind in _POSITIONAL][1:]
    names = [parameter.name for parameter in parameters] + [f"argument {i}" for i in range(len(parameters), len(args))]
    return sorted(name for name, value in (*zip(names, args, strict=False), *kwargs.items()) if sized(value))


def _parsed(text: str) -> Shape:
    dtype, _, sizes = text.rstrip("]").partition("[")
    return dtype, tuple(int(size) for size in sizes.split(",") if size.strip())


def _paired(actual: Sequence[str], expected: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """The sizes of tensors that correspond; None if some have no counterpart.

    Tensors correspond by position, or else by type and then size, because keywords have no order.
    """
    pairs = list(zip(map(_parsed, actual), map(_parsed, expected), strict=False))
    if len(actual) != len(expected) or any(_kind(a) != _kind(b) for a, b in pairs):
        ours, theirs = sorted(map(_parsed, actual), key=_order), sorted(map(_parsed, expected), key=_order)
        pairs = list(zip(ours, theirs, strict=False))
    if len(actual) != len(expected) or any(_kind(a) != _kind(b) for a, b in pairs):
        return None
    return [(a[1], b[1]) for a, b in pairs]


def _kind(shape: Shape) -> tuple[str, int]:
    return shape[0], len(shape[1])


def _order(shape: Shape) -> Any:
    return _kind(shape), shape[1]


_FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def _widened(actual: Sequence[str], expected: Sequence[str]) -> list[str]:
    """The actual tensors. A tensor of a narrower floating type than its counterpart gets the counterpart's type.

    A wrapper may cast the arguments of the model.
    """
    widened = []
    for ours, theirs in zip(actual, expected, strict=True):
        (dtype, _, sizes), wider = ours.partition("["), theirs.partition("[")[0]
        is_narrower = dtype in _FLOATS and wider in _FLOATS and _FLOATS[dtype] < _FLOATS[wider]
        widened.append(f"{wider}[{sizes}" if is_narrower else ours)
    return widened


def is_covered(actual: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether no tensor is larger anywhere than its counterpart."""
    pairs = _paired(actual if len(actual) != len(expected) else _widened(actual, expected), expected)
    return pairs is not None and all(a <= b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


@dataclasses.dataclass(frozen=True)
class Growth:
    """By how much inputs have grown: their first size, and all other sizes together."""

    batch: float
    other: float

    @property
    def linear(self) -> float:
        """The growth of memory that is proportional to the size of the inputs."""
        return self.batch * self.other

    @property
    def most(self) -> float:
        """The growth of memory that is proportional to pairs of the inputs' elements within a sample."""
        return self.batch * self.other**2


def growth(actual: Sequence[str], expected: Sequence[str]) -> Growth | None:
    """The growth from the expected shapes to the actual ones. Sizes that became smaller count as equal.

    None if it is unknown: a tensor has no counterpart, or had a size of zero.
    """
    ratios = _ratios(actual, expected)
    return None if ratios is None else _growth_of([[max(1.0, ratio) for ratio in sizes] for sizes in ratios])


def numbers_grown(actual: Sequence[str], expected: Sequence[str]) -> Growth | None:
    """Like `growth`, but sizes that became smaller make up for others that have grown.

    At least 1, because some memory depends on no size. Memory that depends only on the sizes that have grown may grow
    by more.
    """
    ratios = _ratios(actual, expected)
    if ratios is None:
        return None
    by = _growth_of(ratios)
    linear = max(1.0, by.linear)
    return Growth(linear**2 / max(linear, by.most), max(linear, by.most) / linear)


def _ratios(actual: Sequence[str], expected: Sequence[str]) -> list[list[float]] | None:
    """The ratio by which each size of each tensor has grown or shrunk. Scalars have no sizes and are left out."""
    pairs = _paired(actual, expected)
    if pairs is None or any(0 in theirs for _, theirs in pairs):
        return None
    return [[a / b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in pairs if ours]


def _growth_of(ratios: Sequence[Sequence[float]]) -> Growth:
    batch = max((sizes[0] for sizes in ratios), default=1.0)
    return Growth(batch, max((math.prod(sizes[1:]) for sizes in ratios), default=1.0))


def grows_from_one(actual: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether a size of one has grown."""
    pairs = _paired(actual, expected) or []
    return any(b == 1 < a for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def rounded_up(actual: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Shapes that cover the actual ones: sizes that have grown lie on a grid that doubles in eight steps."""
    pairs = _paired(actual, expected) or []
    grown = {a for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True) if a > b}
    parsed = [_parsed(text) for text in actual]
    return [f"{dtype}{[_on_grid(s) if s in grown else s for s in sizes]}" for dtype, sizes in parsed]


def _on_grid(size: int) -> int:
    step = max(1, 2 ** (size.bit_length() - 1) // STEPS_PER_DOUBLING)
    return -(-size // step) * step


def count_of(shapes: Sequence[str]) -> int:
    """The number of elements of tensors of these shapes."""
    return sum(math.prod(_parsed(text)[1]) for text in shapes)


def largest_of(shapes: Sequence[str]) -> int:
    """The number of elements of the largest of them."""
    return max((count_of([text]) for text in shapes), default=0)
