"""The benchmark of rollouts: rows, random weights, the parts of a step."""

import argparse
import functools
import itertools
import json
import pathlib
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from refusal import refused
from tiny_checkpoints import model_config

from benchmarks.rollout import __main__ as command
from benchmarks.rollout import benchmark as job
from benchmarks.rollout import profile as parts
from benchmarks.rollout import subject as benchmark_subject
from benchmarks.rollout.random_policy import random_lora, random_params
from benchmarks.rollout.results import KEYS
from pallas_kernels.fp4_matmul import cases
from qerl_jax.compile import executable_cache
from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.config import models
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers.kinds import projection_shapes
from qerl_jax.policy.lora import LoraConfig, matrix_shapes
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.rollout.head import rollout_head

ROOT = pathlib.Path(__file__).resolve().parents[1]
KEY = jax.random.key(0, impl="rbg")
OPTIONS = command.make_parser().parse_args(
    [
        *("--model=tiny", "--format=nf4", "--batch=3", "--prompt=5", "--new-tokens=18"),
        *("--lora-rank=4", "--chunk-steps=8", "--prompts=4", "--group=2", "--max-new-tokens=12"),
    ]
)


def changed(**changes):
    return argparse.Namespace(**vars(OPTIONS) | changes)


@functools.cache
def architecture():
    return model_config("qwen2", embed_dim=64, mlp_dim=128, head_dim=16)


@functools.cache
def subject(format, head_format=""):
    config = architecture()
    params = random_params(KEY, config, format=format)
    params |= rollout_head(params, head_format)
    return benchmark_subject.Subject(
        "tiny", format, config, params, 4, random_lora(KEY, config, rank=4)
    )


def test_every_preset_has_an_architecture():
    assert set(ARCHITECTURES) == set(models.MODELS)
    for name, shapes in cases.MODELS.items():
        model, _, devices = name.partition("/")
        preset = "llama3.1-8b" if model == "llama8b" else f"qwen2.5-{model}"
        preset = model if model in ARCHITECTURES else preset
        own = shard_of(ARCHITECTURES[preset], int(devices or 1), format="nvfp4")
        found = projection_shapes(own)
        rows, inputs = shapes["gate_up"]
        assert found["gate_proj"] == (rows // 2, inputs)
        assert shapes["qkv"][0] == sum(found[f"{p}_proj"][0] for p in "qkv")
        assert found["down_proj"] == shapes["down"]


@pytest.mark.parametrize(
    "format",
    ["nvfp4", "bf16", *(pytest.param(f, marks=pytest.mark.slow) for f in ("nf4", "mxfp4"))],
)
def test_random_weights_are_like_loaded_ones(format):
    made = subject(format)
    for layer in made.params["layers"]:
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            weight = layer[name]
            assert isinstance(weight, QuantTensor) == (format != "bf16")
            if format != "bf16":
                assert weight.format == format
                weight = jax.jit(dequantize, static_argnums=1)(weight, jnp.float32)
            values = np.asarray(weight, np.float32)
            assert np.isfinite(values).all()
            assert len(np.unique(values)) > 16
            assert values.std() == pytest.approx(0.02, rel=0.35)
    first, second = (np.asarray(jax.tree.leaves(layer)[0]) for layer in made.params["layers"])
    assert (first != second).any()
    assert "lm_head" in made.params
    assert all((np.asarray(f["b"]) != 0).all() for f in made.lora.layers[0].values())


def test_packed_weights_need_whole_blocks():
    config = model_config("llama")
    with pytest.raises(UserError, match="nf4 needs a multiple of 64 inputs"):
        random_params(KEY, config, format="nf4")


def test_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHITECTURES, "tiny", architecture())
    monkeypatch.setenv("QERL_COMMIT", "abc")
    # 12 ms from one reading of the clock to the next, on any machine.
    ticks = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: 12e-3 * next(ticks))
    monkeypatch.setattr(job, "time", clock)
    out = tmp_path / "rollout.json"
    job.benchmark(changed(out=out))
    (row,) = json.loads(out.read_text())["rows"]
    policy = ["decode", "tiny", "nf4", "random", 4, "bfloat16", "", 8, "once", "", 1]
    assert [row[name] for name in KEYS["decode"]] == [*policy, 3, 5, 18]
    assert row["ms_per_step"] == 2
    assert row["tokens_per_s"] == 1500
    assert row["prefill_tokens_per_s"] == 1250
    assert row["weights"] == "random"
    assert row["device"] == "cpu"
    assert row["commit"] == "abc"
    assert row["versions"]["jax"] == jax.__version__
    assert {"date", "command", "peak_gb"} <= set(row)
    printed = capsys.readouterr().out
    assert "model=tiny format=nf4 weights=random lora_rank=4 " in printed
    assert " batch=3 prompt=5 new_tokens=18: " in printed
    assert "ms_per_step 2, tokens_per_s 1,500, " in printed


def test_adapters_of_experts_have_rows_of_their_own():
    config, settings = model_config("qwen3_moe"), benchmark_subject.row_settings
    plain = benchmark_subject.Subject("tiny", "bf16", config, {})
    own = benchmark_subject.with_adapter(plain, 4, 2)
    options = LoraConfig(4, 4.0, targets=tuple(projection_shapes(config)), expert_rank=2)
    for number, adapters in enumerate(own.lora.layers):
        assert jax.tree.map(jnp.shape, adapters) == matrix_shapes(config, number, options)
        assert all(jnp.std(leaf) > 0 for leaf in jax.tree.leaves(adapters))
    row, without = (settings(subject, "decode", OPTIONS) for subject in (own, plain))
    assert row.keys() - without.keys() == {"expert_rank"}
    assert set(KEYS[row["kind"]]) - set(KEYS["decode"]) == {"expert_rank"}
    refused(
        "a llama has no routed experts", random_lora, KEY, model_config(), rank=4, expert_rank=2
    )


@pytest.mark.slow
def test_adapters_of_several_ranks_are_measured_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", architecture())
    measured = []

    def row(subject, batch, config, programs):
        measured.append((subject.lora_rank, subject.lora is None, batch))
        described = benchmark_subject.row_settings(subject, "decode", config)
        times = {"ms_per_step": 1.0, "tokens_per_s": 1.0, "prefill_tokens_per_s": 1.0}
        return described | {"batch": batch, "prompt": 5, "new_tokens": 18, "peak_gb": None} | times

    monkeypatch.setattr(job, "measure_decoding", row)
    monkeypatch.setattr(job, "compile_steps", lambda *_: {})
    out = tmp_path / "rollout.json"
    job.benchmark(changed(format=("bf16",), lora_rank=(4, 0), out=out))
    assert measured == [(4, False, 3), (0, True, 3)]
    assert [row["lora_rank"] for row in json.loads(out.read_text())["rows"]] == [0, 4]


@pytest.mark.slow  # 8 s
def test_rollouts_of_problems(tmp_path):
    model = tiny_run.write_model(tmp_path / "model")
    problems = tiny_run.write_problems(tmp_path / "problems.jsonl")
    out = tmp_path / "rollout.json"
    changes = {"source": str(model), "format": ("bf16",), "data": str(problems), "max_rows": 4}
    for _ in range(2):
        job.benchmark(changed(**changes, prompts=3, out=out))
    (row,) = json.loads(out.read_text())["rows"]  # The second replaced that of the first.
    policy = ["gsm8k", "model", "bf16", "real", 4, "bfloat16", "", 8, "once", "", 1]
    assert [row[name] for name in KEYS["gsm8k"]] == [*policy, 3, 2, 12, 4]
    assert 6 <= row["tokens"] <= 6 * 12
    assert row["mean_tokens"] == pytest.approx(row["tokens"] / 6, abs=0.1)
    assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.2)
    assert 0 < row["live_share"] <= 1
    assert row["compile_seconds"] > 0
    with pytest.raises(UserError, match=r"holds 24 problems; pass --prompts=24"):
        job.benchmark(changed(**changes, prompts=25, out=out))


@pytest.mark.slow  # 9 s
def test_a_startup(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", architecture())
    monkeypatch.setattr(executable_cache, "_is_used", lambda: True)  # as on a GPU
    out = tmp_path / "rollout.json"
    options = changed(startup=True, began=time.time() - 50, out=out)
    with set_cache_folder(tmp_path / "cache"):
        for _ in range(2):
            job.benchmark(options)
            jax.clear_caches()
    cold, warm = json.loads(out.read_text())["rows"]
    assert not cold["warm"]
    assert warm["warm"]
    for row in (cold, warm):
        assert 50 < row["weights_s"] <= row["compiled_s"] <= row["first_tokens_s"] < 250
        assert row["programs"] > 3
    assert (cold["kept"], warm["kept"]) == (0, warm["programs"])


# --- The parts of a step --------------------------------------------------------------------------

PACKED = """
%body {
  %loop_add_fusion.1 = bf16[4]{0} fusion(%p), metadata={op_name="jit(f)/while/body/add"}
  %gemm.2 = bf16[4]{0} custom-call(%p), metadata={op_name="jit(f)/jit(_layer)/linears/dot"}
  %mpmd.3 = bf16[4]{0} custom-call(%p), metadata={op_name="jit(f)/linears/fp4_matmul_sm90/map"}
  %zeros.6 = s32[4]{0} fusion(), metadata={op_name="jit(f)/linears/broadcast_in_dim"}
  %input-reduce.4 = f32[4]{0} fusion(%p), metadata={op_type="dot" op_name="jit(f)/head/dot"}
  ROOT %copy.5 = f32[4]{0} copy(%p)
}
"""


def test_parts_of_instructions():
    assert parts.parts_of(PACKED) == {
        "loop_add_fusion.1": "other",
        "gemm.2": "lora",
        "mpmd.3": "linears",
        "zeros.6": "linears",
        "input-reduce.4": "head",
    }
    assert parts.parts_of(PACKED.replace("fp4_", "x"))["gemm.2"] == "linears"


def test_a_step_by_part():
    kernels = [("input_reduce_4", 4.0), ("gemm.2", 1.0), ("mosaic_fp4_matmul_sm90", 2.0)] * 2
    kernels += [("nvjet_tst", 0.5), ("loop_add_fusion_1", 0.25)]
    found = parts.per_step(kernels, parts.parts_of(PACKED), wall_ms=16.0, steps=2, layers=2)
    assert found == {
        "linears": 2.0, "lora": 1.0, "attention": 0.0, "norms": 0.0, "mlp": 0.0, "head": 4.0,
        "sampling": 0.0, "other": 0.375, "gaps": 0.625, "kernels_per_layer": 2.0,
    }  # fmt: skip


def test_the_parts_of_a_chunk(monkeypatch):
    _, table = benchmark_subject.operations_of_steps(subject("bf16"), 2, OPTIONS)
    found = parts.parts_of(table["decode", 2].lower().compile().as_text())
    assert set(found.values()) == set(parts.PARTS) - set(parts._PARTS_OF_SOME)

    def kernels(run):
        drawn = jax.device_get(run())
        assert drawn.tokens.shape == (2, 6)
        assert np.isfinite(drawn.logprobs).all()
        return [(name, 12.0) for name, part in found.items() if part == "head"][:1]

    monkeypatch.setattr(parts, "device_kernels", kernels)
    monkeypatch.setattr(parts, "graph_launches", lambda run: run() and 6)
    seconds = itertools.count(0.0, 0.03 * parts._CHUNKS)  # 30 ms for a chunk of 6 steps
    monkeypatch.setattr(parts, "time", types.SimpleNamespace(perf_counter=lambda: next(seconds)))
    row = parts.step_parts(subject("bf16"), 2, OPTIONS)
    assert row["head"] == 2.0
    assert row["linears"] == row["other"] == 0.0
    assert row["gaps"] == pytest.approx(30.0 / 6 - 2.0)
    assert row["graphs"] == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_a_step_is_one_graph(format):
    row = parts.step_parts(subject(format), 2, OPTIONS)
    # The 17 steps after the first token make three chunks of 6. A chunk may launch one more graph:
    # before its first step it gathers the state of its slots.
    assert 6 <= round(6 * row["graphs"]) <= 7


def test_kernels_of_a_profile():
    text = """
    planes {
      name: "/device:GPU:0"
      lines { name: "Stream #13(Compute)" timestamp_ns: 0
        events { metadata_id: 2 offset_ps: 5000000 duration_ps: 3000000
                 stats { metadata_id: 1 str_value: "gemm.2" } }
        events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000 }
        events { metadata_id: 2 offset_ps: 9000000 duration_ps: 1000000
                 stats { metadata_id: 2 str_value: "size:4" } }
      }
      lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 7000000 } }
      event_metadata { key: 1 value { id: 1 name: "loop_add" } }
      event_metadata { key: 2 value { id: 2 name: "nvjet" } }
      stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
      stat_metadata { key: 2 value { id: 2 name: "memcpy_details" } }
    }
    planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 } } }
    """
    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    )
    names, times = zip(*parts.kernels_in(profile), strict=True)
    assert names == ("loop_add", "gemm.2")
    assert times == pytest.approx((0.002, 0.003))


def test_graphs_of_a_profile():
    text = """
    planes {
      name: "/host:CPU"
      lines { name: "python3" events { metadata_id: 1 } events { metadata_id: 1 }
              events { metadata_id: 2 } }
      event_metadata { key: 1 value { id: 1 name: "cuGraphLaunch (CudaGraph:268)" } }
      event_metadata { key: 2 value { id: 2 name: "cuLaunchKernel" } }
    }
    """
    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    )
    assert parts.graph_launches_in(profile) == 2


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ("qwen9",)}, "unknown model 'qwen9': choose from smollm2-135m"),
        ({"format": ("int4",)}, "unknown format 'int4': choose from nvfp4"),
        ({"new_tokens": 9}, "--new-tokens=9: it must be at least 10"),
        ({"batch": (4, 0)}, "--batch=0: it must be at least 1"),
        ({"data": "x.jsonl"}, "pass real ones with --source"),
        ({"parts": True}, "on an NVIDIA GPU only"),
        ({"startup": True, "format": ("bf16", "nf4")}, "a process begins once"),
        ({"startup": True, "lora_rank": (4, 0)}, "a process begins once"),
        ({"lora_rank": (4, -1)}, "--lora-rank=-1: it must be at least 0"),
    ],
)
def test_what_cannot_be_measured(changes, message):
    with pytest.raises(UserError, match=message):
        benchmark_subject.check(changed(**{"model": ("qwen2.5-7b",)} | changes))


def test_a_batch_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(benchmark_subject.shapes, "fit_rows", lambda *_, **__: (2, 1))
    with pytest.raises(UserError, match="--batch=3: besides tiny in bf16 the memory holds 2 rows"):
        benchmark_subject.check_fits(subject("bf16"), OPTIONS)
    monkeypatch.setattr(benchmark_subject.shapes, "fit_rows", lambda *_, **__: (3, 1))
    benchmark_subject.check_fits(subject("bf16"), OPTIONS)


@pytest.mark.parametrize("flag", ["--batch=1,x", "--lora-rank=32;0"])
def test_flags(flag, capsys):
    with pytest.raises(SystemExit):
        command.make_parser().parse_args([flag])
    name, _, value = flag.partition("=")
    assert f"argument {name}: {value}: numbers with commas" in capsys.readouterr().err
