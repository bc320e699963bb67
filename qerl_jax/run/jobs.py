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
    """A process that trains."""

    name: str  # of its log, which no other job has
    title: str  # what the terminal calls it
    command: Sequence[str]  # arguments of Python
    # The run folder. The job waits while another process trains in it, such as a child of a killed
    # command.
    run: Path
    is_finished: Callable[[], bool]  # whether its work is done
    progress: Callable[[], str]  # on the live line
    result: Callable[[], str]  # what a finished job has achieved


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
    jobs: Sequence[Job], folder: Path, devices: Sequence[str | None] = (None,)
) -> dict[str, str]:
    """Runs each job once, unless it is finished; returns name and reason of the failures.

    Args:
        jobs: the jobs in their order; one whose run another process holds waits for it, while later
            ones begin.
        folder: the outputs of the jobs go to logs/NAME.log in it; they share compiled programs.
        devices: values of CUDA_VISIBLE_DEVICES, from `devices_of`: as many jobs at a time.

    Raises:
        StoppedError: one of `STOP_SIGNALS` arrived; the jobs have saved.
    """
    make_folder(folder / "logs")
    active: dict[str | None, _RunningJob] = {}
    pending, told = list(jobs), set()
    failures: dict[str, str] = {}
    live = LiveLine()

    def start(free: list[str | None]) -> None:
        """Starts jobs on the free devices."""
        for job in list(pending):
            if holder := lock_holder(job.run):
                if job.name not in told:
                    print(f"{job.name}: waiting for {visible(holder)}", flush=True)
                    told.add(job.name)
                continue
            pending.remove(job)
            if job.is_finished():
                print(f"{job.title}: is finished", flush=True)
                continue
            device = free.pop(0)
            active[device] = _start(job, device, folder)
            if not free:
                break

    with stop_signals() as signals:
        try:
            while active or (pending and not signals):
                if signals:
                    _stop(active.values())
                elif pending and (free := [device for device in devices if device not in active]):
                    live.clear()
                    start(free)
                if active:
                    live.update("; ".join(running.job.progress() for running in active.values()))
                if active or pending:
                    time.sleep(_POLL_SECONDS)
                for device in [
                    d for d, running_job in active.items() if running_job.process.poll() is not None
                ]:
                    running_job = active.pop(device)
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
    print(f"{job.title}{suffix}: see {log}", flush=True)
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


def _report(running_job: _RunningJob, *, quiet: bool) -> str:
    """Says how a job ended, and returns the reason of a failure; '' for one that is finished."""
    minutes = (time.perf_counter() - running_job.began) / 60
    code, job = running_job.process.returncode, running_job.job
    if code or not job.is_finished():
        if not quiet:
            print(f"{job.title}: failed after {minutes:.1f} minutes", flush=True)
        return f"{_failure_reason(code, running_job.log)}, see {running_job.log}"
    print(f"{job.title}: {job.result()} after {minutes:.1f} minutes", flush=True)
    return ""


def _failure_reason(code: int, log: Path) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line for line in read_text(log, errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: {visible(lines[-1].strip()) if lines else 'no output'}"
