"""`compile` block by block: exact, within the budget, predicted, and removed without a trace."""

import copy

import cairn.torch as ct
import pytest
import torch
from cairn.torch.compiled import region_code
from cairn.torch.compiled.compiled_model import known
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def few_options(monkeypatch):
    """Each is compiled, which takes most of the time."""
    monkeypatch.setattr(region_code, "MOST_OPTIONS", 3)


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
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
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


def test_blocks_are_compiled_within_the_budget_to_the_same_bits():
    x, model = sample(), Blocks()
    plain = copy.deepcopy(model)
    assert compiled(model, x, "1GiB") is model
    everything = ct.report(model).regions
    middle = (everything.least_budget_bytes + everything.plain_peak_bytes) // 2
    began = known(model).regions.compilations
    compiled(model, x, middle)
    report = ct.report(model)
    plan = report.regions
    assert plan.levels and report.measured_peak_bytes <= middle and report.differences == ()
    assert plan.peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.02)
    for seed in range(3):
        assert all(map(torch.equal, step(model, x, seed), step(plain, x, seed)))
    assert ct.verify(model).differences == ()
    assert "compiled blocks, eager kernels" in str(report)
    with pytest.raises(ct.InfeasibleBudget):
        compiled(model, x, plan.least_budget_bytes // 2)
    assert known(model).regions.compilations == began  # another budget compiles nothing


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
        self.blocks = nn.ModuleList(Experts(width) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_data_dependent_experts_are_compiled_within_the_budget_to_the_same_bits():
    x, model = sample(1, 512, 16)[0], Mixture()
    plain = copy.deepcopy(model)
    compiled(model, x, "1GiB")
    plan = ct.report(model).regions
    compiled(model, x, (plan.least_budget_bytes + plan.plain_peak_bytes) // 2)
    assert ct.report(model).differences == ()
    for seed in range(3):
        other = torch.randn(512, 16, generator=torch.Generator().manual_seed(seed))
        assert all(map(torch.equal, step(model, other), step(plain, other)))
