"""The plan of a run: its bytes against those measured, what fits, and what is refused."""

import functools
import json
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from refusal import refused

from benchmarks import step
from benchmarks.rollout.random_policy import random_params
from pallas_kernels import device as default_device
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.commands.plan import CARDS
from qerl_jax.config import models
from qerl_jax.config.experiments import dapo_math, grpo_gsm8k
from qerl_jax.memory.report import (
    check_fits,
    format_plan,
    largest_length,
    largest_rows,
    out_of_memory,
)
from qerl_jax.memory.run_plan import Device, device_of, plan_rollout, plan_run, this_device
from qerl_jax.memory.update_plan import LongestRows
from qerl_jax.policy import sizes
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers import delta
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.policy.lora import LoraConfig, init
from qerl_jax.policy.sharding import WHOLE, specs
from qerl_jax.policy.tensor_parallel import cut, shard_of
from qerl_jax.policy.trainable import trained_params
from qerl_jax.rollout.config import EngineConfig, TurnConfig
from qerl_jax.rollout.shapes import extend_bytes
from qerl_jax.system.device_memory import pool_of

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
MEASURED = [
    row
    for name in ("step", "long_rows")
    for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
]
# Commits at which an update also held a copy of the head.
COPIED_HEAD = {
    "6b8478842a6d80d2abc3c06a7f69848c1431ead7",
    "8361d36d4ed38bf6168696a4ebfc38fc0a36c1cf",
}
# Commits at which packed weights took up to 1.28 times their bytes, of which the plan counts 1.02:
# layers were not yet copied to memory of their own size.
WASTED = COPIED_HEAD | {
    "1fc509134e067974e2aaf7a269d9a1501799e48a",
    "29561fd022b6d5effd52f49ae65f4628c0ffc235",
    "e0997e029293ef4b90a79e85c29ceb1eda162349",
}
# The commit of a step whose recurrent layers had no kernel.
WITHOUT_KERNEL_OF_CHUNKS = "b3b4db9cb8c76fac2090b3dc399361a7004db652"
GB = 10**9
CPU = Device(None, "xla", 0.0)


def card(name):
    return device_of(*CARDS[name])


H100 = card("h100-80gb")


def planned(model, device=H100, experiment=grpo_gsm8k, prompt=0, **changes):
    config = experiment.get_config(model)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict(changes)
    return plan_run(config, ARCHITECTURES[model], device, prompt=prompt), config


def refuse(words, model, *arguments, **options):
    """Asserts that a run does not fit; returns the message, its plan and its config."""
    plan, config = planned(model, *arguments, **options)
    assert not plan.fits
    return refused(words, check_fits, plan, config, ARCHITECTURES[model]), plan, config


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['model']}-{row['format']}")
def test_the_peak_is_the_measured_one(row, monkeypatch):
    if row["commit"] == WITHOUT_KERNEL_OF_CHUNKS:
        monkeypatch.setattr(delta, "has_kernel", lambda *_: False)
    data, tensor = step.read_mesh(row["mesh"])
    plan, _ = planned(
        row["model"],
        mesh__data=data,
        mesh__tensor=tensor,
        prompt=row["prompt"],
        model__format=row["format"],
        lora__rank=row["lora_rank"],
        rollout__prompts_per_step=row["batch"] // row["group"],
        rollout__group_size=row["group"],
        rollout__max_new_tokens=row["new_tokens"],
        eval__every=0,
        train__buffer_tokens=row["buffer_tokens"],
        train__recompute=row["recompute"],
    )
    architecture = ARCHITECTURES[row["model"]]
    no_longer_held = 0
    if row["commit"] in COPIED_HEAD:
        no_longer_held += 2 * architecture.vocab_size * architecture.embed_dim / GB
    if row["commit"] in WASTED:
        own = shard_of(architecture, tensor, format=row["format"])
        no_longer_held += 0.26 * sizes.packed_bytes(own, row["format"]) / GB
    lowest = 0.97 * row["peak_gb"] - no_longer_held
    assert lowest < plan.peak / GB < 1.10 * row["peak_gb"]


def test_the_measured_rows_are_of_all_sizes():
    assert {"qwen2.5-coder-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"} <= {
        row["model"] for row in MEASURED
    }
    assert WASTED.issubset(row["commit"] for row in MEASURED)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


KEY = jax.random.key(0, impl="threefry2x32")


def shapes_of(config, format):
    """The parameters of a random policy, as shapes."""
    return jax.eval_shape(functools.partial(random_params, model_config=config, format=format), KEY)


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-0.6b", "smollm2-135m"])
def test_the_weights_are_those_of_a_policy(model, format):
    config = ARCHITECTURES[model]
    params = shapes_of(config, format)
    assert sizes.weight_bytes(config, format=format, itemsize=2) == nbytes(params)
    layers = [layer[name] for layer in params["layers"] for name in layer if "_proj" in name]
    assert sizes.packed_bytes(config, format) == (nbytes(layers) if format != "bf16" else 0)
    if format == "bf16":
        assert sizes.dense_layers_bytes(config, 2) == nbytes(layers)


@pytest.mark.parametrize("parameters", ["lora", "lora+norms", "full"])
def test_the_trained_numbers_are_those_of_a_policy(parameters):
    config, lora = ARCHITECTURES["qwen3-0.6b"], LoraConfig(rank=8, alpha=8.0)
    params = shapes_of(config, "bf16")
    trained = jax.eval_shape(functools.partial(trained_params, parameters=parameters), params)
    if parameters != "full":
        trained = trained, jax.eval_shape(lambda: init(KEY, config, lora))
    found = sizes.trained_numbers(config, parameters=parameters, rank=8, targets=lora.targets)
    assert 4 * found == nbytes(trained)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_the_bytes_of_a_device_are_those_of_its_shards(format, shards):
    config, lora = ARCHITECTURES["qwen3-0.6b"], LoraConfig(rank=8, alpha=8.0)

    def first_shards():
        params = random_params(KEY, config, format=format)
        layers = params.pop("layers")
        return [
            {name: cut(name, leaf, config, shards)[0] for name, leaf in arrays.items()}
            for arrays in (params, *layers)
        ]

    own = shard_of(config, shards, format=format)
    assert sizes.weight_bytes(own, format=format, itemsize=2) == nbytes(
        jax.eval_shape(first_shards)
    )
    adapter = jax.eval_shape(lambda: init(KEY, config, lora))
    parts = jax.tree.map(
        lambda x, spec: x.size // (1 if spec == WHOLE else shards), adapter, specs(adapter, shards)
    )
    found = sizes.trained_numbers(own, parameters="lora", rank=8, targets=lora.targets)
    assert found == sum(jax.tree.leaves(parts))


def test_two_cards_hold_what_one_does_not():
    long = {"rollout__max_new_tokens": 16384, "rollout__prompts_per_step": 1}
    _, alone, _ = refuse("this run takes", "qwen2.5-72b", **long)
    both, config = planned("qwen2.5-72b", mesh__tensor=2, **long)
    check_fits(both, config, ARCHITECTURES["qwen2.5-72b"])
    assert both.weights < 0.51 * alone.weights
    assert both.rollout.rows == both.rollout.all_rows == 8
    rows = largest_rows(both, config, ARCHITECTURES["qwen2.5-72b"])
    assert rows > 8


@pytest.mark.parametrize("name", ["rtx-4090", "l40s", "h100-80gb"])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"])
def test_the_most_rows_are_those_that_a_run_decodes_together(model, name):
    plan, config = planned(model, card(name))
    rows = largest_rows(plan, config, ARCHITECTURES[model]) if plan.fits else 0
    if 0 < rows < plan.rollout.all_rows:
        assert plan.rollout.rows == rows
    else:
        assert not rows or plan.rollout.rows == plan.rollout.all_rows


@pytest.mark.parametrize("name", ["h100-80gb", "h200-141gb"])
@pytest.mark.parametrize("model", models.MODELS)
def test_every_preset_starts(model, name):
    plan, _ = planned(model, card(name))
    assert plan.fits
    assert plan.rollout.rows >= min(4, plan.rollout.all_rows)
    assert plan.peak <= card(name).usable


@pytest.mark.parametrize("name", ["rtx-4090", "h200-141gb"])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "gpt-oss-20b", "qwen3.6-35b-a3b", "qwen3.5-27b"])
def test_the_plan_of_a_card_does_not_ask_the_device_that_plans(model, name, monkeypatch):
    def ask():
        pytest.fail("the plan asks the default device")

    for module, function in ((dispatch, "supports_device"), (default_device, "cuda_capability")):
        monkeypatch.setattr(module, function, ask)
    planned(model, card(name), environment__function="module:Class")


@pytest.mark.parametrize("choice", ["", "mosaic", "mma", "xla"])
@pytest.mark.parametrize("name", ["a100-80gb", "rtx-3090", "rtx-4090", "h100-80gb"])
def test_the_plan_of_a_card_is_what_such_a_device_answers(name, choice, monkeypatch):
    if choice:
        monkeypatch.setenv(dispatch.KERNEL_VARIABLE, choice)
    own = card(name)
    gpu = mock.Mock(platform="gpu", compute_capability=str(own.capability))
    gpu.client.platform_version, gpu.memory_stats = "CUDA 13000", lambda: {"bytes_limit": own.pool}
    for function in ("devices", "local_devices"):
        monkeypatch.setattr(jax, function, lambda: [gpu])
    for function in ("agrees", "_agrees_once"):
        monkeypatch.setattr(dispatch, function, lambda *_: True)
    for function in ("supports_device", "supports_mma_device"):
        monkeypatch.setattr(dispatch, function, getattr(dispatch, function).__wrapped__)
    assert this_device() == own
    options = {"turns": TurnConfig(8, 0, 512, 4096), "copies": (0, 0), "free": own.usable // 2}
    rows, dtype = LongestRows(1024, 2048, 64, 8), jnp.dtype("bfloat16")
    for model in map(ARCHITECTURES.get, ("qwen2.5-7b", "gpt-oss-20b", "qwen3.5-27b")):
        for cache in ("bfloat16", "float8"):
            engine = EngineConfig(drafts="off", kv_cache_dtype=cache)
            of_card, of_device = (
                plan_rollout(model, engine, rows, buffer=buffer, **options)
                for buffer in (own.buffer(model, dtype), PlannedBuffer(dtype))
            )
            assert of_card == of_device, (model.model_type, cache)


def test_replies_are_planned_without_the_kernel_where_the_cache_is_too_large():
    """The kernel counts the numbers of all rows, 2**21 each, in 32 bits."""
    model, dtype = ARCHITECTURES["qwen2.5-7b"], jnp.dtype("bfloat16")
    options = {"reply_tokens": 512, "positions": 4096, "dtype": dtype}
    options["buffer"] = H100.buffer(model, dtype)
    # As many of them are extended together.
    few, many = (extend_bytes(model, rows=rows, **options) for rows in (1024, 1025))
    assert few < many


# Compiled with dense weights and an adapter of rank 32: 32 rows of 4,096 positions, 8 of which are
# extended by 768 tokens.
@pytest.mark.parametrize(
    ("model", "capability", "measured"),
    [
        ("qwen2.5-7b", 8.9, 0.971),
        ("qwen2.5-1.5b", 8.9, 0.452),
        ("qwen2.5-7b", 9.0, 0.879),
        ("qwen2.5-7b", 12.0, 0.879),
    ],
)
def test_replies_take_the_bytes_of_the_compiled_program(model, capability, measured):
    dtype = jnp.dtype("bfloat16")
    buffer = PlannedBuffer(dtype, hopper=capability == 9.0, capability=capability)
    options = {"rows": 32, "reply_tokens": 512, "positions": 4096, "dtype": dtype}
    found = extend_bytes(ARCHITECTURES[model], buffer=buffer, **options)
    assert 0.99 * measured < found / GB < 1.03 * measured


def test_prompts_that_wait_for_a_slot_leave_memory_for_replies():
    """A prompt that waits keeps a state of 0.16 GB while rows are extended."""
    model = ARCHITECTURES["qwen3.5-27b"]
    buffer = H100.buffer(model, jnp.dtype("bfloat16"))
    options = {"buffer": buffer, "turns": TurnConfig(8, 0, 512, 4096), "copies": (0, 0)}
    engine, rows = EngineConfig(drafts="off"), LongestRows(256, 2048, group_size=8, num_prompts=16)
    for free in (int(gigabytes * GB) for gigabytes in (1.0, 1.7, 3.1, 19.9, 34.6)):
        rollout = plan_rollout(model, engine, rows, free=free, **options)
        assert rollout.rows < rollout.all_rows
        assert rollout.bytes <= free or not rollout.rows


def test_the_target_of_32b_fits_an_h100():
    lengths = {"rollout__max_new_tokens": 4096, "eval__every": 0, "prompt": 256}
    step = {"rollout__prompts_per_step": 1, "rollout__group_size": 8}
    small, _ = planned("qwen2.5-32b", Device(int(45 * GB / 0.95), "mosaic", 9.0), **lengths | step)
    assert small.fits
    assert small.rollout.rows == 8
    step["rollout__prompts_per_step"] = 4
    large, _ = planned("qwen2.5-32b", **lengths | step)
    assert large.fits
    assert large.rollout.rows == 32


def test_what_does_not_fit_is_refused_with_what_would():
    long = {"rollout__max_new_tokens": 16384}
    words, model = r"this run takes .* GB, .* weights", "qwen2.5-72b"
    said, _, config = refuse(words, model, experiment=dapo_math, **long)
    fitting = largest_length(config, ARCHITECTURES[model], H100)
    assert said.endswith(f"--config.rollout.max_new_tokens={fitting} fits")
    for length, fits in ((fitting, True), (fitting + 128, False)):
        changes = {"rollout__max_new_tokens": length, "rl__overlong_buffer": 0}
        assert planned(model, experiment=dapo_math, **changes)[0].fits == fits
    for device, format, remedy in (
        (card("a100-40gb"), "nvfp4", "take a smaller model or a larger card"),
        (H100, "bf16", "pass --config.model.format=nvfp4"),
    ):
        refuse(remedy, model, device, model__format=format)


@pytest.mark.parametrize(("buffer", "fits"), [(20000, False), (8192, True)])
def test_the_length_that_fits_does_so_with_the_buffer_of_the_user(buffer, fits):
    options = {"device": card("l4"), "train__buffer_tokens": buffer}
    options["rollout__max_new_tokens"] = 7800
    plan, config = planned("qwen2.5-14b", **options)
    assert plan.fits == fits
    fitting = largest_length(config, ARCHITECTURES["qwen2.5-14b"], options["device"])
    assert fitting == (8192 + 1 - config.data.max_prompt_tokens if fits else 0)
    if fits:
        options["rollout__max_new_tokens"] = fitting
        assert planned("qwen2.5-14b", **options)[0].fits
    else:
        refuse(r"leave out train\.buffer_tokens", "qwen2.5-14b", **options)


def test_a_model_of_which_all_parameters_do_not_fit_is_offered_an_adapter():
    whole = {"train__parameters": "full", "model__format": "bf16"}
    refuse(r"parameters=lora with \S+format=nvfp4", "qwen2.5-32b", **whole)
    assert planned("qwen2.5-32b", train__parameters="lora", model__format="nvfp4")[0].fits


def test_the_longest_conversation_that_fits_counts_the_replies():
    """The smallest buffer for a row holds the tokens of the environment, too."""
    lengths = {"rollout__max_new_tokens": 768, "environment__function": "module:Class"}
    _, config = planned("qwen2.5-7b", **lengths)
    fitting = largest_length(config, ARCHITECTURES["qwen2.5-7b"], H100)
    assert fitting > 768
    lengths["rollout__max_new_tokens"] = fitting
    assert planned("qwen2.5-7b", **lengths)[0].fits


LONG_REPLIES = {
    "environment__function": "module:Class",
    "environment__reply_tokens": 512,
    "environment__max_turns": 8,
    "data__max_prompt_tokens": 1024,
}


@pytest.mark.parametrize(
    ("model", "name", "new_tokens", "position"),  # with the bytes of a position of a row
    [("qwen2.5-7b", "h200-141gb", 2048, 57_344), ("qwen2.5-1.5b", "rtx-4090", 4096, 28_672)],
)
def test_replies_extend_rows_in_bounded_memory(model, name, new_tokens, position):
    """The scores of a quarter of the rows once took 18 of 40 GB that the plan did not name."""
    changes = LONG_REPLIES | {"rollout__max_new_tokens": new_tokens}
    plan, config = planned(model, card(name), **changes, rollout__group_size=64)
    assert plan.fits
    rollout = plan.rollout
    assert 0.5 * GB < rollout.extension < 2.1 * GB  # Compiled it takes 15 % more at most.
    # Prompts of which rows wait for a slot are there meanwhile.
    assert rollout.temporary >= rollout.extension + rollout.prefill_prompts * 1024 * position
    assert f"; {rollout.extension / GB:.1f} GB extend rows by replies" in format_plan(plan, config)
    # Rows that wait for an environment while others have their slots.
    assert rollout.rows < rollout.all_rows
    assert rollout.host == 2**33
    assert "on the host, pinned       8.6 GB" in format_plan(plan, config)
    # A reply that does not fit into the conversation ends it, and extends no row.
    longer = changes | {"environment__reply_tokens": 40_000, "environment__context_tokens": 8192}
    assert planned(model, card(name), **longer)[0].rollout.extension < 2.1 * GB
    few, _ = planned(model, card(name), **changes, environment__host_cache_bytes=5)
    assert few.rollout.host in (0, 5)
    longer = changes | {"environment__reply_tokens": 2048, "environment__context_tokens": 8192}
    assert planned(model, card(name), **longer)[0].rollout.extension < 2.1 * GB


def test_rows_that_wait_are_those_of_a_group_of_devices():
    changes = LONG_REPLIES | {"rollout__prompts_per_step": 8, "rollout__group_size": 64}
    changes |= {"rollout__max_rows": 32, "environment__host_cache_bytes": 2**40}
    one, two, cut = (
        planned("qwen2.5-7b", card("h200-141gb"), **changes, **mesh)
        for mesh in ({}, {"mesh__data": 2}, {"mesh__tensor": 2})
    )
    hosts = [plan.rollout.host for plan, _ in (one, two, cut)]
    waiting = [plan.rollout.all_rows - plan.rollout.rows for plan, _ in (one, two, cut)]
    assert waiting == [480, 224, 480]
    assert hosts[1] * 480 == hosts[0] * 224
    assert hosts[2] == hosts[0]
    group = "GB  for each group of devices, keys and values of 224 rows, while they wait"
    assert group in format_plan(*two)
    assert "GB  keys and values of 480 rows, while they wait" in format_plan(*cut)


def test_routes_and_adapters_of_experts_are_planned():
    changes = {"rollout__prompts_per_step": 8, "rollout__max_new_tokens": 2048}
    options = changes | {"rollout__group_size": 32, "data__max_prompt_tokens": 256}
    plan, config = planned("qwen3.6-35b-a3b", card("h200-141gb"), **options)
    assert plan.rollout.routes == 8 * (256 + 32 * 2048) * 320  # 40 layers with 8 experts
    assert "on the host, routes       0.2 GB" in format_plan(plan, config)
    none, config = planned(
        "qwen3.6-35b-a3b", card("h200-141gb"), **options, rl__routing_replay="none"
    )
    assert none.rollout.routes == 0
    assert "routes" not in format_plan(none, config)
    more, _ = planned("qwen3.6-35b-a3b", card("h200-141gb"), **options, lora__expert_rank=8)
    numbers = 40 * 256 * 8 * (1024 + 2048 + 2048 + 512)
    assert more.training - plan.training == 3 * 4 * numbers
    assert more.gradient - plan.gradient >= 4 * numbers
    assert more.rollout.policy_copy - plan.rollout.policy_copy == 2 * numbers


def test_the_sizes_of_a_user_are_kept_and_refused_where_they_do_not_fit():
    plan, _ = planned("qwen2.5-7b", rollout__max_rows=48, train__buffer_tokens=5000)
    assert (plan.rollout.rows, plan.buffer_tokens) == (48, 5120)
    sizes = {"train__recompute": "none", "train__buffer_tokens": 12288}
    refuse(r"leave out train\.buffer_tokens", "qwen2.5-32b", **sizes)


def test_without_a_kernel_for_many_rows_a_third_of_the_memory_may_be_a_dense_copy():
    many, _ = planned("qwen2.5-7b", card("a100-80gb"))
    assert many.rollout.dequantize == "once"
    assert many.rollout.dense_copy > 10 * GB
    few, _ = planned("qwen2.5-7b", card("a100-80gb"), rollout__max_rows=64)
    assert few.rollout.dense_copy < 0.5 * GB  # a layer at a time, for prompts
    plan, _ = planned("qwen2.5-32b", card("a100-80gb"))
    assert plan.rollout.dequantize == "step"
    assert planned("qwen2.5-32b", rollout__dequantize="once")[0].rollout.dense_copy == 0
    assert planned("qwen2.5-7b", model__format="nf4")[0].rollout.dense_copy > 10 * GB


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "l4"])
def test_a_7b_decodes_on_24_gb_without_a_dense_copy(name):
    plan, _ = planned("qwen2.5-7b", card(name))
    assert plan.fits
    assert plan.rollout.dense_copy < 0.5 * GB


@pytest.mark.parametrize("name", ["rtx-5090", "l40s"])
def test_experts_are_never_dense_where_a_kernel_reads_their_tiles(name):
    plan, _ = planned("qwen3.6-35b-a3b", card(name), rollout__max_new_tokens=1024, eval__every=0)
    assert plan.fits
    assert plan.rollout.dense_copy < GB  # attention and the shared experts
    assert not planned("qwen3.6-35b-a3b", card("rtx-4090"))[0].fits


def test_a_longer_evaluation_has_fewer_rows():
    plan, _ = planned("qwen2.5-32b", eval__max_new_tokens=16384)
    assert 0 < plan.evaluation.rows < plan.rollout.rows
    assert planned("qwen2.5-32b", eval__every=0)[0].evaluation is None


def test_out_of_memory_names_the_next_smaller_sizes():
    plan, config = planned("qwen2.5-32b")
    said = out_of_memory(plan, config, ARCHITECTURES["qwen2.5-32b"])
    tokens = int(said.split("train.buffer_tokens=")[1].split()[0])
    again = said.split("train.recompute=")[1].split(";")[0] if "recompute" in said else "none"
    smaller, _ = planned("qwen2.5-32b", train__buffer_tokens=tokens, train__recompute=again)
    assert smaller.update.bytes < 0.91 * plan.update.bytes
    assert f"max_rows={3 * plan.rollout.rows // 4} (now {plan.rollout.rows})" in said


def test_on_a_cpu_everything_fits():
    plan, config = planned(models.STAND_IN, CPU)
    model = ARCHITECTURES[models.STAND_IN]
    check_fits(plan, config, model)
    assert plan.rollout.rows == plan.rollout.all_rows
    assert largest_rows(plan, config, model) is None
    assert "fit" not in format_plan(plan, config)
    assert "lower --config.train.buffer_tokens" in out_of_memory(plan, config, model)


def test_the_plan_as_text():
    plan, config = planned("qwen2.5-32b")
    text = format_plan(plan, config)
    for part in ("weights", "adapter and optimizer", "keys and values", "one update buffer"):
        assert f"\n{part}" in f"\n{text}"
    assert f"{plan.rollout.rows} of 128 rows" in text
    assert f"{plan.peak / GB:.1f} GB" in text


def test_the_command():
    command = [sys.executable, "-m", "experiments.plan", "--json", "--memory-gb=60"]
    command.append("--config=experiments/dapo_math.py:qwen2.5-72b")
    result = subprocess.run(
        command, cwd=RESULTS.parents[1], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: this run takes ")
    assert result.stderr.count("\n") == 1
    found = json.loads(result.stdout)
    assert not found["fits"]
    assert found["usable"] < pool_of(1) * 60 * GB < found["peak"]
    wanted = {"weights", "training", "rollout", "update", "largest_rows", "largest_new_tokens"}
    assert wanted <= found.keys()
