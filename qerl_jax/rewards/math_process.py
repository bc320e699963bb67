"""math-verify in a separate process, which can be killed if a comparison does not end.

The answer of a model can send sympy into C code for hours (with a tower of powers, for example),
and no Python signal handler interrupts C code. The worker process compares one pair at a time. A
timer, whose default signal action kills the process, and a memory limit bound each comparison;
after a kill the next comparison starts a new worker.
"""

import contextlib
import functools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from qerl_jax.rewards.answers import RELATIVE, SMALL
from qerl_jax.system.signals import STOP_SIGNALS

SECONDS = 20.0  # time limit for one comparison; a caller of `verify` may set a shorter one
_MEMORY_BYTES = 4 << 30
_lock = threading.Lock()


def verify(answer: str, text: str) -> bool:
    """Returns whether the answer that math-verify finds in a text equals the reference.

    The comparison is mathematical: 1/2 equals 0.5. An exception that interrupts the wait, such as
    the time limit of a caller that works by a signal, kills the worker and propagates. Answer and
    text are in LaTeX or plain.

    Raises:
        TimeoutError: the comparison took more than `SECONDS`, or more memory than 4 GiB.
        ValueError: math-verify cannot read the reference, or failed on this pair.
    """
    with _lock:
        worker = start()
        reply = ""
        try:
            print(json.dumps([answer, text]), file=worker.stdin, flush=True)
            reply = worker.stdout.readline()  # pyrefly: ignore[missing-attribute]
        except BrokenPipeError:
            pass
        finally:
            if not reply:
                _stop(worker)
    if not reply:
        raise TimeoutError(f"math-verify did not end within {SECONDS:g} s and 4 GiB")
    result = json.loads(reply)
    if isinstance(result, str):
        raise ValueError(result)
    return result


@functools.cache
def start() -> subprocess.Popen[str]:
    """Returns the worker, and starts it first if needed; its import of sympy takes seconds.

    It imports what this process imports, and ends when its standard input is closed, as it is when
    this process ends.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        # -P: a module of the same name in the working directory is not imported.
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C reaches this process only, which ends the worker itself.
    )


def _stop(worker: subprocess.Popen[str]) -> None:
    start.cache_clear()
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # pyrefly: ignore[missing-attribute]


def _serve() -> None:
    """Answers JSON lines [reference, text] with true, false or an error text, until EOF."""
    import math_verify
    from math_verify import grader

    grader.sympy_numeric_eq = _by_size(grader.sympy_numeric_eq)
    # math-verify's own time limits are off, because SIGALRM kills this process; math-verify logs a
    # warning about that, which is silenced here.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # A job scheduler sends its signals to all processes of a job: this one lets the comparison end,
    # so that the step that is saved has all its rewards. It ends with its standard input.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    @functools.lru_cache(maxsize=1024)
    def parse_reference(answer: str) -> list:
        expressions = math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
        # Where math-verify reads no expression, it returns nothing or only the text.
        return [] if all(isinstance(value, str) for value in expressions) else expressions

    for line in sys.stdin:
        answer, text = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            reference = parse_reference(answer)
            prediction = math_verify.parse(text, parsing_timeout=0)
            reply = bool(math_verify.verify(reference, prediction, timeout_seconds=0))
            if not reference:
                reply = f"math-verify cannot read the answer {answer[:50]!r}: use exact_answer"
        except MemoryError:
            return
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


def _by_size(equal: Callable[..., bool]) -> Callable[..., bool]:
    """Compares small numbers as `answers.same_number` does; math-verify takes tiny ones for 0."""
    import sympy

    def compare(first: Any, second: Any, *precision: int) -> bool:
        if not equal(first, second, *precision):
            return False
        if not all(isinstance(value, sympy.Expr) and value.is_number for value in (first, second)):
            return True
        first, second = (sympy.N(value.doit(), 30) for value in (first, second))
        largest = max(abs(first), abs(second))
        return bool(largest >= SMALL or abs(first - second) <= RELATIVE * largest)

    return compare


if __name__ == "__main__":
    _serve()
