"""What a training loop may do to a planned model: each is done, or refused by name, and never silently wrong."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import io
import pickle
import queue
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import inside_support
import pytest
import torch
from cairn.torch.base import memory
from cairn.torch.base._compat import TORCH_VERSION, StorageRef, default_device
from cairn.torch.base.errors import PlanMismatch, RecomputationError, Unsupported
from cairn.torch.rerun_state import module_state
from cairn.torch.runtime.executor import Executor
from cairn.torch.runtime.step_run import Run
from cairn.torch.selective.saved_tensors import Holder, Lease
from executor_support import (
    Op,
    accepted,
    assert_same,
    backward,
    blocks,
    differing,
    drop,
    drop_input,
    every_block,
    expected_runs,
    from_input,
    group_of_one,
    is_valid,
    keep,
    no_collector,
    outside,
    persistent,
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
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Layer(nn.Module):
    """A block with everything that bites: dropout, batch statistics, a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.25)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Net(inside_support.Net):
    """Some layers between an embedding and a head."""

    def __init__(self, count: int = 5, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__(layer, count, WIDTH)


def net(count: int = 5, layer: Callable[[], nn.Module] = Layer) -> Net:
    torch.manual_seed(0)
    return Net(count, layer).train()


STAGES = [outside("before"), *blocks(*(f"layers.{i}" for i in range(5))), outside("after")]
ONLY_BLOCKS = blocks(*(f"layers.{i}" for i in range(5)))
INPUT = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(7))


def loss_of(model: nn.Module) -> Tensor:
    return model(INPUT).square().mean()


def test_generated_schedules_are_valid() -> None:
    for seed in range(100):
        for stages in (STAGES, ONLY_BLOCKS):
            assert is_valid(stages, wild(stages, seed))
            assert is_valid(stages, persistent(stages, seed))


@pytest.mark.parametrize("seed", range(25))
def test_random_schedules(seed: int) -> None:
    stages = (STAGES, ONLY_BLOCKS)[seed % 2]
    assert_same(net(), loss_of, stages, wild(stages, seed))
    assert_same(net(), loss_of, stages, persistent(stages, seed), steps=1)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_simulator_accepts(seed: int) -> None:
    stages = blocks(*(f"layers.{i}" for i in range(4 + seed % 3)))
    ops = accepted(stages, seed)
    assert is_valid(stages, ops)
    assert_same(net(len(stages)), loss_of, stages, ops)


#: Of four blocks, as text; none of them keeps everything that it stored until it was used.
WEAK = {
    "a kept output replaced by a later one": "keep 1, keep 2, drop_input 3, save 4, backward 4, drop_input 2, save 3, "
    "backward 3, keep 1, save 2, backward 2, save 1, backward 1",
    "saved, and then only the output kept": "save 1, save 2, keep 3, keep 2, drop saved 2, save 4, backward 4, save 3, "
    "backward 3, save 2, backward 2, backward 1",
    "saved twice": "keep 1, save 2, save 3, keep 3, drop saved 3, save 4, backward 4, save 3, backward 3, "
    "drop saved 2, save 2, backward 2, save 1, backward 1",
    "a later output moved on while an earlier one comes and goes": "keep 1, keep 2, drop output 1, drop_input 3, "
    "save 4, backward 4, keep 1, drop_input 2, save 3, backward 3, keep 1, save 2, backward 2, save 1, backward 1",
    "forwards after their backward": "save 1, save 2, save 3, save 4, backward 4, backward 3, keep 2, save 3, "
    "drop output 2, backward 2, keep 2, keep 3, backward 1",
}


def ops_of(text: str) -> list[Op]:
    words = [part.split() for part in text.split(", ")]
    makers: dict[str, Callable[..., Op]] = {"save": save, "keep": keep, "drop_input": drop_input, "backward": backward}
    return [drop(rest[0], int(rest[1])) if kind == "drop" else makers[kind](int(rest[0])) for kind, *rest in words]


@pytest.mark.parametrize("name", WEAK)
def test_weakly_persistent_schedules(name: str) -> None:
    stages = blocks(*(f"layers.{i}" for i in range(4)))
    ops = ops_of(WEAK[name])
    assert is_valid(stages, ops)
    assert_same(net(4), loss_of, stages, ops)


# -- memory --------------------------------------------------------------------------------------------------


class Probe(nn.Module):
    """Returns something new each time, saves its input and its output, and reports when it runs."""

    def __init__(self, report: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.report = report
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight)
        self.report(x, y)
        return y


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_alive_that_the_schedule_dropped(seed: int) -> None:
    """At the end of every run of a block, no more copies of blocks' outputs are in memory than by the schedule."""
    stages = blocks(*(str(i) for i in range(6)))
    ops = (wild if seed % 2 else persistent)(stages, seed)
    seen: list[collections.Counter[int]] = []
    storages: list[tuple[int, Any]] = []

    def reporter(stage: int) -> Callable[[Tensor, Tensor], None]:
        def report(x: Tensor, y: Tensor) -> None:
            storages.append((stage, StorageRef(y)))
            seen.append(collections.Counter(number for number, ref in storages[:-1] if ref.alive()))

        return report

    model = nn.Sequential(*(Probe(reporter(stage)) for stage in range(1, 7)))
    with planned(model, stages, ops) as executor:
        model(torch.randn(64)).sum().backward()
    assert executor.trace == expected_runs(stages, ops)
    for alive, resident in zip(seen, resident_before_runs(ops), strict=True):
        assert alive <= resident


def resident_before_runs(ops: list[Op]) -> list[collections.Counter[int]]:
    """By run of a block: how many copies of each stage's output are resident while it runs.

    What the last block returned is the model's own, until the next block has taken it.
    """
    there: set[tuple[str, int]] = set()
    found = []
    furthest = 0
    for op in ops:
        if op[0].startswith("forward"):
            in_forward = 0 < furthest < 6
            found.append(collections.Counter([stage for _, stage in there] + [furthest] * in_forward))
            furthest = max(furthest, op[1])
            there.add(("saved" if op[0] == "forward_save" else "output", op[1]))
            if op[0] == "forward_drop":
                there.remove(("output", op[1] - 1))
        elif op[0] == "backward":
            there -= {("saved", op[1]), ("output", op[1] - 1)}
        else:
            there.remove((op[1], op[2]))
    return found


def executor_objects() -> int:
    return sum(type(thing) in (Run, Holder, Lease) for thing in gc.get_objects())


def tensor_objects() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("ops", [every_block(STAGES), from_input(STAGES), wild(STAGES, 3)])
def test_fifty_steps_leave_nothing_without_the_collector(ops: list[Op]) -> None:
    model = net()
    with planned(model, STAGES, ops), no_collector():
        train(model, loss_of)
        tensors = tensor_objects()
        for step in range(50):
            train(model, loss_of, step)
        assert executor_objects() == 0
        assert tensor_objects() == tensors
        assert gc.collect() == 0


def test_a_backward_that_failed_leaves_nothing() -> None:
    """Nor does its error, which knows the frame that has the loss."""
    model = net()
    with planned(model, STAGES, from_input(STAGES)), no_collector():
        fail_twice(model)
        assert executor_objects() == 0
        assert gc.collect() == 0


def fail_twice(model: nn.Module) -> None:
    loss = loss_of(model)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.add_(1)
    for text in ("modified in place", "an earlier backward of this step failed"):
        try:
            loss.backward(retain_graph=True)
        except RecomputationError as error:
            assert text in str(error)
        else:
            raise AssertionError(text)


def test_forward_without_backward_leaves_nothing() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)), no_collector():
        loss = loss_of(model)
        assert executor_objects() > 0
        del loss
        assert executor_objects() == 0


def test_after_backward_only_the_loss_is_held() -> None:
    model = net()
    with planned(model, STAGES, wild(STAGES, 3)), no_collector():
        loss = loss_of(model)
        loss.backward()
        held = [thing for thing in gc.get_objects() if type(thing) in (Holder, Lease)]
        assert not held  # though the graph's nodes are still there
        del loss


def test_a_planned_model_is_freed_without_the_collector() -> None:
    from weakref import ref

    model = net()
    executor = Executor(model, STAGES, from_input(STAGES))
    executor.attach()
    train(model, loss_of)
    with no_collector():
        watched = ref(model), ref(model.layers[0])
        del model, executor
        assert [reference() for reference in watched] == [None, None]


# -- what stays as it is -------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    return [(name, dict(vars(module))) for name, module in model.named_modules()]


def test_removal_restores_the_model_exactly() -> None:
    model = net()
    before, names = snapshot(model), [list(model.state_dict()), [n for n, _ in model.named_parameters()]]
    with planned(model, STAGES, from_input(STAGES)):
        assert names == [list(model.state_dict()), [n for n, _ in model.named_parameters()]]
        train(model, loss_of)
    after = snapshot(model)
    assert [name for name, _ in after] == [name for name, _ in before]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(new[key] is old[key] for key in old if not key.startswith("_") and key != "training")


def test_a_forward_that_was_replaced_already_is_kept() -> None:
    model = net()
    calls: list[int] = []
    original = model.layers[2].forward

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    model.layers[2].forward = counting  # type: ignore[method-assign]
    with planned(model, STAGES, every_block(STAGES)):
        train(model, loss_of)
    assert len(calls) == 2
    assert vars(model.layers[2])["forward"] is counting


def test_a_forward_that_is_replaced_meanwhile_survives_removal() -> None:
    model, plain = net(), net()
    executor = Executor(model, STAGES, every_block(STAGES))
    executor.attach()
    planned_forward = model.forward
    model.forward = lambda *args: planned_forward(*args)  # type: ignore[method-assign]
    executor.detach()
    assert not differing(train(plain, loss_of), train(model, loss_of))
    assert executor.trace == []


def test_a_forward_that_is_bound_once_more() -> None:
    """As accelerate's unwrap_model does with the forward that it finds in a model."""
    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)) as executor:
        model.forward = types.MethodType(model.forward, model)
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == expected_runs(STAGES, from_input(STAGES))


def test_signature_is_the_models() -> None:
    model = net()
    expected = inspect.signature(model.layers[0].forward)
    with planned(model, STAGES, from_input(STAGES)):
        assert inspect.signature(model.layers[0].forward) == expected


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: reloaded(m)])
def test_copies_are_plain(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)) as executor:
        other = duplicate(model)
        assert all("forward" not in vars(part) and "__reduce_ex__" not in vars(part) for part in other.modules())
        expected = train(plain, loss_of)
        assert not differing(expected, train(other, loss_of))
        assert executor.trace == []
        assert not differing(expected, train(model, loss_of))
        assert executor.trace == expected_runs(STAGES, from_input(STAGES))


def reloaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


class CopiesItself(Layer):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def test_copies_by_the_class_itself_do_not_run_the_original() -> None:
    model = net(layer=CopiesItself)
    with planned(model, STAGES, from_input(STAGES)):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(INPUT).any()


def test_state_dict_round_trip() -> None:
    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)):
        train(model, loss_of)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        train(model, loss_of)
        model.load_state_dict(state)
        plain.load_state_dict(state)
        model.zero_grad()
        assert not differing(train(plain, loss_of, 4), train(model, loss_of, 4))


def test_executors_follow_one_another() -> None:
    model, plain = net(), net()
    for seed in range(3):
        with planned(model, STAGES, wild(STAGES, seed)):
            assert not differing(train(plain, loss_of, seed), train(model, loss_of, seed))
    executor = Executor(model, STAGES, from_input(STAGES))
    executor.attach()
    with pytest.raises(RuntimeError, match="attached"):
        executor.attach()
    executor.detach()
    executor.detach()


# -- kinds of forward ----------------------------------------------------------------------------------------


def test_inactive_without_gradients_and_in_evaluation() -> None:
    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)) as executor:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                torch.manual_seed(0)
                expected = plain(INPUT)
                torch.manual_seed(0)
                assert torch.equal(expected, model(INPUT))
        plain.eval(), model.eval()
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == []
        plain.train(), model.train()
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == expected_runs(STAGES, from_input(STAGES))


def test_active_in_evaluation_if_planned_for_it() -> None:
    model, plain = net().eval(), net().eval()
    ops = from_input(STAGES)
    with planned(model, STAGES, ops, in_eval=True) as executor:
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == expected_runs(STAGES, ops)


def test_several_forwards_before_a_backward() -> None:
    def loss(model: nn.Module) -> Tensor:
        first, second, third = (model(INPUT * k) for k in (1, 2, 3))
        return (first * third).mean() + second.square().mean()

    for ops in (from_input(STAGES), wild(STAGES, 1)):
        assert_same(net(), loss, STAGES, ops)


def test_forwards_whose_backwards_come_in_another_order() -> None:
    def run(model: nn.Module) -> dict[str, Any]:
        torch.manual_seed(5)
        first, second = loss_of(model), model(2 * INPUT).square().mean()
        first.backward()
        second.backward()
        return results(model, first + second)

    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)):
        assert not differing(run(plain), run(model))


def test_under_no_grad_in_parts() -> None:
    class Partly(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            with torch.no_grad():
                x = self.layers[1](self.layers[0](self.enter(x)))
            for layer in self.layers[2:]:
                x = layer(x)
            return self.leave(x)

    torch.manual_seed(0)
    model = Partly().train()
    for ops in (every_block(STAGES), from_input(STAGES), wild(STAGES, 2)):
        assert_same(model, loss_of, STAGES, ops, in_order=False)


class Holds(nn.Module):
    def __init__(self, value: nn.Module) -> None:
        super().__init__()
        self.value = value


@dataclasses.dataclass
class Pair:
    hidden: Tensor
    other: dict[str, Any]


class Structured(nn.Module):
    """Takes and returns nested containers, keywords, None and things that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, pair: Pair, extra: list[Tensor | None], *, flag: str, offset: Tensor) -> tuple[Any, ...]:
        assert flag == "yes" and extra[1] is None
        hidden = self.layer(pair.hidden) + offset + extra[0] * pair.other["weight"][0]
        return Pair(hidden, {"weight": (pair.other["weight"][0] * 2, 1.5), "name": "x"}), None, hidden.detach().sum()


class StructuredNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Structured() for _ in range(4))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        pair, offset = Pair(x * self.weight, {"weight": (self.weight * 3, 0)}), torch.linspace(0, 1, WIDTH)
        for layer in self.layers:
            pair, nothing, total = layer(pair, [offset, None], flag="yes", offset=offset)
            assert nothing is None and not total.requires_grad
        return pair.hidden * pair.other["weight"][0]


@pytest.mark.parametrize("seed", range(4))
def test_nested_arguments_and_results(seed: int) -> None:
    torch.manual_seed(0)
    stages = blocks(*(f"layers.{i}" for i in range(4)))
    assert_same(StructuredNet().train(), loss_of, stages, wild(stages, seed))


def test_views_between_blocks() -> None:
    """What a model does with an output in between, if only to look at it differently, does not keep it."""

    class Reshaping(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for layer in self.layers:
                x = layer(x).view(4, 4, WIDTH).transpose(0, 1).transpose(0, 1).reshape(16, WIDTH)
            return self.leave(x)

    torch.manual_seed(0)
    assert_same(Reshaping().train(), loss_of, STAGES, from_input(STAGES))


def test_an_output_changed_in_place_before_the_next_block() -> None:
    class InPlace(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for layer in self.layers:
                x = layer(x)
                x += 1
            return self.leave(x)

    torch.manual_seed(0)
    for seed in range(4):
        assert_same(InPlace().train(), loss_of, STAGES, wild(STAGES, seed))


def test_an_output_that_skips_blocks() -> None:
    class Skipping(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = first = self.layers[0](self.enter(x))
            for layer in self.layers[1:]:
                x = layer(x, scale=first)
            return self.leave(x + first)

    torch.manual_seed(0)
    for seed in range(4):
        assert_same(Skipping().train(), loss_of, STAGES, wild(STAGES, seed))


def test_outputs_that_only_the_loss_reads() -> None:
    class Auxiliary(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return torch.tanh(x).exp(), y, y.sigmoid().mean()

    class Sums(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x, total = self.enter(x), torch.zeros(())
            for index, layer in enumerate(self.layers):
                early, x, late = layer(x)
                total = total + early.mean() * (index % 2) + late
            return total

    torch.manual_seed(0)
    model = Sums(layer=Auxiliary).train()
    for seed in range(6):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))
    assert_same(model, loss_of, STAGES, from_input(STAGES))


def test_detached_between_blocks() -> None:
    class Detaching(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            outputs = []
            for layer in self.layers:
                x = layer(x.detach())
                outputs.append(x)
            return torch.stack(outputs)

    torch.manual_seed(0)
    for ops in (from_input(STAGES), every_block(STAGES), wild(STAGES, 1)):
        assert_same(Detaching().train(), loss_of, STAGES, ops, in_order=False)


def test_layers_that_save_nothing() -> None:
    class Rolls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.roll(1, 0) + 1

    layers = [Layer(), Rolls(), Rolls(), Layer(), Rolls()]
    model = net(layer=lambda: layers.pop())
    for seed in range(6):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))
    assert_same(model, loss_of, STAGES, from_input(STAGES))


def test_blocks_that_do_not_run_or_run_more_often() -> None:
    class Irregular(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for index in (0, 3, 3, 1):
                x = self.layers[index](x)
            return self.leave(x)

    torch.manual_seed(0)
    plain, model = Irregular().train(), None
    for seed in range(6):
        plain, model = Irregular().train(), None
        model = copy.deepcopy(plain)
        with planned(model, STAGES, wild(STAGES, seed)) as executor:
            assert not differing(train(plain, loss_of), train(model, loss_of))
            assert any("more often" in note for note in executor.notes)
            assert any("did not run" in note for note in executor.notes)


def test_the_whole_model_as_one_block() -> None:
    stages = blocks("")
    model, plain = net(), net()
    ops = [keep(1), save(1), backward(1)]
    with planned(model, stages, ops) as executor:
        assert not differing(train(plain, loss_of), train(model, loss_of))
        assert executor.trace == [("forward_keep", 1), ("forward_save", 1)]


def test_parts_of_a_sequential() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Layer(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    for stages in (blocks("0-1", "2", "3-4"), [*blocks("0-1"), outside("2"), *blocks("3-4")]):
        for ops in (from_input(stages), every_block(stages)):
            assert_same(model.train(), loss_of, stages, ops)


# -- kinds of backward ---------------------------------------------------------------------------------------


def both(stages: Any, ops: list[Op], run: Callable[[nn.Module], Any], model: Callable[[], nn.Module] = net) -> None:
    """Something done to a plain and to a planned model gives the same."""
    plain, other = model(), model()
    with planned(other, stages, ops):
        torch.manual_seed(3)
        expected = run(plain), results(plain, torch.zeros(()))
        torch.manual_seed(3)
        actual = run(other), results(other, torch.zeros(()))
    assert not differing(expected[1], actual[1])
    for first, second in zip(expected[0] or (), actual[0] or (), strict=True):
        assert torch.equal(first, second)


ALL_KINDS = pytest.mark.parametrize(
    "ops", [store_all(STAGES), every_block(STAGES), from_input(STAGES), *(wild(STAGES, seed) for seed in range(4))]
)


@ALL_KINDS
def test_retain_graph(ops: list[Op]) -> None:
    def run(model: nn.Module) -> None:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    both(STAGES, ops, run)


@ALL_KINDS
def test_two_losses(ops: list[Op]) -> None:
    class TwoHeads(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for layer in self.layers[:3]:
                x = layer(x)
            middle = x
            for layer in self.layers[3:]:
                x = layer(x)
            return middle.square().mean(), self.leave(x).square().mean()  # type: ignore[return-value]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return TwoHeads().train()

    def early_first(model: nn.Module) -> None:
        early, late = model(INPUT)
        early.backward(retain_graph=True)
        late.backward()

    def late_first(model: nn.Module) -> None:
        early, late = model(INPUT)
        late.backward(retain_graph=True)
        early.backward()

    def only_early(model: nn.Module) -> None:
        model(INPUT)[0].backward()

    for run in (early_first, late_first, only_early):
        both(STAGES, ops, run, model)


@ALL_KINDS
def test_autograd_grad(ops: list[Op]) -> None:
    def run(model: nn.Module) -> Any:
        assert isinstance(model, Net)
        x = INPUT.clone().requires_grad_()
        loss = model(x).square().mean()
        upper = torch.autograd.grad(loss, list(model.layers[3].parameters()), retain_graph=True)
        whole = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        loss.backward(inputs=list(model.layers[1].parameters()))
        return [*upper, *whole]

    both(STAGES, ops, run)


@ALL_KINDS
def test_batched_gradients(ops: list[Op]) -> None:
    def run(model: nn.Module) -> Any:
        x = INPUT.clone().requires_grad_()
        y = model(x)
        return torch.autograd.grad(y, x, torch.stack([y.detach(), y.detach() + 1]), is_grads_batched=True)

    both(STAGES, ops, run, lambda: net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())))


@ALL_KINDS
def test_double_backward(ops: list[Op]) -> None:
    def run(model: nn.Module) -> Any:
        x = INPUT.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().mean().backward()
        return [gradient, x.grad]

    both(STAGES, ops, run)


def test_a_second_backward_without_retain_graph_is_torchs_error() -> None:
    model = net()
    with planned(model, STAGES, from_input(STAGES)):
        loss = loss_of(model)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        plain = net()
        train(plain, loss_of)
        model.zero_grad(), plain.zero_grad()
        model.load_state_dict(plain.state_dict())
        assert not differing(train(plain, loss_of), train(model, loss_of))


def test_only_an_inner_tensor_is_used() -> None:
    """The loss reads a tensor from inside of a block, and no block's output."""

    class Leaking(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            inner: list[Tensor] = []
            handle = self.layers[3].up.register_forward_hook(lambda module, args, output: inner.append(output))  # type: ignore[union-attr]
            super().forward(x)
            handle.remove()
            return inner[0]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Leaking().train()

    for seed in range(4):
        both(STAGES, wild(STAGES, seed), lambda m: loss_of(m).backward(), model)
    both(STAGES, from_input(STAGES), lambda m: loss_of(m).backward(), model)


@pytest.mark.parametrize("frozen", [("enter", "layers.0", "layers.1"), ("layers.2",), ("layers.3", "layers.4"), ()])
def test_frozen_parameters(frozen: tuple[str, ...]) -> None:
    model = net()
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0].startswith(frozen) and frozen:
            parameter.requires_grad_(False)
    for ops in (every_block(STAGES), from_input(STAGES), wild(STAGES, 0), wild(STAGES, 1)):
        assert_same(model, loss_of, STAGES, ops, in_order=False)


def test_nothing_is_run_again_for_parts_without_gradients() -> None:
    model = net()
    for part in (model.enter, *model.layers[:3]):
        part.requires_grad_(False)
    with planned(model, STAGES, every_block(STAGES)) as executor:
        train(model, loss_of)
        assert [stage for kind, stage in executor.trace if kind == "forward_save"] == [6, 5]
    model.requires_grad_(False)
    with planned(model, STAGES, every_block(STAGES)) as executor:
        loss_of(model)
        assert executor.trace == []  # a run without gradients is no stage


def test_tied_parameters() -> None:
    model = net()
    model.layers[3].up = model.layers[0].up
    model.layers[4].down.weight = model.layers[1].down.weight
    for seed in range(4):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))


# -- surroundings --------------------------------------------------------------------------------------------


def test_random_state_is_not_preserved_if_asked() -> None:
    model = net()
    torch.manual_seed(0)
    loss = loss_of(model)
    state = torch.get_rng_state()
    with planned(model, STAGES, from_input(STAGES)):
        torch.manual_seed(0)
        loss = loss_of(model)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
    with planned(model, STAGES, from_input(STAGES), preserve_rng_state=False):
        torch.manual_seed(0)
        loss_of(model).backward()
        assert not torch.equal(torch.get_rng_state(), state)


def test_autocast_around_forward_alone_and_inside_the_model() -> None:
    class Mixed(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.enter(x)
            for index, layer in enumerate(self.layers):
                with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
                    x = layer(x.float())
            return self.leave(x)

    torch.manual_seed(0)
    model = Mixed().train()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(INPUT).float().square().mean()

    for ops in (from_input(STAGES), wild(STAGES, 1)):
        assert_same(model, loss, STAGES, ops)
        assert_same(model, loss_of, STAGES, ops)


def test_backend_switches_around_forward_alone() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(1, 2, 8, 3 * WIDTH).chunk(3, -1)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return x + y.reshape(16, WIDTH) + torch.zeros(WIDTH).to(x)

    def loss(model: nn.Module) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.device("cpu"):
            return loss_of(model)

    assert_same(net(layer=Attention), loss, STAGES, from_input(STAGES))


#: What is set for the forward alone: the attribute, its value there, and whose it is.
SWITCHED = {
    "float32 of all": ("fp32_precision", "tf32", torch.backends),
    "float32 of matrix products": ("fp32_precision", "tf32", torch.backends.cuda.matmul),
    "float32 of convolutions": ("fp32_precision", "ieee", getattr(torch.backends.cudnn, "conv", None)),
    "float16 sums": ("allow_fp16_reduced_precision_reduction", False, torch.backends.cuda.matmul),
    "bfloat16 sums": ("allow_bf16_reduced_precision_reduction", False, torch.backends.cuda.matmul),
    "float16 accumulation": ("allow_fp16_accumulation", True, torch.backends.cuda.matmul),
    "oneDNN": ("enabled", False, torch.backends.mkldnn),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_later_runs_find_the_switches_of_the_forward(name: str) -> None:
    attribute, wanted, owner = SWITCHED[name]
    if not hasattr(owner, attribute):
        pytest.skip("this torch has no such switch")
    before, found = getattr(owner, attribute), queue.SimpleQueue()  # a list would be put back
    model = net()
    model.layers[1].up.register_forward_hook(lambda module, args, output: found.put(getattr(owner, attribute)))
    with planned(model, STAGES, every_block(STAGES)):
        try:
            setattr(owner, attribute, wanted)
            loss = loss_of(model)
        finally:
            setattr(owner, attribute, before)
        loss.backward()
    assert [found.get_nowait(), found.get_nowait()] == [wanted, wanted]
    assert getattr(owner, attribute) == before


@pytest.mark.parametrize("how", ["nowhere", "in a context", "for the thread"])
def test_where_new_tensors_are_made_is_known(how: str) -> None:
    try:
        torch.set_default_device("meta" if how == "for the thread" else None)
        with torch.device("meta") if how == "in a context" else contextlib.nullcontext():
            assert default_device() == torch.empty(0).device
    finally:
        torch.set_default_device(None)


def test_power_iteration_sees_its_old_vectors() -> None:
    """A buffer that a block reads and writes."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    for seed in range(4):
        assert_same(net(layer=layer), loss_of, STAGES, wild(STAGES, seed))


def test_buffers_that_are_written_with_what_they_hold() -> None:
    """As observers of quantization, whose zero point does not move: a write that is counted is none of the caller's."""

    class Observes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int32))
            self.register_buffer("table", torch.ones(64, 512))

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            self.zero_point.copy_(torch.zeros(1, dtype=torch.int32))
            self.table.fill_(1.0)
            return super().forward((x - self.zero_point) * self.table[0, :WIDTH])

    assert_same(net(layer=Observes), loss_of, STAGES, from_input(STAGES), steps=3)


def test_a_large_buffer_that_is_written() -> None:
    class Counts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(64, 512))

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            self.table += 1
            return super().forward(x * self.table[0, :WIDTH])

    assert_same(net(layer=Counts), loss_of, STAGES, from_input(STAGES), steps=3)


@pytest.mark.parametrize("seed", range(4))
def test_buffers_on_a_device_are_compared_in_the_first_step_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing waits for the device, for which the CPU stands here; what is written without being counted is seen."""

    class Drifts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.ones(WIDTH))
            self.is_moving = False

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x * self.gain.clone(), scale=scale)
            if self.is_moving:
                self.gain.data.mul_(0.9)
            return y

    compared, same = [], module_state.same_bits
    monkeypatch.setattr(memory, "is_at_hand", lambda tensor: False)
    monkeypatch.setattr(module_state, "same_bits", lambda *pair: compared.append(pair) or same(*pair))
    model, plain = net(layer=Drifts), net(layer=Drifts)
    with planned(model, STAGES, wild(STAGES, seed) if seed else from_input(STAGES)):
        for step in range(4):
            for layer in (*model.layers, *plain.layers):
                layer.is_moving = step == 2
            compared.clear()
            assert not differing(train(plain, loss_of, step), train(model, loss_of, step))
            assert bool(compared) == (step == 0)


def test_forward_hooks_of_a_block_run_once_and_inner_ones_again() -> None:
    model, noted, calls = net(), [], queue.SimpleQueue()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        noted.append(name)
        calls.put(name)

    model.layers[1].register_forward_hook(functools.partial(note, "block"))
    model.layers[1].up.register_forward_hook(functools.partial(note, "inner"))
    with planned(model, STAGES, every_block(STAGES)):
        train(model, loss_of)
    assert [calls.get_nowait() for _ in range(calls.qsize())] == ["inner", "block", "inner"]
    assert noted == ["inner", "block"]  # what later runs of it fill is put back


def test_anomaly_detection() -> None:
    model, plain = net(), net()
    with planned(model, STAGES, from_input(STAGES)), torch.autograd.set_detect_anomaly(True):
        assert not differing(train(plain, loss_of), train(model, loss_of))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    with group_of_one(tmp_path):
        model, plain = net(), net()
        ops = from_input(STAGES)
        with planned(model, STAGES, ops) as executor:
            pair = DistributedDataParallel(plain), DistributedDataParallel(model)
            for step in range(3):
                assert not differing(*(train(one, loss_of, step) for one in pair))
                assert executor.trace == expected_runs(STAGES, ops)


shards = pytest.mark.skipif(TORCH_VERSION < (2, 7), reason="fully_shard needs streams there, which the CPU has not")


@shards
@pytest.mark.parametrize("seed", range(3))
def test_fully_sharded_blocks(tmp_path: Path, seed: int) -> None:
    """A block that runs again before its backward asks for its parameters, and a run that saves nothing gives them
    back.
    """
    from torch.distributed.fsdp import fully_shard

    def shard(model: Net) -> Net:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model

    def results(model: Net, step: int) -> list[Tensor]:
        torch.manual_seed(step)
        loss = loss_of(model)
        loss.backward()
        found = [loss.detach(), *(p.grad.full_tensor() for p in model.parameters()), *model.buffers()]
        model.zero_grad()
        return [tensor.clone() for tensor in found]

    with group_of_one(tmp_path):
        model, plain = net(), shard(net())
        ops = (from_input(STAGES), wild(STAGES, 1), persistent(STAGES, 2))[seed]
        with planned(model, STAGES, ops) as executor:
            shard(model)
            for step in range(2):
                assert all(map(torch.equal, results(plain, step), results(model, step)))
                assert executor.trace == expected_runs(STAGES, ops)


@shards
def test_a_sharded_model_is_planned(tmp_path: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with group_of_one(tmp_path):
        model = net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)))
        for layer in model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))  # casts the model's input, too
        options = {"loss_fn": torch.sum, "passes": 1, "blocks": "layers.*"}
        profile = ct.profile(model, INPUT, **options)
        plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
        assert not plan.is_plain and ct.verify(model, plan, INPUT, loss_fn=torch.sum).ok
        model = net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        for module in (model.layers[0][0], *model.layers, model):
            fully_shard(module)
        with pytest.raises(Unsupported, match=r"Linear inside of block 'layers\.0' is sharded by itself"):
            ct.profile(model, INPUT, **options)


def test_full_backward_hooks_run_once() -> None:
    model, calls = net(), []
    model.layers[1].register_full_backward_hook(lambda module, before, after: calls.append(1))
    with planned(model, STAGES, from_input(STAGES)):
        train(model, loss_of)
    assert len(calls) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_a_block(reentrant: bool) -> None:
    class Inner(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return x + checkpoint(super().forward, x, use_reentrant=reentrant)

    model = net(layer=Inner)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.track_running_stats = False  # torch's own checkpoint updates them twice
    for seed in range(3):
        assert_same(model, loss_of, STAGES, wild(STAGES, seed))


class Stashes(torch.autograd.Function):
    """Keeps a tensor outside of what autograd saves, and reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.stash = x.cos()
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert torch.equal(ctx.saved_tensors[0], ctx.saved_tensors[0])
        return grad * ctx.stash


def test_custom_functions() -> None:
    class Custom(Layer):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return Stashes.apply(super().forward(x))

    for seed in range(3):
        assert_same(net(layer=Custom), loss_of, STAGES, wild(STAGES, seed))


def test_models_in_threads() -> None:
    failures: list[Any] = []

    def work(seed: int) -> None:
        torch.manual_seed(seed)
        plain = Net(layer=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())).train()
        model = copy.deepcopy(plain)
        with planned(model, STAGES, wild(STAGES, seed)):
            for _ in range(20):
                for one in (plain, model):
                    loss_of(one).backward()
        if any(not torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)):
            failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


# -- refused, by name ----------------------------------------------------------------------------------------


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


# -- exceptions ----------------------------------------------------------------------------------------------


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


# -- what only looks at a planned model ------------------------------------------------------------------------


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
