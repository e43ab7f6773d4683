"""Rebuilding the saved tensors of a block that were not kept: straight-line programs, run just in time.

A choice (a letter for each saved tensor: keep, drop, keep as a mask) and the order in which the backward asks for the
tensors are compiled, once, into one *segment* for each tensor that is not kept: the operations that it needs and that
no earlier segment ran, in their recorded order. What later segments read stays in registers until it is read for the
last time; everything else is let go at once. So each operation runs at most once in a backward, dead parts not at all.

Operands. A register holds a tensor over a value's storage; operands that look at it differently are views of it. What a
segment reads of the block's arguments, parameters, buffers and kept tensors is loaded when the segment runs. A kept
tensor that segments read is held until the last of them has run, for autograd lets go of its own earlier.

In place. An operation that writes in place writes over its register if nobody reads the old version afterwards, and a
copy of it otherwise.

Random operations run from the state that the generators were in when the last tensor was saved before them, which was
taken down then; afterwards the generators are put back.

If tensors are asked for in another order (a second backward, an inner gradient), the registers are emptied, and each
tensor is rebuilt by a program of its own. A tensor whose sources are gone is not rebuilt: None says so, and the block
is run again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from . import _compat
from .ambient import RandomState
from .block_graph import ARGUMENT, BUFFER, BlockGraph, Operation, Pack, Use
from .block_options import DROP, KEEP, MASK, is_always_there, masks, sources
from .holders import View, digest
from .tree import Slot, tensors_in

PACK = "saved tensor"
Source = tuple[str, int]  # an argument, a parameter, a buffer, a kept tensor or a mask, and which
Hole = tuple[int, int, View | None]  # position, register, and how the operand looks at it, if differently


class Sources(Protocol):
    """Where a rebuild finds what it does not hold itself."""

    def argument(self, index: int) -> torch.Tensor:
        """A tensor among the block's arguments."""

    def parameter(self, index: int) -> torch.Tensor:
        """A parameter of the block."""

    def buffer(self, index: int) -> torch.Tensor:
        """A buffer of the block."""


class Missing(Exception):
    """Something that a rebuild reads is no longer there."""


# -- programs ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Step:
    """One operation with its operands in registers. `read` and `made` are by value, for the compiler."""

    function: Any
    arguments: list[Any]
    options: dict[str, Any]
    holes: list[Hole]
    results: list[tuple[int, int]]  # position among the tensors of the result, register
    writes: list[tuple[int, int, View, bool]]  # old register, new one, how the whole looks, whether to copy
    several: bool = False  # the result is not one tensor
    build: Callable[[list[torch.Tensor]], Any] | None = None  # where operands are inside lists
    state: int | None = None  # runs from this random state
    frees: list[int] = dataclasses.field(default_factory=list)

    def run(self, registers: list[Any], states: dict[int, RandomState]) -> None:
        for old, new, base, copy in self.writes:
            registers[new] = _whole(registers[old], base).clone() if copy else registers[old]
        if self.build is None:
            arguments = self.arguments.copy()
            for position, register, view in self.holes:
                tensor = registers[register]
                arguments[position] = tensor if view is None else torch.as_strided(tensor, *view)
            options = self.options
        else:
            looks = [(registers[r], view) for _, r, view in self.holes]
            arguments, options = self.build([t if v is None else torch.as_strided(t, *v) for t, v in looks])
        call = self.function if self.state is None else functools.partial(self._drawn, states)
        result = call(*arguments, **options)
        if self.several:
            tensors = list(tensors_in(result))
            for position, register in self.results:
                registers[register] = tensors[position]
        else:
            for _, register in self.results:
                registers[register] = result
        for register in self.frees:
            registers[register] = None

    def _drawn(self, states: dict[int, RandomState], *arguments: Any, **options: Any) -> Any:
        state = states.get(self.state) if self.state is not None else None
        if state is None:
            raise Missing
        current = state.exchange()
        try:
            return self.function(*arguments, **options)
        finally:
            current.restore()


def _whole(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return torch.as_strided(tensor, *view)


@dataclasses.dataclass
class Segment:
    """Rebuilds one saved tensor."""

    loads: list[tuple[int, Source]]  # register, and where from
    steps: list[_Step]
    result: int
    view: View | None
    frees: list[int] = dataclasses.field(default_factory=list)  # registers, once it has run
    forgets: list[int] = dataclasses.field(default_factory=list)  # kept tensors that no later segment reads


@dataclasses.dataclass
class Program:
    """A compiled choice. `held`: the kept tensors that segments read; `states`: when random state is taken down."""

    graph: BlockGraph
    decisions: str
    order: list[int]  # of the tensors that are not kept, as the backward asks for them
    segments: list[Segment]
    registers: int
    held: frozenset[int]
    states: frozenset[int]  # after so many saved tensors
    samples: list[_Sample | None]
    compiler: Compiler
    alone: dict[int, Segment] = dataclasses.field(default_factory=dict)

    def segment_alone(self, pack: int) -> Segment:
        """The program that rebuilds one tensor from what is kept."""
        if pack not in self.alone:
            self.alone[pack] = self.compiler.segments([pack])[0]
        return self.alone[pack]


def compile_program(graph: BlockGraph, decisions: str, asked: Sequence[int]) -> Program:
    """Prepares a choice; `asked` is the order in which a backward asked for the saved tensors.

    Raises ValueError where a tensor that is not kept cannot be rebuilt from what is.
    """
    if len(decisions) != len(graph.packs):
        raise ValueError(f"{len(decisions)} decisions for {len(graph.packs)} saved tensors")
    compiler = Compiler(graph, decisions)
    absent = {i for i, letter in enumerate(decisions) if letter != KEEP}
    order = [i for i in asked if i in absent]  # a function may ask twice
    order += sorted(absent.difference(order), reverse=True)
    segments = compiler.segments(order)
    held = {i for s in segments for _, (kind, i) in s.loads if kind in (PACK, MASK)}
    states = {step.state for s in segments for step in s.steps if step.state is not None}
    samples = [_sample_of(graph.packs[i]) if decisions[i] != KEEP else None for i in range(len(decisions))]
    count = compiler.register_count
    return Program(graph, decisions, order, segments, count, frozenset(held), frozenset(states), samples, compiler)


class Compiler:
    """Finds, for each tensor that is not kept, the operations that it needs."""

    def __init__(self, graph: BlockGraph, decisions: str) -> None:
        self._graph = graph
        self._packs = graph.packs
        self._kept: dict[int, Source] = {}
        self._drawn: dict[int, Source] = {}  # by drawing operation: the mask that is kept
        for value, first in sources(graph).items():
            shown = [i for i, p in enumerate(graph.packs) if p.use is not None and p.use.value == value]
            kept = [i for i in shown if decisions[i] == KEEP]
            if kept and not is_always_there(graph, value):
                self._kept[value] = (PACK, kept[0])
            if decisions[first] == MASK:
                self._mark_mask(value, first)

    def _mark_mask(self, value: int, pack: int) -> None:
        drawn = [op for op, shown in masks(self._graph).items() if shown == value]
        if not drawn:
            raise ValueError(f"saved tensor {pack} is no dropout mask")
        self._drawn[drawn[0]] = (MASK, pack)

    @property
    def register_count(self) -> int:
        return 2 * len(self._graph.values)

    def segments(self, order: Sequence[int]) -> list[Segment]:
        """The segments, in the order in which they will run."""
        present: set[int] = set()
        needed = []
        for pack in order:
            use = self._packs[pack].use
            assert use is not None
            chosen = self._needed(use.value, present)
            needed.append(chosen)
            for index in chosen:
                present.update(self._graph.operations[index].values)
        return _Emission(self._graph, self._packs, self._kept, self._drawn).emit(order, needed)

    def _needed(self, wanted: int, present: set[int]) -> list[int]:
        """The operations without which a value is not there, in their recorded order."""
        chosen: set[int] = set()
        missing = [wanted]
        while missing:
            value = missing.pop()
            if value in present or value in self._kept or is_always_there(self._graph, value):
                continue
            index = self._graph.values[value].operation
            if index in chosen:
                continue
            if index < 0 or self._graph.operations[index].reason:
                raise ValueError(f"value {value} can neither be kept nor rebuilt")
            chosen.add(index)
            if index not in self._drawn:
                missing += [use.value for use in self._graph.operations[index].operands]
        return sorted(chosen)


class _Emission:
    """Turns lists of operations into segments, with registers freed after their last use."""

    def __init__(
        self, graph: BlockGraph, packs: Sequence[Pack], kept: dict[int, Source], drawn: dict[int, Source]
    ) -> None:
        self._graph, self._packs, self._kept, self._drawn = graph, packs, kept, drawn
        self._saved = {pack.use.value for pack in packs if pack.use is not None}
        self._last: dict[int, tuple[int, int]] = {}  # by value: the last segment and operation that reads it
        self._end = len(graph.operations)

    def emit(self, order: Sequence[int], needed: Sequence[Sequence[int]]) -> list[Segment]:
        self._note_uses(order, needed)
        segments = []
        for number, (pack, chosen) in enumerate(zip(order, needed, strict=True)):
            segments.append(self._segment(number, pack, chosen))
        last_load = {load: number for number, segment in enumerate(segments) for _, load in segment.loads}
        for (kind, index), number in last_load.items():
            if kind in (PACK, MASK):
                segments[number].forgets.append(index)
        return segments

    def _note_uses(self, order: Sequence[int], needed: Sequence[Sequence[int]]) -> None:
        for number, (pack, chosen) in enumerate(zip(order, needed, strict=True)):
            for index in chosen:
                for value in self._read(index):
                    self._last[value] = number, index
            use = self._packs[pack].use
            assert use is not None
            self._last[use.value] = number, self._end

    def _read(self, index: int) -> list[int]:
        return [] if index in self._drawn else [use.value for use in self._graph.operations[index].operands]

    def _is_loaded(self, value: int) -> bool:
        return value in self._kept or is_always_there(self._graph, value)

    def _segment(self, number: int, pack: int, chosen: Sequence[int]) -> Segment:
        use = self._packs[pack].use
        assert use is not None
        self._looks: dict[int, View] = {}  # how the tensor in a register looks
        segment = Segment([], [], use.value, None)
        read = [value for index in chosen for value in self._read(index)] + [use.value]
        for value in dict.fromkeys(v for v in read if self._is_loaded(v)):
            self._load(segment, value)
        for index in chosen:
            segment.steps.append(self._step(segment, number, index))
        segment.view = self._look(use)
        touched = {*read, *self._made(chosen)}
        segment.frees = [v for v in touched if self._is_loaded(v) or self._last.get(v, (-1, 0))[0] <= number]
        return segment

    def _made(self, chosen: Sequence[int]) -> list[int]:
        return [value for index in chosen for value in self._graph.operations[index].values]

    def _load(self, segment: Segment, value: int) -> None:
        root = self._graph.values[value].root
        source = self._kept.get(value) or root
        assert source is not None
        segment.loads.append((value, source))
        kind, index = source
        shown = self._packs[index].use if kind == PACK else None
        self._looks[value] = shown.view if shown is not None else self._graph.values[value].base

    def _look(self, use: Use) -> View | None:
        """How an operand looks at its register; None if just as the register does."""
        return None if self._looks.get(use.value, self._graph.values[use.value].base) == use.view else use.view

    def _step(self, segment: Segment, number: int, index: int) -> _Step:
        op = self._graph.operations[index]
        if index in self._drawn:
            step = self._from_mask(segment, op, self._drawn[index])
        else:
            step = self._operation(number, index, op)
        done = [v for v in {*self._read(index), *op.values} if not self._is_loaded(v)]
        step.frees += [v for v in done if self._last.get(v, (-1, 0)) <= (number, index)]
        return step

    def _operation(self, number: int, index: int, op: Operation) -> _Step:
        replaced = {op.operands[i].value: new for i, new in op.written.items()}
        values = self._graph.values
        writes = [(old, new, values[old].base, self._copies(old, number, index)) for old, new in replaced.items()]
        views = [(replaced.get(use.value, use.value), self._look_written(use, replaced)) for use in op.operands]
        arguments, options = op.tree.shape
        step = _Step(op.function, list(arguments), options, [], list(op.made.items()), writes)
        step.several = op.results != 1
        if op.random:
            step.state = op.packs_before
        tops = [(i, item.index) for i, item in enumerate(arguments) if type(item) is Slot]
        if len(tops) == len({slot for _, slot in tops}) == len(op.operands):
            step.holes = [(position, *views[slot]) for position, slot in tops]
        else:
            step.holes = [(0, *view) for view in views]
            step.build = op.tree.build
        return step

    def _look_written(self, use: Use, replaced: dict[int, int]) -> View | None:
        if use.value not in replaced:
            return self._look(use)
        return None if self._graph.values[use.value].base == use.view else use.view

    def _copies(self, old: int, number: int, index: int) -> bool:
        """Whether the old version is still needed when an operation writes over it."""
        return self._is_loaded(old) or old in self._saved or self._last[old] > (number, index)

    def _from_mask(self, segment: Segment, op: Operation, source: Source) -> _Step:
        """The noise that was drawn, from its mask."""
        value = op.written[0]
        found = self._graph.values[value]
        register = len(self._graph.values) + value
        segment.loads.append((register, source))
        step = _Step(_noise, [None, found.dtype, found.base], {}, [(0, register, None)], [(0, value)], [])
        step.frees.append(register)
        return step


def mask_of(noise: torch.Tensor) -> torch.Tensor:
    """The mask of a scaled noise: where it is not zero."""
    with torch.no_grad():
        return noise.ne(0)


def _noise(mask: torch.Tensor, dtype: torch.dtype, view: View) -> torch.Tensor:
    size, stride, _ = view
    noise = torch.empty_strided(size, stride, dtype=dtype, device=mask.device)
    return noise.copy_(mask)


# -- running -------------------------------------------------------------------------------------------------


class Rebuild:
    """What one run of a block keeps for rebuilding what it did not keep."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._registers: list[Any] = [None] * program.registers
        self._held: dict[int, tuple[torch.Tensor, int]] = {}  # with its version
        self._states: dict[int, RandomState] = {}
        self._samples: dict[int, Any] = {}
        self._position = 0
        self.was_wrong = False  # a tensor came out otherwise than it was saved
        self.prints: dict[int, Any] | None = None  # fingerprints of what was not kept, where a program is on trial

    def take_state(self, packs: int, state: RandomState) -> None:
        """The state of the generators after so many tensors were saved."""
        self._states[packs] = state

    def saved(self, index: int, tensor: torch.Tensor) -> bool:
        """Takes note of a tensor that autograd saves; says whether it is to be kept."""
        program = self.program
        letter = program.decisions[index]
        if letter != KEEP:
            sample = program.samples[index]
            if sample is not None:
                self._samples[index] = sample.of(tensor)
        if index in program.held:
            self.hold(index, tensor.detach() if letter == KEEP else mask_of(tensor))
        return letter == KEEP

    def hold(self, index: int, tensor: torch.Tensor) -> None:
        """Keeps a tensor, or a mask, that segments read."""
        self._held[index] = tensor, _compat.version(tensor)

    def tensor(self, index: int, where: Sources) -> torch.Tensor | None:
        """A tensor that was not kept; None if it cannot be had."""
        program = self.program
        if self._position < len(program.order) and program.order[self._position] == index:
            segment = program.segments[self._position]
            self._position += 1
        else:
            self._registers = [None] * program.registers
            self._position = len(program.order) + 1
            segment = program.segment_alone(index)
        try:
            with _compat.kernels_only(self._device_type(index)):
                tensor = self._run(segment, where, in_order=self._position <= len(program.order))
        except Missing:
            return None
        if self._is_right(index, tensor):
            return tensor
        self.was_wrong = True
        return None

    def _device_type(self, index: int) -> str:
        return self.program.graph.packs[index].device.type

    def _run(self, segment: Segment, where: Sources, in_order: bool) -> torch.Tensor:
        registers = self._registers
        for register, source in segment.loads:
            registers[register] = self._load(source, where)
        for step in segment.steps:
            step.run(registers, self._states)
        tensor = registers[segment.result]
        if segment.view is not None:
            tensor = torch.as_strided(tensor, *segment.view)
        if in_order:
            for register in segment.frees:
                registers[register] = None
            for index in segment.forgets:
                self._held.pop(index, None)
        else:
            self._registers = [None] * len(registers)
        return tensor.detach()

    def _load(self, source: Source, where: Sources) -> torch.Tensor:
        kind, index = source
        if kind in (PACK, MASK):
            held, version = self._held.get(index, (None, 0))
            if held is None or _compat.version(held) != version:
                raise Missing
            return held
        if kind == ARGUMENT:
            return where.argument(index)
        return where.buffer(index) if kind == BUFFER else where.parameter(index)

    def _is_right(self, index: int, tensor: torch.Tensor) -> bool:
        if self.prints is not None:
            return bool(self.prints.get(index) == fingerprint(tensor))
        sample = self.program.samples[index]
        return sample is None or sample.of(tensor) == self._samples.get(index)


# -- comparing -----------------------------------------------------------------------------------------------


class _Sample:
    """A few bytes of a tensor on the CPU: whether it is what it was, at almost no cost."""

    __slots__ = ("_places", "_size")

    def __init__(self, places: list[int], size: int) -> None:
        self._places, self._size = places, size

    def of(self, tensor: torch.Tensor) -> list[bytes]:
        start, size = tensor.data_ptr(), self._size
        return [ctypes.string_at(start + place, size) for place in self._places]


def _sample_of(pack: Pack) -> _Sample | None:
    if pack.device.type != "cpu" or pack.use is None or 0 in pack.shape:
        return None
    size, stride, _ = pack.use.view
    width = pack.dtype.itemsize
    places = [
        sum((extent * part // 7) * step for extent, step in zip(size, stride, strict=True)) * width for part in (2, 5)
    ]
    return _Sample(places, width)


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that almost surely differs where two tensors of one shape do; takes no memory where it can."""
    with torch.no_grad():
        stride = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda d: -stride[d])
        if tensor.device.type != "cpu" or tensor.numel() == 0 or not tensor.permute(order).is_contiguous():
            return digest(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        return zlib.crc32((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))


__all__ = ["DROP", "Program", "Rebuild", "Sources", "compile_program", "fingerprint", "mask_of"]
