"""Training steps of real models, each also cut into functions, as `checkpoint_sequential` takes a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from . import models


class LossOnly(nn.Module):
    """A model of transformers that returns its loss alone, so that nobody holds the logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).loss


@dataclasses.dataclass
class CutStep:
    """A training step; `functions` are the model as checkpoint_sequential takes it."""

    model: nn.Module
    sample: dict[str, Any]
    loss: Callable[[], torch.Tensor]
    functions: list[Callable[[Any], Any]]
    first: torch.Tensor

    def run(self) -> float:
        torch.manual_seed(1)
        loss = self.loss()
        loss.backward()
        return loss.item()

    def run_in_segments(self, segments: int) -> float:
        torch.manual_seed(1)
        loss = checkpoint_sequential(self.functions, segments, self.first, use_reentrant=False)
        loss.backward()
        return loss.item()

    def run_every_block(self) -> float:
        """The first and the last of the functions are no blocks."""
        torch.manual_seed(1)
        value = self.functions[0](self.first)
        for function in self.functions[1:-1]:
            value = checkpoint(function, value, use_reentrant=False)
        loss = self.functions[-1](value)
        loss.backward()
        return loss.item()


def _transformer(model: Any, inputs: dict[str, torch.Tensor], layers: nn.ModuleList) -> CutStep:
    """A model of transformers; its functions run what stands between `layers` by calling the model itself."""
    whole = LossOnly(model.train())
    cut = _Cut(whole, inputs, list(layers))
    return CutStep(
        whole, {"kwargs": inputs}, lambda: whole(**inputs), cut.functions(), torch.zeros((), requires_grad=True)
    )


class _Cut:
    """The functions of a transformer: up to the first layer, each layer, and what follows the last."""

    def __init__(self, model: LossOnly, inputs: dict[str, torch.Tensor], layers: list[nn.Module]) -> None:
        self._model, self._inputs, self._layers = model, inputs, layers
        self._calls: dict[int, tuple[Any, Any]] = {}
        self._tuples = False

    def functions(self) -> list[Callable[[Any], Any]]:
        return [self._enter, *(self._layer(number) for number in range(len(self._layers))), self._leave]

    def _enter(self, anchor: torch.Tensor) -> torch.Tensor:
        """Runs up to the first layer, and notes what else the layers are called with."""
        found: list[torch.Tensor] = []

        def note(number: int) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if number == 0:
                    found.append(args[0])
                self._calls[number] = (args[1:], kwargs)
                raise _Reached

            return hook

        for number, layer in enumerate(self._layers):
            self._calls.pop(number, None)
            handle = layer.register_forward_pre_hook(note(number), with_kwargs=True)
            try:
                if number == 0:
                    self._model(**self._inputs)
            except _Reached:
                pass
            finally:
                handle.remove()
        return found[0] + 0 * anchor

    def _layer(self, number: int) -> Callable[[Any], Any]:
        def run(value: torch.Tensor) -> torch.Tensor:
            args, kwargs = self._calls[0]
            made = self._layers[number](value, *args, **kwargs)
            self._tuples = isinstance(made, tuple)
            return made[0] if self._tuples else made

        return run

    def _leave(self, value: torch.Tensor) -> torch.Tensor:
        """Runs the model with its layers handing `value` on."""
        held = [layer.forward for layer in self._layers]
        for layer in self._layers:
            layer.forward = lambda x, *args, **kwargs: (value,) if self._tuples else value
        try:
            with torch.random.fork_rng(devices=[]):  # what stands before the layers runs twice
                return self._model(**self._inputs)
        finally:
            for layer in self._layers:
                del layer.forward
            assert [layer.forward for layer in self._layers] == held


class _Reached(Exception):
    pass


def gpt2(layers: int | None) -> CutStep:
    """GPT-2 small, batch 2, sequence 256, tied embedding of 50,257 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers or 12, use_cache=False, loss_type="ForCausalLM"))
    tokens = torch.randint(50257, (2, 256))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, model.transformer.h)


def tiny(layers: int | None) -> CutStep:
    """GPT-2, 2 layers of width 64, batch 2, sequence 64, 1,000 words: to try a benchmark out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers or 2, n_embd=64, n_head=4, vocab_size=1000, use_cache=False))
    tokens = torch.randint(1000, (2, 64))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, model.transformer.h)


def bert(layers: int | None) -> CutStep:
    """BERT base, masked words, batch 4, sequence 128, tied embedding of 30,522 words."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(num_hidden_layers=layers or 12))
    tokens = torch.randint(30522, (4, 128))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, model.bert.encoder.layer)


def llama(layers: int | None) -> CutStep:
    """16 layers of width 512, batch 2, sequence 256, 32,000 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=layers or 16, num_attention_heads=8, use_cache=False
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(32000, (2, 256))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, model.model.layers)


def vit(layers: int | None) -> CutStep:
    """ViT base, batch 2."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=layers or 12))
    inputs = {"pixel_values": torch.randn(2, 3, 224, 224), "labels": torch.tensor([0, 1])}
    return _transformer(model, inputs, model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers)


def deit(layers: int | None) -> CutStep:
    """DeiT small, batch 4."""
    from transformers import DeiTConfig, DeiTForImageClassification

    config = DeiTConfig(num_hidden_layers=layers or 12, hidden_size=384, intermediate_size=1536, num_attention_heads=6)
    model = DeiTForImageClassification(config)
    inputs = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.tensor([0, 1, 0, 1])}
    return _transformer(
        model, inputs, model.deit.encoder.layer if hasattr(model.deit, "encoder") else model.deit.layers
    )


WORDS = 8000  # of the models below, whose head and embedding hardly count


def _language_model(model: Any, layers: nn.ModuleList, batch: int = 2, length: int = 256) -> CutStep:
    tokens = torch.randint(WORDS, (batch, length))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, layers)


def opt(layers: int | None) -> CutStep:
    """OPT of 125 million, batch 2, sequence 256, 8,000 words."""
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(num_hidden_layers=layers or 12, vocab_size=WORDS, use_cache=False))
    return _language_model(model, model.model.decoder.layers)


def pythia(layers: int | None) -> CutStep:
    """GPT-NeoX, 12 layers of 768 as Pythia has, batch 2, sequence 256, 8,000 words."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    config = GPTNeoXConfig(num_hidden_layers=layers or 12, vocab_size=WORDS, use_cache=False, **shape)
    model = GPTNeoXForCausalLM(config)
    return _language_model(model, model.gpt_neox.layers)


def qwen2(layers: int | None) -> CutStep:
    """Qwen2, 12 layers of 512, 8 heads that share 2 of keys and values, batch 2, sequence 256, 8,000 words."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = Qwen2Config(num_hidden_layers=layers or 12, vocab_size=WORDS, use_cache=False, **shape)
    model = Qwen2ForCausalLM(config)
    return _language_model(model, model.model.layers)


def distilbert(layers: int | None) -> CutStep:
    """DistilBERT, masked words, batch 4, sequence 128, 8,000 words."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    model = DistilBertForMaskedLM(DistilBertConfig(n_layers=layers or 6, vocab_size=WORDS))
    return _language_model(model, model.distilbert.transformer.layer, batch=4, length=128)


def _network(made: Any) -> CutStep:
    x = made.args[0]

    def first(anchor: torch.Tensor) -> torch.Tensor:
        return made.model[0](x + 0 * anchor)

    def last(value: torch.Tensor) -> torch.Tensor:
        return made.loss_fn(made.model[-1](value))

    functions = [first, *made.model[1:-1], last]
    return CutStep(made.model, made.sample, made.loss, functions, torch.zeros((), requires_grad=True))


MODELS: dict[str, Callable[[int | None], CutStep]] = {
    "tiny": tiny,
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "vit": vit,
    "deit": deit,
    "opt": opt,
    "pythia": pythia,
    "qwen2": qwen2,
    "distilbert": distilbert,
    "resnet50": lambda layers: _network(models.resnet50()),
    "vgg16": lambda layers: _network(models.vgg16()),
}
