"""A run that ends early and starts again is the run that did not end early."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny_run

import qerl_jax.run.train
from qerl_jax.run.signals import StoppedError
from qerl_jax.run.train import train

STEPS = 6
CHANGES = {
    "steps": STEPS,
    "checkpoint.every": 2,
    "aqn.stages": 3,
    "rl.loss": "dapo",
    "rl.updates_per_rollout": 2,
    "rl.dynamic_sampling": True,
    "rl.dynamic_sampling_rounds": 2,
    "rewards.format.weight": 0.0,  # leaves groups whose rewards are all equal
    "optimizer.schedule": "cosine",
}


class Killed(BaseException):  # noqa: N818
    """Ends a run like SIGKILL, but for this process."""


def rewards_that(act, *, at):
    """The rewards of the config; `act` is called in call number `at` of the correctness."""
    calls = itertools.count(1)

    def correctness(*arguments):
        if next(calls) == at:
            act()
        return tiny_run.even_end(*arguments)

    return {"correctness": (correctness, 1.0), "format": (tiny_run.low_share, 0.0)}


def kill():
    raise Killed


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def uninterrupted(tiny, tmp_path_factory):
    return train(tiny.config(CHANGES), workdir=tmp_path_factory.mktemp("runs") / "uninterrupted")


def assert_same_run(run, uninterrupted):
    assert tiny_run.results(run) == tiny_run.results(uninterrupted)
    assert (run / "curves.png").exists()
    files = [
        path.relative_to(uninterrupted)
        for path in [uninterrupted / "completions.jsonl", *uninterrupted.rglob("adapter_*")]
    ]
    assert len(files) in (3, 5)
    for file in files:
        assert (run / file).read_bytes() == (uninterrupted / file).read_bytes(), file


def steps_of(run):
    return [row["step"] for row in tiny_run.results(run)]


# Correctness is called 4 times in each evaluation (before training, after steps 2, 4 and 6) and 8 or
# 16 times in the rollouts of a step: 80 calls.
def test_calls_that_the_tests_below_count_on(uninterrupted):
    rows = tiny_run.results(uninterrupted)
    assert [row["sampled_groups"] for row in rows] == []


@pytest.mark.parametrize("at", [6, 20, 40, 60])
def test_killed_within_a_step(uninterrupted, tiny, tmp_path, capsys, at):
    config = tiny.config(CHANGES)
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train(config, workdir=run, rewards=rewards_that(kill, at=at))
    lost = steps_of(run) if (run / "metrics.jsonl").exists() else []
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 3, "rew')
    capsys.readouterr()
    train(config, workdir=run)
    restored = len(lost) - len(lost) % 2
    assert ("resuming after step" in capsys.readouterr().out) == (restored > 0)
    assert_same_run(run, uninterrupted)


@pytest.mark.parametrize("at", range(2, 64, 9))
def test_terminated_anywhere(uninterrupted, tiny, tmp_path, at):
    config = tiny.config(CHANGES)
    run = tmp_path / "run"
    with pytest.raises(StoppedError) as stopped:
        train(config, workdir=run, rewards=rewards_that(terminate, at=at))
    assert stopped.value.exit_code == 143
    rows = steps_of(run) if (run / "metrics.jsonl").exists() else []
    saved = [int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()]
    assert max(saved) == len(rows)
    train(config, workdir=run)
    assert_same_run(run, uninterrupted)
