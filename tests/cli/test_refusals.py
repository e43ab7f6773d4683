"""What is refused: exit code 2, a message that says where and why, nothing on standard output, nothing written."""

import copy
import json
import os
import random

import pytest
from cli_support import CHAIN, CHAIN_HASH, GRAPH, STORE_ALL_CHAIN, chain, schedule_of, stage


def expect_refusal(cairn, *words, **more):
    before = cairn.files()
    done = cairn(*words, **more)
    assert done.code == 2, (done.out, done.err)
    assert done.out == ""
    assert done.err.startswith("cairn: ") and done.err.endswith("\n")
    assert cairn.files() == before
    report = cairn(*words[:1], "--json", *words[1:], **more)
    assert report.code == 2
    error = json.loads(report.out)["error"]
    assert list(error) == ["code", "message", "file", "line", "column"]
    assert error["message"]
    return error


# ---- usage ----


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "help"),
        (["slove", "p"], '"solve"'),
        (["--verison"], '"--version"'),
        (["--version", "p"], "one word too many; usage: cairn --version"),
        (["frobnicate"], "help"),
        (["solve"], "PROBLEM"),
        (["solve", "--budget", "1"], "PROBLEM"),
        (["solve", "p"], "--budget"),
        (["solve", "p", "q", "--budget", "1"], "one operand too many"),
        (["verify", "p"], "PROBLEM SCHEDULE"),
        (["verify", "-", "-"], "standard input"),
        (["solve", "p", "--budgt", "1"], "--budget"),
        (["solve", "p", "--bud", "1"], "--budget"),
        (["solve", "p", "--budget=1", "--wibble"], "help solve"),
        (["solve", "p", "--budget"], "needs a value"),
        (["solve", "p", "--budget", "1", "-o"], "needs a value"),
        (["solve", "p", "--budget", "1", "-x"], "-x"),
        (["solve", "p", "--budget", "1", "--output", "s"], "-o"),
        (["solve", "p", "--budget", "1", "--trace", "-", "-o", "-"], "standard output"),
        (["solve", "p", "--budget", "1", "--trace", "s", "-o", "s"], "same file"),
        (["solve", "p", "--budget", "1", "--trace", "./s", "-o", "s"], "same file"),
        (["solve", "p", "--budget", "1", "-o", "--solver"], "-o needs a value"),
        (["solve", "p", "--budget", "--solver"], "--budget needs a value"),
        (["solve", "p", "--budget", "200M"], "did you mean 200MB or 200MiB?"),
        (["solve", "p", "--budget", "5k"], "did you mean 5KB or 5KiB?"),
        (["solve", "p", "--budget", "1", "--to-host", "12G/s"], "did you mean 12GB/s or 12GiB/s?"),
        (["compare", "p", "--budgets", f"{200:080},"], "too long for a size"),
        (["solve", "p", "--budget", "1", "--solver", "store-al"], '"store-all"'),
        (["solve", "p", "--budget", "1", "--solver", "Store-All"], "store-all"),
        (["solve", "p", "--budget", "1", "--solver", "CHAIN-EXACT"], '"chain-exact"'),
        (["SOLVE", "p", "--budget", "1"], '"solve"'),
        (["solve", "p", "--BUDGET", "1"], "--budget"),
        (["solve", "", "--budget", "1"], "file to read is empty"),
        (["verify", "p", ""], "file to read is empty"),
        (["solve", "p", "--budget", "1", "--minimize", "sorrow"], "time|memory"),
        (["verify", "p", "s", "--slots", "3"], "help verify"),
        (["limits", "p", "--budget", "1"], "help limits"),
        (["solvers", "p"], "one operand too many; usage: cairn solvers [flags]"),
        (["solvers", "chain-dp"], "`cairn help chain-dp` describes that solver"),
        (["--budget", "1", "solve", "p"], "flags come after one"),
        (["compare", "p", "--budgets", "0"], "1 to"),
        (["compare", "p", "--budgets", "x"], "x"),
        (["compare", "p", "--budgets", "1,,2"], "size"),
        (["compare", "p", "--budgets", ""], "size"),
        (["solve", "p", "--budget", "10 MB"], "did you mean 10MB?"),
        (["solve", "p", "--budget", "1.5  gib"], "did you mean 1.5GiB?"),
        (["solve", "p", "--budget", "1", "--to-host", "12 gb/s"], "did you mean 12GB/s?"),
        (["solve", "p", "--budget", "1", "--time-limit", "5S"], "did you mean 5s?"),
        (["solve", "p", "--budget", "1", "--time-limit", "5"], "did you mean 5s?"),
        (["solve", "p", "--budget", "1", "--latency", "10"], "did you mean 10us?"),
        (["solve", "p", "--budget", "10M"], "KiB, MiB"),
        (["solve", "p", "--budget", "unlimited"], "or none"),
    ],
)
def test_wrong_usage_teaches_the_right_one(cairn, words, hint):
    cairn.file("p", CHAIN)
    cairn.file("s", schedule_of(CHAIN_HASH, STORE_ALL_CHAIN))
    assert hint in expect_refusal(cairn, *words)["message"]


@pytest.mark.parametrize(
    ("problem", "words", "hints"),
    [
        (CHAIN, ["--solver", "graph-search"], ["takes graphs, and the problem is a chain", "chain-weak", "auto"]),
        (CHAIN, ["--solver", "joint-graph"], ["takes graphs", "joint-chain"]),
        (GRAPH, ["--solver", "chain-dp"], ["takes chains, and the problem is a graph", "graph-search", "auto"]),
        (GRAPH, ["--solver", "select-linear"], ["takes chains"]),
        (
            chain(stage()),
            ["--solver", "joint-chain"],
            ["one in the problem, or options host-budget, to-host and to-device"],
        ),
        (CHAIN, ["--solver", "select-linear"], ["minimizes memory (option minimize); for time there are", "chain-dp"]),
        (CHAIN, ["--minimize", "memory", "--solver", "offload-dp"], ["for memory there are select-cubic", "auto"]),
        (GRAPH | {"machine": CHAIN["machine"]}, ["--minimize", "memory", "--solver", "joint-graph"], ["select-acg"]),
        (CHAIN, ["--solver", "graph-search"], ["joint-chain", "offload-dp", "chain-dp", "auto, among others"]),
        (GRAPH | {"machine": CHAIN["machine"]}, ["--solver", "chain-dp"], ["joint-graph", "graph-search"]),
    ],
)
def test_a_solver_that_does_not_serve_names_those_that_do(cairn, problem, words, hints):
    cairn.file("p", problem)
    budget = [] if "--minimize" in words else ["--budget", "1GiB"]
    message = expect_refusal(cairn, "solve", "p", *budget, *words)["message"]
    for hint in hints:
        assert hint in message
    assert "brute" not in message


def test_solvers_that_need_a_machine_are_named_only_where_there_is_one(cairn):
    cairn.file("p", chain(stage()))
    asked = ("solve", "p", "--budget", "1GiB", "--solver", "graph-search")
    assert "joint-chain" not in expect_refusal(cairn, *asked)["message"]
    machine = ["--host-budget", "1GiB", "--to-host", "12GB/s", "--to-device", "12GB/s"]
    assert "joint-chain" in expect_refusal(cairn, *asked, *machine)["message"]


def test_where_no_solver_serves_the_first_says_why(cairn):
    cairn.file("p", chain(stage(), stage(no_recompute=True)))
    assert "stage 2 must not be" in expect_refusal(cairn, "solve", "p", "--minimize", "memory")["message"]


def test_json_and_standard_output_exclude_each_other(cairn):
    cairn.file("p", CHAIN)
    done = cairn("solve", "p", "--budget", "none", "-o", "-", "--json")
    assert done.code == 2 and json.loads(done.out)["error"]["code"] == "usage"


@pytest.mark.parametrize("size", ["", "x", "-1", "+1", "1.5", "8 GiB", "8gib", "8GIB", "8G", "1e9", "0x10", "1.GiB",
                                  ".5GiB", "9223372036854775808", "8388608TiB", "1KiB/s", "nONE"])  # fmt: skip
def test_sizes_are_exact(cairn, size):
    cairn.file("p", CHAIN)
    assert "size" in (error := expect_refusal(cairn, "solve", "p", f"--budget={size}"))["message"] or \
        "2^63" in error["message"]  # fmt: skip
    cairn.file("s", schedule_of(CHAIN_HASH, STORE_ALL_CHAIN))
    expect_refusal(cairn, "verify", "p", "s", "--budget", size)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12345", 12345), ("1KB", 1000), ("1.5KiB", 1536), ("0.0009765625KiB", 1), ("1.9999KB", 1999),
     ("2TB", 2 * 10**12), ("1MiB", 2**20), ("9223372036854775807", 2**63 - 1)],
)  # fmt: skip
def test_sizes_that_are_taken(cairn, text, size):
    cairn.file("p", CHAIN)
    done = cairn("solve", "--budget", text, "--json", "p")
    assert done.code in (0, 1) and json.loads(done.out)["budget_bytes"] == size


def test_flags_may_stand_anywhere(cairn):
    cairn.file("-p", CHAIN)
    for words in (
        "--json --budget none -- -p",
        "--json --budget=none ./-p",
        "./-p --budget none --json",
        "--budget 1 --json ./-p --budget none",
    ):
        done = cairn("solve", *words.split())
        assert done.code == 0 and json.loads(done.out)["outcome"] in ("optimal", "feasible")


# ---- files ----


def mutated(problem, change):
    made = copy.deepcopy(problem)
    change(made)
    return made


def at(path, value):
    def change(problem):
        *front, last = path
        for key in front:
            problem = problem[key]
        problem[last] = value

    return change


BAD_VALUES = [-1, 1.0, 1.5, 1e3, 2**63, True, None, "1", [], {}]
COUNTS = [["fixed_bytes"], ["input_bytes"], ["stages", 0, "output_bytes"], ["stages", 0, "saved_bytes"],
          ["stages", 0, "forward_only_ns"], ["stages", 1, "options", 1, "backward_ns"],
          ["machine", "host_bytes"]]  # fmt: skip


@pytest.mark.parametrize("path", COUNTS, ids=lambda path: str(path[-1]))
@pytest.mark.parametrize("value", BAD_VALUES, ids=repr)
def test_numbers_of_the_wrong_kind(cairn, path, value):
    cairn.file("p", mutated(CHAIN, at(path, value)))
    error = expect_refusal(cairn, "solve", "p", "--budget", "none", "-o", "s")
    assert error["file"] == "p" and error["line"] == 1 and error["column"] > 1


STRUCTURAL = {
    "empty": "",
    "blank": " \n\n",
    "text": "hello",
    "truncated": json.dumps(CHAIN)[:-40],
    "unclosed": json.dumps(CHAIN)[:-1],
    "trailing": json.dumps(CHAIN) + "x",
    "two objects": json.dumps(CHAIN) * 2,
    "array": "[]",
    "number": "12",
    "byte order mark": "\ufeff" + json.dumps(CHAIN),
    "duplicate key": '{"format": "cairn-chain", "format": "cairn-chain"}',
    "duplicate in a stage": json.dumps(CHAIN).replace('"name": "h.0"', '"name": "h.0", "name": "h.0"'),
    "trailing comma": json.dumps(CHAIN)[:-1] + ",}",
    "comment": "// no\n" + json.dumps(CHAIN),
    "single quotes": json.dumps(CHAIN).replace('"', "'"),
    "NaN": json.dumps(CHAIN).replace("4096", "NaN", 1),
    "control character": '{"format": "cairn-chain\n"}',
    "NUL": json.dumps(CHAIN).encode() + b"\0",
    "NUL inside": json.dumps(CHAIN).encode().replace(b"h.0", b"h\0"),
    "escaped NUL": json.dumps(CHAIN).replace("h.0", "h\\u0000"),
    "lone surrogate": json.dumps(CHAIN).replace("h.0", "\\ud800"),
    "latin-1": json.dumps(CHAIN).encode().replace(b"h.0", b"caf\xe9"),
    "utf-16": json.dumps(CHAIN).encode("utf-16"),
    "noise": bytes(random.Random(1).randrange(256) for _ in range(4096)),
    "deep array": '{"format": ' + "[" * 500000,
    "deep object": '{"provenance": ' + '{"a": ' * 500000,
    "huge number": json.dumps(CHAIN).replace("4096", "9" * 400, 1),
    "no stages": chain(),
    "no format": {"version": 1},
    "other format": {**CHAIN, "format": "cairn-tree"},
    "version 2": {**CHAIN, "version": 2},
    "version text": {**CHAIN, "version": "1"},
    "unknown field": {**CHAIN, "colour": "red"},
    "unknown field of a stage": chain(stage(speed=3)),
    "node fields in a chain": {**CHAIN, "nodes": []},
    "provenance is no object": {**CHAIN, "provenance": "me"},
    "saved less than output": chain(stage(10, saved=9)),
    "options beside their fields": chain({**stage(), "options": [stage()]}),
    "no options": chain({"output_bytes": 1, "options": []}),
    "65 options": chain({"output_bytes": 1, "options": [{"saved_bytes": 1, "forward_ns": 1, "backward_ns": 1}] * 65}),
    "a schedule": schedule_of(CHAIN_HASH, []),
    "too large in sum": chain(stage(2**62), stage(2**62)),
    "bandwidth 0": mutated(CHAIN, at(["machine", "to_host_bytes_per_s"], 0)),
    "machine lacks a field": {**CHAIN, "machine": {"host_bytes": 1}},
    "no nodes": {**GRAPH, "nodes": [], "backward_begins_at": 0},
    "later dependency": mutated(GRAPH, at(["nodes", 0, "deps"], [1])),
    "own dependency": mutated(GRAPH, at(["nodes", 1, "deps"], [1])),
    "negative dependency": mutated(GRAPH, at(["nodes", 1, "deps"], [-1])),
    "dependency twice": mutated(GRAPH, at(["nodes", 1, "deps"], [0, 0])),
    "dependency 2^40": mutated(GRAPH, at(["nodes", 1, "deps"], [2**40])),
    "alias with bytes": mutated(GRAPH, at(["nodes", 1, "alias_of"], 0)),
    "alias -1": mutated(GRAPH, at(["nodes", 1, "alias_of"], -1)),
    "backward begins late": {**GRAPH, "backward_begins_at": 3},
    "backward begins at null": {**GRAPH, "backward_begins_at": None},
    "chain fields in a graph": {**GRAPH, "input_bytes": 1},
}  # fmt: skip


@pytest.mark.parametrize("content", STRUCTURAL.values(), ids=STRUCTURAL.keys())
def test_malformed_problems(cairn, content):
    cairn.file("p", content)
    for words in (["solve", "p", "--budget", "none", "-o", "s", "--trace", "t"], ["limits", "p"]):
        error = expect_refusal(cairn, *words)
        assert error["file"] == "p" and error["line"] >= 1 and error["column"] >= 1
    assert expect_refusal(cairn, "limits", "-", text=(cairn.folder / "p").read_bytes())["file"] == "-"


@pytest.mark.parametrize(
    ("content", "meant"),
    [
        ({**CHAIN, "input_byte": 1}, "input_bytes"),
        (chain({**stage(), "forward_n": 1}), "forward_ns"),
        (chain({"output_bytes": 1, "options": [{"save_bytes": 1, "forward_ns": 1, "backward_ns": 1}]}), "saved_bytes"),
        (mutated(GRAPH, at(["nodes", 0, "byte"], 1)), "bytes"),
    ],
)
def test_a_mistyped_field_is_told_which_was_meant(cairn, content, meant):
    cairn.file("p", content)
    assert f'did you mean "{meant}"?' in expect_refusal(cairn, "limits", "p")["message"]


SCHEDULES = {
    "a problem": CHAIN,
    "empty": "",
    "truncated": json.dumps(schedule_of(CHAIN_HASH, STORE_ALL_CHAIN))[:-5],
    "no ops": {key: value for key, value in schedule_of(CHAIN_HASH, []).items() if key != "ops"},
    "other hash": schedule_of("sha256:" + "0" * 64, STORE_ALL_CHAIN),
    "no hash": schedule_of("", STORE_ALL_CHAIN),
    "hash in capitals": schedule_of(CHAIN_HASH.upper(), STORE_ALL_CHAIN),
    "of a graph": schedule_of(CHAIN_HASH, STORE_ALL_CHAIN, kind="cairn-graph"),
    "unknown op": schedule_of(CHAIN_HASH, [["forward", 1]]),
    "op of graphs": schedule_of(CHAIN_HASH, [["compute", 0]]),
    "op is no list": schedule_of(CHAIN_HASH, ["backward"]),
    "op is empty": schedule_of(CHAIN_HASH, [[]]),
    "too short": schedule_of(CHAIN_HASH, [["backward"]]),
    "too long": schedule_of(CHAIN_HASH, [["backward", 1, 1]]),
    "stage 0": schedule_of(CHAIN_HASH, [["backward", 0]]),
    "stage 3": schedule_of(CHAIN_HASH, [["forward_keep", 3]]),
    "stage -1": schedule_of(CHAIN_HASH, [["forward_keep", -1]]),
    "stage 2^32 + 1": schedule_of(CHAIN_HASH, [["forward_keep", 2**32 + 1]]),
    "stage 1.0": schedule_of(CHAIN_HASH, [["forward_keep", 1.0]]),
    "stage true": schedule_of(CHAIN_HASH, [["forward_keep", True]]),
    "option 1": schedule_of(CHAIN_HASH, [["forward_save", 1, 1]]),
    "option 2^16": schedule_of(CHAIN_HASH, [["forward_save", 1, 65536]]),
    "no value": schedule_of(CHAIN_HASH, [["drop", 1]]),
    "unknown value": schedule_of(CHAIN_HASH, [["drop", "input", 1]]),
    "unknown field": schedule_of(CHAIN_HASH, STORE_ALL_CHAIN, name="x"),
    "negative peak": schedule_of(CHAIN_HASH, STORE_ALL_CHAIN, peak_bytes=-1),
    "solver is a number": schedule_of(CHAIN_HASH, STORE_ALL_CHAIN, solver=1),
    "machine lacks a field": schedule_of(CHAIN_HASH, STORE_ALL_CHAIN, machine={}),
}


@pytest.mark.parametrize("content", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_malformed_schedules(cairn, content):
    cairn.file("p", CHAIN)
    cairn.file("s", content)
    for words in (["verify", "p", "s"], ["simulate", "p", "s", "--trace", "t"]):
        error = expect_refusal(cairn, *words)
        assert error["file"] == "s" and error["line"] >= 1 and error["column"] >= 1


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (["backward", 3], "ops[0]: the stage is 3; 1 to 2"),
        (["forward_save", 1, 1], "ops[0]: the option is 1; 0 to 0"),
    ],
)
def test_an_operation_that_cannot_be_is_placed_once(cairn, op, message):
    cairn.file("p", CHAIN)
    cairn.file("s", schedule_of(CHAIN_HASH, [op]))
    assert expect_refusal(cairn, "verify", "p", "s")["message"] == message


def test_paths_that_are_no_files(cairn):
    cairn.file("p", CHAIN)
    (cairn.folder / "d").mkdir()
    for path, reason in (("missing", "No such file"), ("d", "directory"), ("p/x", "Not a directory")):
        error = expect_refusal(cairn, "solve", path, "--budget", "none")
        assert reason in error["message"] and error["file"] == path and error["line"] is None
        assert expect_refusal(cairn, "verify", "p", path)["file"] == path
    if os.getuid() != 0:
        os.chmod(cairn.folder / "p", 0)
        assert "Permission" in expect_refusal(cairn, "limits", "p")["message"]


def test_a_name_that_is_not_utf8(cairn):
    name = "caf\udce9\x1b[31m"
    error = expect_refusal(cairn, "limits", name)
    assert error["file"] == "caf??[31m"


def test_files_of_more_than_a_gibibyte_are_refused_at_once(cairn):
    with open(cairn.folder / "p", "wb") as file:
        file.truncate((1 << 30) + 1)
    assert expect_refusal(cairn, "limits", "p")["code"] == "too_large"


def test_a_plan_is_told_by_what_it_holds(cairn):
    cairn.file("p", CHAIN)
    cairn.file("plan", {"format": "cairn-torch-plan", "version": 1})
    assert 'a plan has under "problem"' in expect_refusal(cairn, "limits", "plan")["message"]
    assert 'a plan has under "schedule"' in expect_refusal(cairn, "verify", "p", "plan")["message"]


def test_what_the_format_allows_is_read(cairn):
    cairn.file("p", "\n\t " + json.dumps({key: CHAIN[key] for key in reversed(CHAIN)}, indent=1) + " \r\n")
    assert cairn.json("solve", "p", "--budget", "none")["outcome"]
    cairn.file("p", json.dumps({**CHAIN, "machine": None}).replace('"2.13.0"', '1.5e3, "torch": 1, "x": ' + "9" * 99))
    assert cairn.json("solve", "p", "--budget", "none")["outcome"]


def test_mutated_texts_never_crash(cairn):
    """Bytes changed, cut and doubled at random: an exit code of 0, 1 or 2, and JSON on standard output."""
    source = random.Random(7)
    texts = [json.dumps(CHAIN).encode(), json.dumps(GRAPH).encode()]
    for _ in range(150):
        text = bytearray(source.choice(texts))
        for _ in range(source.randint(1, 4)):
            i, j = sorted(source.randrange(len(text)) for _ in range(2))
            kind = source.randrange(4)
            if kind == 0:
                text[i] = source.randrange(256)
            elif kind == 1:
                del text[i : i + source.randint(1, 8)]
            elif kind == 2:
                text[i:i] = text[i : min(j, i + 30)]
            else:
                text[i:i] = source.choice([b"9", b"-", b"e5", b",", b"]", b"}", b'"', b"null", b"\\u00"])
        done = cairn("solve", "-", "--budget", "none", "--solver", "store-all", "--json", text=bytes(text))
        assert done.code in (0, 1, 2), done.err
        json.loads(done.out)
