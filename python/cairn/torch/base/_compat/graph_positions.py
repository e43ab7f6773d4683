"""Where in autograd's graph a step is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def next_sequence_number(unknown: int = 0) -> int:
    """The number of autograd's next function; `unknown` if torch does not say."""
    number = getattr(torch.autograd, "_get_sequence_nr", None)
    return int(number()) if number is not None else unknown


def sequence_number(node: Any) -> int:
    """The number of one of autograd's functions."""
    return int(node._sequence_nr())


def history_mark() -> int:
    """For `is_made_since`: now."""
    return next_sequence_number(unknown=2**63)


def is_made_since(tensor: torch.Tensor, mark: int) -> bool:
    """Whether a function of autograd made this tensor after a mark; False if torch does not say."""
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= mark


def ran_since(node: Any, mark: int) -> bool:
    """Whether a function of autograd ran after a mark; True if torch does not say."""
    return mark >= 2**63 or bool(node._sequence_nr() >= mark)


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graph of tensors, each once."""
    seen: dict[int, Any] = {}  # and alive, so that no two have the same identity
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            yield node
            waiting += [following for following, _ in node.next_functions]


def is_end_of_graph(node: Any) -> bool:
    """Whether a node of the graph only adds to the gradient of a leaf."""
    return hasattr(node, "variable")


def is_made_earlier(tensor: torch.Tensor) -> bool:
    """Whether a tensor that autograd is saving surely comes from another function than the saving one.

    That one has the latest number. Functions written in Python or in extensions may have run others in between.
    """
    made_by = tensor.grad_fn
    if made_by is None:
        return True
    is_torchs = hasattr(getattr(torch._C, "_functions", None), type(made_by).__name__)
    return is_torchs and made_by._sequence_nr() < next_sequence_number() - 1


def backward_sequence_number() -> int:
    """The number of the function whose backward is running; -1 if there is none, or torch does not say."""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = current() if current is not None else None
    return int(node._sequence_nr()) if node is not None else -1


#: Operators called inside are not recorded for a backward, at no cost; parameters stay what they are to them.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", torch.no_grad
)
