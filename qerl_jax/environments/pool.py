"""The pool of processes with environments, as the process that trains sees it."""

import contextlib
import json
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qerl_jax.environments import worker
from qerl_jax.errors import UserError
from qerl_jax.system.import_path import allow_working_directory

_START_SECONDS = 300.0  # for the imports of the user's modules
_LONGEST_MESSAGE = 64 << 20  # bytes
_FINDS = (
    "name a class, package.module:Class, or a function, that Python finds: start where the file of "
    "the module lies, or add that folder to PYTHONPATH"
)
_PACKAGE = Path(__file__).parents[1]
# Importing the whole package needs JAX.
_IN_ANOTHER = """
import socket, sys, types
package = types.ModuleType("qerl_jax")
package.__path__ = [sys.argv[1]]
sys.modules["qerl_jax"] = package
from qerl_jax.environments import worker
worker.main(socket.socket(fileno=int(sys.argv[2])))
"""


class CallError(Exception):
    """A call of an environment failed, exceeded its time limit, or ended the process."""


class Process:
    """A process with one environment, whose call must end by `deadline`, of `time.monotonic`."""

    def __init__(self, pid: int, connection: socket.socket):
        self.pid, self.connection = pid, connection
        self.deadline = float("inf")
        self._data = bytearray()

    def send(self, request: Mapping[str, Any], *, limit: float | None) -> bool:
        """Sends a request, and returns whether the process took it.

        The answer must arrive within `limit` seconds; None sets no limit.
        """
        self.deadline = float("inf") if limit is None else time.monotonic() + limit
        self.connection.settimeout(limit)
        try:
            data = pickle.dumps(dict(request))
            self.connection.sendall(struct.pack("!I", len(data)) + data)
        except (OSError, RecursionError):  # The arguments of a call may be nested deeply.
            return False
        return True

    def answer(self) -> dict[str, Any] | None:
        """Returns the answer, or None while it is not complete.

        A process that ended, or exceeded its time limit, has one with 'error' and 'dead'.
        """
        try:
            answer = self._read()
        except BlockingIOError:
            answer = None
        except (OSError, ValueError) as error:
            reason = "its process ended" if isinstance(error, OSError) else str(error)
            return {"error": reason, "dead": True}
        if answer is None and time.monotonic() >= self.deadline:
            return {"error": "exceeded environment.time_limit", "dead": True}
        return answer

    def _read(self) -> dict[str, Any] | None:
        self.connection.settimeout(0)
        part = self.connection.recv(1 << 20)
        if not part:
            raise ConnectionError
        self._data += part
        if len(self._data) < 4:
            return None
        (size,) = struct.unpack("!I", self._data[:4])
        if size > _LONGEST_MESSAGE:
            raise ValueError(f"an answer of {size} bytes")
        if len(self._data) < 4 + size:
            return None
        data, self._data = bytes(self._data[4:]), bytearray()
        return json.loads(data)


def wait_for_any(processes: Iterable[Process], seconds: float) -> None:
    """Waits until a process has sent something or has ended, for some seconds at most."""
    poll = select.poll()
    for process in processes:
        with contextlib.suppress(ValueError):  # Another thread has closed the pool.
            poll.register(process.connection, select.POLLIN)
    poll.poll(math.ceil(1000 * max(0.0, seconds)))


def _start_parent(
    python: str, connection: socket.socket, variables: Mapping[str, str], *, field: str
) -> subprocess.Popen[bytes]:
    """Starts the process that imports and forks, with its end of a connection.

    Another interpreter has packages of its own, for another version of Python perhaps: it gets the
    user's folders, and of this project the modules of its processes alone.
    """
    if python:
        start = ["-c", _IN_ANOTHER, str(_PACKAGE), str(connection.fileno())]
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    else:
        start = ["-m", worker.__name__, str(connection.fileno())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        return subprocess.Popen(
            [python or sys.executable, "-P", *start],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables, "PYTHONPATH": path},
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(
            f"environment.python={python}: {error.strerror}: pass the path of the Python "
            f"interpreter that has what {field} names, such as /path/of/venv/bin/python"
        ) from error


class Pool:
    """Processes with environments; each serves one episode at a time, of any thread."""

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        field: str = "environment.function",
        remedy: str = _FINDS,
        python: str = "",
        variables: Mapping[str, str] | None = None,
    ):
        """Starts the parent of the processes, which imports the user's modules.

        Args:
            functions: import paths of classes, `package.module:Class`, by name; or of functions
                that are tools, separated by commas.
            field: the field of the config that names them.
            remedy: what to do where one cannot be imported.
            python: another Python interpreter, of 3.11 or later, which has the modules and needs
                nothing of this project; '' for this one.
            variables: further environment variables.

        Raises:
            UserError: a module cannot be imported, or has no such class.
        """
        self._lock = threading.Lock()  # of `take`, whose answer is that to the last request
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        allow_working_directory()
        self._control, other = socket.socketpair()
        with other:
            self._parent = _start_parent(python, other, variables or {}, field=field)
        self._control.settimeout(_START_SECONDS)
        try:
            worker.send(self._control, dict(functions))
            error = worker.receive(self._control)
        except BaseException as failure:
            self.close()
            if not isinstance(failure, EOFError | OSError):
                raise
            paths = ", ".join(functions.values())
            raise UserError(
                f"{field}: importing {paths} ended the process, or took more than "
                f"{_START_SECONDS:g} s: try it alone, {python or 'python'} -c 'import MODULE'"
            ) from failure
        if error:
            self.close()
            paths, reason = error
            named = field if "=" in field else f"{field}={paths}"
            raise UserError(f"{named}: {reason}: {remedy}")

    def take(self) -> Process:
        """Returns a process that is free, and starts one if all are busy.

        Raises:
            UserError: no other process can be started.
        """
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                process.deadline = float("inf")
                if process.answer() is None:
                    return process
                self.kill(process)  # It has ended since its last episode.
            return self._start()

    def _start(self) -> Process:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise UserError(
                f"no environment after {len(self._all)} others, {error.strerror}: lower "
                "environment.processes, or raise the limit, ulimit -n"
            ) from error
        with theirs:
            try:
                socket.send_fds(self._control, [b"start"], [theirs.fileno()])
                process = Process(worker.receive(self._control), ours)
            except BaseException as error:
                self.close()  # Its answer would be taken for that to the next request.
                if not isinstance(error, EOFError | OSError):
                    raise
                raise UserError(
                    "the process that starts environments has ended, perhaps for lack of memory: "
                    "run the same command again"
                ) from error
        self._all.add(process)
        return process

    def give(self, process: Process, *, dead: bool = False) -> None:
        """Takes back a process whose episode has ended; one that is dead is killed."""
        if dead:
            self.kill(process)
        else:
            self._idle.append(process)

    def kill(self, process: Process) -> None:
        """Ends a process at once, with everything that it has started."""
        self._all.discard(process)
        process.connection.close()
        with contextlib.suppress(OSError):
            self._control.sendall(str(process.pid).encode().ljust(16, b"\0"))

    def ask(self, request: Mapping[str, Any], *, limit: float | None) -> dict[str, Any]:
        """Asks a process and waits for its answer, for `limit` seconds or, with None, for good.

        Raises:
            CallError: the call failed, or exceeded its limit.
        """
        process, answer = self.take(), None
        try:
            if not process.send(request, limit=limit):
                answer = {"error": "its process has ended", "dead": True}
            while answer is None:
                wait_for_any([process], min(1.0, process.deadline - time.monotonic()))
                answer = process.answer()
        except BaseException:
            self.kill(process)
            raise
        self.give(process, dead="dead" in answer)
        if "error" in answer:
            raise CallError(answer["error"])
        return answer

    @property
    def is_open(self) -> bool:
        """Whether the pool can start processes."""
        return self._control.fileno() >= 0 and self._parent.poll() is None

    def close(self) -> None:
        """Ends all processes."""
        self._control.close()
        for process in self._all:
            process.connection.close()
        # It may be importing without an end; SIGALRM tells it to end all others first.
        for number in (0, signal.SIGALRM, signal.SIGKILL):
            self._parent.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._parent.wait(timeout=5)
                return
