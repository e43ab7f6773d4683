"""Compiled training at sizes that fill a GPU: `ct.compile` at six budgets against PyTorch's own ways to save memory.

python bench/torch_cuda_compile.py [MODEL ...] [--ways WAY ...] [--budgets 0.4 0.5 ...] [--rounds 5] [--json FILE]
                                   [--device cuda] [--kernels inductor] [--quick]

Ways: eager; compiled by torch.compile; that with torch's activation memory budget at several values ("knob"); with
every layer under torch's selective checkpointing, which saves products and attention ("selective"); with every layer
checkpointed ("layers"); with the outputs of products and attention sent to the host by torch's activation offloading
("offload"); and `ct.compile` at budgets that are shares of eager's peak ("cairn"). Each way runs two steps that do not
count and `--rounds` that do: the peak is torch's own count of allocated bytes on a GPU, the events of the allocator on
the CPU; the time is the median; the loss is that of the first step from one random state. A way that fails says why.

--quick runs small models, on the CPU where there is no CUDA device, with the kernels of eager mode.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from pathlib import Path

import cairn.torch as ct
import torch
from support import arguments
from support.big_models import Case, UnderAutocast, gpt2, llama
from support.training import MIB, allocated_peak, available_device, release, seconds_now, synchronize, write
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
MODELS: dict[str, Callable[[bool], Case]] = {"gpt2": gpt2, "llama": llama}
WAYS = ("eager", "compiled", "knob", "selective", "layers", "offload", "cairn")
Step = Callable[[], torch.Tensor]


# -- ways ----------------------------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules in a model."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


@contextlib.contextmanager
def checkpointed(model: nn.Module, **options: Any) -> Iterator[None]:
    """Every layer runs under torch's checkpoint meanwhile."""
    layers = list(layers_of(model))
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def saves_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def offload_products(joint: fx.GraphModule, _: Any) -> fx.GraphModule:
    """Marks what torch's activation offloading shall send to the host."""
    for node in joint.graph.nodes:
        if node.target in PRODUCTS and not node.name.startswith("tangents"):
            node.meta["should_offload"] = True
    return joint


@contextlib.contextmanager
def way_of(name: str, case: Case, chosen: argparse.Namespace, budget: int) -> Iterator[Callable[..., Any]]:
    """The model as a way runs it. `name` is one of WAYS, behind "knob" with its value."""
    kind, _, value = name.partition(" ")
    config = torch._functorch.config
    with contextlib.ExitStack() as stack:
        if kind == "eager":
            yield case.model
            return
        if kind == "cairn":
            made = ct.compile(case.model, kwargs=case.kwargs, budget=budget, kernels=chosen.kernels, progress=False)
            yield made
            return
        if kind == "knob":
            stack.enter_context(config.patch(activation_memory_budget=float(value)))
        elif kind == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)
            stack.enter_context(checkpointed(case.model, context_fn=contexts))
        elif kind == "layers":
            stack.enter_context(checkpointed(case.model))
        elif kind == "offload":
            stack.enter_context(config.patch(enable_activation_offloading=True, joint_custom_pass=offload_products))
        backend = "inductor" if chosen.kernels == "inductor" else "aot_eager_decomp_partition"
        yield torch.compile(case.model, backend=backend, dynamic=False)


# -- measuring -----------------------------------------------------------------------------------------------


def step_of(case: Case, function: Callable[..., Any]) -> torch.Tensor:
    """One step from one random state; its loss."""
    torch.manual_seed(1)
    loss: torch.Tensor = function(**case.kwargs)
    loss.backward()
    return loss.detach()


def measured(case: Case, function: Callable[..., Any], device: torch.device, rounds: int) -> dict[str, Any]:
    """Peak, time and loss of a way."""
    release(case.model)
    began = time.perf_counter()
    loss = step_of(case, function).item()
    release(case.model)
    prepared = time.perf_counter() - began
    step_of(case, function)
    release(case.model)
    static = sum(t.numel() * t.element_size() for t in (*case.model.parameters(), *case.kwargs.values()))
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    peak = 0

    def run() -> None:
        step_of(case, function)
        release(case.model)

    if device.type == "cpu":
        peak = static + allocated_peak(run)
    times = []
    for _ in range(rounds):
        start = seconds_now(device)
        step_of(case, function)
        times.append(seconds_now(device) - start)
        release(case.model)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return {"peak": peak, "seconds": statistics.median(times), "loss": loss, "first step": prepared}


def attempts(chosen: argparse.Namespace) -> list[tuple[str, float]]:
    """The ways by name, each with its share of eager's peak (of "cairn" alone)."""
    found = []
    for name in chosen.ways:
        if name == "knob":
            found += [(f"knob {value:g}", 0.0) for value in chosen.knob]
        elif name == "cairn":
            found += [(f"cairn {share:g}", share) for share in chosen.budgets]
        else:
            found.append((name, 0.0))
    return found


def compare(case: Case, device: torch.device, chosen: argparse.Namespace) -> dict[str, Any]:
    """All ways of one model."""
    rows: dict[str, Any] = {}
    print(f"  {'way':14} {'peak MiB':>10} {'of eager':>9} {'step ms':>9} {'of eager':>9}  loss", flush=True)
    for name, share in attempts(chosen):
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        eager = rows.get("eager", {})
        budget = int(share * eager.get("peak", 0)) or 1
        try:
            with way_of(name, case, chosen, budget) as function:
                row = measured(case, function, device, chosen.rounds)
        except Exception as error:  # out of memory, no plan, an operator that cannot be captured: others go on
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
            print(f"  {name:14} {rows[name]['failed']}", flush=True)
            release(case.model)
            continue
        rows[name] = row
        eager = rows.get("eager", row)
        peaks, times = row["peak"] / eager["peak"], row["seconds"] / eager["seconds"]
        numbers = f"{row['peak'] / MIB:10.1f} {peaks:9.3f} {1e3 * row['seconds']:9.2f} {times:9.3f}"
        print(f"  {name:14} {numbers}  {row['loss']:.6f}", flush=True)
    return rows


def main() -> None:
    """Measure and print; write JSON where a file is named."""
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is named")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.35, 0.45, 0.55, 0.6, 0.7, 0.85])
    parser.add_argument("--knob", type=float, nargs="*", default=[0.25, 0.5, 0.75])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    quick = {"budgets": [0.85], "knob": [0.5], "models": ["tiny"], "kernels": "eager"}
    chosen = arguments.parse(parser, rounds=1, device=available_device(), **quick)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --quick runs small models on the CPU")
    data: dict[str, Any] = {"torch": torch.__version__, "device": device.type, "kernels": chosen.kernels}
    if device.type == "cuda":
        data["device"] = torch.cuda.get_device_name(device)
    for name in chosen.models or MODELS:
        torch.manual_seed(0)
        case = tiny() if name == "tiny" else MODELS[name](chosen.quick)
        case.model.to(device)
        case.kwargs = {key: tensor.to(device) for key, tensor in case.kwargs.items()}
        print(f"{name}, {data['device']}, torch {torch.__version__}, {chosen.kernels} kernels", flush=True)
        data[name] = compare(case, device, chosen)
        write(chosen.json, data)


class Tiny(nn.Module):
    """Layers in a list, and their loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        block = functools.partial(nn.Sequential, nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def tiny() -> Case:
    """A model for --quick, which imports nothing."""
    x = torch.randn(256, 32)
    return Case(UnderAutocast(Tiny(32)).train(), {"x": x}, {"x": x[:2]})


if __name__ == "__main__":
    main()
