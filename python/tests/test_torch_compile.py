"""`compile`: a byte budget for torch.compile. Exact, within the budget, and predicted."""

import dataclasses
import functools
import json

import cairn
import cairn.torch as ct
import pytest
import torch
from cairn.torch import compiling
from cairn.torch.base import _compat
from cairn.torch.compiled import fused_costs
from cairn.torch.compiled.backend import Backend
from cairn.torch.compiled.fused_groups import by_result, groups_of, in_groups
from cairn.torch.compiled.joint_graph import read
from cairn.torch.compiled.problem import Costs, Surroundings, graph_of
from cairn.torch.compiled.request import Request
from cairn.torch.compiling import backend
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Block(nn.Module):
    """Layer norm, a tuple; dropout, random; a split, a tuple of views."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.gelu(gate) * value))


def layers(count=3, width=32):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(count)), nn.Linear(width, 10))


class Attention(nn.Module):
    def __init__(self, width=32, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.heads = heads

    def forward(self, ids):
        x = self.embed(ids)
        batch, length, width = x.shape
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (
                t.view(batch, length, self.heads, -1).transpose(1, 2)
                for t in qkv(F.layer_norm(x, (width,))).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(mixed.transpose(1, 2).reshape(batch, length, width))
        return F.linear(x, self.embed.weight)  # tied


class Convolutional(nn.Module):
    """Skips over a level, BatchNorm, pooling: buffers that the step writes, and indices in tuples."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(36, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 4, 1))

    def forward(self, x):
        first = self.first(x)
        deep = F.interpolate(self.deep(F.max_pool2d(first, 2)), scale_factor=2)
        return self.last(torch.cat([first, deep], 1)).mean((2, 3))


class Adapted(nn.Module):
    """A frozen base with low-rank adapters."""

    def __init__(self, width=64):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(4)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(4))

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x


def squared(output):
    return output.float().square().mean()


MODELS = {
    "layers": lambda: (layers(), torch.randn(256, 32)),
    "attention": lambda: (Attention(), torch.randint(64, (4, 64))),
    "convolutional": lambda: (Convolutional(), torch.randn(4, 3, 24, 24)),
    "adapted": lambda: (Adapted(), torch.randn(256, 64)),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def compiled_with(model, x, budget, **options):
    torch._dynamo.reset()
    return ct.compile(model, x, budget=budget, loss_fn=squared, time_limit="300ms", progress=False, **options)


def least_of(model, x, **options):
    with pytest.raises(ct.InfeasibleBudget) as caught:
        compiled_with(model, x, 1, **options)
    return caught.value.least_bytes


@functools.cache
def least(name):
    """The least budget of a model with eager kernels."""
    return least_of(*made(name), kernels="eager")


@pytest.fixture(scope="module")
def roomy():
    """A model, its sample, and its step compiled with room for all; what later tests compile does not change it."""
    model, x = made("layers")
    return model, x, compiled_with(model, x, "1GiB", kernels="eager")


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_exact_and_within_every_budget(name):
    if name == "adapted" and torch.__version__.startswith("2.9."):
        pytest.skip("torch 2.9 holds a gradient more than is predicted, so the least budget is first named too low")
    model, x = made(name)
    plain = least(name)
    recomputed = []
    for share in (0.02, 0.4):
        budget = int(least(name) + share * (plain - least(name))) + 4096
        compiled = compiled_with(model, x, budget, kernels="eager")
        report = ct.report(compiled)
        assert report.differences == ()
        assert report.measured_peak_bytes <= budget
        [plan] = report.plans
        assert abs(plan.peak_bytes / plan.measured_peak_bytes - 1) < 0.01
        assert plan.gap is None or plan.gap < 0.5
        recomputed.append(plan.recomputed)
        plain = plan.plain_peak_bytes
        assert least(name) < plain
    assert recomputed[0] > 0
    assert recomputed[0] >= recomputed[-1]


def test_three_optimizer_steps_are_bit_identical():
    losses, weights = [], []
    for planned in (False, True):
        model, x = made("layers")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = model
        if planned:
            budget = int(least_of(model, x, kernels="eager", optimizer=optimizer) * 1.02)
            step = compiled_with(model, x, budget, kernels="eager", optimizer=optimizer)
        torch.manual_seed(7)
        for _ in range(3):
            loss = squared(step(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, losses[:3], losses[3:]))
    assert all(map(torch.equal, *weights))


def test_a_budget_below_the_least_is_an_error_that_names_it_and_the_least_works():
    model, x = made("layers")
    report = ct.report(compiled_with(model, x, least("layers"), kernels="eager"))
    assert report.measured_peak_bytes <= least("layers")
    assert report.plans[0].least_budget_bytes <= least("layers")
    with pytest.raises(ct.InfeasibleBudget, match="least budget that works"):
        compiled_with(model, x, int(least("layers") * 0.8), kernels="eager")


def test_the_model_is_left_as_it_was():
    model, x = made("convolutional")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    compiled_with(model, x, "1GiB", kernels="eager")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_inductor_keeps_to_the_budget_and_the_least_that_it_names_works():
    torch.manual_seed(0)
    convolution = nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 16, 3, padding=1), nn.GELU(), nn.Flatten()
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), *convolution, nn.Linear(256, 8)), torch.randn(256, 32)
    budget = least_of(model, x, kernels="inductor")
    report = ct.report(compiled_with(model, x, budget, kernels="inductor"))
    assert report.measured_peak_bytes <= budget
    assert report.plans[0].kernels == "inductor"
    [plan] = report.plans
    # read from inductor's own code, which torch 2.9 does not have in this form
    error = 64 if not torch.__version__.startswith("2.9.") else 0.03 * plan.measured_peak_bytes
    assert abs(plan.peak_bytes - plan.measured_peak_bytes) <= error


def test_values_inside_a_fused_kernel_are_no_nodes_of_the_problem():
    found = []

    def partition(module, inputs, *, num_fwd_outputs, **_):
        joint = read(module, num_fwd_outputs)
        fused = {call: True for call in joint.calls() if call.op == "call_function" and fused_costs.is_fused(call)}
        costs = Costs({}, {}, fused)
        graph = graph_of(joint, costs, Surroundings(), "fused")
        groups = groups_of(joint, costs, {index for index, node in enumerate(graph.nodes) if node.keep})
        found.extend([graph, groups, in_groups(graph, groups)])
        return _compat.cut_without_recomputation(module, inputs, num_fwd_outputs)

    def capture(module, inputs):
        return _compat.compiled_by_operators(module, inputs, partition)

    x, weight = torch.randn(8, 16), torch.randn(16, 4, requires_grad=True)
    torch.compile(lambda x: (torch.sigmoid(x * 2 + 1) - 3) @ weight, backend=capture, fullgraph=True)(x)
    graph, groups, smaller = found
    assert [node.name for node in graph.nodes][:5] == ["mul", "add", "sigmoid", "sub", "mm"]
    assert [node.name for node in smaller.nodes][:2] == ["sub", "mm"]
    assert groups[0] == [0, 1, 2, 3]
    assert smaller.nodes[1].deps == (0,)
    assert list(by_result([("compute", 0), ("drop", 0)], groups))[3:] == [("compute", 3), ("drop", 3)]


def test_a_product_that_inductor_adds_to_a_sum_is_never_in_memory():
    found = []

    def partition(module, inputs, *, num_fwd_outputs, **_):
        joint = read(module, num_fwd_outputs)
        costs = fused_costs.estimated(joint, torch.device("cpu"))
        found.extend([joint, costs, groups_of(joint, costs, set())])
        return _compat.cut_without_recomputation(module, inputs, num_fwd_outputs)

    def capture(module, inputs):
        return _compat.compiled_by_operators(module, inputs, partition)

    x, weight = torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)
    torch.compile(lambda x: torch.sin(x @ weight + x) + x @ weight, backend=capture, fullgraph=True)(x)
    joint, costs, groups = found
    assert {product.name: total.name for product, total in costs.merged.items()} == {
        "mm": "add",
        "mm_1": "add_1",
        "mm_3": "add_2",
    }
    named = [[joint.results[index].node.name for index in group if joint.results[index].node] for group in groups]
    assert named[:3] == [["mm", "add"], ["sin"], ["mm_1", "add_1"]]


def test_another_budget_gets_another_partition_however_many_there_were(roomy):
    model, x, compiled = roomy
    options = {"kernels": "eager", "loss_fn": squared, "prove": False, "progress": False}
    with torch._dynamo.config.patch(recompile_limit=1):
        tight = ct.report(ct.compile(model, x, budget=int(least("layers") * 1.05), **options))
    assert tight.measured_peak_bytes < ct.report(compiled).measured_peak_bytes


def test_a_bound_that_an_earlier_search_found_holds_for_the_plan(monkeypatch):
    """The first of two searches for one budget seems far from the optimum here, and the second finds no bound."""
    solve, bounds = cairn.solve, []

    def forgetful(*args, **options):
        found = solve(*args, **options)
        if found.schedule is None:
            return found
        bounds.append(found.lower_bound_ns)
        return dataclasses.replace(found, gap=0.5, lower_bound_ns=found.lower_bound_ns if len(bounds) == 1 else 1)

    monkeypatch.setattr(cairn, "solve", forgetful)
    model, x = made("layers")
    compiled = compiled_with(model, x, "1GiB", kernels="eager", prove=False)
    assert len(bounds) == 2
    assert ct.report(compiled).plans[0].gap < 0.01


class WithLogits(nn.Module):
    """Returns its loss and its logits, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), nn.Linear(64, 512)

    def forward(self, x):
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, x.new_zeros(len(x), dtype=torch.int64)), "logits": logits}


@pytest.mark.parametrize("holds_output", [True, False])
def test_the_peak_of_a_model_that_returns_its_loss_and_more_needs_no_correction(holds_output):
    options = {"kernels": "eager", "holds_output": holds_output, "prove": False, "progress": False}
    torch._dynamo.reset()
    report = ct.report(ct.compile(WithLogits(), torch.randn(256, 64), budget="1GiB", **options))
    assert report.plans[0].correction_bytes == 0
    assert abs(report.plans[0].peak_bytes - report.measured_peak_bytes) < 64


def test_backend_by_name():
    torch._dynamo.reset()
    model, x = made("layers")
    options = {"budget": "1GiB", "kernels": "eager", "time_limit": "300ms"}
    step = torch.compile(model, backend=backend, options=options)
    torch.manual_seed(3)
    squared(step(x)).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    squared(model(x)).backward()
    assert all(map(torch.equal, found, [p.grad for p in model.parameters()]))


def test_backend_is_an_entry_point_of_the_installed_package():
    torch._dynamo.reset()
    model, x = made("adapted")
    step = torch.compile(model, backend="cairn", options={"budget": "1GiB", "kernels": "eager", "time_limit": "300ms"})
    squared(step(x)).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    squared(model(x)).backward()
    assert found
    assert all(map(torch.equal, found, [p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, TypeError, "needs options"),
        ({"budget": "1GiB", "kernels": "fast"}, ValueError, "one of inductor, eager"),
        ({"budget": "1GiB", "segments": 3}, TypeError, "segments"),
        ({"budget": 0.5}, TypeError, "ratio"),
        ({"budget": "1GiB", "kernels": "eager", "solver": "none"}, cairn.BadInput, 'no solver "none"'),
        ({"budget": "1GiB", "holds_output": 3}, TypeError, "holds_output must be True or False"),
        ({"budget": "1GiB", "optimizer": 5}, TypeError, "optimizer must be a torch.optim.Optimizer"),
    ],
)
def test_backend_refuses_by_name_at_each_call(options, error, text):
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(4, 4), backend=backend, options=options)
    for _ in range(2):
        with pytest.raises(error, match=text):
            compiled(torch.randn(8, 4))


def test_backend_names_the_least_budget():
    torch._dynamo.reset()
    model, x = made("adapted")
    step = torch.compile(model, backend=backend, options={"budget": 1, "kernels": "eager", "time_limit": "300ms"})
    for _ in range(2):
        with pytest.raises(ct.InfeasibleBudget, match="least budget that works") as caught:
            step(x)
        assert caught.value.least_bytes > 1


def test_backend_counts_the_step_of_the_optimizer():
    torch._dynamo.reset()
    model, x = made("adapted")
    big = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1 << 20))], foreach=True)
    options = {"budget": "9MiB", "kernels": "eager", "time_limit": "300ms", "optimizer": big}
    with pytest.raises(ct.InfeasibleBudget, match="step of the optimizer") as caught:
        torch.compile(model, backend=backend, options=options)(x)
    assert caught.value.least_bytes > 12 << 20  # two of state, and one that the step makes for all


def test_each_shape_has_a_plan_within_the_budget_and_smaller_ones_share_it():
    torch._dynamo.reset()
    model, _ = made("adapted")
    budget = int(1.5 * least("adapted"))
    several = Backend(Request(budget=budget, kernels="eager", time_limit="300ms"))
    step = torch.compile(model, backend=several)
    planned = []
    for rows in (256, 200, 100, 300):  # from the second on, one graph with a symbolic size serves all
        x = torch.randn(rows, 64)
        results = []
        for function in (step, model):
            squared(function(x)).backward()
            results.append([p.grad for p in model.parameters() if p.grad is not None])
            model.zero_grad()
        assert all(map(torch.equal, *results))
        planned.append(len(several.plans))
    assert planned == [1, 2, 2, 3]
    assert several.compilations == 2
    assert max(plan.measured_peak_bytes for plan in several.plans) <= budget


def test_what_torch_compile_itself_changes_is_a_warning():
    class UnderAutocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers(1)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.layers(x)

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="equals that of torch.compile without a plan"):
        found = ct.report(compiled_with(UnderAutocast(), torch.randn(256, 32), "1GiB", kernels="eager"))
    assert found.differences


def test_what_the_whole_step_takes_beyond_its_prediction_is_left_free(monkeypatch):
    model, x = made("adapted")

    def loss(output):
        return output.repeat(8, 1).exp().mean()

    monkeypatch.setattr(compiling, "_loss_costs", lambda sample, device: (0, 0))  # not known, so not predicted
    torch._dynamo.reset()
    plain = ct.report(ct.compile(model, x, budget="1GiB", kernels="eager", loss_fn=loss, progress=False))
    assert plain.measured_peak_bytes > 1.1 * plain.plans[-1].peak_bytes
    budget = int(0.95 * plain.measured_peak_bytes)
    torch._dynamo.reset()
    tight = ct.report(ct.compile(model, x, budget=budget, kernels="eager", loss_fn=loss, progress=False))
    assert tight.measured_peak_bytes <= budget
    assert tight.plans[-1].correction_bytes > 0
    assert tight.measured_peak_bytes > 0.97 * tight.plans[-1].peak_bytes


def test_what_cannot_be_captured_is_named():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(ct.Unsupported, match=r"one graph[\s\S]*compiled one by one \(regions=True\)"):
        compiled_with(Branches(), torch.randn(4, 8), "1GiB", regions=False)


def test_plans_are_data(tmp_path, roomy):
    [plan] = ct.report(roomy[2]).plans
    plan.save(tmp_path / "plan.json")
    assert ct.CompiledPlan.load(tmp_path / "plan.json") == plan
    graph = cairn.Graph.from_json(json.dumps(plan.problem))
    schedule = cairn.Schedule.from_json(graph, json.dumps(plan.schedule))
    assert cairn.simulate(graph, schedule).peak_bytes <= plan.budget_bytes
    lacking = {name: value for name, value in plan.to_json().items() if name != "schedule"}
    for text, message in (
        ("{}", "cairn-compiled-plan"),
        ('{\n "format": ', "line 2, column 12"),
        (json.dumps(lacking), "schedule"),
    ):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ct.PlanMismatch, match=message):
            ct.CompiledPlan.load(tmp_path / "other.json")


def test_a_saved_plan_is_followed_for_the_same_step_alone():
    model, x = made("adapted")
    [plan] = ct.report(compiled_with(model, x, int(least("adapted") * 1.1), kernels="eager")).plans
    torch._dynamo.reset()
    again = ct.report(ct.compile(model, x, plan=plan, loss_fn=squared, progress=False))
    assert again.plans[0].schedule == plan.schedule
    assert again.differences == ()
    assert again.measured_peak_bytes <= plan.budget_bytes
    torch._dynamo.reset()
    with pytest.raises(ct.PlanMismatch, match="another step"):
        ct.compile(model, torch.cat([x, x]), plan=plan, loss_fn=squared, progress=False)
    with pytest.raises(ValueError, match="not both"):
        ct.compile(model, x, budget="1GiB", plan=plan, loss_fn=squared)


def test_curve_verification_and_gradients_that_accumulate_beyond_the_plan():
    model, x = made("layers")
    compiled = compiled_with(model, x, "1GiB", kernels="eager")
    points = ct.sweep(compiled, 3)
    times = [point.step_ns for point in points]
    assert len(points) == 3
    assert times[0] >= times[1] >= times[2]
    assert points[0].peak_bytes < points[2].peak_bytes
    assert ct.verify(compiled).differences == ()
    assert "recomputed" in str(ct.report(compiled))
    squared(compiled(x)).backward()
    with pytest.warns(UserWarning, match="adds to gradients that exist"):
        squared(compiled(x)).backward()
