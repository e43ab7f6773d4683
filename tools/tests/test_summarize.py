"""The summary at the end of `make test` hides no failure."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "summarize_tests.py"

CMOCKA_OUTPUT = """[==========] Running 3 test(s).
[  ERROR   ] --- [   LINE   ] --- x.c:8: error: Failure!
[  PASSED  ] 5 test(s).
[  SKIPPED ] 2 test(s), listed below:
[  SKIPPED ] b
[  FAILED  ] 1 test(s), listed below:
[  FAILED  ] c
"""


def summary(tmp_path: Path, runners: list[tuple[str, str | None]]) -> tuple[int, str]:
    arguments = []
    for number, (status, cases) in enumerate(runners):
        report = tmp_path / f"{number}.xml"
        if cases is not None:
            report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        arguments += [f"runner{number}={status}", str(report)]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


def test_plain_cases_count_once(tmp_path):
    cases = '<testcase name="a"/><testcase name="b"><skipped/></testcase>'
    assert summary(tmp_path, [("0", cases), ("0", cases)]) == (0, "2 passed, 0 failed, 2 skipped")


def test_cmocka_programs_count_their_functions(tmp_path):
    failing = f'<testcase name="t" status="fail"><failure/><system-out>{CMOCKA_OUTPUT}</system-out></testcase>'
    assert summary(tmp_path, [("8", failing)]) == (1, "5 passed, 1 failed, 2 skipped")
    passing = '<testcase name="t" status="run"><system-out>[  PASSED  ] 9 test(s).</system-out></testcase>'
    assert summary(tmp_path, [("0", passing)]) == (0, "9 passed, 0 failed, 0 skipped")


@pytest.mark.parametrize("case", ['status="fail"', 'status="run"><failure/></testcase><testcase name="x"'])
def test_a_program_that_died_is_a_failure(tmp_path, case):
    code, line = summary(tmp_path, [("8", f'<testcase name="t" {case}/>')])
    assert code == 1
    assert ", 1 failed," in line


@pytest.mark.parametrize("cases", [None, "", '<testcase name="a"/>'])
def test_a_runner_that_failed_without_saying_where_is_a_failure(tmp_path, cases):
    code, line = summary(tmp_path, [("0", '<testcase name="a"/>'), ("2", cases)])
    assert code == 1
    assert ", 1 failed," in line


def test_no_tests_at_all_is_a_failure(tmp_path):
    assert summary(tmp_path, [("0", "")])[0] == 1
