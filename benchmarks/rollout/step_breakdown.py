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
    NOTHING_ENDS,
    BenchmarkConfig,
    Subject,
    plan_of,
    sampling_of,
)
from qerl_jax.rollout import decode
from qerl_jax.rollout.programs import bound, dequantized

_REPEATS = 3
_CHUNKS = 4  # chunks that are timed together


class Chunk:
    """Runs the chunks of a generation with the arguments that the engine passes."""

    def __init__(self, subject: Subject, batch: int, new_tokens: int, config: BenchmarkConfig):
        lengths = [config.prompt] * batch
        self.plan = plan_of(subject, lengths, new_tokens, 1, config, max_rows=batch)
        self._config, self._rows = subject.config, batch
        self._sharding = subject.params["embed_tokens"].sharding
        key = jax.random.key(config.seed)
        key, params, lora = bound((key, subject.params, subject.lora))
        rules = decode.rules(subject.config, sampling_of(config, new_tokens, batch), NOTHING_ENDS)
        params = dequantized(params, rules, {})
        dtype = params["embed_tokens"].dtype
        self._policy = key, params, decode.fuse_adapter(lora, config=subject.config, dtype=dtype)
        self._how: dict[str, Any] = {"rules": rules, "steps": self.plan.steps}

    def empty_batch(self) -> decode.Batch:
        """A batch of free slots for all rows."""
        return decode.empty_batch(
            self._rows,
            self.plan.slots,
            config=self._config,
            dtype=self.plan.dtype,
            sharding=self._sharding,
        )

    def lower(self, batch: decode.Batch) -> jax.stages.Lowered:
        """The lowered program for a batch, or for the shapes of a batch."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), batch
        )
        needed = np.ones(self._rows, bool)
        return decode.decode_chunk.lower(*self._policy, shapes, needed, **self._how)

    def run(
        self, batch: decode.Batch, tokens: int, program: jax.stages.Compiled | None = None
    ) -> tuple[decode.Batch, decode.Drawn]:
        """Runs a chunk after `tokens` tokens of each row; `program` replaces the engine's."""
        full = functools.partial(jnp.full, self._rows, device=self._sharding)
        batch = dataclasses.replace(
            batch,
            cache=dataclasses.replace(batch.cache, lengths=full(tokens, jnp.int32)),
            counts=full(0, jnp.int32),
            done=full(False, bool),
        )
        arguments = *self._policy, batch, np.ones(self._rows, bool)
        return program(*arguments) if program else decode.decode_chunk(*arguments, **self._how)


def step_parts(subject: Subject, batch: int, config: BenchmarkConfig) -> dict[str, float]:
    """The parts of a decode step, measured in the middle of the new tokens; {} if a profiler fails.

    Returns:
        What `profile.per_step` returns, and "graphs": the number of CUDA graphs that the engine's
        program launches per step.
    """
    chunk = Chunk(subject, batch, config.new_tokens, config)
    steps = chunk.plan.steps
    middle = config.prompt + (config.new_tokens - steps) // 2
    held = [chunk.empty_batch()]  # A chunk donates its batch and returns the next one.
    key = jax.random.key(config.seed)
    cache = held[0].cache
    for index in range(subject.config.num_layers):
        for arrays in (cache.keys, cache.values):
            key, one = jax.random.split(key)
            drawn = normal(one, arrays[index].shape, jnp.bfloat16, 1.0)
            arrays[index] = drawn.astype(arrays[index].dtype)
    # Kernels in a CUDA graph do not have the names of their instructions.
    observed = chunk.lower(jax.eval_shape(chunk.empty_batch)).compile(
        compiler_options={"xla_gpu_enable_command_buffer": ""}
    )

    def run(program: jax.stages.Compiled | None = None) -> decode.Drawn:
        after, drawn = chunk.run(held.pop(), middle, program)
        held.append(after)
        return drawn

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
        layers=subject.config.num_layers,
    ) | {"graphs": graphs / steps}
