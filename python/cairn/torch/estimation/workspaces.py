"""Workspaces of operators: memory that a kernel allocates while it runs, its result not counted.

Fake tensors do not show workspaces. For the CPU, each kind of call is run once on made-up numbers and measured, unless
it is larger than `MOST_BYTES`. A GPU's kernels cannot be run here, so their workspaces are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..base import _compat, memory
from ..base.errors import Unsupported
from ..compiled import kernel_costs

MOST_BYTES = 1 << 30
_CPU = torch.device("cpu")
#: Operators of aten without a workspace, besides those that torch tags as pointwise.
_PLAIN = frozenset(
    (
        "copy",
        "clone",
        "detach",
        "empty",
        "zeros",
        "ones",
        "full",
        "fill",
        "arange",
        "equal",
        "cat",
        "mm",
        "addmm",
        "bmm",
    )
)
_KNOWN: dict[Any, int] = {}


class Workspaces:
    """Workspaces of calls: measured on this machine's CPU if `measured`, otherwise 0."""

    def __init__(self, measured: bool) -> None:
        self._measured = measured

    def __call__(self, function: Any, args: Any, kwargs: Any, result: Any) -> int:
        schema = _compat.schema_of(function)
        name = "" if schema is None else schema.name
        if "rnn_layer" in name or name == "aten::_cudnn_rnn":
            raise Unsupported(
                f"{name} saves a tensor whose size its kernel alone knows, so recurrent layers cannot be estimated: "
                "profile the model where it runs"
            )
        if not self._measured or not _takes_some(function, name) or _is_simple(function, args, result):
            return 0
        kind = _kind(function, args, kwargs)
        if kind not in _KNOWN:
            _KNOWN[kind] = _measured(function, args, kwargs, result)
        return _KNOWN[kind]


def _takes_some(function: Any, name: str) -> bool:
    if not name.startswith("aten::"):
        return False
    base = name.removeprefix("aten::").rstrip("_")
    aliases = [returned.alias_info for returned in _compat.schema_of(function).returns]
    return base not in _PLAIN and not any(aliases)


def _is_simple(function: Any, args: Any, result: Any) -> bool:
    """Whether an operator writes one number for each that it reads; losses carry the pointwise tag, but reduce."""
    if torch.Tag.pointwise not in function.tags or not isinstance(result, torch.Tensor):
        return False
    read = list(_tensors(args))
    return all(t.numel() <= result.numel() and not t.is_complex() for t in read)


def _kind(function: Any, args: Any, kwargs: Any) -> Any:
    leaves, shape = _compat.tree_flatten((args, kwargs))
    return function, str(shape), tuple(_described(leaf) for leaf in leaves)


def _described(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _measured(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    if sum(t.numel() * t.element_size() for t in _tensors((args, kwargs, result))) > MOST_BYTES:
        return 0
    token = memory.fake_meter.set(None)
    try:
        with _compat.without_dispatch_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            args, kwargs = _compat.tree_map_only(torch.Tensor, kernel_costs.made_up, (args, kwargs))
            return kernel_costs.workspace(function, args, kwargs, _CPU)
    except RuntimeError:  # a kernel that refuses made-up numbers
        return 0
    finally:
        memory.fake_meter.reset(token)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _compat.tree_leaves(values) if isinstance(leaf, torch.Tensor))
