"""The processes of a run as one of them sees them: what they exchange, and how they end together.

What is exchanged travels over the key-value store of JAX's coordination service, which process 0
holds. Gradients do not: they are summed by collectives. A wait for the store can be interrupted, so
that a signal, an error or the loss of one process ends all, while a collective waits forever.

A stop is agreed on by the number of the exchange that the stopped process does not take part in. No
process can complete that exchange, so all of them end in the same step.
"""

import contextlib
import io
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from qerl_jax.errors import UserError, first_line, visible
from qerl_jax.system.signals import StoppedError

HEARTBEAT_SECONDS = 20  # after which JAX's runtime gives a silent process up
_LOOK_SECONDS = 0.5
_READ_SECONDS = 600.0  # how long a share that is there may take to arrive
_PART_SECONDS = 10.0  # how long a process that ends waits for the others to hear why
_JOIN_SECONDS = 5.0
_ANSWER_SECONDS = 5.0  # how long process 0 may take to answer before it counts as lost
_FIRST_SECONDS = 10.0  # how long process 0 may take to raise an error that another one raised
_END_SECONDS = 600.0  # how long a finished process waits for the others
_FAILED, _STOP, _SIGNAL = "told/failed", "told/stop", "told/signal"


class Processes:
    """All processes of a run. By default the run has one, and nothing is exchanged.

    Attributes:
        index: number of this process.
        count: number of all processes.
        names: the processes with their hosts, such as 'process 1 on node7'.
        received: signals that this process has received; it may grow.
        has_checkpoint: whether the run has one, so that an error in it can be followed by a start.
    """

    def __init__(self, index: int = 0, count: int = 1, address: str = ""):
        """Describes the processes, which JAX's runtime has connected.

        Args:
            index: number of this process.
            count: number of all processes.
            address: HOST:PORT of process 0.
        """
        self.index, self.count, self._address = index, count, address
        self.names = [f"process {number}" for number in range(count)]
        self._client: Any = None
        if count > 1:
            from orbax.checkpoint import multihost  # Its import takes seconds.

            self._client = multihost.get_jax_distributed_client()
        self._exchanges = 0  # number of the next exchange
        self.received: Sequence[int] = ()
        self.has_checkpoint = False
        self._signal = 0  # that another process has received
        self._stop: dict[str, int] | None = None
        self._silence, self._last_look = 0.0, time.monotonic()
        self._exit_lock = threading.Lock()  # held by the thread that ends this process
        self._all_others_left, self._ended = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=watch, name="processes", daemon=True)
            for watch in (self._watch_heartbeats, self._watch_messages)
        ]

    @property
    def writes(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.index == 0

    def begin(self) -> None:
        """Names the processes, watches them, and connects their devices."""
        for thread in self._threads:
            thread.start()
        host = socket.gethostname()
        self.names = [f"process {i} on {x}" for i, x in enumerate(self.exchange_json(host))]
        # The first collective connects the devices, which must not wait for a program to compile.
        multihost_utils.sync_global_devices("begin")

    def exchange(self, share: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Returns the shares of all processes, arrays by name, in the order of the processes.

        Raises:
            StoppedError: another process has stopped instead of giving its share.
        """
        if self.count == 1:
            return [dict(share)]
        number, index = self._exchanges, self.index
        try:
            self._client.key_value_set_bytes(f"exchange/{number}/{index}/share", _dumps(share))
            self._client.key_value_set(f"exchange/{number}/{index}/is_there", "yes")
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            raise UserError(
                f"a process {index} of {self.count} is connected already: give each process "
                "another number, and each run another port"
            ) from error
        shares = [
            dict(share) if other == index else _loads(self._wait_for(number, other))
            for other in range(self.count)
        ]
        if number:  # All processes have read the exchange before, as they take part in this one.
            self._client.key_value_delete(f"exchange/{number - 1}/{index}")
        self._exchanges += 1
        return shares

    def exchange_json(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in their order; they are JSON."""
        shares = self.exchange({"json": np.array(json.dumps(value))})
        return [json.loads(str(share["json"])) for share in shares]

    def broadcast_from_first(self, value: Any) -> Any:
        """Returns the value of process 0, which is JSON; the values of the others do not count."""
        return self.exchange_json(value if self.index == 0 else None)[0]

    def check_same(self, fields: Mapping[str, Any], remedy: str) -> None:
        """Refuses processes whose fields, values of JSON by name, differ.

        Raises:
            UserError: a value differs; the line names the fields, the values, the processes and the
                remedy.
        """
        first, *others = self.exchange_json(fields)
        for other, values in enumerate(others, 1):
            differ = [n for n in sorted(first.keys() | values) if first.get(n) != values.get(n)]
            if differ:
                text = "; ".join(f"{n} is {first.get(n)} and {values.get(n)}" for n in differ[:5])
                raise UserError(f"{self.names[0]} and {self.names[other]} differ: {text}; {remedy}")

    def stop_if_asked(self) -> None:
        """Ends this process with all others once one of them has received a signal.

        Raises:
            StoppedError: one has, and no process completes the next exchange.
        """
        self._stop_with_others()
        signum = self.received[0] if self.received else self._signal
        if signum:
            if self.count > 1:
                self._tell(_STOP, {"exchange": self._exchanges, "signal": signum})
            raise StoppedError(signum)

    def fail(self, error: BaseException) -> None:
        """Tells the other processes that this one ends by an error; then all of them end.

        An error of a collective may follow from the loss of another process. Then this process
        waits for the runtime to find out which one, and ends with the line that names it.
        Bad input is an error in all processes, and process 0 is to say so.
        """
        if _may_follow(error):
            time.sleep(2 * HEARTBEAT_SECONDS)  # `_watch_heartbeats` ends the process.
        elif self.index and isinstance(error, UserError):
            time.sleep(_FIRST_SECONDS)  # `_watch_messages` ends the process.
        if not self._exit_lock.acquire(blocking=False):
            return
        text = first_line(error) or type(error).__name__
        if not isinstance(error, UserError):
            text = f"{type(error).__name__}: {text}"
        self._tell(_FAILED, {"process": self.index, "error": text})
        self._wait_for_others(range(self.count))
        self._stop_watching()

    @property
    def command(self) -> str:
        """The command of this process, which resumes the run.

        A command that takes the config from the run folder would not do: a host with a home folder
        of its own takes it for the folder of another person.
        """
        return shlex.join(sys.orig_argv)

    def how_to_resume(self) -> str:
        """Says what continues the run; it reads no file, as the host that has them may be lost."""
        how = "continues from the last checkpoint"
        return f"the same command in all processes {how}: {visible(self.command)}"

    def with_command(self, line: str) -> str:
        """Returns a line about an error with what continues the run, if it has a checkpoint."""
        return f"{line}; {self.how_to_resume()}" if self.has_checkpoint else line

    def end(self) -> None:
        """Waits until all processes are done, and disconnects; process 0 does so last."""
        self._client.wait_at_barrier("end", int(1000 * _END_SECONDS))
        if not self._exit_lock.acquire(blocking=False):
            return
        if self.index == 0:
            self._all_others_left.wait(_PART_SECONDS)
        self._stop_watching()
        jax.distributed.shutdown()

    def why_aborted(self) -> str | None:
        """Says why JAX aborts this process: process 0 is lost, or it took this one for lost."""
        host, _, port = self._address.rpartition(":")
        try:
            address = host.strip("[]"), int(port)
            with socket.create_connection(address, timeout=_ANSWER_SECONDS) as connection:
                # The kernel connects for a process that is frozen; gRPC speaks first.
                is_lost = not connection.recv(1)
        except socket.gaierror:
            return None
        except OSError:
            is_lost = True
        if is_lost:
            return self._loss_error([0])
        silence = max(self._silence, time.monotonic() - self._last_look)
        if silence < HEARTBEAT_SECONDS:
            return None
        return (
            f"error: {self.names[self.index]} was silent for {silence:.0f} s, and then lost, which "
            f"ends the run; {self.how_to_resume()}"
        )

    def _wait_for(self, number: int, other: int) -> bytes:
        key = f"exchange/{number}/{other}"
        while True:
            try:
                # A share may take longer to arrive than a look, which would give it up each time.
                self._client.blocking_key_value_get(f"{key}/is_there", int(1000 * _LOOK_SECONDS))
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if self.received:  # Too late for this process: one that has not given its share stops.
                self._tell(_SIGNAL, {"signal": self.received[0]})
            self._stop_with_others()
        return self._client.blocking_key_value_get_bytes(f"{key}/share", int(1000 * _READ_SECONDS))

    def _stop_with_others(self) -> None:
        if self._stop is not None and self._stop["exchange"] == self._exchanges:
            raise StoppedError(self._stop["signal"])

    def _tell(self, key: str, value: Mapping[str, Any]) -> None:
        """Tells all processes something, unless another one was first."""
        try:
            self._client.key_value_set(key, json.dumps(value))
        except jax.errors.JaxRuntimeError:
            return

    def _stop_watching(self) -> None:
        """Ends the threads: one that is in C++ when the interpreter ends would abort it."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _watch_messages(self) -> None:
        """Reads the messages of other processes, and notes how long this one does not run."""
        self._last_look = time.monotonic()
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            self._silence, self._last_look = max(self._silence, now - self._last_look), now
            try:
                messages = dict(self._client.key_value_dir_get("told/"))
            except jax.errors.JaxRuntimeError:
                return  # The connection has ended.
            if _SIGNAL in messages:
                self._signal = json.loads(messages[_SIGNAL])["signal"]
            if _STOP in messages:
                self._stop = json.loads(messages[_STOP])
            if _FAILED in messages:
                failure = json.loads(messages[_FAILED])
                if failure["process"] != self.index:
                    name = self.names[failure["process"]]
                    line = f"error: {name} failed, which ends the run: {failure['error']}"
                    self._exit(self.with_command(line), range(self.count))
                return

    def _watch_heartbeats(self) -> None:
        """Follows which processes send heartbeats; a number tells a process from its successor."""
        first: dict[int, int] = {}
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                # It returns once all processes that are alive have called it.
                alive = self._client.get_live_nodes(list(range(self.count)))
            except jax.errors.JaxRuntimeError:
                return  # The connection has ended.
            first = alive | first
            lost = [i for i in range(self.count) if i not in alive or alive[i] != first[i]]
            if alive.keys() == {self.index}:
                self._all_others_left.set()
            if lost:
                time.sleep(2 * _LOOK_SECONDS)  # At the end of a run the others may leave first.
                self._exit(self._loss_error(lost), sorted(alive))

    def _loss_error(self, processes: Sequence[int]) -> str:
        names = " and ".join(self.names[number] for number in processes)
        verb = "is" if len(processes) == 1 else "are"
        return f"error: {names} {verb} lost, which ends the run; {self.how_to_resume()}"

    def _exit(self, line: str, alive: Sequence[int]) -> None:
        """Ends this process from a thread: its main thread may wait in a collective forever."""
        if not self._exit_lock.acquire(blocking=False):
            return
        with contextlib.suppress(OSError):  # The terminal was closed.
            print(visible(line), file=sys.stderr, flush=True)
        self._wait_for_others(alive)
        os._exit(1)

    def _wait_for_others(self, alive: Sequence[int]) -> None:
        """Waits a while for the others to hear of the end; process 0 holds the store."""
        try:
            name, milliseconds = f"part {list(alive)}", int(1000 * _PART_SECONDS)
            self._client.wait_at_barrier(name, milliseconds, list(alive))
        except jax.errors.JaxRuntimeError:
            return
        if self.index == 0:
            time.sleep(2 * _LOOK_SECONDS)


ALONE = Processes()  # a run of one process


def _may_follow(error: BaseException) -> bool:
    """Whether an error may follow from the loss of another process."""
    text = str(error)
    if "Gloo" in text or "NCCL" in text:
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in text


def _dumps(share: Mapping[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **share)
    return file.getvalue()


def _loads(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)
