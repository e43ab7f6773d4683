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
        stages=tuple(_stages(profile.stages, along, profile.device == "cpu")),  # gloo takes another copy
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


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """Memory that FSDP2 adds to a stage's forward and backward, and the least rise of either, before it computes."""

    forward: int
    backward: int
    least_forward: int
    least_backward: int

    @classmethod
    def of(cls, before: _Unit, own: _Unit, behind: _Unit, twice: bool) -> _Gathered:
        """For a stage between others.

        A result of an all-gather stays until that of the next block has been copied, so a forward has its parameters
        and their copy. A backward has its own parameters, those of the block before it, which are fetched early, and
        the gradients of the block behind it, which are still being reduced.

        twice: whether an all-gather takes another copy of its result while it runs.
        """
        kept = before if own is _NONE else own
        copies = 2 if twice else 1
        backward = own.whole_bytes + before.whole_bytes + behind.trained_bytes
        return cls(
            own.whole_bytes + kept.whole_bytes,
            backward,
            before.whole_bytes + copies * own.whole_bytes,
            backward + (copies - 1) * before.whole_bytes,
        )

    def rises(self, measured: StageMeasure | OptionMeasure) -> dict[str, Any]:
        """The rises of a stage or option.

        The backward's rise is the same with accumulation: a block's gradients are made whole before they are added to
        those that exist.
        """
        backward = max(measured.backward_rise_bytes + self.backward, self.least_backward)
        return {
            "forward_rise_bytes": max(measured.forward_rise_bytes + self.forward, self.least_forward),
            "backward_rise_bytes": backward,
            "accumulated_backward_rise_bytes": backward,
        }


def _stages(stages: Sequence[StageMeasure], along: Sequence[_Unit], twice: bool) -> Iterable[StageMeasure]:
    """The stages, each with the memory of parameters gathered while it runs; `along` has a unit for each stage."""
    for index, (stage, own) in enumerate(zip(stages, along, strict=True)):
        before = next((unit for unit in reversed(along[:index]) if unit is not _NONE), _NONE)
        behind = next((unit for unit in along[index + 1 :] if unit is not _NONE), _NONE)
        more = _Gathered.of(before, own, behind, twice)
        changed = dataclasses.replace(
            stage,
            forward_only_rise_bytes=max(stage.forward_only_rise_bytes + more.forward, more.least_forward),
            between_forward_rise_bytes=_added(stage.between_forward_rise_bytes, more.forward),
            between_backward_rise_bytes=_added(stage.between_backward_rise_bytes, more.backward),
            accumulated_between_backward_rise_bytes=_added(
                stage.accumulated_between_backward_rise_bytes, more.backward
            ),
            options=[dataclasses.replace(option, **more.rises(option)) for option in stage.options],
            **more.rises(stage),
        )
        if stage.kind == BLOCK:
            changed.weight_grad_bytes = min(stage.weight_grad_bytes, own.part_bytes)
            changed.accumulated_weight_grad_bytes = min(stage.accumulated_weight_grad_bytes, own.part_bytes)
        yield changed


def _added(rise: int, more: int) -> int:
    return rise + more if rise else 0
