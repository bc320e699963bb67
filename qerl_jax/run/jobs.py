"""Jobs in processes of their own, one at a time or one on each device.

The memory use of a job must not affect the next one, so each has a process.
"""

import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from qerl_jax.errors import UserError, visible
from qerl_jax.run.folder import lock_holder
from qerl_jax.system.device_memory import number_of_gpus
from qerl_jax.system.live_line import LiveLine
from qerl_jax.system.safe_files import make_folder, open_to_write, read_text
from qerl_jax.system.signals import StoppedError, after_parent, stop_signals

_POLL_SECONDS = 0.5
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class Job:
    """A process that trains or evaluates."""

    name: str  # of its log, which no other job has
    command: Sequence[str]  # arguments of Python
    is_finished: Callable[[], bool]  # whether its work is done
    # The run folder that it trains in, if any. It waits while another process does, such as a child
    # of a killed command.
    run: Path | None = None
    title: str = ""  # what the terminal calls it; by default the name
    progress: Callable[[], str] | None = None  # on the live line; by default the name
    result: Callable[[], str] = lambda: "done"  # what a finished job has achieved

    @property
    def label(self) -> str:
        """What the terminal calls it."""
        return self.title or self.name


@dataclasses.dataclass
class _RunningJob:
    job: Job
    log: Path
    process: subprocess.Popen
    began: float
    is_stopping: bool = False  # whether it has received SIGTERM


def devices_of(gpus: int, environment: Mapping[str, str]) -> list[str | None]:
    """The values of CUDA_VISIBLE_DEVICES of the processes that run at the same time.

    Args:
        gpus: number of jobs at a time, one per GPU; 0 is one job, which sees what this process
            sees.
        environment: the environment of this process. If it names devices, they are shared out.

    Raises:
        UserError: it names fewer devices than asked for, or names none and there are fewer GPUs.
    """
    if gpus < 0:
        raise UserError(f"--gpus={gpus}: pass the number of GPUs, or leave it out for one run")
    if not gpus:
        return [None]
    if _VISIBLE in environment:
        names = [name.strip() for name in environment[_VISIBLE].split(",") if name.strip()]
        supply = f"{_VISIBLE}={environment[_VISIBLE]} names {len(names)} devices"
    else:
        names = [str(number) for number in range(number_of_gpus())]
        supply = f"JAX can use {len(names)} NVIDIA GPUs of this machine"
    if len(names) < gpus:
        remedy = f"pass --gpus={len(names)}" if names else "leave it out for one run at a time"
        raise UserError(f"--gpus={gpus}: {supply}; {remedy}, or name that many in {_VISIBLE}")
    return [*names[:gpus]]


def environment_of(folder: Path) -> dict[str, str]:
    """The environment of processes that share their compiled programs in a folder.

    The folder may come from another person: JAX, which executes what is in its cache, does not
    get it, but `program_cache`, which reads only what this user has signed.
    """
    # A program is specific to its CPU, so each machine has programs of its own.
    shared = str((folder / f"programs-{platform.node()}").resolve())
    from qerl_jax.compile.program_cache import SHARED  # It imports JAX, which --help does not need.

    return {SHARED: shared, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | dict(os.environ)


def run_jobs(
    ready: Callable[[], Iterable[Job]], folder: Path, devices: Sequence[str | None] = (None,)
) -> dict[str, str]:
    """Runs each job once, unless it is finished; returns name and reason of the failures.

    Args:
        ready: lists the jobs that need no unfinished one, the most urgent first. It is called at
            the start, after the end of a job, and while one waits for another process.
        folder: the outputs of the jobs go to logs/NAME.log in it; they share compiled programs.
        devices: values of CUDA_VISIBLE_DEVICES, from `devices_of`: as many jobs at a time.

    Raises:
        StoppedError: SIGTERM or SIGINT arrived; the jobs have saved.
    """
    make_folder(folder / "logs")
    active: dict[str | None, _RunningJob] = {}
    begun: set[str] = set()
    waiting_jobs: set[str] = set()
    failures: dict[str, str] = {}
    live = LiveLine()

    def start_ready(free: list[str | None]) -> bool:
        """Starts jobs on the free devices; returns whether one waits for another process."""
        waits = False
        for job in ready():
            if job.name in begun:
                continue
            if holder := job.run and lock_holder(job.run):
                waits = True
                if job.name not in waiting_jobs:
                    print(f"{job.name}: waiting for {visible(holder)}", flush=True)
                    waiting_jobs.add(job.name)
                continue
            begun.add(job.name)
            if job.is_finished():
                print(f"{job.label}: is finished", flush=True)
                continue
            device = free.pop(0)
            active[device] = _start(job, device, folder)
            if not free:
                break
        return waits

    asks = True
    with stop_signals() as signals:
        try:
            while active or (asks and not signals):
                if signals:
                    _stop(active.values())
                elif asks and (free := [device for device in devices if device not in active]):
                    live.clear()
                    asks = start_ready(free)
                if active:
                    live.update(
                        "; ".join(_progress(running_job.job) for running_job in active.values())
                    )
                if active or asks:
                    time.sleep(_POLL_SECONDS)
                for device in [
                    d for d, running_job in active.items() if running_job.process.poll() is not None
                ]:
                    running_job, asks = active.pop(device), True
                    live.clear()
                    if reason := _report(running_job, quiet=bool(signals)):
                        failures[running_job.job.name] = reason
        finally:
            live.clear()
            for running_job in active.values():
                running_job.process.kill()
                running_job.process.wait()
        if signals:
            print("the same command continues the sweep", flush=True)
            raise StoppedError(signals[0])
    return failures


def _start(job: Job, device: str | None, folder: Path) -> _RunningJob:
    log = folder / "logs" / f"{job.name}.log"
    environment = environment_of(folder) | ({} if device is None else {_VISIBLE: device})
    suffix = "" if device is None else f" on GPU {device}"
    print(f"{job.label}{suffix}: see {log}", flush=True)
    with open_to_write(log, "a", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *job.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # Outside the terminal's process group, so that Ctrl-C reaches it once, from here.
            start_new_session=True,
            preexec_fn=after_parent(signal.SIGTERM),
        )
    return _RunningJob(job, log, process, time.perf_counter())


def _stop(active: Iterable[_RunningJob]) -> None:
    """Tells each process once to save and stop."""
    for running_job in active:
        if not running_job.is_stopping:
            running_job.process.send_signal(signal.SIGTERM)
            running_job.is_stopping = True


def _progress(job: Job) -> str:
    return job.progress() if job.progress else job.name


def _report(running_job: _RunningJob, *, quiet: bool) -> str:
    """Says how a job ended, and returns the reason of a failure; '' for one that is finished."""
    minutes = (time.perf_counter() - running_job.began) / 60
    code, job = running_job.process.returncode, running_job.job
    if code or not job.is_finished():
        if not quiet:
            print(f"{job.label}: failed after {minutes:.1f} minutes", flush=True)
        return f"{_failure_reason(code, running_job.log)}, see {running_job.log}"
    print(f"{job.label}: {job.result()} after {minutes:.1f} minutes", flush=True)
    return ""


def _failure_reason(code: int, log: Path) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line for line in read_text(log, errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: {visible(lines[-1].strip()) if lines else 'no output'}"
