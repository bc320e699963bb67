"""Products of 64 columns by wgmma, with the weight in registers.

The descriptors that say where the tokens are differ between products only in their address.
`plgpu.wgmma` makes a whole descriptor for each product, of a pointer with 64 bits; here a stage of
the pipeline has one descriptor, to which a product adds a constant.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.fp4_matmul.e4m3 import of_pairs
from pallas_kernels.fp4_matmul.sm90.codes import OPERAND

# Distances in units of 16 bytes, as in descriptors.
_HALF = 8 * 128 // 16  # to the columns 64..127 of bfloat16
_E4M3_HALF = 64 // 16  # to the columns 64..127 of e4m3
_STEP = 2  # to the next step of wgmma, 16 columns of bfloat16 or 32 of e4m3
_SWIZZLED = 1 << 30  # 32 bits of a descriptor: rows of 128 bytes, swizzled
# What the stage's descriptor lacks. ptxas adds smaller constants in two halves, with moves. No
# address is smaller: CUDA reserves the first KB of a CTA's shared memory.
_BIAS = 1024 // 16


def add_product(
    acc: jax.Array,
    weight: jax.Array,
    x: Any,
    slot: Any,
    tile: Any,
    ahead: int,
    half: int,
    *,
    e4m3: bool = False,
    simulated: bool,
) -> jax.Array:
    """Starts to add a product to an accumulator, in a group that `plgpu.wgmma_wait` awaits.

    The accumulator is float32 [64, T], the weight bfloat16 [64, 64]. The tokens x [S, P, T, 128] in
    shared memory have P tiles of 128 columns for each stage: the product is of the tile `ahead`
    after `tile`, the first one that the warpgroup multiplies, in the slot's stage, and of its
    columns 0..63 or 64..127. The tokens may also have 64 columns, and these may be bfloat16 or
    pairs of e4m3, as the weight [64, 32] is then. The interpreter takes no inline code and
    multiplies at once.
    """
    _, per_stage, tokens, width = x.shape
    if simulated:
        columns = x[slot, tile + ahead]
        if e4m3:
            weight, columns = (of_pairs(y).astype(jnp.float32) for y in (weight, columns))
        columns = columns[:, 64 * half : 64 * half + 64]
        return acc + jnp.dot(weight, columns.T, preferred_element_type=jnp.float32)
    eight, size = (rows * width * 2 // 16 for rows in (8, tokens))
    offset = _BIAS + ahead * size + half * (_E4M3_HALF if e4m3 else _HALF)
    columns, dtype, transposed = (32, "e4m3", "") if e4m3 else (16, "bf16", ", 0")

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.Layout.WGMMA,
            plgpu.RefType(OPERAND),
            plgpu.Layout.WG_SPLAT,
        ),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA),
    )
    def multiply(_, acc, weight, x, distance):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        shift, mask, bias = (
            arith.constant(i32, ir.IntegerAttr.get(i32, number)) for number in (4, 0x3FFF, _BIAS)
        )
        address = arith.shrui(llvm.ptrtoint(i32, mgpu.utils.memref_ptr(x)), shift)
        lower = arith.subi(arith.andi(address, mask), bias)
        lower = arith.addi(lower, distance.registers.item())
        weight = mgpu.optimization_barrier(weight)  # so that it is ready before the fence
        nvvm.wgmma_fence_aligned()
        sums = [vector.extract(pair, [], [i]) for pair in acc.registers.flat for i in (0, 1)]
        words = [mgpu.utils.bitcast(pair, i32) for pair in weight.registers.flat]
        count = len(sums)
        accumulator = ", ".join(f"${i}" for i in range(count))
        first_word, last = 2 * count, 2 * count + len(words)
        # ptxas must not see the upper half, or it would move it for each product.
        code = (
            ".reg .b64 stage, desc; .reg .b32 upper; .reg .pred p; setp.eq.b32 p, 0, 0; "
            f"shr.u32 upper, ${last}, 31; add.u32 upper, upper, {_SWIZZLED | eight}; "
            f"mov.b64 stage, {{${last}, upper}}; "
        )
        for step in range(len(words) // 4):
            operand = ", ".join(f"${first_word + 4 * step + i}" for i in range(4))
            code += (
                f"add.s64 desc, stage, {offset + step * _STEP}; "
                f"wgmma.mma_async.sync.aligned.m64n{tokens}k{columns}.f32.{dtype}.{dtype} "
                f"{{{accumulator}}}, {{{operand}}}, desc, p, 1, 1{transposed}; "
            )
        constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * (len(words) + 1)
        struct: Any = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * count),
            [*sums, *words, lower],
            f"{{ {code} }}",
            ",".join(constraints),
            has_side_effects=True,
        )
        nvvm.wgmma_commit_group_sync_aligned()
        sums = [llvm.extractvalue(f32, struct, [i]) for i in range(count)]
        out = np.empty(acc.registers.shape, dtype=object)
        pair = ir.VectorType.get((2,), f32)
        out.flat[:] = [vector.from_elements(pair, sums[i : i + 2]) for i in range(0, count, 2)]
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return multiply(acc, weight, x, (slot * per_stage + tile) * size)
