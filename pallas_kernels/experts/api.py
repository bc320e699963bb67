"""`grouped_matmul`: tiles of rows times the weights of their experts, dequantized in parts.

`grouped_lora` is the same for the adapters of experts, which have gradients.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import fp4_matmul
from pallas_kernels.experts.table import Table
from pallas_kernels.fp4_matmul import Fp4Tiles, Fp4Weight
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS

# Numbers of dequantized weights that exist at a time: 256 MiB in bfloat16. With a quarter of them a
# layer of Qwen3.6-35B-A3B takes 1.15 instead of 0.79 ms for a token of 8 rows (H200), and an update
# 11 % longer, as the host begins each block.
DENSE_NUMBERS = 1 << 27
# Numbers of products of tiles, in float32, that exist at a time in the gradient of an adapter.
PRODUCT_NUMBERS = 1 << 25

Weight = jax.Array | Fp4Weight | Fp4Tiles


@jax.named_scope("experts")
def grouped_matmul(x: jax.Array, weight: Weight, table: Table, *, outputs: int) -> jax.Array:
    """Returns x W_e^T for the frozen weight W_e of the expert e of each row.

    A block of tiles is multiplied at a time, by the weights of its experts, which are dequantized
    for it alone; the gradient by x does the same. The weight has no gradient.

    Args:
        x: [R, K], rows in the order of the table; those without a pair are zeros.
        weight: [E N, K], the weights of the experts one after the other: dense, or packed in
            checkpoint order or in tile order.
        table: which expert a row belongs to.
        outputs: number N of outputs of an expert.

    Returns:
        [R, N] in x's dtype, accumulated in float32; zeros for rows without a pair.
    """
    if isinstance(weight, Fp4Tiles) and outputs % TILE_ROWS:
        weight = fp4_matmul.from_tiles(weight)  # Tiles have rows of two experts.
    return _grouped(x, weight, table, outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, weight, table, outputs):
    return _by_blocks(x, weight, table, outputs, "tmk,tnk->tmn")


def _grouped_fwd(x, weight, table, outputs):
    return _grouped(x, weight, table, outputs), (weight, table)


def _grouped_bwd(outputs, residuals, dy):
    weight, table = residuals
    return _by_blocks(dy, weight, table, outputs, "tmn,tnk->tmk"), None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


@jax.named_scope("lora")
def grouped_lora(x: jax.Array, lora: tuple[jax.Array, jax.Array], table: Table) -> jax.Array:
    """Returns (x A_e^T) B_e^T for the adapter of the expert e of each row.

    The gradients of A and B are sums over the tiles of an expert in their order, without atomics.

    Args:
        x: [R, K], rows in the order of the table; those without a pair are zeros.
        lora: A [E, r, K] with LoRA's scale, and B [E, N, r], of rank r.
        table: which expert a row belongs to.

    Returns:
        [R, N] in x's dtype, to which x A_e^T is rounded, too; zeros for rows without a pair.
    """
    a, b = (matrix.astype(x.dtype) for matrix in lora)
    return _trained(_trained(x, a, table), b, table)


@jax.custom_vjp
def _trained(x, weight, table):
    """The product of rows with weights [E, N, K] that have a gradient."""
    flat = weight.reshape(-1, weight.shape[2])
    return _by_blocks(x, flat, table, weight.shape[1], "tmk,tnk->tmn")


def _trained_fwd(x, weight, table):
    return _trained(x, weight, table), (x, weight, table)


def _trained_bwd(residuals, dy):
    x, weight, table = residuals
    flat = weight.reshape(-1, weight.shape[2])
    dx = _by_blocks(dy, flat, table, weight.shape[1], "tmn,tnk->tmk")
    return dx, _weight_gradient(x, dy, table, len(weight)).astype(weight.dtype), None


_trained.defvjp(_trained_fwd, _trained_bwd)


def _weight_gradient(x, dy, table, experts):
    """The gradients float32 [E, N, K] of the weights: products of tiles, added up by experts."""
    count, owners = len(table.owner), jnp.arange(experts)[:, None]
    x, dy = (rows.reshape(count, -1, rows.shape[1]) for rows in (x, dy))
    size = min(count, max(1, PRODUCT_NUMBERS // (x.shape[2] * dy.shape[2])))

    def step(number, total):
        # The last block begins earlier, where the one before has added its tiles already.
        start = jnp.minimum(number * size, count - size)
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        products = jnp.einsum("tmn,tmk->tnk", cut(dy), cut(x), preferred_element_type=jnp.float32)
        is_new = start + jnp.arange(size) >= number * size
        is_own = (cut(table.owner) == owners) & is_new
        # A sum by a product with ones and zeros has a fixed order; that of a scatter has none.
        is_own = is_own.astype(jnp.float32)
        return total + jnp.einsum("et,tnk->enk", is_own, products, precision="highest")

    total = jnp.zeros((experts, dy.shape[2], x.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, -(-table.used // size), step, total)


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
