"""Programs of W4A8, simulated, compiled for an H200: they round, and multiply by cuBLAS."""

import dataclasses
import re

import h200
import jax
import jax.numpy as jnp
import pytest
from test_decode_aot import choose_kernels, compile_for_h200, fused_adapter, step_of  # noqa: F401

from pallas_kernels.fp4_matmul import fp8
from qerl_jax.policy import dequantize, transformer
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.quant import EVERY

pytestmark = pytest.mark.aot


def fp8_policy(layers=1):
    config = dataclasses.replace(ARCHITECTURES["qwen2.5-coder-1.5b"], num_layers=layers)
    params = h200.policy(config)
    packed = transformer.packed_weights(params, rows=EVERY)
    dense = [
        fp8.Fp8Weight(h200.array(*w.shape), h200.array(w.shape[0], dtype=jnp.float32))
        for w in packed
    ]
    return config, params, transformer.dequantize_params(params, lambda _: dense, rows=EVERY)


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_decode_step(rows, compile_for_h200, monkeypatch):  # noqa: F811
    choose_kernels(monkeypatch, "mosaic")
    config, _, params = fp8_policy()
    hlo = step_of(compile_for_h200, config, params, rows)
    # The kernels of a step are there, and four products whose inputs are rounded.
    assert hlo.count('custom_call_target="mosaic_gpu') >= 5
    assert len(re.findall(r" reduce-precision\(", hlo)) == 4


def test_the_update_and_the_weights(compile_for_h200, monkeypatch):  # noqa: F811
    choose_kernels(monkeypatch, "mosaic")
    _, packed, params = fp8_policy()
    weights = transformer.packed_weights(packed, rows=EVERY)
    hlo = compile_for_h200(
        dequantize.to_fp8_weights, weights, dtype=jnp.dtype(jnp.bfloat16)
    ).as_text()
    assert "reduce-precision" in hlo

    def loss(x, params):
        from qerl_jax.policy.layers.linear import linear

        return jnp.sum(linear(x, params["layers"][0]["qkv_proj"]).astype(jnp.float32) ** 2)

    hlo = compile_for_h200(jax.jit(jax.value_and_grad(loss)), h200.array(1, 4352, 1536), params)
    text = hlo.as_text()
    assert "reduce-precision" in text
    assert "dot(" in text
    assert not re.search(r"parameter_\d+: f32\[4352", text[: text.index("ENTRY")])
