"""transformers and PEFT compute the project's results from its exports.

Generators: golden/make_export_logits.py, golden/make_export_greedy.py.
"""

import dataclasses
import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_model import rounded_to_bfloat16

from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.policy import transformer
from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.config import SamplingConfig
from qerl_jax.rollout.sampler import Sampler

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDER = GOLDEN / "export_logits"
forward = jax.jit(transformer.forward, static_argnames="config")


def generator(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GOLDEN)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports every model and checks that the files are those that transformers read."""
    folder = tmp_path_factory.mktemp("exports")
    digests = generator("make_export_logits").export_all(folder)
    assert digests == json.loads((FOLDER / "exports.json").read_text())
    return folder


@pytest.mark.parametrize("form", ["peft", "merged", "nvfp4"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_logits(name, form, exports):
    golden = load_file(FOLDER / "logits.safetensors")
    base = str(GOLDEN / f"nvfp4_{name}") if form == "peft" else ""
    policy = open_policy(str(exports / f"{name}.{form}"), base=base, dtype="float32")
    assert (policy.lora is None) == (form != "peft")
    logits = jax.jit(forward, static_argnames="config")(
        rounded_to_bfloat16(policy.model.params),
        policy.lora,
        golden["ids"][None],
        jnp.array([len(golden["ids"])]),
        config=policy.model.config,
    )[0]
    expected = golden[f"{name}.{form}"]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_greedy_tokens_of_smollm2(tmp_path):
    made = generator("make_export_greedy")
    made.export_all(tmp_path)
    golden = json.loads((GOLDEN / "export_greedy.json").read_text())
    for form in made.FORMATS:
        base = str(tmp_path / "peft-base") if form == "peft" else ""
        policy = open_policy(str(tmp_path / form), base=base, dtype="float32")
        sampler = Sampler(
            policy.model.config,
            dataclasses.replace(policy.model.tokenizer, eos_ids=()),
            SamplingConfig(max_new_tokens=made.NEW_TOKENS, temperature=0.0),
        )
        exported = Policy(rounded_to_bfloat16(policy.model.params), policy.lora)
        rollout = sampler.rollout(jax.random.key(0), exported, made.prompts())
        expected = [row["tokens"] for row in golden[form]]
        np.testing.assert_array_equal(rollout.tokens, expected, err_msg=form)
    assert golden["peft"] != golden["nvfp4"]
