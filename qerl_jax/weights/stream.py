"""Brings tensors from files to the device in chunks, and keeps account of it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from qerl_jax.system.threads import covered_seconds
from qerl_jax.weights.safetensors import CHUNK_BYTES

_ALIGNMENT = 64


class Meter:
    """What a load has done so far; threads may call it at the same time.

    Args:
        parameters: number of parameters of the model.
        total_bytes: bytes of all tensors in the files.
        on_progress: called with the meter whenever bytes were read, by one thread at a time, and
            once in the end.
    """

    def __init__(
        self,
        parameters: int,
        total_bytes: int,
        on_progress: Callable[["Meter"], None],
    ):
        self.parameters = parameters
        self.total_bytes = total_bytes
        self.bytes = 0
        self.done = False
        self._complete = False
        self._spans: list[tuple[str, float, float]] = []
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._ended = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the meter was made, until the load ended."""
        return (self._ended if self.done else time.perf_counter()) - self._began

    @property
    def text(self) -> str:
        """The state as a line of text; none for a load that failed."""
        if self.done and not self._complete:
            return ""
        count = self.parameters / 1e9
        model = f"{count:.1f}B" if count >= 1 else f"{1000 * count:.0f}M"
        total, read = self.total_bytes / 1e9, self.bytes / 1e9
        digits = 1 if total >= 10 else 2
        if self.done:
            return (
                f"loaded {model} parameters: {total:.{digits}f} GB in {self.seconds:.1f} s, "
                f"{total / max(self.seconds, 1e-9):.2g} GB/s"
            )
        return (
            f"loading {model} parameters: {read:.{digits}f} of {total:.{digits}f} GB, "
            f"{self.seconds:.0f} s"
        )

    def add(self, count: int) -> None:
        """Counts bytes that are on the device."""
        with self._lock:
            self.bytes += count
            self._on_progress(self)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ends the load with a block, and reports the end, also where the block fails."""
        try:
            yield
            self._complete = True
        finally:
            with self._lock:
                self._ended, self.done = time.perf_counter(), True
                self._on_progress(self)

    @contextlib.contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        """Counts the time of a block for a stage: 'read', 'transfer', 'quantize' or 'arrange'."""
        began = time.perf_counter()
        yield
        self._spans.append((stage, began, time.perf_counter()))

    def busy_seconds(self, *stages: str) -> float:
        """Returns in how many seconds at least one thread was in one of the stages."""
        return covered_seconds(span[1:] for span in self._spans if span[0] in stages)


class Stream:
    """Sends chunks of tensors to the default device, and counts bytes and seconds in its meter.

    A thread reads all of its chunks into the same memory, because pages that are touched for the
    first time cost more than the copy into them.
    """

    def __init__(self, meter: Meter):
        self.meter = meter
        self._threads = threading.local()
        self._reuses = jax.default_backend() != "cpu"

    def memory(self, size: int) -> np.ndarray:
        """Returns memory of at least `size` bytes, which the last chunk of this thread may hold.

        On a CPU the memory is new, because an array on the device then is the same memory.
        """
        if not self._reuses:
            return _aligned_memory(size)
        buffer = getattr(self._threads, "memory", None)
        if buffer is None or len(buffer) < size:
            buffer = self._threads.memory = _aligned_memory(max(size, CHUNK_BYTES))
        return buffer

    def send(self, chunks: Iterable[np.ndarray], stored_bytes: int) -> list[jax.Array]:
        """Returns the chunks of one tensor on the device; `stored_bytes` are those in the file.

        Each chunk may be overwritten when the next one is made.
        """
        arrays, counted_bytes, iterator = [], 0, iter(chunks)
        while True:
            with self.meter.busy("read"):
                chunk = next(iterator, None)
            if chunk is None:
                break
            with self.meter.busy("transfer"):
                arrays.append(jax.block_until_ready(jax.device_put(chunk)))
            share = min(chunk.nbytes, stored_bytes - counted_bytes)
            counted_bytes += share
            self.meter.add(share)
        self.meter.add(stored_bytes - counted_bytes)
        return arrays


def _aligned_memory(size: int) -> np.ndarray:
    """Returns new memory that jax on a CPU takes over without a copy."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :][:size]
