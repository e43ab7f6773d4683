"""Recorded operations, the choices found on them, and the recipes that recompute: each by itself."""

from __future__ import annotations

import itertools
import linecache
import math
import random
import traceback
from typing import Any

import pytest
import torch
from cairn.torch.base.stage_measure import OptionMeasure
from cairn.torch.profiling import option_measure
from cairn.torch.profiling.option_measure import _pareto
from cairn.torch.rerun_state.rng_and_autocast import RandomState
from cairn.torch.selective import bit_masks
from cairn.torch.selective.block_graph import BlockGraph, Pack, Use
from cairn.torch.selective.block_options import (
    DROP,
    KEEP,
    MASK,
    OF_PRODUCTS,
    STEADY_BYTES_PER_NS,
    STEADY_CHOICES,
    STEP_NS,
    TIMED_CHOICES,
    Choice,
    _Model,
    _thinned,
    _with_steady_times,
    candidates,
    choices,
    ideal_choices,
    masks,
)
from cairn.torch.selective.graph_recorder import BlockRecorder, _may_meet
from cairn.torch.selective.min_cut import Network
from cairn.torch.selective.recompute import TensorRecompute, compile_recipe, mask_of, sample_of
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence


class Recorded:
    """A run of a function, with all that autograd saved and the states of the generator."""

    def __init__(self, function: Any, *arguments: Tensor, parameters: Any = (), buffers: Any = ()) -> None:
        self.arguments = arguments
        self.saved: list[Tensor] = []
        self.states = {0: RandomState(())}
        recorder = BlockRecorder(arguments, parameters, buffers)

        def pack(tensor: Tensor) -> int:
            with recorder.paused():
                recorder.pack(tensor)
                self.saved.append(tensor.detach())
                self.states[len(self.saved)] = RandomState(())
            return len(self.saved) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: self.saved[index]), recorder:
            self.output = function(*arguments)
        self.graph: BlockGraph = recorder.graph(self.output)

    def argument(self, index: int) -> Tensor:
        return self.arguments[index].detach()

    def parameter(self, index: int) -> Tensor:
        raise AssertionError

    buffer = parameter

    def recompute(self, decisions: str, order: list[int]) -> TensorRecompute:
        recompute = TensorRecompute(compile_recipe(self.graph, decisions, order))
        for index, tensor in enumerate(self.saved):
            assert recompute.saved(index, tensor) == (decisions[index] == KEEP)
        for count in recompute.recipe.states:
            recompute.take_state(count, self.states[count])
        return recompute

    def check(self, decisions: str, order: list[int]) -> None:
        """Recomputes what is not kept, in an order, and compares."""
        recompute = self.recompute(decisions, order)
        for index in order:
            if decisions[index] != KEEP:
                tensor = recompute.tensor(index, self)
                assert tensor is not None and torch.equal(tensor, self.saved[index])
                assert tensor.stride() == self.saved[index].stride()

    def least(self) -> str:
        return choices(self.graph, 100)[-1].decisions


def gelu(x: Tensor) -> Tensor:
    y = F.dropout(0.5 * x * (1 + torch.tanh(x + 0.04 * x.pow(3))), 0.2)
    z = torch.sin(y).mul_(1.5)
    return (F.relu_(z + y) @ y.t()).softmax(-1) * 2


def leaf(*shape: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(*shape, requires_grad=True)


# -- choices --------------------------------------------------------------------------------------------------


def brute_force(graph: BlockGraph, step_ns: int = STEP_NS, with_output: bool = False) -> list[tuple[int, int]]:
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
    cuts, pieces = next(count), len(model._pieces)
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
    graph = _with_steady_times(run.graph)
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
    assert found >= {choice.decisions for choice in choices(graph, STEADY_CHOICES, 2 * part)}


def test_thinning_leaves_out_where_the_curve_changes_least() -> None:
    a, b, c, d = (Choice("", kept, took) for kept, took in ((100, 0), (50, 10), (45, 12), (0, 100)))
    assert _thinned([a, b, c, d], 3) == [a, c, d]
    assert _thinned([a, b, c, d], 2) == [a, d]


def test_products_take_longer_by_steady_times() -> None:
    graph = _with_steady_times(Recorded(lambda x, y: torch.tanh(x @ y), leaf(64, 64), leaf(64, 64)).graph)
    moved = {"aten.mm.default": 3 * 64 * 64 * 4 * OF_PRODUCTS, "aten.tanh.default": 2 * 64 * 64 * 4}
    assert {op.name: op.nanoseconds * STEADY_BYTES_PER_NS for op in graph.operations} == moved


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
    steady = {choice.decisions for choice in choices(_with_steady_times(graph), STEADY_CHOICES)}
    assert len(steady) > 4
    choose, at_most = random.Random(2), STEADY_CHOICES + TIMED_CHOICES - 2
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
    assert _pareto([everything, beaten, slow, small]) == [everything, slow, small]


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


# -- recipes --------------------------------------------------------------------------------------------------


def test_every_choice_in_any_order() -> None:
    run = Recorded(gelu, leaf(16, 16))
    choose = random.Random(2)
    backwards = list(reversed(range(len(run.saved))))
    for choice in choices(run.graph, 100):
        run.check(choice.decisions, backwards)
        run.check(choice.decisions, choose.sample(backwards, len(backwards)))


def test_arbitrary_decisions() -> None:
    run = Recorded(gelu, leaf(16, 16))
    least, choose = run.least(), random.Random(3)
    backwards = list(reversed(range(len(run.saved))))
    for _ in range(40):
        decisions = "".join(letter if choose.random() < 0.6 else KEEP for letter in least)
        run.check(decisions.replace(MASK, DROP), backwards)


def test_another_order_than_compiled_for() -> None:
    run = Recorded(gelu, leaf(16, 16))
    decisions = run.least()
    backwards = list(reversed(range(len(run.saved))))
    recompute = run.recompute(decisions, backwards)
    absent = [i for i in range(len(decisions)) if decisions[i] != KEEP]
    for index in absent:  # forwards, where the recipe goes backwards
        tensor = recompute.tensor(index, run)
        assert tensor is not None and torch.equal(tensor, run.saved[index])


def test_asked_twice_in_a_row() -> None:
    run = Recorded(gelu, leaf(16, 16))
    decisions = run.least()
    order = [i for i in reversed(range(len(run.saved))) for _ in range(2)]
    run.check(decisions, order)


def test_nothing_is_left_over() -> None:
    run = Recorded(gelu, leaf(16, 16))
    for choice in choices(run.graph, 100):
        order = list(reversed(range(len(run.saved))))
        recompute = run.recompute(choice.decisions, order)
        for index in order:
            if choice.decisions[index] != KEEP:
                recompute.tensor(index, run)
        assert not recompute._kept and not recompute._made
        assert recompute._running is None or set(recompute._running.gi_frame.f_locals) == {"kept", "states", "made"}


def test_a_traceback_shows_the_code_and_names_the_block() -> None:
    run = Recorded(gelu, leaf(16, 16))
    decisions, order = run.least(), list(reversed(range(len(run.saved))))
    recompute = TensorRecompute(compile_recipe(run.graph, decisions, order, "layers.7"))

    class Failing(Recorded):
        def __init__(self) -> None:
            pass

        def argument(self, index: int) -> Tensor:
            return torch.ones(3, 5)

    for index, tensor in enumerate(run.saved):
        recompute.saved(index, tensor)
    for count in recompute.recipe.states:
        recompute.take_state(count, run.states[count])
    with pytest.raises(RuntimeError) as caught:
        for index in order:
            if decisions[index] != KEEP:
                recompute.tensor(index, Failing())
    text = "".join(traceback.format_exception(caught.value))
    assert "recomputing what 'layers.7' did not keep" in text and "= aten_" in text
    file = next(each for each in linecache.cache if "layers.7" in each)
    del caught, recompute
    assert file not in linecache.cache


def test_a_kept_tensor_that_was_written_is_not_used() -> None:
    x = leaf(16, 16)

    def function(x: Tensor) -> Tensor:
        y = x @ x
        return torch.tanh(torch.sin(y))

    run = Recorded(function, x)
    decisions = "".join(
        DROP if t.shape == (16, 16) and i == len(run.saved) - 1 else KEEP for i, t in enumerate(run.saved)
    )
    order = list(reversed(range(len(run.saved))))
    recompute = run.recompute(decisions, order)
    run.saved[-2].add_(1)
    assert recompute.tensor(len(run.saved) - 1, run) is None


def test_a_tensor_that_comes_out_wrong_is_noticed() -> None:
    run = Recorded(gelu, leaf(16, 16))
    decisions, order = run.least(), list(reversed(range(len(run.saved))))
    recompute = run.recompute(decisions, order)
    with torch.no_grad():
        run.arguments[0].mul_(1.01)
    assert any(recompute.tensor(i, run) is None for i in order if decisions[i] != KEEP)
    assert recompute.was_wrong


def test_writing_over_what_is_still_needed() -> None:
    def function(x: Tensor) -> Tensor:
        a = x * 3
        first, between = torch.tanh(a), a + 1
        a.add_(2).mul_(0.5)
        return torch.tanh(a) * first * torch.sigmoid(between)

    run = Recorded(function, leaf(8, 8))
    run.check(run.least(), list(reversed(range(len(run.saved)))))


def test_what_was_saved_of_storages_that_are_written_beside_it() -> None:
    """A GRU cell writes its gates into one storage after the other, and saves each; none can make an earlier one."""

    def cells(x: Tensor, *weights: Tensor) -> Tensor:
        state = x.sin()
        for _ in range(2):
            state = torch.gru_cell(x, state, *weights)
        return state * 2

    run = Recorded(cells, leaf(8, 16), leaf(48, 16), leaf(48, 16), leaf(48), leaf(48))
    choose, backwards = random.Random(4), list(reversed(range(len(run.saved))))
    found = choices(run.graph, 100)
    assert len(found) > 2 and found[-1].kept_bytes < found[0].kept_bytes // 2
    for choice in found:
        run.check(choice.decisions, backwards)
    for _ in range(40):
        decisions = "".join(letter if choose.random() < 0.6 else KEEP for letter in run.least())
        run.check(decisions, choose.sample(backwards, len(backwards)))


def test_views_that_are_told_apart_have_no_element_in_common() -> None:
    choose, apart, meeting = random.Random(5), 0, 0
    for _ in range(3000):
        strides = choose.choice([(12, 1), (12, 4, 1), (1, 12), (4, 1), (0, 1), (12, 12), (6, 3)])
        one, other = ((tuple(choose.randint(1, 4) for _ in strides), strides, choose.randint(0, 12)) for _ in range(2))
        seen = [set(torch.arange(200).as_strided(*view).flatten().tolist()) for view in (one, other)]
        if not _may_meet(one, other):
            assert seen[0].isdisjoint(seen[1]), (one, other)
        apart += not _may_meet(one, other)
        meeting += not seen[0].isdisjoint(seen[1])
    assert apart > 500 and meeting > 500
    gate = (8, 32), (96, 1)
    assert not _may_meet((*gate, 0), (*gate, 32)) and _may_meet((*gate, 0), (*gate, 31))


def test_decisions_that_cannot_be_carried_out() -> None:
    run = Recorded(lambda x: (x * torch.rand(8, 8, generator=torch.Generator())).tanh(), leaf(8, 8))
    drawn = next(i for i, t in enumerate(run.saved) if run.graph.packs[i].maker is type(None))
    decisions = "".join(DROP if i == drawn else KEEP for i in range(len(run.saved)))
    with pytest.raises(ValueError, match="neither be kept nor recomputed"):
        compile_recipe(run.graph, decisions, [])
    with pytest.raises(ValueError, match="decisions for"):
        compile_recipe(run.graph, KEEP, [])
    with pytest.raises(ValueError, match="no dropout mask"):
        compile_recipe(run.graph, "".join(MASK if i == drawn else KEEP for i in range(len(run.saved))), [])


def test_masks() -> None:
    run = Recorded(lambda x: F.dropout(x.sin(), 0.3) * 2, leaf(64, 64))
    for op in run.graph.operations:
        op.nanoseconds = 100_000  # far more than reading a mask takes
    [with_mask] = [choice for choice in choices(run.graph, 100) if MASK in choice.decisions][:1]
    assert with_mask.kept_bytes == 64 * 64 // 8
    others = 2 * (100_000 + STEP_NS)  # the noise's tensor is made, and scaled
    assert with_mask.recompute_ns == others + 2 * STEP_NS + 64 * 64 // 4
    run.check(with_mask.decisions, list(reversed(range(len(run.saved)))))
    noise = run.saved[with_mask.decisions.index(MASK)]
    mask = mask_of(noise)
    assert mask.nbytes == noise.numel() // 8
    assert torch.equal(unpacked(mask, noise.shape), noise != 0)
    transposed = noise[:40].t()
    assert torch.equal(mask_of(transposed), transposed != 0)


def test_a_mask_is_kept_of_what_draws_where_the_random_state_is_not_at_hand() -> None:
    run = Recorded(lambda x: F.dropout(F.rrelu(x.sin(), training=True), 0.3) * 2, leaf(64, 64))
    for op in run.graph.operations:
        op.nanoseconds = 100_000
        if op.name.startswith("aten.empty_like") and op.packs_before == 1:
            op.reason = "does not give the same result again"  # what RReLU writes later, as profiles find
    assert any("not at hand" in op.reason for op in run.graph.operations)
    found = choices(run.graph, 100)
    assert any(MASK in choice.decisions for choice in found)
    for choice in found:
        run.check(choice.decisions, list(reversed(range(len(run.saved)))))


def drawn(scale: float = 1.5, shape: tuple[int, ...] = (64, 64)) -> Tensor:
    return torch.empty(shape).bernoulli_(0.5).mul_(scale)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x.sin() * drawn(), 1),
        (lambda x: x.sin() * drawn(1e-46), 0),  # whose zeros are more than those of the mask
        (lambda x: x.sin() * drawn(shape=(128, 64))[:64], 0),  # of which not all is saved
        (lambda x: x.sin() + drawn(), 0),
    ],
)
def test_noise_from_whose_zeros_its_mask_can_be_read(function: Any, count: int) -> None:
    assert len(masks(Recorded(function, leaf(64, 64)).graph)) == count


def test_a_noise_that_is_saved_twice_has_one_mask() -> None:
    def function(x: Tensor) -> Tensor:
        noise = drawn()
        return (x.sin() * noise).cos() * noise

    graph = Recorded(function, leaf(64, 64)).graph
    for op in graph.operations:
        op.nanoseconds = 100_000
    found = [choice for choice in choices(graph, 100) if MASK in choice.decisions]
    assert found and all(choice.decisions.count(MASK) == 1 for choice in found)


def unpacked(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """As truth values."""
    return bit_masks.unpack(packed, torch.tensor([False, True]), torch.empty(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", ["div_", "mul_", "none"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_scaled_noise_is_filled_in(dtype: torch.dtype, scale: str, is_packed: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(x).bernoulli_(0.7)
        if scale != "none":
            noise = getattr(noise, scale)(0.7)
        return x.sin() * noise

    x = torch.rand(33, 65, dtype=dtype)
    run = Recorded(function, (x if is_packed else x.t()).requires_grad_())  # bits are for what lies in one piece
    for op in run.graph.operations:
        op.nanoseconds = 10_000_000
    found = [choice for choice in choices(run.graph, 100) if MASK in choice.decisions]
    assert found
    run.check(found[0].decisions, list(reversed(range(len(run.saved)))))
    code = compile_recipe(run.graph, found[0].decisions, []).code.source
    assert "noise(held" in code and "div_" not in code and "mul_" not in code


def test_bits() -> None:
    for count in range(201):
        for start in range(3):
            given = torch.rand(count + start)[start:] < 0.7
            packed = bit_masks.pack(given)
            assert packed.nbytes == (count + 7) // 8
            assert torch.equal(unpacked(packed, given.shape), given)
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                numbers = torch.where(given, float("nan") if start else 5e-39, -0.0).to(dtype)
                pair = torch.tensor([0.3, 1 / 0.3], dtype=dtype)
                assert torch.equal(bit_masks.pack(numbers), bit_masks.pack(numbers != 0))
                expected_numbers = torch.where(numbers != 0, pair[1], pair[0])
                assert torch.equal(
                    bit_masks.unpack(bit_masks.pack(numbers), pair, torch.empty_like(numbers)), expected_numbers
                )
            expected = torch.tensor(
                [sum(b << i for i, b in enumerate(given[at : at + 8])) for at in range(0, count, 8)]
            )
            assert torch.equal(packed.long(), expected.long())


# -- what is recorded -----------------------------------------------------------------------------------------


def test_reasons_not_to_open() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda x: x * x.sum().item(), "depends on the values"),
        (lambda x: x[x > 0], "depends on the values"),
        (lambda x: x * x.detach().tolist()[0][0], "reads tensors from Python"),
        (lambda x: x.detach().add_(1) * x.sin(), "writes what it did not make"),
    ]
    for function, reason in cases:
        assert reason in Recorded(function, leaf(8, 8)).graph.closed
    assert not Recorded(gelu, leaf(8, 8)).graph.closed


def test_values_that_functions_read_themselves_are_a_reason_not_to_open() -> None:
    places, lengths = torch.tensor([1, 5]), torch.tensor([4, 3, 1])
    reading: list[Any] = [
        lambda x, places: x.tensor_split(places, -1)[1].sin(),
        lambda x, places: torch.tensor_split(x, tensor_indices_or_sections=places)[0].sin(),
        lambda x, places: pad_packed_sequence(PackedSequence(x, lengths))[0].sin(),
    ]
    for function in reading:
        assert "depends on the values of its tensors" in Recorded(function, leaf(8, 8), places).graph.closed
    harmless: list[Any] = [
        lambda x, places: x[places].sin(),
        lambda x, places: x[:2, :1].expand_as(places.view(2, 1).expand(2, 4)).sin(),
        lambda x, places: x[places.long().contiguous().view(2)].sin() * places.shape[0],
        lambda x, places: x.type_as(x.to(places)).sin() * places.to(x.dtype).sum(),
        lambda x, places: F.embedding(places, x).sin(),
        lambda x, places: torch.where(x > 0, x, 0).sin().masked_fill(x > 1, 0.0),
    ]
    for function in harmless:
        assert not Recorded(function, leaf(8, 8), places).graph.closed


def test_reasons_not_to_replay() -> None:
    def two_draws(x: Tensor) -> Tensor:
        noise = torch.rand(8, 8) + torch.rand(8, 8)
        return torch.tanh(x * noise)

    graph = Recorded(two_draws, leaf(8, 8)).graph
    assert [op.reason for op in graph.operations if op.random] == ["", "draws where the random state is not at hand"]
    constant = Recorded(lambda x: x * torch.tensor([1.0] * 8), leaf(8, 8)).graph
    assert all(op.reason or op.name == "aten.mul.Tensor" for op in constant.operations)


def test_digest_does_not_depend_on_sizes() -> None:
    small, large = Recorded(gelu, leaf(8, 8)), Recorded(gelu, leaf(24, 24))
    assert small.graph.digest() == large.graph.digest()
    other = Recorded(lambda x: gelu(x).tanh(), leaf(8, 8))
    assert other.graph.digest() != small.graph.digest()


def test_digest_does_not_depend_on_arguments_that_are_not_used() -> None:
    """Trainers pass a count of tokens down to every layer."""
    x, y = leaf(8, 8), leaf(8, 8)
    alone = Recorded(lambda a, b: gelu(a) * b.tanh(), x, y).graph.digest()
    assert (
        Recorded(lambda count, a, spare, b: gelu(a) * b.tanh(), torch.tensor(3), x, leaf(2), y).graph.digest() == alone
    )
    assert Recorded(lambda a, b: gelu(a) * a.tanh(), x, y).graph.digest() != alone
    assert Recorded(lambda a, b: gelu(b) * a.tanh(), x, y).graph.digest() == alone  # as if they had changed names


# -- comparing a few bytes -----------------------------------------------------------------------------------

_VIEWS: dict[str, Any] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.mT,
    "columns": lambda x: x[:, 3:9],
    "every other column": lambda x: x[:, ::2],
    "one column": lambda x: x[:, 5],
    "expanded": lambda x: x[:, 5:6].expand(-1, 4),
    "one number": lambda x: x[7, 5],
    "channels last": lambda x: x.view(2, 3, 4, 16).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", _VIEWS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str)
def test_samples_are_of_the_tensor_and_of_nothing_beside_it(view: str, dtype: torch.dtype) -> None:
    viewed = _VIEWS[view](torch.empty(24, 16))
    look = (tuple(viewed.shape), tuple(viewed.stride()), int(viewed.storage_offset()))
    whole, is_inside = torch.ones(24 * 16, dtype=dtype), torch.zeros(24 * 16, dtype=torch.bool)
    is_inside[torch.arange(24 * 16).as_strided(*look).flatten()] = True
    part = whole.as_strided(*look)
    sample = sample_of(Pack(Use(0, look), part.shape, dtype, part.device, None))
    assert sample is not None
    before = sample.of(part)
    whole[~is_inside] = 0
    assert sample.of(part) == before
    whole[is_inside] = 0
    assert all(now != then for now, then in zip(sample.of(part), before, strict=True))


def test_a_sample_tells_noises_apart_that_agree_in_single_places() -> None:
    """One number of each of two places would be zero in every sixteenth pair of noises."""
    sample = sample_of(
        Pack(Use(0, ((64, 64), (64, 1), 0)), torch.Size((64, 64)), torch.float32, torch.device("cpu"), None)
    )
    assert sample is not None
    generator = torch.Generator().manual_seed(0)
    noises = [
        torch.rand(64, 64, generator=generator) * (torch.rand(64, 64, generator=generator) > 0.5) for _ in range(100)
    ]
    assert len({sample.of(noise) for noise in noises}) == 100
