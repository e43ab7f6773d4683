"""Executors that run every block under a given option, without a plan, to measure what that costs."""

from __future__ import annotations

from typing import Any

import cairn.torch as ct
from cairn.torch.runtime.executor import Executor
from cairn.torch.selective.block_runs import SelectiveOptions
from torch import nn


def alike(profile: ct.Profile) -> SelectiveOptions:
    """How blocks with options that are all alike can be kept: by the options of one whose last output nobody saves."""
    found = min((stage for stage in profile.stages if stage.options), key=lambda stage: len(stage.options))
    return SelectiveOptions(
        found.digest, tuple(found.asked), tuple(found.draws), tuple(o.decisions for o in found.options)
    )


def by_kept(options: SelectiveOptions) -> list[int]:
    """The options, the one first by which most tensors are kept."""
    return sorted(range(1, len(options.decisions)), key=lambda option: -options.decisions[option].count("k"))


def by_option(model: nn.Module, profile: ct.Profile, option: int) -> Executor:
    """Has each block with options kept by that option of `alike`."""
    selective = [number for number, stage in enumerate(profile.stages, 1) if stage.options]
    last = len(profile.stages)
    ops: list[tuple[Any, ...]] = [("forward_save", s, option if s in selective else 0) for s in range(1, last + 1)]
    ops += [("backward", s) for s in range(last, 0, -1)]
    return Executor(model, profile.refs, ops, selective=dict.fromkeys(selective, alike(profile)))
