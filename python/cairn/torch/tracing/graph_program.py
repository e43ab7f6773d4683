"""A traced training step as a program: operations on values, in the order in which the step performed them.

An operation is one node of the cairn-graph. It consists of one call of an operator, or of a few if the step wrote in
place: a write before the first reader belongs to the operation that made the value. Operands are other operations'
results, tensors from outside (parameters, inputs, constants), or results of the operation's own earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..offloading.host_copies import HostCopies

# -- operands ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A result of an operation of the program."""

    operation: int
    output: int


@dataclass(frozen=True)
class External:
    """A tensor that was there before the step."""

    index: int


@dataclass(frozen=True)
class Local:
    """A result of an earlier call of the same operation."""

    call: int
    result: int


@dataclass(frozen=True)
class ExternalTensor:
    """A tensor that was there before the step, or that the program's text has as numbers."""

    name: str
    tensor: torch.Tensor
    is_literal: bool = False


# -- the program ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of an operator; operands stand where the tensors were.

    described: the same with shapes and types in their place; calls that are described alike take alike time.
    repeats: it gives the same bits whenever it is made.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    described: str
    repeats: bool = True


@dataclass(frozen=True)
class Operation:
    """One node of the graph.

    Attributes
    ----------
    name
        Its name in messages.
    calls
        The calls that perform it.
    outputs
        The results that later operations read; the others are freed with it.
    storage_bytes
        Bytes of each storage that is new with it; none for a view.
    deps
        The operations whose results it reads, ascending.
    base
        For a view, the operation that allocated its storage.
    once
        It draws random numbers, talks to other processes or does not repeat its bits, so it is computed once.
    keep
        Its outputs are results of the step.
    """

    name: str
    calls: tuple[Call, ...]
    outputs: tuple[Local, ...]
    storage_bytes: tuple[int, ...]
    deps: tuple[int, ...]
    base: int | None
    once: bool
    keep: bool

    @property
    def bytes(self) -> int:
        """Bytes that its outputs take."""
        return sum(self.storage_bytes)

    @property
    def described(self) -> str:
        """Equal for operations that take alike time and workspace."""
        return " ".join([*(call.described for call in self.calls), *map(repr, self.outputs)])


@dataclass(frozen=True)
class Program:
    """A training step.

    Attributes
    ----------
    operations
        In the order of the step.
    externals
        The tensors from outside.
    backward_begins_at
        How many operations come before the backward.
    loss
        The value that is the loss.
    outputs
        The tensors of the model's output, where they are results.
    grads
        Gradients by the name of their parameter or input.
    written
        The new contents of tensors from outside (buffers): pairs (external, value).
    """

    operations: tuple[Operation, ...]
    externals: tuple[ExternalTensor, ...]
    backward_begins_at: int
    loss: Value | External
    outputs: tuple[Value | External, ...]
    grads: Mapping[str, Value | External]
    written: tuple[tuple[int, Value | External], ...]

    def store_all(self) -> list[tuple[str, int]]:
        """The program as a schedule: every operation once, each value dropped after its last reader."""
        last = {v: v for v in range(len(self.operations))}
        for v, operation in enumerate(self.operations):
            last.update(dict.fromkeys(operation.deps, v))
            if operation.base is not None:
                last[operation.base] = v  # a view needs its base, even if it is made of another view
        dying: dict[int, list[int]] = {}
        for v, reader in last.items():
            if not self.operations[v].keep:
                dying.setdefault(reader, []).append(v)
        ops: list[tuple[str, int]] = []
        for v in range(len(self.operations)):
            ops.append(("compute", v))
            ops += [("drop", dead) for dead in dying.get(v, [])]
        return ops


# -- performing operations -----------------------------------------------------------------------------------


class LiveValues:
    """The values that exist while a program runs.

    A view holds all that its base returned, as in the simulator's rules, where a node's memory is one storage.
    """

    def __init__(self, program: Program, externals: Sequence[torch.Tensor]) -> None:
        self._operations = program.operations
        self._externals = externals
        self._values: list[list[Any] | None] = [None] * len(program.operations)
        self._bases: list[list[Any] | None] = [None] * len(program.operations)
        devices = {tensor.device for tensor in externals if tensor.device.type != "cpu"}
        self._host = HostCopies(devices.pop() if devices else torch.device("cpu"))

    def compute(self, v: int) -> None:
        """Performs an operation; afterwards its outputs exist and nothing else of it."""
        operation = self._operations[v]
        results: list[list[Any]] = []
        for call in operation.calls:
            args = [self._operand(argument, results) for argument in call.args]
            kwargs = {name: self._operand(argument, results) for name, argument in call.kwargs.items()}
            result = call.function(*args, **kwargs)
            results.append(list(result) if isinstance(result, (tuple, list)) else [result])
        self._values[v] = [results[output.call][output.result] for output in operation.outputs]
        if operation.base is not None:
            self._bases[v] = self._base_of(operation)

    def drop(self, v: int) -> None:
        """Releases an operation's outputs."""
        self._taken(v)
        self._host.wait_out(v)
        self._values[v] = self._bases[v] = None

    def offload(self, v: int) -> None:
        """Starts to copy an operation's outputs to the host; the device keeps its own."""
        values = self._taken(v)
        if values is None:
            raise RuntimeError(f"{self._operations[v].name} is sent to the host but does not exist")
        self._host.offload(v, values)

    def prefetch(self, v: int) -> None:
        """Starts to copy an operation's outputs back from the host, which keeps its own."""
        self._host.prefetch(v)

    def discard(self, v: int) -> None:
        """Releases the copy on the host."""
        self._host.discard(v)

    @property
    def host_peak_bytes(self) -> int:
        """The largest memory that copies on the host took at any time."""
        return self._host.peak_bytes

    def fetch_results(self) -> None:
        """Brings back what is kept and ended on the host alone."""
        for v in self._host.values():
            if self._taken(v) is None and self._operations[v].keep:
                self.prefetch(v)

    def clear(self) -> None:
        """Releases everything."""
        self._values = [None] * len(self._values)
        self._bases = [None] * len(self._bases)

    def close(self) -> None:
        """Ends all copying to and from the host."""
        self._host.close()

    def _taken(self, v: int) -> list[Any] | None:
        """An operation's outputs, if they exist; waits for their prefetch."""
        if self._host.is_arriving(v):
            self._values[v] = self._host.take(v)
        return self._values[v]

    def tensor(self, where: Value | External) -> torch.Tensor:
        """A value that exists."""
        if isinstance(where, External):
            return self._externals[where.index]
        values = self._taken(where.operation)
        if values is None:
            raise RuntimeError(f"{self._operations[where.operation].name} is read but does not exist")
        tensor: torch.Tensor = values[where.output]
        return tensor

    def _base_of(self, view: Operation) -> list[Any] | None:
        """The outputs of the operation that allocated the storage of a view."""
        shown = next(dep for dep in view.deps if dep == view.base or self._operations[dep].base == view.base)
        return self._taken(shown) if shown == view.base else self._bases[shown]

    def _operand(self, argument: Any, results: Sequence[Sequence[Any]]) -> Any:
        kind = type(argument)
        if kind is Value or kind is External:
            return self.tensor(argument)
        if kind is Local:
            return results[argument.call][argument.result]
        if kind is list:
            return [self._operand(item, results) for item in argument]
        return argument
