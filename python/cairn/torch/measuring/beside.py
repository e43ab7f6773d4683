"""What a block leaves for the loss beside its result.

Some blocks put a loss of their own into an attribute (routers do), hooks collect features of modules inside of blocks,
and transformers what these return. Where the loss reads such a tensor, its gradient waits from the loss until the
block's backward, which then begins with it, too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat
from ..base.blocks import Block
from ..base.layouts import Layout, Layouts, layouts_of
from ..base.tree import tensors_in, unique_tensors_in
from ..context.attributes import Attributes
from ..context.reach import reached
from . import isolate


class Beside:
    """Finds what a run of a block that is about to begin leaves beside its result."""

    def __init__(self, block: Block) -> None:
        self._parts = block.parts()
        self._since = _compat.history_mark()

    def tensors(self, result: Any) -> list[torch.Tensor]:
        """Those with a backward, each once, that the run made and `result` does not have."""
        returned = {id(t) for t in tensors_in(result)}
        places = [*map(vars, self._parts), *map(_filled, reached(self._parts)), _collected()]
        left = (tensor for tensor in unique_tensors_in(places) if _compat.is_made_since(tensor, self._since))
        return [tensor for tensor in left if id(tensor) not in returned]

    def added(self) -> set[int]:
        """The identities of tensors that are in lists now, which gets more in each run."""
        return {id(tensor) for tensor in unique_tensors_in(list(Attributes(self._parts).sequences()))}

    def root(self, result: Any, known: Layouts) -> tuple[list[torch.Tensor], list[Layout | None]]:
        """What a backward of the block begins with, and how the gradients lie, None where there is none.

        `known` is what is known of the gradients of the result, and then of what is left beside it. As long as nothing
        is, all of the result gets gradients, which lie as it does, and the rest gets none.
        """
        returned, others = isolate.differentiable(result), self.tensors(result)
        if len(known) == len(returned) + len(others):
            return returned + others, list(known)
        return returned + others, [*layouts_of(returned), *(None for _ in others)]


def _filled(found: tuple[nn.Module, str, Any]) -> Any:
    value = found[2]
    return value if isinstance(value, (list, dict)) else getattr(value, "__dict__", None)


class Arrivals:
    """How the gradients of tensors lie when a backward brings them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.layouts: list[Layout | None] = [None] * len(tensors)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(lambda grad, index=index: self._note(index, grad))

    def _note(self, index: int, grad: torch.Tensor) -> None:
        self.layouts[index] = Layout(grad)


# -- what transformers collects ------------------------------------------------------------------------------


def _collector() -> Any:
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def _collected() -> Any:
    collector = _collector()
    return collector.get() if collector is not None else None


@contextlib.contextmanager
def collecting_apart() -> Iterator[None]:
    """What blocks run for is not seen by who collects what modules return (`output_hidden_states` and the like)."""
    collector, collected = _collector(), _collected()
    if collected is None:
        yield
        return
    token = collector.set({key: list(value) if isinstance(value, list) else value for key, value in collected.items()})
    try:
        yield
    finally:
        collector.reset(token)
