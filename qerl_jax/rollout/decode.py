"""The programs that the device runs for a rollout: dequantise, read, seat rows, decode, close up.

Rows decode together in a batch of a fixed number of seats. A row that has ended leaves its seat to
the next one that waits; between two programs the batch stays on the device.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pallas_kernels.decode import to_cache
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import quant, transformer
from qerl_jax.policy.attention import KVCache
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rollout.sampling import SamplingConfig, row_keys, sample

# No search for the fastest matmul: it takes longer than the rest of the compilation, finds another
# one when the device is busy, and none that is faster than the choice of the library.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the programs are compiled for, beside shapes.

    Attributes:
        config: the architecture.
        eos_ids: what ends a row,
        max_new_tokens: and how long it can become.
        temperature: see `sampling.sample`.
        top_k: likewise.
        top_p: likewise.
        dequantize: see `sampling.SamplingConfig`.
    """

    config: ModelConfig
    eos_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    dequantize: str


def rules(config: ModelConfig, sampling: SamplingConfig, eos_ids: Sequence[int]) -> Rules:
    """The rules of a way to sample."""
    return Rules(
        config=config,
        eos_ids=tuple(eos_ids),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        dequantize=sampling.dequantize,
    )


@struct.dataclass
class Batch:
    """B seats. One that nobody needs is done; it decodes along, reads few keys and means nothing.

    Attributes:
        cache: keys and values of the prompt and of all tokens but the last.
        rows: int32 [B], the identity of the row in each seat, which its draws depend on.
        counts: int32 [B], tokens drawn.
        last: int32 [B], the newest of them.
        done: bool [B].
    """

    cache: KVCache
    rows: jax.Array
    counts: jax.Array
    last: jax.Array
    done: jax.Array


@struct.dataclass
class Prompts:
    """P prompts that were read.

    Attributes:
        logits: float32 [P, V] after the last token of each.
        cache: their keys and values, [P, K, T, H] for every layer.
    """

    logits: jax.Array
    cache: KVCache

    @property
    def width(self) -> int:
        """T."""
        return self.cache.keys[0].shape[2]


@struct.dataclass
class Drawn:
    """Tokens [B, steps] with log-probabilities and entropies, see `sampling.sample`.

    What a row has behind its end means nothing.
    """

    tokens: jax.Array
    logprobs: jax.Array
    entropies: jax.Array


def empty_batch(
    rows: int,
    slots: int,
    *,
    config: ModelConfig,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None = None,
) -> Batch:
    """B free seats.

    Args:
        rows: B.
        slots: S of the cache.
        config: the architecture.
        dtype: of the cache.
        sharding: where it lies. The batch is bound to it, as what the programs return is: bound and
            unbound arrays would compile to two programs.
    """
    shape = (rows, config.num_kv_heads, slots, config.head_dim)
    layers = range(config.num_layers)
    return Batch(
        cache=KVCache(
            keys=[jnp.zeros(shape, dtype, device=sharding) for _ in layers],
            values=[jnp.zeros(shape, dtype, device=sharding) for _ in layers],
            lengths=jnp.zeros(rows, jnp.int32, device=sharding),
        ),
        rows=jnp.zeros(rows, jnp.int32, device=sharding),
        counts=jnp.zeros(rows, jnp.int32, device=sharding),
        last=jnp.zeros(rows, jnp.int32, device=sharding),
        done=jnp.ones(rows, bool, device=sharding),
    )


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize(packed: list[QuantTensor], *, dtype: jnp.dtype) -> list[jax.Array]:
    """Dense [N, K] weights of packed ones."""
    return [quant.dequantize(weight, dtype) for weight in packed]


@functools.partial(jax.jit, static_argnames=("config", "dtype"), compiler_options=_UNTUNED)
def read_prompts(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    dtype: jnp.dtype,
) -> Prompts:
    """Reads right-padded prompts [P, T] of int32 [P] lengths; `dtype` is the cache's."""
    logits, cache = transformer.prefill(
        params, lora, tokens, lengths, config=config, cache_positions=tokens.shape[1]
    )
    stored = KVCache(
        keys=[to_cache(k, dtype) for k in cache.keys],
        values=[to_cache(v, dtype) for v in cache.values],
        lengths=lengths,
    )
    return Prompts(logits=logits, cache=stored)


@functools.partial(jax.jit, static_argnames="rules", donate_argnames="batch")
def seat_rows(
    key: jax.Array,
    batch: Batch,
    prompts: Prompts,
    seats: jax.Array,
    sources: jax.Array,
    rows: jax.Array,
    *,
    rules: Rules,
) -> tuple[Batch, Drawn]:
    """Gives seats to N rows, each with a copy of its prompt, and draws their first tokens.

    Args:
        key: of the rollout.
        batch: B seats; it is given away.
        prompts: P prompts that were read.
        seats: int32 [N], the seat of each row; B where there is no row.
        sources: int32 [N], which of the prompts it continues.
        rows: int32 [N], its identity.
        rules: static.

    Returns:
        The batch, and what was drawn, [N, 1].
    """
    drawn = _draw(key, prompts.logits[sources], rows, jnp.zeros_like(rows), rules)

    def put(old, new):
        return old.at[seats].set(new, mode="drop")

    old, read = batch.cache, prompts.cache
    put_layer = functools.partial(_put_rows, seats=seats, sources=sources)
    batch = Batch(
        cache=KVCache(
            keys=[put_layer(*layer) for layer in zip(old.keys, read.keys, strict=True)],
            values=[put_layer(*layer) for layer in zip(old.values, read.values, strict=True)],
            lengths=put(old.lengths, read.lengths[sources]),
        ),
        rows=put(batch.rows, rows),
        counts=put(batch.counts, 1),
        last=put(batch.last, drawn.tokens),
        done=put(batch.done, _ends(drawn.tokens, rules)),
    )
    return batch, jax.tree.map(lambda x: x[:, None], drawn)


@jax.jit
def _put_rows(cache, prompts, seats, sources):
    return cache.at[seats, :, : prompts.shape[2]].set(prompts[sources], mode="drop")


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def fuse_adapter(lora: Lora | None, *, config: ModelConfig, dtype: jnp.dtype) -> list[dict]:
    """The adapter as decode steps read it, see `lora.fuse`; once for all chunks of a rollout."""
    return lora_lib.fuse(lora, config, dtype)


@functools.partial(
    jax.jit,
    static_argnames=("rules", "steps"),
    donate_argnames="batch",
    compiler_options=_UNTUNED,
)
def decode_chunk(
    key: jax.Array,
    params: dict,
    fused_lora: list[dict],
    batch: Batch,
    needed: jax.Array,
    *,
    rules: Rules,
    steps: int,
) -> tuple[Batch, Drawn]:
    """Draws `steps` tokens for every seat.

    Args:
        key: of the rollout.
        params: the policy.
        fused_lora: of `fuse_adapter`.
        batch: B seats; it is given away.
        needed: bool [B]; a seat that is not needed is done from now on.
        rules: static.
        steps: static too, as a loop that ends with the rows would ask the host at every token.

    Returns:
        The batch, and what was drawn, [B, steps].
    """
    batch = _with_done(batch, batch.done | ~needed)

    def step(batch, _):
        logits, cache = transformer.decode_step(
            params, fused_lora, batch.last, batch.cache, config=rules.config
        )
        drawn = _draw(key, logits, batch.rows, batch.counts, rules)
        counts = batch.counts + 1
        ended = _ends(drawn.tokens, rules) | (counts >= rules.max_new_tokens)
        batch = batch.replace(cache=cache, counts=counts, last=drawn.tokens)
        return _with_done(batch, batch.done | ended), drawn

    batch, drawn = jax.lax.scan(step, batch, length=steps)
    return batch, jax.tree.map(lambda x: x.T, drawn)


@jax.jit
def take_rows(x: jax.Array, seats: jax.Array | np.ndarray) -> jax.Array:
    """Some rows, int32 [N], of an array [B, ...]."""
    return x[seats]


@jax.named_scope("sampling")
def _draw(key, logits, rows, positions, rules) -> Drawn:
    tokens, logprobs, entropies = sample(
        row_keys(key, rows, positions),
        logits,
        temperature=rules.temperature,
        top_k=rules.top_k,
        top_p=rules.top_p,
    )
    return Drawn(tokens=tokens, logprobs=logprobs, entropies=entropies)


def _ends(tokens, rules):
    return jnp.isin(tokens, jnp.array(rules.eos_ids, jnp.int32))


def _with_done(batch, done):
    """Marks seats as done, and empties them: what nobody needs reads few keys, not a thousand."""
    lengths = jnp.where(done, 0, batch.cache.lengths)
    return batch.replace(done=done, cache=batch.cache.replace(lengths=lengths))
