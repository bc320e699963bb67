"""LoRA (https://arxiv.org/abs/2106.09685) as a tree that is separate from the frozen weights."""

import dataclasses
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import fp4_matmul
from qerl_jax.errors import UserError
from qerl_jax.policy.collectives import own_rows
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import (
    ALL_FUSED,
    ALL_PROJECTIONS,
    PROJECTIONS,
    WEIGHTS,
    fused_of,
    projection_shapes,
)
from qerl_jax.policy.quant import QuantTensor, dequantize

LARGEST_ALPHA = 1e6


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which projections are adapted, and how strongly.

    Attributes:
        rank: rank R of every adapter.
        alpha: numerator of the scale.
        rslora: whether to divide alpha by sqrt(R) (https://arxiv.org/abs/2312.03732) instead of R.
        targets: Hugging Face names of the adapted projections.
    """

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self):
        unknown = set(self.targets) - set(ALL_PROJECTIONS)
        repeated = len(set(self.targets)) < len(self.targets)
        if self.rank < 1 or unknown or repeated or not self.targets:
            raise UserError(
                f"lora.rank={self.rank}, lora.targets={self.targets}: the rank must be at least 1, "
                f"the targets some of {ALL_PROJECTIONS}, each at most once"
            )
        if not abs(self.alpha) <= LARGEST_ALPHA:
            raise UserError(
                f"lora.alpha={self.alpha}: must be a finite number between "
                f"-{LARGEST_ALPHA:.0f} and {LARGEST_ALPHA:.0f}"
            )

    @property
    def scale(self) -> float:
        """The factor of the update B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@struct.dataclass
class Lora:
    """The trainable low-rank update W + scale * B A of the adapted projections.

    Attributes:
        layers: one dict per layer, from projection name to {'a': [R, K], 'b': [N, R]} in float32.
        scale: factor of the update B A.
    """

    layers: list[dict[str, dict[str, jax.Array]]]
    scale: float = struct.field(pytree_node=False)


def check_targets(config: ModelConfig, targets: Collection[str]) -> None:
    """Checks that the layers of a model have the projections that an adapter is for.

    Raises:
        UserError: no layer has one of the targets.
    """
    shapes = projection_shapes(config)
    if missing := set(targets) - shapes.keys():
        raise UserError(
            f"lora.targets: a {config.model_type} has no {', '.join(sorted(missing))}: choose from "
            f"{', '.join(shapes)}"
        )


def targets_of(config: ModelConfig, layer: int, targets: Collection[str]) -> list[str]:
    """Returns which of the targets a layer has, in the order of `ALL_PROJECTIONS`.

    Raises:
        UserError: no layer of the model has one of the targets.
    """
    check_targets(config, targets)
    members = [name for names in fused_of(config, layer).values() for name in names]
    return [name for name in ALL_PROJECTIONS if name in members and name in targets]


def init(key: jax.Array, config: ModelConfig, lora_config: LoraConfig) -> Lora:
    """Initializes adapters as PEFT does: A uniform in +-1/sqrt(K) and B zero, so B A is zero.

    Args:
        key: random key; each matrix depends only on the key, its layer and its projection.
        config: the architecture.
        lora_config: rank, scale and targets of the adapters.
    """
    shapes = projection_shapes(config)
    layers = []
    for layer in range(config.num_layers):
        layer_key = jax.random.fold_in(key, layer)
        adapters = {}
        for name in targets_of(config, layer, lora_config.targets):
            index = ALL_PROJECTIONS.index(name)
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
    """Stacks the adapters of fused projections to fit the stored weights.

    The A matrices of a fused projection are stacked and multiplied by the scale in float32. The B
    matrices form a block-diagonal matrix. A fused projection then has one A [R', K] and one B
    [N, R'], where R' is the sum of the ranks.

    Args:
        lora: the adapters, or None.
        config: the architecture.
        dtype: dtype of the result.

    Returns:
        One dict per layer, from the names of its fused weights, as 'qkv_proj', to the pair
        (A, B); projections without an adapter are absent. Where the FP4 kernel runs, B is padded
        with columns of zeros to the multiple of 64 that the kernel reads. Where the weights of a
        device are padded (see `tensor_parallel`), so are A and B.
    """
    if lora is None:
        return [{} for _ in range(config.num_layers)]
    shapes = projection_shapes(config)
    stacked = {name: rows for weight in WEIGHTS.values() for name, rows in weight.stacked}

    def of_device(name: str, adapters: dict) -> dict[str, jax.Array] | None:
        adapter = adapters.get(name)
        if adapter is None or name not in stacked:
            return adapter
        return adapter | {"b": own_rows(adapter["b"], stacked[name](config), config)}

    return [
        {
            fused: _stack(
                [of_device(name, adapters) for name in members],
                [shapes[name][0] for name in members],
                shapes[members[0]][1],
                scale=lora.scale,
                dtype=dtype,
            )
            for fused, members in ALL_FUSED.items()
            if any(name in adapters for name in members)
        }
        for adapters in lora.layers
    ]


def _stack(adapters, outputs, inputs, *, scale, dtype):
    ranks = [0 if adapter is None else adapter["a"].shape[0] for adapter in adapters]
    packed = fp4_matmul.device_kernel() != "xla"
    columns = fp4_matmul.padded_rank(sum(ranks)) if packed else sum(ranks)
    a = jnp.concatenate([adapter["a"] for adapter in adapters if adapter is not None])
    blocks = []
    for i, adapter in enumerate(adapters):
        if adapter is None:
            blocks.append(jnp.zeros((outputs[i], columns), dtype))
        else:
            left = sum(ranks[:i])
            right, below = columns - left - ranks[i], outputs[i] - len(adapter["b"])
            blocks.append(jnp.pad(adapter["b"].astype(dtype), ((0, below), (left, right))))
    a = jnp.pad((scale * a).astype(dtype), ((0, 0), (0, inputs - a.shape[1])))
    return a, jnp.concatenate(blocks)


def merge_layer(
    layer: dict, adapters: dict[str, dict[str, jax.Array]], config: ModelConfig, *, scale: float
) -> tuple[dict, dict[str, jax.Array]]:
    """Adds the adapters of a layer to its weights: W + scale * B A, computed in float32.

    Args:
        layer: one layer of a parameter tree, with dense or packed projections.
        adapters: the same layer of a `Lora`.
        config: the architecture.
        scale: factor of the update B A.

    Returns:
        The layer with every projection dense in float32 and not rounded (packed projections are
        dequantized), and the added updates scale * B A, float32 [N, K], under the same names. The
        update of a projection without an adapter is zero.
    """
    shapes = projection_shapes(config)
    merged, updates = dict(layer), {}
    for fused, members in ALL_FUSED.items():
        if fused not in layer:
            continue
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
