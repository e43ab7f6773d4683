"""Replacements for operations that read more than they need, or write more than their schema declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.tree import Slot, Tree
from .block_graph import Operation, Value, is_dense, short_name

_BATCH_NORMS = {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"}
_TAKES_NO_STATISTICS = {"native_batch_norm", "cudnn_batch_norm"}
_RESERVED = 3  # among the results
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}


def simplify(op: Operation, values: Sequence[Value]) -> None:
    """Remove arguments of an operation that it does not need."""
    name = short_name(op.function)
    if name in _LIKE and op.function.namespace == "aten" and not op.reason and len(op.new_values) == 1:
        _make_from_nothing(op, name, values[next(iter(op.new_values.values()))])
    elif name in _BATCH_NORMS and not op.reason:
        _without_statistics(op, name, values)


def _make_from_nothing(op: Operation, name: str, result: Value) -> None:
    """A factory such as `zeros_like`: it needs only the shape of its argument, which is known."""
    size, stride, _ = result.base
    if not is_dense(result):
        return
    fill: Callable[[torch.Tensor], Any] | None = None
    if not name.endswith(("empty", "empty_like")):
        value = 0 if "zeros" in name else 1 if "ones" in name else _fill_value(op.tree.shape)
        if value is None:
            return

        def fill(tensor: torch.Tensor) -> Any:
            return tensor.fill_(value)

    op.function = _Factory(op.name, fill)
    op.operands = []
    op.tree = Tree(((size, stride), {"dtype": result.dtype, "device": result.device}), [], [])


def _fill_value(shape: Any) -> Any:
    args, kwargs = shape
    scalars = [item for item in args if isinstance(item, (int, float, bool))]
    found = kwargs.get("fill_value", scalars[-1] if scalars else None)
    return found if isinstance(found, (int, float, bool)) else None


class _Factory:
    """Makes a tensor of a given shape, filled or not."""

    def __init__(self, name: str, fill: Callable[[torch.Tensor], Any] | None) -> None:
        self._name, self._fill = name, fill

    def __str__(self) -> str:
        return self._name

    def __call__(self, size: Any, stride: Any, **options: Any) -> torch.Tensor:
        tensor = torch.empty_strided(size, stride, **options)
        if self._fill is not None:
            self._fill(tensor)
        return tensor


def _without_statistics(op: Operation, name: str, values: Sequence[Value]) -> None:
    """Batch normalisation without the running statistics that it writes: batch statistics need the input alone.

    cuDNN may return a reserve for the backward, which is not documented to be written entirely.
    """
    args, kwargs = op.tree.shape
    if name == "_native_batch_norm_legit" or len(args) < 6 or kwargs:
        op.reason = "writes statistics"
        return
    training = args[5]
    if training is not True:
        return
    reserved = op.new_values.get(_RESERVED)
    if name not in _TAKES_NO_STATISTICS or (reserved is not None and values[reserved].nbytes > 0):
        op.reason = "writes statistics"
        return
    dropped = {item.index for item in args[3:5] if type(item) is Slot}
    _drop_operands(op, (*args[:3], None, None, *args[5:]), dropped)


def _drop_operands(op: Operation, args: tuple[Any, ...], dropped: set[int]) -> None:
    order = [i for i in range(len(op.operands)) if i not in dropped]
    places = {old: new for new, old in enumerate(order)}
    args = tuple(Slot(places[a.index]) if type(a) is Slot else a for a in args)
    op.operands = [op.operands[i] for i in order]
    op.tree = Tree((args, {}), [], [])
