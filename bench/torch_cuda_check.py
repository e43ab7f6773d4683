"""What of cairn.torch runs otherwise on a CUDA device, checked on one: a line for each check; returns 1 if one fails.

Exactness and peaks: small transformers and a convolutional network, in float32, autocast and with several kernels of
attention; at three budgets each, with and without offloaded values to the host, a planned step must give the plain
one's bits and keep torch's own count of allocated bytes within the budget. Then what only a device has: whether copies
go on beside a computation, whether the host waits for the device within a step, steps on another stream, gradient
scaling, running out of memory within a step, capture, another device than the plan's, and what a plan that keeps
everything costs in a step of small kernels.

python bench/torch_cuda_check.py [CHECK ...] [--device cuda] [--quick]

Without a CUDA device it says so. On the CPU, and with --quick, models are small.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import cairn.torch as ct
import torch
from cairn import format_bytes
from support import arguments
from support.training import available_device, seconds_now
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, LENGTH, BATCH, LAYERS, WORDS = 1024, 16, 512, 8, 8, 8192
ROUNDS = 7
failed: list[str] = []


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="names of checks, as they are printed; default: all")
    parser.add_argument("--device", default="cuda")
    chosen = arguments.parse(parser, device=available_device(), checks=["float32", "other stream", "out of memory"])
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return 0
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    if device.type == "cpu" or chosen.quick:
        _make_small()
    torch.use_deterministic_algorithms(True)
    checks: dict[str, Callable[[], str]] = {
        name: lambda setting=setting: exact_and_within(setting, device)  # type: ignore[misc]
        for name, setting in settings(device).items()
    }
    for check in (link, waits, other_stream, scaled, out_of_memory, capture, other_device, mechanism):
        checks[check.__name__.replace("_", " ")] = lambda check=check: check(device)  # type: ignore[misc]
    unknown = [name for name in chosen.checks if name not in checks]
    if unknown:
        parser.error(f"there is no check {unknown[0]!r}; there are {', '.join(map(repr, checks))}")
    for name in chosen.checks or checks:
        attempt(name, checks[name])
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def attempt(name: str, check: Callable[[], str]) -> None:
    """Prints what a check found; an exception is a failure."""
    began = time.perf_counter()
    try:
        found, word = check(), "ok    "
    except Exception as error:  # whatever happens, the other checks go on
        traceback.print_exc()
        found, word = f"{type(error).__name__}: {error}", "FAILED"
        failed.append(name)
    print(f"{word} {name} ({time.perf_counter() - began:.1f} s): {found}", flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _make_small() -> None:
    globals().update(WIDTH=64, HEADS=4, LENGTH=64, BATCH=2, LAYERS=4, WORDS=512)


# -- models --------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Of a transformer, with dropout in attention and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), 0.1)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def convolutions() -> nn.Module:
    layers = [
        nn.Sequential(nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for i in range(8)
    ]
    return nn.Sequential(*layers, nn.Sequential(nn.AvgPool2d(LENGTH // 4), nn.Flatten(), nn.Linear(64, 1000)))


class Setting:
    """A model with its input and surroundings."""

    def __init__(self, model: nn.Module, x: Tensor, surroundings: Callable[[], Any] = contextlib.nullcontext) -> None:
        self.model, self.x, self.surroundings = model, x, surroundings

    def loss_fn(self, output: Tensor) -> Tensor:
        return output.float().square().mean()

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = None
        with self.surroundings():
            loss = self.loss_fn(self.model(self.x))
        loss.backward()


def transformer(device: torch.device) -> Setting:
    torch.manual_seed(0)
    return Setting(Transformer().to(device).train(), torch.randint(WORDS, (BATCH, LENGTH), device=device))


def settings(device: torch.device) -> dict[str, Setting]:
    """By name; models of the same kind are one model."""
    base, half = transformer(device), torch.bfloat16
    kernels = {"math": SDPBackend.MATH}
    if device.type == "cuda":
        kernels["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    found = {"float32": base}
    for name, kernel in kernels.items():
        found[f"float32, {name} attention"] = Setting(base.model, base.x, functools.partial(sdpa_kernel, kernel))
    found["bfloat16 autocast"] = Setting(base.model, base.x, lambda: torch.autocast(device.type, half))
    found["bfloat16"] = Setting(copy.deepcopy(base.model).to(half), base.x)
    images = torch.randn(2 * BATCH, 3, LENGTH // 4, LENGTH // 4, device=device)
    found["convolutions"] = Setting(convolutions().to(device).train(), images)
    return found


# -- exactness and peaks -------------------------------------------------------------------------------------


def exact_and_within(setting: Setting, device: torch.device) -> str:
    """At three budgets, with and without offloading: bits, and the peak that torch counts."""
    model, x = setting.model, setting.x
    with setting.surroundings():
        profile = ct.profile(model, x, loss_fn=setting.loss_fn)
        roomy = ct.plan(profile, "100GiB")
        problems, lines, offloaded_count = [], [f"allocator takes {profile.excess:+.1%}"], 0
        for share in (0.0, 0.3, 0.7):
            for host in (None, "8GiB"):
                plans = ct.sweep(profile, 2, host_budget=host)
                least = plans[0].budget_bytes
                budget = least + int(share * max(0, roomy.plain_peak_bytes - least))
                plan = ct.plan(profile, budget, host_budget=host)
                found = ct.verify(model, plan, x, loss_fn=setting.loss_fn, strict=False)
                problems += found.problems()
                offloaded_count += plan.offloads
                lines.append(_peaks(setting, plan, device))
    _require(not problems, "; ".join(dict.fromkeys(problems)))
    return f"{offloaded_count} plans offload; {', '.join(lines)}"


def _peaks(setting: Setting, plan: ct.Plan, device: torch.device) -> str:
    """Of a step in training, by torch's own counters, without what else this process has on the device."""
    if device.type != "cuda":
        return f"{plan.budget_bytes}"
    with ct.apply(setting.model, plan) as handle:
        setting.step()
        gc.collect()
        torch.cuda.synchronize(device)
        grads = sum(p.grad.untyped_storage().nbytes() for p in setting.model.parameters() if p.grad is not None)
        there = torch.cuda.memory_allocated(device) - grads
        beside = max(0, there - sum(size for name, size in plan.resident.items() if "gradients" not in name))
        torch.cuda.reset_peak_memory_stats(device)
        setting.step()
        torch.cuda.synchronize(device)
        peak, reserved = torch.cuda.max_memory_allocated(device) - beside, torch.cuda.max_memory_reserved(device)
        notes = list(handle.executor.notes)
    for p in setting.model.parameters():
        p.grad = None
    _require(not notes, "; ".join(notes))
    text = f"{format_bytes(peak)} of {format_bytes(plan.budget_bytes)}, reserved {format_bytes(reserved)}"
    _require(peak <= plan.budget_bytes, f"over the budget: {text}")
    return text


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


# -- what only a device has ----------------------------------------------------------------------------------


def link(device: torch.device) -> str:
    """Rates, and by how much copies beside a computation make it longer; copies that hid nothing would double it."""
    found = ct.measure_link(device)
    rates = f"{found.to_host_bytes_per_s / 1e9:.1f} GB/s out, {found.to_device_bytes_per_s / 1e9:.1f} GB/s in"
    if device.type != "cuda":
        return rates
    from cairn.torch.offloading.tiers import open_tier
    from cairn.torch.offloading.transfers import Transfers

    transfers = Transfers(open_tier("host", 256 << 20, device), device)
    factor, sent = torch.randn(4096, 4096, device=device), torch.ones(256 << 20, dtype=torch.uint8, device=device)

    def compute() -> None:
        for _ in range(40):
            factor @ factor

    def copy_there_and_back(meanwhile: Callable[[], None] = lambda: None) -> None:
        transfers.begin_step()
        group = transfers.offload("sent", [sent], 0)
        group.prefetch()
        group.wait_out()
        meanwhile()
        group.tensors()

    alone, copies = median_ms(compute, device), median_ms(copy_there_and_back, device)
    both = median_ms(lambda: copy_there_and_back(compute), device)
    transfers.close()
    hidden = (alone + copies - both) / min(alone, copies)
    _require(hidden > 0.5, f"of copies beside a computation {hidden:.0%} are hidden")
    return f"{rates}; computing {alone:.1f} ms, copies {copies:.1f} ms, both {both:.1f} ms: {hidden:.0%} hidden"


def median_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a run, after one that does not count."""
    taken = []
    for _ in range(ROUNDS + 1):
        began = seconds_now(device)
        run()
        taken.append(1e3 * (seconds_now(device) - began))
    return statistics.median(taken[1:])


def tight(setting: Setting, host: str | None = "8GiB") -> ct.Plan:
    """A plan at a third of the way from the least budget to storing everything."""
    profile = ct.profile(setting.model, setting.x, loss_fn=setting.loss_fn, passes=1)
    least, most = (point.budget_bytes for point in ct.sweep(profile, 2, host_budget=host))
    return ct.plan(profile, least + (most - least) // 3, host_budget=host)


def state_after(setting: Setting, step: Callable[[], None]) -> list[Tensor]:
    """Gradients and random state after a step from one seed."""
    torch.manual_seed(7)
    step()
    grads = [p.grad.clone() for p in setting.model.parameters() if p.grad is not None]
    return [*grads, torch.rand(8, device=setting.x.device)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def waits(device: torch.device) -> str:
    """Within a step the host waits for the device no oftener than in the plain step, which does not."""
    setting, found = transformer(device), []
    profile = ct.profile(setting.model, setting.x, loss_fn=setting.loss_fn, passes=1)
    for host in (None, "8GiB"):
        least, most = (point.budget_bytes for point in ct.sweep(profile, 2, host_budget=host))
        for share in (0.0, 0.5):
            plan = ct.plan(profile, least + int(share * (most - least)), host_budget=host)
            with ct.apply(setting.model, plan):
                setting.step()
                setting.step()
                with waiting_is_an_error(device):
                    setting.step()
            found.append("offloading" if plan.offloads else f"selective recomputation of {len(plan.selective)} blocks")
    return ", ".join(found)


@contextlib.contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """As far as torch tells it: not what `torch.cuda.synchronize` and waiting for events take."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def other_stream(device: torch.device) -> str:
    """The caller computes on a stream of its own."""
    setting = transformer(device)
    plan = tight(setting)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def step() -> None:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            setting.step()
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)

    plain = state_after(setting, step)
    with ct.apply(setting.model, plan):
        for _ in range(3):
            _require(same(plain, state_after(setting, step)), "the planned step has other bits than the plain one")
    return f"{'offloading' if plan.offloads else 'nothing is offloaded'}, three steps"


def scaled(device: torch.device) -> str:
    """Float16 under autocast, with a gradient scaler and an optimizer."""
    if device.type != "cuda":
        return "not on this device"
    outcomes = []
    for planned in (False, True):
        setting = transformer(device)
        setting.surroundings = lambda: torch.autocast("cuda", torch.float16)
        optimizer, scaler = torch.optim.AdamW(setting.model.parameters()), torch.amp.GradScaler("cuda")
        with setting.surroundings():
            plan = tight(setting)
        torch.manual_seed(3)
        with ct.apply(setting.model, plan) if planned else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                with setting.surroundings():
                    loss = setting.loss_fn(setting.model(setting.x))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        outcomes.append([p.detach().clone() for p in setting.model.parameters()])
    _require(same(*outcomes), "three steps end in other parameters than without a plan")
    return "three steps"


class Exhausting(torch.autograd.Function):
    """Asks for more memory than there is, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("as if") if grad.device.type == "cpu" else _exhausted(grad.device)


def _exhausted(device: torch.device) -> Exception:
    torch.empty(1 << 45, dtype=torch.uint8, device=device)
    return AssertionError("32 TiB were there")


def out_of_memory(device: torch.device) -> str:
    """In the middle of a backward; the next step is the plain one."""
    setting = transformer(device)
    plan, plain = tight(setting), state_after(setting, setting.step)
    with ct.apply(setting.model, plan):
        layer = setting.model.get_submodule(f"layers.{LAYERS // 2}")
        hook = layer.register_forward_hook(lambda module, args, output: Exhausting.apply(output))
        try:
            setting.step()
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("there was no error")
        hook.remove()
        for _ in range(2):
            _require(same(plain, state_after(setting, setting.step)), "the next step has other bits")
    return "the steps behind it are plain"


def capture(device: torch.device) -> str:
    """Of a planned model in a CUDA graph is refused."""
    if device.type != "cuda":
        return "not on this device"
    setting = transformer(device)
    with ct.apply(setting.model, tight(setting)):
        setting.step()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                setting.model(setting.x)
        except ct.Unsupported as error:
            return str(error)
    raise AssertionError("it was not refused")


def other_device(device: torch.device) -> str:
    """A plan that was made on one device holds on another."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return "there is no other device"
    plan, other = tight(transformer(device)), torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    setting = transformer(other)
    return str(ct.verify(setting.model, plan, setting.x, loss_fn=setting.loss_fn))


@contextlib.contextmanager
def small_kernels() -> Iterator[None]:
    """Sizes at which the host, not the device, is what a step waits for."""
    before = {name: globals()[name] for name in ("LENGTH", "BATCH")}
    globals().update(LENGTH=16, BATCH=1)
    try:
        yield
    finally:
        globals().update(before)


def mechanism(device: torch.device) -> str:
    """What plans cost where kernels are small: one that keeps everything, and the tightest."""
    with small_kernels():
        setting = transformer(device)
        profile = ct.profile(setting.model, setting.x, loss_fn=setting.loss_fn, passes=1)
        plain = median_ms(setting.step, device)
        lines = [f"plain {plain:.2f} ms"]
        for name, budget in {"all kept": "100GiB", "tightest": ct.sweep(profile, 2)[0].budget_bytes}.items():
            plan = ct.plan(profile, budget)
            with ct.apply(setting.model, plan):
                setting.step()
                lines.append(f"{name} {median_ms(setting.step, device):.2f} ms (predicted {plan.step_ns / 1e6:.2f})")
    return ", ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
