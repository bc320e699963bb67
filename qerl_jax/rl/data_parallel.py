"""The functions of `train_step` on a mesh: each group adds up the gradient of its own buffers.

A group is a row of the mesh, one device or several between which weights are cut. Every function is
a `shard_map` over all devices, because XLA would otherwise gather the operands of a Mosaic kernel
and run the whole kernel on every device. Inside of it a device runs the function of `train_step` on
its share: buffers and totals have a first axis with one entry for each group.

Where weights are cut, so is the gradient of their part of the adapter. The gradient of an array
that lies whole on every device is a part on each (see `collectives`), and its totals have one
entry for each device. `apply_gradient` adds all totals up, in the order of the devices, so that
repeated runs give the same bits; an all-reduce promises no order. Numerators, denominators and
maxima of the metrics are combined as those of buffers are, so that the result does not depend on
the number of devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qerl_jax.policy.collectives import TENSOR
from qerl_jax.policy.sharding import DATA, batch_sharding, on_mesh, put_on, shardings, specs
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rl import train_step
from qerl_jax.rl.losses import add_metrics
from qerl_jax.rl.packing import PackedBuffer, empty_buffer
from qerl_jax.rl.train_step import Totals, TrainState, UpdateConfig

_TOGETHER = 8 << 20  # numbers that are added up over the devices at once


def functions(
    update_config: UpdateConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> dict[str, Callable[..., Any]]:
    """Returns the jitted functions by name, without their static arguments.

    Args:
        update_config: static options of the update, with the architecture of the whole policy.
        optimizer: optimizer.
        mesh: mesh of the run.
    """
    model = shard_of(update_config.model, mesh.shape[TENSOR])
    teacher = update_config.teacher and shard_of(update_config.teacher, mesh.shape[TENSOR])
    update_config, policy = dataclasses.replace(update_config, model=model), {"model_config": model}
    return {
        "zero_totals": _on_each(
            train_step.zero_totals, mesh, results=lambda totals: totals, update_config=update_config
        ),
        "add_gradient": _on_each(
            train_step.add_gradient,
            mesh,
            donates=True,
            results=lambda totals: (totals, P(DATA)),
            update_config=update_config,
        ),
        "old_logprobs": _on_each(train_step.old_logprobs, mesh, update_config=update_config),
        "apply_gradient": _apply_gradient(optimizer, mesh),
        "buffer_logprobs": _on_each(train_step.buffer_logprobs, mesh, **policy),
        "teacher_logprobs": _on_each(train_step.teacher_logprobs, mesh, model_config=teacher),
        "buffer_kl": _on_each(train_step.buffer_kl, mesh, gathers=True, **policy),
        "buffer_loss": _on_each(train_step.buffer_loss, mesh, gathers=True, **policy),
        "own_routes_difference": _on_each(
            train_step.own_routes_difference, mesh, gathers=True, **policy
        ),
    }


def deal_buffers(buffers: Sequence[PackedBuffer], mesh: Mesh | None) -> list[PackedBuffer]:
    """Deals buffers out by count: buffers [D, N] with one buffer [N] for each group.

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
    if buffers[0].routes is not None:
        padding = dataclasses.replace(padding, routes=np.zeros_like(buffers[0].routes))
    all_buffers = [*buffers, *[padding] * (-len(buffers) % count)]
    rounds = [all_buffers[start : start + count] for start in range(0, len(all_buffers), count)]
    return [
        jax.tree.map(lambda *x: put_on(np.stack(x), batch_sharding(mesh)), *group)
        for group in rounds
    ]


def abstract_buffer(buffer: PackedBuffer, mesh: Mesh) -> PackedBuffer:
    """Returns the shapes of a buffer as `deal_buffers` makes them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (mesh.shape[DATA], *x.shape), x.dtype, sharding=batch_sharding(mesh)
        ),
        buffer,
    )


def abstract_totals(totals: Totals, mesh: Mesh) -> Totals:
    """Returns the shapes of totals with their shardings."""
    totals_specs = _specs_of_totals(totals.gradient, mesh)
    abstract = functools.partial(
        jax.tree.map,
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
    )
    return Totals(
        loss=abstract(totals.loss, P(DATA)),
        gradient=abstract(totals.gradient, totals_specs.gradient),
        metrics=abstract(totals.metrics, jax.tree.map(lambda _: P(DATA), totals.metrics)),
    )


def _on_each(
    function: Callable[..., Any],
    mesh: Mesh,
    *,
    donates: bool = False,
    gathers: bool = False,
    results: Callable[[Any], Any] = lambda totals: P(DATA),
    **static: Any,
) -> Callable[..., Any]:
    """Returns a function that runs on every device; its results have a first axis of groups.

    The first argument is donated if it `donates`; if it `gathers`, every device gets the results of
    all, such as those that the host reads. `results` makes their specs from those of totals.
    """

    def local(*arguments: Any) -> Any:
        shares = [_device_share(x) if _is_dealt(x) else x for x in arguments]
        result = function(*shares, **static)
        if gathers:
            return jax.lax.all_gather(result, DATA)
        return jax.tree.map(lambda x: x[None], result)

    def in_specs(*arguments: Any) -> tuple:
        def spec(argument: Any) -> Any:
            if isinstance(argument, Totals):
                return _specs_of_totals(_find_trainable(arguments), mesh)
            return P(DATA) if _is_dealt(argument) else specs(argument, mesh.shape[TENSOR])

        return tuple(map(spec, arguments))

    def out_specs(*arguments: Any) -> Any:
        return P() if gathers else results(_specs_of_totals(_find_trainable(arguments), mesh))

    local.__name__ = getattr(function, "__name__", "local")
    return on_mesh(
        local, mesh, in_specs=in_specs, out_specs=out_specs, donated=0 if donates else ()
    )


def _find_trainable(arguments: tuple) -> Trainable | None:
    """Returns the trained parameters among the arguments of a function, or None."""
    return next((x for x in arguments if isinstance(x, Trainable)), None)


def _specs_of_totals(trainable: Trainable | None, mesh: Mesh) -> Totals:
    """Returns the specs of totals, whose gradient is a tree like the trainable."""
    gradient = jax.tree.map(
        lambda spec: P(DATA, *spec) if TENSOR in spec else P((DATA, TENSOR)),
        specs(trainable, mesh.shape[TENSOR]),
    )
    # pyrefly: ignore[bad-argument-type]  Specs in place of arrays.
    return Totals(loss=P(DATA), gradient=gradient, metrics=P(DATA))


def _apply_gradient(
    optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, Totals], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `train_step.apply_gradient` for the totals of all devices."""
    count = mesh.shape[DATA]

    def combine(totals: Totals) -> Totals:
        share = _device_share(totals)
        loss, metrics = jax.lax.all_gather((share.loss, share.metrics), DATA)
        parts = [jax.tree.map(lambda x, i=i: x[i], metrics) for i in range(count)]
        return Totals(
            loss=functools.reduce(jnp.add, [loss[i] for i in range(count)]),
            gradient=_sum_over_mesh(share.gradient, mesh),
            metrics=functools.reduce(add_metrics, parts),
        )

    def apply_gradient(state: TrainState, totals: Totals) -> Any:
        gradient_specs = specs(state.trainable, mesh.shape[TENSOR])
        total = jax.shard_map(
            combine,
            mesh=mesh,
            in_specs=(_specs_of_totals(state.trainable, mesh),),
            # pyrefly: ignore[bad-argument-type]  Specs in place of arrays.
            out_specs=Totals(loss=P(), gradient=gradient_specs, metrics=P()),
            check_vma=False,
        )(totals)
        # XLA divides these sums over whole matrices, such as the norm of the gradient, by itself.
        results = train_step.apply_gradient(state, total, optimizer=optimizer)
        targets = shardings(state, mesh), NamedSharding(mesh, P())
        return tuple(map(jax.lax.with_sharding_constraint, results, targets))

    return jax.jit(apply_gradient, donate_argnums=0)


def _sum_over_mesh(gradient: Any, mesh: Mesh) -> Any:
    """Returns the sum of gradients over the devices that have parts of them."""
    leaves, treedef = jax.tree.flatten(gradient)
    cut = [TENSOR in spec for spec in jax.tree.leaves(specs(gradient, mesh.shape[TENSOR]))]
    parts = [leaf for leaf, is_cut in zip(leaves, cut, strict=True) if not is_cut]
    shards = [leaf for leaf, is_cut in zip(leaves, cut, strict=True) if is_cut]
    parts = iter(_sum_in_order(parts, mesh.size, (DATA, TENSOR)))
    shards = iter(_sum_in_order(shards, mesh.shape[DATA], (DATA,)))
    return treedef.unflatten([next(shards if is_cut else parts) for is_cut in cut])


def _sum_in_order(leaves: list[jax.Array], count: int, axes: tuple[str, ...]) -> list[jax.Array]:
    """Returns the sums of arrays over the devices along some axes, added up in their order.

    Each device adds up its part of the arrays, and then all parts are gathered: as many bytes as an
    all-reduce moves. Small arrays travel together, because each of the hundreds of arrays of an
    adapter would take as long as NCCL takes to start.
    """
    if count == 1:
        return leaves
    sums: list[jax.Array] = []
    while len(sums) < len(leaves):
        sizes = np.cumsum([leaf.size for leaf in leaves[len(sums) :]])
        number = max(1, int(np.searchsorted(sizes, _TOGETHER, side="right")))
        group, sizes = leaves[len(sums) :][:number], sizes[:number]
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in group])
        parts = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
        parts = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=0)
        part_sum = functools.reduce(jnp.add, [parts[i] for i in range(count)])
        total = jax.lax.all_gather(part_sum, axes, tiled=True)[: flat.size]
        # Fused with the optimizer, hundreds of pieces of one array took XLA minutes to compile.
        pieces = jax.lax.optimization_barrier(jnp.split(total, sizes[:-1].tolist()))
        sums += [x.reshape(leaf.shape) for x, leaf in zip(pieces, group, strict=True)]
    return sums


def _is_dealt(argument: Any) -> bool:
    return isinstance(argument, PackedBuffer | Totals)


def _device_share(tree: Any) -> Any:
    """Returns a device's share of arrays [D, ...], which is [1, ...] on the device."""
    return jax.tree.map(lambda x: x[0], tree)
