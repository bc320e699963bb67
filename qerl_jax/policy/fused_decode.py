"""A layer of a decode step: `pallas_kernels.decode` between its projections.

It is the function of `transformer`'s layer, which defines it. Roundings differ, as the factor of an
RMSNorm multiplies what the projection returns and not what it reads. With up to 128 rows it takes
nine kernels: one less where attention does not split rows, one less where the product of gate and
up, packed and with an adapter, ends with SwiGLU, and one less for each norm that the projection in
front of it begins, having added to the residual stream. A projection behind any of these makes its
own x A^T; behind attention and SwiGLU a kernel does so where the tiling has no room for it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import decode, fp4_matmul
from pallas_kernels.device import num_sms
from pallas_kernels.fp4_matmul.tiling import MAX_ROWS_OF_PARTIALS
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.linear import linear, linear_with_shares, swiglu_behind_norm
from qerl_jax.policy.quant import QuantTensor, kernel_weight

# Rows up to which down begins the norm of the next layer. With 64 the product of q, k and v takes 2
# us longer for it and down 1, and the norm's kernel takes 3.
_MAX_ROWS_OF_NEXT_NORM = 48


def serves(config: ModelConfig, dtype: jnp.dtype, keys: jax.Array) -> bool:
    """Whether the kernels exist for the policy and run on the default device.

    Args:
        config: the architecture.
        dtype: of the computation.
        keys: [B, K, S, H] of a layer.
    """
    return (
        dtype == jnp.bfloat16
        and config.head_dim in (32, 64, 128, 256)
        and keys.size <= 2**31  # the kernels count elements in 32 bits
        and decode.kernels_run(keys.dtype)
    )


class _Normed(NamedTuple):
    """The residual stream with the next norm begun, see `pallas_kernels.decode.kernels.Normed`."""

    residual: jax.Array
    scaled: jax.Array
    squares: jax.Array


def decode_layers(
    params: dict,
    adapters: list[dict[str, tuple[jax.Array, jax.Array]]],
    keys: list[jax.Array],
    values: list[jax.Array],
    x: jax.Array,
    lengths: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    *,
    config: ModelConfig,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """All blocks over one new token per row.

    Args:
        params: the policy.
        adapters: `lora.fuse`.
        keys: [B, K, S, H] of each layer; given away.
        values: likewise.
        x: bfloat16 [B, D], the embedded tokens.
        lengths: int32 [B].
        angles: `attention.rotary_angles` of the lengths.
        config: the architecture.

    Returns:
        The residual stream [B, D], keys and values.
    """
    layers = params["layers"]
    norms = [layer["input_layernorm"] for layer in layers]
    stream: Any = x, jnp.zeros_like(x)
    next_norms = [None] * len(layers)
    if _down_begins_norms(layers, adapters, x, config):
        stream = _first_norm(layers[0], adapters[0], x, config)
        # The last of them is not read, but a layer without it would be another program.
        next_norms = [*norms[1:], params["norm"]]
    new_keys, new_values = [], []
    for *layer, norm in zip(layers, adapters, keys, values, next_norms, strict=True):
        stream, k, v = _decode_layer(*layer, stream, lengths, angles, norm, config=config)
        new_keys.append(k)
        new_values.append(v)
    x = stream.residual if isinstance(stream, _Normed) else stream[0] + stream[1]
    return x, new_keys, new_values


# One jit: the layers share a trace and a lowering.
@functools.partial(jax.jit, static_argnames="config")
def _decode_layer(
    layer: dict,
    adapters: dict[str, tuple[jax.Array, jax.Array]],
    keys: jax.Array,
    values: jax.Array,
    stream: tuple[jax.Array, jax.Array] | _Normed,
    lengths: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    next_norm: jax.Array | None,
    *,
    config: ModelConfig,
) -> tuple[tuple[jax.Array, jax.Array] | _Normed, jax.Array, jax.Array]:
    """One block over one new token per row.

    Args:
        layer: one of `params["layers"]`.
        adapters: the layer of `lora.fuse`.
        keys: [B, K, S, H] of the layer; given away.
        values: likewise.
        stream: the residual stream [B, D] and what is still to be added to it, or the stream with
            the layer's first norm begun.
        lengths: int32 [B].
        angles: `attention.rotary_angles` of the lengths.
        next_norm: [D], the scale of the norm that the layer is to begin at its end, or None.
        config: the architecture.

    Returns:
        The stream, likewise, keys and values.
    """
    # They use an API of jax that may change, and are loaded when needed.
    from pallas_kernels.decode import kernels

    cosines, sines = (part[:, 0, 0] for part in angles)
    a, b = ({name: pair[i] for name, pair in adapters.items()} for i in (0, 1))
    eps = config.norm_eps

    def begin(x, y, norm, name):
        with jax.named_scope("norms"):
            return kernels.norm_project(x, y, layer[norm], a.get(name))

    def project(name, x, shares, inside):
        if inside is not None:
            return linear(x, layer[name], lora=adapters[name])
        return linear_with_shares(x, layer[name], shares, b.get(name))

    def add(name, x, residual, norm, shares, a):
        weight = kernel_weight(layer[name])
        with jax.named_scope("linears"):
            return _Normed(
                *fp4_matmul.fp4_matmul_add_rmsnorm(
                    x, weight, residual, norm, b[name], xa_partials=shares, a=a
                )
            )

    # The product with such a weight makes x A^T too: behind attention in one part nothing is left.
    in_tiles = isinstance(layer["o_proj"], QuantTensor) and layer["o_proj"].tiles is not None
    if isinstance(stream, _Normed):
        residual, scaled, squares = stream
        weight, lora = kernel_weight(layer["qkv_proj"]), adapters["qkv_proj"]
        with jax.named_scope("linears"):
            qkv, squares = fp4_matmul.fp4_behind_norm(scaled, weight, lora, squares)
    else:
        residual, scaled, shares, squares = begin(*stream, "input_layernorm", "qkv_proj")
        qkv = project("qkv_proj", scaled, shares, None)
    with jax.named_scope("attention"):
        attended, keys, values = kernels.attend(
            qkv,
            squares,
            (cosines, sines),
            keys,
            values,
            lengths,
            bias=layer.get("qkv_bias"),
            qk_norm=(layer["q_norm"], layer["k_norm"]) if config.qk_norm else None,
            eps=eps,
            multiprocessors=num_sms(),
            finish=in_tiles and len(qkv) <= MAX_ROWS_OF_PARTIALS,
        )
    # A product adds shares of x A^T, or makes them of A itself, which then is `inside`.
    shares, inside = None, a.get("o_proj")
    if isinstance(attended, kernels.AttentionParts):
        with jax.named_scope("attention"):
            attended, shares = kernels.merge_project(attended, inside, dtype=qkv.dtype)
        inside = None
    if _begins_norm(layer, a, b, attended):
        norm = layer["post_attention_layernorm"]
        residual, scaled, squares = add("o_proj", attended, residual, norm, shares, inside)
        shares, inside = None, a["gate_up_proj"]
    else:
        y = project("o_proj", attended, shares, inside)
        residual, scaled, shares, squares = begin(
            residual, y, "post_attention_layernorm", "gate_up_proj"
        )
        inside = None
    hidden = swiglu_behind_norm(
        scaled,
        layer["gate_up_proj"],
        b.get("gate_up_proj"),
        squares,
        shares=shares,
        a=inside,
        eps=eps,
    )
    if hidden is None:
        assert inside is None  # `_begins_norm` had asked whether the product ends with SwiGLU
        gate_up = project("gate_up_proj", scaled, shares, inside)
        with jax.named_scope("mlp"):
            hidden, shares = kernels.silu_project(gate_up, squares, a.get("down_proj"), eps=eps)
    else:
        shares, inside = None, a.get("down_proj")
    if next_norm is not None:
        return add("down_proj", hidden, residual, next_norm, shares, inside), keys, values
    return (residual, project("down_proj", hidden, shares, inside)), keys, values


def _first_norm(layer: dict, adapters: dict, x: jax.Array, config: ModelConfig) -> _Normed:
    """The beginning of the first layer's norm, in as many shares as a down projection leaves."""
    norm, (a, b) = layer["input_layernorm"], adapters["down_proj"]
    begin = functools.partial(fp4_matmul.fp4_matmul_add_rmsnorm, a=a)
    args = _hidden(x, config), kernel_weight(layer["down_proj"]), x, norm, b
    shares = jax.eval_shape(begin, *args)[2]
    wide = x.astype(jnp.float32)
    squares = jnp.zeros(shares.shape, shares.dtype).at[0].set(jnp.mean(wide * wide, axis=-1))
    return _Normed(x, (wide * norm).astype(x.dtype), squares)


def _down_begins_norms(
    layers: list[dict], adapters: list[dict], x: jax.Array, config: ModelConfig
) -> bool:
    """Whether every down projection begins the norm behind it.

    They do with few rows, if the product behind each then makes x A^T.
    """
    if len(x) > _MAX_ROWS_OF_NEXT_NORM:
        return False
    names = "qkv_proj", "down_proj"
    for layer, pairs in zip(layers, adapters, strict=True):
        if not all(isinstance(layer[name], QuantTensor) and name in pairs for name in names):
            return False
        qkv, down = (kernel_weight(layer[name]) for name in names)
        if not fp4_matmul.supports_add_rmsnorm(_hidden(x, config), down, pairs["down_proj"][1]):
            return False
        if not fp4_matmul.supports_lora_shrink(x, qkv, pairs["qkv_proj"]):
            return False
    return True


def _hidden(x: jax.Array, config: ModelConfig) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(x), config.mlp_dim), x.dtype)


def _begins_norm(layer: dict, a: dict, b: dict, attended: jax.Array) -> bool:
    """Whether the output projection begins the norm behind it.

    It does if the product of gate and up then makes x A^T and ends with SwiGLU: with a kernel for
    x A^T nothing would be saved.
    """
    o, gate_up = layer["o_proj"], layer["gate_up_proj"]
    packed = isinstance(o, QuantTensor) and isinstance(gate_up, QuantTensor)
    if not packed or not {"o_proj", "gate_up_proj"} <= b.keys():
        return False
    width = a["gate_up_proj"].shape[1]
    scaled = jax.ShapeDtypeStruct((len(attended), width), attended.dtype)
    o, gate_up = kernel_weight(o), kernel_weight(gate_up)
    return fp4_matmul.supports_add_rmsnorm(attended, o, b["o_proj"]) and fp4_matmul.supports_swiglu(
        scaled, gate_up, b["gate_up_proj"], a=a["gate_up_proj"]
    )
