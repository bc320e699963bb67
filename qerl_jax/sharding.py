"""The mesh of devices of a run, and which arrays lie where on it.

A run on one device has no mesh. On a mesh every device holds the policy, the trained parameters and
the state of the optimizer; the rows of a step are dealt out along the axis `data`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qerl_jax.errors import UserError

DATA, TENSOR = "data", "tensor"  # the axes of a mesh


def check_mesh(data: int, tensor: int, *, prompts: int) -> None:
    """Checks what needs no device.

    Args:
        data: number of devices that the rows of a step are dealt out to.
        tensor: number of devices that a weight is cut into.
        prompts: prompts of a step.

    Raises:
        UserError: weights would be cut, or the prompts cannot be dealt out equally.
    """
    if tensor > 1:
        raise UserError(
            f"mesh.tensor={tensor}: weights are not cut between devices yet, pass mesh.tensor=1 "
            f"and, to deal out the rows of a step, mesh.data={data * tensor}"
        )
    if prompts % data:
        raise UserError(
            f"rollout.prompts_per_step={prompts} is not divisible by mesh.data={data}: every "
            f"device takes the same number of prompts, pass {-(-prompts // data) * data}"
        )


def make_mesh(data: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Returns the mesh of a run, or None for a run on the first device alone.

    Args:
        data: number of devices that the rows of a step are dealt out to.
        tensor: number of devices that a weight is cut into.
        devices: the devices; by default those of all processes.

    Raises:
        UserError: the mesh has another number of devices than there are.
    """
    if data * tensor == 1:
        return None
    found = jax.devices() if devices is None else devices
    if data * tensor != len(found):
        processes = len({device.process_index for device in found})
        visible = ",".join(map(str, range(data * tensor)))
        fewer = f", or show it fewer devices, such as CUDA_VISIBLE_DEVICES={visible}"
        raise UserError(
            f"mesh.data={data} x mesh.tensor={tensor} are {data * tensor} devices, and "
            f"{f'the {processes} processes have' if processes > 1 else 'this process has'} "
            f"{len(found)}: pass mesh.data={len(found)}"
            f"{fewer if len(found) > data * tensor else ''}"
        )
    return Mesh(np.array(found).reshape(data, tensor), (DATA, TENSOR))


def replicated(tree: Any, mesh: Mesh | None) -> Any:
    """Returns a tree whose arrays lie whole on every device; without a mesh, on the first one.

    The copy on a device that already holds an array is that array itself. An array that occurs
    twice in the tree is copied once.
    """
    if mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    leaves, treedef = jax.tree.flatten(tree)
    target = NamedSharding(mesh, PartitionSpec())
    copies = {id(leaf): put(leaf, target) for leaf in {id(x): x for x in leaves}.values()}
    return jax.tree.unflatten(treedef, [copies[id(leaf)] for leaf in leaves])


def put(array: Any, target: NamedSharding) -> jax.Array:
    """Returns an array on the devices of a sharding, those of other processes included.

    Args:
        array: the whole array, which is the same in every process.
        target: the sharding.
    """
    if target.is_fully_addressable:
        return jax.device_put(array, target)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = array.addressable_data(0)  # It is replicated.
    whole = target.is_fully_replicated
    places = target.addressable_devices_indices_map(array.shape)
    parts = [jax.device_put(array if whole else array[i], one) for one, i in places.items()]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


def dealt(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays [D, ...] with one entry for each of the D shares of `data`."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def devices_of(tree: Any) -> list[jax.Device]:
    """Returns the devices of this process that hold a tree of replicated arrays, in order."""
    array = next(leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return [shard.device for shard in array.addressable_shards]


def on_device(tree: Any, device: jax.Device) -> Any:
    """Returns a tree as one device holds it. Nothing is copied where the device has the array."""

    def local(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.devices() == {device}:
            return leaf
        for shard in leaf.addressable_shards if leaf.is_fully_replicated else ():
            if shard.device == device:
                return shard.data
        return jax.device_put(leaf, device)

    return jax.tree.map(local, tree)
