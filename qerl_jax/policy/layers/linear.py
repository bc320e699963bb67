"""What the parts of a layer are made of: the product with a weight, and RMSNorm."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import fp4_matmul
from qerl_jax.policy.collectives import enter_shards, leave_shards
from qerl_jax.policy.layers.part import Own, Weight
from qerl_jax.policy.quant import QuantTensor, kernel_weight

# The products of a layer whose results the backward pass reads, in the order of a layer. In every
# kind of layer the first three are the input projection, what mixes tokens, and the output one.
PRODUCTS = ("qkv_proj", "attention", "o_proj", "gate_up_proj")
ROUTES = "routes"  # the experts of tokens, which the backward pass reads, too


def linear(
    x: jax.Array,
    weight: jax.Array | QuantTensor,
    *,
    adapter: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns x W^T + (x A^T) B^T + bias, in x's dtype.

    The adapter is A [R, K], with the LoRA scale inside, and B [N, R].
    """
    if isinstance(weight, QuantTensor):
        with jax.named_scope("linears"):
            return fp4_matmul.fp4_matmul(x, kernel_weight(weight), lora=adapter, bias=bias)
    if isinstance(weight, fp4_matmul.fp8.Fp8Weight):
        with jax.named_scope("linears"):
            y = fp4_matmul.fp8.product(x, weight)
        if adapter is not None:
            with jax.named_scope("lora"):
                y = y + fp4_matmul.lora_product(x, adapter).astype(jnp.float32)
        return (y if bias is None else y + bias).astype(x.dtype)
    with jax.named_scope("linears"):
        y = fp4_matmul.dot(x, weight)
    if adapter is not None:
        with jax.named_scope("lora"):
            y = y + fp4_matmul.lora_product(x, adapter)
    if bias is not None:
        y = y + bias.astype(x.dtype)
    return y


def project(own: Own, weight: Weight, x: jax.Array) -> jax.Array:
    """Returns the outputs [..., N] of a weight of a layer, summed over devices that cut K."""
    if own.inputs is not None:
        own.inputs[weight.name] = x
    bias = own.layer.get(weight.bias) if weight.bias else None
    y = linear(x, own.layer[weight.name], adapter=own.adapters.get(weight.name), bias=bias)
    # What the backward pass keeps is the sum, so that it does not add it up again.
    y = y if weight.by_rows else leave_shards(y, own.config)
    return checkpoint_name(y, weight.product)


def normed(own: Own, name: str, x: jax.Array) -> jax.Array:
    """Returns the residual stream x [..., D] after the RMSNorm in front of a part."""
    return rms_norm(enter_shards(x, own.config), own.layer[name], own.config.norm_eps)


@jax.named_scope("norms")
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x [..., D] divided by its root mean square and times a scale [D]."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)
