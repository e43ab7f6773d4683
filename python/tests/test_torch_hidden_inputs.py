"""Blocks that read a value with gradients which they are not passed: it is an input of theirs, or they are refused."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import cairn.torch as ct
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 24
GLOBAL: dict[str, Any] = {}
LOCAL = threading.local()


class Shared:
    value: Any = None


class Block(nn.Module):
    """`weight` says where its weight comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.index, self.shared, self.held = 0, Shared(), Shared.value

    def work(self, x: Tensor, weight: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x) @ weight)))

    def weight(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x, self.weight())


class Model(nn.Module):
    """Before its blocks run, `put` says where they find a weight."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.source = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        for index, block in enumerate(self.blocks):
            block.index = index
        self.start()

    def start(self) -> None:
        pass

    def put(self, weight: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.put(torch.tanh(self.source))
        for block in self.blocks:
            x = block(x)
        return x


class InAttribute(Model):
    class block(Block):
        def weight(self) -> Tensor:
            return self.held

    def put(self, weight: Tensor) -> None:
        for block in self.blocks:
            block.held = weight


class OneForEach(InAttribute):
    def put(self, weight: Tensor) -> None:
        for block in self.blocks:
            block.held = torch.tanh(self.source)


class InGlobal(Model):
    class block(Block):
        def weight(self) -> Tensor:
            return GLOBAL["weight"]

    def put(self, weight: Tensor) -> None:
        GLOBAL["weight"] = weight


class InThread(Model):
    class block(Block):
        def weight(self) -> Tensor:
            return LOCAL.weight

    def put(self, weight: Tensor) -> None:
        LOCAL.weight = weight


class InObject(Model):
    """Rows of what an object has, by views."""

    class block(Block):
        def weight(self) -> Tensor:
            return self.shared.value["all"][self.index]

    def start(self) -> None:
        for block in self.blocks[1:]:
            block.shared = self.blocks[0].shared

    def put(self, weight: Tensor) -> None:
        self.blocks[0].shared.value = {"all": weight * torch.ones(3, 1, 1)}


class InPartial(Model):
    class block(Block):
        def weight(self) -> Tensor:
            return self.held()

    def put(self, weight: Tensor) -> None:
        for block in self.blocks:
            block.held = functools.partial(torch.clone, weight)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


class InFunction(InAttribute):
    """Handed to a function of one's own, which no mode of torch sees."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(Multiply.apply(self.norm(x), self.held))))


class Returned(InAttribute):
    """Handed on as it is, too."""

    class block(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.work(x, self.held), self.held

    def forward(self, x: Tensor) -> Tensor:
        self.put(torch.tanh(self.source))
        total = torch.zeros(())
        for block in self.blocks:
            x, weight = block(x)
            total = total + weight.sum()
        return x * total


class AcrossLayers(Model):
    """Later blocks use what the first has left."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(self.norm(x)))
            if self.index:
                hidden = hidden + self.held[0].left
            else:
                self.left = hidden
            return x + self.down(hidden)

    def start(self) -> None:
        for block in self.blocks[1:]:
            block.held = [self.blocks[0]]

    def put(self, weight: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.tanh(self.source)


class Repeated(InPartial):
    """One block, several times."""

    def forward(self, x: Tensor) -> Tensor:
        self.put(torch.tanh(self.source))
        for _ in range(4):
            x = self.blocks[0](x)
        return x


class Frozen(InAttribute):
    """Nothing but what the blocks are not passed is trained."""

    def start(self) -> None:
        self.blocks.requires_grad_(False)


class Cast(InAttribute):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Computed(nn.Module):
    """Weights that are computed at every use, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.index = 0
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = parametrizations.spectral_norm(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.down.weight.sum()


class Cached(Model):
    """... and kept for a while."""

    block = Computed
    is_cached = True

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached() if self.is_cached else contextlib.nullcontext():
            for block in self.blocks:
                x = block(x)
        return x @ torch.tanh(self.source)


class CachedCell(Cached):
    """... for other calls of the same block."""

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for _ in range(3):
                x = self.blocks[0](x)
        return x @ torch.tanh(self.source)


KINDS = (
    InAttribute, OneForEach, InGlobal, InThread, InObject, InPartial, InFunction, Returned, AcrossLayers, Repeated,
    Frozen, Cast, Cached, CachedCell,
)  # fmt: skip


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind().train(), torch.randn(256, WIDTH)


def loss_fn(y: Tensor) -> Tensor:
    return y.square().mean()


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = loss_fn(model(x))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


def planned_steps(kind: Callable[[], nn.Module], profile: ct.Profile) -> list[Tensor]:
    """Steps at the least budget."""
    model, x = made(kind)
    with ct.apply(model, ct.plan(profile, ct.plan(profile, "1TiB").least_budget_bytes)) as handle:
        found = steps(model, x)
        assert all("recorded again" in note for note in handle.executor.notes)
    return found


@pytest.mark.parametrize(
    ("kind", "inside"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in (InAttribute, InFunction, AcrossLayers, Cached))],
)
def test_what_a_block_is_not_passed_is_an_input_of_it(kind: type[Model], inside: bool) -> None:
    want = steps(*made(kind))
    model, x = made(kind)
    profile = ct.profile(model, x, loss_fn=loss_fn, inside=inside, passes=1)
    blocks = [stage for stage in profile.stages if stage.kind == "block"]
    assert not any(stage.keep_reason for stage in blocks)
    free = ct.plan(profile, "1TiB")
    assert free.least_budget_bytes < free.plain_peak_bytes
    reads = [bool(stage.captured) for stage in blocks]
    if kind is Cached:
        assert not any(reads)
    elif kind in (AcrossLayers, CachedCell):
        assert reads == [False, *(True for _ in reads[1:])]
    else:
        assert all(reads)
    assert all(map(torch.equal, want, planned_steps(kind, profile)))


def test_it_is_counted() -> None:
    """The gradient of what is shared waits through the whole backward, and its value is there all the time."""
    model, x = made(InAttribute)
    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    plan = ct.plan(profile, ct.plan(profile, "1TiB").least_budget_bytes)
    model, x = made(InAttribute)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok


class Stack(Model):
    """Skips in a list that all blocks know: the second half takes out what the first has put there."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(self.norm(x)))
            if self.index < 2:
                self.put(hidden)
                return x + self.down(hidden)
            return x + self.down(hidden + self.take())

        def put(self, hidden: Tensor) -> None:
            self.held.append(hidden)

        def take(self) -> Tensor:
            return self.held.pop()

    def start(self) -> None:
        self.blocks.append(self.block())
        self.blocks[3].index = 3
        skips: Any = self.empty()
        for block in self.blocks:
            block.held = skips

    def empty(self) -> Any:
        return []

    def put(self, weight: Tensor) -> None:
        pass


class Names(Stack):
    """The same by names in a dict."""

    class block(Stack.block):
        def put(self, hidden: Tensor) -> None:
            self.held[1 - self.index] = hidden

        def take(self) -> Tensor:
            return self.held.pop(self.index - 2)

    def empty(self) -> Any:
        return {}


@pytest.mark.parametrize("kind", [Stack, Names])
def test_a_block_that_takes_out_what_it_is_not_passed_is_kept(kind: type[Model]) -> None:
    want = steps(*made(kind))
    model, x = made(kind)
    profile = ct.profile(model, x, loss_fn=loss_fn, inside=False, passes=1)
    reasons = {stage.name: stage.keep_reason for stage in profile.stages if stage.kind == "block"}
    assert not reasons["blocks.0"]
    assert not reasons["blocks.1"]
    for name in ("blocks.2", "blocks.3"):
        assert "out of where it finds it" in reasons[name] or "changes the attribute 'held'" in reasons[name]
    assert all(map(torch.equal, want, planned_steps(kind, profile)))


class Replaced(InAttribute):
    """Another value stands there when a block is recomputed: it is kept."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            for other in self.blocks:
                other.held = torch.tanh(self.source + number)
            x = block(x)
        return x


def test_a_block_of_which_that_is_another_after_the_forward_is_kept() -> None:
    want = steps(*made(Replaced))
    model, x = made(Replaced)
    profile = ct.profile(model, x, loss_fn=loss_fn, inside=False, passes=1)
    assert [bool(s.keep_reason) for s in profile.stages if s.kind == "block"] == [True, True, False]
    assert all(map(torch.equal, want, planned_steps(Replaced, profile)))


class Writing(InAttribute):
    """What it is not passed is written in place."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.work(x, torch.eye(WIDTH))
            self.held.add_(y.sum(0))
            return y

    def forward(self, x: Tensor) -> Tensor:
        self.put(torch.tanh(self.source)[0].clone())
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[0].held


def test_a_block_that_writes_what_it_is_not_passed_is_refused_by_name() -> None:
    model, x = made(Writing)
    with pytest.raises(ct.Unsupported, match=r"'blocks\.0' reads .* not passed \(the attribute 'held' of block\)"):
        ct.profile(model, x, loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())
