"""A process for each group of GPUs of one machine, started by the command itself.

With `mesh.data=4` on a machine of four GPUs the command becomes process 0 of four, and starts the
other three with its own arguments; each sees the GPUs of its group alone. From there on they are
the processes of `launch`, as if a user had started them. Nothing is started where the variables of
`launch` are set (JAX_NUM_PROCESSES=1 keeps one process for all GPUs), nor without enough GPUs.
"""

import collections
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping

from qerl_jax.errors import visible
from qerl_jax.processes.launch import ADDRESS, COUNT, DEVICES, INDEX, read_rank
from qerl_jax.system.device_memory import number_of_gpus
from qerl_jax.system.signals import after_parent

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_END_SECONDS = 60  # how long the others may take to end after process 0
_FAILED_SECONDS = 3  # and after an error in it, which connected processes have heard of
_LOST_SECONDS = 30  # how long connected processes may take to find out that one has ended
_KEPT_LINES = 100
_PROXIES = {"grpc_proxy", "https_proxy", "http_proxy"}
_INTERFACE = "NCCL_SOCKET_IFNAME"
_ERROR = "error: "
# Variables by which a user decides what this process serves.
_DECIDED = COUNT, DEVICES, "JAX_CUDA_VISIBLE_DEVICES"


def environments(
    *, data: int, tensor: int, environment: Mapping[str, str], gpus: int
) -> list[dict[str, str]]:
    """Returns what to set in the environment of each process; [] where one process runs alone.

    There are `data` groups of `tensor` GPUs each, and `gpus` GPUs in the machine.
    """
    if data == 1 or not gpus or any(environment.get(name) for name in _DECIDED):
        return []
    if read_rank(environment, devices=data * tensor):
        return []
    gpu_names = [str(number) for number in range(gpus)]
    if _VISIBLE in environment:
        names = (name.strip() for name in environment[_VISIBLE].split(","))
        gpu_names = list(itertools.takewhile(lambda name: _may_be_gpu(name, gpus), names))
    if len(gpu_names) < data * tensor or len(set(gpu_names)) < len(gpu_names):
        return []  # The run itself says how many there are.
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        address = f"localhost:{listener.getsockname()[1]}"
    # JAX's runtime would ask a proxy for this address. Without one it would warn of the variable.
    direct = {"no_grpc_proxy": "localhost"} if _PROXIES & environment.keys() else {}
    # NCCL would listen on an interface that other machines reach.
    direct |= {} if _INTERFACE in environment else {_INTERFACE: "lo"}
    return [
        {
            ADDRESS: address,
            COUNT: str(data),
            INDEX: str(index),
            _VISIBLE: ",".join(gpu_names[index * tensor : (index + 1) * tensor]),
        }
        | direct
        for index in range(data)
    ]


@contextlib.contextmanager
def one_for_each_group(*, data: int, tensor: int) -> Generator[None]:
    """Makes this process the first of those of a mesh, and starts the others while the block runs.

    It must run before JAX and CUDA start. Signals, such as Ctrl-C, go to process 0 alone, which
    tells the others. Only process 0 prints; the output of another process is shown if it fails.
    Each of the `data` groups of `tensor` GPUs gets a process.
    """
    gpus = number_of_gpus()
    settings = environments(data=data, tensor=tensor, environment=os.environ, gpus=gpus)
    if not settings:
        yield
        return
    print(f"starting {len(settings)} processes, one for each group of GPUs", flush=True)
    command = [sys.executable, *sys.orig_argv[1:]]
    own_settings, *others = settings
    children = [_Child(i, command, os.environ | other) for i, other in enumerate(others, 1)]
    os.environ.update(own_settings)
    block_end = threading.Event()
    threading.Thread(target=_watch, args=(children, block_end), daemon=True).start()
    seconds = _FAILED_SECONDS
    try:
        yield
        seconds = _END_SECONDS
    finally:
        block_end.set()
        _end(children, seconds)


class _Child:
    """Another process of the run, whose last lines on stderr that are not shown are `lines`."""

    def __init__(self, index: int, command: list[str], environment: Mapping[str, str]):
        ask_to_die = after_parent(signal.SIGKILL)
        # A Ctrl-C that arrives in the function that Python runs after a fork would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

        def end_with_the_first() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            ask_to_die()

        self.index = index
        try:
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                preexec_fn=end_with_the_first,
                process_group=0,  # A terminal sends Ctrl-C to the group of process 0.
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.lines: collections.deque[bytes] = collections.deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def report_end(self) -> str:
        """Shows what the process wrote before it crashed, and returns a line about its end."""
        self._reader.join(1.0)  # A worker of the process may hold the pipe open.
        code, lines = self.process.returncode, list(self.lines)
        last = visible(lines[-1].decode(errors="replace").strip()) if lines else ""
        if last.startswith(_ERROR):
            return f"{_ERROR}process {self.index} failed, which ends the run: {last[len(_ERROR) :]}"
        if code < 0 or 0 < code < 128:
            _write(b"".join(lines))
        cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"{_ERROR}process {self.index} ended {cause}, which ends the run"

    def _read(self) -> None:
        shows = False
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                shows = shows or line.startswith(b"Traceback ")  # a bug
                if shows:
                    _write(line)
                else:
                    self.lines.append(line)


def _watch(children: list[_Child], block_end: threading.Event) -> None:
    """Ends this process if another one has ended and the processes do not end by themselves.

    Connected processes do; one that ends before leaves the others waiting for it.
    """
    while all(child.process.poll() is None for child in children):
        if block_end.wait(1.0):
            return
    line = next(child for child in children if child.process.poll() is not None).report_end()
    if not block_end.wait(_LOST_SECONDS):
        _write(f"{line}\n".encode())
        _end(children, seconds=0)
        os._exit(1)


def _end(children: list[_Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed.
        os.write(2, text)


def _may_be_gpu(name: str, gpus: int) -> bool:
    """Whether CUDA may show a GPU of this name; it ignores a name that is wrong, and all after."""
    if name.removeprefix("-").isdecimal():
        return 0 <= int(name) < gpus
    return bool(name)
