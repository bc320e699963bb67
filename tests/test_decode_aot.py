"""A decode step's kernels compiled for an H200 without one: no spills, little code, few kernels.

uv run --group aot pytest -n 0 -m aot
"""

import functools
import re

import h200
import jax
import jax.numpy as jnp
import pytest
from h200 import array, tiles
from tiny_checkpoints import model_config

from pallas_kernels import decode as decode_kernels
from pallas_kernels import fp4_matmul, matvec
from pallas_kernels.decode import attend_sm90, kernels
from pallas_kernels.fp4_matmul import cases, dispatch
from qerl_jax.policy import lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rollout import decode
from qerl_jax.rollout.sampling import SamplingConfig

pytestmark = pytest.mark.aot

HEAD_DIM = 128
RANK = 32
SLOTS = 2048


@pytest.fixture(scope="module")
def compile_for_h200():
    with h200.compiler() as compiled:
        yield compiled


def adapter(layer, inputs):
    """The stacked A of a fused projection."""
    return array(cases.rank_of(layer, RANK), inputs)


def squares(rows):
    """As many shares of a norm's mean squares as the down projection of 14B leaves at 32 rows."""
    return array(324, rows, dtype=jnp.float32)


def norm_project(shapes, rows):
    embed = shapes["qkv"][1]
    scale = array(embed, dtype=jnp.float32)
    a = adapter("qkv", embed)
    return kernels.norm_project, (array(rows, embed), array(rows, embed), scale, a)


def attend(shapes, rows, *, bias=True, qk_norm=False, dtype=jnp.bfloat16):
    outputs, heads = shapes["qkv"][0], shapes["o"][1] // HEAD_DIM
    kv_heads = (outputs // HEAD_DIM - heads) // 2
    angle = array(rows, HEAD_DIM // 2, dtype=jnp.float32)
    cache = array(rows, kv_heads, SLOTS, HEAD_DIM, dtype=dtype)
    extra = {"bias": array(outputs)} if bias else {}
    if qk_norm:
        extra["qk_norm"] = (array(HEAD_DIM, dtype=jnp.float32),) * 2
    lengths = array(rows, dtype=jnp.int32)

    def run(qkv, squares, angles, keys, values, lengths, extra):
        return kernels.attend(
            qkv, squares, angles, keys, values, lengths, eps=1e-6, multiprocessors=132, **extra
        )

    return run, (array(rows, outputs), squares(rows), (angle, angle), cache, cache, lengths, extra)


def merge_project(shapes, rows):
    run, args = attend(shapes, rows)
    parts, *_ = jax.eval_shape(run, *args)
    a = adapter("o", shapes["o"][1])
    return functools.partial(kernels.merge_project, dtype=jnp.bfloat16), (parts, a)


def silu_project(shapes, rows):
    mlp = shapes["down"][1]
    run = functools.partial(kernels.silu_project, eps=1e-6)
    return run, (array(rows, 2 * mlp), squares(rows), adapter("down", mlp))


@pytest.fixture
def check(compile_for_h200, tmp_path):
    """Compiles a function and looks at its kernel."""

    def checked(name, function, args, *, lines=2500):
        compile_for_h200(function, *args, options=h200.dump_to(tmp_path))
        names = []
        for ptx in tmp_path.glob("*.ptx"):
            text = ptx.read_text()
            names += re.findall(r"\.entry (\w+)", text)
            assert set(h200.spilled_bytes(ptx)) == {0}, names[-1]
            # A block of threads executes its code once: what it waits for is the code.
            assert text.count("\n") < lines, names[-1]
        assert names == [name]

    return checked


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("model", ["1.5b", "7b", "32b", "llama8b"])
@pytest.mark.parametrize("kernel", [norm_project, attend, merge_project, silu_project])
def test_kernel(kernel, model, rows, check):
    check(kernel.__name__, *kernel(cases.MODELS[model], rows))


@pytest.mark.parametrize("layer", ["7b.qkv", "7b.down", "14b.down"])
def test_matvec(layer, check):
    model, name = layer.split(".")
    n, k = cases.MODELS[model][name]
    check("matvec", matvec.matvec, (array(1, k), array(n, k)))


@pytest.mark.parametrize(("dtype", "lines"), [(jnp.bfloat16, 2500), (jnp.float8_e4m3fn, 3500)])
def test_attention_of_normed_heads(dtype, lines, check):
    function, args = attend(cases.MODELS["llama8b"], 8, bias=False, qk_norm=True, dtype=dtype)
    check("attend", function, args, lines=lines)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("model", ["1.5b", "7b", "32b", "llama8b"])
def test_attention_on_hopper(model, rows, qk_norm, compile_for_h200, capfd):
    """No spills, in place, and few registers, as several blocks share a multiprocessor."""
    _, (qkv, squares, angles, keys, values, lengths, extra) = attend(
        cases.MODELS[model], rows, bias=model != "llama8b", qk_norm=qk_norm
    )

    @functools.partial(jax.jit, donate_argnums=(3, 4))
    def run(qkv, squares, angles, keys, values, lengths, extra):
        return attend_sm90.attend(
            qkv, squares, angles, keys, values, lengths, eps=1e-6, multiprocessors=132, **extra
        )

    compiled = compile_for_h200(run, qkv, squares, angles, keys, values, lengths, extra)
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
    """How many kernels the body of the loop over steps has."""
    bodies = [
        re.search(rf"^%{re.escape(name)} .*?^}}", hlo, re.M | re.S)[0]
        for name in re.findall(r" body=%([\w.-]+)", hlo)
    ]
    (body,) = [body for body in bodies if "/attention/" in body]
    operations = re.findall(r"^ .*? = (?:\(.*?\)|\S+) ([\w-]+)\(", body, re.M)
    free = {"bitcast", "parameter", "get-tuple-element", "tuple", "constant", "fusion-done"}
    return sum(operation not in free for operation in operations)


# Few rows are split by attention; what is no multiple of eight has kernels for SwiGLU and a norm.
@pytest.mark.parametrize(("rows", "most"), [(6, 9), (8, 6), (32, 5), (64, 6)])
def test_a_layer_of_a_step_is_few_kernels(rows, most, compile_for_h200, monkeypatch):
    monkeypatch.setattr(decode_kernels, "kernels_run", lambda _: True)
    monkeypatch.setattr(kernels, "_sm90_agrees", lambda: True)
    for module in (fp4_matmul, dispatch):
        monkeypatch.setattr(module, "supports_device", lambda: True)
    counts = []
    for layers in (1, 2):
        config, params = policy(layers)
        key = jax.eval_shape(lambda: jax.random.key(0))
        adapters = jax.eval_shape(
            functools.partial(lora.init, config=config, lora_config=lora.LoraConfig(RANK, 32.0)),
            key,
        )
        fused = decode.fuse_adapter.eval_shape(
            adapters, config=config, dtype=jnp.dtype(jnp.bfloat16)
        )
        batch = jax.eval_shape(
            functools.partial(decode.empty_batch, rows, 448, config=config, dtype=jnp.bfloat16)
        )
        compiled = compile_for_h200(
            decode.decode_chunk,
            key,
            params,
            fused,
            batch,
            array(rows, dtype=bool),
            rules=decode.rules(config, SamplingConfig(max_new_tokens=144), (1,)),
            steps=16,
        )
        hlo = compiled.as_text()
        counts.append(kernels_of_a_step(hlo))
        assert ("attend_sm90" in hlo) == (rows >= 32)
    assert 0 < counts[1] - counts[0] <= most
