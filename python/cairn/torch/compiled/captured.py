"""What Dynamo captured of a model, shared by all budgets that it is compiled for.

Capturing and tracing a model takes longer than planning its step. Dynamo keeps the code that it made for one backend,
as long as its guards hold. So all compilations of a model share one backend, `Switch`, and each compiled model names
its plans while it runs. A plan belongs to one compilation and one graph: another budget never gets it.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ..base import _compat_compile, memory
from ..base.errors import Unsupported
from .joint_graph import JointGraphs
from .planner import Planner


class Captured:
    """A graph that Dynamo captured, and what every plan for it has in common. Sizes in bytes.

    Attributes
    ----------
    sizes
        The symbolic sizes among the graph's inputs: by place, with what it was captured with.
    parameters_bytes, others_bytes
        Of the inputs that are trained, and of all others.
    gradients_bytes, all_gradients_bytes
        Of the inputs that are trained and are no results: on the device, and anywhere.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.module, self.device = module, device_of(inputs)
        self.sizes = {place: _compat_compile.size_hint(value) for place, value in enumerate(inputs)
                      if isinstance(value, torch.SymInt)}  # fmt: skip
        everywhere = [t for t in inputs if isinstance(t, torch.Tensor)]
        here = [t for t in everywhere if t.device == self.device]
        trained = [t for t in here if t.requires_grad]
        self.parameters_bytes = memory.unique_bytes(trained)
        self.others_bytes = memory.unique_bytes(here, without=memory.storages(trained))
        self.gradients_bytes = memory.dense_bytes(t for t in trained if t.is_leaf)
        self.all_gradients_bytes = memory.dense_bytes(t for t in everywhere if t.requires_grad and t.is_leaf)
        self.graphs = JointGraphs()
        self._by_operators = _compat_compile.ByOperators(module)

    @property
    def needs_no_inputs(self) -> bool:
        """Whether it can be compiled with eager kernels without the inputs at hand."""
        return self._by_operators.is_traced

    def compiled(self, inputs: Sequence[Any], planner: Planner) -> Callable[..., Any]:
        """The graph's code, cut by a planner."""
        if planner.request.kernels == "eager":
            return self._by_operators.compiled(inputs, planner)
        return _compat_compile.compiled_by_inductor(self.module, inputs, planner)


class Plans(Protocol):
    """Plans of one compilation, and the code that keeps to them."""

    def code(self, captured: Captured, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The code for a graph, compiled when it is first asked for."""


_CURRENT: contextvars.ContextVar[Plans] = contextvars.ContextVar("cairn_plans")


class Switch:
    """Dynamo's backend for all compilations of a model: a graph runs the code that the plans in force have for it."""

    def __init__(self) -> None:
        self._latest: weakref.ref[Captured] | None = None

    @property
    def latest(self) -> Captured | None:
        """The graph that ran last, as long as Dynamo keeps it."""
        return None if self._latest is None else self._latest()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph for the plans in force."""
        captured = Captured(module, inputs)
        _CURRENT.get().code(captured, inputs)
        reference = weakref.ref(captured)

        def run(*args: Any) -> Any:
            self._latest = reference
            return _CURRENT.get().code(captured, args)(*args)

        return run


def under(plans: Plans, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with plans in force while it runs."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        token = _CURRENT.set(plans)
        try:
            return function(*args, **kwargs)
        finally:
            _CURRENT.reset(token)

    return forward


def device_of(inputs: Sequence[Any]) -> torch.device:
    """The one device of a graph."""
    devices = dict.fromkeys(t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type != "cpu")
    if len(devices) > 1:
        raise Unsupported(f"the graph uses {', '.join(map(str, devices))}: a budget is for one device")
    return next(iter(devices), torch.device("cpu"))
