"""How close estimates of steps that are never run are to steps that are, and how long the largest of them takes.

python bench/torch_estimate.py [MODEL ...] [--layers 80] [--devices 64] [--json FILE]

For each architecture of torch_families: the plain peak of a step that creates its gradients, estimated on fake tensors
and measured, and the least budget, estimated and planned from a measured profile. Then a Llama of 8,192 features and so
many layers (80: 70 billion parameters) on meta in bfloat16, AdamW, one sequence of 4,096 on each device, sharded over
so many H100: its estimate, how long that took, and the memory of this process. --layers 0 leaves it out.
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
from support.training import MIB, UNLIMITED, machine, quiet, step_peak, write
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

    step()
    measured = step_peak(model, step, [value for value in batch.values() if isinstance(value, torch.Tensor)])
    return {
        "model": name,
        "plain_bytes": found.plain_peak_bytes,
        "plain_measured_bytes": measured,
        "least_bytes": found.least_budget_bytes,
        "least_planned_bytes": planned.least_budget_bytes,
    }


def described(row: dict[str, Any]) -> str:
    """A line of the table."""
    plain = 100 * (row["plain_bytes"] / row["plain_measured_bytes"] - 1)
    least = 100 * (row["least_bytes"] / row["least_planned_bytes"] - 1)
    sizes = row["plain_measured_bytes"] / MIB, row["least_planned_bytes"] / MIB
    return f"{row['model']:<14} {sizes[0]:8.1f} MiB {plain:+7.2f} % {sizes[1]:9.1f} MiB {least:+7.2f} %"


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
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--no-batch", action="store_true", help="do not look for the largest batch of the large model")
    parser.add_argument("--json", type=Path)
    chosen = arguments.parse(parser, models=["bert"], layers=1, no_batch=True)
    hf.logging.set_verbosity_error()
    rows = []
    print(f"{'model':<14} {'plain peak':>12} {'estimate':>9} {'least budget':>13} {'estimate':>9}")
    with quiet():
        for name in chosen.models:
            rows.append(family_row(name, FAMILIES[name]))
            print(described(rows[-1]), flush=True)
    found = large(chosen.layers, chosen.devices, not chosen.no_batch) if chosen.layers else None
    write(chosen.json, {**machine(), "rows": rows, "large": found})


if __name__ == "__main__":
    main()
