"""Adaptive quantization noise: Gaussian noise on the RMSNorm scales, annealed in stages.

Noise on the scale of a norm perturbs the input channels of every matmul that reads the norm's
output. The policy thus explores around a packed 4-bit weight, which itself stays unchanged (QeRL,
arXiv 2510.11696, Section 3.3).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from qerl_jax.errors import UserError
from qerl_jax.system.import_path import import_function, names_function, user_errors

SCHEDULES = ("exponential", "reference", "linear", "cosine", "logarithmic", "constant", "off")
FORMS = ("additive", "relative")

# The random key of a norm's noise depends on the position of its name in this tuple.
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")

# `logarithmic` follows log10 from 1 to 10: a quarter of the stages covers half of the range.
_LOG_CURVATURE = 9.0


def sigma_schedule(
    name: str, *, sigma_start: float, sigma_end: float, stages: int, total_steps: int
) -> optax.Schedule:
    """Returns the noise level as an optax schedule: step (from 0) -> sigma, a float32 scalar.

    The run is divided into K = `stages` stages of max(1, total_steps // K) steps; the remaining
    steps belong to the last stage. Stage 0 has no noise, so only quantization noise explores. The
    sigma of stages k = 1..K-1, with s0 = `sigma_start`, s1 = `sigma_end` and
    u = (k - 1) / (K - 2), is:

    * exponential: s0 (s1 / s0)^((k - 1) / (K - 1)), the paper's Eq. 8 and Algorithm 1. The last
      stage is one factor short of s1.
    * reference: s0 (s1 / s0)^u, as the paper's released code computes it. The last stage has s1.
    * linear: s0 + (s1 - s0) u
    * cosine: s1 + (s0 - s1) (1 + cos(pi u)) / 2
    * logarithmic: s0 + (s1 - s0) log(1 + 9 u) / log(10), which changes fast at first.
    * constant: s0
    * off: 0

    The paper compares linear, cosine and logarithmic schedules (Fig. 9) without formulas; these are
    the natural ones. With K = 2 the single noisy stage has s0; with K = 1 no stage has noise. If
    total_steps < K, each stage is one step and the last stages are not reached.

    Args:
        name: a name from the list above, or 'package.module:function' for a custom factory. The
            factory gets the other arguments as keywords and returns a schedule, which also decides
            about stage 0. The schedule is called outside of jit, with the step as an int, and
            from `total_steps` on where a run is extended.
        sigma_start: standard deviation of the noise in the first noisy stage.
        sigma_end: standard deviation that the schedule approaches.
        stages: number of stages, including the first one without noise.
        total_steps: number of training steps.

    Raises:
        UserError: the name is unknown, a value is out of range, a factory cannot be imported, or
            the factory's schedule fails at step 0. A factory's schedule that fails at a later step
            raises UserError then.
    """
    if names_function(name):
        return _custom_schedule(
            name,
            sigma_start=sigma_start,
            sigma_end=sigma_end,
            stages=stages,
            total_steps=total_steps,
        )
    for argument, value in (("stages", stages), ("total_steps", total_steps)):
        if value < 1:
            raise UserError(f"{argument} of the noise schedule is {value}: it must be at least 1")
    sigmas = np.zeros(stages, np.float32)
    sigmas[1:] = _noisy_stages(name, sigma_start, sigma_end, stages)
    steps_per_stage = max(1, total_steps // stages)

    def schedule(step):
        return jnp.asarray(sigmas)[jnp.clip(step // steps_per_stage, 0, stages - 1)]

    return schedule


def _custom_schedule(name: str, **arguments) -> optax.Schedule:
    """Returns the schedule of a user's factory; its errors become a UserError of one line."""
    factory = import_function(name, what="noise schedule")

    usage = (
        f"it is called as f(*, {', '.join(arguments)}) and returns a function of the step, which "
        "is also called from total_steps on where a run is extended"
    )
    with user_errors(f"noise schedule {name!r}", usage):
        schedule = factory(**arguments)

    def checked_schedule(step):
        with user_errors(f"noise schedule {name!r} at step {step}", usage):
            sigma = jnp.asarray(schedule(step), jnp.float32)
            if sigma.shape or not 0 <= sigma < jnp.inf:
                raise ValueError(f"sigma is {sigma}, expected a number of at least 0")
        return sigma

    checked_schedule(0)
    return checked_schedule


@struct.dataclass
class Noise:
    """One draw of noise on the norm scales, as `add_noise` applies it."""

    key: jax.Array  # random key of this draw, for example folded with the step
    # Standard deviation of the noise, a scalar that is converted to float32.
    sigma: jax.Array | float
    form: str = struct.field(pytree_node=False)  # 'additive' or 'relative'
    # Whether the norm before the head is also perturbed.
    final_norm: bool = struct.field(pytree_node=False)


def add_noise(params: dict[str, Any], noise: Noise) -> dict[str, Any]:
    """Returns the parameters with noise on the norm scales of every layer.

    With Z ~ N(0, sigma^2) in float32, drawn for each element of each norm, a scale w becomes

    * additive: w + Z, the paper's Eq. 10;
    * relative: w (1 + Z), which perturbs all input channels of the following matmuls by the same
      relative amount, however small w is.

    Both norms of a layer are perturbed, `q_norm` and `k_norm` never. The noise of a norm depends
    only on the key, the number of the layer and the name of the norm. All other parameters are
    returned as the same objects. With sigma = 0 the scales keep every bit.

    Args:
        params: the policy's parameters.
        noise: the key, sigma and form of the draw; key and sigma may be traced.

    Raises:
        UserError: the form is unknown.
    """
    if noise.form not in FORMS:
        raise UserError(f"unknown form of noise {noise.form!r}: choose from {', '.join(FORMS)}")
    layers = params["layers"]
    scales = [layer[name] for layer in layers for name in LAYER_NORMS]
    if noise.final_norm:
        scales.append(params["norm"])
    noisy = _perturb(noise.key, scales, noise.sigma, form=noise.form)
    params = dict(params)
    if noise.final_norm:
        params["norm"] = noisy[-1]
    number = len(LAYER_NORMS)
    params["layers"] = [
        layer | {name: noisy[number * i + j] for j, name in enumerate(LAYER_NORMS)}
        for i, layer in enumerate(layers)
    ]
    return params


def perturb_norms(
    key: jax.Array,
    params: dict[str, Any],
    sigma: jax.Array | float,
    *,
    form: str = "additive",
    final_norm: bool = False,
) -> dict[str, Any]:
    """Returns the parameters with Gaussian noise on the norm scales, as `add_noise` draws it.

    Args:
        key: random key of this draw, for example folded with the step.
        params: the policy's parameters.
        sigma: standard deviation of the noise; may be traced.
        form: 'additive' for w + Z or 'relative' for w (1 + Z), with Z ~ N(0, sigma^2).
        final_norm: whether to perturb the norm before the head, too, as the paper's released code
            would.

    Raises:
        UserError: the form is unknown.
    """
    return add_noise(params, Noise(key=key, sigma=sigma, form=form, final_norm=final_norm))


def count_perturbed(params: dict[str, Any], noisy: dict[str, Any]) -> int:
    """Returns how many norms of `noisy` differ from `params`, including q_norm and k_norm."""
    scales = [
        (scale, noisy_layer[name])
        for layer, noisy_layer in zip(params["layers"], noisy["layers"], strict=True)
        for name, scale in layer.items()
        if name.endswith("norm")
    ]
    scales.append((params["norm"], noisy["norm"]))
    return int(_count_different(*zip(*scales, strict=True)))


@jax.jit
def _count_different(scales, noisy):
    return sum(jnp.any(a != b) for a, b in zip(scales, noisy, strict=True))


@functools.partial(jax.jit, static_argnames="form")
def _perturb(key, scales, sigma, *, form):
    """Perturbs M scales [D] in the order of the layers and returns them stacked, [M, D]."""
    scales = jnp.stack(scales)

    def draw(layer, index):
        norm_key = jax.random.fold_in(jax.random.fold_in(key, layer), index)
        return jax.random.normal(norm_key, scales.shape[1:], jnp.float32)

    # The final norm has the key of the first norm in the layer after the last.
    z = jax.vmap(draw)(*jnp.divmod(jnp.arange(len(scales)), len(LAYER_NORMS)))
    sigma = jnp.asarray(sigma, jnp.float32)
    noisy = scales + sigma * z if form == "additive" else scales * (1.0 + sigma * z)
    # The sum would turn a scale of -0.0 into 0.0.
    return jnp.where(sigma == 0.0, scales, noisy)


def _noisy_stages(name: str, start: float, end: float, stages: int) -> np.ndarray | float:
    """Returns the sigmas of stages 1..K-1."""
    positive = name in ("exponential", "reference")
    if name != "off" and (min(start, end) < 0.0 or (positive and min(start, end) == 0.0)):
        limit = "greater than 0" if positive else "at least 0"
        raise UserError(
            f"sigma_start={start}, sigma_end={end}: a schedule {name!r} needs both {limit}"
        )
    k = np.arange(1, stages)
    u = (k - 1) / max(stages - 2, 1)
    match name:
        case "exponential":
            return start * (end / start) ** ((k - 1) / max(stages - 1, 1))
        case "reference":
            return start * (end / start) ** u
        case "linear":
            return start + (end - start) * u
        case "cosine":
            return end + (start - end) * (1.0 + np.cos(np.pi * u)) / 2.0
        case "logarithmic":
            return start + (end - start) * np.log1p(_LOG_CURVATURE * u) / np.log1p(_LOG_CURVATURE)
        case "constant":
            return start
        case "off":
            return 0.0
    raise UserError(
        f"unknown noise schedule {name!r}: choose from {', '.join(SCHEDULES)}, kl, "
        "or name a factory as 'package.module:function'"
    )
