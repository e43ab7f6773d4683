"""What less memory costs: the least step time for a dozen budgets, from one preparation of the solver.

python budget_curve.py [PROBLEM.json]
"""

import sys

import cairn

MIB = 2**20


def convolutional_chain() -> cairn.Chain:
    """Early stages with large activations and little work, late ones the other way round."""
    stages = []
    for i in range(24):
        output_bytes = 96 * MIB >> (i // 6)
        forward_ns = 1_000_000 * (3 + i // 6)
        stages.append(
            cairn.Stage(
                output_bytes,
                saved_bytes=5 * output_bytes,
                forward_ns=forward_ns,
                backward_ns=2 * forward_ns,
                name=f"stage {i + 1}",
            )
        )
    return cairn.Chain(stages, input_bytes=12 * MIB, name="convolutional")


def main() -> None:
    """Prints the curve."""
    problem = cairn.load(sys.argv[1]) if len(sys.argv) > 1 else convolutional_chain()
    limits = cairn.limits(problem)
    if limits.least_bytes is None:
        sys.exit("no solver takes this problem")
    step = (limits.store_all_bytes - limits.least_bytes) / 11
    budgets = [limits.least_bytes + round(i * step) for i in range(11)] + [limits.store_all_bytes]

    print(f"{problem.name}: {len(problem)} pieces, {cairn.format_ns(limits.store_all_ns)} with everything stored")
    print("    budget        peak    time more    could be saved at most")
    slowest = None
    for solution in cairn.solve_many(problem, budgets):
        assert solution.found and solution.peak_bytes <= solution.budget_bytes
        assert slowest is None or solution.makespan_ns <= slowest, "more memory is never slower"
        slowest = solution.makespan_ns
        more = solution.makespan_ns / limits.store_all_ns - 1
        print(
            f"{cairn.format_bytes(solution.budget_bytes):>10}  {cairn.format_bytes(solution.peak_bytes):>10}"
            f"  {more:10.1%}  {solution.gap:10.1%}  {'#' * round(100 * more)}"
        )


if __name__ == "__main__":
    main()
