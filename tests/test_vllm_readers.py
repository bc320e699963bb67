"""vLLM reads the project's exports.

The project does not depend on vLLM, which pins other versions of common packages. QERL_VLLM_PYTHON
names the Python of an environment with vLLM. Its CPU-only parts are enough: pip install --no-deps
vllm, and the packages that its imports need.

    QERL_VLLM_PYTHON=.../bin/python uv run pytest -m slow tests/test_vllm_readers.py
"""

import json
import os
import pathlib
import subprocess

import finished_run
import jax
import numpy as np
import pytest

from qerl_jax.export import model_card as card_lib
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.policy import lora
from qerl_jax.policy.layers.kinds import FUSED, projection_shapes
from qerl_jax.policy.quant import checkpoint_order, dequantize
from qerl_jax.policy.trainable import Trainable
from qerl_jax.weights.load import load
from qerl_jax.weights.names import layer_module
from qerl_jax.weights.peft import fill_peft_adapter

TESTS = pathlib.Path(__file__).parent
GOLDEN = TESTS / "golden"
PYTHON = os.environ.get("QERL_VLLM_PYTHON")
MIXTURES = ("qwen3_moe", "qwen3_5_moe")
EXPERTS = 8  # of the golden mixtures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="QERL_VLLM_PYTHON is not set to a Python with vLLM"),
]


def read(*arguments):
    command = [PYTHON, TESTS / "read_with_vllm.py", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def exported(name, form, out, **options):
    source, base = GOLDEN / "export_logits" / f"adapter_{name}", GOLDEN / f"nvfp4_{name}"
    if name in MIXTURES:
        source, base = GOLDEN / "peft_experts" / name / "stacked", GOLDEN / name
    return export(
        ExportConfig(
            source=str(source),
            base=str(base),
            format=form,
            out=str(out),
            score_problems=0,
            **options,
        )
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_adapters(name, tmp_path):
    folder = exported(name, "peft", tmp_path / "out")
    found = read("adapter", folder, card_lib.vllm_rank(4))
    config = load(str(GOLDEN / f"nvfp4_{name}")).config
    assert (found["rank"], found["scale"]) == (4, 2.0)
    assert found["modules"] == {
        layer_module(layer, projection): [[4, inputs], [outputs, 4]]
        for layer in range(config.num_layers)
        for projection, (outputs, inputs) in projection_shapes(config).items()
    }


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_experts(family, stacked, rslora, tmp_path):
    """Both layouts become A and the scaled B of gate, down and up of all experts."""
    config = load(str(GOLDEN / family), format="bf16").config
    targets = tuple(projection_shapes(config))
    options = lora.LoraConfig(4, 8.0, rslora=rslora, targets=targets, expert_rank=3)
    adapter = lora.init(jax.random.key(0), config, options)
    adapter = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape), adapter)
    made = Trainable(adapter, {})
    fill_peft_adapter(tmp_path, made, options, base_model=family, stacked=stacked)
    found = read("experts", tmp_path, card_lib.vllm_rank(4), EXPERTS, int(stacked))
    assert len(found) == config.num_layers
    for number, adapters in enumerate(adapter.layers):
        gate_up, down = (adapters[name] for name in ("experts_gate_up", "experts_down"))
        gate, up = np.split(gate_up["b"], 2, axis=1)
        expected = (gate_up["a"], gate), (down["a"], down["b"]), (gate_up["a"], up)
        pairs = found[f"model.layers.{number}.mlp"]
        for (a, b), (own_a, own_b) in zip(pairs, expected, strict=True):
            np.testing.assert_allclose(a, own_a, rtol=1e-6)
            np.testing.assert_allclose(b, options.scale * own_b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", MIXTURES)
def test_exported_adapters_of_experts(family, tmp_path):
    """In the layout of the export, with the names of a base with a vision tower if it has one."""
    folder = exported(family, "peft", tmp_path / "out")
    found = read("experts", folder, 8, EXPERTS, int(family == "qwen3_5_moe"))
    layers = load(str(GOLDEN / family), format="bf16").config.num_layers
    root = "model.language_model.layers" if family == "qwen3_5_moe" else "model.layers"
    assert found.keys() == {f"{root}.{number}.mlp" for number in range(layers)}


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("form", ["merged", "nvfp4"])
def test_names_of_experts(family, form, tmp_path):
    """Each tensor of experts fills the parameters that it should, and no expert lacks one."""
    folder = exported(family, form, tmp_path / "out")
    found = read("names", folder, EXPERTS)
    parts = ("_packed", "_scale", "_global_scale") if form == "nvfp4" else ("",)
    shards = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
    expected = {}
    for layer in range(load(str(folder)).config.num_layers):
        root = f"model.layers.{layer}.mlp.experts"
        if form == "merged" and family == "qwen3_5_moe":
            expected[f"{root}.gate_up_proj"] = [["w13_weight", 0, "w1"], ["w13_weight", 1, "w3"]]
            expected[f"{root}.down_proj"] = [["w2_weight", 0, "w2"]]
            continue
        for expert in range(EXPERTS):
            for name, (param, shard) in shards.items():
                for part in parts:
                    filled = [[f"{param}_weight{part}", expert, shard]]
                    expected[f"{root}.{expert}.{name}.weight{part}"] = filled
    assert found == expected


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", *MIXTURES])
@pytest.mark.parametrize("kind", ["base", "requantized", "calibrated"])
def test_checkpoints(kind, name, tiny, tmp_path):
    if kind != "requantized" and name in MIXTURES:
        pytest.skip("their golden bases are in 16 bits")
    folder = tmp_path / "out"
    if kind == "base":
        exported(name, "peft", folder, with_base=True)
        folder = tmp_path / "out-base"
    elif kind == "requantized":
        exported(name, "nvfp4", folder)
    else:
        run = finished_run.write_golden_run(tmp_path, tiny, f"nvfp4_{name}")
        options = {"calibration": "gptq", "score_problems": 0, "out": str(folder)}
        export(ExportConfig(source=str(run), format="nvfp4", **options))
    assert read("checkpoint", folder) == {
        "name": "compressed-tensors",
        "nvfp4": True,
        "activations": None,
        "format": "nvfp4-pack-quantized",
        "head": None,
    }
    if name in MIXTURES:
        return
    # Equal weights but for the last digit, and one global scale for those that vLLM stacks.
    model = load(str(folder), format="stored")
    read("weights", folder)
    theirs = np.load(folder / "weights.npz")
    for number, layer in enumerate(model.params["layers"]):
        for fused in FUSED.keys() & layer.keys():
            weight = checkpoint_order(layer[fused])
            parts = [theirs[layer_module(number, member)] for member in FUSED[fused]]
            ours = dequantize(weight, np.float32)
            np.testing.assert_allclose(np.concatenate(parts), ours, rtol=1e-6)
            assert len(np.unique(weight.global_scale)) == 1
