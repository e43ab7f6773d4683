"""Runs benchmarks one after the other: run_benchmarks.py [--quick] [NAME...], `make bench`.

Names are files of bench/ without their ending. Without any, the C programs run and the scripts that take minutes at
most; name the others to run them. --quick runs each for seconds. The C programs are built first. Times are of this
machine, as it is while they run: read them as ratios.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH, BUILD = ROOT / "bench", ROOT / "build" / "release"
PROGRAMS = sorted(path.stem for path in BENCH.glob("*.c"))
SCRIPTS = sorted(path.stem for path in BENCH.glob("*.py"))
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
    return [str(BUILD / "bench" / name)] if name in PROGRAMS else [sys.executable, str(BENCH / f"{name}.py")]


def build() -> None:
    """Builds the C programs."""
    subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, "-DCAIRN_BENCH=ON"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """All that were asked for; exit 1 when one fails, 2 for a name that is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="seconds for each")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in PROGRAMS and name not in SCRIPTS:
            parser.error(f"no benchmark {name!r}; there are {', '.join([*PROGRAMS, *SCRIPTS])}")
    build()
    failed = []
    for name in chosen.names or [*PROGRAMS, *BY_DEFAULT]:
        print(f"\n== {name}", flush=True)
        if subprocess.run([*command_of(name), *["--quick"] * chosen.quick], check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
