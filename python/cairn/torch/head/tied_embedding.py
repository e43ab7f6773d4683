"""The gradient of a tied embedding in one copy instead of three, bit for bit the same.

Problem. Where one weight is the embedding of a model and its head, it gets two gradients. Autograd's engine holds the
head's until the embedding's has come, which is as large, although only the rows of the tokens that occurred differ from
zero; then it may add the two into a third. For GPT-2 small these are three times 147 MiB at the end of the backward.

Method. All uses of the weight go through a node of their own, `_Tie`, the same one for all forwards whose graphs live
at the same time. A use does not return its gradient but adds it to a sum that they share, in the order in which the
engine reaches them; the embedding adds the rows that occurred. When the last use has run, the engine reaches the tie,
which returns the sum.

Why it is the same. The sum of a row's gradients is computed by the kernel of the whole embedding, which adds them in
the order of the tokens, for a table of only those rows. All other rows would have added 0.0, which changes nothing but
-0.0; so 0.0 is added. Contributions are added in the order in which the engine would add them.

The sum is written into the first gradient of the whole weight: a matrix product that a use's own operation has just
made, and nobody else has. (The engine does not dare to: the product comes as a view of itself, transposed twice.)

A backward that itself is to be differentiated goes the ordinary way. So do uses under autocast, which shares copies of
the weight, and with them the sums of gradients, among the operations of a region.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn import functional as F

from ..base import _compat


@dataclasses.dataclass(frozen=True)
class Rows:
    """A gradient of which only some rows differ from zero."""

    indices: torch.Tensor
    values: torch.Tensor
    count: int  # of all rows

    @classmethod
    def of_embedding(cls, grad: torch.Tensor, tokens: torch.Tensor, count: int, padding_idx: int) -> Rows:
        """The gradient of an embedding's weight, from the gradient of its output."""
        rows, places = torch.unique(tokens.long(), return_inverse=True)
        padding = (rows == padding_idx).nonzero()
        padding_place = int(padding) if padding.numel() else -1
        values = torch.ops.aten.embedding_dense_backward(grad, places, rows.numel(), padding_place, False)
        return cls(rows, values, count)

    def dense(self) -> torch.Tensor:
        """With the zeros."""
        whole = self.values.new_zeros((self.count, *self.values.shape[1:]))
        return whole.index_copy_(0, self.indices, self.values)


class _Sum:
    """The contributions to a weight's gradient so far in one backward."""

    def __init__(self) -> None:
        self._total: torch.Tensor | Rows | None = None
        self._backward = -1

    def add(self, part: torch.Tensor | Rows) -> None:
        """Add the contribution of one use."""
        if self._backward != _compat.backward_id():  # an earlier one may not have come to its end
            self._total, self._backward = None, _compat.backward_id()
        if self._total is None:
            self._total = part
            return
        if isinstance(self._total, Rows) and isinstance(part, Rows):
            self._total = self._total.dense()
        elif isinstance(self._total, Rows):
            self._total, part = part, self._total
        assert isinstance(self._total, torch.Tensor)
        if isinstance(part, Rows):
            self._total.index_add_(0, part.indices, part.values).add_(0.0)
        else:
            self._total.add_(part)

    def take(self) -> torch.Tensor | None:
        """The sum, and forgets it."""
        total, self._total = self._total, None
        return total.dense() if isinstance(total, Rows) else total


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return grad if grad is not None else ctx.total.take(), None


class _Use(torch.autograd.Function):
    """A use of the whole weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tie: Tie) -> torch.Tensor:
        ctx.tie = tie
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return grad, None
        ctx.tie.total.add(grad)
        return None, None


class _Lookup(torch.autograd.Function):
    """A use of some rows of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tokens: torch.Tensor, padding_idx: int, tie: Tie) -> torch.Tensor:
        ctx.tie, ctx.count, ctx.padding_idx = tie, weight.shape[0], padding_idx
        ctx.save_for_backward(tokens)
        return torch.embedding(weight, tokens, padding_idx)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            dense = torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.count, ctx.padding_idx, False)
            return dense, None, None, None
        ctx.tie.total.add(Rows.of_embedding(grad, tokens, ctx.count, ctx.padding_idx))
        return None, None, None, None


class Tie:
    """The uses of a weight in graphs that may have one backward. The graphs own it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.total = _Sum()
        self._of = _identity(weight)
        self._weight = _Tie.apply(weight, self.total)

    def holds_for(self, weight: torch.Tensor) -> bool:
        """Whether this is still the weight, unchanged."""
        return self._of == _identity(weight)

    def whole(self) -> torch.Tensor:
        """The weight, for one use."""
        return _Use.apply(self._weight, self)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`F.linear` with the weight."""
        return F.linear(x, self.whole(), bias)

    def embedding(self, tokens: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        """`F.embedding` with the weight."""
        return _Lookup.apply(self._weight, tokens, _row(padding_idx, self._weight), self)


def _row(padding_idx: int | None, weight: torch.Tensor) -> int:
    """The row whose gradient is none, for torch's own functions: they take -1 for no row at all."""
    return -1 if padding_idx is None else padding_idx % weight.shape[0]


def _identity(weight: torch.Tensor) -> tuple[int, int, int]:
    return id(weight), weight.data_ptr(), _compat.version(weight)


def proved(weight: torch.Tensor, tokens: torch.Tensor, padding_idx: int | None) -> bool:
    """Whether the rows of such a lookup's gradient come out bit for bit as in the whole."""
    with torch.no_grad():
        place = _row(padding_idx, weight)
        grad = torch.randn((*tokens.shape, weight.shape[1]), device=weight.device).to(weight.dtype)
        whole = torch.ops.aten.embedding_dense_backward(grad, tokens, weight.shape[0], place, False)
        return torch.equal(Rows.of_embedding(grad, tokens, weight.shape[0], place).dense(), whole)
