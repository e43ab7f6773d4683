"""Executors that keep a part of every block, by a given option and without a plan, to measure what that costs."""

from __future__ import annotations

from typing import Any

import cairn.torch as ct
from cairn.torch.runtime.executor import Executor
from cairn.torch.selective.block_runs import Inside
from torch import nn


def alike(profile: ct.Profile) -> Inside:
    """How opened blocks that are all alike can be kept: by the options of one whose last output nobody saves."""
    found = min((stage for stage in profile.stages if stage.options), key=lambda stage: len(stage.options))
    return Inside(found.digest, tuple(found.asked), tuple(found.draws), tuple(o.decisions for o in found.options))


def by_kept(inside: Inside) -> list[int]:
    """The options, the one first by which most tensors are kept."""
    return sorted(range(1, len(inside.options)), key=lambda option: -inside.options[option].count("k"))


def kept_in_part(model: nn.Module, profile: ct.Profile, option: int) -> Executor:
    """Has each opened block kept by that option of `alike`."""
    opened = [number for number, stage in enumerate(profile.stages, 1) if stage.options]
    last = len(profile.stages)
    ops: list[tuple[Any, ...]] = [("forward_save", s, option if s in opened else 0) for s in range(1, last + 1)]
    ops += [("backward", s) for s in range(last, 0, -1)]
    return Executor(model, profile.refs, ops, inside=dict.fromkeys(opened, alike(profile)))
