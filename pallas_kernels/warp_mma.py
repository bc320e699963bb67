"""Products of single warps: mma.sync of 16 x 8 x 16 bfloat16, on registers as kernels load them.

A thread's parts of the operands are pairs of neighbors along the summed dimension, which may be in
any order as long as it is the same in both operands. So that a thread reads 16 bytes at a time, its
eight neighbors in memory are four pairs, of two products.

In every operand and result, thread t of a warp has row or column t / 4 ("group"), and within it the
part t % 4.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

ROWS = 8  # rows or columns of a register of an operand: one for each group
TILE_ROWS = 16  # rows of a product


def add_product(acc: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    """Adds a product of a warp, [16, 16] by [16, 8].

    Args:
        acc: four float32: row `group`, columns 2 `part` and after it; the same of row 8 + `group`.
        a: four pairs, i32: row `group`, row 8 + `group`; the same of the second half of the
            summed dimension.
        b: two pairs, i32: column `group`, both halves of the summed dimension.

    Returns:
        The new accumulator.
    """
    f32 = ir.F32Type.get()
    ptx = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return mgpu.utils.inline_ptx(ptx, *a, *b, *acc, result_types=[f32] * 4)


def add_warpgroup_product(
    acc: Sequence[Any], steps: Sequence[Sequence[Any]], descriptor: Any, offsets: Sequence[int]
) -> list[Any]:
    """Adds a product of a warpgroup on a Hopper GPU, [64, 16 S] by [16 S, N], and waits for it.

    Args:
        acc: N / 2 float32, four for each eight columns, as `add_product` has them.
        steps: four pairs, i32, for each 16 of the summed dimension, as `add_product` has them.
        descriptor: where wgmma finds the second operand in shared memory, i64.
        offsets: numbers to add to the descriptor, one for each step.

    Returns:
        The new accumulator.
    """
    f32, count = ir.F32Type.get(), len(acc)
    names = [f"${i}" for i in range(2 * count + 4 * len(steps) + 1)]
    total, a = ", ".join(names[:count]), names[2 * count : -1]
    ptx = "{ .reg .pred add; .reg .b64 at; setp.eq.u32 add, 0, 0; wgmma.fence.sync.aligned; "
    for i, offset in enumerate(offsets):
        ptx += f"add.s64 at, {names[-1]}, {offset}; wgmma.mma_async.sync.aligned"
        ptx += f".m64n{2 * count}k16.f32.bf16.bf16 {{{total}}}, "
        ptx += f"{{{', '.join(a[4 * i : 4 * i + 4])}}}, at, add, 1, 1, 0; "
    ptx += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * len(a) + ["l"]
    found = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*acc, *(word for step in steps for word in step), descriptor],
        ptx,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    assert isinstance(found, ir.Value)
    return [llvm.extractvalue(f32, found, [i]) for i in range(count)]


def words(register: Any) -> list[Any]:
    """The pairs of a vector of bfloat16, each an i32."""
    i32 = ir.IntegerType.get_signless(32)
    count = ir.VectorType(register.type).shape[0] // 2
    pairs = vector.bitcast(ir.VectorType.get((count,), i32), register)
    return [vector.extract(pairs, [], [i]) for i in range(count)]


def numbers(register: Any) -> list[Any]:
    """The elements of a vector."""
    (count,) = ir.VectorType(register.type).shape
    return [vector.extract(register, [], [i]) for i in range(count)]


def vector_of(elements: Sequence[Any]) -> Any:
    """A vector of some elements."""
    return vector.from_elements(
        ir.VectorType.get((len(elements),), elements[0].type), list(elements)
    )


def zero(kind: Any) -> Any:
    """The zero of an element type."""
    return mgpu.utils.c(0, kind)


def array(registers: Any, like: Any, shape: tuple[int, ...]) -> mgpu.FragmentedArray:
    """An array of registers in row-major order, in a layout.

    Args:
        registers: vectors, in the order of the layout's registers.
        like: the layout, as Pallas has it.
        shape: shape of the array.
    """
    layout = like.to_mgpu()
    out = np.empty(layout.registers_shape(shape), dtype=object)
    for place, register in zip(np.ndindex(out.shape), registers, strict=True):
        out[place] = register
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
