"""The compiled code of a class of blocks: Dynamo captures a block once, and each graph is cut for every option.

Blocks of one class share one callable; Dynamo's guards decide for which blocks and shapes a captured graph holds. What
Dynamo gets as the code of a graph runs that of the option that is current then. The code of an option is made when it
is first needed, and Dynamo captures nothing again. AOTAutograd's trace of the graph is cut anew. Where a
trace cannot be cut again (inductor, torch 2.9, higher-order operators), AOTAutograd traces the graph anew for each
option; costs and schedules of the first trace are used for all later traces that have the same results.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..base import _compat
from ..base.errors import PlanMismatch, Unsupported
from . import fused_costs, kernel_costs
from .backend import raising
from .captured import Captured
from .emission import emit
from .joint_graph import JointGraph
from .partitions import Partitions, have_same_results
from .problem import Costs
from .region_levels import EVERYTHING, UNPLANNED, GraphCurve, Level, level_text

#: In place of an option: graphs that run keep everything, and are added to `RegionBackend.recorded`.
RECORDING = -1

Code = Callable[..., Any]


class RegionGraph:
    """A graph that Dynamo captured, with its code for each option.

    Attributes
    ----------
    curve
        Its schedules by level; None if it has no backward, or cannot be planned.
    not_planned
        Why it is cut by torch's default partition; empty where it is not.
    recomputed
        The number of calls that the backward recomputes, by option.
    """

    def __init__(self, backend: RegionBackend, module: fx.GraphModule) -> None:
        self._backend, self._graph = backend, Captured(module)
        self._inputs = _compat.CapturedInputs(module)
        self._uncut: Code | None = None  # without gradients: for all options
        self.curve: GraphCurve | None = None
        self.not_planned = ""
        self.recomputed: dict[int, int] = {}
        self.codes: dict[int, Code] = {}

    def running(self) -> Code:
        """The function that Dynamo gets: runs the code of the option that is current then."""
        backend, codes = self._backend, self.codes

        def run(*args: Any) -> Any:
            code = codes.get(backend.option)
            return (self.current() if code is None else code)(*args)

        return run

    def current(self) -> Code:
        """The code of the current option."""
        option = self._backend.option
        if option == RECORDING:
            self._backend.recorded.append(self)
            option = self._backend.number_of(EVERYTHING)
        if option not in self.codes:
            with self._inputs.active() as inputs:
                self.compile(option, inputs)
        return self.codes[option]

    def compile(self, option: int, inputs: Sequence[Any]) -> None:
        """Make the code of an option. inputs: as Dynamo captured them."""
        if self._uncut is None:
            self._backend.compilations += 1
            cut = functools.partial(self._cut, option)
            with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):  # hides active hooks from tracing
                try:
                    code = self._graph.compiled(inputs, self._backend.kernels, cut)
                except PlanMismatch as error:
                    code = raising(error)
                else:
                    self._uncut = None if option in self.recomputed else code
        self.codes[option] = code if self._uncut is None else self._uncut

    def _cut(
        self, option: int, module: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph for an option. A graph that cannot be analysed gets torch's default partition."""
        self.recomputed[option] = 0
        level = self._backend.levels[option]
        if level == UNPLANNED or self.not_planned:
            return _compat.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        try:
            joint, curve = self._analysed(module, num_fwd_outputs)
            schedule = self._backend.schedule(curve, level)
            emitted = emit(joint, schedule, saves_views=self._backend.is_by_operators)
        except Unsupported as error:
            self.curve, self.not_planned = None, str(error)
            self._backend.not_planned.append(self.not_planned)
            return _compat.cut_without_recomputation(module, joint_inputs, num_fwd_outputs, **others)
        self.recomputed[option] = emitted.recomputed
        return _compat.cut(emitted.module, emitted.saved, emitted.sizes, num_fwd_outputs)

    def _analysed(self, module: fx.GraphModule, num_fwd_outputs: int) -> tuple[JointGraph, GraphCurve]:
        """The analysed joint graph and its curve. Another trace with the same results keeps the curve that there is."""
        joint = self._graph.read(module, num_fwd_outputs)
        if self.curve is None or not have_same_results(self.curve.joint, joint):
            self.curve = self._backend.curve_of(joint)
        return joint, self.curve


class RegionBackend:
    """The backend of torch.compile for a class of blocks.

    Attributes
    ----------
    levels
        By option.
    option
        The current option: calls of compiled code use it. All blocks of the class and all threads share it, so only one
        thread at a time may run the model.
    graphs
        How many graphs Dynamo captured.
    compilations
        How many codes were made of them, one for each option.
    recorded
        The graphs that ran while the option was `RECORDING`.
    not_planned
        For each graph that was cut by torch's default partition: the reason.
    """

    def __init__(self, kernels: str, device: torch.device, partitions: Partitions) -> None:
        self.kernels, self.is_by_operators = kernels, kernels == "eager"
        self._device, self._partitions = device, partitions
        self.levels, self.option = [EVERYTHING], 0
        self.graphs = self.compilations = 0
        self.recorded: list[RegionGraph] = []
        self.not_planned: list[str] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Code:
        """Compiles a graph that Dynamo captured for the current option."""
        self.graphs += 1
        graph = RegionGraph(self, module)
        graph.compile(max(self.option, 0), inputs)
        return graph.running()

    def number_of(self, level: Level) -> int:
        """The option of a level, which is added if there is none."""
        if level not in self.levels:
            self.levels.append(level)
        return self.levels.index(level)

    def curve_of(self, joint: JointGraph) -> GraphCurve:
        """The curve of a graph. What its calls cost is measured now, unless a loaded plan has its schedules."""
        curve = GraphCurve(joint, self._measured)
        if not self._partitions.is_loaded:
            _ = curve.costs
        return curve

    def _measured(self, joint: JointGraph) -> Costs:
        measured = kernel_costs.measured if self.is_by_operators else fused_costs.estimated
        return measured(joint, self._device)

    def schedule(self, curve: GraphCurve, level: Level) -> Sequence[tuple[Any, ...]]:
        """The schedule of a graph at a level: a stored one, or a new one."""
        if level == EVERYTHING:
            return curve.everything()
        name = level_text(level)
        known = self._partitions.ops(name, curve.joint)
        if known is not None:
            return curve.validated(known)
        ops = curve.at(level).ops
        self._partitions.add(name, curve.joint, ops)
        return ops


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class BlockCode:
    """The compiled code of one class of blocks.

    Attributes
    ----------
    backend
        Makes the code of each captured graph.
    compiled
        The compiled function, which takes the block and its arguments.
    has_graph_breaks
        Whether blocks are captured as several graphs.
    """

    def __init__(self, function: Code, kernels: str, device: torch.device, partitions: Partitions) -> None:
        self._function, self.backend = function, RegionBackend(kernels, device, partitions)
        self.has_graph_breaks = False
        self.compiled = self._compiled()

    def _compiled(self) -> Code:
        own = with_own_code(self._function)
        compiled: Code = torch.compile(own, backend=self.backend, fullgraph=not self.has_graph_breaks)
        return compiled

    def allow_graph_breaks(self) -> None:
        """From now on, allow graph breaks: blocks are captured as several graphs."""
        self.has_graph_breaks = True
        self.compiled = self._compiled()


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with its own code object. Dynamo stores compiled code by code object."""
    function = _compat.own_frame(function)
    if not isinstance(function, types.FunctionType):
        return function
    code, module_globals = function.__code__.replace(), function.__globals__
    copied = types.FunctionType(code, module_globals, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    copied.__module__ = function.__module__
    copied.__dict__.update(function.__dict__)
    return copied


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of a module with its hooks, as a function that can be compiled."""
    return module(*args, **kwargs)
