"""Fixtures of several test files."""

import contextlib
import os

import jax
import pytest
import tiny_run

from qerl_jax.run.compilation_cache import cached_in


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """A folder for compiled programs, which all modules and workers of a session share."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compile_cache"


@pytest.fixture(autouse=True, scope="module")
def programs(request, compile_cache):
    """On a CPU, compiles a program once a session, and quickly, as most run once or twice.

    Frees the programs of a module: each holds memory maps, of which a process has so many.
    """
    # Who asks for the backend loads CUDA's plugin: `h200.compiler` first tells it what it lacks.
    quick = not request.node.get_closest_marker("aot") and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", quick)
    with cached_in(compile_cache) if quick else contextlib.nullcontext():
        yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, compile_cache):
    """A tiny model and problems; processes of its runs share the cache of compiled programs."""
    return tiny_run.write_tiny(tmp_path_factory.mktemp("tiny"), compile_cache)
