"""Times the stages of a step, in passes like the one that measures memory, but without a meter.

In each pass every block runs forward once without saving. One block of each kind also runs forward and backward with
everything saved and without hooks, as a kept block does. Code outside blocks is timed in place. A stage's time is the
median over the passes and over blocks of its kind.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import clock
from ..base.blocks import Block, intercepted, resolve
from ..base.stage_measure import StageMeasure
from ..rerun_state.attributes import Attributes
from ..rerun_state.preserve import Randomness
from . import isolated_block, overhead
from .block_meter import captured_by
from .sample import Sample, backward_of
from .side_outputs import SideOutputs, hidden_from_collectors
from .step_records import StepMeasure


@dataclasses.dataclass
class _Samples:
    """Times of one kind of stage, in nanoseconds."""

    forward: list[int] = dataclasses.field(default_factory=list)
    forward_only: list[int] = dataclasses.field(default_factory=list)
    backward: list[int] = dataclasses.field(default_factory=list)


class TimePasses:
    """Runs the passes; see the top of this file."""

    def __init__(self, sample: Sample, blocks: Sequence[Block], measured: StepMeasure, device: torch.device) -> None:
        self._sample, self._blocks, self._measured, self._device = sample, blocks, measured, device
        self._samples: dict[Any, _Samples] = {}

    def run(self, passes: int) -> None:
        """Sets the times of the measured stages."""
        for _ in range(passes):
            self._step()
        for stage in self._measured.stages:
            samples = self._samples.get(_kind(stage), _Samples())
            stage.forward_ns = _median(samples.forward)
            stage.forward_only_ns = _median(samples.forward_only) or stage.forward_ns
            stage.backward_ns = _median(samples.backward)
        self._sample.reporter.begin("measuring the overhead of plans")
        for stage in self._measured.blocks if overhead.counts(self._device) else ():
            stage.recompute_overhead_ns = overhead.cost().of(resolve(self._sample.model, stage.name), stage.saved_count)

    def _step(self) -> None:
        self._timed: set[Any] = set()
        self._index = 0
        self._segment_began = clock.now(self._device)
        with intercepted(self._blocks, self._handle, self._sample.replaced.during_block):
            output, loss = self._sample.forward()
        self._close_segment()
        self._backward_began = clock.now(self._device)
        backward_of(output, loss)
        self._close_backward(0)
        del output, loss
        self._sample.drop_gradients()

    def _samples_of(self, stage: StageMeasure) -> _Samples:
        return self._samples.setdefault(_kind(stage), _Samples())

    def _close_segment(self) -> None:
        stage = self._measured.surroundings[self._index]
        if stage is not None:
            self._samples_of(stage).forward.append(clock.now(self._device) - self._segment_began)

    def _close_backward(self, index: int) -> None:
        stage = self._measured.surroundings[index]
        if stage is not None:
            self._samples_of(stage).backward.append(clock.now(self._device) - self._backward_began)

    def _handle(self, block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._close_segment()
        index = self._index
        stage = self._measured.blocks[index]
        arguments = isolated_block.Arguments(args, kwargs, block)
        if stage.captured:
            captured_by(block, function, arguments, self._device)
        if _kind(stage) not in self._timed:
            self._timed.add(_kind(stage))
            state = Randomness(self._device)
            attributes = Attributes(block.all_modules(), with_large=bool(stage.captured))  # which it may take out
            with hidden_from_collectors():
                self._time_saving(stage, block, function, arguments)
            attributes.restore()
            state.restore()
        result, lent = self._time_forward_only(stage, function, arguments)
        hooks = isolated_block.Hooks(arrived=lambda grads: self._close_backward(index + 1), begun=self._begin_backward)
        output = isolated_block.bridge(result, arguments.differentiable, hooks)
        lent.apply_changes(block.name, result, output)
        del result, lent
        self._index += 1
        self._sample.reporter.one_done()
        self._segment_began = clock.now(self._device)
        return output

    def _begin_backward(self) -> None:
        self._backward_began = clock.now(self._device)

    def _time_forward_only(
        self, stage: StageMeasure, function: Callable[..., Any], arguments: isolated_block.Arguments
    ) -> tuple[Any, isolated_block.ContainerCopies]:
        with arguments.saving_nothing():
            args, kwargs = arguments.source(isolated_block.Hooks())
            lent = arguments.with_container_copies(args, kwargs)
            began = clock.now(self._device)
            result = arguments.run(function, args, kwargs)
            self._samples_of(stage).forward_only.append(clock.now(self._device) - began)
        return result, lent

    def _time_saving(
        self, stage: StageMeasure, block: Block, function: Callable[..., Any], arguments: isolated_block.Arguments
    ) -> None:
        samples = self._samples_of(stage)
        args, kwargs = arguments.source(isolated_block.Hooks())
        beside = SideOutputs(block.all_modules())
        began = clock.now(self._device)
        result = arguments.run(function, args, kwargs)
        samples.forward.append(clock.now(self._device) - began)
        del args, kwargs
        begun: list[int] = []
        new_outputs, grads = beside.root(result, self._measured.arriving.get((stage.name, stage.call), ()))
        hooks = isolated_block.Hooks(begun=lambda: begun.append(clock.now(self._device)))
        root = isolated_block.sink(new_outputs, hooks, grads) if new_outputs else None
        del result, new_outputs
        if root is not None:  # else a hook behind the block makes its output require gradients
            with isolated_block.as_in_backward(self._device):
                root.backward()
        samples.backward.append(clock.now(self._device) - begun[0] if begun else 0)
        torch.clear_autocast_cache()
        self._sample.drop_gradients()


def _kind(stage: StageMeasure) -> Any:
    return stage.signature() if stage.kind == "block" else (stage.kind, stage.name)


def _median(samples: Sequence[int]) -> int:
    return int(statistics.median(samples)) if samples else 0
