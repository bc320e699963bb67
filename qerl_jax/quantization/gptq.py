"""GPTQ onto the grid of NVFP4: four-bit codes that keep the outputs of a projection.

Rounding to the nearest number treats every weight alone. GPTQ (https://arxiv.org/abs/2210.17323)
rounds the columns of a weight one after the other, and moves the columns that follow so that they
make up for the error so far, as far as the inputs of the projection correlate. With H the mean of
x x^T over the inputs x, and a row w that becomes q, it lowers the error of the outputs
(w - q) H (w - q)^T.

Written by the factor H = R R^T with R upper triangular, that error is |(w - q) R|^2, and GPTQ is
Babai's nearest-plane algorithm (https://arxiv.org/abs/2507.18553): with e_i = w_i - q_i for the
columns i so far, column j rounds

    t_j = w_j + sum_{i < j} e_i R_ij / R_jj

The original formulation updates the weights by the inverse of H, which gives the same numbers, but
for the rounding of floats, and needs an inverse besides the factor.

Three choices differ from rounding: columns are taken by descending H_jj, so that those with the
largest inputs have the most columns after them (llm-compressor's static activation order: a block
keeps its columns and its scale); H gets a hundredth of its mean diagonal; and the scale of a block
may grow up to twice, where that lowers its squared error weighted by H_jj.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul import FORMATS
from qerl_jax.policy.quant import BLOCK

# The compiler would time candidates for matrix products, and could choose others the next time: the
# same text must give the same bytes. Without timing, the kernels that it generates are slow at
# products (a layer of 7B takes 3.7 s instead of 1.1), so that those of cuBLAS are used.
SAME_PROGRAM = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

_DAMPING = 0.01  # of the mean diagonal of H
_PANELS = (128, 64, 32, 16)  # columns between two products with all columns
_GROWTH = 8  # FP8 numbers above the scale of the largest weight: eight are a factor of two
_LARGEST_SCALE = 448.0  # of E4M3
_LARGEST_BYTE = 126  # the byte of 448
_ROOM = 256.0  # what the scale of the largest weight becomes, so that it may grow

Array = jax.Array


@functools.partial(jax.jit, static_argnames="grow")
def block_scales(weight: Array, energy: Array, *, grow: bool = True) -> tuple[Array, Array]:
    """Chooses scales FP8 (E4M3) [N, K/16] of a fused group in NVFP4, and their float32 divisor.

    `weight`, float32 [N, K], has the stacked rows of the group, and `energy`, float32 [K], the mean
    square of each input, which weighs the errors of its column. With `grow` a scale may exceed the
    one that maps the largest weight of its block to 6. Smaller ones, which clip, are never taken:
    an error that makes all large weights smaller does more harm than its square says.
    """
    blocks = weight.reshape(len(weight), -1, BLOCK)
    amax = jnp.abs(blocks).max(axis=-1)
    largest = jnp.abs(weight).max()
    room = _ROOM if grow else _LARGEST_SCALE
    # The quotient of weights below about 1e-35 overflows; all of them then become zero.
    divisor = room * 6.0 / largest
    divisor = jnp.where(jnp.isfinite(divisor), divisor, 1.0).astype(jnp.float32)
    default = (amax / 6.0 * divisor).astype(jnp.float8_e4m3fn)
    default = jnp.where(default == 0, jnp.float8_e4m3fn(0.125), default)
    if not grow:
        return default, divisor
    first = jax.lax.bitcast_convert_type(default, jnp.uint8)
    weights = energy.reshape(-1, BLOCK)

    def scales_of(step: Array) -> Array:
        byte = jnp.minimum(first + step, _LARGEST_BYTE).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)

    def error(step: Array) -> Array:
        scales = (scales_of(step).astype(jnp.float32) / divisor)[..., None]
        return jnp.sum(weights * (round_to_e2m1(blocks / scales) * scales - blocks) ** 2, axis=-1)

    def keep_better(best: tuple[Array, Array], step: Array) -> tuple[tuple[Array, Array], None]:
        candidate = error(step)
        is_less = candidate < best[0]
        return (jnp.where(is_less, candidate, best[0]), jnp.where(is_less, step, best[1])), None

    start = error(jnp.uint8(0)), jnp.zeros_like(first)
    (_, steps), _ = jax.lax.scan(keep_better, start, jnp.arange(1, _GROWTH + 1, dtype=jnp.uint8))
    return scales_of(steps), divisor


def _gptq(
    weight: Array,
    hessian: Array,
    scales: Array,
    divisor: Array,
    damping: Array | float = _DAMPING,
    dither: Array | None = None,
    *,
    orders: bool = True,
) -> tuple[Array, Array]:
    """Rounds a weight column by column, as the module says.

    Args:
        weight: [N, K].
        hessian: float32 [K, K], the mean of x x^T over the inputs, or a multiple of it.
        scales: FP8 (E4M3) scales [N, K/16], which stay as they are.
        divisor: float32 divisor of the scales.
        damping: what is added to the diagonal of H, relative to its mean.
        dither: [N, K], what is added to each target before it is rounded, from -0.5 to 0.5 of the
            distance between two numbers there; None adds nothing.
        orders: whether columns are taken by descending H_jj, or as they stand.

    Returns:
        E2M1 codes uint8 [N, K], and whether all numbers stayed finite. An H that is too close to a
        singular one has no factor; it needs more damping.
    """
    inputs = weight.shape[1]
    energy = jnp.diagonal(hessian)
    # An input that is always zero changes no output, and its column becomes zero.
    is_dead = energy == 0
    order = jnp.argsort(-energy) if orders else jnp.arange(inputs)
    added = jnp.where(is_dead, 1.0, 0.0) + damping * energy.mean()
    # The factor of the reversed matrix is lower triangular; reversed again, it is upper triangular.
    # H of 72B has 3.5 GB, so that no step makes a copy that it does not need.
    last = order[::-1]
    matrix = hessian[last[:, None], last] + jnp.diag(added[last])
    factor = jnp.linalg.cholesky(matrix, symmetrize_input=False)[::-1, ::-1]
    columns = jnp.where(is_dead, 0.0, weight.astype(jnp.float32)).T[
        order
    ]  # [K, N], so that a column is contiguous
    steps = (scales.astype(jnp.float32) / divisor).T  # [K/16, N]
    offsets = () if dither is None else (dither.T[order],)
    width = next(panel for panel in _PANELS if inputs % panel == 0)

    def round_panel(moved: Array, start: Array) -> tuple[Array, Array]:
        """Rounds the columns of a panel; `moved` [K, N] is the sum of e_i R_ij."""
        rows = jax.lax.dynamic_slice_in_dim(factor, start, width)  # [P, K]
        square = jax.lax.dynamic_slice_in_dim(rows, start, width, axis=1)  # [P, P]
        blocks = jax.lax.dynamic_slice_in_dim(order, start, width) // BLOCK

        def round_column(panel: Array, column: tuple[Array, ...]) -> tuple[Array, tuple]:
            index, value, block, *offset = column
            target = value + panel[index] / square[index, index]
            scale = steps[block]
            rounded = round_to_e2m1(target / scale, *offset)
            error = value - rounded * scale
            panel += square[index][:, None] * error
            return panel, (error, e2m1_code(rounded))

        _, (errors, codes) = jax.lax.scan(
            round_column,
            jax.lax.dynamic_slice_in_dim(moved, start, width),
            (
                jnp.arange(width),
                jax.lax.dynamic_slice_in_dim(columns, start, width),
                blocks,
                *(jax.lax.dynamic_slice_in_dim(offset, start, width) for offset in offsets),
            ),
        )
        moved += jnp.matmul(rows.T, errors, precision=jax.lax.Precision.HIGHEST)
        return moved, codes

    _, codes = jax.lax.scan(round_panel, jnp.zeros_like(columns), jnp.arange(0, inputs, width))
    codes = codes.reshape(inputs, -1)[jnp.argsort(order)].T
    return codes, jnp.isfinite(jnp.diagonal(factor)).all()


gptq = jax.jit(_gptq, static_argnames="orders", compiler_options=SAME_PROGRAM)


@functools.partial(jax.jit, static_argnames="orders", compiler_options=SAME_PROGRAM)
def gptq_of_experts(
    weights: Array,
    hessians: Array,
    scales: Array,
    divisors: Array,
    damping: Array,
    *,
    orders: bool = True,
) -> tuple[Array, Array]:
    """Rounds the weights [E, N, K] of experts, each by itself as `gptq` does; see there."""
    each = functools.partial(_gptq, orders=orders)
    return jax.vmap(each)(weights, hessians, scales, divisors, damping)


def e2m1_step(values: Array) -> Array:
    """Returns the distance between the E2M1 numbers next to values of at most 6."""
    size = jnp.abs(values)
    return jnp.where(size < 2.0, 0.5, jnp.where(size < 4.0, 1.0, 2.0))


def round_to_e2m1(values: Array, offset: Array | float = 0.0) -> Array:
    """Rounds to the nearest E2M1 number, of at most 6; a tie goes to the even code.

    With an offset, relative to the distance between numbers, it is what is nearest to the sum.
    """
    values = jnp.clip(values, -6.0, 6.0)
    step = e2m1_step(values)
    return jnp.clip(jnp.round(values / step + offset) * step, -6.0, 6.0)


def e2m1_code(values: Array) -> Array:
    """Returns the codes uint8 of E2M1 numbers: three bits of magnitude, and 8 for a minus.

    A zero keeps its sign, as it does in llm-compressor.
    """
    size = jnp.abs(values)
    code = jnp.where(size < 2.0, 2.0 * size, jnp.where(size < 4.0, size + 2.0, size / 2.0 + 4.0))
    return code.astype(jnp.uint8) | jnp.signbit(values).astype(jnp.uint8) << 3


def pack_codes(codes: Array) -> Array:
    """Returns the bytes uint8 [N, K/2] of codes [N, K], the even column in the low half."""
    assert not FORMATS["nvfp4"].high_first
    return codes[:, 0::2] | codes[:, 1::2] << 4
