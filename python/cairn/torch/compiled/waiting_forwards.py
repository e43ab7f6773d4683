"""Forwards of compiled graphs that wait for their backward, and a warning where several wait at the same time.

`torch.compile(backend="cairn")` gets one graph at a time, and plans it as if it were the whole step. If Dynamo splits a
model, the saved tensors of all of its graphs are in memory together, and no plan counts those of the others.

A hook before the backward of each forward owns a mark of it. So the mark exists as long as the autograd graph does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from cairn import format_bytes

from ..base.errors import warn


class _Forward:
    """The mark of one forward of a graph."""

    def __init__(self, graph: object, budget_bytes: int) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes


class WaitingForwards:
    """The forwards on one device that have run, and whose backward has not begun."""

    def __init__(self) -> None:
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, graph: object, outputs: Iterable[torch.Tensor], budget_bytes: int) -> None:
        """A forward of a graph has run. Without gradients, nothing waits.

        graph: anything that stands for the graph; warnings name no graph twice. budget_bytes: of its plan.
        """
        node = next((output.grad_fn for output in outputs if output.grad_fn is not None), None)
        if node is not None:
            forward = _Forward(graph, budget_bytes)
            self._forwards.add(forward)
            node.register_prehook(functools.partial(self._begin, forward))

    def _begin(self, forward: _Forward, _: Any) -> None:
        """The backward of a forward begins."""
        waiting = list(self._forwards)
        self._forwards.discard(forward)
        if len(waiting) > 1 and forward.graph not in self._warned:
            self._warned.update(each.graph for each in waiting)
            warn(
                f'{len(waiting)} forwards of graphs that backend="cairn" compiled wait for this backward. Each is '
                "planned as if it were the whole step, so the step may take more than its budget of "
                f"{format_bytes(forward.budget_bytes)}. If Dynamo splits the model, torch.compile(fullgraph=True) says "
                "where. cairn.torch.compile(model, ...) plans the step as a whole"
            )


@functools.cache
def waiting_forwards(device: torch.device) -> WaitingForwards:
    """The forwards of graphs on a device."""
    return WaitingForwards()
