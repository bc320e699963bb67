"""The executable cache: programs of rollouts that one process compiles and the next one loads."""

import contextlib
import errno
import functools
import importlib.metadata
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_rollout import compiled, policy, rollout

from pallas_kernels.fp4_matmul import dispatch, self_test
from qerl_jax.compile import executable_cache, program_cache, run_cache
from qerl_jax.compile.run_cache import keep_programs, set_cache_folder
from qerl_jax.system import processor, user_key


def as_if_on_a_gpu(patch):
    patch.setattr(executable_cache, "_is_used", lambda: True)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    as_if_on_a_gpu(monkeypatch)


@pytest.fixture(scope="module")
def programs_of_a_process(tmp_path_factory):
    """Returns a function that gives the folder in which a process has left its programs."""

    @functools.cache
    def folder(quantized):
        path = tmp_path_factory.mktemp("programs")
        with pytest.MonkeyPatch.context() as patch:
            as_if_on_a_gpu(patch)
            compiled(path, quantized=quantized)
        return path

    return folder


@pytest.fixture
def filled(programs_of_a_process, tmp_path):
    """Returns a function that copies the programs of another process to a folder of this test."""

    def fill(quantized=False):
        return shutil.copytree(programs_of_a_process(quantized), tmp_path / "filled")

    return fill


@contextlib.contextmanager
def cache_set_to(folder):
    """Sets what `set_cache_folder` cannot set: no folder, or one that is not on this machine."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def run(code, **environment):
    """What another process prints."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def complete(executables=None, **changes):
    """Completions of three prompts, with the settings of `compiled`."""
    options = {"layers": 1, "eos_ids": (3,), "prompt_width": 9} | changes
    return rollout(executables=executables, **options)


def names(keys):
    return sorted(name for name, *_ in keys)


@pytest.mark.parametrize("quantized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_one_process_compiles_the_next_one_loads(quantized, tmp_path):
    first = compiled(tmp_path, quantized=quantized)
    dequantize = ["dequantize"] if quantized else []
    assert names(first.compiled) == ["decode", *dequantize, "fuse_adapter", "insert", "prefill"]
    expected = complete(first, quantized=quantized)
    again = compiled(tmp_path, quantized=quantized)
    assert not again.compiled
    assert again.keys() == first.keys()
    result = complete(again, quantized=quantized)
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.slow  # 10 s
def test_after_the_base_and_its_adapter_the_next_process_compiles_nothing(tmp_path):
    """The two have the same insertions and compactions, which JAX keeps in memory."""
    options = {"quantized": True, "prompts": 12, "max_new_tokens": 13}
    for adapted in (False, True):
        first = compiled(tmp_path, adapted=adapted, clear=not adapted, **options)
    assert {"compact", "dequantize", "insert"} <= set(names(first))
    assert set(names(first.compiled)) == {"decode", "fuse_adapter", "prefill"}
    for adapted in (False, True):
        assert not compiled(tmp_path, adapted=adapted, **options).compiled


def test_a_broken_file_is_compiled_again(filled):
    folder = filled()
    files = sorted(folder.glob("rollout-*"))
    files[0].write_bytes(files[0].read_bytes()[:100])
    assert len(compiled(folder).compiled) == 1
    # A file that is whole, and that the driver refuses.
    program_cache.ProgramCache(None, None, folder).write(files[0].name, b"no program")
    with pytest.warns(UserWarning, match=f"{files[0].name}: compiling again"):
        executables = compiled(folder)
    assert len(executables.compiled) == 1
    assert not compiled(folder).compiled


def test_what_cannot_be_written_is_compiled_all_the_same(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    executables = compiled(tmp_path)
    assert capsys.readouterr().err.count(f"not kept in {tmp_path} (no space left)") == 1
    assert not list(tmp_path.glob("rollout-*"))
    assert complete(executables).lengths.tolist() == complete().lengths.tolist()


def test_stopped_while_compiling(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled(tmp_path, on_progress=stop)
    assert jax.config.jax_enable_compilation_cache
    executables = compiled(tmp_path)
    # The programs that were compiled until then are in the cache.
    assert len(executables.compiled) < len(executables)


@pytest.mark.slow  # 7 s
def test_a_program_from_the_cache_of_jax_is_not_written_again(tmp_path):
    with set_cache_folder(tmp_path):
        for _ in range(2):
            expected = complete()
            jax.clear_caches()
        complete()
        compiled(tmp_path, clear=False)
    again = compiled(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, complete(again), expected)


@pytest.mark.slow  # 13 s
def test_a_policy_on_one_of_two_devices(tmp_path):
    code = (
        "import jax; jax.config.update('jax_default_device', jax.devices()[1]);"
        "import pathlib, tiny_rollout as t; from qerl_jax.compile import executable_cache;"
        "executable_cache._is_used = lambda: True;"
        f"folder = pathlib.Path({str(tmp_path)!r});"
        "first, second = [t.compiled(folder) for _ in range(2)];"
        "result = t.rollout(layers=1, eos_ids=(3,), prompt_width=9, executables=second);"
        "print(len(first.compiled), len(second.compiled), result.lengths)"
    )
    flags = "--xla_force_host_platform_device_count=2"
    assert run(code, XLA_FLAGS=flags) == "4 0 [9 9 9]\n"


def test_programs_of_packed_and_of_dense_weights_are_not_mistaken_for_each_other(filled):
    options = {"quantized": True, "dequantize": "step"}
    executables = compiled(filled(quantized=True), **options)
    assert names(executables.compiled) == ["decode", "insert", "prefill"]
    assert complete(executables, **options).lengths.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    "change",
    [
        "sources",
        "sampling",
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in ("flags", "setting", "policy")
        ),
    ],
)
def test_what_makes_another_program_is_compiled(change, filled, monkeypatch):
    folder = filled()
    before = compiled(folder)
    assert not before.compiled
    changes, precision = {}, None
    if change == "sources":
        monkeypatch.setattr(executable_cache, "_SOURCES", "edited")
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    elif change == "setting":
        precision = "highest"
    elif change == "sampling":
        changes["temperature"] = 0.0
    else:
        changes["adapted"] = False
    with jax.default_matmul_precision(precision):
        executables = compiled(folder, **changes)
    # Prefill and the fusion of the adapter do not depend on how a token is chosen, and insertions
    # not on the policy.
    loaded = {"sampling": 2, "policy": 1}
    assert len(executables.compiled) == len(before) - loaded.get(change, 0)


@pytest.mark.parametrize(
    ("edited", "differs"),
    [
        ("qerl_jax/rl/losses.py", True),
        ("qerl_jax/policy/sharding.py", True),
        ("pallas_kernels/decode/layer.py", True),
        ("qerl_jax/quantization/gptq.py", True),  # Calibration has programs, too.
        ("qerl_jax/data/splits.py", False),
    ],
)
def test_an_edit_of_what_programs_are_traced_from_is_noticed(edited, differs, monkeypatch):
    before, read = executable_cache._sources(), pathlib.Path.read_bytes

    def edit(path):
        return read(path) + (b"# edited" if path.as_posix().endswith(edited) else b"")

    monkeypatch.setattr(pathlib.Path, "read_bytes", edit)
    assert (executable_cache._sources() != before) == differs


@pytest.mark.parametrize(
    ("name", "differs"),
    [("nvidia-cudnn-cu13", True), ("jax-cuda13-plugin", True), ("optax", True), ("wandb", False)],
)
def test_another_version_of_a_library_makes_other_programs(name, differs, monkeypatch):
    origins = set()
    for version in ("1.0", "1.1"):
        library = types.SimpleNamespace(name=name, version=version)
        monkeypatch.setattr(importlib.metadata, "distributions", lambda one=library: [one])
        executable_cache._libraries.cache_clear()
        origins.add(executable_cache.origin(jnp.zeros(8)))
    executable_cache._libraries.cache_clear()
    assert (len(origins) == 2) == differs


@pytest.mark.parametrize(("form", "differs"), [("nvfp4", False), ("mxfp4", True)])
def test_programs_depend_on_the_kernel_of_the_format(form, differs, monkeypatch):
    tiles = self_test.random_tiles(np.random.default_rng(0), 64, 128, form)
    packed = jax.tree.map(jnp.asarray, tiles)
    monkeypatch.setattr(dispatch, "device_kernel", lambda: "mosaic")
    origins = set()
    for agrees in (True, False):
        monkeypatch.setattr(dispatch, "_supports_mxfp4", lambda _, agrees=agrees: agrees)
        origins.add(executable_cache.origin(packed))
        dense, found = (
            executable_cache.origin(policy, shapes=False) for policy in (jnp.zeros(8), packed)
        )
        assert (found == dense) == (agrees or not differs)
    assert (len(origins) == 2) == differs


def test_a_missing_program_is_named(filled):
    executables = compiled(filled())
    with pytest.raises(RuntimeError, match=r"operation \('prefill', 16, .*compile the operations"):
        complete(executables, kv_cache_dtype="bfloat16")


@pytest.mark.parametrize("enabled", [True, False])
def test_what_the_user_says_of_the_cache_of_jax_stays(enabled):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", enabled)
    try:
        with executable_cache.jax_cache_off():
            assert not jax.config.jax_enable_compilation_cache
        assert jax.config.jax_enable_compilation_cache == enabled
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_nothing_is_cached_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.undo()
    compiled(tmp_path)
    assert not list(tmp_path.glob("rollout-*"))


def test_what_jax_finds_in_its_cache_is_not_counted_as_compiled(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert compiled(tmp_path).compiled
    assert not compiled(tmp_path).compiled


@pytest.mark.parametrize("folder", [None, "gs://bucket/cache"])
def test_nothing_is_cached_without_a_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with cache_set_to(folder):
        assert executable_cache.paths(["name"], policy(layers=1)[1]) == {}


@pytest.mark.slow
def test_the_names_of_files_are_those_of_another_process():
    """Nothing in the digest depends on the process, such as an address or the order of a set."""
    code = (
        "import jax; jax.config.update('jax_compilation_cache_dir', '/folder');"
        "from tiny_rollout import policy; from qerl_jax.compile import executable_cache;"
        "executable_cache._is_used = lambda: True;"
        "config, *arrays = policy(layers=1);"
        "print(executable_cache.paths([('name', config)], arrays))"
    )
    first, second = (run(code, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert "rollout-" in first
    assert first == second


def test_a_run_does_not_need_the_folder_of_the_cache_of_jax(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (tmp_path / "file").touch()
    with set_cache_folder(tmp_path / "file"), keep_programs(tmp_path / "run"):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "run")
    assert f"programs are not kept in {tmp_path / 'file'} (File" in capsys.readouterr().err


@pytest.mark.parametrize("common", [None, "gs://bucket/cache"])
def test_a_run_without_the_cache_of_jax_has_its_own_folder(common, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    of_xla = jax.config.jax_persistent_cache_enable_xla_caches
    with cache_set_to(common):
        with keep_programs(tmp_path):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path)
            # Files that XLA reads by itself would have no signature.
            assert not jax.config.jax_persistent_cache_enable_xla_caches
            executables = program_cache.current()
            assert executables.folder_of_executables == tmp_path
        assert jax.config.jax_compilation_cache_dir == common
        assert jax.config.jax_persistent_cache_enable_xla_caches == of_xla


class Bomb:
    """What runs code as it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def in_a_run(common, run, **options):
    """What `compiled` returns with a folder of a run beside the common one."""
    with set_cache_folder(common), keep_programs(run, **options):
        return compiled(None)


@pytest.mark.parametrize("place", ["run", "common"])
def test_a_program_of_another_person_is_not_executed(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    common, run = tmp_path / "common", tmp_path / "run"
    first = in_a_run(common, run)
    name = min(file.name for file in common.glob("rollout-*"))
    signed = (run / name).read_bytes()
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    (tmp_path / place / name).write_bytes(bomb)
    ({"run": common, "common": run}[place] / name).unlink()
    for content in (bomb, signed[:51] + bomb):  # without a signature, and with that of another
        (tmp_path / place / name).write_bytes(content)
        again = in_a_run(common, run)
        assert len(again.compiled) == 1
        assert not (tmp_path / "executed").exists()
        said = capsys.readouterr().err
        assert said.count("a GPU may then round differently; --trust") == (place == "run")
        # Now it is what this process has compiled, in both folders.
        assert not in_a_run(common, tmp_path / "new").compiled
        assert not in_a_run(tmp_path / f"new-{len(content)}", run).compiled
        ({"run": common, "common": run}[place] / name).unlink()
    assert again.keys() == first.keys()
    if place == "run":  # The user may trust the folder.
        (run / name).write_bytes(bomb)
        with pytest.warns(UserWarning, match="compiling again"):
            in_a_run(common, run, trusted=True)
        assert (tmp_path / "executed").exists()


def test_a_program_is_signed_under_its_name(tmp_path, monkeypatch):
    """No program takes the place of another one."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cache = program_cache.ProgramCache(tmp_path, None, None)
    cache.write("rollout-a", b"content")
    (tmp_path / "rollout-a").rename(tmp_path / "rollout-b")
    assert cache.read("rollout-b") is None
    cache.write("rollout-b", b"content")
    assert cache.read("rollout-b") == b"content"


def compile_one(common, run, **options):
    """Compiles a program, or takes it from JAX's cache; returns the number of programs found."""
    hits = []

    def listen(event, **_):
        hits.append(event == "/jax/compilation_cache/cache_hits")

    jax.clear_caches()
    jax.monitoring.register_event_listener(listen)
    try:
        with (
            set_cache_folder(common) if common else contextlib.nullcontext(),
            keep_programs(run, **options),
        ):
            jax.jit(lambda x: jnp.sin(x) @ x)(np.ones((8, 8), np.float32))
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return sum(hits)


def entries(folder):
    return {file.name for file in folder.glob("*-cache")}


def test_what_a_process_compiles_is_in_both_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    common, run = tmp_path / "common", tmp_path / "run"
    assert compile_one(common, run) == 0
    assert entries(common) == entries(run) != set()
    (name,) = entries(run)
    assert (run / name).read_bytes().endswith((common / name).read_bytes())
    # It is there at once: a run that is killed resumes with what it executed.
    jax.clear_caches()
    with set_cache_folder(tmp_path / "killed"), keep_programs(tmp_path / "of_killed"):
        jax.jit(lambda x: jnp.sin(x) @ x)(np.ones((8, 8), np.float32))
        for folder in (tmp_path / "killed", tmp_path / "of_killed"):
            assert entries(folder) == {name}
    # Each of the two is enough, and a run gets what it executes.
    assert compile_one(common, tmp_path / "other") == 1
    assert entries(tmp_path / "other") == {name}
    assert compile_one(tmp_path / "elsewhere", run) == 1
    # What was read from the folder of a run goes nowhere else.
    assert entries(tmp_path / "elsewhere") == set()
    # JAX's own cache reads what is in the common folder.
    jax.clear_caches()
    with set_cache_folder(common):
        jax.jit(lambda x: jnp.sin(x) @ x)(np.ones((8, 8), np.float32))
    assert entries(common) == {name}


@pytest.mark.parametrize("damage", ["another person", "torn", "unsigned"])
def test_an_entry_of_another_person_is_compiled_again(damage, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    run = tmp_path / "run"
    compile_one(tmp_path / "common", run)
    (name,) = entries(run)
    stored = (run / name).read_bytes()
    key = user_key.key_path()
    if damage == "another person":
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        assert user_key.key_path() != key
    else:
        content = stored[:200] if damage == "torn" else stored[51:]
        (run / name).write_bytes(content)
    assert compile_one(tmp_path / "another", run) == 0
    assert capsys.readouterr().err.count("not written by this user") == 1
    # Now it is the user's, in both.
    assert entries(tmp_path / "another") == {name}
    assert compile_one(tmp_path / "third", run) == 1
    assert capsys.readouterr().err == ""


def test_a_torn_entry_of_the_common_folder_is_replaced(tmp_path, monkeypatch):
    """JAX writes an entry in place, and would compile the program in every process."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    common = tmp_path / "common"
    compile_one(common, tmp_path / "first")
    (name,) = entries(common)
    (common / name).write_bytes(b"torn")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        compile_one(common, tmp_path / "second")
    assert compile_one(common, tmp_path / "third") == 1
    assert compile_one(tmp_path / "new", tmp_path / "second") == 1


def test_of_several_processes_one_replaces_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    compile_one(tmp_path / "common", tmp_path / "run")
    (name,) = entries(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(b"of process 0, on a host with another home folder")
    compile_one(tmp_path / "another", tmp_path / "run", writes=False)
    assert (tmp_path / "run" / name).read_bytes().startswith(b"of process 0")
    compile_one(tmp_path / "another", tmp_path / "new", writes=False)
    assert entries(tmp_path / "new") == {name}


def test_a_run_whose_folder_cannot_be_written_is_compiled_all_the_same(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (tmp_path / "file").touch()
    compile_one(tmp_path / "common", tmp_path / "file" / "programs")
    assert capsys.readouterr().err.count("warning: compiled programs are not kept in ") == 1
    assert entries(tmp_path / "common")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    compile_one(tmp_path / "common", tmp_path / "link")
    assert not list((tmp_path / "target").iterdir())


def test_runs_of_a_sweep_share_programs_that_this_user_has_signed(tmp_path, monkeypatch):
    """The folder of a sweep may come from another person, and JAX never reads it by itself."""
    shared = tmp_path / "sweep" / "programs-node"
    monkeypatch.setenv(program_cache.SHARED, str(shared))

    def compile_in(run, backend):
        """Compiles a program without a cache of JAX; returns the number of programs found."""
        with pytest.MonkeyPatch.context() as patch, cache_set_to(None):
            patch.setattr(jax, "default_backend", lambda: backend)
            return compile_one(None, run)

    for backend in ("gpu", "cpu"):
        run = tmp_path / backend
        monkeypatch.setenv(program_cache.SHARED, str(shared / backend))
        assert compile_in(run, backend) == 0
        folder = shared / backend
        if backend == "cpu":  # Hosts of one name may have other processors.
            (folder,) = folder.iterdir()
        (name,) = entries(folder)
        assert entries(run) == ({name} if backend == "gpu" else set())
        assert compile_in(tmp_path / f"{backend}-2", backend) == 1
        assert entries(tmp_path / f"{backend}-2") == entries(run)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[51:])  # as JAX itself writes it
        assert compile_in(tmp_path / f"{backend}-3", backend) == 0
        assert (folder / name).read_bytes().startswith(content[:19])  # It is signed.


@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_a_run_loads_what_another_run_compiled(backend, tmp_path, monkeypatch):
    """By default JAX has no cache, and each run has a folder of its own."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(executable_cache, "_is_used", lambda: backend == "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with cache_set_to(None):
        for name in ("first", "second"):
            jax.clear_caches()
            with keep_programs(tmp_path / name):
                programs = compiled(None)
            assert bool(programs.compiled) == (name == "first")
            # A resumed run on a GPU executes the same program, whatever becomes of the cache.
            kept = {path.name for path in tmp_path.glob(f"{name}/rollout-*")}
            assert len(kept) == (len(programs) if backend == "gpu" else 0)
    folder = tmp_path / "cache" / "qerl_jax" / "programs"
    assert kept <= {path.name for path in folder.iterdir()} != set()


def test_a_resumed_run_executes_its_own_programs(tmp_path):
    """Two runs that compile at the same time write two programs under one name."""
    shared = tmp_path / "shared"
    first, second = (program_cache.ProgramCache(tmp_path / n, shared=shared) for n in "ab")
    for cache, content in ((first, b"first"), (second, b"second")):
        cache.write("rollout-1", content)
        cache.put("2", content)
    assert (first.read("rollout-1"), first.get("2")) == (b"first", b"first")
    third = program_cache.ProgramCache(tmp_path / "c", shared=shared)
    assert (third.read("rollout-1"), third.get("2")) == (b"second", b"second")
    first.write("rollout-1", b"again")
    assert third.read("rollout-1") == b"second"  # It has been copied.


def test_the_programs_that_were_used_last_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "qerl_jax" / "programs"
    cache = program_cache.ProgramCache(tmp_path / "run", shared=folder)
    for age, name in enumerate(("rollout-1", "rollout-2", "rollout-3", "rollout-4.host-1-ab")):
        cache.write(name, bytes(1000))
        os.utime(folder / name, (0, 1000 - age))
    (folder / "notes").write_bytes(bytes(1000))  # of the user
    os.utime(folder / "notes", (0, 0))
    reader = program_cache.ProgramCache(tmp_path / "another", shared=folder)
    assert reader.read("rollout-3") == bytes(1000)  # Now it is the one that was used last.
    monkeypatch.setattr(run_cache, "_LIMIT", 2500)
    with cache_set_to(None), keep_programs(tmp_path / "run"):
        assert {path.name for path in folder.iterdir()} == {"rollout-1", "rollout-3", "notes"}
    assert len(list((tmp_path / "run").iterdir())) == 4  # A run has what it executes.


def test_a_cache_of_the_user_that_cannot_be_searched_is_not_needed(tmp_path, monkeypatch, capsys):
    """Such as one that another user has made."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "qerl_jax" / "programs").mkdir(parents=True)
    stat, lstat = os.stat, os.lstat

    def refuse(found, path, **options):
        if not isinstance(path, int) and "/qerl_jax/programs" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return found(path, **options)

    monkeypatch.setattr(os, "stat", functools.partial(refuse, stat))
    monkeypatch.setattr(os, "lstat", functools.partial(refuse, lstat))
    with cache_set_to(None), keep_programs(tmp_path / "run"):
        programs = compiled(None)
    assert len(programs.compiled) == len(programs)
    assert capsys.readouterr().err.count("/qerl_jax/programs (Permission denied)") == 1
    assert len(list((tmp_path / "run").glob("rollout-*"))) == len(programs)


def test_a_cache_of_the_user_may_be_a_link_and_needs_a_key(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "cache" / "qerl_jax").mkdir(parents=True)
    (tmp_path / "cache" / "qerl_jax" / "programs").symlink_to(disk)
    with cache_set_to(None):
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", "/dev/null")
            compile_one(None, tmp_path / "unsigned")
        assert not list(disk.iterdir())  # No process could read it.
        said = capsys.readouterr().err
        assert said.count(f"not kept in {disk} (/dev/null/qerl-jax/key cannot be made: ") == 1
        assert compile_one(None, tmp_path / "first") == 0
        assert entries(disk) == entries(tmp_path / "first") != set()
        assert compile_one(None, tmp_path / "second") == 1


def test_processes_of_a_run_do_not_read_the_cache_of_the_user(tmp_path, monkeypatch):
    """Where they have caches of their own, they would begin with other programs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with cache_set_to(None):
        assert compile_one(None, tmp_path / "run") == 0
        assert compile_one(None, tmp_path / "run") == 1
    assert not (tmp_path / "cache").exists()


def test_a_cpu_keeps_programs_for_its_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run, user = tmp_path / "run", tmp_path / "qerl_jax" / "programs"
    with cache_set_to(None):
        assert compile_one(None, run) == 0
        (folder,) = user.iterdir()
        assert folder.name.startswith("cpu-")
        (name,) = entries(folder)
        assert compile_one(None, run) == 1
        (folder / name).write_bytes((folder / name).read_bytes()[51:])
        assert compile_one(None, run, trusted=True) == 0  # It has no signature.
        assert compile_one(None, run) == 1
        for digest in ("of another", ""):
            monkeypatch.setattr(run_cache, "processor_digest", lambda digest=digest: digest)
            assert compile_one(None, run) == 0
            assert {path.name for path in user.iterdir()} == {folder.name, "cpu-of another"}
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "unused"))
    assert compile_one(tmp_path / "common", run) == 0
    assert not run.exists()
    assert not (tmp_path / "unused").exists()  # JAX's own cache has it.


def test_vector_instructions_are_the_widest_that_programs_use():
    text = "processor\t: 0\nflags\t\t: fpu avx avx2 {}\n\nprocessor\t: 1\nflags\t\t: fpu avx\n"
    wide = text.format("avx512f avx512bw")
    assert processor.vectors_of(text.format("fma"), "") == "AVX2"
    assert processor.vectors_of(wide, "--xla_force=1") == "AVX512"
    assert processor.vectors_of(wide, "--xla_cpu_max_isa=AVX2 --xla_force=1") == "AVX2"
    assert processor.vectors_of(text.format(""), "--xla_cpu_max_isa=AVX512") == "AVX2"
    assert processor.vectors_of("processor\t: 0\n", "") == ""


def test_processors_with_other_features_are_told_apart():
    text = "processor\t: 0\nmodel\t\t: 1\ncpu MHz\t\t: {}\nflags\t\t: fpu avx2{}\n\n"
    digests = [
        processor.digest_of(2 * text.format(mhz, more), machine)
        for mhz, more, machine in (
            *(("2000", "", "x86_64"), ("3000", "", "x86_64")),
            *(("2000", " avx512f", "x86_64"), ("2000", "", "arm64")),
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert processor.digest_of("processor\t: 0\n", "x86_64") == ""
