"""A head and its cross entropy without a whole tensor of logits, bit for bit as PyTorch computes the two.

Problem. A language model's logits are its largest tensor: rows (tokens) times words. `F.cross_entropy(F.linear(...))`
makes several of them.

Forward. Logits are computed for some rows at a time. Three numbers of each row are kept: its largest logit, the
logarithm of the softmax's denominator, and the logarithm of the target's probability. PyTorch's own kernel computes the
loss from the last ones, in the same order of additions as from the whole tensor.

Backward. Logits are recomputed for some columns (words) of all rows at a time. A logit, minus the row's largest, minus
the logarithm of the denominator, is the value of log_softmax, in its order of operations. From the rest of a row,
PyTorch's kernel needs only the sum of that row's gradient, which has one entry, at the target. If the target is in
other columns, an additional column holds it. So the kernel gives these columns the same bits as in the whole. They give
these words' part of the weight's gradient, and one summand of the input's gradient.

Only matrix products and the bias's gradient can differ in the last bit, because smaller ones are divided otherwise.
Rows and columns of the result mostly have the same bits, if they are not a few alone: a small rest is computed with the
last chunk. Sums over columns have the same bits if their number is one that the library itself sums at a time.
`head_proof.py` tests for each shape which numbers do. If no number does, the input's gradient is computed by rows, from
logits that are recomputed once more. If that differs as well, logits are computed in the whole, and the profile's notes
say so.

Cost. PyTorch computes three products of the size of the head, this four, and five if the input's gradient is by rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ..base._compat import PLAIN_CLASSES
from .head_chunks import Backward, Chunks, Head, Softmax
from .head_proof import Case, conditions, proved, unproved
from .loss import REDUCTIONS, cross_entropy

CHUNK_BYTES = 2**24  # of logits at a time
IGNORE_INDEX = -100
_IGNORED = -(2**62)  # what no target is
_DTYPES = (torch.float32, torch.float64)


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    exact: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """`cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`, bit for bit, without whole logits.

    The arguments are those of PyTorch's own `linear_cross_entropy`. A case that cannot be computed in chunks is
    computed in the whole, by `cairn.torch.cross_entropy`.

    Parameters
    ----------
    input : torch.Tensor
        Of shape (rows, features): a row for each target.
    linear_weight : torch.Tensor
        Of shape (classes, features).
    target : torch.Tensor
        Class indices, of shape (rows,).
    linear_bias : torch.Tensor, optional
        Of shape (classes,).
    weight, reduction, ignore_index, label_smoothing
        As for `torch.nn.functional.cross_entropy`.
    exact : bool
        False accepts chunks that were not proved to give the same bits.
    chunk_bytes : int
        About how many bytes of logits exist at a time.

    Returns
    -------
    torch.Tensor
        The loss: a scalar, or of shape (rows,) with reduction "none".

    Examples
    --------
    >>> loss = ct.linear_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten())
    """
    tensors = (input, linear_weight, target, linear_bias, weight)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            linear_cross_entropy,
            tensors,
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            exact=exact,
            chunk_bytes=chunk_bytes,
        )
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is a number of bytes, not {chunk_bytes}")
    loss = _Loss(weight, reduction, IGNORE_INDEX if ignore_index is None else ignore_index, label_smoothing)
    head = Head(input, linear_weight, linear_bias)
    method = _find(head, target, loss, exact, chunk_bytes)
    if method.chunks is None:
        return loss.whole(head, target)
    return _LinearCrossEntropy.apply(input, linear_weight, linear_bias, target, loss, method.chunks)


#: What computes a head and its loss at once; PyTorch's own exists since 2.13.
FUNCTIONS = (linear_cross_entropy, getattr(F, "linear_cross_entropy", linear_cross_entropy))


@dataclasses.dataclass(frozen=True)
class _Loss:
    """A cross entropy."""

    weight: torch.Tensor | None
    reduction: str
    ignore_index: int
    label_smoothing: float

    def whole(self, head: Head, target: torch.Tensor) -> torch.Tensor:
        """From whole logits."""
        return cross_entropy(
            F.linear(head.input, head.weight, head.bias),
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def forward(self, picked: torch.Tensor, only: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and what a mean is divided by, from the logarithm of each target's probability, the only column."""
        return torch.ops.aten.nll_loss_forward(picked, only, None, REDUCTIONS[self.reduction], _IGNORED)

    def backward(
        self, of_loss: torch.Tensor, picked: torch.Tensor, only: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of `picked`, of which only the shape matters."""
        return torch.ops.aten.nll_loss_backward(
            of_loss, picked, only, None, REDUCTIONS[self.reduction], _IGNORED, total
        )

    def places(self, target: torch.Tensor, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets as a column, those that are no class somewhere; and the targets where one column stands for all
        classes, those that are neither class nor ignored as they are, for PyTorch to complain of.
        """
        place = target.clamp(0, words - 1)
        only = torch.where(place == target, 0, target).masked_fill_(target == self.ignore_index, _IGNORED)
        return place[:, None], only


# -- in chunks or not ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeadMethod:
    """How a call is computed: in these chunks, proved for this case; in the whole if `chunks` is None."""

    case: Case | None
    chunks: Chunks | None
    reason: str = ""  # why in the whole

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadMethod:
        """Reads what `to_json` wrote."""
        case, chunks = data["case"], data["chunks"]
        return cls(case and Case(**case), chunks and Chunks(**chunks), data["reason"])

    @property
    def largest(self) -> int:
        """The most logits that there are at a time, where a proof says so; else 0."""
        case = self.case
        return 0 if case is None or self.chunks is None else self.chunks.largest(case.rows, case.words)

    def note(self) -> str:
        """For people."""
        if self.chunks is None:
            return f"linear_cross_entropy makes a whole tensor of logits: {self.reason}"
        parts = [f"{self.chunks.rows} rows in the forward"]
        parts += [f"{self.chunks.columns} words in the backward"] * bool(self.chunks.columns)
        parts += [f"{self.chunks.input_rows} rows for the gradient of its input"] * bool(self.chunks.input_rows)
        return f"linear_cross_entropy computes logits of {', '.join(parts)} at a time"

    def holds_still(self) -> bool:
        """Whether chunks that need no more memory are proved here and now."""
        if self.case is None or self.chunks is None:
            return True
        here = dataclasses.replace(self.case, conditions=conditions())
        return 0 < HeadMethod(here, proved(here)).largest <= self.largest


def examined(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    exact: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    options: Any = None,
) -> HeadMethod:
    """How a call of one of FUNCTIONS is computed."""
    if options is not None:
        return HeadMethod(None, None, "PyTorch's own options are given")
    loss = _Loss(weight, reduction, IGNORE_INDEX if ignore_index is None else ignore_index, label_smoothing)
    return _find(Head(input, linear_weight, linear_bias), target, loss, exact, chunk_bytes)


def _find(head: Head, target: torch.Tensor, loss: _Loss, exact: bool, chunk_bytes: int) -> HeadMethod:
    reason = _other_operands(head, target) or _other_loss(head, target, loss)
    if not reason and head.rows * head.words * head.input.element_size() <= 2 * chunk_bytes:
        reason = "it would be small"
    if reason:
        return HeadMethod(None, None, reason)
    case = Case.of(head, chunk_bytes)
    if not exact:
        return HeadMethod(None, unproved(case))
    chunks = proved(case, head.weight)
    return HeadMethod(case, chunks, "" if chunks else "matrix products of this shape have other bits in parts")


def _other_operands(head: Head, target: torch.Tensor) -> str:
    """Why such operands are not for chunks."""
    operands = [head.input, head.weight, *([] if head.bias is None else [head.bias])]
    if any(type(tensor) not in PLAIN_CLASSES for tensor in (*operands, target)) or torch.compiler.is_compiling():
        return "its operands are not plain tensors"
    if any(tensor.device.type != "cpu" for tensor in (*operands, target)):
        return "only on the CPU it is proved to be the same"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is at work"
    if head.input.dtype not in _DTYPES or any(tensor.dtype is not head.input.dtype for tensor in operands):
        return "its operands are not all of float32 or all of float64"
    shapes_match = head.input.dim() == head.weight.dim() == 2 and head.input.shape[1] == head.weight.shape[1]
    if not shapes_match or (head.bias is not None and head.bias.shape != head.weight.shape[:1]):
        return "its operands are not an input with rows and a weight of two dimensions"
    if not all(tensor.is_contiguous() for tensor in operands):
        return "an operand does not lie contiguously in memory"
    return ""


def _other_loss(head: Head, target: torch.Tensor, loss: _Loss) -> str:
    """Why such a loss is not for chunks; PyTorch's way names what is wrong with it."""
    if loss.weight is not None or loss.label_smoothing != 0.0:
        return "the loss has weights or smoothed labels"
    if target.dtype is not torch.long or target.shape != head.input.shape[:1] or loss.reduction not in REDUCTIONS:
        return "targets are not one class index for each row"
    return ""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        loss: _Loss,
        chunks: Chunks,
    ) -> torch.Tensor:
        place, only = loss.places(target, len(weight))
        softmax, picked = Softmax.of(Head(input, weight, bias), place, chunks.rows)
        value, total = loss.forward(picked, only)
        ctx.loss, ctx.chunks, ctx.conditions = loss, chunks, conditions()
        ctx.save_for_backward(input, weight, bias, target, softmax.largest, softmax.denominator, total)
        return value

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor) -> Any:
        if torch.is_grad_enabled() or ctx.conditions != conditions():
            return *_whole(ctx, of_loss), None, None, None
        input, weight, bias, target, largest, denominator, total = ctx.saved_tensors
        place, only = ctx.loss.places(target, len(weight))
        of_picked = ctx.loss.backward(of_loss, largest, only, total)
        backward = Backward(Head(input, weight, bias), Softmax(largest, denominator), place, of_picked)
        grads = backward.run(ctx.chunks, *ctx.needs_input_grad[:3])
        return grads.input, grads.weight, grads.bias, None, None, None


def _whole(ctx: Any, of_loss: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients by operations that can be differentiated, from whole logits."""
    operands, target = ctx.saved_tensors[:3], ctx.saved_tensors[3]
    with torch.enable_grad():
        # views: one operand may have been made of another
        own = [None if tensor is None else tensor.view_as(tensor) for tensor in operands]
        assert own[0] is not None and own[1] is not None
        loss = ctx.loss.whole(Head(own[0], own[1], own[2]), target)
    wanted = [tensor for tensor in own if tensor is not None and tensor.requires_grad]
    grads = iter(torch.autograd.grad(loss, wanted, of_loss, create_graph=torch.is_grad_enabled()))
    return [next(grads) if is_wanted else None for is_wanted in ctx.needs_input_grad[:3]]
