"""A chain by hand: describe it, solve it, look at the answer, verify it, save it.

Sixteen like blocks and a large last one (logits and loss), 4 GiB of parameters beside them.
"""

import dataclasses
import tempfile
from pathlib import Path

import cairn

MIB = 2**20
MS = 10**6  # nanoseconds

block = cairn.Stage(
    output_bytes=64 * MIB,
    saved_bytes=640 * MIB,  # what the backward needs, the output included
    forward_ns=20 * MS,
    backward_ns=40 * MS,
    backward_workspace_bytes=96 * MIB,
    weight_grad_bytes=50 * MIB,
)
blocks = [dataclasses.replace(block, name=f"block {i}") for i in range(1, 17)]
head = cairn.Stage(
    output_bytes=4, saved_bytes=900 * MIB, forward_ns=15 * MS, backward_ns=30 * MS, no_recompute=True, name="head"
)
chain = cairn.Chain(
    [*blocks, head], input_bytes=64 * MIB, fixed_bytes=4096 * MIB, name="by hand", provenance={"by": "me"}
)

limits = cairn.limits(chain)
print(f"storing everything takes {cairn.format_bytes(limits.store_all_bytes)}", end="; ")
print(f"{cairn.format_bytes(limits.least_bytes)} are enough\n")

solution = cairn.solve(chain, "9GiB")
print(solution.report())

# The solver did not mark its own work, and neither does its user.
schedule = solution.require()
verified = cairn.verify(chain, schedule, "9GiB")
assert verified.replay.peak_bytes == solution.peak_bytes <= 9 * 1024 * MIB

print("the first operations:", *schedule.ops[:4], sep="\n  ")

# A schedule may come from anywhere. This one stores everything; it is valid, but not within 9 GiB.
n = len(chain)
ops = [("forward_save", stage) for stage in range(1, n + 1)] + [("backward", stage) for stage in range(n, 0, -1)]
store_all = cairn.Schedule.from_ops(chain, ops)
assert cairn.simulate(chain, store_all, budget=None).peak_bytes == limits.store_all_bytes
try:
    cairn.verify(chain, store_all, "9GiB")
except cairn.InvalidSchedule as error:
    print(f"\nstoring everything: {error}")

# Too little memory is an answer, with the budget that would do.
try:
    cairn.solve(chain, "5GiB").require()
except cairn.InfeasibleBudget as error:
    print(f"5 GiB: {error}")
    assert error.least_bytes == limits.least_bytes

with tempfile.TemporaryDirectory() as folder:
    problem_file, schedule_file = Path(folder, "chain.json"), Path(folder, "schedule.json")
    chain.save(problem_file)
    schedule.save(schedule_file)
    cairn.save_trace(Path(folder, "timeline.json"), chain, schedule)  # for https://ui.perfetto.dev
    again = cairn.load(problem_file)
    assert again == chain and cairn.Schedule.load(again, schedule_file) == schedule
