"""Cross entropy whose backward needs no copy of the logits beyond what its forward saved, bit for bit the same.

PyTorch saves the logarithm of the softmax, and its backward makes two more tensors of that size: the gradient of that
logarithm, with one entry a row, and that of the logits. Here the same kernels run on some rows at a time, and their
result overwrites the saved tensor, unless the graph is kept for another backward. All kernels work row by row, and the
one number that they need of the whole (the sum of the targets' weights) comes from the forward. So the bits are the
same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..base import _compat

CHUNK_BYTES = 2**21  # of logits worked on at a time: what a core's cache holds
#: On a device, where few rows take as long as many: so many chunks, unless they are larger than they need to be.
CHUNKS, MOST_BYTES = 16, 2**28
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute `torch.nn.functional.cross_entropy`, bit for bit, with less memory in the backward.

    For logits of two dimensions with class indices as targets. Everything else is passed on to PyTorch's own.

    Parameters
    ----------
    input : torch.Tensor
        Logits, of shape (rows, classes).
    target : torch.Tensor
        Class indices, of shape (rows,).
    weight, size_average, ignore_index, reduce, reduction, label_smoothing
        As for `torch.nn.functional.cross_entropy`.

    Returns
    -------
    torch.Tensor
        The loss: a scalar, or of shape (rows,) with reduction "none".

    Examples
    --------
    >>> loss = ct.cross_entropy(logits.flatten(0, 1), labels.flatten())
    """
    plain = size_average is None and reduce is None and label_smoothing == 0.0
    if plain and reduction in REDUCTIONS and _is_supported(input, target, weight):
        loss, _ = _CrossEntropy.apply(input, target, weight, REDUCTIONS[reduction], ignore_index)
        return loss
    return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


def _is_supported(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> bool:
    if type(input) is not torch.Tensor or type(target) is not torch.Tensor or not input.requires_grad:
        return False
    if not torch.is_grad_enabled() or (weight is not None and weight.requires_grad):
        return False
    if torch.is_autocast_enabled(input.device.type) and input.dtype is not torch.float32:
        return False  # PyTorch may compute the loss in another type than the logarithm
    matching = input.dim() == 2 and target.dim() == 1 and input.shape[0] == target.shape[0] and input.numel() > 0
    return matching and target.dtype is torch.long and input.is_floating_point()


class _CrossEntropy(torch.autograd.Function):
    """Returns the loss and, so that a backward can be differentiated, the logarithm of the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logarithm = torch.log_softmax(input, 1)
        loss, total = torch.ops.aten.nll_loss_forward(logarithm, target, weight, reduction, ignore_index)
        ctx.reduction, ctx.ignore_index, ctx.dtype = reduction, ignore_index, input.dtype
        ctx.save_for_backward(logarithm, target, weight, total)
        ctx.set_materialize_grads(False)
        return loss, logarithm

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor | None, of_logarithm: torch.Tensor | None) -> Any:
        logarithm, target, weight, total = ctx.saved_tensors
        if torch.is_grad_enabled() or of_logarithm is not None:
            return _whole(ctx, of_loss, of_logarithm), None, None, None, None
        assert of_loss is not None
        logarithm = logarithm.detach()
        result = logarithm
        if not _is_last_use(logarithm, ctx.dtype):
            result = torch.empty_like(logarithm, dtype=ctx.dtype, memory_format=torch.contiguous_format)
        rows = _rows_at_a_time(logarithm)
        for start in range(0, logarithm.shape[0], rows):
            part = slice(start, start + rows)
            torch.ops.aten._log_softmax_backward_data.out(
                torch.ops.aten.nll_loss_backward(
                    of_loss[part] if of_loss.dim() else of_loss,
                    logarithm[part],
                    target[part],
                    weight,
                    ctx.reduction,
                    ctx.ignore_index,
                    total,
                ),
                logarithm[part],
                1,
                ctx.dtype,
                out=result[part],
            )
        return result, None, None, None, None


def _rows_at_a_time(logits: torch.Tensor) -> int:
    size = CHUNK_BYTES
    if not logits.is_cpu:
        size = max(size, min(MOST_BYTES, logits.nbytes // CHUNKS))
    return max(1, size // (logits.shape[1] * logits.element_size()))


def _whole(ctx: Any, of_loss: torch.Tensor | None, of_logarithm: torch.Tensor | None) -> torch.Tensor:
    """The gradient of the logits by operations that can be differentiated."""
    logarithm, target, weight, total = ctx.saved_tensors
    grad = of_logarithm
    if of_loss is not None:
        by_loss = torch.ops.aten.nll_loss_backward(
            of_loss, logarithm, target, weight, ctx.reduction, ctx.ignore_index, total
        )
        grad = by_loss if grad is None else grad + by_loss
    assert grad is not None
    return torch.ops.aten._log_softmax_backward_data(grad, logarithm, 1, ctx.dtype)


def _is_last_use(saved: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a saved tensor may be overwritten: no other backward of this graph, and nobody else, will read it."""
    return saved.dtype is dtype and not _compat.graph_is_kept() and saved.is_contiguous()


def proved(input: torch.Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether loss and gradient of such a call come out bit for bit as PyTorch's own do."""
    results = []
    for function in (F.cross_entropy, cross_entropy):
        with torch.enable_grad():
            logits = input.detach().requires_grad_()
            loss = function(logits, *arguments, **keywords)
            loss.backward(torch.ones_like(loss))
        results.append((loss.detach(), logits.grad))
    (loss, grad), (own_loss, own_grad) = results
    return torch.equal(loss, own_loss) and grad is not None and own_grad is not None and torch.equal(grad, own_grad)
