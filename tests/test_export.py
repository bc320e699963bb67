"""Checkpoints out: unchanged bytes of what was loaded, and folders that are complete or absent."""

import dataclasses
import itertools
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny_checkpoints
import trees
from refusal import refused
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import model_config, random_tensors, write_folder

from qerl_jax.errors import UserError
from qerl_jax.policy.config import RopeScaling
from qerl_jax.policy.layers.attention import rotary_frequencies
from qerl_jax.system import staging
from qerl_jax.weights import safetensors
from qerl_jax.weights import save as export
from qerl_jax.weights.load import DTYPES, load
from qerl_jax.weights.save import (
    checkpoint_tensors,
    companion_files,
    write_checkpoint,
    write_files,
)

GOLDEN = pathlib.Path(__file__).parent / "golden"
ROOT = pathlib.Path(__file__).resolve().parents[1]
TENSORS = [(f"t{i}", np.full((4, 8), i, np.float32)) for i in range(5)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def export_model(model, folder, *, dtype="bfloat16", **options):
    packed = model.format == "nvfp4"
    write_checkpoint(
        folder,
        checkpoint_tensors(model.params, model.config, dtype=dtype),
        files=companion_files(model, packed=packed, dtype=dtype),
        **options,
    )
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "qwen3_5", "qwen3_moe", "qwen3_5_moe"])
def test_a_checkpoint_of_llm_compressor_is_exported_unchanged(name, dtype, tmp_path):
    source = GOLDEN / f"nvfp4_{name}"
    folder = export_model(load(str(source), format="nvfp4", dtype=dtype), tmp_path / "out")
    written = contents(folder)
    assert written == {file: (source / file).read_bytes() for file in written}
    assert written.keys() == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_fused_projections_keep_their_own_global_scales(tmp_path):
    source = tmp_path / "in"
    shutil.copytree(GOLDEN / "nvfp4_llama", source)
    tensors = dict(safetensors.read_file(source / "model.safetensors"))
    for number, name in enumerate(sorted(tensors)):
        if name.endswith("weight_global_scale"):
            tensors[name] = np.array([1000.0 + number], np.float32)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    folder = export_model(load(str(source), format="nvfp4"), tmp_path / "out")
    written = (folder / "model.safetensors").read_bytes()
    assert written == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("model_type", "tied", "dtype"),
    [
        *itertools.product(
            ["qwen2", "qwen3", "llama", "mistral", "qwen3_5"], [True, False], ["bfloat16"]
        ),
        ("llama", False, "float32"),
        ("qwen3_moe", False, "bfloat16"),
        ("qwen3_5_moe", False, "bfloat16"),
    ],
)
def test_a_dense_checkpoint_is_exported_unchanged(model_type, tied, dtype, tmp_path):
    config = model_config(model_type, tie_embeddings=tied)
    tensors = random_tensors(config, dtype=DTYPES[dtype])
    if model_type == "qwen3_5_moe":  # as it is published, and as transformers writes it
        tensors = tiny_checkpoints.stacked(config, tensors)
    source = write_folder(tmp_path / "in", config, tensors, torch_dtype=dtype)
    model = load(str(source), format="bf16", dtype=dtype)
    folder = export_model(model, tmp_path / "out", dtype=dtype)
    written = load_file(folder / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("limit", [1, 3000, 10_000])
def test_shards(limit, tmp_path):
    source = write_folder(tmp_path / "in", model_config(), random_tensors(model_config()))
    model = load(str(source), format="bf16")
    folder = export_model(model, tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((folder / safetensors.INDEX_FILE).read_text())
    files = sorted(path.name for path in folder.glob("model-*"))
    assert len(files) > 2
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    sizes = {file: [t.nbytes for t in load_file(folder / file).values()] for file in files}
    assert all(sum(s) <= limit or len(s) == 1 for s in sizes.values())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert set(index["weight_map"].values()) == set(files)

    again = load(str(folder), format="bf16")
    assert again.fingerprint == model.fingerprint
    trees.assert_equal(again.params, model.params)
    second = export_model(again, tmp_path / "second", max_shard_bytes=limit)
    assert contents(second) == contents(folder)
    single = export_model(again, tmp_path / "single")
    assert (single / "model.safetensors").read_bytes() == (
        export_model(model, tmp_path / "direct") / "model.safetensors"
    ).read_bytes()


def test_layers_may_be_an_iterator(tmp_path):
    model = load(str(GOLDEN / "nvfp4_llama"))
    taken = []

    def layers():
        for number, layer in enumerate(model.params["layers"]):
            taken.append(number)
            yield layer

    tensors = checkpoint_tensors({**model.params, "layers": layers()}, model.config)
    next(tensors)
    assert taken == []
    next(tensors)
    assert taken == [0]
    written = {name: np.asarray(tensor) for name, tensor in tensors}
    assert taken == [0, 1]
    assert "model.layers.1.mlp.down_proj.weight_packed" in written


def test_an_array_that_is_not_contiguous_is_written_in_order(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write_checkpoint(tmp_path / "out", [("a", array)], files={})
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["a"], array)


def test_files_have_the_read_permissions_of_their_folder(tmp_path):
    write_checkpoint(tmp_path / "out", TENSORS, files={"config.json": b"{}"})
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_config_of_a_requantized_model(tmp_path):
    config = model_config("qwen2")
    source = write_folder(
        tmp_path, config, random_tensors(config), dtype="float32", rope_theta=5e5, extra=[1]
    )
    model = load(str(source), format="nvfp4")
    written = json.loads(companion_files(model, packed=True)["config.json"])
    assert written["quantization_config"] == export.QUANTIZATION_CONFIG
    assert (written["dtype"], written["extra"], written["rope_theta"]) == ("bfloat16", [1], 5e5)
    assert "torch_dtype" not in written


def test_the_quantization_config_equals_that_of_llm_compressor():
    stored = json.loads((GOLDEN / "nvfp4_llama" / "config.json").read_text())
    stored = stored["quantization_config"]
    group = stored["config_groups"]["group_0"]["weights"]
    written = export.QUANTIZATION_CONFIG
    assert written == {key: stored[key] for key in written} | {
        "config_groups": written["config_groups"]
    }
    weights = written["config_groups"]["group_0"]["weights"]
    assert weights == {key: group[key] for key in weights} | {"observer": "minmax"}


def test_config_of_a_dense_model_from_a_packed_one():
    model = load(str(GOLDEN / "nvfp4_qwen3"))
    written = json.loads(companion_files(model, packed=False)["config.json"])
    stored = json.loads((GOLDEN / "nvfp4_qwen3" / "config.json").read_text())
    del stored["quantization_config"]
    assert written == stored


@pytest.mark.parametrize(
    "changes",
    [
        {"quant_method": "modelopt"},
        {"format": "nvfp4"},
        {"config_groups": {"group_0": {"input_activations": {"num_bits": 4}}}},
        {"config_groups": None},
    ],
)
def test_another_quantization_config_is_replaced(changes, tmp_path):
    shutil.copytree(GOLDEN / "nvfp4_llama", tmp_path / "in")
    model = load(str(tmp_path / "in"))
    path = tmp_path / "in" / "config.json"
    stored = json.loads(path.read_text())
    stored["quantization_config"] |= changes
    path.write_text(json.dumps(stored))
    written = json.loads(companion_files(model, packed=True)["config.json"])
    assert written == stored | {"quantization_config": export.QUANTIZATION_CONFIG}


def test_companions_are_copied(tmp_path):
    source = write_folder(tmp_path, model_config(), random_tensors(model_config()))
    extra = {
        "generation_config.json": b'{"temperature": 0.7}',
        "chat_template.jinja": "{{ 'é' }}".encode(),
        "vocab.json": b"{}",
        "merges.txt": b"",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    }
    write_files(source, extra)
    (source / "README.md").write_text("of the base")
    model = load(str(source))
    files = companion_files(model, packed=False)
    assert {name: files[name] for name in extra} == extra
    assert files["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
    assert "README.md" not in files
    for name in (*extra, "tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    assert companion_files(model, packed=False).keys() == {"config.json"}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_a_gguf_file_becomes_a_folder(model_type, tmp_path):
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192) if model_type == "llama" else None
    config = model_config(model_type, rope_theta=5e5)
    factors = None
    if scaling is not None:
        config = dataclasses.replace(config, rope_scaling=scaling, head_dim=64, embed_dim=256)
        plain = rotary_frequencies(dataclasses.replace(config, rope_scaling=None))
        factors = plain / rotary_frequencies(config)
    tensors = {name: t.astype(np.float32) for name, t in random_tensors(config).items()}
    path = tiny_checkpoints.write_gguf(tmp_path / "m.gguf", config, tensors, rope_freqs=factors)
    model = load(str(path), format="nvfp4")
    again = load(str(export_model(model, tmp_path / "out")), format="stored")
    assert again.format == "nvfp4"
    assert again.config == model.config
    trees.assert_equal(again.params, model.params)
    assert again.tokenizer.eos_ids == model.tokenizer.eos_ids
    assert again.tokenizer.pad_id == model.tokenizer.pad_id
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert hf["torch_dtype"] == "bfloat16"
    assert hf["eos_token_id"] == list(model.tokenizer.eos_ids)


# --- Complete or absent ---------------------------------------------------------------------------


def failing(error, after=3):
    yield from TENSORS[:after]
    raise error


@pytest.mark.parametrize("error", [UserError("bad weight"), KeyboardInterrupt(), ValueError("x")])
def test_a_source_that_fails_leaves_nothing(error, tmp_path):
    with pytest.raises(type(error)):
        write_checkpoint(tmp_path / "deep" / "out", failing(error), files={}, max_shard_bytes=1)
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_full_disk_leaves_nothing_and_is_an_error_of_one_line(tmp_path):
    program = (
        "import resource, sys, numpy as np\n"
        "from qerl_jax.errors import UserError\n"
        "from qerl_jax.weights.save import write_checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        f"    write_checkpoint({str(tmp_path / 'out')!r}, [('a', np.zeros(9999))], files={{}})\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "out: could not be written" in result.stdout
    assert result.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_model_and_the_next_one_cleans_up(tmp_path):
    program = (
        "import os, signal, numpy as np\n"
        "from qerl_jax.weights.save import write_checkpoint\n"
        "def tensors():\n"
        "    yield 'a', np.zeros(9)\n"
        "    yield 'b', np.zeros(9)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"write_checkpoint({str(tmp_path / 'out')!r}, tensors(), files={{}}, max_shard_bytes=1)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert result.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    write_checkpoint(tmp_path / "out", TENSORS, files={})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_two_exports_to_one_place(tmp_path):
    with staging.staged_folder(tmp_path / "out"):
        refused("in use", write_checkpoint, tmp_path / "out", TENSORS, files={})
        assert (tmp_path / ".out.partial" / "new").exists()


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    write_checkpoint(tmp_path / "out", TENSORS, files={})
    before = contents(tmp_path / "out")
    (tmp_path / "file").write_text("x")
    for name in ("out", "file"):
        with pytest.raises(UserError, match=f"{name} exists already"):
            write_checkpoint(tmp_path / name, failing(AssertionError(), after=0), files={})
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_a_path_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("x")
    refused("could not be written", write_checkpoint, tmp_path / "file" / "out", TENSORS, files={})
