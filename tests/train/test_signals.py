"""Stop requests by real signals, in this process and in others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ssdtune.train.signals import StopSignals

# A run that says when it is ready and then stays in native code for minutes.
STUBBORN = """
import hashlib
from ssdtune.train.signals import StopSignals
with StopSignals(same_press_s=0):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""

POLITE = """
import signal
from ssdtune.train.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while stop.requested is None:
        signal.pause()
    print("saved", flush=True)
raise SystemExit(128 + stop.requested)
"""


def start(script: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_sets_the_flag_and_handlers_come_back(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    with StopSignals() as stop:
        assert stop.requested is None
        signal.raise_signal(number)
        assert stop.requested == number
    assert {n: signal.getsignal(n) for n in before} == before
    assert signal.set_wakeup_fd(wakeup) == wakeup
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
    assert "finishing the step and saving" in capfd.readouterr().err


def test_signals_of_one_press_do_not_quit() -> None:
    with StopSignals(clock=lambda: 7.0) as stop:  # time stands still
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stop.requested == signal.SIGTERM


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_polite_stop(number: signal.Signals, code: int) -> None:
    process = start(POLITE)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "saved\n")
    assert "once more to quit at once" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_quits_even_where_python_does_not_run(
    number: signal.Signals, code: int
) -> None:
    process = start(STUBBORN)
    assert process.stderr is not None
    process.send_signal(number)
    process.stderr.readline()
    assert "once more to quit at once" in process.stderr.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert "quitting at once" in err


def test_other_threads_get_a_context_that_does_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with StopSignals() as stop:
            seen.append(signal.getsignal(signal.SIGINT))
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None]


def test_signals_to_a_forked_worker_are_not_ours() -> None:
    reading, writing = os.pipe()
    with StopSignals() as stop:
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, b"x")
                signal.pause()
            finally:
                os._exit(1)
        assert os.read(reading, 1) == b"x"
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    assert stop.requested is None
    os.close(reading)
    os.close(writing)
