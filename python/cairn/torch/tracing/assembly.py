"""Makes a program from a recording: drops operations that no result needs, and gives each result a node to keep.

A node of a cairn-graph is kept or dropped as a whole, and so are all tensors that an operator returns. Keeping a small
one would therefore hold the large ones. In two cases the program copies the small tensor after the operator, and the
copy is read or kept instead:

* The tensor is a result of the step (a gradient, say), and the operator's other tensors are not.
* The tensor is small and is read for longer than a large one of the same operator (the statistics of a normalisation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .graph_program import Call, External, ExternalTensor, Local, Operation, Program, Value
from .records import Output, Record
from .tape import Tape

Result = Output | External


@dataclass
class Results:
    """The results of a step, as the recorder knows them."""

    loss: Result
    outputs: Sequence[Result]
    grads: Mapping[str, Result]
    written: Sequence[tuple[int, Result]]

    def all(self) -> list[Result]:
        """Every result."""
        return [self.loss, *self.outputs, *self.grads.values(), *(where for _, where in self.written)]


def assembled(tape: Tape, results: Results) -> Program:
    """The program of a recorded step."""
    needed = _needed(tape.records, results)
    records = [record for record in tape.records if record in needed]
    return _Assembly(records, results).program(tape.externals)


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


#: A tensor is copied if the largest tensor of its operation is this many times as large.
SMALL = 16


@dataclass
class _Assembly:
    records: list[Record]
    results: Results
    used: dict[Record, list[int]] = field(default_factory=dict)  # the outputs that are read, ascending
    index: dict[Record, int] = field(default_factory=dict)
    kept: set[Record] = field(default_factory=set)
    copies: dict[Record, Output] = field(default_factory=dict)  # records that are copies, and of what
    final: dict[Output, Output] = field(default_factory=dict)  # results that are kept as copies
    moved: dict[Output, Output] = field(default_factory=dict)  # what is read as a copy

    def program(self, externals: Sequence[ExternalTensor]) -> Program:
        self._find_used()
        self._copy_small_ones()
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

    # what is read, and of whom

    def _results(self) -> list[Output]:
        tensors = (self._now(where) for where in self.results.all() if isinstance(where, Output))
        return list(dict.fromkeys(tensors))

    def _now(self, where: Output) -> Output:
        return self.moved.get(where, where)

    def _operands(self, record: Record) -> list[Output]:
        """The outputs that a record reads. A copy reads the original."""
        return [operand if record in self.copies else self._now(operand) for operand in operands_of(record)]

    def _allocating(self, where: Output) -> Output:
        """The output that allocated the storage of a result: the result itself, or the base of a view."""
        base = where.record.base
        return self._now(base) if isinstance(base, Output) else where

    def _find_used(self) -> None:
        used: dict[Record, set[int]] = {record: set() for record in self.records}
        read = [operand for record in self.records for operand in self._operands(record)]
        for operand in [*read, *self._results()]:
            used[operand.record].add(operand.index)
        self.used = {record: sorted(outputs) for record, outputs in used.items()}

    def _storages(self, record: Record) -> dict[int, int]:
        """The storages of a record's outputs, and their bytes."""
        return dict(record.storages[i] for i in self.used[record]) if record.storages else {}

    # copies

    def _copy_small_ones(self) -> None:
        last = self._last_readers()
        behind: dict[Record, list[Record]] = {}
        for record in self.records:
            sizes = self._storages(record)
            if len(sizes) < 2 or len(sizes) < len(self.used[record]):
                continue
            largest = max(sizes, key=lambda number: sizes[number])
            for i in self.used[record]:
                number, size = record.storages[i]
                if size * SMALL <= sizes[largest] and last.get(number, -1) > last.get(largest, -1):
                    where = Output(record, i)
                    copy = self._copy(where)
                    self.moved[where] = Output(copy, 0)
                    behind.setdefault(record, []).append(copy)
        self._insert(behind)
        self._find_used()

    def _last_readers(self) -> dict[int, int]:
        """For each storage the last record that reads it or a view of it."""
        last: dict[int, int] = {}
        for position, record in enumerate(self.records):
            for operand in self._operands(record):
                allocating = self._allocating(operand)
                if allocating.record.storages:
                    last[allocating.record.storages[allocating.index][0]] = position
        return last

    def _keep_results(self) -> None:
        by_maker: dict[Record, list[Output]] = {}
        for where in self._results():
            by_maker.setdefault(self._allocating(where).record, []).append(where)
        behind: dict[Record, list[Record]] = {}
        for maker, wanted in by_maker.items():
            shown = {maker.storages[self._allocating(where).index][0] for where in wanted} if maker.storages else set()
            if shown == set(self._storages(maker)):
                self.kept.update(where.record for where in wanted)
                continue
            for where in wanted:
                copy = self._copy(where)
                self.final[where] = Output(copy, 0)
                behind.setdefault(where.record, []).append(copy)
                self.kept.add(copy)
        self._insert(behind)
        self._find_used()
        self.used.update((copy, [0]) for copy in self.kept if copy in self.copies)

    def _insert(self, behind: Mapping[Record, Sequence[Record]]) -> None:
        self.records = [each for record in self.records for each in (record, *behind.get(record, ()))]

    def _copy(self, where: Output) -> Record:
        geometry = where.record.geometries[where.index]
        record = Record(f"{where.record.name} (copy)", where.record.is_backward)
        record.calls.append(Call(torch.ops.aten.clone.default, (where,), {}, f"copy {geometry.described()}"))
        record.add_output(Local(0, 0), geometry)
        record.storages.append((-len(self.copies) - 1, geometry.dense_bytes))
        self.copies[record] = where
        return record

    # operations

    def _final(self, where: Result) -> Value | External:
        if isinstance(where, External):
            return where
        where = self._now(where)
        return self._value(self.final.get(where, where))

    def _value(self, output: Output) -> Value:
        return Value(self.index[output.record], self.used[output.record].index(output.index))

    def _operation(self, record: Record) -> Operation:
        base = self._allocating(Output(record, 0)).record if record.base is not None else record
        return Operation(
            name=record.name,
            calls=tuple(self._call(call, record in self.copies) for call in record.calls),
            outputs=tuple(record.outputs[i] for i in self.used[record]),
            storage_bytes=tuple(self._storages(record).values()),
            deps=tuple(sorted({self.index[operand.record] for operand in self._operands(record)})),
            base=None if base is record else self.index[base],
            once=record.once or not all(call.repeats for call in record.calls),
            keep=record in self.kept,
        )

    def _call(self, call: Call, is_copy: bool) -> Call:
        args = tuple(self._placed(argument, is_copy) for argument in call.args)
        kwargs = {name: self._placed(argument, is_copy) for name, argument in call.kwargs.items()}
        return replace(call, args=args, kwargs=kwargs)

    def _placed(self, argument: Any, is_copy: bool) -> Any:
        if isinstance(argument, Output):
            return self._value(argument if is_copy else self._now(argument))
        if isinstance(argument, list):
            return [self._placed(item, is_copy) for item in argument]
        return argument
