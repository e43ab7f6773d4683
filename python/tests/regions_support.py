"""Compiled blocks whose options and plans do not depend on measured times, and so not on the machine's load."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from cairn.torch.base.stage_measure import StageMeasure
from cairn.torch.compiled import kernel_costs, region_levels
from cairn.torch.compiled.problem import Costs
from cairn.torch.planning.step_profile import Profile


@contextlib.contextmanager
def fixed_costs() -> Iterator[None]:
    """Each call of a graph takes a time by its kind, and no search ends by the clock."""
    measured = kernel_costs.measured

    def costs(*args: Any) -> Costs:
        found = measured(*args)
        return dataclasses.replace(found, ns={node: 10_000 if "mm" in str(node.target) else 2_000 for node in found.ns})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_costs, "measured", costs)
        patch.setattr(region_levels, "RESULT_MS", 1000)
        patch.setattr(region_levels, "MAX_MS", 100_000)
        yield


def with_fixed_times(profile: Profile) -> Profile:
    """A profile with the same times on each machine: an option that keeps less takes longer."""
    return dataclasses.replace(profile, stages=tuple(map(_with_fixed_times, profile.stages)))


def _with_fixed_times(stage: StageMeasure) -> StageMeasure:
    options = [
        dataclasses.replace(option, forward_ns=800_000, backward_ns=700_000 + 200_000 * number)
        for number, option in enumerate(stage.options)
    ]
    return dataclasses.replace(
        stage,
        options=options,
        forward_ns=800_000,
        forward_only_ns=800_000,
        backward_ns=700_000,
        recompute_overhead_ns=50_000,
    )
