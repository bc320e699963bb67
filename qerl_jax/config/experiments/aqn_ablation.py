"""An ablation of the noise: its schedules against no noise, three seeds each.

    uv run python -m experiments.sweep --config=aqn_ablation
    uv run python -m experiments.sweep --config=aqn_ablation:qwen2.5-3b

The first command needs no GPU and no hub: the stand-in of `grpo_gsm8k.py` with half of the steps
and half of the samples per step, with noise and without. Three seeds of a small model can tell a
large effect from none, not one schedule from another. The second command compares the schedules, as
the paper does (QeRL, arXiv:2510.11696, Figure 9), and needs a GPU.

Results of the first command, 22 minutes on two CPU cores: greedy accuracy 64 ± 22 % without noise,
65 ± 15 % with it (three seeds, half of the 95 % interval), so no effect that it could see. The
second command has not run yet.
"""

from ml_collections import ConfigDict

from qerl_jax.config import models
from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.config.sweep import ConfigOverrides, chain, product

_STAND_IN = {
    "steps": 16,
    "aqn.stages": 5,
    "aqn.sigma_start": 5e-3,
    "aqn.kl_rows": 3,  # fill one buffer of the update
    "rollout.prompts_per_step": 4,
    "eval.every": 16,
    "eval.problems": 64,
    "log.tensorboard": False,
}


def get_config(preset: str = models.STAND_IN) -> ConfigDict:
    """Returns the locked config that all runs share, before their overrides."""
    config = grpo_gsm8k.get_config(preset)
    if preset == models.STAND_IN:
        config.update_from_flattened_dict(_STAND_IN)
    return config


def get_sweep(preset: str = models.STAND_IN) -> list[ConfigOverrides]:
    """Returns the overrides of the runs."""
    schedules = ["exponential"]
    if preset != models.STAND_IN:
        schedules += ["cosine", "linear", "logarithmic"]
    return product(
        chain({"aqn.schedule": ["off"]}, {"aqn.schedule": schedules}), {"seed": [0, 1, 2]}
    )
