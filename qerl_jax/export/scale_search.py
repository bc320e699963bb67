"""The scale of each NVFP4 block that rounds its weights with the least error.

By default the largest weight of a block becomes 6, the largest E2M1 number. The steps between these
numbers grow towards 6, so that a block is often closer to the original with a larger scale, in
which its largest weight becomes 4 (Four Over Six, https://arxiv.org/abs/2512.02010), or another
one. Here every FP8 number up to about twice the default scale is tried. On normally distributed
weights the relative error falls from 0.095 to 0.083.

Smaller scales, which clip the largest weights, would lower it to 0.081, but are not tried: an error
that makes all large weights smaller does more harm than its square says. With them SmolLM2-135M
came no closer to its original than with the default scales.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from qerl_jax.policy.quant import BLOCK

_STEPS = 8  # FP8 numbers that are tried, from the default scale on; eight steps are a factor of 2
_LARGEST = 126  # the byte of 448, the largest E4M3 number


@jax.jit
def best_scales(members: Sequence[jax.Array]) -> jax.Array:
    """The scales of a fused group for `quantize_nvfp4`.

    Args:
        members: weights [N_i, K], for example of q, k and v.

    Returns:
        FP8 (E4M3) scales [sum N_i, K/16]. Of equal errors the one of the smaller scale is taken.
    """
    members = [weight.astype(jnp.float32) for weight in members]
    blocks = jnp.concatenate(members).reshape(-1, members[0].shape[1] // BLOCK, BLOCK)
    divisor = global_scale(members)
    default = jax.lax.bitcast_convert_type(default_scales(blocks, divisor), jnp.uint8)

    def scales_of(step: jax.Array) -> jax.Array:
        byte = jnp.minimum(default + step, _LARGEST).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)

    def error(step: jax.Array) -> jax.Array:
        return jnp.sum((round_blocks(blocks, scales_of(step), divisor) - blocks) ** 2, axis=-1)

    def better(best: tuple, step: jax.Array) -> tuple[tuple, None]:
        found = error(step)
        less = found < best[0]
        return (jnp.where(less, found, best[0]), jnp.where(less, step, best[1])), None

    start = error(jnp.uint8(0)), jnp.zeros_like(default)
    (_, steps), _ = jax.lax.scan(better, start, jnp.arange(1, _STEPS, dtype=jnp.uint8))
    return scales_of(steps)


def global_scale(members: Sequence[jax.Array]) -> jax.Array:
    """The float32 divisor of the scales of a fused weight, as `quantize_nvfp4` computes it.

    Args:
        members: float32 weights [N_i, K], for example of q, k and v.
    """
    amax = jnp.stack([jnp.abs(weight).max() for weight in members])
    amax = amax.astype(jnp.bfloat16).astype(jnp.float32)
    reciprocals = (1.0 / amax).astype(jnp.bfloat16).astype(jnp.float32)
    divisors = (reciprocals * 2688.0).astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(jnp.isfinite(divisors), divisors, 1.0).min()


def default_scales(blocks: jax.Array, divisor: jax.Array) -> jax.Array:
    """The scale of each block by its largest weight, as `quantize_nvfp4` rounds it.

    Args:
        blocks: float32 weights [N, K/16, 16].
        divisor: from `global_scale`.

    Returns:
        FP8 (E4M3) scales [N, K/16].
    """
    amax = jnp.abs(blocks).max(axis=-1)
    ideal = (amax / 6.0).astype(jnp.bfloat16).astype(jnp.float32) * divisor
    scales = jnp.minimum(ideal, 448.0).astype(jnp.float8_e4m3fn)
    return jnp.where(scales == 0, jnp.float8_e4m3fn(0.125), scales)


def round_blocks(blocks: jax.Array, scales: jax.Array, divisor: jax.Array) -> jax.Array:
    """Rounds weights to the nearest numbers that these scales can write.

    Args:
        blocks: float32 weights [N, K/16, 16].
        scales: FP8 scales [N, K/16].
        divisor: from `global_scale`.

    Returns:
        Float32 weights [N, K/16, 16].
    """
    scales = (scales.astype(jnp.float32) / divisor)[..., None]
    values = jnp.clip(blocks / scales, -6.0, 6.0)
    size = jnp.abs(values)
    step = jnp.where(size < 2.0, 0.5, jnp.where(size < 4.0, 1.0, 2.0))
    return jnp.round(values / step) * step * scales
