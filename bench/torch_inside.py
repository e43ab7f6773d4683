"""What keeping a part of each block is worth: CPU seconds of a GPT-2 step at given peaks, against whole blocks.

python bench/torch_inside.py [--layers 12] [--vocabulary 50257] [--rounds 3] [--mib 840 553 442 321]
                             [--json FILE] [--allocator default]

Peaks are bytes above the parameters in a step that creates its gradients. All methods give plain's exact loss. They
take turns, one thread, CPU time of the process (which a busy machine disturbs less than the clock's). The allocator
keeps what it has (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ at 4 GiB), so that tensors are not faulted in
again and again; `--allocator default` leaves glibc as it is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cairn
import cairn.torch as ct
import torch
from cairn.torch import memory
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential
from torch_support import Method, machine, peak_of, quiet, release, write

MIB = 2**20
FAULT_FREE = {"MALLOC_MMAP_THRESHOLD_": str(4 * 2**30), "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=3, help="steps timed per method; the median counts")
    parser.add_argument("--mib", type=int, nargs="*", default=[840, 553, 442, 321])
    parser.add_argument("--segments", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--allocator", choices=("keeping", "default"), default="keeping")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if (
        chosen.allocator == "keeping"
        and os.environ.get("MALLOC_TRIM_THRESHOLD_") != FAULT_FREE["MALLOC_TRIM_THRESHOLD_"]
    ):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **FAULT_FREE})
    with quiet():
        data = _measured(chosen)
    write(
        chosen.json,
        {
            "machine": machine(),
            "allocator": chosen.allocator,
            "layers": chosen.layers,
            "vocabulary": chosen.vocabulary,
            **data,
        },
    )


class Gpt2:
    """The step, plainly and with checkpoint_sequential over embedding, layers and head."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=layers, vocab_size=vocabulary, use_cache=False)).train()
        self.tokens = torch.randint(vocabulary, (2, 256))

    def loss_fn(self, output: Any) -> torch.Tensor:
        logits = output.logits[:, :-1].reshape(-1, output.logits.shape[-1])
        return F.cross_entropy(logits, self.tokens[:, 1:].reshape(-1))

    def run(self) -> float:
        torch.manual_seed(1)
        output = self.model(self.tokens)  # held through the backward, as training loops do
        loss = self.loss_fn(output)
        loss.backward()
        return loss.item()

    def run_in_segments(self, segments: int) -> float:
        torch.manual_seed(1)
        inner = self.model.transformer
        places = torch.arange(256)[None]

        def embed(anchor: torch.Tensor) -> torch.Tensor:
            return inner.drop(inner.wte(self.tokens) + inner.wpe(places) + 0 * anchor)

        def head(x: torch.Tensor) -> torch.Tensor:
            logits = self.model.lm_head(inner.ln_f(x))
            return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), self.tokens[:, 1:].reshape(-1))

        anchor = torch.zeros((), requires_grad=True)
        functions = [embed, *inner.h, head]
        loss = checkpoint_sequential(functions, segments, anchor, use_reentrant=False)
        loss.backward()
        return loss.item()

    def run_every_layer(self) -> float:
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            return self.run()
        finally:
            self.model.gradient_checkpointing_disable()


def _measured(chosen: argparse.Namespace) -> dict[str, Any]:
    step = Gpt2(chosen.layers, chosen.vocabulary)
    model = step.model
    parameters = memory.unique_bytes([*model.parameters(), *model.buffers()])
    profile = ct.profile(model, step.tokens, loss_fn=step.loss_fn)
    block = next(stage for stage in profile.stages if stage.options)
    _print_options(block)
    methods = {"plain": Method(step.run), "every layer (transformers)": Method(step.run_every_layer)}
    for k in chosen.segments:
        methods[f"checkpoint_sequential {k}"] = Method(lambda k=k: step.run_in_segments(k))
    for mib in chosen.mib:
        for name, allow in (("blocks", ("recompute",)), ("parts", ("recompute", "inside"))):
            budget = cairn.Budget(total=parameters + mib * MIB, reserve=0)
            try:
                plan = ct.plan(profile, budget, gradients="created", allow=allow)
            except ct.InfeasibleBudget as error:
                print(f"{mib} MiB, {name}: the least is {(error.least_bytes - parameters) / MIB:.1f} MiB")
                continue
            methods[f"{name} within {mib} MiB"] = Method(step.run, plan)
    rows = _timed(step, methods, chosen.rounds, parameters)
    _print(rows)
    return {"options": [vars(option) for option in block.options], "rows": rows}


def _timed(step: Gpt2, methods: dict[str, Method], rounds: int, parameters: int) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {name: [] for name in methods}
    peaks: dict[str, int] = {}
    losses: dict[str, set[float]] = {name: set() for name in methods}
    for number in range(rounds + 1):
        for name, method in methods.items():
            release(step.model)
            if number == 0:  # the first step of a plan records; its peak is that of the others
                peaks[name] = peak_of(step.model, method, [step.tokens]) - parameters
                continue
            with method.on(step.model):
                began = time.process_time()
                losses[name].add(method.run())
                taken[name].append(time.process_time() - began)
    plain = statistics.median(taken["plain"])
    rows = []
    for name, method in methods.items():
        seconds = statistics.median(taken[name])
        rows.append(
            {
                "method": name,
                "peak_bytes": peaks[name],
                "predicted_peak_bytes": None if method.plan is None else method.plan.created_peak_bytes - parameters,
                "cpu_seconds": seconds,
                "overhead": seconds / plain - 1,
                "predicted_overhead": None if method.plan is None else method.plan.overhead,
                "same_loss": losses[name] == losses["plain"],
            }
        )
    return rows


def _print_options(stage: Any) -> None:
    base = stage.options[0]
    print(f"{'option':>6} {'saves MiB':>10} {'of the block, slower':>21}  runs again")
    for number, option in enumerate(stage.options):
        slower = option.time_ns / base.time_ns - 1
        print(f"{number:>6} {option.saved_bytes / MIB:>10.2f} {100 * slower:>20.2f}%  {option.rebuilds}")


def _print(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'method':<28} {'peak MiB':>9} {'predicted':>9} {'CPU s':>7} {'slower':>8} {'predicted':>9} {'same loss':>9}"
    )
    for row in rows:
        predicted = row["predicted_peak_bytes"]
        slower = row["predicted_overhead"]
        print(
            f"{row['method']:<28} {row['peak_bytes'] / MIB:>9.1f} {'' if predicted is None else predicted / MIB:>9.6} "
            f"{row['cpu_seconds']:>7.2f} {100 * row['overhead']:>7.1f}% "
            f"{'' if slower is None else f'{100 * slower:.1f}%':>9} {row['same_loss']!s:>9}"
        )


if __name__ == "__main__":
    main()
