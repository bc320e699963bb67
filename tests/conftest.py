"""Fixtures that several test modules use, and the order in which modules run."""

import atexit
import contextlib
import gc
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import bytecode  # noqa: F401  First: it sets where the imports below leave bytecode.

# isort: split

import jax
import pytest
import tiny_run

from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.run import plots
from qerl_jax.system.signals import STOP_SIGNALS

# XLA's CPU compiler is faster with its older emitters of fusions, and when it does not divide a
# program into parts: the first run of the tiny model then takes 16 seconds of CPU time instead of
# 35.
QUICK_FLAGS = (
    "--xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)

# Tracing makes millions of small objects that live as long as a program. Python would look through
# all of them again and again for cycles, a tenth of the time of tests that compile.
gc.set_threshold(20_000, 20, 10)

# Processes of pytest that share a GPU take its memory as they need it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# JAX's CUDA plugin checks its libraries with a driver, once, before the first array. A module that
# makes an array while it is imported would leave the tests that compile for an H200 without it.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

# Runs are signed with a key of these tests, and never with that of the person who runs them.
if "PYTEST_XDIST_WORKER" not in os.environ:  # Workers share the key of the process of pytest.
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="qerl-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

# Tests send these signals, and under nohup or in the background of a shell some are ignored.
for number in STOP_SIGNALS:
    if signal.getsignal(number) is signal.SIG_IGN:
        is_int = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)

# No test asks a model hub; the tests of its answers replace the functions that ask.
os.environ["HF_HUB_OFFLINE"] = "1"

# Modules that run whole trainings and evaluations of the tiny model, the longest first. They run
# before all others, one after another, and in each process they use what the ones before have
# traced: with all programs in the compilation cache, a run takes 12 seconds of CPU time when it is
# traced and 3.5 when it is not. None of these modules replaces a function that is traced.
RUNS = (
    "test_resume",
    "test_train",
    "test_trainable",
    "test_user_code",
    "test_init_from",
    "test_mixture",
    "test_kl_control",
    "test_overrides",
    "test_evaluate",
    "test_export_hf",
    "test_config_reads",
    "test_errors",
    "test_readme",
    "test_pitfalls",
    "test_sweep",
    "test_sample",
    "test_foreign_folders",
    "test_twice",
)
# Other modules that take long: begun late, one of them would run alone at the end.
LONG = (
    "test_benchmark_rollout",
    "test_golden_smollm2",
    "test_processes",
    "test_decode_layer",
    "test_mesh",
    "test_decode_kernels",
    "test_fp4_kernel",
    "test_rollout_slots",
    "test_sampling",
)
# `test_decode_aot` compiles equal products, and ptxas reports on each kernel of a process once.
FIRST_FOR_AN_H200 = ("test_fp4_aot",)
# Modules that compute for longer than they compile: their programs are optimized.
COMPUTE = ("test_sampling",)
_MAPS = pathlib.Path("/proc/self/maps")
# Memory maps above which a process frees its programs; Linux allows 65,530.
_MANY_MAPS = 30_000


def compiles_quickly(config):
    """Whether programs are compiled in a hurry: in each tier but that of whole runs, `-m e2e`."""
    return config.option.markexpr != "e2e"


def pytest_configure(config):
    """Sets XLA's flags, which it reads when the first program is compiled.

    Processes that tests start inherit them. Flags of the caller come last, so that they win.
    """
    if compiles_quickly(config):
        os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
        # The lines of Python that an operation comes from are a tenth of its lowering, here and in
        # processes that tests start.
        jax.config.update("jax_traceback_in_locations_limit", 0)
        os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"


def pytest_ignore_collect(collection_path, config):
    """Leaves out the modules that compile for an H200 where no such test is asked for.

    Naming their cases chooses a tiling for each of hundreds of shapes.
    """
    if collection_path.stem.endswith("_aot") and "not aot" in config.option.markexpr:
        return True
    return None


def pytest_collection_modifyitems(items):
    """Sorts the modules: xdist's --no-loadscope-reorder leaves them so."""
    order = {name: i for i, name in enumerate((*FIRST_FOR_AN_H200, *RUNS, *LONG))}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """A folder for compiled programs that all modules and workers of a session share."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compile_cache"


@pytest.fixture(autouse=True, scope="module")
def programs(request, compile_cache):
    """On a CPU, compiles each program once per session, with few optimizations but in whole runs.

    Most programs run once or twice. The modules in `RUNS` share what they trace. Each other module
    begins without programs and frees its own: each program holds memory maps, whose number per
    process is limited.
    """
    shared = request.path.stem in RUNS
    if not shared:
        jax.clear_caches()
    # Asking for the backend loads CUDA's plugin, which `h200.compiler` must configure before.
    quick = not request.node.get_closest_marker("aot") and jax.default_backend() == "cpu"
    lazy = quick and compiles_quickly(request.config) and request.path.stem not in COMPUTE
    jax.config.update("jax_disable_most_optimizations", lazy)
    with set_cache_folder(compile_cache) if quick else contextlib.nullcontext():
        yield
    if not shared or not _MAPS.exists() or _MAPS.read_text().count("\n") > _MANY_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def sketches(request):
    """Leaves the pictures of runs empty, which were a third of the time of short runs.

    `test_plots` draws whole pictures, and so do most processes that tests start.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_plots":
            patch.setattr(plots, "_make_axes", tiny_run.sketch)
        yield


@pytest.fixture(scope="session")
def tiny(request, tmp_path_factory, compile_cache):
    """A tiny model and problems; the processes of runs share the cache of compiled programs.

    The model has one layer, which takes 0.7 of the CPU time of two. It has two in the tier of whole
    runs, and in `test_resume`.
    """
    layers = 1 if compiles_quickly(request.config) else 2
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_run.write_tiny(folder, compile_cache, num_layers=layers)


@pytest.fixture(autouse=True)
def nothing_is_compiled_after_the_first_step(monkeypatch):
    """Fails a test in which a run of this process compiles anything after its first step."""
    if (loop := sys.modules.get("qerl_jax.training.loop")) is None:
        yield
        return
    late, began = [], set()

    class Watched(loop.MetricsLog):
        def write(self, row):
            if self in began and row.get("compiled_programs"):
                late.append(row)
            if "remaining_seconds" in row:  # The row of a step that this process took.
                began.add(self)
            return super().write(row)

    monkeypatch.setattr(loop, "MetricsLog", Watched)
    yield
    assert not late


@pytest.fixture
def simulated():
    """The parameters of a simulated Hopper GPU, which searches for races."""
    from simulated_kernel import simulation

    with simulation() as parameters:
        yield parameters


@pytest.fixture
def simulated_api(simulated, monkeypatch):
    """Makes `fp4_matmul` run the simulated Hopper kernel."""
    from simulated_kernel import simulate_the_kernel

    simulate_the_kernel(monkeypatch, simulated)


@pytest.fixture(autouse=True)
def interrupts_reach_children():
    """A process inherits that SIGINT is ignored, as it is where a shell runs this in background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
