"""In which calls hooks are in force, and what they cost."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence

import pytest
import torch
from cairn.torch import profiler
from cairn.torch.profiling import overhead
from cairn.torch.selective.submodule_calls import CALL_COST, Call, covering
from cairn.torch.selective.submodule_hooks import recorded_calls
from selective_support import WIDTH, mean_square, net, sample
from submodule_hooks_support import Act, Own, Parts
from torch import Tensor, nn


def _random_calls(choose: random.Random, first: int, end: int, depth: int = 0) -> list[Call]:
    """Some calls between two numbers of saved tensors, those within others before them."""
    found: list[Call] = []
    places = sorted(choose.randint(first, end) for _ in range(2 * choose.randint(0, 3)))
    for low, high in zip(places[::2], places[1::2], strict=True):
        inner = _random_calls(choose, low, high, depth + 1) if depth < 3 else []
        found += [*inner, Call(len(found) + 100 * depth, 0, low, high)]
    return found


def _cheapest(calls: Sequence[Call], wanted: Sequence[int]) -> float:
    """What it costs at least to have hooks in force wherever a wanted tensor is saved, of all ways to choose."""
    best = float("inf")
    for count in range(len(calls) + 1):
        for chosen in itertools.combinations(calls, count):
            apart = all(a.end <= b.first or b.end <= a.first for a, b in itertools.combinations(chosen, 2))
            holds = all(any(call.first <= index < call.end for call in chosen) for index in wanted)
            if apart and holds:
                best = min(best, sum(call.end - call.first + CALL_COST for call in chosen))
    return best


def test_calls_cover_what_is_wanted_at_the_least_cost() -> None:
    choose, found_some = random.Random(5), 0
    for _ in range(400):
        count = choose.randint(1, 30)
        calls = _random_calls(choose, 0, count)[-9:]
        wanted = sorted(choose.sample(range(count), min(count, choose.randint(1, 4))))
        least, found = _cheapest(calls, wanted), covering(calls, wanted, count)
        if found is None:
            assert least >= count
            continue
        found_some += 1
        assert sum(call.end - call.first + CALL_COST for call in found) == least < count
        assert all(sum(call.first <= index < call.end for call in found) == 1 for index in wanted)
        assert found == sorted(found, key=lambda call: call.first)
    assert found_some > 20


def test_calls_are_noted_in_the_order_in_which_they_end() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Act(), Own()

        def forward(self, x: Tensor) -> Tensor:
            self.save(1)
            self.one(x)
            self.save(2)
            return self.one(self.two(x))

        def save(self, count: int) -> None:
            saved[0] += count

    saved, calls = [0], list[Call]()
    outer = Outer()
    parts, before = list(outer.modules()), [dict(vars(part)) for part in outer.modules()]
    x = torch.zeros(2, WIDTH)
    with recorded_calls(parts, lambda: saved[0], calls):
        thread = threading.Thread(target=lambda: outer(x))
        thread.start()
        thread.join()
        assert not calls
        saved[0] = 0
        outer(x)
        outer.one(x)
    by_name = [(next(n for n, p in outer.named_modules() if p is parts[call.part]), *call[1:]) for call in calls]
    assert [each for each in by_name if each[0] in ("one", "two", "")] == [
        ("one", 0, 1, 1),
        ("two", 0, 3, 3),
        ("one", 1, 3, 3),
        ("", 0, 0, 3),
        ("one", 2, 3, 3),
    ]
    assert [vars(part) for part in parts] == before
    with pytest.raises(ZeroDivisionError), recorded_calls(parts, lambda: 0, calls):
        raise ZeroDivisionError
    assert [vars(part) for part in parts] == before


def test_hooks_count_in_what_options_are_said_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead.Cost, "of_part", lambda self, hooks: 10**9 * hooks)
    profile = profiler.profile(net(Parts), sample(), loss_fn=mean_square, passes=1)
    [stage, *_] = [stage for stage in profile.stages if stage.options]
    hooks = [(option.forward_ns - stage.forward_ns) // 10**9 for option in stage.options[1:]]
    assert all(0 < count <= len(stage.options[0].decisions) for count in hooks) and min(hooks) < max(hooks)
