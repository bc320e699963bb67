"""The kernels lowered for a Hopper GPU, as JAX does it before it compiles them; neither is needed.

The interpreter accepts programs that Mosaic GPU does not lower: for example a slice at a constant.
`-m aot` compiles many more, with the group aot.
"""

import functools
import warnings

import h200
import jax
import jax.numpy as jnp
import pytest
from h200 import array, tiles
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels import matvec
from pallas_kernels.decode import attention, attention_sm90, delta, gated_attention, norms
from pallas_kernels.experts import route
from pallas_kernels.experts.combine import ExpertSums
from pallas_kernels.experts.route import Router, Scores
from pallas_kernels.fp4_matmul import lora_shrink, sm90, tiling

N, K, RANK = 512, 512, 32
FLOAT32 = jnp.float32


def lower(function, *args):
    """Lowers a function of abstract arguments for the GPU of `h200`."""
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=h200.DEVICE)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # That of a backend that JAX will remove is attributed to JAX's own modules.
        warnings.simplefilter("error", DeprecationWarning)
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("adapter", ["none", "product", "xa_partials", "inside"])
def test_fp4_product(adapter, m):
    """A slice may end after its array: a tile has more rows than there are tokens."""
    b = array(N, 2 * RANK)  # padded
    extra = {
        "none": {},
        "product": {"xa": array(m, 2 * RANK), "b": b},
        "xa_partials": {"xa_partials": array(K // 128, m, RANK, dtype=FLOAT32), "b": b},
        "inside": {"a": array(RANK, K), "b": b},
    }[adapter]
    config = tiling.choose(m, N, K, rank=2 * RANK)

    def product(x, weight, extra):
        return sm90.matmul(x, weight, config=config, num_sms=132, **extra)

    lower(product, array(m, K), tiles(N, K), extra)


INPUTS = h200.attention_inputs(2, 128, kv_heads=2, group=7)
PARTS = attention.AttentionParts(
    array(2, 3, 2, 128, dtype=FLOAT32), *[array(2, 3, 2, dtype=FLOAT32)] * 2
)
RULE = delta.DeltaInputs(
    parts=array(3, 4 * 128 + 2 * 130),
    square_partials=array(35, 3, dtype=FLOAT32),
    lengths=array(3, dtype=jnp.int32),
    conv=array(4 * 128, 1, 4),
    a_log=array(2, dtype=FLOAT32),
    dt_bias=array(2, dtype=FLOAT32),
    scale=array(128, dtype=FLOAT32),
    state=array(3, 2, 128, 128, dtype=FLOAT32),
    window=array(3, 4 * 128, 3, dtype=FLOAT32),
)
GATED = h200.attention_inputs(2, 128, kv_heads=2, group=16, qk_norm=True, bias=False)
KERNELS = {
    "matvec": (matvec.matvec, (array(1, K), array(N, K))),
    "shrink": (lora_shrink.shrink, (array(3, K), array(RANK, K))),
    "add_rmsnorm": (
        norms.add_rmsnorm,
        (array(3, K), array(3, K), array(K, dtype=FLOAT32), array(RANK, K)),
    ),
    "add_rmsnorm of experts": (
        functools.partial(norms.add_rmsnorm, router=jnp.zeros((40, K), jnp.bfloat16)),
        (
            array(3, K),
            ExpertSums(
                array(24, K),
                array(3, 2, dtype=jnp.int32),
                array(3, K),
                array(3, dtype=FLOAT32),
            ),
            array(K, dtype=FLOAT32),
            array(RANK, K),
        ),
    ),
    "route": (
        functools.partial(route.route, router=Router(40, 2, normalized=False, eps=1e-6)),
        (
            Scores(
                array(37, K),
                array(4, 37, dtype=FLOAT32),
                array(4, 37, 64, dtype=FLOAT32),
                array(1, K),
            ),
        ),
    ),
    "swiglu": (
        functools.partial(norms.swiglu, eps=1e-6),
        (array(3, 2 * K), array(4, 3, dtype=FLOAT32), array(RANK, K)),
    ),
    "attend": (functools.partial(attention.attend, eps=1e-6, num_sms=132), (INPUTS,)),
    "attend_whole": (functools.partial(attention.attend_whole, eps=1e-6, num_sms=2), (INPUTS,)),
    "attention_sm90": (functools.partial(attention_sm90.attend, eps=1e-6, num_sms=132), (INPUTS,)),
    "delta_step": (functools.partial(delta.step, eps=1e-6), (RULE, array(RANK, 256))),
    "split_gates": (
        functools.partial(gated_attention.split, eps=1e-6),
        (GATED._replace(cosines=array(2, 32, dtype=FLOAT32), sines=array(2, 32, dtype=FLOAT32)),),
    ),
    "merge_parts": (
        functools.partial(attention.merge_parts, dtype=jnp.bfloat16),
        (PARTS, array(RANK, 256)),
    ),
}


@pytest.mark.timeout(120)  # Mosaic GPU may search for layouts that do not exist.
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_of_a_decode_step(kernel):
    function, args = KERNELS[kernel]
    lower(function, *args)
