"""The options of a block: which saved tensors to keep and which to recompute, computed from one recorded run.

Problem. For every saved tensor of a block: keep it, or recompute it in the backward from kept tensors. Kept bytes cost
memory. Each recomputed operation costs its time once, however many tensors need it. The wanted choices lie on the lower
convex hull of (bytes, time): a chain solver mixes options over the blocks, so choices above the hull help little. A
block that makes up much of a step leaves little to mix; for it, choices on the edges of the hull are wanted as well.

Method. For a price of w_b per byte and w_t per nanosecond the cheapest choice is a minimum cut. Let r(o) say that
operation o is recomputed and a(v) that value v is available. Then a(v) = 1 for every saved v; r(o) = 1 asks for a(u) =
1 of each operand u; and a(v) = 1 without r(o) = 1 of the operation o that makes v means that v is kept. With the nodes
of r and a on the source's side where they are 1, the edges are: source -> a(v), infinite, where v is saved;
a(v) -> r(o), w_b * bytes(v), infinite where v is not saved and so cannot be kept; r(o) -> sink, w_t * time(o), infinite
where o may not be replayed; r(o) -> a(u), infinite. (This is the cut of the min-cut partitioners for training graphs,
with times on the operations in addition to bytes on the values.) A cut at the price of the line between two known
points of the hull gives a point between them, if there is one; repeated on both sides of each new point, this gives the
whole hull. Prices are integers, so they are exact.

The network is small. Saved values have a(v) = 1, so they are merged with the source, and their edge to r(o) starts at
the source. Operations that would require the replay of a forbidden one are on the sink's side and are left out. The
rest falls into pieces that share only source and sink. Most have a few operations, because saved values separate them.
Each piece is cut by itself. A piece whose cuts at a higher and at a lower price of bytes are equal is not cut in
between, where the cut is the same.

Masks. A dropout draws `empty.bernoulli_(1 - p)` and scales it in place. Its noise may also be kept as one bit per
element (a byte, where it is not on the CPU): the drawing is split into an operation that draws the mask, and one that
turns a mask into noise; the mask is one more value that can be kept.

Seeds. Kernels of attention on CUDA save the seed and offset of their random numbers, and leave them unwritten if they
draw none, so that they differ in every run. Values of this size are always kept, even if their operation is recomputed.

Cost. One cut of a block of n operations takes O(n) in practice: a millisecond or two for a hundred operations. There
are about two cuts for each point of the hull. A block that loops can have large n and large pieces, whose cuts take up
to O(n^2), and measured times make nearly each operation a point of its own. So cuts are limited by work, and the next
cut is always made where the largest area may lie below the known hull.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from fractions import Fraction
from typing import TypeVar

from torch.utils.flop_counter import flop_registry

from ..base.stage_measure import KEEP
from . import bit_masks
from .block_graph import ARGUMENT, BUFFER, PARAMETER, BlockGraph, Operation
from .min_cut import Network, Side, connected

DROP, MASK = "d", "m"  # decisions on a saved tensor other than keeping it
STEADY_CHOICES = 12  # that are worth measuring by times that do not vary, keep everything among them
TIMED_CHOICES = 8  # and by measured ones
STEADY_BYTES_PER_NS = 4  # about what a core reads and writes
OF_PRODUCTS = 20  # so much longer do products take than what only reads and writes as much
CUT_WORK = 20_000_000  # cuts times the square of operations: at most some seconds, and no limit for 200 operations
STEP_NS = 3000  # overhead of replaying one operation
SEED_BYTES = 16  # saved values up to here are always kept
_Point = TypeVar("_Point")
_KEEPS_ZEROS = ("aten.div_.Scalar", "aten.mul_.Scalar", "aten.div_.Tensor", "aten.mul_.Tensor")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A decision for each saved tensor, one letter each in the order of saving, with estimated bytes and time."""

    decisions: str
    kept_bytes: int
    recompute_ns: int


def choices(graph: BlockGraph, at_most: float = math.inf, finest_bytes: int = 0) -> list[Choice]:
    """Choices along the convex hull, from keeping everything to keeping as little as possible; at most `at_most`.

    finest_bytes: two neighbours further apart than that get choices in between. 0: none.
    """
    model = _Model(graph)
    everything, least = model.keep_everything(), model.cheapest(model.total_ns + 1, 1)
    if least.kept_bytes >= everything.kept_bytes:
        return [everything]
    cuts = max(2, CUT_WORK // len(graph.operations) ** 2)
    points = _thinned([everything, *_between(model, everything, least, cuts), least], at_most)
    return _filled(model, points, finest_bytes) if finest_bytes > 0 else points


def ideal_choices(graph: BlockGraph) -> list[Choice]:
    """The hull if only replayed operations cost time: a lower bound on every choice's bytes and time.

    The block's output counts as kept here and may be recomputed, because the next block reads it in its backward.
    """
    model = _Model(graph, ideal=True)
    everything, least = model.keep_everything(), model.cheapest(model.total_ns + 1, 1)
    return [everything, *_between(model, everything, least), least]


def candidates(graph: BlockGraph, finest_bytes: int = 0) -> list[Choice]:
    """The choices worth measuring: some by measured times, some by times that do not vary.

    Measured times differ from run to run, and so do the choices along their hull. The least memory must not depend on
    that, so the choices by constant times are the same in every run. The first choice keeps everything. `finest_bytes`:
    as above, for the choices by constant times.
    """
    steady = choices(_with_steady_times(graph), STEADY_CHOICES, finest_bytes)
    found = {choice.decisions: choice for choice in (*steady, *choices(graph, TIMED_CHOICES))}
    return sorted(found.values(), key=lambda choice: (KEEP * len(graph.packs) != choice.decisions, -choice.kept_bytes))


def _with_steady_times(graph: BlockGraph) -> BlockGraph:
    """The same block with times computed from the bytes that operations read and write; matrix products take longer."""

    def steady(op: Operation) -> Operation:
        values = (*(use.value for use in op.operands if use.value >= 0), *op.values)
        nbytes = sum(graph.values[value].nbytes for value in values)
        is_product = getattr(op.function, "overloadpacket", None) in flop_registry
        return dataclasses.replace(op, nanoseconds=nbytes // STEADY_BYTES_PER_NS * (OF_PRODUCTS if is_product else 1))

    return dataclasses.replace(graph, operations=[steady(op) for op in graph.operations])


def _between(model: _Model, first: Choice, last: Choice, cuts: float = math.inf) -> list[Choice]:
    """The points of the hull strictly between two of them, as far as the limit of cuts allows."""
    found: list[Choice] = []
    gaps = [(first, last)]
    while gaps and cuts > 0:
        gap = max(gaps, key=_room)
        gaps.remove(gap)
        a, b = gap
        nanoseconds, nbytes = b.recompute_ns - a.recompute_ns, a.kept_bytes - b.kept_bytes
        if nanoseconds <= 0 or nbytes <= 0:
            continue
        cuts -= 1
        between = model.cheapest(nanoseconds, nbytes)
        if model.price(between, nanoseconds, nbytes) < model.price(a, nanoseconds, nbytes):
            found.append(between)
            gaps += [(a, between), (between, b)]
    return sorted(found, key=lambda choice: -choice.kept_bytes)


def _room(gap: tuple[Choice, Choice]) -> int:
    """A bound on the area of the hull below the line between two of its points."""
    a, b = gap
    return (b.recompute_ns - a.recompute_ns) * (a.kept_bytes - b.kept_bytes)


def _filled(model: _Model, points: Sequence[Choice], finest_bytes: int) -> list[Choice]:
    """The choices, with more between two that are too far apart, if there are any in between."""
    found = list(points[:1])
    for a, b in itertools.pairwise(points):
        parts = -(-(a.kept_bytes - b.kept_bytes) // finest_bytes)
        found += model.partly(a, b, parts)
        found.append(b)
    return found


def _thinned(points: Sequence[Choice], at_most: float) -> list[Choice]:
    return thinned(points, at_most, lambda choice: (choice.kept_bytes, choice.recompute_ns))


def thinned(
    points: Sequence[_Point], at_most: float, place: Callable[[_Point], tuple[int, int]], stay: Container[int] = ()
) -> list[_Point]:
    """Remove the points that change the curve of bytes and time least, until few enough are left.

    `place` gives bytes and time of a point. The two ends stay, and so do the points whose identity is in `stay`.
    """
    points = list(points)
    while len(points) > at_most:
        between = [i for i in range(1, len(points) - 1) if id(points[i]) not in stay]
        del points[min(between, key=lambda i: _loss(*map(place, points[i - 1 : i + 2])))]
    return points


def _loss(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    """Twice the area of the triangle that leaving out b adds below the curve; less than 0 if b lies above it."""
    return (b[1] - a[1]) * (c[0] - a[0]) - (b[0] - a[0]) * (c[1] - a[1])


# -- what can be kept ----------------------------------------------------------------------------------------


def sources(graph: BlockGraph) -> dict[int, int]:
    """The saved values that can be kept, with the first saved tensor that shows each."""
    found: dict[int, int] = {}
    for index, pack in enumerate(graph.packs):
        if pack.use is not None:
            found.setdefault(pack.use.value, index)
    return found


def is_always_there(graph: BlockGraph, value: int) -> bool:
    """Whether a value is an argument, a parameter or a buffer, which exists in the backward without being kept."""
    root = graph.values[value].root
    return root is not None and root[0] in (ARGUMENT, PARAMETER, BUFFER)


def masks(graph: BlockGraph) -> dict[int, int]:
    """By drawing operation: the saved value from whose zeros the drawn mask can be read."""
    writer = {op_value: i for i, op in enumerate(graph.operations) for op_value in op.written.values()}
    follower = {graph.values[value].before: value for value in writer}
    saved = sources(graph)
    found = {}
    for index, op in enumerate(graph.operations):
        if not op.name.startswith("aten.bernoulli_.float") or len(op.written) != 1:
            continue
        value = op.written[0]
        while value not in saved and value in follower and _keeps_zeros(graph.operations[writer[follower[value]]]):
            value = follower[value]
        if value in saved and _shows_all(graph, saved[value]) and graph.values[value].dtype.itemsize > 1:
            found[index] = value
    return found


def _shows_all(graph: BlockGraph, pack: int) -> bool:
    """Whether a saved tensor reads each element of its value exactly once, in the layout in which it was made."""
    use = graph.packs[pack].use
    return use is not None and use.view == graph.values[use.value].base and graph.is_dense(use.value)


def _keeps_zeros(op: Operation) -> bool:
    if op.name not in _KEEPS_ZEROS:
        return False
    scalars = [item for item in op.tree.shape[0] if isinstance(item, (int, float))]
    return len(scalars) == 1 and 1e-30 < abs(scalars[0]) < 1e30


# -- the cut -------------------------------------------------------------------------------------------------


class _Model:
    """A block's choices as a network; see the top of this file."""

    def __init__(self, graph: BlockGraph, ideal: bool = False) -> None:
        self._graph = graph
        self._step_ns, self._is_ideal = 0 if ideal else STEP_NS, ideal
        self._sources = sources(graph)
        self._masks = masks(graph)
        self._read_inside = {p.use.value for p in graph.packs if p.read_inside and p.use is not None}
        self._free = self._free_values()
        made = (v for v in graph.values if v.storage in graph.returned and v.root is None and not v.overwritten)
        self._outputs = {v.index for v in made} if ideal else set()
        self._saved = self._outputs.union(self._sources)
        self._pieces = self._found_pieces()
        nothing: list[Side] = [[] for _ in self._pieces]
        self._cuts = [(Fraction(0), nothing)]  # by price of bytes
        self._sides = {KEEP * len(graph.packs): nothing}  # of each choice, by its decisions
        self.total_ns = sum(self._time(op) for op in graph.operations) * 2

    def _time(self, op: Operation) -> int:
        return op.nanoseconds + self._step_ns

    def _free_values(self) -> set[int]:
        """Saved values that cost nothing to keep: the block's output, and copies of parameters alone."""
        graph, from_parameters = self._graph, set()
        for value in graph.values:
            if value.root is not None:
                if value.root[0] == PARAMETER:
                    from_parameters.add(value.index)
                continue
            operands = [use.value for use in graph.operations[value.operation].operands]
            if operands and all(operand in from_parameters for operand in operands):
                from_parameters.add(value.index)
        returned = frozenset() if self._is_ideal else graph.returned
        return {v for v in self._sources if graph.values[v].storage in returned or v in from_parameters}

    def bytes_of(self, value: int) -> int:
        """Bytes of keeping a saved value."""
        found = self._graph.values[value]
        return 0 if found.root is not None or value in self._free else found.nbytes

    def keep_everything(self) -> Choice:
        kept = sum(map(self.bytes_of, self._saved))
        return Choice(KEEP * len(self._graph.packs), kept, 0)

    def price(self, choice: Choice, per_byte: int, per_ns: int) -> int:
        return per_byte * choice.kept_bytes + per_ns * choice.recompute_ns

    def cheapest(self, per_byte: int, per_ns: int) -> Choice:
        """The choice of least price."""
        ratio = Fraction(per_byte, per_ns)
        place = bisect.bisect(self._cuts, ratio, key=lambda cut: cut[0])
        around = [sides for _, sides in self._cuts[place - 1 : place + 1]]
        sides = [
            around[0][i] if len(around) > 1 and around[0][i] == around[1][i] else piece.source_side(per_byte, per_ns)
            for i, piece in enumerate(self._pieces)
        ]
        self._cuts.insert(place, (ratio, sides))
        return self._of_sides(sides)

    def _of_sides(self, sides: list[Side]) -> Choice:
        choice = self._choice({node for side in sides for node in side})
        self._sides[choice.decisions] = sides
        return choice

    def partly(self, first: Choice, last: Choice, parts: int) -> list[Choice]:
        """Choices between two neighbours of the hull, at about equal distances.

        Each takes the second choice for some pieces, those that run earliest, and the first choice for the others.
        Pieces of one price, such as those of equal layers, change together along the hull, so these choices lie on it.
        The earliest pieces change first: they are recomputed last, when the backward is past its peak. Some more
        choices leave out every second piece, every third, and so on. They help where each piece is recomputed from the
        one before it: otherwise the recomputed values of the whole row exist at once.
        """
        before, after = self._sides[first.decisions], self._sides[last.decisions]
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        changed.sort(key=lambda i: min(index for _, index in (*before[i], *after[i])))

        def with_these(pieces: Sequence[int]) -> Choice:
            gone = set(pieces)
            return self._of_sides([after[i] if i in gone else before[i] for i in range(len(before))])

        def with_first(count: int) -> Choice:
            return with_these(changed[:count])

        found: dict[str, Choice] = {}
        for part in range(1, parts):
            wanted = first.kept_bytes - (first.kept_bytes - last.kept_bytes) * part // parts
            counts = range(1, len(changed))
            at = bisect.bisect_left(counts, -wanted, key=lambda count: -with_first(count).kept_bytes)
            if at < len(counts):
                choice = with_first(counts[at])
                found[choice.decisions] = choice
        for every in range(2, math.isqrt(len(changed)) + 1) if parts > 1 else ():
            choice = with_these([piece for place, piece in enumerate(changed, 1) if place % every])
            found[choice.decisions] = choice
        return sorted(found.values(), key=lambda choice: -choice.kept_bytes)

    def _found_pieces(self) -> list[Network]:
        """The networks of the operations that may be recomputed, one for each connected piece."""
        needs: list[Set[int] | None] = []
        for index, op in enumerate(self._graph.operations):
            found = self._needed(index, op)  # of what ran earlier
            needs.append(None if found is None or any(needs[other] is None for other in found) else found)
        gains = self._gains()
        pieces = connected([index for index in gains if needs[index] is not None], needs)
        return [self._network(piece, gains, needs) for piece in pieces]

    def _needed(self, index: int, op: Operation) -> Set[int] | None:
        """The operations that must be recomputed if this one is; None if it may not be."""
        used = {use.value for use in op.operands if use.value >= 0} - self._saved
        values = [self._graph.values[v] for v in used if not is_always_there(self._graph, v)]
        if (op.reason and index not in self._masks) or any(value.root is not None for value in values):
            return None
        return {value.operation for value in values}

    def _gains(self) -> dict[int, int]:
        """By operation that made saved values: the bytes that need not be kept if it is recomputed."""
        gains: dict[int, int] = {}
        for value in sorted(self._saved):
            if self.bytes_of(value) and not (value in self._sources and self._stays(value)):
                index = self._made_by(value)
                gains[index] = gains.get(index, 0) + self.bytes_of(value)
        return gains

    def _network(self, piece: Iterable[int], gains: Mapping[int, int], needs: Sequence[Set[int] | None]) -> Network:
        network = Network()
        for index in piece:
            op, node = self._graph.operations[index], ("r", index)
            network.edge(Network.SOURCE, node, gains.get(index, 0), 0)
            for other in needs[index] or ():
                network.edge(node, ("r", other), Network.INFINITE, 0)
            if index in self._masks:
                network.edge(node, Network.SINK, 0, self._step_ns)
                network.edge(node, ("draw", index), self._mask_bytes(index), self._mask_ns(index))
                node = "draw", index
            network.edge(node, Network.SINK, 0, self._time(op) if not op.reason else Network.INFINITE)
        return network

    def _mask_bytes(self, index: int) -> int:
        """As bits on the CPU, as bytes elsewhere."""
        elements = self._mask_elements(index)
        is_packed = self._graph.values[self._masks[index]].device.type == "cpu"
        return -(-elements // bit_masks.PER_BYTE) if is_packed else elements

    def _mask_ns(self, index: int) -> int:
        """For reading a mask off a noise, and making the noise from it."""
        return 0 if self._is_ideal else STEP_NS + self._mask_elements(index) // 4

    def _mask_elements(self, index: int) -> int:
        value = self._graph.values[self._masks[index]]
        return value.nbytes // value.dtype.itemsize

    def _choice(self, chosen: set[tuple[str, int]]) -> Choice:
        """The decisions of a cut, with their bytes and time."""
        graph = self._graph
        again = {index for kind, index in chosen if kind == "r"}
        as_masks = {i for i in again & set(self._masks) if ("draw", i) not in chosen}
        mask_values = {self._masks[i] for i in as_masks}
        letters, kept = [], 0
        for index, pack in enumerate(graph.packs):
            value = pack.use.value if pack.use is not None else -1
            if value < 0 or self._stays(value) or graph.values[value].operation not in again:
                letters.append(KEEP)
                kept += self.bytes_of(value) if value >= 0 and self._sources[value] == index else 0
            else:
                letters.append(MASK if value in mask_values and self._sources[value] == index else DROP)
        kept += sum(self._mask_bytes(i) for i in as_masks)
        kept += sum(self.bytes_of(v) for v in self._outputs.difference(self._sources) if self._made_by(v) not in again)
        return Choice("".join(letters), kept, self._recompute_ns(again, as_masks))

    def _stays(self, value: int) -> bool:
        """Whether a saved value is kept in every choice."""
        found = self._graph.values[value]
        return found.root is not None or found.nbytes <= SEED_BYTES or value in self._read_inside

    def _recompute_ns(self, again: set[int], as_masks: set[int]) -> int:
        total = 0
        for index in again:
            if index in as_masks:
                total += self._step_ns + self._mask_ns(index)
            else:
                total += self._time(self._graph.operations[index]) + (self._step_ns if index in self._masks else 0)
        return total

    def _made_by(self, value: int) -> int:
        return self._graph.values[value].operation
