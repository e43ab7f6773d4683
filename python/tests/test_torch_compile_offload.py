"""Offloading in a compiled graph: exact, within the budget and the host budget, transfers in the order of the plan."""

import cairn
import cairn.torch as ct
import pytest
import torch
from cairn.torch.base.errors import TransferFailed
from cairn.torch.compiled import host_memory
from cairn.torch.compiled.transfers import performed, without_transfers_of
from cairn.torch.offloading.tiers import HostTier
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

HOST = {"host_budget": "1MiB", "link": cairn.Machine("1MiB", "4GB/s", "4GB/s", shared_link=True)}


class Block(nn.Module):
    """Dropout is random; its mask, a member of a tuple, and values of strided storages can be offloaded."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.gelu(gate) * value))


def made():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(32, 10)), torch.randn(256, 32)


def squared(output):
    return output.square().mean()


def compiled_with(model, x, **options):
    torch._dynamo.reset()
    settings = {"kernels": "eager", "loss_fn": squared, "regions": False, "time_limit": "90ms", "progress": False}
    return ct.compile(model, x, **{**settings, **options})


def least(**options):
    with pytest.raises(ct.InfeasibleBudget) as caught:
        compiled_with(*made(), budget=1, **options)
    return caught.value.least_bytes


@pytest.fixture(scope="module")
def offloading():
    """A step within less than recomputation alone needs, its model, its plan and its host memory."""
    budget = int(0.95 * least())
    model, x = made()
    compiled = compiled_with(model, x, budget=budget, **HOST)
    [plan] = ct.report(compiled).plans
    host = max(host_memory._MEMORIES.values(), key=lambda host: host.number)
    return compiled, model, x, plan, host


def transfers_of(plan):
    names = [node["name"] for node in plan.problem["nodes"]]
    return [(op[0], names[op[1]]) for op in plan.schedule["ops"] if op[0] in ("offload", "prefetch")]


def transfers_of_a_backward(plan):
    """What every backward of a kept graph does again: all prefetches, and the offloads of the backward's own values."""
    names, begins = [node["name"] for node in plan.problem["nodes"]], plan.problem["backward_begins_at"]
    first = next(i for i, op in enumerate(plan.schedule["ops"]) if op[0] == "compute" and op[1] >= begins)
    ops = enumerate(plan.schedule["ops"])
    return [(op[0], names[op[1]]) for i, op in ops if op[0] == "prefetch" or (op[0] == "offload" and i > first)]


def results(step, model, x, seed=3):
    torch.manual_seed(seed)
    loss = squared(step(x))
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (
            50,
            "c0 offload0 c1 c2 wait0 c3 last_prefetch0 c4 c5",
        ),  # waits where the forward ends; prefetches beside c4
        (49, "c0 offload0 c1 c2 wait0 c3 c4 last_prefetch0 c5"),
        (29, "c0 offload0 c1 wait0 c2 c3 c4 last_prefetch0 c5"),  # c2 needs the memory
    ],
)
def test_waits_come_where_memory_is_needed_and_prefetches_start_with_the_computation_before(budget, expected):
    ops = [("compute", 0), ("offload", 0), ("compute", 1), ("drop", 0), ("compute", 2), ("compute", 3), ("compute", 4)]
    ops += [("prefetch", 0), ("discard", 0), ("compute", 5)]
    graph = cairn.Graph([cairn.Node(1, 10, [v - 1] if v else []) for v in range(6)])
    made = performed(ops, graph, budget, end=3)
    assert " ".join(f"{'c' if name == 'compute' else name}{v}" for name, v in made) == expected


def test_outputs_stay_on_the_device():
    listed = "c0 c1 offload0 drop0 offload1 drop1 c2 offload2 drop2 prefetch0 discard0 c1 drop0 drop1"
    ops = [("compute" if op[0] == "c" else op[:-1], int(op[-1])) for op in listed.split()]
    made = without_transfers_of({0, 1, 2}, {2}, ops)  # 1 is recomputed, 2 is kept
    assert " ".join(f"{'c' if name == 'compute' else name}{v}" for name, v in made) == "c0 c1 drop1 c2 c1 drop0 drop1"


def test_step_is_exact_and_keeps_to_both_budgets(offloading):
    compiled, model, x, plan, host = offloading
    report = ct.report(compiled)
    assert report.differences == ()
    assert report.measured_peak_bytes <= plan.budget_bytes
    assert abs(plan.peak_bytes / plan.measured_peak_bytes - 1) < 0.01
    assert 0 < plan.host_bytes <= plan.host_budget_bytes
    assert all(map(torch.equal, results(compiled, model, x), results(model, model, x)))
    assert host.transfers.tier.capacity_bytes == plan.host_bytes


def test_transfers_are_made_in_the_order_of_the_plan(offloading):
    compiled, model, x, plan, host = offloading
    results(compiled, model, x)
    assert host.transfers.trace == transfers_of(plan)
    assert not host.transfers.used_spans()


def test_forwards_without_backward_and_several_before_it(offloading):
    compiled, model, x, plan, host = offloading
    plain = [results(model, model, x, seed) for seed in (3, 4)]
    compiled(x)
    assert not host.transfers.used_spans()  # the graph is gone, and what it had on the host
    losses = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        losses.append(squared(compiled(x)))
    for loss, expected in zip(losses, plain, strict=True):
        loss.backward()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], expected[1:]))
        model.zero_grad()
    assert not host.transfers.used_spans()
    assert host.transfers.tier.capacity_bytes <= plan.host_budget_bytes


def test_a_copy_that_fails_is_an_error_and_the_next_step_works(offloading, monkeypatch):
    compiled, model, x, plan, host = offloading

    def write(*_):
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "write", write)
        with pytest.raises(TransferFailed, match="broken"):
            results(compiled, model, x)
    model.zero_grad()
    assert all(map(torch.equal, results(compiled, model, x), results(model, model, x)))


def test_hooks_that_copy_saved_tensors_are_refused_by_name(offloading):
    compiled, model, x, *_ = offloading
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
        loss = squared(compiled(x))
    with pytest.raises(ct.Unsupported, match="save_on_cpu"):
        loss.backward()
    model.zero_grad()


def test_three_optimizer_steps_by_a_saved_plan_are_bit_identical(offloading, tmp_path):
    offloading[3].save(tmp_path / "plan.json")
    plan = ct.CompiledPlan.load(tmp_path / "plan.json")
    ends = []
    for planned in (False, True):
        model, x = made()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = compiled_with(model, x, plan=plan) if planned else model
        torch.manual_seed(7)
        for _ in range(3):
            loss = squared(step(x))
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*model.parameters(), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))
    host = max(host_memory._MEMORIES.values(), key=lambda host: host.number)
    assert host.transfers.trace == [*transfers_of(plan), *transfers_of_a_backward(plan)]


def test_the_backend_by_name_offloads(offloading):
    torch._dynamo.reset()
    model, x = made()
    options = {"budget": offloading[3].budget_bytes, "kernels": "eager", "time_limit": "90ms", **HOST}
    step = torch.compile(model, backend="cairn", options=options)
    assert all(map(torch.equal, results(step, model, x), results(model, model, x)))
    host = max(host_memory._MEMORIES.values(), key=lambda host: host.number)
    assert host.transfers.trace


def test_a_plan_has_its_own_host_budget(offloading):
    with pytest.raises(ValueError, match="a plan has its own host budget"):
        compiled_with(*made(), plan=offloading[3], **HOST)


def test_inductor_offloads_in_the_order_of_the_plan():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(256, 32)
    compiled = compiled_with(model, x, budget="232KiB", kernels="inductor", **HOST)
    [plan] = ct.report(compiled).plans
    assert plan.measured_peak_bytes <= 232 << 10
    found = results(compiled, model, x)
    host = max(host_memory._MEMORIES.values(), key=lambda host: host.number)
    assert host.transfers.trace == transfers_of(plan) != []
    for one, other in zip(found, results(model, model, x), strict=True):
        torch.testing.assert_close(one, other)
