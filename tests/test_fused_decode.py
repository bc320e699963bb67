"""A layer of a decode step, built of kernels, against the one of `transformer`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from triton_kernel import BACKENDS, assert_close, normal, wide

from pallas_kernels import decode, fp4_matmul
from pallas_kernels.decode import kernels
from pallas_kernels.fp4_matmul.tiling import MIN_PARTIALS
from qerl_jax.policy import fused_decode, transformer
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy.lora import PROJECTIONS
from qerl_jax.policy.quant import QuantTensor, quantize, tile_order


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3", PROJECTIONS),
        *(pytest.param(k, PROJECTIONS, marks=pytest.mark.slow) for k in ("qwen2", "llama")),
        ("qwen2", ("k_proj", "down_proj")),
        ("qwen3", ()),
    ],
)
def test_a_step_is_the_policys(kind, targets, interpret, monkeypatch):
    config, params = tiny_model.tiny_policy(kind, embed_dim=64, head_dim=32)
    norms = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
    params = jax.tree.map_with_path(
        lambda path, x: x if path[-1].key in norms else x.astype(jnp.bfloat16), params
    )
    lora = tiny_model.random_lora(config, targets=targets) if targets else None
    fused = lora_lib.fuse(lora, config, jnp.bfloat16)
    prompts = tiny_model.random_tokens(3, 9)
    lengths = jnp.asarray([9, 1, 5])
    _, cache = transformer.prefill(params, lora, prompts, lengths, config=config, slots=16)

    def step():
        jax.clear_caches()
        run = functools.partial(transformer.decode_step, config=config)
        return jax.jit(run)(params, fused, prompts[:, 0], cache)

    monkeypatch.setattr(decode, "kernels_run", lambda _: False)
    expected, expected_cache = step()
    monkeypatch.setattr(decode, "kernels_run", lambda _: True)
    for name in ("norm_project", "attend", "merge_project", "silu_project"):
        kernel = functools.partial(getattr(kernels, name), interpret=interpret)
        monkeypatch.setattr(kernels, name, kernel)
    assert fused_decode.serves(config, jnp.dtype("bfloat16"), cache.keys[0])
    actual, actual_cache = step()
    assert_close(actual, wide(expected), 2e-2)
    for name in ("keys", "values"):
        layers = getattr(actual_cache, name), getattr(expected_cache, name)
        for new, old in zip(*layers, strict=True):
            assert_close(new, wide(old), 2e-2)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("down", "form"),
    [
        ("packed", "nvfp4"),
        ("packed", "mxfp4"),
        ("packed, without an adapter", "nvfp4"),
        ("dense", "nvfp4"),
    ],
)
@pytest.mark.parametrize("begins_norm", [False, True])
def test_a_step_whose_product_ends_with_swiglu(down, form, begins_norm, interpret, monkeypatch):
    """Of a packed policy; on a CPU definitions stand in for the products."""
    rows, served = 8, []
    config, params = tiny_model.tiny_policy("llama", embed_dim=512, mlp_dim=640, head_dim=32)

    def stored(name, x):
        if x.ndim == 1:
            return x
        if name == "down_proj" and down == "dense":
            return x.astype(jnp.bfloat16)
        return tile_order(jax.tree.map(jnp.asarray, quantize([np.asarray(x)], format=form)))

    params["layers"] = [
        {name: stored(name, x) for name, x in layer.items()} for layer in params["layers"]
    ]
    params["embed_tokens"] = params["embed_tokens"].astype(jnp.bfloat16)
    targets = PROJECTIONS
    if "without" in down:
        targets = tuple(name for name in PROJECTIONS if name != "down_proj")
    lora = tiny_model.random_lora(config, targets=targets)
    fused = lora_lib.fuse(lora, config, jnp.bfloat16)
    prompts = tiny_model.random_tokens(rows, 9)
    lengths = jnp.arange(1, rows + 1)
    _, cache = transformer.prefill(params, None, prompts, lengths, config=config, slots=16)

    def product(x, weight, b, *, shares=None, a=None):
        if a is not None:
            return fp4_matmul.fp4_matmul(x, weight, lora=(a, b))
        return fp4_matmul.fp4_matmul_with_xa_partials(x, weight, shares, b)

    def begin_norm(x, weight, stream, scale, b, **adapter):
        served.append(weight.shape)
        if not interpret:
            return kernels_of["fp4_matmul_add_rmsnorm"](x, weight, stream, scale, b, **adapter)
        y = stream + product(x, weight, b, **adapter)
        wide = y.astype(jnp.float32)
        squares = jnp.stack([jnp.mean(wide * wide, axis=1) / 4] * 4)
        return y, (wide * scale).astype(x.dtype), squares

    def behind_norm(x, weight, lora, squares):
        served.append(weight.shape)
        assert len(squares) >= MIN_PARTIALS
        if not interpret:
            return kernels_of["fp4_behind_norm"](x, weight, lora, squares)
        return fp4_matmul.fp4_matmul(x, weight, lora=lora), squares.sum(axis=0)[None]

    def swiglu(x, weight, b, squares, *, eps, **adapter):
        served.append(weight.shape)
        assert (adapter["shares"] is None) == begins_norm
        if not interpret:
            return kernels_of["fp4_swiglu"](x, weight, b, squares, eps=eps, **adapter)
        y = product(x, weight, b, **adapter)
        gate, up = jnp.split(y * jax.lax.rsqrt(squares.sum(axis=0) + eps)[:, None], 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    def step():
        jax.clear_caches()
        run = functools.partial(transformer.decode_step, config=config)
        return jax.jit(run)(params, fused, prompts[:, 0], cache)[0]

    monkeypatch.setattr(decode, "kernels_run", lambda _: False)
    expected = step()
    monkeypatch.setattr(decode, "kernels_run", lambda _: True)
    for name in ("norm_project", "attend", "merge_project"):
        patched = functools.partial(getattr(kernels, name), interpret=interpret)
        monkeypatch.setattr(kernels, name, patched)
    stand_ins = {
        "fp4_matmul_add_rmsnorm": begin_norm,
        "fp4_behind_norm": behind_norm,
        "fp4_swiglu": swiglu,
    }
    kernels_of = {name: getattr(fp4_matmul, name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(fp4_matmul, name, stand_in)
    if interpret:
        monkeypatch.setattr(fp4_matmul, "supports_swiglu", lambda *_, **__: True)
    if interpret or not begins_norm:
        monkeypatch.setattr(fp4_matmul, "supports_add_rmsnorm", lambda *_: begins_norm)
        monkeypatch.setattr(fp4_matmul, "supports_lora_shrink", lambda *_: begins_norm)
    actual = step()
    o_proj = config.embed_dim, config.num_heads * config.head_dim
    gate_up_proj = 2 * config.mlp_dim, config.embed_dim
    down_proj = config.embed_dim, config.mlp_dim
    expected_products = [o_proj, gate_up_proj] if begins_norm else [gate_up_proj]
    if begins_norm and down == "packed":  # Asked for its shape first.
        qkv_proj = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, config.embed_dim
        expected_products = [down_proj, qkv_proj, *expected_products, down_proj]
    assert served == expected_products  # layers share a trace
    assert_close(actual, wide(expected), 2e-2)


@pytest.mark.parametrize(
    ("dense", "without", "ends_with_swiglu", "expected"),
    [
        (None, None, True, True),
        ("o_proj", None, True, False),
        ("gate_up_proj", None, True, False),
        (None, "o_proj", True, False),
        (None, "gate_up_proj", True, False),
        (None, None, False, False),
    ],
)
def test_which_layers_begin_a_norm(dense, without, ends_with_swiglu, expected, monkeypatch):
    """Packed ones with both adapters, where the next product then makes x A^T itself."""

    def supports_swiglu(x, weight, b, squares=None, *, xa_partials=None, a=None):
        assert x.shape == (8, 512)
        assert xa_partials is None
        assert a is not None
        return ends_with_swiglu

    monkeypatch.setattr(fp4_matmul, "supports_swiglu", supports_swiglu)
    monkeypatch.setattr(fp4_matmul, "supports_add_rmsnorm", lambda x, weight, b: True)
    shapes = {"o_proj": (512, 128), "gate_up_proj": (1280, 512)}
    packed = QuantTensor(packed=jnp.zeros((1, 1), jnp.uint8), scales=jnp.zeros((1, 1)))
    layer = {name: normal(1, 1, 1) if name == dense else packed for name in shapes}
    a, b = (
        {name: normal(2, 32, shape[i]) for name, shape in shapes.items() if name != without}
        for i in (1, 0)
    )
    assert fused_decode._begins_norm(layer, a, b, normal(3, 8, 128)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dense": "qkv_proj"}, False),
        ({"dense": "down_proj"}, False),
        ({"without": "qkv_proj"}, False),
        ({"without": "down_proj"}, False),
        ({"supports_add_rmsnorm": False}, False),
        ({"supports_lora_shrink": False}, False),
        ({"rows": 48}, True),
        ({"rows": 64}, False),
    ],
)
def test_when_down_begins_the_norms(change, expected, monkeypatch):
    """With few rows, where it and the product behind it are packed and have adapters everywhere."""
    rows = change.get("rows", 8)

    def supports_add_rmsnorm(x, weight, b):
        assert (x.shape, b.shape) == ((rows, 640), (512, 64))
        return change.get("supports_add_rmsnorm", True)

    def supports_lora_shrink(x, weight, lora):
        assert (x.shape, *(part.shape for part in lora)) == ((rows, 512), (32, 512), (768, 64))
        return change.get("supports_lora_shrink", True)

    monkeypatch.setattr(fp4_matmul, "supports_add_rmsnorm", supports_add_rmsnorm)
    monkeypatch.setattr(fp4_matmul, "supports_lora_shrink", supports_lora_shrink)
    config, _ = tiny_model.tiny_policy("llama", embed_dim=512, mlp_dim=640, head_dim=32)
    packed = QuantTensor(packed=jnp.zeros((1, 1), jnp.uint8), scales=jnp.zeros((1, 1)))
    whole = {"qkv_proj": packed, "down_proj": packed}
    pairs = {
        "qkv_proj": (normal(1, 32, 512), normal(2, 768, 64)),
        "down_proj": (normal(3, 32, 640), normal(4, 512, 64)),
    }
    last, pairs_of_last = dict(whole), dict(pairs)
    if "dense" in change:
        last[change["dense"]] = normal(5, 1, 1)
    pairs_of_last.pop(change.get("without"), None)
    layers, adapters = [whole, last], [pairs, pairs_of_last]
    x = normal(6, rows, 512)
    assert fused_decode._down_begins_norms(layers, adapters, x, config) == expected
