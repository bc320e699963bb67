"""Packed bytes and logits equal those of llm-compressor (generator: golden/make_nvfp4.py)."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import stacked, write_golden_source
from tiny_model import rounded_to_bfloat16

from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import ALL_FUSED, PACKED
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.weights import names
from qerl_jax.weights.load import load
from qerl_jax.weights.safetensors import read_file

GOLDEN = pathlib.Path(__file__).parent / "golden"
MODELS = ("qwen2", "qwen3", "llama", "qwen3_5", "qwen3_moe", "qwen3_5_moe")


def assert_stored(params, config, tensors):
    """Asserts that the packed projections hold the checkpoint's bytes."""
    for i, layer in enumerate(params["layers"]):
        stored = names.stored_tensors(config, i)
        for array in (*PACKED, *ALL_FUSED):
            weight = layer.get(array)
            if not isinstance(weight, QuantTensor):
                # Another kind of layer has it, or it is one that llm-compressor leaves in 16 bits.
                assert array not in layer or stored[array][0] in tensors
                continue
            start = 0
            for tensor in stored[array]:
                module = tensor.removesuffix(".weight")
                packed = tensors[f"{module}.weight_packed"]
                rows = slice(start, start + len(packed))
                start = rows.stop
                np.testing.assert_array_equal(weight.packed[rows], packed, err_msg=module)
                np.testing.assert_array_equal(
                    np.asarray(weight.scales[rows]).view(np.uint8),
                    tensors[f"{module}.weight_scale"].view(np.uint8),
                    err_msg=module,
                )
                divisor = tensors[f"{module}.weight_global_scale"]
                assert np.all(weight.global_scale[rows] == divisor), module
            assert start == weight.shape[0]


@pytest.mark.parametrize("name", MODELS)
def test_quantizing_the_source_gives_the_bytes_of_the_checkpoint(name, tmp_path):
    model = load(str(write_golden_source(tmp_path, name)), format="nvfp4")
    assert_stored(
        model.params, model.config, read_file(GOLDEN / f"nvfp4_{name}" / "model.safetensors")
    )


@pytest.mark.parametrize("name", MODELS)
def test_loading_the_checkpoint_keeps_its_bytes(name):
    model = load(str(GOLDEN / f"nvfp4_{name}"), format="nvfp4")
    assert_stored(
        model.params, model.config, read_file(GOLDEN / f"nvfp4_{name}" / "model.safetensors")
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_experts_in_other_layouts(name, tmp_path):
    """All experts of a layer in one tensor, and the names and multipliers of ModelOpt."""
    source = GOLDEN / f"nvfp4_{name}"
    expected = load(str(source))
    tensors = dict(read_file(source / "model.safetensors"))
    whole = stacked(expected.config, tensors)
    assert len(whole) < len(tensors)

    def loaded(stored, folder):
        shutil.copytree(source, folder)
        save_file(stored, folder / "model.safetensors")
        return load(str(folder))

    found = loaded(whole, tmp_path / "stacked")
    trees.assert_equal(found.params, expected.params)
    assert found.fingerprint == expected.fingerprint
    modelopt = {
        name.replace("weight_packed", "weight").replace("weight_global_scale", "weight_scale_2"): (
            np.reciprocal(tensor[:1]).reshape(()) if name.endswith("_global_scale") else tensor
        )
        for name, tensor in tensors.items()
    }
    shutil.copytree(source, tmp_path / "modelopt")
    hf = json.loads((source / "config.json").read_text())
    hf["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "modelopt" / "config.json").write_text(json.dumps(hf))
    save_file(modelopt, tmp_path / "modelopt" / "model.safetensors")
    found = load(str(tmp_path / "modelopt"))
    for ours, theirs in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
        # The divisor of a multiplier is rounded.
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=2e-7
        )


@pytest.mark.parametrize("weights", ["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, weights):
    model = load(str(GOLDEN / f"nvfp4_{name}"), format="nvfp4", dtype="float32")
    params = rounded_to_bfloat16(model.params) if weights == "bf16" else model.params
    expected = load_file(GOLDEN / f"nvfp4_{name}" / "logits.safetensors")
    ids = jnp.asarray(expected["ids"])[None]
    logits = transformer.forward(params, None, ids, jnp.array([ids.shape[1]]), config=model.config)
    np.testing.assert_allclose(logits[0], expected[f"logits_{weights}"], atol=1e-4, rtol=0)
