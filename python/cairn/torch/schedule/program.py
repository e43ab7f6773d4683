"""A schedule's list of operations, prepared for the executor: what each operation reads, what is freed after it.

Problem. The executor walks the list once in each training step. The model's own forward and autograd's backward advance
it. Everything that follows from the list alone is computed here, once: where an operation's input comes from, which
stages need nothing but autograd, and when a value is read for the last time.

Values. a[l] is the output of stage l alone. A[l] is what its saving forward leaves: its saved tensors and its output
(`docs/reference/formats`). A stage reads a[l-1] if that is resident, else A[l-1].

Stages that need nothing but autograd. A stage is *autograd_only* if

* its saving forward is its only forward,
* its A[l] is never dropped or offloaded, and
* at its backward, its input is still the tensor that the model passed to it in the forward.

The executor does nothing for such a stage in the backward. If the stage keeps all saved tensors it is *native*:
autograd keeps them anyway. Under selective recomputation it recomputes the others by itself (`single_runs.py`).

Transfers. A value has a copy on the device, one on the host, or both. A prefetch makes a new copy on the device. The
list has the order in which transfers start; `transfer_plan.py` says for which of them an operation waits.

Idle forwards. A schedule may recompute a stage after its backward. Only that backward and later stages could read the
result, and they are done. So the forward is left out: the step takes less than the simulator counted.

A list that contradicts itself is refused here. Sizes, times and budgets are checked by the simulator.
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
    """One operation. `value`: what a drop or transfer names. `source`: where a computation finds its input."""

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
        """The value that a drop or a transfer names."""
        return self.value, self.stage

    @property
    def product(self) -> Value | None:
        """The value that a forward produces; None for other operations."""
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
    autograd_only: list[bool]  # stages that need nothing but autograd in the backward
    native: list[bool]  # those of them that keep all saved tensors
    is_block: list[bool]
    executed: list[bool]  # blocks that need the executor in the backward; one entry more, for the stage after the last
    selective: list[bool]  # blocks under selective recomputation
    watched: list[bool]  # the list advances when the gradient of the stage's output is ready
    releases: list[tuple[Value, ...]] = field(default_factory=list)  # by op: values read there for the last time
    quiet: list[bool] = field(default_factory=list)  # stages with nothing to do after their first forward

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    def ref(self, stage: int) -> StageRef:
        return self.stages[stage - 1]

    def needed(self, begin: int, wanted: Iterable[int], transfers: bool) -> frozenset[int]:
        """The forwards, from position `begin` on, that the backwards of the stages `wanted` need.

        transfers: False if nothing was offloaded in this step, so that prefetches bring nothing.
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
    """Prepares a list of operations.

    Raises ValueError if the list contradicts itself, Unsupported if it asks for more than the executor can do.

    options: the number of options of stages that have more than one.
    waiting: positions of operations that wait for transfers.
    """
    refs = tuple(stages)
    parsed = [_parse(position, raw, refs, options or {}) for position, raw in enumerate(ops)]
    compiled = _Residency(refs).trace(parsed)
    first_forward, backward = _positions(refs, compiled)
    autograd_only = _autograd_only_stages(refs, compiled)
    selective = [any(op.stage == i and op.option and not op.is_idle for op in compiled) for i in range(len(refs) + 1)]
    native = [is_autograd_only and not selective[i] for i, is_autograd_only in enumerate(autograd_only)]
    is_block = [False, *(ref.is_block for ref in refs)]
    executed = [
        *(block and not is_autograd_only for block, is_autograd_only in zip(is_block, autograd_only, strict=True)),
        False,
    ]
    watched = _watched_stages(refs, compiled, first_forward, executed, waiting)
    program = Program(
        refs, tuple(compiled), first_forward, backward, autograd_only, native, is_block, executed, selective, watched
    )
    program.releases = _last_reads(program)
    program.quiet = [
        not (executed[i + 1] or watched[i] or program.releases[position] or compiled[position].kind == FORWARD_DROP)
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
    """Follows along the list which values are resident, and finds what each operation reads."""

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


def _autograd_only_stages(stages: Sequence[StageRef], ops: Sequence[Op]) -> list[bool]:
    forwards = [0] * (len(stages) + 1)
    autograd_only = [True] * (len(stages) + 1)
    copy_position: dict[Value, int] = {}  # where the resident copy of a value was made
    first: dict[int, tuple[Value, int]] = {}  # by stage: the copy that its first forward made
    for position, op in enumerate(ops):
        if op.is_idle:
            continue
        if op.is_forward:
            forwards[op.stage] += 1
            autograd_only[op.stage] &= op.kind == FORWARD_SAVE and forwards[op.stage] == 1
            assert op.product is not None
            copy_position[op.product] = position
            first.setdefault(op.stage, (op.product, position))
            if op.kind == FORWARD_DROP:
                copy_position.pop((OUTPUT, op.stage - 1), None)
        elif op.kind in ON_VALUES:
            autograd_only[op.stage] &= op.value != SAVED
            if op.kind == DROP:
                copy_position.pop(op.subject, None)
            elif op.kind == PREFETCH:
                copy_position[op.subject] = position
        else:
            passed, made_at = first.get(op.stage - 1, (None, -1))
            autograd_only[op.stage] &= passed is None or copy_position.get(passed) == made_at
            copy_position.pop((SAVED, op.stage), None)
            copy_position.pop((OUTPUT, op.stage - 1), None)
    return autograd_only


def _watched_stages(
    stages: Sequence[StageRef],
    ops: Sequence[Op],
    first_forward: list[int],
    executed: list[bool],
    waiting: Container[int],
) -> list[bool]:
    """The blocks at which the list advances when the gradient of their output is ready.

    A block is left out if there is nothing to do: no operation since the last block's backward, no transfer to wait
    for, and nothing of that block to free.
    """
    watched = [False] * (len(stages) + 1)
    pending = False
    for position, op in enumerate(ops[max(first_forward) + 1 :], max(first_forward) + 1):
        pending |= position in waiting
        if op.kind != BACKWARD:
            pending = True
        elif stages[op.stage - 1].is_block:
            watched[op.stage] = pending or executed[op.stage]
            pending = executed[op.stage]
    return watched


def _last_reads(program: Program) -> list[tuple[Value, ...]]:
    """By operation: resident values that nothing reads after it.

    So a value that the schedule drops later than it could is freed as soon as possible. Of A[l] this means the output
    alone, because the backward of stage l reads the rest.
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
