"""Every kind of model under every kind of schedule: bit for bit the plain step, blocks run in the schedule's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from cairn.torch.base.stages import StageRef
from executor_support import (
    Op,
    assert_same,
    blocks,
    every_block,
    from_input,
    is_valid,
    outside,
    persistent,
    store_all,
    wild,
)
from torch import nn
from torch_models import ALL, Step

LAYERS = {
    "cnn": ("0", "1-2", "3", "4", "5", "6", "7", "8", "9", "10-11"),
    "resnet": tuple(f"layers.{i}" for i in range(6)),
    "vgg": (
        "0",
        "1-2",
        "3",
        "4-5",
        "6",
        "7",
        "8-9",
        "10",
        "11-12",
        "13",
        "14",
        "15-16",
        "17",
        "18-19",
        "20",
        "21-23",
        "24",
    ),
    "branches": ("enter", "left", "right", "twice", "twice", "leave"),
    "gpt2": tuple(f"transformer.h.{i}" for i in range(3)),
    "bert": tuple(f"bert.encoder.layer.{i}" for i in range(3)),
    "llama": tuple(f"model.layers.{i}" for i in range(3)),
    "mixtral": tuple(f"model.layers.{i}" for i in range(3)),
    "t5": tuple(f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)),
    "vit": tuple(f"vit.layers.{i}" for i in range(4)),
}
SCHEDULES: dict[str, Callable[[Sequence[StageRef]], list[Op]]] = {
    "store all": store_all,
    "every block": every_block,
    "from the input": from_input,
    "persistent": lambda stages: persistent(stages, 1),
    "wild": lambda stages: wild(stages, 2),
    "wilder": lambda stages: wild(stages, 5),
}


def step_of(name: str) -> Step:
    torch.manual_seed(1)
    return ALL[name]()


def stages_of(name: str) -> list[StageRef]:
    if name in ("cnn", "vgg"):
        return [*blocks(*LAYERS[name]), outside("after")]
    between = [outside("between")] if name == "t5" else []
    layers = blocks(*LAYERS[name])
    return [outside("before"), *layers[:2], *between, *layers[2:], outside("after")]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LAYERS)
def test_equal_to_plain(name: str, schedule: str) -> None:
    step, stages = step_of(name), stages_of(name)
    ops = SCHEDULES[schedule](stages)
    assert is_valid(stages, ops)
    assert_same(step.model, loss_of(step), stages, ops)


@pytest.mark.parametrize("name", LAYERS)
def test_equal_under_autocast(name: str) -> None:
    step, stages = step_of(name), stages_of(name)
    loss = loss_of(step)

    def cast(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model)

    assert_same(step.model, cast, stages, from_input(stages))


def loss_of(step: Step) -> Callable[[nn.Module], torch.Tensor]:
    def compute(model: nn.Module) -> torch.Tensor:
        output = model(*step.args, **step.kwargs)
        return output.loss if step.loss_fn is None else step.loss_fn(output)

    return compute


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5"])
def test_equal_with_a_cache(name: str) -> None:
    """Each run of a layer has its own cache, so that attention sees the tensors that it sees plainly."""
    step, stages = step_of(name), stages_of(name)
    step.model.config.use_cache = True
    for ops in (from_input(stages), persistent(stages, 4)):
        assert_same(step.model, loss_of(step), stages, ops, steps=1)


def test_router_logits_are_used_by_the_loss() -> None:
    step, stages = step_of("mixtral"), stages_of("mixtral")
    step.kwargs["output_router_logits"] = True
    step.model.config.router_aux_loss_coef = step.model.router_aux_loss_coef = 1.0
    for ops in (from_input(stages), every_block(stages), persistent(stages, 4)):
        assert_same(step.model, loss_of(step), stages, ops, steps=1)
