"""Processes that lower and compile programs of rollouts beside the one that needs them.

To trace and lower a program with kernels of Pallas in it takes Python seconds, and Python does one
thing at a time. A helper does it in a process of its own, and leaves the executable in its file
(`executables`), from which the process that needs it loads it. Helpers take programs from the same
queue as that process; what they leave undone, as they ended early, is left to it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys
import warnings
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import IO, Any, BinaryIO

import jax

from qerl_jax.rollout import decode, executables, programs
from qerl_jax.rollout.budget import Plan

COMPILERS = max(4, (os.cpu_count() or 1) // 2)  # programs that compile at the same time
_COMMAND = (sys.executable, "-m", __name__)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a helper is told; programs are numbers from then on.

    Attributes:
        policy: the shapes of its arrays.
        device: where it lies, among `jax.devices()`.
        shapes: see `programs.lowerings`.
        paths: where each of those programs is to be kept, in their order.
        settings: those of JAX.
    """

    policy: programs.Policy
    device: int
    shapes: Sequence[tuple[Plan, decode.Rules]]
    paths: Sequence[pathlib.Path]
    settings: Mapping[str, Any]


def task_for(
    policy: programs.Policy,
    shapes: Sequence[tuple[Plan, decode.Rules]],
    paths: Mapping[Hashable, pathlib.Path],
) -> Task:
    """The task of helpers of this process.

    Args:
        policy: bound, all of it to one device.
        shapes: see `programs.lowerings`.
        paths: of `executables.paths`.
    """
    (device,) = executables.devices_of(policy)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), policy)
    settings = dict(jax.config.values)
    return Task(abstract, jax.devices().index(device), shapes, list(paths.values()), settings)


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
        self._queue = queue
        self._handed_out: list[list[int]] = [[] for _ in range(count)]
        self._helpers = [_start() for _ in range(count)]
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, count))
        told = pickle.dumps(task)
        self._leading = [
            self._pool.submit(self._lead, helper, numbers, told)
            for helper, numbers in zip(self._helpers, self._handed_out, strict=True)
        ]

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._helpers:
            helper.kill()
        self._pool.shutdown()

    def finish(self) -> list[int]:
        """Waits for what was handed out, when nothing is left to hand out, and returns it."""
        for helper, numbers, leading in zip(
            self._helpers, self._handed_out, self._leading, strict=True
        ):
            code = helper.poll()
            if not numbers:  # It has not begun yet.
                helper.kill()
            leading.result()
            if code or (numbers and helper.returncode):
                warnings.warn(
                    "a helper that compiles programs of rollouts ended with exit code "
                    f"{helper.returncode}; what it left undone is compiled here",
                    stacklevel=2,
                )
        return [number for numbers in self._handed_out for number in numbers]

    def _lead(self, helper: subprocess.Popen[bytes], numbers: list[int], told: bytes) -> None:
        # A helper ends where its pipe is closed, which the block does, and waits.
        with contextlib.suppress(BrokenPipeError), helper:
            _write(helper.stdin, told)
            left = taken(self._queue)
            while helper.stdout.readline():  # pyrefly: ignore[missing-attribute]
                if (number := next(left, None)) is None:
                    return
                numbers.append(number)
                _write(helper.stdin, b"%d\n" % number)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # The memory is that of the process that needs the programs.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
        start_new_session=True,  # Ctrl-C is for that process, which ends its helpers.
    )


def _write(pipe: IO[bytes] | None, what: bytes) -> None:
    assert pipe is not None
    pipe.write(what)
    pipe.flush()


def _serve(given: BinaryIO) -> None:
    """Reads a task, and numbers of its programs, a line each, until EOF; a line asks for one."""
    task: Task = pickle.load(given)
    for name, value in task.settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[task.device])
    policy = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), task.policy
    )
    lowerings = list(programs.lowerings(policy, task.shapes).values())

    def compile_and_keep(number: int, lowered: jax.stages.Lowered) -> None:
        executables.keep(lowered.compile(), task.paths[number])

    with (
        executables.not_cached(),
        programs.uncollected(),
        concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool,
    ):
        print(flush=True)
        for line in given:
            number = int(line)
            pool.submit(compile_and_keep, number, lowerings[number]())
            print(flush=True)


if __name__ == "__main__":
    _serve(sys.stdin.buffer)
