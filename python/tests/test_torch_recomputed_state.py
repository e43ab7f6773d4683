"""A recomputation finds counts, flags, buffers and statistics as the first forward found them, or is refused."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from attributes_support import UNLIMITED, Keeping
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


class Warming(nn.Module):
    """Does something else from its third run on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.runs = nn.Linear(32, 128), nn.Linear(128, 32), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        y = self.down(self.up(x).tanh().sin())
        return y if self.runs > 3 else y * 0.1


def test_blocks_run_again_find_the_counts_that_they_found_first() -> None:
    plain, x = nn.Sequential(*(Warming() for _ in range(4)), nn.Linear(32, 4)), torch.randn(64, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert not plan.is_plain and planned[0].runs == 0
    ct.apply(planned, plan)
    for _ in range(6):
        for model in (plain, planned):
            model(x).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True))
        assert [block.runs for block in planned[:4]] == [block.runs for block in plain[:4]]


class Masking(nn.Module):
    """Masks more positions, the more often it has run; what it counts in has many kinds."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.calls = self.masked = 0
        self.is_late, self.names, self.place, self.small = False, {"runs": 0}, Keeping(0), torch.zeros(())

    def count(self) -> int:
        self.calls += 1
        if self.how == "seldom":
            self.masked += self.calls % 4 == 0
            return self.masked
        if self.how == "a flag":
            self.is_late = self.calls > 5
            return 3 * self.is_late
        if self.how == "a dict":
            self.names["runs"] += 1
            return max(0, self.names["runs"] - 5)
        if self.how == "an object":
            self.place.number += 1
            return max(0, self.place.number - 5)
        self.small += 1
        return max(0, int(self.small) - 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[1]) >= self.count()
        return x + self.inner(x * mask[None, :, None])


@pytest.mark.parametrize("how", ["seldom", "a flag", "a dict", "an object", "a small tensor"])
def test_counts_that_come_to_matter_later_are_found_as_they_were(how: str) -> None:
    plain, x = nn.Sequential(*(Masking(how) for _ in range(3)), nn.Linear(32, 4)), torch.randn(32, 16, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert not plan.is_plain
    ct.apply(planned, plan)
    for _ in range(9):
        for model in (plain, planned):
            model(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True))


class Recalling(nn.Module):
    """From its sixth run on, adds what it left in the run before; in the place of a tensor, or in a large buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.runs, self.memory = how, 0, torch.zeros(32, 4, 32)
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.register_buffer("book", torch.zeros(32, 32, 32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        known = self.memory if self.how == "an attribute" else self.book[:, :4]
        y = x + self.inner(torch.cat([x[:, :4] + known, x[:, 4:]], 1))
        if self.runs > 5 and self.how == "an attribute":
            self.memory = y[:, :4].detach()
        elif self.runs > 5:
            self.book.data[:, :4] = y[:, :4].detach()
        return y


@pytest.mark.parametrize("how", ["an attribute", "a buffer's data"])
def test_large_memories_that_begin_to_matter_are_refused_and_not_passed_over(how: str) -> None:
    plain, x = nn.Sequential(*(Recalling(how) for _ in range(3)), nn.Linear(32, 4)), torch.randn(32, 16, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    most = ct.plan(profile, UNLIMITED, allow=["recompute"])
    ct.apply(planned, ct.plan(profile, most.least_budget_bytes, allow=["recompute"]))
    for step in range(9):
        plain(x).square().mean().backward()
        try:
            planned(x).square().mean().backward()
        except ct.RecomputationError as error:
            assert step >= 5
            assert "computed other values" in str(error)
            return
        pairs = zip(planned.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


class Slots:
    __slots__ = ("value",)


def leaving(how: str) -> tuple[Callable[..., None], Callable[[], torch.Tensor]]:
    """A hook that leaves a module's output somewhere, and what gets it from there."""
    left: dict[str, torch.Tensor] = {}
    slots, variable = Slots(), torch.zeros(())

    def rebind(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal variable
        variable = output

    ways: dict[str, tuple[Callable[..., None], Callable[[], torch.Tensor]]] = {
        "a variable": (rebind, lambda: variable),
        "a class": (lambda m, a, output: setattr(Keeping, "left", output), lambda: Keeping.left),
        "slots": (lambda m, a, output: setattr(slots, "value", output), lambda: slots.value),
        "a dict": (lambda m, a, output: left.__setitem__("it", output), lambda: left["it"]),
    }
    return ways[how]


@pytest.mark.parametrize("how", ["a variable", "a class", "slots", "a dict"])
def test_gradients_go_through_what_hooks_leave_outside_or_are_refused(how: str) -> None:
    plain, x = nn.Sequential(*(torch_models.Residual(32) for _ in range(4))), torch.randn(256, 32)
    planned = copy.deepcopy(plain)
    for model in (plain, planned):
        hook, left = leaving(how)
        parts = [part for part in model[2].modules() if isinstance(part, nn.Linear)]
        parts[0].register_forward_hook(hook)
        if model is planned:
            profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
            most = ct.plan(profile, UNLIMITED, allow=["recompute"])
            ct.apply(model, ct.plan(profile, most.least_budget_bytes, allow=["recompute"]))
        torch.manual_seed(1)
        model(x).square().mean().backward(retain_graph=True)
        is_lost = how == "a dict" and model is planned
        with (
            pytest.raises(ct.RecomputationError, match="has no autograd graph to the parameters")
            if is_lost
            else contextlib.nullcontext()
        ):
            left().square().mean().backward()
    are_equal = [torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True)]
    assert how == "a dict" or all(are_equal)


class Consuming(nn.Module):
    """Takes what it needs out of the dict and the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)), nn.Linear(32, 4))

    def forward(self, batch: dict[str, torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
        target = batch.pop("target")
        return nn.functional.cross_entropy(self.layers(batch.pop("x")) * weights.pop(), target)


def test_forwards_may_take_things_out_of_their_arguments() -> None:
    def batch() -> tuple[Any, ...]:
        return {"x": torch.randn(64, 32), "target": torch.randint(4, (64,))}, [torch.ones(4)]

    model, sample = Consuming(), batch()
    plan = ct.plan(ct.profile(model, sample, passes=1), UNLIMITED)
    assert ct.verify(model, plan, sample).ok
    assert len(sample[0]) == 2 and len(sample[1]) == 1
    ct.checkpoint(model, sample, budget=UNLIMITED, passes=1, progress=False)
    model(*batch()).backward()
    assert not model(*batch()).isnan()


class Routed(nn.Module):
    """Reads a buffer that is written behind it: by the model between its blocks, at the end, or by a hook."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.register_buffer("bias", torch.zeros(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * (1 + self.bias.sum())


def _balance(block: nn.Module, args: Any, output: torch.Tensor) -> None:
    block.bias.add_(0.1)


class Balanced(nn.Module):
    def __init__(self, where: str, count: int) -> None:
        super().__init__()
        self.blocks, self.where = nn.ModuleList(Routed(count) for _ in range(4)), where
        for block in self.blocks if where == "hook" else ():
            block.register_forward_hook(_balance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.where == "between":
                block.bias.add_(0.1)
        for block in self.blocks if self.where == "end" else ():
            block.bias.add_(0.1)
        return x


@pytest.mark.parametrize("count", [8, 4096])
@pytest.mark.parametrize("where", ["between", "end", "hook"])
def test_buffers_that_are_written_behind_a_block_are_found_as_they_were(where: str, count: int) -> None:
    plain, x = Balanced(where, count), torch.randn(128, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    most = ct.plan(profile, UNLIMITED, allow=["recompute"])
    plan = ct.plan(profile, most.least_budget_bytes, allow=["recompute"])
    kept = {stage.keep_reason for stage in profile.stages if stage.kind == "block"}
    written = "reads a tensor that is changed in place, or replaced in its modules, after it ran"
    assert kept == {"" if count == 8 else written}
    ct.apply(planned, plan)
    for _ in range(3):
        for model in (plain, planned):
            model(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True))
        assert all(torch.equal(p, q) for p, q in zip(planned.buffers(), plain.buffers(), strict=True))


class Covariances:
    """Running statistics of activations, as second-order optimizers keep them."""

    def __init__(self) -> None:
        self.of: dict[nn.Module, torch.Tensor] = {}

    def hook(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        x = args[0].detach()
        before = self.of.get(module, torch.eye(x.shape[1]))
        self.of[module] = 0.9 * before + 0.1 * x.t() @ x / len(x)

    __call__ = hook


def collect(covariances: Covariances, module: nn.Module, args: tuple[torch.Tensor]) -> None:
    covariances.hook(module, args)


@pytest.mark.parametrize("how", ["method", "object", "partial", "closure"])
def test_statistics_that_hooks_keep_in_objects_are_counted_once(how: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))), torch.randn(64, 64)
    plain, kept = copy.deepcopy(model), []
    for trained in (model, plain):
        found = Covariances()
        hook = {
            "method": found.hook,
            "object": found,
            "partial": functools.partial(collect, found),
            "closure": lambda module, args, found=found: found.hook(module, args),
        }[how]
        for layer in trained:
            layer[0].register_forward_pre_hook(hook)
        kept.append(found)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=list(model))
    assert all("'of'" in stage.keep_reason for stage in profile.stages if stage.kind == "block")
    ct.apply(model, ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes))
    for found in kept:
        found.of.clear()
    for _ in range(2):
        model(x).sum().backward()
        plain(x).sum().backward()
    assert all(map(torch.equal, *(found.of.values() for found in kept)))


def test_small_statistics_in_attributes_do_not_close_blocks() -> None:
    """They are compared after each later run, which is not among what the run does."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.gelu(self.up(self.norm(x)))
            self.sparsity = (y > 0).float().mean().detach()
            return x + self.down(y)

    model, x = nn.Sequential(*(Sparse() for _ in range(4))), torch.randn(128, 64)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert plan.selective and ct.verify(model, plan, x, loss_fn=torch.sum).ok
    with ct.apply(model, plan) as handle:
        for _ in range(3):
            model(x).sum().backward()
        assert not any("aten.equal" in note for note in handle.executor.notes)
