"""`plan`: from a profile and a budget to a verified schedule.

A `Task` plans one profile for any number of budgets. For each budget it

1. subtracts the reserve (`_Room`);
2. asks the chain solvers for the fastest schedule that keeps and recomputes (`chains.py`);
3. if a host budget is given, asks for the fastest schedule that also offloads (`offload_plans.py`), and takes the
   faster of the two (`_Chosen`);
4. simulates the schedule and makes the `Plan`. If no schedule fits, it makes the `InfeasibleBudget` that says why.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import cairn
import torch

from ..._budget import Budget
from ..base import budgets
from ..base.choices import ACCUMULATED, CREATED
from ..base.errors import FINER_BLOCKS, InfeasibleBudget, Unsupported
from ..schedule.dependent_counts import NO_ASSUMPTIONS, Assumptions
from ..schedule.executed import as_performed, excess_bytes
from ..schedule.peak_parts import first_over, grouped, peak_moment
from ..schedule.transfer_plan import TransferPlan, peak_with_transfers
from ..selective.block_runs import SelectiveOptions
from . import arguments
from .chains import Answer, Chains, assumptions_for
from .offload_plans import (
    Destination,
    Offloading,
    OffloadSchedule,
    destination,
    held_outputs,
    problem_of,
)
from .plan import Plan, chain_of, known_number
from .step_profile import Profile, shifted_ns

#: How much a measured peak may exceed the predicted one: a share of the activations, and bytes on top.
UNCERTAINTY = {"cpu": (0.002, 32 * 1024), "cuda": (0.005, 2 * 1024 * 1024)}
AUTOCAST_UNCERTAINTY = 0.02  # autocast's copies of parameters live as long as the caller's autocast regions


def plan(
    profile: Profile,
    budget: Any = "auto",
    *,
    host_budget: Any = None,
    tier: str = "host",
    link: Any = None,
    allow: Collection[str] | None = None,
    solver: str = "auto",
    scope: str = "step",
    gradients: str = ACCUMULATED,
    **options: Any,
) -> Plan:
    """The fastest schedule of the profiled step within a budget.

    Parameters
    ----------
    profile : Profile
        Made by `cairn.torch.profile`.
    budget : int, str or cairn.Budget
        Bytes, "8GiB", "80%" (of the device), "auto" (what is free).
    host_budget : int or str, optional
        The most to offload at a time: bytes, a size, or "auto" (most of the free memory). None: no offloading. With
        a host budget, the saved tensors of a block (all, some, or its output alone) are kept, recomputed or offloaded,
        whichever is fastest.
    tier : str
        Where to offload: "host", or "file:PATH" (a file in the folder of that path, or in that folder).
    link : Link, cairn.Machine or str, optional
        How fast the link is: a measurement, or a rate such as "8GB/s". Measured if None.
    allow : collection of {"recompute", "inside", "offload"}, optional
        The allowed ways to save memory: "recompute" recomputes blocks; "inside" is selective recomputation inside
        blocks; "offload" needs a host_budget. All that are possible by default.
    solver : str
        As for `cairn.solve`. "auto" asks the strongest solver that can be afforded. It is exact in bytes unless a model
        has hundreds of blocks that all differ.
    scope : {"step", "activations"}
        "step" counts all device memory of the step. "activations" leaves out parameters, buffers, gradients and
        optimizer state.
    gradients : {"accumulated", "created"}
        "accumulated" plans for steps that add to existing gradients. Such a plan is valid for every loop. "created"
        plans for loops whose steps create their gradients (`zero_grad()` before every backward), which takes less.
    **options
        Options of the solver, as for `cairn.solve`.

    Returns
    -------
    Plan
        A schedule that the simulator has verified within the budget.

    Raises
    ------
    InfeasibleBudget
        No plan fits. The error names the least budget that works and what it consists of.
    cairn.MemoryLimit
        The solver named by solver= needs more memory than memory_limit= allows.

    Examples
    --------
    >>> plan = ct.plan(profile, "8GiB", host_budget="64GiB")
    >>> plan.peak_bytes <= plan.budget_bytes
    True
    """
    host_budget = arguments.host_budget_of(budget, host_budget)
    way = {"host_budget": host_budget, "tier": tier, "link": link}
    request = {**way, "allow": allow, "scope": scope, "gradients": gradients, "solver": solver}
    check_request(profile, {**request, **options})
    arguments.check_budget(budget)
    profile = profile if "inside" in arguments.allowed(allow, host_budget) else profile.without_options()
    to = destination(host_budget, tier, link, torch.device(profile.device))
    return Task(profile, scope, gradients, solver, options, to).plan(budget)


def check_request(profile: Any, options: Mapping[str, Any]) -> None:
    """Raises if this is no profile, or if an option is not one of `plan`."""
    if not isinstance(profile, Profile):
        arguments.refuse_torch_compiled(profile)
        what = f"{type(profile).__name__!r} object"
        raise TypeError(f"plans and curves are made from what cairn.torch.profile returns, not from this {what}")
    arguments.check_plan_options(options)


@dataclasses.dataclass(frozen=True)
class _Room:
    """A budget and its reserve."""

    total_bytes: int
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.reserve_bytes


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The schedule chosen for a budget, with its predicted time and bound."""

    problem: Mapping[str, Any]
    schedule: cairn.Schedule
    step_ns: int
    lower_bound_ns: int | None
    least_bytes: int | None
    solver: str
    outcome: str
    transfer_plan: TransferPlan | None = None
    assumed: Assumptions = NO_ASSUMPTIONS  # the assumptions under which the problem's sizes hold

    @classmethod
    def of(cls, answer: Answer) -> _Chosen | None:
        """From a solver's answer; None if it has no schedule."""
        solution = answer.solution
        if solution.schedule is None:
            return None
        return cls(
            answer.problem,
            solution.schedule,
            known_number(solution.makespan_ns),
            solution.lower_bound_ns,
            answer.least_bytes,
            solution.solver,
            str(solution.outcome),
            assumed=answer.assumed,
        )

    def recorded(self, budget_bytes: int) -> dict[str, Any]:
        """The schedule as the contents of a JSON file, with its budget, makespan and peak."""
        problem, ops = chain_of(self.problem), self.schedule.ops
        replay = cairn.simulate(problem, cairn.Schedule.from_ops(problem, ops), budget_bytes)
        made = cairn.Schedule.from_ops(
            problem,
            ops,
            solver=self.solver,
            budget_bytes=budget_bytes,
            makespan_ns=replay.makespan_ns,
            peak_bytes=replay.peak_bytes,
        )
        return dict(json.loads(made.to_json()))

    @classmethod
    def of_offload_schedule(cls, offload_schedule: OffloadSchedule) -> _Chosen:
        """From a schedule with transfers."""
        is_optimal = offload_schedule.makespan_ns == offload_schedule.lower_bound_ns
        outcome = str(cairn.Outcome.optimal if is_optimal else cairn.Outcome.feasible)
        return cls(
            offload_schedule.problem,
            offload_schedule.schedule,
            offload_schedule.step_ns,
            offload_schedule.lower_bound_ns,
            None,
            offload_schedule.solver,
            outcome,
            offload_schedule.transfer_plan,
        )


class Task:
    """Plans of one profile for several budgets. The solver's tables are made once for all of them."""

    def __init__(
        self,
        profile: Profile,
        scope: str,
        gradients: str,
        solver: str,
        options: Mapping[str, Any],
        to: Destination | None,
        remedy: str = FINER_BLOCKS,
    ) -> None:
        self.remedy = remedy  # what an error advises
        self.profile, self.scope, self.gradients, self.to = profile, scope, gradients, to
        self.offloading = None if to is None else Offloading(profile, scope, gradients, to, solver, options)
        needs_machine = next((info.needs_machine for info in cairn.solvers() if info.name == solver), False)
        self.solver, self.options = "auto" if needs_machine and to is not None else solver, options
        self._chains = Chains(profile, scope, gradients, self.solver, options)
        self.problem, self.chain = self._chains.problem, self._chains.chain
        self.optimizer_peak = _optimizer_peak(profile) if scope == "step" else 0

    def plans(self, wanted: Sequence[Any]) -> list[Plan | InfeasibleBudget]:
        """A plan for each budget, or the error that says why there is none."""
        rooms = [self._room(budget) for budget in wanted]
        fitting = [room for room in rooms if max(self.optimizer_peak, 1) <= room.usable_bytes]
        usable = [room.usable_bytes for room in fitting]
        answers = dict(zip(fitting, self._chains.solved(usable), strict=True))
        return [self._answer(room, answers.get(room)) for room in rooms]

    def plan(self, budget: Any) -> Plan:
        """The plan for one budget. Raises InfeasibleBudget where there is none."""
        [result] = self.plans([budget])
        try:
            if isinstance(result, InfeasibleBudget):
                raise result
            return result
        finally:
            del result  # the error's traceback refers to this frame: a reference back would be a cycle

    def _answer(self, room: _Room, answer: Answer | None) -> Plan | InfeasibleBudget:
        stays = None if answer is None else _Chosen.of(answer)
        solution, offload_schedule = None if answer is None else answer.solution, None
        if solution is not None and self.offloading is not None and solution.makespan_ns != solution.store_all_ns:
            offload_schedule = self.offloading.solve(room.usable_bytes)
        if offload_schedule is not None and (stays is None or offload_schedule.step_ns < stays.step_ns):
            stays = _Chosen.of_offload_schedule(offload_schedule)
        return self._infeasible(room) if stays is None else self._plan_of(room, stays)

    def _least_bytes(self) -> int | None:
        """The least memory that has a known schedule, without the reserve."""
        offloading = None if self.offloading is None else self.offloading.least_bytes
        return min((size for size in (self._chains.least_bytes, offloading) if size is not None), default=None)

    def _some_least(self) -> int:
        """`_least_bytes`. Raises Unsupported where no schedule is known."""
        least_bytes = self._least_bytes()
        if least_bytes is None:
            remedy = "leave solver= out" if self.solver != "auto" else "give it more time (time_limit=)"
            raise Unsupported(f"solver {self.solver!r} finds no schedule of this model at any budget; {remedy}")
        return least_bytes

    def least_budget(self) -> int | None:
        """The least budget that works, with its reserve; None if no schedule is known."""
        least_bytes = self._least_bytes()
        return None if least_bytes is None else max(least_bytes, self.optimizer_peak) + self.reserve(None)

    def even_budgets(self, count: int) -> list[int]:
        """`count` budgets at even distances, from the least that works to the one that keeps everything."""
        reserve, most = self.reserve(None), cairn.limits(self.chain, solver="store-all").store_all_bytes
        low, high = (max(known_number(size), self.optimizer_peak) + reserve for size in (self._some_least(), most))
        return [low + (high - low) * i // max(count - 1, 1) for i in range(count)]

    def _room(self, budget: Any) -> _Room:
        present = self.profile.present_bytes if self.scope == "step" else 0
        return _Room(budgets.resolve(budget, torch.device(self.profile.device), present), self.reserve(budget))

    def reserve(self, budget: Any) -> int:
        """The bytes of a budget that stay unused, because measurements are not exact."""
        if isinstance(budget, Budget) and budget.reserve is not None:
            return budgets.size_bytes(budget.reserve, "reserve") if budget.reserve != 0 else 0
        share, least = UNCERTAINTY[torch.device(self.profile.device).type]
        if self.profile.fingerprint["autocast"]:
            share += AUTOCAST_UNCERTAINTY
        everything = known_number(cairn.limits(self.chain, solver="store-all").store_all_bytes)
        activations = everything - self.problem["fixed_bytes"]
        return least + int(share * activations) + int(self.profile.excess * everything) + self.profile.miss_bytes

    def _plan_of(self, room: _Room, chosen: _Chosen) -> Plan:
        profile, scope, ops, to = self.profile, self.scope, chosen.schedule.ops, self.to
        limits = cairn.limits(self.chain, solver="store-all")
        return Plan(
            model_name=profile.model_name,
            device=profile.device,
            scope=scope,
            budget_bytes=room.total_bytes,
            reserve_bytes=room.reserve_bytes,
            gradients=self.gradients,
            accumulated_peak_bytes=self._peak(chosen, ACCUMULATED),
            created_peak_bytes=self._peak(chosen, CREATED),
            plain_peak_bytes=max(known_number(limits.store_all_bytes), self.optimizer_peak),
            least_budget_bytes=max(self._least_of(chosen), self.optimizer_peak) + room.reserve_bytes,
            optimizer_peak_bytes=self.optimizer_peak,
            step_ns=chosen.step_ns,
            plain_ns=known_number(limits.store_all_ns),
            lower_bound_ns=chosen.lower_bound_ns,
            solver=chosen.solver,
            outcome=chosen.outcome,
            problem=chosen.problem,
            schedule=chosen.recorded(room.usable_bytes),
            stages=profile.refs,
            resident=self._resident(chosen),
            held=profile.held_by_name,
            kept_because={s.name: s.keep_reason for s in profile.stages if s.kind == "block" and s.keep_reason},
            fingerprint=dict(profile.fingerprint),
            selective=_selective(profile, ops),
            tier="" if to is None else to.tier,
            host_budget_bytes=0 if to is None else to.machine.host_bytes,
            host_bytes=0 if chosen.transfer_plan is None else chosen.transfer_plan.slab_bytes,
            replacements=profile.replacements.to_json(),
            holds_output=profile.holds_output,
            restored_blocks=list(dict.fromkeys(stage.name for stage in profile.stages if stage.restores_attributes)),
            shifted_ns=list(map(shifted_ns, profile.stages)),
        )

    def _least_of(self, chosen: _Chosen) -> int:
        """The least memory that has a known schedule; that of this one, if the search for less ended before it."""
        least = chosen.least_bytes if self.offloading is None else self._least_bytes()
        if least is not None and self.offloading is None:
            return least
        peak = self._peak(chosen, self.gradients)
        return peak if least is None else min(peak, least)

    def _resident(self, chosen: _Chosen | None = None) -> dict[str, int]:
        resident = self.profile.resident_by_name(self.scope, self.gradients)
        if chosen is not None and chosen.transfer_plan is not None:
            held = sum(held_outputs(self.profile).values())
            resident.update({"outputs of blocks that are held": held} if held else {})
        return resident

    def _peak(self, chosen: _Chosen, gradients: str) -> int:
        """The peak of a schedule, where the step creates its gradients or adds to existing ones."""
        if chosen.transfer_plan is not None:
            problem = problem_of(self.profile, self.scope, gradients)
            ops = chosen.transfer_plan.ops
            beyond = excess_bytes(problem, ops, as_performed(ops, self.profile.refs))
            return max(peak_with_transfers(problem, chosen.transfer_plan)[1] + beyond, self.optimizer_peak)
        scope_and_gradients = self.scope, gradients
        assumed = assumptions_for(self.profile, scope_and_gradients, chosen.schedule.ops, chosen.assumed.counted_twice)
        chain = chain_of(self.profile.chain(*scope_and_gradients, assumed))
        replayed = cairn.simulate(chain, cairn.Schedule.from_ops(chain, chosen.schedule.ops), None)
        return max(known_number(replayed.peak_bytes), self.optimizer_peak)

    def _infeasible(self, room: _Room) -> InfeasibleBudget:
        """The error that names the least budget, what it consists of, and the operation that exceeds this budget."""
        least_bytes = self._some_least()
        if self.optimizer_peak > least_bytes:
            return self._optimizer_needs_more(room)
        profile = self.profile
        problem, ops = self._at(least_bytes)
        moment = peak_moment(problem, ops, self._resident(), profile.held_by_name)
        blocking = first_over(problem, ops, max(room.usable_bytes, 0))
        names = [str(ref) for ref in profile.refs if ref.is_block]
        parts = {part.name: part.bytes for part in grouped(moment.parts, names)}
        least = least_bytes + room.reserve_bytes
        at = moment.text
        return InfeasibleBudget.make(room.total_bytes, least, room.reserve_bytes, parts, at, blocking, self.remedy)

    def _at(self, budget: int) -> tuple[Mapping[str, Any], list[cairn.Op]]:
        """A problem and its schedule for a budget, with transfers that take no time; store-all if there is none."""
        [answer] = self._chains.solved([budget])
        if answer.solution.schedule is not None:
            return answer.problem, list(answer.solution.schedule.ops)
        offload_schedule = None if self.offloading is None else self.offloading.solve(budget)
        return self.problem, list(
            _store_all(len(self.problem["stages"])) if offload_schedule is None else offload_schedule.schedule.ops
        )

    def _optimizer_needs_more(self, room: _Room) -> InfeasibleBudget:
        profile, name = self.profile, "step of the optimizer"
        parts = {
            **profile.resident_by_name(self.scope),
            "input": profile.input_bytes,
            "held by the caller": profile.held_bytes,
            "temporaries of the optimizer": profile.optimizer_step_bytes,
        }
        least = self.optimizer_peak + room.reserve_bytes
        return InfeasibleBudget.make(room.total_bytes, least, room.reserve_bytes, parts, name, name, remedy="")


def _store_all(stages: int) -> list[cairn.Op]:
    """The schedule of plain training."""
    numbers = range(1, stages + 1)
    return [*(("forward_save", s, 0) for s in numbers), *(("backward", s) for s in reversed(numbers))]


def _selective(profile: Profile, ops: Sequence[cairn.Op]) -> dict[str, Any]:
    """For each stage under selective recomputation: its options, and the digest of the recording they belong to."""
    used = {int(op[1]) for op in ops if op[0] == "forward_save" and len(op) > 2 and op[2]}
    plans = {}
    for number in sorted(used):
        stage = profile.stages[number - 1]
        decisions = tuple(option.decisions for option in stage.options)
        options = SelectiveOptions(stage.digest, tuple(stage.asked), tuple(stage.draws), decisions)
        plans[str(number)] = {**options.to_json(), "recomputes": [option.recomputes for option in stage.options]}
    return plans


def _optimizer_peak(profile: Profile) -> int:
    """Memory during the optimizer's step: resident memory, tensors that the caller holds, and temporaries."""
    resident = profile.resident_bytes("step", ACCUMULATED) + profile.input_bytes
    return resident + profile.held_bytes + profile.optimizer_step_bytes
