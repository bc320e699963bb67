"""Executables of rollouts that one process leaves to the next.

With JAX's cache of compiled programs a process need not compile, but it traces and lowers, which is
Python's work and, with kernels of Pallas in them, the longest part of a start. So on a GPU the
executables of a policy on one device are serialised, too, and lie in the folder of that cache under
a digest of all that makes them. To load one is to run what is in it, so whoever can write to the
folder must be trusted. Nothing there is ever deleted.
"""

import contextlib
import hashlib
import os
import pathlib
import pickle
import socket
import warnings
from collections.abc import Collection, Generator, Hashable
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels import device, fp4_matmul

# Settings of JAX that say what is reported or stored, not what is compiled.
_REPORTS = ("cache", "jax_log", "jax_debug_log", "jax_dump", "jax_explain", "jax_traceback")


def _keeps() -> bool:
    """On a CPU to lower takes less than a second, and to load hardly less."""
    return jax.default_backend() == "gpu"


def paths(names: Collection[Hashable], policy: Any) -> dict[Hashable, pathlib.Path]:
    """Where programs are kept; nowhere without a folder, or with a policy on several devices.

    Args:
        names: what tells the programs of a policy apart.
        policy: its arrays.
    """
    folder = jax.config.jax_compilation_cache_dir if _keeps() else None
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return {}
    if len(devices_of(policy)) > 1:
        return {}
    made_by = origin(policy)
    digests = {name: hashlib.sha256(f"{made_by} {name}".encode()).hexdigest() for name in names}
    return {name: pathlib.Path(folder, f"rollout-{digests[name]}") for name in names}


def devices_of(policy: Any) -> set[jax.Device]:
    """Where the arrays of a policy lie."""
    return {one for leaf in jax.tree.leaves(policy) for one in leaf.sharding.device_set}


def origin(policy: Any) -> str:
    """All that the programs of a policy depend on beside their names.

    Args:
        policy: its arrays, or their shapes with shardings.
    """
    leaves, treedef = jax.tree.flatten(policy)
    shapes = [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in _REPORTS)
    }
    kinds = [one.device_kind for one in jax.devices()]
    kernels = fp4_matmul.supports_device(), device.has_triton(), device.num_sms()
    versions = jax.__version__, jaxlib.__version__, jax.devices()[0].client.platform_version
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{_SOURCES} {versions} {kinds} {kernels} {flags} {settings} {treedef} {shapes}"


def _sources() -> str:
    """A digest of what programs are traced from."""
    digest = hashlib.sha256()
    rollout = pathlib.Path(__file__).parent
    for folder in (pathlib.Path(device.__file__).parent, rollout.with_name("policy"), rollout):
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


_SOURCES = _sources()  # as they are imported, not as somebody edits them while the process runs


@contextlib.contextmanager
def not_cached() -> Generator[None]:
    """JAX's cache off, which would hold the same again, and give what cannot be written anew."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def keep(compiled: jax.stages.Compiled, path: pathlib.Path) -> None:
    """Writes a program, so that its file is whole or not there."""
    program, *treedefs = serialize_executable.serialize(compiled)
    trees = [jax.tree.unflatten(treedef, range(treedef.num_leaves)) for treedef in treedefs]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = unfinished(path, os.getpid())
    try:
        written.write_bytes(pickle.dumps((program, trees)))
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def unfinished(path: pathlib.Path, pid: int) -> pathlib.Path:
    """Where a process of this host writes what is then renamed to a path."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{pid}")


def load(path: pathlib.Path, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    """A program that was kept; None where it cannot be loaded."""
    try:
        program, trees = pickle.loads(path.read_bytes())
        treedefs = map(jax.tree.structure, trees)
        return serialize_executable.deserialize_and_load(
            program, *treedefs, execution_devices=devices
        )
    except Exception as error:  # A file that is broken, or what a driver refuses.
        warnings.warn(f"{path.name}: compiling again ({error})", stacklevel=2)
        return None
