"""Lifetimes of gradients outside of blocks: when the backward allocates them, and when they are freed.

A value with two readers gets two gradients, and the first waits for the second: at a residual sum during the block's
backward, at a U-Net's skip from one end to the other. A waiting gradient exists next to the chain's own, so it counts
as a part of that, from stage to stage, until it is freed. Gradients of parameters are never freed; a stage leaves them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..base.stage_measure import StageMeasure


def split_lasting(changes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split the level after each of several changes into a lasting and a temporary part.

    Returns the lasting rise of each change, and the temporary bytes after each, which are freed later. A level is at
    least zero: bytes below that were counted elsewhere.
    """
    levels = list(itertools.accumulate(changes, lambda level, change: max(0, level + change), initial=0))[1:]
    lasting = list(itertools.accumulate(reversed(levels), min))[::-1]
    raised = [after - before for before, after in itertools.pairwise([0, *lasting])]
    return raised, [level - stays for level, stays in zip(levels, lasting, strict=True)]


def count(stages: Sequence[StageMeasure], created: Sequence[int], accumulated: Sequence[int]) -> None:
    """Count the changes of memory outside of blocks by the stages' backwards, with new and with accumulated gradients.

    Everything is in the order of the forward pass.
    """
    raised, waiting = split_lasting(created[::-1])
    raised_adding, waiting_adding = split_lasting(accumulated[::-1])
    for place, stage in enumerate(reversed(stages)):
        stage.weight_grad_bytes += raised[place]
        stage.accumulated_weight_grad_bytes += raised_adding[place]
        if place:
            stage.pending_grad_bytes, stage.accumulated_pending_grad_bytes = (
                waiting[place - 1],
                waiting_adding[place - 1],
            )
