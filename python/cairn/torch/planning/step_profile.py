"""A training step as data, and the chain problem that it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cairn import format_bytes, format_ns

from ..base.choices import ACCUMULATED, CREATED
from ..base.stage_measure import OPTIMIZER_STATE, REPLAYED, RUNS_ONCE, STATE, OptionMeasure, StageMeasure
from ..base.stages import BLOCK, StageRef, shown
from ..head.replacements import Replacements
from ..schedule.dependent_counts import NO_ASSUMPTIONS, Assumptions, HeldInForward, passing

PROFILE_VERSION = 5


@dataclasses.dataclass(frozen=True)
class Profile:
    """One training step, measured; made by `cairn.torch.profile`. Sizes in bytes, times in nanoseconds.

    Attributes
    ----------
    stages : tuple
        The measurement of each stage, in the order of the forward.
    resident : dict
        Memory that is held during the whole step, bytes by name: parameters, buffers, optimizer state and so on.
    gradient_bytes : int
        Gradients of all parameters; a step either creates them or adds to ones that exist.
    optimizer_step_bytes : int
        Memory that the optimizer's step allocates, its state not counted.
    notes : tuple of str
        Reasons why blocks are always kept, or recomputed only as a whole.
    holds_output : bool
        Whether the training loop has the model's output during the backward.
    """

    model_name: str
    device: str
    stages: tuple[StageMeasure, ...]
    resident: Mapping[str, int]
    input_bytes: int
    input_grad_bytes: int
    gradient_bytes: int
    optimizer_step_bytes: int
    fingerprint: Mapping[str, Any]
    present_bytes: int = 0  # what of all this was on the device when it was profiled
    miss_bytes: int = 0  # by how much a measured step passed its predicted peak
    excess: float = 0.0  # share by which the device's allocator took more than tensors asked it for
    notes: tuple[str, ...] = ()
    replacements: Replacements = Replacements()  # what is replaced outside blocks
    holds_output: bool = True  # whether the training loop has the model's output during the backward

    def __repr__(self) -> str:
        blocks = [stage for stage in self.stages if stage.kind == BLOCK]
        saved, resident = sum(stage.saved_bytes for stage in blocks), self.resident_bytes()
        step_ns = sum(stage.forward_ns + stage.backward_ns for stage in self.stages)
        return (
            f"<Profile of {self.model_name} on {self.device}: {len(blocks)} block{'s' * (len(blocks) != 1)}, "
            f"{format_bytes(saved)} saved, {format_bytes(resident)} resident, {format_ns(step_ns)} a step>"
        )

    @property
    def refs(self) -> tuple[StageRef, ...]:
        """The part of the model that each stage is."""
        return tuple(StageRef(stage.kind, stage.name, stage.call) for stage in self.stages)

    @property
    def held_bytes(self) -> int:
        """Bytes that the caller holds until the step ends: the model's output, the loss."""
        return sum(stage.held_bytes for stage in self.stages)

    @property
    def held_by_name(self) -> dict[str, int]:
        """`held_bytes` by the name of the stage."""
        return {shown(stage.name, stage.call): stage.held_bytes for stage in self.stages if stage.held_bytes}

    def resident_by_name(self, scope: str = "step", gradients: str = ACCUMULATED) -> dict[str, int]:
        """Memory that is resident from the step's beginning to its end, without the input."""
        if scope == "activations":
            return {name: size for name, size in self.resident.items() if name not in STATE}
        if gradients == CREATED:
            return dict(self.resident)
        return {**self.resident, "gradients of parameters": self.gradient_bytes}

    def resident_bytes(self, scope: str = "step", gradients: str = ACCUMULATED) -> int:
        """The total of `resident_by_name`."""
        return sum(self.resident_by_name(scope, gradients).values())

    def chain(
        self,
        scope: str = "step",
        gradients: str = ACCUMULATED,
        counted: Assumptions = NO_ASSUMPTIONS,
        *,
        offloads: bool = False,
    ) -> dict[str, Any]:
        """The step as a cairn-chain, which the command line reads.

        Parameters
        ----------
        scope : {"step", "activations"}
            "step" counts everything on the device; "activations" leaves out parameters, buffers, gradients and
            optimizer state.
        gradients : {"accumulated", "created"}
            Whether the step adds to existing gradients or creates them.
        counted
            The assumptions about the schedule under which sizes are counted.
        offloads : bool
            Whether anything is offloaded. Then copies may be under way while the last stage's forward runs, so that
            forward is counted exactly.

        Returns
        -------
        dict
            The chain as plain data, for `json.dump`.
        """
        created = gradients == CREATED and scope == "step"
        stages = []
        held = HeldInForward(self.stages, counted)
        before = self.input_grad_bytes  # the gradient that the stage's backward returns
        for number, stage in enumerate(_stages_under(self.stages, counted), 1):
            stages.append(_chain_stage(stage, before, created))
            held.count(number, stage, stages[-1], counted)
            before = stage.arriving_bytes(created)
        if len(self.stages) > 1:
            _join_loss(stages[-1], stages[-2]["grad_bytes"], offloads)
        return {
            "format": "cairn-chain",
            "version": 1,
            "name": self.model_name,
            "provenance": dict(self.fingerprint),
            "fixed_bytes": self.resident_bytes(scope, gradients),
            "input_bytes": self.input_bytes,
            "input_grad_bytes": self.input_grad_bytes,
            "stages": stages,
        }

    def corrected(self, miss_bytes: int) -> Profile:
        """The profile after a step took `miss_bytes` more than predicted. Its plans leave as much more free."""
        return dataclasses.replace(self, miss_bytes=max(self.miss_bytes, miss_bytes))

    def with_optimizer_of(self, other: Profile) -> Profile:
        """The profile as if it had been made with the optimizer of another one of the same model."""
        state = {name: size for name, size in other.resident.items() if name == OPTIMIZER_STATE}
        resident = {**self.resident, **state}
        return dataclasses.replace(self, resident=resident, optimizer_step_bytes=other.optimizer_step_bytes)

    def without_options(self) -> Profile:
        """The profile of blocks that are kept or recomputed as wholes."""
        stages = tuple(dataclasses.replace(stage, options=[], digest="") for stage in self.stages)
        return dataclasses.replace(self, stages=stages)

    def run_once(self) -> Profile:
        """The profile of a step in which no block is recomputed as a whole, and nothing has to be replayed for it."""
        stages = tuple(dataclasses.replace(stage, keep_reason=stage.keep_reason or RUNS_ONCE) for stage in self.stages)
        resident = {name: size for name, size in self.resident.items() if name != REPLAYED}
        return dataclasses.replace(self, stages=stages, resident=resident)

    def with_options(self, chosen: Sequence[int]) -> Profile:
        """The profile of a step whose stages always run by these options, and have no others."""
        stages = tuple(stage.by_option(number) for stage, number in zip(self.stages, chosen, strict=True))
        return dataclasses.replace(self, stages=stages)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data; `from_json` reads it back."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["stages"] = [dataclasses.asdict(stage) for stage in self.stages]
        data["replacements"] = self.replacements.to_json()
        data["resident"], data["fingerprint"] = dict(self.resident), dict(self.fingerprint)
        return {"format": "cairn-torch-profile", "version": PROFILE_VERSION, **data, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """Reads what `to_json` wrote."""
        if data.get("format") != "cairn-torch-profile" or data.get("version") != PROFILE_VERSION:
            raise ValueError(f"this is not a cairn-torch-profile of version {PROFILE_VERSION}")
        fields = {key: value for key, value in data.items() if key not in ("format", "version")}
        fields["stages"] = tuple(StageMeasure.from_json(stage) for stage in fields["stages"])
        replacements = Replacements.from_json(fields.get("replacements", {}))
        return cls(**{**fields, "notes": tuple(fields["notes"]), "replacements": replacements})


# -- as a chain ----------------------------------------------------------------------------------------------


def _stages_under(stages: Sequence[StageMeasure], assumed: Assumptions) -> Sequence[StageMeasure]:
    """The stages with the sizes that hold under these assumptions.

    Resident memory counts once. Recomputed outputs count twice. Outputs in `counted_twice` count with the next stage
    as well.
    """
    numbered = enumerate(map(_with_surrounding_rises, stages), 1)
    changed = [
        stage if number in assumed.counted_twice else _without_resident_saved(stage) for number, stage in numbered
    ]
    changed = [
        s if number in assumed.repeated else _without_resident_output_rise(s) for number, s in enumerate(changed, 1)
    ]
    for number in assumed.recomputed_unsaved:
        stage = changed[number - 1]
        stage.output_bytes += stage.pinned_bytes
        stage.options = [
            dataclasses.replace(option, saved_bytes=max(option.saved_bytes, stage.output_bytes))
            for option in stage.options
        ]
    for number in assumed.counted_twice:
        stage, behind = changed[number - 1 : number + 1]
        stage.output_bytes -= stage.also_held_bytes
        behind.saved_bytes += stage.also_held_bytes
        behind.forward_rise_bytes += stage.also_held_bytes
    for number in passing(stages) - assumed.read_by_recomputation:
        changed[number - 1 : number + 1] = _count_with_next(*changed[number - 1 : number + 1])
    return changed


def _changed(stage: StageMeasure, by: Mapping[str, int], **own: Any) -> StageMeasure:
    """The stage, with sizes of it and of each option changed by these bytes. own: other fields of the stage alone."""

    def sizes(measured: StageMeasure | OptionMeasure) -> dict[str, Any]:
        return {name: getattr(measured, name) + size for name, size in by.items()}

    options = [dataclasses.replace(option, **sizes(option)) for option in stage.options]
    return dataclasses.replace(stage, **sizes(stage), **own, options=options)


def _count_with_next(stage: StageMeasure, behind: StageMeasure) -> tuple[StageMeasure, StageMeasure]:
    """A stage part of whose output is freed before the backward, and the next stage, with which that part counts."""
    size = stage.passing_bytes
    by = {"saved_bytes": -size, "backward_rise_bytes": size, "accumulated_backward_rise_bytes": size}
    only_bytes = behind.forward_only_rise_bytes + size
    return (
        _changed(stage, by, output_bytes=stage.output_bytes - size),
        _changed(behind, {"forward_rise_bytes": size}, forward_only_rise_bytes=only_bytes),
    )


def _with_surrounding_rises(stage: StageMeasure) -> StageMeasure:
    """The stage and its options, with the rises of the code around it that is no stage."""

    def higher(measured: StageMeasure | OptionMeasure) -> dict[str, Any]:
        adding = measured.accumulated_backward_rise_bytes
        return {
            "forward_rise_bytes": max(measured.forward_rise_bytes, stage.between_forward_rise_bytes),
            "backward_rise_bytes": max(measured.backward_rise_bytes, stage.between_backward_rise_bytes),
            "accumulated_backward_rise_bytes": max(adding, stage.accumulated_between_backward_rise_bytes),
        }

    only_bytes = max(stage.forward_only_rise_bytes, stage.between_forward_rise_bytes)
    options = [dataclasses.replace(option, **higher(option)) for option in stage.options]
    return dataclasses.replace(stage, **higher(stage), forward_only_rise_bytes=only_bytes, options=options)


def _without_resident_saved(stage: StageMeasure) -> StageMeasure:
    """The stage without saved tensors that are resident anyway: its backward does not free its resident output."""
    if not stage.resident_saved_bytes:
        return stage
    pinned = stage.pinned_saved_bytes
    by = {"backward_rise_bytes": pinned, "accumulated_backward_rise_bytes": pinned}
    return _changed(stage, {"saved_bytes": -stage.resident_saved_bytes, **by})


def _without_resident_output_rise(stage: StageMeasure) -> StageMeasure:
    """The stage whose only forward computes its resident output, which counts from the beginning of the step."""
    only_bytes = stage.forward_only_rise_bytes - stage.pinned_bytes
    return _changed(stage, {"forward_rise_bytes": -stage.pinned_bytes}, forward_only_rise_bytes=only_bytes)


def _chain_stage(stage: StageMeasure, grad_before: int, created: bool) -> dict[str, Any]:
    """The workspaces of a stage: its measured peaks without the results that the chain counts.

    `recompute_overhead_ns` is the overhead of a recomputation, without the run itself. It adds to each forward that no
    backward follows: each forward has it, and the backward subtracts it. A run that saves nothing takes no longer than
    one that saves. A block that is always kept never has the overhead.
    """
    recompute_overhead_ns = 0 if stage.keep_reason else stage.recompute_overhead_ns
    saved = max(stage.saved_bytes, stage.output_bytes)
    least_ns = min([stage.forward_ns, *(option.forward_ns for option in stage.options)])
    weight_grad = stage.weight_grad_bytes if created else stage.accumulated_weight_grad_bytes
    rise = stage.backward_rise_bytes if created else stage.accumulated_backward_rise_bytes
    return {
        "name": shown(stage.name, stage.call),
        "output_bytes": stage.output_bytes,
        "grad_bytes": stage.arriving_bytes(created),
        "weight_grad_bytes": weight_grad,
        "no_recompute": bool(stage.keep_reason),
        "forward_only_ns": min(stage.forward_only_ns, least_ns) + recompute_overhead_ns,
        "forward_only_workspace_bytes": stage.forward_only_rise_bytes - stage.output_bytes,
        "options": [
            {
                "name": "keep",
                "saved_bytes": saved,
                **_times(stage, recompute_overhead_ns),
                "forward_workspace_bytes": stage.forward_rise_bytes - saved,
                "backward_workspace_bytes": rise - grad_before - weight_grad,
            },
            *(
                _chain_option(number, option, grad_before + weight_grad, created, recompute_overhead_ns)
                for number, option in stage.selective_options()
            ),
        ],
    }


def _join_loss(last: dict[str, Any], grad_before: int, in_both: bool) -> None:
    """Counts the workspace of the last stage's forward in its backward, where that takes less; or in both.

    No block can be recomputed between the two: the runtime acts again only when gradients have arrived at the last
    block. So a plan must not free saved tensors to make room for the loss, and recompute them before its backward.
    """
    handed = last["grad_bytes"] + grad_before + last["weight_grad_bytes"]
    for option in last["options"]:
        least = option["forward_workspace_bytes"] - handed
        option["backward_workspace_bytes"] = max(option["backward_workspace_bytes"], least)
        if not in_both:
            option["forward_workspace_bytes"] = min(option["forward_workspace_bytes"], 0)


def shifted_ns(stage: StageMeasure) -> list[int]:
    """For each option of a stage, how much of its backward's time the chain counts with its forward."""
    recompute_overhead_ns = 0 if stage.keep_reason else stage.recompute_overhead_ns
    options: list[StageMeasure | OptionMeasure] = [stage, *(option for _, option in stage.selective_options())]
    return [min(recompute_overhead_ns, measured.backward_ns) for measured in options]


def _times(measured: StageMeasure | OptionMeasure, recompute_overhead_ns: int) -> dict[str, int]:
    shifted = min(recompute_overhead_ns, measured.backward_ns)
    return {"forward_ns": measured.forward_ns + shifted, "backward_ns": measured.backward_ns - shifted}


def _chain_option(
    number: int, option: OptionMeasure, handed: int, created: bool, recompute_overhead_ns: int
) -> dict[str, Any]:
    """An option of selective recomputation; `handed` are the gradients that the backward leaves."""
    rise = option.backward_rise_bytes if created else option.accumulated_backward_rise_bytes
    return {
        "name": f"option {number}",
        "saved_bytes": option.saved_bytes,
        **_times(option, recompute_overhead_ns),
        "forward_workspace_bytes": option.forward_rise_bytes - option.saved_bytes,
        "backward_workspace_bytes": rise - handed,
    }
