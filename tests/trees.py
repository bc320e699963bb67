"""Trees of arrays that are equal, bit for bit."""

import jax
import numpy as np


def assert_equal(tree, other):
    """Asserts that two trees have the same structure, types and values; keys are compared, too."""

    def raw(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(raw(one), raw(two))
