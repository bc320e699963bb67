"""Recurrent layers: the delta rule, their states in rollouts, adapters, noise, files and plans."""

import dataclasses
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints
import tiny_rollout
import tiny_run
from jax.experimental.pallas import mosaic_gpu as plgpu
from tiny_model import random_lora, random_tokens, tiny_policy
from warpgroup_kernel import use_decode_kernels

from pallas_kernels import chunks_sm90
from pallas_kernels.attention import PART_BITS, segments
from pallas_kernels.decode import delta as delta_kernel
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.config.experiments.grpo_gsm8k import get_config
from qerl_jax.errors import UserError
from qerl_jax.export.merge import merged_layers
from qerl_jax.memory.report import format_plan
from qerl_jax.memory.run_plan import Device, plan_run
from qerl_jax.policy import aqn, lora, sizes, tensor_parallel, transformer
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.config import RecurrentConfig, from_hf_config, to_hf_config
from qerl_jax.policy.layers import delta, kinds, recurrent
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.trainable import Trainable
from qerl_jax.quantization.calibration import CalibrationOptions, calibrated_layers
from qerl_jax.rollout import shapes
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, TurnConfig
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.training.loop import train
from qerl_jax.weights import names, peft
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import load
from qerl_jax.weights.safetensors import read_file, read_folder
from qerl_jax.weights.save import checkpoint_tensors, companion_files, write_checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden" / "qwen3_5"
SHAPES = RecurrentConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=6, window=4)
TOKENS = 300
TARGETS = (*kinds.PROJECTIONS, "in_proj_qkv", "in_proj_z", "out_proj")


@functools.cache
def inputs():
    """Inputs of the convolution, of the gates, and the arrays of a layer."""
    rng = np.random.default_rng(0)
    layer = {
        "a_log": jnp.asarray(rng.uniform(-3, 1, 4), jnp.float32),
        "dt_bias": jnp.ones(4),
        "conv": jnp.asarray(rng.standard_normal((SHAPES.channels, 1, 4)), jnp.float32),
    }
    x = rng.standard_normal((1, TOKENS, SHAPES.channels)).astype(np.float32)
    return x, rng.standard_normal((1, TOKENS, 8)).astype(np.float32), layer


@functools.partial(jax.jit, static_argnames="packed")
def chunked(x, ba, buffer_segments, *, packed=True):
    """The outputs and the last state of the chunked form."""
    layer = inputs()[2]
    layout = delta.layout_of(buffer_segments, SHAPES) if packed else None
    mixed = delta.convolve(x, layer["conv"], layout)
    heads = delta.split_heads(mixed, SHAPES)
    return delta.delta_rule(*heads, delta.gates(ba, layer), layout)


def test_steps_are_the_chunks():
    """Tokens one after the other give the outputs, the state and the window of whole rows."""
    x, ba, layer = inputs()
    length = 130
    expected, last = chunked(x[:, :length], ba[:, :length], None, packed=False)

    @jax.jit
    def step(carry, token):
        state, window = carry
        mixed, window = delta.convolve_step(token[0], window, layer["conv"])
        heads = delta.split_heads(mixed, SHAPES)
        out, state = delta.delta_step(*heads, delta.gates(token[1], layer), state)
        return (state, window), out

    zeros = (jnp.zeros((1, 4, 8, 6)), jnp.zeros((1, SHAPES.channels, 3)))
    tokens = (x[:, :length].swapaxes(0, 1), ba[:, :length].swapaxes(0, 1))
    (state, window), out = jax.lax.scan(step, zeros, tokens)
    np.testing.assert_allclose(out.swapaxes(0, 1), expected, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)
    lengths = np.array([length])
    np.testing.assert_array_equal(window, delta.last_window(x, lengths, 4))


@pytest.mark.parametrize("seed", range(3))
def test_completions_begin_at_the_state_of_their_prompt(seed):
    """Every completion of a ragged buffer has the outputs of a row with its prompt alone."""
    rng = np.random.default_rng(seed)
    ids, group = [], 0
    while len(ids) < TOKENS - 20:
        ids += [group << PART_BITS] * int(rng.choice([0, 1, 2, 3, 5, 40, 64, 70]))
        for part in range(1, int(rng.integers(2, 6))):
            ids += [group << PART_BITS | part] * int(rng.choice([1, 2, 3, 4, 9, 30, 64, 66]))
        group += 1
    ids = np.array(ids[: TOKENS - 9] + [-1] * (TOKENS - len(ids[: TOKENS - 9])), np.int32)
    x, ba, _ = inputs()
    out, _ = chunked(x, ba, segments(ids))
    completions = [part for part in np.unique(ids) if part > 0 and part & ((1 << PART_BITS) - 1)]
    assert len(completions) > 5
    for part in completions:
        in_group = ids >> PART_BITS == part >> PART_BITS
        path = np.flatnonzero((ids == part) | (in_group & (ids & ((1 << PART_BITS) - 1) == 0)))
        alone = np.pad(path, (0, TOKENS - len(path)))  # one program for all lengths
        expected, _ = chunked(x[:, alone], ba[:, alone], None, packed=False)
        own = ids[path] == part
        actual = np.asarray(out)[:, path][:, own]
        np.testing.assert_allclose(actual, expected[:, : len(path)][:, own], atol=5e-6)


@pytest.mark.slow  # 5 s
@pytest.mark.parametrize("packed", [True, False])
def test_the_hopper_kernel_is_the_loop(packed, monkeypatch):
    """Outputs, last states and gradients, with a search for races: to the rounding of bfloat16."""
    shapes = RecurrentConfig(key_heads=1, value_heads=2, key_dim=128, value_dim=64, window=4)
    # Completions begin in the second and the third chunk, which see the prompt's old state.
    parts, lengths = [0, 1, 2, 3, 1 << PART_BITS, -1], [20, 50, 70, 30, 14, 8]
    ids = np.repeat(parts, lengths).astype(np.int32)
    layout = delta.layout_of(segments(ids), shapes) if packed else None
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((1, 192, *heads)).astype(np.float32)
                      for heads in ((1, 128), (1, 128), (1, 2, 64), (1, 2, 64)))  # fmt: skip
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    rates = rng.uniform(0, 1, (2, 1, 192, 2)).astype(np.float32)
    live = (ids >= 0)[None, :, None, None, None] | (not packed)

    @functools.partial(jax.jit, static_argnames="dtype")
    def run(q, k, v, rates, *, dtype):
        def rule(q, k, v, rates):
            return delta.delta_rule(q, k, v, delta.Gates(-rates[0], rates[1]), layout, dtype=dtype)

        (out, last), pull = jax.vjp(rule, q, k, v, rates)
        own = jnp.zeros_like(last) if packed else jnp.ones_like(last)
        return out * live, own * last, *pull((d_out * live, own))

    expected = run(q, k, v, rates, dtype=jnp.float32)
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    # A simulated kernel has effects, which a checkpoint refuses.
    monkeypatch.setattr(jax, "checkpoint", lambda function: function)
    how = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(chunks_sm90, "run", functools.partial(chunks_sm90.run, interpret=how))
    for found, want in zip(run(q, k, v, rates, dtype=jnp.bfloat16), expected, strict=True):
        assert 0 <= np.linalg.norm(found - want) <= 6e-3 * np.linalg.norm(want)
        assert not want.any() or (found != want).any()  # the kernel ran


# --- Rollouts -------------------------------------------------------------------------------------


@functools.cache
def policy(quantized=False):
    config, params = tiny_policy(
        "qwen3_5", quantized=quantized, num_layers=2, recurrent_layers=(0,)
    )
    return config, Policy(params, random_lora(config, targets=TARGETS))


def sampler(**options):
    sampling, engine, others = tiny_rollout.configs(
        {"max_new_tokens": 20, "chunk_steps": 4} | options
    )
    tokenizer = tiny_rollout.TinyTokenizer((3, 4, 5, 6))
    return Sampler(policy()[0], tokenizer, sampling, engine, group_size=4, **others)


def test_slots_and_compaction_keep_states_with_their_rows():
    """Rows that wait for slots sample what rows do that all decode together."""
    key, prompts = jax.random.key(5), tiny_rollout.PROMPTS
    together = sampler(compact="once").rollout(key, policy()[1], prompts)
    assert len(set(together.lengths.tolist())) > 5
    made = sampler(prompt_width=9, max_rows=6, prefill_prompts=1, compact="once")
    made = made.compiled(key, policy()[1], num_prompts=3)  # no program is missing
    rollout = made.rollout(key, policy()[1], prompts)
    np.testing.assert_array_equal(rollout.tokens, together.tokens)
    np.testing.assert_allclose(rollout.logprobs, together.logprobs, atol=1e-4)


def test_the_trainer_computes_the_log_probabilities_of_the_rollout():
    rollout = sampler().rollout(jax.random.key(5), policy()[1], tiny_rollout.PROMPTS)
    prompts = [prompt for prompt in tiny_rollout.PROMPTS for _ in range(4)]
    expected, _ = tiny_rollout.conversation_logprobs(*policy(), prompts, rollout)
    for row, length in enumerate(rollout.lengths):
        np.testing.assert_allclose(
            rollout.logprobs[row, :length], expected[row, :length], atol=2e-4
        )


@pytest.mark.slow
def test_rollouts_by_the_kernels(monkeypatch):
    """Simulated kernels sample what the trainer computes, whichever slot of a batch a row has."""
    heads = RecurrentConfig(key_heads=1, value_heads=2, key_dim=128, value_dim=128, window=4)
    changes = {"recurrent": heads, "head_dim": 128, "rotary_dim": 64}
    config, params = tiny_policy("qwen3_5", num_layers=2, recurrent_layers=(0,), **changes)
    wide = {name for name, array in kinds.ARRAYS.items() if array.is_wide}
    wide |= {"norm", "input_layernorm", "post_attention_layernorm"}
    params = jax.tree.map_with_path(
        lambda path, x: x if path[-1].key in wide else x.astype(jnp.bfloat16), params
    )
    own = Policy(params, random_lora(config, targets=TARGETS))
    use_decode_kernels(monkeypatch, interpret=True)
    steps, run = [], delta_kernel.step

    def step(inputs, *args, **options):
        steps.append(inputs.parts.dtype)
        return run(inputs, *args, **options)

    monkeypatch.setattr(delta_kernel, "step", step)
    key, prompts = jax.random.key(5), tiny_rollout.PROMPTS

    def rollout(**options):
        changes = {"max_new_tokens": 12, "chunk_steps": 4} | options
        sampling, engine, others = tiny_rollout.configs(changes)
        tokenizer = tiny_rollout.TinyTokenizer((3, 4, 5, 6))
        made = Sampler(config, tokenizer, sampling, engine, group_size=4, **others)
        return made.rollout(key, own, prompts)

    together = rollout()
    # Rounded before the norm's factor and after it, they would be less exact than the trainer's.
    assert set(steps) == {jnp.dtype(jnp.float32)}
    again = rollout()
    np.testing.assert_array_equal(again.tokens, together.tokens)
    np.testing.assert_array_equal(again.logprobs, together.logprobs)
    waiting = rollout(max_rows=6, prefill_prompts=1, compact="often")
    for made in (together, waiting):
        repeated = [prompt for prompt in prompts for _ in range(4)]
        expected, _ = tiny_rollout.conversation_logprobs(config, own, repeated, made)
        differences = [
            np.abs(made.logprobs[row, :length] - expected[row, :length])
            for row, length in enumerate(made.lengths)
        ]
        assert np.mean(np.concatenate(differences)) < 0.05


def test_a_step_rounds_where_rows_do():
    """In bfloat16 a layer's outputs are equal bits, but where sums in another order round apart.

    Without an explicit rounding of what the rule returns, XLA rounds it in rows alone, and half of
    the outputs differ: in a layer with the heads of Qwen3.5-0.8B, not in a tiny one.
    """
    heads = RecurrentConfig(key_heads=16, value_heads=16, key_dim=128, value_dim=128, window=4)
    config, params = tiny_policy("qwen3_5", num_layers=1, recurrent_layers=(0,), recurrent=heads)
    layer = {
        name: array.astype(jnp.bfloat16) if name == "conv" or name.endswith("proj") else array
        for name, array in params["layers"][0].items()
    }
    batch, length = 2, 66
    x = jax.random.normal(jax.random.key(0), (batch, length, config.embed_dim), jnp.bfloat16)
    lengths = jnp.full(batch, length)
    options = {"kind": kinds.layer_of(config, 0), "config": config}
    rows, *_ = transformer._layer(layer, {}, x, lengths, None, **options)
    shapes, steps = recurrent.row_shapes(config, 0, jnp.dtype("float32")), []
    kept = jax.tree.map(lambda row: jnp.zeros((batch, *row.shape)), shapes)
    for token in range(length):
        out, kept, _ = transformer._decode_layer(
            layer, {}, kept, x[:, token : token + 1], lengths, None, **options
        )
        steps.append(out)
    different = np.mean(np.asarray(jnp.concatenate(steps, axis=1) != rows))
    assert different < 0.05


def test_a_row_takes_its_state_whatever_its_length():
    config = policy()[0]
    state = 4 * (4 * 8 * 12 + 3 * (2 * 2 * 8 + 4 * 12))  # of one layer, in float32
    assert shapes.state_bytes(config) == state
    key = 2 * 1 * 2 * 8 * 4  # keys and values of one layer with attention
    assert shapes.position_bytes(config, jnp.dtype("float32")) == key
    made = shapes.row_bytes(config, positions=8, dtype=jnp.dtype("float32"))
    assert made == state + 8 * key + 4 * 4 * config.vocab_size
    rows, _ = shapes.fit_rows(
        config,
        EngineConfig(kv_cache_bytes=5 * (16 * key + state) + 3 * (8 * key + state)),
        num_prompts=3,
        group_size=4,
        width=8,
        positions=16,
        buffer=PlannedBuffer(jnp.dtype("float32")),
        free=None,
    )
    assert rows == 6  # a prefill of one prompt leaves the memory of 6 rows


# --- Adapters, noise, sizes -----------------------------------------------------------------------


def test_noise_is_on_the_scales_that_multiply_and_on_no_others():
    _, (params, _) = policy()
    noisy = aqn.perturb_norms(jax.random.key(0), params, 0.1)
    assert aqn.count_perturbed(params, noisy) == 2 * len(params["layers"])
    for before, after in zip(params["layers"], noisy["layers"], strict=True):
        changed = {name for name in before if before[name] is not after[name]}
        assert changed == {"input_layernorm", "post_attention_layernorm"}


def test_an_adapter_has_the_projections_of_each_layer():
    config = policy()[0]
    made = lora.init(jax.random.key(0), config, LoraConfig(rank=2, alpha=4.0, targets=TARGETS))
    mlp = {"gate_proj", "up_proj", "down_proj"}
    of_recurrence = {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert set(made.layers[0]) == mlp | of_recurrence
    assert set(made.layers[1]) == mlp | {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert made.layers[1]["q_proj"]["b"].shape == (2 * 4 * 8, 2)  # queries and gates
    with pytest.raises(
        UserError, match="a qwen3 has no in_proj_qkv, in_proj_z: choose from q_proj"
    ):
        lora.check_targets(tiny_checkpoints.model_config("qwen3"), TARGETS[:9])


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_sizes(format):
    config, made = policy(format == "nvfp4")
    numbers = jax.tree.map(lambda leaf: leaf.size * leaf.dtype.itemsize, made.params)
    assert sum(jax.tree.leaves(numbers)) == sizes.weight_bytes(config, format=format, itemsize=4)
    trained = sizes.trained_numbers(config, parameters="lora", rank=4, targets=TARGETS)
    assert trained == sum(leaf.size for leaf in jax.tree.leaves(made.lora))


def test_presets_have_the_parameters_of_the_models():
    """Billions of parameters of the published text models, by the sizes of their files."""
    billions = {"qwen3.5-0.8b": 0.75, "qwen3.5-4b": 4.2, "qwen3.5-9b": 8.95, "qwen3.6-27b": 26.9}
    billions |= {"qwen3-30b-a3b": 30.53, "qwen3.6-35b-a3b": 34.66}
    for name, expected in billions.items():
        size = sizes.weight_bytes(ARCHITECTURES[name], format="bf16", itemsize=2) / 2e9
        assert size == pytest.approx(expected, rel=0.01), name


def test_stop_strings_end_no_turns_of_recurrent_layers():
    turns = TurnConfig(max_turns=2, turn_tokens=4, reply_tokens=4, context_tokens=16)
    with pytest.raises(UserError, match=r"rollout\.stop=\('x',\): the device does not see"):
        shapes.plan_shapes(
            {},
            num_prompts=1,
            longest=4,
            group_size=1,
            model_config=ARCHITECTURES["qwen3.5-0.8b"],
            sampling=SamplingConfig(max_new_tokens=4, stop=("x",)),
            engine=EngineConfig(),
            turns=turns,
        )


def test_a_device_has_key_heads_with_all_that_belongs_to_them():
    config, made = policy()
    own, layer = tensor_parallel.shard_of(config, 2), made.params["layers"][0]
    assert own.recurrent == dataclasses.replace(config.recurrent, key_heads=1, value_heads=2)
    heads = (("in_proj", (16, 16, 48, 48, 4, 4)), ("conv", (16, 16, 48)), ("a_log", (4,)))
    for name, rows in heads:
        parts = np.split(np.asarray(layer[name]), np.cumsum(rows)[:-1])
        for number, shard in enumerate(tensor_parallel.cut(name, layer[name], config, 2)):
            expected = np.concatenate([np.split(part, 2)[number] for part in parts])
            np.testing.assert_array_equal(shard, expected)
    with pytest.raises(UserError, match="the 2 key heads of the recurrent layers"):
        tensor_parallel.shard_of(dataclasses.replace(config, num_kv_heads=4), 4)


def test_plans_know_states():
    config = get_config("qwen3.5-27b")
    config.rollout.prompts_per_step, config.rollout.group_size = 1, 8
    model = ARCHITECTURES["qwen3.5-27b"]
    plan = plan_run(config, model, Device(int(0.92 * 85e9), "mosaic", 9.0))
    assert plan.fits
    state = 48 * 4 * (48 * 128 * 128 + 3 * 10240)
    assert plan.rollout.state == state
    assert f"positions each and a state of {state / 1e6:.1f} MB" in format_plan(plan, config)
    config.train.parameters = "lora+norms"
    with pytest.raises(UserError, match="norms of a qwen3_5 are stored minus 1"):
        plan_run(config, model, Device(int(0.92 * 85e9), "mosaic", 9.0))


# --- Files ----------------------------------------------------------------------------------------


def hf_config(**changes):
    return to_hf_config(tiny_checkpoints.model_config("qwen3_5")) | changes


def test_a_config_with_a_vision_tower_is_that_of_its_text():
    text = hf_config()
    nested = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    config = from_hf_config(nested)
    assert config.tie_embeddings
    assert config.recurrent_layers == (0, 1)
    assert from_hf_config(text) == tiny_checkpoints.model_config("qwen3_5")
    del text["layer_types"]
    layers = from_hf_config(text | {"full_attention_interval": 2}).recurrent_layers
    assert layers == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention", "mamba", "full_attention"]}, "layer_types"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"linear_num_value_heads": 3}, "3 value heads"),
        ({"linear_conv_kernel_dim": 1}, "window of the recurrent layers is 1, must be at least 2"),
        ({"model_type": "qwen3_next"}, "'qwen3_next' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "rotated dimensions"),
        ({"model_type": "qwen3_5", "text_config": 3}, "text_config is 3"),
    ],
)
def test_what_differs_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        from_hf_config(hf_config(**changes))


def test_other_parts_of_a_checkpoint_are_named(capsys):
    load(str(GOLDEN), format="bf16")
    assert "the vision tower and the MTP head left out" in capsys.readouterr().out


@pytest.mark.parametrize("packed", [False, True])
def test_an_export_is_the_text_model_alone(tmp_path, packed):
    """Its weights have the bytes of the source, and its config has no section."""
    model = load(str(GOLDEN), format="nvfp4" if packed else "bf16")
    files = companion_files(model, packed=packed)
    tensors = checkpoint_tensors(model.params, model.config)
    write_checkpoint(tmp_path / "export", tensors, files=files)
    hf = json.loads((tmp_path / "export" / "config.json").read_text())
    assert hf["architectures"] == ["Qwen3_5ForCausalLM"]
    assert hf["model_type"] == "qwen3_5_text"
    assert not {"text_config", "vision_config", "mtp_num_hidden_layers"} & set(hf)
    assert "mrope_section" not in hf["rope_parameters"]
    stored, _ = names.text_tensors(read_folder(GOLDEN))
    written = read_folder(tmp_path / "export")
    if packed:
        ignored = hf["quantization_config"]["ignore"]
        assert ignored == ["lm_head", *names.dense_modules(model.config)]
        assert "model.layers.0.linear_attn.in_proj_a" in ignored
    else:
        assert set(written) == set(stored)
    for name, tensor in written.items():
        if name in stored:
            want = np.asarray(stored[name]).astype(tensor.dtype)
            np.testing.assert_allclose(
                np.asarray(tensor, np.float32), np.asarray(want, np.float32), atol=1e-7, rtol=0
            )
    again = load(str(tmp_path / "export"), format="stored")
    assert again.config == model.config
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-2)


def test_merging_into_four_bits_leaves_recurrent_projections_in_16():
    model = load(str(GOLDEN), format="bf16")
    adapter = random_lora(model.config, targets=TARGETS)
    retention = {}
    layers = list(merged_layers(model, adapter, format="nvfp4", retention=retention))
    assert set(retention) == set(TARGETS)
    assert isinstance(layers[0]["gate_up_proj"], QuantTensor)
    assert layers[0]["in_proj"].dtype == jnp.bfloat16


def test_calibration_packs_attention_and_mlp(tmp_path):
    """GPTQ runs through both kinds of layers, and what it leaves is that of the source."""
    config = tiny_checkpoints.model_config("qwen3_5", num_layers=2, recurrent_layers=(0,))
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal(shape) / (shape[1] if len(shape) == 2 else 4) ** 0.5).astype(
            ml_dtypes.bfloat16
        )
        for name, shape in names.expected_shapes(config).items()
    }
    checkpoint = open_checkpoint(str(tiny_checkpoints.write_folder(tmp_path, config, tensors)))
    tokens = random_tokens(4, 24)
    options = CalibrationOptions(reports_errors=True)
    dense = load(str(tmp_path), format="bf16").params["layers"]
    for number, layer in enumerate(calibrated_layers(checkpoint, tokens, options)):
        packed = {name for name, array in layer.arrays.items() if isinstance(array, QuantTensor)}
        assert packed == set(kinds.FUSED) & set(kinds.fused_of(config, number))
        for name in layer.arrays.keys() - packed:
            np.testing.assert_array_equal(
                np.asarray(layer.arrays[name], np.float32),
                np.asarray(dense[number][name], np.float32),
            )
        for name, error in layer.errors.items():
            assert error < layer.rounded_errors[name]


@pytest.mark.parametrize("nested", [False, True])
def test_adapters_have_the_names_of_their_base(tmp_path, nested):
    """Those of PEFT and vLLM for a base with a vision tower, or for a text model."""
    config = policy()[0]
    lora_config = LoraConfig(rank=4, alpha=2.0, targets=TARGETS)
    trainable = Trainable(random_lora(config, targets=TARGETS), {})
    peft.fill_peft_adapter(tmp_path, trainable, lora_config, base_model="x", nested=nested)
    root = "base_model.model.model." + ("language_model." if nested else "")
    stored = set(read_file(tmp_path / peft.WEIGHTS_FILE))
    assert f"{root}layers.0.linear_attn.in_proj_qkv.lora_A.weight" in stored
    assert f"{root}layers.1.self_attn.q_proj.lora_B.weight" in stored
    again_config, _ = peft.read_peft_config(tmp_path)
    assert set(again_config.targets) == set(TARGETS)
    again = peft.load_peft_adapter(tmp_path, config, lora_config)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(trainable), strict=True):
        np.testing.assert_array_equal(a, b)


# --- Runs -----------------------------------------------------------------------------------------


@pytest.mark.slow  # 30 s
def test_a_run_learns_and_resumes_bit_for_bit(tmp_path):
    """A tiny run learns, and ends with the same bytes if it is killed in its fifth step."""
    tiny = tiny_run.write_tiny(
        tmp_path,
        tmp_path / "programs",
        model_type="qwen3_5",
        num_layers=2,
        recurrent_layers=(0,),
    )
    config = {
        "steps": 8,
        "aqn.schedule": "off",
        "optimizer.learning_rate": 2e-2,
        "lora.targets": TARGETS,
        "rollout.prompts_per_step": 8,
        "rollout.group_size": 8,
        "eval.every": 0,
        "checkpoint.every": 2,
    }
    calls = itertools.count(1)

    def killing(*arguments):
        if next(calls) == 5 * 64 - 3:
            raise tiny_run.KilledError
        return tiny_run.low_fraction(*arguments)

    low = {"low_fraction": tiny_run.low_fraction}
    whole = train(tiny.config(config), workdir=tmp_path / "whole", rewards=low)
    rows = tiny_run.results(whole)
    assert max(abs(row["logprob_diff_mean"]) for row in rows) < 1e-4
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    with pytest.raises(tiny_run.KilledError):
        train(tiny.config(config), workdir=tmp_path / "killed", rewards={"low_fraction": killing})
    resumed = train(tiny.config(config), workdir=tmp_path / "killed", rewards=low)
    weights = [(run / "adapter" / peft.WEIGHTS_FILE).read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]
