"""Recomputes each block once after the sample step's forward has returned, as plans will do it.

Blocks are measured while the model's forward runs. What a model sets for the time of its forward alone (a thread-local
stack, a global, an attribute of a class, hooks that are removed again) is still there then, and gone when a plan
recomputes a block in the backward. So one more forward runs under a plan that recomputes every block; after it each
block is recomputed from what the executor noted of its first run, in the thread that runs backwards. What a block saves
and returns must be the same, value by value. Where it is not, the same is tried with the attributes of the block and
the hooks on its parts as they were in the forward; plans bring these back if that helps, else the block is kept.

Memory needed: the inputs of all blocks, what one block takes while it runs, and what is saved outside of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from ..base.errors import RecomputationError, Unsupported, is_out_of_memory
from ..base.stage_measure import StageMeasure
from ..base.stages import StageRef
from ..runtime.executor import Executor
from ..runtime.step_run import Run
from ..schedule.program import BACKWARD, DROP, FORWARD_KEEP, FORWARD_SAVE, OUTPUT
from . import isolated_block
from .sample import Sample


def keep_what_differs(sample: Sample, stages: Sequence[StageMeasure], device: torch.device) -> bool:
    """Gives every block that computes something else after the forward a reason to be kept.

    False: there was no memory for it, and no block was tried. A planned step compares what recomputed blocks return.
    """
    if all(stage.kind != "block" or stage.keep_reason for stage in stages):
        return True
    try:
        differing = _differences(sample, stages, device, frozenset())
        names = frozenset(stages[number - 1].name for number in differing)
        still = _differences(sample, stages, device, names) if names else {}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    kept = {stages[number - 1].name for number in still}
    for number, stage in enumerate(stages, 1):
        if number in still or (number in differing and stage.name in kept):
            stage.keep_reason = still.get(number) or differing[number]
        elif stage.kind == "block" and stage.name in names and not stage.keep_reason:
            stage.brings_back = True
    return True


def _differences(
    sample: Sample, stages: Sequence[StageMeasure], device: torch.device, brought_back: Set[str]
) -> Mapping[int, str]:
    """Reasons to keep blocks, by the number of the stage. brought_back: blocks that find attributes and hooks as they
    were in the forward.
    """
    runs: list[Run] = []
    refs = [StageRef(stage.kind, stage.name, stage.call) for stage in stages]
    executor = Executor(
        sample.model,
        refs,
        _recompute_each(stages),
        determinism_check="values",
        in_eval=True,
        forward_returned=runs.append,
        brought_back=brought_back,
    )
    errors: dict[int, Exception] = {}
    try:
        executor.attach()
        results = sample.forward()
        if runs:
            _in_backward(lambda: errors.update(runs.pop().rehearse()), device)
        del results
    except Unsupported:
        return {}  # the model cannot follow any plan, which `apply` or the first step says, and why
    finally:
        executor.detach()
    return {stage: _reason(error) for stage, error in errors.items()}


def _reason(error: Exception) -> str:
    """Why to keep a block whose recomputation after the forward has ended in an error."""
    if isinstance(error, RecomputationError) and not error.difference:
        return f"cannot be recomputed once the model's forward has returned: {error}"
    if isinstance(error, RecomputationError):
        what = f"computes something else once the model's forward has returned ({error.difference})"
    else:
        what = f"fails when it is recomputed once the model's forward has returned ({type(error).__name__}: {error})"
    return f"{what}, so it reads state that is set for the forward alone; pass that as an argument"


def _recompute_each(stages: Sequence[StageMeasure]) -> list[tuple[Any, ...]]:
    """The operations of a schedule that keeps the input of every block that is not always kept."""
    count = len(stages)
    again = [stage.kind == "block" and not stage.keep_reason for stage in stages]
    ops: list[tuple[Any, ...]] = [
        (FORWARD_KEEP, number) if recomputed else (FORWARD_SAVE, number) for number, recomputed in enumerate(again, 1)
    ]
    for number in range(count, 0, -1):
        if again[number - 1]:
            ops += [(DROP, OUTPUT, number)] if number == count else []
            ops.append((FORWARD_SAVE, number))
        ops.append((BACKWARD, number))
    return ops


def _in_backward(work: Callable[[], Any], device: torch.device) -> None:
    """Calls a function as autograd's backward for a device would: in its thread, outside of autocast."""
    root = torch.zeros((), device=device, requires_grad=True)
    with torch.enable_grad():
        end = _Calling.apply(root, work)
    with isolated_block.as_in_backward(device):
        end.backward()


class _Calling(torch.autograd.Function):
    """Calls something in its backward."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, work: Callable[[], Any]) -> torch.Tensor:
        ctx.work = work
        return root.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        ctx.work()
        return None, None
