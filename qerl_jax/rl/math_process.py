"""math-verify in a process of its own, where a comparison that does not end can be ended.

A model's answer may send sympy into C code for hours (a tower of powers, say), which no signal
handler of Python interrupts. The worker compares one pair at a time, under a timer whose signal the
kernel lets end it, and under a limit of its memory; the next comparison starts a new one.
"""

import contextlib
import functools
import json
import logging
import resource
import signal
import subprocess
import sys
import threading

from qerl_jax import worker_process

SECONDS = 20.0  # for one comparison; a shorter limit is the caller's, see `verify`
_MEMORY_BYTES = 4 << 30
_lock = threading.Lock()


def verify(answer: str, text: str) -> bool:
    """Whether the answer that math-verify finds in a text equals the reference in mathematics.

    Whatever interrupts the wait (a time limit of the caller that works by a signal) ends the worker
    and passes on.

    Args:
        answer: the reference, in LaTeX or plain.
        text: the completion, or what was cut out of it.

    Raises:
        TimeoutError: the comparison took more than `SECONDS`, or more memory than 4 GiB.
        ValueError: math-verify failed on this pair.
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
    found = json.loads(reply)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@functools.cache
def start() -> subprocess.Popen[str]:
    """The worker, started if there is none; it takes seconds until it has imported sympy."""
    command = worker_process.module_command(__name__)
    return worker_process.start(command, text=True, encoding="utf-8")


def _stop(worker: subprocess.Popen[str]) -> None:
    start.cache_clear()
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # pyrefly: ignore[missing-attribute]


def _serve() -> None:
    """Answers [reference, text] lines with true, false or the text of an error, until EOF."""
    import math_verify

    # Its own time limits are off, as SIGALRM ends this process; it warns about that.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    @functools.lru_cache(maxsize=1024)
    def parse_reference(answer: str) -> list:
        return math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=0)

    for line in sys.stdin:
        answer, text = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            prediction = math_verify.parse(text, parsing_timeout=0)
            reply = bool(math_verify.verify(parse_reference(answer), prediction, timeout_seconds=0))
        except MemoryError:
            return
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve()
