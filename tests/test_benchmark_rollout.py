"""The benchmark of rollouts: rows, random weights, the parts of a step."""

import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny_checkpoints import model_config

from benchmarks.rollout import __main__ as command
from benchmarks.rollout import benchmark as job
from benchmarks.rollout import profile as parts
from benchmarks.rollout import results as rollout_rows
from benchmarks.rollout import step_breakdown as step_parts
from benchmarks.rollout import subject as benchmark_subject
from benchmarks.rollout.random_policy import random_lora, random_params
from pallas_kernels.fp4_matmul import cases
from qerl_jax.compile import executable_cache
from qerl_jax.compile.run_cache import set_cache_folder
from qerl_jax.config import models
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers.kinds import projection_shapes
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.rollout.head import rollout_head
from qerl_jax.rollout.scheduler import Statistics
from qerl_jax.rollout.shapes import RolloutShapes

ROOT = pathlib.Path(__file__).resolve().parents[1]
KEY = jax.random.key(0, impl="rbg")
CONFIG = benchmark_subject.BenchmarkConfig(
    models=("tiny",),
    source="",
    formats=("nf4",),
    batches=(3,),
    prompt=5,
    new_tokens=18,
    lora_ranks=(4,),
    tensor=1,
    chunk_steps=8,
    dequantize="once",
    implementation="",
    kv_cache_dtype="",
    head_format="",
    parts=False,
    startup=False,
    began=0.0,
    data="",
    prompts=4,
    group=2,
    max_new_tokens=12,
    max_rows=0,
    system_prompt="",
    seed=0,
    bandwidth=1e10,
    out="",
)


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
    returned = job.benchmark(dataclasses.replace(CONFIG, out=str(out)))
    (row,) = json.loads(out.read_text())["rows"]
    assert returned == [row]
    policy = ["decode", "tiny", "nf4", "random", 4, "bfloat16", "", 8, "once", "", 1]
    assert [row[name] for name in rollout_rows.KEYS["decode"]] == [*policy, 3, 5, 18]
    assert row["ms_per_step"] == 2
    assert row["tokens_per_s"] == 1500
    assert row["prefill_tokens_per_s"] == 1250
    # 15 tokens of prompts in 3 rows of 8, and 17 steps of 3 rows in chunks of 6.
    assert row["padding_waste"] == pytest.approx(1 - (15 + 51) / (24 + 54), abs=1e-4)
    moved = job.step_bytes(subject("nf4"), rows=3, tokens=5 + 12)
    assert row["roofline_share"] == pytest.approx(moved / 2e7, abs=1e-4)
    assert row["weights"] == "random"
    assert row["device"] == "cpu"
    assert row["commit"] == "abc"
    assert row["versions"]["jax"] == jax.__version__
    assert {"date", "command", "peak_gb"} <= set(row)
    printed = capsys.readouterr().out
    assert "tiny nf4 lora 4, batch 3: " in printed
    assert ", 15.4 % padding" in printed
    assert "model  format  lora  3" in printed


@pytest.mark.slow
def test_adapters_of_several_ranks_are_measured_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", architecture())
    measured = []

    def row(subject, batch, config, programs):
        measured.append((subject.lora_rank, subject.lora is None, batch))
        described = benchmark_subject.row_settings(subject, "decode", config)
        times = {"ms_per_step": 1.0, "tokens_per_s": 1.0, "prefill_tokens_per_s": 1.0}
        shares = {"roofline_share": None, "peak_gb": None, "padding_waste": 0.0}
        return described | {"batch": batch, "prompt": 5, "new_tokens": 18} | times | shares

    monkeypatch.setattr(job, "measure_decoding", row)
    monkeypatch.setattr(job, "_compile", lambda *_: {})
    out = tmp_path / "rollout.json"
    config = dataclasses.replace(CONFIG, formats=("bf16",), lora_ranks=(4, 0), out=str(out))
    job.benchmark(config)
    assert measured == [(4, False, 3), (0, True, 3)]
    assert [row["lora_rank"] for row in json.loads(out.read_text())["rows"]] == [0, 4]


@pytest.mark.slow  # 8 s
def test_rollouts_of_problems(tmp_path, capsys):
    model = tiny_run.write_model(tmp_path / "model")
    problems = tiny_run.write_problems(tmp_path / "problems.jsonl")
    out = tmp_path / "rollout.json"
    config = dataclasses.replace(
        CONFIG,
        source=str(model),
        formats=("bf16",),
        data=str(problems),
        prompts=3,
        max_rows=4,
        out=str(out),
    )
    job.benchmark(config)
    (row,) = job.benchmark(config)
    assert json.loads(out.read_text())["rows"] == [row]  # which replaced its own
    policy = ["gsm8k", "model", "bf16", "real", 4, "bfloat16", "", 8, "once", "", 1]
    assert [row[name] for name in rollout_rows.KEYS["gsm8k"]] == [*policy, 3, 2, 12, 4]
    assert 6 <= row["tokens"] <= 6 * 12
    assert row["mean_tokens"] == pytest.approx(row["tokens"] / 6, abs=0.1)
    assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.2)
    assert 0 < row["live_share"] <= 1
    assert 0 < row["padding_waste"] < 1
    assert row["compile_seconds"] > 0
    printed = capsys.readouterr().out
    assert f"model bf16 lora 4, 3 x 2: {row['tokens_per_s']:,.0f} tokens/s" in printed
    assert f"{100 * row['padding_waste']:.1f} % padding" in printed
    with pytest.raises(UserError, match=r"holds 24 problems; pass --prompts=24"):
        job.benchmark(dataclasses.replace(config, prompts=25))


@pytest.mark.slow  # 9 s
def test_a_startup(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHITECTURES, "tiny", architecture())
    monkeypatch.setattr(executable_cache, "_is_used", lambda: True)  # as on a GPU
    out = tmp_path / "rollout.json"
    config = dataclasses.replace(CONFIG, startup=True, began=time.time() - 50, out=str(out))
    with set_cache_folder(tmp_path / "cache"):
        for _ in range(2):
            job.benchmark(config)
            jax.clear_caches()
    cold, warm = json.loads(out.read_text())["rows"]
    assert not cold["warm"]
    assert warm["warm"]
    for row in (cold, warm):
        assert 50 < row["weights_s"] <= row["compiled_s"] <= row["first_tokens_s"] < 250
        assert row["programs"] > 3
    assert (cold["kept"], warm["kept"]) == (0, warm["programs"])
    printed = capsys.readouterr().out
    assert "tiny nf4 lora 4, 4 x 2: first tokens after " in printed
    assert "all of them in the cache" in printed


def test_bytes_of_a_step():
    config = architecture()
    weights = sum(n * k for n, k in projection_shapes(config).values()) * config.num_layers
    head = 2 * config.vocab_size * config.embed_dim
    position = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    for format, bits in (("nvfp4", 4.5), ("bf16", 16)):
        expected = weights * bits / 8 + head + 3 * 10 * position
        assert job.step_bytes(subject(format), rows=3, tokens=10) == expected
    small = job.step_bytes(subject("bf16"), rows=3, tokens=10, kv_cache_dtype="float8")
    assert small == weights * 2 + head + 3 * 10 * position / 2
    with_head = subject("bf16", head_format="nvfp4")
    small = job.step_bytes(with_head, rows=3, tokens=10)
    assert small == weights * 2 + head * 4.5 / 16 + 3 * 10 * position


def test_padding_waste():
    plan = RolloutShapes(
        cache_positions=48, batch_sizes=(4,), chunk_steps=4, prefill_batch=2,
        prompt_widths=(8, 16), insert_sizes=(4,), dtype=jnp.dtype("bfloat16"),
    )  # fmt: skip
    cost = Statistics(prefilled_prompts=4, decoded=100, live=80)
    # Prompts of 5 and 8 are prefilled in 8 positions, the third one with another in 16.
    assert job.padding_waste([5, 8, 9], plan, cost) == round(1 - (22 + 80) / (16 + 32 + 100), 4)


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
    chunk = step_parts.Chunk(subject("bf16"), 2, 18, CONFIG)
    program = chunk.lower(jax.eval_shape(chunk.empty_state)).compile()
    found = parts.parts_of(program.as_text())
    assert set(found.values()) == set(parts.PARTS) - {"recurrence"}

    def kernels(run):
        drawn = jax.device_get(run())
        assert drawn.tokens.shape == (2, 6)
        assert np.isfinite(drawn.logprobs).all()
        return [(name, 12.0) for name, part in found.items() if part == "head"][:1]

    monkeypatch.setattr(step_parts, "device_kernels", kernels)
    monkeypatch.setattr(step_parts, "graph_launches", lambda run: run() and 6)
    seconds = itertools.count(0.0, 0.03 * step_parts._CHUNKS)  # 30 ms for a chunk of 6 steps
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr(step_parts, "time", clock)
    row = step_parts.step_parts(subject("bf16"), 2, CONFIG)
    assert row["head"] == 2.0
    assert row["linears"] == row["other"] == 0.0
    assert row["gaps"] == pytest.approx(30.0 / 6 - 2.0)
    assert row["graphs"] == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_a_step_is_one_graph(format):
    row = step_parts.step_parts(subject(format), 2, CONFIG)
    # The 17 steps after the first token make three chunks of 6. A chunk may launch one more graph:
    # before its first step it gathers the state of its slots.
    assert 6 <= round(6 * row["graphs"]) <= 7


@pytest.mark.parametrize(("dequantize", "packed"), [("once", False), ("step", True)])
def test_a_chunk_reads_the_weights_that_the_engine_gives_it(dequantize, packed):
    config = dataclasses.replace(CONFIG, dequantize=dequantize)
    chunk = step_parts.Chunk(subject("nf4"), 2, 18, config)
    lowered = chunk.lower(jax.eval_shape(chunk.empty_state))
    assert ("xui8>" in lowered.as_text()) == packed


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
        ({"models": ("qwen9",)}, "unknown model 'qwen9': choose from smollm2-135m"),
        ({"formats": ("int4",)}, "unknown format 'int4': choose from nvfp4"),
        ({"new_tokens": 9}, "--new-tokens=9: it must be at least 10"),
        ({"batches": (4, 0)}, "--batch=0: it must be at least 1"),
        ({"data": "x.jsonl"}, "pass real ones with --source"),
        ({"parts": True}, "on an NVIDIA GPU only"),
        ({"startup": True, "formats": ("bf16", "nf4")}, "a process begins once"),
        ({"startup": True, "lora_ranks": (4, 0)}, "a process begins once"),
        ({"lora_ranks": (4, -1)}, "--lora-rank=-1: it must be at least 0"),
        ({"startup": True, "parts": True}, "--startup measures nothing else"),
        ({"seed": -1}, "--seed=-1: it must be at least 0"),
        ({"bandwidth": float("nan")}, "--bandwidth=nan: it must be at least 0"),
    ],
)
def test_what_cannot_be_measured(changes, message):
    given = {"models": ("qwen2.5-7b",)} | changes
    with pytest.raises(UserError, match=message):
        benchmark_subject.check(dataclasses.replace(CONFIG, **given))


def test_a_batch_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(benchmark_subject.shapes, "rows_left", lambda *_, **__: 2)
    with pytest.raises(UserError, match="--batch=3: beside tiny in bf16 the memory holds 2 rows"):
        benchmark_subject.check_fits(subject("bf16"), CONFIG)
    monkeypatch.setattr(benchmark_subject.shapes, "rows_left", lambda *_, **__: 3)
    benchmark_subject.check_fits(subject("bf16"), CONFIG)


def test_flags():
    with pytest.raises(UserError, match="--batch=1,x: numbers with commas"):
        command.run(command.make_parser().parse_args(["--batch=1,x"]))
    with pytest.raises(UserError, match="--lora-rank=32;0: numbers with commas"):
        command.run(command.make_parser().parse_args(["--lora-rank=32;0"]))


@pytest.mark.slow
def test_an_unknown_model():
    program = [sys.executable, "-m", "benchmarks.rollout", "--model=x"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown model 'x': choose from smollm2-135m")
