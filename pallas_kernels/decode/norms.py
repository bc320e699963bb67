"""The kernels of a decode step before and after its MLP products: residual add, RMSNorm, SwiGLU.

Deferred normalization: the factor of an RMSNorm, one number per row, passes through a linear map.
`add_rmsnorm` therefore writes x * scale without the factor, the product reads that, and the reader
of the product multiplies by the factor. So no kernel waits for a whole row, and every CTA has a few
columns. Its contributions to the mean square of a row and to the LoRA shrink x A^T are partial
sums, which their reader adds up in an order that never changes.

The kernels use Pallas's Triton backend; `lora_shrink` has what they share.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fp4_matmul import lora_shrink
from pallas_kernels.fp4_matmul.tiling import MAX_ROWS_OF_PARTIALS

_LOG2_E = 1.4426950408889634


class DeferredNorm(NamedTuple):
    """The residual and its RMSNorm without the factor 1 / sqrt(mean square + eps).

    Attributes:
        residual: bfloat16 [M, D].
        scaled: bfloat16 [M, D], the residual times the scale of the norm. It lacks the factor, and
            so does a product with it.
        xa_partials: float32 [P, M, R'] whose sum over P is `scaled` A^T, or None where no kernel
            has computed them. Columns after R are zero.
        square_partials: float32 [P, M] whose sum over P is the mean square of the residual.
    """

    residual: jax.Array
    scaled: jax.Array
    xa_partials: jax.Array | None
    square_partials: jax.Array


def norm_factor(square_partials: Any, rows: jax.Array, eps: float) -> jax.Array:
    """The factors of a norm, float32 [rows], for use inside a Triton kernel.

    Args:
        square_partials: reference to the float32 [P, M] partial mean squares.
        rows: int32 [rows]; rows from M on are read as zeros.
        eps: epsilon of the norm.
    """
    count, m = square_partials.shape
    index = jnp.arange(pl.next_power_of_2(count))[:, None]
    mask = (index < count) & (rows < m)[None, :]
    partials = plt.load(square_partials.at[index, rows[None, :]], mask=mask, other=0.0)
    return lax.rsqrt(jnp.sum(partials, axis=0) + eps)


def add_rmsnorm(
    x: jax.Array,
    y: jax.Array,
    scale: jax.Array,
    a: jax.Array | None,
    *,
    interpret: bool = False,
) -> DeferredNorm:
    """Adds to the residual, begins an RMSNorm, and computes the LoRA shrink of the next product.

    Args:
        x: bfloat16 [M, D] residual.
        y: bfloat16 [M, D] to add.
        scale: float32 [D] scale of the norm.
        a: bfloat16 [R, D] A of the next product's adapter, or None.
        interpret: run on a CPU.

    Returns:
        x + y with its norm, whose factor is deferred.
    """
    m, width = x.shape

    def compute_tile(refs, tile):
        residual = tile.load(refs["x"]) + tile.load(refs["y"])
        residual = residual.astype(x.dtype).astype(jnp.float32)
        factors = plt.load(refs["scale"].at[tile.cols], mask=tile.cols < width, other=0.0)
        scaled = (residual * factors[None, :]).astype(x.dtype)

        @pl.when(tile.first)
        def store():
            tile.store(refs["residual"], residual.astype(x.dtype))
            tile.store(refs["scaled"], scaled)
            squares = jnp.sum(residual * residual, axis=1) / width
            place = refs["square_partials"].at[tile.index, tile.rows]
            plt.store(place, squares, mask=tile.rows < m)

        return scaled

    partials = pl.cdiv(width, lora_shrink.COLUMNS), m
    results = {
        "residual": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "scaled": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "square_partials": jax.ShapeDtypeStruct(partials, jnp.float32),
    }
    outs = lora_shrink.shrink_tiles(
        "add_rmsnorm",
        compute_tile,
        {"x": x, "y": y, "scale": scale},
        results,
        a,
        (m, width),
        interpret=interpret,
    )
    return DeferredNorm(*(outs[name] for name in DeferredNorm._fields))


def swiglu(
    gate_up: jax.Array,
    square_partials: jax.Array,
    a: jax.Array | None,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """SwiGLU of a product that lacks its norm's factor, and the LoRA shrink of the next product.

    Args:
        gate_up: bfloat16 [M, 2 F]; the gate is the first half.
        square_partials: float32 [P, M] partial mean squares of the norm.
        a: bfloat16 [R, F] A of the next product's adapter, or None.
        eps: epsilon of the norm.
        interpret: run on a CPU.

    Returns:
        bfloat16 [M, F], and the partials of its x A^T as in `DeferredNorm`, or None without A.
    """
    m, outputs = gate_up.shape[0], gate_up.shape[1] // 2
    dtype = gate_up.dtype

    def compute_tile(refs, tile):
        factor = norm_factor(refs["square_partials"], tile.rows, eps)[:, None]
        # Rounded where the product would be, had it the factor.
        gate = (tile.load(refs["gate_up"]) * factor).astype(dtype).astype(jnp.float32)
        up = (tile.load(refs["gate_up"], offset=outputs) * factor).astype(dtype)
        active = (gate / (1.0 + jnp.exp2(-_LOG2_E * gate))).astype(dtype)
        hidden = (active.astype(jnp.float32) * up.astype(jnp.float32)).astype(dtype)

        @pl.when(tile.first)
        def store():
            tile.store(refs["hidden"], hidden)

        return hidden

    outs = lora_shrink.shrink_tiles(
        "swiglu",
        compute_tile,
        {"gate_up": gate_up, "square_partials": square_partials},
        {"hidden": jax.ShapeDtypeStruct((m, outputs), dtype)},
        a,
        (m, outputs),
        # With 18944 columns, tiles of 128 columns take 4.9 us at 32 rows where tiles of 256 take
        # 6.2, and both take equally long at 8 rows. Larger tiles leave fewer partials, and their
        # reader reads all of them.
        block=lora_shrink.COLUMNS if 16 < m <= MAX_ROWS_OF_PARTIALS else 2 * lora_shrink.COLUMNS,
        # With more rows, all CTAs run at the same time only if they are small.
        warps=8 if m <= 32 else 4,
        interpret=interpret,
    )
    return outs["hidden"], outs["xa_partials"]
