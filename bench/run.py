"""Runs the benchmarks one after the other and prints what they measured: bench/run.py [NAME...], `make bench`.

Names are files of this folder without their ending. Without any, the C programs run and the scripts that take minutes
at most; the others are asked for by name. The C programs are built first. Times are of this machine, as it is while
they run: read them as ratios.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "release"
PROGRAMS = sorted(path.stem for path in HERE.glob("bench_*.c"))
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py") if "__main__" in path.read_text() and path.stem != "run")
BY_DEFAULT = [
    "select_networks",
    "joint_tradeoff",
    "checkmate",
    "bench_torch_mechanism",
    "torch_prediction",
    "torch_curves",
    "torch_offload_plan",
]


def command_of(name: str) -> list[str]:
    """How a benchmark is started."""
    return [str(BUILD / "bench" / name)] if name in PROGRAMS else [sys.executable, str(HERE / f"{name}.py")]


def build() -> None:
    """Builds the C programs."""
    subprocess.run(["cmake", "-S", HERE.parent, "-B", BUILD, "-DCAIRN_BENCH=ON"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """All that were asked for; exit 1 when one fails, 2 for a name that is none."""
    names = sys.argv[1:] or [*PROGRAMS, *BY_DEFAULT]
    for name in names:
        if name not in PROGRAMS and name not in SCRIPTS:
            print(f"run.py: no benchmark {name!r}; there are {', '.join([*PROGRAMS, *SCRIPTS])}", file=sys.stderr)
            return 2
    build()
    failed = []
    for name in names:
        print(f"\n== {name}", flush=True)
        if subprocess.run(command_of(name), check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
