"""Higher-order operators (torch.cond, scan, ...), compiled functions, custom operators and transforms in, between and
behind blocks: planned steps give the bits of plain ones within the budget, or are refused by name.
"""

# ruff: noqa: E402

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.base import _compat
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH, ROWS, DEPTH = 64, 64, 2
UNLIMITED = 2**40


def operator(name: str) -> Callable[..., torch.Tensor]:
    """A higher-order operator that this version of torch may not have."""
    module = pytest.importorskip(f"torch._higher_order_ops.{name}")
    return getattr(module, name)


def run_cond(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: linear(y).tanh(), lambda y: linear(y).sigmoid(), (x,))


def run_frozen_cond(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = torch.cond(x.sum() > 0, lambda y: y.sigmoid(), lambda y: y.tanh(), (x,))
    return torch.tanh(linear(x)) * gate


def run_while_loop(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        begin = torch.tensor(0), x.detach().sigmoid()
        _, gate = operator("while_loop")(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5 + 0.1), begin)
    return torch.tanh(linear(x)) * gate


def run_map(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return operator("map")(lambda row: torch.tanh(linear(row)), x.view(4, -1, WIDTH)).reshape_as(x)


def run_scan(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def step(state: torch.Tensor, item: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.sigmoid(item) * state + item
        return state, state.clone()

    _, states = operator("scan")(step, torch.zeros(32, WIDTH), torch.tanh(linear(x)).view(-1, 32, WIDTH), dim=0)
    return states.reshape_as(x) * 0.1


def run_associative_scan(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(linear(x))
    return operator("associative_scan")(lambda a, b: a * b + b, gate, dim=0, combine_mode="generic") * 0.1


def run_flex_attention(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    attention = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    with torch.no_grad():  # of a frozen encoder: its backward needs a GPU
        heads = x.detach().view(4, -1, 4, WIDTH // 4).transpose(1, 2)
        causal = lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf"))  # noqa: E731
        seen = attention(heads, heads, heads, score_mod=causal)
    return torch.tanh(linear(seen.transpose(1, 2).reshape_as(x)))


@functools.lru_cache
def compiled() -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x: torch.tanh(x) * torch.sigmoid(x) + x.sin(), backend="eager")


def run_compiled(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return compiled()(linear(x))


@torch.library.custom_op("cairn_tests::gate", mutates_args=())
def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * x


def _gate_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    share = torch.sigmoid(x)
    return grad * (share + x * share * (1 - share))


gate.register_autograd(_gate_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def run_custom(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return gate(linear(x))


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp().clamp(max=5)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        _, y = ctx.saved_tensors
        return grad * y * (y < 5)


def run_function(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Clamped.apply(linear(x)) * 0.1


def run_vmap(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: torch.tanh(linear(row)))(x)


class Layer(nn.Module):
    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.run, self.linear = run, nn.Linear(WIDTH, WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.run(self.linear, x)
        return x + self.out(x)


class Between(nn.Module):
    """Blocks between which the model calls an operator, and whose last ones run only in bodies of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(run_vmap) for _ in range(DEPTH))
        self.either, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.cond(x.sum() > 1e9, lambda y: y.sin(), lambda y: y.cos(), (block(x),))
        return torch.cond(x.sum() > 0, self.either, self.other, (x,))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = loss_fn(model(x))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_exact(model: nn.Module, x: torch.Tensor) -> ct.Profile:
    """A plan of the least memory gives the bits of plain steps, within its budget."""
    want = step(model, x)
    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    ct.verify(model, plan, x, loss_fn=loss_fn)
    with ct.apply(model, plan) as handle:
        assert all(map(torch.equal, want, step(model, x)))
        assert handle.executor.notes == []
    return profile


RUNS = (run_frozen_cond, run_while_loop, run_map, run_scan, run_associative_scan, run_flex_attention, run_compiled,
        run_custom, run_function, run_vmap)  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_steps_with_blocks_that_call_it_are_exact_within_the_budget(run: Callable[..., torch.Tensor]) -> None:
    torch._dynamo.reset()
    check_exact(nn.Sequential(*(Layer(run) for _ in range(DEPTH))), torch.randn(ROWS, WIDTH))


def test_a_block_that_calls_an_operator_is_not_looked_into() -> None:
    model, x = nn.Sequential(*(Layer(run_frozen_cond) for _ in range(DEPTH))), torch.randn(ROWS, WIDTH)
    blocks = [stage for stage in ct.profile(model, x, loss_fn=loss_fn, passes=1).stages if stage.kind == "block"]
    by_name = "calls the higher-order operator cond, which is recomputed as a whole"
    assert {stage.closed for stage in blocks} <= {by_name, "is compiled"}  # as the call compiles itself
    assert not any(stage.keep_reason for stage in blocks)


def test_what_an_operator_holds_outside_of_what_autograd_saves_keeps_its_block() -> None:
    torch._dynamo.reset()
    profile = check_exact(nn.Sequential(*(Layer(run_cond) for _ in range(DEPTH))), torch.randn(ROWS, WIDTH))
    reasons = {stage.keep_reason for stage in profile.stages if stage.kind == "block"}
    assert "keeps its input or output outside what autograd saves" in reasons


def test_operators_run_between_blocks_and_run_modules_in_their_bodies() -> None:
    torch._dynamo.reset()
    check_exact(Between(), torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("compiled_before", [False, True])
def test_tracing_refuses_an_operator_by_name(compiled_before: bool) -> None:
    torch._dynamo.reset()
    if compiled_before:  # as blocks that are compiled one by one do, for the rest of the process
        _compat.skip_tracing_of("cairn")
    with pytest.raises(ct.Unsupported, match="cond.*is a higher-order operator"):
        ct.trace(nn.Sequential(Layer(run_cond)), torch.randn(ROWS, WIDTH), loss_fn=loss_fn)
