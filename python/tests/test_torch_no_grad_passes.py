"""Blocks that a model's forward runs without gradients, too: such runs are no stages, the others are."""

from __future__ import annotations

import copy
from typing import Any

import cairn.torch as ct
import pytest
import torch
from torch import Tensor, nn

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Base(nn.Module):
    share = 0.7  # of plain training's peak is enough

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.mix = self.layers(), nn.Linear(WIDTH, WIDTH)

    def layers(self) -> nn.Module:
        return nn.ModuleList(Block() for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recycling(Base):
    """As many passes as are drawn, the last one with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        before, passes = torch.zeros_like(x), 1 + int(torch.randint(1, 3, ()))
        for index in range(passes):
            with torch.set_grad_enabled(torch.is_grad_enabled() and index == passes - 1):
                before = self.run(x + self.mix(before))
        return before


class SelfConditioning(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.run(x)
        return self.run(x + self.mix(before))


class Inference(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            before = self.run(x).mean()
        return self.run(x + self.mix(x) * float(before))


class StopGradient(Base):
    """With gradients first, without them afterwards, in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        seen = self.run(x)
        with torch.no_grad():
            self.blocks.eval()
            target = self.run(x + 0.1)
            self.blocks.train()
        return seen - self.mix(target)


class Sometimes(Base):
    """Half of the samples' steps have no pass without gradients at all, and some blocks run in that pass alone."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                x = x + self.blocks[2](self.blocks[0](x))
        return self.run(x + self.mix(x))


class InSequence(SelfConditioning):
    """Blocks that are children of a Sequential, some of them several at once; a Linear saves no more than its input."""

    share = 0.8

    def layers(self) -> nn.Module:
        children = [(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
        return nn.Sequential(*(module for group in children for module in group))

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Statistics(SelfConditioning):
    """Batch statistics, which both passes write."""

    def layers(self) -> nn.Module:
        return nn.ModuleList(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4))


class Frozen(Base):
    """The first pass has gradients on, but nothing in it has any; the second one has what the model trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.mix(self.run(x)))


class Twice(Base):
    """Two passes with gradients around one without."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.run(x)
        with torch.no_grad():
            target = self.run(first)
        return self.run(first + self.mix(target))


class Momentum(Base):
    """The block itself runs another one without gradients."""

    def layers(self) -> nn.Module:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Block()

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    target = self.inner(x)
                return self.inner(x) + target

        return nn.ModuleList(Outer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.mix(x))


KINDS = (
    Recycling, SelfConditioning, Inference, StopGradient, Sometimes, InSequence, Statistics, Frozen, Twice, Momentum
)  # fmt: skip


def loss_fn(y: Tensor) -> Tensor:
    return y.square().mean()


def made(kind: type[Base]) -> tuple[Base, Tensor]:
    torch.manual_seed(0)
    return kind(), torch.randn(128, WIDTH)


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for seed in range(3):
        model.zero_grad(set_to_none=False)
        torch.manual_seed(seed)
        loss = loss_fn(model(x))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [*(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]
    return found


@pytest.mark.parametrize("options", [{}, {"blocks": "blocks.*"}], ids=["by default", "named"])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_without_gradients_are_no_stages(kind: type[Base], options: dict[str, Any]) -> None:
    model, x = made(kind)
    want = steps(copy.deepcopy(model), x)
    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1, inside=kind is SelfConditioning, **options)
    free = ct.plan(profile, "1TiB")
    assert free.least_budget_bytes <= kind.share * free.plain_peak_bytes
    if options:
        found = [stage for stage in profile.stages if stage.kind == "block"]
        per_pass = len(model.blocks) if kind is not InSequence else len({stage.name for stage in found})
        assert len(found) == (2 if kind is Twice else 1) * per_pass
        assert {stage.call for stage in found} == ({0, 1} if kind is Twice else {0})
        assert not any(stage.keep_reason for stage in found)
    with ct.apply(model, ct.plan(profile, free.least_budget_bytes)) as handle:
        got = steps(model, x)
        assert not handle.executor.notes
    assert all(map(torch.equal, want, got))


@pytest.mark.parametrize("kind", [SelfConditioning, StopGradient])
def test_the_peak_is_as_predicted(kind: type[Base]) -> None:
    model, x = made(kind)
    profile = ct.profile(model, x, loss_fn=loss_fn)
    plan = ct.plan(profile, ct.plan(profile, "1TiB").least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok


def test_a_step_in_evaluation_mode_warns_that_it_follows_no_plan(recwarn: pytest.WarningsRecorder) -> None:
    model, x = made(StopGradient)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), "1GiB")
    with ct.apply(model, plan):
        model.eval()
        model(x)  # evaluation that forgets no_grad has no backward
        assert not recwarn
        with pytest.warns(UserWarning, match=r"StopGradient runs in evaluation mode.*Call model\.train\(\)"):
            model(x).sum().backward()
        model(x).sum().backward()  # once is enough
        model.train()
        model(x).sum().backward()
    assert not [w for w in recwarn if "follows no plan" in str(w.message)]
    in_eval = ct.plan(ct.profile(model.eval(), x, loss_fn=torch.sum, passes=1), "1GiB")
    with ct.apply(model, in_eval):
        model(x).sum().backward()
    assert not [w for w in recwarn if "follows no plan" in str(w.message)]


class Between(nn.Module):
    """Returns its argument, too, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = [x]
        for block in self.blocks:
            results.append(block(results[-1]))
        return results


def test_only_a_backward_of_the_planned_forward_warns_in_evaluation_mode(recwarn: pytest.WarningsRecorder) -> None:
    model, before, x = Between(), nn.Linear(8, 8), torch.randn(4, 8)
    plan = ct.plan(ct.profile(model, x, loss_fn=lambda output: output[-1].sum(), passes=1), "1GiB")
    with ct.apply(model, plan):
        model.eval()
        same, *results = model(before(x))
        same.sum().backward()
        assert not recwarn
        with pytest.warns(UserWarning, match="follows no plan"):
            model(before(x))[-1].sum().backward()
