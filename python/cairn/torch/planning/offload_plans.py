"""Plans with offloading: asks the solver `joint-chain` for a schedule, and makes one that the executor can run.

The problem is the step's chain, with all options of its stages, and a machine: the host budget and the speed of the
link. A block may be kept as a whole or in part, or be recomputed; its saved tensors or its output may be offloaded.
Three kinds of values cannot be offloaded:

* Values outside blocks belong to autograd alone. They are resident from their forward to their backward; before the
  first block that is nearly the whole step. For the solver they are fixed bytes.
* The output of a block may be held by the code behind it, outside blocks. It is fixed as well. The other saved tensors
  of the block may be offloaded.
* A block may save something other than plain bytes of its own: sparse tensors, views of a larger tensor, outputs that
  others read. Such values cannot be fixed, because the block may be recomputed. If the schedule offloads them, they
  stay on the device instead, and the solver is asked again with a budget that is smaller by the missing bytes.

Stages outside blocks run by themselves, in the model's own code. So a recomputation that the list has before such a
stage waits until the stage has run. The list is put into that order first (`executed.py`), if the simulator accepts it.
Otherwise the memory that waiting takes is left free.

The simulator judges the result on the unchanged problem. Host copies must lie in one slab of at most the host budget.
If gaps between lifetimes make the slab larger, the solver is asked again with less host memory.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cairn
import torch

from ..base import budgets
from ..base.stages import StageRef
from ..offloading.link import Link, measure_link
from ..schedule.dependent_counts import safe_assumptions
from ..schedule.executed import as_performed, excess_bytes, in_order_of_process
from ..schedule.peak_parts import peak_of
from ..schedule.program import ON_VALUES, OUTPUT, SAVED, Value
from ..schedule.transfer_plan import TransferPlan, has_transfers, traffic_of, transfer_plan_of
from .step_profile import Profile

Op = Sequence[Any]
SavedValue = tuple[str, int, int]  # a value, and the option of its stage's run (0 for an output)

TRIES = 6  # how often the solver is asked
CACHED_DIVISOR = 8  # a file of at most 1/8 of the free memory stays in the kernel's cache


# -- where to ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Destination:
    """A tier to which values may be offloaded, its size and its link; `slowdown` is that of a `Link`."""

    tier: str
    machine: cairn.Machine
    slowdown: float = 0.0

    def slowdown_ns(self, busy_ns: int, stall_ns: int) -> int:
        """The time by which copies slow down the computations that run at the same time.

        busy_ns: how long the link is busy. stall_ns: how long computations wait for it.
        """
        return int(max(0, busy_ns - stall_ns) * self.slowdown / (1 + self.slowdown))


def destination(host_budget: Any, tier: str, link: Any, device: torch.device) -> Destination | None:
    """The destination that the user's arguments describe; None if nothing may be offloaded.

    host_budget: bytes or a size, "auto" for most of what is free, None for no offloading. link: None to measure it, a
    `Link`, a cairn.Machine, or one rate for both directions such as "8GB/s".
    """
    if host_budget is None:
        return None
    if host_budget == "auto":
        size = _free_bytes(tier)
    else:
        size = 0 if host_budget == 0 else budgets.size_bytes(host_budget, "host_budget")
    if link is None:
        is_cached = tier == "host" or size <= budgets.free_bytes(torch.device("cpu")) // CACHED_DIVISOR
        link = _measured_link(device, tier, is_cached)
    elif isinstance(link, str):
        link = cairn.Machine(size, link, link, shared_link=device.type == "cpu")  # type: ignore[arg-type]
    machine = link.machine(size) if isinstance(link, Link) else dataclasses.replace(link, host_bytes=size)
    return Destination(tier, machine, link.slowdown if isinstance(link, Link) else 0.0)


def _free_bytes(tier: str) -> int:
    if tier == "host":
        free = budgets.free_bytes(torch.device("cpu"))
    else:
        path = Path(tier.removeprefix("file:")).expanduser()
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    return int(free * (1 - budgets.AUTO_RESERVE))


@functools.lru_cache(maxsize=8)
def _measured_link(device: torch.device, tier: str, is_cached: bool) -> Link:
    return measure_link(device, tier, cached=is_cached)


# -- planning ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OffloadSchedule:
    """A schedule with transfers that the simulator has accepted."""

    problem: Mapping[str, Any]
    schedule: cairn.Schedule
    transfer_plan: TransferPlan
    makespan_ns: int
    step_ns: int  # the makespan, and the time by which copies slow computations down
    lower_bound_ns: int | None
    solver: str


class Offloading:
    """Finds schedules with transfers for one profile; see the top of this file."""

    def __init__(
        self, profile: Profile, scope: str, gradients: str, to: Destination, solver: str, options: Mapping[str, Any]
    ) -> None:
        self._to, self._machine = to, to.machine
        self._options = {"solver": solver, **options}
        self.problem = {**problem_of(profile, scope, gradients), "machine": dataclasses.asdict(to.machine)}
        self._chain = cairn.Chain.from_json(json.dumps(self.problem))
        always = [number for number, ref in enumerate(profile.refs[:-1], 1) if not ref.is_block]
        self._solver_chain = cairn.Chain.from_json(json.dumps(_as_fixed(self.problem, always)))
        self._not_offloadable, self._refs = _not_offloadable(profile), profile.refs

    @functools.cached_property
    def _smallest(self) -> tuple[int, list[Op]] | None:
        """The least budget that has a known schedule, and that schedule."""
        least = cairn.limits(self._solver_chain, **self._options).least_bytes
        solution = None if least is None else cairn.solve(self._solver_chain, least, **self._options)
        if solution is None or solution.schedule is None:
            return None
        ops = self._executable(solution.schedule)
        if ops is None:
            return None
        size = peak_of(self.problem, ops)[1]
        fits = transfer_plan_of(self.problem, ops, size).slab_bytes <= self._machine.host_bytes
        return (size + self._excess(ops), ops) if fits else None

    @property
    def least_bytes(self) -> int | None:
        """The least budget that has a known schedule with transfers."""
        return None if self._smallest is None else self._smallest[0]

    def solve(self, budget: int) -> OffloadSchedule | None:
        """The best known schedule with transfers; None if there is none, or the best has no transfers."""
        schedule = self._search(budget)
        if schedule is None and self._smallest is not None and self._smallest[0] <= budget:
            ops = self._smallest[1]
            return self._timed(budget, ops, "joint-chain")
        return schedule

    def _search(self, budget: int) -> OffloadSchedule | None:
        solver_budget, host = budget, self._machine.host_bytes
        for _ in range(TRIES):
            if solver_budget <= 0 or host <= 0:
                return None
            machine = dataclasses.replace(self._machine, host_bytes=host)
            solution = cairn.solve(self._solver_chain, solver_budget, machine=machine, **self._options)
            if solution.schedule is None:
                return None
            ops = self._executable(solution.schedule)
            if ops is None:
                return None
            room = budget - self._excess(ops)
            missing = peak_of(self.problem, ops)[1] - room
            excess = transfer_plan_of(self.problem, ops, room).slab_bytes - self._machine.host_bytes
            if missing <= 0 and excess <= 0:
                return self._timed(budget, ops, solution.solver)
            solver_budget, host = solver_budget - max(0, missing), host - max(0, excess)
        return None

    def _executable(self, schedule: cairn.Schedule) -> list[Op] | None:
        """The list without transfers of values that cannot be offloaded, in the order in which a process runs it.

        None if no transfers are left, or if the simulator refuses the list without them.
        """
        listed = without_transfers_of(self._not_offloadable, schedule.ops)
        ways = (in_order_of_process(listed, self._refs), listed) if has_transfers(listed) else ()
        return next((ops for ops in ways if self._makespan(None, ops) is not None), None)

    def _excess(self, ops: Sequence[Op]) -> int:
        return excess_bytes(self.problem, ops, as_performed(ops, self._refs))

    def _timed(self, budget: int, ops: Sequence[Op], solver: str) -> OffloadSchedule | None:
        room = budget - self._excess(ops)
        makespan = self._makespan(room, ops)
        if makespan is None:
            return None
        ops = self._without_useless_transfers(room, ops, makespan)
        schedule = cairn.Schedule.from_ops(self._chain, ops)
        transfer_plan = performed_transfer_plan(self.problem, ops, self._refs, budget)
        replay = cairn.simulate(self._chain, schedule, room)
        makespan = replay.makespan_ns or makespan
        busy_ns = traffic_of(self.problem, transfer_plan.ops).busy_ns
        step = makespan + self._to.slowdown_ns(busy_ns, replay.stall_ns or 0)
        bound = cairn.bound(self._chain, budget).lower_bound_ns
        return OffloadSchedule(self.problem, schedule, transfer_plan, makespan, step, bound, solver)

    def _makespan(self, budget: int | None, ops: Sequence[Op]) -> int | None:
        """The simulated time; None if the simulator refuses the list."""
        return cairn.simulate(self._chain, cairn.Schedule.from_ops(self._chain, ops), budget).makespan_ns

    def _without_useless_transfers(self, budget: int, ops: Sequence[Op], makespan: int) -> list[Op]:
        """The list without transfers that do not make it faster; searches leave some behind."""
        kept = list(ops)
        for position in reversed(range(len(kept))):
            without = _without_transfer(kept, position)
            if without is None:
                continue
            without_ns = self._makespan(budget, without)
            if without_ns is not None and without_ns <= makespan:
                kept = without
        return kept


def performed_transfer_plan(
    problem: Mapping[str, Any], ops: Sequence[Op], stages: Sequence[StageRef], budget: int
) -> TransferPlan:
    """The transfer plan of an accepted list, within the budget less what running it takes beyond the simulation."""
    return transfer_plan_of(problem, ops, budget - excess_bytes(problem, ops, as_performed(ops, stages)))


def held_outputs(profile: Profile) -> dict[int, int]:
    """Bytes of the outputs that are held outside blocks, by stage."""
    return {n: stage.output_bytes for n, stage in enumerate(profile.stages, 1) if stage.output_is_held}


def problem_of(profile: Profile, scope: str, gradients: str) -> dict[str, Any]:
    """The step as a cairn-chain, in which held outputs are fixed bytes."""
    problem = profile.chain(scope, gradients, safe_assumptions(profile.stages), offloads=True)
    for number, size in held_outputs(profile).items():
        stage = problem["stages"][number - 1]
        problem["fixed_bytes"] += size
        stage["output_bytes"] = 0
        stage["forward_only_workspace_bytes"] += size  # a recomputation allocates another one
        for option in stage["options"]:
            option["saved_bytes"] -= size
            option["forward_workspace_bytes"] += size
    return problem


def _as_fixed(problem: Mapping[str, Any], stages: Sequence[int]) -> dict[str, Any]:
    """The problem in which the saved bytes of these stages are fixed."""
    changed = copy.deepcopy(dict(problem))
    for number in stages:
        stage = changed["stages"][number - 1]
        [option] = stage["options"]
        changed["fixed_bytes"] += option["saved_bytes"]
        option["saved_bytes"] = stage["output_bytes"] = 0
    return changed


def _without_transfer(ops: Sequence[Op], position: int) -> list[Op] | None:
    """The list without the prefetch at this position, or without the offload if nothing prefetches it; else None."""
    if position >= len(ops) or ops[position][0] not in ("offload", "prefetch"):
        return None
    name, *value = ops[position]
    end = next((i for i in range(position + 1, len(ops)) if list(ops[i]) == ["discard", *value]), len(ops))
    if name == "offload":
        if any(list(op) == ["prefetch", *value] for op in ops[position:end]):
            return None
        return [op for i, op in enumerate(ops) if i not in (position, end)]
    dropped = next((i for i in range(position + 1, end) if list(ops[i]) == ["drop", *value]), -1)
    return [op for i, op in enumerate(ops) if i not in (position, dropped)]


def _not_offloadable(profile: Profile) -> frozenset[SavedValue]:
    """The values that the executor cannot offload."""
    values: set[SavedValue] = set()
    for number, stage in enumerate(profile.stages, 1):
        is_block = stage.kind == "block"
        saving = [0, *(option for option, _ in stage.selective_options())]
        values.update(
            (SAVED, number, option) for option in saving if not (is_block and stage.saved_is_offloadable(option))
        )
        if not (is_block and stage.output_is_offloadable):
            values.add((OUTPUT, number, 0))
    return frozenset(values)


def without_transfers_of(staying: frozenset[SavedValue], ops: Sequence[Op]) -> list[Op]:
    """The list in which these values stay on the device instead of being offloaded."""
    kept: list[Op] = []
    options: dict[int, int] = {}  # by stage: the option of its latest run
    on_host: dict[Value, bool] = {}  # by offloaded value: whether it stays on the device instead
    for position, op in enumerate(ops):
        if op[0] not in ON_VALUES:
            if op[0] == "forward_save":
                options[op[1]] = op[2] if len(op) > 2 else 0
            kept.append(op)
            continue
        value = (op[1], op[2])
        if op[0] == "offload":
            on_host[value] = (*value, options.get(op[2], 0) if op[1] == SAVED else 0) in staying
        stays = on_host.get(value, False)
        if op[0] == "discard":
            del on_host[value]
        if not stays or (op[0] == "drop" and not _is_prefetched_next(ops[position + 1 :], value)):
            kept.append(op)
    return kept


def _is_prefetched_next(ops: Sequence[Op], value: Value) -> bool:
    """Whether the next device copy of the value comes from a prefetch, not from a recomputation."""
    forwards = ("forward_save",) if value[0] == SAVED else ("forward_keep", "forward_drop")
    for op in ops:
        if op[0] in forwards and op[1] == value[1]:
            return False
        if op[0] == "prefetch" and (op[1], op[2]) == value:
            return True
    return False
