"""Outputs are replaced whole, or refused first."""

import functools
import json
import os
import resource
import signal
import subprocess
import time

import pytest
from cli_support import CHAIN, PROGRAM, chain, stage


def test_outputs_are_replaced_whole(cairn):
    cairn.file("p", CHAIN)
    cairn.file("s", "old")
    os.chmod(cairn.folder / "s", 0o640)
    (cairn.folder / "link").symlink_to("s")
    assert cairn("solve", "p", "--budget", "none", "-o", "link").code == 0
    assert (cairn.folder / "link").is_symlink()
    assert json.loads((cairn.folder / "s").read_text())["ops"]
    assert (cairn.folder / "s").stat().st_mode & 0o777 == 0o640
    assert cairn.files() == {"p", "s", "link"}
    assert cairn("solve", "p", "--budget", "none", "-o", "/dev/null").code == 0


@pytest.mark.parametrize("words", [["-os"], ["-o=s"], ["-o", "s"]])
def test_a_value_follows_its_flag(cairn, words):
    cairn.file("p", CHAIN)
    assert cairn("solve", "p", "--budget=none", *words).code == 0
    assert cairn.files() == {"p", "s"}


def test_inputs_are_not_overwritten(cairn):
    cairn.file("p", CHAIN)
    (cairn.folder / "link").symlink_to("p")
    for words in (
        ["solve", "p", "--budget", "none", "-o", "./p"],
        ["solve", "p", "--budget", "none", "--trace", "link"],
    ):
        done = cairn(*words)
        assert done.code == 2 and "overwritten" in done.err
    assert json.loads((cairn.folder / "p").read_text()) == CHAIN
    assert cairn("solve", "p", "--budget", "none", "-o", "n" * 255).code == 0
    assert cairn.files() == {"p", "link", "n" * 255}


@pytest.mark.parametrize("target", ["missing/s", ".", "p/s", "", "n" * 256])
def test_outputs_that_cannot_be_are_refused_first(cairn, target):
    cairn.file("p", CHAIN)
    done = cairn("solve", "p", "--budget", "none", "-o", target)
    reason = "cannot be written" if target else "to write is empty"
    assert done.code == 2 and reason in done.err and done.out == ""
    assert cairn.files() == {"p"}


def test_links_to_nowhere_are_refused_first(cairn):
    cairn.file("p", CHAIN)
    (cairn.folder / "astray").symlink_to("missing/s")
    (cairn.folder / "new").symlink_to("s")
    done = cairn("solve", "p", "--budget", "none", "-o", "astray")
    assert done.code == 2 and "cannot be written in its folder" in done.err and done.out == ""
    assert cairn("solve", "p", "--budget", "none", "-o", "new").code == 0
    assert cairn.files() == {"p", "astray", "new", "s"}


def test_two_names_of_one_output_are_noticed(cairn):
    cairn.file("p", CHAIN)
    cairn.file("s", "old")
    for name in ("s", "new"):
        done = cairn("solve", "p", "--budget", "none", "-o", name, "--trace", f"./{name}")
        assert done.code == 2 and "same file" in done.err
    assert (cairn.folder / "s").read_text() == "old" and not (cairn.folder / "new").exists()


def test_a_file_that_may_not_grow_is_noticed(cairn):
    cairn.file("p", CHAIN)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    done = cairn("solve", "p", "--budget", "none", "-o", "s", preexec_fn=limit)
    assert done.code == 3 and "File too large" in done.err
    assert cairn.files() == {"p"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_whole_files_or_none(cairn, number):
    """At moments all over the run, most of which is writing."""
    cairn.file("p", chain(*[stage() for _ in range(2000)]))
    words = [PROGRAM, "solve", "p", "--budget", "none", "--solver", "store-all", "-o", "s", "--trace", "t"]
    begun = time.monotonic()
    subprocess.run(words, cwd=cairn.folder, stdout=subprocess.DEVNULL, check=True)
    takes = time.monotonic() - begun
    for step in range(40):
        process = subprocess.Popen(words, cwd=cairn.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   preexec_fn=functools.partial(signal.signal, number, signal.SIG_DFL))  # fmt: skip
        time.sleep(takes * step / 40)
        process.send_signal(number)
        assert process.wait(timeout=60) in (0, 130, -number)
        for name in cairn.files() - {"p"}:
            assert name in ("s", "t") and json.loads((cairn.folder / name).read_text())
            (cairn.folder / name).unlink()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_noticed(cairn):
    cairn.file("p", CHAIN)
    done = cairn("solve", "p", "--budget", "none", "-o", "/dev/full")
    assert done.code == 3 and "No space" in done.err
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "solve", "p", "--budget", "none", "-o", "-"], cwd=cairn.folder, stdout=full,
                              stderr=subprocess.PIPE, check=False)  # fmt: skip
        assert done.returncode == 3 and b"<standard output>: cannot be written" in done.stderr
        for words in (["solvers"], ["solve", "p", "--budget", "none"], ["solve", "p", "--budget", "none", "--json"]):
            done = subprocess.run([PROGRAM, *words], cwd=cairn.folder, stdout=full, stderr=subprocess.PIPE, check=False)
            assert done.returncode == 3 and b"standard output" in done.stderr


def test_a_closed_pipe_is_noticed(cairn):
    cairn.file("p", CHAIN)
    read, write = os.pipe()
    os.close(read)
    for words in (["solve", "p", "--budget", "none"], ["compare", "p", "--csv"],
                  ["compare", "p"], ["compare", "p", "--json"], ["convert", "p"], ["solvers"], ["help"]):  # fmt: skip
        done = subprocess.run([PROGRAM, *words], cwd=cairn.folder, stdout=write, stderr=subprocess.PIPE, check=False)
        *others, last = done.stderr.decode().splitlines()
        assert done.returncode == 3 and last == "cairn: standard output cannot be written: Broken pipe", words
        assert not any("written" in line for line in others)
    os.close(write)


def test_a_comparison_ends_with_the_pipe_that_it_writes_to(cairn):
    """What nobody reads is not computed: no answer comes after the first line that is not taken."""
    cairn.file("p", chain(*[stage(1000 + 37 * i % 501, saved=4000 + i, time=100 + i * i % 97) for i in range(120)]))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([PROGRAM, "compare", "p", "--json", "--budgets", "2"], cwd=cairn.folder, stdout=write,
                          stderr=subprocess.PIPE, check=False)  # fmt: skip
    os.close(write)
    assert done.returncode == 3 and b"brute-chain" not in done.stderr  # which is asked last, and left out
