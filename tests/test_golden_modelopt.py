"""NVFP4 checkpoints of NVIDIA's ModelOpt are read as ModelOpt does (golden/make_modelopt.py)."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import load_file

from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import fused_of
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.weights.load import load
from qerl_jax.weights.names import layer_module

GOLDEN = pathlib.Path(__file__).parent / "golden"
MODELS = ("qwen2", "qwen3", "llama")


def golden(name):
    folder = GOLDEN / f"modelopt_{name}"
    return load(str(folder), dtype="float32"), load_file(folder / "expected.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_weights(name):
    model, expected = golden(name)
    compared, largest = 0, 0.0
    for i, layer in enumerate(model.params["layers"]):
        for fused, members in fused_of(model.config, i).items():
            weight = layer[fused]
            if not isinstance(weight, QuantTensor):
                continue
            ours = np.asarray(dequantize(weight, jnp.float32))
            theirs = np.concatenate([expected[f"{layer_module(i, m)}.weight"] for m in members])
            nonzero = theirs != 0
            np.testing.assert_array_equal(ours != 0, nonzero)
            largest = max(largest, np.abs(ours[nonzero] / theirs[nonzero] - 1).max())
            np.testing.assert_array_equal(
                ours.astype(jnp.bfloat16), theirs.astype(jnp.bfloat16), err_msg=fused
            )
            compared += len(members)
    assert compared == len(expected) - 2
    assert largest <= 2e-7


@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    model, expected = golden(name)
    ids = jnp.asarray(expected["ids"])[None]
    logits = transformer.forward(
        model.params, None, ids, jnp.array([ids.shape[1]]), config=model.config
    )
    np.testing.assert_allclose(logits[0], expected["logits"], atol=1e-4, rtol=0)


def copied(folder, name, change):
    """Copies a golden checkpoint with another quantization_config."""
    shutil.copytree(GOLDEN / f"modelopt_{name}", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = change(config["quantization_config"])
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_older_checkpoints_are_recognized_by_hf_quant_config(tmp_path):
    folder = copied(tmp_path, "llama", lambda found: None)
    load(folder)
    (tmp_path / "hf_quant_config.json").unlink()
    refused("has the shape", load, folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_algo": "FP8"}, "'modelopt' as 'FP8'"),
        ({"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
        ({"quant_algo": ["NVFP4"]}, "'modelopt' as"),
        ({"quantization": 3}, "by 'modelopt' are not supported"),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "group_size 32"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, "'num_bits': 8"),
        ({"config_groups": {"a": {"weights": None}}}, "weights None"),
        ({"config_groups": [1]}, "config_groups"),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path, changes, named):
    folder = copied(tmp_path, "llama", lambda found: found | changes)
    refused(named, load, folder)


@pytest.mark.parametrize("multiplier", [0.0, -1.0, np.nan, np.inf, 1e-45, 1e36])
def test_a_multiplier_must_be_positive_and_finite(tmp_path, multiplier):
    folder = copied(tmp_path, "llama", lambda found: found)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    name = "model.layers.1.mlp.up_proj.weight_scale_2"
    begin = 8 + length + json.loads(content[8 : 8 + length])[name]["data_offsets"][0]
    content[begin : begin + 4] = np.float32(multiplier).tobytes()
    path.write_bytes(content)
    refused(r"global scale of 'model.layers.1.mlp.up_proj'", load, folder)
