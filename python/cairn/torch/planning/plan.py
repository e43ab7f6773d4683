"""`plan`: from a profile and a budget to a verified schedule; plans are data."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import cairn
import torch

from ..._budget import Budget
from ..base import budgets
from ..base.choices import ACCUMULATED, CREATED
from ..base.errors import InfeasibleBudget, PlanMismatch, Unsupported, warn
from ..base.stages import StageRef
from ..schedule.dependent_counts import AS_PLAIN, Counted
from ..schedule.executed import as_performed, excess_bytes
from ..schedule.peak_parts import Moment, first_over, grouped, peak_moment
from ..schedule.transfer_plan import Itinerary, has_transfers, peak_with_transfers
from ..selective.block_runs import Inside
from . import arguments
from .chains import Answer, Chains, counted_for
from .fingerprint import fingerprint_of
from .offload_plans import (
    Destination,
    Journey,
    Offloading,
    destination,
    held_outputs,
    performed_itinerary,
    problem_of,
)
from .step_profile import Profile, shifted_ns

PLAN_VERSION = 3

#: By how much a measured peak may pass the predicted one: share of what is not resident, and bytes on top.
UNCERTAINTY = {"cpu": (0.002, 32 * 1024), "cuda": (0.005, 2 * 1024 * 1024)}
AUTOCAST_UNCERTAINTY = 0.02  # its copies of parameters live as long as regions of the caller's code do


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule for one training step, with the problem that it solves. Sizes in bytes, times in nanoseconds.

    budget_bytes: what the step may take; reserve_bytes of it are left free for what the profile cannot know.
    gradients: "accumulated" if the steps it is made for may add to existing gradients, "created" if all create theirs.
    accumulated_peak_bytes, created_peak_bytes: predicted for either kind of step.
    least_budget_bytes: the least budget for which there is a plan, the reserve included.
    tier: the slower memory that values may travel to, empty if none may; of it, host_budget_bytes at most, and
        host_bytes by this plan.
    """

    model_name: str
    device: str
    scope: str
    budget_bytes: int
    reserve_bytes: int
    gradients: str
    accumulated_peak_bytes: int
    created_peak_bytes: int
    plain_peak_bytes: int
    least_budget_bytes: int
    optimizer_peak_bytes: int
    step_ns: int
    plain_ns: int
    lower_bound_ns: int | None
    solver: str
    outcome: str
    problem: Mapping[str, Any]
    schedule: Mapping[str, Any]
    stages: tuple[StageRef, ...]
    resident: Mapping[str, int]
    held: Mapping[str, int]
    kept_because: Mapping[str, str]
    fingerprint: Mapping[str, Any]
    inside: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tier: str = ""
    host_budget_bytes: int = 0
    host_bytes: int = 0
    outside: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what is replaced outside blocks
    holds_output: bool = True  # whether the training loop has the model's output during the backward
    brought_back: Sequence[str] = ()  # blocks of which attributes and hooks are those of their first runs again
    shifted_ns: Sequence[Sequence[int]] = ()  # by stage and option, what of a backward the problem has in the forward

    @property
    def opened(self) -> dict[int, Inside]:
        """By stage, what its options keep, where one other than keeping everything is used."""
        return {int(stage): Inside.from_json(found) for stage, found in self.inside.items()}

    @property
    def peak_bytes(self) -> int:
        """Predicted for the worst step that the plan is made for."""
        return self.created_peak_bytes if self.gradients == CREATED else self.accumulated_peak_bytes

    @property
    def ops(self) -> list[list[Any]]:
        """The schedule's operations, as in a cairn-schedule file."""
        return list(self.schedule["ops"])

    @property
    def is_plain(self) -> bool:
        """True if nothing is recomputed or travels: the step runs as it would without a plan."""
        forwards = sum(op[0].startswith("forward") for op in self.schedule["ops"])
        return bool(forwards == len(self.stages)) and not self.inside and not self.offloads

    @property
    def offloads(self) -> bool:
        """Whether anything travels to slower memory."""
        return has_transfers(self.schedule["ops"])

    @property
    def overhead(self) -> float:
        """Predicted extra time, as a share of the plain step's."""
        return self.step_ns / self.plain_ns - 1 if self.plain_ns else 0.0

    @functools.cached_property
    def verified(self) -> cairn.Verified:
        """The schedule, judged by the simulator under the budget less the reserve: what executors take."""
        problem = _chain_of(self.problem)
        schedule = cairn.Schedule.from_json(problem, json.dumps(self.schedule))
        return cairn.verify(problem, schedule, self.budget_bytes - self.reserve_bytes)

    @functools.cached_property
    def itinerary(self) -> Itinerary | None:
        """When transfers take place; None if nothing travels."""
        if not self.offloads:
            return None
        room = self.budget_bytes - self.reserve_bytes
        return performed_itinerary(self.problem, self.verified.schedule.ops, self.stages, room)

    @property
    def executed_ops(self) -> Sequence[Sequence[Any]]:
        """The schedule's operations as they are issued: prefetches before the computation that they start with."""
        return self.verified.schedule.ops if self.itinerary is None else self.itinerary.ops

    def peak_moment(self) -> Moment:
        """The moment of the predicted peak and what makes it up."""
        if self.itinerary is not None:
            at = peak_with_transfers(self.problem, self.itinerary)
            return peak_moment(self.problem, self.itinerary.ops, self.resident, self.held, at)
        return peak_moment(self.problem, self.ops, self.resident, self.held)

    @functools.cached_property
    def floor(self) -> Moment | None:
        """The moment that sets the least budget, and what makes it up.

        None where that is the optimizer's step, and for a plan with transfers, for which `peak_moment` says it.
        """
        least = self.least_budget_bytes - self.reserve_bytes
        if self.offloads or least <= self.optimizer_peak_bytes:
            return None
        chain = _chain_of(self.problem)
        solution = cairn.solve(chain, least)
        if solution.schedule is None:  # its chain supposes more of schedules than the least one's
            solution = cairn.solve(chain, _number(solution.least_bytes))
        return peak_moment(self.problem, solution.require().ops, self.resident, self.held)

    def __repr__(self) -> str:
        peak, budget = cairn.format_bytes(self.peak_bytes), cairn.format_bytes(self.budget_bytes)
        return f"<Plan for {self.model_name}: {peak} of {budget}, {100 * self.overhead:+.1f} % time, {self.hash[:15]}>"

    @property
    def hash(self) -> str:
        """SHA-256 over the plan's content: equal on every rank that runs the same plan."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["stages"] = [ref.to_json() for ref in self.stages]
        return data

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data; `problem` and `schedule` in it are files of the command line."""
        return {"format": "cairn-torch-plan", "version": PLAN_VERSION, "hash": self.hash, **self._content()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Reads what `to_json` wrote; refuses another version and changed content."""
        if not isinstance(data, Mapping):
            raise PlanMismatch(f"a plan is an object, not a {type(data).__name__}")
        if data.get("format") != "cairn-torch-plan" or data.get("version") != PLAN_VERSION:
            raise PlanMismatch(f"this is not a cairn-torch-plan of version {PLAN_VERSION}; make the plan again")
        fields = {key: value for key, value in data.items() if key not in ("format", "version", "hash")}
        try:
            fields["stages"] = tuple(StageRef.from_json(ref) for ref in fields["stages"])
            plan = cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanMismatch(f"the plan has not the fields of version {PLAN_VERSION}: {error}") from None
        if plan.hash != data.get("hash"):
            raise PlanMismatch("the plan's content does not match its hash: it was changed after it was written")
        return plan

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        target = Path(path)
        if target.is_dir():
            raise IsADirectoryError(
                f"{target} is a directory; a plan is saved to a file, such as {target / 'plan.json'}"
            )
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
        unfinished = target.with_name(target.name + ".unfinished")
        try:
            unfinished.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that `save` wrote. Raises PlanMismatch if it is another version, was changed, or is no plan."""
        try:
            return cls.from_json(json.loads(Path(path).read_bytes()))
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise PlanMismatch(f"{path} is no plan, or not a whole one: {where}: {error.msg}") from None
        except UnicodeDecodeError as error:
            raise PlanMismatch(f"{path} is no plan: byte {error.start} is not text") from None
        except PlanMismatch as error:
            raise PlanMismatch(f"{path}: {error.message}") from None

    def check_fits(self, model: torch.nn.Module, args: Any = None, kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises PlanMismatch if the plan is of another model or other input shapes; warns of other versions."""
        arguments = args if isinstance(args, (tuple, list)) else () if args is None else (args,)
        now = fingerprint_of(model, tuple(arguments), kwargs or {})
        hard = ["model", "parameters", "dtype", "training"] + (["inputs"] if arguments or kwargs else [])
        for field in hard:
            if now[field] != self.fingerprint[field]:
                raise PlanMismatch(f"{self._made_for(field, now[field])}: profile and plan again")
        for field in ("torch", "device"):
            if now[field] != self.fingerprint[field]:
                warn(
                    f"the plan was made with {field} {self.fingerprint[field]!r}, this is {now[field]!r}: "
                    "sizes and times may differ",
                )

    def change_of(self, model: torch.nn.Module) -> str:
        """How a model's parameters are others than those that the plan was made for; empty where they are not."""
        now = fingerprint_of(model, (), {})
        return next((self._made_for(f, now[f]) for f in ("dtype", "parameters") if now[f] != self.fingerprint[f]), "")

    def _made_for(self, field: str, now: Any) -> str:
        if field == "parameters":  # their hash says nothing to people
            return "the plan was made for parameters with other names, shapes, types or requires_grad"
        return f"the plan was made for {field} {self.fingerprint[field]!r}, this is {now!r}"


# -- planning ------------------------------------------------------------------------------------------------


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

    budget: bytes, "8GiB", "80%" (of the device), "auto" (what is free), or a cairn.Budget.
    scope: "step" counts all that the step has on the device; "activations" leaves out parameters, buffers, gradients
        and optimizer state.
    gradients: "accumulated" plans for steps that add to gradients that exist, which holds for every loop; "created" for
        loops in which each step creates its gradients (`zero_grad()` before every backward), which takes less.
    host_budget: slower memory that values may travel to: bytes, a size, "auto" (most of what is free), or None for no
        offloading. Then what every block saved, all of it or a part, or its output alone, may stay, be computed again
        or travel, whatever is fastest.
    tier: which slower memory: "host", or "file:PATH" (beside that path, or in that folder).
    link: how fast the way there is: measured if None; a `Link`, a cairn.Machine, or a rate such as "8GB/s".
    allow: what may be done to save memory: "recompute" runs blocks again; "inside" lets blocks keep a part of what they
        save and rebuild the rest; "offload" lets values travel, and takes a host_budget. By default all that can be.
    solver, options: as for `cairn.solve`. "auto" asks the strongest solver that can be afforded: exact in bytes unless
        a model has hundreds of blocks that are all unlike each other. One that is named, and would need more memory
        than it may use (memory_limit=), raises cairn.MemoryLimit.

    Raises InfeasibleBudget with the least budget that works and what it is made of.
    """
    host_budget = arguments.host_budget_of(budget, host_budget)
    way = {"host_budget": host_budget, "tier": tier, "link": link}
    asked = {**way, "allow": allow, "scope": scope, "gradients": gradients, "solver": solver}
    check_request(profile, {**asked, **options})
    arguments.check_budget(budget)
    profile = profile if "inside" in arguments.allowed(allow, host_budget) else profile.without_options()
    to = destination(host_budget, tier, link, torch.device(profile.device))
    return Task(profile, scope, gradients, solver, options, to).plan(budget)


def _chain_of(problem: Mapping[str, Any]) -> cairn.Chain:
    return cairn.Chain.from_json(json.dumps(problem))


def check_request(profile: Any, options: Mapping[str, Any]) -> None:
    """Raises for what is no profile, and for options that a plan does not take."""
    if not isinstance(profile, Profile):
        raise TypeError(f"a plan is made from what cairn.torch.profile returns, not from a {type(profile).__name__}")
    arguments.check_plan_options(options)


@dataclasses.dataclass(frozen=True)
class _Room:
    """A budget, and what of it stays in reserve."""

    total_bytes: int
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.reserve_bytes


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """A schedule for a budget."""

    problem: Mapping[str, Any]
    schedule: cairn.Schedule
    step_ns: int
    lower_bound_ns: int | None
    least_bytes: int | None
    solver: str
    outcome: str
    itinerary: Itinerary | None = None
    counted: Counted = AS_PLAIN  # what the problem supposes

    @classmethod
    def of(cls, answer: Answer) -> _Chosen | None:
        """A solver's answer; None if it has none."""
        solution = answer.solution
        if solution.schedule is None:
            return None
        return cls(
            answer.problem,
            solution.schedule,
            _number(solution.makespan_ns),
            solution.lower_bound_ns,
            answer.least_bytes,
            solution.solver,
            str(solution.outcome),
            counted=answer.counted,
        )

    def recorded(self, budget_bytes: int) -> dict[str, Any]:
        """The schedule as a file that says for which budget it was made, and what it takes."""
        problem, ops = _chain_of(self.problem), self.schedule.ops
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
    def of_journey(cls, journey: Journey) -> _Chosen:
        """A schedule with transfers."""
        is_optimal = journey.makespan_ns == journey.lower_bound_ns
        outcome = str(cairn.Outcome.optimal if is_optimal else cairn.Outcome.feasible)
        return cls(
            journey.problem,
            journey.schedule,
            journey.step_ns,
            journey.lower_bound_ns,
            None,
            journey.solver,
            outcome,
            journey.itinerary,
        )


class Task:
    """What plans of one profile have in common; the solver's tables are made once for all budgets."""

    def __init__(
        self,
        profile: Profile,
        scope: str,
        gradients: str,
        solver: str,
        options: Mapping[str, Any],
        to: Destination | None,
    ) -> None:
        self.profile, self.scope, self.gradients, self.to = profile, scope, gradients, to
        self.offloading = None if to is None else Offloading(profile, scope, gradients, to, solver, options)
        needs_machine = next((info.needs_machine for info in cairn.solvers() if info.name == solver), False)
        self.solver, self.options = "auto" if needs_machine and to is not None else solver, options
        self._chains = Chains(profile, scope, gradients, self.solver, options)
        self.problem, self.chain = self._chains.problem, self._chains.chain
        self.optimizer_peak = _optimizer_peak(profile) if scope == "step" else 0

    def plans(self, wanted: Sequence[Any]) -> list[Plan | InfeasibleBudget]:
        """For each budget its plan, or the error that says why there is none."""
        rooms = [self._room(budget) for budget in wanted]
        fitting = [room for room in rooms if max(self.optimizer_peak, 1) <= room.usable_bytes]
        usable = [room.usable_bytes for room in fitting]
        answers = dict(zip(fitting, self._chains.solved(usable), strict=True))
        return [self._answer(room, answers.get(room)) for room in rooms]

    def plan(self, budget: Any) -> Plan:
        """The plan for one budget. Raises InfeasibleBudget where there is none."""
        [made] = self.plans([budget])
        try:
            if isinstance(made, InfeasibleBudget):
                raise made
            return made
        finally:
            del made  # an error holds the frames that it came through, so these must not hold it

    def _answer(self, room: _Room, answer: Answer | None) -> Plan | InfeasibleBudget:
        stays = None if answer is None else _Chosen.of(answer)
        solution, journey = None if answer is None else answer.solution, None
        if solution is not None and self.offloading is not None and solution.makespan_ns != solution.store_all_ns:
            journey = self.offloading.solve(room.usable_bytes)
        if journey is not None and (stays is None or journey.step_ns < stays.step_ns):
            stays = _Chosen.of_journey(journey)
        return self._infeasible(room) if stays is None else self._plan_of(room, stays)

    def _least_bytes(self) -> int | None:
        """The least that works, without a reserve."""
        travelling = None if self.offloading is None else self.offloading.least_bytes
        return min((size for size in (self._chains.least_bytes, travelling) if size is not None), default=None)

    def even_budgets(self, count: int) -> list[int]:
        """So many from the least to storing everything."""
        reserve, most = self.reserve(None), cairn.limits(self.chain, solver="store-all").store_all_bytes
        low, high = (max(_number(size), self.optimizer_peak) + reserve for size in (self._least_bytes(), most))
        return [low + (high - low) * i // max(count - 1, 1) for i in range(count)]

    def _room(self, budget: Any) -> _Room:
        present = self.profile.present_bytes if self.scope == "step" else 0
        return _Room(budgets.resolve(budget, torch.device(self.profile.device), present), self.reserve(budget))

    def reserve(self, budget: Any) -> int:
        """What of a budget stays free for what the profile cannot know."""
        if isinstance(budget, Budget) and budget.reserve is not None:
            return budgets.size_bytes(budget.reserve, "reserve") if budget.reserve != 0 else 0
        share, least = UNCERTAINTY[torch.device(self.profile.device).type]
        if self.profile.fingerprint["autocast"]:
            share += AUTOCAST_UNCERTAINTY
        everything = _number(cairn.limits(self.chain, solver="store-all").store_all_bytes)
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
            plain_peak_bytes=max(_number(limits.store_all_bytes), self.optimizer_peak),
            least_budget_bytes=max(self._least_of(chosen), self.optimizer_peak) + room.reserve_bytes,
            optimizer_peak_bytes=self.optimizer_peak,
            step_ns=chosen.step_ns,
            plain_ns=_number(limits.store_all_ns),
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
            inside=_inside(profile, ops),
            tier="" if to is None else to.tier,
            host_budget_bytes=0 if to is None else to.machine.host_bytes,
            host_bytes=0 if chosen.itinerary is None else chosen.itinerary.slab_bytes,
            outside=profile.outside.to_json(),
            holds_output=profile.holds_output,
            brought_back=list(dict.fromkeys(stage.name for stage in profile.stages if stage.brings_back)),
            shifted_ns=list(map(shifted_ns, profile.stages)),
        )

    def _least_of(self, chosen: _Chosen) -> int:
        if self.offloading is None:
            return _number(chosen.least_bytes)
        return min(_number(self._least_bytes()), self._peak(chosen, self.gradients))

    def _resident(self, chosen: _Chosen | None = None) -> dict[str, int]:
        resident = self.profile.resident_by_name(self.scope, self.gradients)
        if chosen is not None and chosen.itinerary is not None:
            held = sum(held_outputs(self.profile).values())
            resident.update({"outputs of blocks that are held": held} if held else {})
        return resident

    def _peak(self, chosen: _Chosen, gradients: str) -> int:
        """Of a schedule in either kind of step."""
        if chosen.itinerary is not None:
            problem = problem_of(self.profile, self.scope, gradients)
            ops = chosen.itinerary.ops
            beyond = excess_bytes(problem, ops, as_performed(ops, self.profile.refs))
            return max(peak_with_transfers(problem, chosen.itinerary)[1] + beyond, self.optimizer_peak)
        asked = self.scope, gradients
        counted = counted_for(self.profile, asked, chosen.schedule.ops, chosen.counted.apart)
        chain = _chain_of(self.profile.chain(*asked, counted))
        replayed = cairn.simulate(chain, cairn.Schedule.from_ops(chain, chosen.schedule.ops), None)
        return max(_number(replayed.peak_bytes), self.optimizer_peak)

    def _infeasible(self, room: _Room) -> InfeasibleBudget:
        """Says what the least budget is, what it consists of, and what stands in the way."""
        least_bytes = self._least_bytes()
        if least_bytes is None:
            remedy = "leave solver= out" if self.solver != "auto" else "give it more time (time_limit=)"
            raise Unsupported(f"solver {self.solver!r} finds no schedule of this model at any budget; {remedy}")
        if self.optimizer_peak > least_bytes:
            return self._optimizer_needs_more(room)
        profile = self.profile
        problem, ops = self._at(least_bytes)
        moment = peak_moment(problem, ops, self._resident(), profile.held_by_name)
        blocking = first_over(problem, ops, max(room.usable_bytes, 0))
        names = [str(ref) for ref in profile.refs if ref.is_block]
        parts = {part.name: part.bytes for part in grouped(moment.parts, names)}
        least = least_bytes + room.reserve_bytes
        return InfeasibleBudget.make(room.total_bytes, least, room.reserve_bytes, parts, moment.text, blocking)

    def _at(self, budget: int) -> tuple[Mapping[str, Any], list[cairn.Op]]:
        """A budget's schedule, copies done at once, and its problem; plain training's where there is none."""
        [answer] = self._chains.solved([budget])
        if answer.solution.schedule is not None:
            return answer.problem, list(answer.solution.schedule.ops)
        journey = None if self.offloading is None else self.offloading.solve(budget)
        return self.problem, list(_store_all(len(self.problem["stages"])) if journey is None else journey.schedule.ops)

    def _optimizer_needs_more(self, room: _Room) -> InfeasibleBudget:
        profile, name = self.profile, "step of the optimizer"
        parts = {
            **profile.resident_by_name(self.scope),
            "input": profile.input_bytes,
            "held by the caller": profile.held_bytes,
            "temporaries of the optimizer": profile.optimizer_step_bytes,
        }
        least = self.optimizer_peak + room.reserve_bytes
        return InfeasibleBudget.make(room.total_bytes, least, room.reserve_bytes, parts, name, name)


def _store_all(stages: int) -> list[cairn.Op]:
    """The plain step."""
    numbers = range(1, stages + 1)
    return [*(("forward_save", s, 0) for s in numbers), *(("backward", s) for s in reversed(numbers))]


def _inside(profile: Profile, ops: Sequence[cairn.Op]) -> dict[str, Any]:
    """What executors must know about the stages of which a part is kept."""
    used = {int(op[1]) for op in ops if op[0] == "forward_save" and len(op) > 2 and op[2]}
    found = {}
    for number in sorted(used):
        stage = profile.stages[number - 1]
        decisions = tuple(option.decisions for option in stage.options)
        inside = Inside(stage.digest, tuple(stage.asked), tuple(stage.draws), decisions)
        found[str(number)] = {**inside.to_json(), "rebuilds": [option.rebuilds for option in stage.options]}
    return found


def _number(value: int | None) -> int:
    """A number that every answer with a schedule has."""
    assert value is not None
    return value


def _optimizer_peak(profile: Profile) -> int:
    """Memory while the optimizer steps: everything resident, what the caller holds, and its temporaries."""
    resident = profile.resident_bytes("step", ACCUMULATED) + profile.input_bytes
    return resident + profile.held_bytes + profile.optimizer_step_bytes
