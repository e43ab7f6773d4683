"""What the executor's tests share: valid schedules of every kind, and steps compared bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cairn
import torch
from cairn.torch.base import memory
from cairn.torch.base.stages import BLOCK, OUTSIDE, StageRef
from cairn.torch.runtime.executor import Executor
from torch import distributed, nn

Op = tuple[Any, ...]


def save(stage: int) -> Op:
    return ("forward_save", stage, 0)


def keep(stage: int) -> Op:
    return ("forward_keep", stage)


def drop_input(stage: int) -> Op:
    return ("forward_drop", stage)


def backward(stage: int) -> Op:
    return ("backward", stage)


def drop(value: str, stage: int) -> Op:
    return ("drop", value, stage)


def blocks(*names: str) -> list[StageRef]:
    """Stages of blocks; a name that comes again is a further call."""
    return [StageRef(BLOCK, name, names[:i].count(name)) for i, name in enumerate(names)]


def outside(name: str) -> StageRef:
    return StageRef(OUTSIDE, name)


# -- schedules -----------------------------------------------------------------------------------------------


def store_all(stages: Sequence[StageRef]) -> list[Op]:
    n = len(stages)
    return [save(s) for s in range(1, n + 1)] + [backward(s) for s in range(n, 0, -1)]


def every_block(stages: Sequence[StageRef]) -> list[Op]:
    """Each block's input is kept, and the block is recomputed in the backward."""
    n = len(stages)
    ops = [keep(s) if stages[s - 1].is_block else save(s) for s in range(1, n + 1)]
    for stage in range(n, 0, -1):
        if stages[stage - 1].is_block:
            ops += [drop("output", stage)] if stage == n else []
            ops.append(save(stage))
        ops.append(backward(stage))
    return ops


def from_input(stages: Sequence[StageRef]) -> list[Op]:
    """As little as possible is kept: every backward runs the blocks again from the last value that must be there."""
    return _Persistent(stages, lambda first, last: last).between(1, len(stages))


def persistent(stages: Sequence[StageRef], seed: int) -> list[Op]:
    """A random schedule that never drops what it stores before it was used."""
    choose = random.Random(seed)

    def checkpoint(first: int, last: int) -> int:
        return first if choose.random() < 0.3 else choose.randint(first + 1, last)

    return _Persistent(stages, checkpoint).between(1, len(stages))


class _Persistent:
    def __init__(self, stages: Sequence[StageRef], checkpoint: Callable[[int, int], int]) -> None:
        self._fixed = [s for s, ref in enumerate(stages, 1) if not ref.is_block]
        self._checkpoint = checkpoint

    def between(self, first: int, last: int) -> list[Op]:
        """From the input of `first` to its gradient, given the gradient of the output of `last`."""
        if first == last:
            return [save(first), backward(first)]
        fixed = min((s for s in self._fixed if first <= s <= last), default=last)
        cut = first if fixed == first else min(self._checkpoint(first, last), fixed)
        if cut == first:
            return [save(first), *self.between(first + 1, last), backward(first)]
        sweep = [keep(first)] + [drop_input(s) for s in range(first + 1, cut)]
        return sweep + self.between(cut, last) + self.between(first, cut - 1)


def wild(stages: Sequence[StageRef], seed: int) -> list[Op]:
    """A random valid schedule of no particular kind: early drops, several copies, needless recomputation."""
    return _Wild(stages, random.Random(seed)).ops


class _Wild:
    def __init__(self, stages: Sequence[StageRef], choose: random.Random) -> None:
        self._stages, self._random = stages, choose
        self._there: set[tuple[str, int]] = set()
        self.ops: list[Op] = []
        n = len(stages)
        for stage in range(1, n + 1):
            self._require_input(stage)
            self._forward(stage, first=True)
            self._disturb(stage)
        for stage in range(n, 0, -1):
            if ("saved", stage) not in self._there:
                self._require_input(stage)
                self._emit_forward(save(stage))
            self._require_input(stage)
            self._backward(stage)
            self._disturb(stage - 1)

    def _has_output(self, stage: int) -> bool:
        return stage == 0 or ("output", stage) in self._there or ("saved", stage) in self._there

    def _require_input(self, stage: int) -> None:
        if not self._has_output(stage - 1):
            self._require_input(stage - 1)
            self._forward(stage - 1)

    def _forward(self, stage: int, first: bool = False) -> None:
        kinds = [save(stage)]
        if self._stages[stage - 1].is_block:
            kinds.append(keep(stage))
            if self._may_remove("output", stage - 1):
                kinds.append(drop_input(stage))
        self._emit_forward(self._random.choice(kinds))

    def _emit_forward(self, op: Op) -> None:
        kind, stage = op[0], op[1]
        self._there.add(("saved" if kind == "forward_save" else "output", stage))
        if kind == "forward_drop":
            self._there.remove(("output", stage - 1))
        self.ops.append(op)

    def _may_remove(self, value: str, stage: int) -> bool:
        if (value, stage) not in self._there or not self._stages[stage - 1].is_block:
            return False
        other = "saved" if value == "output" else "output"
        return ("saved", stage + 1) not in self._there or (other, stage) in self._there

    def _backward(self, stage: int) -> None:
        self.ops.append(backward(stage))
        self._there -= {("saved", stage), ("output", stage - 1)}

    def _disturb(self, last: int) -> None:
        """Drops something, or runs something again, among the stages that are not done with."""
        if self._random.random() < 0.4:
            removable = sorted(v for v in self._there if v[1] <= last and self._may_remove(*v))
            if removable:
                value = self._random.choice(removable)
                self._there.remove(value)
                self.ops.append(drop(*value))
        if self._random.random() < 0.25:
            again = [
                op
                for stage in range(1, last + 1)
                for op, product in ((save(stage), "saved"), (keep(stage), "output"))
                if self._stages[stage - 1].is_block
                and self._has_output(stage - 1)
                and (product, stage) not in self._there
                and any(v == ("saved", stage) or v == ("output", stage) for v in self._there)
            ]
            if again:
                self._emit_forward(self._random.choice(again))


def accepted(stages: Sequence[StageRef], seed: int, most: int = 60) -> list[Op]:
    """A random schedule grown from whatever operations the simulator accepts next, sensible or not."""
    chain, choose, last = cairn.Chain.from_json(_chain_json(stages)), random.Random(seed), len(stages)
    numbers = range(1, last + 1)
    every = [make(s) for s in numbers for make in (save, keep, drop_input)]
    every += [drop(value, s) for s in numbers for value in ("output", "saved")]
    ops: list[Op] = []

    def is_next(op: Op) -> bool:
        replay = cairn.simulate(chain, cairn.Schedule.from_ops(chain, [*ops, op]))
        return replay.violation is None or replay.violation.op is None  # at most incomplete

    while last > 0:
        if (len(ops) > most or choose.random() < 0.5) and is_next(backward(last)):
            ops.append(backward(last))
            last -= 1
            continue
        found = [op for op in every if is_next(op) and (op[0] != "drop" or choose.random() < 0.3)]
        if len(ops) > most:  # to an end
            found = [op for op in found if op[0] == "forward_save" and op[1] <= last] or found
        ops += [choose.choice(found)] if found else []
    return ops


def is_valid(stages: Sequence[StageRef], ops: Sequence[Op]) -> bool:
    """By the simulator."""
    chain = cairn.Chain.from_json(_chain_json(stages))
    replay = cairn.simulate(chain, cairn.Schedule.from_ops(chain, ops))
    return bool(replay.valid)


def _chain_json(stages: Sequence[StageRef]) -> str:
    import json

    sizes = {"output_bytes": 1, "saved_bytes": 2, "forward_ns": 1, "backward_ns": 1}
    described = [{"name": str(ref), "no_recompute": not ref.is_block, **sizes} for ref in stages]
    return json.dumps({"format": "cairn-chain", "version": 1, "input_bytes": 1, "stages": described})


def expected_runs(stages: Sequence[StageRef], ops: Sequence[Op]) -> list[tuple[str, int]]:
    """The runs of blocks that a list of operations asks for, those apart that come after the block's backward."""
    found, backwards = [], set()
    for op in ops:
        if op[0] == "backward":
            backwards.add(op[1])
        elif op[0].startswith("forward") and stages[op[1] - 1].is_block and op[1] not in backwards:
            found.append((op[0], op[1]))
    return found


# -- steps ---------------------------------------------------------------------------------------------------


def results(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Everything that a step leaves behind."""
    found: dict[str, torch.Tensor | None] = {"loss": loss.detach().clone(), "random state": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    for name, buffer in model.named_buffers():
        found[name] = buffer.detach().clone()
    return found


def train(model: nn.Module, compute_loss: Callable[[nn.Module], torch.Tensor], seed: int = 0) -> dict[str, Any]:
    """One step from a seed."""
    torch.manual_seed(seed)
    loss = compute_loss(model)
    loss.backward()
    return results(model, loss)


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not _equal(first[name], second[name])]


def _equal(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


@contextlib.contextmanager
def planned(model: nn.Module, stages: Sequence[StageRef], ops: Sequence[Op], **options: Any) -> Iterator[Executor]:
    """A model whose steps follow a schedule."""
    executor = Executor(model, stages, ops, **options)
    executor.attach()
    try:
        yield executor
    finally:
        executor.detach()


def assert_same(
    model: nn.Module,
    compute_loss: Callable[[nn.Module], torch.Tensor],
    stages: Sequence[StageRef],
    ops: Sequence[Op],
    steps: int = 2,
    in_order: bool = True,
) -> None:
    """Trains copies of a model plain and planned, several steps onto the same gradients, and compares."""
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    with planned(other, stages, ops) as executor:
        for step in range(steps):
            expected = train(plain, compute_loss, step)
            actual = train(other, compute_loss, step)
            assert not differing(expected, actual)
            assert not executor.notes
            if in_order:
                assert executor.trace == expected_runs(stages, ops)


_groups: list[object] = []


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What is in cycles stays."""
    gc.collect()
    with memory.not_collecting():
        yield


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """Collectives of this process alone.

    The group outlives the test: one that is freed soon after a collective can wait for a thread of its own for ever,
    which waits for the interpreter to let go of that collective's tensors (torch 2.13).
    """
    store = distributed.FileStore(str(folder / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    _groups.append(distributed.group.WORLD)
    try:
        yield
    finally:
        distributed.destroy_process_group()
