"""Calls of compiled models and blocks: Dynamo's settings hold around each, and its errors are named."""

import copy
import logging
import pickle
import warnings

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base import memory
from cairn.torch.base._compat import compiler_budget
from cairn.torch.base.errors import Unsupported
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LOGGER = logging.getLogger(__name__)
FEW = 2  # compilations of one function that torch allows, without Cairn's settings


@pytest.fixture(autouse=True)
def few_compilations():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=FEW):
        yield
    torch._dynamo.reset()


class Numbered(nn.Module):
    """A block with a number, which makes its graph another one than those of its like."""

    def __init__(self, number, has_break=False):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.number, self.has_break = number, has_break

    def forward(self, x):
        if self.has_break:
            torch._dynamo.graph_break()
        return x + self.down(torch.tanh(torch.tanh(self.up(x))) * self.number)


class Logging(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.up(x).tanh()
        LOGGER.debug("a call that no graph can have")
        return self.down(x)


def squared(output):
    return output.square().mean()


def numbered(count=FEW + 1, **options):
    return nn.Sequential(*(Numbered(1 + i, **options) for i in range(count)))


def frozen_first():
    """A model whose first parameters get no gradients."""
    model = numbered()
    model[0].requires_grad_(False)
    return model


def compiled_with(model, x, budget="1GiB", **options):
    return ct.compile(model, x, budget=budget, kernels="eager", loss_fn=squared, **options)


def step(model, x):
    squared(model(x)).backward()
    model.zero_grad()


def evaluated(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def peak_of_step(model, x):
    meter = memory.meter_for(torch.device("cpu"))
    with memory.not_collecting(), meter:
        first = meter.mark()
        step(model, x)
        last = meter.mark()
    return meter.peak(first, last) - meter.level(first) + memory.unique_bytes([*model.parameters(), x])


@pytest.mark.parametrize("has_break", (False, True))
def test_calls_of_compiled_blocks_are_compiled_beyond_dynamos_limit(has_break):
    model, x = numbered(has_break=has_break), torch.randn(1024, 32)
    compiled_with(model, x, regions=True)
    made = ct.report(model).regions
    budget = made.least_budget_bytes + (made.plain_peak_bytes - made.least_budget_bytes) // 5
    compiled_with(model, x, budget, regions=True)
    for rows in (1024, 1000):
        smaller = x[:rows].clone()
        step(model, smaller)  # compiles
        assert peak_of_step(model, smaller) <= budget
    evaluated(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        step(model, x)


def test_every_shape_of_one_graph_has_a_plan_beyond_dynamos_limit():
    model, x = Logging(), torch.randn(64, 32)
    compiled = compiled_with(model, x, regions=False)
    for rows in range(40, 41 + FEW):
        step(compiled, x[:rows])
    evaluated(compiled, x)
    with torch.inference_mode():
        compiled(x)


@pytest.mark.parametrize(
    ("model", "options", "what"),
    (
        (numbered(), {"regions": True}, "the block '0'"),
        (numbered(has_break=True), {"regions": True}, "the block '0'"),
        (numbered(), {"regions": False}, "the model Sequential"),
    ),
    ids=("blocks", "blocks with graph breaks", "one graph"),
)
def test_the_limit_of_compilations_is_named(monkeypatch, model, options, what):
    x = torch.randn(64, 32)
    compiled = compiled_with(model, x, **options)
    monkeypatch.setattr(compiler_budget, "MANY_GRAPHS", 1)
    with pytest.raises(Unsupported, match=rf"limit of .* in {what} \(graphs captured: \d+\)"):
        step(compiled, x[:40])


def test_an_operation_that_no_graph_can_have_is_named_at_a_later_call():
    class Breaking(Numbered):
        def forward(self, x):
            if not self.training:
                torch._dynamo.graph_break()
            return super().forward(x)

    compiled = compiled_with(Breaking(1), torch.randn(64, 32), regions=False)
    with pytest.raises(Unsupported, match="cannot capture the model Breaking as one graph"):
        evaluated(compiled, torch.randn(64, 32))


@pytest.mark.parametrize("regions", (False, True))
@pytest.mark.parametrize("gradients", ("created", "accumulated"))
def test_a_step_onto_existing_gradients_warns_once_if_the_plan_does_not_count_them(regions, gradients):
    model, x = frozen_first(), torch.randn(64, 32)
    compiled = compiled_with(model, x, regions=regions, gradients=gradients, prove=False)
    found = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            squared(compiled(x)).backward()
        found.append(sum("adds to gradients that exist" in str(warning.message) for warning in caught))
    assert found == [0, int(gradients == "created"), 0]


class Split(nn.Module):
    """A model that Dynamo splits into as many graphs as it has blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = numbered()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x)


def waits(compiled, inputs):
    """The numbers of waiting forwards that warnings of a step name. Earlier losses exist during the step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [squared(compiled(x)) for x in inputs]
        sum(losses).backward()
    texts = [str(warning.message) for warning in caught]
    return losses, [int(text.split()[0]) for text in texts if "wait for this backward" in text]


def test_forwards_of_several_graphs_that_wait_for_one_backward_are_a_warning():
    options = {"budget": "1GiB", "kernels": "eager"}
    x = torch.randn(64, 32)
    split = torch.compile(Split(), backend="cairn", options=options)
    held = [waits(split, [x]), waits(split, [x])]
    whole = torch.compile(Numbered(1), backend="cairn", options=options)
    held += [waits(whole, [x]), waits(whole, [x])]
    squared(whole(x))  # its backward never runs, and nothing of it stays
    with torch.no_grad():
        kept = split(x)
    held += [waits(whole, [x]), waits(whole, [x, x])]
    assert [found for _, found in held] == [[3], [], [], [], [], [2]]
    assert not kept.requires_grad


@pytest.mark.parametrize("regions", (False, True))
def test_a_backward_may_be_repeated_with_eager_kernels(regions):
    """As without compilation: operators that run one by one write into no saved tensor."""
    torch.manual_seed(0)
    model, x = numbered(), torch.randn(64, 32)
    results = []
    for compiled in (model, compiled_with(model, x, regions=regions)):
        loss = squared(compiled(x))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        results.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *results))


def test_what_compile_returned_is_compiled_again_for_another_budget():
    model, x = Logging(), torch.randn(64, 32)
    first = compiled_with(model, x, regions=False)
    budget = ct.report(first).plans[0].peak_bytes + 2**20
    again = compiled_with(first, x, budget, regions=False)
    assert [*again.state_dict()] == [*first.state_dict()]
    assert ct.report(again).plans[0].budget_bytes == budget
    with pytest.raises(Unsupported, match=r"has compiled this Logging as a whole.*plan the model itself"):
        ct.checkpoint(again, x, loss_fn=squared)


def test_a_copy_of_what_compile_returned_is_compiled_again_too():
    x = torch.randn(64, 32)
    copied = copy.deepcopy(compiled_with(Logging(), x, regions=False))
    with pytest.raises(Unsupported, match=r"cairn.torch.compile has compiled this Logging as a whole"):
        ct.checkpoint(copied, x, loss_fn=squared)
    again = compiled_with(copied, x, regions=False)
    assert len(ct.report(again).plans) == 1


def test_a_compiled_model_is_copied_and_its_pickle_is_refused_by_name():
    model, x = Logging(), torch.randn(64, 32)
    compiled = compiled_with(model, x, regions=False)
    for copied in (copy.copy(compiled), copy.deepcopy(compiled)):
        assert torch.equal(copied(x), compiled(x))
    with pytest.raises(pickle.PicklingError, match="pickle the model that it was given"):
        pickle.dumps(compiled)
    compiled.load_state_dict(pickle.loads(pickle.dumps(compiled.state_dict())))


def test_what_torch_compile_returned_is_refused_by_name():
    model, x = numbered(), torch.randn(64, 32)
    with pytest.raises(Unsupported, match=r"torch.compile has compiled this Sequential already: give the model itself"):
        compiled_with(torch.compile(model), x)
