"""The commit of the source tree, which results name."""

import os
import pathlib
import subprocess
from typing import Any

_SOURCE_ROOT = pathlib.Path(__file__).resolve().parents[1]


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


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(_SOURCE_ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return result.stdout.strip()
