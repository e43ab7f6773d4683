"""What a link to host memory spares of recomputation in graphs, as Markdown.

The networks are those of `bench/support/paper_networks.py` at a batch of 32, and random training graphs with skips.
Memory is the share of the way from the least that is proved to what storing everything takes. Columns are speeds of the
link: what part of the peak of storing everything it moves each way in the time of a step. *Recomputation* is what
`graph-search` takes beyond storing everything. The cells are the same of `joint-graph`, and in brackets how much of it
the lower bound leaves open. All solvers have the same time limit.

python bench/joint_graphs.py [--networks resnet50 unet] [--nodes 200 1000] [--limit 5s] > bench/results/joint-graphs.md
"""

from __future__ import annotations

from collections.abc import Iterator

import cairn
import large_graphs
from support import arguments, paper_networks
from support.answers import between, known

BATCH = 32
HOST_BYTES = 2**40
SPEEDS = (0.05, 0.2, 0.8)
WAYS = (0.1, 0.3)


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--networks", nargs="*", default=["vgg16", "resnet50", "mobilenet", "unet"])
    parser.add_argument("--nodes", type=int, nargs="*", default=[200, 1000])
    parser.add_argument("--limit", default="5s")
    chosen = arguments.parse(parser, networks=["vgg16"], nodes=[60], limit="100ms")
    about = (__doc__ or "").split("\n", 2)[2].split("python bench")[0].strip()
    print(f"# A link and recomputation in graphs\n\n{about}\n")
    print(f"Made by `python bench/joint_graphs.py`, with a limit of {chosen.limit}.\n")
    print("| graph | memory | recomputation | " + " | ".join(f"{speed}" for speed in SPEEDS) + " |")
    print("|---|---|---|" + "---|" * len(SPEEDS))
    for name, graph in graphs(chosen.networks, chosen.nodes):
        for way in WAYS:
            print(row(name, graph, way, chosen.limit), flush=True)


def graphs(networks: list[str], counts: list[int]) -> Iterator[tuple[str, cairn.Graph]]:
    """The graphs with their names."""
    for name in networks:
        yield name, paper_networks.training_graph(paper_networks.NETWORKS[name](), BATCH)
    for count in counts:
        yield f"random, {count} nodes", large_graphs.training_graph(count // 2)


def row(name: str, graph: cairn.Graph, way: float, limit: str) -> str:
    """One line of the table."""
    limits = cairn.limits(graph, solver="store-all")
    everything, base = known(limits.store_all_bytes), known(limits.store_all_ns)
    budget = between(limits.least_lower_bytes, everything, way)
    alone = cairn.solve(graph, budget, solver="graph-search", time_limit=limit)
    cells = [name, f"{way:.0%}", beyond(alone, base)]
    for speed in SPEEDS:
        rate = int(speed * everything / base * 1e9)
        machine = cairn.Machine(HOST_BYTES, rate, rate)
        joint = cairn.solve(graph, budget, machine=machine, solver="joint-graph", time_limit=limit)
        cells.append(f"{beyond(joint, base)} ({joint.gap or 0:.2%})" if joint.found else "-")
    return "| " + " | ".join(cells) + " |"


def beyond(solution: cairn.Solution, base_ns: int) -> str:
    """What a schedule takes beyond a time; "-" where there is none."""
    return f"{known(solution.makespan_ns) / base_ns - 1:+.2%}" if solution.found else "-"


if __name__ == "__main__":
    main()
