"""How a run uses the memory of its device: bytes by arithmetic, before anything is compiled.

The plan chooses the size of the update's buffers and what their backward pass computes again. It
depends on the config, the architecture and the size of the device alone, so a resumed run makes the
same choice.
"""

import dataclasses

import jax
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import FUSED, projection_shapes
from qerl_jax.policy.transformer import PRODUCTS
from qerl_jax.rl.packing import layout

# What 'auto' computes again, from the least to the most memory saved. The results of the MLP's
# first product are by far the largest.
RECOMPUTATIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("gate_up_proj",),
    ("gate_up_proj", "o_proj"),
    PRODUCTS,
)

_LARGEST_BUFFER = 12288  # tokens; a larger buffer is no faster
_TOKENS_OF_A_CALL = 400  # what a call costs besides its tokens: dequantized weights, the launch
_MULTIPLE = 128  # tokens of a tile of the attention kernel
_CPU_BUFFER = 512  # tokens; on a CPU the mask of the attention is dense
_CPU_MULTIPLE = 8
_USABLE = 0.92  # fraction of the device that a plan fills


@dataclasses.dataclass(frozen=True)
class LongestRows:
    """The longest rows that a step may sample.

    Attributes:
        prompt: tokens of the longest prompt.
        new_tokens: largest number of tokens of a completion.
        group_size: completions of a prompt.
        prompts: prompts of a step.
        devices: devices that the buffers are dealt out to.
    """

    prompt: int
    new_tokens: int
    group_size: int
    prompts: int
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of an update.

    Attributes:
        weights: weights before training, with the copy of the head for rollouts.
        training: trained parameters, state of the optimizer, and two gradients.
        update: activations and temporary arrays of one buffer.
        buffer_tokens: positions of a buffer.
        recompute: products that the backward pass computes again.
    """

    weights: int
    training: int
    update: int
    buffer_tokens: int
    recompute: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes that an update takes at its peak."""
        return self.weights + self.training + self.update


def plan_update(
    config: ModelConfig,
    rows: LongestRows,
    *,
    weights: int,
    training: int,
    itemsize: int,
    buffer_tokens: int,
    recompute: tuple[str, ...] | None,
    device_bytes: int | None,
) -> MemoryPlan:
    """Chooses the buffers of the update.

    Args:
        config: architecture of the policy.
        rows: the longest rows that a step may sample.
        weights: bytes of the weights on the device.
        training: bytes of trained parameters, optimizer state and gradients.
        itemsize: bytes of an activation.
        buffer_tokens: wanted size of a buffer; 0 chooses it.
        recompute: wanted recomputation; None chooses it.
        device_bytes: memory of the device; None where it is unknown, as on a CPU.

    Returns:
        The plan. Without a known memory a buffer is about one group.

    Raises:
        UserError: a row does not fit into the wanted size, or nothing fits into the device.
    """
    longest = rows.prompt - 1 + rows.new_tokens
    if buffer_tokens and buffer_tokens < longest:
        raise UserError(
            f"train.buffer_tokens={buffer_tokens} is less than the {longest} tokens of the longest "
            "row (prompt and rollout.max_new_tokens): raise it, or pass 0 to choose it"
        )

    def plan(tokens: int, again: tuple[str, ...]) -> MemoryPlan:
        update = update_bytes(config, tokens=tokens, recompute=again, itemsize=itemsize)
        return MemoryPlan(weights, training, update, tokens, again)

    if device_bytes is None:
        group = rows.prompt - 1 + rows.group_size * rows.new_tokens
        size = _rounded_up(max(longest, min(group, _CPU_BUFFER)), _CPU_MULTIPLE)
        return plan(buffer_tokens or size, recompute or ())
    usable = int(_USABLE * device_bytes)
    least = _rounded_up(buffer_tokens or longest, _MULTIPLE)
    largest = least if buffer_tokens else max(least, _LARGEST_BUFFER)
    choices = RECOMPUTATIONS if recompute is None else (recompute,)
    costs: dict[MemoryPlan, float] = {}
    for size in range(least, largest + 1, _MULTIPLE):
        positions = _computed_positions(rows, size)
        for again in choices:
            found = plan(size, again)
            if found.peak <= usable:
                costs[found] = positions * _relative_time(config, again)
    if costs:
        return min(costs, key=lambda found: costs[found])
    found = plan(least, choices[-1])
    raise UserError(
        f"an update with a buffer of {least} tokens takes {found.peak / 1e9:.1f} GB "
        f"({weights / 1e9:.1f} GB of it weights), the device has {device_bytes / 1e9:.1f} GB: "
        "lower rollout.max_new_tokens or train.buffer_tokens, or take a smaller model"
    )


def _computed_positions(rows: LongestRows, size: int) -> float:
    """Positions that a device computes in an update with buffers of a size.

    They are those of the longest batch, what each call costs besides, and half a buffer of padding,
    because a batch of shorter rows ends anywhere in its last buffer.
    """
    groups = np.repeat(np.arange(rows.prompts), rows.group_size)
    ones = np.ones_like(groups)
    parts = layout((rows.prompt - 1) * ones, rows.new_tokens * ones, groups, buffer_tokens=size)
    return -(-len(parts) // rows.devices) * (size + _TOKENS_OF_A_CALL) + size / 2


def _relative_time(config: ModelConfig, again: tuple[str, ...]) -> float:
    """Time of an update that computes some products again, relative to one that computes none.

    A frozen weight has one product in the forward pass and one in the backward pass. Computing the
    first one again makes three of two.
    """
    shapes = projection_shapes(config)
    sizes = {
        fused: sum(shapes[name][0] * shapes[name][1] for name in members)
        for fused, members in FUSED.items()
    }
    return 1 + sum(sizes.get(name, 0) for name in again) / (2 * sum(sizes.values()))


def recomputation(value: str) -> tuple[str, ...] | None:
    """Returns the products that train.recompute names, None for 'auto'.

    Raises:
        UserError: a name is unknown.
    """
    if value == "auto":
        return None
    shorthands = {"none": (), "all": PRODUCTS}
    names = shorthands.get(value, tuple(name.strip() for name in value.split(",")))
    if not set(names) <= set(PRODUCTS):
        raise UserError(
            f"train.recompute={value!r}: choose 'auto', 'none', 'all', or names from "
            f"{', '.join(PRODUCTS)}, separated by commas"
        )
    return tuple(name for name in PRODUCTS if name in names)


def update_bytes(
    config: ModelConfig, *, tokens: int, recompute: tuple[str, ...], itemsize: int
) -> int:
    """Returns the bytes of activations and temporary arrays of an update on one buffer.

    Args:
        config: architecture of the policy.
        tokens: positions of the buffer.
        recompute: products of a layer that the backward pass computes again.
        itemsize: bytes of an activation.
    """
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    widths = {
        "qkv_proj": heads + 2 * kv_heads,
        "attention": heads + 4 * config.num_heads // itemsize,  # and the log-sum-exp in float32
        "o_proj": config.embed_dim,
        "gate_up_proj": 2 * config.mlp_dim,
    }
    kept = config.embed_dim + sum(size for name, size in widths.items() if name not in recompute)
    # One layer while its backward pass runs: results, gradients, inputs of the products.
    layer = 2 * sum(widths.values()) + 2 * config.mlp_dim + 6 * config.embed_dim
    dense = 2 * itemsize * 2 * config.mlp_dim * config.embed_dim  # a dequantized weight, twice
    states = 4 * tokens * itemsize * config.embed_dim  # final states and their gradients
    activations = tokens * itemsize * (config.num_layers * kept + layer)
    return activations + states + dense + HEAD_BYTES


HEAD_BYTES = 4 * (256 << 20)  # logits of a chunk, their gradient, and copies of them


def device_bytes() -> int | None:
    """Returns the bytes that this process may use on its device; None where it is unknown."""
    memory = jax.local_devices()[0].memory_stats() or {}
    return memory.get("bytes_limit")


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
