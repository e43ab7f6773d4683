"""What the training benchmarks share: measured steps, and the conditions under which they ran."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from cairn.torch.base import clock, memory
from cairn.torch.evaluation.comparison import Steps
from cairn.torch.handle import SuspendablePlan
from torch import nn

CPU = torch.device("cpu")
MIB = 2**20
UNLIMITED = 2**62


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One thread, its own processor time instead of the clock's, no garbage collection."""
    torch.set_num_threads(1)
    clock.read = time.thread_time_ns
    gc.collect()
    with memory.not_collecting():
        yield


def release(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def allocated_peak(run: Callable[[], object], device: torch.device = CPU) -> int:
    """Bytes that a run has allocated at its peak, beyond those allocated before it."""
    meter = memory.meter_for(device)
    with meter:
        first = meter.mark()
        run()
        last = meter.mark()
    return meter.peak(first, last) - meter.level(first)


def step_peak(model: nn.Module, step: Callable[[], object], inputs: Iterable[torch.Tensor]) -> int:
    """Peak bytes of a step that creates its gradients, parameters, buffers and inputs included."""
    inputs = list(inputs)
    device = inputs[0].device if inputs else CPU
    release(model)
    static = memory.unique_bytes([*model.parameters(), *model.buffers(), *inputs])
    peak = allocated_peak(step, device)
    release(model)
    return static + peak


def seconds_now(device: torch.device) -> float:
    """The clock, once the device has finished its work."""
    synchronize(device)
    return time.perf_counter()


def available_device() -> str:
    """A CUDA device where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_it_is(model: Callable[..., Any]) -> contextlib.AbstractContextManager[Callable[..., Any]]:
    """A turn of a comparison: the model without a plan."""
    return contextlib.nullcontext(model)


@contextlib.contextmanager
def following(model: nn.Module, recalled: SuspendablePlan) -> Iterator[nn.Module]:
    """A turn of a comparison: the model, while it follows a plan."""
    with recalled.at_work():
        yield model


def succeeded(steps: Steps | str) -> Steps:
    """Measured steps of a comparison; a failure is an error."""
    if isinstance(steps, str):
        raise RuntimeError(f"a step failed: {steps}")
    return steps


@dataclasses.dataclass
class Method:
    """One way to run a step; a plan is applied before the step is measured."""

    run: Callable[[], Any]
    plan: ct.Plan | None = None

    def on(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.plan is None else ct.apply(model, self.plan)


def plans_between(profile: ct.Profile, count: int) -> list[ct.Plan]:
    """Plans for budgets evenly from the least to the one that stores everything."""
    top = ct.plan(profile, UNLIMITED)
    low, high = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes
    return [ct.plan(profile, low + (high - low) * i // (count - 1)) for i in range(count)]


def seconds_of(model: nn.Module, method: Method) -> float:
    """Of a second step in a row: the first one after a plan was applied finds things out."""
    with method.on(model):
        method.run()
        release(model)
        began = time.thread_time()
        method.run()
        return time.thread_time() - began


def medians(model: nn.Module, methods: dict[str, Method], rounds: int) -> dict[str, float]:
    """Seconds of a step of each method; they take turns, so that a busy machine slows all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds + 1):
        for name, method in methods.items():
            taken[name].append(seconds_of(model, method))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}  # the first warms up


def machine() -> dict[str, Any]:
    return {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads(),
            "processor": _processor(), "cores": os.cpu_count(), "times": "processor time of the one thread",
            "load": os.getloadavg()[0]}  # fmt: skip


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def write(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
