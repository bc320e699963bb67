r"""DAPO on competition mathematics with a 4-bit policy, QeRL's second setting (arXiv 2510.11696).

    uv run python -m experiments.dapo_math
    uv run python -m experiments.dapo_math --config=dapo_math:qwen2.5-7b

The first command is the stand-in of `grpo_gsm8k.py`, sums up to 20, with this experiment's loss.
The second command trains on BigMath (levels 3 to 5; 4 and 5 from 32B on) from the Hugging Face hub,
or from a local file; `experiments.evaluate RUN --tasks=math500` measures the result on MATH-500:

    --config.data.path=math_train.jsonl --config.data.levels="(3, 4, 5)"

Results: docs/evidence.md has 100 steps of a 1.5B model on MATH; no preset was run as it is.

A plain number between the answer tags counts as an answer, as does \boxed{}; correctness and
format are logged apart.
"""

from ml_collections import ConfigDict

from qerl_jax.config import build, models

_SETTINGS = {
    "steps": 1000,
    "data.source": "open-r1/Big-Math-RL-Verified-Processed:level_3_4_5",
    "data.system_prompt": (
        "Solve the problem step by step. Write your reasoning between <think> and </think>, then "
        "the final answer between <answer> and </answer>."
    ),
    "data.max_question_chars": 1024,
    "data.max_prompt_tokens": 1024,
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 16,
    "rollout.max_new_tokens": 8192,
    "rl.loss": "dapo",
    "rl.updates_per_rollout": 1,
    "rl.dynamic_sampling": True,
    "rl.overlong_buffer": 2048,
}

_REWARDS = {
    "correctness": {"function": "qerl_jax.rewards.functions:math_answer", "weight": 1.0},
    "format": {"function": "qerl_jax.rewards.functions:think_format", "weight": 0.2},
}

_STAND_IN = {
    "experiment": "dapo_sums",
    "data.max_question_chars": 0,
    "rollout.prompts_per_step": 4,
    "rl.overlong_buffer": 1,
}

_HARDEST_FROM = ("qwen2.5-32b", "qwen2.5-72b", "qwen3-32b")


def get_config(preset: str = models.STAND_IN) -> ConfigDict:
    """Returns the locked config of a preset, 'MODEL[,RECIPE]'.

    Raises:
        UserError: the preset does not exist.
    """
    config = build.build(
        "dapo_math", preset, settings=_SETTINGS, rewards=_REWARDS, stand_in=models.SUMS | _STAND_IN
    )
    if preset.partition(",")[0] in _HARDEST_FROM:
        config.data.source = config.data.source.replace("level_3_4_5", "level_4_5")
    return config
