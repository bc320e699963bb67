"""Attention of one new token per row: what a decode step does between its q, k, v and o products.

`attend` does all of it in one kernel: the norm's factor, the bias, the norms of queries and keys,
the rotation, the new key and value, and attention. A decode step is short of time for its many
small operations, not of bandwidth.

With few rows, each row is split into parts, so that all SMs have work; `merge_parts` then adds the
parts up. With enough rows there is one part, and `attend_whole` writes the final result.

The kernels use Pallas's Triton backend; `attention_sm90` replaces `attend_whole` on Hopper GPUs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.decode import to_cache
from pallas_kernels.decode.norms import norm_factor
from pallas_kernels.fp4_matmul import lora_shrink

_BLOCK = 64  # cache positions that are read at a time
_MAX_PARTS = 8  # parts that a row is split into, at most
_LOG2_E = 1.4426950408889634

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
    return min(_MAX_PARTS, wanted, pl.cdiv(positions, 2 * _BLOCK))


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
    return _run(inputs, parts, shape[0], eps=eps, num_sms=num_sms, interpret=interpret)


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
    attended = jax.ShapeDtypeStruct((m, inputs.num_heads * head_dim), inputs.qkv.dtype)
    return _run(inputs, attended, 1, eps=eps, num_sms=num_sms, interpret=interpret)


def _run(inputs, attended, parts, *, eps, num_sms, interpret):
    """Runs the kernel, whose CTAs have a part of a row for a key head each.

    `attended` has the shapes of what it writes: those of `AttentionParts`, or of their merged sum.
    """
    m, kv_heads, _, head_dim = inputs.keys.shape
    # With fewer stages more CTAs share an SM, if there are more; and three stages of heads with 256
    # dimensions exceed the shared memory of a desktop GPU.
    few = m * kv_heads <= 2 * num_sms
    operands, outputs = len(jax.tree.leaves(inputs)), len(jax.tree.leaves(attended))
    return pl.pallas_call(
        functools.partial(_attend_block, eps=eps, parts=parts),
        grid=(m, kv_heads, parts),
        out_shape=(
            attended,
            jax.ShapeDtypeStruct(inputs.keys.shape, inputs.keys.dtype),
            jax.ShapeDtypeStruct(inputs.values.shape, inputs.values.dtype),
        ),
        input_output_aliases={operands - 2: outputs, operands - 1: outputs + 1},
        compiler_params=plt.CompilerParams(
            num_warps=4, num_stages=3 if few and head_dim <= 128 else 2
        ),
        name="attend",
        interpret=interpret,
    )(inputs)


@dataclasses.dataclass(frozen=True)
class _Row:
    """The product of q, k and v for one row, as the kernel reads it.

    Attributes:
        inputs: references to the kernel's operands.
        row: index of the row.
        factor: factor of the row's norm.
        cosines: [H/2] cosines of the row's position.
        sines: [H/2] sines of the row's position.
        eps: epsilon of the norms.
    """

    inputs: AttentionInputs
    row: Any
    factor: jax.Array
    cosines: jax.Array
    sines: jax.Array
    eps: float

    def projected(self, columns: jax.Array) -> jax.Array:
        """Columns of the product with factor and bias, rounded as if the product had them."""
        qkv, bias = self.inputs.qkv, self.inputs.bias
        mask = columns < qkv.shape[1]
        x = plt.load(qkv.at[self.row, columns], mask=mask, other=0.0)
        x = self.factor * x.astype(jnp.float32)
        if bias is not None:
            added = plt.load(bias.at[columns], mask=mask, other=0.0)
            x += added.astype(jnp.float32)
        return x.astype(qkv.dtype).astype(jnp.float32)

    def rotated(self, columns: jax.Array, norm: Any) -> tuple[jax.Array, jax.Array]:
        """The two halves of heads that begin at some columns, normed and rotated.

        Args:
            columns: [..., H/2] columns of the first half of each head.
            norm: reference to the scale of the heads' norm, or None.
        """
        dtype, half = self.inputs.qkv.dtype, columns.shape[-1]
        first, second = self.projected(columns), self.projected(columns + half)
        if norm is not None:
            squares = jnp.sum(first * first + second * second, axis=-1, keepdims=True)
            over = lax.rsqrt(squares / (2 * half) + self.eps)
            halves = jnp.arange(half)
            scales = (plt.load(norm.at[dims]) for dims in (halves, half + halves))
            first, second = (
                (x * over * scale).astype(dtype).astype(jnp.float32)
                for x, scale in zip((first, second), scales, strict=True)
            )
        return (
            (first * self.cosines - second * self.sines).astype(dtype),
            (second * self.cosines + first * self.sines).astype(dtype),
        )


def _attend_block(inputs, attended, new_keys, new_values, *, eps, parts):
    """What one CTA does: a part of a row for one key head and the query heads that share it."""
    row, head, part = (pl.program_id(axis) for axis in range(3))
    _, kv_heads, _, head_dim = inputs.keys.shape
    heads = inputs.num_heads
    group = heads // kv_heads
    dims, halves = jnp.arange(head_dim), jnp.arange(head_dim // 2)
    length = plt.load(inputs.lengths.at[row])
    factor = jnp.sum(norm_factor(inputs.square_partials, row[None], eps))
    cosines = plt.load(inputs.cosines.at[row, halves])
    sines = plt.load(inputs.sines.at[row, halves])
    product = _Row(inputs, row, factor, cosines, sines, eps)

    # Heads after the group are other groups' heads, computed along and not stored.
    query = jnp.arange(max(16, pl.next_power_of_2(group)))
    in_group = query < group
    q_heads = head * group + query
    queries = product.rotated(q_heads[:, None] * head_dim + halves[None, :], inputs.q_norm)
    key = product.rotated((heads + head) * head_dim + halves, inputs.k_norm)
    key = tuple(to_cache(k, inputs.keys.dtype).astype(inputs.qkv.dtype) for k in key)
    value = product.projected((heads + kv_heads + head) * head_dim + dims)
    value = to_cache(value, inputs.values.dtype).astype(jnp.float32)

    # The new token belongs to the first part, which so is never empty; the others may be.
    owns_new_token = part == 0
    start = _attend_to_new_token(queries, key, value, owns_new_token)
    # A row's filled blocks are divided into equal parts, however long the row is.
    filled_blocks = pl.cdiv(length, _BLOCK)
    part_blocks = pl.cdiv(filled_blocks, parts)
    first = part * part_blocks
    last = jnp.minimum(first + part_blocks, filled_blocks)
    add = functools.partial(_attend_to_cached_block, inputs, row, head, length, queries)
    total, weight, largest = lax.fori_loop(first, last, add, start)

    if isinstance(attended, AttentionParts):
        place = attended.sums.at[part, row, q_heads[:, None], dims[None, :]]
        plt.store(place, total, mask=in_group[:, None])
        plt.store(attended.weights.at[part, row, q_heads], weight, mask=in_group)
        plt.store(attended.largest.at[part, row, q_heads], largest, mask=in_group)
    else:
        merged = (1.0 / weight)[:, None] * total
        place = attended.at[row, q_heads[:, None] * head_dim + dims[None, :]]
        plt.store(place, merged.astype(inputs.qkv.dtype), mask=in_group[:, None])

    @pl.when(owns_new_token)
    def store_new_token():
        for ref, new, dims_of_new in (
            (new_keys, key[0], halves),
            (new_keys, key[1], head_dim // 2 + halves),
            (new_values, value, dims),
        ):
            place = ref.at[row, head, length, dims_of_new]
            plt.store(place, new.astype(ref.dtype))


def _score_scale(queries):
    """The factor of scores in base 2."""
    return (2 * queries[0].shape[1]) ** -0.5 * _LOG2_E


def _attend_to_new_token(queries, key, value, owns):
    """The sums with which a CTA begins: those of the new token, or of no token.

    Args:
        queries: two halves [G, H/2].
        key: two halves [H/2].
        value: float32 [H].
        owns: whether the CTA's part has the new token.

    Returns:
        float32 [G, H], [G] and [G], as `AttentionParts` has them.
    """
    score = jnp.sum(
        queries[0].astype(jnp.float32) * key[0].astype(jnp.float32)
        + queries[1].astype(jnp.float32) * key[1].astype(jnp.float32),
        axis=1,
    )
    rows = len(score)
    empty = jnp.finfo(jnp.float32).min
    largest = jnp.where(owns, _score_scale(queries) * score, empty)
    weight = jnp.where(owns, jnp.ones(rows, jnp.float32), 0.0)
    total = jnp.where(owns, jnp.broadcast_to(value[None, :], (rows, len(value))), 0.0)
    return total, weight, largest


def _attend_to_cached_block(inputs, row, head, length, queries, block, carry):
    """Adds the positions of one block of the cache, for `lax.fori_loop`; an online softmax."""
    total, weight, largest = carry
    dtype, head_dim = inputs.qkv.dtype, inputs.keys.shape[-1]
    dims, halves = jnp.arange(head_dim), jnp.arange(head_dim // 2)
    position = block * _BLOCK + jnp.arange(_BLOCK)
    filled = position < length

    def read(ref, dims):
        place = ref.at[row, head, position[:, None], dims[None, :]]
        return plt.load(place, mask=filled[:, None], other=0.0).astype(dtype)

    first, second = (read(inputs.keys, half) for half in (halves, head_dim // 2 + halves))
    product = plt.dot(queries[0], first, trans_b=True)
    scores = _score_scale(queries) * (product + plt.dot(queries[1], second, trans_b=True))
    scores = jnp.where(filled[None, :], scores, -jnp.inf)
    top = jnp.maximum(largest, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - top[:, None])
    keep = jnp.exp2(largest - top)
    total = keep[:, None] * total + plt.dot(weights.astype(dtype), read(inputs.values, dims))
    return total, keep * weight + jnp.sum(weights, axis=1), top


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
        live = tile.rows < m
        index = jnp.arange(pl.next_power_of_2(count))[None, :]
        mask = live[:, None] & (index < count)
        place = index, tile.rows[:, None], tile.index
        largest = plt.load(refs["largest"].at[place], mask=mask, other=-jnp.inf)
        weights = plt.load(refs["weights"].at[place], mask=mask, other=0.0)
        top = jnp.max(jnp.where(live[:, None], largest, 0.0), axis=1)
        weight = jnp.sum(jnp.exp2(largest - top[:, None]) * weights, axis=1)
        weight = jnp.where(live, weight, 1.0)
        total = jnp.zeros((len(tile.rows), head_dim), jnp.float32)
        for part in range(count):
            place = refs["largest"].at[part, tile.rows, tile.index]
            fraction = jnp.exp2(plt.load(place, mask=live, other=-jnp.inf) - top) / weight
            place = refs["sums"].at[part, tile.rows[:, None], tile.index, tile.dims[None, :]]
            total += fraction[:, None] * plt.load(place, mask=live[:, None], other=0.0)
        attended = total.astype(dtype)

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
