"""Measures the options of compiled blocks: each runs forward and backward alone, once for each kind of block.

The options of a block are timed in turns, so that other load of the machine affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base import clock
from ..base.blocks import Block
from ..base.ranks import Ranks, several
from ..base.stage_measure import StageMeasure
from ..profiling import isolated_block
from ..profiling.block_meter import parameters_of
from ..profiling.option_measure import OptionPass, moved, option_relative_to, pareto
from ..profiling.option_meter import OptionMeter
from ..profiling.option_proofs import OptionTimes
from ..profiling.option_runs import BlockRuns
from ..profiling.side_outputs import SideOutputs
from .region_code import RECORDING, RegionGraph
from .region_levels import EVERYTHING, level_of, level_text, useful_levels
from .regions import Region, Regions

#: Limits of the timing of one kind of block: nanoseconds in all, and the most and fewest rounds.
MAX_NS, MAX_ROUNDS, MIN_ROUNDS = 1_000_000_000, 12, 3


class RegionPass(OptionPass):
    """One forward of the model in which one block of each kind is measured with all of its options."""

    def __init__(self, regions: Regions, *step: Any) -> None:
        super().__init__(*step)
        self._regions = regions
        self._kinds: dict[Any, int] = {}
        self._curves: dict[int, _Curve] = {}

    def _measure_kind(
        self,
        stage: StageMeasure,
        block: Block,
        call: int,
        function: Callable[..., Any],
        arguments: isolated_block.Arguments,
    ) -> None:
        region = self._regions.get(block.name)
        if region is None:
            stage.closed = "is not compiled"
            return
        arriving = self._measured.arriving.get((block.name, call), ())
        run = BlockRuns(block, function, arguments, self._device, arriving)
        own_kind = self._kinds.setdefault((stage.signature(), id(region.code)), len(self._kinds))
        kind = self._sample.ranks.of_first(own_kind)  # measured bytes may differ a little from rank to rank
        if kind not in self._curves:
            run.pending = self._parameter_users.with_pending_gradients(block, call)
            run.shared = {id(p) for p in parameters_of(block) if self._parameter_users.is_shared(p)}
            with run.rewound():
                self._curves[kind] = _Curve(run, stage, region, self._sample.ranks)
        self._curves[kind].describe(stage)


class _Curve:
    """The measured options of one kind of block.

    ranks: those that share the model. They all measure the levels of the first: a run of a sharded block waits for the
    same run on the other ranks.
    """

    def __init__(self, run: BlockRuns, stage: StageMeasure, region: Region, ranks: Ranks) -> None:
        self._stage, backend = stage, region.code.backend
        graphs = _graphs(run, region)
        curves = [graph.curve for graph in graphs if graph.curve is not None]
        texts = list(map(level_text, useful_levels(curves) if curves else [EVERYTHING]))
        levels = list(map(level_of, ranks.of_first(texts)))
        numbers = [backend.number_of(level) for level in levels]
        all_times = _times(run, region, numbers)
        metered = []
        for number in numbers:
            region.option = number
            metered.append(OptionMeter(run, lambda: isolated_block.SavedTensors(run.device)).stage)
        region.option = 0
        measured = []
        for level, number, option_stage, option_times in zip(levels, numbers, metered, all_times, strict=True):
            repeats = f"{sum(graph.recomputed.get(number, 0) for graph in graphs)} operators"
            measured.append(
                option_relative_to(stage, metered[0], option_stage, option_times, level_text(level), repeats)
            )
        self.options = pareto(measured)

    def describe(self, stage: StageMeasure) -> None:
        """Store the measured options in a stage."""
        if len(self.options) < 2:
            stage.closed = "has no option that takes less"
            return
        stage.digest = "compiled"
        stage.options = [moved(option, self._stage, stage) for option in self.options]


def _graphs(run: BlockRuns, region: Region) -> list[RegionGraph]:
    """The captured graphs that a block runs."""
    recorded, region.option = region.code.backend.recorded, RECORDING
    recorded.clear()
    try:
        _timed(run)
        return list(dict.fromkeys(recorded))
    finally:
        recorded.clear()
        region.option = 0


def _times(run: BlockRuns, region: Region, numbers: list[int]) -> list[OptionTimes]:
    """The extra time of forward and backward of each option over the first, at least 0.

    The least of several times counts, since other programs can only add to it.
    """
    rounds: list[list[tuple[int, int]]] = []
    start_ns = clock.read()
    max_rounds = MIN_ROUNDS + 1 if several() else MAX_ROUNDS  # as many on each: they may wait for each other
    while len(rounds) < max_rounds and (len(rounds) <= MIN_ROUNDS or clock.read() - start_ns < MAX_NS):
        rounds.append([])
        for number in numbers:
            region.option = number
            rounds[-1].append(_timed(run))
        if len(rounds) == 1:  # the first round compiled them
            start_ns = clock.read()
    least_ns = [tuple(min(now[index][part] for now in rounds[1:]) for part in (0, 1)) for index in range(len(numbers))]
    return [
        OptionTimes(max(0, forward - least_ns[0][0]), max(0, backward - least_ns[0][1]))
        for forward, backward in least_ns
    ]


def _timed(run: BlockRuns) -> tuple[int, int]:
    """The times of forward and backward of one run, in ns."""
    run.rewind()
    side_outputs = SideOutputs(run.block.all_modules())
    args, kwargs = run.arguments.source(isolated_block.Hooks())
    start_ns = clock.now(run.device)
    result = run.arguments.run(run.function, args, kwargs)
    forward_ns = clock.now(run.device) - start_ns
    del args, kwargs
    roots, grads = side_outputs.root(result, run.arriving)
    del result
    start_ns = clock.read()
    run.backward(roots, grads)
    return forward_ns, clock.now(run.device) - start_ns
