"""The compiled programs of a run, which a resumed run executes again.

On a GPU the compiler measures candidates and may choose other matmul kernels the next time, which
round differently. So a run keeps its programs in its folder: the same programs give the same bits.

On a CPU they save the time of the compiler. Each kind of processor has a folder, as a program with
instructions of one does not run on another.
"""

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

from qerl_jax.compile import program_cache
from qerl_jax.errors import UserError
from qerl_jax.system.paths import cache_folder
from qerl_jax.system.processor import processor_digest


@contextlib.contextmanager
def keep_programs(
    path: Path | None, *, trusted: bool = False, writes: bool = True
) -> Generator[None]:
    """Keeps compiled programs in a folder while the block runs.

    On a CPU that is the folder of its processor inside, `cpu-DIGEST`; nothing is kept where JAX has
    a cache of its own, or where the features of the processor are unknown. The runs of a sweep
    share those in its folder. Programs in JAX's cache are executed and copied to the folder, and
    new ones go to both, see `program_cache`.

    Args:
        path: folder of the programs; made if missing. None keeps none.
        trusted: whether programs that this user has not signed are executed.
        writes: whether this process replaces programs in the folder. Of several processes of a run
            one does; the others add what is missing.
    """
    common, shared = _common_folder(), _shared_folder()
    folder = path if jax.default_backend() == "gpu" else None
    if path is not None and jax.default_backend() == "cpu" and common is None:
        # The runs of a sweep share their programs instead.
        folder, shared = (None, _of_processor(shared)) if shared else (_of_processor(path), None)
    used = common or folder or shared
    if used is None or (folder is None and common is not None):
        yield
        return
    # XLA would write files of its own into the folder, which have no signature.
    no_files = {} if common else {"jax_persistent_cache_enable_xla_caches": ""}
    with (
        set_cache_folder(used, **no_files),
        program_cache.install(
            folder, common=common, trusted=trusted, replaces=writes, shared=shared
        ),
    ):
        yield


def user_folder() -> Path | None:
    """Returns the folder of the compiled programs that do not belong to a run.

    Returns:
        The folder; None without a home folder, after a warning.
    """
    try:
        return cache_folder("programs")
    except UserError as error:
        print(f"warning: compiled programs are not kept: {error}", file=sys.stderr, flush=True)
        return None


def _of_processor(folder: Path) -> Path | None:
    """Returns the part of a folder that is for this processor; None where it is unknown."""
    digest = processor_digest()
    return folder / f"{program_cache.OF_PROCESSOR}{digest}" if digest else None


def _common_folder() -> Path | None:
    """Returns the folder of JAX's cache; None without one that can be used as a folder."""
    common = jax.config.jax_compilation_cache_dir
    if not common or "://" in common:
        return None
    try:
        Path(common).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        program_cache.warn_not_kept(Path(common), error)
        return None
    return Path(common)


def _shared_folder() -> Path | None:
    """Returns the folder of programs that the runs of a sweep share, or None."""
    shared = os.environ.get(program_cache.SHARED, "")
    return Path(shared) if os.path.isabs(shared) else None


def set_cache_folder(path: Path, **settings: Any) -> contextlib.AbstractContextManager[None]:
    """Makes a folder JAX's cache of compiled programs, with settings of JAX, while a block runs.

    Programs that compile in less than JAX's default of one second are cached too.
    """
    settings |= {"jax_persistent_cache_min_compile_time_secs": 0.0}
    return program_cache.jax_settings(jax_compilation_cache_dir=str(path.resolve()), **settings)
