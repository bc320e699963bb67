"""A process for each group of GPUs of one machine, started by the command itself.

With `mesh.data=4` on a machine of four GPUs the command becomes process 0 of four, and starts the
other three with its own arguments; each sees the GPUs of its group alone. From there on they are
the processes of `launch`, as if a user had started them. Nothing is started where the variables of
`launch` are set (JAX_NUM_PROCESSES=1 keeps one process for all GPUs), nor without enough GPUs.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping

from qerl_jax.processes.launch import ADDRESS, COUNT, INDEX, place_of
from qerl_jax.run.device_memory import uses_gpus

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_END_SECONDS = 60  # how long processes may take to end after process 0, or after one of them
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def environments(
    *, data: int, tensor: int, environment: Mapping[str, str], gpus: int
) -> list[dict[str, str]]:
    """Returns what to set in the environment of each process; [] where one process runs alone.

    Args:
        data: number of groups.
        tensor: number of GPUs of a group.
        environment: the environment variables of this process.
        gpus: number of GPUs of the machine.
    """
    if data == 1 or environment.get(COUNT) or place_of(environment, devices=data * tensor):
        return []
    named = [str(number) for number in range(gpus)]
    if _VISIBLE in environment:
        named = [name.strip() for name in environment[_VISIBLE].split(",") if name.strip()]
    if len(named) < data * tensor:
        return []  # The run itself says how many there are.
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    return [
        {
            ADDRESS: address,
            COUNT: str(data),
            INDEX: str(index),
            _VISIBLE: ",".join(named[index * tensor : (index + 1) * tensor]),
        }
        for index in range(data)
    ]


@contextlib.contextmanager
def one_for_each_group(*, data: int, tensor: int) -> Generator[None]:
    """Makes this process the first of those of a mesh, and starts the others while the block runs.

    It must run before JAX and CUDA start. Signals go to process 0, which tells the others; Ctrl-C
    goes to all.

    Args:
        data: number of groups, each of which gets a process.
        tensor: number of GPUs of a group.
    """
    gpus = _number_of_gpus() if uses_gpus() else 0
    own, *others = environments(data=data, tensor=tensor, environment=os.environ, gpus=gpus) or [{}]
    if not others:
        yield
        return
    print(f"starting {1 + len(others)} processes, one for each group of GPUs", flush=True)
    command = [sys.executable, *sys.orig_argv[1:]]
    started = [_start(command, os.environ | place) for place in others]
    os.environ.update(own)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(started, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _end(started)


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # Process 0 speaks for all.
        # If process 0 is killed before the processes have connected, nothing else ends the others.
        preexec_fn=lambda: libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM),
    )


def _watch(started: list[subprocess.Popen], ended: threading.Event) -> None:
    """Ends this process if another one has failed and the processes have not ended by themselves.

    Connected processes do; one that fails before leaves the others waiting for it.
    """
    while not any(process.poll() for process in started):
        if ended.wait(1.0):
            return
    if not ended.wait(_END_SECONDS):
        index = next(i for i, process in enumerate(started, 1) if process.poll())
        code = started[index - 1].returncode
        os.write(2, f"error: process {index} ended with exit code {code}; see above\n".encode())
        _end(started, seconds=0)
        os._exit(1)


def _end(started: list[subprocess.Popen], seconds: float = _END_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _number_of_gpus() -> int:
    """The number of NVIDIA GPUs, without starting CUDA, which would fix what this process sees."""
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if management.nvmlInit_v2() or management.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    management.nvmlShutdown()
    return count.value
