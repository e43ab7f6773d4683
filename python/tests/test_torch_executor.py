"""What a training loop may do to a planned model: each is done, or refused by name, and never silently wrong."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.torch.runtime.executor import Executor
from executor_models import INPUT, STAGES, Layer, loss_of, net
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
    is_valid,
    keep,
    persistent,
    planned,
    save,
    train,
    wild,
)
from torch import Tensor, nn

ONLY_BLOCKS = blocks(*(f"layers.{i}" for i in range(5)))


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
