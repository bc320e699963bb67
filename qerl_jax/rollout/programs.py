"""The programs of rollouts, for every shape that one needs, compiled ahead of time."""

import concurrent.futures
import contextlib
import functools
import itertools
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import fp4_matmul
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rollout import budget, decode, executables
from qerl_jax.rollout.budget import Plan
from qerl_jax.rollout.sampling import SamplingConfig

# Compiled programs of one policy, by the `Program.name` of each.
Programs = Mapping[Hashable, jax.stages.Compiled]
# Traces and lowers a program.
Lowering = Callable[[], jax.stages.Lowered]

_COMPILERS = max(4, (os.cpu_count() or 1) // 2)  # programs that compile at the same time
_COMPILATION = "/jax/core/compile/backend_compile_duration"
_FUNCTIONS: tuple[Any, ...] = (
    decode.dequantize,
    decode.read_prompts,
    decode.seat_rows,
    decode.fuse_adapter,
    decode.decode_chunk,
    decode.take_rows,
)


class Program(NamedTuple):
    """A jitted function for some shapes.

    Attributes:
        function: what is jitted.
        static: its static arguments.
        name: identifies it among the programs of a policy.
    """

    function: Any
    static: dict[str, Any]
    name: Hashable

    def run(self, programs: Programs, *arguments: Any) -> Any:
        """Calls it as it was compiled ahead of time, or lets jit compile it."""
        if self.name in programs:
            return programs[self.name](*arguments)
        return self.function(*arguments, **self.static)


def dequantized(params: dict, rules: decode.Rules, programs: Programs) -> dict:
    """The policy as a rollout reads it: what the rules let be dequantised once is dense."""
    if not _packed(params, rules):
        return params
    return transformer.dequantize_params(
        params, functools.partial(dequantize(params).run, programs)
    )


def _packed(params: dict, rules: decode.Rules) -> list[QuantTensor]:
    return [] if rules.dequantize == "step" else transformer.packed_weights(params)


def dequantize(params: dict) -> Program:
    """`decode.dequantize` for a policy."""
    return _program(decode.dequantize, {"dtype": params["embed_tokens"].dtype})


def read_prompts(plan: Plan, rules: decode.Rules, width: int) -> Program:
    """`decode.read_prompts` of prompts [P, T] padded to a width."""
    static = {"config": rules.config, "dtype": plan.dtype}
    return _program(decode.read_prompts, static, plan.prompts, width, rules.dequantize)


def seat_rows(plan: Plan, rules: decode.Rules, width: int, count: int) -> Program:
    """`decode.seat_rows` for so many rows, whose prompts were read in a width."""
    shapes = plan.batches[0], plan.slots, plan.dtype, plan.prompts, width, count
    return _program(decode.seat_rows, {"rules": rules}, *shapes)


def fuse_adapter(rules: decode.Rules, params: dict) -> Program:
    """`decode.fuse_adapter` for a policy."""
    static = {"config": rules.config, "dtype": params["embed_tokens"].dtype}
    return _program(decode.fuse_adapter, static)


def decode_chunk(plan: Plan, rules: decode.Rules, rows: int) -> Program:
    """`decode.decode_chunk` of a batch of so many rows."""
    static = {"rules": rules, "steps": plan.steps}
    return _program(decode.decode_chunk, static, rows, plan.slots, plan.dtype)


def take_rows(x: jax.Array | jax.ShapeDtypeStruct, count: int) -> Program:
    """`decode.take_rows` of so many rows of an array."""
    return _program(decode.take_rows, {}, x.shape, x.dtype, count)


def _program(function, static, *shapes) -> Program:
    return Program(function, static, (function.__name__, *shapes, *static.values()))


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
    rules = decode.rules(config, sampling, eos_ids)
    policy = key, params, lora = bound((key, params, lora))
    needed = lowerings(key, params, lora, plan, rules=rules)
    return compile_programs(needed, policy, on_progress)


def lowerings(
    key: jax.Array, params: dict, lora: Lora | None, plan: Plan, *, rules: decode.Rules
) -> dict[Hashable, Lowering]:
    """What lowers each program of a rollout, by its name.

    Args:
        key: one like those that `generate` gets, bound.
        params: the policy, likewise.
        lora: its adapter, or None.
        plan: the shapes.
        rules: the rest.
    """
    arguments = _Arguments(key, params, lora, plan, rules)
    needed: list[tuple[Any, ...]] = []
    if arguments.packed:
        needed.append((dequantize(params), arguments.dequantize))
    for width in plan.widths:
        needed.append((read_prompts(plan, rules, width), arguments.read_prompts, width))
        for count in plan.seatings:
            seat = seat_rows(plan, rules, width, count)
            needed.append((seat, arguments.seat_rows, width, count))
    if plan.steps:
        needed.append((fuse_adapter(rules, params), arguments.fuse_adapter))
        for rows in plan.batches:
            needed.append((decode_chunk(plan, rules, rows), arguments.decode_chunk, rows))
    for rows, smaller in itertools.pairwise(plan.batches):
        for x in jax.tree.leaves(arguments.batch(rows)):
            needed.append((take_rows(x, smaller), arguments.take_rows, x, smaller))
    return {program.name: functools.partial(_lower, program, *how) for program, *how in needed}


def _lower(program: Program, arguments: Callable, *shapes: Any) -> jax.stages.Lowered:
    return program.function.lower(*arguments(*shapes), **program.static)


class _Arguments:
    """What the programs are lowered for, bound like what they are called with."""

    def __init__(self, key, params, lora, plan, rules):
        self._key, self._params, self._lora = key, params, lora
        self._plan, self._rules = plan, rules
        self.packed = _packed(params, rules)
        if self.packed:
            self._params = transformer.dequantize_params(
                params, lambda _: self._result(dequantize(params), self.dequantize())
            )

    def _bound(self, tree):
        sharding = self._params["embed_tokens"].sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def _result(self, program, arguments):
        return self._bound(program.function.eval_shape(*arguments, **program.static))

    def batch(self, rows):
        how = {"config": self._rules.config, "dtype": self._plan.dtype}
        return self._bound(
            jax.eval_shape(lambda: decode.empty_batch(rows, self._plan.slots, **how))
        )

    def dequantize(self):
        return (self.packed,)

    def read_prompts(self, width):
        prompts = self._plan.prompts
        return self._params, self._lora, *_integers((prompts, width), prompts)

    def seat_rows(self, width, count):
        read = self._result(read_prompts(self._plan, self._rules, width), self.read_prompts(width))
        batch = self.batch(self._plan.batches[0])
        return self._key, batch, read, *_integers(count, count, count)

    def fuse_adapter(self):
        return (self._lora,)

    def decode_chunk(self, rows):
        fused = self._result(fuse_adapter(self._rules, self._params), self.fuse_adapter())
        return self._key, self._params, fused, self.batch(rows), np.zeros(rows, bool)

    def take_rows(self, x, count):
        return x, *_integers(count)


def compile_programs(
    needed: Mapping[Hashable, Lowering],
    policy: Any,
    on_progress: Callable[[int, int], None] | None = None,
) -> Programs:
    """Loads the programs that are kept, and compiles the others a few at a time.

    Args:
        needed: of `lowerings`.
        policy: the key, the policy and its adapter, bound.
        on_progress: as in `compile_ahead`.
    """
    paths = executables.paths(needed, policy)
    kept = {name: path for name, path in paths.items() if path.exists()}
    programs: dict[Hashable, jax.stages.Compiled] = {}

    threads: set[int] = set()  # in which XLA compiled

    def take(names):
        for future in concurrent.futures.as_completed(names):
            if (program := future.result()) is None:
                continue
            programs[names[future]] = program
            if on_progress is not None:
                on_progress(len(programs), len(needed))

    uncached = executables.not_cached() if paths else contextlib.nullcontext()
    with uncached, _on_compilation(lambda _: threads.add(threading.get_ident())):
        pool = concurrent.futures.ThreadPoolExecutor(_COMPILERS)
        try:
            if kept:
                fp4_matmul.load_kernel()
                devices = list(executables.devices_of(policy))
                load = functools.partial(executables.load, devices=devices)
                take({pool.submit(load, path): name for name, path in kept.items()})
            # While one is lowered, which is Python's work, others are compiled.
            take(
                {
                    pool.submit(_compile, lower(), paths.get(name), threads): name
                    for name, lower in needed.items()
                    if name not in programs
                }
            )
        finally:
            pool.shutdown(cancel_futures=True)
    return programs


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

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def bound(tree: Any) -> Any:
    """The arrays bound to where they are: unbound ones would compile to programs of their own."""
    leaves, treedef = jax.tree.flatten(tree)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    return jax.tree.unflatten(treedef, jax.device_put(leaves, shardings))


def _integers(*shapes: int | tuple[int, ...]) -> list[np.ndarray]:
    return [np.zeros(shape, np.int32) for shape in shapes]


def _compile(
    lowered: jax.stages.Lowered, path: pathlib.Path | None, threads: set[int]
) -> jax.stages.Compiled:
    """Compiles a program, and keeps it unless jit had it already, maybe from JAX's cache."""
    here = threading.get_ident()
    threads.discard(here)
    compiled = lowered.compile()
    if path is not None and here in threads:
        try:
            executables.keep(compiled, path)
        except Exception as error:  # A full disk, or what a backend cannot write.
            warnings.warn(f"a compiled program is not kept: {error}", stacklevel=2)
    return compiled
