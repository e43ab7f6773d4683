"""Blocks with saved-tensor hooks of their own. Torch calls only the innermost hooks, and so not those of the plan."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
from cairn.torch.selective.saved_tensors import InnerHolder
from executor_support import backward, blocks, drop, is_valid, keep, save
from executor_support import planned as planned_by
from selective_support import mean_square
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.usefixtures("seeded")
Way = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


def under(hooks: Callable[[], Any]) -> Way:
    def way(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with hooks():
            return function(x)

    return way


def identity() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def rounding() -> Any:
    """What is read is not what was saved, so gradients tell whether these hooks were called."""
    return saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float())


def nested(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        x = torch.exp(x)
        with rounding():
            x = torch.tanh(function(x))
        return x * x


def selective(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    result = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    assert isinstance(result, torch.Tensor)
    return result


WAYS: dict[str, Way] = {
    "save_on_cpu": under(save_on_cpu),
    "identity": under(identity),
    "rounding": under(rounding),
    "nested": nested,
    "selective": selective,
    "offload": under(ct.offload),
}


class Hooked(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 256), nn.Linear(256, 16)
        self.drop, self.way = nn.Dropout(0.1), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.way(self._inner, self.norm(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.exp(torch.tanh(self.up(x)))))


class Net(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.layers, self.times = nn.ModuleList(Hooked(way) for _ in range(6)), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return x


def planned(way: Way, share: float = 0.0) -> tuple[nn.Module, torch.Tensor, ct.Plan]:
    """A model, its input, and a plan for a budget that is so much of the way from the least one to that of plain."""
    model, x = Net(way), torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=mean_square, passes=1, inside=False)
    top = ct.plan(profile, "1TiB")
    least, plain = top.least_budget_bytes, top.plain_peak_bytes + top.reserve_bytes
    return model, x, ct.plan(profile, least + int(share * (plain - least)))


def two_steps(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    torch.manual_seed(3)
    for _ in range(2):
        mean_square(model(x)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("way", "share"), [*((way, 0) for way in WAYS), ("nested", 0.4), ("selective", 0.4)])
def test_blocks_with_saved_tensor_hooks_are_recomputed_as_wholes(way: str, share: float) -> None:
    model, x, plan = planned(WAYS[way], share)
    assert not plan.kept_because
    assert plan.least_budget_bytes < 0.75 * (plan.plain_peak_bytes + plan.reserve_bytes)
    found = ct.verify(model, plan, x, loss_fn=mean_square)
    assert found.ok
    assert found.accumulated.peak_bytes <= plan.accumulated_peak_bytes <= 1.03 * found.accumulated.peak_bytes
    plain = copy.deepcopy(model)
    with ct.apply(model, plan):
        assert all(map(torch.equal, two_steps(model, x), two_steps(plain, x)))


def test_what_hooks_refer_to_is_dropped_with_what_they_keep() -> None:
    """The autograd graph of the first run stays, and refers to the pack hook."""
    kept: list[weakref.ref[nn.Module]] = []

    def hooked(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        alive.append([reference() is not None for reference in kept])
        owner = nn.Identity()
        kept.append(weakref.ref(owner))
        with saved_tensors_hooks(lambda tensor: owner(tensor), lambda tensor: owner(tensor)):
            return function(x)

    alive: list[list[bool]] = []
    net, stages = Net(hooked), blocks(*(f"layers.{number}" for number in range(3)))
    del net.layers[3:]
    again = [backward(3), save(1), save(2), backward(2), backward(1)]
    ops = [save(1), keep(2), drop("saved", 1), save(3), *again]
    assert is_valid(stages, ops)
    with planned_by(net, stages, ops):
        mean_square(net(torch.randn(64, 16))).backward()
    assert alive[:3] == [[], [True], [False, False]]


def test_profiles_say_why_such_blocks_have_no_options() -> None:
    profile = ct.profile(Net(under(identity)), torch.randn(64, 16), loss_fn=mean_square, passes=1)
    assert all("saved-tensor hooks of its own" in s.closed for s in profile.stages if s.kind == "block")
    assert any("saved-tensor hooks of its own" in note for note in profile.notes)


@pytest.mark.parametrize("way", ["rounding", "nested", "save_on_cpu"])
def test_a_graph_that_is_kept_is_differentiated_twice(way: str) -> None:
    model, x, plan = planned(WAYS[way])
    plain = copy.deepcopy(model.eval()).train()

    def twice(net: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loss = mean_square(net(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]

    with ct.apply(model.train(), plan):
        assert all(map(torch.equal, twice(model), twice(plain)))


def test_runs_beyond_the_plan_are_recomputed_too() -> None:
    model, x, plan = planned(under(rounding))
    plain = copy.deepcopy(model)
    model.times = plain.times = 3  # type: ignore[assignment]
    with ct.apply(model, plan):
        assert all(map(torch.equal, two_steps(model, x), two_steps(plain, x)))


def test_hooks_that_return_the_saved_tensor_itself_make_no_cycle() -> None:
    model, x, plan = planned(under(identity))
    gc.collect()
    gc.disable()
    try:
        with ct.apply(model, plan):
            mean_square(model(x)).backward()
        assert not any(type(found) is InnerHolder for found in gc.get_objects())
    finally:
        gc.enable()


def test_hooks_elsewhere_stay_as_they_are() -> None:
    """Torch's class is changed only while a block runs, and only for the thread in which it runs."""
    enter = saved_tensors_hooks.__enter__
    model, x, plan = planned(under(identity))
    with ct.apply(model, plan):
        two_steps(model, x)
    assert saved_tensors_hooks.__enter__ is enter
