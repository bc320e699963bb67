"""The linear map of the policy, for every way in which a weight is stored."""

import jax

from pallas_kernels import fp4_matmul
from qerl_jax.policy.quant import QuantTensor, kernel_weight


def linear(
    x: jax.Array,
    weight: jax.Array | QuantTensor,
    *,
    adapter: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T + bias.

    Args:
        x: [..., K] inputs.
        weight: [N, K], dense or packed in 4 bits.
        adapter: A [R, K] with the LoRA scale inside, and B [N, R]; or None.
        bias: [N], or None.

    Returns:
        [..., N] in x's dtype.
    """
    if isinstance(weight, QuantTensor):
        with jax.named_scope("linears"):
            return fp4_matmul.fp4_matmul(x, kernel_weight(weight), lora=adapter, bias=bias)
    with jax.named_scope("linears"):
        y = fp4_matmul.dot(x, weight)
    if adapter is not None:
        with jax.named_scope("lora"):
            y = y + fp4_matmul.lora_product(x, adapter)
    if bias is not None:
        y = y + bias.astype(x.dtype)
    return y
