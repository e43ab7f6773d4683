"""The solvers that need HiGHS: with the package highsbox they work, without it they say what is missing."""

import os
import subprocess
import sys

import cairn
import pytest

NODES = [
    cairn.Node(cost_ns=5, bytes=10, deps=[]),
    cairn.Node(cost_ns=3, bytes=10, deps=[0]),
    cairn.Node(cost_ns=3, bytes=10, deps=[1]),
    cairn.Node(cost_ns=4, bytes=10, deps=[2]),
    cairn.Node(cost_ns=4, bytes=10, deps=[3, 1]),
    cairn.Node(cost_ns=4, bytes=10, deps=[4, 0], keep=True),
]


@pytest.mark.parametrize("solver", ["graph-milp", "graph-lp-round"])
def test_with_highs(solver: str) -> None:
    assert next(info for info in cairn.solvers() if info.name == solver).available
    graph = cairn.Graph(NODES)
    best = cairn.solve(graph, 40, solver="brute-graph")
    solution = cairn.solve(graph, 40, solver=solver)
    assert solution.found and solution.makespan_ns >= best.makespan_ns
    if solver == "graph-milp":
        assert solution.makespan_ns == best.makespan_ns
        assert solution.outcome == "optimal" or solution.optimal_in == "frontier"


def test_without_highs() -> None:
    script = """
import cairn
graph = cairn.Graph([cairn.Node(cost_ns=1, bytes=1, deps=[])])
assert not any(info.available for info in cairn.solvers() if info.name in ("graph-milp", "graph-lp-round"))
try:
    cairn.solve(graph, 10, solver="graph-milp")
except cairn.Unavailable as error:
    print(error)
"""
    environment = {**os.environ, "CAIRN_HIGHS_LIBRARY": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "HiGHS" in done.stdout and "/nonexistent" in done.stdout
