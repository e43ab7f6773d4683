"""Graphs that Dynamo captured, shared by all budgets that a model is compiled for.

Capturing and tracing a model takes longer than planning its step. Dynamo reuses the code that a backend returned while
its guards hold. So all compiled models with the same kernels share one backend, `SharedBackend`, and with it the
captured graphs. While a compiled model runs, its plans are the current ones. A plan belongs to one compiled model and
one graph: another budget never gets it.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from ..base import _compat
from .calls import compiled_call
from .joint_graph import JointGraph, read
from .planner import Planner

AS_BLOCKS = "let its blocks be compiled one by one (regions=True)"


class Captured:
    """A graph that Dynamo captured. AOTAutograd's trace of it, and its analysis, are reused by every plan."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._by_operators = _compat.ByOperators(module)
        self._joint: JointGraph | None = None

    def compiled(self, inputs: Sequence[Any], kernels: str, partition: Callable[..., Any]) -> Callable[..., Any]:
        """Compile the graph, cut by a partition function of AOTAutograd. kernels: "eager" or "inductor"."""
        if kernels == "eager":
            return self._by_operators.compiled(inputs, partition)
        return _compat.compiled_by_inductor(self.module, inputs, partition)

    def planned(self, inputs: Sequence[Any], kernels: str, planner: Planner) -> Callable[..., Any]:
        """Compile the graph, cut by a planner, which reads the code of fused kernels afterwards."""
        if kernels == "eager":
            return self.compiled(inputs, kernels, planner)
        with _compat.generated_code() as code:
            compiled = self.compiled(inputs, kernels, planner)
        planner.read_code(code)
        return compiled

    def read(self, module: fx.GraphModule, num_fwd_outputs: int) -> JointGraph:
        """The analysis of the joint graph that AOTAutograd traced of this graph. The latest one is cached."""
        if self._joint is None or self._joint.module is not module:
            self._joint = read(module, num_fwd_outputs)
        return self._joint


class Plans(Protocol):
    """The plans of one compiled model. compilations: how many graphs were compiled for it."""

    compilations: int

    def code(self, captured: Captured, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled code of a graph. The first request plans and compiles the graph."""


_CURRENT_PLANS: contextvars.ContextVar[Plans] = contextvars.ContextVar("cairn_plans")


class SharedBackend:
    """Dynamo's backend for all compiled models: a graph runs the code that the current plans have for it."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph for the current plans. The returned function runs the code of those that are current then."""
        captured = Captured(module)
        _CURRENT_PLANS.get().code(captured, inputs)

        def run(*args: Any) -> Any:
            return _CURRENT_PLANS.get().code(captured, args)(*args)

        return run


#: By kernels: inductor changes the graph that Dynamo captured.
_BACKENDS: dict[str, SharedBackend] = {}


def compiled_with(plans: Plans, model: nn.Module, kernels: str) -> nn.Module:
    """The module that torch.compile returns for a model. While it runs, `plans` are the current ones.

    Its calls raise Unsupported where Dynamo cannot capture them.
    """
    backend = _BACKENDS.setdefault(kernels, SharedBackend())
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    wrapped: nn.Module = _compat.with_wrapped_calls(
        compiled, functools.partial(_with_plans, plans, type(model).__name__)
    )
    return wrapped


def _with_plans(plans: Plans, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function. While it runs, `plans` are the current ones. name: that of the model's class, for errors."""
    what = f"the model {name}"

    def run(*args: Any, **kwargs: Any) -> Any:
        token = _CURRENT_PLANS.set(plans)
        try:
            with compiled_call(what, lambda: plans.compilations, AS_BLOCKS):
                return function(*args, **kwargs)
        finally:
            _CURRENT_PLANS.reset(token)

    return run
