"""The functions of `train_step` on a mesh: each device adds up the gradient of its own buffers.

Every function is a `shard_map` over all devices, because XLA would otherwise gather the operands of
a Mosaic kernel and run the whole kernel on every device. Inside of it a device runs the function of
`train_step` on its share: buffers and totals have a first axis with one entry per device.
`apply_gradient` adds the totals up, in the order of the devices, so that repeated runs give the
same bits; an all-reduce promises no order. Numerators, denominators and maxima of the metrics are
combined as those of buffers are, so that the result does not depend on the number of devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qerl_jax.rl import train_step
from qerl_jax.rl.losses import add_metrics
from qerl_jax.rl.packing import PackedBuffer, empty_buffer
from qerl_jax.rl.train_step import Totals, TrainState, UpdateConfig
from qerl_jax.sharding import DATA, dealt, put

_TOGETHER = 8 << 20  # numbers that are added up over the devices at once


def functions(
    config: UpdateConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> dict[str, Callable[..., Any]]:
    """Returns the jitted functions by name, without their static arguments.

    Args:
        config: static options of the update.
        optimizer: optimizer.
        mesh: mesh of the run.
    """
    policy = {"config": config.model}
    return {
        "zero_totals": _on_each(train_step.zero_totals, mesh, config=config),
        "add_gradient": _on_each(train_step.add_gradient, mesh, donates=True, config=config),
        "apply_gradient": _apply_gradient(optimizer, mesh),
        "buffer_logprobs": _on_each(train_step.buffer_logprobs, mesh, **policy),
        "buffer_kl": _on_each(train_step.buffer_kl, mesh, gathers=True, **policy),
    }


def deal_buffers(buffers: Sequence[PackedBuffer], mesh: Mesh | None) -> list[PackedBuffer]:
    """Deals buffers out by count: buffers [D, N] with one buffer [N] for each device.

    All buffers take the same time, because all have the same size. What is missing in the last
    round is padding, which adds nothing to any sum.

    Args:
        buffers: packed buffers, as NumPy arrays.
        mesh: mesh of the run; without one, the buffers are returned as they are.
    """
    if mesh is None or not buffers:
        return list(buffers)
    count = mesh.shape[DATA]
    padding = empty_buffer(len(buffers[0].tokens))
    filled = [*buffers, *[padding] * (-len(buffers) % count)]
    rounds = [filled[start : start + count] for start in range(0, len(filled), count)]
    return [jax.tree.map(lambda x: put(x, dealt(mesh)), _stack(found)) for found in rounds]


def abstract_buffer(buffer: PackedBuffer, mesh: Mesh) -> PackedBuffer:
    """Returns the shapes of a buffer as `deal_buffers` makes them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((mesh.shape[DATA], *x.shape), x.dtype, sharding=dealt(mesh)),
        buffer,
    )


def _stack(buffers: Sequence[PackedBuffer]) -> PackedBuffer:
    return jax.tree.map(lambda *x: np.stack(x), *buffers)


def _on_each(
    function: Callable[..., Any],
    mesh: Mesh,
    *,
    donates: bool = False,
    gathers: bool = False,
    **static: Any,
) -> Callable[..., Any]:
    """Returns a function that runs on every device; its results have a first axis of devices.

    Args:
        function: function of `train_step`.
        mesh: mesh of the run.
        donates: whether the first argument is donated.
        gathers: whether every device gets the results of all, such as those that the host reads.
        **static: static arguments of the function.
    """

    def local(*arguments: Any) -> Any:
        own = [_own(x) if _is_dealt(x) else x for x in arguments]
        result = function(*own, **static)
        if gathers:
            return jax.lax.all_gather(result, DATA)
        return jax.tree.map(lambda x: x[None], result)

    def on_mesh(*arguments: Any) -> Any:
        specs = tuple(P(DATA) if _is_dealt(x) else P() for x in arguments)
        out = P() if gathers else P(DATA)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(
            *arguments
        )

    on_mesh.__name__ = getattr(function, "__name__", "on_mesh")
    return jax.jit(on_mesh, donate_argnums=0 if donates else ())


def _apply_gradient(
    optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, Totals], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `train_step.apply_gradient` for the totals of all devices."""
    count = mesh.shape[DATA]

    def local(state: TrainState, totals: Totals) -> tuple[TrainState, dict[str, jax.Array]]:
        own = _own(totals)
        loss, metrics = jax.lax.all_gather((own.loss, own.metrics), DATA)
        parts = [jax.tree.map(lambda x, i=i: x[i], metrics) for i in range(count)]
        combined = Totals(
            loss=functools.reduce(jnp.add, [loss[i] for i in range(count)]),
            gradient=_sum_in_order(own.gradient, count),
            metrics=functools.reduce(add_metrics, parts),
        )
        return train_step.apply_gradient(state, combined, optimizer=optimizer)

    def apply_gradient(state: TrainState, totals: Totals) -> Any:
        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(DATA)), out_specs=P(), check_vma=False
        )(state, totals)

    return jax.jit(apply_gradient, donate_argnums=0)


def _sum_in_order(tree: Any, count: int) -> Any:
    """Returns the sum of a tree over the devices, added up in their order.

    Each device adds up its part of the arrays, and then all parts are gathered: as many bytes as an
    all-reduce moves. Small arrays travel together, because each of the hundreds of arrays of an
    adapter would take as long as NCCL takes to start.
    """
    leaves, treedef = jax.tree.flatten(tree)
    summed: list[jax.Array] = []
    while len(summed) < len(leaves):
        sizes = np.cumsum([leaf.size for leaf in leaves[len(summed) :]])
        number = max(1, int(np.searchsorted(sizes, _TOGETHER, side="right")))
        group, sizes = leaves[len(summed) :][:number], sizes[:number]
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in group])
        parts = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
        parts = jax.lax.all_to_all(parts, DATA, split_axis=0, concat_axis=0)
        own = functools.reduce(jnp.add, [parts[i] for i in range(count)])
        total = jax.lax.all_gather(own, DATA, tiled=True)[: flat.size]
        pieces = jnp.split(total, sizes[:-1].tolist())
        summed += [x.reshape(leaf.shape) for x, leaf in zip(pieces, group, strict=True)]
    return jax.tree.unflatten(treedef, summed)


def _is_dealt(argument: Any) -> bool:
    return isinstance(argument, PackedBuffer | Totals)


def _own(tree: Any) -> Any:
    """Returns a device's share of arrays [D, ...], which is [1, ...] on the device."""
    return jax.tree.map(lambda x: x[0], tree)
