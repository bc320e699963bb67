"""Signals that ask a run to stop: nothing that they meet raises an exception."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from qerl_jax.system.signals import (
    STOP_SIGNALS,
    after_parent,
    exit_on_stop_signals,
    stop_signals,
)


class Broken:
    """A stderr that is being written to, or whose terminal is gone."""

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error


@pytest.mark.parametrize(
    "stderr",
    [
        Broken(RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")),
        Broken(OSError(5, "Input/output error")),
        None,
    ],
)
@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_is_kept_where_its_line_cannot_be_printed(stderr, signum, monkeypatch):
    with stop_signals() as received:
        monkeypatch.setattr(sys, "stderr", stderr)
        os.kill(os.getpid(), signum)
        monkeypatch.undo()
    assert received == [signum]


def test_a_signal_says_one_line(capsys):
    with stop_signals() as received:
        for _ in range(2):  # A scheduler may repeat it.
            os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert capsys.readouterr().err == "\nSIGTERM: saving and stopping\n"


@pytest.fixture
def disposition():
    """Sets how this process handles a signal while a test runs."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield signal.signal
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("block", [stop_signals, exit_on_stop_signals])
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_an_ignored_signal_stays_ignored(block, number, disposition):
    """As SIGHUP under nohup, and SIGINT of a job that a shell started in the background."""
    disposition(number, signal.SIG_IGN)
    with block():
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN


def test_a_program_keeps_its_own_use_of_a_signal(disposition):
    seen = []
    disposition(signal.SIGUSR1, lambda *_: seen.append(1))
    with stop_signals() as received:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (seen, received) == ([1], [])


def test_a_job_hears_its_sweep_that_ignores_the_signal(disposition):
    disposition(signal.SIGTERM, signal.SIG_IGN)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    ask = after_parent(signal.SIGTERM)
    done = subprocess.run([sys.executable, "-S", "-c", code], preexec_fn=ask, check=False)
    assert done.returncode == -signal.SIGTERM


TERMINAL = """
import fcntl, sys, termios, time
from qerl_jax.system.signals import stop_signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
with stop_signals() as received:
    print("ready", flush=True)
    while not received:
        time.sleep(0.01)
    print("a row", flush=True)
    print("a warning", file=sys.stderr, flush=True)
with open(sys.argv[1], "w") as file:
    file.write(str(received))
"""


def test_what_is_printed_after_a_terminal_was_closed_is_no_error(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, str(tmp_path / "received")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    assert b"ready" in os.read(ours, 100)
    time.sleep(0.1)
    os.close(ours)
    assert process.wait(timeout=20) == 0
    assert (tmp_path / "received").read_text() == str([int(signal.SIGHUP)])
