"""Bad input on the command line: one line, exit code 2, and nothing is lost."""

import json
import logging
import shutil
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import tiny_checkpoints
import tiny_run
from absl import flags
from problem_sets import load_problems
from safetensors.numpy import load_file, save_file

from benchmarks import step
from qerl_jax.commands import cli
from qerl_jax.commands import train as train_command
from qerl_jax.config.experiments import installed_file
from qerl_jax.errors import UserError
from qerl_jax.evaluation.tasks import TaskOverrides, make_tasks
from qerl_jax.rewards.from_config import PYTHON_REWARDS
from qerl_jax.run.ownership import write_config
from qerl_jax.run.saved_config import saved_config
from qerl_jax.training.first_policy import _announce
from qerl_jax.training.loop import train
from qerl_jax.weights.peft import WEIGHTS_FILE

CONFIG = installed_file("grpo_gsm8k")
CHANGES = {"steps": 3, "eval.every": 0, "aqn.kl_every": 0}


@pytest.fixture
def command(tiny, tmp_path, monkeypatch, capsys):
    """Returns a function that calls the experiment's main and gives the exit code and stderr."""
    config = tiny.config_file(tmp_path / "tiny_config.py", CHANGES)
    levels = {name: logging.getLogger(name).level for name in ("", "absl", "jax")}

    def call(*arguments, config=config):
        argv = ["grpo_gsm8k.py", *([f"--config={config}"] if config else []), *arguments]
        before = set(flags.FLAGS)
        # absl's own would change the logging of this process.
        monkeypatch.setattr(cli.app, "run", lambda main, flags_parser: main(flags_parser(argv)))
        monkeypatch.setattr(sys, "argv", argv)
        capsys.readouterr()
        code = 0
        try:
            cli.main(train_command.run, CONFIG)
        except SystemExit as stopped:
            code = stopped.code
        finally:
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)
        call.out, err = capsys.readouterr()
        lines = err.splitlines(keepends=True)  # on a slow machine with what is waited for
        return code, "".join(line for line in lines if not line.startswith(("load", "compiling")))

    yield call
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def fails(command):
    """Returns a function that expects the one line of an error, with all of these words in it."""

    def call(*arguments, words, **options):
        code, err = command(*arguments, **options)
        assert code == 2
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        for word in words:
            assert word in err

    return call


@pytest.fixture(scope="module")
def finished_run(tiny, tmp_path_factory):
    return train(tiny.config(CHANGES), workdir=tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def finished(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "finished")


@pytest.fixture
def model(tiny, tmp_path):
    """A copy of the model, to be spoiled."""
    return shutil.copytree(tiny.model, tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.rl.clip_hgh=0.2"], ["'clip_hgh'", "clip_high"]),
        (["--config.rl.clip_high=wide"], ["clip_high"]),
        ([f"--config={CONFIG}:qwen2.5-8b"], ["unknown preset 'qwen2.5-8b'", "qwen2.5-7b"]),
        (["--config.rl.loss=ppo"], ["'ppo'", "grpo", "dapo"]),
        (["--config.rollout.group_size=1"], ["rollout.group_size=1", "at least 2"]),
        (["--config.profile.start=2"], ["profile.start=2, profile.stop=0"]),
        (["--config.aqn.schedule=mine:ramp"], ["'mine:ramp'"]),
        (["--config.rewards.format.function=mine:score"], ["'mine:score'"]),
        (["--config.model.source=/absent/model"], ["'/absent/model'", "--config.model.source"]),
        (["--config.data.path=/absent.jsonl"], ["/absent.jsonl"]),
        (["--config.data.max_prompt_tokens=3"], ["data.max_prompt_tokens=3", "=6"]),
        (["--config.rollout.max_new_tokens=113"], ["rollout.max_new_tokens = 129", "128"]),
        (
            ["--config.eval.every=1", "--config.eval.max_new_tokens=113"],
            ["eval.max_new_tokens = 129", "128"],
        ),
        (["--config.lora.init=/absent/adapter"], ["/absent/adapter"]),
        (["--config.log.wandb=true"], ["wandb", "--config.log.wandb=false"]),
    ],
)
def test_bad_values(fails, tmp_path, arguments, words):
    fails(*arguments, f"--workdir={tmp_path / 'run'}", words=words)


@pytest.mark.parametrize("name", ["matplotlib.font_manager", "urllib3.connectionpool", "root"])
def test_libraries_log_nothing_between_the_lines(command, tmp_path, name):
    command("--config.data.path=/absent.jsonl", f"--workdir={tmp_path / 'run'}")
    assert not logging.getLogger(name).isEnabledFor(logging.WARNING)
    assert logging.getLogger("jax.x").isEnabledFor(logging.WARNING)


def test_the_home_folder_is_expanded_in_every_path(fails, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for flag in ("lora.init", "model.source"):
        fails(f"--config.{flag}=~/absent", "--workdir=~/run", words=[str(tmp_path), "absent"])
    assert not (tmp_path / "run").exists()  # A failed start leaves no folder.
    shutil.copy(tiny.problems, tmp_path / "own.jsonl")
    expected = load_problems("", path=str(tiny.problems))
    assert load_problems("", path="~/own.jsonl") == expected
    assert load_problems("", eval_path="~/own.jsonl", split="eval", eval_size=99) == expected
    (task,) = make_tasks(["~/own.jsonl"], run=None, overrides=TaskOverrides())
    assert (task.name, task.problems) == ("own", expected)
    assert cli.with_files(["--config=~/c.py:tiny"]) == [f"--config={tmp_path}/c.py:tiny"]
    assert step.make_parser().parse_args(["--out=~/r.json"]).out == tmp_path / "r.json"


@pytest.mark.parametrize(
    ("preset", "warned"),
    [("qwen2.5-1.5b-paper", True), ("qwen2.5-coder-1.5b-trl", True), ("qwen3-0.6b-paper", False)],
)
def test_a_large_preset_on_a_cpu_is_said(tiny, preset, warned, capsys):
    _announce(tiny.config({"preset": preset}))
    err = capsys.readouterr().err
    assert (err.count("\n") == 1 and "on a CPU" in err and "--extra cuda" in err) == warned


def change_architecture(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))


def truncate(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1000])


def lose_weights(model):
    (model / "model.safetensors").unlink()


def lose_template(model):
    tiny_checkpoints.write_tokenizer(model)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (change_architecture, ["'mamba'", "qwen2"]),
        (truncate, ["model.safetensors", "truncated"]),
        (lose_weights, ["neither model.safetensors nor"]),
        (lose_template, ["chat template"]),
    ],
)
def test_bad_models(fails, model, tmp_path, spoil, words):
    spoil(model)
    fails(f"--config.model.source={model}", f"--workdir={tmp_path / 'run'}", words=words)


def test_bad_problems(fails, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "t1", "answer": "1"}\n{"quest')
    fails(f"--config.data.path={path}", f"--workdir={tmp_path / 'run'}", words=[f"{path}:2"])


def test_another_config_in_an_existing_folder(fails, finished):
    before = tiny_run.contents(finished)
    words = ["optimizer.b2: 0.99 -> 0.9", "seed: 0 -> 1", f"--config.init_from={finished}"]
    fails("--config.optimizer.b2=0.9", "--config.seed=1", f"--workdir={finished}", words=words)
    assert tiny_run.contents(finished) == before


def test_other_weights_in_an_existing_folder(fails, finished, tiny):
    before = tiny_run.contents(finished)
    weights = tiny.model / "model.safetensors"
    data = weights.read_bytes()
    try:
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        fails("--config.steps=4", f"--workdir={finished}", words=[str(tiny.model), "began with"])
    finally:
        weights.write_bytes(data)
    assert tiny_run.contents(finished) == before


def test_a_run_goes_on_with_the_config_that_it_saved(command, fails, finished, capsys):
    before = tiny_run.results(finished)
    workdir = f"--workdir={finished}"
    assert command(workdir, "--config.steps=4", config=None) == (0, "")
    rows = tiny_run.results(finished)
    assert (rows[:3], [row["step"] for row in rows]) == (before, [1, 2, 3, 4])
    fails(workdir, "--config.seed=1", config=None, words=["seed: 0 -> 1"])
    fails(workdir, "--config.rl.clip_hgh=1", config=None, words=["'clip_hgh'"])
    saved = json.loads((finished / "config.json").read_text())
    saved["config"]["rl"]["loss"] = "antigravity:loss"  # so the tag is not valid
    (finished / "config.json").write_text(json.dumps(saved))
    for options in (["--dry_run"], ["--print_config"], ["--explain=rl"], []):
        fails(workdir, *options, config=None, words=["of another person", "--config", "--trust"])
    assert "antigravity" not in sys.modules
    fails(workdir, "--trust", "--dry_run", config=None, words=["antigravity:loss"])


def test_the_saved_config_is_that_of_the_run(tiny, finished_run):
    saved = saved_config(finished_run, trust=False)
    assert saved.to_dict() == tiny.config(CHANGES).to_dict()
    assert saved.is_locked
    assert saved.lora.get_type("targets") is tuple


def test_rewards_given_in_python_are_not_those_of_the_saved_config(finished):
    saved = json.loads((finished / "config.json").read_text())
    rewards = {"correctness": {"function": "a:b", "weight": 1.0}}
    write_config(finished / "config.json", saved | {PYTHON_REWARDS: rewards})
    with pytest.raises(UserError, match="given in Python: resume it there"):
        saved_config(finished, trust=False)


@pytest.mark.parametrize("option", ["--dry_run", "--print_config"])
def test_what_a_run_refuses_is_refused_before(option, fails, finished, tmp_path):
    before = tiny_run.contents(finished)
    fails(option, "--config.rollout.group_size=1", words=["rollout.group_size=1", "at least 2"])
    fails(option, "--config.mesh.data=2", words=["mesh.data=2 x mesh.tensor=1 are 2 devices"])
    fails(option, f"--workdir={finished}", "--config.seed=1", words=["seed: 0 -> 1"])
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    fails(option, f"--workdir={tmp_path / 'thesis'}", words=["is not a run folder", "thesis.tex"])
    file = tmp_path / "thesis" / "thesis.tex"
    for path in (file, file / "run"):
        fails(option, f"--workdir={path}", words=["as a run folder", "thesis.tex is a file"])
    assert tiny_run.contents(finished) == before
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_what_differs_from_the_preset(command, tmp_path):
    code, _ = command("--dry_run", "--config.steps=5", f"--workdir={tmp_path / 'run'}")
    assert code == 0
    first, last, *_ = command.out.splitlines()
    assert first == "steps = 5 (preset: 3)"
    assert last.endswith(" fields as in the preset, which --print_config prints")


def test_a_config_with_epochs_is_printed_without_reading_the_rows(command):
    options = ["--print_config", "--config.data.path=absent.jsonl"]
    assert command(*options, config="sft:qwen2.5-1.5b") == (0, "")
    assert "sft.epochs = 1.0\nsft.max_tokens" in command.out


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1] + "/lock", "a+")
fcntl.lockf(lock, fcntl.LOCK_EX)
lock.truncate(0)
lock.write("process 7")
lock.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_in_the_same_folder(fails, command, finished):
    before = tiny_run.contents(finished)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, finished], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        fails(f"--workdir={finished}", words=["in use by process 7", "--workdir"])
    assert tiny_run.contents(finished) == before
    assert command(f"--workdir={finished}") == (0, "")


def test_no_disk_space_for_a_checkpoint(fails, command, finished, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 10**6)
    before = tiny_run.results(finished)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        words = ["no disk space", str(finished), "0.00 GB free"]
        fails("--config.steps=5", f"--workdir={finished}", words=words)
    assert tiny_run.results(finished) == before  # No step is taken that could not be saved.
    assert (finished / "checkpoints" / "3").is_dir()
    assert command("--config.steps=5", f"--workdir={finished}") == (0, "")
    rows = tiny_run.results(finished)
    assert rows[:3] == before
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.slow  # `test_train` has such gradients
def test_non_finite_gradients(finished, fails, tmp_path):
    weights = finished / "adapter" / WEIGHTS_FILE
    tensors = load_file(weights)
    name = min(tensors)
    tensors[name] = np.full_like(tensors[name], 1e38)  # The product overflows.
    save_file(tensors, weights)
    words = ["3 updates in a row were not finite", "learning_rate"]
    arguments = [f"--config.lora.init={weights.parent}", "--config.steps=9"]
    arguments += ["--config.checkpoint.every=1", "--config.eval.every=0"]
    fails(*arguments, f"--workdir={tmp_path / 'run'}", words=words)
    rows = tiny_run.results(tmp_path / "run")
    assert [(row["step"], row["update_skipped"]) for row in rows] == [(1, 1), (2, 1), (3, 1)]
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_a_process_of_its_own(tiny, tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--workdir={tmp_path / 'run'}"),
            f"--config={tiny.config_file(tmp_path / 'config.py')}",
            "--config.rollout.group_size=1",
        ],
        env=tiny.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "rollout.group_size=1" in result.stderr
