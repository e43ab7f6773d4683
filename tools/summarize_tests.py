"""Adds up test results: summarize_tests.py RUNNER=STATUS JUNIT.xml ... -> "N passed, N failed, N skipped".

A C test program counts as the test functions that cmocka reports in its output, any other ctest test as one. A runner
that failed without a failing test in its report (it crashed, or wrote none) counts as one failure: no error vanishes.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

CMOCKA_LINE = re.compile(r"^\[  (PASSED|SKIPPED|FAILED) +\] (\d+) test\(s\)", re.MULTILINE)


def outcome_of(case: ElementTree.Element) -> str:
    """Outcome of one test case, as JUnit files tell it."""
    if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
        return "failed"
    if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
        return "skipped"
    return "passed"


def cmocka_counts(output: str) -> Counter[str]:
    """Test functions by outcome in what a cmocka program printed; empty when it is none."""
    counts: Counter[str] = Counter()
    for name, number in CMOCKA_LINE.findall(output):
        counts[name.lower()] += int(number)
    return counts


def counts_of(report: Path) -> Counter[str]:
    """Test cases by outcome in one JUnit file."""
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = outcome_of(case)
        inner = cmocka_counts(case.findtext("system-out") or "")
        if outcome == "failed":
            inner["failed"] = max(inner["failed"], 1)  # killed, or failed after the last test function
        elif not inner:
            inner[outcome] = 1
        counts += inner
    return counts


def main(arguments: list[str]) -> int:
    """Prints one line per runner and the sum; 1 when anything failed."""
    total: Counter[str] = Counter()
    for runner_and_status, report in zip(arguments[::2], arguments[1::2], strict=True):
        runner, status = runner_and_status.split("=")
        counts = counts_of(Path(report)) if Path(report).is_file() else Counter()
        if status != "0" and counts["failed"] == 0:
            counts["failed"] = 1
            print(f"{runner} ended with status {status}")
        print(f"{runner}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
        total += counts
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
