"""The memory of a block's run with an option: what it saves, and what its backward takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base import _compat, memory
from ..base.stage_measure import StageMeasure
from ..base.tree import Tree
from ..rerun_state.rng_and_autocast import RandomState
from ..selective.recompute import Recipe, TensorRecompute
from . import isolated_block
from .block_meter import BlockMeter, ParameterGradients, parameters_of
from .option_proofs import BlockInputs
from .option_runs import BlockRuns


class OptionMeter:
    """One option's forward and backward, alone, under a meter.

    saved: makes the pack hooks under which it runs.
    """

    def __init__(self, run: BlockRuns, saved: Callable[[], isolated_block.MeasuringHooks]) -> None:
        run.rewind()
        self.stage = StageMeasure(run.block.name, "block")
        meter = memory.meter_for(run.device)
        static = memory.storages(t for t in (*run.parameters(), *run.buffers()) if t is not None)
        created = ParameterGradients(meter)
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: created.note(p.grad))
            for p in parameters_of(run.block)
            if p.requires_grad and p.is_leaf and id(p) not in run.shared
        ]
        block_meter = BlockMeter(meter, self.stage, run.block, run.device, run.arriving, static)
        try:
            with meter:
                block_meter.run_saving(run.function, run.arguments, run.pending, created, saved)
        finally:
            for handle in handles:
                handle.remove()
        block_meter.read_saving()


def following(run: BlockRuns, recipe: Recipe) -> Callable[[], isolated_block.MeasuringHooks]:
    """The pack hooks of an option of selective recomputation."""
    return lambda: _OptionHooks(run, recipe)


class _OptionHooks:
    """Pack hooks that keep and recompute as the executor does."""

    def __init__(self, run: BlockRuns, recipe: Recipe) -> None:
        self.count = 0
        self.storages: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.stays = False
        self._run, self._recipe, self._tensor_recompute = run, recipe, TensorRecompute(recipe)
        self._leaves: list[torch.Tensor] = []
        self._stand_ins: list[Any] = []  # for random states, which no operator makes
        if 0 in recipe.states:
            self._take_state()

    def _take_state(self) -> None:
        state = RandomState(self._run.devices)
        self._stand_ins.append(memory.stand_in(state.cpu_bytes))
        self._tensor_recompute.take_state(self.count, state)

    def recording(self) -> Any:
        return _compat.saved_tensors_hooks(self._pack, self._unpack)

    def given(self, args: Any, kwargs: Any) -> None:
        """The arguments that the block is called with."""
        self._leaves = [t.detach() for t in Tree.of((args, kwargs)).leaves]

    def _pack(self, tensor: torch.Tensor) -> Any:
        index = self.count
        self.count += 1
        keep = self._tensor_recompute.saved(index, tensor)
        if self.count in self._recipe.states:
            self._take_state()
        held = tensor if keep else self._tensor_recompute.held().get(index)
        if held is not None and held.device == self._run.device:
            self.sizes.update(memory.storages([held]))
            self.stays |= not memory.can_be_offloaded(held)
        return index, tensor.detach() if keep else None

    def _unpack(self, held: tuple[int, torch.Tensor | None]) -> torch.Tensor:
        index, tensor = held
        if tensor is not None:
            return tensor
        recomputed = self._tensor_recompute.tensor(
            index, BlockInputs(self._leaves, self._run.parameters(), self._run.buffers())
        )
        assert recomputed is not None
        return recomputed
