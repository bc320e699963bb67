"""The kernels of a decode step before and after its MLP products: residual add, RMSNorm, SwiGLU.

Deferred normalization: the factor of an RMSNorm, one number per row, passes through a linear map.
`add_rmsnorm` therefore writes x * scale without the factor, the product reads that, and the reader
of the product multiplies by the factor. So no kernel waits for a whole row, and every CTA has a few
columns. Its contributions to the mean square of a row and to the LoRA shrink x A^T are partial
sums, which their reader adds up in an order that never changes.

`lora_shrink` has what the kernels share.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warp_mma
from pallas_kernels.experts import combine
from pallas_kernels.experts.combine import ExpertSums
from pallas_kernels.fp4_matmul import lora_shrink
from pallas_kernels.warpgroup import WARPS, Layout

_LOG2_E = 1.4426950408889634
_PARTIALS = 4  # partial mean squares that the threads of a row read at a time
_MOST_PARTIALS = 64  # partial mean squares that are added up before their threads' sums are


class DeferredNorm(NamedTuple):
    """The residual and its RMSNorm without the factor 1 / sqrt(mean square + eps)."""

    residual: jax.Array  # bfloat16 [M, D]
    # bfloat16 [M, D], the residual times the scale of the norm. It lacks the factor, and so does a
    # product with it.
    scaled: jax.Array
    # float32 [P, M, R'] whose sum over P is `scaled` A^T, or None where no kernel has computed
    # them. Columns after R are zero.
    xa_partials: jax.Array | None
    square_partials: jax.Array  # float32 [P, M] whose sum over P is the mean square of the residual
    # float32 [P, M, E'] whose sum over P is the product of `scaled` with a router, which lacks the
    # factor; or None without one.
    logit_partials: jax.Array | None = None


def _norm_factors(tile: lora_shrink.Tile, square_partials: Any, eps: float) -> jax.Array:
    """The factors of a norm for the rows of a tile, float32 [rows], of partials [P, M]."""
    threads, rows = tile.threads, tile.rows
    layout = _partials_layout(rows.size)
    count = len(square_partials)
    whole = count // _PARTIALS * _PARTIALS
    numbers = []
    if whole:
        starts = range(0, whole, _MOST_PARTIALS)
        vectors = [
            threads.load(square_partials.at[pl.ds(i, min(_MOST_PARTIALS, whole - i)), rows], layout)
            for i in starts
        ]
        numbers = [jnp.sum(vector, axis=0) for vector in vectors]
    numbers += [tile.load_rows(square_partials.at[i]) for i in range(whole, count)]
    return lax.rsqrt(sum(numbers[1:], start=numbers[0]) + eps)


def _partials_layout(rows: int) -> Layout:
    """How partial mean squares [P, rows] lie in registers: the threads of a row have one each."""
    rows = min(rows, warp_mma.ROWS)
    shared = (plgpu.Replicated(warp_mma.ROWS // rows),) if rows < warp_mma.ROWS else ()
    return plgpu.Layout.TILED(
        plgpu.Tiling(((_PARTIALS, rows), (1,)) if rows > 1 else ((_PARTIALS, 1),)),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=(*shared, -2, -3) if rows > 1 else (*shared, -2),
        vector_dim=-1,
    )


def add_rmsnorm(
    x: jax.Array,
    y: jax.Array | ExpertSums,
    scale: jax.Array,
    a: jax.Array | None,
    *,
    router: jax.Array | None = None,
    interpret: bool = False,
) -> DeferredNorm:
    """Adds y to the residual x, and computes the LoRA shrink of the next product.

    x and y are bfloat16 [M, D], the scale of the norm is float32 [D], A bfloat16 [R, D], or None,
    and the router bfloat16 [E, D], or None. y may also be what experts are still to be added up.
    The sum's RMSNorm lacks its factor.
    """
    columns = x.shape[1]
    pad = functools.partial(lora_shrink.padded, width=lora_shrink.COLUMNS)
    x, scale = pad(x), pad(scale)
    if isinstance(y, ExpertSums):
        y = y._replace(rows=pad(y.rows), shared=y.shared if y.shared is None else pad(y.shared))
    else:
        y = pad(y)
    m, width = x.shape

    def compute_tile(refs, tile):
        residual, added = _float32(tile.load(refs["x"])), refs["y"]
        is_sum = isinstance(added, ExpertSums)
        residual += combine.load(tile, added) if is_sum else _float32(tile.load(added))
        residual = residual.astype(x.dtype)
        scaled = (_float32(residual) * tile.load_columns(refs["scale"])).astype(x.dtype)

        @pl.when(tile.first)
        def store():
            tile.store(refs["residual"], residual)
            tile.store(refs["scaled"], scaled)
            counted = _float32(tile.once(residual))
            squares = jnp.sum(counted * counted, axis=1) / columns
            tile.threads.store(refs["square_partials"].at[tile.index, tile.rows], squares)

        return scaled

    partials = pl.cdiv(width, lora_shrink.COLUMNS), m
    results = {
        "residual": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "scaled": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "square_partials": jax.ShapeDtypeStruct(partials, jnp.float32),
    }
    operands: dict[str, Any] = {"x": x, "y": y, "scale": scale}
    outs = lora_shrink.shrink_tiles(
        "add_rmsnorm",
        compute_tile,
        operands,
        results,
        a if router is None else (a, router),
        (m, width),
        interpret=interpret,
    )
    for name in ("residual", "scaled"):
        outs[name] = outs[name][:, :columns]
    return DeferredNorm(**outs)


def swiglu(
    gate_up: jax.Array,
    square_partials: jax.Array,
    a: jax.Array | None,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """SwiGLU of a product that lacks its norm's factor, and the LoRA shrink of the next product.

    The product is bfloat16 [M, 2 F], first of the gate, and the norm's partial mean squares are
    float32 [P, M]. A is bfloat16 [R, F], or None. Returns bfloat16 [M, F], and the partials of its
    x A^T as in `DeferredNorm`, or None without A.
    """
    # With 18944 columns, tiles of 128 columns take 4.9 us at 32 rows where tiles of 256 take 6.2,
    # and both take equally long at 8 rows. Larger tiles leave fewer partials, and their reader
    # reads all of them.
    few = 16 < len(gate_up) <= 128
    block = lora_shrink.COLUMNS if few else 2 * lora_shrink.COLUMNS
    outputs = gate_up.shape[1] // 2
    if outputs < block or outputs % 8:
        halves = jnp.split(gate_up, 2, axis=1)
        gate_up = jnp.concatenate([lora_shrink.padded(half, block) for half in halves], axis=1)
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    dtype = gate_up.dtype

    def compute_tile(refs, tile):
        gate, up = (_float32(tile.load(refs["gate_up"], offset)) for offset in (0, width))
        factor = tile.over_columns(_norm_factors(tile, refs["square_partials"], eps))
        # Rounded where the product would be, had it the factor.
        gate, up = (_float32((half * factor).astype(dtype)) for half in (gate, up))
        active = (gate / (1.0 + jnp.exp2(-_LOG2_E * gate))).astype(dtype)
        hidden = (_float32(active) * up).astype(dtype)

        @pl.when(tile.first)
        def store():
            tile.store(refs["hidden"], hidden)

        return hidden

    outs = lora_shrink.shrink_tiles(
        "swiglu",
        compute_tile,
        {"gate_up": gate_up, "square_partials": square_partials},
        {"hidden": jax.ShapeDtypeStruct((m, width), dtype)},
        a,
        (m, width),
        block=block,
        interpret=interpret,
    )
    return outs["hidden"][:, :outputs], outs["xa_partials"]


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
