"""Which options of a block give the same tensors when they are recomputed, bit for bit, and what that takes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import torch

from ..base import _compat, clock
from ..base.stage_measure import KEEP
from ..base.tensor_fingerprints import fingerprint
from ..base.tree import Tree
from ..rerun_state.rng_and_autocast import RandomState, no_autocast
from ..selective.block_graph import BlockGraph
from ..selective.block_options import candidates
from ..selective.recompute import Recipe, TensorRecompute, compile_recipe
from . import isolated_block
from .option_runs import BlockRuns

PROOFS = 3  # recomputations of each choice; the median of their times counts
LONG_NS = 500_000_000  # what takes longer is done and timed once
LEAST_BYTES = 4096  # an option that saves less is not worth having
ATTEMPTS = 8  # at choices without the operations that turned out not to give the same again


@dataclasses.dataclass
class OptionTimes:
    """Times of an option beyond those of keeping everything."""

    saving_ns: int = 0
    recomputing_ns: int = 0


class _NotReproduced(Exception):
    """A tensor did not come out as it was saved."""

    def __init__(self, pack: int) -> None:
        super().__init__(pack)
        self.pack = pack


class Proofs:
    """Recomputes what choices do not keep from the saved tensors of one run, and compares."""

    def __init__(self, run: BlockRuns, graph: BlockGraph, read_order: Sequence[int], part_bytes: int) -> None:
        self._run, self._graph, self._read_order, self._part_bytes = run, graph, read_order, part_bytes

    def choices(self) -> list[tuple[Recipe, OptionTimes]]:
        """The choices with their times; the first keeps everything."""
        for _ in range(ATTEMPTS):
            try:
                return self._try()
            except _NotReproduced as error:
                self._rule_out(error.pack)
        return []

    def _rule_out(self, pack: int) -> None:
        """The operation that made a tensor, or the ones before it, must not be replayed."""
        use = self._graph.packs[pack].use
        assert use is not None
        operation = self._graph.operations[self._graph.values[use.value].operation]
        operation.forbid("does not give the same result again")

    def _try(self) -> list[tuple[Recipe, OptionTimes]]:
        self._run.rewind()
        saved: list[torch.Tensor] = []
        states = [RandomState(self._run.devices)]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            states.append(RandomState(self._run.devices))
            return saved[-1]

        args, kwargs = self._run.arguments.source(isolated_block.Hooks())
        where = BlockInputs(Tree.of((args, kwargs)).leaves, self._run.parameters(), self._run.buffers())
        with _compat.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._run.arguments.run(self._run.function, args, kwargs)
        torch.clear_autocast_cache()
        if len(saved) != len(self._graph.packs):
            return []
        choices = candidates(self._graph, self._part_bytes)
        recipes = [compile_recipe(self._graph, choice.decisions, self._read_order) for choice in choices]
        return [(recipe, self._proved(recipe, saved, states, where)) for recipe in recipes]

    def _proved(
        self, recipe: Recipe, saved: Sequence[torch.Tensor], states: Sequence[RandomState], where: BlockInputs
    ) -> OptionTimes:
        took: list[OptionTimes] = []
        if set(recipe.decisions) == {KEEP}:
            return OptionTimes()
        for _ in range(PROOFS):
            recompute, now = TensorRecompute(recipe), OptionTimes()
            for index, tensor in enumerate(saved):
                began = clock.now(self._run.device)
                recompute.saved(index, tensor)
                if index + 1 in recipe.states:
                    RandomState(self._run.devices)
                now.saving_ns += clock.now(self._run.device) - began
            for count in recipe.states:
                recompute.take_state(count, states[count])
            # as in a backward, where some operations (oneDNN's LSTM) leave out what only a backward would read
            with no_autocast((self._run.device.type,)), torch.no_grad():
                self._recompute_all(recompute, saved, where, now)
            took.append(now)
            if now.recomputing_ns > LONG_NS or _compat.is_faked():
                break
        return OptionTimes(
            int(statistics.median(t.saving_ns for t in took)), int(statistics.median(t.recomputing_ns for t in took))
        )

    def _recompute_all(
        self, recompute: TensorRecompute, saved: Sequence[torch.Tensor], where: BlockInputs, took: OptionTimes
    ) -> None:
        for index in recompute.recipe.order:
            began = clock.now(self._run.device)
            again = recompute.tensor(index, where)
            took.recomputing_ns += clock.now(self._run.device) - began
            if again is None or not _same(again, saved[index]):
                raise _NotReproduced(index)
            del again


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit, in the same layout."""
    if first.stride() != second.stride() or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first, second) or fingerprint(first) == fingerprint(second)


@dataclasses.dataclass
class BlockInputs:
    """The inputs of a block, while its options are proved."""

    arguments: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor | None]

    def argument(self, index: int) -> torch.Tensor:
        return self.arguments[index].detach()

    def parameter(self, index: int) -> torch.Tensor:
        parameter = self.parameters[index]
        assert parameter is not None
        return parameter

    def buffer(self, index: int) -> torch.Tensor:
        buffer = self.buffers[index]
        assert buffer is not None
        return buffer
