"""Problems: chains of stages and graphs of operations. All are immutable."""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from . import _structs
from ._document import Document, FilePath, loaded
from ._errors import BadInput
from ._library import Handle, lib, text_of
from ._machine import Machine, machine_of, machine_struct
from ._node import Node, node_of, node_struct
from ._stage import Stage, stage_of, stage_struct
from ._units import encoded, index32, integer, json_bytes, list_of

P = TypeVar("P", bound="Problem")


def problem_pointer(problem: Any) -> Any:
    """The cairn_problem * of an argument, or a TypeError that says what to give."""
    if isinstance(problem, Problem):
        return problem.pointer
    hint = ""
    if isinstance(problem, (str, os.PathLike)):
        hint = "; cairn.load reads a file"
    elif isinstance(problem, dict):
        hint = "; cairn.Problem.from_json reads its JSON text"
    raise TypeError(f"problem must be a cairn.Chain or a cairn.Graph, not {type(problem).__name__}{hint}")


class Problem(Document):
    """The base of chains and graphs: an immutable, validated problem, owned by the C library.

    Problems are equal when their hashes are: names and provenance do not count. They may be shared between threads,
    copied (a copy is the same object) and pickled.
    """

    __slots__ = ()
    _writer = "cairn_problem_write"
    #: "chain" or "graph".
    kind: str

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a Problem is made as a Chain or a Graph, or by cairn.load, Problem.from_json or Problem.load")

    @classmethod
    def _adopt(cls: type[P], pointer: Any) -> P:
        """Wraps a new cairn_problem * and owns it."""
        handle = Handle(pointer, lib.cairn_problem_free)
        kind = lib.cairn_problem_kind_of(pointer)
        made: type[Chain | Graph] = Chain if kind == _structs.KIND_CHAIN else Graph
        if not issubclass(made, cls):
            raise BadInput(f"this is a cairn-{made.kind}, not a cairn-{cls.kind}")
        problem = object.__new__(made)
        problem._own(handle)
        return problem

    @property
    def _info(self) -> _structs.ProblemInfo:
        info: _structs.ProblemInfo = lib.cairn_problem_info_of(self.pointer).contents
        return info

    @property
    def name(self) -> str:
        """Name for people."""
        return text_of(self._info.name)

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the problem comes from: a new dict of JSON values on each access."""
        value: dict[str, Any] = json.loads(self._provenance_text)
        return value

    @property
    def _provenance_text(self) -> _JsonText:
        return _JsonText(text_of(self._info.provenance))

    @property
    def fixed_bytes(self) -> int:
        """Memory that is always resident and counts toward the budget, bytes."""
        return int(self._info.fixed_bytes)

    @property
    def machine(self) -> Machine | None:
        """The link to host memory; None when there is no offloading."""
        return machine_of(self._info.machine)

    @property
    def hash(self) -> str:
        """Hash of the canonical form: "sha256:" and 64 hexadecimal digits."""
        return text_of(lib.cairn_problem_hash(self.pointer))

    def scaled(self: P, multiplier: int, divisor: int = 1) -> P:
        """The problem at another size: sizes, workspaces and times times a fraction, rounded up; fixed bytes stay.

        A problem that was measured at batch 32 is ``problem.scaled(48, 32)`` at batch 48.

        Raises
        ------
        BadInput
            The multiplier or the divisor is less than 1.
        Overflow
            A size or time passes 2^63 - 1.
        """
        parts = integer(multiplier, "multiplier"), integer(divisor, "divisor")
        pointer = ctypes.POINTER(_structs.Problem)()
        lib.check(lib.cairn_problem_scale, None, self.pointer, *parts, ctypes.byref(pointer))
        return type(self)._adopt(pointer)

    def __reduce__(self) -> tuple[Any, ...]:
        return Problem.from_json, (self.to_json(),)

    def to_json(self) -> str:
        """The problem as a cairn-chain or cairn-graph file, ending in a newline. The same problem, the same text."""
        return super().to_json()

    @classmethod
    def from_json(cls: type[P], text: str | bytes) -> P:
        """Reads a cairn-chain or cairn-graph file's text. ``Chain.from_json`` and ``Graph.from_json`` take only theirs.

        Raises
        ------
        Parse
            Not JSON; the error has line and column.
        BadInput
            A field is missing, unknown or wrong; the error has its path.
        Overflow
            A sum of sizes or times passes 2^63 - 1.
        TooLarge
            A stated limit is exceeded.
        """
        data = json_bytes(text)
        pointer = ctypes.POINTER(_structs.Problem)()
        lib.check(lib.cairn_problem_read, None, data, len(data), ctypes.byref(pointer))
        return cls._adopt(pointer)

    @classmethod
    def load(cls: type[P], path: FilePath) -> P:
        """Reads a cairn-chain or cairn-graph file.

        Raises
        ------
        OSError
            The file cannot be read.
        Error
            As from_json, with the file in the error.
        """
        return loaded(path, cls.from_json)


class Chain(Problem):
    """A chain of stages: the forward runs stages 1 to n, the backward n to 1.

    Parameters
    ----------
    stages
        The stages, in the order of the forward.
    input_bytes
        The chain's input, bytes; resident from the start to the end.
    input_grad_bytes
        Gradient of the input, bytes (default: ``input_bytes``).
    fixed_bytes
        Memory that is always resident and counts toward the budget, bytes.
    machine
        The link to host memory; None: no offloading.
    name
        For people.
    provenance
        JSON values saying where the problem comes from.

    Raises
    ------
    BadInput
        A value breaks a rule; the error names stage and field.
    Overflow
        A sum of sizes or times passes 2^63 - 1.
    """

    __slots__ = ()
    kind = "chain"

    def __init__(
        self,
        stages: Iterable[Stage],
        *,
        input_bytes: int,
        input_grad_bytes: int | None = None,
        fixed_bytes: int = 0,
        machine: Machine | None = None,
        name: str = "",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        made = list_of(stages, Stage, "stages")
        chain = _structs.Chain(
            input_bytes=integer(input_bytes, "input_bytes", least=0),
            input_grad_bytes=integer(
                input_bytes if input_grad_bytes is None else input_grad_bytes, "input_grad_bytes", least=0
            ),
            stage_count=len(made),
            stages=_structs.array_type(_structs.Stage, len(made))(*map(stage_struct, made)),
        )
        info = _info_struct(name, provenance, fixed_bytes, machine)
        self._own(_new(lib.cairn_problem_new_chain, chain, info))

    @property
    def _chain(self) -> _structs.Chain:
        chain: _structs.Chain = lib.cairn_problem_chain(self.pointer).contents
        return chain

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages; stage l of the format stands at index l - 1."""
        if "stages" not in self._views:
            chain = self._chain
            self._views["stages"] = tuple(stage_of(chain.stages[i]) for i in range(chain.stage_count))
        stages: tuple[Stage, ...] = self._views["stages"]
        return stages

    @property
    def input_bytes(self) -> int:
        """Size of the chain's input, bytes."""
        return int(self._chain.input_bytes)

    @property
    def input_grad_bytes(self) -> int:
        """Size of the gradient of the chain's input, bytes."""
        return int(self._chain.input_grad_bytes)

    def __len__(self) -> int:
        """Number of stages."""
        return int(self._chain.stage_count)

    def to_graph(self) -> Graph:
        """The chain as a graph, for graph solvers; a stage with several options runs by its first, with a warning."""
        for number, stage in enumerate(self.stages, 1):
            if len(stage.options) > 1:
                name = f", {stage.name}" if stage.name else ""
                warnings.warn(
                    f"stage {number}{name} has {len(stage.options)} options; "
                    f'the graph has the first, "{stage.options[0].name}"',
                    stacklevel=2,
                )
        pointer = ctypes.POINTER(_structs.Problem)()
        lib.check(lib.cairn_chain_to_graph, None, self.pointer, ctypes.byref(pointer))
        return Graph._adopt(pointer)

    def replace(self, **changes: Any) -> Chain:
        """A new chain with some of the constructor's arguments changed: ``chain.replace(machine=None)``."""
        return Chain(
            **{
                "stages": self.stages,
                "input_bytes": self.input_bytes,
                "input_grad_bytes": self.input_grad_bytes,
                "fixed_bytes": self.fixed_bytes,
                "machine": self.machine,
                "name": self.name,
                "provenance": self._provenance_text,
                **changes,
            }
        )

    def __repr__(self) -> str:
        return f"<cairn.Chain {self.name!r}: {len(self)} stages, {self.hash[:19]}>"


class Graph(Problem):
    """A graph of operations, listed in the order in which they are first computed.

    Parameters
    ----------
    nodes
        The operations; each depends on earlier ones only.
    fixed_bytes
        Memory that is always resident and counts toward the budget, bytes.
    backward_begins_at
        How many nodes come before the backward; None when it is not known.
    machine
        The link to host memory; None: no offloading.
    name
        For people.
    provenance
        JSON values saying where the problem comes from.

    Raises
    ------
    BadInput
        A value breaks a rule; the error names node and field.
    Overflow
        A sum of sizes or times passes 2^63 - 1.
    """

    __slots__ = ()
    kind = "graph"

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        fixed_bytes: int = 0,
        backward_begins_at: int | None = None,
        machine: Machine | None = None,
        name: str = "",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        made = list_of(nodes, Node, "nodes")
        begins = -1
        if backward_begins_at is not None:
            begins = index32(backward_begins_at, "backward_begins_at", "backward_begins_at")
        graph = _structs.Graph(
            node_count=len(made),
            nodes=_structs.array_type(_structs.Node, len(made))(*map(node_struct, made)),
            backward_begins_at=begins,
        )
        info = _info_struct(name, provenance, fixed_bytes, machine)
        self._own(_new(lib.cairn_problem_new_graph, graph, info))

    @property
    def _graph(self) -> _structs.Graph:
        graph: _structs.Graph = lib.cairn_problem_graph(self.pointer).contents
        return graph

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The operations; node v of the format stands at index v."""
        if "nodes" not in self._views:
            graph = self._graph
            self._views["nodes"] = tuple(node_of(graph.nodes[v]) for v in range(graph.node_count))
        nodes: tuple[Node, ...] = self._views["nodes"]
        return nodes

    @property
    def backward_begins_at(self) -> int | None:
        """How many nodes come before the backward; None when it is not known."""
        begins = int(self._graph.backward_begins_at)
        return None if begins < 0 else begins

    def __len__(self) -> int:
        """Number of nodes."""
        return int(self._graph.node_count)

    def replace(self, **changes: Any) -> Graph:
        """A new graph with some of the constructor's arguments changed: ``graph.replace(machine=None)``."""
        return Graph(
            **{
                "nodes": self.nodes,
                "fixed_bytes": self.fixed_bytes,
                "backward_begins_at": self.backward_begins_at,
                "machine": self.machine,
                "name": self.name,
                "provenance": self._provenance_text,
                **changes,
            }
        )

    def __repr__(self) -> str:
        return f"<cairn.Graph {self.name!r}: {len(self)} nodes, {self.hash[:19]}>"


def _new(function: Any, problem: Any, info: _structs.ProblemInfo) -> Handle:
    pointer = ctypes.POINTER(_structs.Problem)()
    lib.check(function, None, ctypes.byref(problem), ctypes.byref(info), ctypes.byref(pointer))
    return Handle(pointer, lib.cairn_problem_free)


class _JsonText(str):
    """JSON that is kept byte for byte: Python's own numbers and dicts cannot hold all of it."""


def _json_of(provenance: Mapping[str, Any] | _JsonText | None) -> str:
    if isinstance(provenance, _JsonText):
        return provenance
    if provenance is not None and not isinstance(provenance, Mapping):
        raise TypeError(f"provenance must be a dict of JSON values or None, not {type(provenance).__name__}")
    try:
        return json.dumps(dict(provenance or {}), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"provenance holds what JSON cannot: {error}", path="provenance") from None


def _info_struct(
    name: str, provenance: Mapping[str, Any] | None, fixed_bytes: int, machine: Machine | None
) -> _structs.ProblemInfo:
    info = _structs.ProblemInfo(
        name=encoded(name, "name"),
        provenance=encoded(_json_of(provenance), "provenance"),
        fixed_bytes=integer(fixed_bytes, "fixed_bytes", least=0),
    )
    if machine is not None:
        info.machine = ctypes.pointer(machine_struct(machine))
    return info


def load(path: FilePath) -> Chain | Graph:
    """Read a cairn-chain or cairn-graph file; see ``Problem.load``.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    Chain or Graph
        What the file holds.

    Raises
    ------
    Parse
        It is not JSON.
    BadInput
        It is no problem; ``line``, ``column`` and ``path`` say where.

    Examples
    --------
    >>> problem = cairn.load("model.json")
    """
    problem = Problem.load(path)
    assert isinstance(problem, (Chain, Graph))
    return problem
