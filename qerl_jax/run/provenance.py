"""Where results come from: versions, commit, device and command line."""

import importlib.metadata
import platform
import re
import shlex
import sys
import time
from typing import Any

from pallas_kernels.provenance import git_state
from qerl_jax.system.processor import describe_processor

_PACKAGES = ("qerl-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def provenance() -> dict[str, Any]:
    """Versions, commit, device, command line and time, as a JSON object."""
    import jax

    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    return {
        "versions": versions(),
        "git": git_state(),
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            **(describe_processor() if on_cpu else {}),
            **({"processes": jax.process_count()} if jax.process_count() > 1 else {}),
        },
        "command": shlex.join(sys.orig_argv),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that results depend on; None where missing."""
    return {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES}


def without_folders(text: str) -> str:
    """`text` with absolute paths cut to their last part: results are published without folders."""
    text = text.replace("file:///", "/")
    return re.sub(r"(?<![\w./])/(?:[^\s/\"]+/)+", "", text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
