"""What the commands print, write and return."""

import functools
import json
import os
import pty
import re
import resource
import signal
import subprocess
import time

import pytest
from cli_support import CHAIN, CHAIN_HASH, GRAPH, GRAPH_HASH, PROGRAM, STORE_ALL_CHAIN, chain, schedule_of, stage

SOLVE_KEYS = [
    "outcome",
    "solver",
    "budget_bytes",
    "makespan_ns",
    "peak_bytes",
    "host_peak_bytes",
    "lower_bound_ns",
    "gap",
    "least_bytes",
    "least_is_exact",
    "least_lower_bytes",
    "store_all_bytes",
    "store_all_ns",
    "reason",
    "optimal_in",
    "recompute_ns",
    "stall_ns",
    "solve_ns",
    "solver_peak_bytes",
    "checkpoints",
    "objective_bytes",
]
REPLAY_KEYS = ["valid", "makespan_ns", "peak_bytes", "host_peak_bytes", "recompute_ns", "stall_ns", "violation"]


# ---- solve ----


def test_solve_prints_one_object(cairn):
    answer = cairn.json("solve", cairn.file("p", CHAIN), "--budget", "none", "--solver", "store-all")
    assert list(answer) == SOLVE_KEYS
    assert answer["outcome"] in ("optimal", "feasible")
    assert answer["solver"] == "store-all"
    assert answer["budget_bytes"] is None
    assert answer["makespan_ns"] == answer["store_all_ns"] == 6000
    assert answer["peak_bytes"] == answer["store_all_bytes"]
    assert answer["gap"] == (answer["makespan_ns"] - answer["lower_bound_ns"]) / answer["makespan_ns"]
    assert answer["recompute_ns"] == 0
    assert answer["checkpoints"] is None and answer["objective_bytes"] is None
    for key in SOLVE_KEYS:
        if key.endswith(("_bytes", "_ns")) and answer[key] is not None:
            assert type(answer[key]) is int


def test_solve_writes_a_schedule_that_verifies(cairn):
    problem = cairn.file("p", CHAIN)
    done = cairn("solve", problem, "--budget", "1MiB", "-o", "s.json")
    assert done.code == 0, done.err
    assert cairn.files() == {"p", "s.json"}
    written = json.loads((cairn.folder / "s.json").read_text())
    assert written["problem"] == {"format": "cairn-chain", "hash": CHAIN_HASH}
    assert written["budget_bytes"] == 1 << 20
    replay = cairn.json("verify", problem, "s.json")
    assert list(replay) == REPLAY_KEYS
    assert replay["valid"] and replay["violation"] is None
    assert (replay["makespan_ns"], replay["peak_bytes"]) == (written["makespan_ns"], written["peak_bytes"])
    for flags, budget in (([], "1.00 MiB"), (["--budget", "none"], "none"), (["--budget", "2MiB"], "2.00 MiB")):
        assert cairn("verify", problem, "s.json", *flags).out.splitlines()[:2] == ["valid", f"budget        {budget}"]


def test_graphs_are_solved(cairn):
    problem = cairn.file("p", GRAPH)
    assert cairn("solve", problem, "--budget", "none", "-o", "s").code == 0
    assert json.loads((cairn.folder / "s").read_text())["problem"] == {"format": "cairn-graph", "hash": GRAPH_HASH}
    assert cairn.json("simulate", problem, "s")["makespan_ns"] == 1100


def test_searches_say_how_much_they_may_look_at(cairn):
    cairn.file("p", {**GRAPH, "nodes": [{"cost_ns": 2, "bytes": 5, "deps": [v - 1] if v else []} for v in range(20)]})
    chosen, asked = (
        re.search(r"^iterations +(\d+) ", cairn("solve", "p", "--solver", "graph-search", *flags).out, re.MULTILINE)
        for flags in (["--budget", "15"], ["--budget", "15", "--iterations", "7"])
    )
    assert int(chosen[1]) > 1000 and asked[1] == "7"
    for flags in (["--budget", "15", "--time-limit", "1s"], ["--budget", "15", "--solver", "store-all"]):
        assert "\niterations" not in cairn("solve", "p", *flags).out


def test_same_input_same_bytes(cairn):
    problem = cairn.file("p", chain(*[stage(7 + i, time=3 + i) for i in range(12)]))
    budget = cairn.json("limits", problem)["store_all_bytes"] - 1
    first = [cairn("solve", problem, "--budget", budget, "-o", "-").out for _ in range(2)]
    assert first[0] == first[1]


def test_infeasible_is_an_answer(cairn):
    cairn.file("p", CHAIN)
    answer = cairn.json("solve", "p", "--budget", "1", "-o", "s", "--trace", "t", code=1)
    assert answer["outcome"] == "infeasible"
    assert answer["makespan_ns"] is None and answer["peak_bytes"] is None and answer["gap"] is None
    assert answer["least_bytes"] > 1
    assert answer["reason"]
    assert cairn.files() == {"p"}
    least = cairn.json("solve", "p", "--budget", answer["least_bytes"])
    assert least["outcome"] in ("optimal", "feasible")
    assert cairn.json("solve", "p", "--budget", answer["least_bytes"] - 1, code=1)["outcome"] == "infeasible"
    done = cairn("solve", "p", "--budget", "1", "-o", "-")
    assert (done.code, done.out) == (1, "")
    assert "infeasible" in done.err


def test_the_table_for_people(cairn):
    cairn.file("p", chain(*[stage(1000, saved=3000, name=f"block {i}") for i in range(8)], name="net \u001b[31m"))
    limits = cairn.json("limits", "p")
    done = cairn("solve", "p", "--budget", limits["least_bytes"])
    assert done.code == 0
    for word in ("budget", "peak", "time", "against store-all", "recomputed", "least memory", "solved in"):
        assert word in done.out
    assert "\x1b" not in done.out
    if limits["least_bytes"] < limits["store_all_bytes"]:
        assert "block 0" in done.out


def test_steps_that_take_no_time(cairn):
    """Nothing is as long as nothing; what is longer is longer by no share of it."""
    stages = [stage(1000, saved=3000, time=0, no_recompute=True) for _ in range(4)]
    link = ["--host-budget", "1MB", "--to-host", "1GB/s", "--to-device", "1GB/s"]
    cairn.file("p", chain(*stages))
    plain, moved = (cairn("solve", "p", "--budget", budget, *link) for budget in ("none", "10KB"))
    assert plain.code == 0 and re.search(r"\ntime +0 ns +\+0\.0 % against store-all\n", plain.out)
    assert moved.code == 0 and re.search(r"\ntime +[1-9]\S* us\n", moved.out)
    first, second = cairn("compare", "p", "--budgets", "10KB,none", *link).out.splitlines()[-2:]
    assert re.search(r" us +- +\d", first) and " +0.0 % " in second


def test_pipes(cairn):
    problem = cairn.file("p", CHAIN)
    solved = cairn("solve", "-", "--budget", "1MiB", "-o", "-", text=json.dumps(CHAIN))
    assert solved.code == 0 and json.loads(solved.out)["format"] == "cairn-schedule"
    assert cairn.json("verify", problem, "-", text=solved.out)["valid"]
    cairn.file("s", solved.out)
    assert cairn.json("verify", "-", "s", text=json.dumps(CHAIN))["valid"]


# ---- verify, simulate ----


def test_verify_uses_the_recorded_budget_and_numbers(cairn):
    cairn.file("p", CHAIN)
    right = cairn.json("simulate", "p", cairn.file("s", schedule_of(CHAIN_HASH, STORE_ALL_CHAIN)))
    makespan, peak = right["makespan_ns"], right["peak_bytes"]
    recorded = {"budget_bytes": peak, "makespan_ns": makespan, "peak_bytes": peak}
    cases = [
        ({}, [], None),
        (recorded, [], None),
        ({**recorded, "budget_bytes": peak - 1}, [], "over_budget"),
        ({**recorded, "budget_bytes": peak - 1}, ["--budget", peak], "recorded_makespan"),
        ({**recorded, "budget_bytes": peak - 1, "makespan_ns": None, "peak_bytes": None}, ["--budget", peak], None),
        (recorded, ["--budget", peak - 1], "over_budget"),
        ({**recorded, "makespan_ns": makespan + 1}, [], "recorded_makespan"),
        ({**recorded, "peak_bytes": peak + 1}, [], "recorded_peak"),
    ]
    for fields, flags, code in cases:
        cairn.file("s", schedule_of(CHAIN_HASH, STORE_ALL_CHAIN, **fields))
        replay = cairn.json("verify", "p", "s", *flags, code=1 if code else 0)
        assert (replay["violation"] or {}).get("code") == code
    assert cairn.json("simulate", "p", "s", "--budget", "none")["valid"]


def test_a_violation_names_the_operation(cairn):
    cairn.file("p", CHAIN)
    cairn.file("s", schedule_of(CHAIN_HASH, [["forward_save", 1], ["backward", 1]]))
    replay = cairn.json("verify", "p", "s", code=1)
    assert replay["violation"]["code"] == "wrong_order" and replay["violation"]["op"] == 1
    assert replay["violation"]["message"]
    assert all(replay[key] is None for key in REPLAY_KEYS[1:-1])
    cairn.file("s", schedule_of(CHAIN_HASH, []))
    replay = cairn.json("simulate", "p", "s", code=1)
    assert replay["violation"]["code"] == "incomplete" and replay["violation"]["op"] is None
    done = cairn("verify", "p", "s")
    assert done.code == 1 and done.out.startswith("not valid: incomplete")


def test_transfers_need_a_machine(cairn):
    without = {key: value for key, value in CHAIN.items() if key != "machine"}
    cairn.file("p", without)
    hash_ = json.loads(cairn("solve", "p", "--budget", "none", "-o", "-").out)["problem"]["hash"]
    moves = [["forward_save", 1], ["offload", "saved", 1], ["forward_save", 2], ["backward", 2], ["backward", 1]]
    cairn.file("s", schedule_of(hash_, moves))
    assert cairn.json("verify", "p", "s", code=1)["violation"]["code"] == "no_machine"
    machine = ["--host-budget", "1MiB", "--to-host", "1GB/s", "--to-device", "1GB/s"]
    replay = cairn.json("verify", "p", "s", *machine, "--latency", "10ns", "--shared-link")
    assert replay["host_peak_bytes"] == 65536 and replay["makespan_ns"] >= 65536 + 10
    assert cairn.json("verify", "p", "s", "--host-budget", "1", *machine[2:], code=1)["violation"]["code"] == \
        "over_host_budget"  # fmt: skip
    assert cairn("verify", "p", "s", *machine[:4]).code == 2
    own = {"host_bytes": 1 << 20, "to_host_bytes_per_s": 10**9, "to_device_bytes_per_s": 10**9}
    cairn.file("s", schedule_of(hash_, moves, machine=own))
    assert cairn.json("verify", "p", "s")["valid"]
    done = cairn("verify", "p", "s", "--host-budget", "1", *machine[2:])
    assert done.code == 0 and "machine of its own" in done.err


def test_traces_open_as_json(cairn):
    cairn.file("p", CHAIN)
    cairn.file("s", schedule_of(CHAIN_HASH, [["forward_keep", 1], *STORE_ALL_CHAIN]))
    assert cairn("simulate", "p", "s", "--trace", "t").code == 0
    events = json.loads((cairn.folder / "t").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == \
        ["forward h.0", "recompute h.0", "forward h.1", "backward h.1", "backward h.0"]  # fmt: skip
    assert [span["dur"] for span in spans] == [0.95, 1.0, 1.0, 2.0, 2.0]
    curve = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == "device memory"]
    assert max(curve) == cairn.json("simulate", "p", "s")["peak_bytes"]
    assert cairn("simulate", "p", "s", "--trace", "t2", "--budget", "1").code == 1
    assert cairn.files() == {"p", "s", "t"}
    assert cairn("solve", "p", "--budget", "none", "--trace", "t3").code == 0
    assert json.loads((cairn.folder / "t3").read_text())["traceEvents"]
    assert json.loads(cairn("simulate", "p", "s", "--trace", "-").out)["traceEvents"] == events


# ---- the rest ----


def test_limits(cairn):
    limits = cairn.json("limits", cairn.file("p", CHAIN), "--solver", "store-all")
    assert list(limits) == ["least_bytes", "least_is_exact", "least_lower_bytes", "store_all_bytes", "store_all_ns"]
    assert limits["least_lower_bytes"] <= limits["least_bytes"] <= limits["store_all_bytes"]
    graph = cairn("limits", cairn.file("g", GRAPH))
    assert graph.code == 0 and "exact" in graph.out


def test_bound(cairn):
    bound = cairn.json("bound", cairn.file("p", CHAIN), "--budget", "none")
    assert list(bound) == ["lower_bound_ns", "method"]
    assert 0 < bound["lower_bound_ns"] <= 6000
    least = cairn.json("limits", "p")["least_lower_bytes"]
    for budget, said in ((least, False), (least - 1, True), (0, True)):
        done = cairn("bound", "p", "--budget", str(budget), "--json")
        assert done.code == 0 and list(json.loads(done.out)) == list(bound)
        assert (f"every schedule needs at least {least} bytes" in done.err) == said
        table = cairn("bound", "p", "--budget", str(budget)).out
        assert table.startswith("lower bound ") and ("least memory " in table) == said
    assert cairn("bound", "p").code == 2


def test_solvers(cairn):
    solvers = cairn.json("solvers")["solvers"]
    names = [solver["name"] for solver in solvers]
    assert {"auto", "store-all"} <= set(names) and len(set(names)) == len(names)
    for solver in solvers:
        assert list(solver)[:2] == ["name", "available"] and type(solver["available"]) is bool
        assert solver["summary"]
    text = cairn("solvers").out
    assert all(name in text for name in names)


def test_compare(cairn):
    cairn.file("p", chain(*[stage(10 + i) for i in range(4)]))
    limits = cairn.json("limits", "p")
    done = cairn("compare", "p", "--budgets", "3", "--json")
    assert done.code == 0
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert all(list(answer) == SOLVE_KEYS for answer in answers)
    asked = sorted({answer["budget_bytes"] for answer in answers})
    assert asked[0] == limits["least_bytes"] and asked[-1] == limits["store_all_bytes"]
    at = limits["store_all_bytes"]
    best = min(a["makespan_ns"] for a in answers if a["budget_bytes"] == at and a["makespan_ns"] is not None)
    assert best == limits["store_all_ns"]
    lines = cairn("compare", "p", "--budgets", f"{at},1GiB,none", "--json").out.splitlines()
    assert {json.loads(line)["budget_bytes"] for line in lines} == {at, 1 << 30, None}
    table = cairn("compare", "p", "--budgets", "2")
    assert table.out.startswith("solver") and " +0.0 % " in table.out
    assert "left out because they take no chains: " in table.err and "graph-search" in table.err
    named = {solver["name"] for solver in cairn.json("solvers")["solvers"]}
    asked = {answer["solver"] for answer in answers}
    assert all(table.err.count(name) == 1 for name in ("graph-milp", "offload-dp", "select-cubic", "chain-alike"))
    assert all(name in table.err for name in named - asked - {"auto"})
    timed = cairn("compare", "p", "--budgets", "2", "--time-limit", "1500ms", "--json")
    told = re.search(r"each of (\d+) solvers may take 1500ms at each of 2 budgets, (\S+) s in all", timed.err)
    assert told and float(told[2]) == 3 * int(told[1]) and int(told[1]) == len(timed.out.splitlines()) / 2
    csv = cairn("compare", "p", "--budgets", "2", "--csv").out.splitlines()
    assert all(line.count(",") == csv[0].count(",") for line in csv) and len(csv) > 2


def test_options_of_other_solvers(cairn):
    """What would change nothing is refused, or, of limits, told."""
    cairn.file("p", chain(*[stage(10 + i) for i in range(4)]))
    asked = ("p", "--budget", "200")
    for words in (("solve", *asked), ("limits", "p"), ("max-batch", *asked, "--batch", "2")):
        done = cairn(*words, "--solver", "chain-exact", "--slots", "20")
        assert done.code == 2 and done.out == "" and "chain-exact takes no option slots; these do: " in done.err
        assert "chain-dp" in done.err
        done = cairn(*words, "--solver", "chain-exact", "--iterations", "20", "--seed", "1")
        assert done.code == 0 and "chain-exact has no use for --iterations; these have: " in done.err
        assert "no use for --seed" in done.err and "graph-search" in done.err
        assert cairn(*words, "--slots", "20").code == 0
    assert (
        cairn.json("solve", *asked, "--solver", "store-all", "--segments", "2", code=2)["error"]["code"]
        == "unsupported"
    )
    selecting = ("solve", "p", "--minimize", "memory", "--solver", "select-cubic", "--objective")
    assert cairn(*selecting, "eq6").err == ""
    done = cairn(*selecting, "eq9")
    assert (
        done.code == 2
        and "select-cubic takes no option objective=eq9; these do: " in done.err
        and "select-linear" in done.err
    )
    done = cairn("solve", cairn.file("g", GRAPH), "--budget", "1MB", "--slots", "20")
    assert "none of the solvers that auto asks" in done.err
    assert "20 segments of a chain of 4 stages" in cairn("solve", *asked, "--segments", "20").err
    quiet = cairn("solve", "g", "--budget", "1MB", "--solver", "graph-search", "--iterations", "20", "--threads", "1")
    assert quiet.code == 0 and quiet.err == ""
    assert "takes no flag --slots" in cairn("bound", *asked, "--slots", "20").err
    assert "options        --slots" in cairn("help", "chain-dp").out
    table = {solver["name"]: solver["options"] for solver in cairn.json("solvers")["solvers"]}
    assert table["periodic"] == ["segments"] and table["store-all"] == []


def test_compare_gives_each_solver_what_it_takes(cairn):
    cairn.file("p", chain(*[stage(10 + i) for i in range(4)]))
    plain = cairn("compare", "p", "--budgets", "2", "--json")
    coarse = cairn("compare", "p", "--budgets", "2", "--slots", "3", "--segments", "1", "--json")
    answers = [json.loads(line) for line in coarse.out.splitlines()]
    assert len(answers) == len(plain.out.splitlines()) and coarse.err == plain.err
    assert all(a["outcome"] == "infeasible" for a in answers[:2] if a["solver"] == "periodic")
    done = cairn("compare", cairn.file("g", GRAPH), "--slots", "3")
    assert done.code == 2 and done.out == "" and "chain-dp" in done.err


def test_max_batch(cairn):
    cairn.file("p", chain(*[stage(10, saved=30) for _ in range(6)], fixed_bytes=100))
    asked = ("max-batch", "p", "--batch", "2", "--budget")
    answer = cairn.json(*asked, 2000)
    assert list(answer) == ["max_batch", "budget_bytes", "makespan_ns"] and answer["budget_bytes"] == 2000
    batch = answer["max_batch"]
    for size in ("forward_ns", "backward_ns", "output_bytes", "saved_bytes"):
        assert stage(10, saved=30)[size] * batch % 2 == 0
    scaled = {key: value * batch // 2 for key, value in stage(10, saved=30).items()}
    cairn.file("scaled", chain(*[scaled] * 6, fixed_bytes=100) | {"input_bytes": 5 * batch})
    solved = cairn.json("solve", "scaled", "--budget", 2000)
    assert solved["makespan_ns"] == answer["makespan_ns"]
    assert solved["recompute_ns"] <= 6 * scaled["forward_ns"]
    table = cairn(*asked, 2000)
    assert table.code == 0 and table.out.startswith(f"max batch     {batch} ") and "is not possible" in table.out
    assert cairn.json(*asked, 101, code=1) == {"max_batch": None, "budget_bytes": 101, "makespan_ns": None}
    none = cairn(*asked, 101).out
    assert "max batch     none" in none and re.search(r"least memory  \d+ B +of a batch of 1", none)
    unlimited = cairn.json(*asked, 2000, "--time-limit", "0ns", "--solver", "chain-exact", code=1)
    assert unlimited["max_batch"] is None
    for wrong in ("0", "-1", "1.5", "", "99999999999999999999"):
        assert cairn("max-batch", "p", "--budget", "1KB", f"--batch={wrong}").code == 2
    assert "--batch" in cairn("max-batch", "p", "--budget", "1KB").err
    assert "--budget" in cairn("max-batch", "p", "--batch", "2").err
    assert cairn("max-batch", "p", "--batch", "2", "--budget", "none").code == 2
    graph = {key: value for key, value in GRAPH.items() if key != "backward_begins_at"}
    done = cairn("max-batch", cairn.file("g", graph), "--batch", "2", "--budget", "1MB")
    assert done.code == 2 and "backward_begins_at is missing" in done.err
    nothing = {**GRAPH, "nodes": [{"cost_ns": 1, "bytes": 0, "deps": []}]}
    assert cairn.json("max-batch", cairn.file("n", nothing), "--batch", "1", "--budget", "1", code=2)["error"][
        "code"
    ] == ("overflow")


def test_convert(cairn):
    cairn.file("p", CHAIN)
    done = cairn("convert", "p")
    assert done.code == 0 and 'stage 2, h.1 has 2 options; the graph has the first, "keep"' in done.err
    graph = json.loads(done.out)
    names = ["output gradient", "h.0.saved", "h.0", "h.1.saved", "h.1"]
    backward = ["h.1.backward", "h.0.weight_grad", "h.0.backward"]
    assert [node["name"] for node in graph["nodes"]] == names + backward
    assert graph["backward_begins_at"] == len(names) and graph["fixed_bytes"] == 4096
    assert graph["machine"] == CHAIN["machine"] and graph["provenance"] == CHAIN["provenance"]
    assert cairn("convert", "-", "-o", "-", text=json.dumps(CHAIN)).out == done.out
    assert cairn("convert", "p", "--json").out == done.out
    assert cairn("convert", "p", "-o", "g").out == "nodes         8            5 before the backward\n"
    assert (cairn.folder / "g").read_text() == done.out
    assert cairn.json("limits", "g")["store_all_bytes"] == cairn.json("limits", "p")["store_all_bytes"]
    moved = json.loads(cairn("convert", "p", "--host-budget", "1KB").out)
    assert moved["machine"] == CHAIN["machine"] | {"host_bytes": 1000}
    again = cairn("convert", "g")
    assert again.code == 2 and "only a chain is converted" in again.err
    assert cairn("convert", "p", "-o", "p").code == 2 and cairn("convert").code == 2


def test_help(cairn):
    overview = cairn("help")
    assert overview.code == 0 and overview.out == cairn("--help").out
    for name in (
        "solve",
        "verify",
        "simulate",
        "limits",
        "bound",
        "compare",
        "max-batch",
        "convert",
        "solvers",
        "help",
    ):
        assert f"\n  {name} " in overview.out
        about = cairn("help", name)
        assert about.code == 0 and about.out.startswith(f"usage: cairn {name}")
        assert about.out == cairn(name, "--help").out
    assert "--time-limit DURATION" in cairn("help", "solve").out
    for name, default in (("solve", "(required)"), ("bound", "(required)"), ("verify", "(default: the recorded one)")):
        (budget,) = (line for line in cairn("help", name).out.splitlines() if "--budget SIZE" in line)
        assert budget.endswith(default)
    assert cairn("help", "store-all").code == 0
    assert cairn("--help", "solve").out == cairn("-h", "solve").out == cairn("help", "solve").out
    assert cairn("help", "solve", "p").err.endswith("usage: cairn help [COMMAND]\n")
    done = cairn("help", "simulat")
    assert done.code == 2 and '"simulate"' in done.err
    version = cairn("--version")
    assert version.code == 0 and version.out.startswith("cairn ")


# ---- writing ----


def test_outputs_are_replaced_whole(cairn):
    cairn.file("p", CHAIN)
    cairn.file("s", "old")
    os.chmod(cairn.folder / "s", 0o640)
    (cairn.folder / "link").symlink_to("s")
    assert cairn("solve", "p", "--budget", "none", "-o", "link").code == 0
    assert (cairn.folder / "link").is_symlink()
    assert json.loads((cairn.folder / "s").read_text())["ops"]
    assert (cairn.folder / "s").stat().st_mode & 0o777 == 0o640
    assert cairn.files() == {"p", "s", "link"}
    assert cairn("solve", "p", "--budget", "none", "-o", "/dev/null").code == 0


@pytest.mark.parametrize("words", [["-os"], ["-o=s"], ["-o", "s"]])
def test_a_value_follows_its_flag(cairn, words):
    cairn.file("p", CHAIN)
    assert cairn("solve", "p", "--budget=none", *words).code == 0
    assert cairn.files() == {"p", "s"}


def test_inputs_are_not_overwritten(cairn):
    cairn.file("p", CHAIN)
    (cairn.folder / "link").symlink_to("p")
    for words in (
        ["solve", "p", "--budget", "none", "-o", "./p"],
        ["solve", "p", "--budget", "none", "--trace", "link"],
    ):
        done = cairn(*words)
        assert done.code == 2 and "overwritten" in done.err
    assert json.loads((cairn.folder / "p").read_text()) == CHAIN
    assert cairn("solve", "p", "--budget", "none", "-o", "n" * 255).code == 0
    assert cairn.files() == {"p", "link", "n" * 255}


@pytest.mark.parametrize("target", ["missing/s", ".", "p/s", "", "n" * 256])
def test_outputs_that_cannot_be_are_refused_first(cairn, target):
    cairn.file("p", CHAIN)
    done = cairn("solve", "p", "--budget", "none", "-o", target)
    reason = "cannot be written" if target else "to write is empty"
    assert done.code == 2 and reason in done.err and done.out == ""
    assert cairn.files() == {"p"}


def test_links_to_nowhere_are_refused_first(cairn):
    cairn.file("p", CHAIN)
    (cairn.folder / "astray").symlink_to("missing/s")
    (cairn.folder / "new").symlink_to("s")
    done = cairn("solve", "p", "--budget", "none", "-o", "astray")
    assert done.code == 2 and "cannot be written in its folder" in done.err and done.out == ""
    assert cairn("solve", "p", "--budget", "none", "-o", "new").code == 0
    assert cairn.files() == {"p", "astray", "new", "s"}


def test_two_names_of_one_output_are_noticed(cairn):
    cairn.file("p", CHAIN)
    cairn.file("s", "old")
    for name in ("s", "new"):
        done = cairn("solve", "p", "--budget", "none", "-o", name, "--trace", f"./{name}")
        assert done.code == 2 and "same file" in done.err
    assert (cairn.folder / "s").read_text() == "old" and not (cairn.folder / "new").exists()


def test_a_file_that_may_not_grow_is_noticed(cairn):
    cairn.file("p", CHAIN)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    done = cairn("solve", "p", "--budget", "none", "-o", "s", preexec_fn=limit)
    assert done.code == 3 and "File too large" in done.err
    assert cairn.files() == {"p"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_whole_files_or_none(cairn, number):
    """At moments all over the run, most of which is writing."""
    cairn.file("p", chain(*[stage() for _ in range(2000)]))
    words = [PROGRAM, "solve", "p", "--budget", "none", "--solver", "store-all", "-o", "s", "--trace", "t"]
    begun = time.monotonic()
    subprocess.run(words, cwd=cairn.folder, stdout=subprocess.DEVNULL, check=True)
    takes = time.monotonic() - begun
    for step in range(40):
        process = subprocess.Popen(words, cwd=cairn.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   preexec_fn=functools.partial(signal.signal, number, signal.SIG_DFL))  # fmt: skip
        time.sleep(takes * step / 40)
        process.send_signal(number)
        assert process.wait(timeout=60) in (0, 130, -number)
        for name in cairn.files() - {"p"}:
            assert name in ("s", "t") and json.loads((cairn.folder / name).read_text())
            (cairn.folder / name).unlink()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_noticed(cairn):
    cairn.file("p", CHAIN)
    done = cairn("solve", "p", "--budget", "none", "-o", "/dev/full")
    assert done.code == 3 and "No space" in done.err
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "solve", "p", "--budget", "none", "-o", "-"], cwd=cairn.folder, stdout=full,
                              stderr=subprocess.PIPE, check=False)  # fmt: skip
        assert done.returncode == 3 and b"<standard output>: cannot be written" in done.stderr
        for words in (["solvers"], ["solve", "p", "--budget", "none"], ["solve", "p", "--budget", "none", "--json"]):
            done = subprocess.run([PROGRAM, *words], cwd=cairn.folder, stdout=full, stderr=subprocess.PIPE, check=False)
            assert done.returncode == 3 and b"standard output" in done.stderr


def test_a_closed_pipe_is_noticed(cairn):
    cairn.file("p", CHAIN)
    read, write = os.pipe()
    os.close(read)
    for words in (["solve", "p", "--budget", "none"], ["compare", "p", "--csv"],
                  ["compare", "p"], ["compare", "p", "--json"], ["convert", "p"], ["solvers"], ["help"]):  # fmt: skip
        done = subprocess.run([PROGRAM, *words], cwd=cairn.folder, stdout=write, stderr=subprocess.PIPE, check=False)
        *others, last = done.stderr.decode().splitlines()
        assert done.returncode == 3 and last == "cairn: standard output cannot be written: Broken pipe", words
        assert not any("written" in line for line in others)
    os.close(write)


def test_a_comparison_ends_with_the_pipe_that_it_writes_to(cairn):
    """What nobody reads is not computed: no answer comes after the first line that is not taken."""
    cairn.file("p", chain(*[stage(1000 + 37 * i % 501, saved=4000 + i, time=100 + i * i % 97) for i in range(120)]))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([PROGRAM, "compare", "p", "--json", "--budgets", "2"], cwd=cairn.folder, stdout=write,
                          stderr=subprocess.PIPE, check=False)  # fmt: skip
    os.close(write)
    assert done.returncode == 3 and b"brute-chain" not in done.stderr  # which is asked last, and left out


def mind_interrupts():
    """In a child: background jobs, as tests may be, ignore them, and so do their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_terminal_sees_how_far_it_is_and_the_best_so_far(cairn):
    """What one poll has told stays until another tells more; the answer after Ctrl-C is on standard output."""
    stages = [stage(1000 + 37 * i % 501, saved=4000 + 101 * i % 1999, time=100 + i * i % 97) for i in range(250)]
    cairn.file("p", chain(*stages))
    budget = cairn.json("limits", "p")["store_all_bytes"] // 15
    terminal, stderr = pty.openpty()
    words = ["solve", "p", "--budget", str(budget), "--json", "--threads", "1"]
    process = subprocess.Popen(
        [PROGRAM, *words],
        cwd=cairn.folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=mind_interrupts,
    )
    os.close(stderr)
    seen = ""
    while not re.search(r"solving: \d+ s, \S.* \d+ %, best \d.* [mu]?s\x1b", seen):
        seen += os.read(terminal, 4096).decode()
        assert seen.endswith(("\r", "\x1b[K"))  # a line comes in one piece; the terminal takes its beginning alone
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 130 and json.loads(out)["makespan_ns"]


def test_an_interrupt_before_the_first_of_all_solvers_has_answered_is_told(cairn):
    """What solvers need at the least is asked before: seconds, for graphs with a link."""
    forward = [
        {"cost_ns": 100 + 37 * v % 91, "bytes": 1000 + 131 * v % 977, "deps": [v - 1] * (v > 0)} for v in range(300)
    ]
    backward = [
        {"cost_ns": 200, "bytes": 1000 + 17 * v % 501, "deps": sorted({v - 1, 599 - v})} for v in range(300, 600)
    ]
    link = {"host_bytes": 10**9, "to_host_bytes_per_s": 10**10, "to_device_bytes_per_s": 10**10}
    problem = {"format": "cairn-graph", "version": 1, "nodes": forward + backward, "machine": link}
    cairn.file("p", json.dumps({**problem, "backward_begins_at": 300}))
    process = subprocess.Popen(
        [PROGRAM, "compare", "p", "--json"],
        cwd=cairn.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=mind_interrupts,
    )  # fmt: skip
    while "left out" not in (line := process.stderr.readline()):  # which is told when it begins to ask
        assert line
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    if '"error"' in out:
        assert json.loads(out)["error"]["code"] == "cancelled" and "stopped before any answer" in told
    else:
        assert '"makespan_ns"' in out


def test_an_interrupt_gives_the_best_answer_so_far(cairn):
    """At whatever moment it comes: no crash, and either an answer or none, told by the exit code."""
    cairn.file("p", chain(*[stage(1000 + 37 * i % 101, time=100 + i) for i in range(400)]))
    budget = cairn.json("limits", "p", "--solver", "store-all")["store_all_bytes"] // 8
    for delay in (0.02, 0.2, 1.0):
        process = subprocess.Popen(
            [PROGRAM, "solve", "p", "--budget", str(budget), "-o", "s", "--json"],
            cwd=cairn.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=mind_interrupts,
        )  # fmt: skip
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode in (0, 1, 130, -signal.SIGINT)
        if process.returncode == 130:
            answer = json.loads(out)
            if answer.get("makespan_ns") is not None:
                assert cairn.json("verify", "p", "s")["valid"]
            else:
                assert "s" not in cairn.files()
        (cairn.folder / "s").unlink(missing_ok=True)


def test_flags_on_the_machine_do_not_matter_to_a_schedule_with_its_own(cairn):
    cairn.file("p", {key: value for key, value in CHAIN.items() if key != "machine"})
    machine = ["--host-budget", "1MiB", "--to-host", "1GB/s", "--to-device", "1GB/s"]
    assert cairn("solve", "p", "--budget", "none", *machine, "-o", "s").code == 0
    done = cairn("verify", "p", "s", "--host-budget", "2MiB")
    assert done.code == 0 and "a machine of its own" in done.err
    assert cairn("solve", "p", "--budget", "none", "-o", "plain").code == 0
    done = cairn("verify", "p", "plain", "--host-budget", "2MiB")
    assert done.code == 2 and "needed together" in done.err
