"""Caches of keys and values that models fill while training."""

# ruff: noqa: E402

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from plan_support import UNLIMITED, profiled

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_caches_that_models_fill_while_training_are_left_out(name: str) -> None:
    """As Hugging Face's own checkpointing does: models are configured to fill caches unless told otherwise."""
    step = torch_models.made(name)
    step.model.config.use_cache = True
    profile = profiled(step)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert ct.verify(step.model, plan, step.args, step.kwargs).ok


def test_a_cache_that_the_model_makes_is_held_by_no_block() -> None:
    """What its blocks leave in there is the model's, and does not stand in the way of running them again."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(100, (4, 64), generator=torch.Generator().manual_seed(0))
    profile = ct.profile(model, kwargs={"input_ids": ids, "labels": ids}, passes=1)
    assert model.config.use_cache and [stage.keep_reason for stage in profile.stages[1:-1]] == ["", ""]


def test_a_cache_that_went_through_a_training_step_is_not_continued() -> None:
    transformers = pytest.importorskip("transformers")
    step = torch_models.made("llama")
    ids = step.kwargs["input_ids"]
    ct.checkpoint(step.model, budget=UNLIMITED, passes=1, check_steps=0, **step.sample)
    output = step.model(input_ids=ids, use_cache=True)
    with pytest.raises(ct.Unsupported, match="pass them all in one call"):
        step.model(input_ids=ids, past_key_values=output.past_key_values)
    given = transformers.DynamicCache()
    step.model(input_ids=ids, past_key_values=given)
    with torch.no_grad(), pytest.raises(ct.Unsupported, match="past_key_values"):
        step.model(input_ids=ids, past_key_values=given)
    step.model.eval()
    with torch.no_grad():
        output = step.model(input_ids=ids, use_cache=True)
        step.model(input_ids=ids, past_key_values=output.past_key_values)
    ct.handle(step.model).remove()


def test_a_cache_in_the_sample_is_left_as_it_was() -> None:
    pytest.importorskip("transformers")
    step = torch_models.made("llama")
    ids = step.kwargs["input_ids"]
    with torch.no_grad():
        cache = step.model(input_ids=ids, use_cache=True).past_key_values
    kwargs = {"input_ids": ids, "labels": ids, "past_key_values": cache, "use_cache": True}
    profile = ct.profile(step.model, kwargs=kwargs, passes=1)
    for budget in (UNLIMITED, ct.plan(profile, UNLIMITED).least_budget_bytes):
        assert ct.verify(step.model, ct.plan(profile, budget), kwargs=kwargs).ok
    assert cache.get_seq_length() == ids.shape[1] and not cache.layers[0].keys.requires_grad


def test_a_cache_with_gradients_is_refused() -> None:
    """Prefix tuning trains the keys and values that layers find in their cache."""
    transformers = pytest.importorskip("transformers")
    step = torch_models.made("llama")
    config = step.model.config
    cache = transformers.DynamicCache()
    for layer in range(config.num_hidden_layers):
        shape = (
            len(step.kwargs["input_ids"]),
            config.num_key_value_heads,
            3,
            config.hidden_size // config.num_attention_heads,
        )
        cache.update(torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True), layer)
    with pytest.raises(ct.Unsupported, match="past_key_values, as in prefix tuning"):
        ct.profile(step.model, kwargs={**step.kwargs, "past_key_values": cache}, passes=1)


def test_layers_that_the_sample_skipped_leave_nothing_in_the_cache_of_the_others() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=6, num_attention_heads=2,
        word_embed_proj_dim=32, max_position_embeddings=32, layerdrop=0.5, use_cache=True,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).train()
    plain = copy.deepcopy(model)
    ids = torch.randint(5, 64, (2, 16))
    given = {"input_ids": ids, "labels": ids}
    low, high = (point.budget_bytes for point in ct.sweep(ct.profile(model, kwargs=given, passes=1), 2))
    ct.checkpoint(model, kwargs=given, budget=(low + high) // 2, passes=1, check_steps=0)
    for seed in range(6):
        losses = []
        for each in (model, plain):
            torch.manual_seed(seed)
            losses.append(each(**given).loss)
            losses[-1].backward()
        assert torch.equal(*losses)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) and (
            ours.grad is None or torch.equal(ours.grad, theirs.grad)
        )
