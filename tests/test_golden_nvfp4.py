"""Packed bytes and logits equal those of llm-compressor (generator: golden/make_nvfp4.py)."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_checkpoints import write_golden_source
from tiny_model import rounded_to_bfloat16

from qerl_jax.policy import transformer
from qerl_jax.policy.layers.kinds import ALL_FUSED
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.weights.load import load
from qerl_jax.weights.names import layer_module
from qerl_jax.weights.safetensors import read_file

GOLDEN = pathlib.Path(__file__).parent / "golden"
MODELS = ("qwen2", "qwen3", "llama", "qwen3_5")


def assert_stored(params, tensors):
    """Asserts that the packed projections hold the checkpoint's bytes."""
    for i, layer in enumerate(params["layers"]):
        for fused, members in ALL_FUSED.items():
            weight = layer.get(fused)
            if not isinstance(weight, QuantTensor):
                # Another kind of layer has it, or it is one that llm-compressor leaves in 16 bits.
                module = layer_module(i, members[0])
                assert fused not in layer or f"{module}.weight" in tensors
                continue
            start = 0
            for member in members:
                module = layer_module(i, member)
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
    assert_stored(model.params, read_file(GOLDEN / f"nvfp4_{name}" / "model.safetensors"))


@pytest.mark.parametrize("name", MODELS)
def test_loading_the_checkpoint_keeps_its_bytes(name):
    model = load(str(GOLDEN / f"nvfp4_{name}"), format="nvfp4")
    assert_stored(model.params, read_file(GOLDEN / f"nvfp4_{name}" / "model.safetensors"))


@pytest.mark.parametrize("weights", ["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, weights):
    model = load(str(GOLDEN / f"nvfp4_{name}"), format="nvfp4", dtype="float32")
    params = rounded_to_bfloat16(model.params) if weights == "bf16" else model.params
    expected = load_file(GOLDEN / f"nvfp4_{name}" / "logits.safetensors")
    ids = jnp.asarray(expected["ids"])[None]
    logits = transformer.forward(params, None, ids, jnp.array([ids.shape[1]]), config=model.config)
    np.testing.assert_allclose(logits[0], expected[f"logits_{weights}"], atol=1e-4, rtol=0)
