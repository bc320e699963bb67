"""Training norms together with the adapter, or every parameter instead of it."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from refusal import refused
from tiny_model import random_lora, random_tokens, tiny_policy

from qerl_jax.errors import UserError
from qerl_jax.evaluation.load_policy import open_policy
from qerl_jax.policy import aqn, transformer
from qerl_jax.policy.trainable import Trainable, current_policy, trained_params
from qerl_jax.run.folder import RunFolder
from qerl_jax.training.first_policy import first_trainable
from qerl_jax.training.loop import train
from qerl_jax.training.saving import save_policy
from qerl_jax.training.setup import prepare
from qerl_jax.weights.load import load

CHANGES = {"steps": 4, "checkpoint.every": 2, "rl.updates_per_rollout": 2}
CHANGES |= {"rl.mini_batches": 2}
FULL = {"train.parameters": "full", "model.format": "bf16"}
NORMS = {"train.parameters": "lora+norms"}


def noise_of(sigma=0.05, form="additive"):
    return aqn.Noise(key=jax.random.key(3), sigma=np.float32(sigma), form=form, final_norm=False)


def test_trained_params():
    _, params = tiny_policy("qwen3")
    assert trained_params(params, "lora") == {}
    norms = trained_params(params, "lora+norms")
    assert norms.keys() == {"layers"}
    assert [sorted(layer) for layer in norms["layers"]] == [
        ["input_layernorm", "post_attention_layernorm"]
    ] * len(params["layers"])
    full = trained_params(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), "full")
    assert jax.tree.structure(full) == jax.tree.structure(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(full)} == {jnp.dtype(jnp.float32)}


def test_packed_weights_and_unknown_parts_cannot_be_trained():
    _, params = tiny_policy("qwen3", quantized=True)
    refused(r"'full'.*model.format=bf16", trained_params, params, "full")
    refused(r"'norms'.*lora, lora\+norms, full", trained_params, params, "norms")


def test_the_current_policy():
    _, params = tiny_policy("llama", quantized=True)
    trained = jax.tree.map(lambda leaf: leaf + 1, trained_params(params, "lora+norms"))
    current = current_policy(params, Trainable(None, trained))
    for layer, old in zip(current["layers"], params["layers"], strict=True):
        assert layer["qkv_proj"] is old["qkv_proj"]
        np.testing.assert_array_equal(layer["input_layernorm"], old["input_layernorm"] + 1)
    dense = {"weight": jnp.ones(2, jnp.bfloat16)}
    rounded = current_policy(dense, Trainable(None, {"weight": jnp.full(2, 1.001)}))
    assert rounded["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("form", aqn.FORMS)
def test_noise_lies_on_the_trained_norms(form):
    _, params = tiny_policy("llama")
    trained = jax.tree.map(lambda leaf: leaf + 1, trained_params(params, "lora+norms"))
    noise = noise_of(form=form)
    current = current_policy(params, Trainable(None, trained))
    expected = aqn.perturb_norms(noise.key, current, 0.05, form=form, final_norm=False)
    noisy = current_policy(params, Trainable(None, trained), noise)
    jax.tree.map(np.testing.assert_array_equal, noisy, expected)
    assert aqn.count_perturbed(current, noisy) == 2 * len(params["layers"])


@pytest.mark.parametrize("form", aqn.FORMS)
def test_the_gradient_passes_the_noise(form):
    config, params = tiny_policy("llama", num_layers=1)
    tokens, lora = random_tokens(1, 5), random_lora(config)
    noise = noise_of(0.1, form)

    def loss(trained, norm):
        part = {"layers": [trained["layers"][0] | {"input_layernorm": norm}]}
        policy = current_policy(params, Trainable(lora, part), noise)
        logits = transformer.forward(policy, lora, tokens, jnp.array([5]), config=config)
        return jax.nn.log_softmax(logits)[..., 3].sum()

    trained = trained_params(params, "lora+norms")
    norm = trained["layers"][0]["input_layernorm"]
    slope = jax.grad(loss, argnums=1)(trained, norm)
    direction = jnp.asarray(np.random.default_rng(0).standard_normal(norm.shape), jnp.float32)
    step = 1e-2
    ends = (loss(trained, norm + s * direction) for s in (step, -step))
    difference = (next(ends) - next(ends)) / (2 * step)
    np.testing.assert_allclose(difference, slope @ direction, rtol=1e-2)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(NORMS, id="lora+norms"),
        pytest.param(FULL, id="full", marks=pytest.mark.slow),
    ],
)
def whole(request, tiny, tmp_path_factory):
    """Runs without interruption; returns the changes to the config and the run folder."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return request.param, train(tiny.config(CHANGES | request.param), workdir=folder)


def test_a_run(whole):
    changes, run = whole
    policy = open_policy(str(run), adapter="model" if changes is FULL else "adapter")
    base = open_policy(str(run), adapter="none")
    assert (policy.lora is None) == (changes is FULL)
    moved = [
        float(jnp.abs(new["input_layernorm"] - old["input_layernorm"]).max())
        for new, old in zip(policy.model.params["layers"], base.model.params["layers"], strict=True)
    ]
    assert min(moved) > 0
    if changes is FULL:
        assert jnp.any(policy.model.params["embed_tokens"] != base.model.params["embed_tokens"])


def test_a_saved_model_is_the_policy_to_the_bit(tiny, tmp_path):
    """An update of 1e-4 is kept in norms, which are float32 in a policy in bfloat16."""
    config = tiny.config(FULL | {"model.dtype": "bfloat16"})
    model = load(str(tiny.model), format="bf16", dtype="bfloat16")
    trained = jax.tree.map(lambda leaf: leaf + 1e-4, trained_params(model.params, "full"))
    trainable, setup = Trainable(None, trained), types.SimpleNamespace(config=config, model=model)
    save_policy(RunFolder(tmp_path), setup, trainable)
    saved = load(str(tmp_path / "model"), format="bf16", dtype="bfloat16").params
    policy = current_policy(model.params, trainable)
    assert float(policy["norm"][0]) != 1
    jax.tree.map(np.testing.assert_array_equal, saved, policy)


@pytest.mark.parametrize(
    ("correction", "changes"),
    [
        pytest.param("none", NORMS, id="none-lora+norms"),
        pytest.param("none", FULL, id="none-full", marks=pytest.mark.slow),
        pytest.param("noisy_forward", NORMS, id="noisy_forward-lora+norms"),
        pytest.param("noisy_forward", FULL, id="noisy_forward-full", marks=pytest.mark.slow),
    ],
)
def test_the_trainer_has_the_policy_that_sampled(changes, correction, tiny, tmp_path):
    noise = {"aqn.stages": 1, "aqn.schedule": "tiny_run:loud", "aqn.correction": correction}
    brief = {"steps": 1, "eval.every": 0}
    run = train(tiny.config(CHANGES | changes | noise | brief), workdir=tmp_path / "run")
    apart = [row["logprob_diff_max"] for row in tiny_run.results(run)]
    assert max(apart) < 1e-4 if correction == "noisy_forward" else min(apart) > 1e-2


def test_the_plan_counts_trained_parameters(tiny):
    """The memory is that of the parameters, of two moments and of the updated policy."""
    for changes in ({"model.format": "bf16"}, FULL):
        config = tiny.config(changes | {"eval.every": 0})
        setup = prepare(config, {"low": (tiny_run.low_fraction, 1.0)}, schedule_steps=4)
        trained = first_trainable(config, setup.model, setup.method.lora_config, setup.key)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(trained))
        assert setup.memory.training == 3 * size > 0
    assert setup.memory.rollout.policy_copy == size


def test_resume(whole, tiny, tmp_path):
    changes, run = whole
    config = tiny.config(CHANGES | changes)
    calls = itertools.count(1)

    def correctness(*arguments):
        if next(calls) == 37:  # in step 4: an evaluation has 4 calls, a step has 8
            raise tiny_run.KilledError
        return tiny_run.even_end(*arguments)

    rewards = {"correctness": (correctness, 1.0), "format": (tiny_run.low_fraction, 0.1)}
    with pytest.raises(tiny_run.KilledError):
        train(config, workdir=tmp_path / "run", rewards=rewards)
    resumed = train(config, workdir=tmp_path / "run")
    assert tiny_run.results(resumed) == tiny_run.results(run)
    name = "model" if changes is FULL else "adapter"
    for path in (run / name).iterdir():
        assert (resumed / name / path.name).read_bytes() == path.read_bytes()


def test_a_run_can_start_from_an_adapter_with_norms(whole, tiny, tmp_path):
    changes, run = whole
    if changes is FULL:
        pytest.skip("has no adapter")
    start = {"lora.init": str(run / "adapter"), "steps": 1, "eval.every": 0}
    train(tiny.config(CHANGES | changes | start), workdir=tmp_path / "next")
    with pytest.raises(UserError, match=r"trained norms.*train.parameters=lora\+norms"):
        train(tiny.config(CHANGES | start), workdir=tmp_path / "other")


@pytest.mark.slow
def test_the_kl_is_measured_to_the_start(whole, tiny, tmp_path):
    """To the norms of a given adapter too, and to the model where every parameter is trained."""
    changes, run = whole
    start = {"rl.kl_coef": 0.1, "rl.updates_per_rollout": 1, "eval.every": 0, "rl.mini_batches": 1}
    if changes is NORMS:
        start["lora.init"] = str(run / "adapter")
    for steps in (1, 2):  # The second start resumes the run.
        config = tiny.config(CHANGES | changes | start | {"steps": steps})
        train(config, workdir=tmp_path / "resumed")
    whole_run = train(config, workdir=tmp_path / "whole")
    first, second = tiny_run.results(whole_run)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 1e-4
    assert tiny_run.results(tmp_path / "resumed") == [first, second]
