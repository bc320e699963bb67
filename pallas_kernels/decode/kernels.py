"""What a decode step does between the four projections of a layer, in four kernels.

A step is short of time for its many small operations, not of bandwidth, so each kernel does all
there is to do between two projections, down to the product of the next projection's input with A of
its LoRA adapter:

    norm_project      x + y, its RMSNorm, the product with A
    attend            norm's factor, bias, QK norm, rotation, the new key and value, attention
    merge_project     the sum of attention's parts, the product with A
    silu_project      norm's factor, SwiGLU, the product with A

The last one is not needed where `fp4_matmul.supports_swiglu`, the first where the product in front
of a norm begins it (`fp4_matmul.supports_add_rmsnorm`), nor is `merge_project` where rows have one
part: the next projection then makes x A^T itself, or `lora_shrink.shrink` does.

The factor of an RMSNorm, one number for each row, passes through the linear maps: the projection
reads x * scale, and who reads the projection multiplies by the factor. So no kernel waits for a
whole row, and every block of threads has a few columns. What they contribute to the product with A
and to the mean square of a row are shares, which their reader adds up, in an order that never
changes.

All of this is Pallas's Triton backend, but for `attend_sm90`; `lora_shrink` has what three of them
share.
"""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import fp4_matmul
from pallas_kernels.decode import to_cache
from pallas_kernels.fp4_matmul import lora_shrink
from pallas_kernels.fp4_matmul.tiling import MAX_ROWS_OF_PARTIALS

_SLOTS = 64  # of the cache that attention reads at a time
_PARTS = 8  # of a row's slots, at most
_LOG2_E = 1.4426950408889634


class Normed(NamedTuple):
    """A row without its factor, see `norm_project`.

    Attributes:
        residual: [M, D], x + y.
        scaled: [M, D], the residual times the scale of the norm.
        shares: float32 [S, M, R'] of `scaled` times A^T, R' >= R, or None. What is behind R is 0.
        squares: float32 [S, M], shares of the mean squares of the residual: `scaled`, and what is
            linear in it, lacks the factor 1 / sqrt(mean square + eps).
    """

    residual: jax.Array
    scaled: jax.Array
    shares: jax.Array | None
    squares: jax.Array


class AttentionParts(NamedTuple):
    """Attention over equal parts of what each row has filled of the cache, see `attend`.

    Attributes:
        sums: float32 [P, M, N, H], values by weights whose largest is 1.
        weights: float32 [P, M, N], the sums of these weights; 0 where a part holds no key.
        largest: float32 [P, M, N], the largest score in base 2.
    """

    sums: jax.Array
    weights: jax.Array
    largest: jax.Array


def norm_project(
    x: jax.Array,
    y: jax.Array,
    scale: jax.Array,
    a: jax.Array | None,
    *,
    interpret: bool = False,
) -> Normed:
    """Adds to the residual stream, and begins an RMSNorm and the projection behind it.

    Args:
        x: bfloat16 [M, D].
        y: bfloat16 [M, D] to add.
        scale: float32 [D], of the norm.
        a: bfloat16 [R, D], or None.
        interpret: run on a CPU.
    """
    m, width = x.shape

    def value(refs, tile):
        residual = tile.load(refs["x"]) + tile.load(refs["y"])
        residual = residual.astype(x.dtype).astype(jnp.float32)
        factors = plt.load(refs["scale"].at[tile.cols], mask=tile.cols < width, other=0.0)
        scaled = (residual * factors[None, :]).astype(x.dtype)

        @pl.when(tile.first)
        def _():
            tile.store(refs["residual"], residual.astype(x.dtype))
            tile.store(refs["scaled"], scaled)
            squares = jnp.sum(residual * residual, axis=1) / width
            plt.store(refs["squares"].at[tile.index, tile.rows], squares, mask=tile.rows < m)

        return scaled

    results = {
        "residual": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "scaled": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "squares": jax.ShapeDtypeStruct((pl.cdiv(width, lora_shrink.COLUMNS), m), jnp.float32),
    }
    outs = lora_shrink.shrink_tiles(
        "norm_project",
        value,
        {"x": x, "y": y, "scale": scale},
        results,
        a,
        (m, width),
        interpret=interpret,
    )
    return Normed(outs["residual"], outs["scaled"], outs["xa_partials"], outs["squares"])


def silu_project(
    gate_up: jax.Array,
    squares: jax.Array,
    a: jax.Array | None,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """SwiGLU of a projection that lacks its norm's factor, and its product with A.

    Args:
        gate_up: bfloat16 [M, 2 F].
        squares: of `norm_project`.
        a: bfloat16 [R, F], or None.
        eps: of the norm.
        interpret: run on a CPU.

    Returns:
        bfloat16 [M, F], and the shares of the product or None, see `Normed`.
    """
    m, outputs = gate_up.shape[0], gate_up.shape[1] // 2
    dtype = gate_up.dtype

    def value(refs, tile):
        over = _factor(refs["squares"], tile.rows, eps)[:, None]
        # Rounded where the projection would be, had it the factor.
        gate = (tile.load(refs["gate_up"]) * over).astype(dtype).astype(jnp.float32)
        up = (tile.load(refs["gate_up"], offset=outputs) * over).astype(dtype)
        active = (gate / (1.0 + jnp.exp2(-_LOG2_E * gate))).astype(dtype)
        z = (active.astype(jnp.float32) * up.astype(jnp.float32)).astype(dtype)

        @pl.when(tile.first)
        def _():
            tile.store(refs["z"], z)

        return z

    outs = lora_shrink.shrink_tiles(
        "silu_project",
        value,
        {"gate_up": gate_up, "squares": squares},
        {"z": jax.ShapeDtypeStruct((m, outputs), dtype)},
        a,
        (m, outputs),
        # Of 18944 columns, blocks of 128 take 4.9 us at 32 rows where 256 take 6.2, and as long as
        # those at 8; larger ones leave fewer shares, and who reads them reads all of them.
        block=lora_shrink.COLUMNS if 16 < m <= MAX_ROWS_OF_PARTIALS else 2 * lora_shrink.COLUMNS,
        # With more rows all blocks run at a time only if they are small.
        warps=8 if m <= 32 else 4,
        interpret=interpret,
    )
    return outs["z"], outs["xa_partials"]


def merge_project(
    parts: AttentionParts,
    a: jax.Array | None,
    *,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Adds up the parts of `attend`, and multiplies by A.

    Args:
        parts: of M rows.
        a: bfloat16 [R, N H], or None.
        dtype: of the result.
        interpret: run on a CPU.

    Returns:
        [M, N H], and the shares of the product or None, see `Normed`.
    """
    count, m, heads, head_dim = parts.sums.shape

    def value(refs, tile):
        live = tile.rows < m
        index = jnp.arange(pl.next_power_of_2(count))[None, :]
        mask = live[:, None] & (index < count)
        place = index, tile.rows[:, None], tile.index
        largest = plt.load(refs["largest"].at[place], mask=mask, other=-jnp.inf)
        weights = plt.load(refs["weights"].at[place], mask=mask, other=0.0)
        top = jnp.max(jnp.where(live[:, None], largest, 0.0), axis=1)
        weight = jnp.sum(jnp.exp2(largest - top[:, None]) * weights, axis=1)
        weight = jnp.where(live, weight, 1.0)
        total = jnp.zeros((len(tile.rows), head_dim), jnp.float32)
        for p in range(count):
            place = refs["largest"].at[p, tile.rows, tile.index]
            share = jnp.exp2(plt.load(place, mask=live, other=-jnp.inf) - top) / weight
            place = refs["sums"].at[p, tile.rows[:, None], tile.index, tile.dims[None, :]]
            total += share[:, None] * plt.load(place, mask=live[:, None], other=0.0)
        attended = total.astype(dtype)

        @pl.when(tile.first)
        def _():
            tile.store(refs["attended"], attended)

        return attended

    outs = lora_shrink.shrink_tiles(
        "merge_project",
        value,
        parts._asdict(),
        {"attended": jax.ShapeDtypeStruct((m, heads * head_dim), dtype)},
        a,
        (m, heads * head_dim),
        block=head_dim,
        interpret=interpret,
    )
    return outs["attended"], outs["xa_partials"]


def _factor(squares: Any, rows: jax.Array, eps: float) -> jax.Array:
    """What a norm multiplies some rows by, out of the shares [S, M] of their mean squares."""
    count, m = squares.shape
    index = jnp.arange(pl.next_power_of_2(count))[:, None]
    mask = (index < count) & (rows < m)[None, :]
    shares = plt.load(squares.at[index, rows[None, :]], mask=mask, other=0.0)
    return lax.rsqrt(jnp.sum(shares, axis=0) + eps)


def served_by_sm90(keys: jax.Array, heads: int) -> bool:
    """Whether `attend_sm90` runs on the default device, for keys [M, K, S, H] and so many heads."""
    if not fp4_matmul.supports_device() or not _sm90_agrees():
        return False
    from pallas_kernels.decode import attend_sm90

    return attend_sm90.serves(keys, heads)


@functools.cache
def _sm90_agrees() -> bool:
    """Whether `attend_sm90` agrees with the definition; it uses an API of jax that may change."""
    try:
        from pallas_kernels.decode import attend_sm90

        error = attend_sm90.self_check()
    except Exception as problem:  # Whatever an untested version of jax raises.
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
    else:
        if error < 1e-2:
            return True
        reason = f"it is off by {error:.1e}"
    warnings.warn(f"attention without the kernel for Hopper GPUs ({reason})", stacklevel=2)
    return False


def attend(
    qkv: jax.Array,
    squares: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    bias: jax.Array | None = None,
    qk_norm: tuple[jax.Array, jax.Array] | None = None,
    eps: float,
    multiprocessors: int,
    finish: bool = False,
    interpret: bool = False,
) -> tuple[AttentionParts | jax.Array, jax.Array, jax.Array]:
    """Puts the new key and value of every row into the cache, and attends to all of them.

    Args:
        qkv: bfloat16 [M, (N + 2 K) H], a projection that lacks its norm's factor and its bias.
        squares: of `norm_project` or `fp4_matmul.fp4_behind_norm`.
        angles: cosines and sines, float32 [M, H/2], of the rotation of queries and keys.
        keys: [M, K, S, H], bfloat16 or float8_e4m3fn; given away.
        values: likewise; numbers, behind a row's filled slots too.
        lengths: int32 [M], the filled slots of each row, less than S.
        bias: [(N + 2 K) H], or None.
        qk_norm: float32 [H], the scales of queries' and keys' RMSNorm, or None.
        eps: of the norms.
        multiprocessors: of the device; fewer blocks of threads split rows into parts.
        finish: where rows are not split, return what `merge_project` would make of the one part.
            On a Hopper GPU `attend_sm90` does so.
        interpret: run on a CPU.

    Returns:
        The parts for `merge_project`, or their sum, [M, N H]; keys and values.
    """
    m, kv_heads, slots, head_dim = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    group = heads // kv_heads
    half = head_dim // 2
    wanted = max(1, multiprocessors // (m * kv_heads))
    count = min(_PARTS, wanted, pl.cdiv(slots, 2 * _SLOTS))
    # With fewer stages more blocks share a multiprocessor, if there are more; and three stages of
    # heads of 256 exceed the shared memory of a desktop's GPU.
    few = m * kv_heads <= 2 * multiprocessors
    padded = max(16, pl.next_power_of_2(group))
    dtype = qkv.dtype
    operands = {"qkv": qkv, "squares": squares, "cos": angles[0], "sin": angles[1]}
    operands |= {"lengths": lengths}
    if bias is not None:
        operands["bias"] = bias
    if qk_norm is not None:
        operands["q_norm"], operands["k_norm"] = qk_norm
    operands |= {"keys": keys, "values": values}
    results = {
        "sums": jax.ShapeDtypeStruct((count, m, heads, head_dim), jnp.float32),
        "weights": jax.ShapeDtypeStruct((count, m, heads), jnp.float32),
        "largest": jax.ShapeDtypeStruct((count, m, heads), jnp.float32),
    }
    finish = finish and count == 1
    if finish and not interpret and served_by_sm90(keys, heads):
        from pallas_kernels.decode import attend_sm90

        return attend_sm90.attend(
            qkv,
            squares,
            angles,
            keys,
            values,
            lengths,
            bias=bias,
            qk_norm=qk_norm,
            eps=eps,
            multiprocessors=multiprocessors,
        )
    if finish:
        results = {"attended": jax.ShapeDtypeStruct((m, heads * head_dim), dtype)}
    results["new_keys"] = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    results["new_values"] = jax.ShapeDtypeStruct(values.shape, values.dtype)

    def body(*refs):
        refs = dict(zip((*operands, *results), refs, strict=True))
        row, head, part = (pl.program_id(axis) for axis in range(3))
        dims, halves = jnp.arange(head_dim), jnp.arange(half)
        length = plt.load(refs["lengths"].at[row])
        factor = jnp.sum(_factor(refs["squares"], row[None], eps))
        cos = plt.load(refs["cos"].at[row, halves])
        sin = plt.load(refs["sin"].at[row, halves])

        def projected(columns):
            """Columns of the projection, rounded as if it had the factor."""
            mask = columns < qkv.shape[1]
            x = plt.load(refs["qkv"].at[row, columns], mask=mask, other=0.0)
            x = factor * x.astype(jnp.float32)
            if bias is not None:
                added = plt.load(refs["bias"].at[columns], mask=mask, other=0.0)
                x += added.astype(jnp.float32)
            return x.astype(dtype).astype(jnp.float32)

        def rotated(columns, norm):
            """The two halves of heads that begin at some columns, [...] or [heads, ...]."""
            first, second = projected(columns), projected(columns + half)
            if qk_norm is not None:
                squares = jnp.sum(first * first + second * second, axis=-1, keepdims=True)
                over = lax.rsqrt(squares / head_dim + eps)
                scales = (plt.load(refs[norm].at[d]) for d in (halves, half + halves))
                first, second = (
                    (x * over * scale).astype(dtype).astype(jnp.float32)
                    for x, scale in zip((first, second), scales, strict=True)
                )
            return (
                (first * cos - second * sin).astype(dtype),
                (second * cos + first * sin).astype(dtype),
            )

        # Heads beyond the group are other heads', computed along and not stored.
        query = jnp.arange(padded)
        in_group = query < group
        q_columns = (head * group + query)[:, None] * head_dim + halves[None, :]
        q_first, q_second = rotated(q_columns, "q_norm")
        new_keys = rotated((heads + head) * head_dim + halves, "k_norm")
        k_first, k_second = (to_cache(k, keys.dtype).astype(dtype) for k in new_keys)
        new_value = projected((heads + kv_heads + head) * head_dim + dims)
        new_value = to_cache(new_value, values.dtype).astype(jnp.float32)
        scale = head_dim**-0.5 * _LOG2_E
        owns = part == 0

        def scores(first, second):
            product = plt.dot(q_first, first, trans_b=True)
            return scale * (product + plt.dot(q_second, second, trans_b=True))

        def add(block, carry):
            total, weight, largest = carry
            slot = block * _SLOTS + jnp.arange(_SLOTS)
            filled = slot < length

            def read(ref, dims):
                place = ref.at[row, head, slot[:, None], dims[None, :]]
                return plt.load(place, mask=filled[:, None], other=0.0).astype(dtype)

            s = scores(read(refs["keys"], halves), read(refs["keys"], half + halves))
            s = jnp.where(filled[None, :], s, -jnp.inf)
            top = jnp.maximum(largest, jnp.max(s, axis=1))
            weights = jnp.exp2(s - top[:, None])
            keep = jnp.exp2(largest - top)
            total = keep[:, None] * total + plt.dot(
                weights.astype(dtype), read(refs["values"], dims)
            )
            return total, keep * weight + jnp.sum(weights, axis=1), top

        # The new token belongs to the first part, which so is never empty; the others may be.
        own_score = jnp.sum(
            q_first.astype(jnp.float32) * k_first.astype(jnp.float32)
            + q_second.astype(jnp.float32) * k_second.astype(jnp.float32),
            axis=1,
        )
        empty = jnp.finfo(jnp.float32).min
        largest = jnp.where(owns, scale * own_score, empty)
        weight = jnp.where(owns, jnp.ones(padded, jnp.float32), 0.0)
        total = jnp.where(owns, jnp.broadcast_to(new_value[None, :], (padded, head_dim)), 0.0)
        # A row's filled blocks are cut into equal parts, however long it is.
        filled_blocks = pl.cdiv(length, _SLOTS)
        part_blocks = pl.cdiv(filled_blocks, count)
        begin = part * part_blocks
        end = jnp.minimum(begin + part_blocks, filled_blocks)
        total, weight, largest = lax.fori_loop(begin, end, add, (total, weight, largest))
        q_heads = head * group + query
        if finish:
            attended = (1.0 / weight)[:, None] * total
            place = refs["attended"].at[row, q_heads[:, None] * head_dim + dims[None, :]]
            plt.store(place, attended.astype(dtype), mask=in_group[:, None])
        else:
            place = refs["sums"].at[part, row, q_heads[:, None], dims[None, :]]
            plt.store(place, total, mask=in_group[:, None])
            plt.store(refs["weights"].at[part, row, q_heads], weight, mask=in_group)
            plt.store(refs["largest"].at[part, row, q_heads], largest, mask=in_group)

        @pl.when(owns)
        def _():
            for name, new, dims_of in (
                ("new_keys", k_first, halves),
                ("new_keys", k_second, half + halves),
                ("new_values", new_value, dims),
            ):
                place = refs[name].at[row, head, length, dims_of]
                plt.store(place, new.astype(refs[name].dtype))

    names, first = list(operands), len(results) - 2
    outs = pl.pallas_call(
        body,
        grid=(m, kv_heads, count),
        out_shape=tuple(results.values()),
        input_output_aliases={names.index("keys"): first, names.index("values"): first + 1},
        compiler_params=plt.CompilerParams(
            num_warps=4, num_stages=3 if few and head_dim <= 128 else 2
        ),
        name="attend",
        interpret=interpret,
    )(*operands.values())
    *attended, new_keys, new_values = outs
    return attended[0] if finish else AttentionParts(*attended), new_keys, new_values
