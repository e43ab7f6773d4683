"""Side effects of blocks: writes into attributes, and elsewhere. They happen once a step, as in plain
training, or the block is kept; and profiling and verifying leave none of it.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import copy
import random
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import cairn.torch as ct
from attributes_support import UNLIMITED, Keeping
from cairn.torch.runtime import recomputation, step_run
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")
WRITTEN: list[int] = []  # by blocks, in what is no attribute


class Writing(nn.Module):
    """A block that notes each of its runs, in one of many ways; `noted` gives all that it has noted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.out = how, nn.Linear(16, 64), nn.Linear(64, 16)
        self.number, self.rows, self.names, self.kinds = 0, [], {}, set()
        self.nested, self.lists = {"rows": [0]}, ([], [[]])
        self.last, self.counter, self.sums = deque(maxlen=3), Counter(), defaultdict(int)
        self.order, self.keeping = OrderedDict(runs=0), Keeping()
        self.lists_by_name, self.counts = defaultdict(list), defaultdict(lambda: defaultdict(int))
        self.late: list[int] | None = None
        self.small, self.replaced, self.large = torch.zeros(16), torch.zeros(16), torch.zeros(2048)

    def write_late(self) -> None:
        if self.late is None:
            self.late = []
        self.late.append(1)

    def note(self, y: torch.Tensor) -> None:
        rows = (y > 0).float().mean(0)
        ways: dict[str, Callable[[], Any]] = {
            "a number": lambda: setattr(self, "number", self.number + 1),
            "a list": lambda: self.rows.append(1),
            "a dict": lambda: self.names.__setitem__("runs", self.names.get("runs", 0) + 1),
            "a set": lambda: self.kinds.add(len(self.kinds)),
            "an item of a nested list": lambda: self.nested["rows"].__setitem__(0, self.nested["rows"][0] + 1),
            "a list in a tuple": lambda: self.lists[1][0].append(1),
            "a deque": lambda: self.last.append(len(self.last) + 1),
            "a counter": lambda: self.counter.update(runs=1),
            "a defaultdict": lambda: self.sums.__setitem__("runs", self.sums["runs"] + 1),
            "an ordered dict": lambda: self.order.__setitem__("runs", self.order["runs"] + 1),
            "a list in a defaultdict": lambda: self.lists_by_name["runs"].append(float(rows[0])),
            "a list of tensors in a defaultdict": lambda: self.lists_by_name["runs"].append(rows[0]),
            "a number in nested defaultdicts": lambda: self.counts["runs"].__setitem__(
                "forward", self.counts["runs"]["forward"] + 1
            ),
            "a list in the place of None": self.write_late,
            "a number of an object": lambda: setattr(self.keeping, "number", self.keeping.number + 1),
            "a list of an object": lambda: self.keeping.seen.append(1),
            "a dict of an object": lambda: self.keeping.table.__setitem__("runs", self.keeping.table["runs"] + 1),
            "an object behind an object": lambda: self.keeping.next.seen.append(1),
            "a small tensor": lambda: self.small.add_(rows),
            "a small tensor, past its version": lambda: self.small.data.add_(rows),
            "another tensor": lambda: setattr(self, "replaced", self.replaced + rows),
            "a large tensor": lambda: self.large[:16].add_(rows),
            "a global": lambda: WRITTEN.append(1),
        }
        ways[self.how]()

    def noted(self) -> list[Any]:
        objects = [(k.number, k.seen, k.table) for k in (self.keeping, self.keeping.next)]
        tensors = [t.tolist() for t in (self.small, self.replaced, self.large)]
        own = [self.number, self.rows, self.names, self.kinds, self.nested, self.lists, list(self.last), self.counter]
        written = {name: list(map(float, items)) for name, items in self.lists_by_name.items()}
        written |= {name: dict(counts) for name, counts in self.counts.items()}
        return copy.deepcopy([*own, self.sums, self.order, objects, tensors, written, self.late, WRITTEN])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            self.note(self.out(y))
        return x + self.out(y)


NOT_PUT_BACK = {
    "an object behind an object": "changes the attribute 'keeping' of Writing",
    "a large tensor": "changes the attribute 'large' of Writing",
    "a global": "changes 'WRITTEN', which its code reads",
}
PUT_BACK = [
    "a number",
    "a list",
    "a dict",
    "a set",
    "an item of a nested list",
    "a list in a tuple",
    "a deque",
    "a counter",
    "a defaultdict",
    "an ordered dict",
    "a list in a defaultdict",
    "a list of tensors in a defaultdict",
    "a number in nested defaultdicts",
    "a list in the place of None",
    "a number of an object",
    "a list of an object",
    "a dict of an object",
    "a small tensor",
    "a small tensor, past its version",
    "another tensor",
]


def noted(model: nn.Sequential) -> list[Any]:
    return [layer.noted() for layer in model]


@pytest.mark.parametrize("how", [*PUT_BACK, *NOT_PUT_BACK])
def test_what_a_block_writes_beside_its_result_is_written_once_a_step(how: str) -> None:
    model, x = nn.Sequential(*(Writing(how) for _ in range(4))), torch.randn(256, 16)
    WRITTEN.clear()
    plain, before = copy.deepcopy(model), noted(model)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=Writing)
    kept = [stage.keep_reason for stage in profile.stages if stage.kind == "block" and stage.keep_reason]
    assert len(kept) == (4 if how in NOT_PUT_BACK else 0)
    assert all(NOT_PUT_BACK[how] in reason for reason in kept)
    plan = ct.plan(profile, ct.plan(profile, "1GiB").least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok
    if how in PUT_BACK:
        assert noted(model) == before
    found = []
    for each in (plain, model):
        WRITTEN.clear()
        with ct.apply(each, plan) if each is model else contextlib.nullcontext():
            for _ in range(3):
                each.zero_grad()
                each(x).sum().backward()
        found.append(noted(each))
    if how in PUT_BACK or how == "a global":
        assert found[0] == found[1]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["torch", "random", "numpy", "legacy"])
def test_generators_that_a_model_has_of_its_own_are_left_as_they_were(kind: str) -> None:
    made = {
        "torch": lambda: torch.Generator().manual_seed(1),
        "random": lambda: random.Random(1),
        "numpy": lambda: np.random.default_rng(1),
        "legacy": lambda: np.random.RandomState(1),
    }

    class Drawing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.own = [made[kind]()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = self.own[0]
            draw = torch.rand((), generator=own).item() if kind == "torch" else own.random()
            return super().forward(x) * draw

    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Drawing(), nn.Linear(16, 16), nn.Tanh()), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), UNLIMITED)
    report = ct.verify(model, plan, x, loss_fn=torch.sum)
    assert report.ok and report.compared and not report.unsteady
    assert torch.equal(model(x), plain(x))


def test_verify_tells_what_a_plan_leaves_in_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(recomputation.Attributes):
        def restore(self) -> None:
            """Does nothing."""

    model, x = nn.Sequential(*(Writing("a counter") for _ in range(4))), torch.randn(256, 16)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=Writing)
    plan = ct.plan(profile, ct.plan(profile, "1GiB").least_budget_bytes)
    for module in (step_run, recomputation):
        monkeypatch.setattr(module, "Attributes", Forgetful)
    with pytest.raises(ct.VerificationFailed, match=r"the attribute 0\.counter \(block 0\) differs"):
        ct.verify(model, plan, x, loss_fn=torch.sum)
    assert not model[0].counter


def test_an_expert_load_that_is_no_buffer_is_that_of_plain_training() -> None:
    """The loop moves a bias by what blocks have counted, so that a count too many is another loss."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route, self.up, self.down = nn.Linear(32, 4), nn.Linear(32, 128), nn.Linear(128, 32)
            self.bias, self.load = nn.Parameter(torch.zeros(4), requires_grad=False), torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = (self.route(x) + self.bias).softmax(-1)
            with torch.no_grad():
                self.load.add_(gates.argmax(-1).bincount(minlength=4))
            return x + self.down(torch.tanh(self.up(x))) * gates.amax(-1, keepdim=True)

    def trained(model: nn.Sequential) -> list[float]:
        optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            for layer in model:
                layer.bias.data += 1e-3 * (layer.load.mean() - layer.load)
                layer.load.zero_()
        return losses

    model, x = nn.Sequential(*(Routed() for _ in range(4))), torch.randn(256, 32)
    plain = copy.deepcopy(model)
    profile = ct.profile(model, x, loss_fn=lambda y: y.square().mean(), passes=1)
    ct.apply(model, ct.plan(profile, ct.plan(profile, "1GiB").least_budget_bytes))
    assert trained(model) == trained(plain)


class Calibrated(nn.Module):
    """Makes something in its first run, and notes beside it what belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.mask, self.scale, self.sizes = None, torch.ones(1), {}
        self.rows, self.seen = [], set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        if self.mask is None:
            self.mask, self.sizes["mask"] = torch.ones(64), 64
            self.scale.copy_(y.detach().abs().max() * 3)
            self.rows.append(64)
            self.seen.add(64)
        assert self.seen == set(self.rows)
        return x + self.down(y * self.mask / self.scale) / self.sizes["mask"]


def test_what_was_made_with_a_cache_stays_with_it() -> None:
    model, x = nn.Sequential(*(Calibrated() for _ in range(3))), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    ct.checkpoint(model, x, loss_fn=torch.sum, budget="1GiB", passes=1, blocks=Calibrated)
    assert torch.equal(model(x), plain(x))
    assert [(layer.scale, layer.rows) for layer in model] == [(layer.scale, [64]) for layer in plain]


@pytest.mark.parametrize("declared", [None, "nothing", "a tensor"])
def test_a_loss_in_an_attribute_is_no_cache(declared: str | None) -> None:
    """What each forward leaves anew does not make the load beside it stay."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.load = nn.Linear(16, 4), torch.zeros(4)
            if declared != "nothing":
                self.aux = None if declared is None else torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            share = self.gate(x).softmax(-1)
            chosen = (share.detach() - 0.01 * (self.load - self.load.mean())).argmax(-1)
            self.load += torch.bincount(chosen, minlength=4) / len(x)
            self.aux = share.mean(0).square().sum()
            return x + torch.tanh(x) * share.gather(1, chosen[:, None])

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Router() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean() + sum(layer.aux for layer in self.layers)

    model, x = Routed(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    profile = ct.profile(model, x, passes=1, blocks="layers.*")
    assert not any(layer.load.any() for layer in model.layers)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert ct.verify(model, plan, x).ok
    assert not any(layer.load.any() for layer in model.layers)
    ct.apply(model, plan)
    for _ in range(4):
        loss, exact = model(x), plain(x)
        assert torch.equal(loss, exact)
        loss.backward()  # a graph that the model holds, and which knows it, is freed by its backward alone


def test_hooks_that_a_first_run_installs_are_installed_once() -> None:
    """As transformers does for what is to be returned beside the result."""

    class Hooked(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "is_hooked"):
                self.is_hooked, self.seen = True, []
                for layer in self:
                    layer.register_forward_hook(lambda module, args, output: self.seen.append(output.shape))
            self.seen.clear()
            y = super().forward(x)
            assert len(self.seen) == len(self)
            return y

    model, x = Hooked(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))), torch.randn(64, 16)
    plan = ct.plan(ct.profile(copy.deepcopy(model), x, loss_fn=torch.sum, passes=1), UNLIMITED)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok
    model(x)


def test_attributes_that_cannot_be_written_are_only_read(tmp_path: Path) -> None:
    class Table(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            values = np.memmap(tmp_path / "table", dtype="f4", mode="r", shape=(16,))
            self.table = torch.from_numpy(values)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x)) + self.table

    np.arange(16, dtype="f4").tofile(tmp_path / "table")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written
        model = nn.Sequential(*(Table() for _ in range(4)))
    x = torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=Table)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_functions_that_are_made_anew_in_each_run_say_the_same() -> None:
    class Making(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.shape_of = lambda: x.shape
            return torch.tanh(super().forward(x))

    model, x = nn.Sequential(*(Making(16, 16) for _ in range(4))), torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=Making)
    assert not any(stage.keep_reason for stage in profile.stages if stage.kind == "block")
    ct.verify(model, ct.plan(profile, UNLIMITED), x, loss_fn=torch.sum)


def test_attributes_of_any_kind_are_looked_at_without_harm() -> None:
    class Odd(int):
        def __repr__(self) -> str:
            raise RuntimeError("it has no text")

    class Having(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.odd, self.local = Odd(1), threading.local()
            self.seeds, self.many = np.random.SeedSequence(1), [[i] * 100 for i in range(500)]
            self.ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
            self.around, self.table, self.deep = [1], {"rows": [2]}, [3]
            self.around.append(self.around)
            self.table["rows"].append(self.table)
            for _ in range(40):
                self.deep = [self.deep, self.deep]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x))

    model, x = nn.Sequential(*(Having() for _ in range(4))), torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=Having)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok
