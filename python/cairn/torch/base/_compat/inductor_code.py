"""The allocations and frees in the code that inductor generates, read from its lines before they become text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from torch import fx

__all__ = ["Event", "GeneratedCode", "generated_code"]


class Event(NamedTuple):
    """One event of generated code.

    Attributes
    ----------
    kind
        "allocate"; "free", of an allocation or of an input of the graph; or "run", of an operator that is no kernel of
        inductor's, whose own workspace lies within it.
    name
        Of the storage; of "run" the graph's node.
    node
        The graph's node that an allocation belongs to; empty if there is none.
    nbytes
        Of an allocation.
    """

    kind: str
    name: str
    node: str = ""
    nbytes: int = 0


class GeneratedCode:
    """The events of the two graphs of one compilation.

    Attributes
    ----------
    forward, backward
        None for a graph that was not compiled, whose lines could not be read, or whose code is in several pieces.
    """

    def __init__(self) -> None:
        self.forward: tuple[Event, ...] | None = None
        self.backward: tuple[Event, ...] | None = None
        self._pieces = [0, 0]

    def add(self, is_backward: bool, events: tuple[Event, ...] | None) -> None:
        """The events of a piece of a graph's code."""
        self._pieces[is_backward] += 1
        setattr(self, "backward" if is_backward else "forward", events if self._pieces[is_backward] == 1 else None)


@contextlib.contextmanager
def generated_code() -> Iterator[GeneratedCode]:
    """Read the code of the graphs that inductor compiles in the body.

    Lines of inductor are private: in a torch where they differ, there are no events.
    """
    code = GeneratedCode()
    try:
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.virtualized import V

        original: Callable[..., Any] = PythonWrapperCodegen.memory_plan_reuse
    except (ImportError, AttributeError):
        yield code
        return

    def planned(wrapper: Any) -> Any:
        result = original(wrapper)
        try:
            events = tuple(_Reader(V.graph).events(wrapper.lines))
        except (AttributeError, KeyError, TypeError):
            events = None
        code.add(bool(V.graph.is_backward), events)
        return result

    with mock.patch.object(PythonWrapperCodegen, "memory_plan_reuse", planned):
        yield code


class _Reader:
    """Tracks which variables of the code refer to which storage. A storage is freed with the last of them."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._storages: dict[str, set[str]] = {}  # by variable: several for a tuple
        self._variables: dict[str, set[str]] = {}  # by storage
        self._allocated: set[str] = set()  # storages that the code allocates
        self._members: set[str] = set()  # variables that are taken out of tuples

    def events(self, lines: Sequence[Any]) -> Iterator[Event]:
        """The events of inductor's lines."""
        self._members = {line.result_name for line in lines if type(line).__name__ == "MultiOutputLine"}
        for line in lines:
            read = getattr(self, f"_{type(line).__name__}", None)
            if read is not None:
                yield from read(line)
        yield from self._delete_all_but(set(self._graph.get_output_names()))

    def _AllocateLine(self, line: Any) -> Iterator[Event]:
        yield from self._allocate(line.node)

    def _ExternKernelAllocLine(self, line: Any) -> Iterator[Event]:
        if _is_tensor(line.node):
            yield from self._allocate(line.node)
        for member in getattr(line.node, "outputs", ()):
            if hasattr(member, "get_name"):
                owner = member if member.get_name() in self._members else line.node
                yield from self._allocate(member, owner.get_name())
        yield Event("run", _origin(line.node))

    def _ExternKernelOutLine(self, line: Any) -> Iterator[Event]:
        yield Event("run", _origin(line.node))

    def _ReuseLine(self, line: Any) -> Iterator[Event]:
        self._alias(line.reused_as.get_name(), line.node.get_name())
        if line.delete_old:
            yield from self._delete(line.node.get_name())

    def _ReinterpretLine(self, line: Any) -> Iterator[Event]:
        self._alias(line.reused_as.get_name(), line.node.get_name())
        yield from ()

    def _FreeIfNotReusedLine(self, line: Any) -> Iterator[Event]:
        if not line.is_reused:
            yield from self._delete(line.node.get_name())

    def _FreeLine(self, line: Any) -> Iterator[Event]:
        yield from self._delete(line.node.get_name())

    def _allocate(self, buffer: Any, owner: str = "") -> Iterator[Event]:
        """Allocate a buffer's storage. owner: the variable that refers to it; by default the buffer's own."""
        name, aliased = buffer.get_name(), _aliased_by(buffer)
        if aliased:
            self._alias(owner or name, aliased[0])
            return
        self._storages.setdefault(owner or name, set()).add(name)
        self._variables[name] = {owner or name}
        self._allocated.add(name)
        yield Event("allocate", name, _origin(buffer), self._bytes(buffer))

    def _alias(self, name: str, aliased: str) -> None:
        """Let a variable refer to the storage of another one, or of an input of the graph."""
        for storage in self._storages.setdefault(aliased, {aliased}):
            self._storages.setdefault(name, set()).add(storage)
            self._variables.setdefault(storage, {storage}).add(name)

    def _delete(self, name: str) -> Iterator[Event]:
        for storage in sorted(self._storages.get(name, {name})):
            variables = self._variables.setdefault(storage, {storage})
            variables.discard(name)
            if not variables:
                yield Event("free", storage)

    def _delete_all_but(self, outputs: set[str]) -> Iterator[Event]:
        """Free all but the outputs when the code returns. Inductor omits the lines that would free them just before."""
        for storage in sorted(self._allocated):
            if self._variables[storage] and not self._variables[storage] & outputs:
                yield Event("free", storage)

    def _bytes(self, buffer: Any) -> int:
        count = getattr(buffer, "count", None)  # of a kernel's workspace
        if count is None or callable(count):
            sizes = self._graph
            count = (getattr(sizes, "get_allocation_storage_size", None) or sizes.get_allocation_size)(buffer)
        return int(self._hint(count)) * int(buffer.get_dtype().itemsize)

    def _hint(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        sizes = self._graph.sizevars
        if hasattr(sizes, "optimization_hint"):
            return int(sizes.optimization_hint(size, fallback=0))
        return int(sizes.size_hint(size, fallback=0))


def _aliased_by(buffer: Any) -> list[str]:
    """The variables whose storage a buffer shares. A kernel's workspace shares none."""
    return list(buffer.get_inputs_that_alias_output()) if hasattr(buffer, "get_inputs_that_alias_output") else []


def _is_tensor(buffer: Any) -> bool:
    """Whether a buffer is one tensor: not a tuple of some, and not nothing."""
    from torch._inductor import ir

    return not isinstance(buffer.get_output_spec(), (ir.MultiOutputLayout, ir.NoneLayout, ir.NonOwningLayout))


def _origin(buffer: Any) -> str:
    """The graph's node that a buffer is the result of; empty if there is none."""
    node = buffer.get_origin_node() if hasattr(buffer, "get_origin_node") else None
    if isinstance(node, fx.Node):
        return node.name
    target = getattr(buffer, "op_overload", None)
    calls = [node.name for node in getattr(buffer, "origins", ()) if target is not None and node.target is target]
    return calls[0] if len(calls) == 1 else ""
