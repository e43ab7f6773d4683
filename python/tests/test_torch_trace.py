"""cairn.torch.trace: the graph of a step is true in sizes and order, and its schedules run as they were judged."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import dataclasses
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import random_networks
import torch_models
from cairn.torch.base import memory
from cairn.torch.base.errors import TransferFailed
from cairn.torch.offloading.copy_streams import Copy, ThreadLanes
from cairn.torch.offloading.tiers import HostTier
from cairn.torch.tracing import interpreter
from cairn.torch.tracing.graph_program import LiveValues
from executor_support import group_of_one
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("seeded")
SEED = 5


def make(name: str) -> torch_models.Step:
    """Smaller ones where whole graphs would take long."""
    if name == "gpt2":
        pytest.importorskip("transformers")
        return torch_models.gpt2(layers=2, width=64, vocabulary=200, length=64)
    if name == "resnet":
        return torch_models.resnet((1, 1, 1), 8, 4, 64)
    return torch_models.made(name)


class Plain:
    """A plain step of a copy of the model: what a traced one must give, bit for bit."""

    def __init__(self, step: torch_models.Step) -> None:
        other = torch_models.Step(copy.deepcopy(step.model), step.args, step.kwargs, step.loss_fn)
        torch.manual_seed(SEED)
        self.loss = other.loss()
        self.loss.backward()
        self.model, self.random = other.model, torch.get_rng_state()

    def check(self, given: ct.Step, model: nn.Module) -> None:
        assert torch.equal(given.loss, self.loss)
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        assert set(given.grads) == set(grads)
        for name, grad in grads.items():
            assert torch.equal(given.grads[name], grad), name
        for (name, mine), theirs in zip(model.state_dict().items(), self.model.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), name
        assert torch.equal(torch.get_rng_state(), self.random)


def run_from(traced: ct.Traced, model: nn.Module, state: dict[str, Any], verified: Any) -> ct.Step:
    model.load_state_dict(state)
    torch.manual_seed(SEED)
    return traced.run(verified)


def solved(traced: ct.Traced, share: float, solver: str = "graph-search", **options: Any) -> cairn.Verified:
    """A schedule whose budget lies between the solver's least and storing everything."""
    limits = cairn.limits(traced.graph, solver=solver)
    budget = int(limits.least_bytes + share * (limits.store_all_bytes - limits.least_bytes))
    if solver == "graph-search":
        options.setdefault("iterations", 40)
    schedule = cairn.solve(traced.graph, budget, solver=solver, **options).require()
    return cairn.verify(traced.graph, schedule, budget)


# -- schedules run as they were judged -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet", "gpt2", "vit", "cnn", "branches"])
def test_results_are_those_of_plain_training_and_the_peak_is_the_predicted_one(name: str) -> None:
    step = make(name)
    traced = ct.trace(step.model, **step.sample)
    state, plain = copy.deepcopy(step.model.state_dict()), Plain(step)
    everything = run_from(traced, step.model, state, None)
    plain.check(everything, step.model)
    assert everything.peak_bytes == cairn.limits(traced.graph, solver="store-all").store_all_bytes
    assert everything.computed == len(traced.graph)
    in_order = cairn.Schedule.from_ops(traced.graph, traced._program.store_all())
    assert cairn.verify(traced.graph, in_order, everything.peak_bytes).replay.recompute_ns == 0
    peaks = []
    for share in (0.02, 0.3, 0.6):
        verified = solved(traced, share)
        given = run_from(traced, step.model, state, verified)
        plain.check(given, step.model)
        assert given.peak_bytes == given.predicted_peak_bytes == verified.replay.peak_bytes
        assert given.peak_bytes <= verified.budget_bytes < everything.peak_bytes
        assert given.computed > len(traced.graph)
        peaks.append(given.peak_bytes)
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("seed", range(16))
def test_whatever_a_network_does_in_place(seed: int) -> None:
    torch.manual_seed(seed)
    step = torch_models.Step(random_networks.Network(seed), (torch.randn(6, 6),), loss_fn=lambda output: output)
    state = copy.deepcopy(step.model.state_dict())
    try:
        plain = Plain(step)
    except RuntimeError as error:  # autograd refuses what this network does
        assert "inplace operation" in str(error) or "does not require grad" in str(error)
        with pytest.raises((RuntimeError, ValueError)):
            ct.trace(step.model, *step.args, loss_fn=step.loss_fn)
        return
    traced = ct.trace(step.model, *step.args, loss_fn=step.loss_fn, passes=1)
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, state[name]), name
    schedules = [None, *(solved(traced, share, "graph-online") for share in (0.0, 0.3, 0.6))]
    for verified in schedules:
        given = run_from(traced, step.model, state, verified)
        plain.check(given, step.model)
        if verified is not None:
            assert given.peak_bytes <= given.predicted_peak_bytes


def test_other_inputs_and_parameters() -> None:
    step = torch_models.branches()
    traced = ct.trace(step.model, **step.sample, passes=1)
    verified = solved(traced, 0.2)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.mul_(1.5)
    step.args, step.kwargs = (torch.randn(1024, 64),), {"scale": torch.rand(128)}
    plain = Plain(step)
    torch.manual_seed(SEED)
    plain.check(traced.run(verified, step.args, step.kwargs), step.model)
    first = step.args[0].clone()
    assert torch.equal(step.args[0], first)


def test_gradients_of_inputs_and_outputs_that_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(16, 8, requires_grad=True)
    traced = ct.trace(model, x, loss_fn=lambda y: y.square().mean(), keep_output=True, passes=1)
    given = traced.run(solved(traced, 0.0))
    output = model(x)
    output.square().mean().backward()
    assert torch.equal(given.outputs[0], output)
    assert torch.equal(given.grads["args[0]"], x.grad)
    assert torch.equal(given.grads["2.weight"], model[2].weight.grad)
    assert not given.loss.requires_grad


def test_a_given_generator_and_nested_derivatives() -> None:
    generator = torch.Generator().manual_seed(3)

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = (net.weight @ x * torch.rand(8, generator=generator)).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return gradient.square().mean()

    net, x = Small(forward), torch.randn(8, 8)
    traced = ct.trace(net, x, passes=1)
    assert generator.initial_seed() == 3
    loss = net(x)
    loss.backward()
    generator.manual_seed(3)
    given = traced.run(solved(traced, 0.0))
    assert torch.equal(given.loss, loss) and torch.equal(given.grads["weight"], net.weight.grad)


def test_autocast_is_recorded_and_not_needed_again() -> None:
    net, x = Small(lambda net, x: F.relu(x @ net.weight) @ net.weight), torch.randn(32, 8)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        traced = ct.trace(net, x, loss_fn=loss_fn, passes=1)
        loss = loss_fn(net(x))
    loss.backward()
    for surroundings in (torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with surroundings:
            given = traced.run()
        assert torch.equal(given.loss, loss) and torch.equal(given.grads["weight"], net.weight.grad)


# -- the graph -----------------------------------------------------------------------------------------------


def test_the_graph_is_what_the_step_is() -> None:
    step = make("gpt2")
    traced = ct.trace(step.model, **step.sample, name="a small GPT-2")
    graph, nodes = traced.graph, traced.graph.nodes
    assert graph.name == "a small GPT-2" and graph.provenance["torch"] == torch.__version__
    owned = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in step.model.state_dict().values()}
    tokens = step.kwargs["input_ids"].untyped_storage().nbytes()
    rest = graph.fixed_bytes - sum(owned.values()) - tokens
    assert 0 <= rest < 64  # buffers that are not saved, and literals
    views = [node for node in nodes if node.alias_of is not None]
    assert len(views) > len(nodes) / 4
    assert all(node.bytes == 0 and nodes[node.alias_of].alias_of is None for node in views)
    # two dropouts in each of two blocks, one in attention, one on the embedding
    once = [node for node in nodes if node.no_recompute]
    assert len(once) == 7 and all("bernoulli_" in node.name for node in once)
    backward = graph.backward_begins_at
    assert all(("(backward)" in node.name) == (v >= backward) for v, node in enumerate(nodes))
    assert any(node.name == "transformer.h.1.mlp.c_fc: addmm" for node in nodes)
    assert any(node.name == "transformer.h.1.mlp.c_fc: mm (backward)" for node in nodes)
    gradients = len([p for p in step.model.parameters() if p.requires_grad])
    assert sum(node.keep for node in nodes) == gradients + 1  # and the loss


@pytest.mark.parametrize("name", ["resnet", "gpt2"])
def test_every_size_and_workspace_is_the_allocators(name: str) -> None:
    step = make(name)
    traced = ct.trace(step.model, **step.sample, passes=1)
    program = traced._program
    tensors = [outside.tensor for outside in program.externals]
    values, marks = LiveValues(program, tensors), []
    with memory.CpuMeter() as meter, interpreter.below_everything(torch.device("cpu")):
        for op, v in program.store_all():
            if op == "drop":
                values.drop(v)
                continue
            begin = meter.mark()
            values.compute(v)
            marks.append((begin, meter.mark()))
        values.clear()
    some = False
    for node, (begin, end) in zip(traced.graph.nodes, marks, strict=True):
        assert meter.level(end) - meter.level(begin) == node.bytes, node.name
        peak = meter.peak(begin, end) - meter.level(begin)
        assert 0 <= peak - node.bytes <= node.workspace_bytes, node.name
        some = some or node.workspace_bytes > 0
    assert some


@pytest.mark.parametrize("name", ["resnet", "gpt2", "cnn"])
def test_everything_stored_takes_no_more_than_plain_training(name: str) -> None:
    step = make(name)
    traced = ct.trace(step.model, **step.sample, passes=0)
    with memory.not_collecting(), memory.CpuMeter() as meter:
        begin = meter.mark()
        loss = step.loss()
        loss.backward()
        end = meter.mark()
        del loss
        step.model.zero_grad()
    plain = traced.graph.fixed_bytes + meter.peak(begin, end)
    assert abs(traced.run().peak_bytes - plain) < 0.01 * plain


def test_what_an_operator_returns_together_need_not_stay_together() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    graph = ct.trace(model, torch.randn(4, 3, 12, 12), loss_fn=lambda y: y.square().mean(), passes=0).graph
    named: dict[str, list[cairn.Node]] = {}
    for node in graph.nodes:
        named.setdefault(node.name, []).append(node)
    on_its_way, kept = named["2: convolution_backward (backward)"]
    assert on_its_way.bytes == 4 * 8 * 10 * 10 * 4 and not on_its_way.keep
    assert kept.bytes == (4 * 8 * 9 + 4) * 4 and kept.keep
    copies = named["1: native_batch_norm (copy)"]
    assert sorted((node.bytes, node.keep) for node in copies) == [(32, False)] * 2 + [(32, True)] * 2


def test_two_traces_differ_in_times_only() -> None:
    step = make("resnet")

    def without_times(graph: cairn.Graph) -> str:
        data = json.loads(graph.to_json())
        for node in data["nodes"]:
            del node["cost_ns"]
        return json.dumps(data)

    first, second = (ct.trace(step.model, **step.sample, passes=1).graph for _ in range(2))
    assert without_times(first) == without_times(second)
    assert sum(node.cost_ns for node in first.nodes) > 0


def test_schedules_outlive_a_trace() -> None:
    step = torch_models.branches()
    first = ct.trace(step.model, **step.sample)
    verified = solved(first, 0.2)
    again = ct.trace(step.model, **step.sample, times_of=first.graph)
    assert again.graph == first.graph
    assert again.run(verified).peak_bytes == verified.replay.peak_bytes
    nodes = list(first.graph.nodes)
    nodes[3] = dataclasses.replace(nodes[3], workspace_bytes=nodes[3].workspace_bytes + 8)
    with pytest.raises(ct.PlanMismatch, match="node 3"):
        ct.trace(step.model, **step.sample, times_of=first.graph.replace(nodes=nodes))
    with pytest.raises(ct.PlanMismatch, match="another step"):
        ct.trace(step.model, **step.sample, times_of=first.graph.replace(fixed_bytes=0))


def test_collectives_are_performed_once_and_waited_for(tmp_path: Path) -> None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch without gloo")
    with group_of_one(tmp_path):

        def forward(net: Small, x: torch.Tensor) -> torch.Tensor:
            y = (x @ net.weight).tanh()
            total, parts = y.detach().exp(), [torch.empty(8, 8)]
            distributed.all_reduce(total)
            distributed.all_gather(parts, total * x)
            return (y * parts[0] + total).square().mean()

        net, x = Small(forward), torch.randn(8, 8)
        traced = ct.trace(net, x, passes=1)
        once = [node.name for node in traced.graph.nodes if node.no_recompute]
        assert once == ["exp+allreduce_", "allgather_"]
        loss = net(x)
        loss.backward()
        given = traced.run(solved(traced, 0.0))
        assert torch.equal(given.loss, loss) and torch.equal(given.grads["weight"], net.weight.grad)


def test_operations_that_are_alike_cost_alike() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    graph = ct.trace(model, torch.randn(8, 16), loss_fn=lambda y: y.sum(), passes=2).graph
    costs = {node.cost_ns for node in graph.nodes if node.name.endswith(": addmm")}
    assert len(costs) == 1


def test_tracing_leaves_everything_as_it_was() -> None:
    step = torch_models.cnn()
    step.loss().backward()
    before = copy.deepcopy(step.model.state_dict())
    grads = {name: (p.grad, p.grad.clone()) for name, p in step.model.named_parameters()}
    state, foreign = torch.get_rng_state(), random.getstate()
    ct.trace(step.model, **step.sample, passes=1)
    assert all(torch.equal(before[name], value) for name, value in step.model.state_dict().items())
    for name, p in step.model.named_parameters():
        assert p.grad is grads[name][0] and torch.equal(p.grad, grads[name][1])
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == foreign
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in step.model.modules())


def test_the_file_and_the_command_line(tmp_path: Path) -> None:
    step = torch_models.branches()
    traced = ct.trace(step.model, **step.sample, passes=1)
    traced.save(tmp_path / "graph.json")
    assert cairn.load(tmp_path / "graph.json") == traced.graph
    budget = str(cairn.limits(traced.graph).store_all_bytes * 9 // 10)
    subprocess.run(
        [sys.executable, "-m", "cairn", "solve", "graph.json", "--budget", budget, "-o", "schedule.json"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    schedule = cairn.Schedule.load(traced.graph, tmp_path / "schedule.json")
    given = traced.run(cairn.verify(traced.graph, schedule))
    assert given.peak_bytes <= int(budget)


# -- what is refused -------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A function with a weight."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.table = nn.Embedding(8, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


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
        with pytest.raises(ct.PlanMismatch, match="another way"):
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


@pytest.fixture
def linear() -> tuple[nn.Module, ct.Traced]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).train()
    return model, ct.trace(model, torch.randn(4, 8), loss_fn=lambda y: y.square().mean(), passes=1)


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


def with_transfers(traced: ct.Traced, count: int) -> list[tuple[str, int]]:
    """Everything stored, but the largest values of the forward wait for the backward on the host."""
    graph = traced.graph
    readers: list[list[int]] = [[] for _ in graph.nodes]
    shown = {node.alias_of for node in graph.nodes}
    for v, node in enumerate(graph.nodes):
        for dep in node.deps:
            readers[dep].append(v)
    begins = graph.backward_begins_at
    waiting = [
        v for v in range(begins) if v not in shown and readers[v] and readers[v][-1] >= begins and graph.nodes[v].bytes
    ]
    away = sorted(waiting, key=lambda v: -graph.nodes[v].bytes)[:count]
    before: dict[int, list[tuple[str, int]]] = {}
    after: dict[int, list[tuple[str, int]]] = {}
    for v in away:
        leaves = max([v, *(reader for reader in readers[v] if reader < begins)])
        after.setdefault(leaves, []).extend([("offload", v), ("drop", v)])
        before.setdefault(min(r for r in readers[v] if r >= begins), []).extend([("prefetch", v), ("discard", v)])
    ops: list[tuple[str, int]] = []
    for name, v in traced._program.store_all():
        computes = name == "compute"
        ops += [*(before.get(v, []) if computes else []), (name, v), *(after.get(v, []) if computes else [])]
    loss = next(v for v, node in enumerate(graph.nodes) if node.keep)
    return [*ops, ("offload", loss), ("drop", loss)]  # a result may end on the host


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_values_are_offloaded_to_the_host_and_back(name: str) -> None:
    step = make(name)
    traced = ct.trace(step.model, **step.sample, passes=0)
    state, plain = copy.deepcopy(step.model.state_dict()), Plain(step)
    machine = cairn.Machine("1GiB", "1GB/s", "1GB/s")
    peaks = []
    for count in (0, 6):
        ops = with_transfers(traced, count)
        schedule = cairn.Schedule.from_ops(traced.graph, ops, machine=machine)
        verified = cairn.verify(traced.graph, schedule, None)
        given = run_from(traced, step.model, state, verified)
        plain.check(given, step.model)
        assert given.peak_bytes <= given.predicted_peak_bytes  # nothing overlaps in the run
        assert given.host_peak_bytes <= verified.replay.host_peak_bytes
        peaks.append((given.peak_bytes, given.host_peak_bytes))
    assert peaks[1][0] < peaks[0][0] and peaks[1][1] > peaks[0][1] > 0


def test_copies_start_in_the_order_of_the_list_and_one_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make("cnn")
    traced = ct.trace(step.model, **step.sample, passes=0)
    ops = with_transfers(traced, 4)
    machine = cairn.Machine("1GiB", "1GB/s", "1GB/s")
    verified = cairn.verify(traced.graph, cairn.Schedule.from_ops(traced.graph, ops, machine=machine), None)
    threads, seen = threading.active_count(), []

    def submit(lanes: ThreadLanes, copy: Copy) -> None:
        seen.append((copy.kind, copy.what))
        plainly(lanes, copy)

    plainly = ThreadLanes.submit
    with monkeypatch.context() as patch:
        patch.setattr(ThreadLanes, "submit", submit)
        traced.run(verified)
    assert seen[: len(seen) - 1] == [op for op in ops if op[0] in ("offload", "prefetch")]  # then a result is fetched
    assert threading.active_count() == threads

    def write(*_: Any) -> None:
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "write", write)
        with pytest.raises(TransferFailed, match="broken"):
            traced.run(verified)
    assert threading.active_count() == threads
    assert traced.run(verified).host_peak_bytes > 0


def test_runs_leave_nothing_behind(linear: tuple[nn.Module, ct.Traced]) -> None:
    _, traced = linear
    verified = solved(traced, 0.0)
    peaks = [traced.run(verified).peak_bytes for _ in range(5)]
    assert len(set(peaks)) == 1
    unmeasured = traced.run(verified, measure=False)
    assert unmeasured.peak_bytes is None and unmeasured.predicted_peak_bytes == peaks[0]
