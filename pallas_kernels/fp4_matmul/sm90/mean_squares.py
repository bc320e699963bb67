"""The mean squares of a norm before a product, added up by the warpgroup that adds up x A^T.

They come in shares, see `begin_norm`. Whoever applies the norm's factor, the inverse of its root
mean square, would otherwise read all shares itself, and wait for them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.sm90.synchronize import opaque
from pallas_kernels.fp4_matmul.tiling import MIN_PARTIALS


class _Reading(NamedTuple):
    """What a warpgroup reads at a time, of which a lane has one number.

    Attributes:
        xa_partials: how many.
        tokens: likewise.
        layout: of [shares, tokens].
    """

    xa_partials: int
    tokens: int
    layout: Any


def _reading(xa_partials: int, tokens: int, *inner: tuple, warps: Any, lanes: tuple) -> _Reading:
    """Of tiles [shares, tokens] with inner tiles, of whose dimensions these are the warps'."""
    tiling = plgpu.Tiling(((xa_partials, tokens), *inner, (1,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=lanes, vector_dim=-1)
    return _Reading(xa_partials, tokens, layout)


_SPREAD = (
    _reading(4, 32, warps=-3, lanes=(-2,)),
    _reading(8, 16, (2, 16), warps=-5, lanes=(-3, -2)),
    _reading(16, 8, (4, 8), warps=-5, lanes=(-3, -2)),
)
# All warps read the same.
_FEW = _reading(MIN_PARTIALS, 8, warps=plgpu.Replicated(4), lanes=(-3, -2))


def write_factor(square_partials: Any, factor: Any, eps: float) -> None:
    """Writes 1 / sqrt(mean square + eps) of every token; a warpgroup calls it.

    Args:
        square_partials: float32 [S, M] in global memory, whose sum over S is the mean square.
        factor: float32 [M'], M' >= M, in shared memory.
        eps: of the norm.
    """
    reading = _readings(*square_partials.shape)[0]

    # LLVM would unroll two turns, and ask for the shares of both, with registers for half of them.
    @pl.loop(0, opaque(jnp.int32(square_partials.shape[1] // reading.tokens)))
    def _(i):
        place = pl.ds(i * reading.tokens, reading.tokens)
        factor.at[place][...] = lax.rsqrt(_total(square_partials, place, reading) + eps)


def write_total(square_partials: Any, total: Any, block: Any, blocks: int) -> None:
    """Writes this block's part of the mean squares; a warpgroup calls it.

    Args:
        square_partials: float32 [S, M] in global memory, whose sum over S is the mean square.
        total: float32 [1, M], likewise.
        block: of threads, the one that calls.
        blocks: that call.
    """
    reading = _readings(*square_partials.shape)[-1]
    parts = square_partials.shape[1] // reading.tokens

    @pl.loop(0, jnp.where(block < parts, lax.div(parts - block + blocks - 1, blocks), 0))
    def _(turn):
        place = pl.ds((block + turn * blocks) * reading.tokens, reading.tokens)
        total.at[0, place][...] = _total(square_partials, place, reading)


def _readings(count: int, tokens: int) -> list[_Reading]:
    """What can be read of so many shares and tokens, a multiple of 8; most tokens first.

    Warps have different shares, but for few shares of a width for which these would be more.
    """
    found = [r for r in _SPREAD if tokens % r.tokens == 0 and count >= r.xa_partials]
    return found or [_FEW]


def _total(square_partials: Any, tokens: pl.Slice, reading: _Reading) -> jax.Array:
    """The mean squares of as many tokens as are read at a time."""
    count, (xa_partials, width, layout) = square_partials.shape[0], reading
    zero = plgpu.layout_cast(jnp.zeros((xa_partials, width), jnp.float32), layout)
    total = zero
    for begin in range(0, count, xa_partials):
        # The last ones begin with what has been added before, if they are not enough.
        first = min(begin, count - xa_partials)
        value = plgpu.load(
            square_partials.at[pl.ds(first, xa_partials), tokens], layout=layout, optimized=False
        )
        if first < begin:
            index = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout)
            value = jnp.where(first + index >= begin, value, zero)
        total += value
    return total.sum(axis=0)
