"""What cannot be traced, or is no step of a trace, is refused by name."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
from torch import nn
from torch.nn import functional as F
from trace_support import (
    Plain,
    Small,
    linear_fixture,  # noqa: F401
    make,
    run_from,
    solved,
)

pytestmark = pytest.mark.usefixtures("seeded")


class InNumpy(torch.autograd.Function):
    """A function of torch's that computes elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Cube(torch.autograd.Function):
    """A function of torch's that computes in torch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def branch(net: Small, x: torch.Tensor) -> torch.Tensor:
    y = x @ net.weight
    return y if y.sum() > 0 else 2 * y


def sets_the_random_state(net: Small, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = F.dropout(x @ net.weight)
    torch.set_rng_state(state)
    return first + F.dropout(x @ net.weight)


def sets_data(net: Small, x: torch.Tensor) -> torch.Tensor:
    net.weight.data = net.weight.data * 0.9
    return x @ net.weight


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "a branch": (branch, "aten._local_scalar_dense"),
    "a mask as an index": (lambda net, x: (x @ net.weight)[x > 0], "aten.index.Tensor"),
    "as many rows as there are": (lambda net, x: net.weight[x.nonzero()[:, 0]], "aten.nonzero"),
    "a list": (lambda net, x: x @ net.weight * x.tolist()[0][0], "tolist"),
    "a function in numpy": (lambda net, x: InNumpy.apply(x @ net.weight), "numpy"),
    "data that is set": (sets_data, "sets the data of 1.weight"),
    "sparse gradients": (lambda net, x: net.table(torch.arange(8)) + x @ net.weight, "sparse_coo"),
    "a new shape": (lambda net, x: x.detach().clone().resize_(16, 16).sum() * net.weight, "aten.resize_"),
    "random numbers from elsewhere": (lambda net, x: x @ net.weight * random.random(), "Python's random"),
    "random state": (sets_the_random_state, "the loss differs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_named(name: str) -> None:
    function, said = REFUSED[name]
    model, x = nn.Sequential(nn.Linear(8, 8), Small(function)), torch.randn(8, 8)
    state, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ct.Unsupported, match=said) as caught:
        ct.trace(model, x, loss_fn=lambda y: y.square().mean())
    if said.startswith("aten"):
        assert "in '1'" in str(caught.value)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)


def test_what_looks_forbidden_and_is_not() -> None:
    """Numbers of the program's own text may be read, and functions of torch's operators are seen through."""

    def forward(net: Small, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(4)
        scale = 2.0 if bool((steps > 2).any()) else 3.0
        return Cube.apply(x @ net.weight) * scale * steps.tolist()[1]

    net, x = Small(forward), torch.randn(8, 8)
    traced = ct.trace(net, x, loss_fn=lambda y: y.square().mean(), passes=1)
    loss = net(x).square().mean()
    loss.backward()
    given = traced.run(solved(traced, 0.0))
    assert torch.equal(given.loss, loss) and torch.equal(given.grads["weight"], net.weight.grad)


def test_numbers_can_be_checked_instead() -> None:
    """Then the graph stands for the steps that read the same numbers."""

    def forward(net: Small, x: torch.Tensor) -> torch.Tensor:
        y = x @ net.weight
        if bool((x > 0).all()):
            y = y * 2
        if x.tolist()[0][0] == 1:
            y = y + 1
        return y[x.sum(1) > 8]

    net, x = Small(forward), torch.ones(8, 8)
    x[0, 0] = 3

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    with pytest.raises(ct.Unsupported, match='numbers="check"'):
        ct.trace(net, x, loss_fn=loss_fn)
    traced = ct.trace(net, x, loss_fn=loss_fn, passes=1, numbers="check")
    assert [node.name for node in traced.graph.nodes if "(checked)" in node.name] == [
        "_local_scalar_dense (checked)",
        "tolist (checked)",
    ]
    with torch.no_grad():
        net.weight.mul_(0.5)
    loss = loss_fn(net(x))
    loss.backward()
    given = traced.run(solved(traced, 0.0))
    assert torch.equal(given.loss, loss) and torch.equal(given.grads["weight"], net.weight.grad)
    for row, column, value in ((2, 2, 2.0), (0, 0, 4.0), (0, 1, -1.0)):
        other = x.clone()
        other[row, column] = value
        with pytest.raises(ct.PlanMismatch, match="another branch"):
            traced.run(args=other)


@pytest.mark.parametrize("name", ["bert"])
def test_a_mask_that_a_model_looks_at(name: str) -> None:
    step = make(name)
    with pytest.raises(ct.Unsupported, match="_local_scalar_dense"):
        ct.trace(step.model, **step.sample)
    traced = ct.trace(step.model, **step.sample, passes=1, numbers="check")
    state, plain = copy.deepcopy(step.model.state_dict()), Plain(step)
    plain.check(run_from(traced, step.model, state, solved(traced, 0.4)), step.model)


def test_a_step_without_a_loss() -> None:
    with pytest.raises(ValueError, match="loss_fn"):
        ct.trace(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="without gradients"):
        ct.trace(nn.Linear(4, 4), torch.randn(2, 4), loss_fn=lambda y: y.detach().sum())
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        ct.trace(nn.Linear(4, 4), torch.randn(2, 4), loss_fn={"labels": 1})
    with pytest.raises(ValueError, match="'refuse' or 'check'"):
        ct.trace(nn.Linear(4, 4), torch.randn(2, 4), loss_fn=torch.sum, numbers="ignore")


def test_schedules_of_other_graphs_are_refused(linear: tuple[nn.Module, ct.Traced]) -> None:
    _, traced = linear
    other = traced.graph.replace(fixed_bytes=traced.graph.fixed_bytes + 1)
    schedule = cairn.solve(other, None).require()
    with pytest.raises(ct.PlanMismatch, match="sha256"):
        traced.run(cairn.verify(other, schedule))
    with pytest.raises(TypeError, match=r"cairn\.verify"):
        traced.run(cairn.solve(traced.graph, None).schedule)
    renamed = traced.graph.replace(name="names do not count")
    assert traced.run(cairn.verify(renamed, cairn.solve(renamed, None).require())).peak_bytes


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        ({"model": "x"}, TypeError, "must be an nn.Module, not a str"),
        ({"kwargs": "abc"}, TypeError, "kwargs must map names"),
        ({"args": {"input": torch.ones(2, 4)}}, TypeError, "give it as kwargs="),
        ({"passes": -1}, ValueError, "passes is -1; at least 0"),
        ({"passes": 1.5}, TypeError, "passes must be an integer"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
    ],
)
def test_what_is_no_step_is_refused(given: dict[str, Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        ct.trace(**{"model": nn.Linear(4, 4), "args": torch.ones(2, 4), **given})


def test_another_step_is_refused(linear: tuple[nn.Module, ct.Traced]) -> None:
    model, traced = linear
    with pytest.raises(ct.PlanMismatch, match=r"args\[0\] is float32\[5, 8\]"):
        traced.run(args=torch.randn(5, 8))
    with pytest.raises(ct.PlanMismatch, match="float64"):
        traced.run(args=torch.randn(4, 8, dtype=torch.float64))
    with pytest.raises(ct.PlanMismatch, match="arranged"):
        traced.run(args=torch.randn(4, 8), kwargs={"more": 1})
    model.eval()
    with pytest.raises(ct.PlanMismatch, match="mode"):
        traced.run()
    model.train()
    model[0].weight.requires_grad_(False)
    with pytest.raises(ct.PlanMismatch, match="mode|gradient"):
        traced.run()
    model[0].weight.requires_grad_(True)
    traced.run()
    model[2].weight = nn.Parameter(torch.randn(8, 8))
    with pytest.raises(ct.PlanMismatch, match=r"2\.weight was replaced"):
        traced.run()
