"""A decode step's kernels compiled for an H200 without one: no spills, little code, few kernels.

uv run --group aot pytest -n 0 -m aot
"""

import dataclasses
import functools
import itertools
import re

import h200
import jax
import jax.numpy as jnp
import pytest
from h200 import array, tiles
from tiny_checkpoints import model_config
from tiny_rollout import TinyTokenizer

from pallas_kernels import decode as decode_kernels
from pallas_kernels import matvec
from pallas_kernels.decode import attention, attention_sm90, norms
from pallas_kernels.decode import layer as decode_layer
from pallas_kernels.fp4_matmul import cases, dispatch
from qerl_jax.policy import lora, transformer
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.kinds import PROJECTIONS
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rollout import decode
from qerl_jax.rollout.config import EngineConfig, SamplingConfig

pytestmark = pytest.mark.aot

HEAD_DIM = 128
RANK = 32
POSITIONS = 2048


@pytest.fixture(scope="module")
def compile_for_h200():
    with h200.compiler() as compiled:
        yield compiled


def adapter(layer, inputs):
    """The stacked A of a fused projection."""
    return array(cases.rank_of(layer, RANK), inputs)


def add_rmsnorm(shapes, rows):
    embed = shapes["qkv"][1]
    scale = array(embed, dtype=jnp.float32)
    a = adapter("qkv", embed)
    return norms.add_rmsnorm, (array(rows, embed), array(rows, embed), scale, a)


def attention_inputs(shapes, rows, **options):
    outputs, heads = shapes["qkv"][0], shapes["o"][1] // HEAD_DIM
    kv_heads = (outputs // HEAD_DIM - heads) // 2
    heads = {"kv_heads": kv_heads, "group": heads // kv_heads}
    return h200.attention_inputs(rows, POSITIONS, **heads, **options)


def attend(shapes, rows, **options):
    run = functools.partial(attention.attend, eps=1e-6, num_sms=132)
    return run, (attention_inputs(shapes, rows, **options),)


def merge_parts(shapes, rows):
    run, args = attend(shapes, rows)
    parts, *_ = jax.eval_shape(run, *args)
    a = adapter("o", shapes["o"][1])
    return functools.partial(attention.merge_parts, dtype=jnp.bfloat16), (parts, a)


def swiglu(shapes, rows):
    mlp = shapes["down"][1]
    run = functools.partial(norms.swiglu, eps=1e-6)
    square_partials = array(324, rows, dtype=jnp.float32)  # as many as a product leaves, or more
    return run, (array(rows, 2 * mlp), square_partials, adapter("down", mlp))


@pytest.fixture
def check(compile_for_h200, monkeypatch, capfd):
    """Compiles a function, which must have one kernel, without spills and with little code."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")

    def checked(name, function, args, *, lines=2500):
        compile_for_h200(function, *args)
        report = "".join(capfd.readouterr())
        assert re.findall(r"\.entry (\w+)_mosaic_gpu_kernel", report) == [name]
        assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
        # A CTA executes its code once, so that loading the code takes most of the time.
        assert report.count("\n") < lines

    return checked


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("model", ["1.5b", "7b", "32b", "llama8b"])
@pytest.mark.parametrize("kernel", [add_rmsnorm, attend, merge_parts, swiglu])
def test_kernel(kernel, model, rows, check):
    check(kernel.__name__, *kernel(cases.MODELS[model], rows))


@pytest.mark.parametrize("layer", ["7b.qkv", "7b.down", "14b.down"])
def test_matvec(layer, check):
    model, name = layer.split(".")
    n, k = cases.MODELS[model][name]
    check("matvec", matvec.matvec, (array(1, k), array(n, k)))


@pytest.mark.parametrize(("dtype", "lines"), [(jnp.bfloat16, 2500), (jnp.float8_e4m3fn, 4000)])
def test_attention_of_normed_heads(dtype, lines, check):
    function, args = attend(cases.MODELS["llama8b"], 8, bias=False, qk_norm=True, dtype=dtype)
    check("attend", function, args, lines=lines)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("model", ["1.5b", "7b", "32b", "llama8b"])
def test_sm90_attention(model, rows, qk_norm, compile_for_h200, capfd):
    """No spills, in place, and few registers, because several CTAs share an SM."""
    inputs = attention_inputs(cases.MODELS[model], rows, bias=model != "llama8b", qk_norm=qk_norm)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def run(inputs, keys, values):
        inputs = inputs._replace(keys=keys, values=values)
        return attention_sm90.attend(inputs, eps=1e-6, num_sms=132)

    keys, values = inputs.keys, inputs.values
    compiled = compile_for_h200(run, inputs._replace(keys=None, values=None), keys, values)
    report = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
    assert int(re.search(r"Used (\d+) registers", report)[1]) <= 128
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * 2 * keys.size
    assert " copy(" not in compiled.as_text()


def policy(layers):
    """The architecture of Qwen2.5-7B with a few layers, and its abstract parameters in NVFP4."""
    config = model_config(
        "qwen2",
        vocab_size=152064,
        embed_dim=3584,
        mlp_dim=18944,
        num_layers=layers,
        num_heads=28,
        num_kv_heads=4,
        head_dim=HEAD_DIM,
    )
    table = array(config.vocab_size, config.embed_dim)
    norm = array(config.embed_dim, dtype=jnp.float32)
    shapes = cases.MODELS["7b"]
    layer = {f"{name}_proj": QuantTensor(tiles=tiles(*shape)) for name, shape in shapes.items()}
    layer |= {"input_layernorm": norm, "post_attention_layernorm": norm}
    layer["qkv_bias"] = array(shapes["qkv"][0])
    params = {"embed_tokens": table, "lm_head": table, "norm": norm, "layers": [layer] * layers}
    return config, params


def kernels_of_a_step(hlo):
    """Counts the kernels in the body of the loop over steps."""
    bodies = [
        re.search(rf"^%{re.escape(name)} .*?^}}", hlo, re.M | re.S)[0]
        for name in re.findall(r" body=%([\w.-]+)", hlo)
    ]
    (body,) = [body for body in bodies if "/norms/" in body]
    return kernels_of(body)


def kernels_of(body):
    """Counts the kernels of a computation."""
    operations = re.findall(r"^ .*? = (?:\(.*?\)|\S+) ([\w-]+)\(", body, re.M)
    free = {"bitcast", "parameter", "get-tuple-element", "tuple", "constant", "fusion-done"}
    return sum(operation not in free for operation in operations)


def fused_adapter(config, targets=PROJECTIONS):
    """The abstract adapter of a policy, as a decode step reads it."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    own = lora.LoraConfig(RANK, 32.0, targets)
    adapters = jax.eval_shape(functools.partial(lora.init, config=config, lora_config=own), key)
    return decode.fuse_adapter.eval_shape(
        adapters, model_config=config, dtype=jnp.dtype(jnp.bfloat16)
    )


def step_of(compile_for_h200, config, params, rows, targets=PROJECTIONS):
    """The text of a compiled chunk of decode steps with an adapter."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    fused = fused_adapter(config, targets)
    state = jax.eval_shape(
        functools.partial(decode.empty_state, rows, 448, model_config=config, dtype=jnp.bfloat16)
    )
    compiled = compile_for_h200(
        decode.decode_chunk,
        key,
        params,
        fused,
        state,
        decode.CacheRows(array(rows, dtype=jnp.int32), array(rows, dtype=bool)),
        array(dtype=jnp.float32),
        config=decode.decode_config(
            config, SamplingConfig(max_new_tokens=144), EngineConfig(), TinyTokenizer((1,))
        ),
        steps=16,
    )
    return compiled.as_text()


def choose_kernels(monkeypatch, kernel):
    """Makes a step take the kernels of `decode`, and one of those for packed weights."""
    monkeypatch.setattr(decode_kernels, "supports_device", lambda _: True)
    for name in ("_sm90_attention_agrees", "_sm90_queries_agree", "delta_agrees"):
        monkeypatch.setattr(decode_layer, name, lambda: True)
    monkeypatch.setattr(dispatch, "supports_mma_device", lambda: kernel == "mma")
    monkeypatch.setattr(dispatch, "supports_device", lambda: kernel == "mosaic")
    jax.clear_caches()  # A layer of as many rows was traced with the other kernel.


# Attention splits few rows; rows that are no multiple of eight have kernels for SwiGLU and a norm.
@pytest.mark.parametrize(
    ("kernel", "rows", "most"),
    [("mosaic", 6, 9), ("mosaic", 8, 7), ("mosaic", 32, 6), ("mosaic", 64, 6), ("mma", 8, 13)],
)
def test_a_layer_of_a_step_is_few_kernels(kernel, rows, most, compile_for_h200, monkeypatch):
    choose_kernels(monkeypatch, kernel)
    counts = []
    for layers in (1, 2):
        hlo = step_of(compile_for_h200, *policy(layers), rows)
        counts.append(kernels_of_a_step(hlo))
        assert ("fp4_matmul_mma" in hlo) == (kernel == "mma")
        assert ("attention_sm90" in hlo) == (kernel == "mosaic" and rows >= 32)
    assert 0 < counts[1] - counts[0] <= most


@pytest.mark.parametrize(
    ("kernel", "rows", "count", "most"),
    [("mosaic", 1, 2, 11), ("mosaic", 8, 8, 9), ("mosaic", 32, 2, 9), ("mma", 8, 4, 15)],
)
def test_a_layer_of_several_positions_is_few_kernels(
    kernel, rows, count, most, compile_for_h200, monkeypatch
):
    """No cache is copied."""
    choose_kernels(monkeypatch, kernel)
    counts = []
    for layers in (1, 2):
        config, params = policy(layers)
        kept = jax.tree.map(
            lambda x: array(rows, *x.shape), kinds.row_shapes(config, 448, jnp.bfloat16)
        )
        cache = transformer.Cache(kept, array(rows, dtype=jnp.int32))
        run = functools.partial(transformer.decode_positions, config=config)
        hlo = compile_for_h200(
            jax.jit(run, donate_argnums=3),
            params,
            fused_adapter(config),
            array(rows, count, dtype=jnp.int32),
            cache,
        ).as_text()
        counts.append(kernels_of(hlo[hlo.index("\nENTRY ") :]))
        assert f"copy(bf16[{rows},4,448,128]" not in hlo
        assert ("attend_queries_sm90" in hlo) == (kernel == "mosaic")
    assert 0 < counts[1] - counts[0] <= most


@pytest.mark.parametrize("rows", [1, 64])
def test_a_recurrent_layer_of_a_step_is_few_kernels(rows, compile_for_h200, monkeypatch):
    """Its projections are dense: each has a sum and a product of its adapter. No state is copied.

    Every fourth layer has attention with gates.
    """
    choose_kernels(monkeypatch, "mosaic")
    counts, whole = [], ARCHITECTURES["qwen3.5-4b"]
    targets = (*PROJECTIONS, "in_proj_qkv", "in_proj_z", "out_proj")
    for layers in (4, 5, 8):
        recurrent = tuple(layer for layer in whole.recurrent_layers if layer < layers)
        config = dataclasses.replace(whole, num_layers=layers, recurrent_layers=recurrent)
        hlo = step_of(compile_for_h200, config, h200.policy(config), rows, targets)
        counts.append(kernels_of_a_step(hlo))
        assert f"copy(f32[{rows},32,128,128]" not in hlo
        assert "recurrence/delta_step" in hlo
        assert "attention/split_gates" in hlo
    of_recurrence, of_three = (y - x for x, y in itertools.pairwise(counts))
    assert 0 < of_recurrence <= 15
    assert 0 < of_three - 2 * of_recurrence <= 10
