"""Ahead-of-time (AOT) compilation of programs, several at a time."""

import concurrent.futures
import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels import fp4_matmul
from qerl_jax.compile import executable_cache, program_cache
from qerl_jax.compile.operation import Executables, Operation
from qerl_jax.system.processor import available_cores

_THREADS = max(4, available_cores() // 2)  # programs that compile at the same time
_COMPILATION = "/jax/core/compile/backend_compile_duration"  # of a program from JAX's cache, too
_FOUND = "/jax/compilation_cache/cache_retrieval_time_sec"  # comes first if the cache has it


def compile_operations(
    policy: Any,
    operations: Iterable[Operation],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    others: Sequence[Sequence[jax.Device]] = (),
) -> Executables:
    """Loads programs from the executable cache, and compiles those that are not in it.

    Lowering a program is Python's work. Meanwhile threads compile the programs before it.

    Args:
        policy: tree of the committed arrays of a policy.
        operations: operations of one or several rollouts of this policy; those with equal keys are
            compiled once.
        on_progress: called with the number of programs that are ready and the number of all.
        others: groups of as many devices as hold the policy, which get the programs too, as
            `replicas`. Nothing is lowered or compiled for them.
    """
    by_key = {operation.key: operation for operation in operations}
    with _Compiler(policy, by_key, on_progress, others) as compiler:
        compiler.load_cached()
        with _garbage_collector_off():
            compiler.compile_missing(by_key)
        return compiler.executables


def program_bytes(executables: Executables, operations: Iterable[Operation]) -> dict[str, int]:
    """Returns the bytes that programs take besides their arguments: results and temporary arrays.

    Args:
        executables: programs of the operations.
        operations: operations whose keys begin with their names.

    Returns:
        The bytes by name, of the largest program where several sizes have one. A program of which
        the backend does not tell its bytes is left out.
    """
    sizes: dict[str, int] = {}
    for operation in operations:
        program: Any = executables[operation.key]
        if isinstance(program, FirstRunAlone):
            program = program.program
        if (memory := program.memory_analysis()) is not None:
            size = memory.temp_size_in_bytes + memory.output_size_in_bytes
            name = operation.key[0]  # pyrefly: ignore[bad-index]
            sizes[name] = max(sizes.get(name, 0), size - memory.alias_size_in_bytes)
    return sizes


class FirstRunAlone:
    """A program whose first run is never at the same time as that of another with the same lock.

    When a program first runs on a device, XLA loads its kernels, and cuDNN captures a stream to
    build its graphs. Two threads that did so at once, each on its GPU, failed with "capturing
    stream has unjoined work". XLA may do it after the call has returned, so the lock is held until
    the first results are ready.
    """

    def __init__(self, program: Callable[..., Any], lock: threading.Lock) -> None:
        self.program, self._lock, self._has_run = program, lock, False

    def __call__(self, *arguments: Any) -> Any:
        """Returns the results of the program."""
        if self._has_run:
            return self.program(*arguments)
        with self._lock:
            results = jax.block_until_ready(self.program(*arguments))
        self._has_run = True
        return results


class _Compiler:
    """Threads that load or compile programs, until the block is left; `executables` are ready."""

    def __init__(
        self,
        policy: Any,
        operations: Mapping[Hashable, Operation],
        on_progress: Callable[[int, int], None] | None,
        others: Sequence[Sequence[jax.Device]],
    ) -> None:
        self.executables = Executables()
        self.executables.replicas = [Executables() for _ in others]
        self._others = others
        self._first_runs = threading.Lock()
        self._keys = list(operations)
        of_any_policy = {key for key, value in operations.items() if value.of_any_policy}
        self._paths = executable_cache.paths(self._keys, policy, of_any_policy=of_any_policy)
        # Threads have contexts of their own, in which there is no current cache.
        self._cache = program_cache.current()
        self._devices = executable_cache.devices_of(policy)
        self._on_progress = on_progress
        self._pending: dict[concurrent.futures.Future, Hashable] = {}
        self._compiled_in: set[int] = set()  # identifiers of threads in which XLA compiled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "_Compiler":
        if self._paths or self._others:
            self._stack.enter_context(executable_cache.jax_cache_off())
        self._stack.enter_context(_compiling_threads(self._compiled_in))
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._stack.callback(self._pool.shutdown, cancel_futures=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def load_cached(self) -> None:
        """Loads the programs that are in the executable cache."""
        cached = [key for key, path in self._paths.items() if self._cache.has(path.name)]
        if cached:
            fp4_matmul.load_kernel()
        for key in cached:
            self._submit(key, self._load, key)
        self._take(concurrent.futures.as_completed(list(self._pending)))

    def compile_missing(self, operations: dict[Hashable, Operation]) -> None:
        """Compiles the programs that could not be loaded."""
        for key, operation in operations.items():
            if key not in self.executables:
                self._submit(key, self._compile, key, operation.lower())
        self._take(concurrent.futures.as_completed(list(self._pending)))

    def _submit(self, key: Hashable, function: Callable, *arguments: Any) -> None:
        """Starts a thread's work on a program, and takes the programs that are ready."""
        self._pending[self._pool.submit(function, *arguments)] = key
        self._take([future for future in self._pending if future.done()])

    def _take(self, futures: Iterable[concurrent.futures.Future]) -> None:
        for future in futures:
            key = self._pending.pop(future)
            programs = future.result()
            if programs[0] is None:  # A file that cannot be loaded.
                continue
            if self._others:
                programs = [FirstRunAlone(program, self._first_runs) for program in programs]
            for executables, program in zip(
                [self.executables, *self.executables.replicas], programs, strict=True
            ):
                executables[key] = program
            if self._on_progress is not None:
                self._on_progress(len(self.executables), len(self._keys))

    def _load(self, key: Hashable) -> list[jax.stages.Compiled | None]:
        """Loads a program for each device; the first is None where the file cannot be loaded."""
        name = self._paths[key].name
        content = self._cache.read(name)
        if content is None:  # It is not of this user.
            return [None]
        program = executable_cache.load(content, name, self._devices)
        if program is None or not self._others:
            return [program]
        return [program, *self._copies(content)]

    def _compile(self, key: Hashable, lowered: jax.stages.Lowered) -> list[jax.stages.Compiled]:
        """Compiles a program and caches it, unless JAX had it in memory or in its own cache."""
        thread = threading.get_ident()
        self._compiled_in.discard(thread)
        program = lowered.compile()
        if thread in self._compiled_in:
            self.executables.compiled.append(key)
            if key in self._paths:
                self._save(program, self._paths[key].name)
        return [program, *(self._copies(executable_cache.dumps(program)) if self._others else ())]

    def _save(self, program: jax.stages.Compiled, name: str) -> None:
        try:
            self._cache.write(name, executable_cache.dumps(program))
        except Exception as error:  # A full disk, or a program that the backend cannot serialize.
            warnings.warn(f"a compiled program is not cached: {error}", stacklevel=2)

    def _copies(self, content: bytes) -> list[jax.stages.Compiled]:
        devices = self._devices
        return [executable_cache.load_for_devices(content, devices, o) for o in self._others]


@contextlib.contextmanager
def _compiling_threads(threads: set[int]) -> Generator[None]:
    """Adds the identifiers of threads in which XLA compiles, while the block runs."""
    found = set()

    def listen(event: str, duration_secs: float, **labels: str | int) -> None:
        del duration_secs, labels
        thread = threading.get_ident()
        if event == _FOUND:
            found.add(thread)
        elif event == _COMPILATION:
            if thread not in found:
                threads.add(thread)
            found.discard(thread)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def _garbage_collector_off() -> Generator[None]:
    """Switches off Python's garbage collector, which takes a tenth of the time of lowering."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
