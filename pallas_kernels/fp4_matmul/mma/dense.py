"""The product of a few tokens with a dense weight, made of the parts of `kernel`.

    y[M, N] = x[M, K] W[N, K]^T + xa[M, R] B[N, R]^T + bias,   M <= 16

XLA's product takes less time, but its adapter and its bias are three or four further kernels. Rows
of W and of x go through shared memory alike.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import device, warp_mma, warpgroup
from pallas_kernels.fp4_matmul.mma import copies, epilogue
from pallas_kernels.fp4_matmul.mma.epilogue import ACC
from pallas_kernels.fp4_matmul.mma.kernel import RANKS, adapter
from pallas_kernels.fp4_matmul.mma_schedule import PITCH, padded_tokens
from pallas_kernels.fp4_matmul.tiling import TILE_ROWS
from pallas_kernels.warpgroup import WARPS, Warpgroup

# The largest number of tokens, and sizes of weights, with which it is faster than XLA's kernels:
# measured on an H200 with gpt-oss-20b and Qwen3.5-4B.
_MAX_TOKENS = 16
_SIZES = 10_000_000, 15_000_000
# Columns of x A^T, those of q, k and v with a rank of 128: x A^T is in shared memory, next to the
# stages, and its sums are unrolled.
_MOST_RANKS = 384
_COLUMNS = 128  # of a step
_STAGES = 3  # number of steps that shared memory holds
_PART = 32  # the columns of a CTA are a multiple
# Partial sums of x A^T, float32 [8, 32]: a warp has two tokens, a thread two neighbors of one.
_SUMS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, RANKS), (2, RANKS), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def supports(x: jax.Array | jax.ShapeDtypeStruct, weight: Any, ranks: int) -> bool:
    """Whether the kernel `fits` a product and runs on the default device."""
    return fits(x, weight, ranks) and device.supports_warpgroup()


def fits(x: jax.Array | jax.ShapeDtypeStruct, weight: Any, ranks: int) -> bool:
    """Whether the kernel has the product of x [M, K] and a dense weight [N, K].

    `ranks` is the number of columns of x A^T.
    """
    return (
        1 < len(x) <= _MAX_TOKENS
        and ranks <= _MOST_RANKS
        and x.dtype == weight.dtype == jnp.bfloat16
        and _SIZES[0] <= weight.size <= _SIZES[1]
        and weight.shape[0] % TILE_ROWS == 0
        and weight.shape[1] % 8 == 0
    )


def matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    lora: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
    split: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns x W^T + xa B^T + bias, [M, N] in bfloat16 or float32, where `supports`.

    Args:
        x: bfloat16 [M, K].
        weight: bfloat16 [N, K].
        lora: float32 [S, M, R], whose sum over S is x A^T, and bfloat16 B [N, R'']; what only one
            of the two has of columns counts as zero.
        bias: [N].
        dtype: dtype of the result.
        split: number of CTAs that divide the columns of the same rows of W; None for two CTAs of an
            SM.
        interpret: whether to simulate the kernel on a CPU.
    """
    (m, k), n = x.shape, len(weight)
    tokens, blocks = padded_tokens(m), n // TILE_ROWS
    if split is None:
        split = max(1, min(2 * device.num_sms() // blocks, k // (_STAGES * _COLUMNS)))
    operands = {"x": x, "weight": weight}
    if lora is not None:
        xa, b = lora
        columns = pl.cdiv(xa.shape[-1], RANKS) * RANKS
        missing = (0, tokens - m), (0, columns - xa.shape[-1])
        operands["b"] = jnp.pad(b, ((0, 0), (0, max(0, columns - b.shape[1]))))
        operands["xa"] = jnp.pad(xa, ((0, 0), *missing))
    if bias is not None:
        operands["bias"] = bias
    results = {"y": jax.ShapeDtypeStruct((m, n), dtype)}
    if split > 1:
        # Zero before and after every call: all calls of a program use the same array.
        operands["counters"] = jnp.zeros((blocks, WARPS), jnp.int32)
        shape = blocks, split, TILE_ROWS, tokens
        results["partial"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    pitch = _COLUMNS + PITCH
    scratch: dict[str, tuple[tuple[int, ...], Any]] = {
        "tokens": ((_STAGES, tokens, pitch), jnp.bfloat16),
        "rows": ((_STAGES, TILE_ROWS, pitch), jnp.bfloat16),
    }
    if "xa" in operands:
        scratch["xa"] = operands["xa"].shape[1:], jnp.bfloat16
    return warpgroup.run(
        functools.partial(_body, split),
        "dense_matmul_mma",
        (blocks, split),
        operands,
        results,
        scratch=scratch,
        interpret=interpret,
    )["y"]


def _body(split, threads: Warpgroup, operands, _, results, *, tokens, rows, xa=None) -> None:
    """What a CTA does."""
    block, part = threads.cta
    x, k = operands["x"], operands["x"].shape[1]
    own = operands["weight"].at[pl.ds(block * TILE_ROWS, TILE_ROWS)]
    per_part = pl.cdiv(pl.cdiv(k, split), _PART) * _PART
    first = part * per_part
    end = jnp.minimum(first + per_part, k)

    def start_copies(step):
        column, slot = first + step * _COLUMNS, lax.rem(step, _STAGES)
        copies.start_x(threads, own, rows.at[slot], column, end)
        copies.start_x(threads, x, tokens.at[slot], column, end)
        copies.close_group(threads)

    for step in range(_STAGES - 1):
        start_copies(jnp.int32(step))
    if xa is not None:
        _add_up(threads, operands["xa"], xa, part, split)
    sums = adapter(threads, operands | {"xa": xa}, block, tokens.shape[1])

    def multiply_step(step, sums):
        copies.wait(threads, _STAGES - 2)
        threads.meet()  # All copies are there, and the stage of the step before is free.
        start_copies(step + _STAGES - 1)
        slot = lax.rem(step, _STAGES)
        return _multiply(threads, sums, rows.at[slot], tokens.at[slot])

    sums = lax.fori_loop(0, pl.cdiv(per_part, _COLUMNS), multiply_step, sums)

    def store(total):
        bias = None
        if "bias" in operands:
            bias = epilogue.load_rows(threads, operands["bias"], block)
        epilogue.store(threads, results["y"], total, None, bias, block)

    if split == 1:
        store(sums)
        return
    threads.store(results["partial"].at[block, part], sums)

    @pl.when(epilogue.is_last(threads, operands["counters"], block, part, split))
    def add_parts():
        store(epilogue.add_parts(threads, results["partial"].at[block]))


def _add_up(threads: Warpgroup, partials: Any, xa: Any, part: Any, split: int) -> None:
    """Adds up a CTA's share of the partial sums of x A^T [S, M', R], into shared memory.

    The CTAs that divide the columns of W divide the partial sums, too.
    """
    count, tokens, ranks = partials.shape
    share = pl.cdiv(count, split)
    for row, column in itertools.product(range(0, tokens, 8), range(0, ranks, RANKS)):
        place, total = (pl.ds(row, 8), pl.ds(column, RANKS)), None
        for i in range(share):
            index = part * share + i
            loaded = threads.load(partials.at[jnp.minimum(index, count - 1), *place], _SUMS)
            if (split - 1) * share + i >= count:
                loaded *= jnp.where(index < count, 1.0, 0.0)
            total = loaded if total is None else total + loaded
        assert total is not None, "there is a partial sum"
        threads.store(xa.at[place], total.astype(xa.dtype))
    threads.meet()


def _multiply(threads: Warpgroup, sums: jax.Array, rows: Any, tokens: Any) -> jax.Array:
    """Adds the product of a stage's rows of W [64, P] and tokens [M', P] to sums [64, M']."""
    columns, shape = _COLUMNS, sums.shape
    if threads.simulated:
        pair = rows[:, :columns], tokens[:, :columns]
        return sums + jnp.einsum("rk,mk->rm", *pair, preferred_element_type=jnp.float32)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC)

    @plgpu.inline_mgpu(arg_types=(ACC, plgpu.RefType(), plgpu.RefType()), return_type=result)
    def multiply(_, sums, rows, tokens):
        i32 = ir.IntegerType.get_signless(32)
        thread = mgpu.utils.thread_idx()
        lane, warp = (of(thread, mgpu.utils.c(32, i32)) for of in (arith.remui, arith.divui))
        pitch = 2 * (columns + PITCH)

        def start(array, width, first=None):
            """The address of a lane's row in the first of four matrices, `width` rows high."""
            row, eight = (of(lane, mgpu.utils.c(width, i32)) for of in (arith.remui, arith.divui))
            row = row if first is None else arith.addi(row, first)
            place = arith.muli(row, mgpu.utils.c(pitch, i32))
            place = arith.addi(place, arith.muli(eight, mgpu.utils.c(16, i32)))
            return arith.addi(copies.address(array), place)

        # Rows of W: two matrices of eight rows below each other, and the same of the next columns.
        height = warp_mma.TILE_ROWS
        own = start(rows, height, arith.muli(warp, mgpu.utils.c(height, i32)))
        operands = [copies.read_matrices(own, 32 * i) for i in range(columns // 16)]
        groups = start(tokens, warp_mma.ROWS)
        out = []
        for group, (upper, lower) in enumerate(sums.registers.reshape(-1, 2)):
            acc = warp_mma.numbers(upper) + warp_mma.numbers(lower)
            for i in range(columns // 32):
                offset = warp_mma.ROWS * group * pitch + 64 * i
                words = copies.read_matrices(groups, offset)
                for j in (0, 1):
                    pair = words[2 * j : 2 * j + 2]
                    acc = warp_mma.add_product(acc, operands[2 * i + j], pair)
            out += [warp_mma.vector_of(acc[:2]), warp_mma.vector_of(acc[2:])]
        return warp_mma.array(out, ACC, shape)

    return multiply(sums, rows, tokens)
