"""Writes trl_losses.npz: TRL's GRPO and DAPO losses, and their gradients, on fixed tensors.

The inputs: logprobs, old_logprobs, ref_logprobs, rollout_logprobs, mask (all [B, C]; one row is
masked out, one token has no rollout log-probability) and advantages [B] (one is 0). Ratios lie on
both sides of both clip bounds: epsilon 0.2, epsilon_high 0.28. For each VARIANT, `VARIANT.loss` is
the loss and `VARIANT.grad` [B, C] its gradient with respect to logprobs:

    grpo, dapo       beta = 0
    ..._k3           beta = 0.04, use_bias_correction_kl=False
    ..._unbiased     beta = 0.04, use_bias_correction_kl=True
    ..._tis          beta = 0.04, use_bias_correction_kl=False, and the importance weight
                     min(exp(old_logprobs - rollout_logprobs), 1.5), as the trainer computes it for
                     vllm_importance_sampling_mode="token_truncate"

GRPOTrainer._compute_loss runs on a stand-in for the trainer, whose forward pass returns logprobs.

Needs Python 3.11, torch==2.13.0 (CPU), transformers==5.23.0, trl==1.16.0, accelerate, numpy:

    python tests/golden/make_trl_losses.py
"""

import collections
import os
import pathlib
import types

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
from accelerate import Accelerator
from trl.trainer.grpo_trainer import GRPOTrainer

PATH = pathlib.Path(__file__).parent / "trl_losses.npz"
TIS_CAP = 1.5
BETAS = {"": 0.0, "_k3": 0.04, "_unbiased": 0.04, "_tis": 0.04}


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
        "mask": (torch.arange(shape[1]) < lengths[:, None]).int(),
        "advantages": torch.tensor([1.2, -0.7, 0.9, -1.1, 0.4, 0.0]),
    }


def trl_loss(inputs, *, loss_type, beta, unbiased, tis, accelerator):
    """Returns the loss, with a graph to inputs['logprobs']."""
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(
            delta=None, use_bias_correction_kl=unbiased, steps_per_generation=1
        ),
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=beta,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=tis,
        vllm_importance_sampling_correction=tis,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
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
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": inputs["old_logprobs"],
        "ref_per_token_logps": inputs["ref_logprobs"],
    }
    if tis:
        difference = (inputs["old_logprobs"] - inputs["rollout_logprobs"]) * mask
        ratio = torch.exp(torch.nan_to_num(difference, nan=0.0))
        batch["importance_sampling_ratio"] = torch.clamp(ratio, max=TIS_CAP)
    loss = GRPOTrainer._compute_loss(trainer, None, batch)
    print(loss_type, beta, unbiased, tis, loss.item(), dict(trainer._metrics["train"]))
    return loss


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    inputs = make_inputs()
    arrays = {name: value.numpy() for name, value in inputs.items()}
    for loss_type in ("grpo", "dapo"):
        for suffix, beta in BETAS.items():
            inputs["logprobs"] = torch.tensor(arrays["logprobs"], requires_grad=True)
            loss = trl_loss(
                inputs,
                loss_type=loss_type,
                beta=beta,
                unbiased=suffix == "_unbiased",
                tis=suffix == "_tis",
                accelerator=accelerator,
            )
            (grad,) = torch.autograd.grad(loss, inputs["logprobs"])
            arrays[f"{loss_type}{suffix}.loss"] = loss.detach().numpy()
            arrays[f"{loss_type}{suffix}.grad"] = grad.numpy()
    np.savez(PATH, **arrays)


if __name__ == "__main__":
    main()
