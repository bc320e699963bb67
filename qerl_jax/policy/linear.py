"""The one linear map of the policy, whatever its weight is stored in."""

import jax

from pallas_kernels import fp4_matmul, matvec
from qerl_jax.policy.quant import QuantTensor, kernel_weight


def linear(
    x: jax.Array,
    weight: jax.Array | QuantTensor,
    *,
    lora: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T + bias.

    Args:
        x: [..., K].
        weight: [N, K], dense or packed in 4 bits.
        lora: A [R, K] and B [N, R] with the LoRA scale inside A.
        bias: [N].

    Returns:
        [..., N] in x's dtype.
    """
    if isinstance(weight, QuantTensor):
        with jax.named_scope("linears"):
            return fp4_matmul.fp4_matmul(x, kernel_weight(weight), lora=lora, bias=bias)
    with jax.named_scope("linears"):
        y = fp4_matmul.dot(x, weight)
    if lora is not None:
        a, b = lora
        with jax.named_scope("lora"):
            b = b[:, : a.shape[0]]
            y = y + fp4_matmul.dot(fp4_matmul.dot(x, a.astype(x.dtype)), b.astype(x.dtype))
    if bias is not None:
        y = y + bias.astype(x.dtype)
    return y


def linear_with_shares(
    x: jax.Array, weight: jax.Array | QuantTensor, shares: jax.Array | None, b: jax.Array | None
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T, without derivatives.

    Args:
        x: [M, K].
        weight: [N, K], dense or packed in 4 bits.
        shares: of x A^T, see `fp4_matmul.fp4_matmul_with_xa_partials`; None without an adapter.
        b: [N, R], likewise.

    Returns:
        [M, N] in x's dtype.
    """
    adapted = shares is not None and b is not None
    if isinstance(weight, QuantTensor):
        if not adapted:
            return linear(x, weight)
        with jax.named_scope("linears"):
            return fp4_matmul.fp4_matmul_with_xa_partials(x, kernel_weight(weight), shares, b)
    with jax.named_scope("linears"):
        y = matvec.matmul(x, weight)
    if adapted:
        with jax.named_scope("lora"):
            y = y + fp4_matmul.dot(fp4_matmul.sum_xa_partials(shares, x, b), b)
    return y


def swiglu_behind_norm(
    x: jax.Array,
    weight: jax.Array | QuantTensor,
    b: jax.Array | None,
    squares: jax.Array,
    *,
    shares: jax.Array | None = None,
    a: jax.Array | None = None,
    eps: float,
) -> jax.Array | None:
    """Returns SwiGLU of x W^T + (x A^T) B^T behind a norm, or None if no kernel does all of it.

    Args:
        x: [M, K], without the norm's factor.
        weight: [2 F, K].
        b: see `linear_with_shares`.
        squares: shares of the norm's mean squares, see `fp4_matmul.fp4_swiglu`.
        shares: of x A^T, see `linear_with_shares`.
        a: in their place, [R, K].
        eps: of the norm.

    Returns:
        [M, F], or None.
    """
    if b is None or (shares is None and a is None) or not isinstance(weight, QuantTensor):
        return None
    tiles = kernel_weight(weight)
    if not fp4_matmul.supports_swiglu(x, tiles, b, squares, xa_partials=shares, a=a):
        return None
    with jax.named_scope("linears"):
        return fp4_matmul.fp4_swiglu(x, tiles, b, squares, xa_partials=shares, a=a, eps=eps)
