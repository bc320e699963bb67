"""The parts of a run that need no model: noise, temperature, loss, optimizer."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import optax
from ml_collections import ConfigDict

from qerl_jax.errors import UserError
from qerl_jax.policy.kl_control import KlTarget, noise_level
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.rl.losses import LossConfig, loss_config
from qerl_jax.rl.train_step import make_optimizer


class Method(NamedTuple):
    """The parts of a run that need no model.

    Attributes:
        lora_config: rank, scale and targets of the adapter.
        sigma: sigma of the noise by step, or the KL that it should cause.
        temperature: sampling temperature by step.
        loss: definition of the loss.
        optimizer: the optimizer with its schedule.
        optimizer_key: options of the optimizer as text, its identity across processes.
    """

    lora_config: LoraConfig
    sigma: optax.Schedule | KlTarget
    temperature: Callable[[int], float]
    loss: LossConfig
    optimizer: optax.GradientTransformation
    optimizer_key: str


def method_of(config: ConfigDict, schedule_steps: int) -> Method:
    """Makes the parts of a run that need no model.

    Args:
        config: the resolved config.
        schedule_steps: number of steps that the schedules of noise and learning rate span.

    Raises:
        UserError: an option is out of range.
    """
    return Method(
        lora_config=LoraConfig(
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            rslora=config.lora.rslora,
            targets=tuple(config.lora.targets),
        ),
        sigma=noise_level(
            config.aqn.schedule,
            sigma_start=config.aqn.sigma_start,
            sigma_end=config.aqn.sigma_end,
            sigma_max=config.aqn.sigma_max,
            kl_target_start=config.aqn.kl_target_start,
            kl_target_end=config.aqn.kl_target_end,
            stages=config.aqn.stages,
            total_steps=schedule_steps,
        ),
        temperature=temperature_schedule(
            config.rollout.temperature_schedule,
            start=config.rollout.temperature,
            end=config.rollout.temperature_end,
            total_steps=schedule_steps,
        ),
        loss=loss_from(config),
        optimizer=_optimizer(config, schedule_steps),
        optimizer_key=f"{config.optimizer.to_dict()} {config.rl.updates_per_rollout} "
        f"{schedule_steps}",
    )


def loss_from(config: ConfigDict) -> LossConfig:
    """The loss that a config names.

    Raises:
        UserError: the loss is unknown, or a value is out of range.
    """
    return loss_config(
        config.rl.loss,
        aggregation=config.rl.aggregation,
        clip_low=config.rl.clip_low,
        clip_high=config.rl.clip_high,
        dual_clip=config.rl.dual_clip or None,
        sapo_temperature_pos=config.rl.sapo_temperature_pos,
        sapo_temperature_neg=config.rl.sapo_temperature_neg,
        off_policy_delta=config.rl.off_policy_delta or None,
        kl_coef=config.rl.kl_coef,
        kl_grad=config.rl.kl_grad,
        entropy_coef=config.rl.entropy_coef,
        tis_cap=config.aqn.tis_cap if config.aqn.correction == "tis" else None,
    )


def temperature_schedule(
    name: str, *, start: float, end: float, total_steps: int
) -> Callable[[int], float]:
    """Returns the sampling temperature by step, from 0 on.

    With u from 0 in the first step to 1 in the last one, and 1 in steps after that, T0 = `start`
    and T1 = `end`:

    * constant: T0
    * linear: T0 + (T1 - T0) u
    * cosine: T1 + (T0 - T1) (1 + cos(pi u)) / 2

    Args:
        name: a name from the list above.
        start: temperature of the first step.
        end: temperature of the last step.
        total_steps: number of training steps.

    Raises:
        UserError: the name is unknown.
    """
    curves: dict[str, Callable[[float], float]] = {
        "constant": lambda u: 0.0,
        "linear": lambda u: u,
        "cosine": lambda u: (1.0 - float(np.cos(np.pi * u))) / 2.0,
    }
    if name not in curves:
        raise UserError(
            f"unknown rollout.temperature_schedule {name!r}: choose from {', '.join(curves)}"
        )
    curve = curves[name]
    return lambda step: start + (end - start) * curve(min(step / max(total_steps - 1, 1), 1.0))


def _optimizer(config: ConfigDict, schedule_steps: int) -> optax.GradientTransformation:
    updates = config.rl.updates_per_rollout
    return make_optimizer(
        learning_rate=config.optimizer.learning_rate,
        schedule=config.optimizer.schedule,
        final_fraction=config.optimizer.final_fraction,
        warmup_updates=config.optimizer.warmup_steps * updates,
        total_updates=schedule_steps * updates,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
    )
