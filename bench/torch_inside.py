"""What keeping a part of each block is worth: time of a step at given peaks, against whole blocks and against torch.

python bench/torch_inside.py [gpt2 | bert | llama | vit | ... | resnet50 | vgg16] [--layers N] [--mib 840 553 442 321]
                             [--share 0.25 0.5] [--segments 2 4] [--rounds 5] [--allocator default] [--json FILE]
                             [--plot FILE]

Peaks are bytes of activations: what a step that adds to existing gradients takes beyond parameters and gradients. They
are given in MiB, or as shares of the way from the least of whole blocks to plain. Whole blocks are planned twice: with
PyTorch's head and loss ("blocks alone"; shares refer to these), and with Cairn's, which take less ("blocks", and
"parts", where blocks may be kept in part, too). The models return their loss alone.
Methods take turns, one thread, CPU time of the process (which a busy machine disturbs less than the clock's); the
overhead is the median over the rounds of the ratio to the same round's plain step. All must give plain's exact loss.
The model's inputs count, as they do in plans. Beside each plan stands the least that any choice of kept tensors could
cost at the plan's peak, if the operations that it replays were all that it costs (`torch_inside_bound.py`).

The allocator keeps what it has (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ at 4 GiB), so that tensors are not
faulted in again and again; `--allocator default` leaves glibc as it is, `--allocator mmap` faults every tensor in, and
`--allocator jemalloc` preloads that library (libjemalloc2 on Debian) as it is. Page faults of a step are counted.
"""

from __future__ import annotations

import argparse
import ctypes.util
import dataclasses
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn
import cairn.torch as ct
import torch
from cairn.torch.base import memory
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch_inside_bound import bound_of
from torch_models_large import resnet50, vgg16
from torch_support import Method, machine, quiet, write

MIB = 2**20
ALLOCATORS = {
    "keeping": {"MALLOC_MMAP_THRESHOLD_": str(4 * 2**30), "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30)},
    "default": {},
    "mmap": {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)},
    "jemalloc": {"LD_PRELOAD": ctypes.util.find_library("jemalloc") or ""},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, default="gpt2")
    parser.add_argument("--layers", type=int, help="of a transformer, fewer than usual")
    parser.add_argument("--mib", type=int, nargs="*", default=[], help="peaks to plan for")
    parser.add_argument("--share", type=float, nargs="*", default=[], help="the same, from the least (0) to plain (1)")
    parser.add_argument("--segments", type=int, nargs="*", default=[], help="of checkpoint_sequential")
    parser.add_argument("--rounds", type=int, default=5, help="steps timed per method; the median counts")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="keeping")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw what a block's options save and cost")
    chosen = parser.parse_args()
    wanted = ALLOCATORS[chosen.allocator]
    if not all(wanted.values()):
        parser.error(f"{chosen.allocator} is not installed")
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    with quiet():
        torch.manual_seed(0)
        step = MODELS[chosen.model](chosen.layers)
        data = _measured(step, chosen)
    described = {"machine": machine(), "allocator": chosen.allocator, "allocator_environment": wanted}
    described |= {"model": chosen.model, "layers": chosen.layers}
    write(chosen.json, {**described, **data})
    if chosen.plot is not None:
        draw(data["options"], chosen.plot)


# -- models --------------------------------------------------------------------------------------------------


class LossOnly(nn.Module):
    """A model of transformers that returns its loss alone, so that nobody holds the logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).loss


@dataclasses.dataclass
class Step:
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


def _transformer(model: Any, inputs: dict[str, torch.Tensor], layers: nn.ModuleList) -> Step:
    """A model of transformers; its functions run what stands between `layers` by calling the model itself."""
    whole = LossOnly(model.train())
    cut = _Cut(whole, inputs, list(layers))
    return Step(
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
            layer.forward = lambda x, *args, **kwargs: (value,) if self._tuples else value  # type: ignore[method-assign]
        try:
            with torch.random.fork_rng(devices=[]):  # what stands before the layers runs twice
                return self._model(**self._inputs)
        finally:
            for layer in self._layers:
                del layer.forward
            assert [layer.forward for layer in self._layers] == held


class _Reached(Exception):
    pass


def gpt2(layers: int | None) -> Step:
    """GPT-2 small, batch 2, sequence 256, tied embedding of 50,257 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers or 12, use_cache=False, loss_type="ForCausalLM"))
    tokens = torch.randint(50257, (2, 256))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, model.transformer.h)


def bert(layers: int | None) -> Step:
    """BERT base, masked words, batch 4, sequence 128, tied embedding of 30,522 words."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(num_hidden_layers=layers or 12))
    tokens = torch.randint(30522, (4, 128))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, model.bert.encoder.layer)


def llama(layers: int | None) -> Step:
    """16 layers of width 512, batch 2, sequence 256, 32,000 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=layers or 16, num_attention_heads=8, use_cache=False
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(32000, (2, 256))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, model.model.layers)


def vit(layers: int | None) -> Step:
    """ViT base, batch 2."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=layers or 12))
    inputs = {"pixel_values": torch.randn(2, 3, 224, 224), "labels": torch.tensor([0, 1])}
    return _transformer(model, inputs, model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers)


def deit(layers: int | None) -> Step:
    """DeiT small, batch 4."""
    from transformers import DeiTConfig, DeiTForImageClassification

    config = DeiTConfig(num_hidden_layers=layers or 12, hidden_size=384, intermediate_size=1536, num_attention_heads=6)
    model = DeiTForImageClassification(config)
    inputs = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.tensor([0, 1, 0, 1])}
    return _transformer(
        model, inputs, model.deit.encoder.layer if hasattr(model.deit, "encoder") else model.deit.layers
    )


WORDS = 8000  # of the models below, whose head and embedding hardly count


def _language_model(model: Any, layers: nn.ModuleList, batch: int = 2, length: int = 256) -> Step:
    tokens = torch.randint(WORDS, (batch, length))
    return _transformer(model, {"input_ids": tokens, "labels": tokens}, layers)


def opt(layers: int | None) -> Step:
    """OPT of 125 million, batch 2, sequence 256, 8,000 words."""
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(num_hidden_layers=layers or 12, vocab_size=WORDS, use_cache=False))
    return _language_model(model, model.model.decoder.layers)


def pythia(layers: int | None) -> Step:
    """GPT-NeoX, 12 layers of 768 as Pythia has, batch 2, sequence 256, 8,000 words."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    config = GPTNeoXConfig(num_hidden_layers=layers or 12, vocab_size=WORDS, use_cache=False, **shape)
    model = GPTNeoXForCausalLM(config)
    return _language_model(model, model.gpt_neox.layers)


def qwen2(layers: int | None) -> Step:
    """Qwen2, 12 layers of 512, 8 heads that share 2 of keys and values, batch 2, sequence 256, 8,000 words."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = Qwen2Config(num_hidden_layers=layers or 12, vocab_size=WORDS, use_cache=False, **shape)
    model = Qwen2ForCausalLM(config)
    return _language_model(model, model.model.layers)


def distilbert(layers: int | None) -> Step:
    """DistilBERT, masked words, batch 4, sequence 128, 8,000 words."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    model = DistilBertForMaskedLM(DistilBertConfig(n_layers=layers or 6, vocab_size=WORDS))
    return _language_model(model, model.distilbert.transformer.layer, batch=4, length=128)


def _network(made: Any) -> Step:
    x = made.args[0]

    def first(anchor: torch.Tensor) -> torch.Tensor:
        return made.model[0](x + 0 * anchor)

    def last(value: torch.Tensor) -> torch.Tensor:
        return made.loss_fn(made.model[-1](value))

    functions = [first, *made.model[1:-1], last]
    return Step(made.model, made.sample, made.loss, functions, torch.zeros((), requires_grad=True))


MODELS: dict[str, Callable[[int | None], Step]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "vit": vit,
    "deit": deit,
    "opt": opt,
    "pythia": pythia,
    "qwen2": qwen2,
    "distilbert": distilbert,
    "resnet50": lambda layers: _network(resnet50()),
    "vgg16": lambda layers: _network(vgg16()),
}


NETWORKS = "resnet50", "vgg16"  # of unequal blocks


# -- measuring -----------------------------------------------------------------------------------------------


def _measured(step: Step, chosen: argparse.Namespace) -> dict[str, Any]:
    profile = ct.profile(step.model, loss_fn=step.sample.get("loss_fn"), **_sample(step))
    alone = ct.profile(step.model, loss_fn=step.sample.get("loss_fn"), **_sample(step), inside=False, outside=False)
    block = next(stage for stage in profile.stages if stage.options)
    _print_options(block)
    methods = {"plain": Method(step.run), "every block": Method(step.run_every_block)}
    for k in chosen.segments:
        methods[f"checkpoint_sequential {k}"] = Method(lambda k=k: step.run_in_segments(k))
    least = ct.plan(alone, 2**62, scope="activations")
    sizes = [mib * MIB for mib in chosen.mib]
    sizes += [
        int(least.least_budget_bytes + share * (least.plain_peak_bytes - least.least_budget_bytes))
        for share in chosen.share
    ]
    ways = {"blocks alone": (alone, ("recompute",))} if profile.outside.notes() else {}
    ways |= {"blocks": (profile, ("recompute",)), "parts": (profile, ("recompute", "inside"))}
    for size in sizes:
        for name, (measured, allow) in ways.items():
            try:
                plan = ct.plan(measured, cairn.Budget(total=size, reserve=0), scope="activations", allow=allow)
            except ct.InfeasibleBudget as error:
                print(f"{size / MIB:.0f} MiB, {name}: the least is {error.least_bytes / MIB:.1f} MiB", flush=True)
                continue
            methods[f"{name} within {size / MIB:.0f} MiB"] = Method(step.run, plan)
    rows = _timed(step, methods, chosen.rounds, profile.input_bytes)
    if chosen.model not in NETWORKS:
        bound = bound_of(profile, step.model, step.loss)
        for row in rows:
            planned = row["predicted_peak_bytes"]
            row["least_overhead"] = None if planned is None else bound.overhead(planned)
    _print(rows)
    return {"options": [vars(option) for option in block.options], "rows": rows}


def _sample(step: Step) -> dict[str, Any]:
    return {name: value for name, value in step.sample.items() if name in ("args", "kwargs")}


def _timed(step: Step, methods: dict[str, Method], rounds: int, input_bytes: int) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {name: [] for name in methods}
    faults: dict[str, list[int]] = {name: [] for name in methods}
    peaks: dict[str, int] = {}
    losses: dict[str, set[float]] = {name: set() for name in methods}
    for p in step.model.parameters():
        p.grad = torch.zeros_like(p)
    for number in range(rounds + 1):
        for name, method in methods.items():
            for p in step.model.parameters():
                assert p.grad is not None
                p.grad.zero_()
            with method.on(step.model):
                if number == 0:  # the first step of a plan records; its peak is that of the others
                    peaks[name] = input_bytes + _peak_of(method)
                    continue
                faulted, began = _page_faults(), time.process_time()
                losses[name].add(method.run())
                taken[name].append(time.process_time() - began)
                faults[name].append(_page_faults() - faulted)
    rows = []
    for name, method in methods.items():
        ratios = [mine / plain for mine, plain in zip(taken[name], taken["plain"], strict=True)]
        rows.append(
            {
                "method": name,
                "peak_bytes": peaks[name],
                "predicted_peak_bytes": None if method.plan is None else method.plan.peak_bytes,
                "cpu_seconds": statistics.median(taken[name]),
                "page_faults": statistics.median(faults[name]),
                "overhead": statistics.median(ratios) - 1,
                "predicted_overhead": None if method.plan is None else method.plan.overhead,
                "same_loss": losses[name] == losses["plain"],
            }
        )
    return rows


def _page_faults() -> int:
    """Of the process so far, without reading from a disk: memory that the kernel has put in place."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _peak_of(method: Method) -> int:
    meter = memory.CpuMeter()
    with meter:
        first = meter.mark()
        method.run()
        last = meter.mark()
    return meter.peak(first, last) - meter.level(first)


def _print_options(stage: Any) -> None:
    base = stage.options[0]
    print(f"{'option':>6} {'saves MiB':>10} {'of the block, slower':>21}  runs again")
    for number, option in enumerate(stage.options):
        slower = option.time_ns / base.time_ns - 1
        print(f"{number:>6} {option.saved_bytes / MIB:>10.2f} {100 * slower:>20.2f}%  {option.rebuilds}")


def draw(options: list[dict[str, Any]], path: Path) -> None:
    """What each option of a block saves, and by how much the block is slower for it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "cairn"
    mpl.rcParams["svg.fonttype"] = "none"
    times = [option["forward_ns"] + option["backward_ns"] for option in options]
    saved = [option["saved_bytes"] / MIB for option in options]
    slower = [100 * (time / times[0] - 1) for time in times]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="saved, MiB", ylabel="slower, % of the block's forward and backward")
    axes.plot(saved, slower, "o-")
    for number, (x, y) in enumerate(zip(saved, slower, strict=True)):
        name = f"part {number}" if number else "keep"
        axes.annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8)
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _print(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'method':<28} {'peak MiB':>9} {'predicted':>9} {'CPU s':>7} {'slower':>8} {'predicted':>9} {'at least':>8} "
        f"{'faults':>9} {'same loss':>9}"
    )
    for row in rows:
        predicted = row["predicted_peak_bytes"]
        slower, least = row["predicted_overhead"], row.get("least_overhead")
        print(
            f"{row['method']:<28} {row['peak_bytes'] / MIB:>9.1f} "
            f"{'' if predicted is None else f'{predicted / MIB:.1f}':>9} "
            f"{row['cpu_seconds']:>7.2f} {100 * row['overhead']:>7.1f}% "
            f"{'' if slower is None else f'{100 * slower:.1f}%':>9} "
            f"{'' if least is None else f'{100 * least:.1f}%':>8} {row['page_faults']:>9,.0f} {row['same_loss']!s:>9}",
            flush=True,
        )


if __name__ == "__main__":
    main()
