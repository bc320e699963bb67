"""What a CTA of attention reads besides cached keys and values, and what it makes of it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.warpgroup import WARPS, Layout, Warpgroup

QUERIES = 8  # query heads are computed in eights
# One number per lane, which all warps have.
_LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (1,))),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(-2,),
    vector_dim=-1,
)


def padded_group(group: int) -> int:
    """The number of query heads that a kernel computes for a group."""
    return -(-group // QUERIES) * QUERIES


def halves_of(head_dim: int) -> tuple[pl.Slice, pl.Slice]:
    """The dimensions of a head that are rotated with each other."""
    half = head_dim // 2
    return pl.ds(0, half), pl.ds(half, half)


@functools.cache
def heads_layout(head_dim: int) -> Layout:
    """How half of the dimensions of eight heads lie in registers: a warp has two of the heads."""
    half = head_dim // 2
    vector = max(4, half // 16)
    spare = 16 * vector // half
    return plgpu.Layout.TILED(
        plgpu.Tiling(((QUERIES, half), (2, half), (vector,))),
        warp_dims=(-5,),
        lane_dims=(*((plgpu.Replicated(spare),) if spare > 1 else ()), -3, -2),
        vector_dim=-1,
    )


class Half(NamedTuple):
    """Half of the dimensions of one or more heads of the product of q, k and v."""

    product: jax.Array  # bfloat16 [..., H/2] without the norm's factor
    bias: jax.Array | None  # [..., H/2], or None


class Rotation(NamedTuple):
    """What turns the halves of queries or keys into what attention reads."""

    cosines: jax.Array  # [..., H/2] cosines of the row's position
    sines: jax.Array  # [..., H/2] sines of the row's position
    scales: tuple[jax.Array, ...] | None  # two halves of the norm's scale, or None without a norm

    def rotated(self, halves: list[jax.Array], eps: float) -> list[jax.Array]:
        """The halves of queries or keys, normed if they have a norm, and rotated."""
        first, second = halves
        if self.scales is not None:
            total = jnp.sum(first * first, axis=-1) + jnp.sum(second * second, axis=-1)
            factor = lax.rsqrt(total / (2 * first.shape[-1]) + eps)
            if first.ndim == 2:
                factor = lax.broadcast_in_dim(factor, first.shape, (0,))
            first, second = (
                rounded(x * factor * scale) for x, scale in zip(halves, self.scales, strict=True)
            )
        return [
            first * self.cosines - second * self.sines,
            second * self.cosines + first * self.sines,
        ]


def projected(halves: list[Half], factor: jax.Array) -> list[jax.Array]:
    """The halves with factor and bias, rounded as if the product had them."""
    products = [(factor * half.product.astype(jnp.float32), half.bias) for half in halves]
    return [rounded(x if bias is None else x + bias.astype(jnp.float32)) for x, bias in products]


def rounded(x: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def load_squares(threads: Warpgroup, partials: Any, row: Any) -> tuple[list, list]:
    """Requests the partial mean squares [P, M] of a row.

    Returns those in vectors of 32, one number per lane, and the others as scalars.
    """
    count = partials.shape[0]
    vectors = [
        threads.load(partials.at[pl.ds(i, 32), row], _LANES) for i in range(0, count - 31, 32)
    ]
    return vectors, [partials[i, row] for i in range(count // 32 * 32, count)]


def norm_factor(vectors: list, numbers: list, eps: float) -> jax.Array:
    """The factor of a row's norm, given what `load_squares` returns."""
    if vectors:
        numbers = [jnp.sum(sum(vectors[1:], start=vectors[0])), *numbers]
    return lax.rsqrt(sum(numbers[1:], start=numbers[0]) + eps)


class Row(NamedTuple):
    """What a CTA reads besides cached keys and values, as it is in global memory."""

    length: jax.Array  # filled cache positions of the row
    # Partial mean squares of the row in vectors of 32, one number per lane.
    square_partials: list[jax.Array]
    other_partials: list[jax.Array]  # partial mean squares that do not fill a vector, as scalars
    queries: list[list[Half]]  # two halves of the query heads, for every eight heads
    key: list[Half]  # two halves of one head
    value: list[Half]  # two halves of one head
    query_rotation: Rotation  # rotation of the queries
    key_rotation: Rotation  # rotation of the key

    def norm_factor(self, eps: float) -> jax.Array:
        """The factor of the row's norm."""
        return norm_factor(self.square_partials, self.other_partials, eps)


def load_row(
    threads: Warpgroup, operands: Any, group: int, kv_heads: int, row: Any, head: Any, one: Layout
) -> Row:
    """Requests everything that a CTA reads besides cached keys and values.

    The operands are references to the `AttentionInputs`, with heads as a dimension; `group` query
    heads share a key head. The layout `one` is for half of the dimensions of the key and of the
    value.
    """
    heads, head_dim = group * kv_heads, operands.qkv.shape[2]
    halves, eight = halves_of(head_dim), heads_layout(head_dim)

    def load(ref, place, layout):
        return threads.load(ref.at[place], layout)

    def projection(columns, layout):
        return [
            Half(
                load(operands.qkv, (row, columns, dims), layout),
                None if operands.bias is None else load(operands.bias, (columns, dims), layout),
            )
            for dims in halves
        ]

    def rotation(row, norm, layout):
        scales = None
        if norm is not None:
            scales = tuple(load(norm, (dims,), layout) for dims in halves)
        cosines, sines = (load(x, (row,), layout) for x in (operands.cosines, operands.sines))
        return Rotation(cosines, sines, scales)

    length = operands.lengths[row]
    squares = load_squares(threads, operands.square_partials, row)
    key = projection(heads + head, one)
    value = projection(heads + kv_heads + head, one)
    starts = range(0, padded_group(group), QUERIES)
    queries = [projection(pl.ds(head * group + i, QUERIES), eight) for i in starts]
    key_rotation = rotation(row, operands.k_norm, one)
    # Opaque, or the compiler would take both loads for one, which has one layout.
    distinct = one != eight.reduce(0) and not threads.simulated
    query_rotation = jax.tree.map(
        lambda x: lax.broadcast_in_dim(x, (QUERIES, x.shape[0]), (1,)),
        rotation(opaque(row) if distinct else row, operands.q_norm, eight.reduce(0)),
    )
    return Row(length, *squares, queries, key, value, query_rotation, key_rotation)
