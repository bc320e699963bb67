"""The live line: rewritten in place on a terminal, and rare lines elsewhere."""

import io
import os
import pty
import subprocess
import sys
import time
import types

import bytecode
import pytest

from qerl_jax.run.lines import line_columns
from qerl_jax.system import live_line


def test_live_line_is_silent_off_a_terminal_and_rewritten_on_one():
    quiet = io.StringIO()
    live = live_line.LiveLine(quiet)
    live.update("rollout 1/64 rows")
    live.clear()
    assert quiet.getvalue() == ""

    screen = io.StringIO()
    screen.isatty = lambda: True
    live = live_line.LiveLine(screen, interval=3600)
    live.update("rollout 1/64 rows")
    live.update("too soon")
    live.clear()
    live.update("x" * 1000)
    first, second, third = screen.getvalue().split("\r\x1b[K")[1:]
    assert (first, second) == ("rollout 1/64 rows", "")
    assert 0 < len(third) < 1000


def state(seconds, *, done=False):
    text = f"{'loaded' if done else 'loading'} after {seconds} s"
    return types.SimpleNamespace(text=text, seconds=seconds, done=done)


def test_progress_off_a_terminal_is_a_line_every_few_seconds_and_one_in_the_end():
    stream = io.StringIO()
    show = live_line.progress_line(stream, every=5.0)
    for seconds in (1.0, 4.9, 5.0, 6.0, 9.9, 10.1, 11.0):
        show(state(seconds))
    show(state(12.0, done=True))
    assert stream.getvalue().splitlines() == [
        "loading after 5.0 s",
        "loading after 10.1 s",
        "loaded after 12.0 s",
    ]


def test_progress_on_a_terminal_is_rewritten_and_its_last_state_stays():
    screen = io.StringIO()
    screen.isatty = lambda: True
    show = live_line.progress_line(screen)
    show(state(0.5))
    show(state(0.51))
    show(state(2.0, done=True))
    assert screen.getvalue().split("\r\x1b[K") == [
        "",
        "loading after 0.5 s",
        "loaded after 2.0 s\n",
    ]


def test_work_that_fails_leaves_no_line():
    screen = io.StringIO()
    screen.isatty = lambda: True
    show = live_line.progress_line(screen)
    show(state(3.0))
    show(types.SimpleNamespace(text="", seconds=4.0, done=True))
    assert screen.getvalue() == "\r\x1b[Kloading after 3.0 s\r\x1b[K"


def test_work_of_less_than_a_second_leaves_no_line():
    stream = io.StringIO()
    show = live_line.progress_line(stream)
    show(state(0.2))
    show(state(0.9, done=True))
    assert stream.getvalue() == ""


def wait_for(condition):
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_waiting_is_a_line_every_few_seconds_of_work_that_never_calls_back():
    stream = io.StringIO()
    with live_line.waiting("compiling programs", stream=stream, every=0.02) as say:
        wait_for(lambda: stream.getvalue().count("\n") >= 2)
        say("compiling programs, 1/2 ready")
        wait_for(lambda: "ready" in stream.getvalue())
    before = stream.getvalue()
    assert before.startswith("compiling programs, 0 s\ncompiling programs, 0 s\n")
    assert "\ncompiling programs, 1/2 ready, 0 s\n" in before
    time.sleep(0.05)
    assert stream.getvalue() == before


def test_waiting_on_a_terminal_leaves_no_line(monkeypatch):
    monkeypatch.setattr(live_line, "_QUIET_SECONDS", 0.02)
    screen = io.StringIO()
    screen.isatty = lambda: True
    with live_line.waiting("importing", stream=screen):
        wait_for(lambda: "importing" in screen.getvalue())
    assert screen.getvalue().startswith("\r\x1b[Kimporting, 0 s")
    assert screen.getvalue().endswith("\r\x1b[K")


def test_short_waits_and_those_of_other_processes_are_silent():
    stream = io.StringIO()
    with live_line.waiting("compiling programs", stream=stream):
        pass
    with live_line.waiting("compiling programs", stream=stream, every=0.001, shows=False):
        time.sleep(0.02)
    assert stream.getvalue() == ""


# The banner is written as XLA writes it, in C and to the descriptor.
OTHERS = """
import os, time, warnings
from qerl_jax.system import live_line
live_line._QUIET_SECONDS = 0.05
with live_line.waiting("compiling programs"):
    time.sleep(0.3)
    os.write(2, b"E0000 alarm.cc:73] \\n****\\nVery slow compile?\\n****\\n")
    warnings.warn("of Python")
    time.sleep(0.3)
    END
os.write(2, b"after\\n")
"""


def lines_on_terminal(code, text="compiling programs, "):
    """The exit code of Python, and the lines that a terminal as its stderr shows at the end."""
    screen, end = pty.openpty()
    arguments = [sys.executable, "-c", code]
    with os.fdopen(end) as terminal:
        process = subprocess.Popen(
            arguments, stderr=terminal, env=os.environ | bytecode.ENVIRONMENT
        )
    shown = b""
    try:
        while part := os.read(screen, 4096):
            shown += part
    except OSError:  # The process has ended.
        os.close(screen)
    lines = shown.decode().replace("\r\n", "\n").split("\n")
    assert shown.count(f"\r\x1b[K{text}".encode()) > 3
    return process.wait(), [line.rpartition(live_line._CLEAR)[2] for line in lines]


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("pass", 0, ["after", ""]),
        ("os.write(2, b'last words\\n'); os.abort()", -6, ["last words", ""]),
        ("os.write(2, b'no line end')", 0, ["no line end", "after", ""]),
    ],
)
def test_what_others_write_is_above_the_live_line(end, code, last):
    found, lines = lines_on_terminal(OTHERS.replace("END", end))
    banner = ["E0000 alarm.cc:73] ", "****", "Very slow compile?", "****"]
    assert found == code
    assert lines == [*banner, "<string>:8: UserWarning: of Python", *last]


SCORING = """
import os, time
from types import SimpleNamespace
from qerl_jax.export import card_scores
from qerl_jax.system import live_line
live_line._QUIET_SECONDS = 0.05
def accuracy(model, lora, on_progress):
    on_progress(1, 5)
    time.sleep(0.5)
    os.write(2, b"Very slow compile?\\n")
    on_progress(2, 5)
    time.sleep(0.5)
    return SimpleNamespace(missing=1)
held_out = SimpleNamespace(prompts=[1, 2], accuracy=accuracy)
card_scores.add_score(None, held_out, "bf16 base", None, None)
"""


def test_what_others_write_is_above_the_line_of_an_export():
    assert lines_on_terminal(SCORING, "scoring bf16 base: ") == (0, ["Very slow compile?", ""])


def test_streams_that_are_closed_show_nothing(monkeypatch, capsys):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        live_line.LiveLine().update("rollout")
        with live_line.waiting("compiling programs", every=0.001):
            time.sleep(0.02)
    monkeypatch.setattr(sys, "stderr", None)
    live_line.progress_line()(state(9.0))
    live_line.progress_line()(state(9.0, done=True))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", None)
    assert line_columns() is None


def test_the_line_has_the_columns_of_what_the_terminal_encodes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    screen.isatty = lambda: True
    live_line.LiveLine(screen).update("\u2265" * 20)
    assert screen.buffer.getvalue() == b"\r\x1b[K\\u2265\\u226"
