"""Progress, Ctrl-C, other signals, and threads beside a long solve."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cairn
import pytest
from cairn import _calls


def chain(stage_count: int) -> cairn.Chain:
    return cairn.Chain(
        [
            cairn.Stage(
                1000 + 37 * i % 511, saved_bytes=5000 + 91 * i % 1300, forward_ns=100 + 53 * i % 97, backward_ns=200
            )
            for i in range(stage_count)
        ],
        input_bytes=1000,
    )


GRAPH = cairn.load(Path(__file__).parents[2] / "tests" / "data" / "graphs" / "resnet_8.json")
LONG = chain(100)
BUDGET = 100_000
SETTINGS = {"solver": "chain-dp", "slots": 500, "threads": 1}


@pytest.fixture
def eager_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_POLL_INTERVAL_NS", 0)


@pytest.fixture(autouse=True)
def sigint_arrives():
    """Also where the tests run in the background of a shell, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def sigint_restored():
    before = signal.getsignal(signal.SIGINT)
    yield before
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, before)


def search_for_hours() -> cairn.Solution:
    """Takes as long as it is let, and little memory; finds a first schedule at once."""
    return cairn.solve(GRAPH, 170_000_000, solver="graph-search", iterations=10**12)


def test_progress(eager_polls: None) -> None:
    seen: list[cairn.Progress] = []
    threads = set()

    def progress(state: cairn.Progress) -> None:
        seen.append(state)
        threads.add(threading.current_thread())

    solution = cairn.solve(LONG, BUDGET, progress=progress, **SETTINGS)
    assert solution.schedule == cairn.solve(LONG, BUDGET, **SETTINGS).schedule
    assert len(seen) > 10 and threads == {threading.current_thread()}
    assert all(state.phase and (state.done is None or 0 <= state.done <= state.total) for state in seen)


def test_polls_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_POLL_INTERVAL_NS", 10**15)
    seen: list[cairn.Progress] = []
    cairn.solve(LONG, BUDGET, progress=seen.append, **SETTINGS)
    assert len(seen) == 1


def test_what_progress_raises_comes_out(eager_polls: None) -> None:
    def progress(_state: cairn.Progress) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        cairn.solve(LONG, BUDGET, progress=progress, **SETTINGS)
    assert caught.value.__context__ is None
    with pytest.raises(LookupError, match="mine"):
        cairn.limits(LONG, progress=progress, **SETTINGS)


def test_progress_can_stop_the_search(eager_polls: None) -> None:
    with pytest.raises(cairn.Cancelled):  # at the first poll nothing has been found
        cairn.solve(LONG, BUDGET, progress=lambda _: True, **SETTINGS)

    def is_half_done(state: cairn.Progress) -> bool:
        return state.done is not None and 2 * state.done >= state.total

    solution = cairn.solve(LONG, BUDGET, progress=is_half_done, **SETTINGS)
    assert solution.stopped_early
    assert cairn.verify(LONG, solution.schedule).replay.peak_bytes <= BUDGET


def test_interrupt_during_a_solve(eager_polls: None, sigint_restored) -> None:
    calls = []

    def progress(_state: cairn.Progress) -> None:
        calls.append(None)
        signal.raise_signal(signal.SIGINT)  # as the terminal does: pending when the callback returns

    with pytest.raises(KeyboardInterrupt) as caught:
        cairn.solve(LONG, BUDGET, progress=progress, **SETTINGS)
    assert len(calls) == 1 and caught.value.solution is None


def test_a_handler_that_returns_lets_the_solve_go_on(eager_polls: None, sigint_restored) -> None:
    arrived = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        raised = []
        solution = cairn.solve(LONG, BUDGET, progress=lambda _: _raise_once(raised), **SETTINGS)
    finally:
        signal.signal(signal.SIGINT, sigint_restored)
    assert solution.found and len(arrived) == 1
    assert arrived[0][0] == signal.SIGINT and arrived[0][1] is not None


def _raise_once(raised: list) -> None:
    if not raised:
        raised.append(True)
        signal.raise_signal(signal.SIGINT)


def test_a_signal_after_the_last_poll_is_not_lost(sigint_restored) -> None:
    with pytest.raises(KeyboardInterrupt), _calls.SignalHold():
        signal.raise_signal(signal.SIGINT)
    call = _calls.Call()
    call.run(lambda *_: signal.raise_signal(signal.SIGINT) or 0)
    assert call.interrupted and not call.failed
    with pytest.raises(KeyboardInterrupt) as caught:
        call.finish("answer")
    assert caught.value.solution == "answer"


def test_other_signals_interrupt_too() -> None:
    def expire(_number: int, _frame: object) -> None:
        raise TimeoutError("late")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="late") as caught:
            search_for_hours()
        assert time.monotonic() - started < 20
        best = caught.value.solution
        assert best.stopped_early and cairn.verify(GRAPH, best.require()).replay.makespan_ns == best.makespan_ns
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert signal.getsignal(signal.SIGALRM) is expire
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_in_a_process_of_its_own() -> None:
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import test_interrupt
        print("solving", flush=True)
        try:
            test_interrupt.search_for_hours()
        except KeyboardInterrupt as interrupt:
            print("interrupted", interrupt.solution.stopped_early, flush=True)
            raise
        print("finished", flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdout.readline() == "solving\n"
        time.sleep(0.3)
        started = time.monotonic()
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert output == "interrupted True\n", errors
    assert child.returncode == -signal.SIGINT
    assert "Exception ignored" not in errors
    assert time.monotonic() - started < 20


def test_other_threads_run_meanwhile() -> None:
    found = []
    solver = threading.Thread(target=lambda: found.append(cairn.solve(LONG, BUDGET, **{**SETTINGS, "slots": 2000})))
    solver.start()
    ticks = 0
    while solver.is_alive():
        time.sleep(0.001)
        ticks += 1
    solver.join()
    assert found[0].found and ticks > 10


def test_solves_run_at_the_same_time() -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(cairn.solve(LONG, BUDGET, **SETTINGS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({solution.schedule for solution in found}) == 1 and len(found) == 3


def test_nested_solves(eager_polls: None, sigint_restored) -> None:
    def progress(_state: cairn.Progress) -> None:
        assert cairn.solve(chain(3), 10**6).found
        signal.raise_signal(signal.SIGINT)
        cairn.solve(chain(3), 10**6)  # not here: this call began after the outer one took the signals over

    with pytest.raises(KeyboardInterrupt):
        cairn.solve(LONG, BUDGET, progress=progress, **SETTINGS)
