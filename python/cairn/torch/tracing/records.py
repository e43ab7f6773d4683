"""The parts of a recorded step, before it is a program: records, their results, and views of storages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..base import operators
from .graph_program import Call, External, Local


@dataclass(frozen=True)
class Geometry:
    """Which part of its storage a tensor covers, and with which shape, strides and type."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor."""
        return cls(
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def covers(self, storage_bytes: int) -> bool:
        """Whether it shows every element of the storage, once."""
        count = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: pair[1]):
            if size != 1:
                if stride != count:
                    return False
                count *= size
        plain = not self.offset and not self.is_conj and not self.is_neg
        return plain and count * self.dtype.itemsize == storage_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of a new tensor of this shape."""
        return math.prod(self.size) * self.dtype.itemsize

    def described(self) -> str:
        """Type, shape and strides as text."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}{list(self.stride)}"


@dataclass(eq=False)
class Record:
    """One operation of the program, while the step is recorded.

    Attributes
    ----------
    name
        Its name in messages.
    is_backward
        Whether it was performed in the backward.
    base
        For a view, the result that made its storage.
    calls
        The calls that perform it, with operands in place of tensors.
    outputs
        The results that later records read.
    geometries
        The geometry of each output in its storage.
    storages
        For each output with a new storage: the storage's number and its bytes.
    once
        Whether it must be performed exactly once.
    position
        Its index among the records.
    """

    name: str
    is_backward: bool
    base: Output | External | None = None
    calls: list[Call] = field(default_factory=list)
    outputs: list[Local] = field(default_factory=list)
    geometries: list[Geometry] = field(default_factory=list)
    storages: list[tuple[int, int]] = field(default_factory=list)
    once: bool = False
    position: int = -1

    def add_output(self, local: Local, geometry: Geometry) -> Output:
        """Makes a result of one of its calls an output of the record."""
        self.outputs.append(local)
        self.geometries.append(geometry)
        return Output(self, len(self.outputs) - 1)


@dataclass(frozen=True)
class Output:
    """A result of a record."""

    record: Record
    index: int


Operand = Output | External | Local


def view_call(operand: Operand, geometry: Geometry) -> Call:
    """The call that makes a view of a storage with this geometry."""
    where = (operand, geometry.size, geometry.stride, geometry.offset, geometry.dtype)
    return Call(operators.view_of_storage, where, {}, f"view {geometry.described()}")


@dataclass
class LocalStorage:
    """A storage inside a record that is being written."""

    record: Record
    local: Local
    geometry: Geometry

    def view(self, geometry: Geometry) -> Local:
        """Where the record's calls find a part of it."""
        if geometry == self.geometry:
            return self.local
        self.record.calls.append(view_call(self.local, geometry))
        return Local(len(self.record.calls) - 1, 0)
