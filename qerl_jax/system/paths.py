"""Paths that a user gives, on the command line or in a config, and the user's cache."""

import errno
import os
import pathlib

from qerl_jax.errors import UserError


def user_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path with `~` and `~name` at its start expanded to a home folder.

    A shell expands `~` only at the start of a word, so that `--workdir=~/run` arrives as it is.

    Raises:
        UserError: the home folder is unknown, or no file system has such a path.
    """
    try:
        found = pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{path}: the home folder of {pathlib.Path(path).parts[0]!r} is unknown; write the "
            f"path in full, or ./{path} for a folder of this name"
        ) from error
    try:
        os.lstat(found)
    except (ValueError, OSError) as error:
        # Most functions of pathlib raise these, instead of saying that there is no such file.
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{str(path)!r:.200} cannot be a path: pass another one") from error
    return found


def cache_folder(name: str) -> pathlib.Path:
    """Returns a folder of the user's cache, `$XDG_CACHE_HOME/qerl_jax/NAME`; it may be missing."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home, "qerl_jax", name)
