"""Determines the chunks in which a head's matrix products give the same bits as in the whole, by computing both.

The way in which a library divides a product depends on its shape, the alignment of its operands, the number of threads
and the processor, and not on the numbers. So the numbers are random. Two orders of addition of them often agree in one
sum by chance, but not in many: no part has fewer than LEAST_ROWS rows or LEAST_COLUMNS columns.
Only the weight is the model's own, because it is large, unless it has so many zeros that they could hide differences.
The whole computation by PyTorch is compared with the chunked forward and backward, by the same code that runs in
training: the logits, their gradient, and the gradients of input, weight and bias, each completely.

The tried numbers of columns are near the requested size, and multiples of the numbers that libraries sum at a time: MKL
sums long products in runs of 384, and shorter ones in runs of 1,536 = 4 x 384.

Memory: one tensor of logits and one gradient of the weight, as in the backward without chunks, and a few chunks. The
results are kept for the process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..base import _compat
from .head_chunks import (
    LEAST_COLUMNS,
    LEAST_ROWS,
    Backward,
    Chunks,
    Gradients,
    Head,
    Softmax,
    column_slices,
    row_slices,
)
from .loss import cross_entropy

ALIGNMENT = 64  # bytes, with which PyTorch allocates on the CPU
COLUMN_UNITS = (1536, 384, LEAST_COLUMNS)
ROW_UNITS = (64, LEAST_ROWS)
MORE_ROWS = (64, 128, 256, 512)
MANY_ZEROS = 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """All that the division of products may depend on, and which gradients are asked for."""

    rows: int
    width: int
    words: int
    dtype: str
    has_bias: bool
    input_offset: int  # from a multiple of ALIGNMENT, in bytes
    weight_offset: int
    of_input: bool
    of_weight: bool
    of_bias: bool
    chunk_bytes: int
    conditions: str

    @classmethod
    def of(cls, head: Head, chunk_bytes: int) -> Case:
        """The case of a call."""
        return cls(
            rows=head.rows,
            width=head.input.shape[1],
            words=head.words,
            dtype=str(head.input.dtype).removeprefix("torch."),
            has_bias=head.bias is not None,
            input_offset=head.input.data_ptr() % ALIGNMENT,
            weight_offset=head.weight.data_ptr() % ALIGNMENT,
            of_input=_is_differentiated(head.input),
            of_weight=_is_differentiated(head.weight),
            of_bias=_is_differentiated(head.bias),
            chunk_bytes=chunk_bytes,
            conditions=conditions(),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def columns_at_a_time(self) -> int:
        """About, by the bytes of logits that are asked for."""
        return self.chunk_bytes // (self.rows * self.torch_dtype.itemsize)

    @property
    def rows_at_a_time(self) -> int:
        """About, by the bytes of logits that are asked for."""
        return self.chunk_bytes // (self.words * self.torch_dtype.itemsize)


def _is_differentiated(tensor: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad


def conditions() -> str:
    """The conditions, besides the operands, that decide how a library divides up matrix products."""
    parts: tuple[Any, ...] = (
        torch.__version__,
        f"{torch.get_num_threads()} threads",
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        "" if torch.backends.mkldnn.enabled else "no mkldnn",
    )
    return ", ".join(filter(None, parts))


def unproved(case: Case) -> Chunks:
    """Chunks of the size that is asked for, whatever they do to the last bit."""
    return Chunks((*_row_sizes(case), case.rows)[0], (*_column_sizes(case), case.words)[0])


_known: dict[Case, Chunks | None] = {}


def proved(case: Case, weight: torch.Tensor | None = None) -> Chunks | None:
    """Chunks that give the same bits as the whole; None if there are none."""
    if case not in _known:
        identity = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with _compat.without_dispatch_modes(), torch.device("cpu"), torch.no_grad(), identity:
            _known[case] = _Proof(case, weight).chunks()
    return _known[case]


class _Proof:
    """See the top of this file."""

    def __init__(self, case: Case, weight: torch.Tensor | None) -> None:
        self._case = case
        random = torch.Generator().manual_seed(0)
        spread = 0.0 if weight is None else _spread(weight)
        if weight is None or not spread:
            weight, spread = _aligned((case.words, case.width), case, case.weight_offset, random), 1.0
        # logits of about one, for a softmax of which every term counts
        input = _aligned((case.rows, case.width), case, case.input_offset, random)
        input.div_(spread * math.sqrt(case.width))
        bias = torch.randn(case.words, dtype=case.torch_dtype, generator=random) if case.has_bias else None
        self._head = Head(input, weight.detach(), bias)
        self._target = torch.randint(case.words, (case.rows, 1), generator=random)
        self._of_loss = torch.rand(case.rows, dtype=case.torch_dtype, generator=random) + 0.5

    def chunks(self) -> Chunks | None:
        """The chunks that give the bits of the whole; None if there are none."""
        leaves = self._leaves()
        with torch.enable_grad():
            logits = F.linear(*leaves)
        edge = torch.autograd.graph.get_gradient_edge(logits) if logits.requires_grad else None
        logits = logits.detach()
        rows = next((size for size in _row_sizes(self._case) if self._rows_hold(size, logits)), 0)
        if not rows:
            return None
        softmax, picked = Softmax.of(self._head, self._target, rows)
        loss = F.cross_entropy(logits, self._target[:, 0], reduction="none")
        if not torch.equal(picked[:, 0], loss.neg()):
            return None
        if edge is None:
            return Chunks(rows)
        grad = self._gradient_of(logits)
        del logits
        wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
        gradients = iter(
            torch.autograd.grad(edge, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad], grad)
        )
        expected = Gradients(*(next(gradients) if is_wanted else None for is_wanted in wanted))
        backward = Backward(self._head, softmax, self._target, self._of_loss[:, None].neg())
        return self._of_backward(backward, rows, grad, expected)

    def _leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The operands, with gradients where they are asked for."""
        head, case = self._head, self._case
        bias = None if head.bias is None else head.bias.detach().requires_grad_(case.of_bias)
        return (
            head.input.detach().requires_grad_(case.of_input),
            head.weight.detach().requires_grad_(case.of_weight),
            bias,
        )

    def _gradient_of(self, logits: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            logits.requires_grad_()
            loss = cross_entropy(logits, self._target[:, 0], reduction="none")
            (grad,) = torch.autograd.grad(loss, logits, self._of_loss)
        return grad

    def _rows_hold(self, size: int, logits: torch.Tensor) -> bool:
        return all(torch.equal(self._head.logits(part), logits[part]) for part in row_slices(self._case.rows, size))

    def _of_backward(self, backward: Backward, rows: int, grad: torch.Tensor, expected: Gradients) -> Chunks | None:
        """The first sizes that hold, those before others in which the input's gradient is summed up over columns."""
        case, columns = self._case, 0
        for size in _column_sizes(case):
            holds, sums_input = _columns_hold(backward, size, grad, expected)
            if holds and sums_input:
                return Chunks(rows, size)
            columns = columns or size * holds
        if not columns and (case.of_weight or case.of_bias):
            return None
        if not case.of_input:
            return Chunks(rows, columns)
        assert expected.input is not None
        sizes = (*_row_sizes(case), case.rows)
        input_rows = next((size for size in sizes if _input_rows_hold(backward, size, expected.input)), 0)
        columns = columns if case.of_weight or case.of_bias else 0
        return Chunks(rows, columns, input_rows) if input_rows else None


def _columns_hold(backward: Backward, size: int, grad: torch.Tensor, expected: Gradients) -> tuple[bool, bool]:
    """Whether so many columns at a time give what is expected: apart from the input's gradient, and with it.

    They overwrite the expected values, which are restored if they differ, because a weight is large.
    """
    of_input = None if expected.input is None else torch.empty_like(expected.input)
    to = Gradients(of_input, expected.weight, expected.bias)
    for columns in column_slices(backward.head.words, size):
        pairs = [(part[columns], part[columns].clone()) for part in (to.weight, to.bias) if part is not None]
        made = backward.add_columns(columns, to, sums_input=True)
        if not torch.equal(made, grad[:, columns]) or not all(torch.equal(*pair) for pair in pairs):
            for part, before in pairs:
                part.copy_(before)
            return False, False
    return True, of_input is None or expected.input is None or torch.equal(of_input, expected.input)


def _input_rows_hold(backward: Backward, size: int, expected: torch.Tensor) -> bool:
    """Whether the input's gradient by so many rows at a time is what is expected."""
    made = torch.empty_like(expected)
    for rows in row_slices(backward.head.rows, size):
        backward.set_rows(rows, made)
    return torch.equal(made, expected)


def _column_sizes(case: Case) -> list[int]:
    return _sizes(case.columns_at_a_time, COLUMN_UNITS, (), case.words)


def _row_sizes(case: Case) -> list[int]:
    return _sizes(case.rows_at_a_time, ROW_UNITS, MORE_ROWS, case.rows)


def _sizes(about: int, units: Sequence[int], more: Sequence[int], count: int) -> list[int]:
    """Numbers of things at a time, of `count`: not more than said, in multiples of units; then larger ones."""
    about = max(about, units[-1])
    sizes = [*(about // unit * unit for unit in units), *(size for size in more if size > about)]
    return [size for size in dict.fromkeys(sizes) if 0 < size < count]


def _spread(weight: torch.Tensor) -> float:
    """The root of the mean square of a weight; 0 if it is not finite, or has many zeros."""
    spread = float(weight.norm()) / math.sqrt(weight.numel())
    return spread if math.isfinite(spread) and weight.count_nonzero() > MANY_ZEROS * weight.numel() else 0.0


def _aligned(shape: tuple[int, int], case: Case, offset: int, random: torch.Generator) -> torch.Tensor:
    """Normal random numbers that begin so many bytes behind a multiple of ALIGNMENT."""
    ahead = offset // case.torch_dtype.itemsize
    whole = torch.empty(ahead + shape[0] * shape[1], dtype=case.torch_dtype)
    return whole[ahead:].view(shape).normal_(generator=random)
