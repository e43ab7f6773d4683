"""Which of the memory that a backward takes outside of blocks goes again, and when.

Where a value goes two ways, the gradient of the way that is done first waits for that of the other: that of a sum
around a block during the block's backward, that of a U-Net's skip from one end to the other. It is on its way back
beside the chain's own, so it is counted as a part of that, from stage to stage, until it goes. What never goes, the
gradients of parameters, is what a stage leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..base.stage_measure import StageMeasure


def parted(changes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Parts what is there after each of some changes of a level.

    Returns by how much each raises what is there from then on, and what is there beside that after each, which goes
    later. A level is at least zero: what goes beyond that was counted elsewhere.
    """
    levels = list(itertools.accumulate(changes, lambda level, change: max(0, level + change), initial=0))[1:]
    lasting = list(itertools.accumulate(reversed(levels), min))[::-1]
    raised = [after - before for before, after in itertools.pairwise([0, *lasting])]
    return raised, [level - stays for level, stays in zip(levels, lasting, strict=True)]


def count(stages: Sequence[StageMeasure], created: Sequence[int], accumulated: Sequence[int]) -> None:
    """Counts by how much the backwards of stages change what is there outside of blocks, where the step creates its
    gradients and where it adds to existing ones. All in the order of the forward pass.
    """
    raised, waiting = parted(created[::-1])
    raised_adding, waiting_adding = parted(accumulated[::-1])
    for place, stage in enumerate(reversed(stages)):
        stage.weight_grad_bytes += raised[place]
        stage.accumulated_weight_grad_bytes += raised_adding[place]
        if place:
            stage.waiting_bytes, stage.accumulated_waiting_bytes = waiting[place - 1], waiting_adding[place - 1]
