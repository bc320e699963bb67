"""Text from outside reaches the terminal without what a terminal obeys."""

import io
import subprocess
import sys

import pytest

from qerl_jax.commands import cli
from qerl_jax.errors import UserError, first_line, visible
from qerl_jax.evaluation import load_policy, sample
from qerl_jax.processes.spawn import _Child
from qerl_jax.rewards.score import score
from qerl_jax.run.checkpoints import _root_cause
from qerl_jax.run.jobs import _failure_reason
from qerl_jax.system.live_line import LiveLine

# A title, a cleared screen, red, a carriage return, C1's CSI, and a text that runs backwards.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mhi\rfake\x9b1m\u202eend"


def is_safe(text):
    return all(character in "\n\t" or character.isprintable() for character in text)


def test_control_characters_become_escapes():
    assert not is_safe(HOSTILE)
    assert is_safe(visible(HOSTILE))
    assert visible("a\tb\nc 日 é") == "a\tb\nc 日 é"
    assert visible(visible(HOSTILE)) == visible(HOSTILE)


def test_the_first_line_of_an_error():
    assert is_safe(first_line(ValueError(HOSTILE)))
    assert is_safe(_root_cause(ValueError(HOSTILE)))


def failing(prompt, completion, answer, num_tokens, finished):
    raise ValueError(f"cannot parse {completion}")


async def failing_later(prompt, completion, answer, num_tokens, finished):
    raise ValueError(f"cannot parse {completion}")


def failing_by_name(prompt, completion, answer, num_tokens, finished):
    raise type(HOSTILE, (ValueError,), {})("x")


@pytest.mark.parametrize("function", [failing, failing_later, failing_by_name])
def test_the_message_of_a_reward(function):
    scores = score({"judge": (function, 1.0)}, ["p"], [HOSTILE], ["a"], [1], [True], time_limit=5)
    (line,) = scores.errors
    assert r"\x1b" in line
    assert is_safe(line)


def test_bad_input_of_a_command(capsys):
    with pytest.raises(SystemExit), cli._one_line_errors():
        raise UserError(f"the folder {HOSTILE}\nis odd")
    captured = capsys.readouterr()
    assert is_safe(captured.err)
    assert captured.err.count("\n") == 1


def test_the_traceback_of_a_bug_in_a_function_of_the_user():
    code = (
        "import argparse; from qerl_jax.commands import cli\n"
        f"def run(arguments): raise RuntimeError({HOSTILE!r})\n"
        "cli.run_command(argparse.ArgumentParser(), run, [])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: \\x1b]0;owned" in done.stderr
    assert is_safe(done.stderr)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line():
    stream = Terminal()
    LiveLine(stream).update(HOSTILE)
    assert is_safe(stream.getvalue().removeprefix("\r\x1b[K"))


def test_a_sample_is_safe_on_a_terminal_and_whole_in_a_file(monkeypatch):
    for stream, expected in ((Terminal(), visible(HOSTILE)), (io.StringIO(), HOSTILE)):
        monkeypatch.setattr(sys, "stdout", stream)
        sample._write(HOSTILE)
        assert stream.getvalue() == expected


def test_a_warning_about_a_foreign_adapter(capsys):
    load_policy.warn_of_another_base("folder", f"user/{HOSTILE}", ["user/base"])
    assert is_safe(capsys.readouterr().err)


def test_what_a_job_of_a_sweep_said_last(tmp_path):
    (tmp_path / "log").write_text(HOSTILE)
    assert is_safe(_failure_reason(1, tmp_path / "log"))


def test_what_another_process_said_last():
    code = f"import sys; sys.stderr.write('error: ' + {HOSTILE!r}); sys.exit(2)"
    child = _Child(1, [sys.executable, "-c", code], {"PYTHONIOENCODING": "utf-8"})
    child.process.wait()
    assert is_safe(child.report_end())
