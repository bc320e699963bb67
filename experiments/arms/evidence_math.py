r"""Arms of a comparison on competition mathematics with DAPO: weights in 16 and in 4 bits.

    uv run --extra cuda python -m experiments.dapo_math \
        --config=experiments/arms/evidence_math.py:nvfp4-lora --config.seed=0

The model is Qwen2.5-Coder-1.5B-Instruct, the problems are those of levels 3 to 5 of MATH's training
set, and MATH-500 tests. All of them come from files:

    --config.model.source=FILE.gguf --config.data.path=math_train.jsonl
    --config.data.eval_path=math500.jsonl

The arms differ in their weights alone; there is no noise. A completion has up to 2,048 tokens, and
the last 512 of them are the buffer in which DAPO's length penalty grows. A rollout samples 16
groups, of which a step trains on 8 informative ones: about as many groups have equal rewards, and a
second rollout would wait for its own longest completion. benchmarks/results/dapo_math.json has the
results, and docs/evidence.md says what they mean.
"""

from ml_collections import ConfigDict

from qerl_jax.config.experiments import dapo_math
from qerl_jax.errors import UserError

# The learning rate is the one that held for 200 steps of GSM8K (evidence.py).
_SETTINGS = {
    "steps": 100,
    "aqn.schedule": "off",
    "optimizer.learning_rate": 5e-5,
    "data.levels": (3, 4, 5),
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 2048,
    "rl.overlong_buffer": 512,
    "rl.dynamic_sampling_prompts": 16,
    "eval.every": 25,
    "eval.problems": 500,
    "checkpoint.every": 25,
    "log.tensorboard": False,
}
ARMS = {"bf16-lora": "bf16", "nvfp4-lora": "nvfp4"}


def get_config(preset: str = "nvfp4-lora") -> ConfigDict:
    """Returns the locked config of an arm.

    Raises:
        UserError: there is no arm of this name.
    """
    if preset not in ARMS:
        raise UserError(f"unknown arm {preset!r}: choose from {', '.join(ARMS)}")
    config = dapo_math.get_config("qwen2.5-coder-1.5b")
    config.update_from_flattened_dict(_SETTINGS | {"model.format": ARMS[preset]})
    config.preset = preset
    return config
