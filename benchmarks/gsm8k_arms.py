"""Trains and scores arms of the comparison on GSM8K on all GPUs of a machine: grids, then seeds.

    uv run --extra cuda python -m benchmarks.gsm8k_arms --gpus=2 \
        --arms=bf16-lora,nvfp4-lora,nvfp4-lora-aqn-kl0.01 --seeds=0,1,2 \
        --model=qwen2.5-coder-1.5b.gguf --train=gsm8k_train.jsonl --test=gsm8k_test_first1000.jsonl

Each job is a process on one GPU: a run of an arm's grid of learning rates, then, with the rate of
the best held-out accuracy, the training of a seed and the evaluations of `benchmarks.gsm8k`, and
the evaluations of the start. The first seed of all arms comes before the second one. Grids and rows
go to gsm8k.json as they get ready. Those that are there, and what lies finished in --workdir, are
not done again, so the same command continues after it was stopped, also with other arms, seeds or
GPUs.

Each job says what it does to logs/NAME.log in --workdir. One that fails is named at the end.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from benchmarks import gsm8k
from experiments import cli
from experiments.configs import evidence
from qerl_jax.errors import UserError
from qerl_jax.paths import user_path
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.signals import StoppedError, stop_signals
from qerl_jax.run.sweep_processes import devices_of

_POLL_SECONDS = 0.5
_RATE = "optimizer.learning_rate"


@dataclasses.dataclass(frozen=True)
class Job:
    """A process that trains or evaluates.

    Attributes:
        name: name of its log.
        command: arguments of Python.
    """

    name: str
    command: list[str]


@dataclasses.dataclass
class _Started:
    job: Job
    process: subprocess.Popen
    log: IO[str]
    began: float
    is_told: bool = False  # to save and stop


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gsm8k_arms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arms", required=True, help=f"comma-separated arms, from {', '.join(evidence.ARMS)}")
    add("--seeds", default="0,1,2", help="comma-separated seeds (default: 0,1,2)")
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
    """The jobs that are not finished and need no unfinished one, the most urgent first.

    Args:
        arms: the arms to compare.
        seeds: the seeds of each arm.
        arguments: the parsed arguments.
    """
    known = gsm8k.read_results(arguments.results)
    rates: dict[str, float] = {}  # of the arms whose grids are finished
    for arm in arms:
        if arm in known["grids"]:
            rates[arm] = best_rate(known["grids"][arm])
            continue
        waiting = list(_grid_jobs(arm, arguments))
        yield from waiting
        if not waiting:
            rates[arm] = best_rate(gsm8k.grid_of(grid_folder(arguments.workdir, arm))[1])
    seen = set()
    for seed in seeds:
        for arm, rate in rates.items():
            if gsm8k.run_name(arm, seed) in known["runs"]:
                continue
            for job in _seed_jobs(arm, seed, rate, arguments):
                if job.name not in seen:  # Arms of one format share the evaluations of the start.
                    seen.add(job.name)
                    yield job


def _grid_jobs(arm: str, arguments: argparse.Namespace) -> Iterator[Job]:
    for changes in evidence.get_sweep(arm):
        run = grid_folder(arguments.workdir, arm) / f"lr{changes[_RATE]:g}"
        if not _is_trained(run):
            rate = f"--config.{_RATE}={changes[_RATE]}"
            command = gsm8k.train_command(arm, changes["seed"], run, arguments, [rate])
            yield Job(f"grid-{arm}-{run.name}", command)


def _seed_jobs(arm: str, seed: int, rate: float, arguments: argparse.Namespace) -> Iterator[Job]:
    own = argparse.Namespace(**vars(arguments), rest=[f"--config.{_RATE}={rate}"])
    run = arguments.workdir / gsm8k.run_name(arm, seed)
    form = evidence.get_config(arm).model.format
    folders = gsm8k.evaluation_folders(run, form)
    for part, command in gsm8k.commands(arm, seed, own).items():
        starts = part.startswith("start")
        if part == "train":
            if not _is_trained(run):
                yield Job(f"{run.name}-train", command)
        elif _is_trained(run) and gsm8k.finished_evaluation(folders[part]) is None:
            yield Job(f"{part}-{form}" if starts else f"{run.name}-{part}", command)


def _is_trained(run: pathlib.Path) -> bool:
    return RunFolder(run).finished_steps() is not None


def run(arguments: argparse.Namespace) -> None:
    """Runs the jobs with the parsed arguments.

    Raises:
        UserError: an argument is wrong, or jobs have failed.
        StoppedError: SIGTERM or SIGINT arrived; the jobs have saved.
    """
    arms, seeds = arguments.arms.split(","), _seeds(arguments.seeds)
    if unknown := [arm for arm in arms if arm not in evidence.ARMS]:
        raise UserError(f"unknown arm {unknown[0]!r}: choose from {', '.join(evidence.ARMS)}")
    logs = arguments.workdir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    devices = devices_of(arguments.gpus, os.environ)
    active: dict[str | None, _Started] = {}
    failed: list[str] = []
    with stop_signals() as received:
        try:
            while True:
                names = {started.job.name for started in active.values()} | {*failed}
                ready = [] if received else jobs(arms, seeds, arguments)
                ready = [job for job in ready if job.name not in names]
                free = [device for device in devices if device not in active]
                for device, job in zip(free, ready, strict=False):
                    active[device] = _start(job, device, arguments.workdir)
                if not active:
                    break
                _wait(active, received)
                for device in [d for d, one in active.items() if one.process.poll() is not None]:
                    started = active.pop(device)
                    if not _report(started) and not received:
                        failed.append(started.job.name)
                    _publish(arms, arguments)
        finally:
            for started in active.values():
                started.process.kill()
                started.process.wait()
        if received:
            print("the same command continues", flush=True)
            raise StoppedError(received[0])
    if failed:
        raise UserError(
            f"failed: {', '.join(failed)}; see {logs}/NAME.log; the same command retries"
        )


def _seeds(text: str) -> list[int]:
    seeds = text.split(",")
    if unknown := [seed for seed in seeds if seed not in map(str, evidence.SEEDS)]:
        known = ",".join(map(str, evidence.SEEDS))
        raise UserError(f"--seeds={text}: {unknown[0]!r} is none of {known}")
    return [int(seed) for seed in seeds]


def _start(job: Job, device: str | None, workdir: pathlib.Path) -> _Started:
    environment = gsm8k.environment_of(workdir)
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    log = (workdir / "logs" / f"{job.name}.log").open("w", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, *job.command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    print(f"{time.strftime('%H:%M:%S')} {job.name} begins", flush=True)
    return _Started(job, process, log, time.monotonic())


def _wait(active: dict[str | None, _Started], received: list[int]) -> None:
    """Waits until a job ends; tells each of them once that a signal has arrived."""
    while all(started.process.poll() is None for started in active.values()):
        for started in active.values():
            if received and not started.is_told:
                started.process.send_signal(signal.SIGTERM)
                started.is_told = True
        time.sleep(_POLL_SECONDS)


def _report(started: _Started) -> bool:
    """Says how a job has ended; returns whether it has done its work."""
    started.log.close()
    code, seconds = started.process.returncode, time.monotonic() - started.began
    failed = "is stopped" if started.is_told else f"fails with exit code {code}"
    how = failed if code else "ends"
    print(f"{time.strftime('%H:%M:%S')} {started.job.name} {how} after {seconds:.0f} s", flush=True)
    return not code


def _publish(arms: list[str], arguments: argparse.Namespace) -> None:
    """Writes grids that are finished, and rows of runs that are, to gsm8k.json."""
    known = gsm8k.read_results(arguments.results)["grids"]
    for arm in arms:
        if arm not in known and not any(_grid_jobs(arm, arguments)):
            gsm8k.add_grid(grid_folder(arguments.workdir, arm), arguments.results)
    for name in gsm8k.collect(arguments.workdir, arguments.results):
        print(f"new row {name}", flush=True)


if __name__ == "__main__":
    cli.run_command(make_parser(), run)
