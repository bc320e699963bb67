"""Splits the device's time of a decode step by part of the policy.

A chunk of steps runs outside the engine, with the engine's program, under a profiler. The parts are
the `jax.named_scope`s of the policy and of the rollout. The metadata of a compiled program holds
them for each instruction, and kernels are named after or labeled with instructions.
"""

import argparse
import dataclasses
import functools
import pathlib
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData, ProfileEvent, ProfileOptions

from benchmarks.rollout.random_policy import normal
from benchmarks.rollout.subject import Subject, operations_of_steps
from qerl_jax.compile.operation import Programs
from qerl_jax.policy.dequantize import dequantized
from qerl_jax.rollout import decode

PARTS = (
    *("linears", "lora", "attention", "recurrence", "norms", "mlp", "router", "experts"),
    *("head", "sampling", "other"),
)
_PARTS_OF_SOME = "recurrence", "router", "experts"  # that most models do not have

_REPEATS = 3
_CHUNKS = 4  # chunks that are timed together
_FP4 = "fp4_"  # prefix of the names of the Hopper kernel's programs
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\bop_name=\"([^\"]*)\"", re.MULTILINE)

Kernels = list[tuple[str, float]]  # name of instruction or kernel, milliseconds


def step_parts(subject: Subject, batch: int, options: argparse.Namespace) -> dict[str, float]:
    """The parts of a decode step, measured in the middle of the new tokens; {} if a profiler fails.

    They are what `per_step` returns, and "graphs": CUDA graphs that the engine launches per step.
    """
    (key, params, lora), table = operations_of_steps(subject, batch, options)
    programs, operation = Programs(table), table["decode", batch]
    params, adapter = dequantized(params, programs, rows=batch), programs["fuse_adapter"](lora)
    rows = decode.CacheRows(np.arange(batch, dtype=np.int32), np.ones(batch, bool))
    steps = operation.static["steps"]
    middle = options.prompt + (options.new_tokens - steps) // 2
    full = functools.partial(jnp.full, batch, device=key.sharding)
    states = [_random_state(key, operation.arguments()[3])]

    def run(program: Callable[..., Any] = programs["decode", batch]) -> decode.Samples:
        state = dataclasses.replace(
            states.pop(),  # A chunk donates its state, and returns the next one.
            lengths=full(middle, jnp.int32),
            counts=full(0, jnp.int32),
            ended=full(False, bool),
        )
        state, samples = program(key, params, adapter, state, rows, np.float32(1))
        states.append(state)
        return samples

    # Kernels in a CUDA graph do not have the names of their instructions.
    observed = operation.lower().compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    jax.block_until_ready(run())
    walls = []
    for _ in range(_REPEATS):
        first, *others = [run() for _ in range(1 + _CHUNKS)]
        jax.block_until_ready(first)
        began = time.perf_counter()
        jax.block_until_ready(others)
        walls.append(1e3 * (time.perf_counter() - began) / _CHUNKS)
    try:
        graphs = graph_launches(run)
        kernels = device_kernels(lambda: run(observed))
    except Exception as error:  # A failing profiler must not cost the row.
        print(f"no parts: {type(error).__name__}: {error}"[:200], flush=True)
        return {}
    return per_step(
        kernels,
        parts_of(observed.as_text() or ""),
        wall_ms=min(walls),
        steps=steps,
        layers=subject.model_config.num_layers,
    ) | {"graphs": graphs / steps}


def _random_state(key: jax.Array, shapes: decode.DecodeState) -> decode.DecodeState:
    """A state of these shapes with random keys and values; everything else is 0."""
    leaves, treedef = jax.tree.flatten(shapes)

    def array(number: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = jnp.zeros(leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = normal(jax.random.fold_in(key, number), leaf.shape, jnp.bfloat16, 1.0)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.unflatten(treedef, [array(*pair) for pair in enumerate(leaves)])


def parts_of(hlo: str) -> dict[str, str]:
    """The part of each instruction of a compiled program's text, by its name.

    A fusion belongs to the part of its last operation. Products with LoRA's A that are fused into
    the kernels between the projections belong to those kernels. SwiGLU, or adding to the residual,
    belongs to the linears where it is an epilogue of their kernel. In a packed linear, everything
    beside that kernel belongs to the adapter.
    """
    paths = dict(_INSTRUCTION.findall(hlo))
    packed = any(_FP4 in path for path in paths.values())
    return {name: _part(path, packed) for name, path in paths.items()}


def _part(path: str, packed: bool) -> str:
    scopes = [scope for scope in path.split("/") if scope in PARTS]
    if not scopes:
        return "other"
    # The kernel counts its slices in memory that starts at zero.
    kernel = _FP4 in path or path.endswith("/broadcast_in_dim")
    if scopes[-1] == "linears" and packed and not kernel:
        return "lora"
    return scopes[-1]


def _as_kernel(name: str) -> str:
    """Kernels have the names of instructions with underscores in place of dots and dashes."""
    return re.sub(r"\W", "_", name)


def device_kernels(run: Callable[[], Any]) -> Kernels:
    """The kernels that the second call of `run` starts on a GPU, by XLA's profiler.

    It reports the instruction that started each kernel, also for kernels of libraries, unless the
    kernel is in a CUDA graph.
    """
    profiles = _profiles(run, host_tracer_level=0)
    return [kernel for profile in profiles for kernel in kernels_in(profile)]


def graph_launches(run: Callable[[], Any]) -> int:
    """The number of CUDA graphs that the second call of `run` launches."""
    return sum(graph_launches_in(profile) for profile in _profiles(run, host_tracer_level=2))


def graph_launches_in(profile: ProfileData) -> int:
    """The launches of CUDA graphs in a profile."""
    return sum(
        event.name.startswith("cuGraphLaunch")
        for plane in profile.planes
        if plane.name.startswith("/host:")
        for line in plane.lines
        for event in line.events
    )


def _profiles(run: Callable[[], Any], *, host_tracer_level: int) -> list[ProfileData]:
    """The profiles of the second call of `run`, by XLA's profiler."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        options = ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = host_tracer_level, 0
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        files = pathlib.Path(folder).rglob("*.xplane.pb")
        return [ProfileData.from_file(str(file)) for file in files]


def kernels_in(profile: ProfileData) -> Kernels:
    """The kernels of a profile in order of time, named by instruction where it is known."""
    events: list[tuple[float, str, float]] = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # Other lines repeat these events in sums.
            for event in line.events:
                stats = _stats(event)
                if "memcpy_details" in stats or "memset_details" in stats:
                    continue
                name = str(stats.get("hlo_op", event.name))
                events.append((event.start_ns, name, 1e-6 * event.duration_ns))
    return [(name, milliseconds) for _, name, milliseconds in sorted(events)]


def _stats(event: ProfileEvent) -> dict[str | None, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about the iterator's type
        return dict(event.stats)


def per_step(
    kernels: Sequence[tuple[str, float]],
    parts: Mapping[str, str],
    *,
    wall_ms: float,
    steps: int,
    layers: int,
) -> dict[str, float]:
    """Milliseconds of a decode step by part, from the kernels of a chunk of `steps` steps.

    Also "gaps", the time `wall_ms` of a chunk without a kernel, negative where kernels overlap; and
    "kernels_per_layer", the kernels of a step divided by the layers.
    """
    part_of_kernel = {_as_kernel(name): part for name, part in parts.items()}
    times = dict.fromkeys(PARTS, 0.0)
    for name, milliseconds in kernels:
        default = "linears" if _FP4 in name else "other"
        times[part_of_kernel.get(_as_kernel(name), default)] += milliseconds / steps
    times = {part: time for part, time in times.items() if time or part not in _PARTS_OF_SOME}
    times["gaps"] = wall_ms / steps - sum(times.values())
    return {part: round(time, 4) for part, time in times.items()} | {
        "kernels_per_layer": round(len(kernels) / steps / layers, 1)
    }
