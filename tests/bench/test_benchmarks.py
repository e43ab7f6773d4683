"""Every file of bench/ is a benchmark, and runs with --quick, in seconds."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from script_runs import run_script

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("CAIRN_BUILD_DIR", ROOT / "build" / "release"))
BENCHMARKS = sorted(path for path in (ROOT / "bench").iterdir() if path.suffix in (".c", ".py"))
LONGEST_S = 120  # on a machine that is busy; they take 1 to 10 seconds


def run(path: Path, folder: Path) -> subprocess.CompletedProcess:
    if path.suffix == ".py" and "import torch" in path.read_text(encoding="utf-8"):
        if find_spec("torch") is None:
            pytest.skip("an environment without torch")
        return run_script(path, "--quick", folder=folder, timeout=LONGEST_S)
    program = [BUILD / "bench" / path.stem] if path.suffix == ".c" else [sys.executable, path]
    return subprocess.run([*program, "--quick"], capture_output=True, text=True, timeout=LONGEST_S, check=False)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.name)
def test_runs_for_seconds(benchmark, tmp_path):
    done = run(benchmark, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.name)
def test_has_the_shared_command_line(benchmark):
    text = benchmark.read_text(encoding="utf-8")
    assert ("take_quick(" if benchmark.suffix == ".c" else "arguments.parse(") in text
