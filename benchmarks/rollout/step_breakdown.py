"""The parts of a decode step, from chunks that run outside the engine under a profiler."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rollout.profile import device_kernels, graph_launches, parts_of, per_step
from benchmarks.rollout.random_policy import normal
from benchmarks.rollout.subject import (
    NO_TEXT,
    BenchmarkConfig,
    Subject,
    engine_of,
    plan_of,
    sampling_of,
)
from qerl_jax.compile.operation import Programs, commit
from qerl_jax.policy.dequantize import dequantized
from qerl_jax.rollout import decode
from qerl_jax.rollout.programs import operations

_REPEATS = 3
_CHUNKS = 4  # chunks that are timed together


class Chunk:
    """Runs the chunks of a generation with the arguments that the engine passes."""

    def __init__(self, subject: Subject, batch: int, new_tokens: int, options: BenchmarkConfig):
        lengths = [options.prompt] * batch
        self.plan = plan_of(subject, lengths, new_tokens, 1, options, max_rows=batch)
        self._model_config, self._rows = subject.model_config, batch
        self._sharding = subject.params["embed_tokens"].sharding
        key = jax.random.key(options.seed)
        key, policy = commit((key, subject.policy))
        static = decode.decode_config(
            subject.model_config, sampling_of(new_tokens), engine_of(options, batch), NO_TEXT
        )
        programs = Programs(operations(key, policy, self.plan, static))
        params = dequantized(policy.params, programs)
        dtype = params["embed_tokens"].dtype
        fused = decode.fuse_adapter(policy.lora, model_config=subject.model_config, dtype=dtype)
        self._policy = key, params, fused
        self._static: dict[str, Any] = {"config": static, "steps": self.plan.chunk_steps}

    def empty_state(self) -> decode.DecodeState:
        """Returns a state with an empty slot for every row."""
        return decode.empty_state(
            self._rows,
            self.plan.cache_positions,
            model_config=self._model_config,
            dtype=self.plan.dtype,
            sharding=self._sharding,
        )

    def lower(self, state: decode.DecodeState) -> jax.stages.Lowered:
        """Lowers the program for a state, or for the shapes of a state."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), state
        )
        return decode.decode_chunk.lower(*self._policy, shapes, *self._all_rows, **self._static)

    @property
    def _all_rows(self) -> tuple[decode.CacheRows, np.float32]:
        """All cache rows, and the temperature."""
        slots, active = np.arange(self._rows, dtype=np.int32), np.ones(self._rows, bool)
        return decode.CacheRows(slots, active), np.float32(1)

    def run(
        self, state: decode.DecodeState, tokens: int, program: jax.stages.Compiled | None = None
    ) -> tuple[decode.DecodeState, decode.Samples]:
        """Runs a chunk after `tokens` tokens of each row, with the engine's program by default."""
        full = functools.partial(jnp.full, self._rows, device=self._sharding)
        state = dataclasses.replace(
            state,
            lengths=full(tokens, jnp.int32),
            counts=full(0, jnp.int32),
            done=full(False, bool),
        )
        arguments = *self._policy, state, *self._all_rows
        return program(*arguments) if program else decode.decode_chunk(*arguments, **self._static)


def step_parts(subject: Subject, batch: int, options: BenchmarkConfig) -> dict[str, float]:
    """The parts of a decode step, measured in the middle of the new tokens; {} if a profiler fails.

    Returns:
        What `profile.per_step` returns, and "graphs": the number of CUDA graphs that the engine's
        program launches per step.
    """
    chunk = Chunk(subject, batch, options.new_tokens, options)
    steps = chunk.plan.chunk_steps
    middle = options.prompt + (options.new_tokens - steps) // 2
    key, state = jax.random.key(options.seed), chunk.empty_state()
    arrays, treedef = jax.tree.flatten(state.layers)
    state = dataclasses.replace(state, layers=[])  # Each array is freed as it is replaced.
    for index in range(len(arrays)):
        key, subkey = jax.random.split(key)
        values = normal(subkey, arrays[index].shape, jnp.bfloat16, 1.0)
        arrays[index] = values.astype(arrays[index].dtype)
    # A chunk donates its state, and returns the next one.
    states = [dataclasses.replace(state, layers=treedef.unflatten(arrays))]
    del arrays
    # Kernels in a CUDA graph do not have the names of their instructions.
    observed = chunk.lower(jax.eval_shape(chunk.empty_state)).compile(
        compiler_options={"xla_gpu_enable_command_buffer": ""}
    )

    def run(program: jax.stages.Compiled | None = None) -> decode.Samples:
        next_state, values = chunk.run(states.pop(), middle, program)
        states.append(next_state)
        return values

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
