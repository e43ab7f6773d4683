"""What a terminal sees of progress, and what an interrupt returns."""

import json
import os
import pty
import re
import signal
import subprocess
import time

import pytest
from cli_support import PROGRAM, chain, stage


def mind_interrupts():
    """In a child: background jobs, as tests may be, ignore them, and so do their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_terminal_sees_how_far_it_is_and_the_best_so_far(cairn):
    """What one poll has told stays until another tells more; the answer after Ctrl-C is on standard output."""
    stages = [stage(1000 + 37 * i % 501, saved=4000 + 101 * i % 1999, time=100 + i * i % 97) for i in range(250)]
    cairn.file("p", chain(*stages))
    budget = cairn.json("limits", "p")["store_all_bytes"] // 15
    terminal, stderr = pty.openpty()
    words = ["solve", "p", "--budget", str(budget), "--json", "--threads", "1"]
    process = subprocess.Popen(
        [PROGRAM, *words],
        cwd=cairn.folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=mind_interrupts,
    )
    os.close(stderr)
    seen = ""
    while not re.search(r"solving: \d+ s, \S.* \d+ %, best \d.* [mu]?s\x1b", seen):
        seen += os.read(terminal, 4096).decode()
        assert seen.endswith(("\r", "\x1b[K"))  # a line comes in one piece; the terminal takes its beginning alone
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 130 and json.loads(out)["makespan_ns"]


def test_an_interrupt_before_the_first_of_all_solvers_has_answered_is_told(cairn):
    """What solvers need at the least is asked before: seconds, for graphs with a link."""
    forward = [
        {"cost_ns": 100 + 37 * v % 91, "bytes": 1000 + 131 * v % 977, "deps": [v - 1] * (v > 0)} for v in range(300)
    ]
    backward = [
        {"cost_ns": 200, "bytes": 1000 + 17 * v % 501, "deps": sorted({v - 1, 599 - v})} for v in range(300, 600)
    ]
    link = {"host_bytes": 10**9, "to_host_bytes_per_s": 10**10, "to_device_bytes_per_s": 10**10}
    problem = {"format": "cairn-graph", "version": 1, "nodes": forward + backward, "machine": link}
    cairn.file("p", json.dumps({**problem, "backward_begins_at": 300}))
    process = subprocess.Popen(
        [PROGRAM, "compare", "p", "--json"],
        cwd=cairn.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=mind_interrupts,
    )  # fmt: skip
    while "left out" not in (line := process.stderr.readline()):  # which is told when it begins to ask
        assert line
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    if '"error"' in out:
        assert json.loads(out)["error"]["code"] == "cancelled" and "stopped before any answer" in told
    else:
        assert '"makespan_ns"' in out


@pytest.mark.parametrize("command", ["limits", "bound", "solve", "max-batch", "compare"])
def test_an_interrupted_answer_is_told_to_be_one(cairn, command):
    """Also where the numbers themselves do not show it."""
    forward = [
        {"cost_ns": 100 + 37 * v % 91, "bytes": 1000 + 131 * v % 977, "deps": [v - 1] * (v > 0)} for v in range(3000)
    ]
    backward = [
        {"cost_ns": 200, "bytes": 1000 + 17 * v % 501, "deps": sorted({v - 1, 5999 - v})} for v in range(3000, 6000)
    ]
    problem = {"format": "cairn-graph", "version": 1, "nodes": forward + backward, "backward_begins_at": 3000}
    cairn.file("p", json.dumps(problem))
    options = {
        "limits": [],
        "compare": ["--budgets", "none,1MB", "--json"],
        "max-batch": ["--budget", "10MB", "--batch", "8"],
    }
    words = [command, "p", *options.get(command, ["--budget", "3MB"])]
    process = subprocess.Popen(
        [PROGRAM, *words],
        cwd=cairn.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=mind_interrupts,
    )  # fmt: skip
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    if process.returncode == 130 and out:
        assert "interrupted: this is what was found by then" in told
    else:
        assert "interrupted" not in told


def test_an_interrupt_gives_the_best_answer_so_far(cairn):
    """At whatever moment it comes: no crash, and either an answer or none, told by the exit code."""
    cairn.file("p", chain(*[stage(1000 + 37 * i % 101, time=100 + i) for i in range(400)]))
    budget = cairn.json("limits", "p", "--solver", "store-all")["store_all_bytes"] // 8
    for delay in (0.02, 0.2, 1.0):
        process = subprocess.Popen(
            [PROGRAM, "solve", "p", "--budget", str(budget), "-o", "s", "--json"],
            cwd=cairn.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=mind_interrupts,
        )  # fmt: skip
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode in (0, 1, 130, -signal.SIGINT)
        if process.returncode == 130:
            answer = json.loads(out)
            if answer.get("makespan_ns") is not None:
                assert cairn.json("verify", "p", "s")["valid"]
            else:
                assert "s" not in cairn.files()
        (cairn.folder / "s").unlink(missing_ok=True)
