"""Signals that ask a run to stop: nothing that they meet raises an exception."""

import os
import signal
import sys

import pytest

from qerl_jax.system.signals import stop_signals


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
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_kept_where_its_line_cannot_be_printed(stderr, signum, monkeypatch):
    with stop_signals() as received:
        monkeypatch.setattr(sys, "stderr", stderr)
        os.kill(os.getpid(), signum)
        monkeypatch.undo()
    assert received == [signum]


def test_a_signal_says_one_line(capsys):
    with stop_signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert capsys.readouterr().err == "\nSIGTERM: saving and stopping\n"
