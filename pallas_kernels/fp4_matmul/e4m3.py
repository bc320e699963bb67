"""Rows in e4m3, as the Hopper kernel multiplies them by weights that it rounds to e4m3.

A number in e4m3 has three bits after its first one, wherever it lies between 2^-6 and 448, and
fewer down to 2^-9. So the scale of a row needs no maximum, which no CTA knows: it is a power of two
by which the mean exponent of the row's first columns becomes that of 2^-5. Numbers of up to 7,000
times the size of these fit; zeros do not count.

The product of such a row is that of the row times its power of two; whoever reads it multiplies by
the inverse. Both are exact.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SAMPLE = 32  # columns whose exponents are averaged
# The powers of two are 2^(122 - E) for the mean E of the exponents' bits, within these bounds.
_SMALLEST, _LARGEST = 64, 190


class Rounded(NamedTuple):
    """Rows [M, K] in e4m3."""

    pairs: jax.Array  # bfloat16 [M, K / 2], see `pairs`
    inverse: jax.Array  # float32 [M], inverse of the power of two of each row


class Scaled(NamedTuple):
    """A product of `Rounded`."""

    rows: jax.Array  # bfloat16 [M, N]
    inverse: jax.Array  # float32 [M], what the rows are to be multiplied by


def unscaled(product: Scaled) -> jax.Array:
    """The rows of a product, bfloat16 [M, N]."""
    return (product.rows * product.inverse[:, None]).astype(product.rows.dtype)


def powers(sample: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The power of two of each row and its inverse, float32 [M], of columns [M, SAMPLE]."""
    bits = lax.bitcast_convert_type(sample.astype(jnp.float32), jnp.int32)
    exponents = lax.shift_right_logical(bits, 23) & 255
    # The numbers that are not zero are counted in the upper bits.
    total = jnp.sum(jnp.where(exponents == 0, 0, exponents + (1 << 16)), axis=1)
    # No quotient is an integer, so that rounding does not change its integral part.
    total, count = (x.astype(jnp.float32) for x in (total & 0xFFFF, total >> 16))
    mean = ((total + 0.5) / jnp.maximum(count, 1.0)).astype(jnp.int32)
    mean = jnp.minimum(jnp.maximum(mean, _SMALLEST), _LARGEST)
    bits = (249 - mean) << 23, (mean + 5) << 23
    power, inverse = (lax.bitcast_convert_type(number, jnp.float32) for number in bits)
    return power, inverse


def in_register_order(x: Any) -> Any:
    """Columns [..., K] in the order in which wgmma of e4m3 wants them of a thread.

    Of 16 columns a thread has the codes of 2 c, 2 c + 1, 2 c + 8 and 2 c + 9, and of the numbers in
    e4m3 the ones that follow 4 c. The order of a sum is free: K is permuted.
    """
    return x.reshape(*x.shape[:-1], -1, 2, 4, 2).swapaxes(-3, -2).reshape(x.shape)


def pairs(x: jax.Array) -> jax.Array:
    """Numbers in e4m3 [..., K] as bfloat16 [..., K / 2] with the bits of two.

    The kernel copies bfloat16, and XLA would copy an array to see its bits as another dtype.
    """
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.bfloat16)


def of_pairs(x: jax.Array) -> jax.Array:
    """The inverse of `pairs`."""
    return lax.bitcast_convert_type(x, jnp.float8_e4m3fn).reshape(*x.shape[:-1], -1)


def rounded(x: jax.Array) -> Rounded:
    """Rounds rows [M, K] by XLA, K a multiple of 128."""
    power, inverse = powers(x[:, :SAMPLE])
    numbers = (x.astype(jnp.float32) * power[:, None]).astype(jnp.float8_e4m3fn)
    return Rounded(pairs(in_register_order(numbers)), inverse)
