"""Runs of a block that the plan does not have: more calls in a step than in the profile, or calls in another order.

Such a run keeps only its inputs. When its backward reads the first saved tensor, the whole block is recomputed from the
state recorded in the forward, and all its holders are filled. Autograd frees them as the block's backward goes on. The
position in the schedule's list does not change.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base.errors import RecomputationError, Unsupported
from ..base.layouts import ByteView
from ..rerun_state.attributes import Attributes
from ..rerun_state.attributes_and_hooks import AttributesAndHooks
from ..rerun_state.module_state import BlockState
from ..schedule.program import FORWARD_SAVE, Op
from ..selective.pack_hooks import FirstRunPack, active
from ..selective.saved_tensors import Holder, Lease, View
from .block_records import BlockRun, RecomputingStep


class UnplannedRun(Lease):
    """One run of a block that the plan does not have. It owns all that its recomputation needs."""

    __slots__ = ("_block", "_is_running")
    run: RecomputingStep

    def __init__(self, run: RecomputingStep, stage: int, block: BlockRun) -> None:
        super().__init__(run, stage)
        self._block, self._is_running = block, True

    def forward(self, state: BlockState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the block and returns its output."""
        block, before = self._block, state.before()
        if state.fills or state.restores_attributes:
            block.attributes_before = Attributes(state.modules())
        block.fingerprints = self.run.new_fingerprints()
        first = block.first = FirstRunPack(
            self, block.tree.leaves, keep=False, digest=None, fingerprints=block.fingerprints
        )
        with active(first):
            output = block.forward(*args, **kwargs)
        block.refuse_written(self.run.name(self.stage), first.versions)
        block.state = state.after(before)
        if state.restores_attributes:
            block.attributes_after = AttributesAndHooks(state.modules())
        self.run.record_returned(block, output)
        first.close()
        block.tree.leaves, block.tree.opaque = [], []
        self._is_running = False
        return output

    def missing(self, holder: Holder) -> None:
        """Recompute the block, because its backward reads a saved tensor."""
        name = self.run.name(self.stage)
        if self._is_running:
            raise Unsupported(f"'{name}' computes gradients inside its own forward; keep this block")
        self.run.recompute_block(Op(FORWARD_SAVE, self.stage), self._block)
        if holder.is_empty:
            raise RecomputationError(f"a tensor that '{name}' saved is missing after its recomputation")

    def saved_argument(self, index: int, view: View | ByteView | None) -> torch.Tensor:
        """A tensor that the block saved and that is one of its arguments, or a view of one."""
        return self.run.view_of(self.run.find(self.stage, self._block, index), view)
