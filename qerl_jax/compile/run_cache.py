"""The compiled programs of a run, which a resumed run executes again, and later runs as well.

On a GPU the compiler measures candidates and may choose other matmul kernels the next time, which
round differently. So a run keeps its programs in its folder: the same programs give the same bits.

The programs of all runs are in the cache of the user, or in that of JAX, and save the time of the
compiler. On a CPU each kind of processor has a folder, as a program with instructions of one does
not run on another.
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

_LIMIT = 10**10  # bytes of programs in the cache of the user, for each kind of processor


@contextlib.contextmanager
def keep_programs(
    path: Path | None = None, *, trusted: bool = False, writes: bool = True
) -> Generator[None]:
    """Keeps compiled programs while the block runs, those of a run in its folder, too.

    All programs are in JAX's cache where that is a folder. Elsewhere they are in the folder of a
    sweep, for its runs, or in the cache of the user. A program from there is copied to the folder
    of the run, and a new one goes to both, see `program_cache`. A CPU without a cache of JAX has a
    folder for its processor, `cpu-DIGEST`, in that of the sweep or the user, and none for the run;
    nothing is kept where the features of the processor are unknown, nor by several processes
    outside of a sweep. In the cache of the user the 10 GB of programs that were used last stay.

    Args:
        path: folder of the programs of a run; made if missing. None where there is no run.
        trusted: whether programs in it that this user has not signed are executed.
        writes: whether this process replaces programs in it. Of several processes of a run one
            does; the others add what is missing.
    """
    common, shared = _common_folder(), _sweep_folder()
    # Processes of one run would begin with other programs where they have caches of their own.
    of_user = common is None and shared is None and jax.process_count() == 1
    if of_user:
        shared = _user_folder()
    folder = path if jax.default_backend() == "gpu" else None
    if shared is not None and jax.default_backend() == "cpu":
        shared = _of_processor(shared)
    if of_user and shared is not None:
        program_cache.remove_oldest(shared, limit=_LIMIT)
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


def _user_folder() -> Path | None:
    """Returns the folder of programs in the cache of the user; None without a home folder.

    Programs are not written through a link. The user may have made the folder one, such as to a
    larger disk, so its target is returned.
    """
    try:
        return cache_folder("programs").resolve()
    except UserError as error:
        print(
            f"warning: compiled programs are not kept for later runs: {error}",
            file=sys.stderr,
            flush=True,
        )
        return None


def _of_processor(folder: Path) -> Path | None:
    """Returns the part of a folder that is for this processor; None where it is unknown."""
    digest = processor_digest()
    return folder / f"cpu-{digest}" if digest else None


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


def _sweep_folder() -> Path | None:
    """Returns the folder of programs that the runs of a sweep share, or None."""
    shared = os.environ.get(program_cache.SHARED, "")
    return Path(shared) if os.path.isabs(shared) else None


def set_cache_folder(path: Path, **settings: Any) -> contextlib.AbstractContextManager[None]:
    """Makes a folder JAX's cache of compiled programs, with settings of JAX, while a block runs.

    Programs that compile in less than JAX's default of one second are cached too.
    """
    settings |= {"jax_persistent_cache_min_compile_time_secs": 0.0}
    return program_cache.jax_settings(jax_compilation_cache_dir=str(path.resolve()), **settings)
