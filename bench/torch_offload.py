"""A step with its saved tensors offloaded, against plain, torch's save_on_cpu and checkpointing of every block.

Peak of the device's allocator, offload tier taken, time of a step by the clock and of all processor threads. Steps
take turns; medians count. On a CUDA device also how much of the copying went on while kernels ran, from a profiler's
trace.

python bench/torch_offload.py [mlp] [resnet50] [vgg16] [--device cuda] [--folder /tmp] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from support import arguments
from support.models import MODELS
from support.training import machine, quiet, release, seconds_now, step_peak, synchronize, write
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined] # torch does not list it
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

Interval = tuple[float, float]


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="mlp, resnet50, vgg16; default: mlp, resnet50")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where the file is")
    parser.add_argument("--resident", default=None, help="resident_bytes of offload, such as 64MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = arguments.parse(parser, models=["tiny-mlp"], rounds=1)
    with quiet():
        results = {name: Comparison(name, chosen).rows() for name in chosen.models or ("mlp", "resnet50")}
        conditions = machine() | {"times": "seconds by the clock, and of all threads", "device": chosen.device}
    write(chosen.json, {"machine": conditions, "models": results})


class Comparison:
    """One network and the ways to run its step."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        self._name, self._rounds = name, chosen.rounds
        self._device = torch.device(chosen.device)
        torch.manual_seed(0)
        step = MODELS[name]()
        self._model = step.model.to(self._device)
        self._x = step.args[0].to(self._device)
        output = self._model(self._x)
        self._target = torch.zeros_like(output).detach()
        del output
        self._offload = {
            f"cairn, {tier.split(':')[0]}": ct.offload(
                self._model, self._x, self._target, tier=tier, resident_bytes=chosen.resident
            )
            for tier in ("host", f"file:{chosen.folder}")
        }
        self._methods = self._all_methods()

    def rows(self) -> list[dict[str, Any]]:
        """What each method takes."""
        for run in self._methods.values():
            run()
        peaks = {name: self._peak(run) for name, run in self._methods.items()}
        clock, busy = self._times()
        rows = [
            {
                "method": name,
                "peak_bytes": peaks[name],
                "slower_bytes": self._offload[name].capacity_bytes if name in self._offload else 0,
                "seconds": clock[name],
                "processor_seconds": busy[name],
                "times_plain": clock[name] / clock["plain"],
                "overlapped": self._overlapped(run),
            }
            for name, run in self._methods.items()
        ]
        self._print(rows)
        return rows

    def _all_methods(self) -> dict[str, Callable[[], None]]:
        pinned = self._device.type == "cuda"
        methods: dict[str, Callable[[], None]] = {
            "plain": lambda: self._step(contextlib.nullcontext()),
            "save_on_cpu": lambda: self._step(save_on_cpu(pin_memory=pinned)),
            "every block checkpointed": lambda: self._step(contextlib.nullcontext(), self._checkpointed),
        }
        for name, context in self._offload.items():
            methods[name] = functools.partial(self._step, context)
        return methods

    def _step(self, context: Any, forward: Callable[[Tensor], Tensor] | None = None) -> None:
        with context:
            loss = nn.functional.mse_loss((forward or self._model)(self._x), self._target)
        loss.backward()

    def _checkpointed(self, value: Tensor) -> Tensor:
        assert isinstance(self._model, nn.Sequential)
        for layer in self._model:
            value = checkpoint(layer, value, use_reentrant=False)
        return value

    def _peak(self, run: Callable[[], None]) -> int:
        return step_peak(self._model, run, [self._x, self._target])

    def _times(self) -> tuple[dict[str, float], dict[str, float]]:
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in self._methods}
        for _ in range(self._rounds + 1):
            for name, run in self._methods.items():
                release(self._model)
                began, busy = seconds_now(self._device), time.process_time()
                run()
                taken[name].append((seconds_now(self._device) - began, time.process_time() - busy))
        clock, processor = (
            {name: statistics.median(pair[i] for pair in pairs[1:]) for name, pairs in taken.items()} for i in range(2)
        )
        return clock, processor

    def _overlapped(self, run: Callable[[], None]) -> float | None:
        """The share of the time of copies to and from the host in which kernels ran; None where nothing was copied."""
        if self._device.type != "cuda":
            return None
        release(self._model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            synchronize(self._device)
        copies: list[Interval] = []
        kernels: list[Interval] = []
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA:
                interval = (event.time_range.start, event.time_range.end)
                (copies if event.name.startswith("Memcpy") else kernels).append(interval)
        copying = sum(end - start for start, end in copies)
        return shared(copies, kernels) / copying if copying else None

    def _print(self, rows: list[dict[str, Any]]) -> None:
        print(f"{self._name:<26} {'peak':>12} {'offload tier':>14} {'time':>9} {'x plain':>8} {'processor':>10}")
        for row in rows:
            line = (
                f"  {row['method']:<24} {row['peak_bytes'] / 2**20:>8.1f} MiB {row['slower_bytes'] / 2**20:>10.1f} MiB "
                f"{row['seconds'] * 1e3:>6.0f} ms {row['times_plain']:>8.2f} {row['processor_seconds'] * 1e3:>7.0f} ms"
            )
            overlapped = "" if row["overlapped"] is None else f"  {100 * row['overlapped']:.0f} % of copying overlapped"
            print(line + overlapped, flush=True)


def shared(ones: Iterable[Interval], others: Iterable[Interval]) -> float:
    """How long one of each is there at once; neither overlap among themselves, as on one stream each."""
    total = 0.0
    merged = merge(others)
    for start, end in merge(ones):
        total += sum(max(0.0, min(end, e) - max(start, s)) for s, e in merged)
    return total


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as intervals that do not touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


if __name__ == "__main__":
    main()
