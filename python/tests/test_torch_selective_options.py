"""The choices found on recorded operations, and the options of a block that are kept of them."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from cairn.torch.base.stage_measure import OptionMeasure
from cairn.torch.profiling import option_measure
from cairn.torch.profiling.option_measure import pareto
from cairn.torch.selective.block_graph import BlockGraph
from cairn.torch.selective.block_options import (
    CONSTANT_BYTES_PER_NS,
    CONSTANT_TIME_CHOICES,
    DROP,
    KEEP,
    MEASURED_TIME_CHOICES,
    PRODUCT_FACTOR,
    REPLAY_OVERHEAD_NS,
    Choice,
    _Model,
    _thinned,
    _with_constant_times,
    candidates,
    choices,
    ideal_choices,
)
from cairn.torch.selective.min_cut import Network
from recorded_support import Recorded, gelu, leaf
from torch import Tensor
from torch.nn import functional as F


def brute_force(
    graph: BlockGraph, step_ns: int = REPLAY_OVERHEAD_NS, with_output: bool = False
) -> list[tuple[int, int]]:
    """Bytes and time of every choice of kept values: all operations that the others need, each once; no masks.

    with_output: what the block returns is wanted as well, and kept or recomputed.
    """
    shown: dict[int, list[int]] = {}
    for index, pack in enumerate(graph.packs):
        if pack.use is not None and graph.values[pack.use.value].root is None:
            shown.setdefault(pack.use.value, []).append(index)
    returned = {v.index for v in graph.values if v.storage in graph.returned and not v.overwritten}
    if with_output:
        shown |= {value: [] for value in returned - set(shown)}
    free = set() if with_output else returned
    points = []
    for kept in itertools.chain.from_iterable(itertools.combinations(shown, n) for n in range(len(shown) + 1)):
        needed: set[int] = set()
        missing = [v for v in shown if v not in kept]
        while missing:
            value = missing.pop()
            if graph.values[value].root is None and value not in kept:
                operation = graph.values[value].operation
                if operation not in needed:
                    needed.add(operation)
                    missing += [use.value for use in graph.operations[operation].operands]
        nbytes = sum(graph.values[v].nbytes for v in kept if v not in free)
        points.append((nbytes, sum(graph.operations[o].nanoseconds + step_ns for o in needed)))
    return points


def hull(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The corners of the lower left convex hull, most bytes first."""
    best: dict[int, int] = {}
    for nbytes, time in points:
        best[nbytes] = min(time, best.get(nbytes, time))
    corners: list[tuple[int, int]] = []
    for point in sorted(best.items()):
        if corners and point[1] >= corners[-1][1]:
            continue
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners[::-1]


def _is_above(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def test_choices_are_the_hull_of_all_choices() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = torch.tanh(x @ y)
        b = torch.sigmoid(a * x).exp()
        return torch.cat([(a * b).sin(), F.layer_norm(b + a, (8,)).cos()]) @ y

    graph = Recorded(function, leaf(8, 8), leaf(8, 8)).graph
    choose = random.Random(1)
    for _ in range(20):
        for op in graph.operations:
            op.nanoseconds = choose.randrange(1, 40000)
        found = [(choice.kept_bytes, choice.recompute_ns) for choice in choices(graph, 1000)]
        corners = hull(brute_force(graph))
        assert found[-1] == corners[-1] and found[0] == corners[0]
        assert set(corners) <= set(found)


def test_ideal_choices_are_the_hull_with_the_output_and_without_overhead() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = torch.tanh(x @ y)
        return F.layer_norm(torch.sigmoid(a * x).exp() + a, (8,)).cos() @ y + x

    graph = Recorded(function, leaf(8, 8), leaf(8, 8)).graph
    choose = random.Random(1)
    for _ in range(20):
        for op in graph.operations:
            op.nanoseconds = choose.randrange(1, 40000)
        found = [(choice.kept_bytes, choice.recompute_ns) for choice in ideal_choices(graph)]
        corners = hull(brute_force(graph, 0, with_output=True))
        assert found[-1] == corners[-1] == (0, corners[-1][1]) and found[0] == corners[0]
        assert set(corners) <= set(found)


def test_a_block_of_very_many_operations_is_cut_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over a sequence: no two operations take the same time, and each would be a corner of the hull."""

    def function(x: Tensor) -> Tensor:
        for _ in range(200):
            x = (torch.tanh(x) * 1.5).sin()
        return x

    graph = Recorded(function, leaf(8, 8)).graph
    for index, op in enumerate(graph.operations):
        op.nanoseconds = 1000 + 7 * index
    cut, cuts = _Model.cheapest, []
    monkeypatch.setattr(_Model, "cheapest", lambda model, *price: cuts.append(price) or cut(model, *price))
    found = choices(graph, 12)
    assert len(graph.operations) == 600 and len(cuts) < 60, len(cuts)
    assert len(found) == 12 and found[0].recompute_ns == 0 and found[-1].kept_bytes == 0
    steps = [a.kept_bytes - b.kept_bytes for a, b in itertools.pairwise(found)]
    assert max(steps) < found[0].kept_bytes / 4, steps


def test_cuts_at_prices_between_others_are_those_of_a_fresh_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies apart in a network is cut anew only where the cuts on both sides differ."""

    def function(x: Tensor) -> Tensor:
        for _ in range(30):
            x = torch.tanh(F.dropout(gelu(x), 0.3) * 1.5)
        return x

    graph = Recorded(function, leaf(8, 8)).graph
    for index, op in enumerate(graph.operations):
        op.nanoseconds = 1000 + 37 * index % 5000
    cut, count = Network.source_side, itertools.count()
    monkeypatch.setattr(Network, "source_side", lambda network, *price: (next(count), cut(network, *price))[1])
    prices = [(random.Random(i).randrange(1, 10**6), random.Random(-i).randrange(1, 10**4)) for i in range(40)]
    model = _Model(graph)
    found = [model.cheapest(*price) for price in prices]
    cuts, pieces = next(count), len(model._components)
    assert pieces > 60 and cuts < len(prices) * pieces / 2, (cuts, pieces)
    assert found == [_Model(graph).cheapest(*price) for price in prices]


def test_thinning_keeps_the_ends() -> None:
    graph = Recorded(gelu, leaf(8, 8)).graph
    everything = choices(graph, 100)
    assert len(everything) > 4
    few = choices(graph, 4)
    assert len(few) == 4 and few[0] == everything[0] and few[-1] == everything[-1]
    assert set(few) <= set(everything)
    assert few[0] == Choice(KEEP * len(graph.packs), few[0].kept_bytes, 0)


def alike(x: Tensor) -> Tensor:
    for _ in range(8):
        x = x + torch.tanh(x * 2) @ x.t()
    return x


def test_between_choices_that_are_far_apart_are_some_that_do_the_same_for_fewer_operations() -> None:
    """Layers that are alike are worth recomputing at the same price."""
    run = Recorded(alike, leaf(16, 16))
    graph = _with_constant_times(run.graph)
    part = 16 * 16 * 4
    far, near = choices(graph), choices(graph, math.inf, 2 * part)
    assert max(a.kept_bytes - b.kept_bytes for a, b in itertools.pairwise(far)) > 4 * part
    assert set(far) < set(near) and near == sorted(near, key=lambda choice: -choice.kept_bytes)
    assert max(a.kept_bytes - b.kept_bytes for a, b in itertools.pairwise(near)) <= 2 * part
    for choice in near:
        run.check(choice.decisions, list(reversed(range(len(graph.packs)))))
    found = {choice.decisions for choice in near}
    assert "dkd" * 2 + "kkk" * 6 in found and "dkdkkk" * 4 in found  # the earliest, and every second
    assert set(choices(graph, 4, 10**9)) == set(choices(graph, 4))
    found = {choice.decisions for choice in candidates(run.graph, 2 * part)}
    assert found >= {choice.decisions for choice in choices(graph, CONSTANT_TIME_CHOICES, 2 * part)}


def test_thinning_leaves_out_where_the_curve_changes_least() -> None:
    a, b, c, d = (Choice("", kept, took) for kept, took in ((100, 0), (50, 10), (45, 12), (0, 100)))
    assert _thinned([a, b, c, d], 3) == [a, c, d]
    assert _thinned([a, b, c, d], 2) == [a, d]


def test_products_take_longer_by_steady_times() -> None:
    graph = _with_constant_times(Recorded(lambda x, y: torch.tanh(x @ y), leaf(64, 64), leaf(64, 64)).graph)
    moved = {"aten.mm.default": 3 * 64 * 64 * 4 * PRODUCT_FACTOR, "aten.tanh.default": 2 * 64 * 64 * 4}
    assert {op.name: op.nanoseconds * CONSTANT_BYTES_PER_NS for op in graph.operations} == moved


def test_what_operations_read_must_be_at_hand() -> None:
    """Arguments, parameters and buffers are; of other tensors only those that are saved."""
    shift = torch.randn(8, 8)

    def function(x: Tensor) -> Tensor:
        return torch.tanh(x + shift) * 3

    [everything] = choices(Recorded(function, leaf(8, 8)).graph)
    assert everything.decisions == KEEP
    for at_hand in ({"parameters": [shift]}, {"buffers": [shift]}):
        assert [choice.decisions for choice in choices(Recorded(function, leaf(8, 8), **at_hand).graph)] == [KEEP, DROP]
    assert choices(Recorded(lambda x: torch.tanh(x + shift * x) * 3, leaf(8, 8)).graph)[-1].decisions == KEEP + DROP


def test_what_is_not_replayed_is_kept() -> None:
    def two_draws(x: Tensor) -> Tensor:
        return torch.tanh(x * (torch.rand(8, 8) + torch.rand(8, 8))) * 3

    everything, least = choices(Recorded(two_draws, leaf(8, 8)).graph)
    assert everything.decisions == KEEP * 2
    assert (least.decisions, least.kept_bytes) == (KEEP + DROP, 8 * 8 * 4)


@pytest.mark.parametrize("seen", [torch.view_as_real, lambda z: z.conj().imag], ids=["real", "negative"])
def test_what_is_saved_as_another_type_is_kept(seen: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return (seen(torch.complex(x.sin(), x.cos()).exp()).pow(2) + 1).tanh()

    run = Recorded(function, leaf(8, 8))
    as_real = [index for index, tensor in enumerate(run.saved) if run.graph.packs[index].use is None]
    assert as_real
    for choice in choices(run.graph, 100):
        assert {choice.decisions[index] for index in as_real} == {KEEP}
        run.check(choice.decisions, list(reversed(range(len(run.saved)))))


def test_copies_of_parameters_are_kept_at_no_cost() -> None:
    weight = torch.randn(8, 8)
    graph = Recorded(lambda x: (x.double() @ weight.double()).sin(), leaf(8, 8), parameters=[weight]).graph
    assert all(choice.decisions[0] == KEEP for choice in choices(graph))
    assert choices(graph)[0].kept_bytes == 8 * 8 * 8 and choices(graph)[-1].kept_bytes == 0


def test_candidates_by_steady_times_are_there_whatever_was_measured() -> None:
    """What the least memory takes must not depend on measured times."""
    graph = Recorded(gelu, leaf(8, 8)).graph
    steady = {choice.decisions for choice in choices(_with_constant_times(graph), CONSTANT_TIME_CHOICES)}
    assert len(steady) > 4
    choose, at_most = random.Random(2), CONSTANT_TIME_CHOICES + MEASURED_TIME_CHOICES - 2
    for _ in range(20):
        for op in graph.operations:
            op.nanoseconds = choose.randrange(1, 40000)
        found = [choice.decisions for choice in candidates(graph)]
        assert found[0] == KEEP * len(graph.packs) and len(found) == len(set(found)) <= at_most
        assert steady <= set(found)


def option(saved: int, rise: int, took: int) -> OptionMeasure:
    return OptionMeasure("k", saved, saved, rise, rise, 0, took, "")


def test_what_is_slower_but_peaks_lower_is_kept() -> None:
    everything, small, slow, beaten = (
        option(10**6, 0, 1),
        option(10**5, 900, 2),
        option(10**5 + 1, 800, 9),
        option(10**5 + 2, 901, 3),
    )
    assert pareto([everything, beaten, slow, small]) == [everything, slow, small]


def test_the_options_that_peak_lowest_and_save_least_are_never_left_out() -> None:
    """They set the least budget; of the others those go first that lie above the curve, then what changes it least."""
    curve = [option(1000 - 100 * i, 100 * i, 5 * i * i) for i in range(10)]
    lowest, above = option(450, 10, 400), option(650, 350, 300)
    options = sorted([*curve, lowest, above], key=lambda each: -each.saved_bytes)
    assert option_measure._thinned(options, 12) == options
    eleven = option_measure._thinned(options, 11)
    assert above not in eleven and lowest in eleven
    few = option_measure._thinned(options, 4)
    assert len(few) == 4 and few[0] is curve[0] and few[-1] is curve[-1] and lowest in few
