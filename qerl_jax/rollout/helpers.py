"""Processes that lower and compile programs of rollouts beside the one that needs them.

To trace and lower a program with kernels of Pallas in it takes Python seconds, and Python does one
thing at a time. A helper does it in a process of its own, and leaves the executable in its file
(`executables`), from which the process that needs it loads it. Helpers take programs from the same
queue as that process, and what they leave undone, as they ended early, is left to it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import IO, Any, BinaryIO

import jax

from qerl_jax import worker_process
from qerl_jax.rollout import decode, executables, programs
from qerl_jax.rollout.budget import Plan

_COMMAND = worker_process.module_command(__name__)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a helper is told; programs are numbers from then on.

    Attributes:
        policy: the shapes of its arrays.
        device: where it lies, among `jax.devices()`.
        memory_kind: likewise, of the device.
        shapes: see `programs.lowerings`.
        paths: where each of those programs is to be kept, in their order.
        settings: those of JAX.
        origin: of `executables.origin`, which the helper must agree with.
        compilers: programs that it compiles at the same time.
    """

    policy: programs.Policy
    device: int
    memory_kind: str | None
    shapes: Sequence[tuple[Plan, decode.Rules]]
    paths: Sequence[pathlib.Path]
    settings: Mapping[str, Any]
    origin: str
    compilers: int


def task_for(
    policy: programs.Policy,
    shapes: Sequence[tuple[Plan, decode.Rules]],
    paths: Mapping[Hashable, pathlib.Path],
    compilers: int,
) -> Task:
    """The task of helpers of this process.

    Args:
        policy: bound, all of it to one device in the same way.
        shapes: see `programs.lowerings`.
        paths: of `executables.paths`.
        compilers: programs that a helper compiles at the same time.
    """
    (sharding,) = {leaf.sharding for leaf in jax.tree.leaves(policy)}
    (device,) = sharding.device_set
    plain = bool, int, float, str, type(None)
    return Task(
        policy=jax.eval_shape(lambda x: x, policy),
        device=jax.devices().index(device),
        memory_kind=sharding.memory_kind,
        shapes=shapes,
        paths=list(paths.values()),
        settings={k: v for k, v in jax.config.values.items() if isinstance(v, plain)},
        origin=executables.origin(policy),
        compilers=compilers,
    )


def taken(queue: collections.deque) -> Generator[Any]:
    """What is left in a queue that others take from, too."""
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


class Team:
    """Helpers at work, until the block is left.

    Args:
        count: how many.
        task: of `task_for`.
        queue: of numbers of programs, that they take from.
    """

    def __init__(self, count: int, task: Task, queue: collections.deque[int]) -> None:
        self._count, self._paths, self._queue = count, task.paths, queue
        self._pickled = pickle.dumps(task)
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._helpers: list[_Helper] = []
        self._served: list[concurrent.futures.Future] = []

    def __enter__(self) -> "Team":
        try:
            for _ in range(self._count):
                self._helpers.append(_Helper())
                self._served.append(self._pool.submit(self._serve, self._helpers[-1]))
        except OSError as error:
            warnings.warn(f"no process helps to compile rollout programs: {error}", stacklevel=2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._pool.shutdown()
        for helper in self._helpers:
            helper.errors.close()
            for number in helper.numbers:  # It may have been writing.
                with contextlib.suppress(OSError):
                    executables.unfinished(self._paths[number], helper.process.pid).unlink()

    def handed_out(self) -> list[int]:
        """The programs that helpers took."""
        with self._lock:
            return [number for helper in self._helpers for number in helper.numbers]

    def dismiss(self) -> list[int]:
        """Ends helpers that have not begun, as nothing is left in the queue; the rest as above."""
        with self._lock:
            for helper in self._helpers:
                if not helper.numbers:
                    helper.end()
        return self.handed_out()

    def at_work(self) -> bool:
        """Whether a helper has not ended."""
        return not all(served.done() for served in self._served)

    def end(self) -> None:
        """Ends helpers in the middle of their work."""
        for helper in self._helpers:
            helper.end()

    def failures(self) -> list[str]:
        """Why helpers ended that neither this process nor the end of the queue ended."""
        for served in self._served:
            served.result()
        return [reason for helper in self._helpers if (reason := helper.failure())]

    def _serve(self, helper: "_Helper") -> None:
        """Gives a helper its task, and a program whenever it asks for one."""
        left = taken(self._queue)
        # A helper ends where its pipe is closed, which the block does, and waits.
        with contextlib.suppress(BrokenPipeError), helper.process:
            helper.tell(self._pickled)
            while helper.asks():
                with self._lock:
                    if helper.ended or (number := next(left, None)) is None:
                        return
                    helper.numbers.append(number)
                helper.tell(b"%d\n" % number)


class _Helper:
    """A process.

    Attributes:
        process: that.
        errors: what it wrote about them.
        numbers: the programs that it took.
        ended: whether this process ended it.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.ended = False
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        # The memory is that of the process that needs the programs.
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.process = worker_process.start(_COMMAND, stderr=self.errors, env=env)

    def tell(self, what: bytes) -> None:
        pipe: IO[bytes] = self.process.stdin  # pyrefly: ignore[bad-assignment]
        pipe.write(what)
        pipe.flush()

    def asks(self) -> bool:
        """Waits until it asks for a program; False where it has ended."""
        return bool(self.process.stdout.readline())  # pyrefly: ignore[missing-attribute]

    def end(self) -> None:
        if self.process.poll() is None:
            self.ended = True
            self.process.kill()

    def failure(self) -> str:
        if self.ended or not self.process.returncode:
            return ""
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return "".join(last) or f"exit code {self.process.returncode}"


def _help(given: BinaryIO, ask: IO[str]) -> None:
    """Reads a task, and the numbers of programs until EOF, and asks for each with a line."""
    task: Task = pickle.load(given)
    for name, value in task.settings.items():
        if jax.config.values.get(name, value) != value:
            jax.config.update(name, value)
    sharding = jax.sharding.SingleDeviceSharding(
        jax.devices()[task.device], memory_kind=task.memory_kind
    )
    policy = jax.tree.map(lambda x: x.update(sharding=sharding), task.policy)
    if executables.origin(policy) != task.origin:
        sys.exit("here programs would be others: edited sources, another version or setting")
    lowerings = list(programs.lowerings(policy, task.shapes).values())
    compiling: list[concurrent.futures.Future] = []

    def compile_and_keep(number: int, lowered: jax.stages.Lowered) -> None:
        executables.keep(lowered.compile(), task.paths[number])

    with (
        executables.not_cached(),
        programs.uncollected(),
        concurrent.futures.ThreadPoolExecutor(task.compilers) as pool,
    ):
        print(file=ask, flush=True)
        for line in given:
            number = int(line)
            compiling.append(pool.submit(compile_and_keep, number, lowerings[number]()))
            for future in compiling:
                if future.done():
                    future.result()
            print(file=ask, flush=True)
        for future in compiling:
            future.result()


if __name__ == "__main__":
    _asking = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What compilers print asks for nothing.
    _help(sys.stdin.buffer, _asking)
