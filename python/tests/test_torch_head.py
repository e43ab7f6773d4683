"""Head and loss without a whole tensor of logits: everything bit for bit as PyTorch does it from whole ones."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import memory
from cairn.torch.head import head_chunks
from cairn.torch.head.head_chunks import Chunks
from cairn.torch.head.replacements import head, head_proof
from executor_support import no_collector
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, WORDS = 96, 24, 900
PAGE_BYTES = 4096
OWN = getattr(F, "linear_cross_entropy", None)


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)


def _whole(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, linear_bias: Any = None, **options: Any
) -> torch.Tensor:
    options.pop("chunk_bytes", None)
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **options)


@dataclasses.dataclass
class Operands:
    """What a call is made of."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor

    @classmethod
    def random(
        cls,
        rows: int = ROWS,
        width: int = WIDTH,
        words: int = WORDS,
        dtype: Any = None,
        bias: bool = False,
        seed: int = 0,
    ) -> Operands:
        random = torch.Generator().manual_seed(seed)
        target = torch.randint(words, (rows,), generator=random)
        target[::7] = -100
        return cls(
            torch.randn(rows, width, dtype=dtype, generator=random),
            torch.randn(words, width, dtype=dtype, generator=random) / width**0.5,
            torch.randn(words, dtype=dtype, generator=random) if bias else None,
            target,
        )

    def run(
        self,
        function: Callable[..., torch.Tensor],
        wanted: tuple[bool, bool, bool] = (True, True, True),
        **options: Any,
    ) -> list[torch.Tensor | None]:
        """The loss, and the gradients that are wanted."""
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip((self.input, self.weight, self.bias), wanted, strict=True)
        ]
        loss = function(leaves[0], leaves[1], self.target, linear_bias=leaves[2], **options)
        if loss.requires_grad:
            loss.backward(torch.linspace(0.3, 1.7, loss.numel()).to(loss.dtype).view(loss.shape))
        return [loss.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


@pytest.fixture(autouse=True)
def nothing_proved() -> Iterator[None]:
    before = dict(head_proof._known)
    head_proof._known.clear()
    yield
    head_proof._known.clear()
    head_proof._known.update(before)


def _needs_chunks() -> None:
    """Ends a test on a machine whose library has other bits in parts."""
    if not any(
        head.HeadMethod(case, chunks).largest * 4 <= case.rows * case.words
        for case, chunks in head_proof._known.items()
        if chunks
    ):
        pytest.skip("no small chunks are the same here")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 130),
    width=st.integers(1, 70),
    words=st.integers(2, 700),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignored=st.sampled_from([None, -100, 1]),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    chunk_bytes=st.sampled_from([1, 2000, 20000, 100000]),
    seed=st.integers(0, 1000),
)
@example(22, 1, 385, torch.float32, True, "sum", None, (False, False, True), 1, 0)
def test_any_call_is_pytorchs(
    rows: int,
    width: int,
    words: int,
    dtype: torch.dtype,
    bias: bool,
    reduction: str,
    ignored: int | None,
    wanted: tuple[bool, bool, bool],
    chunk_bytes: int,
    seed: int,
) -> None:
    operands = Operands.random(rows, width, words, dtype, bias, seed)
    options: dict[str, Any] = {"reduction": reduction}
    if ignored is not None:
        operands.target[operands.target == -100] = ignored
        options["ignore_index"] = ignored
    expected = operands.run(_whole, wanted, **options)
    found = operands.run(ct.linear_cross_entropy, wanted, chunk_bytes=chunk_bytes, **options)
    if (operands.target == options.get("ignore_index", -100)).all():
        assert _same(found[0].nan_to_num(), expected[0].nan_to_num())  # type: ignore[union-attr]
    else:
        assert all(map(_same, found, expected))


@pytest.mark.parametrize("wanted", [(False, False, True), (True, True, True)], ids=["bias", "all"])
@pytest.mark.parametrize(
    "shape",
    [(22, 1, 385), (98, 1, 581), (23, 2, 451), (28, 2, 66), (129, 53, 70), (33, 1, 408), (63, 30, 580)],
    ids=str,
)
def test_a_few_rows_or_words_are_no_chunk_of_their_own(
    shape: tuple[int, int, int], wanted: tuple[bool, bool, bool]
) -> None:
    """PyTorch computes them in other ways than many, and by chance to the same bits on some numbers."""
    for dtype in (torch.float32, torch.float64):
        for seed in range(20):
            operands = Operands.random(*shape, dtype, bias=True, seed=seed)
            found = operands.run(ct.linear_cross_entropy, wanted, chunk_bytes=1, reduction="sum")
            assert all(map(_same, found, operands.run(_whole, wanted, reduction="sum")))


@pytest.mark.parametrize("chunks", [Chunks(16, 64), Chunks(64, 0, 16), Chunks(16, 384, 97), Chunks(97, 900)], ids=str)
def test_the_most_logits_are_those_of_the_largest_chunk(chunks: Chunks) -> None:
    rows, words, found = 97, 900, [0]
    for size in filter(None, (chunks.rows, chunks.input_rows)):
        found += [len(range(rows)[part]) * words for part in head_chunks.row_slices(rows, size)]
    for part in head_chunks.column_slices(words, chunks.columns):
        found.append(len(range(words)[part]) * rows)
    assert chunks.largest(rows, words) == max(found)
    assert [len(range(97)[part]) for part in head_chunks.row_slices(97, 16)] == [16, 16, 16, 16, 16, 17]
    assert [len(range(900)[part]) for part in head_chunks.column_slices(900, 384)] == [384, 384, 132]
    assert not list(head_chunks.column_slices(900, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(512, 96, 8000), (510, 64, 5003), (1024, 768, 2000)], ids=str)
def test_larger_shapes_are_in_chunks(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    operands = Operands.random(*shape, dtype=dtype, bias=bias)
    found = operands.run(ct.linear_cross_entropy, chunk_bytes=2**20)
    assert all(map(_same, found, operands.run(_whole)))
    assert len(head_proof._known) == 1


@pytest.mark.parametrize("chunks", [Chunks(32, 128, 0), Chunks(96, 900, 96), Chunks(16, 384, 32), Chunks(7, 100, 13)])
def test_every_way_is_right(chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the proof says, chunks are equal but for rounding."""
    monkeypatch.setattr(head, "proved", lambda case, weight: chunks)
    operands = Operands.random(bias=True, dtype=torch.float64)
    found, expected = operands.run(ct.linear_cross_entropy, chunk_bytes=1), operands.run(_whole)
    for own, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-11, atol=1e-14)


def test_not_exact_by_name_needs_no_proof() -> None:
    operands = Operands.random(bias=True)
    found = operands.run(ct.linear_cross_entropy, chunk_bytes=4000, exact=False)
    assert not head_proof._known
    for own, plain in zip(found, operands.run(_whole), strict=True):
        torch.testing.assert_close(own, plain)


def test_a_proof_that_fails_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that comes out otherwise in parts: each part of the proof notices it."""
    operands = Operands.random()
    case = head_proof.Case.of(
        dataclasses.replace(_head(operands), weight=operands.weight.clone().requires_grad_()), 40000
    )
    case = dataclasses.replace(case, of_input=True, of_weight=True)
    usual = head_proof.proved(case)
    _needs_chunks()
    assert usual is not None
    linear = F.linear

    def wrong_in_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = linear(x, weight, bias)
        return made if len(made) == ROWS and made.shape[1] == WORDS else made * (1 + 2e-7)

    monkeypatch.setattr(F, "linear", wrong_in_parts)
    head_proof._known.clear()
    assert head_proof.proved(case) is None
    monkeypatch.undo()
    head_proof._known.clear()
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: mm(a, b, out=out).mul_(1 + 2e-7))
    assert head_proof.proved(case) is None
    monkeypatch.undo()
    head_proof._known.clear()
    monkeypatch.setattr(torch, "addmm", lambda c, a, b, beta, out: out.zero_())
    found = head_proof.proved(case)
    assert found is not None and found.input_rows


def _head(operands: Operands) -> Any:
    return head.Head(operands.input, operands.weight, operands.bias)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input": lambda t: t.bfloat16(), "weight": lambda t: t.bfloat16()}, "float32"),
        ({"input": lambda t: t.t().contiguous().t()}, "contiguously"),
        ({"weight": lambda t: t.t().contiguous().t()}, "contiguously"),
        ({"target": lambda t: F.one_hot(t.clamp(min=0), WORDS).float()}, "one class index"),
        ({"input": lambda t: t[0], "target": lambda t: t[1]}, "two dimensions"),
        ({"input": lambda t: t[:0], "target": lambda t: t[:0]}, "small"),
    ],
    ids=["bfloat16", "input transposed", "weight transposed", "probabilities", "one row", "no rows"],
)
def test_what_is_passed_on_is_pytorchs(change: dict[str, Callable[..., Any]], reason: str) -> None:
    operands = Operands.random()
    for name, function in change.items():
        setattr(operands, name, function(getattr(operands, name)))
    found, expected = operands.run(ct.linear_cross_entropy, chunk_bytes=1), operands.run(_whole)
    assert all(_same(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True) if a is not None)
    assert reason in head.examined(operands.input, operands.weight, operands.target, chunk_bytes=1).reason


def test_options_that_are_passed_on() -> None:
    operands = Operands.random()
    for options in ({"weight": torch.rand(WORDS)}, {"label_smoothing": 0.1}):
        found = operands.run(ct.linear_cross_entropy, chunk_bytes=1, **options)
        assert all(map(_same, found, operands.run(_whole, **options)))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(_same, operands.run(ct.linear_cross_entropy, chunk_bytes=1), operands.run(_whole)))
    assert not head_proof._known


def test_invalid_calls_fail_as_pytorchs() -> None:
    operands = Operands.random()
    below = operands.target.clone().fill_(-1)
    for target in (below + 1 + WORDS, below, operands.target[:-1], operands.target.float()):
        operands.target = target
        with pytest.raises((RuntimeError, ValueError, IndexError)) as plain:
            operands.run(_whole)
        with pytest.raises(plain.type, match=re.escape(str(plain.value))):
            operands.run(ct.linear_cross_entropy, chunk_bytes=1)
    with pytest.raises(ValueError, match="chunk_bytes"):
        Operands.random().run(ct.linear_cross_entropy, chunk_bytes=0)
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        Operands.random().run(ct.linear_cross_entropy, reduction="median", chunk_bytes=1)


@pytest.mark.parametrize("which", ["weight of zeros", "rows ignored", "not finite"])
def test_the_proof_does_not_depend_on_the_numbers(which: str) -> None:
    """What the first call happens to compute proves nothing and spoils nothing."""
    operands = Operands.random()
    first = Operands.random()
    if which == "weight of zeros":
        first.weight.zero_()
    elif which == "rows ignored":
        first.target.fill_(-100)
    else:
        first.weight[3, 3] = float("inf")
    first.run(ct.linear_cross_entropy, chunk_bytes=40000)
    known = dict(head_proof._known)
    assert all(map(_same, operands.run(ct.linear_cross_entropy, chunk_bytes=40000), operands.run(_whole)))
    assert head_proof._known == known
    _needs_chunks()


def test_graphs_that_are_kept_and_differentiated() -> None:
    """Of one weight that makes the input, too."""
    operands = Operands.random()
    found = []
    for function in (ct.linear_cross_entropy, _whole):
        x, weight = operands.input.clone().requires_grad_(), operands.weight.clone().requires_grad_()
        hidden = x + weight[:ROWS].tanh()
        loss = function(hidden, weight, operands.target, chunk_bytes=40000)
        once = torch.autograd.grad(loss, [x, weight], retain_graph=True)
        again = torch.autograd.grad(loss, [weight], retain_graph=True)
        first = torch.autograd.grad(loss, [x, weight], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, weight], retain_graph=True)
        found.append([*once, *again, *first, *second, *torch.autograd.grad(loss, [x, weight])])
    assert all(map(_same, *found))
    _needs_chunks()


def test_other_conditions_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = Operands.random(bias=True)
    expected = operands.run(_whole)
    leaves = [operands.input.requires_grad_(), operands.weight.requires_grad_()]
    loss = ct.linear_cross_entropy(*leaves, operands.target, linear_bias=operands.bias, chunk_bytes=40000)
    monkeypatch.setattr(head, "conditions", lambda: "elsewhere")
    _needs_chunks()
    monkeypatch.setattr(head.Backward, "run", lambda *_: pytest.fail("computed in chunks"))
    loss.backward(torch.tensor(0.3))
    assert all(map(_same, expected, [loss.detach(), *(leaf.grad for leaf in leaves)]))


def test_no_random_numbers_are_drawn_and_nothing_is_left() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    operands = Operands.random()
    with no_collector():
        operands.run(ct.linear_cross_entropy, chunk_bytes=40000)
        assert torch.equal(state, torch.get_rng_state())
        with memory.CpuMeter() as meter:
            marks = []
            for _ in range(5):
                marks.append(meter.mark())
                operands.run(ct.linear_cross_entropy, chunk_bytes=40000)
        assert len({meter.level(mark) for mark in marks}) == 1
        gc.collect()
        operands.run(ct.linear_cross_entropy, chunk_bytes=40000)
        assert gc.collect() == 0


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "training"])
def test_there_never_is_a_whole_tensor_of_logits(grad: bool) -> None:
    operands = Operands.random(512, 32, 8000)
    logits, weight = 512 * 8000 * 4, 8000 * 32 * 4
    context = contextlib.nullcontext() if grad else torch.no_grad()
    with context:
        operands.run(ct.linear_cross_entropy, chunk_bytes=logits // 16)
        _needs_chunks()
        with memory.CpuMeter() as meter:
            begin = meter.mark()
            operands.run(ct.linear_cross_entropy, chunk_bytes=logits // 16)
            end = meter.mark()
    peak = meter.peak(begin, end) - meter.level(begin)
    assert peak < logits / 2 + weight * grad


# -- in models ------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """A language model in miniature that computes its head and loss at once."""

    def __init__(self, tied: bool = True, own: bool = False, words: int = 4000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, words, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
        self.own, self.in_chunks = own, True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        x, target = x.flatten(0, 1), tokens.flatten()
        if not self.in_chunks:
            return _whole(x, self.head.weight, target, self.head.bias)
        if self.own:
            assert OWN is not None
            return OWN(x, self.head.weight, target, linear_bias=self.head.bias)
        return ct.linear_cross_entropy(x, self.head.weight, target, linear_bias=self.head.bias)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (head.linear_cross_entropy, head.examined):
        monkeypatch.setitem(function.__kwdefaults__, "chunk_bytes", 2**17)


def _step(model: nn.Module, tokens: torch.Tensor, steps: int = 1) -> list[torch.Tensor | None]:
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        loss = model(tokens)
        loss.backward()
        losses.append(loss.detach())
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [*losses, *grads]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.skipif(OWN is None, reason="no such"))])
def test_in_a_planned_model(tied: bool, own: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Language(tied, own).train(), torch.randint(4000, (4, 40)) // 3 * 2
    model.in_chunks = False
    plain = _step(model, tokens, 3)
    model.in_chunks = True
    profile = ct.profile(model, kwargs={"tokens": tokens})
    (way,) = profile.replacements.heads
    _needs_chunks()
    assert way.chunks is not None and any("words in the backward" in note for note in profile.notes)
    assert profile.replacements.tied == (("words.weight",) if tied else ())
    assert ct.Profile.from_json(profile.to_json()) == profile
    everything = ct.plan(profile, "1GiB")
    for budget in (everything.least_budget_bytes, "1GiB"):
        plan = ct.Plan.from_json(ct.plan(profile, budget).to_json())
        head_proof._known.clear()
        with ct.apply(model, plan):
            assert way.case in head_proof._known
            assert all(map(_same, plain, _step(model, tokens, 3)))
        assert ct.verify(model, plan, kwargs={"tokens": tokens}).ok


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_peaks_are_predicted_as_well_as_with_whole_logits(tied: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Language(tied).train(), torch.randint(4000, (4, 40))
    errors, least = [], []
    for model.in_chunks in (False, True):
        profile = ct.profile(model, kwargs={"tokens": tokens})
        plan = ct.plan(profile, "1GiB")
        found = ct.verify(model, plan, kwargs={"tokens": tokens})
        errors.append(plan.created_peak_bytes - found.created.peak_bytes)
        errors.append(plan.accumulated_peak_bytes - found.accumulated.peak_bytes)
        least.append(plan.least_budget_bytes)
    _needs_chunks()
    assert max(errors) - min(errors) < PAGE_BYTES
    assert least[1] < least[0] / 2


@pytest.mark.usefixtures("small_chunks")
def test_a_trace_sees_the_step_and_not_the_proof() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), torch.randint(4000, (4, 40))
    first = ct.trace(model, kwargs={"tokens": tokens})
    assert head_proof._known
    assert str(first) == str(ct.trace(model, kwargs={"tokens": tokens}))


@pytest.mark.usefixtures("small_chunks")
def test_a_plan_for_other_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), torch.randint(4000, (4, 40))
    plan = ct.plan(ct.profile(model, kwargs={"tokens": tokens}), "1GiB")
    _needs_chunks()
    monkeypatch.setattr(head, "proved", lambda case: None)
    with pytest.raises(ct.PlanMismatch, match="profile again"):
        ct.apply(model, plan)


def test_what_is_not_in_chunks_is_said() -> None:
    model, tokens = Language().train(), torch.randint(4000, (2, 4))
    profile = ct.profile(model, kwargs={"tokens": tokens})
    assert "linear_cross_entropy makes a whole tensor of logits: it would be small" in profile.notes
    assert ct.verify(model, ct.plan(profile, "1GiB"), kwargs={"tokens": tokens}).ok
