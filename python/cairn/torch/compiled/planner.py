"""Plans a joint graph: costs, problem, solver, and the forward and backward graphs in the schedule's order.

A joint graph has the operations of forward and backward in one `fx` graph. One planner serves one joint graph. It goes
through four steps: it estimates or measures the cost of each operation, makes a `cairn.Graph` of them (the *problem*),
lets a solver find a schedule of the problem, and generates a forward and a backward graph from the schedule.

There are two peaks. The solver plans against the peak of the schedule, which the simulator computes. `liveness`
computes the peak of the generated graphs, which differs. So the planner adjusts the *target*, the budget that it gives
to the solver, until the peak of the generated graphs just fits the step's budget. A schedule with its graphs is a
*candidate*.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import cairn
import torch
from torch import fx

from ..base import _compat
from ..base.errors import InfeasibleBudget, PlanMismatch, Unsupported
from . import fused_costs, kernel_costs
from .compiled_plan import CompiledPlan
from .emission import Emitted, emit
from .fused_groups import Groups, by_result, groups_of, in_groups
from .graph_offloading import GraphOffloading
from .joint_graph import JointGraph, is_tangent, read, unknown_size
from .liveness import GraphPeak, Liveness
from .problem import Costs, graph_of, repeated_ns
from .request import Request

#: How often the solver is called for one graph, each time with another target.
MAX_SOLUTIONS = 3
#: How often it is called if the generated graphs of no schedule fit the budget so far.
MAX_ATTEMPTS = 8
#: No other target is tried if it would exceed the last one by at most this share of the budget for non-resident memory.
MAX_SLACK = 0.01
#: A schedule is not improved further if it is proved to take at most this share more than the fastest one.
SMALL_GAP = 0.005
#: Reads a joint graph, given the number of its outputs that belong to the forward.
Reader = Callable[[fx.GraphModule, int], JointGraph]
#: The solver for the least memory. It takes seconds on any graph.
LEAST_SOLVER = "graph-search"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule and the graphs generated from it.

    Attributes
    ----------
    solution
        The solver's answer, with a schedule.
    emitted
        The joint graph in the schedule's order.
    forward, backward
        The two graphs that it is cut into.
    liveness
        The storages of the two graphs.
    moment
        The peak of the two graphs.
    """

    solution: cairn.Solution
    emitted: Emitted
    forward: fx.GraphModule
    backward: fx.GraphModule
    liveness: Liveness
    moment: GraphPeak

    @property
    def peak_bytes(self) -> int:
        """The peak of the two graphs, resident memory included."""
        return self.moment.peak_bytes

    @property
    def makespan_ns(self) -> int:
        """The predicted time of the schedule."""
        return _makespan_ns(self.solution)


class Planner:
    """The partition function of one compilation: AOTAutograd calls it with the joint graph.

    Parameters
    ----------
    resident
        Memory that is resident on the device during the whole step, the graph's inputs included: bytes by name.
    reader
        Analyses a joint graph; it may return a cached result.

    Attributes
    ----------
    plan
        The plan; None before the call.
    predicted_bytes
        The peak of the two graphs, as predicted before the compiler generates code for them. Resident memory counts,
        the loss and the optimizer do not.
    written
        Indices of the inputs that the step writes.
    """

    def __init__(self, request: Request, device: torch.device, resident: dict[str, int], reader: Reader = read) -> None:
        self.request, self.device, self.resident, self._read = request, device, resident, reader
        self.plan: CompiledPlan | None = None
        self.predicted_bytes = 0
        self.written: list[int] = []
        self._fixed_bytes = sum(resident.values())
        self._surroundings = request.surroundings(self._fixed_bytes)
        self._groups: Groups = ()  # the results of each node of the problem
        self._offloading: GraphOffloading | None = None
        self._liveness: Liveness | None = None  # of the plan's graphs
        self._bounds: list[tuple[int, int]] = []  # (budget, lower bound of the time of schedules within it)

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph into forward and backward. The signature is AOTAutograd's."""
        joint = self._read(module, num_fwd_outputs)
        if unknown := unknown_size(joint):
            raise Unsupported(
                f"how large {unknown} is, is known only when the step runs: compile blocks one by one "
                "(cairn.torch.compile(regions=True))"
            )
        primals = [n for n in module.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        self.written = [index for index, node in enumerate(primals) if node in joint.written]
        measured = kernel_costs.measured if self.request.kernels == "eager" else fused_costs.estimated
        costs = measured(joint, self.device)
        problem = graph_of(
            joint, costs, self._surroundings, self.request.model_name, {"made_by": f"cairn {cairn.__version__}"}
        )
        self._groups = groups_of(joint, costs, {index for index, node in enumerate(problem.nodes) if node.keep})
        problem = self._with_offloading(joint, in_groups(problem, self._groups))
        if self.request.plan is not None:
            return self._apply_plan(joint, costs, problem, self.request.plan)
        total = self.request.total_bytes(self.device, self._fixed_bytes)
        store_all = cairn.limits(problem, solver="store-all")
        reserve = self.request.reserve_bytes(self.device, (store_all.store_all_bytes or 0) - self._fixed_bytes)
        chosen = self._fit(joint, costs, problem, total, reserve)
        self.plan = self._plan_of(joint, costs, problem, chosen, store_all, total, reserve)
        self._liveness = chosen.liveness
        self.predicted_bytes = self._graphs_peak_bytes(chosen.liveness)
        return chosen.forward, chosen.backward

    def _apply_plan(
        self, joint: JointGraph, costs: Costs, problem: cairn.Graph, plan: CompiledPlan
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph by the request's plan, which was made for an equal graph. No solver is called."""
        planned = plan.graph
        for index, (here, there) in enumerate(zip_longest(problem.nodes, planned.nodes)):
            if here is None or there is None or _structure(here) != _structure(there):
                raise PlanMismatch(
                    f"the plan was made for another step: they differ from node {index} on, "
                    f"{'the end' if here is None else here.name!r} here and "
                    f"{'the end' if there is None else there.name!r} in the plan"
                )
        schedule = cairn.Schedule.from_json(planned, json.dumps(plan.schedule))
        cairn.verify(planned, schedule, plan.budget_bytes if self._offloading is None else None)
        emitted, forward, backward, self._liveness, moment = self._emit_and_cut(joint, costs, schedule)
        self.predicted_bytes = self._graphs_peak_bytes(self._liveness)
        self.plan = dataclasses.replace(
            plan,
            measured_peak_bytes=None,
            recomputed=emitted.recomputed,
            resident=self.resident,
            **self._peak_fields(moment),
        )
        return forward, backward

    def _fit(self, joint: JointGraph, costs: Costs, problem: cairn.Graph, total: int, reserve: int) -> Candidate:
        """The fastest schedule whose generated graphs fit the budget.

        Each attempt solves for a target, generates the graphs, and compares the peak of the graphs with that of the
        schedule. The next target assumes that this difference stays the same: with it, the graphs would just fit. So a
        target may be above the budget. If the graphs of a schedule need less than the schedule, a budget below the
        solver's least memory may work. So the schedule of least memory is tried once if the solver finds none. `total`
        and `reserve` are in bytes.
        """
        usable = total - reserve
        if self.request.least:
            return self._least(joint, costs, problem)
        if self.request.optimizer_peak_bytes > usable:
            raise self._infeasible(self._least(joint, costs, problem), total, reserve)
        target = self._target(usable)
        slack = int(MAX_SLACK * (usable - self._fixed_bytes))
        best: Candidate | None = None
        least: Candidate | None = None
        limit_ns = self._limit_ns
        solutions = MAX_SOLUTIONS - self._is_corrected_below(usable)  # one is for the bound
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if best is not None and attempt > solutions:
                break
            solution = self._solve(problem, target, limit_ns)
            if solution.schedule is not None:
                candidate = self._generated(joint, costs, solution)
            elif best is None and least is None:
                least = candidate = self._least(joint, costs, problem)
            else:
                break
            fits = candidate.peak_bytes <= usable
            fitting_target = usable - candidate.peak_bytes + (candidate.solution.peak_bytes or 0)
            if fits and (best is None or candidate.makespan_ns <= best.makespan_ns):
                best = candidate
            if fits and (fitting_target <= target + slack or _is_fastest(candidate.solution)):
                remaining_ns = (solutions - attempt) * limit_ns
                improved = self._improved(joint, costs, problem, candidate, target, remaining_ns)
                if improved.peak_bytes <= usable:
                    best = min(improved, best or improved, key=lambda one: one.makespan_ns)
                break
            target = fitting_target
        if best is None:
            best = least or self._least(joint, costs, problem)
        if best.peak_bytes > usable:
            raise self._infeasible(best, total, reserve)
        return best

    def _improved(
        self,
        joint: JointGraph,
        costs: Costs,
        problem: cairn.Graph,
        candidate: Candidate,
        target: int,
        remaining_ns: int,
    ) -> Candidate:
        """The candidate, or a faster one if the solver finds it in the remaining time.

        The caller checks the peak of the result, which may exceed the budget.
        """
        gap = candidate.solution.gap
        if remaining_ns <= 0 or gap is None or gap <= SMALL_GAP:
            return candidate
        solution = self._solve(problem, target, remaining_ns)
        if solution.schedule is None or _makespan_ns(solution) > candidate.makespan_ns:
            return candidate
        return self._generated(joint, costs, solution)

    def _least(self, joint: JointGraph, costs: Costs, problem: cairn.Graph) -> Candidate:
        """The candidate of least memory."""
        if self._offloading is not None:
            return self._generated(joint, costs, self._offloading.least(self.request.time_limit))
        return self._generated(joint, costs, _of_least_memory(problem))

    def _solve(self, problem: cairn.Graph, target: int, limit_ns: int) -> cairn.Solution:
        """The solver's answer for a target, in bytes."""
        target, solver, time_limit = max(1, target), self.request.solver, f"{limit_ns}ns"
        if self._offloading is not None:
            solution = self._offloading.solved(target, time_limit, solver)
        else:
            solution = cairn.solve(problem, target, solver=solver, time_limit=time_limit)
        if solution.lower_bound_ns is not None:
            self._bounds.append((target, solution.lower_bound_ns))
        return solution

    def _bound_ns(self, problem: cairn.Graph, solution: cairn.Solution, usable: int) -> int | None:
        """The best lower bound on the time of all schedules of the problem within the budget; None if there is none.

        A bound for a larger budget holds for a smaller one, too: every schedule within the smaller budget is within the
        larger one. The converse is false. So if a correction made all targets smaller than the budget, the solver is
        called once more, for the bound alone. usable: the budget without its reserve, in bytes.
        """
        budget = max(usable, solution.budget_bytes or 0)
        if self._is_corrected_below(usable) and max((target for target, _ in self._bounds), default=0) < budget:
            self._solve(problem, budget, self._limit_ns)
        return max((bound for target, bound in self._bounds if target >= budget), default=None)

    def _is_corrected_below(self, usable: int) -> bool:
        """Whether the first target is below the budget, and the solver can bound what lies between them."""
        has_target = self._offloading is None and not self.request.least
        return has_target and self._target(usable) < usable

    def _target(self, usable: int) -> int:
        """The first target of the solver, in bytes."""
        return usable - self._surroundings.correction_bytes

    @property
    def _limit_ns(self) -> int:
        """How long one call of the solver may take."""
        return cairn.parse_duration(self.request.time_limit) // MAX_SOLUTIONS

    def _generated(self, joint: JointGraph, costs: Costs, solution: cairn.Solution) -> Candidate:
        """The candidate of a solution."""
        assert solution.schedule is not None
        return Candidate(solution, *self._emit_and_cut(joint, costs, solution.schedule))

    def _emit_and_cut(
        self, joint: JointGraph, costs: Costs, schedule: cairn.Schedule
    ) -> tuple[Emitted, fx.GraphModule, fx.GraphModule, Liveness, GraphPeak]:
        """Generate the forward and the backward graph of a schedule, and compute their peak."""
        if self._offloading is None:
            emitted = emit(joint, by_result(schedule.ops, self._groups))
        else:
            assert self.request.host is not None
            emitted = emit(joint, self._offloading.ops(schedule), self.request.host.number)
        forward, backward = _compat.cut(emitted.module, emitted.saved, emitted.sizes, len(joint.outputs))
        liveness = Liveness(joint, costs, forward.graph, backward.graph)
        return emitted, forward, backward, liveness, liveness.peak(self._surroundings)

    def _graphs_peak_bytes(self, liveness: Liveness) -> int:
        """The peak that a measurement of the two graphs sees. A loss computed outside of them does not count."""
        correction = self.request.correction_bytes
        surroundings = dataclasses.replace(self._surroundings, loss_workspace_bytes=0, correction_bytes=correction)
        return liveness.peak(surroundings).peak_bytes

    def read_code(self, code: _compat.GeneratedCode) -> None:
        """Predict the plan's peak anew from the code that the compiler generated for its two graphs."""
        if self.plan is None or self._liveness is None or code.forward is None or code.backward is None:
            return
        correction_bytes = self.request.step_correction_bytes
        surroundings = dataclasses.replace(self._surroundings, correction_bytes=correction_bytes)
        moment = self._liveness.peak(surroundings, code)
        self.plan = dataclasses.replace(
            self.plan,
            correction_bytes=correction_bytes,
            **self._peak_fields(moment),
        )

    def _plan_of(
        self,
        joint: JointGraph,
        costs: Costs,
        problem: cairn.Graph,
        chosen: Candidate,
        store_all: cairn.Limits,
        total: int,
        reserve: int,
    ) -> CompiledPlan:
        solution, double_counted_ns = chosen.solution, repeated_ns(joint, costs)
        assert solution.schedule is not None and solution.makespan_ns is not None
        slowdown_ns = 0 if self._offloading is None else self._offloading.slowed_ns(solution)
        step_ns = solution.makespan_ns - double_counted_ns + slowdown_ns
        least_ns = self._bound_ns(problem, solution, total - reserve)
        bound_ns = None if least_ns is None else least_ns - double_counted_ns
        return CompiledPlan(
            model_name=self.request.model_name,
            device=str(self.device),
            kernels=self.request.kernels,
            budget_bytes=total,
            reserve_bytes=reserve,
            gradients=self.request.gradients,
            measured_peak_bytes=None,
            plain_peak_bytes=store_all.store_all_bytes or 0,
            plain_ns=(store_all.store_all_ns or 0) - double_counted_ns,
            least_budget_bytes=_least_budget(chosen, reserve),
            step_ns=step_ns,
            lower_bound_ns=bound_ns,
            gap=None if bound_ns is None or not step_ns else max(0.0, (step_ns - bound_ns) / step_ns),
            solver=solution.solver,
            outcome=str(solution.outcome),
            recomputed=chosen.emitted.recomputed,
            problem=json.loads(problem.to_json()),
            schedule=json.loads(solution.schedule.to_json()),
            resident=self.resident,
            **self._peak_fields(chosen.moment),
            correction_bytes=self._surroundings.correction_bytes,
            **self._offloading_fields(chosen.emitted),
        )

    def _with_offloading(self, joint: JointGraph, graph: cairn.Graph) -> cairn.Graph:
        """The problem itself or, if values may be offloaded, the problem with a machine; then `_offloading` is set."""
        host = self.request.host
        if host is None:
            return graph
        self._offloading = GraphOffloading(joint, self._groups, graph, host, host.to.machine)
        return self._offloading.graph

    def _peak_fields(self, moment: GraphPeak) -> dict[str, Any]:
        """The fields of `CompiledPlan` about the predicted peak."""
        return {
            "peak_bytes": max(moment.peak_bytes, self.request.optimizer_peak_bytes),
            "at_peak": _parts_by_operator(moment),
            "peak_at": str(moment),
        }

    def _offloading_fields(self, emitted: Emitted) -> dict[str, Any]:
        """The fields of `CompiledPlan` about offloading."""
        host = self.request.host
        if host is None:
            return {}
        return {"tier": host.to.tier, "host_budget_bytes": host.to.machine.host_bytes, "host_bytes": emitted.host_bytes}

    def _infeasible(self, least: Candidate, total: int, reserve: int) -> InfeasibleBudget:
        """The error for a budget below the least that works. It names the moment of the least peak and its parts."""
        needed = least.peak_bytes + reserve
        if self.request.optimizer_peak_bytes + reserve > needed:
            return self._optimizer_infeasible(total, reserve)
        parts = {**self.resident, **_parts_by_operator(least.moment)}
        moment, is_estimate = least.moment, self.request.kernels != "eager"
        remedy = self.request.remedy
        return InfeasibleBudget.make(total, needed, reserve, parts, str(moment), moment.node, remedy, is_estimate)

    def infeasible_if_over(self, measured: Sequence[int]) -> InfeasibleBudget | None:
        """The error if a plan of least memory exceeds the budget, in the measured step or in the optimizer's step.

        None if both fit. None for other plans, too: the caller can plan again with less memory. measured: the peaks of
        this graph's steps in bytes, that of this plan last.
        """
        plan, optimizer = self.plan, self.request.optimizer_peak_bytes
        assert plan is not None
        total, reserve = plan.budget_bytes, plan.reserve_bytes
        if not self.request.least or (measured[-1] <= total and optimizer + reserve <= total):
            return None
        if optimizer > measured[-1]:
            return self._optimizer_infeasible(total, reserve)
        parts = {**self.resident, **plan.at_peak}
        return InfeasibleBudget.of_measured_step(total, measured, reserve, parts, plan.peak_at, self.request.remedy)

    def _optimizer_infeasible(self, total: int, reserve: int) -> InfeasibleBudget:
        needed = self.request.optimizer_peak_bytes + reserve
        name = "step of the optimizer"
        return InfeasibleBudget.make(total, needed, reserve, self.resident, name, name, remedy="")


def _of_least_memory(problem: cairn.Graph) -> cairn.Solution:
    """The schedule of least memory. It is the same in every process, although measured times differ.

    The search takes the cost of every node as 1 ns, and is limited by iterations instead of time.
    """
    unit_costs = cairn.Graph(
        [dataclasses.replace(node, cost_ns=1) for node in problem.nodes],
        fixed_bytes=problem.fixed_bytes,
        backward_begins_at=problem.backward_begins_at,
    )
    least = cairn.limits(unit_costs, solver=LEAST_SOLVER).least_bytes
    solution = cairn.solve(unit_costs, least, solver=LEAST_SOLVER, iterations=1)
    assert solution.schedule is not None
    schedule = cairn.Schedule.from_ops(problem, solution.schedule.ops, solver=solution.solver)
    replay = cairn.simulate(problem, schedule, None)
    return dataclasses.replace(
        solution,
        problem=problem,
        schedule=schedule,
        makespan_ns=replay.makespan_ns,
        recompute_ns=replay.recompute_ns,
        lower_bound_ns=None,
        gap=None,
    )


def _structure(node: cairn.Node) -> tuple[Any, ...]:
    """The fields of a node that decide whether a schedule is valid. Times do not, and differ between measurements."""
    return node.bytes, node.deps, node.alias_of, node.keep, node.no_recompute


def _least_budget(candidate: Candidate, reserve: int) -> int | None:
    """About the least budget, in bytes: the solver's least memory, or the peak of these graphs if that is lower."""
    if candidate.solution.least_bytes is None:
        return None
    return min(candidate.solution.least_bytes, candidate.peak_bytes) + reserve


def _is_fastest(solution: cairn.Solution) -> bool:
    """Whether a schedule neither recomputes nor waits for transfers. Then no other schedule is faster."""
    return solution.recompute_ns == 0 and not solution.stall_ns


def _makespan_ns(solution: cairn.Solution) -> int:
    assert solution.makespan_ns is not None
    return solution.makespan_ns


def _parts_by_operator(moment: GraphPeak) -> dict[str, int]:
    """The bytes at a peak by operator. Calls of one operator count as one part."""
    parts: dict[str, int] = {}
    for name, size in moment.resident.items():
        kind = name.rstrip("0123456789").rstrip("_") or name
        parts[f"results of {kind}"] = parts.get(f"results of {kind}", 0) + size
    return parts
