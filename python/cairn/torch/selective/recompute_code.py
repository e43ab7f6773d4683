"""Straight-line Python that recomputes saved tensors: generated once for a choice, compiled, run in every backward.

Problem. Every backward recomputes a tensor by the same few operations. Interpreting a list of small operations costs
more than the operations themselves; a function that calls them directly does not.

The generated function is a generator, and a whole backward is one run of it. Every `send` runs one *segment*: the
operations that the next tensor needs and that no earlier segment ran. A value is a local variable (v and its number),
deleted after its last use in this or a later segment. Operands with another size, stride or offset are views of it.

    def recompute(kept, states, made):
        where = yield  # saved tensor 7
        v3 = held(kept, 4)
        v5 = aten_tanh_default(v3)
        del v3, where
        made.append(v5)
        del v5
        yield

In place. An operation that writes in place writes over its variable if nobody reads the old version afterwards, and a
copy of it otherwise. Random operations run from the state that the generators were in when the last tensor was saved
before them; afterwards the generators are restored. No tensor that the code reads has a `grad_fn`, so autograd records
nothing.

Masks. If a dropout's mask is kept, one of two numbers is filled in instead of drawing. On the CPU the scaling that
follows is applied to these two numbers once, instead of to the whole noise.

A traceback shows the line and names the block: `linecache` has the source as long as the code exists.
"""

from __future__ import annotations

import itertools
import linecache
import math
import re
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from ..base import _compat
from ..base.tree import Slot, tensors_in
from ..rerun_state.rng_and_autocast import RandomState
from . import bit_masks
from .block_graph import ARGUMENT, BUFFER, BlockGraph, Operation, Use
from .block_options import is_always_resident
from .saved_tensors import View

PACK, MASK = "saved tensor", "mask"
Source = tuple[str, int]  # an argument, a parameter, a buffer, a kept tensor or a mask, and which
Kept = dict[int, tuple[torch.Tensor, int]]  # by saved tensor: what is kept of it, with its version
Recomputed = list[torch.Tensor | None]  # None where an operation omits a result
RecomputeGenerator = Generator[None, Any, None]


#: In-place operations that, given a number, compute each element from that element alone.
_SCALINGS = {
    getattr(packet, name) for packet in (torch.ops.aten.div_, torch.ops.aten.mul_) for name in ("Scalar", "Tensor")
}


class Missing(Exception):
    """An input of a recomputation no longer exists."""


class Code:
    """Compiled segments.

    Attributes
    ----------
    begin
        Makes the generator, from kept tensors, random states, and the list that receives the recomputed tensors.
    source
        Its source text.
    operations
        The operations that it runs, in order.
    held
        The saved tensors that must be held for it, as they are or as a mask.
    states
        When the random state is recorded: after so many saved tensors.
    """

    __slots__ = ("__weakref__", "begin", "held", "operations", "source", "states")

    def __init__(self, name: str, writer: _Writer) -> None:
        self.source = "\n".join(["def recompute(kept, states, made):", *writer.lines, "    yield", ""])
        self.operations = writer.operations
        self.held, self.states = frozenset(writer.held), frozenset(writer.states)
        file = f"<recomputing what '{name}' did not keep, {next(_numbers)}>"
        exec(compile(self.source, file, "exec"), writer.names)
        self.begin: Callable[[Kept, dict[int, RandomState], Recomputed], RecomputeGenerator] = writer.names["recompute"]
        linecache.cache[file] = len(self.source), None, self.source.splitlines(keepends=True), file
        weakref.finalize(self, linecache.cache.pop, file, None).atexit = False


_numbers = itertools.count(1)


def write(
    name: str,
    graph: BlockGraph,
    kept: dict[int, Source],
    drawn: dict[int, Source],
    order: Sequence[int],
    needed: Sequence[Sequence[int]],
    again: bool = False,
) -> Code:
    """The code that recomputes saved tensors in this order.

    kept: by value, where it is kept. drawn: by drawing operation, its kept mask. needed: for each tensor the operations
    that run for it and did not run for an earlier one. again: kept tensors are not released after their last use.
    """
    writer = _Writer(graph, kept, drawn, order, needed, again)
    for number, (pack, chosen) in enumerate(zip(order, needed, strict=True)):
        writer.segment(number, pack, chosen)
    return Code(name, writer)


class _Writer:
    """Writes segment after segment."""

    def __init__(
        self,
        graph: BlockGraph,
        kept: dict[int, Source],
        drawn: dict[int, Source],
        order: Sequence[int],
        needed: Sequence[Sequence[int]],
        again: bool,
    ) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(_HELPERS)
        self.operations: list[Any] = []
        self.held: set[int] = set()
        self.states: set[int] = set()
        self._graph, self._kept, self._drawn, self._again = graph, kept, drawn, again
        self._saved = {pack.use.value for pack in graph.packs if pack.use is not None}
        self._bound: set[str] = set()  # variables that exist
        self._end = len(graph.operations)
        self._last: dict[int, tuple[int, int]] = {}  # by value: the last segment and operation that reads it
        self._last_load: dict[Source, int] = {}
        for number, (pack, chosen) in enumerate(zip(order, needed, strict=True)):
            self._record_uses(number, pack, chosen)
        self._scaled = self._scalings([index for chosen in needed for index in chosen])

    def _record_uses(self, number: int, pack: int, chosen: Sequence[int]) -> None:
        for index in chosen:
            for value in self._read(index):
                self._last[value] = number, index
            if index in self._drawn:
                self._last_load[self._drawn[index]] = number
        self._last[self._use(pack).value] = number, self._end
        for value in self._loaded(pack, chosen):
            self._last_load[self._source(value)] = number

    def _scalings(self, chosen: Sequence[int]) -> dict[int, int]:
        """By scaling operation that alone reads a noise whose mask is kept: the operation that draws the noise."""
        found = {}
        for draw in self._drawn.keys() & set(chosen):
            value = self._graph.operations[draw].written[0]
            readers = [index for index in chosen if value in self._read(index)]
            if len(readers) == 1 and value not in self._saved and self._scales(readers[0], value):
                found[readers[0]] = draw
        return found

    def _scales(self, index: int, value: int) -> bool:
        op, noise = self._graph.operations[index], self._graph.values[value]
        is_whole = op.operands == [Use(value, noise.base)] and list(op.written) == [0]
        return op.function in _SCALINGS and is_whole and noise.device.type == "cpu"

    def _use(self, pack: int) -> Use:
        use = self._graph.packs[pack].use
        assert use is not None
        return use

    def _read(self, index: int) -> list[int]:
        return [] if index in self._drawn else [use.value for use in self._graph.operations[index].operands]

    def _is_loaded(self, value: int) -> bool:
        return value in self._kept or is_always_resident(self._graph, value)

    def _loaded(self, pack: int, chosen: Sequence[int]) -> list[int]:
        """The values that a segment loads and does not compute."""
        read = [value for index in chosen for value in self._read(index)] + [self._use(pack).value]
        return [value for value in dict.fromkeys(read) if self._is_loaded(value)]

    def _source(self, value: int) -> Source:
        source = self._kept.get(value) or self._graph.values[value].root
        assert source is not None
        return source

    # text

    def _line(self, text: str) -> None:
        self.lines.append("    " + text)

    def _bind(self, value: int) -> str:
        self._bound.add(f"v{value}")
        return f"v{value}"

    def _delete(self, names: Sequence[str]) -> None:
        gone = [name for name in dict.fromkeys(names) if name in self._bound]
        self._bound.difference_update(gone)
        if gone:
            self._line(f"del {', '.join(gone)}")

    def _constant(self, value: Any) -> str:
        """The source text of a number or an object."""
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._name(value, f"constant_{str(value)[:40]}")

    def _name(self, value: Any, wanted: str) -> str:
        """A unique name for an object."""
        name = re.sub(r"\W+", "_", wanted)
        others = (f"{name}_{number}" for number in itertools.count(2))
        return next(each for each in itertools.chain([name], others) if self.names.setdefault(each, value) is value)

    def _text(self, item: Any, operands: Sequence[str]) -> str:
        """An argument of an operation."""
        if type(item) is Slot:
            return operands[item.index]
        if type(item) is list:
            return f"[{', '.join(self._text(each, operands) for each in item)}]"
        if type(item) is tuple:
            return f"({' '.join(self._text(each, operands) + ',' for each in item)})"
        return self._constant(item)

    def _view(self, name: str, view: View | None) -> str:
        if view is None:
            return name
        size, stride, offset = view
        return f"as_strided({name}, {_numbers_of(size)}, {_numbers_of(stride)}, {offset})"

    # segments

    def segment(self, number: int, pack: int, chosen: Sequence[int]) -> None:
        self._views: dict[int, View] = {}  # how the tensor in a variable looks
        self._bound.add("where")
        self._line(f"where = yield  # saved tensor {pack}")
        loaded = self._loaded(pack, chosen)
        for value in loaded:
            self._load(number, value)
        self._delete(["where"])
        for index in chosen:
            self._operation(number, index)
        use = self._use(pack)
        view = self._view_of(use)
        self._line(f"made.append({self._view(f'v{use.value}', view)})")
        touched = [*loaded, use.value, *(v for i in chosen for v in (*self._read(i), *self._values(i)))]
        self._delete([f"v{v}" for v in touched if v in loaded or self._last.get(v, (-1, 0))[0] <= number])

    def _values(self, index: int) -> list[int]:
        return list(self._graph.operations[index].values)

    def _load(self, number: int, value: int) -> None:
        source = self._source(value)
        kind, index = source
        if kind == PACK:
            self._line(f"{self._bind(value)} = {self._held(number, source)}")
            self._views[value] = self._use(index).view
            return
        reader = "argument" if kind == ARGUMENT else "buffer" if kind == BUFFER else "parameter"
        self._line(f"{self._bind(value)} = where.{reader}({index}).detach()")
        self._views[value] = self._graph.values[value].base

    def _held(self, number: int, source: Source) -> str:
        self.held.add(source[1])
        is_last = self._last_load[source] == number and not self._again
        return f"{'held_last' if is_last else 'held'}(kept, {source[1]})"

    def _view_of(self, use: Use) -> View | None:
        """The size, stride and offset of an operand; None if they are those of the variable."""
        return None if self._views.get(use.value, self._graph.values[use.value].base) == use.view else use.view

    def _operation(self, number: int, index: int) -> None:
        op = self._graph.operations[index]
        if index in self._scaled.values():
            return  # its scaling makes the noise
        draw = self._scaled.get(index, index)
        self.operations.append(_noise if draw in self._drawn else op.function)
        if draw in self._drawn:
            self._from_mask(number, op, self._drawn[draw])
        else:
            self._call(number, index, op)
        done = [v for v in (*self._read(index), *op.values) if not self._is_loaded(v)]
        self._delete([f"v{v}" for v in done if self._last.get(v, (-1, 0)) <= (number, index)])

    def _from_mask(self, number: int, op: Operation, source: Source) -> None:
        """The noise, or the scaled noise, from its mask."""
        value = op.written[0]
        found = self._graph.values[value]
        size, stride, _ = found.base
        pair = torch.tensor([0, 1], dtype=found.dtype, device=found.device)
        if op.function in _SCALINGS:
            arguments, options = op.tree.shape
            pair = op.function(pair, *arguments[1:], **options)
        made = f"noise({self._held(number, source)}, {self._name(pair, 'pair')}, "
        self._line(f"{self._bind(value)} = {made}{_numbers_of(size)}, {_numbers_of(stride)})")

    def _call(self, number: int, index: int, op: Operation) -> None:
        replaced = {op.operands[i].value: new for i, new in op.written.items()}
        for old, new in replaced.items():
            whole = f"v{old}"
            if self._copies(old, number, index):
                whole = self._view(whole, self._graph.values[old].base) + ".clone()"
            self._line(f"{self._bind(new)} = {whole}")
        operands = [self._view(f"v{replaced.get(u.value, u.value)}", self._view_written(u, replaced))
                    for u in op.operands]  # fmt: skip
        arguments, options = op.tree.shape
        parts = [self._text(item, operands) for item in arguments]
        parts += [f"{key}={self._text(item, operands)}" for key, item in options.items()]
        name = self._name(op.function, str(op.function))
        self._assign(op, f"{name}({', '.join(parts)})", (number, index))

    def _assign(self, op: Operation, call: str, now: tuple[int, int]) -> None:
        """Assign the results that are read later to variables."""
        wanted = {p: v for p, v in op.new_values.items() if self._last.get(v, (-1, 0)) > now and not self._is_loaded(v)}
        is_one = _returns_one(op)
        if is_one and wanted:
            call = f"{self._bind(wanted[0])} = {call}"
        elif wanted:
            call = f"results = {call if _returns_tensors(op) else f'tensors({call})'}"
        if op.random:
            self.states.add(op.packs_before)
            self._line(f"before = drawing(states, {op.packs_before})")
            self.lines += ["    try:", f"        {call}", "    finally:", "        before.restore()", "    del before"]
        else:
            self._line(call)
        if not is_one and wanted:
            for position, value in wanted.items():
                self._line(f"{self._bind(value)} = results[{position}]")
            self._line("del results")

    def _view_written(self, use: Use, replaced: dict[int, int]) -> View | None:
        if use.value not in replaced:
            return self._view_of(use)
        return None if self._graph.values[use.value].base == use.view else use.view

    def _copies(self, old: int, number: int, index: int) -> bool:
        """Whether the old version is still needed when an operation writes over it."""
        return self._is_loaded(old) or old in self._saved or self._last[old] > (number, index)


def _numbers_of(values: Sequence[int]) -> str:
    return f"({' '.join(f'{int(value)},' for value in values)})"


def _returns_one(op: Operation) -> bool:
    """Whether the result is a tensor, and no tuple or list of one."""
    schema = _compat.schema_of(op.function)
    return op.results == 1 and (schema is None or [str(result.type) for result in schema.returns] == ["Tensor"])


def _returns_tensors(op: Operation) -> bool:
    """Whether the results are a tuple of tensors, none of them missing or in a list."""
    schema = _compat.schema_of(op.function)
    return (
        schema is not None
        and len(schema.returns) == op.results
        and all(str(result.type) == "Tensor" for result in schema.returns)
    )


# -- what the code calls -------------------------------------------------------------------------------------


def _held(kept: Kept, index: int) -> torch.Tensor:
    """The kept tensor or mask of a saved tensor, if it was not written since."""
    found = kept.get(index)
    if found is None or _compat.saved_version(found[0]) != found[1]:
        raise Missing
    return found[0]


def _held_last(kept: Kept, index: int) -> torch.Tensor:
    """Like `_held`, for the last use: the value is released."""
    tensor = _held(kept, index)
    del kept[index]
    return tensor


def _drawing(states: dict[int, RandomState], count: int) -> RandomState:
    """Sets the random state after `count` saved tensors, and returns the present one, to be restored."""
    state = states.get(count)
    if state is None:
        raise Missing
    return state.exchange()


def _noise(mask: torch.Tensor, pair: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """The first number of a pair where a mask is not set, the second where it is."""
    noise = torch.empty_strided(size, stride, dtype=pair.dtype, device=mask.device)
    if mask.dtype is torch.uint8:
        return bit_masks.unpack(mask, pair, noise)
    return torch.where(mask, pair[1], pair[0], out=noise)


def _tensors(result: Any) -> list[torch.Tensor]:
    return list(tensors_in(result))


_HELPERS = {
    "as_strided": torch.as_strided,
    "drawing": _drawing,
    "held": _held,
    "held_last": _held_last,
    "noise": _noise,
    "tensors": _tensors,
}
