"""`fp4_matmul`: checks its arguments, chooses the implementation and defines the derivatives."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import device
from pallas_kernels.fp4_matmul import dispatch, layout, reference, tiling
from pallas_kernels.fp4_matmul.epilogues import AddRmsNorm, Epilogue
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig
from pallas_kernels.fp4_matmul.reference import Fp4Weight
from pallas_kernels.fp4_matmul.tiling import PARTIAL_COLUMNS, TileConfig


def fp4_matmul(
    x: jax.Array,
    weight: Fp4Weight | Fp4Tiles,
    *,
    lora: tuple[jax.Array, jax.Array] | None = None,
    xa_partials: jax.Array | None = None,
    bias: jax.Array | None = None,
    epilogue: Epilogue | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    config: TileConfig | MmaConfig | None = None,
) -> Any:
    """Returns x W^T + (x A^T) B^T + bias for a frozen weight W in 4 bits.

    The gradient with respect to x dequantizes the packed weight again, so that no dequantized copy
    outlives the call. W itself has no gradient. With partials, an epilogue or a dtype there are no
    derivatives.

    Args:
        x: [..., K], float32, bfloat16 or float16; the rows are M in what follows.
        weight: packed weight [N, K], in checkpoint order or in tile order.
        lora: A [R, K], which includes LoRA's scale, and B [N, R]. The kernel reads 64 columns of B
            at a time and pads B in every call, unless zeros fill it up to a multiple of 64 already.
        xa_partials: float32 [S, M, R'], whose sum over S is x A^T, where it is known; R' is R
            rounded up to a multiple of 32, and the columns from R on are 0.
        bias: bias [N]; not with an epilogue.
        epilogue: `Swiglu` or `AddRmsNorm` of the product, in the Hopper kernel and with `lora`;
            `supports` says where. None for the product itself.
        dtype: float32 for the product as it was accumulated; None for x's dtype.
        implementation: "mosaic" is the Hopper kernel, "mma" the kernel for up to 64 rows on every
            GPU since Ampere, which dequantizes for more rows; both are for a weight in tile order
            and bfloat16 x. "xla" dequantizes and multiplies. None takes "mosaic" on a Hopper GPU
            on which it agrees with the definition, "mma" on others since Ampere.
        config: tiling of "mosaic" or schedule of "mma"; None looks it up.

    Returns:
        [..., N] in x's dtype or in `dtype`, or the results of the epilogue.

    Raises:
        ValueError: shapes or dtypes do not fit together, or do not fit the implementation.
    """
    if epilogue is not None and implementation is None:
        implementation = "mosaic"
    _check(
        x,
        weight,
        lora=lora,
        xa_partials=xa_partials,
        bias=bias,
        epilogue=epilogue,
        dtype=dtype,
        implementation=implementation,
        config=config,
    )
    if implementation is None:
        implementation = dispatch.implementation_of(weight, x)
    rows, outside = x.reshape(-1, x.shape[-1]), None
    if lora is not None and not dispatch.adapter_inside(implementation, rows, lora, config):
        lora, outside = None, lora
    extra = {"xa_partials": xa_partials, "epilogue": epilogue, "dtype": dtype}
    extra = {name: value for name, value in extra.items() if value is not None}
    if implementation == "xla":
        weight = _in_checkpoint_order(weight, x)
        y = _frozen_matmul(x, weight) if dtype is None else reference.matmul(x, weight, dtype)
    elif extra:  # without derivatives
        y = _RUNS[implementation](rows, weight, config, bias=bias, **_factors(x, lora), **extra)
    else:
        y = _kernel_matmul(rows, weight, lora, bias, config, implementation)
    if isinstance(epilogue, AddRmsNorm):
        return y
    y = y.reshape(*x.shape[:-1], -1)
    if outside is not None:
        tokens = x if xa_partials is None else rows
        y += reference.lora_product(tokens, outside, xa_partials).reshape(y.shape)
    if implementation == "xla" and bias is not None:
        y += bias.astype(y.dtype)
    return y


def _factors(x, lora):
    """A and B in x's dtype, with the columns of B that a kernel reads."""
    if lora is None:
        return {}
    a, b = (matrix.astype(x.dtype) for matrix in lora)
    return {"a": a, "b": dispatch.padded(b, len(a))}


def _in_checkpoint_order(weight: Fp4Weight | Fp4Tiles, x: jax.Array) -> Fp4Weight:
    """The weight in checkpoint order, with x's inputs: a shard by columns has fewer than W."""
    if isinstance(weight, Fp4Tiles):
        return layout.from_tiles(dataclasses.replace(weight, inputs=x.shape[-1]))
    return weight


@jax.custom_vjp
def _frozen_matmul(x: jax.Array, weight: Fp4Weight) -> jax.Array:
    return reference.matmul(x, weight)


def _frozen_matmul_fwd(x, weight):
    return reference.matmul(x, weight), weight


def _frozen_matmul_bwd(weight, dy):
    return reference.matmul_transposed(dy, weight), None


_frozen_matmul.defvjp(_frozen_matmul_fwd, _frozen_matmul_bwd)


_RUNS: dict[str, Callable] = {"mosaic": dispatch.run, "mma": dispatch.run_mma}  # by implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _kernel_matmul(x, weight, lora, bias, config, implementation):
    """The product for x [M, K] with the adapter and the bias, by a kernel."""
    if lora is None or len(x) > tiling.MAX_ROWS_OF_PARTIALS:
        return _kernel_matmul_fwd(x, weight, lora, bias, config, implementation)[0]
    return _RUNS[implementation](x, weight, config, bias=bias, **_factors(x, lora))


def _kernel_matmul_fwd(x, weight, lora, bias, config, implementation):
    adapter, xa = {}, None
    if lora is not None:
        a, b = (matrix.astype(x.dtype) for matrix in lora)
        xa = reference.dot(x, a)
        adapter = {"b": dispatch.padded(b, len(a)), "xa": dispatch.padded(xa, len(a))}
    y = _RUNS[implementation](x, weight, config, bias=bias, **adapter)
    return y, (x if lora is not None else x[:0], xa, weight, lora, bias)


def _kernel_matmul_bwd(_, implementation, residuals, dy):
    x, xa, weight, lora, bias = residuals
    dx = kernel_transposed(dy, weight, inputs=x.shape[1], implementation=implementation)
    dlora = None
    if lora is not None:
        a, b = lora
        rank = a.shape[0]
        through = jnp.dot(dy, b[:, :rank].astype(dy.dtype))
        dx += reference.dot(through, a.astype(dy.dtype).T)
        db = jnp.dot(dy.T, xa, preferred_element_type=jnp.float32).astype(b.dtype)
        dlora = (
            jnp.dot(through.T, x, preferred_element_type=jnp.float32).astype(a.dtype),
            jnp.pad(db, ((0, 0), (0, b.shape[1] - rank))),
        )
    dbias = None if bias is None else dy.sum(axis=0, dtype=jnp.float32).astype(bias.dtype)
    return dx, None, dlora, dbias


def kernel_transposed(
    dy: jax.Array, weight: Fp4Tiles, *, inputs: int, implementation: str = "mosaic"
) -> jax.Array:
    """The gradient by x [M, K] without the adapter's part: dy [M, N] times the weight.

    The kernel of the implementation dequantizes, XLA multiplies. As in `reference.matmul`, no loop
    may carry the dequantized weight. Both parts of a gradient are rounded before they are added: in
    float32 each would be written and read at twice the size, which takes longer than the
    dequantization.
    """
    dy, codes = jax.lax.optimization_barrier((dy, weight.codes))
    weight = dataclasses.replace(weight, codes=codes)
    return reference.dot(dy, _dense(weight, inputs, implementation).T)


def dense(weight: Fp4Weight | Fp4Tiles, dtype: DTypeLike) -> jax.Array:
    """Returns the values [N, K] of a weight in `dtype`, by the kernel of the default device."""
    implementation = dispatch.implementation_of(weight, jax.ShapeDtypeStruct((), dtype))
    if isinstance(weight, Fp4Tiles):
        if implementation != "xla":
            return _dense(weight, weight.inputs, implementation)
        weight = layout.from_tiles(weight)
    return reference.dequantize(weight, dtype)


def _dense(weight: Fp4Tiles, inputs: int, implementation: str) -> jax.Array:
    if implementation == "mosaic":
        return dispatch.kernel().dequantize(weight, inputs=inputs, num_sms=device.num_sms())
    return dispatch.mma_kernel().dequantize(weight, inputs=inputs)


_kernel_matmul.defvjp(_kernel_matmul_fwd, _kernel_matmul_bwd)


def _check(x, weight, *, lora, xa_partials, bias, epilogue, dtype, implementation, config):
    problems = []
    if isinstance(weight, Fp4Tiles):
        n, k = weight.divisor.shape[0], x.shape[-1]
        problems += _misfits_of_tiles(weight, n, k)
    else:
        n, k = weight.packed.shape[0], 2 * weight.packed.shape[1]
        if weight.packed.dtype != jnp.uint8:
            problems.append(f"packed is {weight.packed.dtype}, expected uint8")
        problems += _misfits(weight, n, k)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        problems.append(f"x is {x.dtype}, expected float32, bfloat16 or float16")
    if x.shape[-1] != k:
        problems.append(f"x has {x.shape[-1]} inputs, the weight {k}")
    if lora is not None:
        a, b = lora
        columns = len(a), tiling.padded_rank(len(a))
        if a.ndim != 2 or a.shape[1] != k or b.shape not in [(n, count) for count in columns]:
            problems.append(f"lora is {a.shape}, {b.shape}, expected (R, {k}), ({n}, R)")
    if xa_partials is not None:
        columns = 0 if lora is None else -(-len(lora[0]) // PARTIAL_COLUMNS) * PARTIAL_COLUMNS
        m = math.prod(x.shape[:-1])
        if xa_partials.ndim != 3 or xa_partials.shape[1:] != (m, columns):
            problems.append(f"xa_partials are {xa_partials.shape}, expected (S, {m}, {columns})")
    if dtype not in (None, jnp.float32):
        problems.append(f"dtype is {jnp.dtype(dtype)}, expected float32 or None")
    if bias is not None and bias.shape != (n,):
        problems.append(f"bias is {bias.shape}, expected {(n,)}")
    if implementation not in (None, "mosaic", "mma", "xla"):
        expected = "'mosaic', 'mma', 'xla' or None"
        problems.append(f"implementation is {implementation!r}, expected {expected}")
    if implementation in ("mosaic", "mma") and not (
        isinstance(weight, Fp4Tiles) and x.dtype == jnp.bfloat16
    ):
        kind = type(weight).__name__
        problems.append(f"{implementation} wants bfloat16 and Fp4Tiles, got {x.dtype} and {kind}")
    if isinstance(config, MmaConfig):
        if implementation != "mma":
            problems.append(f"{config} is for implementation 'mma', not {implementation!r}")
        elif problem := config.problem(math.prod(x.shape[:-1])):
            problems.append(problem)
    elif config is not None and (problem := config.problem()):
        problems.append(problem)
    if epilogue is not None and not problems:
        if implementation != "mosaic" or lora is None or bias is not None or dtype is not None:
            problems.append("an epilogue is for 'mosaic' with lora and without bias and dtype")
        else:
            rows = x.reshape(-1, k)
            problems += dispatch.misfits(rows, weight, lora, xa_partials, epilogue, config)
    if problems:
        raise ValueError("fp4_matmul: " + "; ".join(problems))


def _misfits(weight: Fp4Weight, n: int, k: int) -> list[str]:
    """Why the scales do not fit an [n, k] weight."""
    try:
        form = reference.format_of(weight.scales.dtype)
    except ValueError as error:
        return [str(error)]
    problems = []
    if k % form.block:
        problems.append(
            f"the {form.name} weight has {k} inputs, expected a multiple of {form.block}"
        )
    if weight.scales.shape != (n, k // form.block):
        expected = (n, k // form.block)
        problems.append(f"{form.name} scales are {weight.scales.shape}, expected {expected}")
    shape = None if weight.global_scale is None else weight.global_scale.shape
    expected = (n,) if form.global_scale else None
    if shape != expected:
        problems.append(f"{form.name} global_scale is {shape}, expected {expected}")
    return problems


def _misfits_of_tiles(tiles: Fp4Tiles, n: int, k: int) -> list[str]:
    """Why the arrays do not fit an [n, k] weight; for a shard, k is that of the shard."""
    count = (-(-n // tiling.TILE_ROWS), -(-k // tiling.TILE_COLUMNS))
    problems = []
    for name, words in (
        ("codes", layout.CODE_WORDS),
        ("scales", layout.SCALE_WORDS[tiles.format]),
    ):
        array, expected = getattr(tiles, name), (*count, words)
        if array.shape != expected or array.dtype != jnp.uint32:
            problems.append(
                f"{name} of the tiles are {array.dtype} {array.shape}, expected uint32 {expected} "
                f"for {n} outputs and x's {k} inputs"
            )
    return problems
