"""Large training graphs within a time limit: time, memory and distance from the bound, as a Markdown table.

A graph has T/2 forward nodes in a row, every seventh with a second input from six nodes before, and a backward node
for each, which reads the gradient, the input of its forward node and every third its output. Sizes and costs are
random. The budget is a third of what storing everything takes.

A second table has the least memory that is found and the one that is proved.

python bench/large_graphs.py [--nodes 400 3000 10000 100000] [--limits 2s 10s] [--solvers graph-search auto]
"""

from __future__ import annotations

import random
import time

import cairn
from support import arguments
from support.answers import known


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[400, 3000, 10000, 100000])
    parser.add_argument("--limits", nargs="+", default=["2s", "10s"])
    parser.add_argument("--solvers", nargs="+", default=["graph-search", "auto"])
    chosen = arguments.parse(parser, nodes=[200], limits=["1s"])
    print("| T | solver | limit | seconds | processor seconds | solver MiB | over store-all | gap |")
    print("|---|---|---|---|---|---|---|---|")
    for count in chosen.nodes:
        graph = training_graph(count // 2)
        for solver in chosen.solvers:
            for limit in chosen.limits:
                print(row(graph, solver, limit), flush=True)
    print("\n| T | limit | seconds | least memory found | proved | ratio |\n|---|---|---|---|---|---|")
    for count in chosen.nodes:
        for limit in chosen.limits:
            print(least_row(training_graph(count // 2), limit), flush=True)


def row(graph: cairn.Graph, solver: str, limit: str) -> str:
    """One line of the table."""
    budget = known(cairn.limits(graph, solver="store-all").store_all_bytes) // 3
    began, processor_began = time.perf_counter(), time.process_time()
    found = cairn.solve(graph, budget, solver=solver, time_limit=limit)
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - processor_began
    if found.makespan_ns is None or found.gap is None:
        quality = ["-", "-"]
    else:
        quality = [f"{found.makespan_ns / known(found.store_all_ns) - 1:.2%}", f"{found.gap:.2%}"]
    spent = [f"{seconds:.1f}", f"{processor_seconds:.1f}", f"{known(found.solver_peak_bytes) / 2**20:.0f}"]
    return "| " + " | ".join([str(len(graph)), solver, limit, *spent, *quality]) + " |"


def least_row(graph: cairn.Graph, limit: str) -> str:
    """One line of the second table."""
    began = time.perf_counter()
    limits = cairn.limits(graph, time_limit=limit)
    seconds = time.perf_counter() - began
    found, proved = known(limits.least_bytes), known(limits.least_lower_bytes)
    sizes = [cairn.format_bytes(found), cairn.format_bytes(proved), f"{found / proved:.3f}"]
    return "| " + " | ".join([str(len(graph)), limit, f"{seconds:.1f}", *sizes]) + " |"


def training_graph(forward: int, seed: int = 7) -> cairn.Graph:
    """A network with skips, forward and backward."""
    draw = random.Random(seed)
    nodes: list[cairn.Node] = []
    for v in range(forward):
        deps = ([v - 1] if v else []) + ([v - 6] if v % 7 == 6 else [])
        nodes.append(cairn.Node(draw.randint(10**3, 10**5), draw.randint(10**4, 10**6), deps=tuple(sorted(deps))))
    for v in reversed(range(forward)):
        deps = [len(nodes) - 1, *([v - 1] if v else []), *([v] if v % 3 == 0 else [])]
        nodes.append(cairn.Node(2 * nodes[v].cost_ns, nodes[v].bytes, deps=tuple(sorted(set(deps)))))
    return cairn.Graph(nodes, backward_begins_at=forward)


if __name__ == "__main__":
    main()
