"""Trains and scores arms of the comparison on GSM8K on all GPUs of a machine: grids, then seeds.

    uv run --extra cuda python -m benchmarks.gsm8k_arms --gpus=4 \
        --arms=bf16-lora,nvfp4-rounded-lora,nvfp4-lora --seeds=0,1,2,3,4 \
        --model=qwen2.5-coder-1.5b.gguf --train=gsm8k_train.jsonl --test=gsm8k_test_first1000.jsonl

Each job is a process on one GPU: a run of an arm's grid of learning rates, then, with the rate of
the best held-out accuracy, the training of a seed and the evaluations of `benchmarks.gsm8k`, and
the evaluations of the start. The first seed of all arms comes before the second one, and an arm
whose grid is there does not wait for the grids of others. Weights are calibrated by the first job
that needs them, while others that need them wait.

Grids and rows go to gsm8k.json as they get ready. Those that are there, and what lies finished in
--workdir, are not done again, so the same command continues after it was stopped, also with other
arms, seeds or GPUs. `--seeds=` without a seed runs the grids alone, from which the noise is chosen.

Each job says what it does to logs/NAME.log in --workdir. One that fails is named at the end.
"""

import argparse
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks import gsm8k
from experiments.arms import evidence
from qerl_jax.commands import cli
from qerl_jax.errors import UserError
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.jobs import Job, devices_of, run_jobs
from qerl_jax.system.paths import user_path

_RATE = "optimizer.learning_rate"


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gsm8k_arms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arms", required=True, help=f"comma-separated arms, from {', '.join(evidence.ARMS)}")
    seeds = "comma-separated seeds; empty: the grids alone (default: 0,1,2)"
    add("--seeds", default="0,1,2", help=seeds)
    add("--gpus", type=int, default=0, help="jobs at a time, one per GPU (default: one job)")
    add("--model", default="", help="GGUF file or folder of the model (default: the hub's)")
    add("--train", default="", help="JSONL file of training problems (default: the hub's)")
    add("--test", default="", help="JSONL file of test problems (default: the hub's)")
    add("--workdir", type=user_path, default=pathlib.Path("runs/evidence"), help="run folders")
    add("--results", type=user_path, default=gsm8k.RESULTS, help="folder of gsm8k.json")
    return parser


def grid_folder(workdir: pathlib.Path, arm: str) -> pathlib.Path:
    """The folder of an arm's grid, with a run for each learning rate."""
    return workdir / f"grid-{arm}"


def best_rate(grid: list[dict[str, Any]]) -> float:
    """The learning rate of a finished grid with the best held-out accuracy; the lower of equals."""
    return max(grid, key=lambda row: (row["held_out_end"], -row["learning_rate"]))["learning_rate"]


def jobs(arms: list[str], seeds: list[int], arguments: argparse.Namespace) -> Iterator[Job]:
    """The jobs that need no unfinished one, the most urgent first.

    Args:
        arms: the arms to compare.
        seeds: the seeds of each arm.
        arguments: the parsed arguments.
    """
    content = gsm8k.read_results(arguments.results)
    for arm in arms:
        if arm not in content["grids"]:
            yield from _grid_jobs(arm, arguments)
    for seed, arm in itertools.product(seeds, arms):
        if arm in content["grids"] and gsm8k.run_name(arm, seed) not in content["runs"]:
            yield from _seed_jobs(arm, seed, best_rate(content["grids"][arm]), arguments)


def _grid_jobs(arm: str, arguments: argparse.Namespace) -> Iterator[Job]:
    for changes in evidence.get_sweep(arm):
        run = grid_folder(arguments.workdir, arm) / f"lr{changes[_RATE]:g}"
        rate = f"--config.{_RATE}={changes[_RATE]}"
        command = gsm8k.train_command(arm, changes["seed"], run, arguments, [rate])
        yield _training(f"grid-{arm}-{run.name}", command, run)


def _seed_jobs(arm: str, seed: int, rate: float, arguments: argparse.Namespace) -> Iterator[Job]:
    job_arguments = argparse.Namespace(**vars(arguments), rest=[f"--config.{_RATE}={rate}"])
    run = arguments.workdir / gsm8k.run_name(arm, seed)
    folders = gsm8k.evaluation_folders(run, arm)
    commands = gsm8k.commands(arm, seed, job_arguments)
    training = _training(f"{run.name}-train", commands.pop("train"), run)
    yield training
    if training.is_finished():
        # The longest first, so that few GPUs are idle at the end.
        for part in sorted(commands, key=lambda part: "samples" not in part):
            # Arms of the same weights share the evaluations of the start.
            shared = part.startswith("start")
            name = f"{part}-{gsm8k.weights_of(arm)}" if shared else f"{run.name}-{part}"
            is_finished = functools.partial(_is_evaluated, folders[part])
            yield Job(name, commands[part], is_finished)


def _training(name: str, command: list[str], run: pathlib.Path) -> Job:
    return Job(name, command, functools.partial(_is_trained, run), run=run)


def _is_evaluated(folder: pathlib.Path) -> bool:
    return gsm8k.finished_evaluation(folder) is not None


def _is_trained(run: pathlib.Path) -> bool:
    return RunFolder(run).finished_steps() is not None


def run(arguments: argparse.Namespace) -> None:
    """Runs the jobs with the parsed arguments.

    Raises:
        UserError: an argument is wrong or missing, or jobs have failed.
        StoppedError: SIGTERM or SIGINT arrived; the jobs have saved.
    """
    arms, seeds = arguments.arms.split(","), _seeds(arguments.seeds)
    if unknown := [arm for arm in arms if arm not in evidence.ARMS]:
        raise UserError(f"unknown arm {unknown[0]!r}: choose from {', '.join(evidence.ARMS)}")

    def ready() -> Iterator[Job]:
        _publish(arms, arguments)
        return jobs(arms, seeds, arguments)

    devices = devices_of(arguments.gpus, os.environ)
    if failures := run_jobs(ready, arguments.workdir, devices):
        logs = arguments.workdir / "logs"
        raise UserError(
            f"failed: {', '.join(failures)}; see {logs}/NAME.log; the same command retries"
        )


def _seeds(text: str) -> list[int]:
    seeds = text.split(",") if text else []
    if unknown := [seed for seed in seeds if seed not in map(str, evidence.SEEDS)]:
        choices = ",".join(map(str, evidence.SEEDS))
        raise UserError(f"--seeds={text}: {unknown[0]!r} is none of {choices}")
    return [int(seed) for seed in seeds]


def _publish(arms: list[str], arguments: argparse.Namespace) -> None:
    """Writes grids that are finished, and rows of runs that are, to gsm8k.json."""
    grids = gsm8k.read_results(arguments.results)["grids"]
    for arm in arms:
        if arm not in grids and all(job.is_finished() for job in _grid_jobs(arm, arguments)):
            gsm8k.add_grid(grid_folder(arguments.workdir, arm), arguments.results)
    for name in gsm8k.collect(arguments.workdir, arguments.results):
        print(f"new row {name}", flush=True)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
