"""Counts what JAX compiles, programs of single operations on the host included."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator

import jax

from qerl_jax.system.threads import covered_seconds

_COMPILE = "/jax/core/compile/"  # tracing, lowering and compiling
_PROGRAM = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """Compilations since the last call of `take`."""

    _spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    _programs: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add(self, event: str, seconds: float) -> None:
        """Adds an event of `jax.monitoring` that has just ended."""
        end = time.perf_counter()
        with self._lock:
            self._spans.append((end - seconds, end))
            self._programs += event == _PROGRAM

    def take(self) -> dict[str, float]:
        """Returns the metrics since the last call, and begins anew.

        Returns:
            compiled_programs, number of programs that were compiled or read from JAX's cache;
            compile_seconds, wall time in which something was traced, lowered or compiled.
        """
        with self._lock:
            spans, programs = self._spans, self._programs
            self._spans, self._programs = [], 0
        # Threads compile at the same time.
        seconds = covered_seconds(spans)
        return {"compiled_programs": programs, "compile_seconds": seconds}


@contextlib.contextmanager
def count_compilations() -> Generator[Compilations]:
    """Counts the compilations of this process while the block runs."""
    compilations = Compilations()

    def listen(event: str, duration_secs: float, **labels: str | int) -> None:
        del labels
        if event.startswith(_COMPILE):
            compilations.add(event, duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
