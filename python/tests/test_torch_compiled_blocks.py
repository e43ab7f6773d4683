"""Blocks that are compiled, and models that are compiled as wholes."""

# ruff: noqa: E402

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from plan_support import UNLIMITED
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_planned_block_or_model_that_is_compiled_says_what_to_compile() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))), torch.randn(8, 16)
    with ct.budget(model, "1GiB", x, loss_fn=torch.sum, passes=1, blocks=model):
        for compiled in (model, model[1]):
            with pytest.raises(ct.Unsupported, match="or a block of one, cannot be compiled: .* before planning"):
                torch.compile(compiled, backend="eager")(x)
            torch._dynamo.reset()


def test_compiled_blocks_are_planned_to_the_same_bits() -> None:
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(4))
            self.layers = nn.ModuleList(torch.compile(layer, backend=backend) for layer in layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of what ran before in this process
    model, plain, x = Compiled(), Compiled(), torch.randn(64, 32)
    plain.load_state_dict(model.state_dict())
    profile = ct.profile(model, x, passes=1)
    assert [stage.name for stage in profile.stages if stage.kind == "block"] == [f"layers.{i}" for i in range(4)]
    assert any("is compiled" in note for note in profile.notes)
    low, high = (point.budget_bytes for point in ct.sweep(profile, 2))
    handle = ct.apply(model, ct.plan(profile, (low + high) // 2))
    assert not handle.plan.is_plain
    for seed in range(3):
        losses = []
        for each in (model, plain):
            torch.manual_seed(seed)
            losses.append(each(x))
            losses[-1].backward()
        assert torch.equal(*losses)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    forwards = [vars(layer)["forward"] for layer in plain.layers]
    handle.remove()
    assert all(type(vars(a)["forward"]) is type(b) for a, b in zip(model.layers, forwards, strict=True))
    assert ct.verify(model, handle.plan, x).ok
    assert (
        len(torch._dynamo.utils.counters["recompile_limit"]) == 0 and not torch._dynamo.utils.counters["unimplemented"]
    )


def test_forwards_that_are_replaced_on_instances_are_planned_to_the_same_bits() -> None:
    """Of blocks, of their parts, and of a Sequential that would join its children."""

    def louder(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * type(self).forward(self, x)

    def patched(layers: nn.Sequential) -> nn.Sequential:
        for part in (layers, layers[1], layers[1].up, layers[2]):
            part.forward = types.MethodType(louder, part)
        return layers

    model, x = patched(nn.Sequential(*(torch_models.Residual(32) for _ in range(4)))), torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok
    with (
        ct.apply(model, plan),
        pytest.raises(ct.Unsupported, match=r"a plan is at work on 0, a part of this Sequential"),
    ):
        ct.profile(nn.Sequential(model, nn.Tanh()), x, loss_fn=torch.sum)
    with (
        ct.apply(model, plan),
        pytest.raises(ct.Unsupported, match="a plan is at work on a model of which this Residual is a part: remove"),
    ):
        ct.profile(model[2], x, loss_fn=torch.sum)
    assert isinstance(vars(model[1])["forward"], types.MethodType)
    joined = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.ReLU(inplace=True))
    profile = ct.profile(joined, x, loss_fn=torch.sum, passes=1)
    assert profile.stages[0].name == "0-1"
    plan = ct.plan(profile, UNLIMITED)
    joined.forward = types.MethodType(louder, joined)
    with pytest.raises(ct.PlanMismatch, match="replaced on the instance: plan again"):
        ct.apply(joined, plan)
    profile = ct.profile(joined, x, loss_fn=torch.sum, passes=1)
    assert ct.verify(joined, ct.plan(profile, UNLIMITED), x, loss_fn=torch.sum).ok


def test_blocks_that_run_compiled_functions_are_planned_to_the_same_bits() -> None:
    """Nobody's modes may see the functions, which would be compiled with what the modes do."""
    act = torch.compile(lambda x: 0.5 * x * (1 + torch.tanh(x + 0.04 * x.pow(3))), backend="aot_eager")

    class Layer(torch_models.Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.dropout(self.down(act(self.up(x))))

    class Acting(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return act(super().forward(x))

    torch._dynamo.reset()
    for kind, layer, count in ((nn.Sequential, Layer, 4), (Acting, torch_models.Residual, 0)):
        model, x = kind(*(layer(32) for _ in range(4))), torch.randn(64, 32)
        profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
        assert [stage.closed for stage in profile.stages].count("is compiled") == count
        plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
        assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_blocks_are_looked_for_around_compiled_forwards() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

        @torch.compile(backend="aot_eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.middle, self.leave = nn.Linear(32, 32), Compiled(), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.middle(self.enter(x)))

    torch._dynamo.reset()
    model, x = Around(), torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert [stage.name for stage in profile.stages if stage.closed == "is compiled"] == ["middle"]
    assert ct.verify(model, ct.plan(profile, UNLIMITED), x, loss_fn=torch.sum).ok


def test_models_that_are_compiled_as_wholes_are_refused_before_they_run(never_run: nn.Module) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ct.Unsupported, match="compiled as a whole"):
        ct.checkpoint(torch.compile(never_run, backend="eager"), x)
    with pytest.raises(ct.Unsupported, match="0 was compiled in place"):
        inside = nn.Sequential(nn.Linear(4, 4))
        inside[0].compile(backend="eager")
        ct.checkpoint(inside, x)
    compiled = type("Compiled", (nn.Linear,), {"forward": torch.compile(nn.Linear.forward, backend="eager")})
    with pytest.raises(ct.Unsupported, match="compiled as a whole"):
        ct.checkpoint(compiled(4, 4), x)
    never_run.compile(backend="eager")
    with pytest.raises(ct.Unsupported, match="compiled as a whole"):
        ct.checkpoint(never_run, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_of_torch_jit_are_refused_by_name() -> None:
    x = torch.randn(2, 4)
    traced = torch.jit.trace(nn.Linear(4, 4), x)
    with pytest.raises(ct.Unsupported, match="1 is a module of torch.jit"):
        ct.checkpoint(nn.Sequential(nn.Linear(4, 4), traced), x)
    with pytest.raises(ct.Unsupported, match="the model is a module of torch.jit"):
        ct.checkpoint(traced, x)
