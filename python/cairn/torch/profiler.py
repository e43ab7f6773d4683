"""`profile`: measures a model's training step and returns it as data from which plans are made."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from cairn import ProgressCallback, format_bytes, format_ns
from torch import nn

from . import shapes
from .arguments import ACCUMULATED, CREATED, check_call, check_optimizer, check_profile_options
from .base import _compat, memory
from .base.blocks import Block, resolve
from .base.errors import Unsupported, warn
from .base.progress import telling
from .base.stage_measure import CHANGES_INPUT, OptionMeasure, StageMeasure
from .base.stages import BLOCK, StageRef, shown, told
from .base.takeover import Takeover
from .base.tree import tensors_in
from .context.parametrized import refuse_cache
from .context.sharded import refuse_sharded_parts
from .context.state import SMALL_BUFFER_BYTES
from .context.switches import refuse_chosen_kernels
from .context.untouched import Parameters
from .handle import set_aside
from .measuring import discovery, isolate, measure, option_measure, timing
from .measuring.cast_copies import CopyPass
from .measuring.optimizer import OptimizerMemory, measure_optimizer, unwrapped
from .measuring.owners import Owners
from .measuring.sample import Sample
from .outside.replaced import Outside, Replaced
from .outside.replaced import find as find_outside
from .schedule.counted import AS_PLAIN, Counted, Lingering

PROFILE_VERSION = 3
RANDOM_STATE_BYTES = 5056  # of the CPU's generator, as torch hands it out
OTHER_SEEDS = 8
MEASURED_AGAIN = 3  # at most, until gradients lie as was assumed


@dataclasses.dataclass(frozen=True)
class Profile:
    """One training step, measured. Sizes in bytes, times in nanoseconds.

    `resident` names what is there during the whole step: parameters, buffers, optimizer state, input and so on.
    `gradient_bytes` are those of all parameters; a step either creates them or adds to ones that exist.
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
    outside: Outside = Outside()  # what is replaced outside blocks
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
        """What each stage is in the model."""
        return tuple(StageRef(stage.kind, stage.name, stage.call) for stage in self.stages)

    @property
    def held_bytes(self) -> int:
        """What the caller keeps until the step ends: the model's output, the loss."""
        return sum(stage.held_bytes for stage in self.stages)

    @property
    def held_by_name(self) -> dict[str, int]:
        """The same by stage."""
        return {shown(stage.name, stage.call): stage.held_bytes for stage in self.stages if stage.held_bytes}

    def resident_by_name(self, scope: str = "step", gradients: str = ACCUMULATED) -> dict[str, int]:
        """What is resident from the step's beginning to its end, the input apart."""
        if scope == "activations":
            return {name: size for name, size in self.resident.items() if name not in STATE}
        if gradients == CREATED:
            return dict(self.resident)
        return {**self.resident, "gradients of parameters": self.gradient_bytes}

    def resident_bytes(self, scope: str = "step", gradients: str = ACCUMULATED) -> int:
        """The same in total."""
        return sum(self.resident_by_name(scope, gradients).values())

    def chain(self, scope: str = "step", gradients: str = ACCUMULATED, counted: Counted = AS_PLAIN) -> dict[str, Any]:
        """The step as a cairn-chain.

        `scope` "step" counts everything on the device, "activations" leaves out parameters, buffers, gradients and
        optimizer state. `gradients` says whether the step creates the parameters' gradients or adds to existing ones.
        `counted` is what it supposes of the schedule.
        """
        created = gradients == CREATED and scope == "step"
        stages = []
        lingering = Lingering(self.stages, counted.let_go)
        before = self.input_grad_bytes  # the gradient that the stage's backward returns
        for number, stage in enumerate(_held_apart(self.stages, counted), 1):
            stages.append(_chain_stage(stage, before, created))
            lingering.count(number, stage, stages[-1], counted)
            before = stage.arriving_bytes(created)
        if len(self.stages) > 1:
            _join_loss(stages[-1], stages[-2]["grad_bytes"])
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
        """The profile after a step took so much more than predicted: plans leave that much more free."""
        return dataclasses.replace(self, miss_bytes=max(self.miss_bytes, miss_bytes))

    def with_optimizer_of(self, other: Profile) -> Profile:
        """The profile as if it had been made with the optimizer of another one of the same model."""
        state = {name: size for name, size in other.resident.items() if name == OPTIMIZER_STATE}
        resident = {**self.resident, **state}
        return dataclasses.replace(self, resident=resident, optimizer_step_bytes=other.optimizer_step_bytes)

    def without_options(self) -> Profile:
        """The profile of blocks that are kept or run again as wholes."""
        stages = tuple(dataclasses.replace(stage, options=[], digest="") for stage in self.stages)
        return dataclasses.replace(self, stages=stages)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data; `from_json` reads it back."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["stages"] = [dataclasses.asdict(stage) for stage in self.stages]
        data["outside"] = self.outside.to_json()
        data["resident"], data["fingerprint"] = dict(self.resident), dict(self.fingerprint)
        return {"format": "cairn-torch-profile", "version": PROFILE_VERSION, **data, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """Reads what `to_json` wrote."""
        if data.get("format") != "cairn-torch-profile" or data.get("version") != PROFILE_VERSION:
            raise ValueError(f"this is not a cairn-torch-profile of version {PROFILE_VERSION}")
        fields = {key: value for key, value in data.items() if key not in ("format", "version")}
        fields["stages"] = tuple(StageMeasure.from_json(stage) for stage in fields["stages"])
        outside = Outside.from_json(fields.get("outside", {}))
        return cls(**{**fields, "notes": tuple(fields["notes"]), "outside": outside})


OPTIMIZER_STATE = "optimizer state"
STATE = ("parameters", "buffers", OPTIMIZER_STATE, "workspaces of libraries")


def _held_apart(stages: Sequence[StageMeasure], counted: Counted) -> Sequence[StageMeasure]:
    """The stages as is supposed: what is resident is counted once, outputs that are made again twice, and those that
    are apart with what runs behind, too.
    """
    numbered = enumerate(map(copy.copy, stages), 1)
    changed = [stage if number in counted.apart else _once(stage) for number, stage in numbered]
    changed = [s if number in counted.repeated else _made_once(s) for number, s in enumerate(changed, 1)]
    for number in counted.again:
        stage = changed[number - 1]
        stage.output_bytes += stage.pinned_bytes
        stage.options = [
            dataclasses.replace(option, saved_bytes=max(option.saved_bytes, stage.output_bytes))
            for option in stage.options
        ]
    for number in counted.apart:
        stage, behind = changed[number - 1 : number + 1]
        stage.output_bytes -= stage.also_held_bytes
        behind.saved_bytes += stage.also_held_bytes
        behind.forward_rise_bytes += stage.also_held_bytes
    return changed


def _once(stage: StageMeasure) -> StageMeasure:
    """The stage without what it saves that is resident anyway; of its output, that does not go in its backward."""

    def without(measured: Any) -> dict[str, Any]:
        return {
            "saved_bytes": measured.saved_bytes - stage.resident_saved_bytes,
            "backward_rise_bytes": measured.backward_rise_bytes + stage.pinned_saved_bytes,
            "accumulated_backward_rise_bytes": measured.accumulated_backward_rise_bytes + stage.pinned_saved_bytes,
        }

    if not stage.resident_saved_bytes:
        return stage
    options = [dataclasses.replace(option, **without(option)) for option in stage.options]
    return dataclasses.replace(stage, **without(stage), options=options)


def _made_once(stage: StageMeasure) -> StageMeasure:
    """The stage whose only forward makes what of its output is resident, and so counted before it is there."""
    if not stage.pinned_bytes:
        return stage
    rise_bytes = stage.forward_rise_bytes - stage.pinned_bytes
    only_bytes = stage.forward_only_rise_bytes - stage.pinned_bytes
    options = [
        dataclasses.replace(option, forward_rise_bytes=option.forward_rise_bytes - stage.pinned_bytes)
        for option in stage.options
    ]
    return dataclasses.replace(
        stage, forward_rise_bytes=rise_bytes, forward_only_rise_bytes=only_bytes, options=options
    )


def _chain_stage(stage: StageMeasure, grad_before: int, created: bool) -> dict[str, Any]:
    """A stage's workspaces are what its measured peaks have beyond the results that the chain itself counts.

    What running a block again costs beside the run, `again_ns`, comes on top of each forward that no backward follows:
    each forward has it, and the backward takes it back. A run that saves nothing takes no longer than one that saves.
    """
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
        "forward_only_ns": min(stage.forward_only_ns, least_ns) + stage.again_ns,
        "forward_only_workspace_bytes": stage.forward_only_rise_bytes - stage.output_bytes,
        "options": [
            {
                "name": "keep",
                "saved_bytes": saved,
                **_times(stage, stage.again_ns),
                "forward_workspace_bytes": stage.forward_rise_bytes - saved,
                "backward_workspace_bytes": rise - grad_before - weight_grad,
            },
            *(
                _chain_option(number, option, grad_before + weight_grad, created, stage.again_ns)
                for number, option in stage.opened()
            ),
        ],
    }


def _join_loss(last: dict[str, Any], grad_before: int) -> None:
    """Counts what the last stage's forward takes in its backward, where that takes less.

    No block can run between the two: when a plan is asked again, gradients have arrived at the last block. So a plan
    must not let blocks leave room for the loss and run again before its backward.
    """
    handed = last["grad_bytes"] + grad_before + last["weight_grad_bytes"]
    for option in last["options"]:
        least = option["forward_workspace_bytes"] - handed
        option["backward_workspace_bytes"] = max(option["backward_workspace_bytes"], least)
        option["forward_workspace_bytes"] = min(option["forward_workspace_bytes"], 0)


def _times(measured: StageMeasure | OptionMeasure, again_ns: int) -> dict[str, int]:
    shifted = min(again_ns, measured.backward_ns)
    return {"forward_ns": measured.forward_ns + shifted, "backward_ns": measured.backward_ns - shifted}


def _chain_option(number: int, option: OptionMeasure, handed: int, created: bool, again_ns: int) -> dict[str, Any]:
    """An option that keeps a part; `handed` are the gradients that the backward leaves."""
    rise = option.backward_rise_bytes if created else option.accumulated_backward_rise_bytes
    return {
        "name": f"part {number}",
        "saved_bytes": option.saved_bytes,
        **_times(option, again_ns),
        "forward_workspace_bytes": option.forward_rise_bytes - option.saved_bytes,
        "backward_workspace_bytes": rise - handed,
    }


def profile(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: Any = "auto",
    passes: int = 3,
    keep: Any = (),
    inside: bool = True,
    outside: bool = True,
    holds_output: bool = True,
    progress: ProgressCallback | Literal[False] | None = None,
) -> Profile:
    """Measures one plain training step of `model` on sample arguments, without changing the model.

    Plans that are at work on the model, or on others that its loss runs, are set aside meanwhile.

    args, kwargs: what the training loop calls the model with; a single tensor may stand for a tuple of one.
    loss_fn: makes the scalar loss from the model's output; not needed where the output is, or has, its loss.
    optimizer: its state and its step are counted; it is not stepped.
    blocks: which modules may be recomputed: "auto", name patterns ("encoder.layer.*"), module classes, modules, a
        ModuleList, or a list of these.
    passes: how often the times are taken (the median counts).
    keep: blocks (as in `blocks`) that must never be recomputed.
    inside: also find out which parts of what each block saves can be rebuilt, and at what cost.
    outside: also find out whether a tied embedding and the model's own loss can do with less memory.
    holds_output: whether the training loop still has the model's output while the backward runs, as after
        ``output = model(x)``. False where it keeps the loss alone, as in ``model(**batch).loss.backward()``.
    progress: called with a cairn.Progress, block by block; a true result raises cairn.Cancelled. None shows a line on
        a terminal, False nothing.

    Memory needed: the blocks' outputs, one block's saved tensors, and what lies outside blocks.
    """
    check_call(model, kwargs, loss_fn, args)
    check_optimizer(model, optimizer)
    optimizer = unwrapped(optimizer)
    check_profile_options({"passes": passes, "inside": inside, "outside": outside, "holds_output": holds_output})
    _check_named(model, blocks=blocks, keep=keep)
    arguments = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    check_model(model)
    refuse_cache()
    sample = Sample(model, arguments, dict(kwargs or {}), loss_fn, holds_output)
    _check_gradients(sample)
    device, fingerprint = device_of(sample), fingerprint_of(model, arguments, sample.kwargs)
    tells = telling(progress, f"profiling {type(model).__name__}")
    as_found = sample.untouched(device)
    with tells as sample.teller, set_aside(model, *sample.others), as_found as parameters, sample.stateless():
        _refuse_planned_parts(model)
        sample.teller.begin("finding blocks")
        workspaces = memory.library_bytes(device)
        observed = _trace(sample, parameters)
        found = discovery.find_blocks(model, observed, blocks)
        refuse_chosen_kernels(part for block in found for part in block.parts())
        refuse_sharded_parts(found)
        looks_outside = outside and not observed.runs_compiled_outside(found)
        replaced = find_outside(model, sample.output, found) if looks_outside else Outside()
        sample.replaced = Replaced(model, replaced)
        measured, found = _measure(sample, found, observed, device)
        _keep_named(model, measured, keep)
        _keep_writing(measured, found, observed)
        _count_copies_of_buffers(model, measured.blocks)
        sample.teller.begin("taking times", passes * len(measured.blocks))
        timing.TimePasses(sample, found, measured, device).run(passes)
        if inside:
            sample.teller.begin("looking into blocks", len(measured.blocks))
            owners = Owners(model, _call_order(found, observed), measured.used_outside)
            option_measure.OptionPass(sample, found, measured, owners, device).run()
        notes = _notes(sample, measured, discovery.skipped_layers(model, observed))
    taken, given = measure_optimizer(optimizer), [t for t in sample.static_tensors() if t.device == device]
    return Profile(
        model_name=type(model).__name__,
        device=str(device),
        stages=tuple(measured.stages),
        resident=_resident(sample, measured, taken, workspaces),
        input_bytes=memory.unique_bytes(given, memory.storages([*model.parameters()])),
        input_grad_bytes=measured.input_grad_bytes,
        gradient_bytes=memory.unique_bytes(p for p in model.parameters() if p.requires_grad),
        optimizer_step_bytes=taken.step_bytes,
        fingerprint=fingerprint,
        present_bytes=_present_bytes(model, given, optimizer) + workspaces,
        excess=measured.excess,
        notes=(*notes, *replaced.notes()),
        outside=dataclasses.replace(replaced, runs=_ran_outside(found, observed, measured)),
        holds_output=holds_output,
    )


def _refuse_planned_parts(model: nn.Module) -> None:
    """Raises Unsupported where a plan is at work on a part of a model that has none itself, or on what it is in."""
    for name, part in model.named_modules():
        if isinstance(vars(part).get("forward"), Takeover):
            kind = type(model).__name__
            where = f"{name}, a part of this {kind}" if name else f"a model of which this {kind} is a part"
            raise Unsupported(f"a plan is at work on {where}: remove it first")


def _check_gradients(sample: Sample) -> None:
    """Raises ValueError where no backward can run."""
    if not torch.is_grad_enabled():
        region = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ValueError(
            f"a training step is measured, but gradients are switched off here: leave torch.{region}() first"
        )
    if not any(t.requires_grad for t in [*sample.model.parameters(), *sample.static_tensors()]):
        raise ValueError(
            f"there is nothing to train: no parameter of this {type(sample.model).__name__} and none of its arguments "
            "has requires_grad"
        )


def _check_named(model: nn.Module, **named: Any) -> None:
    """Raises ValueError where what a user names is not in the model; () names nothing, "auto" leaves it open."""
    for option, wanted in named.items():
        is_none = isinstance(wanted, (tuple, list)) and not wanted
        if not is_none and not (option == "blocks" and isinstance(wanted, str) and wanted == "auto"):
            is_one = isinstance(wanted, (str, nn.Module)) or not isinstance(wanted, Iterable)
            for each in [wanted] if is_one else wanted:
                _check_names_part(
                    model, each, discovery.named_by_user(model, each if is_one else [each], option), option
                )


def _check_names_part(model: nn.Module, wanted: Any, found: Sequence[nn.Module], option: str) -> None:
    """Raises ValueError where something that a user names stands for nothing, or for what is not in the model."""
    own, kind = set(map(id, model.modules())), type(model).__name__
    if not found:
        raise ValueError(f"{option}={wanted!r} names no module of this {kind}")
    stranger = next((module for module in found if id(module) not in own), None)
    if stranger is not None:
        raise ValueError(
            f"{option}= has a {type(stranger).__name__} that is no part of this {kind}: is it one of another model, or "
            "of a copy?"
        )


def device_of(sample: Sample) -> torch.device:
    """The one device that a model and its sample lie on; of a sample some may be on the host beside it, such as the
    lengths of packed sequences.
    """
    cpu, placed = torch.device("cpu"), [*sample.model.parameters(), *sample.model.buffers()]
    devices = {t.device for t in (*placed, *sample.static_tensors()) if t.device != cpu}
    devices |= {t.device for t in placed if t.dim() > 0}
    if len(devices) > 1:
        raise Unsupported(
            f"the model and its sample lie on several devices ({', '.join(map(str, devices))}); "
            "plan each device's part by itself"
        )
    device = devices.pop() if devices else cpu
    if device.type not in ("cpu", "cuda"):
        raise Unsupported(f"memory on {device.type!r} cannot be measured; profile on the CPU or on CUDA")
    return device


def check_model(model: nn.Module) -> None:
    """Refuses wrappers and models that recompute by themselves."""
    name = type(model).__name__
    if name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        raise Unsupported(f"profile the module inside {name}, before it is wrapped")
    compiled = _compat.compiled_inside(model) is not None or _compat.is_compiled_in_place(model)
    if compiled or _compat.is_compiled_function(model.forward):
        raise Unsupported(
            f"this {name} is compiled as a whole, and a plan works between its blocks: plan the model itself, with "
            "torch.compile(block) in the place of each block"
        )
    for part_name, part in model.named_modules():
        if _compat.is_compiled_in_place(part):
            raise Unsupported(
                f"{part_name} was compiled in place (Module.compile), around what a plan has to do; put "
                "torch.compile(module) in its place instead"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise Unsupported(
                f"{part_name or 'the model'} is a module of torch.jit, whose forward cannot be taken over; put the "
                "module that it was made from in its place, or torch.compile(module)"
            )
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise Unsupported(
            "gradient checkpointing is enabled in the model, which recomputes every layer by itself; call "
            "model.gradient_checkpointing_disable(), and the budget decides which layers are recomputed"
        )
    if not model.training:
        warn("the model is in evaluation mode; its training step may take more: call model.train() first")


def _trace(sample: Sample, parameters: Parameters) -> discovery.Trace:
    """The calls of a step. Where layers are skipped at random, a step in which as few as possible are is looked for."""
    first = sample.random
    best = discovery.trace(sample.model, lambda: _check_differentiable(sample), parameters)
    if not discovery.skipped_layers(sample.model, best) or not sample.draws():
        return best
    begin = first
    for seed in range(OTHER_SEEDS):
        sample.begin_with_seed(seed)
        state, other = sample.random, discovery.trace(sample.model, sample.forward, parameters)
        if len(other.calls) > len(best.calls):
            best, begin = other, state
    sample.begin_with(begin)
    return best


def _check_differentiable(sample: Sample) -> None:
    """Runs a forward; raises ValueError if no backward can follow it."""
    output, loss = sample.forward()
    if not isolate.differentiable(output if loss is None else loss):
        raise ValueError(
            "the model's output does not require gradients, so there is no backward: is there a detach() or no_grad() "
            "in its forward, or a torch.utils.checkpoint with use_reentrant=True? That one gives parameters no "
            "gradients where none of its inputs requires them; use_reentrant=False does"
        )


def _measure(
    sample: Sample, blocks: list[Block], observed: discovery.Trace, device: torch.device
) -> tuple[measure.StepMeasure, list[Block]]:
    """Measures the step; what turns out to change its input in place cannot be a stage and becomes surroundings.

    Again where gradients turn out to lie otherwise in memory than was assumed, or the model to use parameters of blocks
    itself. On CUDA, the first time is for nothing but what happens only once: kernels are loaded, and cuDNN tries which
    ones are the fastest, in scratch of any size.
    """
    if device.type == "cuda":
        measure.MemoryPass(sample, blocks, Owners(sample.model, _call_order(blocks, observed)), device).run()
    arriving: measure.Arriving = {}
    used_outside: frozenset[int] = frozenset()
    copied = observed.casts and not observed.compiled  # what is compiled makes its own copies
    again = 0
    while True:
        order = _call_order(blocks, observed)
        sample.teller.begin("measuring memory", len(order))
        owners = Owners(sample.model, order, used_outside)
        copies = CopyPass(sample, blocks).run() if copied else []
        measured = measure.MemoryPass(sample, blocks, owners, device, arriving, copies).run()
        bad = {stage.name for stage in measured.blocks if stage.keep_reason == CHANGES_INPUT}
        if not bad and (measured.is_settled or again == MEASURED_AGAIN):
            return measured, blocks
        blocks = [block for block in blocks if block.name not in bad]
        arriving, used_outside, again = measured.arriving, measured.used_outside, again + 1


def _call_order(blocks: list[Block], observed: discovery.Trace) -> list[Block]:
    first = {id(block.modules[0]): block for block in blocks}
    return [first[id(call.module)] for call in observed.calls if id(call.module) in first]


def _ran_outside(blocks: list[Block], observed: discovery.Trace, measured: measure.StepMeasure) -> dict[str, str]:
    """The modules without parts of their own that the stages outside blocks run, by the stage's name."""
    first = {id(block.modules[0]) for block in blocks}
    inside = {id(part) for block in blocks for part in block.parts()}
    runs: list[list[str]] = [[]]
    for call in observed.calls:
        if id(call.module) in first:
            runs.append([])
        elif id(call.module) not in inside and not any(call.module.children()):
            runs[-1].append(call.name)
    stages = zip(measured.surroundings, runs, strict=False)
    return {stage.name: ", ".join(dict.fromkeys(names)) for stage, names in stages if stage is not None and names}


def _keep_named(model: nn.Module, measured: measure.StepMeasure, keep: Any) -> None:
    if not keep:
        return
    kept = {id(part) for module in discovery.named_by_user(model, keep, "keep") for part in module.modules()}
    for stage in measured.blocks:
        if any(id(module) in kept for module in resolve(model, stage.name).modules):
            stage.keep_reason = stage.keep_reason or "is listed in keep="


def _keep_writing(measured: measure.StepMeasure, blocks: list[Block], observed: discovery.Trace) -> None:
    """A block that writes parameters would write them again in each run."""
    writing = {b.name for b in blocks if any(c.wrote_parameters for m in b.modules for c in observed.calls_of(m))}
    for stage in measured.blocks:
        if stage.name in writing:
            stage.keep_reason = "writes parameters"


def _resident(
    sample: Sample, measured: measure.StepMeasure, optimizer: OptimizerMemory, workspaces: int
) -> dict[str, int]:
    """What is there during the whole step, by name; gradients are counted apart, the input is the chain's a[0]."""
    parameters = memory.storages(sample.model.parameters())
    states = [stage for stage in measured.blocks if not stage.keep_reason]
    copied = [_copied_bytes(sample.model, stage) for stage in states]
    # those for runs to come, and those of the present one while a block runs again
    replayed = RANDOM_STATE_BYTES * (_random_states(measured.blocks) + 1) + sum(copied) + max(copied, default=0)
    named = {
        "parameters": sum(parameters.values()),
        "buffers": memory.unique_bytes(sample.model.buffers(), parameters),
        OPTIMIZER_STATE: optimizer.state_bytes,
        "workspaces of libraries": workspaces,
        "random states and buffers to replay": replayed,
        **measured.pinned,
    }
    return {name: size for name, size in named.items() if size}


def _random_states(blocks: Iterable[StageMeasure]) -> int:
    """Random states before blocks that may run again: those between which nothing is drawn share one."""
    count, is_new = 0, False
    for stage in blocks:
        is_new |= stage.random_state_is_new
        if not stage.keep_reason:
            count += is_new
            is_new = False
    return count


def _count_copies_of_buffers(model: nn.Module, stages: Iterable[StageMeasure]) -> None:
    """A block that will run again copies its buffers before it first runs, and lets go of what did not change."""
    for stage in stages:
        stage.forward_only_rise_bytes += _buffer_bytes(model, stage)


def _copied_bytes(model: nn.Module, stage: StageMeasure) -> int:
    """Of the copies of a block's buffers that stay until its backward: of those that it writes, and of what cannot be
    compared without waiting for a device.
    """
    if stage.writes_buffers:
        return _buffer_bytes(model, stage)
    buffers = [b for m in resolve(model, stage.name).modules for b in m.buffers() if not memory.is_at_hand(b)]
    return memory.dense_bytes(b for b in buffers if memory.dense_bytes([b]) <= SMALL_BUFFER_BYTES)


def _buffer_bytes(model: nn.Module, stage: StageMeasure) -> int:
    return memory.unique_bytes(b for m in resolve(model, stage.name).modules for b in m.buffers())


def _present_bytes(model: nn.Module, given: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    parameters = list(model.parameters())
    state = [] if optimizer is None else list(tensors_in(list(optimizer.state.values())))
    grads = [p.grad for p in parameters if p.grad is not None]
    return memory.unique_bytes([*parameters, *model.buffers(), *given, *grads, *state])


def _notes(sample: Sample, measured: measure.StepMeasure, skipped: Iterable[str]) -> list[str]:
    notes = told(((stage.name, stage.keep_reason) for stage in measured.blocks if stage.keep_reason), "always kept")
    closed = ((stage.name, stage.closed) for stage in measured.blocks if stage.closed and not stage.keep_reason)
    notes += told(closed, "kept or run again as a whole")
    if not any(stage.kind == "block" and not stage.keep_reason for stage in measured.stages):
        notes.append("no block can be recomputed, so there is nothing to trade; name some with blocks=")
    lists = {stage.name.rpartition(".")[0] for stage in measured.blocks}
    notes += [
        f"{name} did not run in the sample step; a step in which it runs may take more than its budget"
        for name in skipped
        if name.rpartition(".")[0] in lists
    ]
    if sample.has_no_loss:
        notes.append(
            "the loss is computed outside the model and loss_fn was not given: "
            "what the loss itself takes is not counted"
        )
    return notes


def autocast_of(device: torch.device) -> str:
    """The type that autocast casts to here; empty where it is off."""
    enabled = torch.is_autocast_enabled(device.type)
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if enabled else ""


def fingerprint_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan holds for: versions, device, types and shapes."""
    described = [(name, str(p.dtype), list(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    tensor = next(iter(model.parameters()), torch.empty(0, device="cpu"))
    return {
        "torch": torch.__version__,
        "model": type(model).__name__,
        "parameters": hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16],
        "training": model.training,
        "device": torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else tensor.device.type,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "autocast": autocast_of(tensor.device),
        "inputs": shapes.described(args, kwargs),
        "input_names": shapes.names_of(model, args, kwargs),
    }
