"""bootstrap says what is missing, or installs it. Run with a PATH from which tools were taken away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bootstrap"
BASE = [
    "bash",
    "cat",
    "cut",
    "dirname",
    "env",
    "grep",
    "head",
    "mktemp",
    "nproc",
    "rm",
    "sha256sum",
    "sort",
    "tr",
    "true",
]
TOOLS = ["as", "c++", "cc", "git", "ld", "ninja", "pkg-config"]


@pytest.fixture
def machine(tmp_path):
    """A folder of programs that is all the script finds; what is not in it is not installed."""
    for name in BASE + TOOLS:
        found = shutil.which(name)
        if found:
            (tmp_path / name).symlink_to(found)
    program(tmp_path, "python3", f'exec {sys.executable} "$@"')
    return tmp_path


def program(machine: Path, name: str, text: str) -> None:
    path = machine / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(machine: Path, stage: str = "build") -> subprocess.CompletedProcess:
    return subprocess.run(
        [shutil.which("bash"), SCRIPT, stage],
        env={**os.environ, "PATH": str(machine)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_without_rights_it_says_what_to_install(machine):
    program(machine, "id", "echo 1000")
    program(machine, "apt-get", "exit 9")
    done = run(machine)
    assert done.returncode == 1
    assert "please run:  sudo apt-get install cmake" in done.stderr


def test_without_apt_it_names_the_packages(machine):
    (machine / "ninja").unlink()
    done = run(machine)
    assert done.returncode == 1
    assert "please install: cmake ninja-build" in done.stderr


@pytest.mark.parametrize("user", ["root", "sudo"])
def test_with_rights_it_installs_what_is_missing_and_checks(machine, user):
    log = machine / "log"
    program(machine, "id", f"echo {0 if user == 'root' else 1000}")
    program(machine, "apt-get", f'echo "$DEBIAN_FRONTEND" "$@" >>{log}')
    program(machine, "sudo", '[ "$1" = -n ] && shift; exec "$@"')
    done = run(machine)
    assert done.returncode == 1
    assert "still missing after installation: cmake" in done.stderr
    update, install = log.read_text().splitlines()
    assert update.split()[-2:] == ["update", "-qq"]
    assert install.startswith("noninteractive install -y")
    assert install.split()[-1] == "cmake"


def test_only_what_the_stage_needs_is_asked_for(machine):
    program(machine, "pkg-config", '[ "$*" = "--exists jansson >= 2.13" ]')
    assert "libcmocka-dev" not in run(machine, "demo").stderr
    assert "libcmocka-dev" in run(machine, "test").stderr


def test_an_unknown_stage_is_refused(machine):
    done = run(machine, "everything")
    assert done.returncode == 2
    assert "usage" in done.stderr
