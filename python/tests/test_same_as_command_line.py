"""Python and the command line say the same, field by field."""

import json
import subprocess
import sys
from pathlib import Path

import cairn
import pytest

DATA = Path(__file__).parents[2] / "tests" / "data"
GPT2 = DATA / "chains" / "gpt2.json"
OF_THE_RUN = ("solve_ns", "solver_peak_bytes")


def command(*arguments: object, status: int = 0) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "cairn", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def same_every_time(values: dict) -> dict:
    gap = values["gap"] if values["gap"] is None else pytest.approx(values["gap"], rel=1e-12)
    return {**{name: value for name, value in values.items() if name not in OF_THE_RUN}, "gap": gap}


@pytest.mark.parametrize(
    ("path", "budget", "flags", "options"),
    [
        (GPT2, "1.3GiB", [], {}),
        (GPT2, "none", ["--solver", "store-all"], {"solver": "store-all"}),
        (GPT2, "1MiB", [], {}),
        (GPT2, "1.3GiB", ["--solver", "chain-dp", "--time-limit", "0ns"], {"solver": "chain-dp", "time_limit": "0ns"}),
        (GPT2, "1.3GiB", ["--solver", "chain-dp", "--slots", "40"], {"solver": "chain-dp", "slots": 40}),
        (DATA / "graphs" / "resnet_8.json", "none", [], {}),
    ],
)
def test_solve(path: Path, budget: str, flags: list, options: dict) -> None:
    solution = cairn.solve(cairn.load(path), budget, **options)
    values = command("solve", path, "--budget", budget, *flags, status=0 if solution.found else 1)
    assert list(values) == list(solution.to_dict())
    assert same_every_time(values) == same_every_time(solution.to_dict())


def test_selection() -> None:
    solution = cairn.solve(cairn.load(GPT2), minimize="memory")
    values = command("solve", GPT2, "--minimize", "memory")
    assert same_every_time(values) == same_every_time(solution.to_dict())
    assert solution.found and solution.checkpoints[-1] == len(solution.problem) and solution.objective_bytes > 0


def test_the_rest(tmp_path: Path) -> None:
    problem = cairn.load(GPT2)
    limits, bound = cairn.limits(problem), cairn.bound(problem, "1.3GiB")
    assert command("limits", GPT2) == vars(limits)
    least = {"least_lower_bytes": limits.least_lower_bytes}  # which the format of bound does not have
    assert command("bound", GPT2, "--budget", "1.3GiB") | least == vars(bound)
    schedule = cairn.solve(problem, "1.3GiB").require()
    schedule.save(tmp_path / "s.json")
    for name, budget, status in (("verify", "1.3GiB", 0), ("simulate", "none", 0), ("simulate", "1GB", 1)):
        replay = cairn.simulate(problem, schedule, budget)
        assert command(name, GPT2, tmp_path / "s.json", "--budget", budget, status=status) == replay.to_dict()
    listed = command("solvers")["solvers"]
    assert listed == [{**vars(solver), "options": list(solver.options)} for solver in cairn.solvers()]


def test_files_are_the_same(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    subprocess.run(
        [sys.executable, "-m", "cairn", "solve", GPT2, "--budget", "1.3GiB", "-o", out, "--trace", tmp_path / "t.json"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    problem = cairn.load(GPT2)
    schedule = cairn.solve(problem, "1.3GiB").require()
    assert out.read_text() == schedule.to_json()
    assert (tmp_path / "t.json").read_text() == cairn.trace(problem, schedule)
