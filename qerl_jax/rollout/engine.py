"""Sampling completions from the policy that is being trained, out of the same arrays.

A prompt is prefilled once, and its keys and values are copied for its group. The rows decode
together in jitted chunks of a fixed number of steps. Between two chunks the host gives the slots of
rows that have ended to rows that wait; when no row waits, the batch is compacted as rows end. The
host reads the samples of a chunk while the device computes the next one, so that the device does
not wait for the host.
"""

import collections
import dataclasses
from collections.abc import Callable, Generator, Sequence

import jax
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.sharding import beside, of_one_device
from qerl_jax.rollout import decode, programs
from qerl_jax.rollout.completions import Completions, Rollout
from qerl_jax.rollout.config import DEFAULT_ENGINE, EngineConfig, SamplingConfig, Tokenizer
from qerl_jax.rollout.programs import Executables
from qerl_jax.rollout.scheduler import Scheduler, Statistics
from qerl_jax.rollout.shapes import plan_shapes


@dataclasses.dataclass(frozen=True)
class RolloutProgress:
    """A rollout so far.

    Attributes:
        rows: number of completions.
        ended_rows: number of completions that have ended.
        tokens: number of tokens sampled.
        statistics: work of the device.
        rollout: the completions so far. The engine writes to its arrays when the generator
            continues; after the last step they are the result.
    """

    rows: int
    ended_rows: int
    tokens: int
    statistics: Statistics
    rollout: Rollout


def generate(
    key: jax.Array,
    params: dict,
    lora: Lora | None,
    prompts: Sequence[Sequence[int]],
    *,
    config: ModelConfig,
    sampling: SamplingConfig,
    tokenizer: Tokenizer,
    engine: EngineConfig = DEFAULT_ENGINE,
    group_size: int = 1,
) -> Rollout:
    """Samples `group_size` completions of every prompt.

    Args:
        key: PRNG key; a sample depends on it, on the row and on the position only.
        params: the policy. Its weights may be cut between devices, on a mesh whose axis `data` is
            1; see `replicas` for a larger one.
        lora: its adapter, or None.
        prompts: P lists of token ids.
        config: the architecture of the whole policy.
        sampling: distribution and length of the completions.
        tokenizer: token ids that end a completion and that follow it; text for stop strings.
        engine: settings of the engine.
        group_size: G, number of completions of each prompt.

    Returns:
        A Rollout of NumPy arrays.

    Raises:
        UserError: there is no prompt, a prompt is empty or too long, or the memory does not hold a
            row.
    """
    steps = generate_steps(
        key,
        params,
        lora,
        prompts,
        config=config,
        sampling=sampling,
        tokenizer=tokenizer,
        engine=engine,
        group_size=group_size,
    )
    (last,) = collections.deque(steps, maxlen=1)
    return last.rollout


def generate_steps(
    key: jax.Array,
    params: dict,
    lora: Lora | None,
    prompts: Sequence[Sequence[int]],
    *,
    config: ModelConfig,
    sampling: SamplingConfig,
    tokenizer: Tokenizer,
    engine: EngineConfig = DEFAULT_ENGINE,
    group_size: int = 1,
    prompt_ids: Sequence[int] | None = None,
    executables: Executables | None = None,
) -> Generator[RolloutProgress, None, Rollout]:
    """Samples as `generate` does, and yields the progress after every chunk.

    The last progress has the whole rollout, which is also what the generator returns. A caller that
    stops early closes the generator, or drops it.

    Args:
        key: as in `generate`.
        params: as in `generate`.
        lora: as in `generate`.
        prompts: as in `generate`.
        config: as in `generate`.
        sampling: as in `generate`.
        tokenizer: as in `generate`.
        engine: as in `generate`.
        group_size: as in `generate`.
        prompt_ids: identity [P] of each prompt, which the samples of its rows depend on; by default
            its index. Pass them when sampling a part of the prompts.
        executables: result of `aot.compile_rollout` for a policy of these shapes on this device;
            by default jit compiles each program when it is first used.

    Raises:
        UserError: as in `generate`.
        RuntimeError: a program is missing from the executables.
    """
    config = of_one_device(config, params)
    shapes = plan_shapes(
        params,
        prompts=len(prompts),
        longest=_longest(prompts, engine.prompt_width),
        group_size=group_size,
        config=config,
        sampling=sampling,
        engine=engine,
    )
    key, params, lora = programs.committed((beside(key, params), params, lora))
    static = decode.decode_config(config, sampling, engine, tokenizer)
    table = programs.operations(key, params, lora, shapes, static)
    executables = programs.jitted(table) if executables is None else executables
    ids = np.arange(len(prompts)) if prompt_ids is None else np.asarray(prompt_ids)
    identities = (ids[:, None] * group_size + np.arange(group_size)).reshape(-1).astype(np.int32)
    completions = Completions(len(identities), sampling, tokenizer)
    scheduler = Scheduler(
        (key, programs.dequantized(params, table, executables), lora),
        prompts,
        identities,
        shapes=shapes,
        table=table,
        executables=executables,
        completions=completions,
        temperature=sampling.divisor,
        pad_id=tokenizer.pad_id,
    )
    try:
        while not completions.ended.all():
            free = scheduler.free_slots()
            while len(free) and scheduler.waiting:
                # 1. Prefill the next prompts, once for all rows of their groups.
                scheduler.prefill()
                # 2. Insert their rows into free slots, and sample their first tokens.
                free = free[scheduler.insert(free) :]
            older = len(scheduler.in_flight)
            if scheduler.active.any():
                # 3. Compact the batch, once no row waits.
                scheduler.compact()
                # 4. Decode a chunk.
                scheduler.decode_chunk()
            # 5. Drain the samples that were in flight before, while the device decodes.
            scheduler.drain(older)
            yield RolloutProgress(
                rows=len(identities),
                ended_rows=int(completions.ended.sum()),
                tokens=int(completions.rollout.lengths.sum()),
                statistics=scheduler.statistics,
                rollout=completions.rollout,
            )
    finally:
        scheduler.close()
    return completions.rollout


def detokenize(rollout: Rollout, decode_text: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the B completions of a rollout as text.

    Args:
        rollout: the completions.
        decode_text: function from token ids to text.
    """
    return [
        decode_text(tokens[:length].tolist())
        for tokens, length in zip(rollout.tokens, rollout.lengths, strict=True)
    ]


def live_fraction(work: Sequence[Statistics]) -> float:
    """Returns the fraction of all decoded row-steps that are live; 1 where none was decoded."""
    decoded = sum(statistics.decoded for statistics in work)
    return sum(statistics.live for statistics in work) / decoded if decoded else 1.0


def _longest(prompts: Sequence[Sequence[int]], prompt_width: int) -> int:
    if not len(prompts):
        raise UserError("there is no prompt to complete: pass at least one")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {number} is empty: it needs at least one token")
    return max(prompt_width, *map(len, prompts))
