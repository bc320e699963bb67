"""The functions that the device runs for a rollout: prefill, insert, decode a chunk, compact.

Rows decode together in a batch of fixed size. Each row occupies a slot, and a row that has ended
leaves its slot to the next row that waits. The state of the batch stays on the device.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pallas_kernels.decode import to_cache
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.policy.attention import KVCache
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.sharding import head_sharding
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, Tokenizer, TurnConfig
from qerl_jax.rollout.sampling import row_keys, sample

# Without autotuning of matmuls: the search takes longer than the rest of the compilation, chooses
# differently while the device is busy, and finds nothing faster than the library's choice.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static arguments of the programs, apart from shapes.

    Attributes:
        model: the architecture of one device, see `tensor_parallel.shard_of`.
        sampling: distribution and length of completions, without stop strings, which the host
            looks for. Of the temperature it holds only whether it is 0: its value is an argument,
            so that a run may change it.
        eos_ids: token ids that end a row.
        dequantize: 'once' or 'step', see `EngineConfig`.
        turn_limit: number of tokens at which the first turn of a row is cut off; None where rows
            do not talk to environments.
    """

    model: ModelConfig
    sampling: SamplingConfig
    eos_ids: tuple[int, ...]
    dequantize: str
    turn_limit: int | None = None


def decode_config(
    model: ModelConfig,
    sampling: SamplingConfig,
    engine: EngineConfig,
    tokenizer: Tokenizer,
    turns: TurnConfig | None = None,
) -> DecodeConfig:
    """Returns the static arguments of the programs of a rollout."""
    return DecodeConfig(
        model=model,
        sampling=dataclasses.replace(
            sampling, stop=(), temperature=0.0 if sampling.greedy else 1.0
        ),
        eos_ids=tuple(tokenizer.eos_ids),
        dequantize=engine.dequantize,
        turn_limit=None if turns is None else turns.next_turn(0, 0, sampling.max_new_tokens),
    )


@struct.dataclass
class DecodeState:
    """The batch on the device: R cache rows that decode, and the state of all B slots.

    Compaction gathers cache rows and leaves the state of the slots where it is. So R shrinks and B
    does not, and `decode_chunk` takes the slot of each cache row.

    An inactive slot is done. It is still decoded, as shapes are static, but attends to one key
    only, and its values are undefined.

    Attributes:
        keys: keys [R, K, S, H] of every layer, of the prompt and of all tokens but the last. As in
            `KVCache`, a recurrent layer has a state in their place, float32 [R, N, Dk, Dv].
        values: values [R, K, T, H] of every layer; or a window, float32 [R, channels, W - 1].
        lengths: int32 [B], number of filled cache positions.
        rows: int32 [B], identity of the row in each slot, which its samples depend on.
        counts: int32 [B], number of tokens sampled.
        last: int32 [B], the newest token.
        done: bool [B], whether the row has ended or the slot is empty.
        limits: int32 [B], number of sampled tokens at which the row's turn is cut off: a state of
            recurrence cannot go back to it. None where all rows have one turn.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    lengths: jax.Array
    rows: jax.Array
    counts: jax.Array
    last: jax.Array
    done: jax.Array
    limits: jax.Array | None = None


@struct.dataclass
class Prefilled:
    """P prompts after prefill.

    Attributes:
        logits: float32 [P, V] after the last token of each prompt.
        cache: keys and values [P, K, T, H] of every layer, or the state and the window after each
            prompt.
    """

    logits: jax.Array
    cache: KVCache


class CacheRows(NamedTuple):
    """The cache rows of a chunk.

    Attributes:
        slots: int32 [R], slot of each cache row, all different.
        active: bool [R]; a row that is not active is done from now on.
    """

    slots: jax.Array | np.ndarray
    active: jax.Array | np.ndarray


@struct.dataclass
class Samples:
    """Sampled tokens [R, steps] with log-probabilities and entropies, as in `sampling.sample`.

    Values past the end of a row are undefined.
    """

    tokens: jax.Array
    logprobs: jax.Array
    entropies: jax.Array


def empty_state(
    slots: int,
    cache_positions: int,
    *,
    model_config: ModelConfig,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None = None,
    has_turns: bool = False,
) -> DecodeState:
    """Returns a state in which all slots are empty.

    Args:
        slots: B, which is also the number of cache rows.
        cache_positions: S, cache positions of each row.
        model_config: the architecture of one device.
        dtype: dtype of the cache.
        sharding: placement of the arrays but for the cache, which is cut by heads where the weights
            are cut. They are committed to it, as the results of the programs are: committed and
            uncommitted arrays would compile to two programs.
        has_turns: whether rows talk to environments.
    """
    shards = model_config.shards
    shape = (slots, shards * model_config.num_kv_heads, cache_positions, model_config.head_dim)
    cache = head_sharding(sharding)

    def empty(of_recurrence: tuple[int, ...]) -> list[jax.Array]:
        first, *rest = of_recurrence
        return [
            jnp.zeros((slots, shards * first, *rest), jnp.float32, device=cache)
            if layer in model_config.recurrent_layers
            else jnp.zeros(shape, dtype, device=cache)
            for layer in range(model_config.num_layers)
        ]

    state, window = model_config.recurrent.row_shapes if model_config.recurrent else ((0,), (0,))
    return DecodeState(
        keys=empty(state),
        values=empty(window),
        lengths=jnp.zeros(slots, jnp.int32, device=sharding),
        rows=jnp.zeros(slots, jnp.int32, device=sharding),
        counts=jnp.zeros(slots, jnp.int32, device=sharding),
        last=jnp.zeros(slots, jnp.int32, device=sharding),
        done=jnp.ones(slots, bool, device=sharding),
        limits=jnp.zeros(slots, jnp.int32, device=sharding) if has_turns else None,
    )


@functools.partial(
    jax.jit, static_argnames=("model_config", "dtype", "width", "shared"), compiler_options=UNTUNED
)
def prefill(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    model_config: ModelConfig,
    dtype: jnp.dtype,
    width: int,
    shared: int,
) -> Prefilled:
    """Computes logits, keys and values of prompts.

    Args:
        params: the policy.
        lora: its adapter, or None.
        tokens: int32 [P, W] prompts, padded on the right.
        lengths: int32 [P], number of tokens of each prompt.
        model_config: the architecture.
        dtype: dtype of the cache.
        width: T >= W, number of positions that keys and values are padded to, so that
            `insert_rows` does not depend on W.
        shared: number of tokens that all prompts begin with, less than all lengths. They are
            computed once, and the prompts are extended from them.
    """
    whole = (tokens, lengths) if not shared else (tokens[:1, :shared], jnp.full(1, shared))
    logits, cache = transformer.prefill(
        params, lora, *whole, config=model_config, cache_positions=width
    )
    if shared:
        cache = jax.tree.map(lambda x: jnp.repeat(x, len(tokens), axis=0), cache)
        places = jnp.arange(shared, tokens.shape[1])
        places = jnp.where(places < lengths[:, None], places, width)
        fused = lora_lib.fuse(lora, model_config, params["embed_tokens"].dtype)
        logits, cache = transformer.extend(
            *(params, fused, tokens[:, shared:], places, lengths - shared - 1, cache),
            config=model_config,
        )

    def stored(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            array if layer in model_config.recurrent_layers else to_cache(array, dtype)
            for layer, array in enumerate(arrays)
        ]

    stored_cache = KVCache(keys=stored(cache.keys), values=stored(cache.values), lengths=lengths)
    return Prefilled(logits=logits, cache=stored_cache)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def insert_rows(
    key: jax.Array,
    state: DecodeState,
    prefilled: Prefilled,
    slots: jax.Array,
    sources: jax.Array,
    rows: jax.Array,
    temperature: jax.Array,
    *,
    config: DecodeConfig,
) -> tuple[DecodeState, Samples]:
    """Inserts N rows, each with a copy of its prompt's cache, and samples their first tokens.

    Args:
        key: PRNG key of the rollout.
        state: the batch before any compaction; donated.
        prefilled: P prompts.
        slots: int32 [N], slot of each row; B where there is no row.
        sources: int32 [N], index of each row's prompt among the P prompts.
        rows: int32 [N], identity of each row.
        temperature: float32 scalar that the logits are divided by.
        config: static arguments.

    Returns:
        The state, and the samples [N, 1].
    """
    logits, positions = prefilled.logits[sources], jnp.zeros_like(rows)
    samples = _sample(key, logits, rows, positions, temperature, config)

    def put(array, values):
        return array.at[slots].set(values, mode="drop")

    cache = prefilled.cache
    put_layer = functools.partial(_put_rows, slots=slots, sources=sources)
    state = DecodeState(
        keys=[put_layer(*layer) for layer in zip(state.keys, cache.keys, strict=True)],
        values=[put_layer(*layer) for layer in zip(state.values, cache.values, strict=True)],
        lengths=put(state.lengths, cache.lengths[sources]),
        rows=put(state.rows, rows),
        counts=put(state.counts, 1),
        last=put(state.last, samples.tokens),
        done=put(state.done, config.turn_limit == 1 or _ends(samples.tokens, config)),
        limits=None if state.limits is None else put(state.limits, config.turn_limit),
    )
    return state, jax.tree.map(lambda x: x[:, None], samples)


@jax.jit
def _put_rows(cache, prompts, slots, sources):
    return cache.at[slots, :, : prompts.shape[2]].set(prompts[sources], mode="drop")


@functools.partial(jax.jit, static_argnames=("model_config", "dtype"))
def fuse_adapter(lora: Lora | None, *, model_config: ModelConfig, dtype: jnp.dtype) -> list[dict]:
    """Returns the adapter as decode steps read it, see `lora.fuse`; once for a whole rollout."""
    return lora_lib.fuse(lora, model_config, dtype)


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps"),
    donate_argnames="state",
    compiler_options=UNTUNED,
)
def decode_chunk(
    key: jax.Array,
    params: dict,
    lora_layers: list[dict],
    state: DecodeState,
    cache_rows: CacheRows,
    temperature: jax.Array,
    *,
    config: DecodeConfig,
    steps: int,
) -> tuple[DecodeState, Samples]:
    """Samples `steps` tokens for every cache row.

    Args:
        key: PRNG key of the rollout.
        params: the policy.
        lora_layers: result of `fuse_adapter`.
        state: the batch; donated.
        cache_rows: slot and activity of each cache row.
        temperature: float32 scalar that the logits are divided by.
        config: static arguments.
        steps: number of decode steps. It is static, as a loop that ends with the rows would wait
            for the host at every token.

    Returns:
        The state, and the samples [R, steps].
    """
    slots, active = cache_rows
    rows = state.rows[slots]
    limits = config.sampling.max_new_tokens if state.limits is None else state.limits[slots]

    def step(carry, _):
        cache, counts, last, done = carry
        logits, cache = transformer.decode_step(
            params, lora_layers, last, cache, config=config.model
        )
        samples = _sample(key, logits, rows, counts, temperature, config)
        counts = counts + 1
        done |= _ends(samples.tokens, config) | (counts >= limits)
        return (_without_keys(cache, done), counts, samples.tokens, done), samples

    done = state.done[slots] | ~active
    cache = KVCache(keys=state.keys, values=state.values, lengths=state.lengths[slots])
    carry = _without_keys(cache, done), state.counts[slots], state.last[slots], done
    (cache, counts, last, done), samples = jax.lax.scan(step, carry, length=steps)
    state = dataclasses.replace(
        state,
        keys=cache.keys,
        values=cache.values,
        lengths=state.lengths.at[slots].set(cache.lengths),
        counts=state.counts.at[slots].set(counts),
        last=state.last.at[slots].set(last),
        done=state.done.at[slots].set(done),
    )
    return state, jax.tree.map(lambda x: x.T, samples)


@functools.partial(
    jax.jit,
    static_argnames="model_config",
    donate_argnames=("keys", "values"),
    compiler_options=UNTUNED,
)
def extend_rows(
    params: dict,
    lora_layers: list[dict],
    keys: list[jax.Array],
    values: list[jax.Array],
    places: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    last: jax.Array,
    *,
    model_config: ModelConfig,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Appends tokens that were not sampled to N of R cache rows.

    The rows are computed in a copy, as few of them go on at the same time.

    Args:
        params: the policy.
        lora_layers: result of `fuse_adapter`.
        keys: keys [R, K, S, H] of every layer; donated.
        values: values [R, K, S, H] of every layer; donated.
        places: int32 [N], cache row of each row; R for a row that is not there.
        tokens: int32 [N, T] tokens.
        positions: int32 [N, T], cache position of each token; S for padding.
        last: int32 [N], index of the last token of each row.
        model_config: the architecture.

    Returns:
        float32 logits [N, V] after the last token, keys and values.
    """

    def put(caches, rows):
        return [x.at[places].set(new, mode="drop") for x, new in zip(caches, rows, strict=True)]

    cache = KVCache(
        keys=[x.at[places].get(mode="clip") for x in keys],
        values=[x.at[places].get(mode="clip") for x in values],
        lengths=last,
    )
    logits, cache = transformer.extend(
        params, lora_layers, tokens, positions, last, cache, config=model_config
    )
    return logits, put(keys, cache.keys), put(values, cache.values)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def resume_rows(
    key: jax.Array,
    state: DecodeState,
    logits: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    limits: jax.Array,
    temperature: jax.Array,
    *,
    config: DecodeConfig,
) -> tuple[DecodeState, Samples]:
    """Samples the first token of the next turn of N rows.

    Args:
        key: PRNG key of the rollout.
        state: the batch without keys and values; donated.
        logits: float32 [N, V] after the tokens of each row.
        slots: int32 [N], slot of each row; B where no row goes on.
        lengths: int32 [N], number of filled cache positions.
        rows: int32 [N], identity of each row.
        counts: int32 [N], number of tokens sampled before.
        limits: int32 [N], number of sampled tokens at which the turn is cut off.
        temperature: float32 scalar that the logits are divided by.
        config: static arguments.

    Returns:
        The state, and the samples [N, 1].
    """
    samples = _sample(key, logits, rows, counts, temperature, config)
    counts = counts + 1
    done = _ends(samples.tokens, config) | (counts >= limits)

    def put(array, values):
        return array.at[slots].set(values, mode="drop")

    state = dataclasses.replace(
        state,
        lengths=put(state.lengths, jnp.where(done, 0, lengths)),
        rows=put(state.rows, rows),
        counts=put(state.counts, counts),
        last=put(state.last, samples.tokens),
        done=put(state.done, done),
        limits=put(state.limits, limits),
    )
    return state, jax.tree.map(lambda x: x[:, None], samples)


@jax.jit
def take_row(keys: list[jax.Array], values: list[jax.Array], place: jax.Array) -> list[jax.Array]:
    """Returns what a cache row holds: one array for each shape of the caches [R, ...] of L layers.

    Where all layers have attention, it is one array [2 L, K, S, H].
    """
    kinds: dict[tuple, list[jax.Array]] = {}
    for cache in (*keys, *values):
        kinds.setdefault((cache.shape, cache.dtype), []).append(cache[place])
    return [jnp.stack(rows) for rows in kinds.values()]


@functools.partial(jax.jit, donate_argnames=("keys", "values"))
def put_row(
    keys: list[jax.Array], values: list[jax.Array], taken: list[jax.Array], place: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Writes what `take_row` returned to a cache row of keys and values; donates these."""
    kinds = dict.fromkeys((cache.shape, cache.dtype) for cache in (*keys, *values))
    rows = dict(zip(kinds, map(iter, taken), strict=True))

    def put(caches):
        return [x.at[place].set(next(rows[x.shape, x.dtype])) for x in caches]

    return put(keys), put(values)


@jax.jit
def gather_rows(x: jax.Array, indices: jax.Array | np.ndarray) -> jax.Array:
    """Returns N rows of an array [R, ...] by their int32 [N] indices."""
    return x[indices]


@jax.named_scope("sampling")
def _sample(key, logits, rows, positions, temperature, config) -> Samples:
    tokens, logprobs, entropies = sample(
        row_keys(key, rows, positions),
        logits,
        temperature=temperature,
        greedy=config.sampling.greedy,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
    )
    return Samples(tokens=tokens, logprobs=logprobs, entropies=entropies)


def _ends(tokens, config):
    return jnp.isin(tokens, jnp.array(config.eos_ids, jnp.int32))


def _without_keys(cache, done):
    """Sets the lengths of finished rows to 0, so that they attend to one key, not to thousands."""
    return cache.replace(lengths=jnp.where(done, 0, cache.lengths))
