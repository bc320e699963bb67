"""The mesh of devices of a run, and which arrays lie where on it.

A run on one device has no mesh. On a mesh the rows of a step are dealt out along the axis `data`,
and weights are cut along the axis `tensor`: the devices of a row of the mesh are a group that holds
the policy, the trained parameters and the state of the optimizer together, and every group has all
of them.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qerl_jax.errors import UserError
from qerl_jax.policy.collectives import TENSOR
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.quant import in_machine_order
from qerl_jax.policy.tensor_parallel import cut, shard_of

DATA = "data"  # the axis of a mesh that rows are dealt out along; TENSOR is the other one

WHOLE, ROWS, COLUMNS, HEADS = P(), P(TENSOR), P(None, TENSOR), P(None, TENSOR)


def _rules() -> Iterator[tuple[str, P]]:
    """Yields how arrays are cut along `tensor`, by the end of their path in a tree.

    LoRA's A and B are "a" and "b" as they are trained, in the state of the optimizer too, and 0 and
    1 as a rollout fuses them.
    """
    yield r"embed_tokens|lm_head(/packed|/scales|/global_scale|/tiles/\w+)?", ROWS
    for weight in kinds.WEIGHTS.values():
        name, members = weight.name, "|".join(weight.members)
        if weight.by_rows:
            yield rf"{name}(/packed|/scales|/global_scale|/tiles/\w+|/1)?", ROWS
            yield rf"{name}/0|({members})/a", WHOLE
            yield from ((f"{member}/b", WHOLE) for member, _ in weight.stacked)
            yield rf"({members})/b", ROWS
        else:
            yield rf"({name}|{members})(/packed|/scales|/tiles/codes|/tiles/scales|/a|/0)?", COLUMNS
            yield rf"({name}|{members})/(global_scale|tiles/divisor|b|1)", WHOLE
    for name, array in kinds.ARRAYS.items():
        yield name, ROWS if array.by_rows else WHOLE
    for mixer in kinds.MIXERS:  # what rows keep
        yield "|".join(field.name for field in dataclasses.fields(mixer.KEPT)), HEADS
    yield r"norm|(input|post_attention)_layernorm", WHOLE
    # of a rollout
    yield r"lengths|rows|counts|last|ended|limits|logits|slots|active|positions", WHOLE
    yield r"key|sigma|count|skipped_in_a_row", WHOLE  # of the noise and of the optimizer


_RULES = tuple(_rules())


def check_mesh(data: int, *, prompts: int) -> None:
    """Checks what needs no device and no architecture.

    Args:
        data: number of groups of devices that the rows of a step are dealt out to.
        prompts: prompts of a step.

    Raises:
        UserError: the prompts cannot be dealt out equally.
    """
    if prompts % data:
        raise UserError(
            f"rollout.prompts_per_step={prompts} is not divisible by mesh.data={data}: every "
            f"group takes the same number of prompts, pass {-(-prompts // data) * data}"
        )


def make_mesh(data: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Returns the mesh of a run, or None for a run on the first device alone.

    Args:
        data: number of groups of devices that the rows of a step are dealt out to.
        tensor: number of devices of a group, between which weights are cut.
        devices: the devices; by default all devices of the process.

    Raises:
        UserError: the mesh has another number of devices than there are, or devices of several
            processes would hold a policy together.
    """
    if data * tensor == 1:
        return None
    all_devices = jax.devices() if devices is None else devices
    number = len(all_devices)
    if data * tensor != number:
        remedy = f"pass mesh.data={number}"
        if tensor > 1:
            remedy = f"pass two numbers whose product is {number}"
        count = len({device.process_index for device in all_devices})
        owner = f"the {count} processes have" if count > 1 else "this process has"
        raise UserError(
            f"mesh.data={data} x mesh.tensor={tensor} are {data * tensor} devices, and {owner} "
            f"{number}: {remedy}{_remedy_for_fewer(data * tensor, number, count)}"
        )
    grid = np.array(all_devices).reshape(data, tensor)
    if any(len({device.process_index for device in group}) > 1 for group in grid):
        local = number // len({device.process_index for device in all_devices})
        raise UserError(
            f"mesh.tensor={tensor} does not divide the {local} devices of each process: the "
            f"devices of a group belong to one process, pass a divisor of {local}"
        )
    return Mesh(grid, (DATA, TENSOR))


def _remedy_for_fewer(mesh_devices: int, all_devices: int, processes: int) -> str:
    """Returns the end of a sentence that says how a run gets fewer devices, '' if it cannot.

    There are `all_devices` in all `processes` together.
    """
    if mesh_devices > all_devices:
        return ""
    if processes == 1:
        visible = ",".join(map(str, range(mesh_devices)))
        return f", or show it fewer devices, such as CUDA_VISIBLE_DEVICES={visible}"
    per_process = all_devices // processes
    if mesh_devices % per_process == 0:
        count = mesh_devices // per_process
        return f", or start {count} process{'es' if count > 1 else ''} instead of {processes}"
    if mesh_devices % processes == 0:
        return f", or show each process {mesh_devices // processes} of its {per_process} devices"
    return ""


def specs(tree: Any, tensor: int) -> Any:
    """Returns how the arrays of a tree are cut along `tensor`, by the rules for their paths.

    Args:
        tree: a tree of arrays, such as parameters, adapter, state of the optimizer or cache. An
            array without a name lies whole on every device.
        tensor: number of devices that weights are cut into; nothing is cut for 1.

    Raises:
        ValueError: there is no rule for an array.
    """

    def spec(path: tuple, _: Any) -> P:
        if tensor == 1 or all(isinstance(key, jax.tree_util.SequenceKey) for key in path):
            return WHOLE
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        matches = (spec for rule, spec in _RULES if re.search(rf"(^|/)({rule})$", name))
        if (first := next(matches, None)) is None:
            raise ValueError(f"no rule says how {name} is cut into mesh.tensor={tensor} parts")
        return first

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each array of a tree on a mesh, by the same rules."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, mesh.shape[TENSOR]))


def on_mesh(
    function: Callable[..., Any],
    mesh: Mesh,
    *,
    out_specs: Callable[..., Any],
    in_specs: Callable[..., tuple] | None = None,
    static: tuple[str, ...] = (),
    donated: int | tuple[()] = (),
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Returns a jitted function that runs on every device of a mesh, on its shards.

    Args:
        function: function of the shards of one device. The program has its name.
        mesh: devices that hold the arguments together.
        out_specs: function from the arguments, static ones included, to the specs of the results.
        in_specs: the same for the specs of the arguments that are not static; by default they
            follow from the rules for the paths of arrays.
        static: names of the static arguments, which are passed by name.
        donated: number of the argument that is donated, or () for none.
        compiler_options: options of XLA.
    """

    def program(*arguments: Any, **options: Any) -> Any:
        if in_specs is None:
            argument_specs = tuple(specs(argument, mesh.shape[TENSOR]) for argument in arguments)
        else:
            argument_specs = in_specs(*arguments, **options)
        return jax.shard_map(
            functools.partial(function, **options),
            mesh=mesh,
            in_specs=argument_specs,
            out_specs=out_specs(*arguments, **options),
            check_vma=False,
        )(*arguments)

    program.__name__ = getattr(function, "__name__", "program")
    return jax.jit(
        program,
        static_argnames=static,
        donate_argnums=donated,
        compiler_options=compiler_options,
    )


def abstract_on(tree: Any, mesh: Mesh) -> Any:
    """Returns the shapes of a tree of arrays, or of shapes, with their shardings on a mesh."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings(tree, mesh),
    )


def shard(tree: Any, mesh: Mesh | None) -> Any:
    """Returns a tree whose arrays lie on a mesh by the rules; without a mesh, on the first device.

    Fused weights are cut by `shard_params`, which interleaves their rows; here they must lie on
    the mesh already. The copy on a device that already holds an array is that array itself. An
    array that occurs twice in the tree is copied once.
    """
    if mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    leaves, treedef = jax.tree.flatten(tree)
    targets = jax.tree.leaves(shardings(tree, mesh))
    copies = {
        id(leaf): put_on(leaf, target)
        for leaf, target in {id(x): (x, t) for x, t in zip(leaves, targets, strict=True)}.values()
    }
    return jax.tree.unflatten(treedef, [copies[id(leaf)] for leaf in leaves])


def put_on(array: Any, target: NamedSharding) -> jax.Array:
    """Returns an array on the devices of a sharding, those of other processes included.

    Args:
        array: the whole array, which is the same in every process, or an array that has the
            sharding already.
        target: the sharding.
    """
    if target.is_fully_addressable:
        return jax.device_put(array, target)
    if isinstance(array, jax.Array) and array.sharding == target:
        return array
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = array.addressable_data(0)  # It is replicated.
    whole = target.is_fully_replicated
    indices = target.addressable_devices_indices_map(array.shape)
    parts = [jax.device_put(array if whole else array[i], d) for d, i in indices.items()]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


def shard_params(arrays: dict, config: ModelConfig, *, mesh: Mesh | None) -> dict:
    """Returns arrays of one layer, or some outside of the layers, in the order of this machine.

    Args:
        arrays: arrays by name, packed weights in the order of checkpoints; on any device.
        config: the architecture of the whole policy.
        mesh: mesh of the run. If it cuts weights, the arrays are cut and brought to its devices;
            else they stay where they are.
    """
    if mesh is None or mesh.shape[TENSOR] == 1:
        return in_machine_order(arrays)
    shards = mesh.shape[TENSOR]
    parts = [
        dict(zip(arrays, part, strict=True))
        for part in zip(*(cut(*item, config, shards) for item in arrays.items()), strict=True)
    ]

    def join(spec: P, *shard: jax.Array) -> jax.Array:
        """Returns the array on the mesh from its shards, which lie on one device."""
        shape = list(shard[0].shape)
        for axis, name in enumerate(spec):
            shape[axis] *= shards if name == TENSOR else 1
        local = [
            jax.device_put(shard[number], mesh.devices[row, number])
            for row, number in np.ndindex(*mesh.devices.shape)
            if mesh.devices[row, number].process_index == jax.process_index()
        ]
        target = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), target, local)

    return jax.tree.map(join, specs(parts[0], shards), *parts)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays [D, ...] with one entry for each of the D shares of `data`."""
    return NamedSharding(mesh, P(DATA))


def head_sharding(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Returns the sharding of what rows keep where other arrays have `sharding`."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape[TENSOR] == 1:
        return sharding
    return NamedSharding(sharding.mesh, HEADS)


def replicate_like(tree: Any, params: dict) -> Any:
    """Returns a tree on the devices of a policy, replicated if its weights are cut."""
    mesh = mesh_of(params)
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, WHOLE))


def shard_config(config: ModelConfig, params: dict) -> ModelConfig:
    """Returns the architecture that each device of a policy computes."""
    mesh = mesh_of(params)
    return config if mesh is None else shard_of(config, mesh.shape[TENSOR])


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh on which a tree of arrays, or of their shapes, is cut; None if it is not."""
    sharding = next(x.sharding for x in jax.tree.leaves(tree) if hasattr(x, "sharding"))
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape.get(TENSOR, 1) == 1:
        return None
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def groups_of(tree: Any) -> list[tuple[jax.Device, ...]]:
    """Returns the groups of devices of this process that each hold all of a tree, in order."""
    sharding = next(x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    if not isinstance(sharding, NamedSharding):
        return [tuple(sharding.device_set)]
    process = jax.process_index()
    return [tuple(row) for row in sharding.mesh.devices if row[0].process_index == process]


def take_group(tree: Any, group: Sequence[jax.Device]) -> Any:
    """Returns a tree as one group of devices holds it. Nothing is copied that the group has.

    A group of several devices is a mesh of its own, on which other arrays are replicated.
    """
    devices = set(group)
    mesh = Mesh(np.array(group).reshape(1, -1), (DATA, TENSOR))

    def local(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.devices() == devices:
            return leaf
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        if len(group) == 1:
            whole = leaf.is_fully_replicated and shards.get(group[0])
            return whole if isinstance(whole, jax.Array) else jax.device_put(leaf, group[0])
        if not devices <= shards.keys():
            return jax.device_put(leaf, NamedSharding(mesh, WHOLE))
        assert isinstance(leaf.sharding, NamedSharding)
        target = NamedSharding(mesh, leaf.sharding.spec)
        return jax.make_array_from_single_device_arrays(
            leaf.shape, target, [shards[device] for device in group]
        )

    return jax.tree.map(local, tree)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that the first device has of a tree of arrays."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
