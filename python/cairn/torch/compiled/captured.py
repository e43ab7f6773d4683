"""Graphs that Dynamo captured, shared by all budgets that a model is compiled for.

Capturing and tracing a model takes longer than planning its step. Dynamo keeps the code that it made for a backend as
long as its guards hold, so all compiled models with the same kernels share one backend, `Switch`. Each compiled model
puts its plans in force while it runs. A plan belongs to one compiled model and one graph: another budget never gets it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from ..base import _compat, _compat_compile
from .joint_graph import JointGraph, read

_LOGGING = ("debug", "info", "warning", "error", "warning_once", "info_once", "warning_advice")


class Captured:
    """A graph that Dynamo captured. Its trace and what was read of it serve every plan for it."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._by_operators = _compat_compile.ByOperators(module)
        self._joint: JointGraph | None = None

    def compiled(self, inputs: Sequence[Any], kernels: str, partition: _compat_compile.Partition) -> Callable[..., Any]:
        """The graph's code, cut by a partition function."""
        if kernels == "eager":
            return self._by_operators.compiled(inputs, partition)
        return _compat_compile.compiled_by_inductor(self.module, inputs, partition)

    def read(self, module: fx.GraphModule, num_fwd_outputs: int) -> JointGraph:
        """The results of a joint graph of this graph."""
        if self._joint is None or self._joint.module is not module:
            self._joint = read(module, num_fwd_outputs)
        return self._joint


class Plans(Protocol):
    """The plans of one compiled model."""

    def code(self, captured: Captured, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The code for a graph, planned and compiled when it is first wanted."""


_IN_FORCE: contextvars.ContextVar[Plans] = contextvars.ContextVar("cairn_plans")


class Switch:
    """Dynamo's backend for all compiled models: a graph runs the code that the plans in force have for it."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph for the plans in force."""
        captured = Captured(module)
        _IN_FORCE.get().code(captured, inputs)

        def run(*args: Any) -> Any:
            return _IN_FORCE.get().code(captured, args)(*args)

        return run


#: One for each kind of kernels, because inductor changes the graph that Dynamo captured.
_SWITCHES: dict[str, Switch] = {}


def compiled_under(plans: Plans, model: nn.Module, kernels: str) -> nn.Module:
    """The model as torch.compile makes it, with plans in force while it runs."""
    switch = _SWITCHES.setdefault(kernels, Switch())
    compiled = torch.compile(model, backend=switch, fullgraph=True, dynamic=False)
    wrapped: nn.Module = _compat_compile.wrapped(compiled, functools.partial(_under, plans))
    return wrapped


def _under(plans: Plans, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with plans in force while it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        token = _IN_FORCE.set(plans)
        try:
            return function(*args, **kwargs)
        finally:
            _IN_FORCE.reset(token)

    return run


@contextlib.contextmanager
def captured_whole() -> Iterator[None]:
    """Calls of loggers are left out of the graph, and derivatives that the model takes are captured, instead of cutting
    it.
    """
    config: Any = torch._dynamo.config
    functions = {getattr(logging.Logger, method) for method in _LOGGING if hasattr(logging.Logger, method)}
    loggers = next((n for n in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(config, n)), None)
    changed: dict[str, Any] = {} if loggers is None else {loggers: getattr(config, loggers) | functions}
    changed |= _compat.many_graphs()  # every shape of a model is one more compilation of the same forward
    if hasattr(config, "trace_autograd_ops"):
        changed["trace_autograd_ops"] = True
    with config.patch(changed):
        yield
