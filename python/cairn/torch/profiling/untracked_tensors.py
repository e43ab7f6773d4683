"""What custom functions of a block hold beside what autograd saves (`ctx.x = x`, or a closure, as that of torch.cond):
no hook sees or frees it.

Where it is a tensor that the block makes on its way, it shows in the memory that is left when nothing is saved. Where
it is the block's input or output, others have that as well, so it is looked for in the graph.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..base import _compat, memory
from ..base.tree import tensors_inside


def hidden_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages behind the attributes of custom functions in the history of tensors."""
    held = (tensor for node in _nodes(tensors) for tensor in _held_by(node))
    return {_compat.storage_id(tensor) for tensor in held if memory.has_storage(tensor)}


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


def _nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The custom functions, each once."""
    seen: dict[int, Any] = {}  # and alive, so that no two have the same identity
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield node
