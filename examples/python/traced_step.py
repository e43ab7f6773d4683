"""One training step, operator by operator: traced, solved as a graph for a few budgets, run by each schedule.

python traced_step.py
"""

import cairn
import cairn.torch as ct
import torch
from torch import nn


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def main() -> None:
    """Prints what each budget costs, predicted and measured."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block(64) for _ in range(4)))
    x = torch.randn(512, 64)
    traced = ct.trace(model, x, loss_fn=lambda output: output.square().mean())
    graph = traced.graph

    torch.manual_seed(1)
    plain = traced.run()
    limits = cairn.limits(graph)
    print(f"{len(graph)} operations, {cairn.format_bytes(plain.peak_bytes)} with everything stored")
    print("     budget        peak    measured    repeated    time more")
    for share in (0.0, 0.25, 0.5, 0.75):
        budget = round(limits.least_bytes + share * (limits.store_all_bytes - limits.least_bytes))
        solution = cairn.solve(graph, budget, solver="graph-search", iterations=100)
        verified = cairn.verify(graph, solution.require(), budget)
        torch.manual_seed(1)
        step = traced.run(verified)
        assert step.peak_bytes <= budget
        assert torch.equal(step.loss, plain.loss)
        assert all(torch.equal(step.grads[name], grad) for name, grad in plain.grads.items())
        print(
            f"{cairn.format_bytes(budget):>11} {cairn.format_bytes(solution.peak_bytes):>11} "
            f"{cairn.format_bytes(step.peak_bytes):>11} {step.computed - len(graph):>11} "
            f"{solution.makespan_ns / solution.store_all_ns - 1:>12.1%}"
        )


if __name__ == "__main__":
    main()
