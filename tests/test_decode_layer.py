"""A layer of a decode step out of kernels, compared with the layer of `transformer`."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from h200 import array, tiles
from warpgroup_kernel import BACKENDS, assert_close, normal, use_decode_kernels, wide

from pallas_kernels import decode, device, fp4_matmul
from pallas_kernels.decode import attention, attention_sm90, layer, norms
from pallas_kernels.fp4_matmul import AddRmsNorm, Swiglu, cases, dispatch, lora_shrink, mma
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ExpertsConfig, RecurrentConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.kinds import PROJECTIONS
from qerl_jax.policy.quant import quantize, tile_order


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "targets", "count"),
    [
        ("qwen3", PROJECTIONS, 1),
        *(pytest.param(k, PROJECTIONS, 1, marks=pytest.mark.slow) for k in ("qwen2", "llama")),
        pytest.param("qwen2", ("k_proj", "down_proj"), 1, marks=pytest.mark.slow),
        ("qwen3", (), 1),
        pytest.param("qwen3_moe", ("q_proj", "o_proj"), 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe with a shared expert", (), 1, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_5", (*PROJECTIONS, "in_proj_qkv", "out_proj"), 1, marks=pytest.mark.slow
        ),
        ("qwen3_5_moe with a shared expert", (), 1),
        ("qwen2", PROJECTIONS, 3),
        pytest.param("qwen3", ("k_proj", "down_proj"), 8, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", (), 4, marks=pytest.mark.slow),
        pytest.param("gpt_oss", ("q_proj", "o_proj"), 1, marks=pytest.mark.slow),
        pytest.param("gpt_oss with adapters of experts", ("k_proj",), 3, marks=pytest.mark.slow),
        # More ranks of q, k and v than the kernel of dense products has.
        pytest.param("gpt_oss with rank 144", PROJECTIONS[:4], 1, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_policys(kind, targets, count, interpret, monkeypatch):
    """Of one token of each row, and of several."""
    changes: dict = {"embed_dim": 64, "head_dim": 32}
    if "shared" in kind:
        # Adapters of the expert that all tokens have.
        targets = ("gate_proj", "up_proj", "down_proj")
        targets = tuple(f"shared_expert.{name}" for name in targets)
        targets += ("in_proj_qkv", "out_proj", "q_proj", "o_proj") if "qwen3_5" in kind else ()
        changes["experts"] = ExpertsConfig(40, 3, 16, shared_width=48, normalized=False)
    if "gpt_oss" in kind:
        changes["window"] = 4
    if "qwen3_5" in kind:  # A recurrent layer, and one whose attention has gates.
        states = RecurrentConfig(key_heads=1, value_heads=2, key_dim=128, value_dim=128, window=4)
        changes |= {"num_layers": 2, "recurrent_layers": (0,), "recurrent": states}
        changes |= {"rotary_dim": 64, "head_dim": 128}
    config, params = tiny_model.tiny_policy(kind.split()[0], **changes)
    unrounded = {name for name, array in kinds.ARRAYS.items() if array.is_wide}
    unrounded |= {"norm", "input_layernorm", "post_attention_layernorm"}
    params = jax.tree.map_with_path(
        lambda path, x: x if path[-1].key in unrounded else x.astype(jnp.bfloat16), params
    )
    options = {"expert_rank": 3} if "shared" in kind or "adapters" in kind else {}
    options |= {"rank": 144} if "144" in kind else {}
    lora = tiny_model.random_lora(config, targets=targets, **options) if targets else None
    lora_layers = lora_lib.fuse(lora, config, jnp.bfloat16)
    prompts = tiny_model.random_tokens(3, 9)
    lengths = jnp.asarray([9, 1, 5])
    _, cache, _ = transformer.prefill(
        params, lora, prompts, lengths, config=config, cache_positions=16
    )

    tokens = prompts[:, 0] if count == 1 else prompts[:, :count]
    arguments = params, lora_layers, tokens, cache
    monkeypatch.setattr(decode, "supports_device", lambda _: False)
    expected, expected_cache, expected_routes = traced_step(config, *arguments)
    use_decode_kernels(monkeypatch, interpret)
    for mixer, kept in zip(kinds.layers_of(config), cache.layers, strict=True):
        assert mixer.mixer.fuses(config, jnp.dtype("bfloat16"), kept)
    actual, actual_cache, routes = traced_step(config, *arguments)
    np.testing.assert_array_equal(actual_cache.lengths, expected_cache.lengths)
    assert_close(actual, wide(expected), 2e-2)
    if config.experts is not None:
        np.testing.assert_array_equal(routes, expected_routes)
    layers = map(jax.tree.leaves, (actual_cache.layers, expected_cache.layers))
    for new, old in zip(*layers, strict=True):
        assert_close(new, wide(old), 2e-2)


@functools.cache
def packed_policy(down, form):
    """The arguments of a decode step of a packed policy, and its logits without the kernels."""
    rows = 8
    config, params = tiny_model.tiny_policy("llama", embed_dim=512, mlp_dim=640, head_dim=32)

    def stored(name, x):
        if x.ndim == 1:
            return x
        if name == "down_proj" and down == "dense":
            return x.astype(jnp.bfloat16)
        return tile_order(jax.tree.map(jnp.asarray, quantize([np.asarray(x)], format=form)))

    params["layers"] = [
        {name: stored(name, x) for name, x in weights.items()} for weights in params["layers"]
    ]
    params["embed_tokens"] = params["embed_tokens"].astype(jnp.bfloat16)
    targets = PROJECTIONS
    if "without" in down:
        targets = tuple(name for name in PROJECTIONS if name != "down_proj")
    lora = tiny_model.random_lora(config, targets=targets)
    lora_layers = lora_lib.fuse(lora, config, jnp.bfloat16)
    prompts = tiny_model.random_tokens(rows, 9)
    lengths = jnp.arange(1, rows + 1)
    _, cache, _ = transformer.prefill(
        params, None, prompts, lengths, config=config, cache_positions=16
    )
    arguments = params, lora_layers, prompts[:, 0], cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "supports_device", lambda _: False)
        return config, arguments, traced_step(config, *arguments)[0]


def traced_step(config, *arguments):
    """A decode step that is traced anew, as the test has chosen its kernels since the last one."""
    jax.clear_caches()
    run = transformer.decode_step if arguments[2].ndim == 1 else transformer.decode_positions
    return jax.jit(functools.partial(run, config=config))(*arguments)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.parametrize(
    ("down", "form"),
    [
        ("packed", "nvfp4"),
        # MXFP4 differs in the codes alone, which `test_fp4_matmul` covers.
        pytest.param("packed", "mxfp4", marks=pytest.mark.slow),
        pytest.param("packed, without an adapter", "nvfp4", marks=pytest.mark.slow),
        # `test_a_step_is_the_policys` has dense products.
        pytest.param("dense", "nvfp4", marks=pytest.mark.slow),
    ],
)
# `test_fp4_epilogues` gives SwiGLU the partials of x A^T, as a layer does whose norm is apart.
@pytest.mark.parametrize("with_norm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_with_epilogues(down, form, with_norm, interpret, monkeypatch):
    """A packed policy; on a CPU plain operations stand in for the FP4 kernel."""
    called = []
    config, arguments, expected = packed_policy(down, form)

    product, supports = fp4_matmul.fp4_matmul, fp4_matmul.supports

    def stand_in(x, weight, *, epilogue, **adapter):
        if epilogue is not None:
            called.append(weight.shape)
        if isinstance(epilogue, Swiglu):
            assert (adapter["xa_partials"] is None) == with_norm
        if epilogue is None or not interpret:
            return product(x, weight, epilogue=epilogue, **adapter)
        y = product(x, weight, **adapter)
        if isinstance(epilogue, AddRmsNorm):
            y += epilogue.residual
            wide = y.astype(jnp.float32)
            square_partials = jnp.stack([jnp.mean(wide * wide, axis=1) / 4] * 4)
            return y, (wide * epilogue.scale).astype(x.dtype), square_partials
        factor = jax.lax.rsqrt(epilogue.square_partials.sum(axis=0) + epilogue.eps)
        gate, up = jnp.split(y * factor[:, None], 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    def chosen(*args, epilogue, **adapter):
        if isinstance(epilogue, AddRmsNorm) and not with_norm:
            return False
        return interpret or supports(*args, epilogue=epilogue, **adapter)

    use_decode_kernels(monkeypatch, interpret)
    monkeypatch.setattr(fp4_matmul, "fp4_matmul", stand_in)
    monkeypatch.setattr(fp4_matmul, "supports", chosen)
    if interpret:
        monkeypatch.setattr(fp4_matmul, "adds_xa_partials", lambda *_: True)
    actual = traced_step(config, *arguments)[0]
    o_proj = config.embed_dim, config.num_heads * config.head_dim
    gate_up_proj = 2 * config.mlp_dim, config.embed_dim
    # Once each, as the layers share a trace.
    assert called == ([o_proj, gate_up_proj] if with_norm else [gate_up_proj])
    assert_close(actual, wide(expected), 2e-2)


@pytest.mark.parametrize("interpret", BACKENDS)
@pytest.mark.slow  # 12 s
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_a_step_by_the_kernel_for_every_gpu(form, interpret, monkeypatch):
    config, arguments, expected = packed_policy("packed", form)
    use_decode_kernels(monkeypatch, interpret)
    monkeypatch.setattr(dispatch, "supports_device", lambda: False)
    monkeypatch.setattr(dispatch, "supports_mma_device", lambda: True)
    monkeypatch.setattr(dispatch, "_supports_mxfp4", lambda _: True)  # Its self-test multiplies.
    products = []

    def matmul(*args, **options):
        products.append(args[1].shape)
        return mma.matmul(*args, **options, interpret=interpret)

    monkeypatch.setattr(dispatch, "mma_kernel", lambda: types.SimpleNamespace(matmul=matmul))
    actual = traced_step(config, *arguments)[0]
    assert len(products) == 4  # once each, as the layers share a trace
    assert_close(actual, wide(expected), 2e-2)


class StopTraceError(Exception):
    """Ends a trace at the output projection, with the kernel that was chosen."""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dense": "o"}, False),
        ({"dense": "gate_up"}, False),
        ({"without": "o"}, False),
        ({"without": "gate_up"}, False),
        ({"refused": AddRmsNorm}, False),
        ({"refused": Swiglu}, False),
    ],
)
def test_when_the_output_projection_computes_the_norm(change, expected, monkeypatch):
    """It does if both products are FP4 and adapted, and the next one can compute x A^T itself."""
    supported = fp4_matmul.supports

    def supports(x, weight, *, epilogue, **adapter):
        assert adapter["xa_partials"] is None
        if isinstance(epilogue, Swiglu):
            assert x.shape == (8, 512)
            assert epilogue.square_partials is None
        return type(epilogue) is not change.get("refused") and supported(
            x, weight, epilogue=epilogue, **adapter
        )

    def project(activations, projection, epilogue=None):
        if epilogue is not None:
            raise StopTraceError("with norm")

    def add_rmsnorm(*_):
        raise StopTraceError("without norm")

    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    monkeypatch.setattr(device, "num_sms", lambda: 132)
    monkeypatch.setattr(fp4_matmul, "supports", supports)
    monkeypatch.setattr(norms, "add_rmsnorm", add_rmsnorm)
    monkeypatch.setattr(layer, "_project", project)
    o, gate_up = (
        layer.Projection(
            normal(1, *shape) if change.get("dense") == name else tiles(*shape),
            None if change.get("without") == name else (normal(2, 32, shape[1]), normal(3, 8, 64)),
        )
        for name, shape in {"o": (512, 128), "gate_up": (1280, 512)}.items()
    )
    attended, scale = layer.Activations(normal(4, 8, 128)), jnp.ones(512)
    own = layer.Own({"post_attention_layernorm": scale}, {}, 1e-6, None, 0)
    mixed = layer.Mixed(normal(5, 8, 512), attended, o)
    with pytest.raises(StopTraceError, match="^with norm" if expected else "^without norm"):
        layer._output(own, mixed, gate_up)


PLAIN = "add_rmsnorm fp4 attend merge_parts fp4 add_rmsnorm fp4 swiglu fp4"


# The table in the docstring of `layer`.
@pytest.mark.parametrize(
    ("rows", "kernel", "expected"),
    [
        pytest.param(1, "mosaic", PLAIN, marks=pytest.mark.slow),
        (8, "mosaic", "add_rmsnorm fp4 attend merge_parts fp4+RMSNorm fp4+SwiGLU fp4"),
        pytest.param(
            *(64, "mosaic", "add_rmsnorm fp4 attention_sm90 fp4+RMSNorm fp4+SwiGLU fp4"),
            marks=pytest.mark.slow,
        ),
        (72, "mosaic", "add_rmsnorm fp4 attention_sm90 fp4 add_rmsnorm fp4+SwiGLU lora_shrink fp4"),
        pytest.param(
            256,
            "mosaic",
            "add_rmsnorm fp4 attention_sm90 lora_shrink fp4 add_rmsnorm fp4+SwiGLU lora_shrink fp4",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # The tiling of down_proj has no reducer.
            136,
            "mosaic",
            PLAIN.replace("attend merge_parts", "attention_sm90 lora_shrink"),
            marks=pytest.mark.slow,
        ),
        pytest.param(264, "mosaic", PLAIN, marks=pytest.mark.slow),
        (32, "mma", PLAIN),
    ],
)
def test_the_kernels_of_a_layer(rows, kernel, expected, monkeypatch):
    """The kernels for Qwen2.5-7B in NVFP4 with an adapter of rank 32, on 132 SMs."""
    called = []

    endings = {AddRmsNorm: "+RMSNorm", Swiglu: "+SwiGLU"}

    def record(module, name, label):
        function = getattr(module, name)

        def recorded(*args, **options):
            result = function(*args, **options)
            called.append(label + endings.get(type(options.get("epilogue")), ""))
            return result

        monkeypatch.setattr(module, name, recorded)

    monkeypatch.setattr(layer, "_sm90_attention_agrees", lambda: True)
    monkeypatch.setattr(dispatch, "supports_mma_device", lambda: kernel == "mma")
    monkeypatch.setattr(dispatch, "supports_device", lambda: kernel == "mosaic")
    for module, name, label in (
        (norms, "add_rmsnorm", "add_rmsnorm"),
        (norms, "swiglu", "swiglu"),
        (attention, "attend", "attend"),
        (attention, "attend_whole", "attend_whole"),
        (attention, "merge_parts", "merge_parts"),
        (attention_sm90, "attend", "attention_sm90"),
        (lora_shrink, "shrink", "lora_shrink"),
        (fp4_matmul, "fp4_matmul", "fp4"),
    ):
        record(module, name, label)

    weights, adapters = {}, {}
    for name, (n, k) in cases.MODELS["7b"].items():
        rank = cases.rank_of(name, 32)
        weights[f"{name}_proj"] = tiles(n, k)
        adapters[f"{name}_proj"] = array(rank, k), array(n, fp4_matmul.padded_rank(rank))
    embed, outputs = 3584, 4608
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[name] = array(embed, dtype=jnp.float32)
    weights["qkv_bias"] = array(outputs)
    cache, angle = array(rows, 4, 2048, 128), array(rows, 64, dtype=jnp.float32)
    jax.eval_shape(
        functools.partial(layer.decode_layer.__wrapped__, eps=1e-6),
        weights,
        adapters,
        (array(rows, embed),) * 2,
        (cache, cache),
        array(rows, dtype=jnp.int32),
        (angle, angle),
    )
    assert " ".join(called) == expected
