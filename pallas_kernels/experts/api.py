"""Tiles of rows times the weights of their experts.

With tiles of eight rows, those of a decode step, the kernel of `mma` reads packed weights as they
are, on every GPU since Ampere on which it agrees with the definition. With the larger tiles of an
update or a prefill, a Hopper GPU dequantizes the weights of some experts at a time, and its kernel
multiplies all their tiles. Otherwise the weights of some tiles are dequantized at a time.

`grouped_lora` multiplies with the adapters of experts, which have gradients; in a decode step `mlp`
has them.
"""

import dataclasses
import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import device, fp4_matmul
from pallas_kernels.experts import self_test
from pallas_kernels.experts.table import (
    HOPPER_TILE,
    MIN_TILE,
    Table,
    has_hopper_kernel,
    tile_rows,
    to_rows,
)
from pallas_kernels.fp4_matmul import Fp4Tiles, Fp4Weight, dispatch, layout
from pallas_kernels.fp4_matmul.tiling import TILE_COLUMNS, TILE_ROWS

# Numbers of dequantized weights that exist at a time: 256 MiB in bfloat16. With a quarter of them a
# layer of Qwen3.6-35B-A3B takes 1.15 instead of 0.79 ms for a token of 8 rows (H200), and an update
# 11 % longer, as the host begins each block.
DENSE_NUMBERS = 1 << 27
# The same for the Hopper kernel: parts that are too small leave some SMs idle in the end.
PART_NUMBERS = 1 << 28
# Numbers of products of tiles, in float32, that exist at a time in the gradient of an adapter.
PRODUCT_NUMBERS = 1 << 25

# Rows of an expert, on average, up to which a step multiplies by packed weights. With 64 a layer of
# gpt-oss-20b takes 0.40 ms; with 32 it took 1.07 ms to dequantize and multiply (H200).
STEP_ROWS = 64
MAX_RANK = 64  # of an adapter in the kernel; no larger one was tried
SWIGLU_ALPHA = 1.702  # factor of the gate in the sigmoid of a clamped SwiGLU

Weight = jax.Array | Fp4Weight | Fp4Tiles
Adapter = tuple[jax.Array, jax.Array]  # A [E, r, K] and B [E, N, r]


@functools.cache
def has_kernel(form: str) -> bool:
    """Whether the kernel of `mma` runs on the default device, and agrees with the definition.

    `form` is the format of the weights, "nvfp4" or "mxfp4"; each is measured once.
    """
    if not device.supports_warpgroup() or dispatch.chosen_kernel() == "xla":
        return False
    return dispatch.agrees(lambda: self_test.relative_error(kernel(), form))


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
        and has_kernel(weight.format)
    )


@functools.partial(jax.jit, static_argnums=(2, 3))  # so that equal kernels are lowered once
def _mlp_by_kernel(x, mixtures, width, limit):
    mixtures = [kernel().Mixture(*mixture) for mixture in mixtures]
    count = mixtures[0].gate_up.shape[0] // (2 * width)
    config = kernel().choose_mlp(mixtures[0].table, count, x.shape[1])
    return kernel().mlp(x, mixtures, width=width, config=config, limit=limit)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _gated_by_kernel(x, weight, table, row_weights, bias, width, limit):
    config = kernel().choose(table, 2 * width, weight, parts=2)
    options = {"width": width, "bias": bias, "limit": limit}
    return kernel().gated_matmul(x, weight, table, row_weights, config=config, **options)


@functools.partial(jax.jit, static_argnums=4)
def _by_kernel(x, weight, table, bias, outputs):
    config = kernel().choose(table, outputs, weight, parts=1)
    return kernel().matmul(x, weight, table, outputs=outputs, config=config, bias=bias)


class Gated(NamedTuple):
    """The weights of gated MLPs of width F, those of E experts or one, and their adapters."""

    gate_up: Weight  # [E 2F, K], of each expert the rows of gate, then those of up
    down: Weight  # [E N, F]
    # Those of both weights as `grouped_lora` takes them; of one MLP A [r, K] and B [N, r''].
    adapters: tuple[Adapter | None, Adapter | None] = (None, None)
    biases: tuple[jax.Array, jax.Array] | None = None  # of E experts: [E, 2, F] and [E, N]


def activated(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Returns silu(gate) up; with a limit (up + 1) gate sigmoid(1.702 gate).

    The limit is that of gate and of the size of up, as in gpt-oss.
    """
    if not limit:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def bias_of(bias: jax.Array, table: Table, dtype: jnp.dtype) -> jax.Array:
    """Returns the bias [R, N] of the expert of each row, of those [E, ...] of all, in a dtype."""
    own = bias.reshape(len(bias), -1)[table.owner].astype(dtype)
    return jnp.repeat(own, len(table.source) // len(table.owner), axis=0)


@jax.named_scope("experts")
def mlp(
    x: jax.Array,
    experts: Gated,
    table: Table,
    row_weights: jax.Array,
    *,
    width: int,
    shared: Gated | None = None,
    limit: float = 0.0,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (silu(gate) * up * w) W_down^T for the expert of each pair, of gate and up x W_e^T.

    Where experts have biases, these are added to gate and up, and times w to the result.

    There are no derivatives.

    Args:
        x: [T, K], the tokens, whose pairs the table has in their order.
        experts: their weights, as `grouped_matmul` takes them.
        table: which expert a pair belongs to.
        row_weights: float32 [P], the weight w of each pair.
        width: number F of outputs of gate.
        shared: an MLP that all tokens have, where `takes_shared`.
        limit: the limit of gate and up, see `activated`; 0 for none.

    Returns:
        [R, N] in x's dtype, in which rows without a pair are undefined; and what the shared MLP
        computes, [T, N] or None.
    """
    (gate_up, down, adapters, _), mixtures = experts, []
    bias, added = experts.biases or (None, None)
    outputs = _outputs(down) * 2 * width // _outputs(gate_up)
    if _fits_mlp(x, experts, table, width):
        own = _for_kernel(adapters, x.dtype)
        mixtures.append((gate_up, down, table, row_weights, own, (bias, added)))
        if shared is not None:
            whole = [own and (own[0][None], own[1][None]) for own in shared.adapters]
            ones = jnp.ones(len(x), jnp.float32)
            own = _for_kernel(whole, x.dtype)
            mixtures.append((*shared[:2], _table_of_all(len(x)), ones, own))
        ranks = [own for own in adapters if own is not None]
        if shared is not None or kernel().mlp_is_faster(table, ranks):
            rows, *others = _mlp_by_kernel(x, mixtures, width, limit)
            return rows, others[0][: len(x)] if others else None
    assert shared is None, "`takes_shared` says where it may be given"
    own, after = adapters
    if own is None:
        options = {"width": width, "bias": bias, "limit": limit}
        hidden = gated_matmul(x, gate_up, table, row_weights, **options)
    else:
        rows = to_rows(x, table)
        y = grouped_matmul(rows, gate_up, table, outputs=2 * width)
        y = y + grouped_lora(rows, own, table)
        hidden = _gated(y, table, row_weights, bias, limit)
    if added is not None and after is None and _uses_kernel(hidden, down, table, outputs):
        return _by_kernel(hidden, down, table, (added, row_weights), outputs), None
    y = grouped_matmul(hidden, down, table, outputs=outputs, zeros=after is not None)
    if after is not None:
        y = y + grouped_lora(hidden, after, table)
    if added is not None:
        weighted = to_rows(row_weights[:, None], table) * bias_of(added, table, x.dtype)
        y = (y + weighted).astype(x.dtype)
    return y, None


def step_tile(
    x: jax.Array | jax.ShapeDtypeStruct, experts: Gated, *, top_k: int, width: int
) -> int:
    """Returns the rows of a tile of the table for `mlp` of tokens with k experts each."""
    pairs, count = len(x) * top_k, _outputs(experts.gate_up) // (2 * width)
    if pairs <= STEP_ROWS * count and _fits_mlp(x, experts, _table_of_all(len(x)), width):
        return MIN_TILE
    return tile_rows(pairs, count)


def takes_shared(
    x: jax.Array | jax.ShapeDtypeStruct, experts: Gated, shared: Gated, *, top_k: int, width: int
) -> bool:
    """Whether `mlp` of tokens with k experts each also computes an MLP that all of them have."""
    sizes = {"top_k": top_k, "width": width}
    if step_tile(x, experts, **sizes) != MIN_TILE or _outputs(shared.gate_up) != 2 * width:
        return False
    if not _one_format(experts.gate_up, shared.gate_up):
        return False
    everyone = _table_of_all(len(x))
    return all(_fits_mlp(x, own, everyone, width) for own in (experts, shared))


def _fits_mlp(x, own: Gated, table: Table, width: int) -> bool:
    """Whether the kernel has both products, of weights in one format."""
    outputs = _outputs(own.down) * 2 * width // _outputs(own.gate_up)
    ranks = [kernel_rank(adapter[0].shape[-2]) for adapter in own.adapters if adapter is not None]
    return (
        max(ranks, default=0) <= MAX_RANK
        and _uses_kernel(x, own.gate_up, table, width)
        and _uses_kernel(x, own.down, table, outputs)
        and _one_format(own.gate_up, own.down)
    )


def _one_format(*weights: Weight) -> bool:
    """Whether packed weights have one format, so that equal stages hold their scales."""
    return len({weight.format for weight in weights if isinstance(weight, Fp4Tiles)}) < 2


def _table_of_all(tokens: int) -> Table:
    """The table of tokens that have one and the same expert."""
    tiles = -(-tokens // MIN_TILE)
    place = np.arange(MIN_TILE * tiles, dtype=np.int32)
    arrays = place[:tokens], np.minimum(place, tokens), np.zeros(tiles, np.int32), np.int32(tiles)
    return Table(*map(jnp.asarray, arrays))


@jax.named_scope("experts")
def gated_matmul(
    x: jax.Array,
    weight: Weight,
    table: Table,
    row_weights: jax.Array,
    *,
    width: int,
    bias: jax.Array | None = None,
    limit: float = 0.0,
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
        bias: [E, 2, F], which is added to gate and up; or None.
        limit: the limit of gate and up, see `activated`; 0 for none.

    Returns:
        [R, F] in x's dtype; rows without a pair are undefined.
    """
    if _uses_kernel(x, weight, table, width):
        return _gated_by_kernel(x, weight, table, row_weights, bias, width, limit)
    y = grouped_matmul(to_rows(x, table), weight, table, outputs=2 * width)
    return _gated(y, table, row_weights, bias, limit)


def _gated(y, table, row_weights, bias, limit):
    if bias is not None:
        y = y + bias_of(bias, table, y.dtype)
    gate, up = jnp.split(y, 2, axis=1)
    return (activated(gate, up, limit) * to_rows(row_weights[:, None], table)).astype(y.dtype)


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
        return _by_kernel(x, weight, table, None, outputs)
    return _product(x, weight, table, outputs, transposed=False)


def _grouped_fwd(x, weight, table, outputs):
    return _grouped(x, weight, table, outputs), (weight, table)


def _grouped_bwd(outputs, residuals, dy):
    weight, table = residuals
    return _product(dy, weight, table, outputs, transposed=True), None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _product(x, weight, table, outputs, *, transposed):
    """The products of tiles with the weights [N, K] of their owners, or with their transposes."""
    if _uses_hopper_kernel(x, weight, table, outputs):
        return _by_parts(x, weight, table, outputs, transposed)
    return _by_blocks(x, weight, table, outputs, "tmn,tnk->tmk" if transposed else "tmk,tnk->tmn")


def _outputs(weight):
    return weight.packed.shape[0] if isinstance(weight, Fp4Weight) else weight.shape[0]


def _inputs(weight):
    return 2 * weight.packed.shape[1] if isinstance(weight, Fp4Weight) else weight.shape[1]


def _uses_hopper_kernel(x, weight, table, outputs):
    """Whether the Hopper kernel multiplies the tiles."""
    if len(x) != len(table.owner) * HOPPER_TILE or isinstance(weight, Fp4Weight):
        return False
    if x.dtype != jnp.bfloat16 or (isinstance(weight, jax.Array) and weight.dtype != x.dtype):
        return False
    unit = TILE_ROWS if isinstance(weight, Fp4Tiles) else 2 * TILE_ROWS  # Tiles have padding.
    return outputs % unit == _inputs(weight) % unit == 0 and has_hopper_kernel()


def _by_parts(x, weight, table, outputs, transposed):
    """The products of all tiles by the Hopper kernel, on the experts of a part at a time."""
    # Mosaic GPU takes seconds to import, and only a Hopper GPU needs it.
    from pallas_kernels.experts import dense_sm90

    count = weight.shape[0] // outputs
    packed = isinstance(weight, Fp4Tiles)
    parts = -(-count * outputs * _inputs(weight) // PART_NUMBERS) if packed else 1
    work, y = dense_sm90.units(table, count), None
    for begin in range(0, count, size := -(-count // parts)):
        experts = jnp.array([begin, min(begin + size, count)], jnp.int32)
        shapes = min(size, count - begin), outputs, transposed
        y = _multiply_part(x, weight, table, work, experts, y, shapes)
    assert y is not None, "there is an expert"
    width = _inputs(weight) if transposed else outputs
    return y if y.shape[1] == width else y[:, :width]


@functools.partial(jax.jit, static_argnums=6)  # so that equal kernels are lowered once
def _multiply_part(x, weight, table, work, experts, y, shapes):
    """Multiplies the tiles of the experts of a part, and puts the products into y."""
    from pallas_kernels.experts import dense_sm90
    from pallas_kernels.fp4_matmul import sm90

    count, outputs, transposed = shapes
    # The kernel reads tiles of rows in twos, so of an odd number the first one after them, too.
    rows, num_sms, scales = outputs // TILE_ROWS, device.num_sms(), None
    if isinstance(weight, Fp4Tiles):
        if not transposed:
            weight, scales = _split(weight)
        # A part is dequantized when the product with the one before has ended, and never for the
        # forward and the backward pass at once.
        x, codes, y = jax.lax.optimization_barrier((x, weight.codes, y))
        weight = sm90.dequantize(
            dataclasses.replace(weight, codes=codes),
            inputs=weight.codes.shape[1] * TILE_COLUMNS,
            num_sms=num_sms,
            part=(experts[:1] * rows, count * rows + rows % 2),
        )
    static = {"outputs": outputs, "transposed": transposed, "num_sms": num_sms}
    return dense_sm90.product(x, weight, table, work, experts, y, scales, **static)


def _split(weight: Fp4Tiles) -> tuple[Fp4Tiles, jax.Array]:
    """A weight whose numbers bfloat16 has exactly, and what multiplies the outputs then.

    A decode step multiplies by these numbers. Rounded to bfloat16 with their divisor, weights of an
    update would not be those of the rollout.
    """
    exact = dataclasses.replace(weight, divisor=jnp.full_like(weight.divisor, layout.UNIT))
    return exact, layout.UNIT / weight.divisor


def kernel_rank(rank: int) -> int:
    """The ranks that the kernel reads of an adapter: a multiple of eight, the last ones zeros."""
    return -(-rank // MIN_TILE) * MIN_TILE


def pad_ranks(adapter: Adapter) -> Adapter:
    """Returns the adapter with `kernel_rank` ranks, on devices that may have the kernel."""
    a, b = adapter
    missing = kernel_rank(a.shape[1]) - a.shape[1]
    if not missing or not device.supports_warpgroup():
        return adapter
    return jnp.pad(a, ((0, 0), (0, missing), (0, 0))), jnp.pad(b, ((0, 0), (0, 0), (0, missing)))


def _for_kernel(adapters, dtype):
    padded = (own and pad_ranks(own) for own in adapters)
    return tuple(own and (own[0].astype(dtype), own[1].astype(dtype)) for own in padded)


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
    inputs = _inputs(weight)
    size = min(len(tiles), max(1, DENSE_NUMBERS // (outputs * inputs)))
    scales = None
    if isinstance(weight, Fp4Tiles) and equation.endswith("n"):
        weight, scales = _split(weight)

    def product(x, owners):
        dense = _weights_of(weight, owners, outputs, x.dtype)
        wide = x.astype(jnp.promote_types(x.dtype, dense.dtype))
        y = jnp.einsum(equation, wide, dense, preferred_element_type=jnp.float32)
        if scales is not None:
            y *= scales.reshape(-1, 1, outputs)[owners]
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
