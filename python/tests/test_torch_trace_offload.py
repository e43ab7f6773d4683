"""Schedules of traces that offload values."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn
import cairn.torch as ct
from cairn.torch.base.errors import TransferFailed
from cairn.torch.offloading.copy_streams import Copy, ThreadCopyStreams
from cairn.torch.offloading.tiers import HostTier
from trace_support import Plain, make, run_from

pytestmark = pytest.mark.usefixtures("seeded")


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

    def submit(lanes: ThreadCopyStreams, copy: Copy) -> None:
        seen.append((copy.kind, copy.what))
        plainly(lanes, copy)

    plainly = ThreadCopyStreams.submit
    with monkeypatch.context() as patch:
        patch.setattr(ThreadCopyStreams, "submit", submit)
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
