"""What blocks write beside their results: into attributes, and elsewhere. It is written once a step, as in plain
training, or the block is kept; and profiling and verifying leave none of it.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import sys
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
import torch_models
from cairn.torch.runtime import recomputation, step_run
from torch import nn

pytestmark = pytest.mark.usefixtures("seeded")

UNLIMITED = 2**40


WRITTEN: list[int] = []  # by blocks, in what is no attribute


class Keeping:
    """An object with a state of its own, and another one behind it."""

    def __init__(self, depth: int = 1) -> None:
        self.seen, self.number, self.table = [], 0, {"runs": 0}
        self.next = Keeping(depth - 1) if depth else None


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


class Remembering(nn.Module):
    """Blocks beside a state that each forward replaces or fills."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(torch_models.Residual(16) for _ in range(3)))
        if isinstance(state, str):
            self.register_buffer("state", None)
        else:
            self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        row, state = x.detach().mean(0), self.state
        if isinstance(state, np.ndarray):
            state += row.numpy()
        elif isinstance(state, torch.Tensor) and state.numel() == 0:
            state.resize_(row.shape).copy_(row)
        elif isinstance(state, Pair):
            self.state = Pair(row, [row])
        elif isinstance(state, tuple):
            self.state = (float(row.sum()), state[1] + 1)
        elif isinstance(state, dict):
            self.state = {"a": {"b": (row, row)}}
        else:
            self.state = [(row, row)] if isinstance(state, list) else row
        return x


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    rest: list[torch.Tensor]


STATES: dict[str, Callable[[], Any]] = {
    "a list of tuples": lambda: [(torch.zeros(16), torch.zeros(16))],
    "a dict of dicts": lambda: {"a": {"b": (torch.zeros(16),)}},
    "a dataclass": lambda: Pair(torch.zeros(16), []),
    "numbers": lambda: (0.0, 0),
    "an array": lambda: np.zeros(16, np.float32),
    "no buffer yet": lambda: "buffer",
}


@pytest.mark.parametrize("how", STATES)
def test_a_state_that_forwards_replace_is_as_it_was_after_profiles_and_verifications(how: str) -> None:
    model, x = Remembering(STATES[how]()), torch.randn(32, 16)
    before = repr(model.state)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert repr(model.state) == before
    ct.verify(model, ct.plan(profile, UNLIMITED), x, loss_fn=torch.sum)
    assert repr(model.state) == before


def test_buffers_get_their_shapes_in_the_first_step_as_without_profiles() -> None:
    """As those of torch.ao's observers do."""
    model, x = Remembering(None), torch.randn(32, 16)
    del model.state
    model.register_buffer("state", torch.empty(0))
    ct.checkpoint(model, x, loss_fn=torch.sum, passes=1, budget="64MiB")
    assert model.state.shape == (0,)
    model(x).sum().backward()
    assert model.state.shape == (16,)


class Slotted(dict):
    """A container without attributes of its own."""

    __slots__ = ()


@pytest.mark.parametrize("kind", [list, deque])
def test_what_hooks_on_all_modules_collect_is_put_back(kind: type) -> None:
    model, x, seen = nn.Sequential(*(torch_models.Residual(16) for _ in range(4))), torch.randn(32, 16), kind()
    numbers = Slotted()

    def collect(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Linear):
            seen.append(output)
            numbers[0] = 0

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.sum() + sum(each.square().mean() for each in seen)

    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    handle = torch.nn.modules.module.register_module_forward_hook(collect)
    try:
        profile = ct.profile(model, x, loss_fn=loss_of, passes=1)
        assert not seen
        ct.apply(model, ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes))
        loss_of(model(x)).backward()
        assert len(seen) == linears
    finally:
        handle.remove()


class Warming(nn.Module):
    """Does something else from its third run on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.runs = nn.Linear(32, 128), nn.Linear(128, 32), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        y = self.down(self.up(x).tanh().sin())
        return y if self.runs > 3 else y * 0.1


def test_blocks_run_again_find_the_counts_that_they_found_first() -> None:
    plain, x = nn.Sequential(*(Warming() for _ in range(4)), nn.Linear(32, 4)), torch.randn(64, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert not plan.is_plain and planned[0].runs == 0
    ct.apply(planned, plan)
    for _ in range(6):
        for model in (plain, planned):
            model(x).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True))
        assert [block.runs for block in planned[:4]] == [block.runs for block in plain[:4]]


class Masking(nn.Module):
    """Masks more positions, the more often it has run; what it counts in has many kinds."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.calls = self.masked = 0
        self.is_late, self.names, self.place, self.small = False, {"runs": 0}, Keeping(0), torch.zeros(())

    def count(self) -> int:
        self.calls += 1
        if self.how == "seldom":
            self.masked += self.calls % 4 == 0
            return self.masked
        if self.how == "a flag":
            self.is_late = self.calls > 5
            return 3 * self.is_late
        if self.how == "a dict":
            self.names["runs"] += 1
            return max(0, self.names["runs"] - 5)
        if self.how == "an object":
            self.place.number += 1
            return max(0, self.place.number - 5)
        self.small += 1
        return max(0, int(self.small) - 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[1]) >= self.count()
        return x + self.inner(x * mask[None, :, None])


@pytest.mark.parametrize("how", ["seldom", "a flag", "a dict", "an object", "a small tensor"])
def test_counts_that_come_to_matter_later_are_found_as_they_were(how: str) -> None:
    plain, x = nn.Sequential(*(Masking(how) for _ in range(3)), nn.Linear(32, 4)), torch.randn(32, 16, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert not plan.is_plain
    ct.apply(planned, plan)
    for _ in range(9):
        for model in (plain, planned):
            model(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True))


class Recalling(nn.Module):
    """From its sixth run on, adds what it left in the run before; in the place of a tensor, or in a large buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.runs, self.memory = how, 0, torch.zeros(32, 4, 32)
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.register_buffer("book", torch.zeros(32, 32, 32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        known = self.memory if self.how == "an attribute" else self.book[:, :4]
        y = x + self.inner(torch.cat([x[:, :4] + known, x[:, 4:]], 1))
        if self.runs > 5 and self.how == "an attribute":
            self.memory = y[:, :4].detach()
        elif self.runs > 5:
            self.book.data[:, :4] = y[:, :4].detach()
        return y


@pytest.mark.parametrize("how", ["an attribute", "a buffer's data"])
def test_large_memories_that_begin_to_matter_are_refused_and_not_passed_over(how: str) -> None:
    plain, x = nn.Sequential(*(Recalling(how) for _ in range(3)), nn.Linear(32, 4)), torch.randn(32, 16, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    most = ct.plan(profile, UNLIMITED, allow=["recompute"])
    ct.apply(planned, ct.plan(profile, most.least_budget_bytes, allow=["recompute"]))
    for step in range(9):
        plain(x).square().mean().backward()
        try:
            planned(x).square().mean().backward()
        except ct.RecomputationError as error:
            assert step >= 5
            assert "computed other values" in str(error)
            return
        pairs = zip(planned.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


class Slots:
    __slots__ = ("value",)


def leaving(how: str) -> tuple[Callable[..., None], Callable[[], torch.Tensor]]:
    """A hook that leaves a module's output somewhere, and what gets it from there."""
    left: dict[str, torch.Tensor] = {}
    slots, variable = Slots(), torch.zeros(())

    def rebind(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal variable
        variable = output

    ways: dict[str, tuple[Callable[..., None], Callable[[], torch.Tensor]]] = {
        "a variable": (rebind, lambda: variable),
        "a class": (lambda m, a, output: setattr(Keeping, "left", output), lambda: Keeping.left),
        "slots": (lambda m, a, output: setattr(slots, "value", output), lambda: slots.value),
        "a dict": (lambda m, a, output: left.__setitem__("it", output), lambda: left["it"]),
    }
    return ways[how]


@pytest.mark.parametrize("how", ["a variable", "a class", "slots", "a dict"])
def test_gradients_go_through_what_hooks_leave_outside_or_are_refused(how: str) -> None:
    plain, x = nn.Sequential(*(torch_models.Residual(32) for _ in range(4))), torch.randn(256, 32)
    planned = copy.deepcopy(plain)
    for model in (plain, planned):
        hook, left = leaving(how)
        parts = [part for part in model[2].modules() if isinstance(part, nn.Linear)]
        parts[0].register_forward_hook(hook)
        if model is planned:
            profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
            most = ct.plan(profile, UNLIMITED, allow=["recompute"])
            ct.apply(model, ct.plan(profile, most.least_budget_bytes, allow=["recompute"]))
        torch.manual_seed(1)
        model(x).square().mean().backward(retain_graph=True)
        is_lost = how == "a dict" and model is planned
        with pytest.raises(ct.RecomputationError, match="what that run left") if is_lost else contextlib.nullcontext():
            left().square().mean().backward()
    are_equal = [torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True)]
    assert how == "a dict" or all(are_equal)


class Consuming(nn.Module):
    """Takes what it needs out of the dict and the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)), nn.Linear(32, 4))

    def forward(self, batch: dict[str, torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
        target = batch.pop("target")
        return nn.functional.cross_entropy(self.layers(batch.pop("x")) * weights.pop(), target)


def test_forwards_may_take_things_out_of_their_arguments() -> None:
    def batch() -> tuple[Any, ...]:
        return {"x": torch.randn(64, 32), "target": torch.randint(4, (64,))}, [torch.ones(4)]

    model, sample = Consuming(), batch()
    plan = ct.plan(ct.profile(model, sample, passes=1), UNLIMITED)
    assert ct.verify(model, plan, sample).ok
    assert len(sample[0]) == 2 and len(sample[1]) == 1
    ct.checkpoint(model, sample, budget=UNLIMITED, passes=1, progress=False)
    model(*batch()).backward()
    assert not model(*batch()).isnan()


# -- what the model does not have ----------------------------------------------------------------------------


class Proxies(nn.Module):
    """A loss with parameters, statistics and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies, self.norm, self.calls = nn.Linear(32, 10), nn.BatchNorm1d(32), 0
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.centre.mul_(0.9).add_(output.detach().mean(0))
        return self.proxies(self.norm(output) - self.centre).logsumexp(-1).mean() / self.calls


LONE_TEACHER: nn.Module | None = None


class Taught(nn.Module):
    """Compares itself with a network that is no part of it, and that follows it."""

    def __init__(self, where: str, teacher: nn.Module) -> None:
        super().__init__()
        self.student = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)))
        self.where, self.list = where, [{"teacher": teacher}] if where == "list" else []
        if where == "hidden":
            object.__setattr__(self, "hidden", teacher)

    def teacher(self) -> nn.Module:
        if self.where == "global":
            assert LONE_TEACHER is not None
            return LONE_TEACHER
        return self.list[0]["teacher"] if self.where == "list" else self.hidden

    def forward(self, x: torch.Tensor, teacher: nn.Module | None = None) -> torch.Tensor:
        teacher = self.teacher() if teacher is None else teacher
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(0.99)
        return (self.student(x) - teacher(x)).square().mean()


def _state_of(module: nn.Module) -> list[Any]:
    tensors = [*module.parameters(), *module.buffers()]
    grads = [p.grad for p in module.parameters()]
    return [t.clone() for t in tensors] + [g if g is None else g.clone() for g in grads] + [getattr(module, "calls", 0)]


def _is_as(module: nn.Module, before: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b
        for a, b in zip(_state_of(module), before, strict=True)
    )


@pytest.mark.parametrize("how", ["module", "closure", "method", "partial", "object"])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_losses_with_a_state_of_their_own_are_left_as_they_were(how: str, has_gradients: bool) -> None:
    model, loss, x = nn.Sequential(*(torch_models.Residual(32) for _ in range(3))), Proxies(), torch.randn(64, 32)
    weight, keeping = nn.Parameter(torch.ones(())), Keeping()
    keeping.loss = loss
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "module": loss,
        "closure": lambda output: loss(output) * weight,
        "method": loss.forward,
        "partial": functools.partial(lambda other, output: other(output), loss),
        "object": lambda output: keeping.loss(output),
    }
    loss_fn = ways[how]
    if has_gradients:
        loss_fn(model(x)).backward()
        model.zero_grad()
    before, grad = _state_of(loss), weight.grad if weight.grad is None else weight.grad.clone()
    profile = ct.profile(model, x, loss_fn=loss_fn, passes=1)
    plan = ct.plan(profile, UNLIMITED)
    assert ct.verify(model, plan, x, loss_fn=loss_fn).ok
    ct.sweep(profile, [UNLIMITED], model=model, args=x, loss_fn=loss_fn, beside=[], rounds=1)
    ct.checkpoint(model, x, loss_fn=loss_fn, budget=UNLIMITED, passes=1, progress=False)
    ct.handle(model).remove()
    with contextlib.suppress(ct.Unsupported):  # what is written to modules of others cannot be repeated
        ct.trace(model, x, loss_fn=loss_fn, passes=1)
    assert _is_as(loss, before)
    assert (weight.grad is grad) or torch.equal(weight.grad, grad)


@pytest.mark.parametrize("where", ["list", "hidden", "global", "argument"])
def test_teachers_that_are_no_part_of_the_model_are_left_as_they_were(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, x = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)), torch.randn(64, 32)
    monkeypatch.setitem(globals(), "LONE_TEACHER", teacher if where == "global" else None)
    model = Taught(where, teacher)
    sample = (x, teacher) if where == "argument" else (x,)
    before = _state_of(teacher)
    plan = ct.plan(ct.profile(model, sample, passes=1), UNLIMITED)
    assert ct.verify(model, plan, sample).ok
    assert _is_as(teacher, before)


def test_plans_made_in_training_leave_the_loss_as_it_was() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)))

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.layers(x) if mask is None else self.layers(x) * mask

    plain, loss, x, mask = Masked(), Proxies(), torch.randn(64, 32), torch.ones(64, 1)
    planned, planned_loss = copy.deepcopy(plain), copy.deepcopy(loss)
    ct.checkpoint(planned, x, loss_fn=planned_loss, budget=UNLIMITED, passes=1, progress=False)
    for args in ((x,), (x, mask), (x,)):
        for model, its in ((plain, loss), (planned, planned_loss)):
            torch.manual_seed(1)
            its(model(*args)).backward()
    assert [entry.made for entry in ct.handle(planned).plans] == ["measurement", "given"]
    assert _is_as(planned_loss, _state_of(loss)) and _is_as(planned, _state_of(plain))


def test_an_interrupt_as_hooks_are_taken_back_leaves_none() -> None:
    model, x = nn.Sequential(*(torch_models.Residual(16) for _ in range(3))), torch.randn(64, 16)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    most = ct.plan(profile, UNLIMITED, allow=["recompute"])
    ct.apply(model, ct.plan(profile, most.least_budget_bytes, allow=["recompute"]))

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is torch.autograd.graph.saved_tensors_hooks.__exit__.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            model(x).sum().backward()
    finally:
        sys.setprofile(before)
    assert torch.is_grad_enabled()
    model(x).sum().backward()  # would be refused, if hooks were in force
    ct.handle(model).remove()
    model(x).sum().backward()


class Routed(nn.Module):
    """Reads a buffer that is written behind it: by the model between its blocks, at the end, or by a hook."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.register_buffer("bias", torch.zeros(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * (1 + self.bias.sum())


def _balance(block: nn.Module, args: Any, output: torch.Tensor) -> None:
    block.bias.add_(0.1)


class Balanced(nn.Module):
    def __init__(self, where: str, count: int) -> None:
        super().__init__()
        self.blocks, self.where = nn.ModuleList(Routed(count) for _ in range(4)), where
        for block in self.blocks if where == "hook" else ():
            block.register_forward_hook(_balance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.where == "between":
                block.bias.add_(0.1)
        for block in self.blocks if self.where == "end" else ():
            block.bias.add_(0.1)
        return x


@pytest.mark.parametrize("count", [8, 4096])
@pytest.mark.parametrize("where", ["between", "end", "hook"])
def test_buffers_that_are_written_behind_a_block_are_found_as_they_were(where: str, count: int) -> None:
    plain, x = Balanced(where, count), torch.randn(128, 32)
    planned = copy.deepcopy(plain)
    profile = ct.profile(planned, x, loss_fn=torch.sum, passes=1)
    most = ct.plan(profile, UNLIMITED, allow=["recompute"])
    plan = ct.plan(profile, most.least_budget_bytes, allow=["recompute"])
    kept = {stage.keep_reason for stage in profile.stages if stage.kind == "block"}
    written = "reads a tensor that is changed in place, or replaced in its modules, after it ran"
    assert kept == {"" if count == 8 else written}
    ct.apply(planned, plan)
    for _ in range(3):
        for model in (plain, planned):
            model(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(planned.parameters(), plain.parameters(), strict=True))
        assert all(torch.equal(p, q) for p, q in zip(planned.buffers(), plain.buffers(), strict=True))


class Covariances:
    """Running statistics of activations, as second-order optimizers keep them."""

    def __init__(self) -> None:
        self.of: dict[nn.Module, torch.Tensor] = {}

    def hook(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        x = args[0].detach()
        before = self.of.get(module, torch.eye(x.shape[1]))
        self.of[module] = 0.9 * before + 0.1 * x.t() @ x / len(x)

    __call__ = hook


def collect(covariances: Covariances, module: nn.Module, args: tuple[torch.Tensor]) -> None:
    covariances.hook(module, args)


@pytest.mark.parametrize("how", ["method", "object", "partial", "closure"])
def test_statistics_that_hooks_keep_in_objects_are_counted_once(how: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))), torch.randn(64, 64)
    plain, kept = copy.deepcopy(model), []
    for trained in (model, plain):
        found = Covariances()
        hook = {
            "method": found.hook,
            "object": found,
            "partial": functools.partial(collect, found),
            "closure": lambda module, args, found=found: found.hook(module, args),
        }[how]
        for layer in trained:
            layer[0].register_forward_pre_hook(hook)
        kept.append(found)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, blocks=list(model))
    assert all("'of'" in stage.keep_reason for stage in profile.stages if stage.kind == "block")
    ct.apply(model, ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes))
    for found in kept:
        found.of.clear()
    for _ in range(2):
        model(x).sum().backward()
        plain(x).sum().backward()
    assert all(map(torch.equal, *(found.of.values() for found in kept)))


def test_small_statistics_in_attributes_do_not_close_blocks() -> None:
    """They are compared after each later run, which is not among what the run does."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.gelu(self.up(self.norm(x)))
            self.sparsity = (y > 0).float().mean().detach()
            return x + self.down(y)

    model, x = nn.Sequential(*(Sparse() for _ in range(4))), torch.randn(128, 64)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    plan = ct.plan(profile, ct.plan(profile, UNLIMITED).least_budget_bytes)
    assert plan.inside and ct.verify(model, plan, x, loss_fn=torch.sum).ok
    with ct.apply(model, plan) as handle:
        for _ in range(3):
            model(x).sum().backward()
        assert not any("aten.equal" in note for note in handle.executor.notes)
