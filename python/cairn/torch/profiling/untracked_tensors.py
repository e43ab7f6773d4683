"""Tensors that custom functions of a block hold outside of autograd's saved tensors (`ctx.x = x`, or a closure, as in
torch.cond): no hook can see or free them.

An intermediate tensor of the block shows in the memory that stays allocated when nothing is saved. The block's input or
output does not show there, because others hold it too, so it is searched for in the graph.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..base import _compat, memory
from ..base.tree import tensors_inside


def untracked_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of tensors in attributes of custom functions, in the autograd graph of tensors."""
    held = (tensor for node in _custom_functions(tensors) for tensor in _held_by(node))
    return {_compat.storage_id(tensor) for tensor in held if memory.has_storage(tensor)}


def _custom_functions(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of custom functions in the autograd graph of tensors."""
    nodes = _compat.nodes_behind(tensors)
    return (node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction))


def _held_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors in a function's attributes, and in variables of closures there."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = list(vars(node).values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, types.FunctionType) and id(value) not in seen:
            seen[id(value)] = value
            waiting += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        elif not isinstance(value, types.FunctionType):
            yield from (tensor for _, tensor in tensors_inside(value))
