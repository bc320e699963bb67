"""Compiled programs in two folders: that of a run, and the common one of JAX's cache.

A program is code: to load one is to execute what the writer of its file chose. In the folder of a
run, which may come from another person, each file begins with a signature of its name and content
by the user's key, and a file without a valid one is not read. So are serialized executables in the
common folder. JAX's own entries are there as JAX writes them.

A program that this process compiles is written to both folders, and one from the common folder is
copied to that of the run, which executes it again when it resumes. A program from the folder of a
run is not copied. Files appear whole, by a rename.

All runs of the user share a third folder, in the user's cache; those of a sweep share that of the
sweep, which may come from another person as well. Each file in it has a signature, and one without
is compiled again, whatever the user trusts.
"""

import contextlib
import contextvars
import dataclasses
import os
import secrets
import socket
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from qerl_jax.system.user_key import is_signed, key_path, sign, why_no_key

_MAGIC = b"qerl-jax program 1\n"
_SIGNATURE_BYTES = 32
_SUFFIX = "-cache"  # the end of the names of JAX's entries
SHARED = "QERL_SHARED_PROGRAMS"  # variable with the folder that the runs of a sweep share
EXECUTABLE = "rollout-"  # the beginning of the names of serialized executables

# JAX installs a cache through no public function. Its public module takes `reset_cache` from the
# module that also has `get_file_cache`, the function by which JAX opens its cache after a reset.
_JAX: Any = sys.modules[compilation_cache.reset_cache.__module__]
_open_jax_cache = _JAX.get_file_cache

# What blocks that last have replaced, in the order in which they began: the values that each found.
_replaced: list[dict[str, Any]] = []


@dataclasses.dataclass(frozen=True)
class ProgramCache:
    """Where compiled programs are looked for and written; JAX uses it as its own cache."""

    folder: Path | None  # of a run
    common: Any = None  # JAX's own cache of the user, or None
    common_folder: Path | None = None  # of `common`
    trusted: bool = False  # whether programs of the run are read without a valid signature
    replaces: bool = True  # whether files of the run are replaced, and not only added
    shared: Path | None = None  # folder that runs of this user share
    _warned: set[str] = dataclasses.field(default_factory=set)  # what a warning was printed about

    @property
    def _path(self) -> Path | None:
        """The folder that JAX logs."""
        return self.folder or self.common_folder

    def get(self, key: str) -> bytes | None:
        """Returns an entry of JAX's cache, or None."""
        content = self._read_from_run(f"{key}{_SUFFIX}")
        if content is None and self.common is not None:
            content = self.common.get(key)
            if content is not None:
                self._add_to_run(f"{key}{_SUFFIX}", content)
        return self._of_shared(f"{key}{_SUFFIX}") if content is None else content

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry of JAX's cache, which this process has compiled."""
        name = f"{key}{_SUFFIX}"
        self._add_to_run(name, value)
        self._add_to_shared(name, value)
        if self.common_folder is None:
            return
        if jax.config.jax_compilation_cache_max_size != -1:
            self.common.put(key, value)  # JAX counts the sizes, and removes the oldest entries.
        else:
            # JAX's `put` writes in place, and keeps an entry that a killed process left torn.
            self._keep(self.common_folder / name, value)

    @property
    def folder_of_executables(self) -> Path | None:
        """The common folder, or else that of the run, or else the shared one."""
        return self.common_folder or self.folder or self.shared

    def has(self, name: str) -> bool:
        """Returns whether there is a file of an executable, valid or not."""
        folders = self.folder, self.common_folder, self.shared
        # `Path.is_file` raises an error in a folder of another user that cannot be searched.
        return any(f is not None and os.path.isfile(f / name) for f in folders)

    def read(self, name: str) -> bytes | None:
        """Returns an executable that this user has signed, or None."""
        content = self._read_from_run(name)
        if content is None and self.common_folder is not None:
            content, valid = _read(self.common_folder / name)
            content = content if valid else None
            if content is not None:
                self._add_to_run(name, content)
        return self._of_shared(name) if content is None else content

    def write(self, name: str, content: bytes) -> None:
        """Writes an executable, which this process has compiled."""
        self._add_to_run(name, content)
        self._add_to_shared(name, content)
        if self.common_folder is not None:
            self._keep_signed(self.common_folder / name, content)

    def _keep_signed(self, path: Path, content: bytes) -> None:
        """Writes a file with a signature; none without a key, as no process could read it."""
        if reason := why_no_key():
            self._warn(path.parent, OSError(reason))
        else:
            self._keep(path, _sign_program(path.name, content))

    def _keep(self, path: Path, content: bytes) -> None:
        """Writes a file; where that fails, a warning says so once for each folder."""
        try:
            _write(path, content)
        except OSError as error:
            self._warn(path.parent, error)

    def _warn(self, folder: Path, error: OSError) -> None:
        if str(folder) not in self._warned:
            self._warned.add(str(folder))
            warn_not_kept(folder, error)

    def _read_from_run(self, name: str) -> bytes | None:
        if self.folder is None:
            return None
        content, valid = _read(self.folder / name)
        if content is None or valid or self.trusted:
            return content
        if "foreign" not in self._warned:
            self._warned.add("foreign")
            print(
                f"{self.folder}: these compiled programs were not written by this user, by the key "
                f"{key_path() or '(which needs HOME)'}, so they are not executed but "
                "compiled again, and a GPU may then round differently; --trust executes them",
                file=sys.stderr,
                flush=True,
            )
        return None

    def _of_shared(self, name: str) -> bytes | None:
        if self.shared is None:
            return None
        content, valid = _read(self.shared / name)
        if not valid or content is None:
            return None
        with contextlib.suppress(OSError):  # A folder that is only read.
            os.utime(self.shared / name)  # `remove_oldest` goes by the time of the last use.
        self._add_to_run(name, content)
        return content

    def _add_to_shared(self, name: str, content: bytes) -> None:
        if self.shared is not None and not os.path.islink(self.shared):
            self._keep_signed(self.shared / name, content)

    def _add_to_run(self, name: str, content: bytes) -> None:
        if self.folder is None or os.path.islink(self.folder):
            return
        if not self.replaces and (self.folder / name).exists():
            return
        self._keep(self.folder / name, _sign_program(name, content))


def warn_not_kept(folder: Path, error: OSError) -> None:
    """Prints that a folder of compiled programs cannot be written."""
    print(
        f"warning: compiled programs are not kept in {folder} ({error.strerror or error}), so they "
        "are compiled again: free its disk, or choose a folder that can be written",
        file=sys.stderr,
        flush=True,
    )


_current_cache: contextvars.ContextVar[ProgramCache | None] = contextvars.ContextVar(
    "_current_cache", default=None
)


@contextlib.contextmanager
def install(
    folder: Path | None,
    *,
    common: Path | None,
    trusted: bool = False,
    replaces: bool = True,
    shared: Path | None = None,
) -> Generator[None]:
    """Makes the folder of a run and the common one JAX's cache while the block runs.

    `jax_compilation_cache_dir` must be set, as JAX has no cache without it. The arguments are those
    of `ProgramCache`, but `common` is the folder; the folder of the run is made if missing.
    """
    jax_cache = None if common is None else _open_jax_cache(str(common))[0]
    cache = ProgramCache(
        folder, jax_cache, common, trusted=trusted, replaces=replaces, shared=shared
    )
    token = _current_cache.set(cache)
    found = {"open": _JAX.get_file_cache}
    _replaced.append(found)
    _JAX.get_file_cache = lambda path: (cache, path)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        _JAX.get_file_cache = _take_out(found).get("open", _JAX.get_file_cache)
        compilation_cache.reset_cache()
        _current_cache.reset(token)


@contextlib.contextmanager
def jax_settings(**settings: Any) -> Generator[None]:
    """Gives JAX settings while the block runs; its cache is opened anew with them and after it.

    Without that the cache stays in the folder that was first opened.
    """
    found = {name: getattr(jax.config, name) for name in settings}
    _replaced.append(found)
    try:
        _set(settings)
        yield
    finally:
        _set(_take_out(found))


def _take_out(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a block that ends must restore of the values that it found.

    A block of another thread may have begun in this one and last longer: it restores what this one
    found, instead of what this one has set.
    """
    number = next(number for number, other in enumerate(_replaced) if other is found)
    later = _replaced[number + 1 :]
    del _replaced[number]
    restored = {}
    for name, value in found.items():
        heir = next((other for other in later if name in other), restored)
        heir[name] = value
    return restored


def _set(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def current() -> ProgramCache:
    """Returns the cache that `install` made, or else one of the folder that JAX has."""
    cache = _current_cache.get()
    if cache is not None:
        return cache
    common = jax.config.jax_compilation_cache_dir
    return ProgramCache(None, None, Path(common) if common and "://" not in common else None)


def remove_oldest(folder: Path, *, limit: int) -> None:
    """Removes the programs of a folder that were used longest ago, until the rest fits a limit.

    A program that another process was about to read is compiled again. Files that are not a
    program's stay, and so does what cannot be removed.

    Args:
        folder: the folder; it may be missing.
        limit: bytes that the files in it may have.
    """
    files, total = [], 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        files = [(entry.stat(), Path(entry.path)) for entry in entries if entry.is_file()]
    for about, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
        total += about.st_size
        with contextlib.suppress(OSError):
            if total > limit and _is_program(path):
                path.unlink()


def sign_entries(folder: Path) -> None:
    """Signs all programs of a folder with the key of this user.

    Raises:
        OSError: a file cannot be written.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_SUFFIX) or path.name.startswith(EXECUTABLE):
            if path.is_symlink():  # Its target is not part of what the user trusts.
                continue
            content, valid = _read(path)
            if content is not None and not valid and not path.suffix:
                _write(path, _sign_program(path.name, content))


def _sign_program(name: str, content: bytes) -> bytes:
    signature = bytes.fromhex(sign(content, f"program {name}")) or bytes(_SIGNATURE_BYTES)
    return _MAGIC + signature + content


def _is_program(path: Path) -> bool:
    """Returns whether a file begins as the programs of this module do."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _read(path: Path) -> tuple[bytes | None, bool]:
    """Returns the content of a file, None without one, and whether its signature is valid."""
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        data = b""
    if not data:
        return None, False
    begin = len(_MAGIC) + _SIGNATURE_BYTES
    content = data[begin:]
    if not data.startswith(_MAGIC) or len(data) < begin:
        return data, False
    signature = data[len(_MAGIC) : begin].hex()
    return content, is_signed(content, f"program {path.name}", signature)


def _write(path: Path, content: bytes) -> None:
    """Writes a file, which appears complete or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Containers may share the names of their hosts and processes.
    writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    unfinished = path.with_name(f"{path.name}.{writer}")
    try:
        with unfinished.open("xb") as file:
            file.write(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
