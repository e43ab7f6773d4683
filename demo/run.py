"""The demo: two real networks train in less memory than they need.

    make demo        or        .venv/bin/python demo/run.py

Act 1: a residual network with 32 blocks on images of handwritten digits. The operating system caps the process; plain
PyTorch dies, so does checkpointing every block, and the same script with Cairn finishes. Act 2: a small GPT on text,
the same way. Act 3: the first network in so little memory that recomputing takes long; with a file to offload to, it
hardly does. All losses are compared, bit by bit, with a plain run that nobody capped. Then strategies side by side,
PyTorch's own among them, peaks and times predicted and measured, a plot of the trade-off, and a timeline. Last, a step
that torch.compile compiles, at three budgets.

Every run is a process of its own with one thread; two run at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "demo-out"


@dataclass(frozen=True)
class Act:
    """A network, the memory that the system leaves it, and which strategies die under that cap or finish."""

    title: str
    workload: str
    room_mib: int
    dying: tuple[str, ...]
    finishing: tuple[str, ...]
    steps: int = 3


ACTS = (
    Act("a residual network of 32 blocks, digits, batch 16", "cnn", 76, ("plain", "blocks"), ("cairn",)),
    Act("a GPT of 16 layers, text, batch 8 x 256 characters", "gpt", 220, ("plain",), ("cairn",)),
    Act("the residual network in less memory still", "cnn", 60, (), ("cairn", "offload"), 2),
)
NAMES = {
    "plain": "plain PyTorch",
    "blocks": "checkpoint on every block",
    "cairn": "Cairn",
    "offload": "Cairn, offloading to a file",
}


def finished(command: list[str], *good: int) -> subprocess.CompletedProcess[str]:
    """A process that has ended with a status that is good; another one ends the demo."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode not in good:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done


def train(workload: str, strategy: str, steps: int, room_mib: int | None = None) -> dict[str, Any]:
    """One training process; its losses, or that it ran out of memory."""
    command = [sys.executable, str(HERE / "train.py"), workload, strategy, "--steps", str(steps)]
    if room_mib is not None:
        command += ["--room", str(room_mib)]
    result: dict[str, Any] = json.loads(finished(command, 0, 3).stdout.splitlines()[-1])
    return result


def compare() -> str:
    """The table of strategies, which also writes the files."""
    return finished([sys.executable, str(HERE / "strategies.py"), str(OUT)], 0).stdout


def compiled() -> str:
    """The lines of a compiled step at several budgets."""
    return finished([sys.executable, str(HERE / "compiled.py")], 0).stdout


def pace(result: dict[str, Any]) -> str:
    """How fast it went, the first step apart."""
    seconds = result["seconds"][1:]
    return f"finished, {sum(seconds) / max(1, len(seconds)):.1f} s a step"


def verdict(result: dict[str, Any], reference: dict[str, Any]) -> str:
    """What became of a capped run, in a line."""
    if "out_of_memory" in result:
        return "out of memory"
    equal = result["losses"] == reference["losses"]
    how = "every loss equal to the uncapped run's, bit for bit" if equal else "LOSSES DIFFER"
    return f"{pace(result)}; {how}"


def play(act: Act, runs: dict[str, Future[dict[str, Any]]], reference: Future[dict[str, Any]], is_new: bool) -> bool:
    """Prints one act as its runs finish; true when it went as announced."""
    print(f"\n{act.title}: {act.room_mib} MiB for the step, enforced by the kernel (RLIMIT_DATA)", flush=True)
    plain = reference.result()
    if is_new:
        print(f"  {'plain PyTorch, no cap':32} {pace(plain)}; its losses are the reference", flush=True)
    expected = {"losses": plain["losses"][: act.steps]}
    for strategy, run in runs.items():
        print(f"  {NAMES[strategy]:32} {verdict(run.result(), expected)}", flush=True)
    died = all("out_of_memory" in runs[strategy].result() for strategy in act.dying)
    return died and all(runs[strategy].result().get("losses") == expected["losses"] for strategy in act.finishing)


def main() -> int:
    """All acts, and the table."""
    began = time.monotonic()
    OUT.mkdir(exist_ok=True)
    print("seconds a step: wall time; two runs go at a time and disturb each other, so these times are rough")
    references: dict[str, Future[dict[str, Any]]] = {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = []
        for act in ACTS:
            is_new = act.workload not in references
            if is_new:  # the first act of a network has the most steps
                references[act.workload] = pool.submit(train, act.workload, "plain", act.steps)
            strategies = (*act.dying, *act.finishing)
            runs = {each: pool.submit(train, act.workload, each, act.steps, act.room_mib) for each in strategies}
            started.append((act, runs, references[act.workload], is_new))
        table, steps = pool.submit(compare), pool.submit(compiled)
        went_well = [play(*each) for each in started]
        print(table.result())
        print(steps.result())
    print(f"{time.monotonic() - began:.0f} seconds. " + ("" if all(went_well) else "NOT everything went as it should."))
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
