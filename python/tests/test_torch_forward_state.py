"""State that is there for the time of the forward alone, and gone when the backward recomputes a block."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.base.errors import RecomputationError
from torch import nn

ROWS, WIDTH = 64, 32

VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.stack = []
STACK: list[float] = []


class Region:
    scale = 1.0


class Block(nn.Module):
    def __init__(self, scale: Callable[[Block], Any]) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.scale(self))


class Model(nn.Module):
    """Blocks whose forward runs within a region of its own."""

    def __init__(self, scale: Callable[[Block], Any], region: Callable[[Model], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.region = nn.ModuleList(Block(scale) for _ in range(4)), region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region(self):
            for block in self.blocks:
                x = block(x)
        return x


def loss_fn(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def sample() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model(x))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def profile_of(model: nn.Module, x: torch.Tensor, inside: bool = False) -> ct.Profile:
    return ct.profile(model, x, loss_fn=loss_fn, inside=inside, progress=False)


def smallest(profile: ct.Profile) -> ct.Plan:
    return ct.plan(profile, ct.plan(profile, 1 << 40).least_budget_bytes)


def assert_exact(model: nn.Module, inside: bool = False, steps: int = 2) -> ct.Profile:
    """Steps at the least budget give the plain step's bits; the profile."""
    x = sample()
    plain = step(model, x)
    profile = profile_of(model, x, inside)
    with ct.apply(model, smallest(profile)):
        for _ in range(steps):
            assert all(map(torch.equal, plain, step(model, x)))
    return profile


def kept(profile: ct.Profile) -> list[str]:
    return [stage.keep_reason for stage in profile.stages if stage.kind == "block" and stage.keep_reason]


@contextlib.contextmanager
def _variable(model: nn.Module) -> Iterator[None]:
    token = VARIABLE.set(1.5)
    try:
        yield
    finally:
        VARIABLE.reset(token)


@contextlib.contextmanager
def _stacks(model: nn.Module) -> Iterator[None]:
    LOCAL.stack.append(1.5)
    STACK.append(1.5)
    Region.scale = 1.5
    try:
        yield
    finally:
        Region.scale = 1.0
        STACK.pop()
        LOCAL.stack.pop()


@pytest.mark.parametrize("inside", [False, True])
def test_context_variables_are_brought_back(inside: bool) -> None:
    profile = assert_exact(Model(lambda block: VARIABLE.get(), _variable), inside)
    assert not kept(profile)


@pytest.mark.parametrize(
    "scale",
    [
        lambda block: LOCAL.stack[-1],
        lambda block: LOCAL.stack[-1] if LOCAL.stack else 1.0,
        lambda block: STACK[-1] if STACK else 1.0,
        lambda block: Region.scale,
    ],
    ids=["thread-local", "thread-local with a default", "global stack", "attribute of a class"],
)
@pytest.mark.parametrize("inside", [False, True])
def test_other_state_keeps_its_blocks_for_a_named_reason(scale: Callable[[Block], Any], inside: bool) -> None:
    profile = assert_exact(Model(scale, _stacks), inside)
    reasons = kept(profile)
    assert len(reasons) == 4
    assert all("once the model's forward has returned" in reason for reason in reasons)
    assert any("set for the forward alone" in note for note in profile.notes)


def test_only_the_blocks_that_read_such_state_are_kept() -> None:
    model = Model(lambda block: 1.0, _stacks)
    model.blocks[1].scale = lambda block: Region.scale
    profile = assert_exact(model)
    reasons = {stage.name: stage.keep_reason for stage in profile.stages if stage.kind == "block"}
    assert [name for name, reason in reasons.items() if reason] == ["blocks.1"]


def test_state_that_changes_no_output_but_what_is_saved_keeps_the_block() -> None:
    class Doubles(torch.autograd.Function):
        """Its gradient is scaled by what it found in its forward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x * Region.scale)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0]

    class Scaled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Doubles.apply(x))

    model = Model(lambda block: 1.0, _stacks)
    model.blocks[2] = Scaled(lambda block: 1.0)
    assert len(kept(assert_exact(model))) == 1


def test_a_block_that_sets_a_variable_sets_it_once_a_step() -> None:
    counted: contextvars.ContextVar[int] = contextvars.ContextVar("counted", default=0)

    class Counts(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counted.set(counted.get() + 1)
            return super().forward(x)

    model, x = Model(lambda block: 1.0, lambda model: contextlib.nullcontext()), sample()
    model.blocks[1] = Counts(lambda block: 1.0)
    with ct.apply(model, smallest(profile_of(model, x))):
        before = counted.get()
        step(model, x)
    assert counted.get() == before + 1


def test_variables_of_other_threads_are_those_of_the_thread_that_ran_the_forward() -> None:
    model, x = Model(lambda block: VARIABLE.get(), lambda model: contextlib.nullcontext()), sample()
    profile = profile_of(model, x)
    found: list[Any] = []

    def work(scale: float) -> None:
        VARIABLE.set(scale)
        found.append(step(model, x))

    def run(scale: float) -> list[torch.Tensor]:
        thread = threading.Thread(target=work, args=(scale,))
        thread.start()
        thread.join()
        return found.pop()

    plain = run(2.5)
    with ct.apply(model, smallest(profile)):
        assert all(map(torch.equal, plain, run(2.5)))


def test_a_variables_tensor_that_was_written_is_named() -> None:
    class Adds(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + VARIABLE.get())

    scale = torch.full((1,), 1.5)
    model, x = Model(lambda block: 1.0, lambda model: contextlib.nullcontext()), sample()
    model.blocks[1] = Adds(lambda block: 1.0)
    token = VARIABLE.set(scale)
    try:
        with ct.apply(model, smallest(profile_of(model, x))):
            loss = loss_fn(model(x))
            scale.mul_(2)
            with pytest.raises(RecomputationError, match="context variable 'scale' was modified in place"):
                loss.backward()
    finally:
        VARIABLE.reset(token)


def test_a_region_around_the_model_in_the_loop_is_the_forwards() -> None:
    """The backward runs after the region in which the loop calls the model."""
    model, x = Model(lambda block: VARIABLE.get(), lambda model: contextlib.nullcontext()), sample()

    def run() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        with _variable(model):
            loss = loss_fn(model(x))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = run()
    with ct.apply(model, smallest(profile_of(model, x))):
        assert all(map(torch.equal, plain, run()))


@contextlib.contextmanager
def roomy(model: Model) -> Iterator[None]:
    STACK.append(1.0)
    try:
        yield
    finally:
        STACK.clear()


def scale_with_room(block: Block) -> float:
    if not STACK:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes.")
    return STACK[-1]


def test_where_memory_runs_out_in_the_recomputation_after_the_forward_no_block_is_kept_for_it():
    profile = ct.profile(Model(scale_with_room, roomy), torch.randn(ROWS, WIDTH), loss_fn=loss_fn, passes=1)
    assert any("there was no memory to recompute each block" in note for note in profile.notes)
    assert [stage.keep_reason for stage in profile.stages if stage.kind == "block"] == [""] * 4


# -- attributes and hooks ------------------------------------------------------------------------------------


class Toggled(nn.Module):
    """Blocks whose attributes, or hooks on whose parts, the model changes for the time of its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.shared = kind, Shared()
        self.blocks = nn.ModuleList(Adapted(self.shared if kind == "object" else None) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hooks = []
        for block in self.blocks:
            if self.kind == "attribute":
                block.is_adapted = True
            elif self.kind == "new attribute":
                block.extra = 1.25
            elif self.kind == "hook":
                hooks.append(block.up.register_forward_pre_hook(lambda module, given: (given[0] * 1.25,)))
            elif self.kind == "hook that is gone":
                block.up._forward_hooks.clear()
        self.shared.scale = 1.5
        for block in self.blocks:
            x = block(x)
            if self.kind == "mid-forward":
                block.is_adapted = not block.is_adapted
        self.shared.scale = 1.0
        for block in self.blocks:
            block.is_adapted = False
            vars(block).pop("extra", None)
            if self.kind == "hook that is gone":
                block.up.register_forward_hook(lambda module, given, out: out * 0.5)
        for hook in hooks:
            hook.remove()
        return x


class Shared:
    """What all blocks know."""

    scale = 1.0


class Adapted(Block):
    def __init__(self, shared: Shared | None) -> None:
        super().__init__(lambda block: 1.5 if block.is_adapted else 1.0)
        self.is_adapted, self.adapter, self.shared = False, nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * getattr(self, "extra", 1.0)
        if self.shared is not None:
            y = y * self.shared.scale
        return y + self.adapter(x) if self.is_adapted else y


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["attribute", "new attribute", "hook", "hook that is gone", "object", "mid-forward"])
def test_attributes_and_hooks_of_the_forward_are_brought_back(kind: str, inside: bool) -> None:
    profile = assert_exact(Toggled(kind), inside)
    assert not kept(profile), kept(profile)


def test_what_the_recomputation_finds_otherwise_is_there_again_after_it() -> None:
    model, x = Toggled("hook"), sample()
    with ct.apply(model, smallest(profile_of(model, x))):
        loss = loss_fn(model(x))
        for block in model.blocks:
            block.is_adapted, block.label = True, "later"
        own = model.blocks[0].up.register_forward_hook(lambda *_: None)
        loss.backward()
        assert all(block.is_adapted and block.label == "later" for block in model.blocks)
        assert list(model.blocks[0].up._forward_hooks) == [own.id]
        assert not model.blocks[0].up._forward_pre_hooks


def test_a_plan_says_what_it_brings_back_when_it_is_read_again() -> None:
    model, x = Toggled("attribute"), sample()
    plan = smallest(profile_of(model, x))
    again = ct.Plan.from_json(plan.to_json())
    assert list(again.restored_blocks) == list(plan.restored_blocks) != []
    plain = step(model, x)
    with ct.apply(model, again):
        assert all(map(torch.equal, plain, step(model, x)))
