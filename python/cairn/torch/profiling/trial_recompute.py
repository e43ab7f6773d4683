"""Recomputes each block once after the sample step's forward has returned, as plans will do it.

Blocks are measured while the model's forward runs. State that a model sets only during its forward (a thread-local
stack, a global, a class attribute, hooks that it removes) exists at that time, but no longer when a plan recomputes a
block in the backward. So one more forward runs under a plan that recomputes every block. After it, each block is
recomputed from the state that the executor recorded, in the thread that runs backwards. The tensors that it saves and
returns must be equal, value by value. If they are not, the block is recomputed once more with its attributes and the
hooks on its submodules restored. If that helps, plans restore them, too; else the block is kept.

This needs memory for the inputs of all blocks, for one running block, and for tensors saved outside of blocks.
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
    """Give a reason to be kept to every block that computes other values after the forward.

    Returns False if there was not enough memory, so that no block was tried; a planned step then compares the results
    of recomputed blocks.
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
            stage.restores_attributes = True
    return True


def _differences(
    sample: Sample, stages: Sequence[StageMeasure], device: torch.device, restored_blocks: Set[str]
) -> Mapping[int, str]:
    """Reasons to keep blocks, by the number of the stage.

    restored_blocks: blocks whose attributes and hooks are restored as they were in the forward.
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
        restored_blocks=restored_blocks,
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
    """The reason to keep a block whose recomputation after the forward raised an error."""
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
    """Call a function as autograd's backward for a device would: in its thread, outside of autocast."""
    root = torch.zeros((), device=device, requires_grad=True)
    with torch.enable_grad():
        end = _Calling.apply(root, work)
    with isolated_block.as_in_backward(device):
        end.backward()


class _Calling(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, work: Callable[[], Any]) -> torch.Tensor:
        ctx.work = work
        return root.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        ctx.work()
        return None, None
