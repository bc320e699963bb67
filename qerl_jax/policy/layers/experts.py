"""A mixture of experts: a router chooses for each token k of E gated MLPs of width F.

Its arrays are

    router [E, D], router_bias [E]                  dense; biases: gpt-oss
    experts_gate_up [E 2F, D]                       of each expert the rows of gate, then of up
    experts_down [E D, F]
    experts_gate_up_bias [E, 2, F]                  gpt-oss, of gate and of up
    experts_down_bias [E, D]                        gpt-oss
    shared_gate_up [2 S, D], shared_down [D, S]     an expert of width S that every token has
    shared_gate [1, D]                              the sigmoid of its product multiplies that

of which models without a shared expert lack the last three. The activation of gpt-oss is clamped,
see `ModelConfig.swiglu_limit`. The router multiplies in float32, and
of equal logits it takes the expert of the lower id. Router and routed experts are frozen; an
adapter of routed experts has A [E, r, K] and B [E, N, r] by the name of a stack, so that gate and
up share A.

Where the experts of tokens are given, as a rollout recorded them, the router's logits over these
give their weights (https://arxiv.org/abs/2510.11370).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.experts import (
    DENSE_NUMBERS,
    PART_NUMBERS,
    PRODUCT_NUMBERS,
    activated,
    bias_of,
    grouped_lora,
    grouped_matmul,
    has_hopper_kernel,
    table,
    tile_bound,
    tile_rows,
    to_pairs,
    to_rows,
)
from qerl_jax.errors import UserError
from qerl_jax.policy.config import ExpertsConfig, ModelConfig
from qerl_jax.policy.layers.linear import ROUTES, normed
from qerl_jax.policy.layers.mlp import gated
from qerl_jax.policy.layers.part import Array, Memory, Own, PlannedBuffer, Stack, Weight
from qerl_jax.policy.quant import QuantTensor, kernel_weight


def _of(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None, "`kinds.layer_of` decides by it"
    return config.experts


_SHARED = "shared_expert"
_GATE_UP = Weight(
    "shared_gate_up", (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"), "gate_up_proj", by_rows=True
)
_DOWN = Weight("shared_down", (f"{_SHARED}.down_proj",), "down_proj", by_rows=False)
_EXPERTS_GATE_UP = Stack(
    "experts_gate_up",
    ("gate_proj", "up_proj"),
    "experts.gate_up_proj",
    lambda config: (_of(config).count, 2 * _of(config).width, config.embed_dim),
    _GATE_UP.product,
    reads="router",
)
_EXPERTS_DOWN = Stack(
    "experts_down",
    ("down_proj",),
    "experts.down_proj",
    lambda config: (_of(config).count, config.embed_dim, _of(config).width),
    _DOWN.product,
)

MODULE: str = "mlp"
WEIGHTS: tuple[Weight, ...] = (_GATE_UP, _DOWN)
ARRAYS: dict[str, Array] = {
    "router": Array(("gate.weight",), others=("router.weight",)),
    "router_bias": Array(("router.bias",)),
    "experts_gate_up_bias": Array(("experts.gate_up_proj_bias",)),
    "experts_down_bias": Array(("experts.down_proj_bias",)),
    "shared_gate": Array(("shared_expert_gate.weight",)),
}
STACKS: tuple[Stack, ...] = (_EXPERTS_GATE_UP, _EXPERTS_DOWN)


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """As in `part.Part`; routed experts are no projections, see `STACKS`."""
    width = _of(config).shared_width
    shapes = (width, config.embed_dim), (width, config.embed_dim), (config.embed_dim, width)
    members = (*_GATE_UP.members, *_DOWN.members)
    return dict(zip(members, shapes, strict=True)) if width else {}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """As in `part.Part`."""
    count, width = _of(config).count, _of(config).width
    if config.other_biases:
        return {
            "router.weight": (count, config.embed_dim),
            "router.bias": (count,),
            # As `names.expert_tensors` has it, with gate and up apart.
            "experts.gate_up_proj_bias": (count, 2, width),
            "experts.down_proj_bias": (count, config.embed_dim),
        }
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (count, config.embed_dim)}
    if _of(config).shared_width:
        shapes["shared_expert_gate.weight"] = (1, config.embed_dim)
    return shapes


def shard(config: ModelConfig, shards: int) -> dict[str, Any]:
    """As in `part.Part`.

    Raises:
        UserError: always, as experts are not cut.
    """
    raise UserError(
        f"mesh.tensor={shards}: the experts of a {config.model_type} are not cut between devices; "
        "pass mesh.tensor=1, and mesh.data for several devices"
    )


def memory(config: ModelConfig, buffer: PlannedBuffer) -> Memory:
    """As in `part.Part`: the rows of a table are the pairs of tokens, padded to whole tiles.

    Without the Hopper kernel XLA keeps gate and up where rows [R, D] were, and what D leaves of
    these is lost: with 16 layers of Qwen3-30B-A3B (D 2048, 2 F 1536, 8,320 tokens), compiled for an
    H200, 10.0 GB and not 8.9.
    The backward pass has the gradients of the rows, of gate and up, and of their product; and what
    is dequantized at a time. Where experts have adapters it also has the rows, the input of down,
    what adapters add to gate and up, and products of tiles. In a prefill of many tokens the padding
    is at most half of the pairs.
    """
    experts = _of(config)
    itemsize, tokens = buffer.itemsize, buffer.tokens
    pairs = tokens * experts.top_k
    hopper = has_hopper_kernel() if buffer.hopper is None else buffer.hopper
    tile = tile_rows(pairs, experts.count, hopper)
    rows = tile * tile_bound(pairs, experts.count, tile)
    width, shared = experts.width, experts.shared_width
    lost = 0 if hopper else config.embed_dim % (2 * width)
    again = 2 * width + config.embed_dim if "gate_up_proj" in buffer.recompute else 0
    backward = rows * (3 * width + config.embed_dim + again) + tokens * 3 * shared
    # Of it also the packed weights and the products, which XLA gathers.
    block = DENSE_NUMBERS * (itemsize + 1)
    if hopper:
        block = itemsize * min(PART_NUMBERS, experts.count * 2 * width * config.embed_dim)
    padded = 3 * experts.top_k * (max(2 * width, config.embed_dim) + config.embed_dim) // 2
    return Memory(
        kept={"gate_up_proj": -(-rows * (2 * width + lost) // tokens) + 2 * shared},
        backward=itemsize * backward + block,
        adapter=itemsize * rows * (config.embed_dim + 3 * width) + 2 * 4 * PRODUCT_NUMBERS,
        prefill=itemsize * (padded + 3 * shared),
        block=block,
    )


def fused_shapes(config: ModelConfig) -> tuple[int, int, int, bool, float] | None:
    """As in `part.Mlp`."""
    experts = _of(config)
    return (
        *(experts.count, experts.top_k, experts.width, experts.normalized),
        config.swiglu_limit,
    )


def mlp(
    own: Own, x: jax.Array, routes: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """As in `part.Mlp`."""
    h = normed(own, "post_attention_layernorm", x)
    weights, chosen = _route(own, h, routes)
    added = _routed(own, h, weights, chosen if routes is None else routes)
    if _of(own.config).shared_width:
        shared = gated(own, _GATE_UP, _DOWN, h)
        with jax.named_scope("router"):
            opened = jax.nn.sigmoid(_wide_product(h, own.layer["shared_gate"]))
        added = added + opened.astype(x.dtype) * shared
    return added, chosen


@jax.named_scope("router")
def _route(own: Own, h: jax.Array, routes: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The weights float32 [B, T, k] of the routes, and the router's own choice int32 [B, T, k]."""
    experts = _of(own.config)
    if own.inputs is not None:
        own.inputs["router"] = h
    logits = _wide_product(h, own.layer["router"])
    if own.config.other_biases:
        logits = logits + own.layer["router_bias"].astype(jnp.float32)
    chosen = jax.lax.top_k(jax.lax.stop_gradient(logits), experts.top_k)[1]
    # Computed again in the backward pass, they could be others.
    chosen = checkpoint_name(chosen, ROUTES)
    ids = chosen if routes is None else routes
    # A sum with one term, whose gradient adds nothing up at positions that depend on data.
    is_taken = ids[..., None] == jnp.arange(experts.count)
    taken = jnp.where(is_taken, logits[..., None, :], 0).sum(axis=-1)
    if experts.normalized:
        return jax.nn.softmax(taken), chosen
    return jnp.exp(taken - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), chosen


def _routed(own: Own, h: jax.Array, weights: jax.Array, routes: jax.Array) -> jax.Array:
    """What the experts of `routes` add [B, T, D], each times its weight."""
    experts, dtype, width = _of(own.config), h.dtype, h.shape[-1]
    own_table = table(routes.reshape(-1, experts.top_k), experts=experts.count)
    if own.inputs is not None:
        tiles = own_table.source.reshape(len(own_table.owner), -1)
        is_taken = tiles < len(own_table.place)
        own.inputs["owners"] = jnp.where(is_taken, own_table.owner[:, None], experts.count)

    def product(rows: jax.Array, stack: Stack) -> jax.Array:
        if own.inputs is not None:
            own.inputs[stack.name] = rows.reshape(len(own_table.owner), -1, rows.shape[-1])
        weight = own.layer[stack.name]
        packed = kernel_weight(weight) if isinstance(weight, QuantTensor) else weight
        outputs = stack.shape(own.config)[1]
        y = grouped_matmul(rows, packed, own_table, outputs=outputs)
        if stack.name in own.adapters:
            y = y + grouped_lora(rows, own.adapters[stack.name], own_table)
        return y

    rows = to_rows(h.reshape(-1, width), own_table)
    gate_up = checkpoint_name(product(rows, _EXPERTS_GATE_UP), _GATE_UP.product)
    if own.config.other_biases:
        gate_up = gate_up + bias_of(own.layer["experts_gate_up_bias"], own_table, dtype)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    with jax.named_scope("mlp"):
        # A weight multiplies the input of down, so that its gradient does not read the result.
        row_weights = to_rows(weights.reshape(-1, 1), own_table)
        hidden = (activated(gate, up, own.config.swiglu_limit) * row_weights).astype(dtype)
    y = product(hidden, _EXPERTS_DOWN)
    if own.config.other_biases:
        added = row_weights * bias_of(own.layer["experts_down_bias"], own_table, dtype)
        y = (y + added).astype(dtype)
    pairs = to_pairs(y, own_table)
    with jax.named_scope("mlp"):
        added = pairs.reshape(-1, experts.top_k, width).sum(axis=1, dtype=jnp.float32)
    return added.astype(dtype).reshape(h.shape)


@jax.custom_vjp
def _wide_product(h: jax.Array, weight: jax.Array) -> jax.Array:
    """The product [B, T, N] of states with a small weight [N, D], in float32 on every device.

    The gradient of the states has products in their dtype.
    """
    return jnp.einsum(
        "btd,nd->btn", h, weight, precision="highest", preferred_element_type=jnp.float32
    )


def _wide_product_fwd(h, weight):
    return _wide_product(h, weight), (h, weight)


def _wide_product_bwd(saved, gradient):
    h, weight = saved
    d_h = jnp.einsum("btn,nd->btd", gradient.astype(h.dtype), weight.astype(h.dtype))
    return d_h, jnp.einsum("btn,btd->nd", gradient, h).astype(weight.dtype)


_wide_product.defvjp(_wide_product_fwd, _wide_product_bwd)
