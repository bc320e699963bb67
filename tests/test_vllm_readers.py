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

import pytest

from qerl_jax.export import model_card as card_lib
from qerl_jax.export.write import ExportConfig, export
from qerl_jax.policy.layers.kinds import projection_shapes
from qerl_jax.weights.load import load
from qerl_jax.weights.names import layer_module

TESTS = pathlib.Path(__file__).parent
GOLDEN = TESTS / "golden"
PYTHON = os.environ.get("QERL_VLLM_PYTHON")

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
    return export(
        ExportConfig(
            source=str(GOLDEN / "export_logits" / f"adapter_{name}"),
            base=str(GOLDEN / f"nvfp4_{name}"),
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


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("kind", ["base", "requantized"])
def test_checkpoints(kind, name, tmp_path):
    if kind == "base":
        exported(name, "peft", tmp_path / "out", with_base=True)
        folder = tmp_path / "out-base"
    else:
        folder = exported(name, "nvfp4", tmp_path / "out")
    assert read("checkpoint", folder) == {
        "name": "compressed-tensors",
        "nvfp4": True,
        "activations": None,
        "format": "nvfp4-pack-quantized",
        "head": None,
    }
