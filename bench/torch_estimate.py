"""How close estimates of steps that are never run are to steps that are, and how long the largest of them takes.

python bench/torch_estimate.py [MODEL ...] [--sharded] [--layers 80] [--devices 64] [--json FILE]

For each architecture of torch_families: the plain peak of a step that creates its gradients, estimated on fake tensors
and measured; the least budget, estimated and planned from a measured profile; and the peaks of the estimate's own
plans, at their least budget and half-way to the plain step, predicted and measured. --sharded: the same peaks for a GPT
whose blocks FSDP2 shards over two ranks, estimated with shard=2. A rank's peak is the least of five steps, since gloo
frees the copies of its collectives when its own threads come to it; the larger of the two ranks' peaks counts. Then a
Llama of 8,192 features and so many layers (80: 70 billion parameters) on meta in bfloat16, AdamW, one sequence of 4,096
on each device, sharded over so many H100: its estimate, how long that took, and the memory of this process. --layers 0
leaves it out.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
import transformers as hf
from support import arguments
from support.region_models import Blocks, made
from support.training import MIB, UNLIMITED, allocated_peak, machine, quiet, release, step_peak, write
from support.two_ranks import local, on_two_ranks
from torch_families import FAMILIES, Family

VOCABULARY, LENGTH = 128_256, 4096
GIB = 2**30


def family_row(name: str, family: Family) -> dict[str, Any]:
    """Bytes of one architecture, estimated and measured."""
    torch.manual_seed(0)
    model, batch = family.made(), family.batch()
    found = ct.estimate(model, kwargs=batch, device="cpu", gradients="created", progress=False)
    profile = ct.profile(model, kwargs=batch, outside=False, passes=1, progress=False)
    planned = ct.plan(profile, UNLIMITED, gradients="created")

    def step() -> None:
        output = model(**batch)
        output.loss.backward()

    given = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    step()
    measured = step_peak(model, step, given)
    points = []
    for plan in own_plans(found.profile):
        with ct.apply(model, plan):
            step()
            points.append({"bytes": plan.peak_bytes, "measured_bytes": step_peak(model, step, given)})
    return {
        "model": name,
        "points": points,
        "plain_bytes": found.plain_peak_bytes,
        "plain_measured_bytes": measured,
        "least_bytes": found.least_budget_bytes,
        "least_planned_bytes": planned.least_budget_bytes,
    }


def own_plans(profile: ct.Profile) -> list[ct.Plan]:
    """Plans from an estimate's profile: within the least budget, and half-way to the plain step."""
    top = ct.plan(profile, UNLIMITED, gradients="created")
    low, high = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes
    return [ct.plan(profile, budget, gradients="created") for budget in (low, (low + high) // 2)]


def sharded_model(layers: int, width: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A GPT and its tokens."""
    return made("gpt", layers, width, 256), torch.randint(256, (2, 64))


def rank_peaks(layers: int, width: int, data: dict[str, Any]) -> list[int]:
    """Peaks on one rank: of the plain step, and of steps by plans from an estimate's profile."""
    from torch.distributed.fsdp import fully_shard

    model, ids = sharded_model(layers, width)
    assert isinstance(model, Blocks)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    resident = sum(local(p).nbytes for p in model.parameters()) + ids.nbytes

    def peak() -> int:
        found = []
        for _ in range(7):
            found.append(allocated_peak(lambda: model(ids).backward()))
            release(model)
        return resident + min(found[2:])

    data["fingerprint"]["model"] = type(model).__name__  # fully_shard makes a class of its own
    profile = ct.Profile.from_json(data)
    peaks = [peak()]
    for plan in own_plans(profile):
        with ct.apply(model, plan):
            peaks.append(peak())
    return peaks


def sharded_row(layers: int, width: int) -> dict[str, Any]:
    """Bytes of a model that is sharded over two ranks, estimated and measured."""
    model, ids = sharded_model(layers, width)
    options: dict[str, Any] = {"device": "cpu", "shard": 2, "gradients": "created", "inside": False}
    found = ct.estimate(model, ids, progress=False, **options)
    plain, *others = map(max, zip(*on_two_ranks(rank_peaks, layers, width, found.profile.to_json()), strict=True))
    points = [
        {"bytes": plan.peak_bytes, "measured_bytes": measured}
        for plan, measured in zip(own_plans(found.profile), others, strict=True)
    ]
    name = f"FSDP2 {layers} x {width}"
    return {"model": name, "points": points, "plain_bytes": found.plain_peak_bytes, "plain_measured_bytes": plain}


def described(row: dict[str, Any]) -> str:
    """A line of the table."""
    plain = f"{row['plain_measured_bytes'] / MIB:8.1f} MiB {off(row['plain_bytes'], row['plain_measured_bytes'])}"
    points = " ".join(off(point["bytes"], point["measured_bytes"]) for point in row["points"])
    least = " " * 23
    if "least_bytes" in row:
        least = f"{row['least_planned_bytes'] / MIB:9.1f} MiB {off(row['least_bytes'], row['least_planned_bytes'])}"
    return f"{row['model']:<14} {plain} {least}   {points}"


def off(estimated: int, measured: int) -> str:
    """By how much an estimate is off."""
    return f"{100 * (estimated / measured - 1):+7.2f} %"


def large(layers: int, devices: int, search: bool) -> dict[str, Any]:
    """The estimate of a large Llama, and what it took."""
    config = hf.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    began, used = time.perf_counter(), time.process_time()
    found = ct.estimate(
        model,
        kwargs={"input_ids": ids, "labels": ids},
        device="H100",
        memory="80GiB",
        shard=devices,
        optimizer=optimizer,
        largest_batch=search,
        progress=False,
    )
    taken, processor = time.perf_counter() - began, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\n{found}\n\n{taken:.0f} s ({processor:.0f} s of processor time), {peak / GIB:.2f} GiB at most")
    return {"seconds": taken, "processor_seconds": processor, "peak_bytes": peak, "estimate": found.to_json()}


def main() -> None:
    """Prints the table and the large model."""
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(FAMILIES))
    parser.add_argument("--sharded", action="store_true", help="also models that FSDP2 shards over two ranks")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--no-batch", action="store_true", help="do not look for the largest batch of the large model")
    parser.add_argument("--json", type=Path)
    chosen = arguments.parse(parser, models=["bert"], layers=1, no_batch=True)
    hf.logging.set_verbosity_error()
    rows = []
    print(
        f"{'model':<14} {'plain peak':>12} {'estimate':>9} {'least budget':>13} {'estimate':>9}  plans: least, half-way"
    )
    with quiet():
        for name in chosen.models:
            rows.append(family_row(name, FAMILIES[name]))
            print(described(rows[-1]), flush=True)
        for layers, width in ((4, 32), (8, 64), (4, 128), (2, 256)) if chosen.sharded else ():
            rows.append(sharded_row(layers, width))
            print(described(rows[-1]), flush=True)
    found = large(chosen.layers, chosen.devices, not chosen.no_batch) if chosen.layers else None
    write(chosen.json, {**machine(), "rows": rows, "large": found})


if __name__ == "__main__":
    main()
