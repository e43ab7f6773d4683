"""`profile`: measures a model's training step and returns it as data from which plans are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from cairn import ProgressCallback
from torch import nn

from .base import memory
from .base.blocks import Block, resolve
from .base.budgets import free_bytes
from .base.errors import Unsupported
from .base.progress import reported_progress
from .base.stage_measure import (
    BUFFERS,
    CHANGES_INPUT,
    GRADIENTS_INSIDE,
    OPTIMIZER_STATE,
    OWN_HOOKS,
    PARAMETERS,
    REPLAYED,
    WORKSPACES,
    StageMeasure,
)
from .base.stages import sentences
from .base.tree import tensors_in
from .handle import refuse_planned_modules, set_aside
from .head.replacements import Replaced, Replacements
from .head.replacements import find as find_replacements
from .planning.arguments import check_call, check_optimizer, check_profile_options, positional
from .planning.fingerprint import fingerprint_of
from .planning.step_profile import Profile
from .profiling import call_trace, discovery, measure, option_measure, timing, trial_recompute
from .profiling.cast_copies import CopyPass
from .profiling.optimizer import OptimizerMemory, measure_optimizer, unwrapped
from .profiling.parameter_users import ParameterUsers, UsedByModel
from .profiling.profileable import check_differentiable, check_gradients, check_model, check_named, device_of
from .profiling.sample import Sample
from .profiling.step_records import Arriving, StepMeasure
from .rerun_state.backend_flags import refuse_chosen_kernels
from .rerun_state.module_state import SMALL_BUFFER_BYTES
from .rerun_state.parametrized import refuse_cache
from .rerun_state.preserve import Parameters
from .rerun_state.sharded import refuse_sharded_modules

RANDOM_STATE_BYTES = 5056  # of the CPU's generator, as torch hands it out
OTHER_SEEDS = 8
PASSES_OF_RANKS = 3
MEASURED_AGAIN = 3  # at most, until gradients lie as was assumed


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
    """Measure one plain training step of a model on a sample, without changing the model.

    It needs memory for the blocks' outputs, one block's saved tensors, and the code outside of blocks. So it can
    profile models whose plain step does not fit. Plans of the model, and of other models that its loss runs, are
    inactive meanwhile.

    Parameters
    ----------
    model : nn.Module
        The model, on its device.
    args, kwargs
        The model's arguments in the training loop; a single tensor counts as a tuple of one.
    loss_fn : callable, optional
        Computes the scalar loss of the model's output; not needed if the output is the loss or contains it.
    optimizer : torch.optim.Optimizer, optional
        Its state and its step are counted; it is not stepped.
    blocks : str, type, nn.Module or list
        The modules that may be recomputed: "auto", name patterns ("encoder.layer.*"), module classes, modules, a
        ModuleList, or a list of these.
    passes : int
        The number of timed passes; the median counts.
    keep : as blocks
        Blocks that must never be recomputed; a module inside a block keeps the whole block.
    inside : bool
        Also measure options of selective recomputation inside blocks.
    outside : bool
        Also test whether a tied embedding and the model's own loss can be computed with less memory.
    holds_output : bool
        Whether the training loop holds the model's output during the backward, as after ``output = model(x)``. False if
        it holds only the loss, as in ``model(**batch).loss.backward()``.
    progress : callable or False, optional
        Called with a cairn.Progress, block by block; a true result raises cairn.Cancelled. None shows a line on a
        terminal, False nothing.

    Returns
    -------
    Profile
        Bytes and nanoseconds of each stage.

    Raises
    ------
    Unsupported
        The step cannot be profiled; the message names why.

    Examples
    --------
    >>> profile = ct.profile(model, x, loss_fn=loss_fn, optimizer=optimizer)
    >>> print(ct.sweep(profile, 5))
    """
    settings = ProfileSettings(passes, inside, keep)
    around: Any = {"outside": outside, "holds_output": holds_output, "progress": progress}
    return profile_by(settings, model, args, kwargs, loss_fn=loss_fn, optimizer=optimizer, blocks=blocks, **around)


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
    """Settings of the measurement: `passes`, `inside` and `keep` as for `profile`.

    option_pass: makes the pass that measures options of selective recomputation.
    """

    passes: int = 3
    inside: bool = True
    keep: Any = ()
    option_pass: Callable[..., option_measure.OptionPass] = option_measure.OptionPass


def profile_by(
    settings: ProfileSettings,
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    blocks: Any,
    outside: bool,
    holds_output: bool,
    progress: ProgressCallback | Literal[False] | None,
) -> Profile:
    """`profile`, with these settings of the measurement."""
    passes, inside, keep = settings.passes, settings.inside, settings.keep
    check_call(model, kwargs, loss_fn, args)
    check_optimizer(model, optimizer)
    optimizer = unwrapped(optimizer)
    check_profile_options({"passes": passes, "inside": inside, "outside": outside, "holds_output": holds_output})
    check_named(model, blocks=blocks, keep=keep)
    arguments = positional(args)
    check_model(model)
    refuse_cache()
    sample = Sample(model, arguments, dict(kwargs or {}), loss_fn, holds_output)
    check_gradients(sample)
    device, fingerprint = device_of(sample), fingerprint_of(model, arguments, sample.kwargs)
    progress_reports = reported_progress(progress, f"profiling {type(model).__name__}")
    restored = sample.preserved(device)
    with (
        progress_reports as sample.reporter,
        set_aside(model, *sample.others),
        restored as parameters,
        sample.stateless(),
    ):
        refuse_planned_modules(model)
        sample.reporter.begin("finding blocks")
        workspaces = memory.library_bytes(device)
        observed = _trace(sample, parameters)
        stages = discovery.find_blocks(model, observed, blocks)
        may_replace = outside and not observed.runs_compiled_outside(stages)
        replaced = find_replacements(model, sample.output, stages) if may_replace else Replacements()
        sample.replaced = Replaced(model, replaced)
        tries_whole = blocks == "auto" and inside and not keep and not replaced.notes()
        whole = discovery.whole_if_better(model, observed, stages, free_bytes(device)) if tries_whole else []
        as_whole = _as_whole(sample, whole, observed, device, settings) if whole else None
        measured, stages = as_whole or _measure_all(sample, stages, observed, device, settings)
        notes = [*_notes(sample, measured), *_skipped(measured, model, observed)]
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
        replacements=dataclasses.replace(replaced, runs=_segment_modules(stages, observed, measured)),
        holds_output=holds_output,
    )


def _trace(sample: Sample, parameters: Parameters) -> call_trace.Trace:
    """The calls of a step. Where layers, or parts of them, are skipped at random, one that skips few is looked for."""
    first = sample.random
    best = call_trace.trace(sample.model, lambda: check_differentiable(sample), parameters)
    skips = discovery.skipped_layers(sample.model, best) or discovery.modules_that_skip(sample.model, best)
    if not skips or not sample.draws():
        return best
    begin = first
    for seed in range(OTHER_SEEDS):
        sample.begin_with_seed(seed)
        state, other = sample.random, call_trace.trace(sample.model, sample.forward, parameters)
        if len(other.calls) > len(best.calls):
            best, begin = other, state
    sample.begin_with(begin)
    return best


def _measure_all(
    sample: Sample, blocks: list[Block], observed: call_trace.Trace, device: torch.device, settings: ProfileSettings
) -> tuple[StepMeasure, list[Block]]:
    """Memory, times and options of a step's blocks; those that can be stages are returned as well."""
    refuse_chosen_kernels(part for block in blocks for part in block.all_modules())
    refuse_sharded_modules(blocks)
    measured, blocks = _measure(sample, blocks, observed, device)
    _keep_named(sample.model, measured, settings.keep)
    _keep_writing(measured, blocks, observed)
    _keep_what_takes_gradients(measured, blocks)
    sample.reporter.begin("recomputing blocks after the forward")
    measured.is_rehearsed = trial_recompute.keep_what_differs(sample, measured.stages, device)
    _count_copies_of_buffers(sample.model, measured.blocks)
    sample.reporter.begin("timing blocks", settings.passes * len(measured.blocks))
    timing.TimePasses(sample, blocks, measured, device).run(settings.passes)
    if settings.inside:
        sample.reporter.begin("measuring options inside blocks", len(measured.blocks))
        parameter_users = ParameterUsers(observed.call_order(blocks), measured.used_by_model)
        settings.option_pass(sample, blocks, measured, parameter_users, device).run()
    return measured, blocks


def _as_whole(
    sample: Sample, whole: list[Block], observed: call_trace.Trace, device: torch.device, settings: ProfileSettings
) -> tuple[StepMeasure, list[Block]] | None:
    """The measurement of the whole model as one block; None if it cannot be recomputed selectively."""
    try:
        measured, blocks = _measure_all(sample, whole, observed, device, settings)
    except Unsupported:
        sample.drop_gradients()
        return None
    return (measured, blocks) if any(stage.options for stage in measured.blocks) else None


def _measure(
    sample: Sample, blocks: list[Block], observed: call_trace.Trace, device: torch.device
) -> tuple[StepMeasure, list[Block]]:
    """Measure the step. A block that changes its input in place cannot be a stage; it becomes a part of a segment.

    The measurement is repeated if gradients have another layout than assumed, if the model itself uses parameters of
    blocks, or if blocks have saved-tensor hooks of their own. On CUDA the first measurement is a warm-up: kernels are
    loaded, and cuDNN benchmarks its kernels with large workspaces. A model that ranks share is measured several times:
    a buffer that gloo frees in a thread of its own seems to stay, so the pass that ends with least memory is right.
    """
    if device.type == "cuda":
        measure.MemoryPass(sample, blocks, ParameterUsers(observed.call_order(blocks), UsedByModel()), device).run()
    arriving: Arriving = {}
    used_by_model = UsedByModel()
    copied = observed.casts and not observed.compiled  # what is compiled makes its own copies
    again = 0
    while True:
        order = observed.call_order(blocks)
        sample.reporter.begin("measuring memory", len(order))
        parameter_users = ParameterUsers(order, used_by_model)
        copies = CopyPass(sample, blocks).run() if copied else []
        passes = PASSES_OF_RANKS if sample.ranks else 1
        passes_run = [
            measure.MemoryPass(sample, blocks, parameter_users, device, arriving, copies).run() for _ in range(passes)
        ]
        measured = min(passes_run, key=lambda each: each.end_bytes)
        bad = {stage.name for stage in measured.blocks if stage.keep_reason == CHANGES_INPUT}
        hooked = {stage.name for stage in measured.blocks if stage.keep_reason == OWN_HOOKS}
        is_done = not bad and not hooked and (measured.is_settled or again == MEASURED_AGAIN)
        if not sample.ranks.largest(int(not is_done)):
            return measured, blocks
        blocks = [block for block in blocks if block.name not in bad]
        blocks = [dataclasses.replace(b, has_own_hooks=True) if b.name in hooked else b for b in blocks]
        arriving, used_by_model, again = measured.arriving, measured.used_by_model, again + 1


def _segment_modules(blocks: list[Block], observed: call_trace.Trace, measured: StepMeasure) -> dict[str, str]:
    """The modules without parts of their own that the stages outside blocks run, by the stage's name."""
    first = {id(run[0]) for block in blocks for run in observed.runs_of(block.modules)}
    inside = {id(part) for block in blocks for part in block.all_modules()}
    runs: list[list[str]] = [[]]
    for call in observed.calls:
        if id(call) in first:
            runs.append([])
        elif id(call.module) not in inside and not any(call.module.children()):
            runs[-1].append(call.name)
    stages = zip(measured.surroundings, runs, strict=False)
    return {stage.name: ", ".join(dict.fromkeys(names)) for stage, names in stages if stage is not None and names}


def _keep_named(model: nn.Module, measured: StepMeasure, keep: Any) -> None:
    if not keep:
        return
    named = discovery.named_by_user(model, keep, "keep")
    kept, parts = set(map(id, named)), {id(part) for module in named for part in module.modules()}
    for stage in measured.blocks:
        block = resolve(model, stage.name)
        if parts & set(map(id, block.modules)) or kept & set(map(id, block.all_modules())):
            stage.keep("is listed in keep=")


def _keep_writing(measured: StepMeasure, blocks: list[Block], observed: call_trace.Trace) -> None:
    """A block that writes parameters would write them again in each run."""
    writing = {b.name for b in blocks if any(c.wrote_parameters for m in b.modules for c in observed.calls_of(m))}
    for stage in measured.blocks:
        if stage.name in writing:
            stage.keep_reason = "writes parameters"


def _keep_what_takes_gradients(measured: StepMeasure, blocks: list[Block]) -> None:
    """A block with backwards inside would have all that it saves once more; parts of that may be recomputed."""
    inside = {block.name for block in blocks if block.has_gradients_inside}
    for stage in measured.blocks:
        if stage.name in inside:
            stage.keep(GRADIENTS_INSIDE)


def _resident(sample: Sample, measured: StepMeasure, optimizer: OptimizerMemory, workspaces: int) -> dict[str, int]:
    """Memory that is held during the whole step, by name; gradients are separate, and the input is the chain's a[0]."""
    parameters = memory.storages(sample.model.parameters())
    states = [stage for stage in measured.blocks if stage.may_be_selective]
    copied = [_copied_bytes(sample.model, stage) for stage in states]
    # those for runs to come, and those of the present one while a block is recomputed
    replayed = RANDOM_STATE_BYTES * (_random_states(measured.blocks) + 1) + sum(copied) + max(copied, default=0)
    replayed += sum(stage.untracked_bytes for stage in states)
    named = {
        PARAMETERS: sum(parameters.values()),
        BUFFERS: memory.unique_bytes(sample.model.buffers(), parameters),
        OPTIMIZER_STATE: optimizer.state_bytes,
        WORKSPACES: workspaces,
        REPLAYED: replayed,
        **measured.pinned,
    }
    return {name: size for name, size in named.items() if size}


def _random_states(blocks: Iterable[StageMeasure]) -> int:
    """Random states before blocks that may be recomputed: those between which nothing is drawn share one."""
    count, is_new = 0, False
    for stage in blocks:
        is_new |= stage.random_state_is_new
        if stage.may_be_selective:
            count += is_new
            is_new = False
    return count


def _count_copies_of_buffers(model: nn.Module, stages: Iterable[StageMeasure]) -> None:
    """Count the copies of buffers that a recomputed block makes before its forward, and drops if unchanged."""
    for stage in stages:
        stage.forward_only_rise_bytes += _buffer_bytes(model, stage)


def _copied_bytes(model: nn.Module, stage: StageMeasure) -> int:
    """Bytes of the copies of a block's buffers that stay until its backward.

    These are copies of buffers that it writes, and of those that cannot be compared without waiting for a device.
    """
    if stage.writes_buffers:
        return _buffer_bytes(model, stage)
    buffers = [b for m in resolve(model, stage.name).modules for b in m.buffers() if not memory.is_at_hand(b)]
    return memory.unique_bytes(b for b in buffers if memory.dense_bytes([b]) <= SMALL_BUFFER_BYTES)


def _buffer_bytes(model: nn.Module, stage: StageMeasure) -> int:
    return memory.unique_bytes(b for m in resolve(model, stage.name).modules for b in m.buffers())


def _present_bytes(model: nn.Module, given: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    parameters = list(model.parameters())
    state = [] if optimizer is None else list(tensors_in(list(optimizer.state.values())))
    grads = [p.grad for p in parameters if p.grad is not None]
    return memory.unique_bytes([*parameters, *model.buffers(), *given, *grads, *state])


_LEAVES = (
    "keeps {} bytes from step to step, in a cache or in the history of a value that no loss uses: detach such values"
)


def _notes(sample: Sample, measured: StepMeasure) -> list[str]:
    notes = sentences(
        ((stage.name, stage.keep_reason) for stage in measured.blocks if stage.keep_reason), "always kept"
    )
    closed = ((stage.name, stage.closed) for stage in measured.blocks if stage.closed and stage.may_be_selective)
    notes += sentences(closed, "kept or recomputed as a whole")
    leftovers = (stage for stage in measured.blocks if stage.leftover_bytes)
    notes += sentences(((s.name, _LEAVES.format(s.leftover_bytes)) for s in leftovers), "larger than need be")
    if not any(
        stage.kind == "block" and (not stage.keep_reason or stage.selective_options()) for stage in measured.stages
    ):
        notes.append("no block can be recomputed, so there is nothing to trade; name some with blocks=")
    if not measured.is_rehearsed:
        notes.append(
            "there was no memory to recompute each block once after the forward: a block that reads state which is "
            "set for the forward alone is found when a step recomputes it; name it with keep="
        )
    if sample.has_no_loss:
        notes.append(
            "the loss is computed outside the model and loss_fn was not given: "
            "what the loss itself takes is not counted"
        )
    return notes


def _skipped(measured: StepMeasure, model: nn.Module, observed: call_trace.Trace) -> list[str]:
    """Notes about modules that the sample step skipped, and other steps may run."""
    lists = {stage.name.rpartition(".")[0] for stage in measured.blocks}
    layers = [name for name in discovery.skipped_layers(model, observed) if name.rpartition(".")[0] in lists]
    parts = [name or "the model" for name in discovery.modules_that_skip(model, observed)]
    return [
        *(
            f"{name} did not run in the sample step; a step in which it runs may take more than its budget"
            for name in layers
        ),
        *sentences(((name, _SKIPPED_PARTS) for name in parts), "perhaps larger in other steps"),
    ]


_SKIPPED_PARTS = (
    "ran without a part that others of its class ran, in the sample step, and the budget leaves no room for it"
)
