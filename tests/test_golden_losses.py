"""Losses, advantages and the recipes equal TRL's, verl's and the papers' equations.

Generators: golden/make_trl_losses.py, golden/make_verl_losses.py.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from row_loss import loss_config, row_loss

from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.losses import token_weights
from qerl_jax.training.setup import loss_from
from qerl_jax.training.validate import validate

GOLDEN = pathlib.Path(__file__).parent / "golden"
MAX_NEW_TOKENS = 9  # TRL's max_completion_length and verl's loss_scale_factor
MICRO_BATCH_ROWS = 2
TRL_OPTIONS = {"sapo": {"sapo_temperature_neg": 2.0}, "opsm": {"off_policy_delta": 0.1}}
TRL_CLIPS = {"gspo": (0.001, 0.1), "cispo": (1.0, 0.1)}  # the other losses have (0.2, 0.28)


def assert_loss(golden, variant, config):
    """Asserts that loss and gradient on the fixed tensors equal those of a variant."""
    mask = golden["mask"].astype(np.float32)
    rollout = "opsm_rollout_logprobs" if variant.startswith("opsm") else "rollout_logprobs"
    weights = token_weights(
        mask,
        config.aggregation,
        max_new_tokens=MAX_NEW_TOKENS,
        micro_batch_rows=MICRO_BATCH_ROWS,
    )

    def loss(logprobs):
        return row_loss(
            logprobs,
            old_logprobs=golden["old_logprobs"],
            advantages=golden["advantages"],
            mask=mask,
            weights=weights,
            config=config,
            ref_logprobs=golden["ref_logprobs"],
            rollout_logprobs=golden[rollout],
        )[0]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(golden["logprobs"]))
    expected = golden[f"{variant}.grad"]
    np.testing.assert_allclose(value, golden[f"{variant}.loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def trl():
    return np.load(GOLDEN / "trl_losses.npz")


@pytest.fixture(scope="module")
def verl():
    return np.load(GOLDEN / "verl_losses.npz")


def preset(recipe, changes=None):
    config = grpo_gsm8k.get_config(f"qwen2.5-7b,{recipe}")
    config.update_from_flattened_dict(changes or {})
    validate(config)
    return config


@pytest.mark.parametrize("variant", ["", "_k3", "_unbiased", "_tis"])
@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "sapo", "opsm"]
)
def test_losses_of_trl(trl, name, variant):
    clip_low, clip_high = TRL_CLIPS.get(name, (0.2, 0.28))
    config = loss_config(
        name,
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=0.04 if variant else 0.0,
        kl_grad="unbiased" if variant == "_unbiased" else "k3",
        tis_cap=1.5 if variant == "_tis" else None,
        **TRL_OPTIONS.get(name, {}),
    )
    assert_loss(trl, name + variant, config)


def test_two_sided_clipping_of_trl_is_the_dual_clip(trl):
    assert_loss(trl, "dapo_delta", loss_config("dapo", dual_clip=1.3))


def of_verl(aggregation):
    return loss_config("grpo", aggregation=aggregation, clip_high=0.2, dual_clip=3.0)


@pytest.mark.parametrize(
    ("variant", "config"),
    [
        ("dapo_tis", loss_config("dapo", dual_clip=3.0, tis_cap=2.0)),
        ("token-mean", of_verl("token")),
        ("seq-mean-token-mean", of_verl("sequence")),
        (
            "seq-mean-token-sum",
            of_verl("sequence_sum"),
        ),
        (
            "seq-mean-token-sum-norm",
            of_verl("constant"),
        ),
        # verl gives each token of a sequence its own gradient; the sums are the same.
        ("gspo", loss_config("gspo", clip_low=0.001, clip_high=0.1)),
        ("gspo", loss_config("gspo_token", clip_low=0.001, clip_high=0.1)),
        ("gspo_tis", loss_config("gspo_token", clip_low=0.001, clip_high=0.1, tis_cap=2.0)),
        ("cispo", loss_config("cispo", clip_low=10.0, clip_high=0.2)),
        ("cispo_both", loss_config("cispo", clip_low=0.2, clip_high=0.28)),
    ],
)
def test_losses_of_verl(verl, variant, config):
    assert_loss(verl, variant, config)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_of_verl(verl, scale):
    eps = preset("verl").rl.advantage_eps
    advantages = group_advantages(verl["rewards"], scale=scale, eps=eps)
    np.testing.assert_allclose(advantages, verl[f"advantages.{scale}"], rtol=1e-5, atol=1e-7)


def test_preset_trl(trl):
    assert_loss(trl, "defaults", loss_from(preset("trl")))
    assert_loss(trl, "defaults_kl", loss_from(preset("trl", {"rl.kl_coef": 0.04})))
    config, theirs = preset("trl"), json.loads((GOLDEN / "trl_defaults.json").read_text())
    assert theirs["epsilon_high"] is theirs["delta"] is None
    assert not theirs["use_vllm"]  # without vLLM, TRL does not correct for the rollout's policy
    assert {
        "loss_type": config.rl.loss,
        "epsilon": config.rl.clip_low,
        "beta": config.rl.kl_coef,
        "use_bias_correction_kl": config.rl.kl_grad == "unbiased",
        "importance_sampling_level": loss_from(config).ratio,
        "scale_rewards": config.rl.advantage_scale,
        "num_iterations": config.rl.updates_per_rollout,
        "mask_truncated_completions": config.rl.mask_truncated,
        "learning_rate": config.optimizer.learning_rate,
        "lr_scheduler_type": config.optimizer.schedule,
        "warmup_steps": config.optimizer.warmup_steps,
        "adam_beta1": config.optimizer.b1,
        "adam_beta2": config.optimizer.b2,
        "adam_epsilon": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.optimizer.max_grad_norm,
    }.items() <= theirs.items()
    assert (config.rl.clip_high, config.rl.dual_clip) == (config.rl.clip_low, 0.0)
    assert (config.aqn.schedule, config.aqn.correction) == ("off", "none")


def test_preset_verl(verl):
    config, theirs = preset("verl"), json.loads((GOLDEN / "verl_defaults.json").read_text())
    assert_loss(verl, "grpo", loss_from(config))
    assert (theirs["loss_agg_mode"], theirs["kl_loss_type"]) == ("token-mean", "low_var_kl")
    assert theirs["entropy_coeff"] == theirs["lr_warmup_steps_ratio"] == 0
    assert theirs["norm_adv_by_std_in_grpo"] == (config.rl.advantage_scale == "group")
    assert {
        "clip_ratio_low": config.rl.clip_low,
        "clip_ratio_high": config.rl.clip_high,
        "clip_ratio_c": config.rl.dual_clip,
        "kl_loss_coef": config.rl.kl_coef,
        "ppo_epochs": config.rl.updates_per_rollout,
        "advantage_epsilon": config.rl.advantage_eps,
        "lr": config.optimizer.learning_rate,
        "lr_scheduler_type": config.optimizer.schedule,
        "betas": [config.optimizer.b1, config.optimizer.b2],
        "weight_decay": config.optimizer.weight_decay,
        "clip_grad": config.optimizer.max_grad_norm,
    }.items() <= theirs.items()
    assert (config.aqn.schedule, config.aqn.correction) == ("off", "none")


def test_preset_reference_code(trl):
    # The code uses TRL 0.21; the loss_type 'bnpo' has not changed since.
    config = preset("reference_code")
    assert_loss(trl, "bnpo", loss_from(config))
    assert (config.aqn.schedule, config.aqn.stages) == ("reference", 10)
    assert (config.aqn.sigma_start, config.aqn.sigma_end) == (1e-2, 1e-4)
    assert (config.rl.updates_per_rollout, config.rl.mask_truncated) == (1, True)
    assert config.train.parameters == "lora+norms"
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.b1, optimizer.b2) == (1e-5, 0.9, 0.99)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.1, 0.2)
    assert (optimizer.schedule, optimizer.final_fraction) == ("cosine", 0.0)
    assert optimizer.warmup_steps == 0.1 * config.steps


def test_presets_that_trl_can_be_set_to(trl):
    assert_loss(trl, "grpo", loss_from(preset("paper")))
    assert_loss(trl, "dr_grpo", loss_from(preset("dr_grpo")))
    assert preset("dr_grpo").rl.advantage_scale == "none"
    clips = {"rl.clip_low": 0.001, "rl.clip_high": 0.1}
    assert_loss(trl, "gspo", loss_from(preset("gspo", clips)))
    assert_loss(trl, "cispo", loss_from(preset("cispo", {"rl.clip_high": 0.1})))
