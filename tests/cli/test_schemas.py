"""The schemas in docs/reference/formats/ describe what is read, what is written and what is printed."""

import json
import re
from pathlib import Path

import pytest
from cli_support import CHAIN, CHAIN_HASH, GRAPH, GRAPH_HASH, ROOT, STORE_ALL_CHAIN, chain, schedule_of, stage
from jsonschema import Draft202012Validator
from test_refusals import BAD_VALUES, COUNTS, SCHEDULES, STRUCTURAL, at, mutated

FORMATS = ROOT / "docs" / "reference" / "formats"


def schema(name: str) -> dict:
    return json.loads((FORMATS / f"{name}.schema.json").read_text())


def validator(name: str) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema(name))
    return Draft202012Validator(schema(name))


def output(kind: str) -> Draft202012Validator:
    return Draft202012Validator({**schema("json-output"), "anyOf": [{"$ref": f"#/$defs/{kind}"}]})


def documented(page: str) -> list:
    """The JSON examples of a page that are whole values."""
    blocks = re.findall(r"```json\n(\{.*?)```", (FORMATS / page).read_text(), re.DOTALL)
    return [json.loads(block.replace("…", "0" * 64)) for block in blocks]


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "data").glob("*/*.json")), ids=lambda path: path.stem)
def test_measured_problems(cairn, path):
    problem = json.loads(path.read_text())
    kind = problem["format"].removeprefix("cairn-")
    validator(kind).validate(problem)
    done = cairn("solve", path, "--budget", "none", "--solver", "store-all", "-o", "-")
    assert done.code == 0, done.err
    validator("schedule").validate(json.loads(done.out))


def test_documented_examples(cairn):
    assert documented("chain.md") == [CHAIN] and documented("graph.md") == [GRAPH]
    validator("chain").validate(CHAIN)
    validator("graph").validate(GRAPH)
    for example in documented("schedule.md"):
        validator("schedule").validate(example)
    canonical = documented("README.md")[0]
    cairn.file("canonical", canonical)
    done = cairn("solve", "canonical", "--budget", "none", "-o", "-")
    assert json.loads(done.out)["problem"]["hash"] == GRAPH_HASH
    assert GRAPH_HASH in (FORMATS / "graph.md").read_text() and CHAIN_HASH in (FORMATS / "chain.md").read_text()


def test_documented_outputs():
    kinds = ("solve", "replay", "limits", "bound", "max_batch", "error")
    for kind, example in zip(kinds, documented("json-output.md"), strict=True):
        output(kind).validate(example)
        assert list(schema("json-output")["$defs"][kind]["properties"]) == list(example)


def test_printed_objects(cairn):
    cairn.file("p", CHAIN)
    cairn.file("s", schedule_of(CHAIN_HASH, STORE_ALL_CHAIN))
    cairn.file("bad", schedule_of(CHAIN_HASH, []))
    output("solve").validate(cairn.json("solve", "p", "--budget", "1GiB"))
    output("solve").validate(cairn.json("solve", "p", "--budget", "1", code=1))
    output("replay").validate(cairn.json("verify", "p", "s"))
    output("replay").validate(cairn.json("verify", "p", "bad", code=1))
    output("replay").validate(cairn.json("simulate", "p", "s", "--budget", "1", code=1))
    output("limits").validate(cairn.json("limits", "p"))
    output("bound").validate(cairn.json("bound", "p", "--budget", "1GiB"))
    output("bound").validate(cairn.json("bound", "p", "--budget", "1"))
    output("max_batch").validate(cairn.json("max-batch", "p", "--budget", "1GiB", "--batch", "4"))
    output("max_batch").validate(cairn.json("max-batch", "p", "--budget", "1", "--batch", "4", code=1))
    output("solvers").validate(cairn.json("solvers"))
    output("error").validate(cairn.json("limits", "missing", code=2))
    output("error").validate(cairn.json("limits", code=2))


@pytest.mark.parametrize("path", COUNTS, ids=lambda path: str(path[-1]))
def test_wrong_numbers_are_outside_of_the_schema(path):
    for value in BAD_VALUES:
        if type(value) is not float or not value.is_integer():  # to a schema, 1.0 is an integer
            assert not validator("chain").is_valid(mutated(CHAIN, at(path, value)))


# What a schema cannot say: it takes arithmetic, or the problem that a schedule is for.
BEYOND = {"saved less than output", "too large in sum", "later dependency", "own dependency",
          "backward begins late", "other hash", "of a graph", "stage 0", "stage 3", "option 1",
          "stage 1.0"}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, content in {**STRUCTURAL, **SCHEDULES}.items()
                                  if isinstance(content, dict) and name not in BEYOND])  # fmt: skip
def test_what_the_reader_refuses_the_schema_refuses(name):
    content = {**STRUCTURAL, **SCHEDULES}[name]
    kind = "schedule" if name in SCHEDULES else "graph" if content.get("format") == "cairn-graph" else "chain"
    assert not validator(kind).is_valid(content)


def test_what_is_written_reads_back_within_the_schema(cairn):
    problem = chain(stage(name='quote " backslash \\ \u00e9'), {"output_bytes": 3, "options": [stage(3)]})
    del problem["stages"][1]["options"][0]["output_bytes"]
    validator("chain").validate(problem)
    assert cairn.json("solve", cairn.file("p", problem), "--budget", "none", "--trace", "t")["outcome"] == "optimal"
    names = [event["name"] for event in json.loads(Path(cairn.folder / "t").read_text())["traceEvents"]]
    assert 'forward quote " backslash \\ \u00e9' in names and "forward stage 2" in names
