"""No field of the config is dead: a run reads each of them."""

import pytest
from recorded_config import Recorded, fields

import qerl_jax.training.loop
from qerl_jax.commands import train
from qerl_jax.config.experiments.grpo_gsm8k import get_config

# Modes without which some fields are not read.
CHANGES = {
    "steps": 2,  # The first step has no noise.
    "data.curriculum": "learnability",
    "aqn.kl_every": 1,
    "aqn.correction": "tis",
    "rl.dynamic_sampling": True,
    "rl.dynamic_sampling_rounds": 2,
}


@pytest.fixture(scope="module")
def unread(tiny, tmp_path_factory):
    """The fields that a run did not read; one field of the config is unknown to the code."""
    config = tiny.config(CHANGES)
    with config.unlocked():
        config.rl.surprise = 1.0
    recorded = Recorded(config, set())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        # Comparing a value with its limits does not count as reading it.
        validate = qerl_jax.training.loop.validate
        patch.setattr(qerl_jax.training.loop, "validate", lambda config: validate(config.config))
        train.run(recorded, None)
    return fields(config) - recorded.reads


def test_every_field_is_read(unread):
    """The fields of a run that learns from text are in test_sft.py."""
    texts = {"sft.epochs", "sft.max_tokens", "sft.completions_of", "sft.min_reward"}
    assert unread - {"rl.surprise"} <= texts


def test_a_dead_field_is_noticed(unread):
    assert "rl.surprise" in unread


def test_the_tiny_config_has_the_fields_of_the_shipped_one(tiny):
    assert fields(tiny.config()) == fields(get_config())
