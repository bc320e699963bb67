"""How a run uses the memory of its device: bytes by arithmetic, before anything is compiled.

The plan chooses the size of the update's buffers and what their backward pass computes again. It
depends on the config, the architecture and the size of the device alone, so a resumed run makes the
same choice.
"""

import dataclasses

import jax

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.transformer import PRODUCTS

# What 'auto' computes again, from the least to the most memory saved. The results of the MLP's
# first product are by far the largest.
RECOMPUTATIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("gate_up_proj",),
    ("gate_up_proj", "o_proj"),
    PRODUCTS,
)

_LARGEST_BUFFER = 16384  # tokens; a larger buffer is no faster
_SMALLEST_BUFFER = 4096  # tokens; 'auto' computes more again before it takes a smaller buffer
_MULTIPLE = 128  # tokens of a tile of the attention kernel
_CPU_BUFFER = 512  # tokens; on a CPU the mask of the attention is dense
_CPU_MULTIPLE = 8
_USABLE = 0.92  # fraction of the device that a plan fills


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
    *,
    weights: int,
    training: int,
    itemsize: int,
    longest: int,
    group: int,
    batch: int,
    buffer_tokens: int,
    recompute: tuple[str, ...] | None,
    device_bytes: int | None,
) -> MemoryPlan:
    """Chooses the buffers of the update.

    Args:
        config: architecture of the policy.
        weights: bytes of the weights on the device.
        training: bytes of trained parameters, optimizer state and gradients.
        itemsize: bytes of an activation.
        longest: positions of the longest row that a run may sample.
        group: positions of the longest group.
        batch: positions of the longest batch, without repeated prompts.
        buffer_tokens: wanted size of a buffer; 0 chooses it.
        recompute: wanted recomputation; None chooses it.
        device_bytes: memory of the device; None where it is unknown, as on a CPU.

    Returns:
        The plan. Without a known memory a buffer is about one group.

    Raises:
        UserError: a row does not fit into the wanted size, or nothing fits into the device.
    """
    if buffer_tokens and buffer_tokens < longest:
        raise UserError(
            f"train.buffer_tokens={buffer_tokens} is less than the {longest} tokens of the longest "
            "row (data.max_prompt_tokens + rollout.max_new_tokens): raise it, or 0 to choose it"
        )

    def plan(tokens: int, again: tuple[str, ...]) -> MemoryPlan:
        update = update_bytes(config, tokens=tokens, recompute=again, itemsize=itemsize)
        return MemoryPlan(weights, training, update, tokens, again)

    if device_bytes is None:
        size = _rounded_up(max(longest, min(group, _CPU_BUFFER)), _CPU_MULTIPLE)
        return plan(buffer_tokens or size, recompute or ())
    choices = RECOMPUTATIONS if recompute is None else (recompute,)
    usable = int(_USABLE * device_bytes)
    sizes = [buffer_tokens] if buffer_tokens else _sizes(longest, batch)
    # First buffers that are not small, with as little recomputation as possible.
    for smallest in (_SMALLEST_BUFFER, 0):
        for again in choices:
            for size in sizes:
                found = plan(size, again)
                if found.peak <= usable and size >= min(smallest, sizes[0]):
                    return found
    least = plan(sizes[-1], choices[-1])
    raise UserError(
        f"an update with a buffer of {least.buffer_tokens} tokens takes {least.peak / 1e9:.1f} GB "
        f"({weights / 1e9:.1f} GB of it weights), the device has {device_bytes / 1e9:.1f} GB: "
        "lower rollout.max_new_tokens or train.buffer_tokens, or take a smaller model"
    )


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


def _sizes(longest: int, batch: int) -> list[int]:
    """Sizes to choose from, from the largest to the smallest."""
    least = _rounded_up(longest, _MULTIPLE)
    most = max(least, min(_LARGEST_BUFFER, _rounded_up(batch, _MULTIPLE)))
    sizes = {most, least}
    size = _LARGEST_BUFFER
    while size > least:
        sizes.add(min(size, most))
        size = _rounded_up(size * 3 // 4, _MULTIPLE)
    return sorted(sizes, reverse=True)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
