"""The calibrated base of a run: made once, recorded, and exactly the same wherever it is used."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_run
import trees
from refusal import refused

import qerl_jax
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.errors import UserError
from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.export import write
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.quantization import base, cache
from qerl_jax.run.folder import RunFolder
from qerl_jax.weights import safetensors
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import load

CALIBRATED = {"model.calibration": "gptq", "steps": 2, "eval.every": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))


@pytest.fixture(scope="module")
def run(tiny, home, tmp_path_factory):
    """A finished run on a calibrated base, whose cache is `home`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        return qerl_jax.train(
            tiny.config(CALIBRATED), workdir=tmp_path_factory.mktemp("runs") / "run"
        )


def packed(params):
    """The bytes of the projections."""
    leaves = jax.tree.leaves(params["layers"], is_leaf=lambda x: isinstance(x, QuantTensor))
    return [np.asarray(x.packed) for x in leaves if isinstance(x, QuantTensor)]


def digest_of(folder):
    return json.loads((folder / "config.json").read_text())["calibration"]["digest"]


def entries(home):
    return sorted(
        path.parent for path in (home / "qerl_jax" / "calibrated").glob("*/calibration.json")
    )


def test_a_run_trains_on_calibrated_bytes_and_records_them(run, tiny, home):
    (entry,) = entries(home)
    assert digest_of(run) == cache.open_entry(entry).digest
    stored = load(str(entry), dtype="float32")
    policy = open_policy(str(run))
    trees.assert_equal(packed(policy.base.params), packed(stored.params))
    rounded = load(str(tiny.model), dtype="float32")
    assert any(
        (a != b).any() for a, b in zip(packed(stored.params), packed(rounded.params), strict=True)
    )
    # Exports name the model, and can still be made from its 16 bits.
    assert policy.base.source == str(tiny.model.resolve())
    assert not policy.base.packed
    text = np.load(RunFolder(run).calibration)
    assert (text.dtype, text.ndim) == (np.int32, 2)
    trees.assert_equal([text], [np.load(entry / "tokens.npy")])


def test_runs_of_one_model_share_the_base(run, tiny, home, tmp_path, capsys):
    (entry,) = entries(home)
    before = (entry / "calibration.json").stat().st_mtime_ns
    other = qerl_jax.train(tiny.config(CALIBRATED | {"seed": 5}), workdir=tmp_path / "other")
    assert digest_of(other) == digest_of(run)
    assert entries(home) == [entry]
    assert (entry / "calibration.json").stat().st_mtime_ns == before
    assert "calibrated on" not in capsys.readouterr().out


def test_a_run_goes_on_as_if_it_had_not_stopped(run, tiny, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    qerl_jax.train(tiny.config(CALIBRATED | {"steps": 3}), workdir=tmp_path / "run")
    whole = tmp_path / "whole"
    # The schedules of a run span the steps of its first start.
    qerl_jax.train(tiny.config(CALIBRATED), workdir=whole)
    qerl_jax.train(tiny.config(CALIBRATED | {"steps": 3}), workdir=whole)
    assert tiny_run.results(tmp_path / "run") == tiny_run.results(whole)


def test_a_missing_base_is_made_again_from_the_text_of_the_run(run, tmp_path, monkeypatch, capsys):
    expected = packed(open_policy(str(run)).base.params)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trees.assert_equal(packed(open_policy(str(run)).base.params), expected)
    out = capsys.readouterr().out
    assert "calibrated on" in out
    assert len(entries(tmp_path)) == 1
    open_policy(str(run))
    assert "calibrated on" not in capsys.readouterr().out


def test_a_damaged_base_is_made_again(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = packed(open_policy(str(run)).base.params)
    (entry,) = entries(tmp_path)
    tiny_run.damage(entry / "model.safetensors")
    capsys.readouterr()
    trees.assert_equal(packed(open_policy(str(run)).base.params), expected)
    out = capsys.readouterr().out
    assert "damaged" in out
    assert "calibrated on" in out


def test_a_base_is_read_where_the_cache_cannot_be_written(run, home, tmp_path, monkeypatch, capsys):
    """Such as a copy on a file system that is read-only, or full."""
    shutil.copytree(home, tmp_path / "copy")
    (tmp_path / "copy" / "qerl_jax" / "calibrated" / "digests.json").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copy"))

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache, "write_json", refuse)
    open_policy(str(run))
    assert "damaged" not in capsys.readouterr().out


def test_a_cache_that_cannot_be_made_is_one_line(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written: Not a directory; set XDG_CACHE_HOME"):
        qerl_jax.train(tiny.config(CALIBRATED), workdir=tmp_path / "run")


def test_other_bytes_are_refused(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokens = np.load(RunFolder(run).calibration)
    np.save(tmp_path / "run" / "calibration_tokens.npy", tokens[:, ::-1].copy())
    with pytest.raises(UserError, match=r"is [0-9a-f]{16}, and the weights of .* give .*; copy "):
        open_policy(str(tmp_path / "run"))


@pytest.mark.parametrize(
    "content", [b"", b"no array", np.array([[99999]], np.int32), np.zeros((2, 3), np.float32)]
)
def test_a_text_of_somebody_else_is_checked(run, tmp_path, monkeypatch, content):
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "run" / "calibration_tokens.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    refused(r"calibration_tokens\.npy", open_policy, str(tmp_path / "run"))


def array_file(header, data=bytes(24), version=(1, 0)):
    """The bytes of a .npy file with a header."""
    return b"\x93NUMPY" + bytes(version) + len(header).to_bytes(2, "little") + header + data


def described(shape="(2, 3)", descr="'<i4'", order="False", rest="}"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {rest}\n".encode()


def zipped():
    file = io.BytesIO()
    np.savez(file, tokens=np.zeros((2, 3), np.int32))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        zipped(),
        *(
            array_file(described(shape))
            for shape in (
                *("(2**37,)", f"({2**37},)", f"({2**37}, 1)", f"({2**62}, {2**62})", "(6,)"),
                *("(-2, -3)", "(0, 3)", "()", "6", "(2.0, 3)", "('2', 3)", "(2, 4)", "(2, 2)"),
            )
        ),
        *(
            array_file(described(descr=descr))
            for descr in ("'|O'", "'>i4'", "'<i8'", "'<U5'", "[('a', '<i4')]", "('<i4', (2,))", "3")
        ),
        array_file(described(order="True")),
        array_file(described(rest="")),  # an open brace
        array_file(described(rest="'more': 1}")),
        array_file(b"(" * 5000),
        array_file(b"-" * 5000 + b"1"),
        array_file(b"\xff" * 100),
        array_file(b"[" * 60000),
        array_file(described(), version=(2, 0)),
        array_file(described(), version=(9, 9)),
        array_file(described(), data=bytes(23)),
    ],
    ids=lambda content: repr(content[10:60]),
)
def test_the_header_of_a_text_is_checked_before_it_is_read(content, tmp_path):
    """A stranger's file may claim any size, and its header is Python."""
    path = tmp_path / "calibration_tokens.npy"
    path.write_bytes(content)
    refused(r"calibration_tokens\.npy: it.*restore the file", cache.read_tokens, path)


def test_a_text_is_read_as_it_was_written(tmp_path):
    tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.save(tmp_path / "a.npy", tokens)
    trees.assert_equal([cache.read_tokens(tmp_path / "a.npy")], [tokens])
    (tmp_path / "b.npy").write_bytes(array_file(described(), tokens.tobytes()))
    trees.assert_equal([cache.read_tokens(tmp_path / "b.npy")], [tokens])


def test_a_run_that_begins_from_another_one_takes_its_base(run, tiny, home, tmp_path):
    changes = {"init_from": str(run), "data.question_suffix": " t1", "seed": 3}
    after = qerl_jax.train(tiny.config(CALIBRATED | changes), workdir=tmp_path / "after")
    assert digest_of(after) == digest_of(run)
    assert RunFolder(after).calibration.read_bytes() == RunFolder(run).calibration.read_bytes()


def test_weights_that_changed_are_calibrated_anew(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = shutil.copytree(tiny.model, tmp_path / "model")
    first = cache.weights_digest(model)
    assert cache.weights_digest(model) == first
    tiny_run.damage(model / "model.safetensors")
    assert cache.weights_digest(model) != first


@pytest.mark.parametrize(
    "changes", [{"rms_norm_eps": 0.5}, {"rollout.kv_cache_dtype": "float8"}], ids=str
)
def test_another_config_has_a_base_of_its_own(run, home, changes, tiny, tmp_path, monkeypatch):
    """The architecture is that of config.json, and the text of a base depends on the rollout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shutil.copytree(home, tmp_path / "cache")))
    model = shutil.copytree(tiny.model, tmp_path / "model")
    fields = CALIBRATED | {"model.source": str(model), "steps": 1}
    if "rms_norm_eps" in changes:
        content = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(content | changes))
    else:
        fields |= changes
    other = qerl_jax.train(tiny.config(fields), workdir=tmp_path / "run")
    assert digest_of(other) != digest_of(run)
    policy = open_policy(str(other), adapter="none")
    assert policy.model.config == load(str(model), format="stored").config


def test_a_killed_calibration_leaves_nothing_half_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layers = base.calibrated_layers

    def stops(checkpoint, tokens):
        yield next(layers(checkpoint, tokens))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(base, "calibrated_layers", stops)
        with pytest.raises(KeyboardInterrupt):
            qerl_jax.train(tiny.config(CALIBRATED), workdir=tmp_path / "run")
    assert not entries(tmp_path)
    assert not (tmp_path / "run").exists()
    qerl_jax.train(tiny.config(CALIBRATED), workdir=tmp_path / "run")
    assert len(entries(tmp_path)) == 1


def test_gpt_oss_is_not_calibrated(tmp_path):
    """Its plan says so, and a run does before it samples a text."""
    config = get_config("gpt-oss-20b")
    config.model.format, config.model.calibration = "nvfp4", "gptq"
    words = "model.calibration='gptq': a gpt_oss is not calibrated"
    refused(words, base.describe_cost, config, ARCHITECTURES["gpt-oss-20b"])
    checkpoint = open_checkpoint(
        str(tiny_run.write_model(tmp_path / "model", model_type="gpt_oss"))
    )
    refused(words, base.calibrated_base, config, checkpoint, [])


def test_an_nvfp4_checkpoint_is_taken_as_it_is(run, tiny, home, tmp_path, monkeypatch):
    (entry,) = entries(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    changes = CALIBRATED | {"model.source": str(entry)}
    other = qerl_jax.train(tiny.config(changes), workdir=tmp_path / "run")
    assert "calibration" not in json.loads((other / "config.json").read_text())
    assert not entries(tmp_path)


@pytest.mark.slow  # 26 s in a process of its own
def test_two_devices_sample_the_same_text_and_share_the_bytes(run, tiny, tmp_path):
    file = tiny.config_file(tmp_path / "config.py", CALIBRATED | {"mesh.data": 2})
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-m", "experiments.grpo_gsm8k", f"--config={file}", "--workdir=run"],
        env=tiny.environment() | environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert digest_of(tmp_path / "run") == digest_of(run)


def test_an_export_names_the_calibrated_weights(run, home, tmp_path, capsys):
    (entry,) = entries(home)
    export(ExportConfig(str(run), "peft", out=str(tmp_path / "one"), score_problems=0))
    assert f"vllm serve {entry} --enable-lora" in capsys.readouterr().out
    options = {"score_problems": 0, "with_base": True}
    export(ExportConfig(str(run), "peft", out=str(tmp_path / "two"), **options))
    assert f"vllm serve {tmp_path / 'two-base'} --enable-lora" in capsys.readouterr().out
    written = safetensors.read_folder(tmp_path / "two-base")
    for name, tensor in safetensors.read_folder(entry).items():
        np.testing.assert_array_equal(written[name].view(np.uint8), tensor.view(np.uint8))


def test_an_adapter_is_not_uploaded_without_its_calibrated_base(run, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "check_push", lambda *_, **__: None)
    options = {"base_name": "user/base", "score_problems": 0}
    with pytest.raises(UserError, match=r"calibrated weights .* --with-base"):
        export(ExportConfig(str(run), "peft", push="user/name", out=str(tmp_path / "o"), **options))
