"""Layers of a policy in memory of their own size.

The arrays that a layer is computed from share the device with it, and leave holes of all sizes when
they are freed. JAX's allocator hands out a whole hole if it is less than twice as large as the
request, or less than 128 MiB larger. The next layers then get holes that are too large for them:
on an H100, packed weights of models of 1.5B to 72B took 1.18 to 1.28 times their bytes.
Copies of many layers at once get unused memory, which the allocator cuts to size, and what the
layers leave is large enough for many of the next ones. Copied weights took 1.00 to 1.02 times their
bytes.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError, memory_errors
from qerl_jax.policy.sharding import bytes_per_device

# Bytes of the layers that are copied at once. Larger pieces end in fewer holes, and a run should
# not need its most memory here.
_BATCH = 4 * 10**9


def compact_layers(layers: list[dict]) -> list[dict]:
    """Moves the layers of a policy to memory of their own size, and deletes the arrays it moves.

    Returns:
        The layers with the same values. A layer stays where it is if the memory is unknown, as on a
        CPU, if less than three times its bytes is free, or if it cannot be copied.
    """
    copies = first = _copies(layers)
    while batch := _copies(layers[len(copies) :]):
        copies = copies + batch
    # The first ones now come after all others, so the free memory is in two pieces, and the buffers
    # of an update need one of them to be large. The first ones fit into what the others left.
    second_copies = _copies(first)
    return second_copies + copies[len(second_copies) :] + layers[len(copies) :]


def _copies(layers: list[dict]) -> list[dict]:
    """Replaces the first layers, as many as fit at once, by copies of them."""
    if (free := _free_bytes()) is None:
        return []
    limit = min(_BATCH, free // 3)
    sizes = itertools.accumulate(map(bytes_per_device, layers))
    number = sum(size <= limit for size in sizes)
    try:
        with memory_errors("the layers stay where they are"):
            copies = jax.block_until_ready([_copy(layer) for layer in layers[:number]])
    except UserError:  # Another process has taken what seemed free.
        return []
    for leaf in jax.tree.leaves(layers[:number]):
        leaf.delete()
    return copies


@jax.jit
def _copy(layer: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(jnp.copy, layer)


def _free_bytes() -> int | None:
    memory = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return None
    return memory["bytes_limit"] - memory["bytes_in_use"]
