"""What a CTA of `attention_sm90` reads besides cached keys and values, and what it makes of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.attention import AttentionInputs
from pallas_kernels.fp4_matmul.sm90.synchronize import opaque

HEAD_DIM = 128
QUERIES = 8  # columns of wgmma, or a multiple
HALVES = pl.ds(0, HEAD_DIM // 2), pl.ds(HEAD_DIM // 2, HEAD_DIM // 2)

# Halves of eight heads: a warp has two of the heads, a lane has four dimensions.
_HEADS = plgpu.Layout.TILED(
    plgpu.Tiling(((QUERIES, 64), (2, 64), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# Half of one head, which all warps have.
_HEAD = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (2,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)
# One number per lane, which all warps have.
_LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)


class Half(NamedTuple):
    """Half of the dimensions of one or more heads of the product of q, k and v.

    Attributes:
        product: bfloat16 [..., H/2] without the norm's factor.
        bias: [..., H/2], or None.
    """

    product: jax.Array
    bias: jax.Array | None


class Rotation(NamedTuple):
    """What turns the halves of queries or keys into what attention reads.

    Attributes:
        cosines: [..., H/2] cosines of the row's position.
        sines: [..., H/2] sines of the row's position.
        scales: two halves of the norm's scale, or None without a norm.
    """

    cosines: jax.Array
    sines: jax.Array
    scales: tuple[jax.Array, ...] | None

    def rotated(self, halves: list[jax.Array], eps: float) -> list[jax.Array]:
        """The halves of queries or keys, normed if they have a norm, and rotated."""
        first, second = halves
        if self.scales is not None:
            mean = (jnp.sum(first * first, axis=-1) + jnp.sum(second * second, axis=-1)) / HEAD_DIM
            factor = lax.rsqrt(mean + eps)
            if first.ndim == 2:
                factor = lax.broadcast_in_dim(factor, first.shape, (0,))
            first, second = (
                _rounded(x * factor * scale) for x, scale in zip(halves, self.scales, strict=True)
            )
        return [
            first * self.cosines - second * self.sines,
            second * self.cosines + first * self.sines,
        ]


def projected(halves: list[Half], factor: jax.Array) -> list[jax.Array]:
    """The halves with factor and bias, rounded as if the product had them."""
    products = [(factor * half.product.astype(jnp.float32), half.bias) for half in halves]
    return [_rounded(x if bias is None else x + bias.astype(jnp.float32)) for x, bias in products]


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


class Row(NamedTuple):
    """What a CTA reads besides cached keys and values, as it lies in global memory.

    Attributes:
        length: filled cache positions of the row.
        square_partials: partial mean squares of the row in vectors of 32, one number per lane.
        other_partials: partial mean squares that do not fill a vector, as scalars.
        queries: two halves of the query heads, for every eight heads.
        key: two halves of one head.
        value: two halves of one head.
        query_rotation: rotation of the queries.
        key_rotation: rotation of the key.
    """

    length: jax.Array
    square_partials: list[jax.Array]
    other_partials: list[jax.Array]
    queries: list[list[Half]]
    key: list[Half]
    value: list[Half]
    query_rotation: Rotation
    key_rotation: Rotation

    def norm_factor(self, eps: float) -> jax.Array:
        """The factor of the row's norm."""
        vectors, numbers = self.square_partials, self.other_partials
        if vectors:
            numbers = [jnp.sum(sum(vectors[1:], start=vectors[0])), *numbers]
        return lax.rsqrt(sum(numbers[1:], start=numbers[0]) + eps)


def load_row(
    operands: AttentionInputs, group: int, padded: int, row: Any, head: Any, *, simulated: bool
) -> Row:
    """Requests everything that a CTA reads besides cached keys and values."""
    kv_heads = operands.keys.shape[1]
    heads = group * kv_heads

    def load(ref, place, layout):
        return plgpu.load(ref.at[place], layout=layout, optimized=False)

    def projection(columns, layout):
        return [
            Half(
                load(operands.qkv, (row, columns, dims), layout),
                None if operands.bias is None else load(operands.bias, (columns, dims), layout),
            )
            for dims in HALVES
        ]

    def rotation(row, norm, layout):
        scales = None
        if norm is not None:
            scales = tuple(load(norm, (dims,), layout) for dims in HALVES)
        cosines, sines = (load(x, (row,), layout) for x in (operands.cosines, operands.sines))
        return Rotation(cosines, sines, scales)

    length = operands.lengths[row]
    partials = operands.square_partials
    count = partials.shape[0]
    vectors = [load(partials, (pl.ds(i, 32), row), _LANES) for i in range(0, count - 31, 32)]
    others = [partials[i, row] for i in range(count // 32 * 32, count)]
    key = projection(heads + head, _HEAD)
    value = projection(heads + kv_heads + head, _HEAD)
    starts = range(0, padded, QUERIES)
    queries = [projection(pl.ds(head * group + i, QUERIES), _HEADS) for i in starts]
    key_rotation = rotation(row, operands.k_norm, _HEAD)
    # Opaque, or the compiler would take both loads for one, which has one layout.
    query_rotation = jax.tree.map(
        lambda x: lax.broadcast_in_dim(x, (QUERIES, x.shape[0]), (1,)),
        rotation(row if simulated else opaque(row), operands.q_norm, _HEADS.reduce(0)),
    )
    return Row(length, vectors, others, queries, key, value, query_rotation, key_rotation)
