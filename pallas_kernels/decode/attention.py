"""Attention of one new token per row: what a decode step does between its q, k, v and o products.

`attend` does all of it in one kernel: the norm's factor, the bias, the norms of queries and keys,
the rotation, the new key and value, and attention. A decode step is short of time for its many
small operations, not of bandwidth.

With few rows, each row is split into parts, so that all SMs have work; `merge_parts` then adds the
parts up. With enough rows there is one part, and `attend_whole` writes the final result.

Each warp of a CTA has a quarter of the cache positions, which it reads into registers in the order
of its products. The warps meet once, at the end. `attention_sm90` replaces `attend_whole` on Hopper
GPUs.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warpgroup
from pallas_kernels.decode import attention_products as products
from pallas_kernels.decode import to_cache
from pallas_kernels.decode.attention_products import BLOCK, HEADS
from pallas_kernels.decode.row import (
    Row,
    halves_of,
    heads_layout,
    load_row,
    padded_group,
    projected,
)
from pallas_kernels.fp4_matmul import e4m3, lora_shrink
from pallas_kernels.warpgroup import WARPS, Layout, Warpgroup

# A block is requested while the one before is computed, unless its registers would leave an SM
# fewer CTAs than there are, or a thread without any: what it keeps between two blocks is limited.
_CTAS_WITH_NEXT_BLOCK = 2  # of an SM
_MOST_REGISTERS = 200
_MAX_PARTS = 8  # parts that a row is split into, at most
_LOG2_E = 1.4426950408889634
_EMPTY = float(jnp.finfo(jnp.float32).min)  # the largest score of no position

Array = Any  # a jax.Array, its shape and dtype, or a reference to it inside a kernel


class AttentionInputs(NamedTuple):
    """What attention of a decode step reads, in the order of the kernels' operands."""

    # bfloat16 [M, (N + 2 K) H], the product of q, k and v without its norm's factor and without its
    # bias.
    qkv: Array
    square_partials: Array  # float32 [P, M] partial mean squares of the norm before the product
    cosines: Array  # float32 [M, H/2] cosines of the rotation of queries and keys
    sines: Array  # float32 [M, H/2] sines of the rotation
    lengths: Array  # int32 [M], number of filled cache positions of each row, less than S
    bias: Array | None  # [(N + 2 K) H] bias of the product, or None
    q_norm: Array | None  # float32 [H] scale of the RMSNorm of queries, or None
    k_norm: Array | None  # float32 [H] scale of the RMSNorm of keys, or None
    keys: Array  # [M, K, S, H] cached keys, bfloat16 or float8_e4m3fn; donated
    values: Array  # [M, K, S, H] cached values, finite after a row's filled positions too; donated

    @property
    def num_heads(self) -> int:
        """N, the number of query heads."""
        _, kv_heads, _, head_dim = self.keys.shape
        return self.qkv.shape[1] // head_dim - 2 * kv_heads

    def by_heads(self) -> "AttentionInputs":
        """The same without a cache, with heads as a dimension of the product and of the bias.

        A CTA reads heads in eights, also after its group: those of other groups, computed along and
        not stored. Few models have too few heads for that.
        """
        m, kv_heads, head_dim = len(self.qkv), self.keys.shape[1], self.keys.shape[3]
        heads = self.num_heads
        group, total = heads // kv_heads, heads + 2 * kv_heads
        missing = max(0, (kv_heads - 1) * group + padded_group(group) - total)
        qkv, bias = self.qkv.reshape(m, total, head_dim), self.bias
        if bias is not None:
            bias = jnp.pad(bias.reshape(total, head_dim), ((0, missing), (0, 0)))
        qkv = jnp.pad(qkv, ((0, 0), (0, missing), (0, 0)))
        return self._replace(qkv=qkv, bias=bias, keys=None, values=None)


class AttentionParts(NamedTuple):
    """Attention over equal parts of the filled cache positions of each row."""

    sums: Array  # float32 [P, M, N, H], sums of values times weights, the largest of which is 1
    weights: Array  # float32 [P, M, N], sums of these weights; 0 where a part holds no key
    largest: Array  # float32 [P, M, N], the largest score in base 2
    # Or, in place of [M, N], key heads, tokens, and at least the query heads of each [K, M, G].


def num_parts(keys: jax.Array | jax.ShapeDtypeStruct, num_sms: int, *, window: int = 0) -> int:
    """Number of parts of each row of cached keys [M, K, S, H], so that all SMs have work."""
    m, kv_heads, positions, _ = keys.shape
    positions = min(positions, window + BLOCK) if window else positions
    wanted = max(1, num_sms // (m * kv_heads))
    return min(_MAX_PARTS, wanted, pl.cdiv(positions, 2 * BLOCK))


def attend(
    inputs: AttentionInputs,
    *,
    eps: float,
    num_sms: int,
    window: int = 0,
    interpret: bool = False,
) -> tuple[AttentionParts, jax.Array, jax.Array]:
    """Writes the new key and value of every row to the cache, and attends to all positions.

    With a window these are that many, the new one included. Returns `num_parts` parts for
    `merge_parts`, and the updated keys and values.
    """
    m, _, _, head_dim = inputs.keys.shape
    shape = num_parts(inputs.keys, num_sms, window=window), m, inputs.num_heads
    parts = AttentionParts(
        sums=jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
        weights=jax.ShapeDtypeStruct(shape, jnp.float32),
        largest=jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    options = {"eps": eps, "num_sms": num_sms, "interpret": interpret}
    return _run(inputs, parts, shape[0], window=window, **options)


def attend_whole(
    inputs: AttentionInputs, *, eps: float, num_sms: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Does what `attend` and `merge_parts` do, for a cache with one of `num_parts`.

    Returns the attention, bfloat16 [M, N H], and the updated keys and values.
    """
    m, _, _, head_dim = inputs.keys.shape
    attended = jax.ShapeDtypeStruct((m, inputs.num_heads, head_dim), inputs.qkv.dtype)
    attended, keys, values = _run(
        inputs, attended, 1, eps=eps, num_sms=num_sms, interpret=interpret
    )
    return attended.reshape(m, -1), keys, values


def _run(inputs, attended, parts, *, eps, num_sms, interpret, window=0):
    """Runs the kernel, whose CTAs have a part of a row for a key head each.

    `attended` has the shapes of what it writes: those of `AttentionParts`, or of their merged sum.
    """
    m, kv_heads, positions, head_dim = inputs.keys.shape
    group = inputs.num_heads // kv_heads
    operands = inputs.by_heads()
    # No cache of a rollout is so small.
    short = (0, 0), (0, 0), (0, max(0, BLOCK - positions)), (0, 0)
    caches = tuple(jnp.pad(cache, short) for cache in (inputs.keys, inputs.values))
    few = m * kv_heads * parts <= _CTAS_WITH_NEXT_BLOCK * num_sms
    ahead = few and _registers(group, *caches) <= _MOST_REGISTERS
    results, caches = warpgroup.run(
        functools.partial(
            _attend_block, group=group, eps=eps, parts=parts, ahead=ahead, window=window
        ),
        "attend",
        (m, kv_heads, parts),
        operands,
        attended,
        updated=caches,
        scratch=Shared.types(padded_group(group), head_dim),
        interpret=interpret,
    )
    return results, *(cache[:, :, :positions] for cache in caches)


@dataclasses.dataclass(frozen=True)
class RowCache:
    """The cached keys and values of one head of a row, in blocks."""

    threads: Warpgroup  # the threads of the CTA
    keys: Any  # reference to the keys [S, H]
    values: Any  # reference to the values [S, H]
    origin: Any = None  # first position of the first block; None for 0

    def first(self, block: Any) -> Any:
        """First position of a block."""
        return block * BLOCK if self.origin is None else self.origin + block * BLOCK

    def start(self, block: Any) -> Any:
        """First position of what is read of a block; the last one may begin earlier."""
        return jnp.minimum(self.first(block), self.keys.shape[0] - BLOCK)

    def load_keys(self, block: Any) -> tuple[jax.Array, jax.Array]:
        """Requests a block of keys, in halves of the dimensions."""
        positions, head_dim = pl.ds(self.start(block), BLOCK), self.keys.shape[1]
        layout = products.key_layout(head_dim)
        half = head_dim // 2
        first, second = (
            self.threads.load(self.keys.at[positions, pl.ds(i, half)], layout) for i in (0, half)
        )
        return first, second

    def load_values(self, block: Any) -> jax.Array:
        """Requests a block of values."""
        values = self.values.at[pl.ds(self.start(block), BLOCK)]
        return self.threads.load(values, products.value_layout(self.values.shape[1]))


class _Sums(NamedTuple):
    """An online softmax over the positions of each warp."""

    total: jax.Array  # float32 [heads, warps, H], sums of values times weights
    weights: jax.Array  # float32 [heads, warps, 16], whose sums are those of the weights
    largest: jax.Array  # float32 [heads, warps], the largest score in base 2


def _attend_block(threads, inputs, caches, attended, *, group, eps, parts, ahead, window, **shared):
    """What one CTA does: a part of a row for one key head and the query heads that share it."""
    row, head, part = threads.cta
    shared = Shared(threads, **shared)
    kv_heads, head_dim = caches[0].shape[1], caches[0].shape[3]
    one = heads_layout(head_dim).reduce(0)
    read = load_row(threads, inputs, group, kv_heads, row, head, one)
    # A row's filled blocks are divided into equal parts, however long the row is. Those of a window
    # begin where it does, so that no more of them than necessary are read.
    length = read.length
    seen = Seen.of(length, window - 1) if window else Seen(length)
    cache = RowCache(threads, *(ref.at[row, head] for ref in caches), origin=seen.first)
    filled_blocks = _ceil_div(length - seen.first if window else length, BLOCK)
    part_blocks = _ceil_div(filled_blocks, parts)
    first = part * part_blocks
    last = jnp.minimum(first + part_blocks, filled_blocks)
    blocks = (cache.load_keys(first), cache.load_values(first)) if ahead else None

    # The new token belongs to the first part, which so is never empty; the others may be.
    owns_new_token = part == 0
    key, value = _share_row(shared, read, caches, eps, owns_new_token)
    threads.meet()
    queries = shared.load_queries()

    sums = sum_blocks(threads, cache, queries, (first, last), seen, group, blocks)
    heads = head * group
    for start, numbers in shared.merge(sums, group):
        store_sums(threads, attended, numbers, (part, row, pl.ds(heads + start, len(numbers[1]))))

    @pl.when(owns_new_token)
    def store_new_token():
        for cache, new in zip(caches, (key, value), strict=True):
            for dims, half in zip(halves_of(head_dim), new, strict=True):
                threads.store(cache.at[row, head, length, dims], half)


class Seen(NamedTuple):
    """The cached positions that queries see, from the first one and before the limit."""

    limit: Any  # one for all, or int32 [heads, warps, 16]
    first: Any = None  # the same; None for 0
    first_block: Any = 0  # the block of the first one

    @classmethod
    def of(cls, limit: Any, count: int) -> "Seen":
        """At most `count` positions before the limit, one for all."""
        first = jnp.maximum(limit - count, 0)
        return cls(limit, first, lax.div(first, BLOCK))


def sum_blocks(
    threads: Warpgroup,
    cache: RowCache,
    queries: tuple[jax.Array, ...],
    filled: tuple[Any, Any],
    seen: Seen,
    group: int,
    blocks: Any,
) -> _Sums:
    """The softmax of queries over the cached positions of some blocks.

    `filled` are the first block and the one after the last. `blocks` are the keys and values of the
    first block, if blocks are requested ahead, or None.
    """
    ahead, head_dim = blocks is not None, cache.keys.shape[1]

    def add_block(block, carry):
        sums, blocks = carry
        keys = blocks[0] if ahead else cache.load_keys(block)
        product = products.scores(threads, queries, tuple(map(_bfloat16, keys)))
        # The next block is requested as soon as its registers are free. After the last one the
        # same is read once more, from the nearest cache.
        following = jnp.minimum(block + 1, filled[1] - 1)
        keys = cache.load_keys(following) if ahead else None
        values = blocks[1] if ahead else cache.load_values(block)
        positions = cache.first(block), cache.start(block), seen
        added, keep, weights = _add_scores(threads, sums, product, positions, head_dim)
        total = products.add_values(threads, sums.total, keep, weights, _bfloat16(values))
        blocks = (keys, cache.load_values(following)) if ahead else None
        return added._replace(total=total), blocks

    start = _no_sums(threads, group, head_dim), blocks
    return lax.fori_loop(*filled, add_block, start)[0]


def _share_row(shared: "Shared", read: Row, caches: tuple, eps: float, owns: jax.Array) -> tuple:
    """Writes queries, the new value, and its scores to shared memory.

    Returns the halves of the new key and of the new value, in the dtype of the cache.
    """
    factor = read.norm_factor(eps)
    key = read.key_rotation.rotated(projected(read.key, factor), eps)
    key, value = (
        [to_cache(half, cache.dtype) for half in new]
        for new, cache in zip((key, projected(read.value, factor)), caches, strict=True)
    )
    for i, heads in enumerate(read.queries):
        queries = read.query_rotation.rotated(projected(heads, factor), eps)
        shared.store_queries(i, [x.astype(jnp.bfloat16) for x in queries], key, owns)
    shared.store_value(value)
    return key, value


def _registers(group: int, keys: Any, values: Any) -> int:
    """Number of registers that a thread has for queries, sums, and a block of keys and values."""
    heads, head_dim = padded_group(group), keys.shape[3]
    bytes_of_block = BLOCK * head_dim * (keys.dtype.itemsize + values.dtype.itemsize)
    return heads * head_dim // 32 + heads * head_dim // 64 + bytes_of_block // (128 * 4)


def _ceil_div(x, y):
    return lax.div(x + (y - 1), y)


def _bfloat16(x: jax.Array) -> jax.Array:
    """Converts cached keys or values; there is no instruction that converts float8 at once."""
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32).astype(jnp.bfloat16)


def _over(numbers: jax.Array, width: int) -> jax.Array:
    """Repeats a number of each head and warp."""
    return lax.broadcast_in_dim(numbers, (*numbers.shape, width), (0, 1))


def _score_scale(head_dim: int) -> float:
    """The factor of scores in base 2."""
    return head_dim**-0.5 * _LOG2_E


def _no_sums(threads: Warpgroup, group: int, head_dim: int) -> _Sums:
    """The sums of no position."""
    shape, scores = (padded_group(group), WARPS), products.SCORES

    def full(shape, number, layout):
        return threads.cast(jnp.full(shape, number, jnp.float32), layout)

    return _Sums(
        total=full((*shape, head_dim), 0.0, products.total_layout(head_dim)),
        weights=full((*shape, BLOCK // WARPS), 0.0, scores),
        largest=full(shape, _EMPTY, scores.reduce(2)),
    )


def _add_scores(
    threads: Warpgroup, sums: _Sums, product: jax.Array, positions: tuple, head_dim: int
) -> tuple[_Sums, jax.Array, jax.Array]:
    """Adds the weights of a block to a softmax, whose sums of values still lack the block.

    `product` is float32 [heads, warps, 16], of queries and keys; the positions are the first one of
    the block, the first one that was read, and those that are seen. Returns the softmax, the
    factors of the sums of values [heads, warps], and the weights.
    """
    first, start, seen = positions
    layout = products.SCORES
    warp, index = (threads.iota(product.shape, axis, layout) for axis in (1, 2))
    position = start + product.shape[2] * warp + index
    inside = (position >= first) & (position < seen.limit)
    if seen.first is not None:
        inside &= position >= seen.first
    scores = jnp.where(inside, _score_scale(head_dim) * product, jnp.full_like(product, -jnp.inf))
    top = jnp.maximum(sums.largest, jnp.max(scores, axis=2))
    weights = jnp.exp2(scores - _over(top, scores.shape[2]))
    keep = jnp.exp2(sums.largest - top)
    added = sums._replace(
        weights=_over(keep, scores.shape[2]) * sums.weights + weights,
        largest=top,
    )
    return added, keep, weights


@dataclasses.dataclass(frozen=True)
class Shared:
    """What a CTA has in shared memory."""

    threads: Warpgroup  # the threads of the CTA
    totals: Any  # reference to the sums of the warps, float32 [8, warps, H]
    weights: Any  # reference to float32 [heads, warps]
    largest: Any  # reference to float32 [heads, warps]
    queries: Any = None  # reference to two halves of the query heads, bfloat16 [2, heads, H/2]
    # Reference to float32 [heads], the scores of the new token in base 2; -inf in a part that does
    # not have it. None, as the queries and the value, where all keys are in the cache.
    scores: Any = None
    value: Any = None  # reference to the new value, bfloat16 [H]

    @staticmethod
    def types(heads: int, head_dim: int, *, cached: bool = False) -> dict:
        """Shapes and dtypes to allocate, for a number of query heads."""
        numbers = (heads, WARPS), jnp.float32
        new = {
            "queries": ((2, heads, head_dim // 2), jnp.bfloat16),
            "scores": ((heads,), jnp.float32),
            "value": ((head_dim,), jnp.bfloat16),
        }
        return ({} if cached else new) | {
            "totals": ((HEADS, WARPS, head_dim), jnp.float32),
            "weights": numbers,
            "largest": numbers,
        }

    def store_queries(self, i: int, queries: list, key: list, owns: jax.Array) -> None:
        """Writes the eight heads after 8 i, and their scores with the new key."""
        place = pl.ds(i * HEADS, HEADS)
        products_of_dims = []
        for half, (x, y) in enumerate(zip(queries, key, strict=True)):
            self.threads.store(self.queries.at[half, place], x)
            y = lax.broadcast_in_dim(_bfloat16(y).astype(jnp.float32), x.shape, (1,))
            products_of_dims.append(x.astype(jnp.float32) * y)
        score = jnp.sum(operator.add(*products_of_dims), axis=1)
        score *= _score_scale(self.value.shape[0])
        owns = jnp.broadcast_to(owns, score.shape)
        self.threads.store(
            self.scores.at[place], jnp.where(owns, score, jnp.full_like(score, -jnp.inf))
        )

    def store_value(self, value: list) -> None:
        """Writes the halves of the new value."""
        for dims, half in zip(halves_of(self.value.shape[0]), value, strict=True):
            self.threads.store(self.value.at[dims], _bfloat16(half))

    def load_queries(self) -> tuple[jax.Array, ...]:
        """The halves of the queries, as the operands of a product."""
        layout = products.query_layout(self.value.shape[0])
        return tuple(self.threads.load(self.queries.at[half], layout) for half in (0, 1))

    def merge(self, sums: _Sums, group: int) -> Iterator[tuple[int, tuple]]:
        """Yields the first of some query heads and their sums, as those of `AttentionParts`."""
        threads = self.threads
        threads.store(self.weights, jnp.sum(sums.weights, axis=2))
        threads.store(self.largest, sums.largest)
        for start in range(0, group, HEADS):
            if start:
                threads.meet()
            threads.store(self.totals, sums.total[start : start + HEADS])
            threads.meet()
            count = min(HEADS, group - start)
            # Equal numbers of heads, a power of two: some are computed twice.
            together = min(WARPS, 1 << count.bit_length() - 1)
            for i in range(0, count, together):
                inside = min(i, count - together)
                yield start + inside, self._add_up(start, inside, together)

    def _add_up(self, start: int, inside: int, count: int) -> tuple:
        threads, head_dim = self.threads, self.totals.shape[2]
        layout = _heads_layout(count, head_dim)
        # Slices of the first dimension only: shared memory is swizzled along the others.
        heads = pl.ds(start + inside, count)
        largest, weights = (
            threads.load(ref.at[heads], layout.reduce(2)) for ref in (self.largest, self.weights)
        )
        totals = threads.load(self.totals.at[pl.ds(inside, count)], layout)
        if self.scores is None:
            top = jnp.max(largest, axis=1)
            factors = jnp.exp2(largest - lax.broadcast_in_dim(top, largest.shape, (0,)))
            total = jnp.sum(_over(factors, head_dim) * totals, axis=1)
            return total, jnp.sum(factors * weights, axis=1), top
        score = threads.load(self.scores.at[heads], layout.reduce((1, 2)))
        value = threads.load(self.value, layout.reduce((0, 1))).astype(jnp.float32)
        top = jnp.maximum(jnp.max(largest, axis=1), score)
        factors = jnp.exp2(largest - lax.broadcast_in_dim(top, largest.shape, (0,)))
        weight = jnp.exp2(score - top)
        total = jnp.sum(_over(factors, head_dim) * totals, axis=1)
        added = (
            lax.broadcast_in_dim(x, total.shape, (axis,)) for axis, x in enumerate((weight, value))
        )
        total += operator.mul(*added)
        return total, jnp.sum(factors * weights, axis=1) + weight, top


@functools.cache
def _heads_layout(count: int, head_dim: int) -> Layout:
    """How the warps' sums of at most four heads [count, warps, H] lie in registers."""
    spare = (plgpu.Replicated(WARPS // count),) if count < WARPS else ()
    width = min(head_dim, 128)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((count, WARPS, width), (width // 32,))),
        warp_dims=(*((-4,) if count > 1 else ()), *spare),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def store_sums(threads: Warpgroup, attended: Any, sums: tuple, place: tuple) -> None:
    """Writes the sums of some query heads, or attention where a row has one part."""
    if isinstance(attended, AttentionParts):
        for ref, numbers in zip(attended, sums, strict=True):
            threads.store(ref.at[place], numbers)
        return
    total, weight, _ = sums
    weight = lax.broadcast_in_dim(1.0 / weight, total.shape, (0,))
    threads.store(attended.at[place[1:]], (weight * total).astype(attended.dtype))


def merge_parts(
    parts: AttentionParts,
    a: jax.Array | None,
    *,
    dtype: jnp.dtype,
    gates: jax.Array | None = None,
    sinks: jax.Array | None = None,
    heads: int | None = None,
    rounds: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array | e4m3.Rounded, jax.Array | None]:
    """Adds up the parts of `attend`, and computes the LoRA shrink of the next product.

    Returns [M, N H] in a dtype, times the sigmoid of the gates [M, N H] if there are any, and
    partials of its x A^T with A [R, N H], as in `norms.DeferredNorm`, or None without A. The number
    N of heads is that of the parts, unless these are [K, M, G]. Sinks [N] are one more score of
    each head, without a value. With `rounds` the result is in e4m3, for N H a multiple of 128.
    """
    count, m, head_dim = len(parts.sums), parts.sums.shape[-3], parts.sums.shape[-1]
    heads = parts.sums.shape[2] if heads is None else heads

    def attended_of(refs, tile):
        sink = None
        if sinks is not None:
            sink = _LOG2_E * refs["sinks"][tile.index].astype(jnp.float32)

        def of_head(name, part):
            if parts.sums.ndim == 4:
                return refs[name].at[part, :, tile.index]
            group = heads // parts.sums.shape[1]
            return refs[name].at[part, lax.div(tile.index, group), :, lax.rem(tile.index, group)]

        numbers = [
            [tile.load_rows(of_head(name, part)) for part in range(count)]
            for name in ("largest", "weights")
        ]
        top = functools.reduce(jnp.maximum, numbers[0])
        if sink is not None:
            top = jnp.maximum(top, sink)
        factors = [jnp.exp2(largest - top) for largest in numbers[0]]
        weight = sum(factor * number for factor, number in zip(factors, numbers[1], strict=True))
        if sink is not None:
            weight += jnp.exp2(sink - top)
        sums = [
            tile.over_columns(factor / weight) * tile.load_head(of_head("sums", part))
            for part, factor in enumerate(factors)
        ]
        attended = functools.reduce(jnp.add, sums).astype(dtype)
        if gates is not None:
            gate = tile.load(refs["gates"]).astype(jnp.float32)
            opened = attended.astype(jnp.float32) / (1.0 + jnp.exp2(-_LOG2_E * gate))
            attended = opened.astype(dtype)
        return attended

    def compute_tile(refs, tile):
        attended = attended_of(refs, tile)
        if rounds:
            powers = tile.powers(functools.partial(attended_of, refs))
            return tile.round(attended, powers, refs["pairs"], refs["inverse"])

        @pl.when(tile.first)
        def store():
            tile.store(refs["attended"], attended)

        return attended

    outs = lora_shrink.shrink_tiles(
        "merge_parts",
        compute_tile,
        parts._asdict()
        | ({} if gates is None else {"gates": gates})
        | ({} if sinks is None else {"sinks": sinks}),
        lora_shrink.rounded_shapes(m, heads * head_dim)
        if rounds
        else {"attended": jax.ShapeDtypeStruct((m, heads * head_dim), dtype)},
        a,
        (m, heads * head_dim),
        block=head_dim,
        interpret=interpret,
    )
    if rounds:
        return e4m3.Rounded(outs["pairs"], outs["inverse"]), outs["xa_partials"]
    return outs["attended"], outs["xa_partials"]
