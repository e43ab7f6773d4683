"""What plans and reports say of blocks that are always kept."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cairn.torch.base.stage_measure import StageMeasure
from cairn.torch.planning.step_profile import _chain_stage


def test_the_times_of_a_block_that_is_always_kept_are_those_of_plain_training() -> None:
    """What recomputing it would cost beside the run is no part of its forward, nor taken out of its backward."""
    measured = {"name": "a", "kind": "block", "forward_ns": 30, "backward_ns": 50, "again_ns": 400}
    kept = _chain_stage(StageMeasure(**measured, keep_reason="draws"), 0, True)
    assert (kept["options"][0]["forward_ns"], kept["options"][0]["backward_ns"]) == (30, 50)
    recomputed = _chain_stage(StageMeasure(**measured), 0, True)
    assert recomputed["options"][0]["forward_ns"] + recomputed["options"][0]["backward_ns"] == 80
    assert recomputed["forward_only_ns"] == 400
