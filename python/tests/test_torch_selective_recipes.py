"""Recipes recompute what was chosen, bit for bit, in any order."""

from __future__ import annotations

import linecache
import random
import traceback
from typing import Any

import pytest
import torch
from cairn.torch.selective import bit_masks
from cairn.torch.selective.block_options import DROP, KEEP, MASK, REPLAY_OVERHEAD_NS, choices, masks
from cairn.torch.selective.graph_recorder import _may_meet
from cairn.torch.selective.recompute import TensorRecompute, compile_recipe, mask_of
from recorded_support import Recorded, gelu, leaf
from torch import Tensor
from torch.nn import functional as F


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
    others = 2 * (100_000 + REPLAY_OVERHEAD_NS)  # the noise's tensor is made, and scaled
    assert with_mask.recompute_ns == others + 2 * REPLAY_OVERHEAD_NS + 64 * 64 // 4
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
