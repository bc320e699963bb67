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

import jax
import jax.numpy as jnp

from qerl_jax.policy.quant import BLOCK

_STEPS = 8  # FP8 numbers that are tried, from the default scale on; eight steps are a factor of 2
_LARGEST = 126  # the byte of 448, the largest E4M3 number


@jax.jit
def best_scales(weight: jax.Array, default: jax.Array, divisor: jax.Array) -> jax.Array:
    """The scales of a fused weight for `quantize_nvfp4`.

    Args:
        weight: [N, K].
        default: FP8 (E4M3) scales [N, K/16] that `quantize_nvfp4` gives it.
        divisor: the float32 divisor of its scales.

    Returns:
        FP8 scales [N, K/16]. Of equal errors the one of the smaller scale is taken.
    """
    blocks = weight.astype(jnp.float32).reshape(len(weight), -1, BLOCK)
    first = jax.lax.bitcast_convert_type(default, jnp.uint8)

    def scales_of(step: jax.Array) -> jax.Array:
        byte = jnp.minimum(first + step, _LARGEST).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)

    def error(step: jax.Array) -> jax.Array:
        return jnp.sum((round_blocks(blocks, scales_of(step), divisor) - blocks) ** 2, axis=-1)

    def keep_better(best: tuple, step: jax.Array) -> tuple[tuple, None]:
        candidate = error(step)
        is_less = candidate < best[0]
        return (jnp.where(is_less, candidate, best[0]), jnp.where(is_less, step, best[1])), None

    start = error(jnp.uint8(0)), jnp.zeros_like(first)
    (_, steps), _ = jax.lax.scan(keep_better, start, jnp.arange(1, _STEPS, dtype=jnp.uint8))
    return scales_of(steps)


def round_blocks(blocks: jax.Array, scales: jax.Array, divisor: jax.Array) -> jax.Array:
    """Rounds weights to the nearest numbers that these scales can write.

    Args:
        blocks: float32 weights [N, K/16, 16].
        scales: FP8 scales [N, K/16].
        divisor: the float32 divisor of the scales.

    Returns:
        Float32 weights [N, K/16, 16].
    """
    scales = (scales.astype(jnp.float32) / divisor)[..., None]
    values = jnp.clip(blocks / scales, -6.0, 6.0)
    size = jnp.abs(values)
    step = jnp.where(size < 2.0, 0.5, jnp.where(size < 4.0, 1.0, 2.0))
    return jnp.round(values / step) * step * scales
