"""The programs of rollouts: what they are, compiled ahead, and kept for the next process.

With JAX's cache of compiled programs a process need not compile, but it traces and lowers, which is
Python's work and, with kernels of Pallas in them, the longest part of a start. So on a GPU the
programs lie in that cache's folder as they are loaded, named after a digest of all that makes them.
"""

import concurrent.futures
import contextlib
import hashlib
import importlib
import itertools
import os
import pathlib
import pickle
import tempfile
import warnings
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.fp4_matmul import load_kernel
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout import budget, decode
from qerl_jax.rollout.budget import Plan
from qerl_jax.rollout.sampling import SamplingConfig

# Compiled programs, by the `Program.name` of each.
Programs = Mapping[Hashable, jax.stages.Compiled]
# What lowers a program.
Lowering = Callable[[], jax.stages.Lowered]

_COMPILERS = max(4, (os.cpu_count() or 1) // 2)  # programs that compile at the same time
_PACKAGES = ("qerl_jax", "pallas_kernels")
_COMPILATION = "/jax/core/compile/backend_compile_duration"
_FUNCTIONS = ("read_prompts", "seat_rows", "fuse_adapter", "decode_chunk", "take_rows")


class Program(NamedTuple):
    """A jitted function for some shapes.

    Attributes:
        function: what is jitted.
        static: its static arguments.
        name: what makes it another program, for a policy.
    """

    function: Any
    static: dict[str, Any]
    name: Hashable

    def run(self, programs: Programs, *arguments: Any) -> Any:
        """Calls it compiled ahead if it is one of the programs, or lets jit compile it."""
        if self.name in programs:
            return programs[self.name](*arguments)
        return self.function(*arguments, **self.static)


def read_prompts(plan: Plan, rules: decode.Rules, width: int) -> Program:
    """`decode.read_prompts` of prompts [P, T] padded to a width."""
    static = {"config": rules.config, "dtype": plan.dtype}
    return _program(decode.read_prompts, static, plan.prompts, width)


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
    needed = lowerings(key, params, lora, plan, rules=rules)
    return compile_programs(needed, (key, params, lora), on_progress)


def lowerings(
    key: jax.Array, params: dict, lora: Lora | None, plan: Plan, *, rules: decode.Rules
) -> dict[Hashable, Lowering]:
    """What lowers each program of a rollout, by its name.

    Args:
        key: one like those that `generate` gets.
        params: the policy.
        lora: its adapter, or None.
        plan: the shapes.
        rules: the rest.
    """
    key, params, lora = bound((key, params, lora))
    sharding = params["embed_tokens"].sharding
    found: dict[Hashable, Lowering] = {}

    def bound_shapes(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def batch(rows):
        how = {"config": rules.config, "dtype": plan.dtype}
        return bound_shapes(jax.eval_shape(lambda: decode.empty_batch(rows, plan.slots, **how)))

    def add(program, arguments):
        """With a function that gives the arguments: what they are may take a trace."""
        found[program.name] = lambda: program.function.lower(*arguments(), **program.static)

    for width in plan.widths:
        read = read_prompts(plan, rules, width)
        prompts = params, lora, *_integers((plan.prompts, width), plan.prompts)
        add(read, lambda prompts=prompts: prompts)

        def to_seat(count, read=read, prompts=prompts):
            shapes = bound_shapes(read.function.eval_shape(*prompts, **read.static))
            return key, batch(plan.batches[0]), shapes, *_integers(count, count, count)

        for count in plan.seatings:
            add(seat_rows(plan, rules, width, count), lambda count=count, f=to_seat: f(count))
    if plan.steps:
        fuse = fuse_adapter(rules, params)
        add(fuse, lambda: (lora,))

        def to_decode(rows):
            fused = bound_shapes(fuse.function.eval_shape(lora, **fuse.static))
            return key, params, fused, batch(rows), np.zeros(rows, bool)

        for rows in plan.batches:
            add(decode_chunk(plan, rules, rows), lambda rows=rows: to_decode(rows))
    for rows, smaller in itertools.pairwise(plan.batches):
        for x in jax.tree.leaves(batch(rows)):
            add(take_rows(x, smaller), lambda x=x, count=smaller: (x, *_integers(count)))
    return found


def compile_programs(
    needed: Mapping[Hashable, Lowering],
    policy: Any,
    on_progress: Callable[[int, int], None] | None = None,
) -> Programs:
    """Loads the programs that are kept, and compiles the others a few at a time.

    Args:
        needed: of `lowerings`.
        policy: the key, the policy and its adapter.
        on_progress: as in `compile_ahead`.
    """
    paths = _paths(needed, policy)
    kept = {name: path for name, path in paths.items() if path.exists()}
    if kept:
        load_kernel()
    programs: dict[Hashable, jax.stages.Compiled] = {}
    pool = concurrent.futures.ThreadPoolExecutor(_COMPILERS)

    def take(futures):
        names = {future: name for name, future in futures.items()}
        for future in concurrent.futures.as_completed(names):
            if (program := future.result()) is None:
                continue
            programs[names[future]] = program
            if on_progress is not None:
                on_progress(len(programs), len(needed))

    try:
        take({name: pool.submit(_load, path) for name, path in kept.items()})
        missing = {name: lower for name, lower in needed.items() if name not in programs}
        with _not_cached() if paths else contextlib.nullcontext():
            # While one is lowered, which is Python's work, others are compiled.
            take(
                {
                    name: pool.submit(_compile, lower(), paths.get(name))
                    for name, lower in missing.items()
                }
            )
    finally:
        pool.shutdown(cancel_futures=True)
    return programs


@contextlib.contextmanager
def compilations() -> Generator[list[str]]:
    """The programs of rollouts that jit compiles while the block runs, by name."""
    names = {f"jit({name})" for name in _FUNCTIONS}
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **where: str | int) -> None:
        del duration_secs
        if event == _COMPILATION and where.get("fun_name") in names:
            compiled.append(str(where["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def bound(tree: Any) -> Any:
    """The arrays bound to where they are: unbound ones would compile to programs of their own."""
    leaves, treedef = jax.tree.flatten(tree)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    return jax.tree.unflatten(treedef, jax.device_put(leaves, shardings))


def _integers(*shapes: int | tuple[int, ...]) -> list[np.ndarray]:
    return [np.zeros(shape, np.int32) for shape in shapes]


# --- The folder -----------------------------------------------------------------------------------


def _paths(names: Mapping[Hashable, Any], policy: Any) -> dict[Hashable, pathlib.Path]:
    """Where programs are kept; nothing where JAX's cache is none or is no folder."""
    folder = jax.config.jax_compilation_cache_dir if _keeps() else None
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return {}
    origin = _origin(policy)
    digests = {name: hashlib.sha256(f"{origin} {name}".encode()).hexdigest() for name in names}
    return {name: pathlib.Path(folder, f"rollout-{digests[name]}") for name in names}


def _keeps() -> bool:
    """On a CPU to lower takes less than a second, and to load hardly less."""
    return jax.default_backend() == "gpu"


@contextlib.contextmanager
def _not_cached() -> Generator[None]:
    """JAX's cache off: it would hold the same again, and what it gives may not be written anew."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def _origin(policy: Any) -> str:
    """All that programs depend on beside their names."""
    leaves, treedef = jax.tree.flatten(policy)
    shapes = [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
    settings = {
        name: value for name, value in sorted(jax.config.values.items()) if "cache" not in name
    }
    devices = [device.device_kind for device in jax.devices()]
    versions = jax.__version__, jaxlib.__version__, jax.devices()[0].client.platform_version
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{_sources()} {versions} {devices} {flags} {settings} {treedef} {shapes}"


def _sources() -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        folder = pathlib.Path(importlib.import_module(package).__path__[0])
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(lowered: jax.stages.Lowered, path: pathlib.Path | None) -> jax.stages.Compiled:
    compiled = lowered.compile()
    if path is not None:
        try:
            _keep(compiled, path)
        except Exception as error:  # What a backend that cannot write programs raises.
            warnings.warn(f"a compiled program is not kept: {error}", stacklevel=2)
    return compiled


def _keep(compiled: jax.stages.Compiled, path: pathlib.Path) -> None:
    """Writes a program, so that its file is whole or not there."""
    program, *treedefs = serialize_executable.serialize(compiled)
    trees = [jax.tree.unflatten(treedef, range(treedef.num_leaves)) for treedef in treedefs]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(pickle.dumps((program, trees)))
    os.replace(file.name, path)


def _load(path: pathlib.Path) -> jax.stages.Compiled | None:
    """A program that was kept; None where it cannot be loaded."""
    try:
        program, trees = pickle.loads(path.read_bytes())
        return serialize_executable.deserialize_and_load(program, *map(jax.tree.structure, trees))
    except Exception as error:  # A file that is broken, or what a driver refuses.
        warnings.warn(f"{path.name}: compiling again ({error})", stacklevel=2)
        return None
