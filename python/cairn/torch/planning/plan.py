"""`Plan`: a schedule for one training step, with the problem that it solves. It is data: it saves, loads and prints."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cairn
import torch

from ..base.choices import CREATED
from ..base.errors import PlanMismatch, warn
from ..base.plan_files import read_json, write_json
from ..base.stages import StageRef
from ..schedule.peak_parts import PeakMoment, peak_moment
from ..schedule.transfer_plan import TransferPlan, has_transfers, peak_with_transfers
from ..selective.block_runs import SelectiveOptions
from .fingerprint import fingerprint_of
from .offload_plans import (
    performed_transfer_plan,
)

PLAN_VERSION = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule for one training step, with the problem that it solves. Sizes in bytes, times in nanoseconds.

    Attributes
    ----------
    budget_bytes, reserve_bytes : int
        The budget, and the part of it that the plan leaves free for memory that the profile cannot know.
    gradients : {"accumulated", "created"}
        "accumulated" if the steps it is made for may add to existing gradients, "created" if all create theirs.
    accumulated_peak_bytes, created_peak_bytes : int
        Predicted for either kind of step.
    plain_peak_bytes, plain_ns : int
        Predicted for the step with nothing recomputed.
    least_budget_bytes : int
        The least budget for which there is a plan, the reserve included.
    step_ns : int
        Predicted time of the step.
    lower_bound_ns : int or None
        No schedule of the same blocks is faster.
    solver, outcome : str
        The solver, and its outcome: "optimal" or "feasible".
    problem, schedule : dict
        A cairn-chain and its cairn-schedule, as the command line reads them.
    kept_because : dict
        Why blocks are always kept, by their names.
    tier : str
        The offload tier; empty without offloading.
    host_budget_bytes, host_bytes : int
        The most that may be offloaded at a time, and the part of it that this plan uses.
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
    selective: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tier: str = ""
    host_budget_bytes: int = 0
    host_bytes: int = 0
    replacements: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what is replaced outside blocks
    holds_output: bool = True  # whether the training loop has the model's output during the backward
    restored_blocks: Sequence[str] = ()  # blocks whose attributes and hooks a recomputation restores
    shifted_ns: Sequence[Sequence[int]] = ()  # by stage and option, what of a backward the problem has in the forward

    @property
    def selective_options(self) -> dict[int, SelectiveOptions]:
        """By stage, what its options keep, where one other than keeping everything is used."""
        return {int(stage): SelectiveOptions.from_json(data) for stage, data in self.selective.items()}

    @property
    def peak_bytes(self) -> int:
        """Predicted for the worst step that the plan is made for."""
        return self.created_peak_bytes if self.gradients == CREATED else self.accumulated_peak_bytes

    @property
    def ops(self) -> list[list[Any]]:
        """The schedule's operations, as in a cairn-schedule file."""
        return list(self.schedule["ops"])

    @property
    def chosen_options(self) -> list[int]:
        """The option of each stage in its last saving forward; 0 keeps everything."""
        saved_by = {op[1]: op[2] if len(op) > 2 else 0 for op in self.ops if op[0] == "forward_save"}
        return [saved_by.get(number, 0) for number in range(1, len(self.stages) + 1)]

    @property
    def is_plain(self) -> bool:
        """True if nothing is recomputed or offloaded: the step runs as it would without a plan."""
        forwards = sum(op[0].startswith("forward") for op in self.schedule["ops"])
        return bool(forwards == len(self.stages)) and not self.selective and not self.offloads

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return has_transfers(self.schedule["ops"])

    @property
    def overhead(self) -> float:
        """Predicted extra time, as a share of the plain step's."""
        return self.step_ns / self.plain_ns - 1 if self.plain_ns else 0.0

    @functools.cached_property
    def verified(self) -> cairn.Verified:
        """The schedule, judged by the simulator under the budget less the reserve: what executors take."""
        problem = chain_of(self.problem)
        schedule = cairn.Schedule.from_json(problem, json.dumps(self.schedule))
        return cairn.verify(problem, schedule, self.budget_bytes - self.reserve_bytes)

    @functools.cached_property
    def transfer_plan(self) -> TransferPlan | None:
        """When transfers start, and where host copies lie; None if nothing is offloaded."""
        if not self.offloads:
            return None
        room = self.budget_bytes - self.reserve_bytes
        return performed_transfer_plan(self.problem, self.verified.schedule.ops, self.stages, room)

    @property
    def executed_ops(self) -> Sequence[Sequence[Any]]:
        """The schedule's operations as they are issued: prefetches before the computation that they start with."""
        return self.verified.schedule.ops if self.transfer_plan is None else self.transfer_plan.ops

    def peak_moment(self) -> PeakMoment:
        """The moment of the predicted peak and what makes it up."""
        if self.transfer_plan is not None:
            at = peak_with_transfers(self.problem, self.transfer_plan)
            return peak_moment(self.problem, self.transfer_plan.ops, self.resident, self.held, at)
        return peak_moment(self.problem, self.ops, self.resident, self.held)

    @functools.cached_property
    def floor(self) -> PeakMoment | None:
        """The moment that sets the least budget, and what makes it up.

        None where that is the optimizer's step, and for a plan with transfers, for which `peak_moment` says it.
        """
        least = self.least_budget_bytes - self.reserve_bytes
        if self.offloads or least <= self.optimizer_peak_bytes:
            return None
        chain = chain_of(self.problem)
        solution = cairn.solve(chain, least)
        if solution.schedule is None:  # its chain supposes more of schedules than the least one's
            solution = cairn.solve(chain, known_number(solution.least_bytes))
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
        """Read what `to_json` wrote.

        Raises
        ------
        PlanMismatch
            It is of another version, or its content was changed.
        """
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
        """Write the plan as JSON.

        Parameters
        ----------
        path : str or Path
            A file in a folder that exists.
        """
        write_json(path, self.to_json(), indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises
        ------
        PlanMismatch
            It is of another version, was changed, or is no plan.
        """
        try:
            return cls.from_json(read_json(path))
        except PlanMismatch as error:
            raise PlanMismatch(f"{path}: {error.message}") from None

    def check_fits(self, model: torch.nn.Module, args: Any = None, kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises PlanMismatch if the plan is of another model or other input shapes; warns of other versions."""
        arguments = args if isinstance(args, (tuple, list)) else () if args is None else (args,)
        now = fingerprint_of(model, tuple(arguments), kwargs or {})
        hard = ["model", "parameters", "dtype", "training"] + (["inputs"] if arguments or kwargs else [])
        for field in hard:
            if now[field] != self.fingerprint[field]:
                raise PlanMismatch(f"{self.made_for(field, now[field])}: profile and plan again")
        for field in ("torch", "device"):
            if now[field] != self.fingerprint[field]:
                warn(
                    f"the plan was made with {field} {self.fingerprint[field]!r}, this is {now[field]!r}: "
                    "sizes and times may differ",
                )

    def change_of(self, model: torch.nn.Module) -> str:
        """The differences of a model's parameters from those of the plan, in words; empty if there are none."""
        now = fingerprint_of(model, (), {})
        return next((self.made_for(f, now[f]) for f in ("dtype", "parameters") if now[f] != self.fingerprint[f]), "")

    def made_for(self, field: str, now: Any) -> str:
        """Words for a field of the fingerprint that is another one now."""
        if field == "parameters":  # their hash says nothing to people
            return "the plan was made for parameters with other names, shapes, types or requires_grad"
        return f"the plan was made for {field} {self.fingerprint[field]!r}, this is {now!r}"


# -- planning ------------------------------------------------------------------------------------------------


def chain_of(problem: Mapping[str, Any]) -> cairn.Chain:
    """A problem as the library has it."""
    return cairn.Chain.from_json(json.dumps(problem))


def known_number(value: int | None) -> int:
    """A number that every answer with a schedule has."""
    assert value is not None
    return value
