"""What a schedule cannot run exactly is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base.errors import PlanMismatch, RecomputationError, Unsupported
from cairn.torch.runtime.executor import Executor
from executor_models import INPUT, STAGES, WIDTH, Layer, Net, loss_of, net
from executor_support import assert_same, differing, every_block, expected_runs, from_input, planned, store_all, train
from refusals_support import refused, sound_afterwards
from torch import Tensor, nn
from torch.autograd import forward_ad


class Counting(Layer):
    """With a number that runs find and change."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0


class Erratic(Counting):
    """Does not do the same twice."""

    saves = True

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.count += 1
        again = self.count % 2 == 0
        if self.saves:
            return super().forward(x).sin() if again else super().forward(x)
        return super().forward(x) * (2.0 if again else 1.0) if again else super().forward(x) * 1.0


def test_a_block_that_saves_more_the_second_time() -> None:
    model = net(layer=Erratic)
    with (
        planned(model, STAGES, every_block(STAGES)),
        refused(RecomputationError, "layers.4", "same twice"),
    ):
        train(model, loss_of)


def test_a_block_that_saves_other_shapes_the_second_time() -> None:
    class Shrinks(Counting):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            self.count += 1
            return x + x[: 16 - self.count].sin().sum()

    model = net(layer=Shrinks)
    with planned(model, STAGES, every_block(STAGES)), refused(RecomputationError, "layers.4", "(15, 8)", "(14, 8)"):
        train(model, loss_of)


def test_values_are_compared_if_asked() -> None:
    class Drifts(Counting):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            self.count += 1
            return (x * self.count).sin()

    with (
        planned(model := net(layer=Drifts), STAGES, every_block(STAGES), determinism_check="values"),
        refused(RecomputationError, "layers.4", "values"),
    ):
        train(model, loss_of)
    model, plain = net(), net()
    with planned(model, STAGES, every_block(STAGES), determinism_check="values"):
        assert not differing(train(plain, loss_of), train(model, loss_of))
    with pytest.raises(ValueError, match="determinism_check"):
        Executor(model, STAGES, every_block(STAGES), determinism_check="strict")


def test_values_of_a_single_index_are_compared_too() -> None:
    """Of two columns that are equal: only their gradients tell which one was taken."""

    class Ties(Counting):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            x = torch.cat((x[:, :1], x), 1)
            self.count += 1
            return x[:, 1:] + x.index_select(1, torch.tensor([self.count % 2]))

    with (
        planned(model := net(layer=Ties), STAGES, every_block(STAGES), determinism_check="values"),
        refused(RecomputationError, "layers.4", "values", "(1,) int64"),
    ):
        train(model, loss_of)


def test_gradients_inside_a_forward() -> None:
    class Inner(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return y + slope

    model = net(layer=Inner)
    with planned(model, STAGES, every_block(STAGES)), refused(Unsupported, "layers.0", "inside its own forward"):
        train(model, loss_of)
    assert_same(model, loss_of, STAGES, store_all(STAGES))


def test_gradients_inside_the_models_forward() -> None:
    class Penalty(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = x.requires_grad_()
            y = self.layers[1](self.layers[0](self.enter(x)))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return self.leave(self.layers[4](self.layers[3](self.layers[2](y + slope))))

    torch.manual_seed(0)
    model = Penalty().train()
    with planned(model, STAGES, every_block(STAGES)), refused(Unsupported, "layers.1", "inside the model's forward"):
        train(model, loss_of)
    assert_same(model, loss_of, STAGES, store_all(STAGES))


def test_hooks_of_others_around_the_model() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        with torch.autograd.graph.save_on_cpu(), refused(Unsupported, "save_on_cpu"):
            loss_of(model)
        with (
            torch.autograd.graph.disable_saved_tensors_hooks("not here"),
            pytest.raises(RuntimeError, match="not here"),
        ):
            loss_of(model)
        sound_afterwards(model)


def test_data_parallel() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        with refused(Unsupported, "DataParallel"):
            model._replicate_for_data_parallel()
        with refused(Unsupported, "DataParallel"):
            model.layers[0]._replicate_for_data_parallel()
    model._replicate_for_data_parallel()


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "forward_ad"])
def test_transforms_of_a_planned_model(transform: str) -> None:
    """What a block computes again is computed on plain tensors, and would lack what the transform adds."""
    model = net()
    x = torch.randn(4, WIDTH)

    def loss(value: Tensor) -> Tensor:
        return model(value).sum()

    def run() -> None:
        if transform == "jvp":
            torch.func.jvp(loss, (x,), (x,))
        elif transform == "forward_ad":
            with forward_ad.dual_level():
                loss(forward_ad.make_dual(x, torch.ones_like(x))).backward()
        else:
            getattr(torch.func, transform)(loss)(x)

    with planned(model, STAGES, from_input(STAGES)):
        with refused(Unsupported, "transforms of torch.func", "forward-mode"):
            run()
        loss(x).backward()


def test_gradients_that_are_kept_in_attributes() -> None:
    """Of a tensor inside a block someone waits for, the one of the graph stays in its place."""

    class Keeps(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            self.seen = super().forward(x).repeat(40, 1)
            if self.seen.requires_grad:
                self.seen.retain_grad()
            return self.seen.sum(0).expand_as(x) + x

    plain, model = net(layer=Keeps), net(layer=Keeps)
    with planned(model, STAGES, from_input(STAGES)):
        for one in (plain, model):
            torch.manual_seed(0)
            loss_of(one).backward()
    for one, other in zip(plain.layers, model.layers, strict=True):
        assert one.seen.grad is not None and torch.equal(one.seen.grad, other.seen.grad)


def test_compiling_a_planned_model() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)), refused(Unsupported, "in the place of each block before planning"):
        torch.compile(model, backend="eager")(INPUT)


def test_blocks_compiled_before() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    plain = net(layer=layer)
    for index in range(5):
        plain.layers[index] = torch.compile(plain.layers[index], backend="aot_eager")
    model = copy.deepcopy(plain)
    ops = from_input(STAGES)
    with planned(model, STAGES, ops) as executor:
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == expected_runs(STAGES, ops)
    model = net(layer=layer)
    model.layers[1].compile(backend="aot_eager")
    with refused(Unsupported, "Sequential", "torch.compile(module)"):
        Executor(model, STAGES, ops).attach()


def test_a_plan_for_another_model() -> None:
    with refused(PlanMismatch, "layers.0", "Linear"):
        Executor(nn.Linear(3, 3), STAGES, from_input(STAGES))


def _planned_in_parts() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3))
    )
    x = torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    ct.apply(model, ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes))
    model(x).sum().backward()
    return model, x


def test_what_is_traced_runs_without_the_plan() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, x = _planned_in_parts()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == x.shape
    traced = torch.jit.trace(model.eval(), x, check_trace=False)
    assert torch.equal(traced(x), model(x))


def test_wrappers_of_tensors_are_no_memory_to_be_read() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model, x = _planned_in_parts()
    model(TwoTensor(x, x.clone())).sum()


def test_a_planned_forward_has_no_code_of_its_own_and_says_so() -> None:
    model, x = _planned_in_parts()
    assert not hasattr(model.forward, "__code__")
    with pytest.raises(Unsupported, match="remove the plan first"):
        torch.jit.script(model)
    assert model.forward.__wrapped__.__func__ is nn.Sequential.forward
