"""The demo's compiled step: a small GPT under torch.compile, at three budgets.

Torch's operators run one by one here, so that every result can be compared bit for bit with training that is not
compiled. `cairn.torch.compile` makes that comparison itself and raises where a bit differs.
"""

from __future__ import annotations

import warnings

import cairn.torch as ct
import torch
from cairn import format_bytes
from workloads import gpt

DEPTH, WIDTH, BATCH, LENGTH = 3, 64, 4, 128
SHARES = (1.0, 0.5, 0.1)  # of the way from the least budget to nothing recomputed


def main() -> None:
    """Print one line for each budget."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work = gpt(DEPTH, WIDTH, BATCH, LENGTH)
    x, y = next(work.batches)

    def compiled(budget: int | str) -> ct.CompiledReport:
        model = ct.compile(
            work.model,
            x,
            budget=budget,
            kernels="eager",
            loss_fn=lambda output: work.loss(output, y),
            optimizer=work.optimizer,
            time_limit="1s",
            progress=False,
        )
        report = ct.report(model)
        assert isinstance(report, ct.CompiledReport)
        return report

    print(f"\na GPT of {DEPTH} layers under torch.compile, with a budget for its whole step", flush=True)
    roomy = compiled("64GiB").plans[-1]
    least = roomy.least_budget_bytes or roomy.plain_peak_bytes
    for share in SHARES:
        report = compiled(int(least + share * (roomy.plain_peak_bytes + roomy.reserve_bytes - least)))
        plan = report.plans[-1]
        same = "bit-identical" if report.differences == () else "DIFFERS"
        print(
            f"  budget {format_bytes(plan.budget_bytes):>9}: {format_bytes(report.measured_peak_bytes):>9} measured, "
            f"{plan.recomputed:3} operators recomputed, {100 * plan.overhead:+5.1f} % predicted; {same}",
            flush=True,
        )


if __name__ == "__main__":
    main()
