"""Curves of peak against time on a CUDA device, at sizes that fill it: selective recomputation, whole blocks,
offloading, and what PyTorch offers for the same, measured in turns; then what carrying a plan out costs the host.

python bench/torch_cuda_curves.py [MODEL ...] [--budgets 7] [--rounds 5] [--beside WAY ...] [--json FILE]
                                  [--plot FOLDER] [--device cuda] [--quick]

Every model is profiled, and `ct.sweep` runs and measures plain steps, up to five plans of each curve, every block
checkpointed and `checkpoint_sequential` with every number of segments (torch.compile's activation memory budgets, too,
if `--beside` names it). Peaks are those of torch.cuda.max_memory_allocated, parameters and gradients included; times
are the clock's, until the device has done its work. The extra time of a way is the median over the rounds of its ratio
to the plain step of the round. Transfers get a curve of their own, measured in the same way, with plain steps in turns.

The host's part: milliseconds by the clock until a step is issued, and until it is done, for plain steps, hooks that do
nothing, and plans that keep almost all and as little as possible; the same with an input so small that the device waits
for the host. With a full input the first also has what the host waits for, once so many kernels are queued that no more
are taken.

--quick runs small models, on the CPU where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import cairn.torch as ct
import torch
from cairn import format_bytes
from cairn.torch.base import memory
from cairn.torch.evaluation.alternatives import ALTERNATIVES
from cairn.torch.runtime.executor import Executor
from support import arguments
from support.big_models import Case, UnderAutocast, gpt2, llama
from support.cut_steps import LossOnly
from support.models import resnet50
from support.selective_runs import alike, by_kept, by_option
from support.training import UNLIMITED, available_device, synchronize, write

HOST = "64GiB"
ROUNDS_OF_HOST = 7


# -- models --------------------------------------------------------------------------------------------------


def vit(small: bool) -> Case:
    """ViT large (24 layers of 1024), batch 128, autocast to bfloat16."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = ViTForImageClassification(ViTConfig(**(shape if small else large)))

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        labels = torch.zeros(batch, dtype=torch.long)
        return {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": labels}

    return Case(UnderAutocast(LossOnly(model)).train(), inputs(2 if small else 128), inputs(1))


def resnet(small: bool) -> Case:
    """ResNet-50, batch 256 of 224 x 224, autocast to bfloat16."""
    batch, size = (2, 64) if small else (256, 224)
    step, tiny = resnet50(batch, size), resnet50(2, 64)
    return Case(UnderAutocast(step.model).train(), {"input": step.args[0]}, {"input": tiny.args[0]}, _mean_square)


def _mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


MODELS: dict[str, Callable[[bool], Case]] = {"gpt2": gpt2, "llama": llama, "vit": vit, "resnet50": resnet}


# -- measuring -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; default: all")
    parser.add_argument("--budgets", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", nargs="*", choices=ALTERNATIVES, default=ALTERNATIVES[:2], help="of PyTorch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="folder for a picture of each model's curves")
    parser.add_argument("--device", default="cuda")
    chosen = arguments.parse(parser, models=["gpt2"], budgets=2, rounds=1, device=available_device())
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --quick runs small models on the CPU")
    data: dict[str, Any] = {"conditions": conditions(device)}
    print(", ".join(f"{name} {value}" for name, value in data["conditions"].items()))
    for name in chosen.models or MODELS:
        torch.manual_seed(0)
        print(f"\n{name}: {MODELS[name].__doc__}", flush=True)
        data[name] = {"about": (MODELS[name].__doc__ or "").strip()}
        for section, found in measured(MODELS[name](chosen.quick), device, chosen, name):
            data[name][section] = found
            write(chosen.json, data)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def conditions(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "CPU",
        "allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"],
    }
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "CUDA": torch.version.cuda}
    return found


def measured(case: Case, device: torch.device, chosen: argparse.Namespace, name: str) -> Iterator[tuple[str, Any]]:
    """The options of a model's block, its curves, then the host's part."""
    case.model.to(device)
    case.kwargs, case.tiny = ({n: t.to(device) for n, t in each.items()} for each in (case.kwargs, case.tiny))
    began = time.perf_counter()
    profile = ct.profile(case.model, kwargs=case.kwargs, loss_fn=case.loss_fn)
    seconds = time.perf_counter() - began
    kinds = {stage.digest: stage for stage in profile.stages if stage.options}
    options = [len(stage.options) for stage in kinds.values()]
    print(f"profiled in {seconds:.1f} s; options of blocks {options}; allocator {profile.excess:+.2%}; "
          f"replaced outside blocks: {'; '.join(profile.replacements.notes()) or 'nothing'}", flush=True)  # fmt: skip
    yield "profile_seconds", seconds
    yield "options", [vars(option) for stage in list(kinds.values())[:1] for option in stage.options]
    whose = {"model": case.model, "kwargs": case.kwargs, "loss_fn": case.loss_fn, "rounds": chosen.rounds}
    plot = None if chosen.plot is None else chosen.plot / f"{name}.svg"
    curves = ct.sweep(profile, chosen.budgets, plot=plot, beside=chosen.beside, **whose)
    show(curves)
    yield "curves", curves.to_json()
    offloading = ct.sweep(profile, chosen.budgets, host_budget=HOST, beside=(), **whose)
    print(f"with up to {HOST} on the host, link {ct.measure_link(device)}")
    show(offloading)
    yield "offloading", offloading.to_json()
    host = {"full": host_ms(case, case.kwargs, profile, device)}
    tiny = ct.profile(case.model, kwargs=case.tiny, loss_fn=case.loss_fn, passes=1)
    host["tiny"] = host_ms(case, case.tiny, tiny, device)
    for size, ways in host.items():
        print(f"input {size}: " + "; ".join(f"{way} {ms[0]:.2f} ms issued, {ms[1]:.2f} ms" for way, ms in ways.items()))
    yield "host", host


def show(found: ct.Sweep) -> None:
    print(f"  {'':44} {'peak':>10} {'predicted':>10} {'step':>9} {'slower':>8} {'predicted':>9}  same loss")
    for row in found.measured:
        predicted = "" if row.predicted_peak_bytes is None else format_bytes(row.predicted_peak_bytes)
        slower = "" if row.predicted_overhead is None else f"{100 * row.predicted_overhead:.1f} %"
        print(f"  {row.name:44} {format_bytes(row.peak_bytes):>10} {predicted:>10} {row.step_ns / 1e6:>6.1f} ms "
              f"{100 * row.overhead:>6.1f} % {slower:>9}  {row.same_loss}", flush=True)  # fmt: skip
    for name, reason in found.left_out.items():
        print(f"  {name}: {reason}")


# -- the host's part -----------------------------------------------------------------------------------------


def host_ms(
    case: Case, kwargs: dict[str, torch.Tensor], profile: ct.Profile, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Milliseconds that a step takes to be issued, and until it is done."""
    unlimited = ct.plan(profile, UNLIMITED)
    hooks = torch.autograd.graph.saved_tensors_hooks
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "hooks that do nothing": lambda: hooks(lambda t: t, lambda t: t),
        "whole blocks kept": lambda: ct.apply(case.model, unlimited),
    }
    if len({stage.digest for stage in profile.stages if stage.options}) == 1:
        options = by_kept(alike(profile))
        ways["most kept"] = lambda: attached(by_option(case.model, profile, options[0]))
        ways["least kept"] = lambda: attached(by_option(case.model, profile, options[-1]))
    return {name: issued_and_done(case, kwargs, way(), device) for name, way in ways.items()}


@contextlib.contextmanager
def attached(executor: Executor) -> Iterator[None]:
    """It is at work within."""
    executor.attach()
    try:
        yield
    finally:
        executor.detach()


def issued_and_done(
    case: Case, kwargs: dict[str, torch.Tensor], way: contextlib.AbstractContextManager[Any], device: torch.device
) -> tuple[float, float]:
    """Medians of steps after three that do not count."""
    issued, done = [], []
    with way, memory.not_collecting():
        for number in range(ROUNDS_OF_HOST + 3):
            synchronize(device)
            began = time.perf_counter()
            case.step(kwargs)
            left = time.perf_counter()
            synchronize(device)
            if number >= 3:
                issued.append(1e3 * (left - began))
                done.append(1e3 * (time.perf_counter() - began))
    for p in case.model.parameters():
        p.grad = None
    return statistics.median(issued), statistics.median(done)


if __name__ == "__main__":
    main()
