"""Attention of several new tokens per row, as those of a draft: up to eight, to a live cache.

`write` makes queries, keys and values of the product, as `attention` does inside of its kernel, and
writes the keys and values to the cache. `attend` then has a cache that holds all keys, and a token
sees those up to its own.

The queries of a row that share a key head lie one token after the other, and are computed at most
16 in a CTA. So a row's keys are read once from memory, and by each CTA from the nearest cache.
`attention_sm90.attend_queries` replaces `attend` on Hopper GPUs.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import warpgroup
from pallas_kernels.decode import attention_products as products
from pallas_kernels.decode import to_cache
from pallas_kernels.decode.attention import (
    Array,
    AttentionInputs,
    AttentionParts,
    RowCache,
    Seen,
    Shared,
    num_parts,
    store_sums,
    sum_blocks,
)
from pallas_kernels.decode.attention_products import BLOCK
from pallas_kernels.decode.row import (
    QUERIES,
    halves_of,
    heads_layout,
    load_row,
    padded_group,
    projected,
)
from pallas_kernels.warpgroup import WARPS

_MOST = 16  # queries of a CTA
SPARE = 64  # numbers after the last ones of `Queries.newest`, which a kernel may read


class Queries(NamedTuple):
    """What attention of T tokens of each of R rows reads."""

    # bfloat16 [R, K, T G, H], rotated. G is N/K or more, so that T G is a multiple of eight. Others
    # than the first N/K of a token are undefined, and computed in vain.
    queries: Array
    # int32 [R T G + SPARE], the last position that a query sees, in a row none before an earlier
    # one's. What is spare is undefined.
    newest: Array
    rows: Array | None  # int32 [R], the row of the cache; None for all of them in order
    keys: Array  # [B, K, S, H] cached keys, those of the tokens too
    values: Array  # [B, K, S, H] cached values

    @classmethod
    def of(cls, queries: Array, newest: Array, rows: Array | None, *cache: Array) -> "Queries":
        """Of the last position that a token sees, int32 [R, T]."""
        group = queries.shape[2] // newest.shape[1]
        newest = jnp.minimum(newest, cache[0].shape[2] - 1)
        newest = jnp.pad(jnp.repeat(newest.reshape(-1), group), (0, SPARE))
        return cls(queries, newest, rows, *cache)

    def parts(self, num_sms: int, most: int, *, window: int = 0) -> tuple[AttentionParts, int, int]:
        """The shapes of the results of `attend`, the number of queries of a CTA, and of such CTAs.

        A CTA has at most some queries. Heads of the results are [K, R T G].
        """
        rows, kv_heads, total, head_dim = self.queries.shape
        computed = min(most, total)
        chunks = pl.cdiv(total, computed)
        keys = jax.ShapeDtypeStruct((rows, *self.keys.shape[1:]), self.keys.dtype)
        shape = num_parts(keys, num_sms // chunks, window=window), kv_heads, rows * total
        numbers = jax.ShapeDtypeStruct(shape, jnp.float32)
        sums = jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32)
        return AttentionParts(sums, numbers, numbers), computed, chunks


def write(inputs: AttentionInputs, *, eps: float, interpret: bool = False) -> Queries:
    """Writes the keys and values of M = R T new tokens of R rows to the cache.

    `inputs` has M tokens, those of a row one after the other, but R lengths and rows of the cache.
    Positions after those of the cache are not written, and of a row of length 0 the first alone.
    """
    rows, kv_heads, positions, head_dim = inputs.keys.shape
    tokens, heads = len(inputs.qkv), inputs.num_heads
    count, group = tokens // rows, heads // kv_heads
    lengths = inputs.lengths[:, None]
    newest = jnp.where(lengths > 0, lengths + jnp.arange(count), 0)
    written = (newest > 0) | (jnp.arange(count) == 0)
    places = jnp.where(written, newest, positions).reshape(-1)
    queries, caches = warpgroup.run(
        functools.partial(_write_token, count=count, group=group, eps=eps),
        "write_tokens",
        (tokens, kv_heads),
        inputs.by_heads()._replace(lengths=places),
        jax.ShapeDtypeStruct(
            (rows, kv_heads, count * padded_group(group), head_dim), inputs.qkv.dtype
        ),
        updated=(inputs.keys, inputs.values),
        interpret=interpret,
    )
    return Queries.of(queries, newest, None, *caches)


def _write_token(threads, operands, caches, queries, *, count, group, eps):
    """What one CTA does: a token's key, its value, and the query heads that share them."""
    token, head = threads.cta
    _, kv_heads, positions, head_dim = caches[0].shape
    layout = heads_layout(head_dim).reduce(0)
    read = load_row(threads, operands, group, kv_heads, token, head, layout)
    row, first = lax.div(token, count), lax.rem(token, count) * padded_group(group)
    factor = read.norm_factor(eps)
    for i, heads in enumerate(read.queries):
        query = read.query_rotation.rotated(projected(heads, factor), eps)
        place = pl.ds(first + i * QUERIES, QUERIES)
        for dims, half in zip(halves_of(head_dim), query, strict=True):
            threads.store(queries.at[row, head, place, dims], half.astype(queries.dtype))

    @pl.when(read.length < positions)
    def write_key():
        key = read.key_rotation.rotated(projected(read.key, factor), eps)
        value = projected(read.value, factor)
        for cache, new in zip(caches, (key, value), strict=True):
            for dims, half in zip(halves_of(head_dim), new, strict=True):
                target = cache.at[row, head, read.length, dims]
                threads.store(target, to_cache(half, cache.dtype))


def attend(
    inputs: Queries, *, count: int, num_sms: int, window: int = 0, interpret: bool = False
) -> AttentionParts:
    """Attends from `count` tokens of each row, in parts whose heads are [K, M, G].

    With a window a token sees that many positions, its own included.
    """
    rows, kv_heads, _, head_dim = inputs.queries.shape
    most = _MOST if head_dim <= 128 else _MOST // 2
    attended, computed, chunks = inputs.parts(num_sms, most, window=window)
    # No cache of a rollout is so small.
    short = (0, 0), (0, 0), (0, max(0, BLOCK - inputs.keys.shape[2])), (0, 0)
    keys, values = (jnp.pad(cache, short) for cache in (inputs.keys, inputs.values))
    results = warpgroup.run(
        functools.partial(_attend_chunk, window=window),
        "attend_queries",
        (rows * chunks, kv_heads, len(attended.sums)),
        inputs._replace(keys=keys, values=values),
        attended,
        scratch=Shared.types(computed, head_dim, cached=True),
        interpret=interpret,
    )
    return by_tokens(results, rows * count)


def by_tokens(parts: AttentionParts, tokens: int) -> AttentionParts:
    """Parts [P, K, M, G] of results [P, K, R T G]."""
    return AttentionParts(
        *(x.reshape(*x.shape[:2], tokens, x.shape[2] // tokens, *x.shape[3:]) for x in parts)
    )


class Chunk(NamedTuple):
    """What a CTA computes: some queries of a row that share a key head, and some of the keys."""

    queries: tuple  # place of the queries
    first: Any  # index of the first query among those of all rows
    row: Any  # row of the cache
    newest: Any  # last position that a query sees
    begin: Any  # first block of keys
    end: Any  # block after the last one

    @classmethod
    def of(
        cls, inputs: Queries, cta: Sequence[Any], parts: int, computed: int, window: int = 0
    ) -> "Chunk":
        """The chunk of a CTA, by its index: among those of all rows, its key head, and its part."""
        index, head, part = cta
        total = inputs.queries.shape[2]
        chunks = pl.cdiv(total, computed)
        row = lax.div(index, chunks)
        # The last queries begin earlier, and repeat some that another CTA computes.
        start = jnp.minimum(lax.rem(index, chunks) * computed, total - computed)
        first = row * total + start
        newest = inputs.newest[first + (computed - 1)]
        filled = lax.div(newest, BLOCK) + 1
        if window:
            unseen = Seen.of(inputs.newest[first] + 1, window).first_block
            of_part = lax.div(filled - unseen + (parts - 1), parts)
            begin = unseen + part * of_part
        else:
            of_part = lax.div(filled + (parts - 1), parts)
            begin = part * of_part
        end = jnp.minimum(begin + of_part, filled)
        queries = row, head, pl.ds(start, computed)
        return cls(
            queries, first, row if inputs.rows is None else inputs.rows[row], newest, begin, end
        )


def _attend_chunk(threads, inputs, _, attended, *, window, **shared):
    """What one CTA does."""
    _, head, part = threads.cta
    head_dim = inputs.queries.shape[3]
    shared = Shared(threads, **shared)
    computed = shared.weights.shape[0]
    own = Chunk.of(inputs, threads.cta, attended.sums.shape[0], computed, window)
    layout, source = products.query_layout(head_dim), inputs.queries.at[own.queries]
    queries = tuple(threads.load(source.at[:, dims], layout) for dims in halves_of(head_dim))
    newest = inputs.newest.at[pl.ds(own.first, computed)]
    newest = threads.load(newest, products.SCORES.reduce((1, 2)))
    limit = lax.broadcast_in_dim(newest + 1, (computed, WARPS, BLOCK // WARPS), (0,))
    cache = RowCache(threads, *(ref.at[own.row, head] for ref in (inputs.keys, inputs.values)))
    seen = Seen(limit, limit - window if window else None)
    sums = sum_blocks(threads, cache, queries, (own.begin, own.end), seen, computed, None)
    for i, numbers in shared.merge(sums, computed):
        store_sums(threads, attended, numbers, (part, head, pl.ds(own.first + i, len(numbers[1]))))
