"""Bytecode that all processes of test sessions share, also where the environment forbids it.

A container may set PYTHONDONTWRITEBYTECODE. Each process that a test starts would then compile the
sources of everything it imports, which is about half of the time that a short command takes.
"""

import os
import pathlib
import sys

if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# For a process that inherits nothing else.
ENVIRONMENT = {n: v for n, v in os.environ.items() if n == "PYTHONPYCACHEPREFIX"}
