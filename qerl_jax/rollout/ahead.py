"""Programs of rollouts compiled ahead of time, a few at a time and by several processes."""

import collections
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels import fp4_matmul
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout import budget, decode, executables, helpers, programs
from qerl_jax.rollout.budget import Plan
from qerl_jax.rollout.programs import Policy, Programs, bound
from qerl_jax.rollout.sampling import SamplingConfig

_FEWEST_FOR_HELPERS = 6  # programs; fewer are lowered before a helper has begun
_MOST_HELPERS = 3
_CORES_OF_HELPER = 6
_COMPILATION = "/jax/core/compile/backend_compile_duration"
_BY_HELPER = "/qerl_jax/rollout/compiled_by_helper"
_FUNCTIONS: tuple[Any, ...] = (
    decode.dequantize,
    decode.read_prompts,
    decode.seat_rows,
    decode.fuse_adapter,
    decode.decode_chunk,
    decode.take_rows,
)


def compile_ahead(
    key: jax.Array,
    params: dict,
    lora: Lora | None,
    *,
    prompts: int,
    prompt_width: int,
    config: ModelConfig,
    sampling: SamplingConfig,
    eos_ids: Sequence[int],
    group_size: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Programs:
    """Compiles every program that `engine.generate` can need for so many prompts.

    Args:
        key: one like those that `generate` gets.
        params: the policy.
        lora: its adapter, or None.
        prompts: P.
        prompt_width: the longest prompt there is.
        config: see `generate`.
        sampling: likewise.
        eos_ids: likewise.
        group_size: G.
        on_progress: called with the programs that are compiled, and all of them.

    Returns:
        What `generate` is given.

    Raises:
        UserError: see `generate`.
    """
    plan = budget.make_plan(
        params,
        prompts=prompts,
        longest=prompt_width,
        group_size=group_size,
        config=config,
        sampling=sampling,
    )
    shapes = [(plan, decode.rules(config, sampling, eos_ids))]
    return compile_programs(bound((key, params, lora)), shapes, on_progress)


def compile_programs(
    policy: Policy,
    shapes: Sequence[tuple[Plan, decode.Rules]],
    on_progress: Callable[[int, int], None] | None = None,
) -> Programs:
    """Loads the programs that are kept, and compiles the others.

    To lower a program is Python's work; meanwhile those before it are compiled, and helpers lower
    and compile others where that saves time.

    Args:
        policy: bound.
        shapes: of `programs.lowerings`.
        on_progress: as in `compile_ahead`.
    """
    lowerings = programs.lowerings(policy, shapes)
    names: list[Any] = list(lowerings)
    paths = executables.paths(names, policy)
    load = functools.partial(executables.load, devices=list(executables.devices_of(policy)))
    uncached = executables.not_cached() if paths else contextlib.nullcontext()
    compilers = _Compilers(len(names), on_progress)
    with uncached, _on_compilation(compilers.note), compilers:

        def load_kept(some: Iterable[Hashable]) -> None:
            if kept := [name for name in some if paths[name].exists()]:
                fp4_matmul.load_kernel()
                for name in kept:
                    compilers.submit(name, load, paths[name])
                compilers.wait()

        def compile_missing(some: Iterable[Hashable]) -> None:
            for name in some:
                if name not in compilers.programs:
                    compilers.compile(name, lowerings[name](), paths.get(name))
            compilers.wait()

        load_kept(paths)
        missing = [number for number, name in enumerate(names) if name not in compilers.programs]
        with programs.uncollected():
            if count := _helpers_for([names[number] for number in missing], paths, policy):
                queue = collections.deque(missing)
                with helpers.Team(count, helpers.task_for(policy, shapes, paths), queue) as team:
                    compile_missing(names[number] for number in helpers.taken(queue))
                    handed_out = [names[number] for number in team.finish()]
                load_kept(handed_out)
                for name in handed_out:
                    if name in compilers.programs:
                        jax.monitoring.record_event(_BY_HELPER, fun_name=f"jit({name[0]})")
            compile_missing(names)
        return compilers.programs


def _helpers_for(
    names: Sequence[Any], paths: Mapping[Hashable, pathlib.Path], policy: Policy
) -> int:
    """How many helpers save time: with kernels of Hopper, to lower takes longer than to begin."""
    slow = sum(name[0] in ("read_prompts", "decode_chunk") for name in names)
    if not paths or slow < _FEWEST_FOR_HELPERS or not fp4_matmul.kernel_runs():
        return 0
    shardings = {type(leaf.sharding) for leaf in jax.tree.leaves(policy)}
    if shardings != {jax.sharding.SingleDeviceSharding}:
        return 0
    return min(_MOST_HELPERS, (os.cpu_count() or 1) // _CORES_OF_HELPER)


class _Compilers:
    """Threads that load or compile programs, until the block is left.

    Attributes:
        programs: what is done, by name.
    """

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self.programs: dict[Any, jax.stages.Compiled] = {}
        self._total, self._on_progress = total, on_progress
        self._pool = concurrent.futures.ThreadPoolExecutor(helpers.COMPILERS)
        self._names: dict[concurrent.futures.Future, Hashable] = {}  # of what is not taken yet
        self._threads: set[int] = set()  # in which XLA compiled

    def __enter__(self) -> "_Compilers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def note(self, _: Any) -> None:
        """Of `_on_compilation`."""
        self._threads.add(threading.get_ident())

    def submit(self, name: Hashable, function: Callable, *arguments: Any) -> None:
        """Lets a thread make a program; takes those that are done."""
        self._names[self._pool.submit(function, *arguments)] = name
        self._take([future for future in self._names if future.done()])

    def compile(
        self, name: Hashable, lowered: jax.stages.Lowered, path: pathlib.Path | None
    ) -> None:
        """Likewise; the program is kept unless jit had it already, maybe from JAX's cache."""
        self.submit(name, self._compile, lowered, path)

    def wait(self) -> None:
        """Takes all programs."""
        self._take(concurrent.futures.as_completed(list(self._names)))

    def _take(self, futures: Iterable[concurrent.futures.Future]) -> None:
        for future in futures:
            name = self._names.pop(future)
            if (program := future.result()) is None:
                continue  # What is kept cannot be loaded.
            self.programs[name] = program
            if self._on_progress is not None:
                self._on_progress(len(self.programs), self._total)

    def _compile(
        self, lowered: jax.stages.Lowered, path: pathlib.Path | None
    ) -> jax.stages.Compiled:
        here = threading.get_ident()
        self._threads.discard(here)
        compiled = lowered.compile()
        if path is not None and here in self._threads:
            try:
                executables.keep(compiled, path)
            except Exception as error:  # A full disk, or what a backend cannot write.
                warnings.warn(f"a compiled program is not kept: {error}", stacklevel=2)
        return compiled


@contextlib.contextmanager
def compilations() -> Generator[list[str]]:
    """The programs of rollouts that are compiled while the block runs, not loaded, by name."""
    names = {f"jit({function.__name__})" for function in _FUNCTIONS}
    compiled: list[str] = []

    def note(name):
        if name in names:
            compiled.append(name)

    with _on_compilation(note):
        yield compiled


@contextlib.contextmanager
def _on_compilation(note: Callable[[Any], None]) -> Generator[None]:
    """Calls `note` with the name of what is compiled, in its thread, while the block runs."""

    def listen(event: str, duration_secs: float, **where: str | int) -> None:
        del duration_secs
        if event == _COMPILATION:
            note(where.get("fun_name"))

    def listen_to_helpers(event: str, **where: str | int) -> None:
        if event == _BY_HELPER:
            note(where.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(listen_to_helpers)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        jax.monitoring.unregister_event_listener(listen_to_helpers)
