"""The figures of the Checkmate paper for our strategies: trade-off curves, largest batches, distance from the optimum.

The networks are those of support/paper_networks.py, at the paper's batches where it names one. Every strategy answers
at the same budgets, from the least memory to what storing everything takes; the lower bound holds for all schedules, so
the distance from it is at least the distance from the optimum. Costs are floating-point operations, so times are
ratios.

python bench/checkmate.py [NETWORK...] [--budgets 10] [--programs 60s] [--markdown FILE] [--plot FILE] [--json FILE]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cairn
from support import arguments
from support.paper_networks import NETWORKS, training_graph

BATCHES = {"vgg16": 256, "vgg19": 256, "resnet50": 256, "mobilenet": 512, "unet": 32}
DEVICE_BYTES = 16 * 2**30  # of the paper's GPU
PAPER = ("store-all", "griewank-log", "ap-sqrt", "ap-greedy", "linear-sqrt", "linear-greedy")  # its table 1
BASELINES = (*PAPER, "graph-online")
PROGRAMS = ("graph-lp-round", "graph-milp")  # where --programs gives them time
GIB = 2**30


STRATEGIES = (*BASELINES, *PROGRAMS, "graph-exact", "graph-search")  # graph-exact on small graphs


def named(graph: cairn.Graph) -> str:
    """The network of a graph."""
    return str(graph.provenance["network"])


# ---- measuring ----


def curve(graph: cairn.Graph, count: int, programs: str | None) -> dict[str, Any]:
    """Time against storing everything, of each strategy at each budget; None where it finds nothing."""
    limits = cairn.limits(graph)
    low, high = limits.least_bytes, limits.store_all_bytes
    assert low is not None and high is not None
    budgets = [low + (high - low) * i // (count - 1) for i in range(count)]
    times: dict[str, list[float | None]] = {}
    bounds = [0.0] * count
    for solver in STRATEGIES:
        limit: dict[str, Any] = {"time_limit": programs} if solver in PROGRAMS else {}
        if (solver in PROGRAMS and not programs) or not cairn.solver_accepts(solver, graph):
            continue
        try:
            solutions = cairn.solve_many(graph, budgets, solver=solver, **limit)
        except cairn.MemoryLimit as error:
            print(f"  {named(graph)}: {error}", file=sys.stderr)
            continue
        assert limits.store_all_ns is not None
        times[solver] = [s.makespan_ns / limits.store_all_ns if s.makespan_ns else None for s in solutions]
        bounds = [
            max(bound, (s.lower_bound_ns or 0) / limits.store_all_ns)
            for bound, s in zip(bounds, solutions, strict=True)
        ]
        print(f"  {named(graph)}: {solver}", file=sys.stderr, flush=True)
    return {
        "nodes": len(graph),
        "least_bytes": low,
        "least_lower_bytes": limits.least_lower_bytes,
        "store_all_bytes": high,
        "budgets": budgets,
        "times": times,
        "bounds": bounds,
    }


def largest_batches(graph: cairn.Graph) -> dict[str, tuple[int | None, int | None]]:
    """The largest batch of each strategy for at most one more forward, and the least that is refuted."""
    found = {}
    for solver in STRATEGIES:
        if solver in PROGRAMS or not cairn.solver_accepts(solver, graph):
            continue
        answer = cairn.max_batch(graph, DEVICE_BYTES, 1, solver=solver)
        found[solver] = (answer.batch, answer.refuted_batch)
    print(f"  {named(graph)}: largest batches", file=sys.stderr, flush=True)
    return found


def measure(name: str, count: int, programs: str | None) -> dict[str, Any]:
    """All of one network."""
    network = NETWORKS[name]()
    graph = training_graph(network, BATCHES[name])
    return {
        "name": network.name,
        "batch": BATCHES[name],
        "curve": curve(graph, count, programs),
        "batches": largest_batches(training_graph(network)),
    }


# ---- tables ----


def mean_ratio(times: Iterable[float | None], bounds: list[float]) -> tuple[float, int] | None:
    """Geometric mean of time over lower bound where there is an answer, and the number of answers."""
    logs = [math.log(time / bound) for time, bound in zip(times, bounds, strict=True) if time is not None]
    return (math.exp(sum(logs) / len(logs)), len(logs)) if logs else None


def distance_table(results: list[dict[str, Any]]) -> list[str]:
    """Strategies by networks: the mean distance from the lower bound."""
    lines = [f"| strategy | {' | '.join(r['name'] for r in results)} |", "|---|" + "---|" * len(results)]
    for solver in STRATEGIES:
        if not any(solver in result["curve"]["times"] for result in results):
            continue
        cells = []
        for result in results:
            times = result["curve"]["times"].get(solver)
            ratio = mean_ratio(times, result["curve"]["bounds"]) if times else None
            count = len(result["curve"]["budgets"])
            cells.append("-" if ratio is None else f"{ratio[0]:.3f} ({ratio[1]}/{count})")
        lines.append(f"| {solver} | {' | '.join(cells)} |")
    return lines


def batch_table(results: list[dict[str, Any]]) -> list[str]:
    """Strategies by networks: the largest batch, and what is proved."""
    lines = [f"| strategy | {' | '.join(r['name'] for r in results)} |", "|---|" + "---|" * len(results)]
    for solver in STRATEGIES:
        if any(solver in result["batches"] for result in results):
            row = [result["batches"].get(solver, (None, None))[0] for result in results]
            lines.append(f"| {solver} | {' | '.join('-' if batch is None else str(batch) for batch in row)} |")
    refuted = [min((r for _, r in result["batches"].values() if r), default=None) for result in results]
    lines.append(f"| refuted from | {' | '.join('-' if r is None else str(r) for r in refuted)} |")
    return lines


def gain_table(results: list[dict[str, Any]]) -> list[str]:
    """The batch of graph-search over that of storing everything and of the best of the paper's baselines."""
    lines = ["| network | over store-all | over the best of the paper's baselines |", "|---|---|---|"]
    for result in results:
        batches = {solver: batch for solver, (batch, _) in result["batches"].items() if batch}
        ours, plain = batches["graph-search"], batches["store-all"]
        best, other = max((batch, solver) for solver, batch in batches.items() if solver in PAPER)
        lines.append(f"| {result['name']} | {ours / plain:.2f} | {ours / best:.2f} ({other}) |")
    return lines


def curve_table(result: dict[str, Any]) -> list[str]:
    """One network: budgets by strategies."""
    data = result["curve"]
    lines = [
        f"| budget, GiB | {' | '.join(data['times'])} | lower bound |",
        "|---|" + "---|" * (len(data["times"]) + 1),
    ]
    for i, budget in enumerate(data["budgets"]):
        cells = ["-" if times[i] is None else f"{times[i]:.3f}" for times in data["times"].values()]
        lines.append(f"| {budget / GIB:.2f} | {' | '.join(cells)} | {data['bounds'][i]:.3f} |")
    return lines


def document(results: list[dict[str, Any]]) -> str:
    """The page in bench/results/."""
    lines = [
        "# The figures of the Checkmate paper",
        "",
        f"Made by `python bench/checkmate.py` with Cairn {cairn.__version__}: networks and costs as in",
        "`bench/support/paper_networks.py`, solvers with their defaults. Answers depend on neither machine nor clock,",
        "except those of graph-lp-round and graph-milp, which are asked with `--programs 60s`.",
        "",
        "## Largest batch",
        "",
        f"At most one more forward, {DEVICE_BYTES // GIB} GiB, parameters and their gradients included. -: not even 1.",
        "",
        *batch_table(results),
        "",
        *gain_table(results),
        "",
        "## Distance from the optimum",
        "",
        "Geometric mean, over the budgets at which the strategy has an answer (how many of them), of its time over the",
        "lower bound: at most so far from the optimum.",
        "",
        *distance_table(results),
        "",
        "## Trade-off curves",
        "",
        "Time over that of storing everything.",
    ]
    for result in results:
        data = result["curve"]
        lower, least = data["least_lower_bytes"] / GIB, data["least_bytes"] / GIB
        lines += [
            "",
            f"### {result['name']}, batch {result['batch']}, {data['nodes']} nodes",
            "",
            f"Least memory {least:.2f} GiB" + ("" if lower == least else f", at least {lower:.2f} GiB") + ".",
            "",
            *curve_table(result),
        ]
    return "\n".join(lines) + "\n"


# ---- plot ----


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """A panel for each network: overhead against budget."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "cairn"
    mpl.rcParams["svg.fonttype"] = "none"
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.8 * rows), layout="constrained")
    for index, result in enumerate(results, 1):
        axes = figure.add_subplot(rows, columns, index)
        data = result["curve"]
        budgets = [budget / GIB for budget in data["budgets"]]
        for solver, times in data["times"].items():
            points = [(x, 100 * (y - 1)) for x, y in zip(budgets, times, strict=True) if y is not None]
            if points:
                emphasis = {"linewidth": 2.5, "color": "black"} if solver == "graph-search" else {"linewidth": 1}
                axes.plot(*zip(*points, strict=True), marker=".", label=solver, **emphasis)
        axes.plot(budgets, [100 * (y - 1) for y in data["bounds"]], "--", color="gray", label="lower bound")
        axes.set(title=f"{result['name']}, batch {result['batch']}", xlabel="budget, GiB", ylim=(-2, 80))
        if index % columns == 1 or columns == 1:
            axes.set_ylabel("extra time, %")
        if index == 1:
            axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Measures the networks that were asked for and prints the page."""
    parser = arguments.parser(__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"{', '.join(NETWORKS)}; default: all")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--programs", metavar="DURATION", help="also graph-lp-round and graph-milp, so long a budget")
    parser.add_argument("--markdown", type=Path, help="write the page there")
    parser.add_argument("--plot", type=Path, help="draw the curves there (.svg, .png)")
    parser.add_argument("--json", type=Path, help="write the numbers there, or read them where the file exists")
    chosen = arguments.parse(parser, networks=["vgg16"], budgets=2)
    unknown = [name for name in chosen.networks if name not in NETWORKS]
    if unknown or chosen.budgets < 2:
        parser.error(f"no network {unknown[0]!r}" if unknown else "--budgets is at least 2")
    if chosen.json and chosen.json.exists():
        results = json.loads(chosen.json.read_text())
    else:
        results = [measure(name, chosen.budgets, chosen.programs) for name in chosen.networks or NETWORKS]
    if chosen.json and not chosen.json.exists():
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    print(document(results), end="")
    if chosen.markdown:
        chosen.markdown.write_text(document(results))
    if chosen.plot:
        draw(results, chosen.plot)


if __name__ == "__main__":
    main()
