"""Noise whose sigma follows its effect: the measured KL of the noisy against the clean policy.

The same sigma moves one policy much and another one hardly at all. A schedule of KL targets instead
states how far the policy that samples may be from the one that is trained, and a controller finds
the sigma.

For small noise the KL grows as sigma^2: the KL of two near distributions is quadratic in their
difference, and the difference is linear in the noise. If the next step has the same ratio of KL to
sigma^2 as the last measured one, the sigma that meets its target is

    sigma <- sigma * clip(sqrt(target / KL), 1 / 2, 2),    kept in [1e-4, 1] * sigma_max

A single measurement is enough where the relation holds, so no average is kept; the clip bounds what
one unlucky measurement can do. In a mixture of experts small noise sends a share of the tokens that
grows as sigma to other experts, and so does the KL: each step then goes half of the way, in
logarithms.
"""

import dataclasses
import math

import numpy as np
import optax

from qerl_jax.errors import UserError
from qerl_jax.policy import aqn

SCHEDULE = "kl"
# Rounding alone moves a policy in bfloat16 by about this KL, in nats per token.
LOWEST_TARGET = 1e-4

_LARGEST_CHANGE = 2.0  # factor by which sigma changes in a step
_SMALLEST_SIGMA = 1e-4  # as a fraction of the largest sigma


@dataclasses.dataclass(frozen=True)
class KlTarget:
    """What the noise of a run should do to its policy."""

    schedule: optax.Schedule  # target KL in nats per token by step; 0 where there is no noise
    sigma_start: float  # sigma of the first step with noise
    sigma_max: float  # largest sigma


@dataclasses.dataclass(frozen=True)
class SigmaState:
    """What a controller remembers between steps; the same numbers always give the same sigma."""

    # Sigma of the step that was measured last; None before the first one.
    sigma: float | None = None
    kl: float | None = None  # KL that was measured there; None if it was not finite
    not_finite: int = 0  # number of steps whose KL was not finite


NOTHING_MEASURED = SigmaState()


def noise_level(
    schedule: str,
    *,
    sigma_start: float,
    sigma_end: float,
    sigma_max: float,
    kl_target_start: float,
    kl_target_end: float,
    stages: int,
    total_steps: int,
) -> optax.Schedule | KlTarget:
    """Returns the sigmas of a run by step, or with the schedule 'kl' the KL that they should cause.

    The targets go from the first to the last noisy stage by equal factors. The stages are those of
    `aqn.sigma_schedule`: the first one has no noise.

    Args:
        schedule: 'kl', or a schedule of sigmas as in `aqn.sigma_schedule`.
        sigma_start: sigma of the first stage with noise; with 'kl' of its first step.
        sigma_end: sigma that a schedule of sigmas approaches.
        sigma_max: with 'kl', the largest sigma.
        kl_target_start: with 'kl', the KL of the first noisy stage, in nats per token.
        kl_target_end: with 'kl', the KL of the last stage.
        stages: number of stages, including the first one without noise.
        total_steps: number of training steps.

    Raises:
        UserError: a target is below what rounding alone does, a sigma is out of range, or as in
            `aqn.sigma_schedule`.
    """
    stage_options = {"stages": stages, "total_steps": total_steps}
    if schedule != SCHEDULE:
        return aqn.sigma_schedule(
            schedule, sigma_start=sigma_start, sigma_end=sigma_end, **stage_options
        )
    for name, value in (("kl_target_start", kl_target_start), ("kl_target_end", kl_target_end)):
        if not LOWEST_TARGET <= value < math.inf:
            raise UserError(
                f"aqn.{name}={value}: rounding alone moves the policy by about {LOWEST_TARGET} "
                f"nats a token, so no sigma can meet a smaller target; pass {LOWEST_TARGET} or more"
            )
    if not 0.0 < sigma_start <= sigma_max < math.inf:
        raise UserError(
            f"aqn.sigma_start={sigma_start}, aqn.sigma_max={sigma_max}: aqn.schedule='kl' starts "
            "at a sigma above 0 and at most aqn.sigma_max"
        )
    targets = aqn.sigma_schedule(
        "reference", sigma_start=kl_target_start, sigma_end=kl_target_end, **stage_options
    )
    return KlTarget(schedule=targets, sigma_start=sigma_start, sigma_max=sigma_max)


def sigma_of_step(level: optax.Schedule | KlTarget, state: SigmaState, step: int) -> float:
    """Returns the sigma of a step.

    Args:
        level: schedule of sigmas, or of KL targets.
        state: the last measurement.
        step: number of finished steps.
    """
    if not isinstance(level, KlTarget):
        return float(np.asarray(level(step)))
    target = float(np.asarray(level.schedule(step)))
    if target == 0.0:
        return 0.0
    sigma = level.sigma_start if state.sigma is None else state.sigma
    if state.kl is not None:
        # Rounding can make a KL of almost 0 negative.
        factor = math.sqrt(target / state.kl) if state.kl > 0 else math.inf
        sigma *= min(max(factor, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE)
    return min(max(sigma, _SMALLEST_SIGMA * level.sigma_max), level.sigma_max)


def update_state(
    level: optax.Schedule | KlTarget, state: SigmaState, *, sigma: float, kl: float
) -> SigmaState:
    """Returns the state after a step with noise in which the KL was measured.

    A KL that is not finite leaves sigma as it is, and is counted.

    Args:
        level: schedule of sigmas, which needs no state, or of KL targets.
        state: the state before the step.
        sigma: sigma of the step.
        kl: KL of the noisy against the clean policy, in nats per token.
    """
    if not isinstance(level, KlTarget) or sigma == 0.0:
        return state
    if not math.isfinite(kl):
        return SigmaState(sigma=sigma, kl=None, not_finite=state.not_finite + 1)
    return SigmaState(sigma=sigma, kl=kl, not_finite=state.not_finite)


def control_metrics(
    level: optax.Schedule | KlTarget, state: SigmaState, *, sigma: float, step: int
) -> dict[str, float]:
    """Returns the metrics of a controller; none of a schedule of sigmas.

    Args:
        level: schedule of sigmas, or of KL targets.
        state: the state after the step.
        sigma: sigma of the step.
        step: number of steps that were finished before.

    Returns:
        noise_kl_target; sigma_at_bound, 1 where sigma is its largest or smallest value and may miss
        the target; noise_kl_not_finite, number of measurements so far that were not finite.
    """
    if not isinstance(level, KlTarget):
        return {}
    bounds = (_SMALLEST_SIGMA * level.sigma_max, level.sigma_max)
    return {
        "noise_kl_target": float(np.asarray(level.schedule(step))),
        "sigma_at_bound": int(sigma in bounds),
        "noise_kl_not_finite": state.not_finite,
    }
