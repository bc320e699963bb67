"""The pool of processes with environments, as the process that trains sees it."""

import contextlib
import json
import os
import pickle
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from typing import Any

from qerl_jax.environments import worker
from qerl_jax.errors import UserError
from qerl_jax.system.import_path import allow_working_directory

_START_SECONDS = 120.0  # for the imports of the user's modules
_LONGEST_MESSAGE = 64 << 20  # bytes


class CallError(Exception):
    """A call of an environment failed; the environment is still alive."""


class Process:
    """A process with one environment.

    Attributes:
        pid: number of the process.
        connection: socket to it.
        deadline: time at which the call under way must have ended, as `time.monotonic` counts.
    """

    def __init__(self, pid: int, connection: socket.socket):
        self.pid, self.connection = pid, connection
        self.deadline = float("inf")
        self._data = bytearray()

    def send(self, request: Mapping[str, Any], *, limit: float) -> None:
        """Sends a request, whose answer must arrive within `limit` seconds; 0 sets no limit.

        Raises:
            OSError: the process has ended.
        """
        self.deadline = time.monotonic() + limit if limit else float("inf")
        data = pickle.dumps(dict(request))
        self.connection.settimeout(limit or None)
        self.connection.sendall(struct.pack("!I", len(data)) + data)

    def read(self) -> Any:
        """Returns the answer, or None while it is not complete.

        Raises:
            EOFError: the process has ended.
            ValueError: the answer is no answer.
        """
        self.connection.settimeout(0)
        part = self.connection.recv(1 << 20)
        if not part:
            raise EOFError
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


class Pool:
    """Processes with environments; each serves one episode at a time.

    Attributes:
        functions: import paths of the environments by name.
    """

    def __init__(self, functions: Mapping[str, str]):
        """Starts the parent of the processes, which imports the user's modules.

        Args:
            functions: import paths of classes, `package.module:Class`, by name.

        Raises:
            UserError: a module cannot be imported, or has no such class.
        """
        self.functions = dict(functions)
        self._selector = selectors.DefaultSelector()
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        allow_working_directory()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._control, other = socket.socketpair()
        self._parent = subprocess.Popen(
            [sys.executable, "-P", "-m", worker.__name__, str(other.fileno())],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        other.close()
        self._control.settimeout(_START_SECONDS)
        try:
            worker.send(self._control, self.functions)
            error = worker.receive(self._control)
        except (EOFError, OSError) as failure:
            self.close()
            paths = ", ".join(functions.values())
            raise UserError(
                f"environment.function: importing {paths} ended the process, or took more than "
                f"{_START_SECONDS:g} s: try it alone, python -c 'import MODULE'"
            ) from failure
        if error:
            self.close()
            raise UserError(
                f"environment.function={error}: name a class, package.module:Class, that Python "
                "finds from the working directory"
            )

    def take(self) -> Process:
        """Returns a process that is free, and starts one if all are busy."""
        if self._idle:
            return self._idle.pop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"start"], [theirs.fileno()])
                process = Process(worker.receive(self._control), ours)
            except (EOFError, OSError) as error:
                raise UserError(
                    "the process that starts environments has ended, perhaps for lack of memory: "
                    "run the same command again"
                ) from error
        self._all.add(process)
        return process

    def give(self, process: Process) -> None:
        """Takes back a process whose episode has ended."""
        process.deadline = float("inf")
        self._idle.append(process)

    def kill(self, process: Process) -> None:
        """Ends a process at once, with everything that it has started."""
        self._all.discard(process)
        self.unwatch(process)
        process.connection.close()
        with contextlib.suppress(OSError):
            self._control.sendall(str(process.pid).encode().ljust(16, b"\0"))

    def watch(self, process: Process) -> None:
        """Adds a process to those whose answers `ready` waits for."""
        self._selector.register(process.connection, selectors.EVENT_READ, process)

    def unwatch(self, process: Process) -> None:
        """Removes a process from those whose answers `ready` waits for."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(process.connection)

    def ready(self, seconds: float) -> list[Process]:
        """Returns the watched processes with data, or waits for one for some seconds."""
        return [key.data for key, _ in self._selector.select(seconds)]

    def ask(self, request: Mapping[str, Any], *, limit: float) -> dict[str, Any]:
        """Asks a process and waits for its answer.

        Raises:
            CallError: the call failed.
            TimeoutError: there was no answer within `limit` seconds.
            EOFError: the process ended.
        """
        process = self.take()
        try:
            process.send(request, limit=limit)
            process.connection.settimeout(limit or None)
            answer = worker.receive(process.connection)
        except BaseException:
            self.kill(process)
            raise
        self.give(process)
        if "error" in answer:
            raise CallError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends all processes."""
        self._control.close()
        for process in self._all:
            process.connection.close()
        self._selector.close()
        try:
            self._parent.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._parent.kill()
            self._parent.wait()


@contextlib.contextmanager
def open_pool(functions: Mapping[str, str]) -> Generator[Pool | None]:
    """Opens the pool of some environments for a block; None where there is no environment."""
    if not functions:
        yield None
        return
    pool = Pool(functions)
    try:
        yield pool
    finally:
        pool.close()
