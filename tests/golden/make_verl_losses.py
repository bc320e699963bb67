"""Writes verl_losses.npz, verl's losses and gradients on fixed tensors, and verl_defaults.json.

The inputs are logprobs, old_logprobs, ref_logprobs, rollout_logprobs and mask (all [B, C], no row
empty) and advantages [B]. Ratios lie on both sides of all clip bounds, including the bound of the
dual clip, and beyond exp(20), where verl clamps. Differences from ref_logprobs also lie beyond its
clamp. For each VARIANT, `VARIANT.loss` is the loss and `VARIANT.grad` [B, C] its gradient with
respect to logprobs:

    grpo                   the shipped configuration and use_kl_loss=True, as verl documents GRPO
    dapo_tis               no KL, clip_ratio_high=0.28, and verl's token-level importance weights of
                           the rollout, at most 2
    token-mean             no KL, loss_agg_mode token-mean
    seq-mean-token-mean    no KL, loss_agg_mode seq-mean-token-mean
    seq-mean-token-sum     no KL, loss_agg_mode seq-mean-token-sum
    seq-mean-token-sum-norm    no KL, loss_agg_mode seq-mean-token-sum-norm, loss_scale_factor=9
    gspo                   loss_mode gspo, seq-mean-token-mean, clip ratios 0.001 and 0.1
    gspo_tis               the same with the importance weights of dapo_tis, which tell apart the
                           gradients of the tokens of a sequence
    cispo                  loss_mode cispo, clip ratios 10 and 0.2, as in verl's example
    cispo_both             loss_mode cispo, clip ratios 0.2 and 0.28

`advantages.group` and `advantages.none` are the advantages of rewards [P, G] (all equal in one
group) by verl's GRPO estimator, with and without the division by the standard deviation, at verl's
epsilon. verl_defaults.json has those fields of the shipped configuration that the project's configs
have, too.

Needs Python 3.11, torch==2.13.0 (CPU) and, without their other dependencies, verl==0.9.1,
tensordict==0.15.3, omegaconf, hydra-core, ray, codetiming, orjson, pillow, numpy:

    python tests/golden/make_verl_losses.py
"""

import inspect
import json
import pathlib

import numpy as np
import torch
import verl.trainer.config
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils import losses

FOLDER = pathlib.Path(__file__).parent
SHIPPED = pathlib.Path(verl.trainer.config.__file__).parent / "_generated_ppo_trainer.yaml"
TIS_CAP = 2.0
NO_KL = {"use_kl_loss": False}
VARIANTS = {
    "grpo": {"use_kl_loss": True},
    "dapo_tis": NO_KL | {"clip_ratio_high": 0.28},
    "token-mean": NO_KL | {"loss_agg_mode": "token-mean"},
    "seq-mean-token-mean": NO_KL | {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum": NO_KL | {"loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": NO_KL
    | {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9},
    "gspo": NO_KL
    | {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}
    | {"clip_ratio_low": 0.001, "clip_ratio_high": 0.1},
    "gspo_tis": NO_KL
    | {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}
    | {"clip_ratio_low": 0.001, "clip_ratio_high": 0.1},
    "cispo": NO_KL
    | {"policy_loss": {"loss_mode": "cispo"}, "clip_ratio_low": 10.0, "clip_ratio_high": 0.2},
    "cispo_both": NO_KL
    | {"policy_loss": {"loss_mode": "cispo"}, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
}
ACTOR_DEFAULTS = (
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "loss_agg_mode",
    "entropy_coeff",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "ppo_epochs",
)
OPTIMIZER_DEFAULTS = (
    "lr",
    "lr_scheduler_type",
    "lr_warmup_steps_ratio",
    "betas",
    "weight_decay",
    "clip_grad",
)


def make_inputs():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([7, 4, 1, 6, 2, 5])
    shape = (len(lengths), 7)

    def normal():
        return torch.randn(shape, generator=generator)

    logprobs = -3 * torch.rand(shape, generator=generator)
    old_logprobs = logprobs + 0.4 * normal()
    ref_logprobs = logprobs + 0.3 * normal()
    rollout_logprobs = old_logprobs + 0.6 * normal()
    # Advantages of rows 1 and 3 are negative. Ratios of 7.4, exp(22) and exp(-22):
    old_logprobs[1, 0] = logprobs[1, 0] - 2
    old_logprobs[4, 0] = logprobs[4, 0] - 22
    old_logprobs[4, 1] = logprobs[4, 1] + 22
    old_logprobs[3, 2] = logprobs[3, 2] - 22
    old_logprobs[3, 3] = logprobs[3, 3] + 22
    # KL estimates of 50.6, 24 and more than exp(20).
    ref_logprobs[0, 1] = logprobs[0, 1] + 4
    ref_logprobs[0, 2] = logprobs[0, 2] - 25
    ref_logprobs[0, 3] = logprobs[0, 3] + 22
    return {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "mask": (torch.arange(shape[1]) < lengths[:, None]).int(),
        "advantages": torch.tensor([1.2, -0.7, 0.9, -1.1, 0.4, 0.0]),
    }


def verl_loss(inputs, actor, *, tis):
    """Returns the actor's loss, with a graph to inputs['logprobs']."""
    mask = inputs["mask"]
    tensors = {
        "response_mask": mask,
        "old_log_probs": inputs["old_logprobs"],
        "ref_log_prob": inputs["ref_logprobs"],
        "advantages": inputs["advantages"][:, None].expand(mask.shape),
    }
    if tis:
        tensors["rollout_is_weights"], _ = compute_rollout_correction_weights(
            inputs["old_logprobs"] - inputs["rollout_logprobs"],
            mask,
            rollout_is="token",
            rollout_is_threshold=TIS_CAP,
        )
    data = TensorDict(tensors, batch_size=len(mask))
    data.set_non_tensor("dp_size", 1)
    data.set_non_tensor("batch_num_tokens", None)
    data.set_non_tensor("global_batch_size", None)
    losses.no_padding_2_padding = lambda tensor, _: tensor  # the inputs are padded already
    return losses.ppo_loss(actor, {"log_probs": inputs["logprobs"]}, data)[0]


def grpo_advantages(rewards, *, scale):
    groups = np.arange(rewards.shape[0]).repeat(rewards.shape[1])
    advantages, _ = compute_grpo_outcome_advantage(
        rewards.reshape(-1, 1).clone(),
        torch.ones(rewards.numel(), 1),
        groups,
        norm_adv_by_std_in_grpo=scale == "group",
    )
    return advantages.reshape(rewards.shape)


def main():
    torch.set_num_threads(1)
    shipped = OmegaConf.load(SHIPPED)
    OmegaConf.resolve(shipped.actor_rollout_ref)
    shipped_actor = shipped.actor_rollout_ref.actor
    arrays = {name: value.numpy() for name, value in make_inputs().items()}
    for name, changes in VARIANTS.items():
        inputs = make_inputs()
        inputs["logprobs"].requires_grad_()
        actor = omega_conf_to_dataclass(
            OmegaConf.merge(shipped_actor, {"ppo_micro_batch_size_per_gpu": 1}, changes)
        )
        loss = verl_loss(inputs, actor, tis=name.endswith("_tis"))
        (grad,) = torch.autograd.grad(loss, inputs["logprobs"])
        print(name, loss.item())
        arrays[f"{name}.loss"] = loss.detach().numpy()
        arrays[f"{name}.grad"] = grad.numpy()
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.3, 1.1, 0.0, -2.0], [1.1, 1.1, 1.1, 1.1]])
    arrays["rewards"] = rewards.numpy()
    for scale in ("group", "none"):
        arrays[f"advantages.{scale}"] = grpo_advantages(rewards, scale=scale).numpy()
    np.savez_compressed(FOLDER / "verl_losses.npz", **arrays)
    epsilon = inspect.signature(compute_grpo_outcome_advantage).parameters["epsilon"].default
    record = (
        {name: shipped_actor[name] for name in ACTOR_DEFAULTS}
        | {name: OmegaConf.to_object(shipped_actor.optim)[name] for name in OPTIMIZER_DEFAULTS}
        | {"norm_adv_by_std_in_grpo": shipped.algorithm.norm_adv_by_std_in_grpo}
        | {"advantage_epsilon": epsilon}
    )
    (FOLDER / "verl_defaults.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
