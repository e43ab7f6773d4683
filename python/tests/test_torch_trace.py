"""cairn.torch.trace: the graph of a step is true in sizes and order, and its schedules run as they were judged."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
import random_networks
import torch_models
from cairn.torch.base import memory
from cairn.torch.tracing import interpreter
from cairn.torch.tracing.graph_program import LiveValues
from executor_support import group_of_one
from torch import nn
from torch.nn import functional as F
from trace_support import (
    SEED,
    Plain,
    Small,
    linear_fixture,  # noqa: F401
    make,
    run_from,
    solved,
)

pytestmark = pytest.mark.usefixtures("seeded")


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


def test_runs_leave_nothing_behind(linear: tuple[nn.Module, ct.Traced]) -> None:
    _, traced = linear
    verified = solved(traced, 0.0)
    peaks = [traced.run(verified).peak_bytes for _ in range(5)]
    assert len(set(peaks)) == 1
    unmeasured = traced.run(verified, measure=False)
    assert unmeasured.peak_bytes is None and unmeasured.predicted_peak_bytes == peaks[0]
