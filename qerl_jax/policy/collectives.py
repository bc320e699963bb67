"""Where the devices that hold a policy together meet; see `tensor_parallel`.

The functions of the policy run on each device inside a `shard_map` over the axis `TENSOR`. Without
cut weights (`config.shards` is 1) none of these functions does anything.

JAX cannot know inside of a `shard_map` whether the devices have equal gradients. `enter_shards` and
`leave_shards` therefore define theirs: a gradient is added up where a replicated array enters the
computation of one device, and stays as it is where the sum leaves it. So the gradient of an array
that lies whole on every device is on each device a part, whose sum is the gradient.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError
from qerl_jax.policy.config import ModelConfig

TENSOR = "tensor"  # the axis of the mesh that weights are cut along


def divided(number: int, shards: int, what: str) -> int:
    """Returns what one of several devices has of a number that they share.

    Raises:
        UserError: the devices cannot have the same.
    """
    if number % shards:
        raise UserError(
            f"mesh.tensor={shards} does not divide the {number} {what} of the model: every device "
            "takes the same number, pass a divisor"
        )
    return number // shards


def enter_shards(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns x, which all devices have, for the computation of one; adds up its gradient."""
    return x if config.shards == 1 else _enter(x)


def leave_shards(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the sum of x over the devices, whose gradient each device takes as it is."""
    return x if config.shards == 1 else _leave(x)


@jax.custom_vjp
def _enter(x):
    return x


_enter.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.psum(gradient, TENSOR),))


@jax.custom_vjp
def _leave(x):
    return jax.lax.psum(x, TENSOR)


_leave.defvjp(lambda x: (_leave(x), None), lambda _, gradient: (gradient,))


def embed(table: jax.Array, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the rows of an embedding [V, D] for token ids [...], each from its device."""
    if config.shards == 1:
        return table[tokens]
    index, is_own = own_tokens(tokens, config)
    return leave_shards(jnp.where(is_own[..., None], table[index], 0), config)


def own_tokens(tokens: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns where tokens lie in the vocabulary of this device, and whether they do.

    A token of another device has any index.
    """
    if config.shards == 1:
        return tokens, jnp.ones(tokens.shape, bool)
    index = tokens - jax.lax.axis_index(TENSOR) * config.vocab_size
    is_own = (index >= 0) & (index < config.vocab_size)
    return jnp.where(is_own, index, 0), is_own


def own_rows(rows: jax.Array, sizes: tuple[int, ...], config: ModelConfig) -> jax.Array:
    """Returns this device's rows of a stack [N, ...] that lies whole on every device.

    `sizes` are the numbers of rows that one device has of each part of the stack.
    """
    if config.shards == 1:
        return rows
    index = jax.lax.axis_index(TENSOR)
    ends = list(itertools.accumulate(config.shards * size for size in sizes))
    parts = zip(jnp.split(rows, ends[:-1]), sizes, strict=True)
    own = [jax.lax.dynamic_slice_in_dim(part, index * size, size) for part, size in parts]
    return jnp.concatenate(own)


def over_vocabulary(function: Any, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns `jax.lax.psum` or `pmax` of x over the devices' parts of the vocabulary."""
    return x if config.shards == 1 else function(x, TENSOR)


def whole_vocabulary(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns logits [..., V] of all tokens, given those of this device."""
    if config.shards == 1:
        return logits
    return jax.lax.all_gather(logits, TENSOR, axis=logits.ndim - 1, tiled=True)
