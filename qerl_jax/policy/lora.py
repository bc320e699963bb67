"""LoRA (https://arxiv.org/abs/2106.09685) as a tree of its own beside the frozen weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import fp4_matmul
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.quant import QuantTensor, dequantize

# The projections that a layer stores stacked, by the name of the stored weight.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
PROJECTIONS = tuple(name for members in FUSED.values() for name in members)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What is adapted and how strongly.

    Attributes:
        rank: R.
        alpha: the numerator of the scale.
        rslora: divide alpha by sqrt(R) (https://arxiv.org/abs/2312.03732) instead of by R.
        targets: Hugging Face names of the adapted projections.
    """

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self):
        unknown = set(self.targets) - set(PROJECTIONS)
        if self.rank < 1 or unknown or not self.targets:
            raise UserError(
                f"lora.rank={self.rank}, lora.targets={self.targets}: the rank must be at least 1, "
                f"the targets some of {PROJECTIONS}"
            )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@struct.dataclass
class Lora:
    """The trainable low-rank update W + scale * B A of the adapted projections.

    Attributes:
        layers: for every layer a dict from projection name to {'a': [R, K], 'b': [N, R]}, float32.
        scale: the factor of B A.
    """

    layers: list[dict[str, dict[str, jax.Array]]]
    scale: float = struct.field(pytree_node=False)


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the seven projections of a layer."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    return {
        "q_proj": (heads, config.embed_dim),
        "k_proj": (kv_heads, config.embed_dim),
        "v_proj": (kv_heads, config.embed_dim),
        "o_proj": (config.embed_dim, heads),
        "gate_proj": (config.mlp_dim, config.embed_dim),
        "up_proj": (config.mlp_dim, config.embed_dim),
        "down_proj": (config.embed_dim, config.mlp_dim),
    }


def init(key: jax.Array, config: ModelConfig, lora_config: LoraConfig) -> Lora:
    """PEFT's initialisation: A uniform in +-1/sqrt(K), B zero, so that the update is zero."""
    shapes = projection_shapes(config)
    layers = []
    for layer in range(config.num_layers):
        layer_key = jax.random.fold_in(key, layer)
        adapters = {}
        for index, name in enumerate(PROJECTIONS):
            if name not in lora_config.targets:
                continue
            outputs, inputs = shapes[name]
            bound = 1.0 / math.sqrt(inputs)
            adapters[name] = {
                "a": jax.random.uniform(
                    jax.random.fold_in(layer_key, index),
                    (lora_config.rank, inputs),
                    minval=-bound,
                    maxval=bound,
                ),
                "b": jnp.zeros((outputs, lora_config.rank)),
            }
        layers.append(adapters)
    return Lora(layers=layers, scale=lora_config.scale)


@jax.named_scope("lora")
def fuse(
    lora: Lora | None, config: ModelConfig, dtype: jnp.dtype
) -> list[dict[str, tuple[jax.Array, jax.Array]]]:
    """The adapters in the shape of the stored weights.

    A of the fused projections is stacked and carries the scale (multiplied in float32), B is block
    diagonal, so that a fused projection has one A [R', K] and one B [N, R'].

    Returns:
        For every layer a dict from 'qkv_proj', 'o_proj', 'gate_up_proj', 'down_proj' to (A, B) in
        `dtype`; projections without an adapter are absent. Where the FP4 kernel runs, B has columns
        of zeros behind R', up to the multiple of 64 that it reads.
    """
    if lora is None:
        return [{} for _ in range(config.num_layers)]
    shapes = projection_shapes(config)
    return [
        {
            fused: _stack(
                [adapters.get(name) for name in members],
                [shapes[name][0] for name in members],
                scale=lora.scale,
                dtype=dtype,
            )
            for fused, members in FUSED.items()
            if any(name in adapters for name in members)
        }
        for adapters in lora.layers
    ]


def _stack(adapters, outputs, *, scale, dtype):
    ranks = [0 if adapter is None else adapter["a"].shape[0] for adapter in adapters]
    columns = fp4_matmul.padded_rank(sum(ranks)) if fp4_matmul.supports_device() else sum(ranks)
    a = jnp.concatenate([adapter["a"] for adapter in adapters if adapter is not None])
    blocks = []
    for i, adapter in enumerate(adapters):
        if adapter is None:
            blocks.append(jnp.zeros((outputs[i], columns), dtype))
        else:
            left = sum(ranks[:i])
            right = columns - left - ranks[i]
            blocks.append(jnp.pad(adapter["b"].astype(dtype), ((0, 0), (left, right))))
    return (scale * a).astype(dtype), jnp.concatenate(blocks)


def merge_layer(
    layer: dict, adapters: dict[str, dict[str, jax.Array]], config: ModelConfig, *, scale: float
) -> tuple[dict, dict[str, jax.Array]]:
    """Adds a layer's adapters to its weights: W + scale * B A, computed in float32.

    Args:
        layer: the layer of a parameter tree, its projections dense or packed.
        adapters: the layer of a `Lora`.
        config: the architecture.
        scale: the factor of B A.

    Returns:
        The layer with every projection dense in float32 and not rounded (packed ones dequantised),
        and the updates scale * B A that were added, float32 [N, K], under the same names; zero
        where a projection has no adapter.
    """
    shapes = projection_shapes(config)
    merged, updates = dict(layer), {}
    for fused, members in FUSED.items():
        update = jnp.concatenate(
            [
                scale * jnp.dot(adapters[name]["b"], adapters[name]["a"], precision="highest")
                if name in adapters
                else jnp.zeros(shapes[name])
                for name in members
            ]
        )
        weight = layer[fused]
        if isinstance(weight, QuantTensor):
            weight = dequantize(weight, jnp.float32)
        merged[fused], updates[fused] = weight.astype(jnp.float32) + update, update
    return merged, updates
