"""The executable cache: programs of rollouts that one process compiles and the next one loads."""

import contextlib
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.compilation_cache import compress_executable, decompress_executable
from tiny_rollout import compiled, policy, rollout

from qerl_jax.rollout import executable_cache
from qerl_jax.run.compilation_cache import cached_in, programs_in


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(executable_cache, "_is_used", lambda: True)


@contextlib.contextmanager
def cache_set_to(folder):
    """Sets what `cached_in` cannot set: no folder, or a folder that is not on this machine."""
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


def test_a_broken_file_is_compiled_again(tmp_path):
    compiled(tmp_path)
    files = sorted(tmp_path.glob("rollout-*"))
    files[0].write_bytes(files[0].read_bytes()[:100])
    with pytest.warns(UserWarning, match=f"{files[0].name}: compiling again"):
        executables = compiled(tmp_path)
    assert len(executables.compiled) == 1
    assert not compiled(tmp_path).compiled


def test_what_cannot_be_written_is_compiled_all_the_same(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    with pytest.warns(UserWarning, match="not cached: no space left"):
        executables = compiled(tmp_path)
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
    with cached_in(tmp_path):
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
        "import pathlib, tiny_rollout as t; from qerl_jax.rollout import executable_cache;"
        "executable_cache._is_used = lambda: True;"
        f"folder = pathlib.Path({str(tmp_path)!r});"
        "first, second = [t.compiled(folder) for _ in range(2)];"
        "result = t.rollout(layers=1, eos_ids=(3,), prompt_width=9, executables=second);"
        "print(len(first.compiled), len(second.compiled), result.lengths)"
    )
    flags = "--xla_force_host_platform_device_count=2"
    assert run(code, XLA_FLAGS=flags) == "4 0 [9 9 9]\n"


def test_programs_of_packed_and_of_dense_weights_are_not_mistaken_for_each_other(tmp_path):
    compiled(tmp_path, quantized=True)
    options = {"quantized": True, "dequantize": "step"}
    executables = compiled(tmp_path, **options)
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
def test_what_makes_another_program_is_compiled(change, tmp_path, monkeypatch):
    before = compiled(tmp_path)
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
        executables = compiled(tmp_path, **changes)
    # Prefill and the fusion of the adapter do not depend on how a token is chosen, and insertions
    # not on the policy.
    loaded = {"sampling": 2, "policy": 1}
    assert len(executables.compiled) == len(before) - loaded.get(change, 0)


@pytest.mark.parametrize(
    ("edited", "differs"),
    [
        ("qerl_jax/rl/losses.py", True),
        ("qerl_jax/sharding.py", True),
        ("pallas_kernels/decode/layer.py", True),
        ("qerl_jax/data.py", False),
    ],
)
def test_an_edit_of_what_programs_are_traced_from_is_noticed(edited, differs, monkeypatch):
    before, read = executable_cache._sources(), pathlib.Path.read_bytes

    def edit(path):
        return read(path) + (b"# edited" if path.as_posix().endswith(edited) else b"")

    monkeypatch.setattr(pathlib.Path, "read_bytes", edit)
    assert (executable_cache._sources() != before) == differs


def test_a_missing_program_is_named(tmp_path):
    executables = compiled(tmp_path)
    with pytest.raises(RuntimeError, match=r"operation \('prefill', 16, .*call compile_rollout"):
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
        "from tiny_rollout import policy; from qerl_jax.rollout import executable_cache;"
        "executable_cache._is_used = lambda: True;"
        "config, *arrays = policy(layers=1);"
        "print(executable_cache.paths([('name', config)], arrays))"
    )
    first, second = (run(code, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert "rollout-" in first
    assert first == second


def test_the_folder_of_a_run_shares_with_the_cache_of_jax(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    common, run = tmp_path / "common", tmp_path / "run" / "programs"
    common.mkdir()
    run.mkdir(parents=True)
    for folder in (common, run):
        (folder / "of-both-cache").write_bytes(compress_executable(folder.name.encode()))
    (common / "older-cache").write_bytes(compress_executable(b"older"))
    (common / "rollout-0.123").touch()  # which another process is writing
    with cached_in(common):
        with programs_in(run):
            assert jax.config.jax_compilation_cache_dir == str(run)
            (run / "newer-cache").write_bytes(compress_executable(b"newer"))
        assert jax.config.jax_compilation_cache_dir == str(common)
    names = {"of-both-cache", "older-cache", "newer-cache"}
    assert {file.name for file in run.iterdir()} == names
    assert {file.name for file in common.iterdir()} == names | {"rollout-0.123"}
    for folder in (common, run):
        content = (folder / "of-both-cache").read_bytes()
        assert decompress_executable(content) == folder.name.encode()


def test_a_program_that_was_not_written_to_its_end_is_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    common = tmp_path / "common"
    hits = []

    def session(run):
        jax.clear_caches()
        with programs_in(run):
            jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))
        return list(run.glob("*-cache"))

    def listen(event, **_):
        hits.append(event == "/jax/compilation_cache/cache_hits")

    with cached_in(common):
        for file in session(tmp_path / "killed"):
            for copy in (file, common / file.name):  # a killed run links nothing
                copy.unlink()
            file.write_bytes(b"torn")
            os.utime(file, (0, 0))
        session(tmp_path / "killed")
        jax.monitoring.register_event_listener(listen)
        try:
            programs = session(tmp_path / "killed")
            assert sum(hits) == len(programs) > 0
            session(tmp_path / "another")
        finally:
            jax.monitoring.unregister_event_listener(listen)
    assert sum(hits) == 2 * len(programs)


def test_a_program_that_another_process_is_writing_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    common, run = tmp_path / "common", tmp_path / "run"
    for folder in (common, run):
        folder.mkdir()
        (folder / f"{folder.name}-cache").write_bytes(b"the beginning")
    with cached_in(common), programs_in(run):
        pass
    for folder in (common, run):
        assert [file.name for file in folder.iterdir()] == [f"{folder.name}-cache"]


def test_a_run_does_not_need_the_folder_of_the_cache_of_jax(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (tmp_path / "file").touch()
    with cached_in(tmp_path / "file"), programs_in(tmp_path / "run"):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "run")


def test_a_run_without_the_cache_of_jax_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with cache_set_to(None):
        with programs_in(tmp_path):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        assert jax.config.jax_compilation_cache_dir is None
