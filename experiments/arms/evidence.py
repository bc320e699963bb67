"""Arms of a comparison on GSM8K: weights in 16 and 4 bits, with and without noise.

    uv run --extra cuda python -m experiments.grpo_gsm8k \
        --config=experiments/arms/evidence.py:nvfp4-lora --config.seed=0
    uv run --extra cuda python -m experiments.sweep \
        --config=experiments/arms/evidence.py:nvfp4-lora    # the arm's grid of learning rates

The model is Qwen2.5-Coder-1.5B-Instruct. Weights and problems come from the hub, or from files:
`--config.model.source=FILE.gguf --config.data.path=gsm8k_train.jsonl`. All arms have the same
prompts, seeds, batch, lengths and number of updates; an arm differs in the fields below and in its
learning rate. The last 473 training problems are held out: they choose the learning rate of an arm.

The weights of `nvfp4-` arms are calibrated, those of `nvfp4-rounded-` arms are rounded to nearest,
as QeRL's published script does. The name of an arm with noise says how strong it is: `aqn-paper`
has the paper's sigmas, and `aqn-kl0.01` the sigma that moves the policy by 0.01 nats a token in
every stage but the first. With `-decay` this falls from stage to stage to 0.0005, as the paper's
sigmas fall. A sweep over `schedules` or `ranks` compares further settings.

`benchmarks.gsm8k` trains an arm and scores it on test problems before and after;
benchmarks/results/gsm8k.json has the results, and docs/evidence.md says what they mean.
"""

from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.config.sweep import ConfigOverrides, product
from qerl_jax.errors import UserError

HELD_OUT = 473
SEEDS = (0, 1, 2, 3, 4)
# The arm that stands for training in 4 bits.
MAIN = "nvfp4-lora"

# The steps of a run take two minutes of an H100 or H200, so that seeds are affordable.
_SETTINGS = {
    "steps": 60,
    "rl.updates_per_rollout": 1,
    "rollout.max_new_tokens": 512,
    "eval.every": 60,
    "eval.problems": HELD_OUT,
    "eval.max_new_tokens": 1024,
    "checkpoint.every": 10,
    "log.tensorboard": False,
}


def _kl(target: float) -> dict[str, Any]:
    """Noise that moves the policy by the same KL in all stages but the first."""
    return {"aqn.schedule": "kl", "aqn.kl_target_start": target, "aqn.kl_target_end": target}


_OFF = {"aqn.schedule": "off"}
_BF16 = {"model.format": "bf16"}
_ROUNDED = {"model.calibration": "none"}
# Arm -> what it changes. The settings are those of the paper, in calibrated NVFP4 with its noise.
ARMS: dict[str, dict[str, Any]] = {
    "bf16-lora": _BF16 | _OFF,
    "nvfp4-rounded-lora": _ROUNDED | _OFF,
    "nvfp4-lora": _OFF,
    "nf4-lora": {"model.format": "nf4"} | _OFF,
    # A checkpoint of all parameters and their moments has 21 GB: only the last one is saved.
    "bf16-full": _BF16 | _OFF | {"train.parameters": "full", "checkpoint.every": 60},
    "bf16-lora-aqn": _BF16 | _kl(0.01),
    "nvfp4-rounded-lora-aqn-paper": _ROUNDED,
    "nvfp4-rounded-lora-aqn-kl0.003": _ROUNDED | _kl(0.003),
    "nvfp4-rounded-lora-aqn-kl0.01": _ROUNDED | _kl(0.01),
    "nvfp4-rounded-lora-aqn-kl0.01-decay": _ROUNDED | _kl(0.01) | {"aqn.kl_target_end": 0.0005},
    "nvfp4-lora-aqn-paper": {},
    "nvfp4-lora-aqn-kl0.01": _kl(0.01),
    "nvfp4-lora-aqn-kl0.03": _kl(0.03),
    # Controls. The paper's noise and a KL of 0.01 leave the entropy as it is (docs/evidence.md). A
    # temperature of 1.1 matches that of a KL of 0.03, and the bonus asks whether more of it at the
    # end helps.
    "nvfp4-lora-temperature": _OFF | {"rollout.temperature": 1.1},
    "nvfp4-lora-entropy": _OFF | {"rl.entropy_coef": 1e-3},
    # W4A8, simulated: in rollouts, with truncated importance weights; and in rollout and update.
    "nvfp4-lora-fp8-rollout": _OFF | {"rollout.dequantize": "fp8", "aqn.correction": "tis"},
    "nvfp4-lora-fp8-both": _OFF | {"rollout.dequantize": "fp8_both"},
    # The best rate of the grid of 60 steps; in 200 steps one of two runs lost what it had gained.
    "nvfp4-lora-lr1e-4": _OFF,
    # From the start to 69 % in minutes, with test problems in place of the held-out ones.
    "speedrun": _OFF,
}
_RATES, _FULL_RATES = (5e-5, 1e-4, 2e-4), (5e-7, 1e-6, 2e-6)
# Learning rates of the arms, the best of each arm's grid in benchmarks/results/gsm8k.json, but that
# "nvfp4-lora" has the one of "bf16-lora", so that only their weights differ.
LEARNING_RATES = dict.fromkeys(ARMS, 5e-5) | {
    "bf16-lora-aqn": 1e-4,
    "nvfp4-lora-lr1e-4": 1e-4,
    "nvfp4-rounded-lora": 1e-4,
    "nvfp4-rounded-lora-aqn-kl0.01-decay": 1e-4,
    "bf16-full": 1e-6,
}
_GRID_SEED = 100  # none of `SEEDS`

# Five times the paper's sigmas, with which this model hardly notices any schedule.
_STRONG = {"aqn.sigma_start": 5e-2, "aqn.sigma_end": 2.5e-3}
STUDIES: dict[str, list[ConfigOverrides]] = {
    "schedules": product(
        {
            "aqn.schedule": [
                "off",
                "constant",
                "exponential",
                "linear",
                "cosine",
                "logarithmic",
            ]
        },
        {"seed": [0, 1]},
    ),
    "ranks": product({"lora.rank": [16, 32, 64]}, {"seed": [0, 1]}),
}


def get_config(preset: str = "nvfp4-lora") -> ConfigDict:
    """Returns the locked config of an arm or of a study.

    Raises:
        UserError: there is neither an arm nor a study of this name.
    """
    if preset not in ARMS and preset not in STUDIES:
        raise UserError(
            f"unknown arm {preset!r}: choose from {', '.join(ARMS)}; or, for a sweep, from "
            f"{', '.join(STUDIES)}"
        )
    config = grpo_gsm8k.get_config("qwen2.5-coder-1.5b")
    config.update_from_flattened_dict(_SETTINGS)
    if preset in STUDIES:
        config.update_from_flattened_dict(_STRONG)
    else:
        config.update_from_flattened_dict(ARMS[preset])
    config.optimizer.learning_rate = LEARNING_RATES.get(preset, LEARNING_RATES["nvfp4-lora"])
    config.preset = preset
    return config


def get_sweep(preset: str = "nvfp4-lora") -> list[ConfigOverrides]:
    """Returns the runs of a study, or the grid of learning rates of an arm."""
    if preset in STUDIES:
        return STUDIES[preset]
    rates = _FULL_RATES if ARMS[preset].get("train.parameters") == "full" else _RATES
    return product({"optimizer.learning_rate": list(rates)}, {"seed": [_GRID_SEED]})
