"""Where results come from: versions, commit, device and command line."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PACKAGES = ("qerl-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """Versions, commit, device, command line and time, as a JSON object."""
    import jax

    devices = jax.devices()
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "git": git_state(),
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
        },
        "command": shlex.join(sys.orig_argv),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def git_state() -> dict[str, Any] | None:
    """Commit and dirty flag of the source tree.

    Returns:
        {'commit': HASH, 'dirty': BOOL}. The environment variable QERL_COMMIT names the commit
        where the sources lie outside of git; the flag is then None. None when neither git nor
        QERL_COMMIT gives a commit.
    """
    if commit := os.environ.get("QERL_COMMIT"):
        return {"commit": commit, "dirty": None}
    if not (_SOURCE_ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def without_folders(text: str) -> str:
    """`text` with absolute paths cut to their last part: results are published without folders."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/\"]+/)+", "", text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(_SOURCE_ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return result.stdout.strip()
