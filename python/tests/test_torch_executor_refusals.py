"""What a schedule cannot run exactly is refused by name; exceptions in forwards and backwards."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base.errors import PlanMismatch, RecomputationError, Unsupported
from cairn.torch.runtime.executor import Executor
from executor_models import INPUT, STAGES, WIDTH, Layer, Net, loss_of, net
from executor_support import (
    Op,
    assert_same,
    backward,
    blocks,
    differing,
    drop,
    every_block,
    expected_runs,
    from_input,
    is_valid,
    no_collector,
    outside,
    planned,
    results,
    save,
    store_all,
    train,
    wild,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Any:
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value)


def sound_afterwards(model: nn.Module, stages: Any = STAGES, ops: list[Op] | None = None) -> None:
    """After an error, the next step of the same planned model is the plain one."""
    plain = copy.deepcopy(model)
    plain.zero_grad(), model.zero_grad()
    assert not differing(train(plain, loss_of), train(model, loss_of))


def test_a_mutated_keyword_argument() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        scale = torch.ones(WIDTH)
        loss = model(INPUT, scale=scale).square().mean()
        scale.mul_(2)
        with refused(RecomputationError, "'scale'", "layers.0", "in place"):
            loss.backward()
        sound_afterwards(model)


def test_a_mutated_tensor_in_a_nested_argument() -> None:
    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            return super().forward(x) if scale is None else super().forward(x, scale=scale["list"][1])

    model = net(layer=Takes)
    with planned(model, STAGES, every_block(STAGES)):
        scale = torch.ones(WIDTH)
        loss = model(INPUT, scale={"list": [0, scale]}).square().mean()
        scale.add_(1)
        with refused(RecomputationError, "['list'][1]", "scale", "layers.4"):
            loss.backward()
        sound_afterwards(model)


def test_a_mutated_tensor_inside_an_object() -> None:
    class Bag:
        def __init__(self, scale: Tensor) -> None:
            self.scale = scale

    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            return super().forward(x) if scale is None else super().forward(x, scale=scale.scale)

    model = net(layer=Takes)
    with planned(model, STAGES, every_block(STAGES)):
        bag = Bag(torch.ones(WIDTH))
        loss = model(INPUT, scale=bag).square().mean()
        bag.scale.add_(1)
        with refused(RecomputationError, "Bag.scale", "layers.4"):
            loss.backward()
        with refused(Unsupported, "Bag.scale", "layers.0"):
            model(INPUT, scale=Bag(torch.ones(WIDTH, requires_grad=True)))
        sound_afterwards(model)


def test_a_block_that_writes_into_an_object() -> None:
    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            y = super().forward(x)
            if scale is not None:
                scale.last = y
            return y

    class Bag:
        last: Tensor | None = None

    model = net(layer=Takes)
    with planned(model, STAGES, every_block(STAGES)):
        with refused(Unsupported, "layers.0", "Bag"):
            model(INPUT, scale=Bag())
        sound_afterwards(model)
    assert_same(model, lambda m: m(INPUT, scale=Bag()).square().mean(), STAGES, store_all(STAGES))


def test_a_mutated_list_of_numbers_is_the_old_one_again() -> None:
    class Takes(Layer):
        def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
            scale.append(1)
            return super().forward(x) * scale[0]

    def loss(model: nn.Module) -> Tensor:
        factors = [3.0]
        value = model(INPUT, scale=factors).square().mean()
        factors[0] = 5.0
        assert len(factors) == 6
        return value

    assert_same(net(layer=Takes), loss, STAGES, from_input(STAGES))


def test_a_mutated_positional_argument() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3))).train()
    stages = blocks("0", "1", "2")
    with planned(model, stages, from_input(stages)):
        x = INPUT.clone()
        loss = model(x).square().mean()
        x.add_(1)
        with refused(RecomputationError, "args[0]", "'0'"):
            loss.backward()
        sound_afterwards(model)


def test_a_parameter_changed_between_forward_and_backward() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with planned(model, STAGES, from_input(STAGES)):
        train(model, loss_of)
        loss = loss_of(model)
        optimizer.step()
        with refused(RuntimeError, "inplace"):
            loss.backward()
        sound_afterwards(model)
        loss = model(INPUT).sum()  # the head's own backward does not read its weight's old value
        with torch.no_grad():
            model.layers[4].up.weight.mul_(2)
        with refused(RecomputationError, "up.weight", "layers.4"):
            loss.backward()
        assert issubclass(RecomputationError, RuntimeError)  # as what autograd raises in plain training
        sound_afterwards(model)


@pytest.mark.parametrize("how", ["functional call", "parameter", "buffer"])
def test_what_is_replaced_between_forward_and_backward_is_there_for_the_backward(how: str) -> None:
    def results(model: Any) -> list[Tensor]:
        torch.manual_seed(1)
        layer = model.layers[4]
        weight = layer.up.weight
        if how == "functional call":
            others = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}
            loss = torch.func.functional_call(model, others, (INPUT,)).square().mean()
            return [loss, *torch.autograd.grad(loss, list(others.values())), *model.buffers()]
        loss = model(INPUT).square().mean()
        if how == "parameter":
            layer.up.weight = nn.Parameter(torch.zeros_like(weight))
        else:
            for part in model.modules():
                for name, buffer in part.named_buffers(recurse=False):
                    setattr(part, name, torch.zeros_like(buffer))
        loss.backward()
        assert layer.up.weight is weight or layer.up.weight.grad is None
        layer.up.weight = weight
        return [loss, *(p.grad for p in model.parameters()), *model.buffers()]

    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)):
        for _ in range(2):
            assert all(map(torch.equal, results(model), results(plain)))
            model.zero_grad()
            plain.zero_grad()
        sound_afterwards(model)


class Scaled(nn.Module):
    """A parametrization that autograd saves tensors for."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.tanh(weight).square().mean()


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.up, "weight", Scaled())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class CallingTwice(Net):
    """Each layer is called twice, with the weights of the first call where the model says so."""

    is_cached = True

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.enter(x)
        with parametrize.cached() if self.is_cached else contextlib.nullcontext():
            for layer in self.layers:
                x = layer(layer(x))
        return self.leave(x)


def test_weights_that_are_cached_in_the_forward_are_computed_again_in_the_backward() -> None:
    model, plain = net(layer=Parametrized), net(layer=Parametrized)
    with planned(model, STAGES, from_input(STAGES)):
        for step in range(2):
            found = []
            for one in (model, plain):
                torch.manual_seed(step)
                with parametrize.cached():
                    loss = loss_of(one)
                loss.backward()
                found.append(results(one, loss))
            assert not differing(*found)
        found = []
        for one in (model, plain):
            with parametrize.cached():  # in the backward, too
                loss = loss_of(one)
                loss.backward()
            found.append(results(one, loss))
        assert not differing(*found)
        sound_afterwards(model)


def test_weights_of_an_earlier_call_are_there_when_a_block_runs_again() -> None:
    torch.manual_seed(0)
    model = CallingTwice(2, Parametrized).train()
    stages = [outside("before"), *blocks(*(f"layers.{i // 2}" for i in range(4))), outside("after")]
    for ops in (every_block(stages), from_input(stages), wild(stages, 2)):
        assert_same(model, loss_of, stages, ops)
    model.is_cached = False
    assert_same(model, loss_of, stages, from_input(stages))


def test_a_training_flag_changed_between_forward_and_backward() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        loss = loss_of(model)
        model.eval()
        with refused(RecomputationError, "training flag", "layers.0"):
            loss.backward()
        model.train()
        sound_afterwards(model)


def test_a_large_buffer_changed_between_forward_and_backward() -> None:
    class Reads(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(64, 512))

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return super().forward(x * self.table[0, :WIDTH])

    model = net(layer=Reads)
    with planned(model, STAGES, from_input(STAGES)):
        train(model, loss_of)
        loss = loss_of(model)
        model.layers[2].table.add_(1)
        with refused(RecomputationError, "'table'", "layers.2"):
            loss.backward()
        sound_afterwards(model)


def test_a_block_that_changes_its_input() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.relu_(x))

    model = net(layer=Changes)
    with planned(model, STAGES, from_input(STAGES)), refused(Unsupported, "layers.0", "args[0]", "in place"):
        loss_of(model)
    assert_same(model, loss_of, STAGES, store_all(STAGES))


def test_a_kept_tensor_that_is_mutated_later() -> None:
    """Torch's own check does not look behind hooks; ours does."""
    shown: dict[nn.Module, Tensor] = {}  # by what ran last

    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            shown[self] = self.linear(x)
            return shown[self].sin()

    model = net(layer=Shows)
    ops = [save(1), save(2), save(3), drop("saved", 3), save(3), save(4), save(5), save(6), save(7)]
    ops += [backward(stage) for stage in range(7, 0, -1)]
    assert is_valid(STAGES, ops)
    with planned(model, STAGES, ops):
        loss = loss_of(model)
        with torch.no_grad():
            shown[model.layers[1]].mul_(2)
        with refused(RuntimeError, "inplace"):
            loss.backward()


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


class Fails(Layer):
    where = ""

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if Fails.where == "forward":
            raise KeyboardInterrupt
        if Fails.where == "again" and torch._C._current_graph_task_id() != -1:
            raise MemoryError("again")
        if Fails.where == "backward" and y.requires_grad:
            y.register_hook(_fail)
        return y


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "where, error", [("forward", KeyboardInterrupt), ("again", MemoryError), ("backward", ZeroDivisionError)]
)
@pytest.mark.parametrize("ops", [every_block(STAGES), from_input(STAGES), wild(STAGES, 3)])
def test_an_exception_leaves_the_next_step_sound(where: str, error: type[BaseException], ops: list[Op]) -> None:
    layers = [Layer(), Layer(), Fails(), Layer(), Layer()]
    model = net(layer=lambda: layers.pop())
    with planned(model, STAGES, ops), no_collector():
        state = torch.get_rng_state()
        Fails.where = where
        try:
            with pytest.raises(error):
                train(model, loss_of)
        finally:
            Fails.where = ""
        del state
        sound_afterwards(model)


def test_a_failed_backward_cannot_be_continued() -> None:
    layers = [Layer(), Layer(), Fails(), Layer(), Layer()]
    model = net(layer=lambda: layers.pop())
    with planned(model, STAGES, from_input(STAGES)):
        loss = loss_of(model)
        Fails.where = "again"
        try:
            with pytest.raises(MemoryError):
                loss.backward(retain_graph=True)
        finally:
            Fails.where = ""
        with refused(RecomputationError, "run the forward again"):
            loss.backward()


def test_buffers_and_random_state_survive_a_failing_run() -> None:
    layers = [Layer(), Layer(), Fails(), Layer(), Layer()]
    model = net(layer=lambda: layers.pop())
    with planned(model, STAGES, from_input(STAGES)):
        torch.manual_seed(0)
        loss = loss_of(model)
        before = results(model, loss)
        Fails.where = "again"
        try:
            with pytest.raises(MemoryError):
                loss.backward()
        finally:
            Fails.where = ""
        after = results(model, loss)
        changed = differing(before, after)
        assert all(name.startswith("gradient") for name in changed)


def test_detaching_between_forward_and_backward() -> None:
    model, plain = net(), net()
    executor = Executor(model, STAGES, from_input(STAGES))
    executor.attach()
    torch.manual_seed(0)
    loss = loss_of(model)
    executor.detach()
    loss.backward()
    assert not differing(train(plain, loss_of), results(model, loss))


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
