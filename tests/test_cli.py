"""Flags and errors of the command line, in processes of their own."""

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

import bytecode
import pytest

from qerl_jax.commands import cli

ROOT = Path(__file__).resolve().parents[1]
FULL = (
    "error: no disk space: [Errno 28] No space left on device; free some and run the command "
    "again\n"
)

CONFIG = """
from ml_collections import ConfigDict
from qerl_jax.errors import UserError

def get_config(preset="small"):
    if preset not in ("small", "large"):
        raise UserError(f"unknown preset {preset!r}; there are small, large")
    rl = {"clip_low": 0.2, "clip_high": 0.28, "updates_per_rollout": 4}
    rl |= {"kl_coef": 0.0, "kl_grad": "k3", "loss": "grpo"}
    return ConfigDict({"steps": 3, "preset": preset, "rl": rl, "targets": ("a", "b")})
"""

EXPERIMENT = """
import errno, sys
from qerl_jax.commands import cli
from qerl_jax.errors import UserError

def run(config, workdir):
    if config.steps == 7:
        raise UserError("steps is 7;\\n  use 8")
    if config.steps == 8:
        raise KeyboardInterrupt
    if config.steps == 9:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    if config.steps == 11:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "metrics.jsonl")
    if config.steps == 12:
        import theirs
        theirs.f()
    if config.steps == 10:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    print(config.preset, config.rl.clip_high, config.targets, workdir, "jax" in sys.modules)

cli.main(run, sys.path[0] + "/config.py")
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "experiment.py").write_text(EXPERIMENT)

    def run(*arguments, stdout=subprocess.PIPE):
        return subprocess.run(
            [sys.executable, "experiment.py", *arguments],
            cwd=tmp_path,
            env=bytecode.ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def test_an_argument_that_is_not_utf8_is_one_line(command, capsys):
    done = command("--config.preset=\udcff")
    assert done.returncode == 2
    assert done.stderr == (
        "error: argument 1, --config.preset=\\udcff: not valid Unicode: character 17 is the lone "
        "surrogate \\udcff; write the text in UTF-8\n"
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    with pytest.raises(SystemExit):
        cli.run_command(parser, pytest.fail, ["a\udc80"])
    assert capsys.readouterr().err.startswith("error: argument 1, a\\udc80: not valid Unicode")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--adaptor=x"], "--adaptor: there is no such flag; did you mean --adapter? --help"),
        (["a", "--xyz"], "--xyz: there is no such flag; --help"),
        ([], "the following arguments are required: MODEL; --help"),
        (["a", "--rows=x"], "argument --rows: invalid int value: 'x'; --help"),
        (["a", "b"], "unrecognized arguments: b; --help"),
    ],
)
def test_wrong_arguments_of_a_command_are_one_line(argv, text, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--adapter")
    parser.add_argument("--rows", type=int)
    with pytest.raises(SystemExit) as exit:
        cli.run_command(parser, pytest.fail, argv)
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"error: {text} lists all arguments\n"


def test_flags_reach_the_experiment_before_jax_is_imported(command):
    assert command().stdout == "small 0.28 ('a', 'b') None False\n"
    arguments = ("--config=config.py:large", "--config.rl.clip_high=0.2", "--workdir=here")
    assert command(*arguments).stdout == "large 0.2 ('a', 'b') here False\n"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.rl.clip_hgh=0.2", ["'clip_hgh'", 'Did you mean "clip_high"?']),
        ("--config.rl.clip_high=much", ["clip_high=much"]),
        ("--config.rl.kl_grad=k3", ["rl.kl_grad", "rl.kl_coef"]),
        ("--config.stepz.of=1", ["'stepz'"]),
        (
            "--config.rl.kc=1",
            ["'kc'", "mean --config.rl.kl_coef?", "--explain=rl lists the fields"],
        ),
        ("--config.optimizer.lr=1", ["mean --config.optimizer.learning_rate? --explain=optimizer"]),
        ("--steps=3", ["'steps'; a field of the config is set like --config.steps=3\n"]),
        ("--lr", ["'lr'; a field", "--config.optimizer.learning_rate=VALUE\n"]),
        ("--config=qwen2.5-7b,trl", ["is a preset", "write --config=grpo_gsm8k:qwen2.5-7b,trl\n"]),
        ("--explain=rl.clip", ["no such field", "rl.clip_low", "--explain=all"]),
        (
            "--config.rl.repetition_penalty=1.1",
            ["no such field: 'repetition_penalty': it changes a token", "rollout.min_p"],
        ),
        ("--repetition_penalty=1.1", ["it changes a token's probability"]),
        ("--explain=rollout.repetition_penalty", ["no such field: it changes a token"]),
        ("--workdri=x", ["'workdri'", "workdir"]),
        ("--config=config.py:huge", ["'huge'", "small, large"]),
        ("--config=absent.py", ["absent.py"]),
        ("--config=.", ["cannot read the config: [Errno 21]"]),
        ("--config.steps=1e3", ["steps=1e3: it must be a whole number\n"]),
        ("--print_config=maybe", ["maybe: it must be true or false\n"]),
        ("--workdir=", ["--workdir is empty"]),
        ("steps=4", ["'steps=4'", "--config.steps"]),
        ("--config.steps=7", ["steps is 7; use 8"]),
        ("--config.steps=9", ["no disk space", "metrics.jsonl"]),
        ("--config.steps=11", ["no disk space", "metrics.jsonl"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, argument, words):
    result = command(argument)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_a_closed_output_is_no_traceback(command):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as closed:
        done = command(stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")
    done = command("--config.steps=10")  # another pipe, not that of the output
    assert (done.returncode, "BrokenPipeError" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("redirections", "arguments", "code", "stdout", "stderr"),
    [
        (">&-", "", 0, "", ""),
        (">&- 2>&- <&-", "", 0, "", ""),
        ("2>&-", "--config.steps=7", 2, "", ""),
        (">&-", "--help", 0, "", ""),
        ("2>/dev/full", "--config.steps=7", 2, "", ""),
        (">/dev/full", "--help", 2, "", FULL),
        (">/dev/full", "--explain=all", 2, "", FULL),
        ("> >(:)", "--help", 141, "", ""),
        ("2> >(:)", "--config.steps=8", 130, "", ""),
    ],
)
def test_streams_that_cannot_be_written(
    command, tmp_path, redirections, arguments, code, stdout, stderr
):
    del command  # It has written the experiment.
    # A pipe whose reader ends is only seen once the reader has ended.
    wait = "sleep 0.3;" if "(" in redirections else ""
    script = f"exec {redirections}; {wait} exec {sys.executable} experiment.py {arguments}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=bytecode.ENVIRONMENT | {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)


def test_no_file_gets_the_number_of_a_closed_stream():
    code = """
import subprocess, sys
from qerl_jax.system.streams import open_standard_streams
open_standard_streams()
with open(sys.argv[1]) as file:
    assert file.fileno() > 2
print("warning", file=sys.stderr)  # which would go to stdout
sys.stdin.read()
subprocess.run([sys.executable, "-c", "import os; os.fstat(0); os.fstat(2)"], check=True)
"""
    arguments = ["bash", "-c", 'exec "$@" 2>&- <&-', "_", sys.executable, "-c", code, __file__]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_interrupt_is_exit_code_130(command):
    result = command("--config.steps=8")
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("flag", ["--help", "--helpfull", "-?"])
def test_help_is_no_failure(command, flag):
    result = command(flag)
    assert result.returncode == 0
    assert "--workdir" in result.stdout
    text = " ".join(result.stdout.split())
    assert "Models: smollm2-135m, qwen2.5-coder-1.5b," in text
    assert "Recipes: paper, first_run," in text
    assert "--explain=FIELD says what a field means" in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\n\ndef get_config():\n    os.pathh", "bad.py:4: AttributeError: module 'os'"),
        ("def get_config():\n    return {}['key']", "bad.py:2: KeyError: 'key'"),
        ("def get_config(", "bad.py:1: SyntaxError: "),
        ("def get_config():\n    return int('ten')", "bad.py:2: ValueError: invalid literal"),
        ("def get_config():\n    return len(3)", "bad.py:2: TypeError: object of type 'int'"),
        ("def get_config(preset):\n    return {}", "flag --config=bad.py: get_config() missing 1"),
        ("def get_config():\n    return {}", "bad.py: get_config() returned a dict: return a Conf"),
        ("import absent", "bad.py:1: ModuleNotFoundError: "),
        ("", "no get_config(): qerl_jax/config/experiments/grpo_gsm8k.py has one"),
    ],
)
def test_errors_of_a_config_file_say_where(command, tmp_path, source, message):
    (tmp_path / "bad.py").write_text(source)
    result = command("--config=bad.py")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_a_config_that_exits_keeps_its_code(command, tmp_path):
    (tmp_path / "exits.py").write_text("import sys\ndef get_config():\n    sys.exit(3)\n")
    result = command(f"--config={tmp_path / 'exits.py'}")
    line = (
        f"error: {tmp_path / 'exits.py'}:3: SystemExit: 3; it must return, or raise another error\n"
    )
    assert (result.returncode, result.stderr) == (3, line)


@pytest.mark.parametrize(
    ("call", "code"), [("exit()", 2), ("raise SystemExit(4)", 4), ("exit(512)", 2)]
)
def test_code_that_exits_is_named(command, tmp_path, call, code):
    (tmp_path / "theirs.py").write_text(f"def f():\n    {call}\n")
    result = command("--config.steps=12")
    assert result.returncode == code
    assert result.stderr.startswith(f"error: {tmp_path / 'theirs.py'}:2: SystemExit: ")
    assert result.stderr.count("\n") == 1


REWARDS = """
from ml_collections import ConfigDict

def get_config():
    reward = {"function": "a:b", "weight": 1.0}
    return ConfigDict({"steps": 3, "preset": "p", "rewards": {"correctness": reward}}).lock()
"""
SHOW = """
import sys
from qerl_jax.commands import cli
from qerl_jax.rewards.from_config import check_rewards

def run(config, workdir):
    check_rewards(config)
    print(config.rewards.to_dict())

cli.main(run, sys.path[0] + "/config.py")
"""


def test_a_reward_is_added_on_the_command_line(command, tmp_path):
    (tmp_path / "config.py").write_text(REWARDS)
    (tmp_path / "experiment.py").write_text(SHOW)
    result = command(
        "--config.rewards.judge.function=http://host/score",
        "--config.rewards.judge.token_env=TOKEN",
        "--config.rewards.judge.retries=5",
        "--config.rewards.correctness.time_limit=3",
        "--config.rewards.short.function=c:d",
        "--config.rewards.short.weight=0.5",
    )
    assert (result.stderr, result.returncode) == ("", 0)
    assert ast.literal_eval(result.stdout) == {
        "correctness": {"function": "a:b", "weight": 1.0, "time_limit": 3.0},
        "judge": {"function": "http://host/score", "weight": 1.0, "token_env": "TOKEN"}
        | {"retries": 5},
        "short": {"function": "c:d", "weight": 0.5},
    }
    for argument, words in (
        (
            "--config.rewards.shrt.weight=0.5",
            "no reward 'shrt' (there are correctness): add it with "
            "--config.rewards.shrt.function=package.module:function",
        ),
        ("--config.rewards.short.wieght=1", "rewards.short has no 'wieght'; it has function, we"),
        ("--config.rewards.overlong.function=c:d", "'overlong' is the name of the length penalty"),
        ("--config.rewards.total.function=c:d", "'total' is the name of the weighted sum of all"),
    ):
        result = command(argument)
        assert result.returncode != 0
        assert words in result.stderr
        assert result.stderr.count("\n") == 1
