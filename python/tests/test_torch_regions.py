"""`compile` block by block: exact, within the budget, predicted, and removed without a trace."""

import copy
import dataclasses
import gc
import weakref

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base._compat import graph_compilers
from cairn.torch.base.errors import Unsupported
from cairn.torch.compiled import region_code, region_levels, region_options
from cairn.torch.compiled.compiled_model import known
from cairn.torch.compiled.partitions import Partitions
from regions_support import fixed_costs, with_fixed_times
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True, scope="module")
def few_options():
    """Each is compiled, which takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_levels, "MAX_OPTIONS", 3)
        yield


class Block(nn.Module):
    """Attention by products, a GELU, and dropout."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1, self.training) @ v
        return x + F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), 0.1, self.training)


class Blocks(nn.Module):
    def __init__(self, count=2, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)  # so that all blocks are alike: each gets an input with gradients
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(x)


def loss_of(y):
    return y.square().mean()


def sample(batch=4, length=64, width=32):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(1))


def step(model, x, seed=3):
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *grads, torch.get_rng_state()]


def compiled(model, x, budget, **options):
    options = {"kernels": "eager", "loss_fn": loss_of, "regions": True, **options}
    return ct.compile(model, x, budget=budget, **options)


@pytest.fixture(scope="module")
def blocks():
    """A model whose blocks are compiled, and the same model as it was. Its plans do not depend on measured times."""
    model = Blocks(4)
    plain = copy.deepcopy(model)
    with fixed_costs():
        assert compiled(model, sample(), "1GiB") is model
    regions = known(model)
    regions.profile = with_fixed_times(regions.profile)
    return model, plain


def plan_of(model):
    return ct.report(model).regions


def single_level_least(model):
    return known(model).task(runs_once=True).even_budgets(1)[0]


def assert_exact(model, plain, x, seeds=3):
    assert ct.report(model).differences == ()
    for seed in range(seeds):
        assert all(map(torch.equal, step(model, x, seed), step(plain, x, seed)))


def test_blocks_are_compiled_within_the_budget_to_the_same_bits(blocks):
    (model, plain), x = blocks, sample()
    compiled(model, x, "1GiB")
    middle = (single_level_least(model) + plan_of(model).plain_peak_bytes) // 2
    began = known(model).regions.compilations
    compiled(model, x, middle)
    report = ct.report(model)
    plan = report.regions
    assert plan.levels and plan.is_single_level and report.measured_peak_bytes <= middle
    assert plan.peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.02)
    assert_exact(model, plain, x)
    assert ct.handle(model) is None  # autograd runs the step
    assert ct.verify(model).differences == ()
    assert "compiled blocks, eager kernels" in str(report)
    assert known(model).regions.compilations == began  # another budget compiles nothing


def test_below_the_least_single_level_plan_blocks_are_recomputed_as_wholes(blocks):
    (model, plain), x = blocks, sample()
    budget = single_level_least(model) - 1
    compiled(model, x, budget)
    plan = plan_of(model)
    assert not plan.is_single_level and "recomputed 1 x" in str(plan)
    assert plan.peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.02) and plan.measured_peak_bytes <= budget
    assert_exact(model, plain, x)
    with pytest.raises(ct.InfeasibleBudget):
        compiled(model, x, plan.least_budget_bytes // 2)
    assert ct.report(model).regions is plan and ct.handle(model) is not None  # the plan that it had
    assert_exact(model, plain, x, 1)
    points = ct.sweep(model, 3)
    assert [point.step_ns for point in points] == sorted((point.step_ns for point in points), reverse=True)


def test_saved_tensors_of_compiled_blocks_are_offloaded(blocks):
    (model, plain), x = blocks, sample()
    budget = single_level_least(model) - 1
    compiled(model, x, budget, host_budget="4MiB", link="20GB/s")
    plan = plan_of(model)
    assert plan.plan.offloads and "offloaded" in str(plan) and 0 < plan.plan.host_bytes <= 4 << 20
    assert plan.measured_peak_bytes <= budget
    assert_exact(model, plain, x)


@pytest.mark.parametrize("share", [0.5, 0])
def test_a_saved_plan_is_followed_without_planning(blocks, tmp_path, monkeypatch, share):
    (model, plain), x = blocks, sample()
    low = single_level_least(model)
    compiled(model, x, int(low - 1 + share * (plan_of(model).plain_peak_bytes - low)))
    plan = plan_of(model)
    plan.save(tmp_path / "plan.json")
    loaded, other = ct.RegionPlan.load(tmp_path / "plan.json"), copy.deepcopy(plain)
    assert str(loaded) == str(plan) and plan.is_single_level == bool(share)

    def refuse(*_):
        raise AssertionError("a loaded plan is complete")

    with monkeypatch.context() as patch:
        patch.setattr(region_levels.GraphCurve, "at", refuse)
        patch.setattr(region_code.RegionBackend, "_measured", refuse)
        assert ct.compile(other, x, plan=loaded, loss_fn=loss_of) is other
    assert_exact(other, plain, x, 1)
    again = plan_of(other)
    assert again.measured_peak_bytes == plan.measured_peak_bytes and again.partitions == plan.partitions
    assert [point.peak_bytes for point in ct.sweep(other, 2)] == [point.peak_bytes for point in ct.sweep(model, 2)]


class OtherBlock(Block):
    """The same parameters, and another graph."""

    def forward(self, x):
        return super().forward(x.tanh())


def test_a_saved_plan_is_refused_for_another_model_and_other_surroundings(blocks, tmp_path):
    (model, plain), x = blocks, sample()
    compiled(model, x, (single_level_least(model) + plan_of(model).plain_peak_bytes) // 2)
    plan = plan_of(model)

    def refused(reason, model, x=x, plan=plan, **options):
        with pytest.raises(ct.PlanMismatch, match=reason):
            ct.compile(model, x, plan=plan, loss_fn=loss_of, **options)

    refused(r"inputs \['float32\[4, 64, 32\]'\]", plain, sample(2))
    refused("parameters with other names", Blocks(3))
    refused("model 'Blocks'", nn.Sequential(plain))
    refused("training True", copy.deepcopy(plain).eval())
    refused("kernels='inductor'", plain, plan=dataclasses.replace(plan, kernels="inductor"), kernels="eager")
    made_by = dataclasses.replace(plan.plan, fingerprint={**plan.plan.fingerprint, "torch": "1.0"})
    refused("torch '1.0'", plain, plan=dataclasses.replace(plan, plan=made_by))
    refused("a block 'head.2'", plain, plan=dataclasses.replace(plan, blocks=("head.2",)))
    changed = [dataclasses.replace(each, ops=each.ops[1:]) for each in plan.partitions]
    refused("does not hold for the graph", copy.deepcopy(plain), plan=dataclasses.replace(plan, partitions=changed))
    other = copy.deepcopy(plain)
    for block in other.blocks:
        block.__class__ = OtherBlock
    refused(r"made for other blocks: \d+ of their graphs", other)
    assert not [name for name, module in other.named_modules() if "forward" in vars(module)]
    with pytest.raises(ValueError, match="not both"):
        ct.compile(plain, x, plan=plan, budget="1GiB", loss_fn=loss_of)
    (tmp_path / "other.json").write_text('{"format": "cairn-region-plan", "version": 1}')
    with pytest.raises(ct.PlanMismatch, match="has not the fields"):
        ct.RegionPlan.load(tmp_path / "other.json")


@pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9 compiles anew for symbolic views")
def test_larger_inputs_are_planned_within_the_same_budget(blocks):
    (model, plain), x = blocks, sample()
    budget = single_level_least(model) * 2
    compiled(model, x, budget)
    compilations = [known(model).regions.compilations]
    for batch in (2, 6, 7):
        other = sample(batch)
        assert all(map(torch.equal, step(model, other), step(plain, other)))
        compilations.append(known(model).regions.compilations)
        assert plan_of(model).measured_peak_bytes <= budget
        assert plan_of(model).plan.fingerprint["inputs"] == [f"float32[{max(4, batch)}, 64, 32]"]
    assert compilations[-1] == compilations[-2]  # sizes are symbolic from the second shape on
    with pytest.raises(ct.InfeasibleBudget, match=r"inputs float32\[64, 64, 32\], which no plan covers"):
        step(model, sample(64))
    assert_exact(model, plain, sample(7), 1)


def test_options_of_blocks_of_torchs_own_classes_have_a_limit_of_compilations_each():
    block, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        function = region_code.with_own_code(nn.Sequential.forward)
        assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(block, x), block(x))


def test_the_backward_takes_no_view_that_the_forward_has_taken(monkeypatch):
    cuts = []
    for name in ("cut", "cut_without_recomputation"):
        original = getattr(region_code._compat, name)
        monkeypatch.setattr(
            region_code._compat, name, lambda *a, original=original, **k: cuts.append(original(*a, **k)) or cuts[-1]
        )
    for level in (region_levels.EVERYTHING, region_levels.UNPLANNED):
        backend = region_code.RegionBackend("eager", torch.device("cpu"), Partitions())
        backend.option = backend.number_of(level)
        torch.compile(Block(8), backend=backend)(sample(1, 4, 8).requires_grad_()).sum().backward()
        torch._dynamo.reset()
    ours, torchs = (sum(node.op == "call_function" for node in backward.graph.nodes) for _, backward in cuts)
    assert ours <= torchs + 1


def test_a_compiled_model_is_freed():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    compiled(model, sample(1, 8, 8), "1GiB")
    assert [str(ref) for ref in plan_of(model).plan.stages][:2] == ["0", "1"]  # whose children are one region
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class Perceptron(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Repeated(nn.Module):
    """Each block is called several times in a step."""

    def __init__(self, times, autocast=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(32, 32), nn.ModuleList(Perceptron() for _ in range(2))
        self.times, self.autocast = times, autocast

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.stem(x)
            for _ in range(self.times):
                for block in self.blocks:
                    x = block(x)
            return x.float()


def test_blocks_that_were_compiled_in_place_and_run_twice_have_one_partition_each():
    x, model = sample(1, 128)[0], Repeated(2)
    plain = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="eager")
    compiled(model, x, "1GiB", regions="auto")
    compiled(model, x, (single_level_least(model) + plan_of(model).plain_peak_bytes) // 2, regions="auto")
    plan = plan_of(model)
    assert plan.levels and plan.peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.02)
    assert_exact(model, plain, x)


def test_under_autocast_compiled_blocks_are_those_of_torch_without_a_plan():
    x, model = sample(1, 128)[0], Repeated(1, autocast=True)
    with pytest.warns(UserWarning, match="torch.compile computes something else than the model does without it"):
        compiled(model, x, "1GiB")
    with pytest.warns(UserWarning, match="equals that of torch.compile without a plan bit for bit"):
        compiled(model, x, single_level_least(model))
    assert plan_of(model).levels


class Experts(nn.Module):
    """Each token goes to the expert that scores highest: how many there are of each is known only when it runs."""

    def __init__(self, width=16, count=3):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        tokens = self.norm(x)
        scores = self.router(tokens).softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            index = torch.nonzero(chosen == number).squeeze(-1)
            out = out.index_add(0, index, best[index].unsqueeze(-1) * expert(tokens[index]))
        return x + out


class Mixture(nn.Module):
    def __init__(self, count=2, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Experts(width) for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("is_cut_again", [True, False])
def test_data_dependent_experts_are_compiled_within_the_budget_to_the_same_bits(monkeypatch, is_cut_again):
    if not is_cut_again:
        monkeypatch.setattr(graph_compilers._TracedGraph, "can_be_cut_again", lambda self: False)
    x, model = sample(1, 512, 16)[0], Mixture()
    plain = copy.deepcopy(model)
    compiled(model, x, "1GiB")
    compiled(model, x, (single_level_least(model) + plan_of(model).plain_peak_bytes) // 2)
    assert ct.report(model).differences == ()
    for seed in range(3):
        other = torch.randn(512, 16, generator=torch.Generator().manual_seed(seed))
        assert all(map(torch.equal, step(model, other), step(plain, other)))


class SparseRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(50, 32, sparse=True)
        self.blocks = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, ids):
        return self.blocks(self.rows(ids)).square().mean()


def test_sparse_gradients_are_refused_in_one_graph_and_are_the_same_with_compiled_blocks():
    torch.manual_seed(0)
    model, ids = SparseRows(), torch.randint(50, (16, 8))
    plain = copy.deepcopy(model)
    with pytest.raises(ct.Unsupported, match="sparse"):
        ct.compile(model, ids, budget="1GiB", kernels="eager", regions=False, progress=False)
    ct.compile(model, ids, budget="1GiB", kernels="eager", progress=False)
    for each in (model, plain):
        each(ids).backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_dense(), expected.grad.to_dense())


class Lengths(nn.Module):
    """Two kinds of blocks by the length of their inputs, each of which runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(32, 32), nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks[:2]:
            x = block(x)
        x = x[:, ::2].contiguous()
        for block in self.blocks[2:]:
            x = block(x)
        return x


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="torch 2.9 captures blocks anew where they are measured"
)
@pytest.mark.parametrize("is_cut_again", [True, False])
def test_a_kind_of_block_is_captured_and_traced_once_for_all_of_its_options(monkeypatch, is_cut_again):
    x, model = sample(), Lengths()
    plain, counts = copy.deepcopy(model), {"traced": 0, "measured": 0, "searched": 0, "searched for the curve": 0}

    def counted(owner, name, key):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            counts[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def useful_levels(curves):
        before = counts["searched"]
        levels = region_levels.useful_levels(curves)
        counts["searched for the curve"] += counts["searched"] - before
        return levels

    torch._dynamo.reset()  # forgets which sizes differed
    counted(graph_compilers, "compiled_by_operators", "traced")
    counted(region_levels.GraphCurve, "_searched", "searched")
    counted(region_code.RegionBackend, "_measured", "measured")
    monkeypatch.setattr(region_options, "useful_levels", useful_levels)
    if not is_cut_again:
        monkeypatch.setattr(graph_compilers._TracedGraph, "can_be_cut_again", lambda self: False)
    compiled(model, x, "1GiB")
    regions, kinds = known(model).regions, 2
    assert regions.graphs == kinds
    assert 2 * kinds <= regions.compilations <= region_levels.MAX_OPTIONS * kinds
    if is_cut_again:
        assert counts["traced"] == kinds
    assert 0 < counts["searched for the curve"] <= kinds * (len(region_levels.CANDIDATES) - 1)
    compiled(model, x, (single_level_least(model) + plan_of(model).plain_peak_bytes) // 2)
    assert plan_of(model).levels and regions.graphs == kinds
    assert counts["searched"] == counts["searched for the curve"]  # what is compiled is what the curve has
    assert counts["measured"] == kinds
    assert_exact(model, plain, x, 1)


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_all_traces_of_a_graph_have_one_curve(monkeypatch, kernels):
    monkeypatch.setattr(graph_compilers._TracedGraph, "can_be_cut_again", lambda self: False)
    backend, x = region_code.RegionBackend(kernels, torch.device("cpu"), Partitions()), sample(1, 4, 8)
    backend.option = region_code.RECORDING
    block = torch.compile(Perceptron(8), backend=backend)
    block(x.requires_grad_()).sum().backward()
    [graph] = backend.recorded
    curve, least = graph.curve, region_levels.Level(0.0, 0.0)
    first, ops, searches = graph._graph._joint, curve.at(least).ops, curve.searches
    backend.option = backend.number_of(least)
    block(x).sum().backward()
    assert graph._graph._joint is not first and graph.curve is curve and curve.searches == searches
    assert graph.recomputed[backend.option] > 0
    assert [partition.ops for partition in backend._partitions.at_levels([region_levels.level_text(least)])] == [ops]


def test_the_reason_why_a_graph_is_not_planned_is_noted_once_for_each_graph(monkeypatch):
    backend, reasons = region_code.RegionBackend("eager", torch.device("cpu"), Partitions()), iter(["first", "second"])
    emit = region_code.emit

    def refuse(*_, **__):
        raise Unsupported(next(reasons))

    monkeypatch.setattr(region_code, "emit", refuse)
    backend.option, x = region_code.RECORDING, sample(1, 4, 8).requires_grad_()
    blocks = [torch.compile(module, backend=backend) for module in (Perceptron(8), nn.Linear(8, 8))]
    for block in blocks:
        block(x).sum().backward()
    monkeypatch.setattr(region_code, "emit", emit)
    for level in (region_levels.Level(0.5, 1.0), region_levels.Level(0.0, 0.0)):
        backend.option = backend.number_of(level)
        for block in blocks:
            block(x).sum().backward()
    assert [graph.not_planned for graph in backend.recorded] == backend.not_planned == ["first", "second"]
    assert all(graph.curve is None and len(graph.codes) == 3 for graph in backend.recorded)


def test_a_schedule_of_a_wider_level_is_not_searched_again():
    backend = region_code.RegionBackend("eager", torch.device("cpu"), Partitions())
    backend.option = region_code.RECORDING
    torch.compile(Block(8), backend=backend)(sample(1, 4, 8).requires_grad_()).sum().backward()
    [graph] = backend.recorded
    curve = graph.curve
    wide, narrow = (curve.at(region_levels.Level(0.5, peak)) for peak in (3.0, 2.0))  # peaks that no step comes near
    assert wide.ops == narrow.ops and curve.searches == 1
    assert curve.at(region_levels.Level(0.2, 0.0)).step_ns >= wide.step_ns and curve.searches == 2
