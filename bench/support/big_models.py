"""Models at sizes that fill a GPU, and small ones of their kind for the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .cut_steps import LossOnly


class UnderAutocast(nn.Module):
    """A model whose forward computes its products in another precision; the region ends with the forward."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.model, self._dtype = model, dtype

    def forward(self, **inputs: torch.Tensor) -> Any:
        with torch.autocast(next(iter(inputs.values())).device.type, self._dtype):
            return self.model(**inputs)


@dataclasses.dataclass
class Case:
    """A model in training with a full-sized and a tiny input."""

    model: nn.Module
    kwargs: dict[str, torch.Tensor]
    tiny: dict[str, torch.Tensor]
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    def step(self, kwargs: dict[str, torch.Tensor]) -> None:
        output = self.model(**kwargs)
        (output if self.loss_fn is None else self.loss_fn(output)).backward()


def _tokens(model: nn.Module, words: int, batch: int, length: int) -> Case:
    def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(words, (batch, length))
        return {"input_ids": tokens, "labels": tokens}

    return Case(model.train(), inputs(batch, length), inputs(1, 16))


def gpt2(small: bool) -> Case:
    """GPT-2 of 124 million, batch 32 x 1024, autocast to bfloat16, dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512} if small else {}
    config = GPT2Config(use_cache=False, loss_type="ForCausalLM", **shape)
    model = UnderAutocast(LossOnly(GPT2LMHeadModel(config)))
    return _tokens(model, config.vocab_size, *((2, 64) if small else (32, 1024)))


def llama(small: bool) -> Case:
    """Llama of 1.2 billion (16 layers of 2048, 32 heads that share 8), batch 4 x 4096, all in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64 if small else 2048,
        intermediate_size=256 if small else 8192,
        num_hidden_layers=2 if small else 16,
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        vocab_size=512 if small else 32000,
        use_cache=False,
    )
    model = LossOnly(LlamaForCausalLM(config).to(torch.bfloat16))
    return _tokens(model, config.vocab_size, *((2, 64) if small else (4, 4096)))
