"""Runs of blocks that no plan has: more in a step than while profiled, or in another order."""

# ruff: noqa: E402

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.base import memory
from cairn.torch.base.errors import RecomputationError
from torch import nn

ROWS, WIDTH = 512, 64
CPU = torch.device("cpu")


class Cell(nn.Module):
    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)
        self.norm, self.draws = nn.BatchNorm1d(WIDTH), draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (self.drop(y) if self.draws else y)


class Recurrent(nn.Module):
    """Runs its cells as often as it is told."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = nn.ModuleList([Cell(), Cell()]), nn.Linear(WIDTH, 1)
        self.depth = depth

    def order(self) -> list[int]:
        return [0, 1] * self.depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order():
            x = self.cells[index](x)
        return self.head(x).square().mean()


def sample() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    loss = model(x)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def planned(model: nn.Module, x: torch.Tensor, **options: Any) -> ct.Handle:
    profile = ct.profile(model, x, progress=False, **options)
    return ct.apply(model, ct.plan(profile, ct.plan(profile, 1 << 40).least_budget_bytes))


def peak_of(model: nn.Module, x: torch.Tensor) -> int:
    """How far a step rises above what is there before it."""
    step(model, x)
    model.zero_grad(set_to_none=True)
    meter = memory.meter_for(CPU)
    with meter:
        first = meter.mark()
        torch.manual_seed(7)
        model(x).backward()
        last = meter.mark()
    return int(meter.peak(first, last) - meter.level(first))


@pytest.mark.parametrize("inside", [False, True])
def test_more_runs_than_profiled_are_exact_and_recomputed(inside: bool) -> None:
    x, plain = sample(), Recurrent()
    model = Recurrent()
    with planned(model, x, inside=inside) as handle:
        for depth in (3, 6, 3, 8):
            plain.depth = model.depth = depth
            assert all(map(torch.equal, step(plain, x), step(model, x)))
            assert any("more often than planned, kept its inputs alone" in n for n in handle.executor.notes) == (
                depth > 3
            )


def test_more_runs_take_their_inputs_and_no_more() -> None:
    x, plain, model = sample(), Recurrent(), Recurrent()
    plainly = -peak_of(plain, x)
    plain.depth = 13
    plainly += peak_of(plain, x)
    with planned(model, x, inside=False):
        more = -peak_of(model, x)
        model.depth = 13
        more += peak_of(model, x)
    runs = 20
    assert more <= (runs + 8) * x.nbytes < plainly / 4  # one run at a time has what it saves


def test_blocks_in_another_order_are_exact_and_recomputed() -> None:
    class Shuffled(Recurrent):
        def order(self) -> list[int]:
            return [0, 1, 0] if self.depth == 3 else [1, 0, 0]

    x, plain, model = sample(), Shuffled(), Shuffled()
    with planned(model, x, inside=False) as handle:
        plain.depth = model.depth = 4
        assert all(map(torch.equal, step(plain, x), step(model, x)))
        assert any("kept its inputs alone" in note for note in handle.executor.notes)


def test_blocks_that_are_always_kept_are_kept_beyond_the_plan_as_well() -> None:
    x, plain, model = sample(), Recurrent(), Recurrent()
    with planned(model, x, inside=False, keep="cells.1") as handle:
        plain.depth = model.depth = 5
        assert all(map(torch.equal, step(plain, x), step(model, x)))
        notes = handle.executor.notes
    assert any(note.startswith("'cells.1") and note.endswith("and was kept") for note in notes)
    assert any(note.startswith("'cells.0") and "recomputed" in note for note in notes)


def test_two_backwards_and_gradients_of_a_part() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        loss = model(x)
        part = torch.autograd.grad(loss, model.cells[0].up.weight, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [*part, *(p.grad for p in model.parameters() if p.grad is not None)]

    x, plain, model = sample(), Recurrent(), Recurrent()
    with planned(model, x, inside=False):
        plain.depth = model.depth = 5
        assert all(map(torch.equal, run(plain), run(model)))


def test_an_input_written_after_the_forward_is_refused() -> None:
    class Writes(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.order():
                y, x = x, self.cells[index](x)
            if self.depth > 3:
                y.data.copy_(y)  # not counted as a version
                y.detach().add_(1)
            return self.head(x).square().mean()

    x, model = sample(), Writes()
    with planned(model, x, inside=False):
        model.depth = 5
        with pytest.raises((RecomputationError, RuntimeError), match="modified"):
            step(model, x)


def test_a_step_leaves_nothing_behind() -> None:
    x, model = sample(), Recurrent()
    with planned(model, x, inside=False):
        model.depth = 5
        gc.collect()
        gc.disable()
        try:
            found: list[weakref.ref[torch.Tensor]] = []
            hook = model.cells[1].register_forward_hook(lambda m, a, out: found.append(weakref.ref(out)))
            step(model, x)
            hook.remove()
            assert found and not any(ref() is not None for ref in found)
        finally:
            gc.enable()
