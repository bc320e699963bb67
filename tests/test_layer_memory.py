"""Layers move to memory of their own size with the values that they have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4_matmul
from qerl_jax.policy.quant import QuantTensor, quantize_nvfp4
from qerl_jax.weights import layer_memory

LAYERS = 5


def make_layers():
    rng = np.random.default_rng(0)
    weights = [quantize_nvfp4([rng.standard_normal((64, 128), np.float32)]) for _ in range(LAYERS)]
    rows = [fp4_matmul.Fp4Weight(w.packed, w.scales, w.global_scale) for w in weights]
    return [
        {
            "o_proj": QuantTensor(tiles=fp4_matmul.to_tiles(row)),
            "norm": jnp.full(128, float(number)),
        }
        for number, row in enumerate(rows)
    ]


@pytest.fixture
def free(monkeypatch):
    """A list of what is free at each reading, in sizes of a layer; a reading takes one off."""
    size, left = layer_memory.bytes_per_device(make_layers()[0]), []
    monkeypatch.setattr(layer_memory, "_free_bytes", lambda: int(left.pop(0) * size))
    return left


@pytest.fixture
def copied(monkeypatch):
    """The numbers of the layers that were copied, in this order."""
    copy, numbers = layer_memory._copy, []

    def record(layer):
        numbers.append(int(layer["norm"][0]))
        return copy(layer)

    monkeypatch.setattr(layer_memory, "_copy", record)
    return numbers


def test_layers_move_in_batches_of_a_third_of_the_free_memory(free, copied):
    layers = make_layers()
    expected, given = jax.device_get(layers), list(layers)
    free[:] = [6.1, 3.1, 9.0, 9.0, 9.0]  # Two layers, one, the other two, none, and the first two.
    moved = layer_memory.compact_layers(layers)
    assert not free
    assert copied == [0, 1, 2, 3, 4, 0, 1]
    assert layers == given  # The list of the caller is its own.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(layers))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), expected)


def test_no_more_than_a_batch_moves_at_once(free, copied, monkeypatch):
    layers = make_layers()
    monkeypatch.setattr(layer_memory, "_BATCH", 3.5 * layer_memory.bytes_per_device(layers[0]))
    free[:] = 4 * [100.0]
    layer_memory.compact_layers(layers)
    assert not free
    assert copied == [0, 1, 2, 3, 4, 0, 1, 2]


def test_layers_stay_where_no_copy_fits(free):
    layers = make_layers()
    free[:] = [3.1, 2.9, 2.9]
    moved = layer_memory.compact_layers(layers)
    assert jax.tree.leaves(layers[0])[0].is_deleted()
    assert all(new is old for new, old in zip(moved[1:], layers[1:], strict=True))


def test_layers_stay_where_another_process_took_the_memory(free, monkeypatch):
    layers, copy = make_layers(), layer_memory._copy

    def copy_of(layer):
        if layer["norm"][0] == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return copy(layer)

    monkeypatch.setattr(layer_memory, "_copy", copy_of)
    free[:] = [6.1, 9.0, 9.0]
    moved = layer_memory.compact_layers(layers)
    assert [layer["norm"].is_deleted() for layer in layers] == [True, True, False, False, False]
    assert [float(layer["norm"][0]) for layer in moved] == [0, 1, 2, 3, 4]


def test_layers_stay_where_the_memory_is_unknown():
    layers = make_layers()
    moved = layer_memory.compact_layers(layers)
    assert all(new is old for new, old in zip(moved, layers, strict=True))
