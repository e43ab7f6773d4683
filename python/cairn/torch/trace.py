"""`trace`: one training step as a graph of operators that solvers take, and that runs by their schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cairn
import torch
from torch import nn

from .base import memory
from .base.errors import PlanMismatch
from .handle import refuse_planned_modules, set_aside
from .planning.arguments import check_call, check_count, positional
from .planning.fingerprint import fingerprint_of
from .profiling.profileable import check_model, device_of
from .profiling.sample import Sample
from .rerun_state.backend_flags import BackendFlags
from .tracing import graph_costs, interpreter
from .tracing.graph_program import Program
from .tracing.interpreter import Step
from .tracing.recording import recorded
from .tracing.surroundings import Surroundings


class Traced:
    """A training step as a graph; made by `trace`.

    Attributes
    ----------
    graph
        The problem: a node for each operation, in the order of the step.
    """

    def __init__(self, graph: cairn.Graph, program: Program, surroundings: Surroundings, device: torch.device) -> None:
        self.graph = graph
        self._program, self._surroundings, self._device = program, surroundings, device
        self._backend_flags = BackendFlags()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph as a cairn-graph file, which the command line reads.

        Parameters
        ----------
        path : str or path-like
            The file.
        """
        self.graph.save(path)

    def run(
        self,
        verified: cairn.Verified | None = None,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        measure: bool = True,
    ) -> Step:
        """Run the step as a verified schedule says; without one, as it was traced, with nothing recomputed.

        Random numbers are drawn from torch's default generators, as in training. Buffers get the contents that the step
        leaves in them. Parameters' `grad` is not touched.

        Parameters
        ----------
        verified : cairn.Verified, optional
            What `cairn.verify` returned for `graph` and a schedule.
        args, kwargs
            Other inputs of the same shapes; those that were traced if neither is given.
        measure : bool
            Also measure the peak of memory.

        Returns
        -------
        Step
            Loss, gradients, and the peak in bytes.

        Raises
        ------
        PlanMismatch
            The schedule was verified for another graph, or shapes, inputs or parameters are not those that were traced.
        """
        ops = self._program.store_all() if verified is None else self._ops(verified)
        externals = [outside.tensor for outside in self._program.externals]
        if args is not None or kwargs is not None:
            self._surroundings.replace_inputs(externals, args, kwargs)
        self._surroundings.check(externals)
        meter = memory.meter_for(self._device) if measure else None
        with self._backend_flags.in_force():
            run = interpreter.run(self._program, ops, externals, self._device, meter)
        outcome = run.outcome
        interpreter.write_back(outcome, externals)
        return Step(
            loss=outcome.loss,
            grads=outcome.grads,
            outputs=outcome.outputs,
            peak_bytes=self.graph.fixed_bytes + run.rise_bytes if measure else None,
            predicted_peak_bytes=None if verified is None else verified.replay.peak_bytes,
            computed=run.computed,
            host_peak_bytes=run.host_peak_bytes,
        )

    def _ops(self, verified: cairn.Verified) -> Sequence[tuple[Any, ...]]:
        if not isinstance(verified, cairn.Verified):
            raise TypeError(
                f"run takes what cairn.verify(traced.graph, schedule) returns, not a {type(verified).__name__}"
            )
        if verified.problem.hash != self.graph.hash:
            raise PlanMismatch(
                f"the schedule was verified for the problem {verified.problem.hash[:19]}, and this step is "
                f"{self.graph.hash[:19]}: solve traced.graph itself, or what traced.save wrote"
            )
        return verified.schedule.ops

    def __repr__(self) -> str:
        return f"<cairn.torch.Traced {self.graph.name!r}: {len(self.graph)} operations>"


def trace(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    keep_output: bool = False,
    numbers: str = "refuse",
    passes: int = 3,
    times_of: cairn.Graph | None = None,
    name: str | None = None,
) -> Traced:
    """Trace one plain training step of a model on a sample, without changing the model.

    The step runs once as usual and is recorded. Then the recording runs, its results are compared bit for bit with the
    step's, and its operations are measured. This needs the memory of plain training.

    Parameters
    ----------
    model : nn.Module
        The model, on its device.
    args, kwargs
        The model's arguments in the training loop; a single tensor counts as a tuple of one.
    loss_fn : callable, optional
        Computes the scalar loss of the model's output; not needed if the output is the loss or contains it.
    keep_output : bool
        Whether the tensors of the model's output are results too and stay to the end, as in a loop that holds them.
    numbers : {"refuse", "check"}
        How to treat a step that reads numbers of tensors (`if x.sum() > 0`): refuse it, or check in every run that the
        numbers are those of the trace, so that every branch is the same.
    passes : int
        The number of timed passes; the median counts. 0 measures no times, if only memory matters.
    times_of : cairn.Graph, optional
        A graph of the same step, traced perhaps in another process. This graph gets its times, so that schedules of
        that graph are schedules of this one.
    name : str, optional
        The name of the graph; the model's class by default.

    Returns
    -------
    Traced
        The graph, and the step to run.

    Raises
    ------
    Unsupported
        The step cannot be expressed as one graph; the message names the operation.
    PlanMismatch
        `times_of` was traced from another step.

    Examples
    --------
    >>> traced = ct.trace(model, x, loss_fn=loss_fn)
    >>> schedule = cairn.solve(traced.graph, "2GiB").require()
    >>> step = traced.run(cairn.verify(traced.graph, schedule))
    """
    if numbers not in ("refuse", "check"):
        raise ValueError(f"numbers is {numbers!r}; it can be 'refuse' or 'check'")
    check_call(model, kwargs, loss_fn, args)
    check_count("passes", passes, 0)
    arguments = positional(args)
    sample = Sample(model, arguments, dict(kwargs or {}), loss_fn)
    device = device_of(sample)
    check_model(model)
    surroundings = Surroundings(sample)
    with set_aside(model, *sample.others), sample.preserved(device):
        refuse_planned_modules(model)
        program, generators = recorded(sample, surroundings, device, keep_output, numbers == "check")
        tensors = [outside.tensor for outside in program.externals]
        costs = graph_costs.measured(program, tensors, device, 0 if times_of is not None else passes)
        generators.restore()
    surroundings.note(program.externals)
    there = (*model.parameters(), *model.buffers(), *sample.static_tensors(), *tensors)
    fixed = memory.unique_bytes(t for t in there if t.device == device)  # an argument may be on the host
    provenance = {
        "traced_by": f"cairn {cairn.__version__}",
        **fingerprint_of(model, arguments, sample.kwargs),
        "threads": torch.get_num_threads(),
    }
    graph = graph_costs.graph_of(program, costs, fixed, name or type(model).__name__, provenance)
    if times_of is not None:
        graph = graph_costs.with_times_of(graph, times_of)
    return Traced(graph, program, surroundings, device)
