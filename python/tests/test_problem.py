"""Chains, graphs and machines: construction, views, refusals, files, copies."""

import copy
import dataclasses
import gc
import json
import pickle
import tracemalloc
from pathlib import Path

import cairn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DATA = Path(__file__).parents[2] / "tests" / "data"
FILES = sorted(DATA.glob("*/*.json"))
BIG = 2**40

sizes = st.integers(0, BIG)
workspaces = st.integers(-BIG, BIG)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
provenances = st.dictionaries(names, json_values, max_size=3)
machines = st.none() | st.builds(
    cairn.Machine, sizes, st.integers(1, BIG), st.integers(1, BIG), st.booleans(), st.integers(0, 10**9)
)


@st.composite
def stages(draw: st.DrawFn) -> cairn.Stage:
    output_bytes = draw(sizes)
    option = st.builds(cairn.Option, st.integers(output_bytes, BIG), sizes, sizes, workspaces, workspaces, name=names)
    return cairn.Stage(
        output_bytes,
        draw(st.lists(option, min_size=1, max_size=3)),
        name=draw(names),
        grad_bytes=draw(st.none() | sizes),
        weight_grad_bytes=draw(sizes),
        no_recompute=draw(st.booleans()),
        forward_only_ns=draw(st.none() | sizes),
        forward_only_workspace_bytes=draw(st.none() | workspaces),
    )


@st.composite
def nodes(draw: st.DrawFn) -> list[cairn.Node]:
    made: list[cairn.Node] = []
    for v in range(draw(st.integers(1, 6))):
        earlier = st.integers(0, v - 1) if v else st.nothing()
        alias = draw(st.none() | earlier)
        made.append(
            cairn.Node(
                draw(sizes),
                0 if alias is not None else draw(sizes),
                tuple(draw(st.sets(earlier, max_size=3)) if v else ()),
                name=draw(names),
                workspace_bytes=draw(workspaces),
                alias_of=alias,
                keep=draw(st.booleans()),
                no_recompute=draw(st.booleans()),
            )
        )
    return made


@st.composite
def problems(draw: st.DrawFn) -> cairn.Problem:
    common = {
        "fixed_bytes": draw(sizes),
        "machine": draw(machines),
        "name": draw(names),
        "provenance": draw(provenances),
    }
    if draw(st.booleans()):
        return cairn.Chain(
            draw(st.lists(stages(), min_size=1, max_size=4)),
            input_bytes=draw(sizes),
            input_grad_bytes=draw(st.none() | sizes),
            **common,
        )
    listed = draw(nodes())
    return cairn.Graph(listed, backward_begins_at=draw(st.none() | st.integers(0, len(listed))), **common)


def views(problem: cairn.Problem) -> dict:
    fields = ["name", "provenance", "fixed_bytes", "machine"]
    if isinstance(problem, cairn.Chain):
        fields += ["stages", "input_bytes", "input_grad_bytes"]
    else:
        fields += ["nodes", "backward_begins_at"]
    return {field: getattr(problem, field) for field in fields}


@settings(max_examples=150, deadline=None)
@given(problems())
def test_round_trips(problem: cairn.Problem) -> None:
    text = problem.to_json()
    for again in (type(problem).from_json(text), problem.replace(), pickle.loads(pickle.dumps(problem))):
        assert type(again) is type(problem)
        assert again == problem and hash(again) == hash(problem)
        assert views(again) == views(problem)
        assert again.to_json() == text
    assert cairn.Problem.from_json(text.encode()).hash == problem.hash


@settings(max_examples=50, deadline=None)
@given(problems(), names, provenances)
def test_names_and_provenance_do_not_count(problem: cairn.Problem, name: str, provenance: dict) -> None:
    assert problem.replace(name=name, provenance=provenance) == problem
    assert problem.replace(fixed_bytes=problem.fixed_bytes + 1) != problem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files(path: Path, tmp_path: Path) -> None:
    problem = cairn.load(path)
    problem.save(tmp_path / "copy.json")
    assert cairn.load(str(tmp_path / "copy.json")) == problem
    stored = json.loads(path.read_text())
    assert problem.name == stored.get("name", "")
    assert problem.provenance == stored.get("provenance", {})
    assert len(problem) == len(stored.get("stages") or stored.get("nodes"))
    assert [p.name for p in tmp_path.iterdir()] == ["copy.json"]


def chain(**changes) -> cairn.Chain:
    stage = cairn.Stage(4096, saved_bytes=65536, forward_ns=1000, backward_ns=2000, name="h.0")
    return cairn.Chain(**{"stages": [stage, stage], "input_bytes": 4096, **changes})


def test_defaults_are_those_of_the_format() -> None:
    stage = cairn.Stage(4096, saved_bytes=65536, forward_ns=1000, backward_ns=2000, forward_workspace_bytes=7)
    assert stage.options == (cairn.Option(65536, 1000, 2000, 7, 0, "keep"),)
    assert (stage.grad_bytes, stage.weight_grad_bytes, stage.no_recompute) == (4096, 0, False)
    assert (stage.forward_only_ns, stage.forward_only_workspace_bytes) == (1000, 7)
    assert (stage.saved_bytes, stage.forward_ns, stage.backward_ns) == (65536, 1000, 2000)
    made = chain()
    assert (made.input_grad_bytes, made.fixed_bytes, made.machine, made.name, made.provenance) == (
        4096,
        0,
        None,
        "",
        {},
    )
    minimal = {"output_bytes": 4096, "saved_bytes": 65536, "forward_ns": 1000, "backward_ns": 2000}
    text = json.dumps({"format": "cairn-chain", "version": 1, "input_bytes": 4096, "stages": [minimal, minimal]})
    assert cairn.Problem.from_json(text) == made


def test_hashes_of_the_format_page() -> None:
    machine = cairn.Machine("1GiB", "12GB/s", "12GB/s", latency_ns="10us")
    first = cairn.Stage(
        4096,
        saved_bytes=65536,
        forward_ns=1000,
        backward_ns=2000,
        weight_grad_bytes=8192,
        forward_only_ns=950,
        forward_only_workspace_bytes=32768,
    )
    options = [cairn.Option(65536, 1000, 2000), cairn.Option(20480, 1000, 2600, 0, 45056, "selective")]
    made = cairn.Chain([first, cairn.Stage(4096, options)], input_bytes=4096, machine=machine)
    assert made.hash == "sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b2"
    graph = cairn.Graph([cairn.Node(1000, 65536), cairn.Node(100, 65536, [0])], backward_begins_at=1)
    assert graph.hash == "sha256:173b6aa0575166c951a0ae7fee59ab5781050e7be4cb324f98c551c8e77194f2"


def test_values_are_immutable() -> None:
    made = chain()
    for value, field in ((made.stages[0], "name"), (made.stages[0].options[0], "saved_bytes"), (made, "name")):
        with pytest.raises(AttributeError):
            setattr(value, field, "x")
    assert dataclasses.replace(made.stages[0], name="other").name == "other"
    made.provenance["changed"] = True
    assert made.provenance == {}


def test_copies_are_the_same_object() -> None:
    made = chain()
    assert copy.copy(made) is made
    assert copy.deepcopy({"plan": made})["plan"] is made


def test_views_outlive_what_they_came_from() -> None:
    stage = chain(provenance={"torch": "2.13"}).stages[1]
    gc.collect()
    assert stage.name == "h.0" and stage.options[0].saved_bytes == 65536


def test_replace_changes_the_kind_of_nothing_else() -> None:
    made = chain(name="gpt2", machine=cairn.Machine(1, 2, 3))
    assert made.replace(machine=None) == chain(name="gpt2")
    assert made.replace(stages=made.stages[:1]).name == "gpt2"
    with pytest.raises(TypeError, match="wrong"):
        made.replace(wrong=1)


class Elementwise:
    """Compares as an array does: not as a whole."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: chain(stages=[]), cairn.BadInput, "at least one stage"),
        (lambda: chain(input_bytes=-1), cairn.BadInput, "input_bytes is -1; at least 0"),
        (lambda: chain(fixed_bytes=2**63), cairn.Overflow, "fixed_bytes"),
        (lambda: chain(fixed_bytes=2**62, input_bytes=2**62), cairn.Overflow, "passes"),
        (lambda: chain(input_bytes=1.5), TypeError, "input_bytes must be an integer, not float 1.5"),
        (lambda: chain(input_bytes="8GiB"), TypeError, "input_bytes must be an integer"),
        (lambda: chain(input_bytes=True), TypeError, "not a bool"),
        (lambda: chain(name="a\0b"), cairn.BadInput, "zero byte"),
        (lambda: chain(name="\ud800"), cairn.BadInput, "not valid Unicode"),
        (lambda: chain(name=3), TypeError, "name must be text"),
        (lambda: chain(provenance={"x": {1, 2}}), cairn.BadInput, "provenance"),
        (lambda: chain(provenance={"x": float("nan")}), cairn.BadInput, "provenance"),
        (lambda: chain(provenance=[]), TypeError, "provenance must be a dict of JSON values or None, not list"),
        (lambda: chain(provenance="{}"), TypeError, "provenance must be a dict of JSON values or None, not str"),
        (lambda: chain(machine="fast"), TypeError, "cairn.Machine"),
        (lambda: chain(stages=3), TypeError, "stages must be a list of cairn.Stage, not int"),
        (lambda: cairn.Stage(8, [(8, 1, 1)]), TypeError, r"options\[0\] must be a cairn.Option, not tuple"),
        (lambda: cairn.Stage(8, saved_bytes=9, forward_ns=1, backward_ns=1, name=None), TypeError, "name of a stage"),
        (lambda: cairn.Stage(8, [cairn.Option(8, 1, 1)], no_recompute="no"), TypeError, "True or False, not 'no'"),
        (lambda: cairn.Option(8, 1, 1, name=None), TypeError, "name of an option"),
        (lambda: cairn.Machine(1, 1, 1, "yes"), TypeError, "shared_link must be True or False"),
        (lambda: cairn.Node(1, 1, 3), TypeError, "deps must be a list of indices, not int"),
        (lambda: cairn.Node(1, 1, [1.5]), TypeError, r"deps\[0\]: dependency must be an integer, not float 1.5"),
        (lambda: cairn.Problem.from_json(7), TypeError, "JSON text must be str or bytes, not int"),
        (lambda: cairn.Problem.from_json(b"\xff"), cairn.Parse, "line 1, column 1: "),
        (lambda: cairn.Problem.from_json('"\ud800'), cairn.Parse, "line 1, column"),
        (lambda: cairn.Problem(), TypeError, "a Problem is made as a Chain or a Graph"),
        (lambda: cairn.Schedule([("backward", 1)]), TypeError, "a Schedule is made by cairn.solve"),
        (lambda: cairn.Machine(1, 1, 1, Elementwise()), TypeError, "shared_link must be True or False"),
        (lambda: cairn.Stage(8, saved_bytes="", forward_ns=1, backward_ns=1), TypeError, "saved_bytes must be an int"),
        (lambda: cairn.Stage(8, saved_bytes=9, forward_ns=False, backward_ns=1), TypeError, "forward_ns.* not a bool"),
        (lambda: cairn.bound(chain(), Elementwise()), TypeError, "budget must be an integer, not Elementwise"),
        (lambda: cairn.load(True), TypeError, "not bool"),
        (lambda: chain().save(3), TypeError, "not int"),
        (lambda: chain().save(""), cairn.BadInput, "the name of a file to write is empty"),
        (lambda: chain().save("a\0b"), cairn.BadInput, "the name of a file to write contains a zero byte"),
        (lambda: chain(stages=[{"output_bytes": 1}]), TypeError, r"stages\[0\] must be a cairn.Stage, not dict"),
        (lambda: cairn.Stage(8, saved_bytes=9, forward_ns=1), cairn.BadInput, "missing: backward_ns"),
        (lambda: cairn.Stage(8), cairn.BadInput, "missing: saved_bytes, forward_ns, backward_ns"),
        (lambda: cairn.Stage(8, []), cairn.BadInput, "at least one option"),
        (lambda: cairn.Stage(8, [cairn.Option(8, 1, 1)], saved_bytes=8), cairn.BadInput, "not options and saved_bytes"),
        (lambda: cairn.Option(-1, 1, 1), cairn.BadInput, "saved_bytes is -1; at least 0"),
        (lambda: cairn.Machine(1, 0, 1), cairn.BadInput, "to_host_bytes_per_s is 0; at least 1"),
        (lambda: cairn.Machine("1GiB", "12GB", 1), cairn.BadInput, "12GB"),
        (lambda: cairn.Graph([]), cairn.BadInput, "at least one node"),
        (lambda: cairn.Graph([cairn.Node(1, 1, [0])]), cairn.BadInput, "nodes"),
        (lambda: cairn.Node(1, 1, [2**31]), cairn.BadInput, "is 2147483648, out of range: at most 2147483647"),
        (lambda: cairn.Node(1, 1, [-1]), cairn.BadInput, "at least 0"),
        (lambda: cairn.Node(1, 0, alias_of=-1), cairn.BadInput, "alias_of"),
        (lambda: cairn.Graph([cairn.Node(1, 1)], backward_begins_at=2), cairn.BadInput, "backward_begins_at"),
        (lambda: cairn.Graph([cairn.Node(1, 1)], backward_begins_at=-1), cairn.BadInput, "backward_begins_at"),
    ],
)
def test_refusals(make, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_a_number_is_no_file(tmp_path: Path) -> None:
    """open() would read the file that has that number, and close it."""
    (tmp_path / "p.json").write_text(chain().to_json())
    with (tmp_path / "p.json").open("rb") as file:
        with pytest.raises(TypeError):
            cairn.load(file.fileno())
        assert file.read(1) == b"{"


def test_names_of_files_may_be_bytes(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    chain().save(bytes(path))
    assert cairn.load(bytes(path)) == chain()
    path.write_text("[")
    with pytest.raises(cairn.Error) as caught:
        cairn.load(bytes(path))
    assert str(caught.value).startswith(f"{path}:1:")


def test_a_refusal_says_where() -> None:
    stage = cairn.Stage(4096, saved_bytes=1, forward_ns=1, backward_ns=1)
    with pytest.raises(cairn.BadInput) as caught:
        chain(stages=[chain().stages[0], stage])
    assert (caught.value.code, caught.value.index) == ("bad_input", 2)
    assert caught.value.path == "stages[1].options[0].saved_bytes"
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, cairn.Error)
    assert str(caught.value).startswith("stages[1].options[0].saved_bytes: ")


def test_a_file_that_is_not_one_says_where(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"format": "cairn-chain",\n "version": }')
    with pytest.raises(cairn.Parse) as caught:
        cairn.load(path)
    assert (caught.value.line, caught.value.file) == (2, str(path))
    assert str(caught.value).startswith(f"{path}:2:")
    path.write_text(chain().to_json().replace('"saved_bytes"', '"saved"', 1))
    with pytest.raises(cairn.BadInput) as caught:
        cairn.load(path)
    assert caught.value.path and "saved" in str(caught.value) and caught.value.line
    with pytest.raises(FileNotFoundError):
        cairn.load(tmp_path / "nothing.json")
    with pytest.raises(cairn.Io) as caught:
        chain().save(tmp_path / "no" / "such" / "folder.json")
    assert isinstance(caught.value, OSError) and "folder.json" in str(caught.value)


def test_the_other_kind_is_refused() -> None:
    text = cairn.Graph([cairn.Node(1, 1)]).to_json()
    with pytest.raises(cairn.BadInput, match="this is a cairn-graph, not a cairn-chain"):
        cairn.Chain.from_json(text)


def test_errors_survive_pickling() -> None:
    with pytest.raises(cairn.Parse) as caught:
        cairn.Problem.from_json('{"format"')
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is cairn.Parse and vars(again) == vars(caught.value) and str(again) == str(caught.value)


@pytest.mark.parametrize("kind", [cairn.Error, cairn.NoMemory, cairn.MemoryLimit, cairn.Io, cairn.Overflow])
def test_errors_of_all_kinds_survive_pickling(kind: type[cairn.Error]) -> None:
    again = pickle.loads(pickle.dumps(kind("why", file="a.json")))
    assert type(again) is kind and str(again) == "a.json: why" and again.args == ("why",)


def test_a_chain_as_a_graph() -> None:
    stages = [cairn.Stage(10, saved_bytes=30, forward_ns=7, backward_ns=9, name=name) for name in "ab"]
    chain = cairn.Chain(stages, input_bytes=5, fixed_bytes=100, name="net", provenance={"model": "net"})
    graph = chain.to_graph()
    assert isinstance(graph, cairn.Graph)
    assert (graph.name, graph.provenance, graph.fixed_bytes) == ("net", {"model": "net"}, 105)
    assert [node.name for node in graph.nodes[1:]] == ["a.saved", "a", "b.saved", "b", "b.backward", "a.backward"]
    assert sum(node.cost_ns for node in graph.nodes[:5]) == 14 and graph.backward_begins_at == 5
    assert cairn.limits(graph).store_all_ns == cairn.limits(chain).store_all_ns


def test_a_graph_says_what_options_it_has_not() -> None:
    two = [cairn.Option(saved_bytes=30, forward_ns=7, backward_ns=9, name=name) for name in ("keep", "again")]
    chain = cairn.Chain([cairn.Stage(10, options=two, name="a"), cairn.Stage(10, options=two)], input_bytes=5)
    with pytest.warns(UserWarning) as caught:
        chain.to_graph()
    assert [str(warning.message) for warning in caught] == [
        'stage 1, a has 2 options; the graph has the first, "keep"',
        'stage 2 has 2 options; the graph has the first, "keep"',
    ]


@pytest.mark.parametrize(
    "kept",
    [
        '{"a": 1e400, "b":-0}',
        '{"a": 1, "a": 2}',
        '{ "a" : "\\u0000\\ud800" }',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": ' + "[" * 1500 + "]" * 1500 + "}",
    ],
    ids=["numbers", "keys", "escapes", "digits", "depth"],
)
def test_replace_keeps_provenance_as_it_is(kept: str) -> None:
    stage = '{"output_bytes": 1, "saved_bytes": 1, "forward_ns": 1, "backward_ns": 1}'
    text = f'{{"format": "cairn-chain", "version": 1, "provenance": {kept}, "input_bytes": 1, "stages": [{stage}]}}'
    chain = cairn.Chain.from_json(text)
    node = cairn.Node(1, 1)
    for problem in (chain.replace(name="x"), chain.to_graph().replace(nodes=[node], backward_begins_at=None)):
        assert f'"provenance": {kept},' in problem.to_json()
    assert chain.replace(provenance={"b": 1}).provenance == {"b": 1}


def test_scaled() -> None:
    node = cairn.Node(3, 5, workspace_bytes=-3)
    graph = cairn.Graph([node], fixed_bytes=100)
    half = graph.scaled(1, 2)
    assert isinstance(half, cairn.Graph)
    assert half.fixed_bytes == 100
    assert (half.nodes[0].cost_ns, half.nodes[0].bytes, half.nodes[0].workspace_bytes) == (2, 3, -1)
    assert graph.scaled(7).nodes[0].bytes == 35 and graph.scaled(4, 4) == graph
    chain = cairn.Chain([cairn.Stage(10, saved_bytes=11, forward_ns=1, backward_ns=2)], input_bytes=3)
    assert chain.scaled(3, 2).stages[0].saved_bytes == 17 and chain.scaled(3, 2).input_bytes == 5
    for wrong in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(cairn.BadInput):
            graph.scaled(*wrong)
    with pytest.raises(cairn.Overflow):
        graph.scaled(2**62)
    with pytest.raises(cairn.Overflow):
        graph.scaled(2**64)


def test_saving_copies_no_text(tmp_path: Path) -> None:
    chain = cairn.Chain(
        [cairn.Stage(1, saved_bytes=2, forward_ns=3, backward_ns=4) for _ in range(20000)], input_bytes=1
    )
    tracemalloc.start()
    try:
        chain.save(tmp_path / "chain.json")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < (tmp_path / "chain.json").stat().st_size / 100
    assert cairn.load(tmp_path / "chain.json") == chain
    assert (tmp_path / "chain.json").read_text(encoding="utf-8") == chain.to_json()
