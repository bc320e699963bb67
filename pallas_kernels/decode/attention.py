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
from collections.abc import Callable, Iterator
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
from pallas_kernels.decode.norms import RowSquares
from pallas_kernels.fp4_matmul import lora_shrink
from pallas_kernels.warpgroup import WARPS, Layout, Warpgroup

_MOST_REGISTERS = 200  # of a thread, for what it keeps between two blocks
_MAX_PARTS = 8  # parts that a row is split into, at most
_LOG2_E = 1.4426950408889634
_EMPTY = float(jnp.finfo(jnp.float32).min)  # the largest score of no position

Array = Any  # a jax.Array, its shape and dtype, or a reference to it inside a kernel


class AttentionInputs(NamedTuple):
    """What attention of a decode step reads, in the order of the kernels' operands.

    Attributes:
        qkv: bfloat16 [M, (N + 2 K) H], the product of q, k and v without its norm's factor and
            without its bias.
        square_partials: float32 [P, M] partial mean squares of the norm before the product.
        cosines: float32 [M, H/2] cosines of the rotation of queries and keys.
        sines: float32 [M, H/2] sines of the rotation.
        lengths: int32 [M], number of filled cache positions of each row, less than S.
        bias: [(N + 2 K) H] bias of the product, or None.
        q_norm: float32 [H] scale of the RMSNorm of queries, or None.
        k_norm: float32 [H] scale of the RMSNorm of keys, or None.
        keys: [M, K, S, H] cached keys, bfloat16 or float8_e4m3fn; donated.
        values: [M, K, S, H] cached values, finite after a row's filled positions too; donated.
    """

    qkv: Array
    square_partials: Array
    cosines: Array
    sines: Array
    lengths: Array
    bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    keys: Array
    values: Array

    @property
    def num_heads(self) -> int:
        """N, the number of query heads."""
        _, kv_heads, _, head_dim = self.keys.shape
        return self.qkv.shape[1] // head_dim - 2 * kv_heads


class AttentionParts(NamedTuple):
    """Attention over equal parts of the filled cache positions of each row.

    Attributes:
        sums: float32 [P, M, N, H], sums of values times weights, the largest of which is 1.
        weights: float32 [P, M, N], sums of these weights; 0 where a part holds no key.
        largest: float32 [P, M, N], the largest score in base 2.
    """

    sums: Array
    weights: Array
    largest: Array


def num_parts(keys: jax.Array | jax.ShapeDtypeStruct, num_sms: int) -> int:
    """Number of parts that attention splits each row into, so that all SMs have work.

    Args:
        keys: [M, K, S, H] cached keys.
        num_sms: number of SMs of the device.
    """
    m, kv_heads, positions, _ = keys.shape
    wanted = max(1, num_sms // (m * kv_heads))
    return min(_MAX_PARTS, wanted, pl.cdiv(positions, 2 * BLOCK))


def attend(
    inputs: AttentionInputs, *, eps: float, num_sms: int, interpret: bool = False
) -> tuple[AttentionParts, jax.Array, jax.Array]:
    """Writes the new key and value of every row to the cache, and attends to all positions.

    Args:
        inputs: the product of q, k and v, and the cache.
        eps: epsilon of the norms.
        num_sms: number of SMs of the device.
        interpret: run on a CPU.

    Returns:
        `num_parts` parts for `merge_parts`, and the updated keys and values.
    """
    m, _, _, head_dim = inputs.keys.shape
    shape = num_parts(inputs.keys, num_sms), m, inputs.num_heads
    parts = AttentionParts(
        sums=jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
        weights=jax.ShapeDtypeStruct(shape, jnp.float32),
        largest=jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    return _run(inputs, parts, shape[0], eps=eps, interpret=interpret)


def attend_whole(
    inputs: AttentionInputs, *, eps: float, num_sms: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Does what `attend` and `merge_parts` do, for rows that are not split.

    Args:
        inputs: the product of q, k and v, and a cache with one of `num_parts`.
        eps: epsilon of the norms.
        num_sms: number of SMs of the device.
        interpret: run on a CPU.

    Returns:
        Attention, bfloat16 [M, N H], and the updated keys and values.
    """
    m, _, _, head_dim = inputs.keys.shape
    attended = jax.ShapeDtypeStruct((m, inputs.num_heads, head_dim), inputs.qkv.dtype)
    attended, keys, values = _run(inputs, attended, 1, eps=eps, interpret=interpret)
    return attended.reshape(m, -1), keys, values


def _run(inputs, attended, parts, *, eps, interpret):
    """Runs the kernel, whose CTAs have a part of a row for a key head each.

    `attended` has the shapes of what it writes: those of `AttentionParts`, or of their merged sum.
    """
    m, kv_heads, positions, head_dim = inputs.keys.shape
    heads = inputs.num_heads
    group = heads // kv_heads
    total = heads + 2 * kv_heads
    # A CTA reads heads in eights, also after its group: those of other groups, computed along and
    # not stored. Few models have too few heads for that.
    padded = -(-group // HEADS) * HEADS
    missing = max(0, (kv_heads - 1) * group + padded - total)
    qkv = inputs.qkv.reshape(m, total, head_dim)
    bias = inputs.bias
    if bias is not None:
        bias = jnp.pad(bias.reshape(total, head_dim), ((0, missing), (0, 0)))
    operands = inputs._replace(
        qkv=jnp.pad(qkv, ((0, 0), (0, missing), (0, 0))), bias=bias, keys=None, values=None
    )
    # No cache of a rollout is so small.
    short = (0, 0), (0, 0), (0, max(0, BLOCK - positions)), (0, 0)
    caches = tuple(jnp.pad(cache, short) for cache in (inputs.keys, inputs.values))
    numbers = (padded, WARPS), jnp.float32
    results, caches = warpgroup.run(
        functools.partial(_attend_block, group=group, eps=eps, parts=parts),
        "attend",
        (m, kv_heads, parts),
        operands,
        attended,
        updated=caches,
        scratch={
            "totals": ((HEADS, WARPS, head_dim), jnp.float32),
            "weights": numbers,
            "largest": numbers,
        },
        interpret=interpret,
    )
    return results, *(cache[:, :, :positions] for cache in caches)


@dataclasses.dataclass(frozen=True)
class _Head:
    """The product of q, k and v for one row, as a CTA reads it.

    Attributes:
        threads: the threads of the CTA.
        inputs: references to the kernel's operands.
        row: index of the row.
        eps: epsilon of the norms.
    """

    threads: Warpgroup
    inputs: AttentionInputs
    row: Any
    eps: float

    def load(self, heads: Any, dims: Any, layout: Layout) -> tuple[jax.Array, Any]:
        """Loads dimensions of heads of the product, and their bias or None."""
        qkv, bias = self.inputs.qkv, self.inputs.bias
        x = self.threads.load(qkv.at[self.row, heads, dims], layout)
        return x, None if bias is None else self.threads.load(bias.at[heads, dims], layout)

    def halves(self, heads: Any, norm: Any, layout: Layout) -> tuple:
        """Loads all that makes queries, or a key: the halves of heads, and those of a scale."""
        half = self.inputs.cosines.shape[1]
        dims = pl.ds(0, half), pl.ds(half, half)
        loaded = [self.load(heads, place, layout) for place in dims]
        if norm is None:
            return loaded, None
        vector = products.query_layout(2 * half).reduce(0)
        return loaded, [self.threads.load(norm.at[place], vector) for place in dims]

    def rotated(self, halves: tuple, factor: Any, angles: tuple) -> tuple[jax.Array, jax.Array]:
        """The two halves of heads, normed if they have a norm, and rotated; bfloat16."""
        loaded, scales = halves
        first, second = (projected(x, bias, factor) for x, bias in loaded)

        def over_heads(numbers):
            return lax.broadcast_in_dim(numbers, first.shape, (first.ndim - 1,))

        if scales is not None:
            squares = jnp.sum(first * first + second * second, axis=-1)
            over = lax.rsqrt(squares / (2 * first.shape[-1]) + self.eps)
            if first.ndim == 2:
                over = lax.broadcast_in_dim(over, first.shape, (0,))
            first, second = (
                _rounded(x * over * over_heads(scale))
                for x, scale in zip((first, second), scales, strict=True)
            )
        cosines, sines = map(over_heads, angles)
        return (
            (first * cosines - second * sines).astype(jnp.bfloat16),
            (second * cosines + first * sines).astype(jnp.bfloat16),
        )


def projected(x: jax.Array, bias: jax.Array | None, factor: jax.Array) -> jax.Array:
    """A product with factor and bias, rounded as if it had had them, in float32."""
    x = factor * x.astype(jnp.float32)
    return _rounded(x if bias is None else x + bias.astype(jnp.float32))


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


class _Row(NamedTuple):
    """What a CTA has made of the product of q, k and v.

    Attributes:
        queries: two halves, bfloat16 [heads, H/2].
        key: two halves of the new key in the dtype of the cache, [H/2].
        value: the new value in the dtype of the cache, [H].
    """

    queries: tuple[jax.Array, jax.Array]
    key: tuple[jax.Array, jax.Array]
    value: jax.Array


def _load_row(
    threads: Warpgroup, inputs: AttentionInputs, caches: tuple, group: int, eps: float
) -> Callable[[], _Row]:
    """Requests all that a CTA reads besides cached keys and values; what it returns computes."""
    row, head, _ = threads.place
    kv_heads, head_dim = caches[0].shape[1], caches[0].shape[3]
    heads = kv_heads * group
    padded = -(-group // HEADS) * HEADS
    layout = products.query_layout(head_dim)
    vector = layout.reduce(0)
    product = _Head(threads, inputs, row, eps)
    cosines, sines = (threads.load(x.at[row], vector) for x in (inputs.cosines, inputs.sines))
    queries = product.halves(pl.ds(head * group, padded), inputs.q_norm, layout)
    key = product.halves(heads + head, inputs.k_norm, vector)
    columns = products.total_layout(head_dim).reduce((0, 1))
    value = product.load(heads + kv_heads + head, pl.ds(0, head_dim), columns)
    squares = RowSquares.load(threads, inputs.square_partials, row)

    def compute():
        factor, angles = squares.factor(eps), (cosines, sines)
        first, second = product.rotated(key, factor, angles)
        keys, values = (cache.dtype for cache in caches)
        return _Row(
            queries=product.rotated(queries, factor, angles),
            key=(to_cache(first, keys), to_cache(second, keys)),
            value=to_cache(projected(*value, factor), values),
        )

    return compute


@dataclasses.dataclass(frozen=True)
class _Cache:
    """The cached keys and values of one head of a row, in blocks.

    Attributes:
        threads: the threads of the CTA.
        keys: reference to the keys [S, H].
        values: reference to the values [S, H].
    """

    threads: Warpgroup
    keys: Any
    values: Any

    def start(self, block: Any) -> Any:
        """First position of what is read of a block; the last one may begin earlier."""
        return jnp.minimum(block * BLOCK, self.keys.shape[0] - BLOCK)

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
        place = self.values.at[pl.ds(self.start(block), BLOCK)]
        return self.threads.load(place, products.value_layout(self.values.shape[1]))


class _Sums(NamedTuple):
    """An online softmax over the positions of each warp.

    Attributes:
        total: float32 [heads, warps, H], sums of values times weights.
        weights: float32 [heads, warps, 16], whose sums are those of the weights.
        largest: float32 [heads, warps], the largest score in base 2.
    """

    total: jax.Array
    weights: jax.Array
    largest: jax.Array


def _attend_block(
    threads, inputs, caches, attended, totals, weights, largest, *, group, eps, parts
):
    """What one CTA does: a part of a row for one key head and the query heads that share it."""
    row, head, part = threads.place
    length = inputs.lengths[row]
    new_row = _load_row(threads, inputs, caches, group, eps)
    cache = _Cache(threads, *(ref.at[row, head] for ref in caches))
    # A row's filled blocks are divided into equal parts, however long the row is.
    filled_blocks = _ceil_div(length, BLOCK)
    part_blocks = _ceil_div(filled_blocks, parts)
    first = part * part_blocks
    last = jnp.minimum(first + part_blocks, filled_blocks)
    # Without registers for it, a block is requested when it is needed.
    ahead = _registers(group, *caches) <= _MOST_REGISTERS
    keys = cache.load_keys(first) if ahead else None
    values = cache.load_values(first) if ahead and inputs.q_norm is None else None

    new = new_row()
    if ahead and values is None:  # The scales of the norms had its registers.
        values = cache.load_values(first)
    blocks = (keys, values) if ahead else None
    # The new token belongs to the first part, which so is never empty; the others may be.
    owns_new_token = part == 0
    sums = _attend_to_new_token(threads, new, owns_new_token)

    def add_block(block, carry):
        sums, blocks = carry
        keys = blocks[0] if ahead else cache.load_keys(block)
        product = products.scores(threads, new.queries, tuple(map(_bfloat16, keys)))
        # The next block is requested as soon as its registers are free. After the last one the
        # same is read once more, from the nearest cache.
        following = jnp.minimum(block + 1, last - 1)
        keys = cache.load_keys(following) if ahead else None
        values = blocks[1] if ahead else cache.load_values(block)
        positions = block * BLOCK, cache.start(block), length
        sums, weights = _add_scores(threads, sums, product, positions, values.shape[1])
        total = products.add_values(threads, sums.total, weights, _bfloat16(values))
        blocks = (keys, cache.load_values(following)) if ahead else None
        return sums._replace(total=total), blocks

    sums, _ = lax.fori_loop(first, last, add_block, (sums, blocks))
    scratch = _Scratch(threads, totals, weights, largest)
    heads = head * group
    for start, numbers in scratch.merge(sums, group):
        _store(threads, attended, numbers, (part, row, pl.ds(heads + start, len(numbers[1]))))

    @pl.when(owns_new_token)
    def store_new_token():
        half = len(new.key[0])
        for ref, x, dims in (
            (caches[0], new.key[0], pl.ds(0, half)),
            (caches[0], new.key[1], pl.ds(half, half)),
            (caches[1], new.value, pl.ds(0, 2 * half)),
        ):
            threads.store(ref.at[row, head, length, dims], x)


def _registers(group: int, keys: Any, values: Any) -> int:
    """Number of registers that a thread has for queries, sums, and a block of keys and values."""
    heads, head_dim = -(-group // HEADS) * HEADS, keys.shape[3]
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


def _attend_to_new_token(threads: Warpgroup, new: _Row, owns: jax.Array) -> _Sums:
    """The sums with which a CTA begins: those of the new token, or of no token.

    Args:
        threads: the threads of the CTA.
        new: the new token.
        owns: whether the CTA's part has the new token, which its first warp then counts.
    """
    heads, half = new.queries[0].shape
    layout = products.SCORES

    def float32(x):
        return x.astype(jnp.float32)

    score = sum(
        float32(query) * lax.broadcast_in_dim(float32(_bfloat16(key)), query.shape, (1,))
        for query, key in zip(new.queries, new.key, strict=True)
    )
    score = _score_scale(2 * half) * jnp.sum(score, axis=1)
    shape = heads, WARPS
    counts = (threads.iota(shape, 1, layout.reduce(2)) == 0) & jnp.broadcast_to(owns, shape)
    score = lax.broadcast_in_dim(score, shape, (0,))
    largest = jnp.where(counts, score, jnp.full_like(score, _EMPTY))
    weight = jnp.where(counts, jnp.full_like(score, 1.0), jnp.zeros_like(score))
    shape = *shape, BLOCK // WARPS
    weights = _over(weight, shape[2])
    weights = jnp.where(threads.iota(shape, 2, layout) == 0, weights, jnp.zeros_like(weights))
    value = lax.broadcast_in_dim(float32(new.value), (heads, WARPS, 2 * half), (2,))
    return _Sums(_over(weight, 2 * half) * value, weights, largest)


def _add_scores(
    threads: Warpgroup, sums: _Sums, product: jax.Array, positions: tuple, head_dim: int
) -> tuple[_Sums, jax.Array]:
    """Adds the weights of a block, and returns them; the sums of values still lack the block.

    Args:
        threads: the threads of the CTA.
        sums: what is added to.
        product: float32 [heads, warps, 16], products of queries and keys.
        positions: first position of the block, first position that was read, and the row's length.
        head_dim: number of dimensions per head.
    """
    first, start, length = positions
    layout = products.SCORES
    warp, index = (threads.iota(product.shape, axis, layout) for axis in (1, 2))
    position = start + product.shape[2] * warp + index
    inside = (position >= first) & (position < length)
    scores = jnp.where(inside, _score_scale(head_dim) * product, jnp.full_like(product, -jnp.inf))
    top = jnp.maximum(sums.largest, jnp.max(scores, axis=2))
    weights = jnp.exp2(scores - _over(top, scores.shape[2]))
    keep = jnp.exp2(sums.largest - top)
    added = _Sums(
        total=_over(keep, head_dim) * sums.total,
        weights=_over(keep, scores.shape[2]) * sums.weights + weights,
        largest=top,
    )
    return added, weights.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory in which the sums of the warps are added up.

    Attributes:
        threads: the threads of the CTA.
        totals: reference to float32 [8, warps, H].
        weights: reference to float32 [heads, warps].
        largest: reference to float32 [heads, warps].
    """

    threads: Warpgroup
    totals: Any
    weights: Any
    largest: Any

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
        top = jnp.max(largest, axis=1)
        factors = jnp.exp2(largest - lax.broadcast_in_dim(top, largest.shape, (0,)))
        total = jnp.sum(_over(factors, head_dim) * totals, axis=1)
        return total, jnp.sum(factors * weights, axis=1), top


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


def _store(threads: Warpgroup, attended: Any, sums: tuple, place: tuple) -> None:
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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Adds up the parts of `attend`, and computes the LoRA shrink of the next product.

    Args:
        parts: parts of M rows.
        a: bfloat16 [R, N H] A of the next product's adapter, or None.
        dtype: dtype of the result.
        interpret: run on a CPU.

    Returns:
        [M, N H], and the partials of its x A^T as in `norms.DeferredNorm`, or None without A.
    """
    count, m, heads, head_dim = parts.sums.shape

    def compute_tile(refs, tile):
        numbers = [
            [tile.load_rows(refs[name].at[part, :, tile.index]) for part in range(count)]
            for name in ("largest", "weights")
        ]
        top = functools.reduce(jnp.maximum, numbers[0])
        factors = [jnp.exp2(largest - top) for largest in numbers[0]]
        weight = sum(factor * number for factor, number in zip(factors, numbers[1], strict=True))
        sums = [
            tile.over_columns(factor / weight) * tile.load_head(refs["sums"].at[part])
            for part, factor in enumerate(factors)
        ]
        attended = functools.reduce(jnp.add, sums).astype(dtype)

        @pl.when(tile.first)
        def store():
            tile.store(refs["attended"], attended)

        return attended

    outs = lora_shrink.shrink_tiles(
        "merge_parts",
        compute_tile,
        parts._asdict(),
        {"attended": jax.ShapeDtypeStruct((m, heads * head_dim), dtype)},
        a,
        (m, heads * head_dim),
        block=head_dim,
        interpret=interpret,
    )
    return outs["attended"], outs["xa_partials"]
