"""The live line: rewritten in place on a terminal, and rare lines elsewhere."""

import io
import time
import types

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
