"""A schedule in the order in which a training step runs it, and the memory that this takes beyond the simulation.

Two things differ from the list:

* Stages outside blocks run by themselves, and only blocks advance the list. So a recomputation that the list has before
  a stage outside blocks waits until that stage has run.
* The model's own code holds the output of a stage until the next stage has run. A schedule that drops this output
  before, and recomputes it, has it twice.

With offloading, that would delay drops and transfers which wait only for their place in the list. But a schedule
offloads values that must be gone when the head runs. So such a list is first put into the order of a process, and then
simulated (`in_order_of_process`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..base.stages import BLOCK, StageRef
from .peak_parts import Replay
from .program import BACKWARD, DROP, FORWARD_SAVE, FORWARDS, ON_VALUES, OUTPUT, SAVED, Value

Op = Sequence[Any]
Performed = list[tuple[Op, int]]  # each with the stage whose output the model's code holds in another copy; 0: none


def excess_bytes(problem: Mapping[str, Any], ops: Sequence[Op], performed: Performed) -> int:
    """By how much the peak of a schedule, as a step runs it, exceeds the peak of the list."""
    return max(0, _peak(problem, performed) - _peak(problem, [(op, 0) for op in ops]))


def in_order_of_process(ops: Sequence[Op], stages: Sequence[StageRef]) -> list[Op]:
    """The list in the order in which a process performs it.

    A recomputation waits until the process reaches its block. With it wait only those later drops and transfers whose
    values it reads or makes.
    """
    return list(_in_order(ops, stages, free_moves=True))


def as_performed(ops: Sequence[Op], stages: Sequence[StageRef]) -> Performed:
    """The operations in order."""
    performed: Performed = []
    returned, alone = (OUTPUT, 0), 0  # what the first run of a stage left; whose output the caller alone has
    run: set[int] = set()
    for op in _in_order(ops, stages):
        performed.append((op, alone))
        if op[0] in FORWARDS and op[1] not in run:
            run.add(op[1])
            returned, alone = (SAVED if op[0] == FORWARD_SAVE else OUTPUT, op[1]), 0
        elif op[0] == BACKWARD:
            returned, alone = (OUTPUT, 0), 0
        elif op[0] == DROP and (op[1], op[2]) == returned:
            alone = op[2]
    return performed


def _in_order(ops: Sequence[Op], stages: Sequence[StageRef], free_moves: bool = False) -> Iterator[Op]:
    """Reorder a list: stages outside of blocks run before operations that wait for the next block.

    free_moves: drops and transfers wait only if they have to do with what waits.
    """
    waiting: list[Op] = []
    run: set[int] = set()
    for op in ops:
        is_move = op[0] in ON_VALUES
        again = op[0] in FORWARDS and op[1] in run
        run |= {op[1]} if op[0] in FORWARDS else set()
        if again or (is_move and waiting and not (free_moves and _is_free(op, waiting))):
            waiting.append(op)
        elif is_move or stages[op[1] - 1].kind != BLOCK:
            if free_moves and op[0] == BACKWARD:  # the backward itself frees its input
                waiting = _without_drop_of(op[1] - 1, waiting)
            yield op
        else:
            yield from waiting
            waiting.clear()
            yield op
    yield from waiting


def _without_drop_of(stage: int, waiting: Sequence[Op]) -> list[Op]:
    """The waiting operations, without the drop of a stage's earlier output."""
    for position, op in enumerate(waiting):
        if op[0] in FORWARDS and op[0] != FORWARD_SAVE and op[1] == stage:
            break
        if tuple(op) == (DROP, OUTPUT, stage):
            return [*waiting[:position], *waiting[position + 1 :]]
    return list(waiting)


def _is_free(move: Op, waiting: Sequence[Op]) -> bool:
    """Whether no waiting operation reads, makes or moves the value of a drop or transfer."""
    touched: set[Value] = set()
    for op in waiting:
        if op[0] in ON_VALUES:
            touched.add((op[1], op[2]))
        else:
            touched |= {(kind, stage) for kind in (OUTPUT, SAVED) for stage in (op[1] - 1, op[1])}
    return (move[1], move[2]) not in touched


def _peak(problem: Mapping[str, Any], performed: Performed) -> int:
    replay, peak = Replay(problem), 0
    for op, alone in performed:
        more = replay.output_bytes(alone) if alone else 0
        peak = max(peak, more + replay.most_during(op))
        if op[0] in FORWARDS and op[1] + 1 in replay.done and replay.stages[op[1]]["no_recompute"]:
            replay.outputs.discard(op[1])  # nobody reads it any more
    return peak
