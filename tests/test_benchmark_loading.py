"""The benchmark of loading: what it writes, measures and refuses."""

import json

import numpy as np
import pytest
from tiny_checkpoints import model_config

from benchmarks import common, loading, random_checkpoint, result_tables
from qerl_jax.errors import UserError
from qerl_jax.policy import architectures
from qerl_jax.weights import safetensors


@pytest.fixture
def tiny(monkeypatch):
    """The name of a tiny model among the architectures."""
    monkeypatch.setitem(architectures.ARCHITECTURES, "tiny", model_config("qwen2"))
    return "tiny"


def run(*arguments):
    loading.run(loading.make_parser().parse_args(arguments))


@pytest.mark.parametrize("stored", ["bf16", "nvfp4"])
def test_a_row_has_the_bytes_and_seconds_of_a_load(tmp_path, monkeypatch, capsys, tiny, stored):
    # In this process, as a process of its own has no tiny model and takes seconds to start.
    monkeypatch.setattr(common, "in_process", lambda function, *given: function(*given))
    out, folder = tmp_path / "loading.json", tmp_path / "model"
    arguments = (f"--model={tiny}", f"--stored={stored}", f"--folder={folder}", f"--out={out}")
    run(*arguments)
    run(*arguments)  # It replaces both rows.
    rows = json.loads(out.read_text())["rows"]
    assert [row["cache"] for row in rows] == ["cold", "warm"]
    size = sum(tensor.nbytes for tensor in safetensors.read_folder(folder).values())
    for row in rows:
        assert row["gb"] == pytest.approx(size / 1e9)
        assert 0 < row["read_s"] < row["seconds"]
        assert 0 < row["rest_s"] < row["seconds"]
        assert 0 < row["host_before_gb"] <= row["host_peak_gb"]
        assert row["shard_gb"] > row["gb"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" device=")[0] for line in lines[1:]] == [
        f"model=tiny stored={stored} format=nvfp4 cache={cache}" for cache in ("cold", "warm") * 2
    ]
    assert result_tables.loading_table(rows).count("\n") == 3


def test_random_weights_have_the_size_of_weights(tmp_path):
    random_checkpoint.write_random(tmp_path / "x", model_config(), packed=False)
    tensors = safetensors.read_folder(tmp_path / "x")
    weight = np.asarray(tensors["model.layers.1.mlp.down_proj.weight"], np.float32)
    assert weight.std() == pytest.approx(0.02, rel=0.1)


def test_an_unknown_model_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="unknown model 'gpt'"):
        run(f"--folder={tmp_path / 'x'}", f"--out={tmp_path / 'y'}", "--model=gpt")
    assert not list(tmp_path.iterdir())
