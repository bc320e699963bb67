"""What a decode step does in front of attention with gates: Qwen3.5's.

Each query head is followed by its gate, whose sigmoid multiplies what the head attends to, and the
rotation may be that of the first dimensions alone. `split` applies the norm's factor, the norms of
queries and keys, and the rotation. `attention.attend` then has nothing left to do but attention,
and `attention.merge_parts` multiplies by the gates.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warpgroup
from pallas_kernels.decode import ANGLES
from pallas_kernels.decode.attention import AttentionInputs
from pallas_kernels.decode.row import load_squares, norm_factor, rounded
from pallas_kernels.warpgroup import WARPS

# Dimensions of a head, neighbors in neighboring lanes; all warps have them.
_DIMENSIONS = plgpu.Layout.TILED(
    plgpu.Tiling(((ANGLES,), (1,))),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(-2,),
    vector_dim=-1,
)


def split(
    inputs: AttentionInputs, *, eps: float, interpret: bool = False
) -> tuple[AttentionInputs, jax.Array]:
    """Returns what attention without gates reads, and the gates.

    Args:
        inputs: as in `AttentionInputs`, with norms and without a bias, but of a product whose first
            2 N heads are pairs of a query and its gate, and with at most H/2 angles of each row, in
            multiples of `decode.ANGLES`, which rotate the first dimensions.
        eps: epsilon of the norms.
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        The inputs of attention, whose queries and keys are normed and rotated already, and the
        gates [M, N H] in the dtype of the product.
    """
    (rows, kv_heads, _, head_dim), dtype = inputs.keys.shape, inputs.qkv.dtype
    product = inputs.qkv.reshape(rows, -1, head_dim)
    heads = product.shape[1] // 2 - kv_heads
    results = {
        "qkv": jax.ShapeDtypeStruct((rows, heads + 2 * kv_heads, head_dim), dtype),
        "gates": jax.ShapeDtypeStruct((rows, heads, head_dim), dtype),
    }
    outs = warpgroup.run(
        functools.partial(_split_head, heads=heads, kv_heads=kv_heads, eps=eps),
        "split_gates",
        (rows, heads + kv_heads),
        inputs._replace(qkv=product, keys=None, values=None),
        results,
        interpret=interpret,
    )
    whole = jnp.ones((rows, head_dim // 2), jnp.float32)
    plain = inputs._replace(
        qkv=outs["qkv"].reshape(rows, -1),
        square_partials=jnp.full((1, rows), 1.0 - eps, jnp.float32),  # for a factor of one
        cosines=whole,
        sines=jnp.zeros_like(whole),
        q_norm=None,
        k_norm=None,
    )
    return plain, outs["gates"].reshape(rows, -1)


def _split_head(threads, operands, _, results, *, heads, kv_heads, eps):
    """What one CTA does: a query and its gate, or a key and its value, of a row."""
    product = operands.qkv
    row, head = threads.cta
    head_dim, count = product.shape[2], operands.cosines.shape[1]
    is_query = head < heads
    squares = load_squares(threads, operands.square_partials, row)
    dims = [pl.ds(0, count), pl.ds(count, count)]
    if head_dim > 2 * count:
        dims.append(pl.ds(2 * count, head_dim - 2 * count))

    def load(ref, *place):
        return threads.load(ref.at[place], _DIMENSIONS).astype(jnp.float32)

    # A query is in front of its gate, a key in front of all values.
    first = jnp.where(is_query, 2 * head, heads + head)
    second = jnp.where(is_query, 2 * head + 1, heads + kv_heads + head)
    parts, others = ([load(product, row, i, place) for place in dims] for i in (first, second))
    angles = [load(x, row) for x in (operands.cosines, operands.sines)]
    scales = [[load(x, place) for place in dims] for x in (operands.q_norm, operands.k_norm)]
    factor = norm_factor(*squares, eps)
    parts, others = ([rounded(factor * x) for x in numbers] for numbers in (parts, others))
    total = sum((jnp.sum(x * x) for x in parts[1:]), start=jnp.sum(parts[0] * parts[0]))
    norm = lax.rsqrt(total / head_dim + eps)
    own_scales = [
        jnp.where(jnp.broadcast_to(is_query, x.shape), x, y) for x, y in zip(*scales, strict=True)
    ]
    parts = [rounded(x * norm * scale) for x, scale in zip(parts, own_scales, strict=True)]
    cosine, sine = angles
    turned = parts[0] * cosine - parts[1] * sine, parts[1] * cosine + parts[0] * sine

    def store(ref, index, numbers):
        for place, x in zip(dims, numbers, strict=True):
            threads.store(ref.at[row, index, place], x.astype(ref.dtype))

    store(results["qkv"], head, [*turned, *parts[2:]])

    @pl.when(is_query)
    def store_gate():
        store(results["gates"], head, others)

    @pl.when(jnp.logical_not(is_query))
    def store_value():
        store(results["qkv"], kv_heads + head, others)
