"""How well peaks are predicted across the architectures of transformers, each small and with random weights.

python bench/torch_families.py [MODEL ...] [--budgets 4] [--json FILE]

For each model: the least budget, the one that stores everything, and for budgets evenly in between by how much the
predicted peak differs from the measured one, where a step creates its gradients and where it adds to them. Every step
is compared with plain training, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
import transformers as hf
from support import arguments
from support.training import machine, plans_between, quiet, write

VOCABULARY = 500
CLASSES = 3


@dataclasses.dataclass
class Family:
    """An architecture: its classes in transformers, its sizes, and what its step is called with."""

    config: str
    model: str
    sizes: dict[str, Any]
    batch: Callable[[], dict[str, torch.Tensor | bool]]

    def made(self) -> torch.nn.Module:
        """A model with random weights."""
        config = getattr(hf, self.config)(**self.sizes)
        config.num_labels = CLASSES
        return getattr(hf, self.model)(config).train()


def tokens(batch: int = 4, length: int = 64) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (batch, length))


def classes(batch: int) -> torch.Tensor:
    return torch.randint(CLASSES, (batch,))


def sentences() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": classes(4)}


def texts(length: int = 64) -> dict[str, Any]:
    ids = tokens(4, length)
    return {"input_ids": ids, "labels": ids}


def short_texts() -> dict[str, Any]:
    return texts(24)


def small_images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(8, 3, 32, 32), "labels": classes(8)}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(8, 3, 64, 64), "labels": classes(8)}


def pairs() -> dict[str, Any]:
    ids = tokens(4, 32)
    ids[:, -1] = VOCABULARY - 1  # where CLIP's text encoder reads its result
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


def speech() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 4000), "labels": torch.randint(1, 30, (2, 10))}


def spectra() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 40, 200), "labels": tokens(2, 30)}


def words() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": torch.randint(CLASSES, (4, 64))}


def unlabelled() -> dict[str, Any]:
    return {"pixel_values": torch.randn(8, 3, 32, 32)}


LAYERS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCABULARY, "intermediate_size": 256, **LAYERS}
PATCHES = {"intermediate_size": 256, "image_size": 32, "patch_size": 4, **LAYERS}
GROUPED = {"num_key_value_heads": 2, **TEXT}
PYRAMID = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
STAGES = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 2]}
TWO_WAYS = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 256))},
}  # fmt: skip

FAMILIES = {
    "bert": Family("BertConfig", "BertForSequenceClassification", TEXT, sentences),
    "bert-masked": Family("BertConfig", "BertForMaskedLM", TEXT, texts),
    "bert-tokens": Family("BertConfig", "BertForTokenClassification", TEXT, words),
    "roberta": Family("RobertaConfig", "RobertaForSequenceClassification", {"pad_token_id": 1, **TEXT}, sentences),
    "distilbert": Family(
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 256},
        sentences,
    ),
    "electra": Family("ElectraConfig", "ElectraForSequenceClassification", {"embedding_size": 64, **TEXT}, sentences),
    "albert": Family("AlbertConfig", "AlbertForSequenceClassification", {"embedding_size": 32, **TEXT}, sentences),
    "deberta": Family(
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], **TEXT},
        sentences,
    ),
    "xlnet": Family(
        "XLNetConfig",
        "XLNetForSequenceClassification",
        {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 256},
        sentences,
    ),
    "gpt2-classes": Family(
        "GPT2Config",
        "GPT2ForSequenceClassification",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "pad_token_id": 0},
        sentences,
    ),
    "llama-classes": Family("LlamaConfig", "LlamaForSequenceClassification", {"pad_token_id": 0, **TEXT}, sentences),
    "mistral": Family("MistralConfig", "MistralForCausalLM", GROUPED, texts),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, **GROUPED}, texts),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, **GROUPED}, texts),
    "phi": Family("PhiConfig", "PhiForCausalLM", TEXT, texts),
    "falcon": Family("FalconConfig", "FalconForCausalLM", {"vocab_size": VOCABULARY, **LAYERS}, texts),
    "bloom": Family(
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4},
        texts,
    ),
    "gptj": Family(
        "GPTJConfig",
        "GPTJForCausalLM",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
        texts,
    ),
    "gpt-neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT, texts),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        {"vocab_size": VOCABULARY, "ffn_dim": 256, "word_embed_proj_dim": 64, **LAYERS},
        texts,
    ),
    "mamba": Family(
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3},
        short_texts,
    ),
    "bart": Family("BartConfig", "BartForConditionalGeneration", TWO_WAYS, texts),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 3, "num_heads": 4,
         "decoder_start_token_id": 0},
        texts,
    ),
    "vit": Family("ViTConfig", "ViTForImageClassification", PATCHES, small_images),
    "deit": Family("DeiTConfig", "DeiTForImageClassification", PATCHES, small_images),
    "beit": Family("BeitConfig", "BeitForImageClassification", PATCHES, small_images),
    "dinov2": Family(
        "Dinov2Config", "Dinov2ForImageClassification", {"image_size": 32, "patch_size": 4, **LAYERS}, small_images
    ),
    "vit-mae": Family(
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4,
         "decoder_intermediate_size": 128, **PATCHES},
        unlabelled,
    ),
    "swin": Family(
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        small_images,
    ),
    "convnext": Family(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 2, 2]},
        images,
    ),
    "resnet": Family("ResNetConfig", "ResNetForImageClassification", STAGES, images),
    "regnet": Family("RegNetConfig", "RegNetForImageClassification", {"groups_width": 8, **STAGES}, images),
    "mobilenet": Family(
        "MobileNetV2Config", "MobileNetV2ForImageClassification", {"image_size": 64, "depth_multiplier": 0.5}, images
    ),
    "segformer": Family("SegformerConfig", "SegformerForImageClassification", PYRAMID, images),
    "pvt": Family("PvtConfig", "PvtForImageClassification", {"image_size": 64, **PYRAMID}, images),
    "clip": Family(
        "CLIPConfig", "CLIPModel", {"text_config": TEXT, "vision_config": PATCHES, "projection_dim": 32}, pairs
    ),
    "wav2vec2": Family(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        {"vocab_size": 32, "intermediate_size": 256, "conv_dim": (32,) * 4, "conv_stride": (5, 2, 2, 2),
         "conv_kernel": (10, 3, 3, 2), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
         "mask_time_prob": 0.0, "layerdrop": 0.0, **LAYERS},
        speech,
    ),
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {"max_source_positions": 100, "max_target_positions": 64, "num_mel_bins": 40, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, **TWO_WAYS},
        spectra,
    ),
}  # fmt: skip


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--budgets", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = arguments.parse(parser, models=["bert"], budgets=2)
    hf.logging.set_verbosity_error()
    results = {}
    print(f"{'model':<14} {'blocks':>6} {'least':>10} {'everything':>12}  error of the peak: gradients made / added to")
    with quiet():
        for name in chosen.models or FAMILIES:
            results[name] = _measured(FAMILIES[name], chosen.budgets)
            _print(name, results[name])
    errors = [abs(error) for result in results.values() for each in result["errors"] for error in each]
    print(f"{len(results)} models, {len(errors)} peaks: {sum(e <= 0.01 for e in errors)} within 1 %", end=", ")
    print(f"at most {100 * max(errors):.1f} % off; every gradient equal to the bit")
    write(chosen.json, {"machine": machine(), "models": results})


def _measured(family: Family, budgets: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = family.made(), family.batch()
    profile = ct.profile(model, kwargs=batch, passes=1)
    plans, errors = plans_between(profile, budgets), []
    for plan in plans:
        found = ct.verify(model, plan, kwargs=batch)
        if not found.ok:
            raise SystemExit(f"{type(model).__name__}: {found}")
        pairs = ((plan.created_peak_bytes, found.created), (plan.accumulated_peak_bytes, found.accumulated))
        errors.append([predicted / measured.peak_bytes - 1 for predicted, measured in pairs])
    blocks = sum(stage.kind == "block" for stage in profile.stages)
    least, everything = plans[0].budget_bytes, plans[-1].budget_bytes
    return {"blocks": blocks, "least_budget_bytes": least, "everything_bytes": everything, "errors": errors}


def _print(name: str, result: dict[str, Any]) -> None:
    least, everything = (result[key] / 2**20 for key in ("least_budget_bytes", "everything_bytes"))
    print(f"{name:<14} {result['blocks']:>6} {least:>6.1f} MiB {everything:>8.1f} MiB", end=" ")
    print(*(f"{100 * created:>+6.1f} /{100 * added:>+5.1f} %" for created, added in result["errors"]), flush=True)


if __name__ == "__main__":
    main()
