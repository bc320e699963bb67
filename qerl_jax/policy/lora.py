"""LoRA (https://arxiv.org/abs/2106.09685) as a tree that is separate from the frozen weights."""

import dataclasses
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import experts, fp4_matmul
from qerl_jax.errors import UserError
from qerl_jax.policy.collectives import own_rows
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import (
    ALL_FUSED,
    ALL_PROJECTIONS,
    PROJECTIONS,
    STACKS,
    WEIGHTS,
    fused_of,
    has_experts,
    projection_shapes,
    stack_shapes,
)
from qerl_jax.policy.quant import QuantTensor, dequantize

LARGEST_ALPHA = 1e6
_KEY_STACKS = 1 << 16  # folded into the keys of stacks, above the numbers of all projections


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which projections are adapted, and how strongly.

    Attributes:
        rank: rank R of every adapter but those of routed experts.
        alpha: numerator of the scale.
        rslora: whether to divide alpha by sqrt(R) (https://arxiv.org/abs/2312.03732) instead of R.
        targets: Hugging Face names of the adapted projections.
        expert_rank: rank of the adapters of routed experts, whose scale is that of the others; 0
            for none. Gate and up of an expert share A.
    """

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = PROJECTIONS
    expert_rank: int = 0

    def __post_init__(self):
        unknown = set(self.targets) - set(ALL_PROJECTIONS)
        repeated = len(set(self.targets)) < len(self.targets)
        if self.expert_rank < 0:
            raise UserError(f"lora.expert_rank={self.expert_rank}: must be at least 0")
        nothing = not self.targets and not self.expert_rank
        if self.rank < 1 or unknown or repeated or nothing:
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
        layers: one dict per layer, from projection name to {'a': [R, K], 'b': [N, R]} in float32;
            from the name of a stack of E experts to {'a': [E, R', K], 'b': [E, N, R']}.
        scale: factor of the update B A.
    """

    layers: list[dict[str, dict[str, jax.Array]]]
    scale: float = struct.field(pytree_node=False)


def check_targets(config: ModelConfig, targets: Collection[str], expert_rank: int = 0) -> None:
    """Checks that the layers of a model have what an adapter is for.

    Raises:
        UserError: no layer has one of the targets, or there are no routed experts to adapt.
    """
    shapes = projection_shapes(config)
    if missing := set(targets) - shapes.keys():
        experts = "; lora.expert_rank adapts its routed experts" if has_experts(config) else ""
        raise UserError(
            f"lora.targets: a {config.model_type} has no {', '.join(sorted(missing))}: choose from "
            f"{', '.join(shapes)}{experts}"
        )
    if expert_rank and not has_experts(config):
        raise UserError(
            f"lora.expert_rank={expert_rank}: a {config.model_type} has no routed experts; pass 0"
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
    layers = []
    for layer in range(config.num_layers):
        layer_key = jax.random.fold_in(key, layer)
        adapters = {}
        for name, shapes in matrix_shapes(config, layer, lora_config).items():
            if name in STACKS:
                index = _KEY_STACKS + list(STACKS).index(name)
            else:
                index = ALL_PROJECTIONS.index(name)
            bound = 1.0 / math.sqrt(shapes["a"][-1])
            adapters[name] = {
                "a": jax.random.uniform(
                    jax.random.fold_in(layer_key, index), shapes["a"], minval=-bound, maxval=bound
                ),
                "b": jnp.zeros(shapes["b"]),
            }
        layers.append(adapters)
    return Lora(layers=layers, scale=lora_config.scale)


def matrix_shapes(
    config: ModelConfig, layer: int, lora_config: LoraConfig
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of the matrices of a layer of a `Lora`.

    Raises:
        UserError: as `check_targets`.
    """
    check_targets(config, lora_config.targets, lora_config.expert_rank)
    shapes, rank, found = projection_shapes(config), lora_config.rank, {}
    for name in targets_of(config, layer, lora_config.targets):
        outputs, inputs = shapes[name]
        found[name] = {"a": (rank, inputs), "b": (outputs, rank)}
    if rank := lora_config.expert_rank:
        for name, (experts, outputs, inputs) in stack_shapes(config, layer).items():
            found[name] = {"a": (experts, rank, inputs), "b": (experts, outputs, rank)}
    return found


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
        device are padded (see `tensor_parallel`), so are A and B. Those of a stack of experts are
        A [E, R, K] and B [E, N, R], with the ranks that their kernel reads.
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
        | {
            name: experts.pad_ranks(((lora.scale * own["a"]).astype(dtype), own["b"].astype(dtype)))
            for name, own in adapters.items()
            if name in STACKS
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


def expert_update(adapter: dict[str, jax.Array], scale: float, expert: int) -> jax.Array:
    """Returns the update scale * B A of one expert of a stack, float32 [N, K]."""
    return scale * jnp.dot(adapter["b"][expert], adapter["a"][expert], precision="highest")


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
        The layer with every projection but those of routed experts dense in float32 and not rounded
        (packed projections are dequantized), and the added updates scale * B A, float32 [N, K],
        under the same names. The update of a projection without an adapter is zero.
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
