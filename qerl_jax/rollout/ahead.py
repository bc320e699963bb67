"""Programs of rollouts compiled ahead of time, a few at a time and by several processes."""

import collections
import concurrent.futures
import contextlib
import os
import pathlib
import threading
import time
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

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_COMPILERS = max(4, _CORES // 2)  # programs that compile at the same time
_FEWEST_FOR_HELPERS = 6  # programs; fewer are lowered before a helper has begun
_MOST_HELPERS = 3
_CORES_OF_HELPER = 6
_PATIENCE = 300.0  # seconds, with a helper that took programs and keeps none
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
    with _Compilation(policy, shapes, on_progress) as work:
        work.load_kept(work.names)
        with programs.uncollected():
            work.compile_with_helpers()
            work.compile_missing(work.names)
        return work.programs


class _Compilation:
    """Threads that load or compile programs, until the block is left.

    Attributes:
        names: of all programs, in the order of `programs.lowerings`.
        programs: what is done, by name.
    """

    def __init__(
        self,
        policy: Policy,
        shapes: Sequence[tuple[Plan, decode.Rules]],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.programs: dict[Any, jax.stages.Compiled] = {}
        self._policy, self._shapes = policy, shapes
        self._lowerings = programs.lowerings(policy, shapes)
        self.names: list[Any] = list(self._lowerings)
        self._paths = executables.paths(self.names, policy)
        self._devices = list(executables.devices_of(policy))
        self._on_progress = on_progress
        self._pending: dict[concurrent.futures.Future, Any] = {}  # names
        self._threads: set[int] = set()  # in which XLA compiled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "_Compilation":
        if self._paths:
            self._stack.enter_context(executables.not_cached())
        note = _on_compilation(lambda _: self._threads.add(threading.get_ident()))
        self._stack.enter_context(note)
        self._pool = concurrent.futures.ThreadPoolExecutor(_COMPILERS)
        self._stack.callback(self._pool.shutdown, cancel_futures=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def load_kept(self, names: Iterable[Any]) -> set[Any]:
        """Loads the programs that are kept, and returns the names of these."""
        kept = {name for name in names if name in self._paths and self._paths[name].exists()}
        if kept:
            fp4_matmul.load_kernel()
        for name in kept:
            self._submit(name, executables.load, self._paths[name], self._devices)
        self._wait()
        return kept

    def compile_missing(self, names: Iterable[Any]) -> None:
        """Compiles the programs that are not there; takes names while others are compiled."""
        for name in names:
            if name not in self.programs:
                self._submit(name, self._compile, self._lowerings[name](), self._paths.get(name))
        self._wait()

    def compile_with_helpers(self) -> None:
        """Compiles what is missing beside helpers, if they save time, all but what they fail at."""
        missing = [number for number, name in enumerate(self.names) if name not in self.programs]
        count = _helpers_for([self.names[number] for number in missing], self._paths, self._policy)
        if not count:
            return
        queue = collections.deque(missing)
        task = helpers.task_for(self._policy, self._shapes, self._paths, max(2, _COMPILERS // 2))
        with helpers.Team(count, task, queue) as team:
            self.compile_missing(self.names[number] for number in helpers.taken(queue))
            self._load_from(team)
            for reason in team.failures():
                warnings.warn(
                    f"a process that helps to compile rollout programs ended: {reason}; what it "
                    "left undone is compiled here",
                    stacklevel=2,
                )

    def _load_from(self, team: helpers.Team) -> None:
        """Loads what helpers keep until they have kept all, have ended, or seem to hang."""
        missing, news = {self.names[number] for number in team.dismiss()}, time.monotonic()
        while missing:
            at_work = team.at_work()
            if kept := self.load_kept(missing):
                missing, news = missing - kept, time.monotonic()
                for function, *_ in kept & self.programs.keys():
                    jax.monitoring.record_event(_BY_HELPER, fun_name=f"jit({function})")
            elif not at_work or time.monotonic() - news > _PATIENCE:
                break
            else:
                self._report()
                time.sleep(0.1)
        if missing and at_work:
            warnings.warn(
                f"processes that help to compile rollout programs kept none for {_PATIENCE:.0f} s; "
                "what they left undone is compiled here",
                stacklevel=2,
            )
            team.end()

    def _submit(self, name: Any, function: Callable, *arguments: Any) -> None:
        """Lets a thread make a program; takes those that are done."""
        self._pending[self._pool.submit(function, *arguments)] = name
        self._take([future for future in self._pending if future.done()])

    def _wait(self) -> None:
        self._take(concurrent.futures.as_completed(list(self._pending)))

    def _take(self, futures: Iterable[concurrent.futures.Future]) -> None:
        for future in futures:
            name = self._pending.pop(future)
            if (program := future.result()) is not None:  # else it cannot be loaded
                self.programs[name] = program
                self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(len(self.programs), len(self.names))

    def _compile(
        self, lowered: jax.stages.Lowered, path: pathlib.Path | None
    ) -> jax.stages.Compiled:
        """Compiles a program, and keeps it unless jit had it already, maybe from JAX's cache."""
        here = threading.get_ident()
        self._threads.discard(here)
        compiled = lowered.compile()
        if path is not None and here in self._threads:
            try:
                executables.keep(compiled, path)
            except Exception as error:  # A full disk, or what a backend cannot write.
                warnings.warn(f"a compiled program is not kept: {error}", stacklevel=2)
        return compiled


def _helpers_for(
    names: Sequence[Any], paths: Mapping[Hashable, pathlib.Path], policy: Policy
) -> int:
    """How many helpers save time: with kernels of Hopper, to lower takes longer than to begin."""
    slow = sum(name[0] in ("read_prompts", "decode_chunk") for name in names)
    if not paths or slow < _FEWEST_FOR_HELPERS or not fp4_matmul.supports_device():
        return 0
    sharding, *others = {leaf.sharding for leaf in jax.tree.leaves(policy)}
    if others or not isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return 0
    return min(_MOST_HELPERS, _CORES // _CORES_OF_HELPER)


@contextlib.contextmanager
def compilations() -> Generator[list[str]]:
    """The programs of rollouts that are compiled while the block runs, not loaded, by name.

    Those that helpers compile are among them.
    """
    names = {f"jit({function.__name__})" for function in _FUNCTIONS}
    compiled: list[str] = []

    def note(name):
        if name in names:
            compiled.append(name)

    def listen_to_helpers(event: str, **where: str | int) -> None:
        if event == _BY_HELPER:
            note(where.get("fun_name"))

    jax.monitoring.register_event_listener(listen_to_helpers)
    try:
        with _on_compilation(note):
            yield compiled
    finally:
        jax.monitoring.unregister_event_listener(listen_to_helpers)


@contextlib.contextmanager
def _on_compilation(note: Callable[[Any], None]) -> Generator[None]:
    """Calls `note` with the name of what is compiled, in its thread, while the block runs."""

    def listen(event: str, duration_secs: float, **where: str | int) -> None:
        del duration_secs
        if event == _COMPILATION:
            note(where.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
