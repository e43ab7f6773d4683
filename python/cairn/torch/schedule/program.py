"""A schedule's list of operations, prepared for replay: what each operation reads, and what may be let go after it.

Problem. The executor walks the list once per training step, moved on by the model's own forward and by autograd's
backward. Everything that can be known from the list alone is worked out here, once: where an operation's input comes
from, which stages autograd can keep by itself, and when a value has been read for the last time.

Values. a[l] is the output of stage l on its own, A[l] what its saving forward leaves behind, its output included
(`docs/reference/formats`). A stage reads a[l-1] when that is resident, else A[l-1].

Lasting stages. A stage whose saving forward is its only forward, whose A[l] is never dropped or offloaded, and whose
input is still the copy that the model passed to it when its backward comes, needs nothing of the list: that copy is the
one that the first forward of the stage before made, wherever the list reads another. If it keeps everything it is
*native*: autograd keeps what it keeps anyway. If it keeps a part, it rebuilds the rest by itself (`single_runs.py`).

Transfers. A value has a copy on the device, one on the host, or both; a prefetch makes a new copy on the device. The
list says in which order transfers start; for which of them an operation has to wait is in `transfer_plan.py`.

Idle forwards. A schedule may run a stage forward again after its backward. Only that backward, and stages further on
that are done as well, could read what comes of it, so it is left out: the step takes less than the simulator counted.

A list of operations that contradicts itself is refused here; sizes, times and budgets are the simulator's business.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import Unsupported
from ..base.stages import StageRef

FORWARD_SAVE = "forward_save"
FORWARD_KEEP = "forward_keep"
FORWARD_DROP = "forward_drop"
BACKWARD = "backward"
DROP = "drop"
FORWARDS = (FORWARD_SAVE, FORWARD_KEEP, FORWARD_DROP)
OFFLOAD = "offload"
PREFETCH = "prefetch"
DISCARD = "discard"
ON_VALUES = (DROP, OFFLOAD, PREFETCH, DISCARD)

OUTPUT = "output"  # a[l]
SAVED = "saved"  # A[l]

Value = tuple[str, int]  # (OUTPUT or SAVED, stage)


@dataclass(frozen=True)
class Op:
    """One operation. `value` is what a drop or a transfer names; `source` where a computation finds its input."""

    kind: str
    stage: int
    value: str = ""
    option: int = 0
    source: Value | None = None  # None: the chain's own input, or nothing to read
    is_idle: bool = False  # a forward after the stage's backward: valid, but nothing can read what it makes

    @property
    def is_forward(self) -> bool:
        return self.kind in FORWARDS

    @property
    def subject(self) -> Value:
        """What a drop or a transfer is about."""
        return self.value, self.stage

    @property
    def product(self) -> Value | None:
        """What a forward leaves behind."""
        if not self.is_forward:
            return None
        return (SAVED if self.kind == FORWARD_SAVE else OUTPUT, self.stage)


@dataclass
class Program:
    """The prepared list; see the top of this file. Stages are numbered from 1; index 0 of the lists is not used."""

    stages: tuple[StageRef, ...]
    ops: tuple[Op, ...]
    first_forward: list[int]  # position of each stage's first forward
    backward: list[int]  # position of each stage's backward
    lasting: list[bool]  # stages that need nothing of the list
    native: list[bool]  # those of them that keep everything
    is_block: list[bool]
    replayed: list[bool]  # blocks that need the list; one entry more, for the stage after the last
    opened: list[bool]  # blocks that are saved by an option other than keeping everything
    watched: list[bool]  # the list is moved on when the gradient of the stage's output is ready
    releases: list[tuple[Value, ...]] = field(default_factory=list)  # by op: what is read there for the last time
    quiet: list[bool] = field(default_factory=list)  # stages after whose first forward nothing is to be done

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    def ref(self, stage: int) -> StageRef:
        return self.stages[stage - 1]

    def needed(self, begin: int, wanted: Iterable[int], transfers: bool) -> frozenset[int]:
        """The forwards from position `begin` on without which the backwards of the stages `wanted` cannot run.

        transfers: a prefetch brings what it names; else everything stays on the device, and is computed.
        """
        wanted, chosen = set(wanted), set()
        missing: set[Value] = set()
        brought: set[Value] = set()
        for position in range(len(self.ops) - 1, begin - 1, -1):
            op = self.ops[position]
            if op.kind == BACKWARD and op.stage in wanted:
                missing.add((SAVED, op.stage))
            elif op.is_forward and op.product in missing:
                missing.remove(op.product)
                chosen.add(position)
            elif transfers and op.kind == PREFETCH and op.subject in missing:
                missing.remove(op.subject)
                brought.add(op.subject)
                continue
            elif transfers and op.kind == OFFLOAD and op.subject in brought:
                brought.remove(op.subject)
                missing.add(op.subject)
                continue
            else:
                continue
            if op.source is not None:
                missing.add(op.source)
        return frozenset(chosen)


def compile_program(
    stages: Sequence[StageRef],
    ops: Iterable[Sequence[Any]],
    options: Mapping[int, int] | None = None,
    waiting: Container[int] = (),
) -> Program:
    """Prepares a list of operations; raises ValueError where it contradicts itself, Unsupported where it asks for more
    than the executor can do.

    options: how many options stages have, where that is more than one.
    waiting: positions of operations that have to wait for transfers.
    """
    refs = tuple(stages)
    parsed = [_parse(position, raw, refs, options or {}) for position, raw in enumerate(ops)]
    compiled = _Residency(refs).trace(parsed)
    first_forward, backward = _positions(refs, compiled)
    lasting = _lasting_stages(refs, compiled)
    opened = [any(op.stage == i and op.option and not op.is_idle for op in compiled) for i in range(len(refs) + 1)]
    native = [lasts and not opened[i] for i, lasts in enumerate(lasting)]
    is_block = [False, *(ref.is_block for ref in refs)]
    replayed = [*(block and not lasts for block, lasts in zip(is_block, lasting, strict=True)), False]
    watched = _watched_stages(refs, compiled, first_forward, replayed, waiting)
    program = Program(
        refs, tuple(compiled), first_forward, backward, lasting, native, is_block, replayed, opened, watched
    )
    program.releases = _last_reads(program)
    program.quiet = [
        not (replayed[i + 1] or watched[i] or program.releases[position] or compiled[position].kind == FORWARD_DROP)
        for i, position in enumerate(first_forward)
    ]
    return program


def _parse(position: int, raw: Sequence[Any], stages: Sequence[StageRef], options: Mapping[int, int]) -> Op:
    kind, rest = raw[0], list(raw[1:])
    if kind in ON_VALUES:
        op = Op(kind, int(rest[1]), value=rest[0])
        if op.value not in (OUTPUT, SAVED):
            raise ValueError(f"operation {position} is about '{op.value}', which is neither 'output' nor 'saved'")
    elif kind in FORWARDS or kind == BACKWARD:
        op = Op(kind, int(rest[0]), option=int(rest[1]) if len(rest) > 1 else 0)
    else:
        raise ValueError(f"operation {position} is '{kind}', which is not an operation of a chain")
    if not 1 <= op.stage <= len(stages):
        raise ValueError(f"operation {position} is about stage {op.stage}; there are {len(stages)}")
    if op.option >= options.get(op.stage, 1):
        raise Unsupported(
            f"operation {position} saves stage {op.stage} by option {op.option}, of which is not known what it keeps"
        )
    if not stages[op.stage - 1].is_block and kind not in (FORWARD_SAVE, BACKWARD, DROP):
        raise ValueError(f"operation {position} is '{kind}' of '{stages[op.stage - 1]}', which is always kept")
    return op


class _Residency:
    """Which values are resident along the list; finds what each operation reads."""

    def __init__(self, stages: Sequence[StageRef]) -> None:
        self._resident: set[Value] = set()
        self._on_host: set[Value] = set()
        self._done = {len(stages) + 1}  # stages whose backward was issued; that of the loss counts

    def trace(self, ops: Sequence[Op]) -> list[Op]:
        return [self._step(position, op) for position, op in enumerate(ops)]

    def _step(self, position: int, op: Op) -> Op:
        if op.kind in ON_VALUES:
            self._move(position, op)
            return op
        is_idle = op.is_forward and op.stage in self._done
        op = Op(op.kind, op.stage, op.value, op.option, self._source(position, op.stage), is_idle)
        if op.kind == BACKWARD:
            self._backward(position, op)
            return op
        product = op.product
        assert product is not None
        if product in self._resident:
            raise ValueError(f"operation {position} computes {_text(product)}, which is resident")
        self._resident.add(product)
        if op.kind == FORWARD_DROP:
            self._remove(position, (OUTPUT, op.stage - 1))
        return op

    def _move(self, position: int, op: Op) -> None:
        value = op.subject
        if op.kind == DROP:
            self._remove(position, value)
            return
        if op.kind == OFFLOAD and value not in self._resident:
            raise ValueError(f"operation {position} offloads {_text(value)}, which is not resident")
        if op.kind == PREFETCH and value in self._resident:
            raise ValueError(f"operation {position} prefetches {_text(value)}, which is resident")
        if (value in self._on_host) == (op.kind == OFFLOAD):
            raise ValueError(
                f"operation {position} is '{op.kind}' of {_text(value)}, of which there is "
                f"{'a copy on the host already' if op.kind == OFFLOAD else 'no copy on the host'}"
            )
        if op.kind == PREFETCH:
            self._resident.add(value)
        else:
            (self._on_host.add if op.kind == OFFLOAD else self._on_host.remove)(value)

    def _source(self, position: int, stage: int) -> Value | None:
        if stage == 1:
            return None
        for value in ((OUTPUT, stage - 1), (SAVED, stage - 1)):
            if value in self._resident:
                return value
        raise ValueError(f"operation {position} reads the output of stage {stage - 1}, which is not resident")

    def _backward(self, position: int, op: Op) -> None:
        if op.stage + 1 not in self._done or op.stage in self._done:
            raise ValueError(f"operation {position} is the backward of stage {op.stage} out of order")
        self._done.add(op.stage)
        self._remove(position, (SAVED, op.stage))
        self._resident.discard((OUTPUT, op.stage - 1))

    def _remove(self, position: int, value: Value) -> None:
        if value not in self._resident:
            raise ValueError(f"operation {position} removes {_text(value)}, which is not resident")
        self._resident.remove(value)


def _text(value: Value) -> str:
    return f"{'a' if value[0] == OUTPUT else 'A'}[{value[1]}]"


def _positions(stages: Sequence[StageRef], ops: Sequence[Op]) -> tuple[list[int], list[int]]:
    first_forward, backward = [-1] * (len(stages) + 1), [-1] * (len(stages) + 1)
    for position, op in enumerate(ops):
        if op.is_forward and first_forward[op.stage] < 0:
            first_forward[op.stage] = position
        elif op.kind == BACKWARD:
            backward[op.stage] = position
    for stage in range(1, len(stages) + 1):
        if backward[stage] < 0:
            raise ValueError(f"the list has no backward of stage {stage} ('{stages[stage - 1]}')")
    return first_forward, backward


def _lasting_stages(stages: Sequence[StageRef], ops: Sequence[Op]) -> list[bool]:
    forwards = [0] * (len(stages) + 1)
    lasting = [True] * (len(stages) + 1)
    made: dict[Value, int] = {}  # where the resident copy of a value was made
    first: dict[int, tuple[Value, int]] = {}  # by stage: the copy that its first forward made
    for position, op in enumerate(ops):
        if op.is_idle:
            continue
        if op.is_forward:
            forwards[op.stage] += 1
            lasting[op.stage] &= op.kind == FORWARD_SAVE and forwards[op.stage] == 1
            assert op.product is not None
            made[op.product] = position
            first.setdefault(op.stage, (op.product, position))
            if op.kind == FORWARD_DROP:
                made.pop((OUTPUT, op.stage - 1), None)
        elif op.kind in ON_VALUES:
            lasting[op.stage] &= op.value != SAVED
            if op.kind == DROP:
                made.pop(op.subject, None)
            elif op.kind == PREFETCH:
                made[op.subject] = position
        else:
            passed, made_at = first.get(op.stage - 1, (None, -1))
            lasting[op.stage] &= passed is None or made.get(passed) == made_at
            made.pop((SAVED, op.stage), None)
            made.pop((OUTPUT, op.stage - 1), None)
    return lasting


def _watched_stages(
    stages: Sequence[StageRef],
    ops: Sequence[Op],
    first_forward: list[int],
    replayed: list[bool],
    waiting: Container[int],
) -> list[bool]:
    """The blocks at which the list has to be moved on when the gradient of their output is ready.

    Not where there is nothing to do: no operation since the last block's backward, nothing to wait for, and nothing of
    that block to clear.
    """
    watched = [False] * (len(stages) + 1)
    pending = False
    for position, op in enumerate(ops[max(first_forward) + 1 :], max(first_forward) + 1):
        pending |= position in waiting
        if op.kind != BACKWARD:
            pending = True
        elif stages[op.stage - 1].is_block:
            watched[op.stage] = pending or replayed[op.stage]
            pending = replayed[op.stage]
    return watched


def _last_reads(program: Program) -> list[tuple[Value, ...]]:
    """By op: the values that no later stage reads after it, although they are resident still.

    So what a schedule removes later than it could is removed as soon as it can be. Of A[l] this means the output alone,
    for the rest is read by the backward of stage l.
    """
    releases: list[list[Value]] = [[] for _ in program.ops]
    reader: dict[Value, int] = {}
    for position, op in enumerate(program.ops):
        if op.product is not None:
            reader[op.product] = position
        if op.source is not None:
            reader[op.source] = position
        if op.kind in (OFFLOAD, PREFETCH):
            reader[op.subject] = position
        for value in _removed_by(op):
            last = reader.pop(value, None)
            if last is not None and last < position:
                releases[last].append(value)
    return [tuple(values) for values in releases]


def _removed_by(op: Op) -> tuple[Value, ...]:
    if op.kind == DROP:
        return (op.subject,)
    if op.kind == FORWARD_DROP:
        return ((OUTPUT, op.stage - 1),)
    if op.kind == BACKWARD:
        return ((SAVED, op.stage), (OUTPUT, op.stage - 1))
    return ()
