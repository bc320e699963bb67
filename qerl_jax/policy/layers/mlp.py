"""The gated MLP (SwiGLU), whose width F is `mlp_dim`.

Its arrays are gate_up_proj [2 F, D] and down_proj [D, F].
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul.tiling import TILE_ROWS
from qerl_jax.policy.collectives import divided
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.linear import normed, project
from qerl_jax.policy.layers.part import Array, Memory, Own, PlannedBuffer, Stack, Weight

_GATE_UP = Weight("gate_up_proj", ("gate_proj", "up_proj"), "gate_up_proj", by_rows=True)
_DOWN = Weight("down_proj", ("down_proj",), "down_proj", by_rows=False)

MODULE: str = "mlp"
WEIGHTS: tuple[Weight, ...] = (_GATE_UP, _DOWN)
ARRAYS: dict[str, Array] = {}
STACKS: tuple[Stack, ...] = ()


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """As in `part.Part`."""
    return {
        "gate_proj": (config.mlp_dim, config.embed_dim),
        "up_proj": (config.mlp_dim, config.embed_dim),
        "down_proj": (config.embed_dim, config.mlp_dim),
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """As in `part.Part`."""
    return {}


def shard(config: ModelConfig, shards: int) -> dict[str, Any]:
    """As in `part.Part`: padded to whole tiles, of which the kernel reads those of gate and up."""
    width = divided(config.mlp_dim, shards, "columns of the MLP")
    return {"mlp_dim": width + -width % TILE_ROWS}


def memory(config: ModelConfig, buffer: PlannedBuffer) -> Memory:
    """As in `part.Part`.

    The backward pass has the gradients of gate and up; and the larger of their dequantized weights
    and of what the gradient of SwiGLU reads and writes. Gate and up that are computed again count
    twice then: an H200 needs that for rows of 16,384 to 120,064 tokens.
    """
    width, tokens, itemsize = config.mlp_dim, buffer.tokens, buffer.itemsize
    swiglu = tokens * width * (5 if "gate_up_proj" in buffer.recompute else 1)
    return Memory(
        kept={"gate_up_proj": 2 * width},
        backward=itemsize * (2 * tokens * width + max(swiglu, 2 * width * config.embed_dim)),
        prefill=3 * itemsize * width,
    )


def fused_shapes(config: ModelConfig) -> tuple[int, int, int, bool, float] | None:
    """As in `part.Mlp`."""
    return None


def mlp(
    own: Own, x: jax.Array, routes: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """As in `part.Mlp`."""
    return gated(own, _GATE_UP, _DOWN, normed(own, "post_attention_layernorm", x)), None


def gated(own: Own, gate_up: Weight, down: Weight, h: jax.Array) -> jax.Array:
    """Returns the gated MLP of two weights for h [B, T, D]."""
    gate, up = jnp.split(project(own, gate_up, h), 2, axis=-1)
    with jax.named_scope("mlp"):
        hidden = jax.nn.silu(gate) * up
    return project(own, down, hidden)
