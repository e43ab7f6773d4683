"""A byte budget for a compiled step, against the same step without a plan and against torch's own budget knob.

A GPT-2 (8 layers of 384, batch 4 x 256, vocabulary 2,048, dropout 0.1) trains in one thread. Every way runs one step
that does not count and one under a meter. Then all take turns, on one core that the process is bound to; times are its
CPU time, which a busy machine disturbs less than the clock's. In each round every way runs between two steps that are
compiled without a plan, and is compared with their mean, so that what changes slowly falls out of the ratio. Extra time
is the median of these ratios over the rounds; behind it stand the first and third quartiles, and the ratio of the least
times. Peaks are those of the allocator beyond what was there before the step; parameters are not in them. "exact"
compares loss and all gradients with those of the model without compilation, bit for bit.

The allocator keeps what it has, so that memory is not given back and faulted in again within a step; `--allocator
default` leaves glibc as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import cairn
import cairn.torch as ct
import torch
from support import arguments
from support.allocators import ALLOCATORS, restart_under
from support.training import MIB, allocated_peak, quiet
from torch import nn
from torch.nn import functional as F

#: The way that others are compared with.
BASE = "compiled, no plan"


class Loss(NamedTuple):
    """What a model returns."""

    loss: torch.Tensor


class Tiny(nn.Module):
    """A model for --quick, which imports nothing."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(0.1)
        self.layer, self.head = nn.Linear(width, 4 * width), nn.Linear(4 * width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Loss:
        """The loss alone."""
        x = self.head(self.dropout(F.gelu(self.layer(self.embed(input_ids)))))
        return Loss(F.cross_entropy(x.flatten(0, 1), labels.flatten()))


def gpt2(layers: int, width: int, length: int, vocabulary: int) -> Any:
    """The model, as transformers has it; its loss is named, so that no logger is called."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        vocab_size=vocabulary,
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


class Step:
    """One training step of a model, as a loop would run it: the loss is kept, the output is not."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids

    def run(self, function: Callable[..., Any]) -> torch.Tensor:
        """Forward and backward from the same random state each time."""
        torch.manual_seed(1)
        self.model.zero_grad()
        loss: torch.Tensor = function(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def results(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        """The loss and all gradients."""
        loss = self.run(function)
        return [loss, *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]

    def seconds(self, function: Callable[..., Any]) -> float:
        """CPU time of one step."""
        began = time.process_time()
        self.run(function)
        return time.process_time() - began

    def peak_mib(self, function: Callable[..., Any]) -> float:
        """Peak of one step beyond what was there, by the allocator's events."""
        self.model.zero_grad()

        def run() -> None:
            self.run(function)
            self.model.zero_grad()

        return allocated_peak(run) / MIB


def knob(model: Any, share: float, kernels: str) -> Callable[..., Any]:
    """torch.compile with its own activation memory budget."""
    backend = "inductor" if kernels == "inductor" else "aot_eager_decomp_partition"

    def call(**inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compiled(**inputs)

    compiled = torch.compile(model, backend=own(backend), fullgraph=True, dynamic=False)
    return call


def own(name: str) -> Callable[..., Any]:
    """A backend under an identity of its own, so that it does not get what another one compiled."""

    def compile_graph(graph: Any, inputs: Any) -> Any:
        return torch._dynamo.lookup_backend(name)(graph, inputs)

    return compile_graph


def planned(step: Step, beyond_mib: float | None, kernels: str) -> tuple[nn.Module | None, str]:
    """`ct.compile` with a peak beyond parameters and input, or without a limit; what the plan says."""
    resident = sum(t.numel() * t.element_size() for t in (*step.model.parameters(), *step.model.buffers(), step.ids))
    budget = 1 << 40 if beyond_mib is None else resident + int(beyond_mib * MIB)
    inputs = {"input_ids": step.ids, "labels": step.ids}
    began = time.perf_counter()
    try:
        compiled = ct.compile(
            step.model, kwargs=inputs, budget=budget, kernels=kernels, holds_output=False, prove=False, progress=False
        )
    except ct.InfeasibleBudget as error:
        return None, f"least {((error.least_bytes or 0) - resident) / MIB:.1f} MiB"
    report = ct.report(compiled)
    assert isinstance(report, ct.CompiledReport)
    plan = report.plans[-1]
    off = 100 * (plan.peak_bytes / report.measured_peak_bytes - 1)
    gap = "" if plan.gap is None else f", gap {100 * plan.gap:.2f} %"
    took = time.perf_counter() - began
    predicted = f"time {100 * plan.overhead:+.1f} %, {plan.step_ns / 1e9:.3f} s"
    return compiled, f"predicted {off:+.2f} %{gap}, {predicted}, compiled in {took:.0f} s"


def ways(step: Step, options: Any) -> dict[str, tuple[Callable[..., Any] | None, str]]:
    """All ways to run the step, by name."""
    found: dict[str, tuple[Callable[..., Any] | None, str]] = {"eager": (step.model, "")}
    found[BASE] = planned(step, None, options.kernels)
    for mib in options.budgets:
        found[f"cairn {mib:g} MiB"] = planned(step, mib, options.kernels)
    for share in options.knob:
        found[f"torch's knob {share:g}"] = (knob(step.model, share, options.kernels), "")
    return found


def main() -> None:
    """Measure and print; write JSON where a file is named."""
    command = arguments.parser(__doc__)
    command.add_argument("--kernels", choices=("eager", "inductor"), default="eager")
    command.add_argument("--layers", type=int, default=8, help="of GPT-2; 0: a tiny model instead")
    command.add_argument("--width", type=int, default=384)
    command.add_argument("--length", type=int, default=256)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--budgets", type=float, nargs="*", default=[404, 295, 235, 165], help="MiB beyond parameters")
    command.add_argument("--knob", type=float, nargs="*", default=[1.0, 0.5, 0.25, 0.1, 0.0])
    command.add_argument("--planning", action="store_true", help="instead: what planning takes beyond compiling")
    command.add_argument("--allocator", choices=ALLOCATORS, default="keeping")
    command.add_argument("--json", type=Path)
    options = arguments.parse(command, layers=0, width=64, length=32, rounds=1, budgets=[4.5], knob=[0.5])
    restart_under(options.allocator, command)
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 64  # every way is one more compilation of the same forward
    model = gpt2(options.layers, options.width, options.length, 2048) if options.layers else Tiny(options.width, 2048)
    step = Step(model, torch.randint(2048, (4, options.length)))
    with quiet():
        if options.planning:
            planning(step, options)
        else:
            report(step, ways(step, options), options)


def planning(step: Step, options: Any) -> None:
    """CPU seconds of compiling without a plan, of `ct.compile` at each budget, and of steps with everything kept.

    The first budget captures the model; its time is that beyond compiling. Further budgets use what was captured.
    """

    def seconds(make: Callable[..., Any], *given: Any, anew: bool = True) -> tuple[float, nn.Module | None]:
        if anew:
            torch._dynamo.reset()
        began = time.process_time()
        made = make(*given)
        return time.process_time() - began, made

    def at(mib: float) -> nn.Module | None:
        return planned(step, mib, options.kernels)[0]

    def unplanned() -> nn.Module:
        name = "inductor" if options.kernels == "inductor" else "aot_eager_default_partitioner"
        compiled: Any = torch.compile(step.model, backend=own(name), fullgraph=True, dynamic=False)
        step.run(compiled)
        return cast("nn.Module", compiled)

    seconds(unplanned)  # what the first compilation of a process does once
    alone, base = seconds(unplanned)
    assert base is not None
    print(f"compiled without a plan, one step: {alone:.1f} s")
    for number, mib in enumerate(options.budgets):
        taken, made = seconds(at, mib, anew=number == 0)
        found = None if made is None else ct.report(made)
        nodes = f", {len(found.plans[-1].problem['nodes'])} results" if isinstance(found, ct.CompiledReport) else ""
        what = f"{taken - alone:.1f} s more" if number == 0 else f"{taken:.1f} s in all, a further budget"
        print(f"ct.compile at {mib:g} MiB: {what}{nodes}", flush=True)
    kept = planned(step, None, options.kernels)[0]
    assert kept is not None
    ratios = [step.seconds(kept) / step.seconds(base) for _ in range(options.rounds + 1)][1:]
    print(
        f"everything kept: {100 * (statistics.median(ratios) - 1):+.1f} % of a step beside torch.compile without a plan"
    )


class Times(NamedTuple):
    """CPU seconds of a way's steps, and their ratios to the steps around them that are compiled without a plan."""

    seconds: list[float]
    ratios: list[float]

    def extra_percent(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of the extra time."""
        if len(self.ratios) < 2:
            only = 100 * (self.ratios[0] - 1)
            return only, only, only
        first, median, third = statistics.quantiles(self.ratios, method="inclusive")
        return 100 * (first - 1), 100 * (median - 1), 100 * (third - 1)


def rounds(step: Step, runs: dict[str, Callable[..., Any]], count: int) -> dict[str, Times]:
    """All ways in turns, each between two steps that are compiled without a plan."""
    found = {name: Times([], []) for name in runs}
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(count):
        before = step.seconds(runs[BASE])
        for name, function in runs.items():
            taken, after = step.seconds(function), step.seconds(runs[BASE])
            found[name].seconds.append(taken)
            found[name].ratios.append(2 * taken / (before + after))
            before = after
    return found


def report(step: Step, found: dict[str, tuple[Callable[..., Any] | None, str]], options: Any) -> None:
    """A row for each way."""
    runs = {name: function for name, (function, _) in found.items() if function is not None}
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)
    exact_results = step.results(step.model)
    same, peaks = {}, {}
    for name, function in runs.items():
        same[name] = all(map(torch.equal, exact_results, step.results(function)))
        peaks[name] = step.peak_mib(function)
    found_times = rounds(step, runs, options.rounds)
    base_s = min(found_times[BASE].seconds)
    rows = []
    versions = f"torch {torch.__version__}, cairn {cairn.__version__}"
    print(f"{'way':24} {'peak MiB':>9} {'time':>8} {'quartiles':>16} {'least':>8} {'exact':>6}  {versions}")
    for name, (_, said) in found.items():
        if name not in runs:
            print(f"{name:24} {'-':>9} {'-':>8} {'-':>16} {'-':>8} {'-':>6}  {said}")
            continue
        taken = found_times[name]
        first, extra, third = taken.extra_percent()
        least = 100 * (min(taken.seconds) / base_s - 1)
        exact = "yes" if same[name] else "no"
        quartiles = f"{first:+.1f} to {third:+.1f}%"
        print(f"{name:24} {peaks[name]:9.1f} {extra:+7.1f}% {quartiles:>16} {least:+7.1f}% {exact:>6}  {said}")
        rows.append(
            {
                "way": name,
                "peak_mib": peaks[name],
                "extra_time_percent": extra,
                "extra_quartiles_percent": [first, third],
                "extra_of_least_percent": least,
                "least_s": min(taken.seconds),
                "exact": same[name],
                "plan": said,
            }
        )
    if options.json is not None:
        conditions = {
            "torch": torch.__version__,
            "threads": 1,
            "kernels": options.kernels,
            "rounds": options.rounds,
            "allocator": options.allocator,
        }
        options.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
