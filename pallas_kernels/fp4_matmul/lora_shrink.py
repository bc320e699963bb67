"""LoRA shrink: x A^T, where a Triton kernel computes x [M, K] tile by tile.

The product is a sum over K, and a CTA has a few columns. Their contribution is a partial: the
kernel that reads the product adds up the partials, in a fixed order, and no CTA waits for another.

All of this is Pallas's Triton backend. A CTA executes its code once, so its speed depends on how
little code it has: tiles are small, and few of them are unrolled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fp4_matmul.tiling import PARTIAL_COLUMNS

COLUMNS = 128  # columns of x of a CTA
_RANK = PARTIAL_COLUMNS  # rows of A of a CTA


def shrink(x: jax.Array, a: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns partials of x A^T.

    Args:
        x: bfloat16 [M, K].
        a: bfloat16 [R, K].
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        float32 [S, M, R'], whose sum over S is x A^T; R' is the next multiple of PARTIAL_COLUMNS
        from R on, and the columns from R on are 0.
    """

    def load(refs, tile):
        return tile.load(refs["x"]).astype(x.dtype)

    m, k = x.shape
    return shrink_tiles("lora_shrink", load, {"x": x}, {}, a, (m, k), interpret=interpret)[
        "xa_partials"
    ]


class Tile(NamedTuple):
    """The rows and columns of x that a CTA computes.

    Attributes:
        rows: int32 [16] or [32], row indices.
        dims: int32 [block], column indices within the tile.
        cols: int32 [block], column indices within x.
        index: index of the tile along the columns.
        first: whether the CTA is the first with these rows and columns, which stores the tile;
            there is one CTA for every `_RANK` rows of A.
        shape: shape [M, K] of x.
    """

    rows: Any
    dims: Any
    cols: Any
    index: Any
    first: Any
    shape: tuple[int, int]

    @property
    def _mask(self):
        return (self.rows < self.shape[0])[:, None] & (self.cols < self.shape[1])[None, :]

    def load(self, ref, offset: int = 0) -> jax.Array:
        """Loads the tile of an array in float32, with zeros beyond the array's edges."""
        place = ref.at[self.rows[:, None], offset + self.cols[None, :]]
        return plt.load(place, mask=self._mask, other=0.0).astype(jnp.float32)

    def store(self, ref, value) -> None:
        """Writes the tile of an array."""
        plt.store(ref.at[self.rows[:, None], self.cols[None, :]], value, mask=self._mask)


def shrink_tiles(
    name: str,
    value: Callable[[dict, Tile], jax.Array],
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    a: jax.Array | None,
    shape: tuple[int, int],
    *,
    block: int = COLUMNS,
    warps: int = 4,
    interpret: bool,
) -> dict[str, Any]:
    """Computes x [M, K] tile by tile, and its product with A.

    Args:
        name: name of the kernel.
        value: function of references by name and of a `Tile`, which returns the tile of x and may
            store results.
        operands: whole operands of `value` by name.
        results: shapes of the results of `value` by name.
        a: bfloat16 [R, K], or None.
        shape: shape [M, K] of x.
        block: number of columns of a tile.
        warps: number of warps of a CTA.
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        The results by name, and "xa_partials" of `shrink`, None without A.
    """
    m, width = shape
    rows = 16 if m <= 128 else 32
    rank, parts = 0, 1
    operands, results = dict(operands), dict(results)
    blocks = pl.cdiv(width, block)
    if a is not None:
        rank = a.shape[0]
        parts = pl.cdiv(rank, _RANK)
        operands["a"] = a
        results["xa_partials"] = jax.ShapeDtypeStruct((blocks, m, parts * _RANK), jnp.float32)

    def body(*refs):
        refs = dict(zip((*operands, *results), refs, strict=True))
        i, index, part = (pl.program_id(axis) for axis in range(3))
        dims = jnp.arange(block)
        tile = Tile(
            rows=i * rows + jnp.arange(rows),
            dims=dims,
            cols=index * block + dims,
            index=index,
            first=part == 0,
            shape=shape,
        )
        if a is None:
            value(refs, tile)
            return
        ranks = part * _RANK + jnp.arange(_RANK)
        mask = (ranks < rank)[:, None] & (tile.cols < width)[None, :]
        factors = plt.load(refs["a"].at[ranks[:, None], tile.cols[None, :]], mask=mask, other=0.0)
        # A branch that is always taken: otherwise the compiler computes the tile a second time for
        # the product, each warp all of it.
        tokens = lax.cond(
            index >= 0,
            lambda: value(refs, tile),
            lambda: jnp.zeros((rows, block), a.dtype),
        )
        partial = plt.dot(tokens, factors, trans_b=True)
        place = refs["xa_partials"].at[index, tile.rows[:, None], ranks[None, :]]
        plt.store(place, partial, mask=(tile.rows < m)[:, None])

    outs = pl.pallas_call(
        body,
        grid=(pl.cdiv(m, rows), blocks, parts),
        out_shape=tuple(results.values()),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name=name,
        interpret=interpret,
    )(*operands.values())
    return {"xa_partials": None} | dict(zip(results, outs, strict=True))
