"""The mean squares of a norm before a product, added up by the reducer warpgroup.

They come in partials, see `add_rmsnorm`. The warpgroups that apply the norm's factor, the inverse
of its root mean square, would otherwise read all partials themselves, and wait for them.
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
    """What a warpgroup reads at a time, of which a lane has one number."""

    partials: int  # number of partials
    tokens: int  # number of tokens
    layout: Any  # layout of [partials, tokens]


def _reading(partials: int, tokens: int, *inner: tuple, warps: Any, lanes: tuple) -> _Reading:
    """A reading of [partials, tokens] with inner tiles, whose dimensions warps and lanes divide."""
    tiling = plgpu.Tiling(((partials, tokens), *inner, (1,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=lanes, vector_dim=-1)
    return _Reading(partials, tokens, layout)


_SPREAD = (
    _reading(4, 32, warps=-3, lanes=(-2,)),
    _reading(8, 16, (2, 16), warps=-5, lanes=(-3, -2)),
    _reading(16, 8, (4, 8), warps=-5, lanes=(-3, -2)),
)
# All warps read the same numbers.
_FEW = _reading(MIN_PARTIALS, 8, warps=plgpu.Replicated(4), lanes=(-3, -2))


def write_factor(square_partials: Any, factor: Any, eps: float) -> None:
    """Writes 1 / sqrt(mean square + eps) of every token; the reducer warpgroup calls it.

    The partials, float32 [S, M], are in global memory, and their sum over S is the mean square; the
    factor, float32 [M'] with M' >= M, is in shared memory.
    """
    count, m = square_partials.shape
    # Each warp reads other partials, unless there are too few of them for any such reading.
    fitting = (r for r in _SPREAD if m % r.tokens == 0 and count >= r.partials)
    reading = next(fitting, _FEW)

    # LLVM would unroll two turns and load the partials of both, with registers for half of them.
    @pl.loop(0, opaque(jnp.int32(m // reading.tokens)))
    def write_factors_of_tokens(i):
        place = pl.ds(i * reading.tokens, reading.tokens)
        factor.at[place][...] = lax.rsqrt(_total(square_partials, place, reading) + eps)


def _total(square_partials: Any, tokens: pl.Slice, reading: _Reading) -> jax.Array:
    """The mean squares of as many tokens as are read at a time."""
    count, (partials, width, layout) = square_partials.shape[0], reading
    zero = plgpu.layout_cast(jnp.zeros((partials, width), jnp.float32), layout)
    total = zero
    for begin in range(0, count, partials):
        # The last ones begin with what has been added before, if they are too few.
        first = min(begin, count - partials)
        source = square_partials.at[pl.ds(first, partials), tokens]
        value = plgpu.load(source, layout=layout, optimized=False)
        if first < begin:
            index = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout)
            value = jnp.where(first + index >= begin, value, zero)
        total += value
    return total.sum(axis=0)
