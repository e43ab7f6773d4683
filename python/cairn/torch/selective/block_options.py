"""Choices of selective recomputation for a block: which saved tensors to keep and which to recompute.

They are computed from one recorded run of the block. A `Choice` has estimated bytes and time. A choice that was
measured is an *option* of the block.

Problem. For every saved tensor of a block: keep it, or recompute it in the backward from kept tensors. Kept bytes cost
memory. Each recomputed operation costs its time once, however many tensors need it. The useful choices lie on the lower
convex hull of (bytes, time): a chain solver mixes options over the blocks, so choices above the hull help little. If a
block makes up much of a step, there is little to mix. Choices on the edges of the hull are then useful as well.

Method. For a price of w_b per byte and w_t per nanosecond the cheapest choice is a minimum cut. Let r(o) say that
operation o is recomputed and a(v) that value v is available. Then a(v) = 1 for every saved v; r(o) = 1 asks for a(u) =
1 of each operand u; and a(v) = 1 without r(o) = 1 of the operation o that makes v means that v is kept. With the nodes
of r and a on the source's side where they are 1, the edges and their capacities are:

* source -> a(v): infinite, where v is saved;
* a(v) -> r(o): w_b * bytes(v), or infinite where v is not saved and so cannot be kept;
* r(o) -> sink: w_t * time(o), or infinite where o may not be replayed;
* r(o) -> a(u): infinite.

(This is the cut of the min-cut partitioners for training graphs, with times on the operations in addition to bytes on
the values.) A cut at the price of the line between two known points of the hull gives a point between them, if there is
one. Repeated on both sides of each new point, this gives the whole hull. Prices are integers, so they are exact.

The network is small. Saved values have a(v) = 1, so they are merged with the source, and their edge to r(o) starts at
the source. Operations that would require the replay of a forbidden one are on the sink's side and are left out. The
rest falls into components that share only source and sink. Most have a few operations, because saved values separate
them. Each component is cut by itself. If its cuts at a higher and at a lower price of bytes are equal, the cut at any
price in between is the same, and is not computed.

Masks. A dropout draws `empty.bernoulli_(1 - p)` and scales it in place. Its noise may also be kept as one bit per
element (a byte, where it is not on the CPU): the drawing is split into an operation that draws the mask, and one that
turns a mask into noise; the mask is one more value that can be kept.

Seeds. Kernels of attention on CUDA save the seed and offset of their random numbers, and leave them unwritten if they
draw none, so that they differ in every run. Values of this size are always kept, even if their operation is recomputed.

Cost. One cut of a block of n operations takes O(n) in practice: a millisecond or two for a hundred operations. There
are about two cuts for each point of the hull. A block that loops can have large n and large components, whose cuts take
up to O(n^2), and measured times make nearly each operation a point of its own. So the number of cuts is limited, and
the next cut is always made where the largest area may lie below the known hull.
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

DROP, MASK = "d", "m"  # decisions on a saved tensor other than KEEP: recompute it, or keep a mask of it
CONSTANT_TIME_CHOICES = 12  # the most candidates by constant times, the one that keeps everything included
MEASURED_TIME_CHOICES = 8  # the most candidates by measured times
CONSTANT_BYTES_PER_NS = 4  # constant times: the memory bandwidth of one core, about
PRODUCT_FACTOR = 20  # constant times: a matrix product takes this many times as long as a copy of the same bytes
CUT_WORK = 20_000_000  # limit on cuts * operations^2: at most some seconds, and no limit up to 200 operations
REPLAY_OVERHEAD_NS = 3000  # of one operation
SEED_BYTES = 16  # saved values of at most this size are always kept
_Point = TypeVar("_Point")
_PRESERVE_ZEROS = ("aten.div_.Scalar", "aten.mul_.Scalar", "aten.div_.Tensor", "aten.mul_.Tensor")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A decision for each saved tensor of a block, with its estimated bytes and time.

    Attributes
    ----------
    decisions
        One letter for each saved tensor, in the order of saving: KEEP, DROP or MASK.
    kept_bytes
        Bytes that are kept for the backward.
    recompute_ns
        Extra time in the backward.
    """

    decisions: str
    kept_bytes: int
    recompute_ns: int


def choices(graph: BlockGraph, at_most: float = math.inf, finest_bytes: int = 0) -> list[Choice]:
    """Choices along the convex hull, from the one that keeps everything to the one that keeps least.

    Parameters
    ----------
    at_most
        The most points of the hull.
    finest_bytes
        Two neighbours that differ by more than this get choices in between, beyond `at_most`. 0: none do.
    """
    model = _Model(graph)
    everything, least = model.keep_everything(), model.cheapest(model.total_ns + 1, 1)
    if least.kept_bytes >= everything.kept_bytes:
        return [everything]
    cuts = max(2, CUT_WORK // len(graph.operations) ** 2)
    points = _thinned([everything, *_hull_between(model, everything, least, cuts), least], at_most)
    return _with_choices_between(model, points, finest_bytes) if finest_bytes > 0 else points


def ideal_choices(graph: BlockGraph) -> list[Choice]:
    """The hull without the overhead of replaying: a lower bound on every choice's bytes and time.

    The block's output counts as a saved tensor here, because the next block reads it in its backward.
    """
    model = _Model(graph, ideal=True)
    everything, least = model.keep_everything(), model.cheapest(model.total_ns + 1, 1)
    return [everything, *_hull_between(model, everything, least), least]


def candidates(graph: BlockGraph, finest_bytes: int = 0) -> list[Choice]:
    """The choices worth measuring: some by measured times of the operations, some by constant ones.

    Measured times differ from run to run, and so do the choices along their hull. The choices by constant times are the
    same in every run, so the least memory is reproducible. The first choice keeps everything. finest_bytes: as in
    `choices`, for the choices by constant times.
    """
    constant_time = choices(_with_constant_times(graph), CONSTANT_TIME_CHOICES, finest_bytes)
    by_decisions = {choice.decisions: choice for choice in (*constant_time, *choices(graph, MEASURED_TIME_CHOICES))}
    return sorted(
        by_decisions.values(), key=lambda choice: (KEEP * len(graph.packs) != choice.decisions, -choice.kept_bytes)
    )


def _with_constant_times(graph: BlockGraph) -> BlockGraph:
    """A copy of the block whose times are computed from the bytes that operations read and write."""

    def with_constant_time(op: Operation) -> Operation:
        values = (*(use.value for use in op.operands if use.value >= 0), *op.values)
        nbytes = sum(graph.values[value].nbytes for value in values)
        is_product = getattr(op.function, "overloadpacket", None) in flop_registry
        return dataclasses.replace(
            op, nanoseconds=nbytes // CONSTANT_BYTES_PER_NS * (PRODUCT_FACTOR if is_product else 1)
        )

    return dataclasses.replace(graph, operations=[with_constant_time(op) for op in graph.operations])


def _hull_between(model: _Model, first: Choice, last: Choice, cuts: float = math.inf) -> list[Choice]:
    """The points of the hull strictly between two of its points, by at most `cuts` cuts."""
    points: list[Choice] = []
    gaps = [(first, last)]
    while gaps and cuts > 0:
        gap = max(gaps, key=_area_bound)
        gaps.remove(gap)
        a, b = gap
        nanoseconds, nbytes = b.recompute_ns - a.recompute_ns, a.kept_bytes - b.kept_bytes
        if nanoseconds <= 0 or nbytes <= 0:
            continue
        cuts -= 1
        between = model.cheapest(nanoseconds, nbytes)
        if model.price(between, nanoseconds, nbytes) < model.price(a, nanoseconds, nbytes):
            points.append(between)
            gaps += [(a, between), (between, b)]
    return sorted(points, key=lambda choice: -choice.kept_bytes)


def _area_bound(gap: tuple[Choice, Choice]) -> int:
    """A bound on the area between the hull and the line between two of its points."""
    a, b = gap
    return (b.recompute_ns - a.recompute_ns) * (a.kept_bytes - b.kept_bytes)


def _with_choices_between(model: _Model, points: Sequence[Choice], finest_bytes: int) -> list[Choice]:
    """The choices, with further ones between neighbours that differ by more than `finest_bytes`."""
    filled = list(points[:1])
    for a, b in itertools.pairwise(points):
        parts = -(-(a.kept_bytes - b.kept_bytes) // finest_bytes)
        filled += model.interpolated(a, b, parts)
        filled.append(b)
    return filled


def _thinned(points: Sequence[Choice], at_most: float) -> list[Choice]:
    return thinned(points, at_most, lambda choice: (choice.kept_bytes, choice.recompute_ns))


def thinned(
    points: Sequence[_Point],
    at_most: float,
    coordinates: Callable[[_Point], tuple[int, int]],
    keep_ids: Container[int] = (),
) -> list[_Point]:
    """Remove the points that change the curve of bytes and time least, until at most `at_most` are left.

    The two ends stay. coordinates: returns the bytes and time of a point. keep_ids: the `id` of further points that
    stay.
    """
    points = list(points)
    while len(points) > at_most:
        removable = [i for i in range(1, len(points) - 1) if id(points[i]) not in keep_ids]
        del points[min(removable, key=lambda i: _area_lost(*map(coordinates, points[i - 1 : i + 2])))]
    return points


def _area_lost(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    """Twice the area between the curve a, b, c and the line from a to c; negative if b lies above that line."""
    return (b[1] - a[1]) * (c[0] - a[0]) - (b[0] - a[0]) * (c[1] - a[1])


# -- what can be kept ----------------------------------------------------------------------------------------


def saved_values(graph: BlockGraph) -> dict[int, int]:
    """The saved values that can be kept: by value, the index of the first saved tensor that reads it."""
    first_pack: dict[int, int] = {}
    for index, pack in enumerate(graph.packs):
        if pack.use is not None:
            first_pack.setdefault(pack.use.value, index)
    return first_pack


def is_always_resident(graph: BlockGraph, value: int) -> bool:
    """Whether a value is an argument, a parameter or a buffer: it exists in the backward anyway."""
    root = graph.values[value].root
    return root is not None and root[0] in (ARGUMENT, PARAMETER, BUFFER)


def masks(graph: BlockGraph) -> dict[int, int]:
    """By operation that draws a dropout mask: the saved value whose zeros show the mask."""
    writer = {op_value: i for i, op in enumerate(graph.operations) for op_value in op.written.values()}
    follower = {graph.values[value].before: value for value in writer}
    saved = saved_values(graph)
    values = {}
    for index, op in enumerate(graph.operations):
        if not op.name.startswith("aten.bernoulli_.float") or len(op.written) != 1:
            continue
        value = op.written[0]
        while value not in saved and value in follower and _preserves_zeros(graph.operations[writer[follower[value]]]):
            value = follower[value]
        if value in saved and _reads_all(graph, saved[value]) and graph.values[value].dtype.itemsize > 1:
            values[index] = value
    return values


def _reads_all(graph: BlockGraph, pack: int) -> bool:
    """Whether a saved tensor reads each element of its value exactly once, in the layout in which it was made."""
    use = graph.packs[pack].use
    return use is not None and use.view == graph.values[use.value].base and graph.is_dense(use.value)


def _preserves_zeros(op: Operation) -> bool:
    if op.name not in _PRESERVE_ZEROS:
        return False
    scalars = [item for item in op.tree.shape[0] if isinstance(item, (int, float))]
    return len(scalars) == 1 and 1e-30 < abs(scalars[0]) < 1e30


# -- the cut -------------------------------------------------------------------------------------------------


class _Model:
    """The network of a block, and its cuts; see the top of this file.

    ideal: without overhead of replaying, and with the outputs as saved values.
    """

    def __init__(self, graph: BlockGraph, ideal: bool = False) -> None:
        self._graph = graph
        self._overhead_ns, self._is_ideal = 0 if ideal else REPLAY_OVERHEAD_NS, ideal
        self._saved_values = saved_values(graph)
        self._masks = masks(graph)
        self._read_in_forward = {p.use.value for p in graph.packs if p.read_in_forward and p.use is not None}
        self._free = self._free_values()
        outputs = (v for v in graph.values if v.storage in graph.returned and v.root is None and not v.overwritten)
        self._outputs = {v.index for v in outputs} if ideal else set()
        self._saved = self._outputs.union(self._saved_values)
        self._components = self._connected_components()
        no_recompute: list[Side] = [[] for _ in self._components]
        self._cuts = [(Fraction(0), no_recompute)]  # price of a byte in ns, and the cut; ascending
        self._sides = {KEEP * len(graph.packs): no_recompute}  # by a choice's decisions: its cut
        self.total_ns = sum(self._time(op) for op in graph.operations) * 2

    def _time(self, op: Operation) -> int:
        return op.nanoseconds + self._overhead_ns

    def _free_values(self) -> set[int]:
        """Saved values that cost nothing to keep: the block's outputs, and values computed from parameters alone."""
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
        return {v for v in self._saved_values if graph.values[v].storage in returned or v in from_parameters}

    def bytes_of(self, value: int) -> int:
        """The bytes that keeping a saved value takes."""
        saved = self._graph.values[value]
        return 0 if saved.root is not None or value in self._free else saved.nbytes

    def keep_everything(self) -> Choice:
        kept = sum(map(self.bytes_of, self._saved))
        return Choice(KEEP * len(self._graph.packs), kept, 0)

    def price(self, choice: Choice, per_byte: int, per_ns: int) -> int:
        return per_byte * choice.kept_bytes + per_ns * choice.recompute_ns

    def cheapest(self, per_byte: int, per_ns: int) -> Choice:
        """The choice of least price."""
        ratio = Fraction(per_byte, per_ns)
        index = bisect.bisect(self._cuts, ratio, key=lambda cut: cut[0])
        neighbours = [sides for _, sides in self._cuts[index - 1 : index + 1]]
        sides = [
            neighbours[0][i]
            if len(neighbours) > 1 and neighbours[0][i] == neighbours[1][i]
            else piece.source_side(per_byte, per_ns)
            for i, piece in enumerate(self._components)
        ]
        self._cuts.insert(index, (ratio, sides))
        return self._choice_of_sides(sides)

    def _choice_of_sides(self, sides: list[Side]) -> Choice:
        choice = self._choice({node for side in sides for node in side})
        self._sides[choice.decisions] = sides
        return choice

    def interpolated(self, first: Choice, last: Choice, parts: int) -> list[Choice]:
        """Choices between two neighbours of the hull: `parts` - 1 at about equal distances, and some more.

        A choice in between cuts some components as `last` does, and the others as `first` does. Components of equal
        price, such as those of equal layers, change together along the hull, so these choices lie on it.

        The components that run earliest change first: they are recomputed last, when the backward is past its peak.
        The further choices change all but every second component, all but every third, and so on. They help where each
        component is recomputed from the one before it: otherwise the recomputed values of the whole row exist at once.
        """
        before, after = self._sides[first.decisions], self._sides[last.decisions]
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        changed.sort(key=lambda i: min(index for _, index in (*before[i], *after[i])))

        def changing(components: Sequence[int]) -> Choice:
            recomputed = set(components)
            return self._choice_of_sides([after[i] if i in recomputed else before[i] for i in range(len(before))])

        def changing_first(count: int) -> Choice:
            return changing(changed[:count])

        by_decisions: dict[str, Choice] = {}
        for part in range(1, parts):
            target_bytes = first.kept_bytes - (first.kept_bytes - last.kept_bytes) * part // parts
            counts = range(1, len(changed))
            index = bisect.bisect_left(counts, -target_bytes, key=lambda count: -changing_first(count).kept_bytes)
            if index < len(counts):
                choice = changing_first(counts[index])
                by_decisions[choice.decisions] = choice
        for every in range(2, math.isqrt(len(changed)) + 1) if parts > 1 else ():
            choice = changing([component for number, component in enumerate(changed, 1) if number % every])
            by_decisions[choice.decisions] = choice
        return sorted(by_decisions.values(), key=lambda choice: -choice.kept_bytes)

    def _connected_components(self) -> list[Network]:
        """The networks of the operations that may be recomputed, one for each connected component."""
        needs: list[Set[int] | None] = []
        for index, op in enumerate(self._graph.operations):
            needed = self._operations_needed(index, op)  # these ran earlier
            needs.append(None if needed is None or any(needs[other] is None for other in needed) else needed)
        savings = self._savings()
        components = connected([index for index in savings if needs[index] is not None], needs)
        return [self._network(component, savings, needs) for component in components]

    def _operations_needed(self, index: int, op: Operation) -> Set[int] | None:
        """The operations whose unsaved results an operation reads; None if the operation must not be recomputed."""
        used = {use.value for use in op.operands if use.value >= 0} - self._saved
        values = [self._graph.values[v] for v in used if not is_always_resident(self._graph, v)]
        if (op.reason and index not in self._masks) or any(value.root is not None for value in values):
            return None
        return {value.operation for value in values}

    def _savings(self) -> dict[int, int]:
        """By operation that produced saved values: the bytes that need not be kept if it is recomputed."""
        savings: dict[int, int] = {}
        for value in sorted(self._saved):
            if self.bytes_of(value) and not (value in self._saved_values and self._is_always_kept(value)):
                index = self._operation_of(value)
                savings[index] = savings.get(index, 0) + self.bytes_of(value)
        return savings

    def _network(
        self, component: Iterable[int], savings: Mapping[int, int], needs: Sequence[Set[int] | None]
    ) -> Network:
        network = Network()
        for index in component:
            op, node = self._graph.operations[index], ("r", index)
            network.edge(Network.SOURCE, node, savings.get(index, 0), 0)
            for other in needs[index] or ():
                network.edge(node, ("r", other), Network.INFINITE, 0)
            if index in self._masks:
                network.edge(node, Network.SINK, 0, self._overhead_ns)
                network.edge(node, ("draw", index), self._mask_bytes(index), self._mask_ns(index))
                node = "draw", index
            network.edge(node, Network.SINK, 0, self._time(op) if not op.reason else Network.INFINITE)
        return network

    def _mask_bytes(self, index: int) -> int:
        """Bytes of a kept mask: one bit for each element on the CPU, one byte elsewhere."""
        elements = self._mask_elements(index)
        is_packed = self._graph.values[self._masks[index]].device.type == "cpu"
        return -(-elements // bit_masks.PER_BYTE) if is_packed else elements

    def _mask_ns(self, index: int) -> int:
        """Time to compute a mask from the noise, and the noise from the mask."""
        return 0 if self._is_ideal else REPLAY_OVERHEAD_NS + self._mask_elements(index) // 4

    def _mask_elements(self, index: int) -> int:
        value = self._graph.values[self._masks[index]]
        return value.nbytes // value.dtype.itemsize

    def _choice(self, source_side: set[tuple[str, int]]) -> Choice:
        """The choice of a cut. source_side: the nodes on the source's side."""
        graph = self._graph
        recomputed = {index for kind, index in source_side if kind == "r"}
        as_masks = {i for i in recomputed & set(self._masks) if ("draw", i) not in source_side}
        mask_values = {self._masks[i] for i in as_masks}
        letters, kept = [], 0
        for index, pack in enumerate(graph.packs):
            value = pack.use.value if pack.use is not None else -1
            if value < 0 or self._is_always_kept(value) or graph.values[value].operation not in recomputed:
                letters.append(KEEP)
                kept += self.bytes_of(value) if value >= 0 and self._saved_values[value] == index else 0
            else:
                letters.append(MASK if value in mask_values and self._saved_values[value] == index else DROP)
        kept += sum(self._mask_bytes(i) for i in as_masks)
        kept += sum(
            self.bytes_of(v)
            for v in self._outputs.difference(self._saved_values)
            if self._operation_of(v) not in recomputed
        )
        return Choice("".join(letters), kept, self._recompute_ns(recomputed, as_masks))

    def _is_always_kept(self, value: int) -> bool:
        """Whether a saved value is kept in every choice."""
        saved = self._graph.values[value]
        return saved.root is not None or saved.nbytes <= SEED_BYTES or value in self._read_in_forward

    def _recompute_ns(self, recomputed: set[int], as_masks: set[int]) -> int:
        total = 0
        for index in recomputed:
            if index in as_masks:
                total += self._overhead_ns + self._mask_ns(index)
            else:
                total += self._time(self._graph.operations[index]) + (self._overhead_ns if index in self._masks else 0)
        return total

    def _operation_of(self, value: int) -> int:
        return self._graph.values[value].operation
