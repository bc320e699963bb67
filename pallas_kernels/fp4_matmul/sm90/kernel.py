"""The FP4 product on Hopper GPUs: TMA, dequantization in registers, wgmma.

    y[M, N] = x[M, K] W[N, K]^T + xa[M, R] B[N, R]^T + bias

The dequantized weight is the register operand of wgmma, 64 outputs high; the tokens are its narrow
side, read from shared memory. So the accumulator is [64, tile_m], and one kernel serves one token
and thousands. The kernel is persistent: a CTA computes several tiles (`schedule`). Its warpgroups,
in time from left to right, for one tile with an adapter:

    producer  |TMA: stages 0, 1, 2, ...      |await xa|TMA: x A^T |stages of the next tile
              | |full[s]     ^empty[s]       |   ^    | |full[s]  |
              | v            |               |   |    | v         |
    consumers |shrink|dequantize and wgmma: all the   |wgmma:     |epilogue: divisor, bias,
              | |    |tile's steps (`mainloop`)  |    |+ xa B^T   |SwiGLU, residual and norm,
              | |    |                       |   |    |           |TMA store; or `fixup`
              | |partials_made               |   |lock|           | ^factor_full
              | v                            |   |    |           | |
    reducer   | |made_lock: of all CTAs|add up partials of x A^T|factor of the norm

Only products with partials of x A^T have a reducer warpgroup (`xa_partials`, `mean_squares`). The
consumers make these partials first (`make_partials`), or the caller gives them. The stage with
x A^T follows the stages of the work tile that begins a tile. Barriers, and locks in global memory:

    full[s]        the TMA's copies of stage s have arrived
    empty[s]       the consumers have read stage s
    partials_made  the consumers have made this CTA's partials of x A^T
    made_lock      all CTAs have made theirs (global memory)
    lock           all CTAs have added up their parts of x A^T (global memory)
    factor_full    the reducer has written the factor of the norm before SwiGLU
    sums_*         slices of a CTA exchange their sums
    parts_full     the parts of the other CTAs of the cluster have arrived
    locks[1..]     all peers of a split tile have written their partial sums (global memory)

The only roundings are those of the float32 accumulation, of x A^T and of the result, and with
SwiGLU or a residual those of the kernels that would follow the product. Sums across warpgroups and
CTAs have a fixed order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.fp4_matmul.epilogues import AddRmsNorm, Epilogue, Swiglu
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.sm90 import mean_squares, simulation
from pallas_kernels.fp4_matmul.sm90.add_rmsnorm import PARTIALS_OF_ROW_TILE
from pallas_kernels.fp4_matmul.sm90.codes import OPERAND
from pallas_kernels.fp4_matmul.sm90.consumer import consume
from pallas_kernels.fp4_matmul.sm90.context import GlobalMemory, Kernel, SharedMemory
from pallas_kernels.fp4_matmul.sm90.producer import produce
from pallas_kernels.fp4_matmul.sm90.schedule import TileSchedule, make_schedule
from pallas_kernels.fp4_matmul.sm90.xa_partials import SUM_BYTES, XaPartials, reduce_partials
from pallas_kernels.fp4_matmul.tiling import (
    MIN_PARTIALS,
    PARTIAL_COLUMNS,
    TILE_COLUMNS,
    TILE_ROWS,
    TileConfig,
    compute_registers,
    helper_registers,
    helper_warpgroups,
    supports_xa_partials,
)

_LOCKS = 4096  # more than any schedule has
TRACED_EVENTS = 96  # events of a warpgroup that a trace records; later ones are left out


@dataclasses.dataclass(frozen=True)
class Product:
    """The operands of `matmul`; B comes with one of `xa`, `xa_partials` and `a`."""

    x: jax.Array  # bfloat16 [M, K]
    weight: Fp4Tiles  # packed weight [N, K]
    b: jax.Array | None = None  # bfloat16 [N, R]; R a multiple of 64 up to config.block_k
    xa: jax.Array | None = None  # bfloat16 [M, R], x A^T
    # float32 [S, M, R'], whose sum over S is x A^T; S >= MIN_PARTIALS, R' <= R a multiple of
    # PARTIAL_COLUMNS.
    xa_partials: jax.Array | None = None
    # bfloat16 [R'', K], R'' <= R, where the schedule `supports_lora_shrink`.
    a: jax.Array | None = None
    bias: jax.Array | None = None  # bias [N]; not with an epilogue
    # `Swiglu` of at least MIN_PARTIALS partials, with `xa_partials` or `a`; `AddRmsNorm` where the
    # schedule `supports_add_residual`; or None.
    epilogue: Epilogue | None = None
    dtype: DTypeLike = jnp.bfloat16  # dtype of the result, bfloat16 or float32

    @property
    def in_partials(self) -> bool:
        """Whether the kernel adds up x A^T."""
        return self.xa is None and self.b is not None

    @property
    def transposed(self) -> bool:
        """Whether the kernel writes y^T: the transposing store is for 16 bits."""
        return self.dtype == jnp.float32

    @property
    def padded_tokens(self) -> int:
        """M, or the next multiple of 8 beyond 8: the TMA wants whole or single tiles of 8 rows."""
        tokens = len(self.x)
        return tokens if tokens <= 8 else -(-tokens // 8) * 8

    @property
    def xa_columns(self) -> int:
        """Columns of x A^T, which is copied 128 at a time; the TMA fills up less than 128."""
        if self.b is None:
            return 0
        rank = self.b.shape[1]
        return rank if rank < TILE_COLUMNS else -(-rank // TILE_COLUMNS) * TILE_COLUMNS


def matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    *,
    config: TileConfig,
    num_sms: int,
    trace: str = "",
    interpret: plgpu.InterpretGPUParams | None = None,
    **operands: Any,
) -> jax.Array | tuple[jax.Array, ...]:
    """Returns x W^T + xa B^T + bias, or what an epilogue makes of it.

    Args:
        x: bfloat16 [M, K].
        weight: packed weight [N, K].
        config: tiling.
        num_sms: number of CTAs that run at a time, no more than the device has SMs: they wait for
            one another.
        trace: folder for a file of what the warpgroups do and wait for, see `timeline`.
        interpret: parameters of a simulation on a CPU. It dequantizes in jnp, and computes x A^T
            and the partial sums of a split tile outside of the kernel.
        **operands: further attributes of `Product`.

    Returns:
        [M, N], or the results of the epilogue.
    """
    product, simulated = Product(x, weight, **operands), interpret is not None
    row_tiles, k = len(weight.codes), x.shape[1]
    schedule = make_schedule(
        config,
        product.padded_tokens,
        row_tiles,
        k,
        num_sms,
        simulated=simulated,
        paired=isinstance(product.epilogue, Swiglu),
    )
    _check(product, schedule)
    if simulated:
        product = dataclasses.replace(
            product, xa=simulation.shrink(product), xa_partials=None, a=None
        )
    inputs, results = _inputs(product, schedule), _results(product, schedule)
    outs = _run(product, schedule, inputs, results, trace=trace, interpret=interpret)
    return _finish(product, schedule, inputs, outs)


def _check(product: Product, schedule: TileSchedule) -> None:
    """Asserts what the callers of `matmul` have checked."""
    (tokens, k), config = product.x.shape, schedule.config
    n, whole = product.weight.shape[0], product.weight.shape[0] % TILE_ROWS == 0
    a, b, xa_partials, epilogue = product.a, product.b, product.xa_partials, product.epilogue
    given = [source for source in (product.xa, xa_partials, a) if source is not None]
    assert len(given) == (0 if b is None else 1)
    if b is not None:
        assert b.shape[1] % 64 == 0
        assert b.shape[1] <= config.block_k
    if a is not None:
        assert schedule.supports_lora_shrink(len(a), k)
    if xa_partials is not None:
        assert len(xa_partials) >= MIN_PARTIALS
        assert supports_xa_partials(config)
        assert xa_partials.shape[1] == tokens
        assert xa_partials.shape[2] % PARTIAL_COLUMNS == 0
        assert b is not None
        assert xa_partials.shape[2] <= b.shape[1]
    if epilogue is not None:
        assert whole
        assert product.dtype == jnp.bfloat16
        assert product.bias is None
    if isinstance(epilogue, Swiglu):
        assert n % (2 * TILE_ROWS) == 0
        assert tokens % 8 == 0
        assert epilogue.square_partials.shape[1] == tokens
        assert len(epilogue.square_partials) >= MIN_PARTIALS
        # The reducer warpgroup, which adds up x A^T, adds up the squares, too.
        assert schedule.simulated or product.in_partials
    if isinstance(epilogue, AddRmsNorm):
        assert schedule.supports_add_residual(tokens)


def _inputs(product: Product, schedule: TileSchedule) -> dict[str, jax.Array]:
    """The arrays that the kernel reads by their names in `GlobalMemory`."""
    (tokens, k), weight, config = product.x.shape, product.weight, schedule.config
    m, padded, epilogue = product.padded_tokens, schedule.row_tiles * TILE_ROWS, product.epilogue
    codes, scales = (*weight.codes.shape[:2], 4, 256), weight.scales.shape
    if schedule.paired:
        halves = 2, schedule.row_tiles // 2, weight.codes.shape[1], 8
        codes, scales = (*halves, 128), (*halves, scales[-1] // 8)

    def pad_rows(array):
        """Pads to whole tiles of rows; with ones, by which one can divide."""
        padding = ((0, padded - len(array)), *((0, 0) for _ in array.shape[1:]))
        return jnp.pad(array, padding, constant_values=1)

    inputs = {
        "x": jnp.pad(product.x, ((0, m - tokens), (0, -k % 64))),
        "codes": weight.codes.reshape(codes),
        "scales": weight.scales.reshape(scales),
        "divisor": pad_rows(weight.divisor),
    }
    if isinstance(epilogue, Swiglu) and schedule.simulated:
        factor = lax.rsqrt(epilogue.square_partials.sum(axis=0) + epilogue.eps)
        inputs["factor"] = jnp.pad(factor, (0, schedule.m_tiles * config.tile_m - tokens))
    elif isinstance(epilogue, Swiglu):
        inputs["square_partials"] = epilogue.square_partials
    if isinstance(epilogue, AddRmsNorm) and not schedule.simulated:
        inputs |= {"residual": epilogue.residual, "scale": epilogue.scale}
    if product.b is not None:
        inputs["b"] = pad_rows(product.b)
    if product.a is not None:
        inputs["a"] = jnp.pad(product.a, ((0, -len(product.a) % PARTIAL_COLUMNS), (0, 0)))
    if product.xa_partials is not None:
        inputs["xa_partials"] = product.xa_partials
    if product.xa is not None:
        columns = product.xa_columns - product.xa.shape[1]
        inputs["xa"] = jnp.pad(product.xa, ((0, m - tokens), (0, columns)))
    if product.bias is not None:
        inputs["bias"] = pad_rows(product.bias)
    if schedule.split_tiles or product.in_partials:
        # Zero before and after every call, for the kernel leaves them as it found them: so all
        # calls of a program, which follow one another, use the same array. The first and the last
        # lock belong to the partials of x A^T.
        assert schedule.split_tiles * config.warpgroups_n < _LOCKS - 1
        inputs["locks"] = jnp.zeros(_LOCKS, jnp.int32)
    return inputs


def _results(product: Product, schedule: TileSchedule) -> dict[str, jax.ShapeDtypeStruct]:
    """The kernel's results by their names in `GlobalMemory`."""
    (tokens, k), config = product.x.shape, schedule.config
    y = product.padded_tokens, schedule.row_tiles * TILE_ROWS
    if product.transposed:  # What the TMA does not store has space for whole tiles.
        rows = schedule.n_tiles * config.warpgroups_n * TILE_ROWS
        y = rows, schedule.m_tiles * config.tile_m
    if schedule.paired:
        y = product.padded_tokens, product.weight.shape[0] // 2
    results = {"y": jax.ShapeDtypeStruct(y, product.dtype)}
    if isinstance(product.epilogue, AddRmsNorm) and not schedule.simulated:
        results["scaled"] = results["y"]
        partials = PARTIALS_OF_ROW_TILE * schedule.n_tiles * config.warpgroups_n
        results["square_partials"] = jax.ShapeDtypeStruct((partials, tokens), jnp.float32)
    if product.a is not None:
        rank = -(-len(product.a) // PARTIAL_COLUMNS) * PARTIAL_COLUMNS
        shape = k // TILE_COLUMNS, config.tile_m, rank
        results["xa_partials"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if product.in_partials:
        shape = -(-tokens // 8) * 8, product.xa_columns
        results["xa"] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    if schedule.split_tiles or (schedule.split > 1 and schedule.simulated):
        slots = schedule.partial_slots if schedule.split_tiles else schedule.blocks
        shape = slots, config.warpgroups_n, TILE_ROWS, config.tile_m
        results["partial"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return results


def _scratch(product: Product, schedule: TileSchedule) -> dict:
    """Shared memory and barriers by their names in `SharedMemory`."""
    config, rows = schedule.config, schedule.config.warpgroups_n
    stage = config.stages, rows, schedule.tiles_per_stage
    words = product.weight.scales.shape[-1]
    codes, scales = (*stage, 4, 256), (*stage, words)
    stored = config.tile_m
    if isinstance(product.epilogue, AddRmsNorm):  # The sum and the scaled sum lie side by side.
        stored = max(config.tile_m, 2 * schedule.stored_tokens)
    y = plgpu.SMEM((rows, stored, TILE_ROWS), jnp.bfloat16, transforms=OPERAND)
    if schedule.paired:
        halves = config.stages, 2, rows, schedule.tiles_per_stage, 4
        codes, scales = (*halves, 128), (*halves, words // 8)
        y = plgpu.SMEM((rows, config.tile_m, schedule.tile_outputs), jnp.bfloat16)
    x = config.stages, schedule.tiles_per_stage, config.tile_m, TILE_COLUMNS
    scratch = {
        "x": plgpu.SMEM(x, jnp.bfloat16, transforms=OPERAND),
        "codes": plgpu.SMEM(codes, jnp.uint32),
        "scales": plgpu.SMEM(scales, jnp.uint32),
        "y": y,
        "full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=schedule.arrivals),
        "empty": plgpu.Barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
    }
    if schedule.in_clusters:
        others = schedule.split - 1
        scratch |= {
            "parts": _sums(others, rows, config.tile_m // config.receivers),
            "parts_full": plgpu.Barrier(num_barriers=rows, num_arrivals=others),
        }
    if config.slices > 1:
        others = config.slices - 1
        scratch |= {
            "sums": _sums(others, rows, config.tile_m),
            "sums_full": plgpu.Barrier(num_barriers=rows, num_arrivals=others),
            "sums_empty": plgpu.Barrier(num_barriers=rows),
        }
    if schedule.paired and not schedule.simulated:
        scratch["factor"] = plgpu.SMEM((schedule.m_tiles * config.tile_m,), jnp.float32)
        scratch["factor_full"] = plgpu.Barrier()
    if product.a is not None:
        turns = schedule.shrink_turns(*product.a.shape)
        scratch["partials_made"] = plgpu.Barrier(num_arrivals=turns)
    return scratch


def _sums(count: int, rows: int, tokens: int) -> Any:
    """Shared memory for accumulators [64, tokens] of other warpgroups or CTAs."""
    swizzle = plgpu.find_swizzle(tokens * 32)
    return plgpu.SMEM(
        (count, rows, TILE_ROWS, tokens),
        jnp.float32,
        transforms=(plgpu.TilingTransform((8, swizzle // 4)), plgpu.SwizzleTransform(swizzle)),
    )


def _run(
    product: Product,
    schedule: TileSchedule,
    inputs: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    trace: str,
    interpret: plgpu.InterpretGPUParams | None,
) -> dict[str, jax.Array]:
    """The arrays of `results`, which the kernel makes of the inputs."""
    in_clusters = schedule.in_clusters
    eps = product.epilogue.eps if isinstance(product.epilogue, Swiglu) else 0.0
    names = *inputs, *results
    kernel = plgpu.kernel(
        functools.partial(_body, schedule, len(product.x), eps, names),
        out_type=tuple(results.values()),
        scratch_types=_scratch(product, schedule),
        grid=(schedule.clusters if in_clusters else schedule.blocks,),
        grid_names=("block",),
        cluster=(schedule.split,) if in_clusters else (),
        cluster_names=("member",) if in_clusters else (),
        num_threads=schedule.config.warpgroups + helper_warpgroups(product.in_partials),
        thread_name="warpgroup",
        kernel_name="fp4_matmul_sm90",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            # The exponential and the quotient of SwiGLU are rounded to bfloat16.
            approx_math=schedule.paired,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=SUM_BYTES,
            profile_space=TRACED_EVENTS if trace else 0,
            profile_dir=trace,
            profile_bounds_check=True,
        ),
        interpret=interpret,
    )
    return dict(zip(results, kernel(*inputs.values()), strict=True))


def _body(
    schedule: TileSchedule, tokens: int, eps: float, names: tuple[str, ...], *refs, **scratch
) -> None:
    """The kernel: every warpgroup becomes a consumer, the producer or the reducer."""
    gmem = GlobalMemory(**dict(zip(names, refs, strict=True)))
    smem = SharedMemory(**scratch)
    warpgroup = lax.axis_index("warpgroup")
    consumers = schedule.config.warpgroups
    helpers = helper_warpgroups(gmem.xa_partials is not None)
    spared = helper_registers(consumers, helpers)
    partials = None
    if gmem.xa_partials is not None:
        lock, made_lock = (gmem.locks.at[pl.ds(i, 1)] for i in (0, _LOCKS - 1))
        blocks = schedule.resident_blocks
        partials = XaPartials(gmem.xa_partials, gmem.xa, lock, tokens, blocks, gmem.a, made_lock)
    kernel = Kernel(schedule, gmem, smem, partials)

    @pl.when(warpgroup == consumers)
    def run_producer():
        plgpu.set_max_registers(spared, action="decrease")
        produce(kernel)

    if partials is not None:

        @pl.when(warpgroup > consumers)
        def run_reducer():
            plgpu.set_max_registers(spared, action="decrease")
            with jax.named_scope("add partials"):
                reduce_partials(schedule.this_block(), partials, smem.partials_made)
            if schedule.paired:
                mean_squares.write_factor(gmem.square_partials, smem.factor, eps)
                plgpu.barrier_arrive(smem.factor_full)

    @pl.when(warpgroup < consumers)
    def run_consumer():
        registers = compute_registers(consumers, helpers)
        plgpu.set_max_registers(registers, action="increase")
        consume(kernel, warpgroup=warpgroup, registers=registers)


def _finish(
    product: Product, schedule: TileSchedule, inputs: dict, outs: dict[str, jax.Array]
) -> jax.Array | tuple[jax.Array, ...]:
    """The result of `matmul`, without padding; adds up what a simulation leaves."""
    tokens, n, epilogue = len(product.x), product.weight.shape[0], product.epilogue
    y = outs["y"].T[:, : schedule.row_tiles * TILE_ROWS] if product.transposed else outs["y"]
    if schedule.simulated and "partial" in outs:
        bias, factor = inputs.get("bias"), inputs.get("factor")
        y = simulation.add_partial(schedule, y, outs["partial"], bias, factor)
    if not isinstance(epilogue, AddRmsNorm):
        return y[:tokens, :n]
    if schedule.simulated:
        return simulation.add_rmsnorm(y[:tokens, :n], epilogue)
    return outs["y"], outs["scaled"], outs["square_partials"]
