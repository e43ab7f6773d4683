"""A profiled step as FSDP2 runs it on one of N devices: `fully_shard` of every block, and of the model around them.

Each device holds one N-th of every parameter, of its gradient and of its optimizer state, split along the first
dimension and padded. A block runs with all of its parameters gathered. Meanwhile FSDP2 prefetches the parameters of the
next block, and in the backward those of the previous one. A block's backward makes whole gradients; those of the block
after it are being reduced at the same time, in a buffer of their size. Parameters outside blocks stay gathered for the
whole step, and their gradients stay whole once they exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..base import memory
from ..base.blocks import resolve
from ..base.stage_measure import OPTIMIZER_STATE, PARAMETERS, OptionMeasure, StageMeasure
from ..base.stages import BLOCK
from ..planning.step_profile import Profile

GATHERED = "gathered parameters outside blocks"


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Bytes of one block's parameters."""

    whole_bytes: int  # all of them, gathered
    trained_bytes: int  # the trained ones, gathered
    part_bytes: int  # the trained ones, one device's shard


_NONE = _Unit(0, 0, 0)


def sharded(profile: Profile, model: nn.Module, count: int) -> Profile:
    """The profile of the same step on one of `count` devices, each with a sample of this size."""
    if count == 1:
        return profile
    parameters = _unique(model.parameters())
    names = list(dict.fromkeys(stage.name for stage in profile.stages if stage.kind == BLOCK))
    inside = {name: _unique(p for part in resolve(model, name).modules for p in part.parameters()) for name in names}
    in_blocks = {id(p) for own in inside.values() for p in own}
    units = {name: _unit(own, count) for name, own in inside.items()}
    trained = [p for p in parameters if p.requires_grad]
    share = _part_bytes(trained, count) / (memory.dense_bytes(trained) or 1)
    outside_bytes = memory.dense_bytes(p for p in parameters if id(p) not in in_blocks)
    resident = {**profile.resident, PARAMETERS: _part_bytes(parameters, count), GATHERED: outside_bytes}
    if OPTIMIZER_STATE in resident:
        resident[OPTIMIZER_STATE] = round(resident[OPTIMIZER_STATE] * share)
    along = [units[stage.name] if stage.kind == BLOCK else _NONE for stage in profile.stages]
    return dataclasses.replace(
        profile,
        stages=tuple(_stages(profile.stages, along)),
        resident={name: size for name, size in resident.items() if size},
        gradient_bytes=_part_bytes(trained, count),
        optimizer_step_bytes=round(profile.optimizer_step_bytes * share),
    )


def _unique(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(p): p for p in parameters}.values())


def _unit(parameters: Sequence[torch.Tensor], count: int) -> _Unit:
    trained = [p for p in parameters if p.requires_grad]
    return _Unit(memory.dense_bytes(parameters), memory.dense_bytes(trained), _part_bytes(trained, count))


def _part_bytes(parameters: Iterable[torch.Tensor], count: int) -> int:
    """Bytes of the parameters' shards on the device that holds most rows."""
    total = 0
    for parameter in parameters:
        rows = parameter.shape[0] if parameter.dim() else 1
        row_bytes = parameter.numel() * parameter.element_size() // max(rows, 1)
        total += -(-rows // count) * row_bytes
    return total


def _stages(stages: Sequence[StageMeasure], along: Sequence[_Unit]) -> Iterable[StageMeasure]:
    """The stages, each with the memory of parameters gathered while it runs; `along` has a unit for each stage."""
    for index, (stage, own) in enumerate(zip(stages, along, strict=True)):
        before = next((unit for unit in reversed(along[:index]) if unit is not _NONE), _NONE)
        behind = next((unit for unit in along[index + 1 :] if unit is not _NONE), _NONE)
        forward = own.whole_bytes + behind.whole_bytes
        backward = own.whole_bytes + before.whole_bytes + behind.trained_bytes
        changed = dataclasses.replace(
            stage,
            forward_only_rise_bytes=stage.forward_only_rise_bytes + forward,
            between_forward_rise_bytes=_added(stage.between_forward_rise_bytes, forward),
            between_backward_rise_bytes=_added(stage.between_backward_rise_bytes, backward),
            accumulated_between_backward_rise_bytes=_added(stage.accumulated_between_backward_rise_bytes, backward),
            options=[_risen(option, forward, backward) for option in stage.options],
            **_rises(stage, forward, backward),
        )
        if stage.kind == BLOCK:
            changed.weight_grad_bytes = min(stage.weight_grad_bytes, own.part_bytes)
            changed.accumulated_weight_grad_bytes = min(stage.accumulated_weight_grad_bytes, own.part_bytes)
        yield changed


def _risen(option: OptionMeasure, forward: int, backward: int) -> OptionMeasure:
    return dataclasses.replace(option, **_rises(option, forward, backward))


def _rises(measured: StageMeasure | OptionMeasure, forward: int, backward: int) -> dict[str, Any]:
    """The rises of a stage or option.

    The backward's rise is the same with accumulation: a block's gradients are made whole before they are added to those
    that exist.
    """
    return {
        "forward_rise_bytes": measured.forward_rise_bytes + forward,
        "backward_rise_bytes": measured.backward_rise_bytes + backward,
        "accumulated_backward_rise_bytes": measured.backward_rise_bytes + backward,
    }


def _added(rise: int, more: int) -> int:
    return rise + more if rise else 0
