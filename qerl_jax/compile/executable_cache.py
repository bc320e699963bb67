"""A persistent cache of rollout executables.

With JAX's cache of compiled programs a process does not compile, but it still traces and lowers.
This is Python's work and, with Pallas kernels in the programs, the longest part of a start: the
executable cache shortens later starts of a 7B rollout from 36 to 6 seconds. So on a GPU the
executables of a policy are also serialized, under a digest of everything that they are made from.
Loading an executable runs code from its file, so it is signed by the user's key, and no other file
is loaded (`program_cache`).
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import xla_client

from pallas_kernels import device, fp4_matmul
from qerl_jax.compile import program_cache

# Settings of JAX that concern reports and storage, not the compiled program.
_REPORTS = ("cache", "jax_log", "jax_debug_log", "jax_dump", "jax_explain", "jax_traceback")
_LIBRARIES = "jax", "nvidia-", "optax"  # the beginnings of their names


def _is_used() -> bool:
    """Returns whether executables are cached; on a CPU loading takes nearly as long as lowering."""
    return jax.default_backend() == "gpu"


def paths(
    keys: Collection[Hashable], policy: Any, *, of_any_policy: Collection[Hashable] = ()
) -> dict[Hashable, pathlib.Path]:
    """Returns the files of programs in the common folder, or else in that of the run.

    Without a folder, or across processes, it returns no files. The keys tell the programs of a
    policy apart; those `of_any_policy` tell all shapes, and files of other policies serve them.
    """
    folder = program_cache.current().folder_of_executables if _is_used() else None
    if folder is None or not jax.config.jax_enable_compilation_cache:
        return {}
    if any(d.process_index != jax.process_index() for d in devices_of(policy)):
        return {}
    policy_text, any_text = origin(policy), origin(policy, shapes=False)
    files = {}
    for key in keys:
        text = any_text if key in of_any_policy else policy_text
        digest = hashlib.sha256(f"{text} {key}".encode()).hexdigest()
        files[key] = folder / f"{program_cache.EXECUTABLE}{digest}"
    return files


def devices_of(policy: Any) -> list[jax.Device]:
    """Returns the devices of the arrays of a policy, in the order of their mesh."""
    shardings = (leaf.sharding for leaf in jax.tree.leaves(policy))
    largest = max(shardings, key=lambda sharding: len(sharding.device_set))
    if isinstance(largest, jax.sharding.NamedSharding):
        return list(largest.mesh.devices.flat)
    return list(largest.device_set)


def origin(policy: Any, *, shapes: bool = True) -> str:
    """Returns a text of everything that the programs of a policy depend on besides their keys.

    Without `shapes` they depend on where the arrays of the policy are, but not on their shapes.
    """
    leaves, treedef = jax.tree.flatten(policy)
    # A program of several devices names them; that of one device runs on any.
    devices = [d.id for d in devices_of(policy)]
    placement = devices if len(devices) > 1 else "any"
    arrays: Any = sorted({str(leaf.sharding) for leaf in leaves})
    if shapes:
        arrays = treedef, [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in _REPORTS)
    }
    kinds = [d.device_kind for d in jax.devices()]
    packed = jax.tree.leaves(policy, is_leaf=_is_packed)
    formats = {"nvfp4"} | {leaf.format for leaf in packed if _is_packed(leaf)}
    # Other policies' files serve this one unless a format of it lacks the kernel of the device.
    kernels = sorted(set(map(fp4_matmul.format_kernel, formats))), device.num_sms()
    versions = _libraries(), jax.devices()[0].client.platform_version
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{_SOURCES} {versions} {kinds} {kernels} {flags} {settings} {arrays} {placement}"


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, fp4_matmul.Fp4Tiles)


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Returns the libraries that trace, compile and run programs, with their versions.

    NVIDIA's are packages of their own, which change while jaxlib stays as it is.
    """
    installed = ((d.name or "", d.version) for d in importlib.metadata.distributions())
    return tuple(sorted({f"{n} {v}" for n, v in installed if n.startswith(_LIBRARIES)}))


def _sources() -> str:
    """Returns a digest of the sources that programs are traced from."""
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).parents[1]
    folders = [package / name for name in ("policy", "compile", "rollout", "rl", "quantization")]
    for folder in (pathlib.Path(device.__file__).parent, *folders):
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


_SOURCES = _sources()  # as imported; the files may be edited while the process runs


def jax_cache_off() -> contextlib.AbstractContextManager[None]:
    """Switches JAX's cache off while the block runs.

    It would store the same programs again, and a program loaded from it cannot be serialized.
    """
    return program_cache.jax_settings(jax_enable_compilation_cache=False)


def dumps(program: jax.stages.Compiled) -> bytes:
    """Serializes a program, which must not come from JAX's cache."""
    serialized, *treedefs = serialize_executable.serialize(program)
    trees = [jax.tree.unflatten(treedef, range(treedef.num_leaves)) for treedef in treedefs]
    return pickle.dumps((serialized, trees))


def load(content: bytes, name: str, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    """Returns a serialized program, or None where it cannot be loaded.

    Args:
        content: the serialized program, which this user has signed: to load it runs its code.
        name: name of its file.
        devices: the devices that execute it.
    """
    try:
        serialized, trees = pickle.loads(content)
        treedefs = map(jax.tree.structure, trees)
        return serialize_executable.deserialize_and_load(
            serialized, *treedefs, execution_devices=devices
        )
    except Exception as error:  # A program that the driver refuses.
        warnings.warn(f"{name}: compiling again ({error})", stacklevel=2)
        return None


def load_for_devices(
    content: bytes, compiled_for: Sequence[jax.Device], devices: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """Returns a serialized program for other devices, as many and of the same kind.

    This process compiled it or this user has signed it. The devices are an option of the
    compilation, and XLA takes other options with a compiled program: the code is the same.
    `deserialize_and_load` has no argument for them.
    """
    serialized, trees = pickle.loads(content)
    in_tree, out_tree = map(jax.tree.structure, trees)
    unpickler = _OnDevices(io.BytesIO(serialized), devices[0].client, list(devices))
    unpickler.devices_by_id = {
        source.id: target for source, target in zip(compiled_for, devices, strict=True)
    }
    unloaded, arguments, no_kwargs = unpickler.load()
    return jax.stages.Compiled(
        unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs
    )


class _OnDevices(serialize_executable._JaxPjrtUnpickler):
    """Reads a program of some devices for others."""

    def persistent_load(self, pid: tuple) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        options = xla_client.CompileOptions()
        options.num_partitions = len(self.execution_devices)
        options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([[device.id for device in self.execution_devices]])
        )
        return self.backend.deserialize_executable(
            pid[1], executable_devices=self.execution_devices, compile_options=options
        )
