"""x A^T out of its shares: every block of threads adds up some of it, and waits for all of it."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.fp4_matmul.sm90.synchronize import arrive, fence_async_proxy, opaque, wait
from pallas_kernels.fp4_matmul.tiling import MIN_SHARES, SHARE_COLUMNS

# A warp has every fourth share of a row, a lane one of its columns.
_SHARES = plgpu.Layout.TILED(
    plgpu.Tiling(((MIN_SHARES, SHARE_COLUMNS), (1,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)
_IN_FLIGHT = 32
SUM_BYTES = 4 * MIN_SHARES * SHARE_COLUMNS  # of shared memory, to add up what the warps have


def add_shares(shares: Any, xa: Any, lock: Any, blocks: int) -> None:
    """Writes this block's parts of x A^T and counts at the lock, if there are any.

    A part is SHARE_COLUMNS columns of a row. A warpgroup calls it.

    Args:
        shares: float32 [S, M, R'] in global memory, S >= MIN_SHARES.
        xa: bfloat16 [M', R] likewise, M' >= M and R >= R'; columns from R' on become 0.
        lock: int32 [1] likewise.
        blocks: that call it.
    """
    block = opaque(lax.axis_index("block"))
    count, _, width = shares.shape
    columns = xa.shape[1] // SHARE_COLUMNS
    parts = _parts(shares, xa)
    batch = -(-count // -(-count // _IN_FLIGHT))
    batch = min(-(-batch // MIN_SHARES), count // MIN_SHARES) * MIN_SHARES
    batches = -(-count // batch)

    @pl.loop(0, lax.div(parts - block + blocks - 1, blocks))
    def _(turn):
        part = block + turn * blocks
        row = lax.div(part, columns)
        column = (part - row * columns) * SHARE_COLUMNS
        place = pl.ds(column, SHARE_COLUMNS)
        zero = plgpu.layout_cast(jnp.zeros((MIN_SHARES, SHARE_COLUMNS), jnp.float32), _SHARES)

        @pl.loop(0, jnp.where(column < width, batches, 0), init_carry=zero)
        def total(i, total):
            # The last batch begins with what has been added before, if it is not whole.
            begin = jnp.minimum(i * batch, count - batch)
            for j in range(0, batch, MIN_SHARES):
                share = shares.at[pl.ds(begin + j, MIN_SHARES), row, place]
                value = plgpu.load(share, layout=_SHARES, optimized=False)
                if batches * batch > count:
                    index = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_SHARES)
                    value = jnp.where(begin + j + index >= i * batch, value, zero)
                total += value
            return total

        xa.at[row, place][...] = total.sum(axis=0).astype(jnp.bfloat16)

    @pl.when(block < parts)
    def _():
        fence_async_proxy(nvvm.ProxyKind.async_global)
        arrive([lock], [jnp.int32(1)])


def await_shares(shares: Any, xa: Any, lock: Any, blocks: int) -> None:
    """Waits until all of x A^T is there for the copy engine. Every block calls it once."""
    adders = min(blocks, _parts(shares, xa))
    wait([lock], [jnp.int32(adders)], [jnp.int32(blocks)])
    fence_async_proxy(nvvm.ProxyKind.async_global)


def _parts(shares: Any, xa: Any) -> int:
    return shares.shape[1] * (xa.shape[1] // SHARE_COLUMNS)
