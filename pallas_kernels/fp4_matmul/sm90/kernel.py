"""The Hopper kernel: copy engine, decode in registers, wgmma.

    y[M, N] = x[M, K] W[N, K]^T + xa[M, R] B[N, R]^T + bias

The decoded weight is the register operand of wgmma, 64 outputs high; the tokens are its narrow
side, read from shared memory. So the accumulator is [64, tile_m] and one kernel serves one token
and thousands.

A block of threads is persistent. One warpgroup copies stages of codes, scales and tokens to shared
memory; those that compute wait for a stage, decode their tiles of it (`layout` explains the bits)
and multiply. The only roundings are those of the float32 accumulation, of x A^T and of the result,
but for the two endings below, which round where a kernel behind the product would.
At the end of a piece of a tile the accumulator is scaled by the divisors of its rows; to the piece
with the first step xa B^T is added as one more step of K. What several warpgroups or blocks of
threads share is added up in a fixed order, through shared memory, that of a cluster too, or through
global memory. So is xa itself, where it comes in shares, by a warpgroup of its own, which adds up a
norm's mean squares, too; they are given, or made first. The product of a gate and of what it
multiplies may end with SwiGLU, see `swiglu`; another one may add to the residual stream and begin
the norm behind it, see `begin_norm`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.sm90 import mean_squares
from pallas_kernels.fp4_matmul.sm90.begin_norm import SQUARES_OF_ROW_TILE
from pallas_kernels.fp4_matmul.sm90.codes import OPERAND
from pallas_kernels.fp4_matmul.sm90.compute import compute
from pallas_kernels.fp4_matmul.sm90.pipeline import fill_stages
from pallas_kernels.fp4_matmul.sm90.schedule import Plan, make_schedule
from pallas_kernels.fp4_matmul.sm90.simulation import add_partial, begin_norm
from pallas_kernels.fp4_matmul.sm90.xa_partials import SUM_BYTES, Shares, add_shares
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

_LOCKS = 4096  # more than any plan has
TRACED_EVENTS = 96  # of a warpgroup; later ones are not recorded


def matmul(
    x: jax.Array,
    weight: Fp4Tiles,
    *,
    config: TileConfig,
    num_sms: int,
    xa: jax.Array | None = None,
    xa_partials: jax.Array | None = None,
    a: jax.Array | None = None,
    b: jax.Array | None = None,
    bias: jax.Array | None = None,
    square_partials: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    pass_squares: jax.Array | None = None,
    dtype: jnp.dtype = jnp.bfloat16,
    trace: str = "",
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Returns x W^T + xa B^T + bias; or what SwiGLU, or the beginning of a norm, makes of it.

    Args:
        x: bfloat16 [M, K].
        weight: [N, K].
        config: the tiling.
        num_sms: blocks of threads that run at a time, no more than the device has: they
            wait for one another.
        xa: bfloat16 [M, R], x A^T; R a multiple of 64 up to config.block_k.
        xa_partials: in its place float32 [S, M, R'], whose sum over S it is; S >= MIN_PARTIALS, R'
            <= R a multiple of PARTIAL_COLUMNS.
        a: in its place bfloat16 [R'', K], R'' <= R, where the plan `supports_lora_shrink`.
        b: bfloat16 [N, R].
        bias: [N].
        square_partials: float32 [S, M], partial mean squares that a norm before the product divides
            by; S >= MIN_PARTIALS. The product is then that of a gate and of what it multiplies, and
            the result what SwiGLU makes of it. With shares or a, and no bias.
        eps: of that norm.
        residual: bfloat16 [M, N] to add the product to, where the plan `supports_add_residual`; no
            bias.
        scale: [N], of the norm behind the sum.
        pass_squares: likewise squares, for who reads the result. With shares or a.
        dtype: of the result, bfloat16 or float32.
        trace: a folder for a file of what the warpgroups do and wait for, see `timeline`.
        interpret: simulate on a CPU. The decode is then plain jnp; x A^T, and the partial sums of a
            shared tile, are made outside of the kernel.

    Returns:
        [M, N], or [M, N / 2] behind SwiGLU. With a stream, the sum, the sum times the norm's scale,
        and shares [S, M] of the sum's mean squares. With pass_squares, also their sum [1, M].
    """
    n, paired = weight.shape[0], square_partials is not None
    tokens, k = x.shape
    row_tiles = weight.codes.shape[0]
    padded = row_tiles * TILE_ROWS
    # The copy engine wants whole or single tiles of 8 rows and 64 columns.
    m = tokens if tokens <= 8 else -(-tokens // 8) * 8
    simulated = interpret is not None
    rank = 0 if b is None else b.shape[1]
    plan = make_schedule(config, m, row_tiles, k, num_sms, simulated=simulated, paired=paired)

    def rows_of(array):
        """Padded to whole tiles of rows; with ones, by which one can divide."""
        padding = ((0, padded - n), *((0, 0) for _ in array.shape[1:]))
        return jnp.pad(array, padding, constant_values=1)

    # The copy engine transposes 16 bits. What it does not store has room for whole tiles.
    transposed = dtype == jnp.float32
    codes, scales = (*weight.codes.shape[:2], 4, 256), weight.scales.shape
    y_shape = m, padded
    if transposed:
        y_shape = plan.n_tiles * config.warpgroups_n * TILE_ROWS, plan.m_tiles * config.tile_m
    if paired:
        halves = 2, row_tiles // 2, weight.codes.shape[1], 8
        codes, scales, y_shape = (*halves, 128), (*halves, 16), (m, n // 2)
    scratch = _scratch(plan, norm=residual is not None)
    operands = {
        "x": jnp.pad(x, ((0, m - tokens), (0, -k % 64))),
        "codes": weight.codes.reshape(codes),
        "scales": weight.scales.reshape(scales),
        "divisor": rows_of(weight.divisor),
    }
    results = {"y": jax.ShapeDtypeStruct(y_shape, dtype)}
    if square_partials is not None:
        assert n == padded
        assert row_tiles % 2 == 0
        assert tokens % 8 == 0
        assert plan.m_tiles == 1
        assert dtype == jnp.bfloat16
        assert bias is None
        assert len(square_partials) >= MIN_PARTIALS
        assert square_partials.shape[1] == tokens
        if simulated:
            factor = lax.rsqrt(square_partials.sum(axis=0) + eps)
            operands["factor"] = jnp.pad(factor, (0, config.tile_m - tokens))
        else:
            assert b is not None  # Who adds up its shares sums up the squares, too.
            assert xa is None
            operands["square_partials"] = square_partials
            scratch["factor"] = plgpu.SMEM((config.tile_m,), jnp.float32)
            scratch["factor_full"] = plgpu.Barrier()
    assert (residual is None) == (scale is None)
    if residual is not None:
        assert plan.supports_add_residual(tokens)
        assert n == padded
        assert dtype == jnp.bfloat16
        assert bias is None
    if residual is not None and not simulated:
        operands |= {"residual": residual, "scale": scale}
        results["scaled"] = results["y"]
        shape = SQUARES_OF_ROW_TILE * plan.n_tiles * config.warpgroups_n, tokens
        results["square_partials"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if pass_squares is not None:
        assert not paired
        assert residual is None
        assert b is not None  # Who adds up its shares adds up these, too.
        assert xa is None
        assert tokens % 8 == 0
        assert len(pass_squares) >= MIN_PARTIALS
        assert pass_squares.shape[1] == tokens
        if not simulated:
            operands["square_partials"] = pass_squares
            results["total"] = jax.ShapeDtypeStruct((1, tokens), jnp.float32)
    assert (b is None) == (xa is None and xa_partials is None and a is None)
    if b is not None:
        assert rank % 64 == 0
        assert rank <= config.block_k
        operands["b"] = rows_of(b)
    if simulated and a is not None:
        xa_partials = jnp.dot(x, a.T, preferred_element_type=jnp.float32)[None]
    if simulated and xa_partials is not None:
        xa = jnp.pad(xa_partials.sum(axis=0), ((0, 0), (0, rank - xa_partials.shape[2])))
        xa = xa.astype(x.dtype)
    elif a is not None:
        assert plan.supports_lora_shrink(*a.shape)
        operands["a"] = jnp.pad(a, ((0, -len(a) % PARTIAL_COLUMNS), (0, 0)))
        shape = k // TILE_COLUMNS, config.tile_m, len(operands["a"])
        results["xa_partials"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        scratch["made"] = plgpu.Barrier(num_arrivals=plan.turns_of_shares(*a.shape))
    elif xa_partials is not None:
        assert len(xa_partials) >= MIN_PARTIALS
        assert supports_xa_partials(config)
        assert xa_partials.shape[1] == tokens
        assert xa_partials.shape[2] % PARTIAL_COLUMNS == 0
        assert xa_partials.shape[2] <= rank
        operands["xa_partials"] = xa_partials
    in_shares = xa is None and b is not None
    # x A^T is copied 128 columns at a time. Of less than that, the copy engine makes up the rest.
    copied = rank if rank < TILE_COLUMNS else -(-rank // TILE_COLUMNS) * TILE_COLUMNS
    if in_shares:
        results["xa"] = jax.ShapeDtypeStruct((-(-tokens // 8) * 8, copied), jnp.bfloat16)
    if xa is not None:
        operands["xa"] = jnp.pad(xa, ((0, m - tokens), (0, copied - rank)))
    if bias is not None:
        operands["bias"] = rows_of(bias)
    if plan.shared or (plan.split > 1 and simulated):
        slots = plan.slots if plan.shared else plan.blocks
        shape = (slots, config.warpgroups_n, TILE_ROWS, config.tile_m)
        results["partial"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if plan.shared or in_shares:
        # Zero before and after every call, for the kernel leaves them as it found them: so all
        # calls of a program, which follow one another, share them. The first and the last are
        # those of the shares.
        assert plan.shared * config.warpgroups_n < _LOCKS - 1
        operands["locks"] = jnp.zeros(_LOCKS, jnp.int32)
    body = functools.partial(_body, plan, tokens, eps, (*operands, *results))
    kernel = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=scratch,
        grid=(plan.clusters if plan.in_clusters else plan.blocks,),
        grid_names=("block",),
        cluster=(plan.split,) if plan.in_clusters else (),
        cluster_names=("member",) if plan.in_clusters else (),
        num_threads=plan.config.warpgroups + helper_warpgroups(in_shares),
        thread_name="warpgroup",
        kernel_name="fp4_matmul_sm90",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            approx_math=paired,  # the exponential and the quotient of SwiGLU, rounded to bfloat16
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=SUM_BYTES,
            profile_space=TRACED_EVENTS if trace else 0,
            profile_dir=trace,
            profile_bounds_check=True,
        ),
        interpret=interpret,
    )
    outs = dict(zip(results, kernel(*operands.values()), strict=True))
    y = outs["y"].T[:, :padded] if transposed else outs["y"]
    if "partial" in outs and simulated:
        y = add_partial(plan, y, outs["partial"], operands.get("bias"), operands.get("factor"))
    if residual is not None and scale is not None:
        if simulated:
            return begin_norm(y[:tokens, :n], residual, scale)
        return outs["y"], outs["scaled"], outs["square_partials"]
    if pass_squares is not None:
        total = pass_squares.sum(axis=0)[None] if simulated else outs["total"]
        return y[:tokens, :n], total
    return y[:tokens, :n]


def _scratch(plan: Plan, *, norm: bool) -> dict:
    config = plan.config
    stage = config.stages, config.warpgroups_n, plan.per_stage
    codes, scales = (*stage, 4, 256), (*stage, 128)
    stored = max(config.tile_m, 2 * plan.stored_tokens) if norm else config.tile_m
    y = plgpu.SMEM((config.warpgroups_n, stored, TILE_ROWS), jnp.bfloat16, transforms=OPERAND)
    if plan.paired:
        halves = config.stages, 2, config.warpgroups_n, plan.per_stage, 4
        codes, scales = (*halves, 128), (*halves, 16)
        y = plgpu.SMEM((config.warpgroups_n, config.tile_m, plan.height), jnp.bfloat16)
    scratch = {
        "x": plgpu.SMEM(
            (config.stages, plan.per_stage, config.tile_m, TILE_COLUMNS),
            jnp.bfloat16,
            transforms=OPERAND,
        ),
        "codes": plgpu.SMEM(codes, jnp.uint32),
        "scales": plgpu.SMEM(scales, jnp.uint32),
        "y": y,
        "full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=plan.arrivals),
        "empty": plgpu.Barrier(num_barriers=config.stages, num_arrivals=plan.config.warpgroups),
    }

    def sums(count, tokens):
        swizzle = plgpu.find_swizzle(tokens * 32)
        return plgpu.SMEM(
            (count, config.warpgroups_n, TILE_ROWS, tokens),
            jnp.float32,
            transforms=(
                plgpu.TilingTransform((8, swizzle // 4)),
                plgpu.SwizzleTransform(swizzle),
            ),
        )

    if plan.in_clusters:
        others = plan.split - 1
        scratch |= {
            "parts": sums(others, config.tile_m // config.receivers),
            "parts_full": plgpu.Barrier(num_barriers=config.warpgroups_n, num_arrivals=others),
        }
    if config.slices > 1:
        scratch |= {
            "sums": sums(config.slices - 1, config.tile_m),
            "sums_full": plgpu.Barrier(
                num_barriers=config.warpgroups_n, num_arrivals=config.slices - 1
            ),
            "sums_empty": plgpu.Barrier(num_barriers=config.warpgroups_n),
        }
    return scratch


def _body(plan: Plan, rows: int, eps: float, names: tuple[str, ...], *refs, **sm):
    gm = dict(zip(names, refs, strict=True))
    warpgroup = lax.axis_index("warpgroup")
    warpgroups, helpers = plan.config.warpgroups, helper_warpgroups("xa_partials" in gm)
    spared = helper_registers(warpgroups, helpers)
    xa_partials = None
    if "xa_partials" in gm:
        lock, all_made = (gm["locks"].at[pl.ds(i, 1)] for i in (0, _LOCKS - 1))
        xa_partials = Shares(
            gm["xa_partials"], gm["xa"], lock, rows, plan.adders, gm.get("a"), all_made
        )

    @pl.when(warpgroup == warpgroups)
    def _():
        plgpu.set_max_registers(spared, action="decrease")
        fill_stages(plan, gm, sm, xa_partials)

    if xa_partials is not None:

        @pl.when(warpgroup > warpgroups)
        def _():
            plgpu.set_max_registers(spared, action="decrease")
            with jax.named_scope("add shares"):
                add_shares(plan.this_block(), xa_partials, sm.get("made"))
            if plan.paired:
                mean_squares.write_factor(gm["square_partials"], sm["factor"], eps)
                plgpu.barrier_arrive(sm["factor_full"])
            if "total" in gm:
                mean_squares.write_total(
                    gm["square_partials"], gm["total"], plan.this_block(), plan.blocks
                )

    @pl.when(warpgroup < warpgroups)
    def _():
        registers = compute_registers(warpgroups, helpers)
        plgpu.set_max_registers(registers, action="increase")
        compute(plan, gm, sm, xa_partials, warpgroup=warpgroup, registers=registers)
