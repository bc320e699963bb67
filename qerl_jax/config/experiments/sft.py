"""Supervised fine-tuning of the adapter on rows of text, with a frozen policy in 4 bits.

    uv run python -m experiments.sft
    uv run python -m experiments.sft --config=sft:qwen2.5-1.5b --config.data.path=rows.jsonl

The first command is a stand-in that runs anywhere: SmolLM2-135M-Instruct, from an installed
package, learns to write sums up to 20. The second command learns from the rows of a file; without
data.path they are the solutions of GSM8K. docs/learn_from_text.md lists the forms of a row. GRPO
takes the adapter by init_from.
"""

from ml_collections import ConfigDict

from qerl_jax.config import build, models

_SETTINGS = {
    "sft.rows_per_step": 16,
    "sft.epochs": 1.0,
    "data.source": "openai/gsm8k",
    # What a run that samples nothing has no use for.
    "aqn.schedule": "off",
    "rl.updates_per_rollout": 1,
    "rl.routing_replay": "none",
    # TRL's, but for the learning rate, which is its advice for LoRA.
    "optimizer.learning_rate": 1e-4,
    "optimizer.schedule": "cosine",
    "optimizer.b2": 0.999,
    "optimizer.weight_decay": 0.0,
    "optimizer.max_grad_norm": 1.0,
}

_STAND_IN = {
    "experiment": "sft_sums",
    "steps": 24,
    "sft.epochs": 0.0,
    "sft.max_tokens": 64,
    "data.examples": (),
    "optimizer.schedule": "constant",
    "eval.every": 8,
    "eval.problems": 64,
}


def get_config(preset: str = models.STAND_IN) -> ConfigDict:
    """Returns the locked config of a preset, 'MODEL[,RECIPE]'.

    Raises:
        UserError: the preset does not exist.
    """
    sums = {name: v for name, v in models.SUMS.items() if not name.startswith("rewards.")}
    return build.build("sft", preset, settings=_SETTINGS, rewards={}, stand_in=sums | _STAND_IN)
