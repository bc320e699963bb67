"""Writes trl_losses.npz, TRL's losses and gradients on fixed tensors, and trl_defaults.json.

The inputs are logprobs, old_logprobs, ref_logprobs, rollout_logprobs and mask (all [B, C]; one row
is masked out, one token has no rollout log-probability) and advantages [B] (one is 0). Ratios lie
on both sides of both clip bounds. For each VARIANT, `VARIANT.loss` is the loss and `VARIANT.grad`
[B, C] its gradient with respect to logprobs. LOSS is grpo, dapo, bnpo (in micro-batches of two
rows), dr_grpo (completions of at most 9 tokens), gspo (importance_sampling_level="sequence"), cispo
(epsilon_high=1.1; TRL bounds the ratio itself by it, and has no lower bound), sapo (with
sapo_temperature_neg=2) or opsm (loss_type="grpo" with off_policy_mask_threshold=0.1; its
log-probabilities of the sampler are opsm_rollout_logprobs, by which one of the two rows with a
negative advantage is masked, and one with a positive advantage would be):

    LOSS              beta = 0
    LOSS_k3           beta = 0.04, use_bias_correction_kl=False
    LOSS_unbiased     beta = 0.04, use_bias_correction_kl=True
    LOSS_tis          beta = 0.04, use_bias_correction_kl=False, and the importance weight
                      min(exp(old_logprobs - rollout_logprobs), 1.5), as the trainer computes it for
                      vllm_importance_sampling_mode="token_truncate"
    dapo_delta        beta = 0, delta=1.3, two-sided clipping
    defaults          the defaults of GRPOConfig
    defaults_kl       the defaults of GRPOConfig, but beta = 0.04

GRPOTrainer._compute_loss runs on a stand-in for the trainer, whose forward pass returns logprobs.
trl_defaults.json has those fields of GRPOConfig that the project's configs have, too.

Needs Python 3.11, torch==2.13.0 (CPU), transformers==5.23.0, trl==1.16.0, accelerate, numpy:

    python tests/golden/make_trl_losses.py
"""

import collections
import json
import os
import pathlib
import tempfile
import types

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
from accelerate import Accelerator
from trl import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

FOLDER = pathlib.Path(__file__).parent
TIS_CAP = 1.5
MICRO_BATCHES = 3  # number of micro-batches for bnpo
LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 9},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    | {"epsilon": 0.001, "epsilon_high": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
    "opsm": {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
}
KLS = {
    "": {"beta": 0.0},
    "_k3": {"beta": 0.04, "use_bias_correction_kl": False},
    "_unbiased": {"beta": 0.04, "use_bias_correction_kl": True},
    "_tis": {"beta": 0.04, "use_bias_correction_kl": False},
}
SETTINGS = {"epsilon": 0.2, "epsilon_high": 0.28}
DEFAULTS = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "use_bias_correction_kl",
    "importance_sampling_level",
    "scale_rewards",
    "num_iterations",
    "mask_truncated_completions",
    "use_vllm",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
)


def make_inputs():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 4, 1, 6, 0, 5])
    shape = (len(lengths), 7)

    def normal():
        return torch.randn(shape, generator=generator)

    logprobs = -3 * torch.rand(shape, generator=generator)
    old_logprobs = logprobs + 0.4 * normal()
    ref_logprobs = logprobs + 0.3 * normal()
    rollout_logprobs = old_logprobs + 0.4 * normal()
    rollout_logprobs[0, 3] = torch.nan
    return {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "opsm_rollout_logprobs": rollout_logprobs + 0.5 * torch.eye(len(lengths))[:, 3:4],
        "mask": (torch.arange(shape[1]) < lengths[:, None]).int(),
        "advantages": torch.tensor([1.2, -0.7, 0.9, -1.1, 0.4, 0.0]),
    }


def trl_loss(inputs, args, *, tis, micro_batches, num_tokens, accelerator):
    """Returns the loss of one micro-batch of rows, with a graph to inputs['logprobs']."""
    trainer = types.SimpleNamespace(
        args=args,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        beta=args.beta,
        importance_sampling_level=args.importance_sampling_level,
        max_completion_length=args.max_completion_length,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        use_vllm=tis,
        vllm_importance_sampling_correction=tis,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=micro_batches,
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
    )
    logprobs, mask = inputs["logprobs"], inputs["mask"]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logprobs,
        torch.zeros_like(logprobs),
        None,
    )
    ids = torch.zeros(mask.shape, dtype=torch.long)
    batch = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": inputs["advantages"],
        "num_items_in_batch": num_tokens,
        "old_per_token_logps": inputs["old_logprobs"],
        "ref_per_token_logps": inputs["ref_logprobs"],
        "sampling_per_token_logps": inputs["rollout_logprobs"],
    }
    if tis:
        difference = (inputs["old_logprobs"] - inputs["rollout_logprobs"]) * mask
        ratio = torch.exp(torch.nan_to_num(difference, nan=0.0))
        batch["importance_sampling_ratio"] = torch.clamp(ratio, max=TIS_CAP)
    return GRPOTrainer._compute_loss(trainer, None, batch)


def main():
    torch.set_num_threads(1)
    variants = {loss + kl: SETTINGS | LOSSES[loss] | KLS[kl] for loss in LOSSES for kl in KLS} | {
        "dapo_delta": SETTINGS | LOSSES["dapo"] | {"beta": 0.0, "delta": 1.3},
        "defaults": {},
        "defaults_kl": {"beta": 0.04},
    }
    with tempfile.TemporaryDirectory() as scratch:
        args = {
            name: GRPOConfig(output_dir=scratch, use_cpu=True, bf16=False, **settings)
            for name, settings in variants.items()
        }
    record = {name: getattr(args["defaults"], name) for name in DEFAULTS}
    (FOLDER / "trl_defaults.json").write_text(json.dumps(record, indent=2) + "\n")
    accelerator = Accelerator(cpu=True)  # the constructor of GRPOConfig resets its state
    arrays = {name: value.numpy() for name, value in make_inputs().items()}
    for name in variants:
        inputs = make_inputs()
        if name.startswith("opsm"):
            inputs["rollout_logprobs"] = inputs["opsm_rollout_logprobs"]
        inputs["logprobs"].requires_grad_()
        micro_batches = MICRO_BATCHES if args[name].loss_type == "bnpo" else 1
        rows = len(inputs["mask"]) // micro_batches
        loss = sum(
            trl_loss(
                {key: value[start : start + rows] for key, value in inputs.items()},
                args[name],
                tis=name.endswith("_tis"),
                micro_batches=micro_batches,
                num_tokens=inputs["mask"].sum(),
                accelerator=accelerator,
            )
            for start in range(0, len(inputs["mask"]), rows)
        )
        (grad,) = torch.autograd.grad(loss, inputs["logprobs"])
        print(name, loss.item())
        arrays[f"{name}.loss"] = loss.detach().numpy()
        arrays[f"{name}.grad"] = grad.numpy()
    np.savez_compressed(FOLDER / "trl_losses.npz", **arrays)


if __name__ == "__main__":
    main()
