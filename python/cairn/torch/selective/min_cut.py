"""The least cut of a network whose edges cost bytes and nanoseconds (Dinic's algorithm)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set

#: The nodes on the source's side of a cut.
Side = list[tuple[str, int]]


def connected(operations: Iterable[int], needs: Sequence[Set[int] | None]) -> list[list[int]]:
    """These operations with all that they need, directly or not, in groups that need nothing of each other."""
    beside: dict[int, set[int]] = {index: set() for index in operations}
    for index in (missing := list(beside)):  # which grows
        for other in needs[index] or ():
            if other not in beside:
                beside[other] = set()
                missing.append(other)
            beside[index].add(other)
            beside[other].add(index)
    groups: list[list[int]] = []
    met: set[int] = set()
    for first in missing:
        if first not in met:
            met.add(first)
            for index in (group := [first]):
                group += sorted(beside[index] - met)
                met |= beside[index]
            groups.append(group)
    return groups


class Network:
    """A flow network, cut by Dinic's algorithm. Nodes are any hashable things; capacities have two prices, both > 0."""

    SOURCE, SINK = ("source", 0), ("sink", 0)
    INFINITE = 1 << 100

    def __init__(self) -> None:
        self._number: dict[tuple[str, int], int] = {}
        self._ends: list[int] = []  # of edge 2i and its reverse 2i + 1
        self._capacities: list[tuple[int, int]] = []  # of edge 2i
        self._edges: list[list[int]] = []  # by node
        self._node(self.SOURCE)
        self._node(self.SINK)

    def _node(self, name: tuple[str, int]) -> int:
        number = self._number.setdefault(name, len(self._number))
        if number == len(self._edges):
            self._edges.append([])
        return number

    def edge(self, start: tuple[str, int], end: tuple[str, int], nbytes: int, nanoseconds: int) -> None:
        a, b = self._node(start), self._node(end)
        self._edges[a].append(len(self._ends))
        self._edges[b].append(len(self._ends) + 1)
        self._ends += [b, a]
        self._capacities.append((nbytes, nanoseconds))

    def source_side(self, per_byte: int, per_ns: int) -> Side:
        """The nodes on the source's side of a minimum cut, as few as possible, the source left out."""
        self._room = [x for b, ns in self._capacities for x in (per_byte * b + per_ns * ns, 0)]
        while True:
            levels = self._levels()
            if levels[1] < 0:
                return [name for name, number in self._number.items() if levels[number] > 0]
            nexts = [0] * len(self._edges)
            while self._augment(levels, nexts):
                pass

    def _levels(self) -> list[int]:
        levels = [-1] * len(self._edges)
        levels[0] = 0
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                if self._room[edge] > 0 and levels[self._ends[edge]] < 0:
                    levels[self._ends[edge]] = levels[node] + 1
                    queue.append(self._ends[edge])
        return levels

    def _augment(self, levels: Sequence[int], nexts: list[int]) -> bool:
        """Sends what one path can take from the source to the sink, along ascending levels."""
        path: list[int] = []
        node = 0
        while node != 1:
            edge = self._way_on(node, levels, nexts)
            if edge is not None:
                path.append(edge)
                node = self._ends[edge]
            elif not path:
                return False
            else:
                nexts[self._ends[path[-1] ^ 1]] += 1
                node = self._ends[path.pop() ^ 1]
        amount = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= amount
            self._room[edge ^ 1] += amount
        return True

    def _way_on(self, node: int, levels: Sequence[int], nexts: list[int]) -> int | None:
        edges = self._edges[node]
        while nexts[node] < len(edges):
            edge = edges[nexts[node]]
            if self._room[edge] > 0 and levels[self._ends[edge]] == levels[node] + 1:
                return edge
            nexts[node] += 1
        return None
