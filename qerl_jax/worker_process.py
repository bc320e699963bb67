"""Processes that run a module of this package for the one that starts them.

They read what they are told from a pipe, answer through another, and end when the first is closed,
as it is when the process that started them has ended.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def module_command(name: str) -> tuple[str, ...]:
    """The command that runs a module, of those that `start` lets it import."""
    # -P: not what the working directory has by the name, but what this process imports.
    return sys.executable, "-P", "-m", name


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that imports what this one does, with pipes to and from it.

    Args:
        command: of `module_command`.
        options: of `subprocess.Popen`; the variables in `env` are added to those of this process.

    Raises:
        OSError: it cannot be started.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path} | options.pop("env", {}),
        start_new_session=True,  # Ctrl-C is for this process, which ends the other when it is due.
        **options,
    )
