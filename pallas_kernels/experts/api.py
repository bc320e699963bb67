"""Tiles of rows times the weights of their experts.

With tiles of eight rows, those of a decode step, the kernel of `mma` reads packed weights as they
are, on every GPU since Ampere on which it agrees with the definition. Otherwise the weights of some
tiles are dequantized at a time.
"""

import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels import device, fp4_matmul
from pallas_kernels.experts import self_test
from pallas_kernels.experts.table import MIN_TILE, Table, to_rows
from pallas_kernels.fp4_matmul import Fp4Tiles, Fp4Weight, dispatch
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS

# Numbers of dequantized weights that exist at a time: 256 MiB in bfloat16. With a quarter of them a
# layer of Qwen3.6-35B-A3B takes 1.15 instead of 0.79 ms for a token of 8 rows (H200), and an update
# 11 % longer, as the host begins each block.
DENSE_NUMBERS = 1 << 27

Weight = jax.Array | Fp4Weight | Fp4Tiles


@functools.cache
def has_kernel() -> bool:
    """Whether the kernel of `mma` runs on the default device, and agrees with the definition."""
    if not device.supports_warpgroup() or dispatch.chosen_kernel() == "xla":
        return False
    return dispatch.agrees(lambda: self_test.relative_error(kernel()))


def kernel() -> ModuleType:
    """The kernel's module, loaded when needed: it uses an API of jax that may change."""
    from pallas_kernels.experts import mma

    return mma


def _uses_kernel(x: jax.Array, weight: Weight, table: Table, unit: int) -> bool:
    """Whether the kernel multiplies; `unit` are the outputs that are to be whole tiles."""
    return (
        isinstance(weight, Fp4Tiles)
        and x.dtype == jnp.bfloat16
        and len(table.source) == MIN_TILE * len(table.owner)
        and unit % TILE_ROWS == 0
        and has_kernel()
    )


@jax.named_scope("experts")
def gated_matmul(
    x: jax.Array, weight: Weight, table: Table, row_weights: jax.Array, *, width: int
) -> jax.Array:
    """Returns silu(gate) * up * w for the gate and up of the expert of each pair, x W_e^T.

    Gate and up are rounded to x's dtype. There are no derivatives.

    Args:
        x: [T, K], the tokens, whose pairs the table has in their order.
        weight: [E 2F, K], of each expert the rows of gate, then those of up, as `grouped_matmul`
            takes it.
        table: which expert a pair belongs to.
        row_weights: float32 [P], the weight w of each pair.
        width: number F of outputs of gate.

    Returns:
        [R, F] in x's dtype; rows without a pair are undefined.
    """
    if _uses_kernel(x, weight, table, width):
        config = kernel().choose(table, 2 * width, weight, parts=2)
        return kernel().gated_matmul(x, weight, table, row_weights, width=width, config=config)
    y = grouped_matmul(to_rows(x, table), weight, table, outputs=2 * width)
    gate, up = jnp.split(y, 2, axis=1)
    return (jax.nn.silu(gate) * up * to_rows(row_weights[:, None], table)).astype(x.dtype)


@jax.named_scope("experts")
def grouped_matmul(
    x: jax.Array, weight: Weight, table: Table, *, outputs: int, zeros: bool = True
) -> jax.Array:
    """Returns x W_e^T for the frozen weight W_e of the expert e of each row.

    Without the kernel, a block of tiles is multiplied at a time, by the weights of its experts,
    which are dequantized for it alone; the gradient by x does the same. The weight has no gradient.

    Args:
        x: [R, K], rows in the order of the table; those without a pair are zeros.
        weight: [E N, K], the weights of the experts one after the other: dense, or packed in
            checkpoint order or in tile order.
        table: which expert a row belongs to.
        outputs: number N of outputs of an expert.
        zeros: whether rows without a pair become zeros; else they are undefined.

    Returns:
        [R, N] in x's dtype, accumulated in float32.
    """
    if isinstance(weight, Fp4Tiles) and outputs % TILE_ROWS:
        weight = fp4_matmul.from_tiles(weight)  # Tiles have rows of two experts.
    y = _grouped(x, weight, table, outputs)
    if zeros and _uses_kernel(x, weight, table, outputs):
        y = jnp.where((table.source < len(table.place))[:, None], y, 0)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, weight, table, outputs):
    if _uses_kernel(x, weight, table, outputs):
        config = kernel().choose(table, outputs, weight, parts=1)
        return kernel().matmul(x, weight, table, outputs=outputs, config=config)
    return _by_blocks(x, weight, table, outputs, "tmk,tnk->tmn")


def _grouped_fwd(x, weight, table, outputs):
    return _grouped(x, weight, table, outputs), (weight, table)


def _grouped_bwd(outputs, residuals, dy):
    weight, table = residuals
    return _by_blocks(dy, weight, table, outputs, "tmn,tnk->tmk"), None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _by_blocks(x, weight, table, outputs, equation):
    """The products of all used tiles [R, .] with the weights [N, K] of their owners."""
    tiles = x.reshape(len(table.owner), -1, x.shape[1])
    inputs = weight.shape[1] if not isinstance(weight, Fp4Weight) else 2 * weight.packed.shape[1]
    size = min(len(tiles), max(1, DENSE_NUMBERS // (outputs * inputs)))

    def product(x, owners):
        dense = _weights_of(weight, owners, outputs, x.dtype)
        wide = x.astype(jnp.promote_types(x.dtype, dense.dtype))
        y = jnp.einsum(equation, wide, dense, preferred_element_type=jnp.float32)
        return y.astype(x.dtype)

    def step(number, y):
        # The last block begins earlier, and computes a part of the one before again.
        start = jnp.minimum(number * size, len(tiles) - size)
        owners = jax.lax.dynamic_slice_in_dim(table.owner, start, size)
        block = product(jax.lax.dynamic_slice_in_dim(tiles, start, size), owners)
        return jax.lax.dynamic_update_slice_in_dim(y, block, start, axis=0)

    if size == len(tiles):
        y = product(tiles, table.owner)
    else:
        columns = outputs if equation.endswith("n") else inputs
        # Zeros that depend on the table: XLA would make those of all layers once, and copy them for
        # all layers at the same time.
        zero = (table.used < 0).astype(x.dtype)
        y = jnp.broadcast_to(zero, (*tiles.shape[:2], columns))
        y = jax.lax.fori_loop(0, -(-table.used // size), step, y)
    return y.reshape(len(x), -1)


def _weights_of(weight, owners, outputs, dtype):
    """The dense weights [tiles, N, K] of the experts that own some tiles."""

    def gather(array, rows=outputs):
        chosen = array.reshape(-1, rows, *array.shape[1:])[owners]
        return chosen.reshape(-1, *array.shape[1:])

    if isinstance(weight, Fp4Tiles):
        codes, scales = (gather(a, outputs // TILE_ROWS) for a in (weight.codes, weight.scales))
        chosen = dataclasses.replace(
            weight, codes=codes, scales=scales, divisor=gather(weight.divisor)
        )
        dense = fp4_matmul.dense(chosen, dtype)
    elif isinstance(weight, Fp4Weight):
        dense = fp4_matmul.dense(jax.tree.map(gather, weight), dtype)
    else:
        dense = gather(weight)
    return dense.reshape(len(owners), outputs, -1)
