"""Plans a joint graph: costs, problem, solver, and the two graphs in the schedule's order.

One planner serves one graph. The solver plans against the simulator's peak. `liveness` computes the peak of the code
that is made of the schedule, and the planner moves the solver's budget until that peak uses the step's budget.
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

from ..base import _compat_compile
from ..base.errors import InfeasibleBudget, PlanMismatch, Unsupported
from . import fused_costs, kernel_costs
from .compiled_plan import CompiledPlan
from .emission import Emitted, emit
from .fused_groups import Groups, by_result, groups_of, in_groups
from .graph_offloading import GraphOffloading
from .joint_graph import JointGraph, is_tangent, read, unknown_size
from .liveness import Moment, peak
from .problem import Costs, graph_of, repeated_ns
from .request import Request

ROUNDS = 3
#: Slack of the code's peak below the budget, as a share of what is not resident, below which planning ends.
ENOUGH = 0.01
#: The gap to the fastest schedule below which the search for a better one ends.
CLOSE = 0.005
#: Reads a joint graph, given the number of its outputs that belong to the forward.
Reader = Callable[[fx.GraphModule, int], JointGraph]
#: The solver for the least memory: seconds on any graph.
LEAST_SOLVER = "graph-search"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A schedule, and the code that was made of it."""

    solution: cairn.Solution
    emitted: Emitted
    forward: fx.GraphModule
    backward: fx.GraphModule
    moment: Moment


class Planner:
    """The partition function of one compilation.

    resident: what is on the device during the whole step, bytes by name, the graph's inputs included.
    reader: reads joint graphs, or knows what was read before.
    """

    def __init__(self, request: Request, device: torch.device, resident: dict[str, int], reader: Reader = read) -> None:
        self.request, self.device, self.resident, self._read = request, device, resident, reader
        self.plan: CompiledPlan | None = None
        self.predicted_bytes = 0  # the peak of the graph alone, without the loss and the optimizer
        self.written: list[int] = []  # indices of inputs that the step writes
        self._fixed = sum(resident.values())
        self._around = request.around(self._fixed)
        self._groups: Groups = ()  # of results that the problem has as one node
        self._offloads: GraphOffloading | None = None
        self._bounds: list[tuple[int, int]] = []  # budgets, and the time that no schedule within each falls below

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph into forward and backward, the signature that AOTAutograd calls."""
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
        graph = graph_of(joint, costs, self._around, self.request.model_name, {"made_by": f"cairn {cairn.__version__}"})
        self._groups = groups_of(joint, costs, {index for index, node in enumerate(graph.nodes) if node.keep})
        graph = self._with_machine(joint, in_groups(graph, self._groups))
        if self.request.plan is not None:
            return self._replayed(joint, costs, graph, self.request.plan)
        total = self.request.total_bytes(self.device, self._fixed)
        everything = cairn.limits(graph, solver="store-all")
        reserve = self.request.reserve_bytes(self.device, (everything.store_all_bytes or 0) - self._fixed)
        fitted = self._fit(joint, costs, graph, total, reserve)
        self.plan = self._plan_of(joint, costs, graph, fitted, everything, total, reserve)
        self.predicted_bytes = self._alone_bytes(joint, costs, fitted.forward, fitted.backward)
        return fitted.forward, fitted.backward

    def _replayed(
        self, joint: JointGraph, costs: Costs, graph: cairn.Graph, plan: CompiledPlan
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Apply a plan that was made before for the same graph."""
        problem = plan.graph
        for number, (node, other) in enumerate(zip_longest(graph.nodes, problem.nodes)):
            if node is None or other is None or _rules(node) != _rules(other):
                raise PlanMismatch(
                    f"the plan was made for another step: they differ from node {number} on, "
                    f"{'the end' if node is None else node.name!r} here and "
                    f"{'the end' if other is None else other.name!r} in the plan"
                )
        schedule = cairn.Schedule.from_json(problem, json.dumps(plan.schedule))
        cairn.verify(problem, schedule, plan.budget_bytes if self._offloads is None else None)
        emitted, forward, backward, moment = self._code(joint, costs, schedule)
        self.predicted_bytes = self._alone_bytes(joint, costs, forward, backward)
        self.plan = dataclasses.replace(
            plan,
            peak_bytes=max(moment.peak_bytes, self.request.optimizer_peak_bytes),
            measured_peak_bytes=None,
            recomputed=emitted.recomputed,
            resident=self.resident,
            at_peak=_composition(moment),
            peak_at=str(moment),
        )
        return forward, backward

    def _fit(self, joint: JointGraph, costs: Costs, graph: cairn.Graph, total: int, reserve: int) -> Fitted:
        """The fastest schedule whose code keeps to the budget.

        Code may need less memory than its schedule, so that a budget below the solver's least may work.
        """
        usable = total - reserve
        if self.request.least:
            return self._least(joint, costs, graph)
        if self.request.optimizer_peak_bytes > usable:
            raise self._infeasible(self._least(joint, costs, graph), total, reserve)
        target = usable - self._around.correction_bytes
        best: Fitted | None = None
        least: Fitted | None = None
        of_each = cairn.parse_duration(self.request.time_limit) // ROUNDS
        for number in range(1, ROUNDS + 1):
            solution = self._solve(graph, target, of_each)
            if solution.schedule is not None:
                made = self._made(joint, costs, solution)
            elif least is None:
                least = made = self._least(joint, costs, graph)
                target = max(target, made.solution.peak_bytes or 0)
            else:
                break
            over = made.moment.peak_bytes - usable
            if over <= 0 and (best is None or _time(made.solution) <= _time(best.solution)):
                best = made
            if over <= 0 and (-over <= ENOUGH * (usable - self._fixed) or _is_plain(made.solution)):
                longer = self._searched(joint, costs, graph, made, target, (ROUNDS - number) * of_each)
                if longer.moment.peak_bytes <= usable and _time(longer.solution) <= _time((best or made).solution):
                    best = longer
                break
            target -= over
        if best is None:
            best = least or self._least(joint, costs, graph)
        if best.moment.peak_bytes > usable:
            raise self._infeasible(best, total, reserve)
        return best

    def _searched(
        self, joint: JointGraph, costs: Costs, graph: cairn.Graph, found: Fitted, target: int, left_ns: int
    ) -> Fitted:
        """A faster schedule, searched in the time that is left, if one may exist."""
        gap = found.solution.gap
        if left_ns <= 0 or gap is None or gap <= CLOSE:
            return found
        solution = self._solve(graph, target, left_ns)
        if solution.schedule is None or _time(solution) > _time(found.solution):
            return found
        return self._made(joint, costs, solution)

    def _least(self, joint: JointGraph, costs: Costs, graph: cairn.Graph) -> Fitted:
        """The schedule of least memory."""
        if self._offloads is not None:
            return self._made(joint, costs, self._offloads.least(self.request.time_limit))
        return self._made(joint, costs, _of_least_memory(graph))

    def _solve(self, graph: cairn.Graph, target: int, limit_ns: int) -> cairn.Solution:
        if self._offloads is not None:
            return self._offloads.solved(max(1, target), f"{limit_ns}ns", self.request.solver)
        solution = cairn.solve(graph, max(1, target), solver=self.request.solver, time_limit=f"{limit_ns}ns")
        if solution.lower_bound_ns is not None:
            self._bounds.append((max(1, target), solution.lower_bound_ns))
        return solution

    def _bound_ns(self, solution: cairn.Solution) -> int | None:
        """The best bound on the time of schedules within a solution's budget; bounds of larger budgets hold for it."""
        of_larger = [bound for budget, bound in self._bounds if budget >= (solution.budget_bytes or 0)]
        return max((*of_larger, solution.lower_bound_ns or 0)) or None

    def _made(self, joint: JointGraph, costs: Costs, solution: cairn.Solution) -> Fitted:
        assert solution.schedule is not None
        return Fitted(solution, *self._code(joint, costs, solution.schedule))

    def _code(
        self, joint: JointGraph, costs: Costs, schedule: cairn.Schedule
    ) -> tuple[Emitted, fx.GraphModule, fx.GraphModule, Moment]:
        """The two graphs of a schedule, and their peak."""
        if self._offloads is None:
            emitted = emit(joint, by_result(schedule.ops, self._groups))
        else:
            assert self.request.host is not None
            emitted = emit(joint, self._offloads.ops(schedule), self.request.host.number)
        forward, backward = _compat_compile.cut(emitted.module, emitted.saved, emitted.sizes, len(joint.outputs))
        return emitted, forward, backward, peak(joint, costs, self._around, forward.graph, backward.graph)

    def _alone_bytes(self, joint: JointGraph, costs: Costs, forward: fx.GraphModule, backward: fx.GraphModule) -> int:
        """The peak of the two graphs without a loss outside of them."""
        correction = self.request.correction_bytes
        around = dataclasses.replace(self._around, loss_workspace_bytes=0, correction_bytes=correction)
        return peak(joint, costs, around, forward.graph, backward.graph).peak_bytes

    def _plan_of(
        self,
        joint: JointGraph,
        costs: Costs,
        graph: cairn.Graph,
        fitted: Fitted,
        everything: cairn.Limits,
        total: int,
        reserve: int,
    ) -> CompiledPlan:
        solution, twice = fitted.solution, repeated_ns(joint, costs)
        assert solution.schedule is not None and solution.makespan_ns is not None
        step = solution.makespan_ns - twice + (0 if self._offloads is None else self._offloads.slowed_ns(solution))
        least_ns = self._bound_ns(solution)
        bound = None if least_ns is None else least_ns - twice
        return CompiledPlan(
            model_name=self.request.model_name,
            device=str(self.device),
            kernels=self.request.kernels,
            budget_bytes=total,
            reserve_bytes=reserve,
            gradients=self.request.gradients,
            peak_bytes=max(fitted.moment.peak_bytes, self.request.optimizer_peak_bytes),
            measured_peak_bytes=None,
            plain_peak_bytes=everything.store_all_bytes or 0,
            plain_ns=(everything.store_all_ns or 0) - twice,
            least_budget_bytes=_least_budget(fitted, reserve),
            step_ns=step,
            lower_bound_ns=bound,
            gap=None if bound is None or not step else max(0.0, (step - bound) / step),
            solver=solution.solver,
            outcome=str(solution.outcome),
            recomputed=fitted.emitted.recomputed,
            problem=json.loads(graph.to_json()),
            schedule=json.loads(solution.schedule.to_json()),
            resident=self.resident,
            at_peak=_composition(fitted.moment),
            peak_at=str(fitted.moment),
            correction_bytes=self._around.correction_bytes,
            **self._offloaded(fitted.emitted),
        )

    def _with_machine(self, joint: JointGraph, graph: cairn.Graph) -> cairn.Graph:
        """The problem, with a machine if values may be offloaded."""
        host = self.request.host
        if host is None:
            return graph
        self._offloads = GraphOffloading(joint, self._groups, graph, host, host.to.machine)
        return self._offloads.graph

    def _offloaded(self, emitted: Emitted) -> dict[str, Any]:
        """What a plan says about offloading."""
        host = self.request.host
        if host is None:
            return {}
        return {"tier": host.to.tier, "host_budget_bytes": host.to.machine.host_bytes, "host_bytes": emitted.host_bytes}

    def _infeasible(self, least: Fitted, total: int, reserve: int) -> InfeasibleBudget:
        """The error that names the least budget whose code fits, the parts of its peak, and the moment of the peak."""
        needed = least.moment.peak_bytes + reserve
        if self.request.optimizer_peak_bytes + reserve > needed:
            return self._optimizer_needs_more(total, reserve)
        parts = {**self.resident, **_composition(least.moment)}
        return InfeasibleBudget.make(total, needed, reserve, parts, str(least.moment), least.moment.node)

    def refused(self, measured_bytes: int) -> InfeasibleBudget | None:
        """The error for a plan of least memory whose measured step, or the optimizer's step, passes the budget."""
        plan, optimizer = self.plan, self.request.optimizer_peak_bytes
        assert plan is not None
        total, reserve = plan.budget_bytes, plan.reserve_bytes
        if not self.request.least or (measured_bytes <= total and optimizer + reserve <= total):
            return None
        if optimizer > measured_bytes:
            return self._optimizer_needs_more(total, reserve)
        parts = {**self.resident, **plan.at_peak}
        return InfeasibleBudget.make(total, measured_bytes + reserve, reserve, parts, plan.peak_at, "measured step")

    def _optimizer_needs_more(self, total: int, reserve: int) -> InfeasibleBudget:
        needed = self.request.optimizer_peak_bytes + reserve
        name = "step of the optimizer"
        return InfeasibleBudget.make(total, needed, reserve, self.resident, name, name)


def _of_least_memory(graph: cairn.Graph) -> cairn.Solution:
    """The schedule of least memory: the same in every process, whatever times were measured in it.

    The search sees equal times, and is limited by work.
    """
    even = cairn.Graph(
        [dataclasses.replace(node, cost_ns=1) for node in graph.nodes],
        fixed_bytes=graph.fixed_bytes,
        backward_begins_at=graph.backward_begins_at,
    )
    least = cairn.limits(even, solver=LEAST_SOLVER).least_bytes
    found = cairn.solve(even, least, solver=LEAST_SOLVER, iterations=1)
    assert found.schedule is not None
    schedule = cairn.Schedule.from_ops(graph, found.schedule.ops, solver=found.solver)
    replay = cairn.simulate(graph, schedule, None)
    return dataclasses.replace(
        found,
        problem=graph,
        schedule=schedule,
        makespan_ns=replay.makespan_ns,
        recompute_ns=replay.recompute_ns,
        lower_bound_ns=None,
        gap=None,
    )


def _rules(node: cairn.Node) -> tuple[Any, ...]:
    """The parts of a problem that a schedule depends on, without times, which are measured anew each time."""
    return node.bytes, node.deps, node.alias_of, node.keep, node.no_recompute


def _least_budget(fitted: Fitted, reserve: int) -> int | None:
    """About the least budget: the solver's, by the simulator, or what this schedule's code takes."""
    if fitted.solution.least_bytes is None:
        return None
    return min(fitted.solution.least_bytes, fitted.moment.peak_bytes) + reserve


def _is_plain(solution: cairn.Solution) -> bool:
    """Whether a schedule neither recomputes nor waits for transfers, so that no other is faster."""
    return solution.recompute_ns == 0 and not solution.stall_ns


def _time(solution: cairn.Solution) -> int:
    assert solution.makespan_ns is not None
    return solution.makespan_ns


def _composition(moment: Moment) -> dict[str, int]:
    """The parts of a peak by operator; copies of one operator in equal layers count as one part."""
    parts: dict[str, int] = {}
    for name, size in moment.resident.items():
        kind = name.rstrip("0123456789").rstrip("_") or name
        parts[f"results of {kind}"] = parts.get(f"results of {kind}", 0) + size
    return parts
