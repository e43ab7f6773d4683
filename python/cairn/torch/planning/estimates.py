"""Estimates a step with larger inputs from the profile of a smaller one.

Tensors between stages grow in proportion to the inputs. Saved tensors and workspaces of a stage grow with the batch and
the square of all other growth. No operation of a usual block grows faster: attention has a number for every pair of
positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.stage_measure import REPLAYED, STATE, OptionMeasure, StageMeasure
from .shapes import Growth

if TYPE_CHECKING:
    from .step_profile import Profile

_LINEAR = (
    "input_bytes",
    "output_bytes",
    "also_held_bytes",
    "passing_bytes",
    "pinned_bytes",
    "pinned_saved_bytes",
    "added_bytes",
    "left_bytes",
    "left_saved_bytes",
    "grad_bytes",
    "held_bytes",
)
_CONSTANT = (*STATE, REPLAYED)


def scaled(measured: Profile, by: Growth, shapes: Sequence[str]) -> Profile:
    """A profile as a step with inputs of these shapes would give it, or more."""
    stages = tuple(_scaled_stage(stage, by) for stage in measured.stages)
    _scale_pending_gradients(measured.stages, stages, by)
    resident = {name: size if name in _CONSTANT else _grown(size, by.most) for name, size in measured.resident.items()}
    return dataclasses.replace(
        measured,
        stages=stages,
        resident=resident,
        input_bytes=_grown(measured.input_bytes, by.linear),
        input_grad_bytes=_grown(measured.input_grad_bytes, by.linear),
        miss_bytes=_grown(measured.miss_bytes, by.most),
        fingerprint={**measured.fingerprint, "inputs": list(shapes)},
    )


def _grown(size: int, factor: float) -> int:
    return math.ceil(size * factor) if size > 0 else size


def _scaled_stage(stage: StageMeasure, by: Growth) -> StageMeasure:
    """A stage as a step with larger inputs would give it, or more.

    A rise counts from the level at which an operation begins. So a part of it that grows less may be scaled with it.
    """
    grown = dataclasses.replace(stage, options=[dataclasses.replace(option) for option in stage.options])
    for name in _LINEAR:
        setattr(grown, name, _grown(getattr(stage, name), by.linear))
    grown.listed = {name: _grown(size, by.linear) for name, size in stage.listed.items()}
    _scale_measured(grown, by)
    for option in grown.options:
        _scale_measured(option, by)
    return grown


def _scale_measured(grown: StageMeasure | OptionMeasure, by: Growth) -> None:
    for field in dataclasses.fields(grown):
        if field.name not in _LINEAR and field.name.endswith(("saved_bytes", "offloadable_bytes", "rise_bytes", "_ns")):
            setattr(grown, field.name, _grown(getattr(grown, field.name), by.most))


def _scale_pending_gradients(measured: Sequence[StageMeasure], stages: Sequence[StageMeasure], by: Growth) -> None:
    """Scales the gradients that exist beside the chain's when a stage's backward begins.

    These are pending gradients, and those that later stages leave to the end of the backward. Where gradients exist
    already, they hardly ever belong to parameters. With smaller inputs they stay as they are: some may belong to
    parameters, which do not shrink.
    """
    left = 0
    for before, stage in zip(reversed(measured), reversed(stages), strict=True):
        there = left + before.accumulated_pending_grad_bytes
        more = max(_grown(there, by.linear) - there, 0)
        stage.pending_grad_bytes += more
        stage.accumulated_pending_grad_bytes += more
        left += before.accumulated_weight_grad_bytes


def power_of_growth(one: Profile, other: Profile, by: float) -> float:
    """The power of one size with which saved tensors grow. That size is `by` times as large in the first profile.

    The power is at least 1, for tensors with a number for each element, and at most 2, for a number for each pair.
    """
    ours, theirs = (sum(stage.saved_bytes for stage in measured.stages) for measured in (one, other))
    if not (ours and theirs):
        return 1.0
    return min(max(math.log(ours / theirs) / math.log(by), 1.0), 2.0)


def profiling_bytes(measured: Profile, by: Growth) -> int:
    """About the memory that profiling a step takes.

    It consists of held outputs of blocks, segments outside of blocks, and one block with its arguments and result.
    """
    stages = measured.stages
    held = sum(stage.also_held_bytes + stage.left_bytes for stage in stages)
    outside = sum(stage.saved_bytes for stage in stages if stage.kind == "outside")
    block = max(
        max(stage.forward_rise_bytes, stage.saved_bytes + stage.grad_bytes + stage.accumulated_backward_rise_bytes)
        + stage.input_bytes
        + stage.output_bytes
        + sum(stage.listed.values())
        for stage in stages
    )
    more = sum(_grown(size, by.linear) - size for name, size in measured.resident.items() if name not in _CONSTANT)
    growing = _grown(measured.input_bytes + held + outside, by.linear) + _grown(block, by.most)
    return measured.resident_bytes() + more + growing
