"""The overhead of executing a schedule: hooks, holders, random states, comparisons.

It is measured once per process, in processor time, on small layers with the operations of real blocks: normalisation,
matrix products, dropout. Blocks without kernels would show too little: after a kernel, the interpreter's code and data
are no longer in the nearest cache, and the same bookkeeping takes several times as long. Plain and planned steps take
turns. The extra time of a planned step is divided among blocks and their saved tensors, by two sizes of layers. On CUDA
the overhead occurs on the host while the device works, and is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory
from ..base.blocks import Block
from ..base.layouts import saving_nothing
from ..base.stage_measure import KEEP
from ..base.stages import BLOCK, StageRef
from ..base.tree import Tree
from ..rerun_state.rng_and_autocast import RandomState, no_autocast
from ..runtime.executor import Executor
from ..selective.block_graph import BlockGraph
from ..selective.block_options import choices
from ..selective.block_runs import SelectiveOptions
from ..selective.graph_recorder import BlockRecorder
from ..selective.recompute import Recipe, TensorRecompute, compile_recipe

BLOCKS = 4
ROUNDS = 15  # the median counts
SIZES = 1, 3  # branches of the layers, from which follows what a block costs and what a saved tensor
BUFFERS = 16
WIDTH, ROWS = 32, 16


class _Layer(nn.Module):
    """Branches of a few operations each, as those of a transformer; buffers that it does not use."""

    def __init__(self, branches: int, buffers: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(branches))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(branches))
        self.downs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(branches))
        self.dropout = nn.Dropout(0.1)
        for index in range(buffers):
            self.register_buffer(f"buffer{index}", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            y = up(norm(x))
            x = x + self.dropout(down(0.5 * y * (1 + torch.tanh(y))))
        return x


@dataclasses.dataclass(frozen=True)
class Cost:
    """Overhead in nanoseconds: of recomputing a whole block once, and of selective recomputation."""

    recompute_overhead_ns: float  # a block
    recompute_overhead_saved_ns: float  # and each tensor that it saves
    buffer_ns: float  # and each buffer that it has
    part_ns: float
    part_saved_ns: float
    recomputed_ns: float  # and each tensor that is recomputed, beside the operations

    def of(self, block: Block, saved_count: int) -> int:
        """The overhead of recomputing a block that saves `saved_count` tensors."""
        buffers = sum(len(part._buffers) for part in block.all_modules())
        return round(
            self.recompute_overhead_ns + self.recompute_overhead_saved_ns * saved_count + self.buffer_ns * buffers
        )

    def of_part(self, saved_count: int) -> int:
        """The overhead of selective recomputation in a block's forward."""
        return round(self.part_ns + self.part_saved_ns * saved_count)

    def of_recomputing(self, count: int) -> int:
        """The overhead of recomputing `count` tensors in a backward."""
        return round(self.recomputed_ns * count)


def counts(device: torch.device) -> bool:
    """Whether the overhead adds to a step's time: not on an accelerator, nor on fake tensors."""
    return device.type == "cpu" and not _compat.is_faked()


@functools.cache
def cost() -> Cost:
    """Measure the overhead; takes about a second, the first time."""
    with torch.enable_grad(), no_autocast(("cpu",)), torch.random.fork_rng(devices=[]), _one_thread():
        small, large = (_Measured(lambda size=size: _Layer(size)) for size in SIZES)  # type: ignore[misc]
        buffered = _Measured(lambda: _Layer(SIZES[0], BUFFERS))
    recompute_overhead_ns, recompute_overhead_saved_ns = _line(small, large, "recompute_overhead_ns")
    part_ns, part_saved_ns = _line(small, large, "part_ns")
    buffer_ns = max(0.0, buffered.recompute_overhead_ns - small.recompute_overhead_ns) / BUFFERS
    return Cost(
        recompute_overhead_ns, recompute_overhead_saved_ns, buffer_ns, part_ns, part_saved_ns, large.recomputed_ns
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: bookkeeping has only one, and kernels this small would wait for others that wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _line(small: _Measured, large: _Measured, name: str) -> tuple[float, float]:
    """The extra time of a block, and of each saved tensor."""
    low, high = getattr(small, name), getattr(large, name)
    each = max(0.0, high - low) / (large.saved_count - small.saved_count)
    return max(0.0, low - each * small.saved_count), each


class _Measured:
    """The extra time of planned steps over a plain one, per block of one kind of layer."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        with torch.device("cpu"):  # whose being in force would take its own time in every step
            self._model = nn.Sequential(*(make() for _ in range(BLOCKS)))
            self._x = torch.randn(ROWS, WIDTH, requires_grad=True)  # so that the first layer saves what the others do
        alone = _Alone(self._model[0], self._x)
        graph = alone.graph
        self.saved_count = len(graph.packs)
        kept, dropped = KEEP * self.saved_count, choices(graph)[-1].decisions
        draws = tuple(sorted({op.packs_before for op in graph.operations if op.random}))
        inside = SelectiveOptions(graph.digest(), tuple(alone.asked), draws, (kept, kept, dropped))
        taken = self._medians(
            {"again": self._again(), "kept": self._in_part(inside, 1), "dropped": self._in_part(inside, 2)}
        )
        plain = taken["plain"]
        self.recompute_overhead_ns = max(0.0, taken["again"] - plain - taken["forward"]) / BLOCKS
        self.part_ns = max(0.0, taken["kept"] - plain) / BLOCKS
        recomputing = (taken["dropped"] - taken["kept"]) / BLOCKS - alone.recomputing_ns(dropped)
        self.recomputed_ns = max(0.0, recomputing) / sum(letter != KEEP for letter in dropped)

    def _again(self) -> Executor:
        numbers = range(1, BLOCKS + 1)
        ops: list[tuple[Any, ...]] = [("forward_keep", s) for s in numbers]
        ops += [("drop", "output", BLOCKS)]
        ops += [op for s in reversed(numbers) for op in (("forward_save", s), ("backward", s))]
        return Executor(self._model, self._stages(), ops)

    def _in_part(self, options: SelectiveOptions, option: int) -> Executor:
        numbers = range(1, BLOCKS + 1)
        ops: list[tuple[Any, ...]] = [("forward_save", s, option) for s in numbers]
        ops += [("backward", s) for s in reversed(numbers)]
        return Executor(self._model, self._stages(), ops, selective=dict.fromkeys(numbers, options))

    def _stages(self) -> list[StageRef]:
        return [StageRef(BLOCK, str(index)) for index in range(BLOCKS)]

    def _medians(self, executors: dict[str, Executor]) -> dict[str, float]:
        """Nanoseconds of a step plainly, of a forward that saves nothing, and of planned steps, in turns."""
        taken: dict[str, list[int]] = {name: [] for name in ("plain", "forward", *executors)}
        with memory.not_collecting():
            for _ in range(ROUNDS + 2):  # two steps warm up
                taken["plain"].append(_time(self._step))
                taken["forward"].append(_time(self._forward))
                for name, executor in executors.items():
                    executor.attach()
                    taken[name].append(_time(self._step))
                    executor.detach()
        return {name: statistics.median(times[2:]) for name, times in taken.items()}

    def _step(self) -> None:
        self._model(self._x).sum().backward()

    def _forward(self) -> None:
        with saving_nothing():
            self._model(self._x)


def _time(run: Callable[[], None]) -> int:
    began = time.thread_time_ns()
    run()
    return time.thread_time_ns() - began


class _Alone:
    """A layer run alone: its operations, the order of reads of its saved tensors, and their recomputation."""

    def __init__(self, layer: nn.Module, x: torch.Tensor) -> None:
        self.asked: list[int] = []
        self._saved: list[torch.Tensor] = []
        self._states = [RandomState(())]
        self._x, self._parameters = x, list(layer.parameters())
        recorder = BlockRecorder(Tree.of(((x,), {})).leaves, self._parameters, [], list(layer.modules()))

        def pack(tensor: torch.Tensor) -> int:
            with recorder.paused():
                recorder.pack(tensor)
                self._saved.append(tensor.detach())
                self._states.append(RandomState(()))
            return len(self._saved) - 1

        def unpack(index: int) -> torch.Tensor:
            self.asked.append(index)
            return self._saved[index]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), recorder:
            output = layer(x)
        self.graph: BlockGraph = recorder.graph(output)
        output.sum().backward()

    def recomputing_ns(self, decisions: str) -> float:
        """The time of recomputing, measured as for the options of a model that is profiled."""
        recipe = compile_recipe(self.graph, decisions, self.asked)
        return statistics.median(_time(lambda: self._tensor_recompute(recipe)) for _ in range(ROUNDS))

    def _tensor_recompute(self, recipe: Recipe) -> None:
        recompute = TensorRecompute(recipe)
        for index, tensor in enumerate(self._saved):
            recompute.saved(index, tensor)
        for count in recipe.states:
            recompute.take_state(count, self._states[count])
        for index in recipe.order:
            recompute.tensor(index, self)

    def argument(self, index: int) -> torch.Tensor:
        return self._x

    def parameter(self, index: int) -> torch.Tensor:
        return self._parameters[index]

    def buffer(self, index: int) -> torch.Tensor:
        raise AssertionError(f"the layer does not read its buffer {index}")
