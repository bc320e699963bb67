"""Recipes: noise, loss, advantages and optimizer of the paper and of other libraries.

`fields.py` explains the fields. Tests compare each recipe with what its library computes.
"""

from typing import Any

# Recipe -> the values that it sets instead of the experiment's.
RECIPES: dict[str, dict[str, Any]] = {
    # QeRL, arXiv 2510.11696, Table 4 and appendix E: the experiment as it is. Its noise has gained
    # nothing in the runs of docs/evidence.md, on GSM8K with a calibrated policy of 1.5B.
    "paper": {},
    # The paper's recipe for the first run on a GPU: few steps, short completions, and no noise.
    "first_run": {
        "steps": 100,
        "aqn.schedule": "off",
        "rollout.max_new_tokens": 1024,
        "rl.overlong_buffer": 0,
        "eval.every": 25,
        "checkpoint.every": 10,
    },
    # QeRL's released code at commit e8c6e79 (2025-11-27), training/dapo_*_nvfp4_single_gpu.sh. Its
    # "DAPO" has no dynamic sampling and takes the mean over the tokens of a micro-batch. The noise
    # here is the noise that the code is written to add, on every norm; the code searches for norm
    # classes that vLLM's model does not have, and adds none. Its AdamW has moments of 8 bits; its
    # warm-up is a tenth of the run, here of 600 steps. Its sizes are
    # --config.rollout.prompts_per_step=1 --config.rollout.group_size=2
    # --config.rollout.max_new_tokens=2048 --config.lora.rank=16 --config.lora.alpha=16
    # --config.train.micro_batch_rows=2.
    "reference_code": {
        "model.calibration": "none",
        "aqn.schedule": "reference",
        "aqn.stages": 10,
        "aqn.sigma_start": 1e-2,
        "aqn.sigma_end": 1e-4,
        "aqn.form": "additive",
        "aqn.final_norm": True,
        "aqn.correction": "none",
        "rl.loss": "bnpo",
        "rl.aggregation": "",
        "rl.clip_low": 0.2,
        "rl.clip_high": 0.28,
        "rl.dual_clip": 0.0,
        "rl.kl_coef": 0.0,
        "rl.kl_grad": "k3",
        "rl.advantage_scale": "group",
        "rl.advantage_eps": 1e-4,
        "rl.updates_per_rollout": 1,
        "rl.dynamic_sampling": False,
        "rl.mask_truncated": True,
        "rl.overlong_buffer": 0,
        "optimizer.learning_rate": 1e-5,
        "optimizer.schedule": "cosine",
        "optimizer.final_fraction": 0.0,
        "optimizer.warmup_steps": 60,
        "optimizer.b1": 0.9,
        "optimizer.b2": 0.99,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "optimizer.max_grad_norm": 0.2,
        "train.parameters": "lora+norms",
    },
    # TRL 1.16.0: the defaults of its GRPOConfig, made for training all weights; LoRA usually takes
    # ten times the learning rate.
    "trl": {
        "aqn.schedule": "off",
        "aqn.correction": "none",
        "rl.loss": "dapo",
        "rl.aggregation": "",
        "rl.clip_low": 0.2,
        "rl.clip_high": 0.2,
        "rl.dual_clip": 0.0,
        "rl.kl_coef": 0.0,
        "rl.kl_grad": "unbiased",
        "rl.advantage_scale": "group",
        "rl.advantage_eps": 1e-4,
        "rl.updates_per_rollout": 1,
        "rl.dynamic_sampling": False,
        "rl.mask_truncated": False,
        "rl.overlong_buffer": 0,
        "optimizer.learning_rate": 1e-6,
        "optimizer.schedule": "linear",
        "optimizer.final_fraction": 0.0,
        "optimizer.warmup_steps": 0,
        "optimizer.b1": 0.9,
        "optimizer.b2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.0,
        "optimizer.max_grad_norm": 1.0,
    },
    # verl 0.9.1: the defaults of its actor with what its documentation sets for GRPO (use_kl_loss).
    # It splits a rollout into mini-batches and takes an update on each; here all are one update,
    # unless rl.mini_batches is set.
    "verl": {
        "aqn.schedule": "off",
        "aqn.correction": "none",
        "rl.loss": "dapo",
        "rl.aggregation": "",
        "rl.clip_low": 0.2,
        "rl.clip_high": 0.2,
        "rl.dual_clip": 3.0,
        "rl.kl_coef": 1e-3,
        "rl.kl_grad": "k3_clipped",
        "rl.advantage_scale": "group",
        "rl.advantage_eps": 1e-6,
        "rl.updates_per_rollout": 1,
        "rl.dynamic_sampling": False,
        "rl.mask_truncated": False,
        "rl.overlong_buffer": 0,
        "optimizer.learning_rate": 1e-6,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.b1": 0.9,
        "optimizer.b2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
        "optimizer.max_grad_norm": 1.0,
    },
    # The paper's recipe with another loss: Dr. GRPO, arXiv 2503.20783;
    "dr_grpo": {"rl.loss": "dr_grpo", "rl.aggregation": "", "rl.advantage_scale": "none"},
    # GSPO, arXiv 2507.18071, with the clip ranges of its section 5.1;
    "gspo": {"rl.loss": "gspo", "rl.aggregation": "", "rl.clip_low": 3e-4, "rl.clip_high": 4e-4},
    # CISPO, arXiv 2506.13585, with the weight at most 5, as in ScaleRL (arXiv 2510.13786).
    "cispo": {"rl.loss": "cispo", "rl.aggregation": "", "rl.clip_low": 1.0, "rl.clip_high": 4.0},
}
