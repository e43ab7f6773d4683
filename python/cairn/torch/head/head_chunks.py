"""Parts of a head's logits, and their gradients: some rows (tokens), some columns (words).

PyTorch's own kernels do all of it, so a part comes out as in the whole, but for matrix products: `head_proof.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.nn import functional as F

ALL = slice(None)
LEAST_ROWS, LEAST_COLUMNS = 16, 64  # of a part: a few are computed in other ways than many
TILE_BYTES = 2**21  # of logits worked on at a time, elementwise: what a core's cache holds


def slices(count: int, size: int, least: int = 1) -> Iterator[slice]:
    """`count` things in parts of `size`; a rest of fewer than `least` belongs to the last part. None if `size` is 0."""
    start = 0
    while start < count and size:
        stop = start + size if count - start - size >= least else count
        yield slice(start, stop)
        start = stop


def row_slices(count: int, size: int) -> Iterator[slice]:
    """`count` rows in parts of `size`, without a small rest."""
    return slices(count, size, LEAST_ROWS)


def column_slices(count: int, size: int) -> Iterator[slice]:
    """`count` columns in parts of `size`, without a small rest."""
    return slices(count, size, LEAST_COLUMNS)


def _largest(parts: Iterator[slice]) -> int:
    return max((part.stop - part.start for part in parts), default=0)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How many rows or columns of logits there are at a time: in the forward, in the backward, and for the gradient of
    the input. 0 columns: all gradients are made by rows; 0 rows of the input's: it is added up over the columns.
    """

    rows: int
    columns: int = 0
    input_rows: int = 0

    def largest(self, rows: int, words: int) -> int:
        """The most logits that there are at a time, of a head with so many rows and words."""
        most_rows = max(_largest(row_slices(rows, size)) for size in (self.rows, self.input_rows))
        return max(most_rows * words, _largest(column_slices(words, self.columns)) * rows)


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear layer, and what goes into it."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def rows(self) -> int:
        return self.input.shape[0]

    @property
    def words(self) -> int:
        return self.weight.shape[0]

    def logits(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """A part of its results."""
        return F.linear(self.input[rows], self.weight[columns], None if self.bias is None else self.bias[columns])


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Two numbers of each row: the largest logit, and the logarithm of the sum of exp(logit - largest logit)."""

    largest: torch.Tensor
    denominator: torch.Tensor

    @classmethod
    def of(cls, head: Head, target: torch.Tensor, rows: int) -> tuple[Softmax, torch.Tensor]:
        """Also the logarithm of each target's probability, by so many rows at a time."""
        largest, denominator, picked = (head.input.new_empty(head.rows, 1) for _ in range(3))
        for part in row_slices(head.rows, rows):
            logits = head.logits(part)
            largest[part] = logits.amax(1, keepdim=True)
            torch.ops.aten._log_softmax.out(logits, 1, False, out=logits)
            # of the largest logit, 0 - denominator
            denominator[part] = logits.amax(1, keepdim=True).neg_()
            picked[part] = logits.gather(1, target[part])
        return cls(largest, denominator), picked


@dataclasses.dataclass
class Gradients:
    """The gradients that a backward makes; None for those that nobody needs."""

    input: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def empty(cls, head: Head, of_input: bool, of_weight: bool, of_bias: bool) -> Gradients:
        """Not yet computed."""
        return cls(
            torch.empty_like(head.input) if of_input else None,
            torch.empty_like(head.weight) if of_weight else None,
            torch.empty_like(head.bias) if of_bias and head.bias is not None else None,
        )


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward of a head and its cross entropy.

    `target` and `of_picked` have one column: where each row's target is (anywhere, for ignored rows), and the gradient
    of the logarithm of its probability.
    """

    head: Head
    softmax: Softmax
    target: torch.Tensor
    of_picked: torch.Tensor

    def of_logits(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """The gradient of a part of the logits."""
        logits = self.head.logits(rows, columns)
        largest, denominator = self.softmax.largest[rows], self.softmax.denominator[rows]
        target, of_picked = self.target[rows], self.of_picked[rows]
        first, width = columns.start or 0, logits.shape[1]
        place = torch.where((target >= first) & (target < first + width), target - first, width)
        for part in slices(logits.shape[0], max(1, TILE_BYTES // (width * logits.element_size()))):
            logarithm = logits.new_zeros(logits[part].shape[0], width + 1)
            of_logarithm = torch.zeros_like(logarithm).scatter_(1, place[part], of_picked[part])
            inner = logarithm[:, :width]
            torch.sub(logits[part], largest[part], out=inner).sub_(denominator[part])
            made = torch.ops.aten._log_softmax_backward_data(of_logarithm, logarithm, 1, logits.dtype)
            logits[part] = made[:, :width]
        return logits

    def add_columns(self, columns: slice, to: Gradients, sums_input: bool) -> torch.Tensor:
        """Add the contribution of these columns of the logits to the gradients. Returns the gradient of the columns."""
        grad = self.of_logits(columns=columns)
        if to.weight is not None:
            torch.mm(grad.t(), self.head.input, out=to.weight[columns])
        if to.bias is not None:
            torch.sum(grad, 0, out=to.bias[columns])
        if to.input is not None and sums_input:
            torch.addmm(to.input, grad, self.head.weight[columns], beta=int(bool(columns.start)), out=to.input)
        return grad

    def set_rows(self, rows: slice, of_input: torch.Tensor) -> None:
        """The gradient of these rows of the input."""
        torch.mm(self.of_logits(rows), self.head.weight, out=of_input[rows])

    def run(self, chunks: Chunks, of_input: bool, of_weight: bool, of_bias: bool) -> Gradients:
        """All gradients that are asked for."""
        made = Gradients.empty(self.head, of_input, False, False)
        if made.input is not None and chunks.input_rows:
            for rows in row_slices(self.head.rows, chunks.input_rows):
                self.set_rows(rows, made.input)
        if chunks.columns:
            others = Gradients.empty(self.head, False, of_weight, of_bias)
            made.weight, made.bias = others.weight, others.bias
            for columns in column_slices(self.head.words, chunks.columns):
                self.add_columns(columns, made, not chunks.input_rows)
        return made
