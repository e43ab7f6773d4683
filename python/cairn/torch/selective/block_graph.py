"""The recorded graph of a block: its operations in order, the values between them, and the values that autograd saves.

Problem. To keep some of a block's saved tensors and recompute the others, one has to know how each was computed.
Saved-tensor hooks show which tensors are saved and when, but not how they were computed.

Recording. The block runs once, in its own autograd graph. A dispatch mode records every operation that reaches a
kernel, below autograd and autocast, and pack hooks record the tensors saved in between. A *value* is one version of one
storage: an operation makes the first version of the storages that it returns, and the next version of those that it
writes in place. Views make no values; an operand is a value with the size, stride and offset by which the operation
reads it. So aliases are one value, nothing is kept twice, and an in-place chain is a chain of values.

Rules decide which operations may be replayed, and `Operation.reason` names the rule that forbids one. Operations of
unknown libraries are not replayed, nor those that write a value from before the block, nor random ones whose state was
not recorded; their results are kept. A block may also do something else in the next step: it reads values of its
tensors from Python, has shapes that depend on data, writes its arguments or changes its own attributes. Such a block is
not recomputed selectively (`BlockGraph.refusal`). Batch normalisation writes statistics that its schema does not
declare; it is replayed without them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..base import _compat
from ..base.tree import Tree
from .saved_tensors import View
from .submodule_calls import Call

ARGUMENT, PARAMETER, BUFFER, OUTSIDE = "argument", "parameter", "buffer", "outside"
Root = tuple[str, int]  # where a value comes from that was there before the block: kind, and which

MAX_OPERATIONS = 20000


@dataclasses.dataclass(frozen=True)
class Use:
    """An operand or a saved tensor: a value, with the size, stride and offset by which it is read."""

    value: int
    view: View


@dataclasses.dataclass
class Value:
    """One version of one storage. `base` is the size, stride and offset of the tensor that the operation returned."""

    index: int
    storage: int  # a number for the storage, the same for all its versions
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    base: View
    operation: int = -1  # which one made it; -1: it was there before
    root: Root | None = None
    before: int = -1  # the version that was written over
    overwritten: bool = False  # there is a later version


@dataclasses.dataclass
class Operation:
    """One call of a kernel, with its tensors taken out."""

    function: Any
    tree: Tree  # of (args, kwargs)
    operands: list[Use]
    new_values: dict[int, int]  # value by position among the tensors of the result
    written: dict[int, int]  # value made by writing in place, by operand
    results: int  # tensors in the result
    packs_before: int  # how many tensors were saved when it ran
    random: bool = False
    reason: str = ""  # why it is not replayed; empty: it may be
    nanoseconds: int = 0

    def forbid(self, reason: str) -> None:
        """The operation must not be replayed. The first reason stays; an empty one forbids nothing."""
        self.reason = self.reason or reason

    @property
    def name(self) -> str:
        return str(self.function)

    @property
    def values(self) -> Iterator[int]:
        yield from self.new_values.values()
        yield from self.written.values()


@dataclasses.dataclass(frozen=True, slots=True)
class Pack:
    """A tensor that autograd saves. `maker`: the kind of its `grad_fn`; None: it existed before the block.

    cyclic: it may be an output of the node that saves it, so the graph must not hold it with its `grad_fn`.
    read_in_forward: the block reads it before its end, in a backward of its own.
    """

    use: Use | None  # None: not a plain tensor, or its value as another type, conjugate or negative
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    maker: Any
    cyclic: bool = True
    read_in_forward: bool = False

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of another run may correspond to this one."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype or type(tensor) not in _compat.PLAIN_CLASSES:
            return False
        if self.maker is not None and type(tensor.grad_fn) is not self.maker:
            return False
        return self.use is None or (tensor.stride(), tensor.storage_offset()) == self.use.view[1:]


@dataclasses.dataclass
class BlockGraph:
    """A recorded run of a block. `returned`: the storages of its outputs; `calls`: the calls of its submodules."""

    values: list[Value]
    operations: list[Operation]
    packs: list[Pack]
    returned: frozenset[int]
    refusal: str = ""  # why the block has no options; empty: it may have
    calls: Sequence[Call] = ()

    def refuse(self, reason: str) -> None:
        """The block must not be recomputed selectively. The first reason stays."""
        self.refusal = self.refusal or reason

    def is_dense(self, value: int) -> bool:
        """Whether the tensor that an operation returned fills its storage, so that a copy of it has the same layout."""
        return is_dense(self.values[value])

    def digest(self) -> str:
        """A digest of the operations: equal for runs that do the same, whatever the sizes and the unused arguments."""
        met: list[int] = []  # the values that are used
        places: dict[int, int] = {}

        def number(value: int) -> int:
            if value < 0 or value in places:
                return places.get(value, value)
            places[value] = len(met)
            met.append(value)
            return places[value]

        lines = [str(number(pack.use.value) if pack.use else None) for pack in self.packs]
        for op in self.operations:
            operands = [number(use.value) for use in op.operands]
            new, written = ({k: number(v) for k, v in of.items()} for of in (op.new_values, op.written))
            lines.append(f"{op.name} {operands} {new} {written} {op.packs_before} {bool(op.reason)}")
        arguments: dict[Root, int] = {}
        for value in map(self.values.__getitem__, met):  # to which the next line adds
            root = value.root
            if root is not None and root[0] == ARGUMENT:
                root = ARGUMENT, arguments.setdefault(root, len(arguments))
            lines.append(f"{root} {value.operation} {number(value.before)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def short_name(func: Any) -> str:
    """The name of an operator without its namespace."""
    return str(_compat.schema_of(func).name).rpartition(":")[2]


def is_dense(value: Value) -> bool:
    """Whether the value fills its storage, in the order of its dimensions or another."""
    size, stride, offset = value.base
    if offset or value.nbytes != _dense_bytes(size, value.dtype):
        return False
    expected = 1
    for step, extent in sorted((st, e) for st, e in zip(stride, size, strict=True) if e != 1):
        if step != expected:
            return False
        expected *= extent
    return True


def _dense_bytes(size: Sequence[int], dtype: torch.dtype) -> int:
    count = 1
    for extent in size:
        count *= extent
    return count * dtype.itemsize
