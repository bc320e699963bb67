"""Where compiled programs are kept."""

import contextlib
from collections.abc import Generator
from pathlib import Path

import jax
from jax._src.compilation_cache import decompress_executable
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def programs_in(path: Path) -> Generator[None]:
    """On a GPU, keeps the compiled programs in a folder while the block runs.

    A resumed run must execute the very programs it was begun with: compiling again can choose
    other matmul kernels, which round otherwise. The folder begins with what JAX's cache has, and
    JAX's cache gets what is new, by links: where they cannot be, each keeps its own.
    """
    if jax.default_backend() != "gpu":
        yield
        return
    _remove_torn(path)
    common = jax.config.jax_compilation_cache_dir
    if not common or "://" in common:
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
    """Links the files of a folder into another one, but those that it has; unfinished ones not."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        if source.stat().st_dev != target.stat().st_dev:
            return  # Nothing can be linked, so all that is there need not be read.
    except OSError:  # One of them cannot be there.
        return
    _remove_torn(source)
    for file in source.glob("*"):
        if file.is_file() and not file.suffix:
            with contextlib.suppress(OSError):  # It is there, or links are not possible.
                (target / file.name).hardlink_to(file)


def _remove_torn(folder: Path) -> None:
    """Removes programs of JAX's cache that a killed process, or a full disk, left unfinished.

    JAX would compile them again each time, and never write them anew. What is linked was looked at.
    """
    for file in folder.glob("*-cache"):
        with contextlib.suppress(OSError):
            if file.stat().st_nlink == 1 and _is_torn(file):
                file.unlink()


def _is_torn(file: Path) -> bool:
    content = file.read_bytes()
    try:
        decompress_executable(content)
    except Exception:  # of one of the packages that it may have been compressed by
        return True
    return False


@contextlib.contextmanager
def cached_in(path: Path) -> Generator[None]:
    """Makes a folder JAX's cache of compiled programs while the block runs, the small ones too."""
    settings = {
        "jax_compilation_cache_dir": str(path.resolve()),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # The cache otherwise stays where it was first opened.
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
