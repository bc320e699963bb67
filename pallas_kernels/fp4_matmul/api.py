"""`fp4_matmul`: checks its arguments and owns the derivatives."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.reference import Fp4Weight


def fp4_matmul(
    x: jax.Array,
    weight: Fp4Weight,
    *,
    lora: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T + bias for a frozen NVFP4 weight W.

    The gradient with respect to x comes from the packed weight again, so that no dequantised copy
    outlives the call. W itself has none.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: the packed weight [N, K].
        lora: A [R, K] and B [N, R]; a scale belongs into A.
        bias: [N].

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(x, weight, lora, bias)
    y = _frozen_matmul(x, weight)
    if lora is not None:
        a, b = lora
        y = y + reference.dot(reference.dot(x, a.astype(x.dtype)), b.astype(x.dtype))
    if bias is not None:
        y = y + bias.astype(x.dtype)
    return y


@jax.custom_vjp
def _frozen_matmul(x: jax.Array, weight: Fp4Weight) -> jax.Array:
    return reference.matmul(x, weight)


def _frozen_matmul_fwd(x, weight):
    return reference.matmul(x, weight), weight


def _frozen_matmul_bwd(weight, dy):
    zeros = Fp4Weight(
        packed=np.zeros(weight.packed.shape, jax.dtypes.float0),
        scales=jnp.zeros_like(weight.scales),
        global_scale=jnp.zeros_like(weight.global_scale),
    )
    return reference.matmul_transposed(dy, weight), zeros


_frozen_matmul.defvjp(_frozen_matmul_fwd, _frozen_matmul_bwd)


def _check(x, weight, lora, bias):
    n, half = weight.packed.shape
    k = 2 * half
    problems = []
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        problems.append(f"x is {x.dtype}, expected float32, bfloat16 or float16")
    if x.shape[-1] != k:
        problems.append(f"x has {x.shape[-1]} inputs, the weight {k}")
    if weight.packed.dtype != jnp.uint8:
        problems.append(f"packed is {weight.packed.dtype}, expected uint8")
    if k % reference.BLOCK:
        problems.append(f"the weight has {k} inputs, expected a multiple of {reference.BLOCK}")
    if weight.scales.shape != (n, k // reference.BLOCK):
        problems.append(f"scales are {weight.scales.shape}, expected {(n, k // reference.BLOCK)}")
    if weight.scales.dtype != jnp.float8_e4m3fn:
        problems.append(f"scales are {weight.scales.dtype}, expected float8_e4m3fn")
    if weight.global_scale.shape != (n,):
        problems.append(f"global_scale is {weight.global_scale.shape}, expected {(n,)}")
    if lora is not None:
        a, b = lora
        if a.ndim != 2 or a.shape[1] != k or b.shape != (n, a.shape[0]):
            problems.append(f"lora is {a.shape}, {b.shape}, expected (R, {k}), ({n}, R)")
    if bias is not None and bias.shape != (n,):
        problems.append(f"bias is {bias.shape}, expected {(n,)}")
    if problems:
        raise ValueError("fp4_matmul: " + "; ".join(problems))
