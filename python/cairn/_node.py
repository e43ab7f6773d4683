"""Operations of graphs, as Python and as C have them."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass

from . import _structs
from ._library import text_of
from ._units import encoded, flag, index32, listed, normalize


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
        normalize(self, cost_ns=0, bytes=0, workspace_bytes=None)
        encoded(self.name, "name of a node")
        for field in ("keep", "no_recompute"):
            object.__setattr__(self, field, flag(getattr(self, field), field))
        given = listed(self.deps, "deps", "indices")
        deps = (index32(dep, "dependency", f"deps[{i}]") for i, dep in enumerate(given))
        object.__setattr__(self, "deps", tuple(sorted(deps)))
        if self.alias_of is not None:
            object.__setattr__(self, "alias_of", index32(self.alias_of, "alias_of", "alias_of"))


def node_struct(node: Node) -> _structs.Node:
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


def node_of(node: _structs.Node) -> Node:
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
