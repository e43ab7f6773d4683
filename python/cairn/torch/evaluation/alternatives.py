"""PyTorch's ways to run a training step in less memory, applied to the same model without changing it.

* Checkpointing every block: transformers' own switch if the model has it, else torch's `checkpoint` around each block,
  which is equivalent.
* `checkpoint_sequential`: torch's own, over the longest run of blocks that form a sequence. In a sequence each block
  gets the result of its predecessor, and all get the same other arguments. The call of the first block runs all of
  them, and the other blocks return their argument.
* torch.compile: its partitioner keeps a share of the tensors that it would save (`activation_memory_budget`). The
  backend "aot_eager" runs the partitioned graph with eager kernels, so that only the choice of saved tensors differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cairn
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ..base import _compat
from ..base.blocks import Block, intercepted, resolve
from ..base.layouts import saving_nothing
from ..base.stages import StageRef
from ..profiling.sample import Sample
from .comparison import Turn

EVERY_BLOCK, SEQUENTIAL, COMPILE = "every block", "checkpoint_sequential", "torch.compile"
ALTERNATIVES = (EVERY_BLOCK, SEQUENTIAL, COMPILE)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of torch.compile's activation memory budget


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A way to run the step: its setting, its schedule on whole blocks (None: unknown), and how to run it."""

    method: str
    turn: Turn
    segments: int | None = None
    share: float | None = None
    recomputed: Sequence[tuple[int, int]] | None = None  # first and last stages, from 1


def alternatives(
    sample: Sample, refs: Sequence[StageRef], wanted: Sequence[str]
) -> tuple[list[Alternative], dict[str, str]]:
    """The wanted ways of running a sample's step, and, by name, why one is left out."""
    numbers = [number for number, ref in enumerate(refs, 1) if ref.is_block]
    blocks = [resolve(sample.model, refs[number - 1].name) for number in numbers]
    ways: list[Alternative] = []
    left_out: dict[str, str] = {}
    if EVERY_BLOCK in wanted:
        each = [(number, number) for number in numbers]
        ways.append(Alternative(EVERY_BLOCK, _every_block(sample.model, blocks), recomputed=each))
    if SEQUENTIAL in wanted:
        run, reason = longest_sequence(sample, blocks)
        counts = range(2, len(blocks[run]) + 1)
        ways += [
            Alternative(SEQUENTIAL, _in_segments(sample.model, blocks[run], k), k, recomputed=segments(numbers[run], k))
            for k in counts
        ]
        if not counts:
            left_out[SEQUENTIAL] = reason
    if COMPILE in wanted:
        ways += [Alternative(COMPILE, _compiled(sample.model, share), share=share) for share in SHARES]
    return ways, left_out


# -- checkpointing every block -------------------------------------------------------------------------------


def _every_block(model: nn.Module, blocks: Sequence[Block]) -> Turn:
    for prefix in ("activation", "gradient"):  # the name that transformers gives it from version 5 on, and before
        if getattr(model, "supports_gradient_checkpointing", False) and hasattr(
            model, f"{prefix}_checkpointing_enable"
        ):
            return functools.partial(_enabled, model, f"{prefix}_checkpointing")
    return functools.partial(_checkpointed, model, blocks)


@contextlib.contextmanager
def _enabled(model: nn.Module, name: str) -> Iterator[nn.Module]:
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
    try:
        yield model
    finally:
        getattr(model, f"{name}_disable")()


@contextlib.contextmanager
def _checkpointed(model: nn.Module, blocks: Sequence[Block]) -> Iterator[nn.Module]:
    def run(block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    with intercepted(_unique(blocks), run):
        yield model


# -- checkpoint_sequential -----------------------------------------------------------------------------------


def segments(numbers: Sequence[int], count: int) -> list[tuple[int, int]]:
    """First and last of all segments but the last, which `checkpoint_sequential` does not recompute."""
    length = len(numbers) // count
    return [(numbers[i * length], numbers[(i + 1) * length - 1]) for i in range(count - 1)]


def longest_sequence(sample: Sample, blocks: Sequence[Block]) -> tuple[slice, str]:
    """The longest run of blocks that are a sequence, and why another block does not belong to it."""
    if len(_unique(blocks)) < len(blocks):
        return slice(0, 0), "a block runs several times"
    calls: list[_Call] = []

    def note(block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = function(*args, **kwargs)
        calls.append(_Call(block.name, args, kwargs, _value(output)))
        return output

    with intercepted(blocks, note), saving_nothing():  # runs without gradients are not intercepted
        sample.output()
    best, start, reason = slice(0, 0), 0, "there are not two blocks"
    for number, call in enumerate(calls):
        broken = "" if number == start else _breaks_sequence(calls[start], calls[number - 1], call)
        if broken:
            start, reason = number, broken
        if isinstance(call.value, torch.Tensor) and number + 1 - start > best.stop - best.start:
            best = slice(start, number + 1)
    return best, reason


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a block, and the tensor that it handed on, if that is all that it returned."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any


def _breaks_sequence(first: _Call, before: _Call, now: _Call) -> str:
    """Why a block's call does not go on with the sequence; empty if it does."""
    if not isinstance(before.value, torch.Tensor):
        return f"{before.name} returns more than one tensor"
    if not now.args or now.args[0] is not before.value:
        return f"{now.name} is not called with what {before.name} returned"
    if not _same((first.args[1:], first.kwargs), (now.args[1:], now.kwargs)):
        return f"{now.name} is called with other arguments than {first.name}"
    return ""


def _value(output: Any) -> Any:
    """The tensor that a block returns, if it returns nothing else."""
    return output[0] if isinstance(output, tuple) and len(output) == 1 else output


def _same(one: Any, other: Any) -> bool:
    """Whether arguments are the same objects, or equal ones that are no tensors."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, (bool, int, float, str)) and one == other


def _in_segments(model: nn.Module, blocks: Sequence[Block], count: int) -> Turn:
    @contextlib.contextmanager
    def turn() -> Iterator[nn.Module]:
        with intercepted(blocks, _Segmented(blocks, count)):
            yield model

    return turn


class _Segmented:
    """Runs all blocks by `checkpoint_sequential` when the first of them is called."""

    def __init__(self, blocks: Sequence[Block], count: int) -> None:
        self._blocks, self._count = blocks, count
        self._is_inside = False
        self._in_tuple = False  # whether the block that ran last returned its tensor so

    def __call__(self, block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._is_inside:
            return function(*args, **kwargs)
        value = args[0]
        if block is self._blocks[0]:
            functions = [functools.partial(self._run, each, args[1:], kwargs) for each in self._blocks]
            value = checkpoint_sequential(functions, self._count, value, use_reentrant=False)
        return (value,) if self._in_tuple else value

    def _run(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any], value: torch.Tensor) -> torch.Tensor:
        outer, self._is_inside = self._is_inside, True
        try:
            output: Any = value
            for module in block.modules:
                output = module(output, *args, **kwargs)
        finally:
            self._is_inside = outer
        self._in_tuple = isinstance(output, tuple)
        return _value(output)


def _unique(blocks: Sequence[Block]) -> list[Block]:
    """Each block once, however often it runs."""
    return list({id(block.modules[0]): block for block in blocks}.values())


# -- torch.compile -------------------------------------------------------------------------------------------


def _compiled(model: nn.Module, share: float) -> Turn:
    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(model, backend=_compat.own_backend("aot_eager"), dynamic=False)

    @contextlib.contextmanager
    def turn() -> Iterator[Callable[..., Any]]:
        with _compat.activation_memory_budget(share):
            yield compiled()

    return turn


# -- what the simulator says of them -------------------------------------------------------------------------


def predicted(problem: cairn.Chain, recomputed: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Peak and time of a step in which runs of stages, from first to last, are recomputed each as a whole.

    None where the chain does not allow that: a stage of them must be kept.
    """
    schedule = cairn.Schedule.from_ops(problem, _recomputing_ops(len(problem.stages), dict(recomputed)))
    replay = cairn.simulate(problem, schedule, None)
    if replay.peak_bytes is None or replay.makespan_ns is None:
        return None
    return replay.peak_bytes, replay.makespan_ns


def _recomputing_ops(stages: int, last_of: dict[int, int]) -> list[cairn.Op]:
    forward: list[cairn.Op] = []
    backward: list[cairn.Op] = []
    stage = 1
    while stage <= stages:
        last = last_of.get(stage, stage)
        inside = range(stage, last + 1)
        saves: list[cairn.Op] = [("forward_save", i, 0) for i in inside]
        if stage in last_of:
            forward += [("forward_keep", stage), *(("forward_drop", i) for i in inside[1:])]
            backward = [*saves, *(("backward", i) for i in reversed(inside)), *backward]
        else:
            forward += saves
            backward = [("backward", stage), *backward]
        stage = last + 1
    return forward + backward
