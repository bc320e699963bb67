"""The runs of a sweep in processes of their own, one at a time or one on each device.

The memory use of a run must not affect the next one, so each has a process.
"""

import collections
import ctypes
import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from qerl_jax.errors import UserError
from qerl_jax.live_line import LiveLine
from qerl_jax.run.folder import RunFolder, lock_holder
from qerl_jax.run.metrics import read_steps
from qerl_jax.run.signals import StoppedError, stop_signals
from qerl_jax.run.sweep import Run, is_finished

_POLL_SECONDS = 0.5
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass
class _Started:
    """A run in its process.

    Attributes:
        run: the run.
        said: its number and name, as the terminal shows them.
        log: the file of its output.
        process: its process.
        began: when it was started.
    """

    run: Run
    said: str
    log: Path
    process: subprocess.Popen
    began: float


def devices_of(gpus: int, environment: Mapping[str, str]) -> list[str | None]:
    """The values of CUDA_VISIBLE_DEVICES of the processes that run at the same time.

    Args:
        gpus: number of runs at a time, one per GPU; 0 is one run, which sees what this process
            sees.
        environment: the environment of this process. If it names devices, they are shared out.

    Raises:
        UserError: it names fewer devices than asked for.
    """
    if gpus < 0:
        raise UserError(f"--gpus={gpus}: pass the number of GPUs, or leave it out for one run")
    if not gpus:
        return [None]
    if _VISIBLE not in environment:
        return [str(number) for number in range(gpus)]
    named = [name.strip() for name in environment[_VISIBLE].split(",") if name.strip()]
    if len(named) < gpus:
        raise UserError(
            f"--gpus={gpus}: {_VISIBLE}={environment[_VISIBLE]} names {len(named)} devices; pass "
            f"--gpus={len(named)}, or name more"
        )
    return [*named[:gpus]]


def train_all(
    runs: Sequence[Run], folder: Path, devices: Sequence[str | None] = (None,)
) -> dict[str, str]:
    """Runs each unfinished run; returns name and reason of the failures.

    Args:
        runs: the runs.
        folder: the folder of the sweep.
        devices: values of CUDA_VISIBLE_DEVICES, from `devices_of`: as many runs at a time.

    Raises:
        StoppedError: SIGTERM or SIGINT arrived; the runs have saved.
    """
    (folder / "logs").mkdir(exist_ok=True)
    waiting = collections.deque(
        (f"run {number}/{len(runs)} {run.name}", run) for number, run in enumerate(runs, start=1)
    )
    active: dict[str | None, _Started] = {}
    failures: dict[str, str] = {}
    told: set[str] = set()
    live = LiveLine()
    with stop_signals() as received:
        try:
            while waiting or active:
                for device in [d for d in devices if d not in active]:
                    if not received:
                        _start_next(waiting, device, folder, active, told)
                if received:
                    waiting.clear()
                    for started in active.values():
                        if started.run.name not in told:
                            started.process.send_signal(signal.SIGTERM)
                            told.add(started.run.name)
                for device in [d for d, started in active.items() if _has_ended(started)]:
                    started = active.pop(device)
                    live.clear()
                    if reason := _report(started, quiet=bool(received)):
                        failures[started.run.name] = reason
                if active:
                    live.update("; ".join(_last_step(s.run) for s in active.values()))
                if waiting or active:
                    time.sleep(_POLL_SECONDS)
        finally:
            live.clear()
            for started in active.values():
                started.process.kill()
                started.process.wait()
        if received:
            print("the same command continues the sweep", flush=True)
            raise StoppedError(received[0])
    return failures


def _start_next(
    waiting: collections.deque[tuple[str, Run]],
    device: str | None,
    folder: Path,
    active: dict[str | None, _Started],
    told: set[str],
) -> None:
    """Starts the first run that no other process trains, such as a child of a killed sweep."""
    for _ in range(len(waiting)):
        said, run = waiting.popleft()
        if holder := lock_holder(run.folder):
            if said not in told:
                print(f"{run.name}: waiting for {holder}", flush=True)
                told.add(said)
            waiting.append((said, run))
            continue
        if is_finished(run):
            print(f"{said}: is finished", flush=True)
            continue
        log = folder / "logs" / f"{run.name}.log"
        place = "" if device is None else f" on GPU {device}"
        print(f"{said}{place}: see {log}", flush=True)
        process = _start(run, log, folder, device)
        active[device] = _Started(run, said, log, process, time.perf_counter())
        return


def _start(run: Run, log: Path, folder: Path, device: str | None) -> subprocess.Popen:
    # Later runs reuse the programs of earlier ones. A program is specific to its CPU.
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str((folder / f"programs-{platform.node()}").resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    } | dict(os.environ)
    if device is not None:
        environment[_VISIBLE] = device
    with log.open("a", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, *run.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # Outside the terminal's process group, so that Ctrl-C reaches it once, from here.
            start_new_session=True,
            preexec_fn=_stop_with_parent,
        )


def _stop_with_parent() -> None:
    """On Linux, has the kernel send this process SIGTERM when its parent dies."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _has_ended(started: _Started) -> bool:
    return started.process.poll() is not None


def _report(started: _Started, *, quiet: bool) -> str:
    """Says how a run ended, and returns the reason of a failure; '' for a run that is finished."""
    minutes = (time.perf_counter() - started.began) / 60
    code = started.process.returncode
    if code or not is_finished(started.run):
        if not quiet:
            print(f"{started.said}: failed after {minutes:.1f} minutes", flush=True)
        return f"{_reason(code, started.log)}, see {started.log}"
    print(f"{started.said}: {_result(started.run)} after {minutes:.1f} minutes", flush=True)
    return ""


def _last_step(run: Run) -> str:
    path = RunFolder(run.folder).metrics
    rows = read_steps(path) if path.exists() else []
    return f"{run.name} step {rows[-1]['step'] if rows else 0}/{run.config['steps']}"


def _result(run: Run) -> str:
    row = read_steps(RunFolder(run.folder).metrics)[-1]
    return f"last reward {row['reward']:.3f}"


def _reason(code: int, log: Path) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1].strip() if lines else 'no output'}"
