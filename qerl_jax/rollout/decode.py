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
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.part import Kept, NewTokens
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.sharding import head_sharding
from qerl_jax.policy.transformer import Cache
from qerl_jax.rollout import drafts
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, Tokenizer, TurnConfig
from qerl_jax.rollout.sampling import row_keys, sample

RowShape = tuple[tuple[int, ...], jnp.dtype]  # shape and dtype of a row of an array

# Without autotuning of matmuls: the search takes longer than the rest of the compilation, chooses
# differently while the device is busy, and finds nothing faster than the library's choice.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static arguments of the programs, apart from shapes."""

    model: ModelConfig  # the architecture of one device, see `tensor_parallel.shard_of`
    # Distribution and length of completions, without stop strings, which the host looks for. Of the
    # temperature it holds only whether it is 0: its value is an argument, so that a run may change
    # it.
    sampling: SamplingConfig
    eos_ids: tuple[int, ...]  # token ids that end a row
    dequantize: str  # 'once' or 'step', see `EngineConfig`
    # Number of tokens at which the first turn of a row is cut off; None where rows do not talk to
    # environments.
    turn_limit: int | None = None
    records_routes: bool = False  # whether samples have the experts of tokens
    rounds: bool = False  # whether products take E4M3, see `EngineConfig.activations`


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
        records_routes=engine.records_routes and model.experts is not None,
        rounds=engine.activations == "float8",
    )


@struct.dataclass
class DecodeState:
    """The batch on the device: R cache rows that decode, and the state of all B slots.

    Compaction gathers cache rows and leaves the state of the slots where it is. So R shrinks and B
    does not, and `decode_chunk` takes the slot of each cache row.

    The turn of an inactive slot has ended. It is still decoded, as shapes are static, but attends
    to one key only, and its values are undefined.
    """

    # What R rows keep in every layer, of the prompt and of all tokens but the last: keys and values
    # [R, K, S, H] where the layer has attention.
    layers: list[Kept]
    lengths: jax.Array  # int32 [B], number of filled cache positions
    rows: jax.Array  # int32 [B], identity of the row in each slot, which its samples depend on
    counts: jax.Array  # int32 [B], number of tokens sampled
    last: jax.Array  # int32 [B], the newest token
    ended: jax.Array  # bool [B], whether the turn of the row has ended, or the slot is empty
    # int32 [B], number of sampled tokens at which the row's turn is cut off: a state cannot go back
    # to it. None where all rows have one turn.
    limits: jax.Array | None = None
    # int32 [N, G, 8 + S], the tokens of rows so far, from which drafts are made, see `drafts`. None
    # without drafts.
    history: jax.Array | None = None


@struct.dataclass
class Prefilled:
    """P prompts after prefill."""

    logits: jax.Array  # float32 [P, V] after the last token of each prompt
    cache: Cache  # what each prompt keeps, with T cache positions
    routes: jax.Array | None = None  # [P, T, L, k], the experts of each token, if recorded


class CacheRows(NamedTuple):
    """The cache rows of a chunk."""

    slots: jax.Array | np.ndarray  # int32 [R], slot of each cache row, all different
    # bool [R]; the turn of a row that is not active has ended, which only the host sees of a stop
    # string.
    active: jax.Array | np.ndarray
    # int32 [R], where the history has the tokens of each row, see `drafts.begin`; None without
    # drafts.
    places: jax.Array | np.ndarray | None = None


class NextTurns(NamedTuple):
    """The next turns of N rows, each int32 [N]."""

    slots: jax.Array | np.ndarray  # B where there is no row
    lengths: jax.Array | np.ndarray  # number of filled cache positions
    rows: jax.Array | np.ndarray  # identities
    counts: jax.Array | np.ndarray  # number of tokens sampled before
    limits: jax.Array | np.ndarray  # number of sampled tokens at which the turn is cut off


@struct.dataclass
class Samples:
    """Sampled tokens [R, steps] with log-probabilities and entropies, as in `sampling.sample`.

    Values past the end of a row are undefined. The routes [R, W, L, k] are the experts of the token
    before each sample, in the columns at the end. In the W - steps columns before them, those of a
    turn that an environment began have the routes before what it wrote.

    With drafts the samples that a row took follow each other, and `taken`, int32 [R, steps], has
    how many it took in each step: at least one before the row's turn has ended, 0 after that.
    """

    tokens: jax.Array
    logprobs: jax.Array
    entropies: jax.Array
    routes: jax.Array | None = None
    taken: jax.Array | None = None


def empty_state(
    slots: int,
    cache_positions: int,
    *,
    model_config: ModelConfig,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None = None,
    has_turns: bool = False,
    histories: tuple[int, int] | None = None,
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
        histories: numbers of groups and of their rows whose tokens are kept for drafts; None
            without drafts.
    """
    device, shards = head_sharding(sharding), model_config.shards

    rows, treedef = jax.tree.flatten(kinds.row_shapes(model_config, cache_positions, dtype))
    arrays = tuple(((slots, shards * x.shape[0], *x.shape[1:]), x.dtype) for x in rows)
    return DecodeState(
        layers=treedef.unflatten(_zeros(arrays, device)()),
        lengths=jnp.zeros(slots, jnp.int32, device=sharding),
        rows=jnp.zeros(slots, jnp.int32, device=sharding),
        counts=jnp.zeros(slots, jnp.int32, device=sharding),
        last=jnp.zeros(slots, jnp.int32, device=sharding),
        ended=jnp.ones(slots, bool, device=sharding),
        limits=jnp.zeros(slots, jnp.int32, device=sharding) if has_turns else None,
        history=histories and drafts.empty_history(*histories, cache_positions, sharding),
    )


@functools.cache
def _zeros(shapes, sharding):
    """Makes zeros of all layers in one program; `jnp.zeros` for each takes ten milliseconds."""
    return jax.jit(lambda: [jnp.zeros(*shape) for shape in shapes], out_shardings=sharding)


@functools.partial(
    jax.jit,
    static_argnames=("model_config", "dtype", "width", "shared", "records_routes"),
    compiler_options=UNTUNED,
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
    records_routes: bool = False,
) -> Prefilled:
    """Computes the logits of prompts and what they keep.

    Args:
        params: the policy.
        lora: its adapter, or None.
        tokens: int32 [P, W] prompts, padded on the right.
        lengths: int32 [P], number of tokens of each prompt.
        model_config: the architecture.
        dtype: dtype of the cache.
        width: T >= W, cache positions of a prompt, so that `insert_rows` does not depend on W.
        shared: number of tokens that all prompts begin with, less than all lengths. They are
            computed once, and the prompts are extended from them.
        records_routes: whether the result has the experts of the tokens.
    """
    whole = (tokens, lengths) if not shared else (tokens[:1, :shared], jnp.full(1, shared))
    logits, cache, routes = transformer.prefill(
        params, lora, *whole, config=model_config, cache_positions=width
    )
    if shared:
        cache = jax.tree.map(lambda x: jnp.repeat(x, len(tokens), axis=0), cache)
        positions = jnp.arange(shared, tokens.shape[1])
        positions = jnp.where(positions < lengths[:, None], positions, width)
        fused = lora_lib.fuse(lora, model_config, params["embed_tokens"].dtype)
        logits, cache, further = transformer.extend(
            *(params, fused, tokens[:, shared:]),
            NewTokens(positions, lengths - shared - 1),
            cache,
            config=model_config,
        )
        if records_routes:
            assert routes is not None
            assert further is not None
            routes = jnp.repeat(routes, len(tokens), axis=1)
            routes = jnp.concatenate([routes, further], axis=2)

    stored = kinds.row_shapes(model_config, width, dtype)
    layers = jax.tree.map(lambda x, row: to_cache(x, row.dtype), cache.layers, stored)
    prefilled = Prefilled(logits=logits, cache=Cache(layers=layers, lengths=lengths))
    if not records_routes:
        return prefilled
    padding = (0, 0), (0, width - tokens.shape[1]), (0, 0), (0, 0)
    return dataclasses.replace(prefilled, routes=jnp.pad(_recorded(routes, model_config), padding))


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
    """Inserts N rows, each with a copy of what its prompt keeps, and samples their first tokens.

    `state` is the batch before any compaction; it is donated. int32 [N] are the `slots` of the
    rows, B where there is no row, their prompts among the P prefilled ones (`sources`), and their
    identities (`rows`). Returns the state, and the samples [N, 1].
    """
    logits, positions = prefilled.logits[sources], jnp.zeros_like(rows)
    samples = _sample(key, logits, rows, positions, temperature, config)

    def put(array, values):
        return array.at[slots].set(values, mode="drop")

    cache = prefilled.cache
    put_layer = functools.partial(_put_rows, slots=slots, sources=sources)
    state = DecodeState(
        layers=jax.tree.map(put_layer, state.layers, cache.layers),
        lengths=put(state.lengths, cache.lengths[sources]),
        rows=put(state.rows, rows),
        counts=put(state.counts, 1),
        last=put(state.last, samples.tokens),
        ended=put(state.ended, config.turn_limit == 1 or _ends(samples.tokens, config)),
        limits=None if state.limits is None else put(state.limits, config.turn_limit),
        history=state.history,
    )
    if prefilled.routes is not None:
        last = prefilled.routes[sources, cache.lengths[sources] - 1]
        samples = dataclasses.replace(samples, routes=last)
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
    slots, active, _ = cache_rows
    rows = state.rows[slots]
    limits = config.sampling.max_new_tokens if state.limits is None else state.limits[slots]

    def step(carry, _):
        cache, counts, last, ended = carry
        logits, cache, routes = transformer.decode_step(
            params, lora_layers, last, cache, config=config.model, rounds=config.rounds
        )
        samples = _sample(key, logits, rows, counts, temperature, config)
        if config.records_routes:
            samples = dataclasses.replace(samples, routes=_recorded(routes, config.model))
        counts = counts + 1
        ended |= _ends(samples.tokens, config) | (counts >= limits)
        return (_without_keys(cache, ended), counts, samples.tokens, ended), samples

    ended = state.ended[slots] | ~active
    cache = Cache(layers=state.layers, lengths=state.lengths[slots])
    carry = _without_keys(cache, ended), state.counts[slots], state.last[slots], ended
    (cache, counts, last, ended), samples = jax.lax.scan(step, carry, length=steps)
    if state.history is not None:
        history = _with_chunk(state, cache_rows, samples.tokens.T, limits, config)
        state = dataclasses.replace(state, history=history)
    state = dataclasses.replace(
        state,
        layers=cache.layers,
        lengths=state.lengths.at[slots].set(cache.lengths),
        counts=state.counts.at[slots].set(counts),
        last=state.last.at[slots].set(last),
        ended=state.ended.at[slots].set(ended),
    )
    return state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), samples)


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps", "positions"),
    donate_argnames="state",
    compiler_options=UNTUNED,
)
def draft_chunk(
    key: jax.Array,
    params: dict,
    lora_layers: list[dict],
    state: DecodeState,
    cache_rows: CacheRows,
    temperature: jax.Array,
    *,
    config: DecodeConfig,
    steps: int,
    positions: int,
) -> tuple[DecodeState, Samples]:
    """Samples up to T tokens for every cache row in each step, as far as a draft was right.

    The tokens are those of `decode_chunk`. All layers must rewind.

    Args:
        key: as the arguments below, as in `decode_chunk`.
        params: the policy.
        lora_layers: result of `fuse_adapter`.
        state: the batch with a history; donated.
        cache_rows: slot, activity and place in the history of each cache row.
        temperature: float32 scalar that the logits are divided by.
        config: static arguments.
        steps: number of decode steps.
        positions: T, number of tokens that a step checks: the newest one and the draft.

    Returns:
        The state, and the samples [R, steps T], those that a row took at the beginning.
    """
    slots, active, places = cache_rows
    assert places is not None
    assert state.history is not None
    rows, spread = state.rows[slots], jnp.arange(positions)
    limits = config.sampling.max_new_tokens if state.limits is None else state.limits[slots]

    def step(carry, _):
        lengths, layers, counts, last, ended, history = carry
        draft = drafts.guess(history, places, lengths, positions - 1)
        tokens = jnp.concatenate([last[:, None], jnp.maximum(draft, 0)], axis=1)
        cache = Cache(layers=layers, lengths=lengths)
        logits, cache, routes = transformer.decode_positions(
            params, lora_layers, tokens, cache, config=config.model, rounds=config.rounds
        )
        flat = logits.reshape(-1, logits.shape[-1]), jnp.repeat(rows, positions)
        numbers = (counts[:, None] + spread).reshape(-1)
        samples = _sample(key, *flat, numbers, temperature, config)
        samples = jax.tree.map(lambda x: x.reshape(tokens.shape), samples)
        if config.records_routes:
            samples = dataclasses.replace(samples, routes=_recorded(routes, config.model))
        taken, last, ended = _accept(samples.tokens, draft, counts, limits, last, ended, config)
        history = drafts.record(history, places, lengths + 1, samples.tokens, taken)
        lengths, counts = lengths + taken, counts + taken
        carry = jnp.where(ended, 0, lengths), cache.layers, counts, last, ended, history
        return carry, (samples, taken)

    ended = state.ended[slots] | ~active
    lengths, counts, last = state.lengths[slots], state.counts[slots], state.last[slots]
    # The first token of a turn comes from a prefill.
    history = drafts.record(state.history, places, lengths, last[:, None], ~ended)
    carry = jnp.where(ended, 0, lengths), state.layers, counts, last, ended, history
    carry, (samples, taken) = jax.lax.scan(step, carry, length=steps)
    lengths, layers, counts, last, ended, history = carry
    state = dataclasses.replace(
        state,
        layers=layers,
        lengths=state.lengths.at[slots].set(lengths),
        counts=state.counts.at[slots].set(counts),
        last=state.last.at[slots].set(last),
        ended=state.ended.at[slots].set(ended),
        history=history,
    )
    starts = (jnp.cumsum(taken, axis=0) - taken)[..., None]
    columns = jnp.where(spread < taken[..., None], starts + spread, steps * positions)

    def in_order(x):
        whole = jnp.zeros((len(rows), steps * positions, *x.shape[3:]), x.dtype)
        return whole.at[jnp.arange(len(rows))[:, None], columns].set(x, mode="drop")

    return state, dataclasses.replace(jax.tree.map(in_order, samples), taken=taken.T)


@functools.partial(
    jax.jit,
    static_argnames=("model_config", "records_routes"),
    donate_argnames="layers",
    compiler_options=UNTUNED,
)
def extend_rows(
    params: dict,
    lora_layers: list[dict],
    layers: list[Kept],
    tokens: jax.Array,
    new: NewTokens,
    *,
    model_config: ModelConfig,
    records_routes: bool = False,
) -> tuple[jax.Array, list[Kept], jax.Array | None]:
    """Appends tokens [N, T] that were not sampled to N of R cache rows.

    `layers` are what the R rows keep; they are donated. `new` has the cache row and the positions
    of the tokens. Returns float32 logits [N, V] after the last token, the layers, and the routes
    [N, T, L, k] of the tokens, whose last one is in the last column, or None if they are not
    recorded.
    """
    cache = Cache(layers=layers, lengths=new.last)
    logits, cache, routes = transformer.extend(
        params, lora_layers, tokens, new, cache, config=model_config
    )
    if not records_routes:
        return logits, cache.layers, None
    columns = jnp.maximum(new.last[:, None] + jnp.arange(1 - tokens.shape[1], 1), 0)
    routes = _recorded(routes, model_config)[jnp.arange(len(tokens))[:, None], columns]
    return logits, cache.layers, routes


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def resume_rows(
    key: jax.Array,
    state: DecodeState,
    logits: jax.Array,
    turns: NextTurns,
    temperature: jax.Array,
    *,
    config: DecodeConfig,
) -> tuple[DecodeState, Samples]:
    """Samples the first token of the next turn of N rows.

    `state` is the batch without its layers; it is donated. The float32 logits [N, V] are those
    after the tokens of each row. Returns the state, and the samples [N, 1].
    """
    slots, lengths, rows, counts, limits = turns
    samples = _sample(key, logits, rows, counts, temperature, config)
    counts = counts + 1
    ended = _ends(samples.tokens, config) | (counts >= limits)

    def put(array, values):
        return array.at[slots].set(values, mode="drop")

    state = dataclasses.replace(
        state,
        lengths=put(state.lengths, jnp.where(ended, 0, lengths)),
        rows=put(state.rows, rows),
        counts=put(state.counts, counts),
        last=put(state.last, samples.tokens),
        ended=put(state.ended, ended),
        limits=put(state.limits, limits),
    )
    return state, jax.tree.map(lambda x: x[:, None], samples)


@functools.partial(jax.jit, static_argnames=("model_config", "positions"))
def take_row(
    layers: list[Kept], cache_row: jax.Array, *, model_config: ModelConfig, positions: int
) -> list[jax.Array]:
    """Returns what a cache row keeps of its first positions, the arrays of equal shapes stacked.

    Where all L layers have attention, it is one array [2 L, K, positions, H].
    """
    stacks: dict[tuple, list[jax.Array]] = {}
    rows = kinds.row_shapes(model_config, positions, jnp.dtype(jnp.float32))
    for x, row in zip(jax.tree.leaves(layers), jax.tree.leaves(rows), strict=True):
        taken = jax.lax.dynamic_slice(x, (cache_row, *[0] * row.ndim), (1, *row.shape))[0]
        stacks.setdefault(row_shape(x), []).append(taken)
    return [jnp.stack(rows) for rows in stacks.values()]


@functools.partial(jax.jit, donate_argnames="layers")
def put_row(layers: list[Kept], taken: list[jax.Array], cache_row: jax.Array) -> list[Kept]:
    """Writes what `take_row` returned to a cache row; donates the layers."""
    stacks = dict.fromkeys(map(row_shape, jax.tree.leaves(layers)))
    rows = dict(zip(stacks, map(iter, taken), strict=True))

    def put(x):
        row = next(rows[row_shape(x)])[None]
        return jax.lax.dynamic_update_slice(x, row, (cache_row, *[0] * (x.ndim - 1)))

    return jax.tree.map(put, layers)


def row_shape(x: jax.Array) -> RowShape:
    """Returns the shape and the dtype of a row of an array [R, ...]."""
    return x.shape[1:], x.dtype


begin_rows = jax.jit(drafts.begin, donate_argnames="history")


@jax.jit
def gather_rows(arrays: list[jax.Array], indices: jax.Array | np.ndarray) -> list[jax.Array]:
    """Returns N rows of arrays [R, ...] by their int32 [N] indices."""
    return [x[indices] for x in arrays]


def _recorded(routes, model_config):
    """Routes [..., L, k] in few bytes, of those of a forward pass [L, ..., k]."""
    return jnp.moveaxis(routes, 0, -2).astype(model_config.empty_routes().dtype)


@jax.named_scope("sampling")
def _sample(key, logits, rows, positions, temperature, config) -> Samples:
    tokens, logprobs, entropies = sample(
        row_keys(key, rows, positions),
        logits,
        temperature=temperature,
        greedy=config.sampling.greedy,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        min_p=config.sampling.min_p,
    )
    return Samples(tokens=tokens, logprobs=logprobs, entropies=entropies)


def _ends(tokens, config):
    return jnp.isin(tokens, jnp.array(config.eos_ids, jnp.int32))


def _accept(tokens, draft, counts, limits, last, ended, config):
    """How many of the samples [R, T] each row takes, its newest token, and whether it has ended.

    It takes one after the other as long as the draft [R, T - 1] was right and nothing ends it.
    """
    ends, takes, taken = _ends(tokens, config), ~ended, jnp.zeros_like(counts)
    for number in range(tokens.shape[1]):
        if number:
            takes &= ~ended & (tokens[:, number - 1] == draft[:, number - 1])
        taken += takes
        last = jnp.where(takes, tokens[:, number], last)
        ended |= takes & (ends[:, number] | (counts + taken >= limits))
    return taken, last, ended


def _with_chunk(state, cache_rows, tokens, limits, config):
    """The history after a chunk without drafts, with the newest tokens of before and its own."""
    slots, active, places = cache_rows
    going, numbers = ~state.ended[slots] & active, jnp.arange(1, tokens.shape[1] + 1)
    ends = _ends(tokens, config) | (
        state.counts[slots][:, None] + numbers >= jnp.asarray(limits)[..., None]
    )
    count = tokens.shape[1] - jnp.sum(jnp.cumsum(ends, axis=1) - ends > 0, axis=1)
    tokens = jnp.concatenate([state.last[slots][:, None], tokens], axis=1)
    return drafts.record(
        state.history, places, state.lengths[slots], tokens, jnp.where(going, 1 + count, 0)
    )


def _without_keys(cache, ended):
    """Sets the lengths of ended rows to 0, so that they attend to one key, not to thousands."""
    return cache.replace(lengths=jnp.where(ended, 0, cache.lengths))
