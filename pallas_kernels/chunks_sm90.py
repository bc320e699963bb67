"""States that go through the chunks of a linear recurrence on a Hopper GPU, in one kernel.

A CTA takes some columns of the states of a head through all chunks, one after the other, and keeps
them in float32 registers. A producer warpgroup has the TMA copy the matrices of the chunks, and
each of two consumer warpgroups has 64 rows of every state. The products are those of bfloat16.
"""

import concurrent.futures
import functools
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.tiles_sm90 import OPERAND, TILE, meet

_ROWS = 64  # of a state in a warpgroup, and tokens of a chunk
WIDTH = 128  # rows of a state
_COLUMNS = 64  # of the states in a CTA
_STAGES = 2
_CONSUMERS = 2
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24


def run(
    states: jax.Array,
    reads: jax.Array,
    writes: jax.Array,
    keeps: jax.Array,
    given: Sequence[jax.Array],
    *,
    reverse: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes the states X [S 128, Dv] of each head through n chunks.

    A chunk computes P = given + reads X, of [128, Dv], and X <- keeps X + writes P[:64]. With
    `reverse` it begins with the last chunk, P has the 64 rows of reads X and then those that are
    given, and X <- keeps X + writes P.

    Args:
        states: float32 [H, S 128, Dv], the states of H heads at the beginning.
        reads: bfloat16 [n, H, 128, S 128], or [n, H, 64, S 128] with `reverse`.
        writes: bfloat16 [n, H, S 128, 64], or [n, H, S 128, 128] with `reverse`.
        keeps: float32 [n, H, S, S], the factors of the old states in each new state.
        given: float32 [n, H, 64, Dv], the first and the last half of what is given; with `reverse`
            one array.
        reverse: whether to begin with the last chunk.
        interpret: how to simulate the kernel.

    Returns:
        The states at the end; bfloat16 [n, H, S 128, Dv], the states in front of each chunk; and
        bfloat16 P, with `reverse` its first 64 rows alone.
    """
    heads, rows, columns = states.shape
    count, made, written = len(reads), reads.shape[2], writes.shape[3]
    one = plgpu.Barrier(num_barriers=1)
    return plgpu.kernel(
        functools.partial(_body, reverse=reverse, simulated=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct(states.shape, jnp.float32),
            jax.ShapeDtypeStruct((count, *states.shape), jnp.bfloat16),
            jax.ShapeDtypeStruct((count, heads, made, columns), jnp.bfloat16),
        ),
        scratch_types={
            "reads_sm": _operand(_STAGES, made, rows),
            "writes_sm": _operand(rows, written),
            "states_sm": _operand(rows, _COLUMNS),
            "made_sm": _operand(2 * _ROWS, _COLUMNS),
            "reads_full": plgpu.Barrier(num_barriers=_STAGES),
            "reads_empty": plgpu.Barrier(num_barriers=_STAGES, num_arrivals=_CONSUMERS),
            "writes_full": one,
            "writes_empty": plgpu.Barrier(num_barriers=1, num_arrivals=_CONSUMERS),
            "met": plgpu.Barrier(num_barriers=2, num_arrivals=_CONSUMERS),
        },
        grid=(heads, columns // _COLUMNS),
        grid_names=("head", "part"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="chunks_sm90",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(states, reads, writes, keeps.reshape(count, heads, -1), tuple(given))


def _operand(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=OPERAND)


def _body(
    states, reads, writes, keeps, given, end, before, made, *, reverse, simulated, **shared
) -> None:
    """The kernel."""
    warpgroup, head = lax.axis_index("warpgroup"), lax.axis_index("head")
    columns = pl.ds(lax.axis_index("part") * _COLUMNS, _COLUMNS)
    count, kept = reads.shape[0], states.shape[1] // WIDTH
    own = types.SimpleNamespace(**shared)
    add_product = functools.partial(_add_product, simulated=simulated)

    def place(step):
        return count - 1 - step if reverse else step, head

    @pl.when(warpgroup == _CONSUMERS)
    def produce():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        @pl.loop(0, count)
        def fill(step):
            slot = lax.rem(step, _STAGES)

            @pl.when(step >= _STAGES)
            def await_reads():
                plgpu.barrier_wait(own.reads_empty.at[slot])

            source = reads.at[place(step)]
            plgpu.copy_gmem_to_smem(source, own.reads_sm.at[slot], own.reads_full.at[slot])

            @pl.when(step >= 1)
            def await_writes():
                plgpu.barrier_wait(own.writes_empty)

            plgpu.copy_gmem_to_smem(writes.at[place(step)], own.writes_sm, own.writes_full)

        # A kernel must not end before all arrivals at its barriers.
        plgpu.barrier_wait(own.writes_empty)

        @pl.loop(max(count - _STAGES, 0), count)
        def observe_last_phases(step):
            plgpu.barrier_wait(own.reads_empty.at[lax.rem(step, _STAGES)])

    for number in range(_CONSUMERS):
        rows = [slice(state * WIDTH + number * _ROWS, state * WIDTH + (number + 1) * _ROWS)
                for state in range(kept)]  # fmt: skip

        @pl.when(warpgroup == number)
        def consume(number=number, rows=rows):
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            half = slice(number * _ROWS, (number + 1) * _ROWS)

            def advance(step, carry):
                slot, at = lax.rem(step, _STAGES), place(step)
                # Requested long before they are added.
                own_given = not reverse or number == 1
                added = _load(given[number - len(given)].at[*at, :, columns]) if own_given else None
                factors = [keeps[*at, index] for index in range(kept * kept)]
                # The copies of the step before have read what this one changes.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for part, state in zip(rows, carry, strict=True):
                    own.states_sm[part] = state.astype(jnp.bfloat16)
                plgpu.commit_smem()
                for part in rows:
                    plgpu.copy_smem_to_gmem(own.states_sm.at[part], before.at[*at, part, columns])
                meet(own.met.at[0])
                plgpu.barrier_wait(own.reads_full.at[slot])
                value: Any = added
                if not reverse or number == 0:
                    value = add_product(None, own.reads_sm.at[slot, half], own.states_sm)
                    value = value if added is None else value + added
                plgpu.barrier_arrive(own.reads_empty.at[slot])
                own.made_sm[half] = value.astype(jnp.bfloat16)
                plgpu.commit_smem()
                if not (reverse and number == 1):
                    target = made.at[*at, half, columns]
                    plgpu.copy_smem_to_gmem(own.made_sm.at[half], target)
                meet(own.met.at[1])
                plgpu.barrier_wait(own.writes_full)
                right = own.made_sm if reverse else own.made_sm.at[:_ROWS]
                new = []
                for to, part in enumerate(rows):
                    total = factors[to * kept] * carry[0]
                    for of in range(1, kept):
                        total += factors[to * kept + of] * carry[of]
                    new.append(add_product(total, own.writes_sm.at[part], right))
                plgpu.barrier_arrive(own.writes_empty)
                return tuple(new)

            carry = tuple(_load(states.at[head, part, columns]) for part in rows)
            carry = lax.fori_loop(0, count, advance, carry)
            for part, value in zip(rows, carry, strict=True):
                plgpu.store(end.at[head, part, columns], value, optimized=False)
            plgpu.wait_smem_to_gmem(0)


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=TILE, optimized=False)


def _add_product(total: jax.Array | None, a: Any, b: Any, *, simulated: bool) -> jax.Array:
    """Adds the product of two matrices in shared memory, [64, columns of b].

    The interpreter's accumulator begins with zeros.
    """

    def multiply(acc):
        if total is not None and not simulated:
            acc[...] = total
        plgpu.wgmma(acc, a, b)
        return acc[...]

    value = pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
    return value + total if total is not None and simulated else value


def relative_error() -> float:
    """The largest relative error of small runs in both directions, compared with float64."""
    rng, count = np.random.default_rng(0), 4
    errors = []
    for reverse, (made, written) in ((False, (128, 64)), (True, (64, 128))):
        states = rng.standard_normal((1, 2 * WIDTH, 64)).astype(np.float32)
        reads = (rng.standard_normal((count, 1, made, 2 * WIDTH)) / 32).astype(jnp.bfloat16)
        writes = (rng.standard_normal((count, 1, 2 * WIDTH, written)) / 32).astype(jnp.bfloat16)
        keeps = rng.uniform(0, 1, (count, 1, 2, 2)).astype(np.float32)
        given = rng.standard_normal((1 if reverse else 2, count, 1, 64, 64)).astype(np.float32)
        kernel = jax.jit(functools.partial(run, reverse=reverse))
        arrays = states, reads, writes, keeps, list(given)
        # The caller may be tracing a program. Tracing belongs to a thread, so another one computes.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            found = thread.submit(kernel, *arrays).result()
        for value, want in zip(found, _definition(*arrays, reverse=reverse), strict=True):
            error = np.linalg.norm(np.asarray(value, np.float64) - want)
            errors.append(error / np.linalg.norm(want))
    return float(np.max(errors))


def _definition(states, reads, writes, keeps, given, *, reverse):
    """What `run` returns, in float64."""
    reads, writes, keeps, state = (
        np.asarray(x, np.float64) for x in (reads, writes, keeps, states)
    )
    given = np.concatenate([np.asarray(x, np.float64) for x in given], axis=2)
    before, made = np.empty((len(reads), *state.shape)), np.empty((*reads.shape[:3], 64))
    for i in range(len(reads))[:: -1 if reverse else 1]:
        before[i], made[i] = state, reads[i] @ state
        if reverse:
            change = writes[i] @ np.concatenate([made[i], given[i]], axis=1)
        else:
            made[i] += given[i]
            change = writes[i] @ made[i][:, :64]
        parts = state.reshape(len(state), keeps.shape[-1], WIDTH, -1)
        state = np.einsum("hts,hsdv->htdv", keeps[i], parts).reshape(state.shape) + change
    return state, before, made
