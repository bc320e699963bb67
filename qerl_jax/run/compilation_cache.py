"""The compiled programs of a run, which a resumed run executes again.

On a GPU the compiler measures candidates and may choose other matmul kernels the next time, which
round differently. So a run keeps its programs in its folder: the same programs give the same bits.
"""

import contextlib
import sys
import time
import zlib
from collections.abc import Generator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_SECONDS_OF_A_WRITE = 5.0  # less than a killed run needs to get here again
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def programs_in(path: Path, *, writes: bool = True) -> Generator[None]:
    """On a GPU, keeps compiled programs in a folder while the block runs.

    The folder starts with the programs of JAX's cache, and JAX's cache receives the new programs
    when the block ends. The files are hard links; where links are impossible, nothing is shared.

    Args:
        path: folder of the programs; made if missing.
        writes: whether this process keeps the folder in order. Of several processes of a run one
            does; JAX writes the programs of that one too.
    """
    if jax.default_backend() != "gpu":
        yield
        return
    if writes:
        _remove_torn(path)
    common = jax.config.jax_compilation_cache_dir
    if not writes or not common or "://" in common:
        with cached_in(path):
            yield
        return
    _link_files(Path(common), path)
    try:
        with cached_in(path):
            yield
    finally:
        _link_files(path, Path(common))


def _link_files(source: Path, target: Path) -> None:
    """Links the complete files of a folder into another one that lacks them."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        if source.stat().st_dev != target.stat().st_dev:
            return  # Links are impossible, so no file needs to be read.
    except OSError:  # One of the folders cannot be made.
        return
    written = _remove_torn(source)
    for file in source.glob("*"):
        # Files with a suffix are being written, too.
        if file.is_file() and not file.suffix and file.name not in written:
            with contextlib.suppress(OSError):  # The file exists, or links are impossible.
                (target / file.name).hardlink_to(file)


def _remove_torn(folder: Path) -> set[str]:
    """Removes entries of JAX's cache that a killed process or a full disk left incomplete.

    JAX writes an entry in place. When it cannot read one, it warns and compiles, but it never
    replaces an entry that exists: each process would compile the program again, perhaps with other
    kernels. A file with two links was complete when it was linked and is not read again.

    Returns:
        The names of incomplete entries that have just changed: another process may be writing
        them, such as an evaluation beside its run.
    """
    written = set()
    for file in folder.glob("*-cache"):
        with contextlib.suppress(OSError):
            if file.stat().st_nlink == 1 and _is_torn(file.read_bytes()):
                if time.time() - file.stat().st_mtime < _SECONDS_OF_A_WRITE:
                    written.add(file.name)
                else:
                    file.unlink()
    return written


def _is_torn(entry: bytes) -> bool:
    try:
        _decompress(entry)
    except Exception:  # Each of the compressors has an exception class of its own.
        return True
    return False


def _decompress(entry: bytes) -> bytes:
    """Decompresses an entry of JAX's cache: zstd where Python or a package has it, else zlib."""
    if not entry.startswith(_ZSTD_MAGIC):
        return zlib.decompress(entry)
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.decompress(entry)
    import zstandard  # pyrefly: ignore[missing-import]

    return zstandard.ZstdDecompressor().decompress(entry)


@contextlib.contextmanager
def cached_in(path: Path) -> Generator[None]:
    """Makes a folder JAX's cache of compiled programs while the block runs.

    Programs that compile in less than JAX's default of one second are cached too.
    """
    settings = {
        "jax_compilation_cache_dir": str(path.resolve()),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # Without a reset the cache stays in the folder that was first opened.
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
