"""Packed attention compiled for an H200 without one: no spills, and products that overlap.

uv run --group aot pytest -n 0 -m aot
"""

import functools
import re

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import array

from pallas_kernels.attention import backward_sm90, forward_sm90, segments

pytestmark = pytest.mark.aot

TOKENS = 8192


@pytest.fixture(scope="module")
def compile_for_h200():
    with h200.compiler() as compiled:
        yield compiled


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [
        *((12, 2, 128, 0), (28, 4, 128, 0), (40, 8, 128, 0), (9, 3, 64, 0), (64, 8, 128, 0)),
        *((16, 2, 256, 0), (64, 8, 64, 128)),
    ],
)
def test_kernels(heads, kv_heads, head_dim, window, compile_for_h200, capfd):
    q, k = array(TOKENS, heads, head_dim), array(TOKENS, kv_heads, head_dim)
    lse = array(heads, TOKENS, dtype=jnp.float32)
    packed = jax.tree.map(
        lambda x: array(*x.shape, dtype=x.dtype), segments(np.full(TOKENS, -1, np.int32))
    )
    attend, gradients = forward_sm90.attend, backward_sm90.gradients
    if window:  # as gpt-oss has it, with sinks
        packed = packed._replace(positions=packed.ids)
        attend = functools.partial(attend, sinks=jnp.zeros(heads), window=window)
        gradients = functools.partial(gradients, window=window)
    compile_for_h200(attend, q, k, k, packed)
    backward = compile_for_h200(gradients, q, k, k, packed, q, lse, q)
    report = "".join(capfd.readouterr())
    kernels = re.findall(r"Compiling entry function 'packed_attention_(\w*?)_?sm90", report)
    # Equal kernels are compiled once: those of the sums are the same for 40 and for 64 heads.
    assert sorted({*kernels, "sums"}) == ["", "dkv", "dq", "sums"]
    spilled = max(int(number) for number in re.findall(r"(\d+) bytes spill stores", report))
    assert spilled <= (512 if head_dim == 256 else 0)
    # ptxas says so where it makes wgmma wait.
    assert "Potential Performance Loss" not in report
    sums = 2 * TOKENS * kv_heads * head_dim * 4
    assert backward.memory_analysis().temp_size_in_bytes < sums + 2 * lse.size * 4 + 2**20
    assert " copy(" not in backward.as_text()
