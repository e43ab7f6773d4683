"""Schedules: operations, recorded values, files; the simulator; verification; timelines."""

import copy
import gc
import json
import pickle
import threading
from pathlib import Path

import cairn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

OPTIONS = [cairn.Option(300, 10, 20), cairn.Option(120, 10, 25, 0, 50, "selective")]
CHAIN = cairn.Chain(
    [cairn.Stage(100, OPTIONS, name=f"h.{i}") for i in range(3)],
    input_bytes=100,
    machine=cairn.Machine(1000, 10**9, 10**9),
)
GRAPH = cairn.Graph([cairn.Node(5, 10), cairn.Node(5, 10, [0]), cairn.Node(5, 10, [1])])
STORE_ALL = [("forward_save", i, 0) for i in (1, 2, 3)] + [("backward", i) for i in (3, 2, 1)]
RECOMPUTE = [
    ("forward_keep", 1),
    ("forward_drop", 2),
    ("forward_save", 3, 1),
    ("backward", 3),
    ("forward_save", 1, 0),
    ("forward_save", 2, 0),
    ("backward", 2),
    ("backward", 1),
]

stage = st.integers(1, 3)
values = st.sampled_from(["output", "saved"])
moves = st.sampled_from(["drop", "offload", "prefetch", "discard"])
chain_ops = (
    st.tuples(st.just("forward_save"), stage, st.integers(0, 1))
    | st.tuples(st.sampled_from(["forward_keep", "forward_drop", "backward"]), stage)
    | st.tuples(moves, values, stage)
)
graph_ops = st.tuples(moves | st.just("compute"), st.integers(0, 2))
recorded = st.none() | st.integers(0, 10**6)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_round_trips(data: st.DataObject) -> None:
    problem, kind = data.draw(st.sampled_from([(CHAIN, chain_ops), (GRAPH, graph_ops)]))
    ops = data.draw(st.lists(kind, max_size=8))
    info = {name: data.draw(recorded) for name in ("budget_bytes", "makespan_ns", "peak_bytes", "lower_bound_ns")}
    info["solver"] = data.draw(st.none() | st.just("by-hand"))
    info["machine"] = data.draw(st.none() | st.just(cairn.Machine(5, 6, 7, True, 8)))
    made = cairn.Schedule.from_ops(problem, ops, **info)
    assert made.ops == tuple(ops) and len(made) == len(ops)
    assert {name: getattr(made, name) for name in info} == info
    for again in (
        cairn.Schedule.from_json(problem, made.to_json()),
        cairn.Schedule.from_ops(problem, made.ops, **info),
        pickle.loads(pickle.dumps(made)),
    ):
        assert again == made and hash(again) == hash(made)
        assert again.to_json() == made.to_json()
        assert again.problem_hash == problem.hash
    assert json.loads(made.to_json())["ops"] == [list(op) for op in ops]


def test_file(tmp_path: Path) -> None:
    made = cairn.Schedule.from_ops(CHAIN, STORE_ALL, solver="by-hand")
    made.save(tmp_path / "s.json")
    assert cairn.Schedule.load(CHAIN, tmp_path / "s.json") == made
    with pytest.raises(cairn.Mismatch) as caught:
        cairn.Schedule.load(CHAIN.replace(fixed_bytes=1), tmp_path / "s.json")
    assert caught.value.file == str(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (("forward_sav", 1), "'forward_sav' is not an operation; there are forward_save, "),
        (("drop", 1), '"output" or "saved"'),
        (("drop", "input", 1), '"output" or "saved"'),
        (("backward",), r'expected \("backward", index\)'),
        (("backward", 1, 2), r'expected \("backward", index\)'),
        (("forward_save", 1, 2), "option"),
        (("forward_save", 1, 2**16), "the option is 65536, out of range: 0 to 63"),
        (("backward", 4), "stage"),
        (("backward", -1), "the index is -1, out of range: 0 to 2147483647"),
        (("compute", 1), "compute"),
        ((["backward"], 1), "is not an operation; there are forward_save"),
        ("backward", "an operation is a tuple"),
        (7, "an operation is a tuple"),
    ],
)
def test_operations_are_checked(op, text: str) -> None:
    with pytest.raises(cairn.BadInput, match=text) as caught:
        cairn.Schedule.from_ops(CHAIN, [*STORE_ALL, op])
    assert caught.value.index == 6
    for wrong, text in (
        ([("backward", 1.0)], r"ops\[0\]: index must be an integer, not float 1.0"),
        ([("forward_save", 1, "keep")], r"ops\[0\]: option must be an integer, not str 'keep'"),
        (7, "ops must be a list of operations, not int"),
    ):
        with pytest.raises(TypeError, match=text):
            cairn.Schedule.from_ops(CHAIN, wrong)


def test_the_option_of_a_forward_defaults_to_the_first() -> None:
    assert cairn.Schedule.from_ops(CHAIN, [("forward_save", 1)]).ops == (("forward_save", 1, 0),)


def test_simulation() -> None:
    replay = cairn.simulate(CHAIN, cairn.Schedule.from_ops(CHAIN, STORE_ALL))
    assert replay.valid and replay.violation is None
    assert (replay.makespan_ns, replay.peak_bytes, replay.host_peak_bytes) == (90, 1200, 0)
    assert (replay.compute_ns, replay.recompute_ns, replay.stall_ns) == (90, 0, 0)
    replay = cairn.simulate(CHAIN, cairn.Schedule.from_ops(CHAIN, RECOMPUTE), timeline=True)
    assert replay.recompute_ns == 20
    assert [span.op for span in replay.timeline] == list(range(len(RECOMPUTE)))
    assert replay.timeline[-1].end_ns == replay.makespan_ns
    assert max(point.device_bytes for point in replay.memory) == replay.peak_bytes
    assert [point.time_ns for point in replay.memory] == sorted(point.time_ns for point in replay.memory)


def test_timeline_has_lanes() -> None:
    ops = [*STORE_ALL[:1], ("offload", "saved", 1), *STORE_ALL[1:]]
    replay = cairn.simulate(CHAIN, cairn.Schedule.from_ops(CHAIN, ops), timeline=True)
    assert {span.op: span.lane for span in replay.timeline}[1] == "to_host"
    assert max(point.host_bytes for point in replay.memory) == replay.host_peak_bytes == 300


def test_budgets() -> None:
    made = cairn.Schedule.from_ops(CHAIN, STORE_ALL, budget_bytes=1199)
    for budget in (cairn.RECORDED, 1199, "1199"):
        replay = cairn.simulate(CHAIN, made, budget)
        assert not replay.valid and replay.makespan_ns is None and replay.peak_bytes is None
        assert (replay.violation.code, replay.violation.op) == ("over_budget", 3)
        assert replay.violation.needed_bytes - replay.violation.free_bytes == 1
    for budget in (None, "none", 1200, "2KB"):
        assert cairn.simulate(CHAIN, made, budget).valid
    for wrong, kind in ((-1, cairn.BadInput), ("1 GiB", cairn.BadInput), (0.5, TypeError), (2**64, cairn.Overflow)):
        with pytest.raises(kind):
            cairn.simulate(CHAIN, made, wrong)


def test_verification() -> None:
    made = cairn.Schedule.from_ops(CHAIN, STORE_ALL, budget_bytes=1200, makespan_ns=90, peak_bytes=1200)
    verified = cairn.verify(CHAIN, made)
    assert verified.schedule is made and verified.problem is CHAIN and verified.budget_bytes == 1200
    assert verified.replay == cairn.simulate(CHAIN, made)
    assert copy.deepcopy(verified) is verified
    assert pickle.loads(pickle.dumps(verified)).replay == verified.replay
    assert cairn.verify(CHAIN, made, "1MiB").budget_bytes == 2**20
    with pytest.raises(AttributeError):
        verified.budget_bytes = 7
    for kind in (cairn.Verified, cairn.Schedule):
        with pytest.raises(TypeError, match="is made by"):
            kind()


@pytest.mark.parametrize(
    ("info", "ops", "code", "op"),
    [
        ({}, STORE_ALL[:-1], "incomplete", None),
        ({"makespan_ns": 91}, STORE_ALL, "recorded_makespan", None),
        ({"peak_bytes": 1}, STORE_ALL, "recorded_peak", None),
        ({"budget_bytes": 1000}, STORE_ALL, "over_budget", 2),
        ({}, [("backward", 3)], "not_resident", 0),
    ],
)
def test_violations_are_raised(info: dict, ops: list, code: str, op: int) -> None:
    with pytest.raises(cairn.InvalidSchedule, match=code) as caught:
        cairn.verify(CHAIN, cairn.Schedule.from_ops(CHAIN, ops, **info))
    assert (caught.value.violation.code, caught.value.violation.op) == (code, op)
    assert caught.value.index == op and not caught.value.replay.valid
    assert caught.value.replay.to_dict()["violation"] == {
        "code": code,
        "op": op,
        "message": caught.value.violation.message,
    }


def test_the_wrong_problem_is_a_mismatch() -> None:
    made = cairn.Schedule.from_ops(CHAIN, STORE_ALL)
    for judge in (cairn.simulate, cairn.verify):
        with pytest.raises(cairn.Mismatch):
            judge(CHAIN.replace(fixed_bytes=1), made)


def test_verified_holds_what_it_needs() -> None:
    problem = CHAIN.replace(name="short-lived")
    verified = cairn.verify(problem, cairn.Schedule.from_ops(problem, STORE_ALL))
    del problem
    gc.collect()
    assert verified.problem.name == "short-lived" and verified.schedule.ops == tuple(STORE_ALL)


def test_trace(tmp_path: Path) -> None:
    made = cairn.Schedule.from_ops(CHAIN, RECOMPUTE)
    cairn.save_trace(tmp_path / "t.json", CHAIN, made)
    events = json.loads((tmp_path / "t.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert sum(event.get("ph") in ("X", "B") for event in events) >= len(RECOMPUTE)
    with pytest.raises(cairn.InvalidSchedule):
        cairn.trace(CHAIN, made, 1)


def test_no_garbage_is_left_to_the_collector() -> None:
    made = cairn.Schedule.from_ops(CHAIN, RECOMPUTE)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            cairn.simulate(CHAIN, made, timeline=True)
            cairn.verify(CHAIN, cairn.Schedule.from_json(CHAIN, made.to_json()))
            cairn.Chain(CHAIN.stages, input_bytes=1)
            cairn.solve(CHAIN, "1GiB", progress=lambda _: None)
            with pytest.raises(cairn.Unsupported):
                cairn.solve(GRAPH, "1GiB", solver="chain-dp")
            with pytest.raises(cairn.Parse):
                cairn.Problem.from_json("{")
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_threads_share_problems_and_schedules() -> None:
    made = cairn.Schedule.from_ops(CHAIN, RECOMPUTE)
    found = []

    def work() -> None:
        for _ in range(50):
            found.append(cairn.simulate(CHAIN, made, timeline=True).makespan_ns)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and len(set(found)) == 1
