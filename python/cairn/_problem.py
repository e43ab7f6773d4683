"""Problems: chains of stages and graphs of operations, with the machine that they run on. All are immutable."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from . import _structs
from ._document import Document, FilePath, file_read, naming, written
from ._errors import BadInput
from ._library import Handle, lib, text_of
from ._units import encoded, flag, integer, json_bytes, listed, parse_duration, parse_rate, parse_size

INT32_MAX = 2**31 - 1


def _index(value: Any, field: str, path: str) -> int:
    number = integer(value, field, path, least=0)
    if number > INT32_MAX:
        raise BadInput(f"{field} is {number}; out of range", path=path)
    return number


def _normalize(value: Any, **least: int | None) -> None:
    """Replaces the named fields of a frozen dataclass by checked ints."""
    for field, bound in least.items():
        object.__setattr__(value, field, integer(getattr(value, field), field, least=bound))


@dataclass(frozen=True)
class Machine:
    """Host memory and the link to it, which offloading needs. Sizes and rates may be given as text, "12GB/s".

    Attributes
    ----------
    host_bytes
        Host memory that offloaded values may take, bytes.
    to_host_bytes_per_s
        Bandwidth from device to host, bytes per second, at least 1.
    to_device_bytes_per_s
        Bandwidth from host to device, bytes per second, at least 1.
    shared_link
        Both directions share one lane.
    latency_ns
        What every transfer takes before its first byte, nanoseconds.
    """

    host_bytes: int
    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    shared_link: bool = False
    latency_ns: int = 0

    def __post_init__(self) -> None:
        """Turns text into numbers and checks their ranges."""
        for field, parse in (
            ("host_bytes", parse_size),
            ("to_host_bytes_per_s", parse_rate),
            ("to_device_bytes_per_s", parse_rate),
            ("latency_ns", parse_duration),
        ):
            value = getattr(self, field)
            if isinstance(value, str):
                object.__setattr__(self, field, parse(value))
        _normalize(self, host_bytes=0, to_host_bytes_per_s=1, to_device_bytes_per_s=1, latency_ns=0)
        object.__setattr__(self, "shared_link", flag(self.shared_link, "shared_link"))

    def _struct(self) -> _structs.Machine:
        return _structs.Machine(
            self.host_bytes,
            self.to_host_bytes_per_s,
            self.to_device_bytes_per_s,
            self.latency_ns,
            self.shared_link,
        )


def machine_of(pointer: Any) -> Machine | None:
    """The machine behind a const cairn_machine *."""
    if not pointer:
        return None
    struct = pointer.contents
    return Machine(
        struct.host_bytes,
        struct.to_host_bytes_per_s,
        struct.to_device_bytes_per_s,
        struct.shared_link,
        struct.latency_ns,
    )


@dataclass(frozen=True)
class Option:
    """One way to run a stage.

    Attributes
    ----------
    saved_bytes
        All that the backward needs, bytes: the stage's output included, its input excluded.
    forward_ns
        Time of the forward that saves it, nanoseconds.
    backward_ns
        Time of the backward, nanoseconds.
    forward_workspace_bytes
        Memory beyond the result while that forward runs, bytes; may be negative.
    backward_workspace_bytes
        The same of the backward.
    name
        For people.
    """

    saved_bytes: int
    forward_ns: int
    backward_ns: int
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    name: str = "keep"

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        _normalize(
            self,
            saved_bytes=0,
            forward_ns=0,
            backward_ns=0,
            forward_workspace_bytes=None,
            backward_workspace_bytes=None,
        )
        encoded(self.name, "name of an option")


_OPTION_FIELDS = ("saved_bytes", "forward_ns", "backward_ns", "forward_workspace_bytes", "backward_workspace_bytes")


def _single_option(given: dict[str, Any]) -> Option:
    missing = [field for field in _OPTION_FIELDS[:3] if given[field] is None]
    if missing:
        raise BadInput(f"a stage has options, or the fields of its only one; missing: {', '.join(missing)}")
    filled = {field: 0 if value is None else value for field, value in given.items()}
    saved, forward, backward, forward_workspace, backward_workspace = (filled[field] for field in _OPTION_FIELDS)
    return Option(saved, forward, backward, forward_workspace, backward_workspace)


@dataclass(frozen=True, init=False)
class Stage:
    """One stage of a chain: a block of the model, with one or several ways to run it.

    Give either ``options``, or the fields of its only option (``saved_bytes``, ``forward_ns``, ``backward_ns`` and the
    two workspaces); these are then named "keep". What is None takes the default of the file format.

    Attributes
    ----------
    output_bytes
        The stage's output, bytes.
    options
        The ways to run it, at least one; option 0 is what storing everything uses.
    name
        For people.
    grad_bytes
        Gradient of the output, bytes (default: ``output_bytes``).
    weight_grad_bytes
        Gradients of the stage's parameters that its backward adds to what is resident, bytes.
    no_recompute
        The forward must run exactly once, and save.
    forward_only_ns
        Time of a forward that saves nothing, nanoseconds (default: the first option's forward).
    forward_only_workspace_bytes
        Workspace of that forward, bytes (default: the first option's).
    """

    output_bytes: int
    options: tuple[Option, ...]
    name: str
    grad_bytes: int
    weight_grad_bytes: int
    no_recompute: bool
    forward_only_ns: int
    forward_only_workspace_bytes: int

    def __init__(
        self,
        output_bytes: int,
        options: Iterable[Option] | None = None,
        *,
        saved_bytes: int | None = None,
        forward_ns: int | None = None,
        backward_ns: int | None = None,
        forward_workspace_bytes: int | None = None,
        backward_workspace_bytes: int | None = None,
        name: str = "",
        grad_bytes: int | None = None,
        weight_grad_bytes: int = 0,
        no_recompute: bool = False,
        forward_only_ns: int | None = None,
        forward_only_workspace_bytes: int | None = None,
    ) -> None:
        given = dict(
            zip(
                _OPTION_FIELDS,
                (saved_bytes, forward_ns, backward_ns, forward_workspace_bytes, backward_workspace_bytes),
                strict=True,
            )
        )
        if options is None:
            ways: tuple[Option, ...] = (_single_option(given),)
        else:
            ways = tuple(_list_of(options, Option, "options"))
            both = [field for field, value in given.items() if value is not None]
            if both:
                raise BadInput(f"a stage has options, or the fields of its only option; not options and {both[0]}")
            if not ways:
                raise BadInput("a stage has at least one option")
        first = ways[0]
        self._set("output_bytes", output_bytes)
        self._set("options", ways)
        self._set("name", name)
        self._set("grad_bytes", output_bytes if grad_bytes is None else grad_bytes)
        self._set("weight_grad_bytes", weight_grad_bytes)
        self._set("no_recompute", flag(no_recompute, "no_recompute"))
        self._set("forward_only_ns", first.forward_ns if forward_only_ns is None else forward_only_ns)
        self._set(
            "forward_only_workspace_bytes",
            first.forward_workspace_bytes if forward_only_workspace_bytes is None else forward_only_workspace_bytes,
        )
        _normalize(
            self,
            output_bytes=0,
            grad_bytes=0,
            weight_grad_bytes=0,
            forward_only_ns=0,
            forward_only_workspace_bytes=None,
        )
        encoded(name, "name of a stage")

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    @property
    def saved_bytes(self) -> int:
        """What option 0 saves, bytes."""
        return self.options[0].saved_bytes

    @property
    def forward_ns(self) -> int:
        """Forward time of option 0, nanoseconds."""
        return self.options[0].forward_ns

    @property
    def backward_ns(self) -> int:
        """Backward time of option 0, nanoseconds."""
        return self.options[0].backward_ns


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes
    ----------
    cost_ns
        Time to compute it, nanoseconds.
    bytes
        Size of its output, bytes; 0 for an alias.
    deps
        Indices of the earlier nodes that it reads, each once.
    name
        For people.
    workspace_bytes
        Memory beyond the result while it runs, bytes; may be negative.
    alias_of
        Index of the earlier node whose storage this one shares; None for a storage of its own.
    keep
        An output of the whole computation, never lost.
    no_recompute
        Computed exactly once.
    """

    cost_ns: int
    bytes: int
    deps: tuple[int, ...] = ()
    _: dataclasses.KW_ONLY
    name: str = ""
    workspace_bytes: int = 0
    alias_of: int | None = None
    keep: bool = False
    no_recompute: bool = False

    def __post_init__(self) -> None:
        """Checks types and ranges, and puts the dependencies in order."""
        _normalize(self, cost_ns=0, bytes=0, workspace_bytes=None)
        encoded(self.name, "name of a node")
        for field in ("keep", "no_recompute"):
            object.__setattr__(self, field, flag(getattr(self, field), field))
        given = listed(self.deps, "deps", "indices")
        deps = (_index(dep, "dependency", f"deps[{i}]") for i, dep in enumerate(given))
        object.__setattr__(self, "deps", tuple(sorted(deps)))
        if self.alias_of is not None:
            object.__setattr__(self, "alias_of", _index(self.alias_of, "alias_of", "alias_of"))


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
    """What chains and graphs have in common. An immutable, validated problem, owned by the C library.

    Problems are equal when their hashes are: names and provenance do not count. They may be shared between threads,
    copied (a copy is the same object) and pickled.
    """

    __slots__ = ()
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
        value: dict[str, Any] = json.loads(text_of(self._info.provenance))
        return value

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
        return written(lib.cairn_problem_write, self.pointer)

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
        with naming(path):
            return cls.from_json(file_read(path))


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
        made = _list_of(stages, Stage, "stages")
        chain = _structs.Chain(
            input_bytes=integer(input_bytes, "input_bytes", least=0),
            input_grad_bytes=integer(
                input_bytes if input_grad_bytes is None else input_grad_bytes, "input_grad_bytes", least=0
            ),
            stage_count=len(made),
            stages=_structs.array_type(_structs.Stage, len(made))(*map(_stage_struct, made)),
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
            self._views["stages"] = tuple(_stage_of(chain.stages[i]) for i in range(chain.stage_count))
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
                "provenance": self.provenance,
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
        made = _list_of(nodes, Node, "nodes")
        begins = -1
        if backward_begins_at is not None:
            begins = _index(backward_begins_at, "backward_begins_at", "backward_begins_at")
        graph = _structs.Graph(
            node_count=len(made),
            nodes=_structs.array_type(_structs.Node, len(made))(*map(_node_struct, made)),
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
            self._views["nodes"] = tuple(_node_of(graph.nodes[v]) for v in range(graph.node_count))
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
                "provenance": self.provenance,
                **changes,
            }
        )

    def __repr__(self) -> str:
        return f"<cairn.Graph {self.name!r}: {len(self)} nodes, {self.hash[:19]}>"


T = TypeVar("T")


def _list_of(values: Iterable[T], kind: type[T], field: str) -> list[T]:
    made = listed(values, field, f"cairn.{kind.__name__}")
    for i, value in enumerate(made):
        if not isinstance(value, kind):
            raise TypeError(f"{field}[{i}] must be a cairn.{kind.__name__}, not {type(value).__name__}")
    return made


def _new(function: Any, problem: Any, info: _structs.ProblemInfo) -> Handle:
    pointer = ctypes.POINTER(_structs.Problem)()
    lib.check(function, None, ctypes.byref(problem), ctypes.byref(info), ctypes.byref(pointer))
    return Handle(pointer, lib.cairn_problem_free)


def _info_struct(
    name: str, provenance: Mapping[str, Any] | None, fixed_bytes: int, machine: Machine | None
) -> _structs.ProblemInfo:
    try:
        text = json.dumps(dict(provenance or {}), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"provenance holds what JSON cannot: {error}", path="provenance") from None
    info = _structs.ProblemInfo(
        name=encoded(name, "name"),
        provenance=encoded(text, "provenance"),
        fixed_bytes=integer(fixed_bytes, "fixed_bytes", least=0),
    )
    if machine is not None:
        info.machine = ctypes.pointer(machine_struct(machine))
    return info


def machine_struct(machine: Machine) -> _structs.Machine:
    """The machine as the C library takes it."""
    if not isinstance(machine, Machine):
        raise TypeError(f"machine must be a cairn.Machine or None, not {type(machine).__name__}")
    return machine._struct()


def _option_struct(option: Option) -> _structs.StageOption:
    return _structs.StageOption(
        encoded(option.name, "name of an option"),
        option.saved_bytes,
        option.forward_ns,
        option.backward_ns,
        option.forward_workspace_bytes,
        option.backward_workspace_bytes,
    )


def _option_of(option: _structs.StageOption) -> Option:
    return Option(
        option.saved_bytes,
        option.forward_ns,
        option.backward_ns,
        option.forward_workspace_bytes,
        option.backward_workspace_bytes,
        text_of(option.name),
    )


def _stage_struct(stage: Stage) -> _structs.Stage:
    return _structs.Stage(
        name=encoded(stage.name, "name of a stage"),
        output_bytes=stage.output_bytes,
        grad_bytes=stage.grad_bytes,
        weight_grad_bytes=stage.weight_grad_bytes,
        forward_only_ns=stage.forward_only_ns,
        forward_only_workspace_bytes=stage.forward_only_workspace_bytes,
        no_recompute=stage.no_recompute,
        option_count=len(stage.options),
        options=_structs.array_type(_structs.StageOption, len(stage.options))(*map(_option_struct, stage.options)),
    )


def _stage_of(stage: _structs.Stage) -> Stage:
    return Stage(
        stage.output_bytes,
        [_option_of(stage.options[k]) for k in range(stage.option_count)],
        name=text_of(stage.name),
        grad_bytes=stage.grad_bytes,
        weight_grad_bytes=stage.weight_grad_bytes,
        no_recompute=stage.no_recompute,
        forward_only_ns=stage.forward_only_ns,
        forward_only_workspace_bytes=stage.forward_only_workspace_bytes,
    )


def _node_struct(node: Node) -> _structs.Node:
    return _structs.Node(
        name=encoded(node.name, "name of a node"),
        cost_ns=node.cost_ns,
        bytes=node.bytes,
        workspace_bytes=node.workspace_bytes,
        deps=_structs.array_type(ctypes.c_int32, len(node.deps))(*node.deps),
        dep_count=len(node.deps),
        alias_of=-1 if node.alias_of is None else node.alias_of,
        keep=node.keep,
        no_recompute=node.no_recompute,
    )


def _node_of(node: _structs.Node) -> Node:
    return Node(
        node.cost_ns,
        node.bytes,
        tuple(node.deps[: node.dep_count]),
        name=text_of(node.name),
        workspace_bytes=node.workspace_bytes,
        alias_of=None if node.alias_of < 0 else node.alias_of,
        keep=node.keep,
        no_recompute=node.no_recompute,
    )


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
