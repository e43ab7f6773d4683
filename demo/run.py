"""The demo: two real networks train in less memory than they need.

    make demo        or        .venv/bin/python demo/run.py [--quick]

Act 1: a residual network with 32 blocks on images of handwritten digits. The operating system caps the process; plain
PyTorch dies, so does checkpointing every block, and the same script with Cairn finishes. Act 2: a small GPT on text,
the same way. Act 3: the first network in so little memory that computing again takes long; with a file to send values
to, it hardly does. All losses are compared, bit by bit, with a plain run that nobody capped. Then strategies side by
side, PyTorch's own among them, peaks and times predicted and measured, a plot of the trade-off, and a timeline.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
    Act("a residual network of 32 blocks, digits, batch 32", "cnn", 130, ("plain", "blocks"), ("cairn",)),
    Act("a GPT of 16 layers, text, batch 16 x 256 characters", "gpt", 400, ("plain",), ("cairn",)),
    Act("the residual network in less memory still", "cnn", 90, (), ("cairn", "offload"), 2),
)
NAMES = {
    "plain": "plain PyTorch",
    "blocks": "checkpoint on every block",
    "cairn": "Cairn",
    "offload": "Cairn, offloading to a file",
}


def run(workload: str, strategy: str, steps: int, room_mib: int | None = None) -> dict[str, Any]:
    """One training process; its losses, or that it ran out of memory."""
    command = [sys.executable, str(HERE / "train.py"), workload, strategy, "--steps", str(steps)]
    if room_mib is not None:
        command += ["--room", str(room_mib)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


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


def play(act: Act, steps: int, references: dict[str, dict[str, Any]]) -> bool:
    """One act, of so many steps; true when it went as announced.

    `references` has the uncapped runs by network, of at least as many steps, and gets new ones.
    """
    print(f"\n{act.title}: {act.room_mib} MiB for the step, enforced by the kernel (RLIMIT_DATA)")
    with ThreadPoolExecutor(max_workers=2) as pool:
        reference = None if act.workload in references else pool.submit(run, act.workload, "plain", steps)
        strategies = (*act.dying, *act.finishing)
        capped = {strategy: pool.submit(run, act.workload, strategy, steps, act.room_mib) for strategy in strategies}
        if reference is not None:
            references[act.workload] = plain = reference.result()
            print(f"  {'plain PyTorch, no cap':32} {pace(plain)}; its losses are the reference", flush=True)
        expected = {"losses": references[act.workload]["losses"][:steps]}
        results = {}
        for strategy, future in capped.items():
            results[strategy] = future.result()
            print(f"  {NAMES[strategy]:32} {verdict(results[strategy], expected)}", flush=True)
    died = all("out_of_memory" in results[strategy] for strategy in act.dying)
    return died and all(results[strategy].get("losses") == expected["losses"] for strategy in act.finishing)


def main() -> int:
    """All acts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and budgets")
    quick = parser.parse_args().quick
    began = time.monotonic()
    OUT.mkdir(exist_ok=True)
    references: dict[str, dict[str, Any]] = {}
    went_well = [play(act, 2 if quick else act.steps, references) for act in ACTS]
    good = all(went_well)
    from strategies import compare

    compare(OUT, quick)
    print(f"\n{time.monotonic() - began:.0f} seconds. " + ("" if good else "NOT everything went as it should."))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
