"""Locks in global memory, fences, and numbers of which the compiler knows nothing."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm


def fence_async_proxy(kind: nvvm.ProxyKind) -> None:
    """Orders the threads' reads and writes of shared or global memory before later TMA copies."""

    @plgpu.inline_mgpu()
    def fence(_):
        shared = kind == nvvm.ProxyKind.async_shared
        nvvm.fence_proxy(kind, space=nvvm.SharedSpace.shared_cta if shared else None)

    fence()


def meet() -> None:
    """Waits for all threads of the warpgroup."""

    @plgpu.inline_mgpu()
    def barrier(_):
        mgpu.utils.warpgroup_barrier()

    barrier()


def arrive(locks: Sequence, arrivals: Sequence[jax.Array]) -> None:
    """Publishes what the warpgroup wrote to global memory and counts at one or two locks.

    A lock is int32 [1]. Arrivals of 0 leave it alone, and every other number adds one.
    """
    _with_locks(
        "bar.sync $1, 128; @mine fence.acq_rel.gpu; "
        "@mine red.relaxed.gpu.global.add.u32 [lock], 1;",
        locks,
        arrivals,
        arrivals,
    )


def wait(locks: Sequence, arrivals: Sequence[jax.Array], waiters: Sequence[jax.Array]) -> None:
    """Waits for all arrivals at one or two locks, and sees what was written before them.

    A CTA that has waited counts at the lock, too. The last of its waiters resets the lock to zero,
    for the next call of the kernel: no lock is zero again while a CTA waits at it. Arrivals of 0
    leave a lock alone.
    """
    _with_locks(
        "again: @mine ld.acquire.gpu.global.u32 count, [lock]; "
        "setp.lt.and.u32 early, count, sharers, mine; @early bra again; "
        "add.u32 count, sharers, waiters; sub.u32 count, count, 1; "
        "@mine red.relaxed.gpu.global.inc.u32 [lock], count; "
        "bar.warp.sync 0xffffffff; bar.sync $1, 128;",
        locks,
        arrivals,
        waiters,
    )


def _with_locks(code: str, locks, arrivals, waiters) -> None:
    """Runs PTX in which `mine` holds in lanes 0 and 1 of a warpgroup, each with one of the locks.

    `mine` does not hold in a lane without a lock, or whose lock has no arrivals (`sharers`). $1 is
    the warpgroup's barrier.
    """
    number = plgpu.Layout.WG_SPLAT
    if len(locks) == 1:
        locks = [*locks, *locks]
        arrivals, waiters = [*arrivals, jnp.int32(0)], [*waiters, jnp.int32(0)]

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 2, [number] * 4))
    def run(_, locks, numbers):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [
                mgpu.utils.thread_idx(),
                mgpu.utils.warpgroup_barrier_idx(sync=False),
                *(mgpu.utils.memref_ptr(lock) for lock in locks),
                *(number.registers.item() for number in numbers),
            ],
            "{ .reg .pred mine, early; .reg .b32 lane, count, sharers, waiters; .reg .b64 lock; "
            "and.b32 lane, $0, 127; setp.eq.u32 mine, lane, 1; "
            "selp.b64 lock, $3, $2, mine; selp.b32 sharers, $5, $4, mine; "
            "selp.b32 waiters, $7, $6, mine; "
            f"setp.lt.u32 mine, lane, 2; setp.ne.and.u32 mine, sharers, 0, mine; {code} }}",
            "r,r,l,l,r,r,r,r,~{memory}",
            has_side_effects=True,
            convergent=True,
        )

    run(locks, [*arrivals, *waiters])


def opaque(number: jax.Array) -> jax.Array:
    """An int32 of which the compiler knows nothing.

    The compiler does not move what is computed of it out of the loops around it, where it would
    hold registers that the loops need. It does not unroll a loop with this number of turns.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT),
    )
    def move(_, number):
        i32 = ir.IntegerType.get_signless(32)
        value = mgpu.utils.inline_ptx(
            "mov.b32 $0, $1;", number.registers.item(), result_types=i32, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return move(number)
