"""Fixtures that several test files use."""

import contextlib
import os

import jax
import pytest
import tiny_run

from qerl_jax.run.compilation_cache import cached_in


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """A folder for compiled programs that all modules and workers of a session share."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compile_cache"


@pytest.fixture(autouse=True, scope="module")
def programs(request, compile_cache):
    """On a CPU, compiles each program once per session, with few optimizations.

    Most programs run once or twice. The programs of a module are freed after it: each program holds
    memory maps, whose number per process is limited.
    """
    # Asking for the backend loads CUDA's plugin, which `h200.compiler` must configure before.
    quick = not request.node.get_closest_marker("aot") and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", quick)
    with cached_in(compile_cache) if quick else contextlib.nullcontext():
        yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, compile_cache):
    """A tiny model and problems; the processes of runs share the cache of compiled programs."""
    return tiny_run.write_tiny(tmp_path_factory.mktemp("tiny"), compile_cache)
