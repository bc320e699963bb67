"""GRPO on grade-school arithmetic with a 4-bit policy, QeRL's first setting (arXiv 2510.11696).

    uv run python -m experiments.grpo_gsm8k
    uv run python -m experiments.grpo_gsm8k --config=grpo_gsm8k:qwen2.5-7b

The first command is a stand-in that runs anywhere: SmolLM2-135M-Instruct, from an installed
package, learns sums up to 20. The second command trains on GSM8K with the hyperparameters of
the paper (Table 4) and needs a GPU; weights and problems come from the Hugging Face hub, or from
local paths:

    --config.model.source=FOLDER_OR_GGUF --config.data.path=train.jsonl

Results (docs/benchmarks.md has the commands):

    smollm2-135m          32 steps, 4 minutes on two CPU cores: greedy accuracy 0.25 -> 0.82 on
                          held-out sums
    qwen2.5-coder-1.5b    60 steps of 1.8 s on an H100, 15.5 GB: mean reward 0.67
    other presets         not run yet

`qerl_jax/config/` has the models, the recipes and `fields.py`, every field in a row.
"""

from ml_collections import ConfigDict

from qerl_jax.config import build, models

_SETTINGS = {
    "data.source": "openai/gsm8k",
    "data.system_prompt": (
        "Solve the problem step by step. Write your reasoning between <think> and </think>, then "
        "the final number between <answer> and </answer>."
    ),
}

_REWARDS = {
    "correctness": {"function": "qerl_jax.rewards.functions:numeric_answer", "weight": 1.0},
    "format": {"function": "qerl_jax.rewards.functions:think_format", "weight": 0.1},
}


def get_config(preset: str = models.STAND_IN) -> ConfigDict:
    """Returns the locked config of a preset, 'MODEL[,RECIPE]'.

    Raises:
        UserError: the preset does not exist.
    """
    return build.build(
        "grpo_gsm8k", preset, settings=_SETTINGS, rewards=_REWARDS, stand_in=models.SUMS
    )
