"""Paths that a user gives, on the command line or in a config, and the user's cache."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Generator

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


def home_folder() -> pathlib.Path | None:
    """Returns the home folder; None without HOME and an entry of the user in the system."""
    with contextlib.suppress(RuntimeError):
        return pathlib.Path.home()
    return None


def cache_folder(name: str) -> pathlib.Path:
    """Returns a folder of the user's cache, `$XDG_CACHE_HOME/qerl_jax/NAME`; it may be missing.

    Raises:
        UserError: the home folder is unknown.
    """
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(cache, "qerl_jax", name)
    if (home := home_folder()) is None:
        raise UserError(
            f"the cache has no folder: HOME is not set, and the user with the number {os.geteuid()}"
            " has no home folder; set XDG_CACHE_HOME to a folder"
        )
    return home / ".cache" / "qerl_jax" / name


@contextlib.contextmanager
def needs_cache(folder: pathlib.Path, remedy: str) -> Generator[None]:
    """Refuses a folder of the cache that the block cannot use, and says what works without it.

    Raises:
        UserError: the block raised an OSError, such as of a full disk.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror}; set XDG_CACHE_HOME to another folder, "
            f"or {remedy}"
        ) from error
