"""Paths that a user gives, on the command line or in a config."""

import os
import pathlib

from qerl_jax.errors import UserError


def user_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path with `~` and `~name` at its start expanded to a home folder.

    A shell expands `~` only at the start of a word, so that `--workdir=~/run` arrives as it is.

    Raises:
        UserError: the home folder is unknown.
    """
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{path}: the home folder of {pathlib.Path(path).parts[0]!r} is unknown; write the "
            f"path in full, or ./{path} for a folder of this name"
        ) from error
