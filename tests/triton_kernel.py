"""What tests of a Triton kernel of Pallas share: where it runs, and random arguments."""

import jax
import jax.numpy as jnp
import pytest

BACKENDS = [
    pytest.param(True, id="interpreter"),
    pytest.param(False, marks=pytest.mark.gpu, id="gpu"),
]


def normal(seed, *shape):
    """Normal numbers in bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
