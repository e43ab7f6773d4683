"""Makes a program of what was recorded: leaves out what no result needs, and gives every result an operation to keep.

A node of a cairn-graph is kept or dropped as a whole, and so are the tensors that an operator returns together. Where
a result of the step (a gradient, say) is one of several tensors and the others would be kept with it, the program has
a copy of the result behind the operator, and keeps that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import memory
from .graph_program import Call, External, Local, Operation, Outside, Program, Value
from .records import Output, Record
from .tape import Tape

Result = Output | External


@dataclass
class Results:
    """What a step leaves, as the recorder knows it."""

    loss: Result
    outputs: Sequence[Result]
    grads: Mapping[str, Result]
    written: Sequence[tuple[int, Result]]

    def all(self) -> list[Result]:
        """Every result."""
        return [self.loss, *self.outputs, *self.grads.values(), *(where for _, where in self.written)]


def assembled(tape: Tape, results: Results, device: torch.device) -> Program:
    """The program of a recorded step."""
    needed = _needed(tape.records, results)
    records = [record for record in tape.records if record in needed]
    return _Assembly(records, results, device).program(tape.externals)


def _needed(records: Sequence[Record], results: Results) -> set[Record]:
    """The records that results depend on, and those that have effects: random numbers are drawn in the step's order."""
    needed = {where.record for where in results.all() if isinstance(where, Output)}
    for record in reversed(records):
        if record in needed or record.once:
            needed.add(record)
            needed.update(operand.record for operand in operands_of(record))
    return needed


def operands_of(record: Record) -> Iterator[Output]:
    """The results of other records that a record reads."""
    for call in record.calls:
        yield from _outputs_in([call.args, call.kwargs])


def _outputs_in(value: Any) -> Iterator[Output]:
    if isinstance(value, Output):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _outputs_in(item)
    elif isinstance(value, dict):
        yield from _outputs_in(list(value.values()))


@dataclass
class _Assembly:
    records: list[Record]
    results: Results
    device: torch.device
    used: dict[Record, list[int]] = field(default_factory=dict)  # the outputs that are read, ascending
    index: dict[Record, int] = field(default_factory=dict)
    kept: set[Record] = field(default_factory=set)
    copies: dict[Output, Record] = field(default_factory=dict)

    def program(self, externals: Sequence[Outside]) -> Program:
        self._find_used()
        self._keep_results()
        self.index = {record: v for v, record in enumerate(self.records)}
        operations = tuple(self._operation(record) for record in self.records)
        results = self.results
        return Program(
            operations=operations,
            externals=tuple(externals),
            backward_begins_at=sum(not record.is_backward for record in self.records),
            loss=self._final(results.loss),
            outputs=tuple(self._final(where) for where in results.outputs),
            grads={name: self._final(where) for name, where in results.grads.items()},
            written=tuple((external, self._final(where)) for external, where in results.written),
        )

    def _find_used(self) -> None:
        used: dict[Record, set[int]] = {record: set() for record in self.records}
        read = [operand for record in self.records for operand in operands_of(record)]
        for operand in [*read, *(where for where in self.results.all() if isinstance(where, Output))]:
            used[operand.record].add(operand.index)
        self.used = {record: sorted(outputs) for record, outputs in used.items()}

    # results

    def _keep_results(self) -> None:
        final = {where: None for where in self.results.all() if isinstance(where, Output)}
        by_maker: dict[Record, list[Output]] = {}
        for where in final:
            by_maker.setdefault(_made(where).record, []).append(where)
        behind: dict[Record, list[Record]] = {}
        for maker, wanted in by_maker.items():
            if self._bytes(maker) == self._bytes_of_results(maker, wanted):
                self.kept.update(where.record for where in wanted)
                continue
            for where in wanted:
                copy = self._copy(where)
                behind.setdefault(where.record, []).append(copy)
                self.kept.add(copy)
        self.records = [each for record in self.records for each in (record, *behind.get(record, ()))]

    def _bytes(self, maker: Record) -> int:
        """Bytes of the storages that a record hands on."""
        return sum(dict(maker.storages[i] for i in self.used[maker] if maker.storages).values())

    def _bytes_of_results(self, maker: Record, wanted: Iterable[Output]) -> int:
        if not maker.storages:
            return 0
        return sum(dict(maker.storages[_made(where).index] for where in wanted).values())

    def _copy(self, where: Output) -> Record:
        shows = where.record.shows[where.index]
        record = Record(f"{where.record.name} (kept)", where.record.is_backward)
        record.calls.append(Call(torch.ops.aten.clone.default, (where,), {}, f"kept {shows.described()}"))
        record.hand_on(Local(0, 0), shows)
        record.storages.append((0, memory.allocated_bytes(shows.dense_bytes, self.device)))
        self.copies[where], self.used[record] = record, [0]
        return record

    def _final(self, where: Result) -> Value | External:
        if isinstance(where, External):
            return where
        copy = self.copies.get(where)
        return self._value(where) if copy is None else Value(self.index[copy], 0)

    # operations

    def _value(self, output: Output) -> Value:
        return Value(self.index[output.record], self.used[output.record].index(output.index))

    def _operation(self, record: Record) -> Operation:
        used = self.used[record]
        deps = sorted({self.index[operand.record] for operand in operands_of(record)})
        sizes = dict(record.storages[i] for i in used) if record.storages else {}
        base = record.base.record if isinstance(record.base, Output) else None
        return Operation(
            name=record.name,
            calls=tuple(self._call(call) for call in record.calls),
            outputs=tuple(record.outputs[i] for i in used),
            storage_bytes=tuple(sizes.values()),
            deps=tuple(deps),
            base=None if base is None else self.index[base],
            once=record.once,
            keep=record in self.kept,
        )

    def _call(self, call: Call) -> Call:
        args = tuple(self._placed(argument) for argument in call.args)
        kwargs = {name: self._placed(argument) for name, argument in call.kwargs.items()}
        return Call(call.function, args, kwargs, call.described)

    def _placed(self, argument: Any) -> Any:
        if isinstance(argument, Output):
            return self._value(argument)
        if isinstance(argument, list):
            return [self._placed(item) for item in argument]
        return argument


def _made(where: Output) -> Output:
    """What made the storage of a result: itself, or for a view its base."""
    base = where.record.base
    return base if isinstance(base, Output) else where
