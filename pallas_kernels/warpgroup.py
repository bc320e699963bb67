"""Kernels of one warpgroup a CTA, by Pallas's Mosaic GPU backend: from Ampere on.

A kernel is written once. On a GPU `run` compiles it; in a simulation Pallas computes it with plain
operations, in which a layout has no meaning. What differs between the two is in `Warpgroup`.

Nothing here knows of the TMA or of wgmma, which older GPUs lack, so the kernels compile alike for
all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS = 4  # of a CTA

Layout = Any  # how an array lies in the registers of the threads
Array = Any  # a jax.Array, its shape and dtype, or a reference to it inside a kernel


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """The threads of a CTA."""

    cta: Sequence[Any]  # its index along each axis of the grid
    simulated: bool  # whether a kernel is simulated instead of compiled

    def load(self, ref: Any, layout: Layout) -> jax.Array:
        """Loads an array from global or shared memory into registers."""
        return ref[...] if self.simulated else plgpu.load(ref, layout=layout, optimized=False)

    def store(self, ref: Any, value: jax.Array) -> None:
        """Stores registers to global or shared memory, however narrow a thread's part is."""
        if self.simulated:
            ref[...] = value
        else:
            plgpu.store(ref, value, optimized=False)

    def cast(self, value: jax.Array, layout: Layout) -> jax.Array:
        """Distributes an array over the threads as a layout says."""
        return value if self.simulated else plgpu.layout_cast(value, layout)

    def iota(self, shape: tuple[int, ...], axis: int, layout: Layout) -> jax.Array:
        """The index of each element along an axis, int32."""
        if self.simulated:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def meet(self) -> None:
        """Waits for all threads, whose stores all of them see afterwards."""
        if self.simulated:
            return

        @plgpu.inline_mgpu()
        def barrier(_):
            mgpu.utils.warpgroup_barrier()

        barrier()


def run(
    body: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    operands: Any,
    results: Any,
    *,
    updated: tuple[jax.Array, ...] = (),
    scratch: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
    interpret: bool = False,
) -> Any:
    """Runs a kernel.

    Args:
        body: function of a `Warpgroup`, the operands, the updated arrays, the results, all of them
            references, and by name of references to the scratch space.
        name: name of the kernel.
        grid: number of CTAs along each axis.
        operands: a tree of arrays.
        results: a tree of shapes and dtypes.
        updated: arrays that the kernel changes; donated.
        scratch: shapes and dtypes of arrays in shared memory, by name.
        interpret: whether to simulate the kernel on a CPU.

    Returns:
        The results, and after them the updated arrays as a tuple where there are any.
    """
    if interpret:
        results = _simulate(body, grid, operands, results, updated, scratch or {})
    else:
        results = _compile(body, name, grid, operands, results, updated, scratch or {})
    return results if updated else results[0]


def _compile(body, name, grid, operands, results, updated, scratch):
    names = tuple(f"axis{i}" for i in range(len(grid)))
    shapes, tree = jax.tree.flatten(results)

    def kernel(operands, updated, *refs, **scratch):
        threads = Warpgroup(tuple(map(jax.lax.axis_index, names)), simulated=False)
        body(threads, operands, updated, jax.tree.unflatten(tree, refs), **scratch)

    updated = tuple(map(jax.new_ref, updated))
    outs = plgpu.kernel(
        kernel,
        out_type=tuple(shapes),
        scratch_types={key: plgpu.SMEM(*spec) for key, spec in scratch.items()},
        grid=grid,
        grid_names=names,
        kernel_name=name,
        # Kernels say themselves where their threads meet.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(operands, updated)
    return jax.tree.unflatten(tree, outs), tuple(map(jax.freeze, updated))


def _simulate(body, grid, operands, results, updated, scratch):
    count = len(jax.tree.leaves(operands))

    def kernel(operands, _, results, updated, *refs):
        threads = Warpgroup(tuple(map(pl.program_id, range(len(grid)))), simulated=True)
        body(threads, operands, updated, results, **dict(zip(scratch, refs, strict=True)))

    outputs = len(jax.tree.leaves(results))
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=(results, tuple(jax.typeof(array) for array in updated)),
        input_output_aliases={count + i: outputs + i for i in range(len(updated))},
        scratch_shapes=[plgpu.SMEM(*spec) for spec in scratch.values()],
        interpret=True,
    )(operands, updated)
