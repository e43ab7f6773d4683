"""Tied embeddings in less memory get the gradients of PyTorch, bit for bit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import memory
from cairn.torch.head import tied_embedding
from executor_support import no_collector
from head_support import (
    CLASSES,
    WIDTH,
    same_bits,
    small_chunks_fixture,  # noqa: F401
)
from torch import nn
from torch.nn import functional as F

# -- tied embeddings -----------------------------------------------------------------------------------------


class Language(nn.Module):
    """A language model in miniature; its embedding is its head."""

    def __init__(self, padding: int | None = None, bias: bool = False, words: int = CLASSES) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH, padding_idx=padding)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, words, bias=bias)
        self.head.weight = self.words.weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.logits(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Scaled(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 2


class Direct(Language):
    """Has an embedding of its own kind, and no module for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Scaled(CLASSES, WIDTH)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.words.weight)


class Twice(Language):
    """Looks words up twice, and multiplies by them twice."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.words(tokens) + self.words(tokens.flip(1)).tanh()
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x) + self.head(x.sin()) * 0.5
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens.flatten() if labels is None else labels.flatten()
        )


class Otherwise(Language):
    """Uses the weight in a way of its own, too."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(tokens, labels) + self.words.weight.square().mean()


def _tokens(words: int = CLASSES) -> torch.Tensor:
    return torch.randint(words, (2, 12)) // 3 * 2


def _step(model: nn.Module, tokens: torch.Tensor, steps: int = 1) -> list[torch.Tensor | None]:
    """The gradients of steps that accumulate."""
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        loss = model(tokens, labels=tokens)
        loss.backward()
        losses.append(loss.detach())
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [*losses, *grads]


MODELS: dict[str, Callable[[], Language]] = {
    "tied": Language,
    "padding": lambda: Language(padding=0),
    "padding with the last row": lambda: Language(padding=-1),
    "bias": lambda: Language(bias=True),
    "used twice": Twice,
    "used directly": Direct,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_tied_embedding_gets_the_same_gradient(kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model, tokens = MODELS[kind]().train(), _tokens()
    region = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with region:
        plain = _step(model, tokens, steps=3)
        profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})
        assert (profile.replacements.tied, profile.replacements.loss) == (() if autocast else ("words.weight",), True)
        with ct.apply(model, ct.plan(profile, "1GiB")):
            planned = _step(model, tokens, steps=3)
    assert all(map(same_bits, plain, planned))


class InRegion(nn.Module):
    """A model whose own forward begins and ends an autocast region."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(tokens, labels)


def test_a_tied_embedding_in_a_region_of_the_model_itself_is_left_alone() -> None:
    torch.manual_seed(0)
    model, tokens = InRegion(Language()).train(), _tokens()
    plain = _step(model, tokens, steps=3)
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})
    assert (profile.replacements.tied, profile.replacements.loss) == ((), True)
    with ct.apply(model, ct.plan(profile, "1GiB")):
        assert all(map(same_bits, plain, _step(model, tokens, steps=3)))


def test_tokens_may_be_numbers_of_32_bits() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), _tokens()
    profile = ct.profile(model, kwargs={"tokens": tokens.int(), "labels": tokens})
    assert profile.replacements.tied == ("words.weight",)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(5)
        model(tokens.int(), labels=tokens).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return grads

    plain = run()
    with ct.apply(model, ct.plan(profile, "1GiB")):
        assert all(map(same_bits, plain, run()))


def test_several_forwards_before_one_backward() -> None:
    """Gradients add up in the order of the uses, whichever forward they belong to."""
    torch.manual_seed(0)
    model, tokens = Language().train(), _tokens()
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})

    def run() -> list[torch.Tensor | None]:
        torch.manual_seed(5)
        (
            model(tokens, labels=tokens) + model(tokens.flip(0), labels=tokens) * 3 + model(tokens // 2, labels=tokens)
        ).backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        return grads

    plain = run()
    with ct.apply(model, ct.plan(profile, "1GiB")):
        assert all(map(same_bits, plain, run()))
        with torch.autocast("cpu", torch.bfloat16):  # not as profiled
            again = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(same_bits, run(), again))


@pytest.mark.usefixtures("small_chunks")
def test_everything_holds_together() -> None:
    """verify: loss, gradients, buffers, random state and peaks, at the least budget; the plan is saved and read."""
    torch.manual_seed(0)
    model, tokens = Language(words=4000).train(), _tokens(4000)
    sample = {"tokens": tokens, "labels": tokens}
    profile = ct.profile(model, kwargs=sample)
    without = ct.profile(model, kwargs=sample, outside=False)
    assert not without.replacements.tied and not without.replacements.loss
    least, larger = (ct.plan(p, "1GiB").least_budget_bytes for p in (profile, without))
    assert least < larger - 4000 * WIDTH * 4
    plan = ct.Plan.from_json(ct.plan(profile, least).to_json())
    assert ct.verify(model, plan, kwargs=sample).ok
    assert ct.Profile.from_json(profile.to_json()) == profile


def test_another_use_of_the_weight_is_respected() -> None:
    torch.manual_seed(0)
    model, tokens = Otherwise().train(), _tokens()
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})
    assert profile.replacements.tied == ()
    assert ct.verify(model, ct.plan(profile, "1GiB"), kwargs={"tokens": tokens, "labels": tokens}).ok


@pytest.mark.parametrize("what", ["frozen", "by frequency", "in a block"])
def test_what_is_not_ordinary_stays_as_it_is(what: str) -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), _tokens()
    options: dict[str, Any] = {}
    if what == "frozen":
        model.words.weight.requires_grad_(False)
    elif what == "by frequency":
        model.words.scale_grad_by_freq = True
    else:
        options["blocks"] = [*model.layers, model.head]
    sample = {"tokens": tokens, "labels": tokens}
    profile = ct.profile(model, kwargs=sample, **options)
    assert profile.replacements.tied == ()
    assert ct.verify(model, ct.plan(profile, "1GiB"), kwargs=sample).ok


def test_graphs_that_are_kept_differentiated_or_left_unfinished() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), _tokens()
    weight = model.words.weight
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        loss = model(tokens, labels=tokens)
        bias = model.layers[0][0].bias
        found = list(torch.autograd.grad(loss, [bias], retain_graph=True))
        found += torch.autograd.grad(loss, [weight], retain_graph=True)
        found += torch.autograd.grad(loss, [weight, bias], retain_graph=True)
        (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
        found += [first, *torch.autograd.grad(first.square().sum(), [weight])]
        return found

    plain = run()
    with ct.apply(model, ct.plan(profile, "1GiB")):
        planned = run()
    assert all(map(same_bits, plain, planned))


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), _tokens()
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})
    plain = _step(model, tokens)
    fail = True

    def maybe_fail(grad: torch.Tensor) -> None:
        if fail:
            raise ArithmeticError("no")

    with ct.apply(model, ct.plan(profile, "1GiB")):
        torch.manual_seed(5)
        loss = model(tokens, labels=tokens)
        hook = model.layers[0][0].bias.register_hook(maybe_fail)
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
        fail = False
        model.zero_grad()
        loss.backward()
        hook.remove()
        assert all(map(same_bits, plain, [loss.detach(), *(p.grad for p in model.parameters())]))
        model.zero_grad()
        assert all(map(same_bits, plain, _step(model, tokens)))


def test_forward_alone_and_a_part_of_the_model() -> None:
    """Without gradients, and where only the embedding is used."""
    torch.manual_seed(0)
    model, tokens = Language().train(), _tokens()
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})
    model.words(tokens).square().sum().backward()
    plain = model.words.weight.grad
    model.zero_grad()
    with ct.apply(model, ct.plan(profile, "1GiB")):
        with torch.no_grad():
            model(tokens, labels=tokens)
        model.words(tokens).square().sum().backward()
        assert same_bits(plain, model.words.weight.grad)


def test_hooks_see_whole_gradients_once() -> None:
    torch.manual_seed(0)
    model, tokens = Language().train(), _tokens()
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})
    seen: list[torch.Tensor] = []
    model.words.weight.register_hook(lambda grad: seen.append(grad.clone()))
    _step(model, tokens)
    with ct.apply(model, ct.plan(profile, "1GiB")):
        _step(model, tokens)
    assert len(seen) == 2 and same_bits(*seen)


def test_zeros_keep_their_sign() -> None:
    """Where the head's gradient is -0.0 and no token points, the embedding's 0.0 makes it 0.0."""
    weight = nn.Parameter(torch.ones(5, 3))
    tokens = torch.tensor([1, 3, 1])

    def run(embed: Callable[..., Any], linear: Callable[..., Any]) -> torch.Tensor | None:
        weight.grad = None
        y = linear(embed(tokens))
        y.backward(torch.full_like(y, -0.0))
        return weight.grad

    tie = tied_embedding.Tie(weight)
    own = run(lambda t: tie.embedding(t, None), lambda x: tie.linear(x, None))
    assert same_bits(own, run(lambda t: F.embedding(t, weight), lambda x: F.linear(x, weight)))


def test_memory_stays_flat() -> None:
    torch.manual_seed(0)
    model, tokens = Language(words=2000).train(), _tokens(2000)
    profile = ct.profile(model, kwargs={"tokens": tokens, "labels": tokens})
    with no_collector(), ct.apply(model, ct.plan(profile, "1GiB")):
        _step(model, tokens, 3)
        with memory.CpuMeter() as meter:
            marks = []
            for _ in range(50):
                marks.append(meter.mark())
                _step(model, tokens)
        assert len({meter.level(mark) for mark in marks}) == 1
        gc.collect()
        _step(model, tokens, 3)
        assert gc.collect() == 0


# -- models of transformers -----------------------------------------------------------------------------------


def _transformer(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special: dict[str, tuple[str, dict[str, Any]]] = {
        "Qwen2": ("ForCausalLM", {**layers, "intermediate_size": 64, "num_key_value_heads": 1, "use_cache": False}),
        "Gemma2": (
            "ForCausalLM",
            {**layers, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16, "use_cache": False},
        ),
        "OPT": (
            "ForCausalLM",
            {**layers, "ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32, "use_cache": False},
        ),
        "Falcon": ("ForCausalLM", {**layers, "hidden_dropout": 0.1, "attention_dropout": 0.1, "use_cache": False}),
        "DistilBert": ("ForMaskedLM", {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}),
    }
    head, options = special[kind]
    config = getattr(transformers, f"{kind}Config")(**common, **options)
    tokens = torch.randint(3, CLASSES, (2, 24))
    return getattr(transformers, f"{kind}{head}")(config).train(), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma2", "OPT", "Falcon", "DistilBert"])
def test_transformers_at_several_budgets(kind: str) -> None:
    torch.manual_seed(0)
    model, inputs = _transformer(kind)
    profile = ct.profile(model, kwargs=inputs)
    assert profile.replacements.loss
    everything = ct.plan(profile, "1GiB")
    low, high = everything.least_budget_bytes, everything.plain_peak_bytes
    for budget in (low, (low + high) // 2):
        plan = ct.plan(profile, budget)
        assert ct.verify(model, plan, kwargs=inputs).ok
    assert plan.selective
