"""Computes and measures the options of selective recomputation for the blocks of a profiled step.

For one block of each kind:

1. It is recorded twice (`block_graph.py`), which gives the times of its operations and shows whether they repeat.
2. Choices along the hull of bytes and time are computed (`block_options.py`).
3. Each choice is proved: every tensor that it does not keep is recomputed and compared in full with the saved tensor.
   This also gives its time. An operation with another result is no longer replayed, and step 2 is repeated.
4. Each choice runs forward and backward alone under a meter, as the executor will run it, which gives its bytes.

Blocks of the same kind whose recorded operations are equal share the measurement. Bytes and times of an option are
differences to a run of the same kind that keeps everything, added to the stage's values in the measured step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..base import memory
from ..base.blocks import Block, intercepted
from ..base.progress import ProgressReporter
from ..base.stage_measure import OptionMeasure, StageMeasure
from ..selective.block_graph import BlockGraph
from ..selective.block_options import thinned
from ..selective.recompute import Recipe
from . import isolated_block, overhead
from .block_meter import captured_by, parameters_of
from .option_meter import OptionMeter, following
from .option_proofs import LEAST_BYTES, OptionTimes, Proofs
from .option_runs import BlockRuns
from .parameter_users import ParameterUsers
from .sample import Sample, backward_of
from .side_outputs import hidden_from_collectors
from .step_records import StepMeasure

MAX_OPTIONS = 12  # keep everything among them, of a block that saves no more than a part of the step
PARTS = 12  # options of a block lie no further apart than this part of the bytes that the step saves


class OptionPass:
    """One forward of the model in which one block of each kind is recorded; see the top of this file."""

    def __init__(
        self,
        sample: Sample,
        blocks: Sequence[Block],
        measured: StepMeasure,
        parameter_users: ParameterUsers,
        device: torch.device,
    ) -> None:
        self._sample, self._blocks, self._measured = sample, blocks, measured
        self._parameter_users, self._device = parameter_users, device
        self._measured_kinds: dict[Any, _BlockOptions] = {}
        self._index = 0
        self._calls: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # by block: numbers of calls
        self._part_bytes = sum(stage.saved_bytes for stage in measured.stages) // PARTS

    def run(self) -> None:
        """Adds options to the measured stages, or says why there are none."""
        with intercepted(self._blocks, self._handle, self._sample.replaced.during_block):
            output, loss = self._sample.forward()
        backward_of(output, loss)
        del output, loss
        self._sample.drop_gradients()

    def _handle(self, block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self._measured.blocks[self._index]
        self._index += 1
        call = next(self._calls[id(block)])
        arguments = isolated_block.Arguments(args, kwargs, block)
        if stage.captured:
            captured_by(block, function, arguments, self._device)
        if stage.may_be_selective:
            with hidden_from_collectors():
                self._measure_kind(stage, block, call, function, arguments)
        with arguments.saving_nothing():
            args, kwargs = arguments.source(isolated_block.Hooks())
            copies = arguments.with_container_copies(args, kwargs)
            result = arguments.run(function, args, kwargs)
        self._sample.reporter.one_done()
        output = isolated_block.bridge(result, arguments.differentiable, isolated_block.Hooks())
        copies.apply_changes(block.name, result, output)
        return output

    def _measure_kind(
        self,
        stage: StageMeasure,
        block: Block,
        call: int,
        function: Callable[..., Any],
        arguments: isolated_block.Arguments,
    ) -> None:
        """Finds the options of a stage."""
        if block.is_compiled:
            stage.closed = "is compiled"
            return
        if block.has_own_hooks:
            stage.closed = "has saved-tensor hooks of its own (save_on_cpu, a selective checkpoint)"
            return
        arriving = self._measured.arriving.get((block.name, call), ())
        run = BlockRuns(block, function, arguments, self._device, arriving)
        with run.rewound():
            graph = run.recorded(saving=False)
            kind = (stage.signature(), graph.digest(), graph.refusal)
            if kind not in self._measured_kinds:
                run.pending = self._parameter_users.with_pending_gradients(block, call)
                run.shared = {id(p) for p in parameters_of(block) if self._parameter_users.is_shared(p)}
                self._measured_kinds[kind] = _BlockOptions(run, stage, graph, self._part_bytes, self._sample.reporter)
        self._measured_kinds[kind].describe(stage)


class _BlockOptions:
    """The measured options of one kind of block."""

    def __init__(
        self,
        run: BlockRuns,
        stage: StageMeasure,
        graph: BlockGraph,
        part_bytes: int,
        reporter: ProgressReporter,
    ) -> None:
        self._run, self._stage, self._part_bytes = run, stage, part_bytes
        self._reporter = reporter
        self.asked: list[int] = []
        self.options: list[OptionMeasure] = []
        self.digest = graph.digest()
        self.draws = sorted({op.packs_before for op in graph.operations if op.random})
        self.reason = graph.refusal or self._find(stage)
        del self._run, self._reporter

    def describe(self, stage: StageMeasure) -> None:
        """Store the options in a stage."""
        stage.closed = self.reason
        if not self.reason:
            stage.digest, stage.asked, stage.draws = self.digest, list(self.asked), list(self.draws)
            stage.options = [moved(option, self._stage, stage) for option in self.options]

    def _find(self, stage: StageMeasure) -> str:
        graph = self._run.recorded(saving=True, read_order=self.asked)
        again = self._run.recorded(saving=False)
        if graph.digest() != again.digest() or graph.digest() != self.digest:
            return "does not do the same operations when it is recomputed"
        for op, other in zip(graph.operations, again.operations, strict=True):
            op.nanoseconds = min(op.nanoseconds, other.nanoseconds)
        proved = Proofs(self._run, graph, self.asked, self._part_bytes).choices()
        if len(proved) < 2:
            return "has no saved tensor that could be recomputed"
        for recipe, took in proved[1:] if overhead.counts(self._run.device) else ():
            took.saving_ns += overhead.cost().of_part(recipe.hooks_cost)
            took.recomputing_ns += overhead.cost().of_recomputing(len(recipe.order))
        measured = self._metered(proved)
        copied = memory.unique_bytes(b for b in self._run.buffers() if b is not None)
        options = [_option(stage, measured[0], proved[i], m, copied if i else 0) for i, m in enumerate(measured)]
        parts = stage.saved_bytes // max(1, self._part_bytes)
        self.options = _thinned(pareto(options), MAX_OPTIONS + parts)
        return "" if len(self.options) > 1 else "has no option that takes less"

    def _metered(self, proved: Sequence[tuple[Recipe, OptionTimes]]) -> list[tuple[StageMeasure, OptionTimes]]:
        self._reporter.more(len(proved))
        measured = []
        for recipe, took in proved:
            measured.append((OptionMeter(self._run, following(self._run, recipe)).stage, took))
            self._reporter.one_done()
        return measured


def _option(
    stage: StageMeasure,
    everything: tuple[StageMeasure, OptionTimes],
    proved: tuple[Recipe, OptionTimes],
    measured: tuple[StageMeasure, OptionTimes],
    copied_bytes: int,
) -> OptionMeasure:
    """The stage with an option of selective recomputation. Buffers, `copied_bytes`, are copied before it first runs."""
    recipe, took = proved
    option_alone = option_relative_to(stage, everything[0], measured[0], took, recipe.decisions, _described(recipe))
    return dataclasses.replace(option_alone, forward_rise_bytes=option_alone.forward_rise_bytes + copied_bytes)


def option_relative_to(
    stage: StageMeasure, base: StageMeasure, alone: StageMeasure, took: OptionTimes, decisions: str, recomputes: str
) -> OptionMeasure:
    """The stage with an option: its measured values, changed by the difference of `alone` to `base`.

    alone: the option, run alone. base: keeping everything, run alone.
    """
    return OptionMeasure(
        decisions=decisions,
        **_sizes_relative_to(stage, base, alone),
        forward_ns=stage.forward_ns + took.saving_ns,
        backward_ns=stage.backward_ns + took.recomputing_ns,
        offloadable_bytes=stage.offloadable_bytes + alone.offloadable_bytes - base.offloadable_bytes
        if min(stage.offloadable_bytes, alone.offloadable_bytes, base.offloadable_bytes) > 0
        else 0,
        recomputes=recomputes,
    )


def moved(option: OptionMeasure, measured: StageMeasure, stage: StageMeasure) -> OptionMeasure:
    """An option of a stage that was measured, for one of the same signature."""
    offloads = min(option.offloadable_bytes, stage.offloadable_bytes) > 0
    offloadable = option.offloadable_bytes + stage.offloadable_bytes - measured.offloadable_bytes
    return dataclasses.replace(
        option,
        **_sizes_relative_to(stage, measured, option),
        offloadable_bytes=max(0, offloadable) if offloads else 0,
    )


def _sizes_relative_to(stage: StageMeasure, base: StageMeasure, other: StageMeasure | OptionMeasure) -> dict[str, Any]:
    """The sizes of a stage, changed by the difference of `other` to `base`."""
    names = ("saved_bytes", "forward_rise_bytes", "backward_rise_bytes", "accumulated_backward_rise_bytes")
    sizes = {name: getattr(stage, name) + getattr(other, name) - getattr(base, name) for name in names}
    return {**sizes, "saved_bytes": max(sizes["saved_bytes"], stage.output_bytes)}


def _described(recipe: Recipe) -> str:
    """The operations that an option recomputes, as text, most frequent first."""
    names: dict[str, int] = {}
    for function in recipe.code.operations:
        name = getattr(function, "__name__", str(function)).lstrip("_")
        name = str(function).removeprefix("aten.").partition(".")[0] if "." in str(function) else name
        names[name] = names.get(name, 0) + 1
    listed = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in listed)


def pareto(options: list[OptionMeasure]) -> list[OptionMeasure]:
    """Remove dominated options: another one is better in bytes and time. The first, which keeps everything, stays."""
    less = [option for option in options[1:] if option.saved_bytes + LEAST_BYTES < options[0].saved_bytes]
    kept = [option for option in less if not any(_beats(other, option) for other in less)]
    return [options[0], *sorted(kept, key=lambda option: (-option.saved_bytes, option.time_ns))]


def _beats(other: OptionMeasure, option: OptionMeasure) -> bool:
    """Whether an option dominates another: no worse in bytes, peak and time, and better in one."""
    ours, theirs = (
        (o.saved_bytes, o.forward_rise_bytes, o.backward_rise_bytes, o.accumulated_backward_rise_bytes, o.time_ns)
        for o in (option, other)
    )
    return ours != theirs and all(a <= b for a, b in zip(theirs, ours, strict=True))


def _thinned(options: list[OptionMeasure], at_most: int) -> list[OptionMeasure]:
    """At most `at_most` options, among them those that determine the least budget.

    These are the last, which saves least, and those with the lowest peaks.
    """
    stay = {id(min(options, key=_peak)), id(min(options, key=_accumulated_peak))}
    return thinned(options, at_most, lambda option: (option.saved_bytes, option.time_ns), stay)


def _peak(option: OptionMeasure) -> tuple[int, int]:
    """The option with the lowest peak of the block alone; the fastest among equals."""
    return max(option.forward_rise_bytes, option.saved_bytes + option.backward_rise_bytes), option.time_ns


def _accumulated_peak(option: OptionMeasure) -> tuple[int, int]:
    peak = max(option.forward_rise_bytes, option.saved_bytes + option.accumulated_backward_rise_bytes)
    return peak, option.time_ns
