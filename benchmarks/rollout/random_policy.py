"""A policy of random weights and a random adapter, made on the device.

The values are never constant: products of zeros run faster than products of a model.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_kernels import fp4_matmul
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import (
    array_shapes,
    fused_of,
    layer_of,
    packed_of,
    projection_shapes,
    stack_shapes,
)
from qerl_jax.policy.lora import Lora, LoraConfig, matrix_shapes
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.sharding import shard_params

_WEIGHT_SIZE = 0.02  # standard deviation of random weights
_ADAPTER_SIZE = 1e-3  # standard deviation of B: small beside the weights, and not zero


def random_params(
    key: jax.Array,
    model_config: ModelConfig,
    *,
    format: str,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | None = None,
) -> dict:
    """A random parameter tree like those of `load.load`, made on the device a layer at a time."""
    table = (model_config.vocab_size, model_config.embed_dim)
    names = ["embed_tokens"] + ([] if model_config.tie_embeddings else ["lm_head"])
    params: dict = {
        name: normal(jax.random.fold_in(key, index), table, dtype)
        for index, name in enumerate(names)
    }
    params["norm"] = _norm_scale(jax.random.fold_in(key, 2), model_config.embed_dim)
    params = shard_params(params, model_config, mesh=mesh)
    params["layers"] = []
    for number in range(model_config.num_layers):
        own_key, first = jax.random.fold_in(key, 3 + number), _first_like(model_config, number)
        layer = _random_layer(own_key, model_config, first, format, dtype)
        params["layers"].append(shard_params(layer, model_config, mesh=mesh))
    return params


def random_lora(
    key: jax.Array, model_config: ModelConfig, *, rank: int, expert_rank: int = 0
) -> Lora:
    """An adapter of all projections and of routed experts: both factors are random, B is small."""
    keys = jax.random.split(key, model_config.num_layers)
    firsts = [_first_like(model_config, layer) for layer in range(model_config.num_layers)]
    targets = tuple(projection_shapes(model_config))
    options = LoraConfig(rank, alpha=rank, targets=targets, expert_rank=expert_rank)
    pairs = zip(keys, firsts, strict=True)
    return Lora([_random_adapters(key, model_config, n, options) for key, n in pairs], scale=1.0)


def _first_like(model_config: ModelConfig, layer: int) -> int:
    """Returns the first layer of a layer's kind, so that all of a kind share their programs."""
    layers, kind = range(model_config.num_layers), layer_of(model_config, layer)
    return next(n for n in layers if layer_of(model_config, n) == kind)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_adapters(
    key: jax.Array, model_config: ModelConfig, layer: int, options: LoraConfig
) -> dict:
    adapters = {}
    for index, (name, shapes) in enumerate(matrix_shapes(model_config, layer, options).items()):
        a, b = jax.random.split(jax.random.fold_in(key, index))
        bound = 1 / math.sqrt(shapes["a"][-1])
        adapters[name] = {
            "a": jax.random.uniform(a, shapes["a"], minval=-bound, maxval=bound),
            "b": _ADAPTER_SIZE * jax.random.normal(b, shapes["b"]),
        }
    return adapters


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _random_layer(
    key: jax.Array, model_config: ModelConfig, number: int, format: str, dtype: jnp.dtype
) -> dict:
    keys = iter(jax.random.split(key, 16))
    shapes = projection_shapes(model_config)
    others = array_shapes(model_config, number)
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), model_config.embed_dim)
    norms |= {name: others[name][0] for name in ("q_norm", "k_norm") if name in others}
    layer: dict = {name: _norm_scale(next(keys), size) for name, size in norms.items()}
    for fused, members in fused_of(model_config, number).items():
        rows, own_format = sum(shapes[name][0] for name in members), format
        if fused not in packed_of(model_config):
            own_format = "bf16"
        layer[fused] = _projection(next(keys), rows, shapes[members[0]][1], own_format, dtype)
        if fused == "qkv_proj" and "qkv_bias" in others:
            layer["qkv_bias"] = normal(next(keys), (rows,), dtype)
    for name, (experts, rows, columns) in stack_shapes(model_config, number).items():
        layer[name] = _projection(next(keys), experts * rows, columns, format, dtype)
    random_arrays = {
        "conv": lambda key, shape: normal(key, shape, dtype, 0.5),
        # A state keeps between about half and almost all of itself at a token.
        "a_log": lambda key, shape: jax.random.uniform(key, shape, minval=-5.0, maxval=-0.5),
        "dt_bias": lambda key, shape: normal(key, shape, jnp.float32, 1.0),
        "gated_norm": lambda key, shape: _norm_scale(key, shape[0]),
        "sinks": lambda key, shape: normal(key, shape, dtype, 1.0),
    }
    small = "router", "shared_gate", "router_bias", "o_bias"
    small += "experts_gate_up_bias", "experts_down_bias"
    random_arrays |= {name: lambda key, shape: normal(key, shape, dtype) for name in small}
    for name in (name for name in others if name not in layer):
        layer[name] = random_arrays[name](next(keys), others[name])
    return layer


def _projection(key, n, k, format, dtype):
    """A random weight [N, K]: codes of any value, with scales that give the weights their size."""
    if format == "bf16":
        return normal(key, (n, k), dtype)
    codes, scales = jax.random.split(key)
    packed = jax.random.bits(codes, (n, k // 2), jnp.uint8)
    form = fp4_matmul.FORMATS[format]
    if k % form.block:
        raise UserError(f"{format} needs a multiple of {form.block} inputs, a projection has {k}")
    size = _WEIGHT_SIZE / math.sqrt(sum(code * code for code in form.codebook) / 16)
    if format == "nf4":
        spread = jax.random.uniform(scales, (n, k // form.block), minval=0.5, maxval=1.5)
        return QuantTensor(packed=packed, scales=size * spread)
    if format == "mxfp4":
        exponent = 127 + round(math.log2(size))
        stored = jax.random.randint(scales, (n, k // form.block), exponent - 1, exponent + 1)
    else:  # 8 to 448, as a quantizer finds them
        stored = jax.random.randint(scales, (n, k // form.block), 80, 127)
    stored = jax.lax.bitcast_convert_type(stored.astype(jnp.uint8), form.scale_dtype)
    if not form.global_scale:
        return QuantTensor(packed=packed, scales=stored)
    return QuantTensor(
        packed=packed, scales=stored, global_scale=jnp.full(n, 180 / size, jnp.float32)
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key: jax.Array, shape: tuple, dtype: jnp.dtype, size: float = _WEIGHT_SIZE) -> jax.Array:
    """Normal numbers with standard deviation `size`."""
    return (size * jax.random.normal(key, shape, dtype)).astype(dtype)


def _norm_scale(key, size):
    return 1.0 + normal(key, (size,), jnp.float32, 0.1)
