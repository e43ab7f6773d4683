"""What the tests of steps with transfers share: lists of operations with transfers, and models that follow them."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import cairn
import torch
from cairn.torch.base.stages import StageRef
from cairn.torch.runtime.executor import Executor
from cairn.torch.runtime.step_transfers import PlanTier
from cairn.torch.schedule.transfer_plan import TransferPlan, transfer_plan_of
from executor_support import Op, backward, drop, drop_input, keep, save
from torch import nn

CPU = torch.device("cpu")
FAST = cairn.Machine("1GiB", "20GB/s", "20GB/s", shared_link=True)
MIB = 1 << 20


def offload(kind: str, stage: int) -> Op:
    return ("offload", kind, stage)


def prefetch(kind: str, stage: int) -> Op:
    return ("prefetch", kind, stage)


def discard(kind: str, stage: int) -> Op:
    return ("discard", kind, stage)


def sized(stages: Sequence[StageRef], host_bytes: int = 1 << 40, ways: int = 1) -> dict[str, Any]:
    """A chain whose values are larger than any tensor of these tests; every block can be saved in so many ways."""
    options = [{"saved_bytes": 2 * MIB, "forward_ns": 100, "backward_ns": 200}]
    options = [{**o, "forward_workspace_bytes": 0, "backward_workspace_bytes": 0} for o in options]
    described = [
        {
            "name": str(ref),
            "output_bytes": MIB,
            "grad_bytes": MIB,
            "weight_grad_bytes": 0,
            "no_recompute": not ref.is_block,
            "forward_only_ns": 100,
            "forward_only_workspace_bytes": 0,
            "options": options * (ways if ref.is_block else 1),
        }
        for ref in stages
    ]
    machine = {"host_bytes": host_bytes, "to_host_bytes_per_s": 10**11, "to_device_bytes_per_s": 10**11}
    chain = {"format": "cairn-chain", "version": 1, "fixed_bytes": 0, "input_bytes": MIB, "input_grad_bytes": MIB}
    return {**chain, "stages": described, "machine": {**machine, "shared_link": True, "latency_ns": 0}}


def offloading(stages: Sequence[StageRef]) -> list[Op]:
    """Every block's saved tensors leave after the next block ran, and come back one block before they are needed."""
    n = len(stages)
    ops: list[Op] = []
    for stage in range(1, n + 1):
        ops.append(save(stage))
        if stage > 1:
            ops.append(drop("saved", stage - 1))
        if stage < n:
            ops.append(offload("saved", stage))
    if n > 1:
        ops.append(prefetch("saved", n - 1))
    for stage in range(n, 0, -1):
        if stage > 2:
            ops.append(prefetch("saved", stage - 2))
        ops.append(backward(stage))
        if stage < n:
            ops.append(discard("saved", stage))
    return ops


def inputs_offloaded(stages: Sequence[StageRef]) -> list[Op]:
    """Only outputs are kept, on the host; each block is recomputed from its own."""
    n = len(stages)
    ops: list[Op] = []
    for stage in range(1, n):
        ops.append(keep(stage))
        ops += [drop("output", stage - 1)] if stage > 1 else []
        ops += [offload("output", stage)] if stage < n - 1 else []
    ops.append(save(n))
    for stage in range(n, 0, -1):
        ops += [save(stage)] if stage < n else []
        ops.append(backward(stage))
        if stage > 2:
            ops += [prefetch("output", stage - 2), discard("output", stage - 2)]
    return ops


@functools.cache
def by_chance(seed: int, stages: tuple[StageRef, ...], ways: int = 1, most: int = 50) -> list[Op]:
    """A random list grown from whatever the simulator accepts next, transfers included, sensible or not."""
    chain, choose, last = cairn.Chain.from_json(json.dumps(sized(stages, ways=ways))), random.Random(seed), len(stages)
    numbers = range(1, last + 1)
    fixed = [s for s in numbers if not stages[s - 1].is_block]
    movable = [s for s in numbers if s not in fixed]
    every: list[Op] = [*map(save, fixed), *(make(s) for s in movable for make in (keep, drop_input))]
    every += [("forward_save", s, option) for s in movable for option in range(ways)]
    kinds = (drop, offload, prefetch, discard, offload, prefetch)
    every += [make(value, s) for make in kinds for s in movable for value in ("output", "saved")]
    ops: list[Op] = []

    def is_next(op: Op) -> bool:
        replay = cairn.simulate(chain, cairn.Schedule.from_ops(chain, [*ops, op]))
        return replay.violation is None or replay.violation.op is None

    while last > 0:
        if (len(ops) > most or choose.random() < 0.5) and is_next(backward(last)):
            ops.append(backward(last))
            last -= 1
            continue
        chances = {"drop": 0.4, "discard": 0.2}
        found = [op for op in every if is_next(op) and choose.random() < chances.get(op[0], 1)]
        if len(ops) > most:
            found = [op for op in found if op[0] == "forward_save" and op[1] <= last] or found
        ops += [choose.choice(found)] if found else []
    return ops


@contextlib.contextmanager
def carried_out(
    model: nn.Module,
    stages: Sequence[StageRef],
    ops: Sequence[Op],
    tier: str = "host",
    ways: int = 1,
    budget: int = 1 << 50,
    **options: Any,
) -> Iterator[tuple[Executor, TransferPlan, PlanTier]]:
    """A model whose steps follow a list with transfers; `budget` is that of the chain of `sized`."""
    transfer_plan, plan_tier = transfer_plan_of(sized(stages, ways=ways), ops, budget), PlanTier(tier, None, CPU)
    executor = Executor(model, stages, transfer_plan.ops, transfer_plan=transfer_plan, plan_tier=plan_tier, **options)
    executor.attach()
    try:
        yield executor, transfer_plan, plan_tier
    finally:
        executor.detach()


def copies(ops: Sequence[Any]) -> list[tuple[str, tuple[str, int]]]:
    """The copies that a list starts, in order."""
    return [(op[0], (op[1], op[2])) for op in ops if op[0] in ("offload", "prefetch")]


def trace_of(plan_tier: PlanTier) -> list[Any]:
    assert plan_tier.transfers is not None
    return list(plan_tier.transfers.trace)
