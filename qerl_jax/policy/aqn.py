"""Adaptive quantization noise: Gaussian noise on the RMSNorm scales, annealed in stages.

Adding noise to a norm's scale perturbs the input channels of every matmul behind that norm, so a
packed 4-bit weight is explored around without being touched (QeRL, arXiv 2510.11696, Section 3.3).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from qerl_jax.errors import UserError
from qerl_jax.import_path import import_function, user_errors

SCHEDULES = ("exponential", "reference", "linear", "cosine", "logarithmic", "constant", "off")
FORMS = ("additive", "relative")

# The position of a name is part of the noise's key.
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")

# `logarithmic` is log10 of 1 to 10: half of the way is done after a quarter of the stages.
_LOG_CURVATURE = 9.0


def sigma_schedule(
    name: str, *, sigma_start: float, sigma_end: float, stages: int, total_steps: int
) -> optax.Schedule:
    """Returns the noise level as an optax schedule: step (from 0) -> sigma, a float32 scalar.

    The run is cut into K = `stages` equal stages of max(1, total_steps // K) steps; what remains
    belongs to the last. Stage 0 has no noise (quantization noise alone explores); stages
    k = 1..K-1 have, with s0 = `sigma_start`, s1 = `sigma_end` and u = (k - 1) / (K - 2):

    * exponential: s0 (s1 / s0)^((k - 1) / (K - 1)), the paper's Eq. 8 and Algorithm 1. It ends one
      factor short of s1.
    * reference: s0 (s1 / s0)^u, what the paper's released code computes. It ends at s1.
    * linear: s0 + (s1 - s0) u
    * cosine: s1 + (s0 - s1) (1 + cos(pi u)) / 2
    * logarithmic: s0 + (s1 - s0) log(1 + 9 u) / log(10), falling fast at first. The paper compares
      linear, cosine and logarithmic (Fig. 9) without formulas; these are the natural ones.
    * constant: s0
    * off: no noise in any stage.

    With K = 2 the one noisy stage has s0; with K = 1 there is none. When total_steps < K each
    stage is one step and the last stages are not reached.

    Args:
      name: one of the above, or 'package.module:function', a factory of one's own: called with the
        same keyword arguments, it returns a schedule, which also decides about stage 0. It is asked
        outside of jit, with the step as an int.
      sigma_start: standard deviation of the noise in the first noisy stage.
      sigma_end: standard deviation towards which it goes.
      stages: number of stages, the silent first one included.
      total_steps: number of training steps.

    Raises:
      UserError: an unknown name, a factory that cannot be imported, or one whose schedule fails at
        step 0; a value out of range. The schedule raises it where a factory's own fails later.
    """
    if ":" in name:
        return _own_schedule(
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


def _own_schedule(name: str, **arguments) -> optax.Schedule:
    """The schedule of a user's factory; what it raises is an error of one line."""
    factory = import_function(name, what="noise schedule")

    usage = f"it is called as f(*, {', '.join(arguments)}) and returns a function of the step"
    with user_errors(f"noise schedule {name!r}", usage):
        schedule = factory(**arguments)

    def checked(step):
        with user_errors(f"noise schedule {name!r} at step {step}", usage):
            sigma = jnp.asarray(schedule(step), jnp.float32)
            if sigma.shape or not 0 <= sigma < jnp.inf:
                raise ValueError(f"sigma is {sigma}, expected a number of at least 0")
        return sigma

    checked(0)
    return checked


@struct.dataclass
class Noise:
    """A draw of noise: the arguments of `perturb_norms` beside the parameters.

    Attributes:
        key: of the draw.
        sigma: float32 scalar, the standard deviation.
        form: 'additive' or 'relative'.
        final_norm: whether the norm before the head takes part.
    """

    key: jax.Array
    sigma: jax.Array
    form: str = struct.field(pytree_node=False)
    final_norm: bool = struct.field(pytree_node=False)


def perturb_norms(
    key: jax.Array,
    params: dict[str, Any],
    sigma: jax.Array | float,
    *,
    form: str = "additive",
    final_norm: bool = False,
) -> dict[str, Any]:
    """Returns the parameters with noise on the norm scales of every layer.

    With Z ~ N(0, sigma^2) of float32, one draw for each element of each norm, a scale w becomes
    w + Z (additive, the paper's Eq. 10) or w (1 + Z) (relative: every input channel of the matmuls
    behind the norm is perturbed alike, however small its w). The two norms of a layer take part,
    `q_norm` and `k_norm` never. The noise of a norm depends only on the key, its layer and which
    norm it is. Everything else in the tree is passed on as it is, the same objects. Where sigma is
    0 the scales keep every bit.

    Args:
      key: a key for this draw, for example folded with the step.
      params: the policy's parameters.
      sigma: standard deviation of the noise; may be traced.
      form: 'additive' or 'relative'.
      final_norm: also perturb the norm before the head, as the paper's released code would.

    Raises:
      UserError: an unknown form.
    """
    if form not in FORMS:
        raise UserError(f"unknown form of noise {form!r}: choose from {', '.join(FORMS)}")
    layers = params["layers"]
    scales = [layer[name] for layer in layers for name in LAYER_NORMS]
    if final_norm:
        scales.append(params["norm"])
    noisy = _perturb(key, scales, sigma, form=form)
    params = dict(params)
    if final_norm:
        params["norm"] = noisy[-1]
    number = len(LAYER_NORMS)
    params["layers"] = [
        layer | {name: noisy[number * i + j] for j, name in enumerate(LAYER_NORMS)}
        for i, layer in enumerate(layers)
    ]
    return params


def add_noise(params: dict[str, Any], noise: Noise) -> dict[str, Any]:
    """`perturb_norms` with a draw."""
    return perturb_norms(
        noise.key, params, noise.sigma, form=noise.form, final_norm=noise.final_norm
    )


def count_perturbed(params: dict[str, Any], noisy: dict[str, Any]) -> int:
    """Returns how many norms of `noisy` differ from those of `params`, q_norm and k_norm too."""
    scales = [
        (scale, noisy_layer[name])
        for layer, noisy_layer in zip(params["layers"], noisy["layers"], strict=True)
        for name, scale in layer.items()
        if name.endswith("norm")
    ]
    scales.append((params["norm"], noisy["norm"]))
    return int(_count_different(*zip(*scales, strict=True)))


@jax.jit
def _count_different(old, new):
    return sum(jnp.any(a != b) for a, b in zip(old, new, strict=True))


@functools.partial(jax.jit, static_argnames="form")
def _perturb(key, scales, sigma, *, form):
    """Perturbs M scales [D], in the order of the layers; returns them stacked, [M, D]."""
    scales = jnp.stack(scales)

    def draw(layer, index):
        norm_key = jax.random.fold_in(jax.random.fold_in(key, layer), index)
        return jax.random.normal(norm_key, scales.shape[1:], jnp.float32)

    # The final norm is the first of one more layer.
    z = jax.vmap(draw)(*jnp.divmod(jnp.arange(len(scales)), len(LAYER_NORMS)))
    sigma = jnp.asarray(sigma, jnp.float32)
    noisy = scales + sigma * z if form == "additive" else scales * (1.0 + sigma * z)
    # A scale of -0.0 would lose its sign to the sum.
    return jnp.where(sigma == 0.0, scales, noisy)


def _noisy_stages(name: str, start: float, end: float, stages: int) -> np.ndarray | float:
    """The sigmas of stages 1..K-1."""
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
        f"unknown noise schedule {name!r}: choose from {', '.join(SCHEDULES)}, "
        "or name a factory as 'package.module:function'"
    )
