"""Compiled steps of many models at budgets from the least to nothing recomputed: are all exact, within, and predicted?

Small models of each family train for one step at each budget. A row gives, over all budgets of a model, the largest
share of the budget that a step took, the largest error of the predicted peak, the same without what was corrected after
a first measurement, the largest certified gap a third of the way and beyond, by how much the predicted time ever rises
with the budget, and whether loss, gradients, buffers and random state equal those of training without compilation.
"captured" means: equal to what torch.compile computes without a plan, which is not what the model computes without it
(transformers makes other attention masks then). Models of diffusers are left out where it is not installed. Exits with
1 where a step takes more than its budget.

python bench/torch_compile_families.py [MODEL ...] [--budgets 12] [--kernels eager] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from support import arguments
from support.training import quiet
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, Any]]
VOCABULARY, LENGTH, BATCH = 128, 64, 4


def _ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, length))


def _language(model: nn.Module) -> Made:
    ids = _ids()
    return model, {"input_ids": ids, "labels": ids}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=LENGTH,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language(GPT2LMHeadModel(config))


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    return _language(BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes)))


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 160}
    return _language(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)))


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4}
    config = T5Config(vocab_size=VOCABULARY, use_cache=False, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return T5ForConditionalGeneration(config), {"input_ids": _ids(), "labels": _ids(LENGTH // 2)}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=10, **sizes))
    return model, {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(10, (BATCH,))}


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]}
    model = ResNetForImageClassification(ResNetConfig(layer_type="bottleneck", num_labels=10, **sizes))
    return model, {"pixel_values": torch.randn(2 * BATCH, 3, 48, 48), "labels": torch.randint(10, (2 * BATCH,))}


class WithLoss(nn.Module):
    """A model whose output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).float().square().mean()


class UNet(nn.Module):
    """Two levels with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU())
        self.up = nn.Sequential(nn.Conv2d(48, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        deep = self.deep(F.avg_pool2d(skip, 2))
        out: torch.Tensor = self.up(torch.cat([skip, F.interpolate(deep, scale_factor=2)], 1))
        return out


def unet() -> Made:
    return WithLoss(UNet()), {"x": torch.randn(BATCH, 3, 32, 32)}


class Adapted(nn.Module):
    """Frozen layers with low-rank adapters."""

    def __init__(self, width: int = 96, depth: int = 6) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(depth)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = F.gelu(base(x) + up(F.dropout(down(x), 0.1)))
        return x


def lora() -> Made:
    return WithLoss(Adapted()), {"x": torch.randn(256, 96)}


class DiffusionBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.condition = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(F.silu(c)).unsqueeze(1).chunk(6, -1)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Blocks over patches, conditioned on their mean."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiffusionBlock(width, 4) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = x.mean(1)
        for block in self.blocks:
            x = block(x, condition)
        return x


def diffusion() -> Made:
    return WithLoss(DiffusionTransformer()), {"x": torch.randn(BATCH, LENGTH, 64)}


def diffusers_unet() -> Made:
    from diffusers.models.unets.unet_2d import UNet2DModel

    blocks = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = UNet2DModel(sample_size=16, norm_num_groups=4, attention_head_dim=8, **blocks)
    return WithLoss(Sampled(model, (1,))), {"x": torch.randn(BATCH, 3, 16, 16)}


def diffusers_dit() -> Made:
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    shape = {"in_channels": 4, "out_channels": 4, "sample_size": 16, "patch_size": 2, "num_embeds_ada_norm": 10}
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=4, norm_num_groups=4, **shape
    )
    conditions = {name: torch.arange(BATCH) for name in ("timestep", "class_labels")}
    return WithLoss(Sampled(model, (), **conditions)), {"x": torch.randn(BATCH, 4, 16, 16)}


class Sampled(nn.Module):
    """A model of diffusers under fixed conditions."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], **conditions: torch.Tensor) -> None:
        super().__init__()
        self.model, self.args, self.conditions = model, args, conditions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x, *self.args, **self.conditions).sample
        return out


_ALL = (gpt2, bert, llama, t5, vit, resnet, unet, lora, diffusion, diffusers_unet, diffusers_dit)
MODELS: dict[str, Callable[[], Made]] = {made.__name__: made for made in _ALL}


@dataclasses.dataclass
class Row:
    """What was seen of a model; shares in percent."""

    model: str
    results: int
    budgets: int
    largest_share: float = 0.0
    largest_error: float = 0.0
    largest_uncorrected: float = 0.0
    largest_gap: float = 0.0
    largest_rise: float = 0.0
    exact: str = "yes"


def measured(name: str, count: int, kernels: str) -> Row:
    """Compiles one model for all budgets."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()

    def compiled(budget: int) -> ct.CompiledReport:
        torch._dynamo.reset()
        made = ct.compile(model, kwargs=inputs, budget=budget, kernels=kernels, time_limit="2s", progress=False)
        found = ct.report(made)
        assert isinstance(found, ct.CompiledReport)
        return found

    try:
        compiled(1)
    except ct.InfeasibleBudget as error:
        least = error.least_bytes or 0
    most = least if count == 1 else compiled(1 << 50).plans[-1].plain_peak_bytes
    row = Row(name, 0, count)
    least_time = float("inf")
    for number in range(count):
        way = number / max(count - 1, 1)
        budget = int(least + way * (most - least) * 1.01) + 4096
        begun = time.monotonic()
        report = compiled(budget)
        plan = report.plans[-1]
        _tell(name, budget, report, time.monotonic() - begun)
        row.results = len(plan.problem["nodes"])
        row.largest_share = max(row.largest_share, 100 * report.measured_peak_bytes / budget)
        row.largest_error = max(row.largest_error, _error(plan.peak_bytes, report))
        uncorrected = plan.peak_bytes - plan.correction_bytes
        row.largest_uncorrected = max(row.largest_uncorrected, _error(uncorrected, report))
        if 3 * way >= 1:
            row.largest_gap = max(row.largest_gap, 100 * (plan.gap or 0.0))
        if report.differences:
            row.exact = "captured"
        row.largest_rise = max(row.largest_rise, 100 * ((1 + plan.overhead) / least_time - 1))
        least_time = min(least_time, 1 + plan.overhead)
    return row


def _tell(name: str, budget: int, report: ct.CompiledReport, seconds: float) -> None:
    """One budget of a model, as it is done, on stderr."""
    plan, peak_bytes = report.plans[-1], report.measured_peak_bytes
    peaks = f"measured {peak_bytes / 2**20:.2f} MiB, predicted {plan.peak_bytes / 2**20:.2f} MiB"
    time_and_gap = f"time +{100 * plan.overhead:.2f} %, gap {100 * (plan.gap or 0.0):.2f} %"
    print(
        f"{name}: {budget / 2**20:.2f} MiB: {peaks}, corrected by {plan.correction_bytes} bytes, {time_and_gap}, "
        f"planned in {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _error(predicted_bytes: int, report: ct.CompiledReport) -> float:
    """Of a predicted peak, in percent of the measured one."""
    return abs(100 * (predicted_bytes / report.measured_peak_bytes - 1))


def main() -> int:
    """Print a row for each model."""
    command = arguments.parser(__doc__)
    command.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is named")
    command.add_argument("--budgets", type=int, default=12)
    command.add_argument("--kernels", choices=("eager", "inductor"), default="eager")
    command.add_argument("--json", type=Path)
    options = arguments.parse(command, models=["lora"], budgets=1)
    warnings.simplefilter("ignore")
    with quiet():
        return table(options)


def table(options: Any) -> int:
    """A row for each model; 1 where a step takes more than its budget."""
    rows = []
    columns = f"{'share':>8} {'error':>7} {'uncorrected':>11} {'gap':>7} {'rise':>7}"
    print(f"{'model':14} {'results':>7} {'budgets':>7} {columns}  exact")
    for name in options.models or MODELS:
        try:
            row = measured(name, options.budgets, options.kernels)
        except ModuleNotFoundError as error:
            print(f"{name:14} left out: {error}", flush=True)
            continue
        rows.append(dataclasses.asdict(row))
        print(
            f"{row.model:14} {row.results:7} {row.budgets:7} {row.largest_share:7.2f}% {row.largest_error:6.2f}% "
            f"{row.largest_uncorrected:10.2f}% {row.largest_gap:6.2f}% {row.largest_rise:6.2f}%  {row.exact}",
            flush=True,
        )
    if options.json is not None:
        conditions = {"torch": torch.__version__, "threads": 1, "kernels": options.kernels}
        options.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
    return int(any(row["largest_share"] > 100 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
