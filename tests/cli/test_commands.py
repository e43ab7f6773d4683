"""What the commands print, write and return."""

import functools
import json
import os
import re
import resource

from cli_support import CHAIN, CHAIN_HASH, GRAPH, GRAPH_HASH, STORE_ALL_CHAIN, chain, schedule_of, stage

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
    assert list(bound) == ["lower_bound_ns", "method", "least_lower_bytes"]
    assert 0 < bound["lower_bound_ns"] <= 6000
    least = cairn.json("limits", "p")["least_lower_bytes"]
    assert bound["least_lower_bytes"] == least
    for budget, said in ((least, False), (least - 1, True), (0, True)):
        done = cairn("bound", "p", "--budget", str(budget), "--json")
        assert done.code == 0 and list(json.loads(done.out)) == list(bound)
        assert (f"every schedule needs at least {least} bytes" in done.err) == said
        table = cairn("bound", "p", "--budget", str(budget)).out
        assert table.startswith("lower bound ") and ("least memory " in table) == said
        assert f'by the method "{json.loads(done.out)["method"]}"' in table
    assert cairn("bound", "p").code == 2
    assert "the exit code is 0 all the same" in cairn("help", "bound").out


def test_solvers(cairn):
    solvers = cairn.json("solvers")["solvers"]
    names = [solver["name"] for solver in solvers]
    assert {"auto", "store-all"} <= set(names) and len(set(names)) == len(names)
    for solver in solvers:
        assert list(solver)[:2] == ["name", "available"] and type(solver["available"]) is bool
        assert solver["summary"]
    text = cairn("solvers").out
    assert all(name in text for name in names)
    assert all(f"\n{symbol} " in text for symbol in ("n", "T, E", "S", "eq. 6, 9"))
    assert "optimal: by its objective, eq. 9\n" in text and "class eq" not in text and "among eq" not in text
    assert "optimal        by its objective, eq. 6\n" in cairn("help", "select-cubic").out


def test_what_is_not_available_has_a_remedy(cairn):
    without = {"env": {**os.environ, "CAIRN_HIGHS_LIBRARY": "/nonexistent"}}
    for words in (("solvers",), ("help", "graph-milp")):
        done = cairn(*words, **without)
        assert done.code == 0 and "/nonexistent" in done.out and "pip install highsbox" in done.out


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


def test_compare_goes_on_without_a_solver_that_runs_out_of_memory(cairn):
    cairn.file("p", chain(*[stage(10**6 + i * i, saved=10**7 - i * i, time=100 + i) for i in range(300)]))
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (80 << 20, resource.RLIM_INFINITY))
    words = ("compare", "p", "--budgets", "1GB,", "--memory-limit", "10GB", "--threads", "1")
    done = cairn(*words, preexec_fn=limit)
    assert done.code == 0 and "left out: chain-exact: out of memory" in done.err
    assert "\nstore-all " in done.out and "\nauto: " in done.out


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
    wide = cairn("solve", *asked, "--segments", "20").err
    assert "20 segments of a chain of 4 stages; option segments goes from 1 to 4" in wide
    quiet = cairn("solve", "g", "--budget", "1MB", "--solver", "graph-search", "--iterations", "20", "--threads", "1")
    assert quiet.code == 0 and quiet.err == ""
    for flag in ("--slots", "--iterations", "--seed"):
        assert f"takes no flag {flag}" in cairn("bound", *asked, flag, "20").err
        assert flag not in cairn("help", "bound").out
    assert cairn("bound", *asked, "--threads", "2", "--time-limit", "1s", "--memory-limit", "1GiB").err == ""
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
        done = cairn("max-batch", "p", "--budget", "1KB", f"--batch={wrong}")
        assert done.code == 2 and f'--batch is an integer from 1 to 2^63 - 1, not "{wrong}"' in done.err
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
    assert "half of the machine's, or of what a container or ulimit -v leaves)" in cairn("help", "solve").out
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


def test_flags_on_the_machine_do_not_matter_to_a_schedule_with_its_own(cairn):
    cairn.file("p", {key: value for key, value in CHAIN.items() if key != "machine"})
    machine = ["--host-budget", "1MiB", "--to-host", "1GB/s", "--to-device", "1GB/s"]
    assert cairn("solve", "p", "--budget", "none", *machine, "-o", "s").code == 0
    done = cairn("verify", "p", "s", "--host-budget", "2MiB")
    assert done.code == 0 and "a machine of its own" in done.err
    assert cairn("solve", "p", "--budget", "none", "-o", "plain").code == 0
    done = cairn("verify", "p", "plain", "--host-budget", "2MiB")
    assert done.code == 2 and "needed together" in done.err
