"""Programs of rollouts that are kept from one process to the next."""

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
from test_engine import KEY, PAD, PROMPTS, policy

from qerl_jax.rollout import ahead, executables
from qerl_jax.rollout.engine import SamplingConfig, generate
from qerl_jax.run.compilation_cache import cached_in, programs_in

HOW = {"sampling": SamplingConfig(max_new_tokens=9, chunk_steps=4), "eos_ids": (3,)}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(executables, "_keeps", lambda: True)


@contextlib.contextmanager
def cache_set_to(folder):
    """What `cached_in` cannot set: no folder, or one that is none of this machine."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def compiled_ahead(folder, *, adapted=True, quantized=False, **changes):
    """Everything for three prompts, and what jit compiled for it."""
    config, params, lora = policy(layers=1, quantized=quantized)
    how = {"prompt_width": 9, "config": config} | HOW | changes
    jax.clear_caches()
    with cached_in(folder), ahead.compilations() as compiled:
        programs = ahead.compile_ahead(KEY, params, lora if adapted else None, prompts=3, **how)
        return programs, compiled


def run(code, **environment):
    """What another process prints."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def complete(programs, *, quantized=False, **changes):
    config, params, lora = policy(layers=1, quantized=quantized)
    how = {"config": config, "pad_id": PAD, "compiled_ahead": programs} | HOW | changes
    return generate(KEY, params, lora, PROMPTS, **how)


@pytest.mark.parametrize("quantized", [False, True])
def test_what_one_process_compiled_the_next_one_loads(quantized, tmp_path):
    first, compiled = compiled_ahead(tmp_path, quantized=quantized)
    names = ["decode_chunk", "fuse_adapter", "read_prompts", "seat_rows"]
    names += ["dequantize"] if quantized else []
    assert sorted(compiled) == sorted(f"jit({name})" for name in names)
    expected = complete(first, quantized=quantized)
    again, compiled = compiled_ahead(tmp_path, quantized=quantized)
    assert not compiled
    assert again.keys() == first.keys()
    with ahead.compilations() as compiled:
        result = complete(again, quantized=quantized)
    assert not compiled
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_a_broken_file_is_compiled_again(tmp_path):
    compiled_ahead(tmp_path)
    files = sorted(tmp_path.glob("rollout-*"))
    files[0].write_bytes(files[0].read_bytes()[:100])
    with pytest.warns(UserWarning, match=f"{files[0].name}: compiling again"):
        _, compiled = compiled_ahead(tmp_path)
    assert len(compiled) == 1
    assert not compiled_ahead(tmp_path)[1]


def test_what_cannot_be_written_is_compiled_all_the_same(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    with pytest.warns(UserWarning, match="not kept: no space left"):
        programs, _ = compiled_ahead(tmp_path)
    assert not list(tmp_path.glob("rollout-*"))
    assert complete(programs).lengths.tolist() == complete({}).lengths.tolist()


def test_stopped_while_compiling(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled_ahead(tmp_path, on_progress=stop)
    assert jax.config.jax_enable_compilation_cache
    programs, compiled = compiled_ahead(tmp_path)
    assert len(compiled) < len(programs)  # What was compiled until then is kept.


def test_what_jit_had_from_the_cache_of_jax_is_not_written_again(tmp_path):
    with cached_in(tmp_path):
        for _ in range(2):
            expected = complete({})
            jax.clear_caches()
        complete({})
        config, params, lora = policy(layers=1)
        how = {"prompts": 3, "prompt_width": 9, "config": config} | HOW
        ahead.compile_ahead(KEY, params, lora, **how)
    again, _ = compiled_ahead(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, complete(again), expected)


def test_a_policy_on_one_of_two_devices(tmp_path):
    code = (
        "import jax; jax.config.update('jax_default_device', jax.devices()[1]);"
        "import pathlib, test_programs as t; from qerl_jax.rollout import executables;"
        "executables._keeps = lambda: True;"
        f"folder = pathlib.Path({str(tmp_path)!r});"
        "ahead = [t.compiled_ahead(folder) for _ in range(2)];"
        "print(*(len(compiled) for _, compiled in ahead), t.complete(ahead[1][0]).lengths)"
    )
    flags = "--xla_force_host_platform_device_count=2"
    assert run(code, XLA_FLAGS=flags) == "4 0 [9 9 9]\n"


def test_programs_of_packed_and_of_dense_weights_are_not_taken_for_each_other(tmp_path):
    compiled_ahead(tmp_path, quantized=True)
    how = {"sampling": SamplingConfig(max_new_tokens=9, chunk_steps=4, dequantize="step")}
    programs, compiled = compiled_ahead(tmp_path, quantized=True, **how)
    assert sorted(compiled) == ["jit(decode_chunk)", "jit(read_prompts)", "jit(seat_rows)"]
    assert complete(programs, quantized=True, **how).lengths.tolist() == [9, 9, 9]


@pytest.mark.parametrize("change", ["sources", "flags", "setting", "rules", "policy"])
def test_what_makes_another_program_is_compiled(change, tmp_path, monkeypatch):
    before, _ = compiled_ahead(tmp_path)
    changes, precision = {}, None
    if change == "sources":
        monkeypatch.setattr(executables, "_SOURCES", "edited")
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    elif change == "setting":
        precision = "highest"
    elif change == "rules":
        changes["sampling"] = SamplingConfig(max_new_tokens=9, chunk_steps=4, temperature=0.5)
    else:
        changes["adapted"] = False
    with jax.default_matmul_precision(precision):
        _, compiled = compiled_ahead(tmp_path, **changes)
    # To read prompts and to fuse the adapter is the same, however tokens are drawn.
    assert len(compiled) == len(before) - (2 if change == "rules" else 0)


def test_nothing_is_kept_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.undo()
    compiled_ahead(tmp_path)
    assert not list(tmp_path.glob("rollout-*"))


@pytest.mark.parametrize("folder", [None, "gs://bucket/cache"])
def test_nothing_is_kept_where_no_folder_is(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with cache_set_to(folder):
        assert executables.paths(["name"], policy(layers=1)[1]) == {}


def test_the_names_of_files_are_those_of_another_process():
    """Nothing in the digest depends on the process, such as an address or the order of a set."""
    code = (
        "import jax; jax.config.update('jax_compilation_cache_dir', '/folder');"
        "from test_engine import policy; from qerl_jax.rollout import executables;"
        "executables._keeps = lambda: True;"
        "print(executables.paths({('name', policy(layers=1)[0]): None}, policy(layers=1)[1:]))"
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
        session(tmp_path / "killed")
        jax.monitoring.register_event_listener(listen)
        try:
            programs = session(tmp_path / "killed")
            assert sum(hits) == len(programs) > 0
            session(tmp_path / "another")
        finally:
            jax.monitoring.unregister_event_listener(listen)
    assert sum(hits) == 2 * len(programs)


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
