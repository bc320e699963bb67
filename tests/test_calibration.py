"""Calibration of whole models: errors of outputs, files, and what is refused."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import trees
from refusal import refused
from tiny_checkpoints import VOCAB, model_config, random_tensors, write_folder

from qerl_jax.evaluation.perplexity import window_divergences
from qerl_jax.policy import transformer
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.attention import rotary_angles
from qerl_jax.policy.layers.kinds import PROJECTIONS, fused_of, member_bounds
from qerl_jax.policy.quant import QuantTensor, dequantize, quantize_nvfp4
from qerl_jax.quantization import base, calibration
from qerl_jax.quantization.calibration import CalibrationOptions, _batch_rows, calibrated_layers
from qerl_jax.quantization.gptq import block_scales, gptq, pack_codes
from qerl_jax.quantization.rounding import fill_packed, round_layers
from qerl_jax.system.staging import staged_folder
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import load

MODELS = ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "llama"))]


def write_model(folder, model_type="qwen2", change=None, **shape):
    """Writes a model whose activations are correlated and have outliers."""
    config = model_config(model_type, **({"embed_dim": 64, "mlp_dim": 96} | shape))
    rng = np.random.default_rng(1)
    tensors = {}
    for name, tensor in random_tensors(config).items():
        values = tensor.astype(np.float32)
        if name.endswith("_proj.weight"):
            values /= values.shape[1] ** 0.5
        elif "layernorm" in name:
            values = 0.2 + 0.1 * np.abs(values)
            values[rng.choice(len(values), 4, replace=False)] *= 20
        elif "norm" in name:
            values = 1 + 0.1 * values
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    if change is not None:
        change(tensors)
    return open_checkpoint(str(write_folder(folder, config, tensors)))


def windows(seed=0, rows=12):
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, 24), np.int32)


def layers_of(checkpoint, tokens, **options):
    return list(calibrated_layers(checkpoint, tokens, CalibrationOptions(**options)))


def write(folder, checkpoint, layers):
    with staged_folder(folder) as new:
        fill_packed(new, checkpoint, layers)
    return load(str(folder), dtype="float32")


def assert_equal_layers(some, others):
    trees.assert_equal([layer.arrays for layer in some], [layer.arrays for layer in others])


def logits(params, ids, config):
    lengths = jnp.full(len(ids), ids.shape[1], jnp.int32)
    return np.asarray(transformer.forward(params, None, jnp.asarray(ids), lengths, config=config))


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_is_closer_to_its_original_than_a_rounded_one(tmp_path, model_type):
    checkpoint = write_model(tmp_path / "model", model_type)
    layers = layers_of(checkpoint, windows())
    assert [layer.errors for layer in layers] == [{}, {}]
    model = write(tmp_path / "calibrated", checkpoint, layers)
    loaded = zip(model.params["layers"], layers, strict=True)
    for ours, layer in loaded:
        jax.tree.map(np.testing.assert_array_equal, ours, layer.arrays)
    rounded = write(tmp_path / "rounded", checkpoint, round_layers(checkpoint))
    exact = load(str(tmp_path / "model"), format="bf16", dtype="float32")
    ids = windows(seed=1)
    expected = logits(exact.params, ids, exact.config)
    errors = [
        np.square(logits(m.params, ids, m.config) - expected).mean() for m in (model, rounded)
    ]
    assert errors[0] < 0.5 * errors[1]


def inputs_of(layer, x, config, number=0):
    """The output of a layer, and the inputs of its projections, with dense weights."""
    dense = {
        name: dequantize(leaf, jnp.float32) if isinstance(leaf, QuantTensor) else jnp.asarray(leaf)
        for name, leaf in layer.items()
    }
    lengths = jnp.full(len(x), x.shape[1], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    angles = rotary_angles(positions, config)
    kind = kinds.layer_of(config, number)
    return transformer.layer_with_inputs(kind, dense, x, lengths, angles, config=config)


def relative_errors(weight, packed, x, bounds):
    outputs, other = (
        x @ np.asarray(w, np.float64).T for w in (weight, dequantize(packed, jnp.float32))
    )
    parts = zip(np.split(outputs, bounds, axis=1), np.split(other, bounds, axis=1), strict=True)
    return [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in parts]


def test_errors_are_those_of_outputs_behind_the_calibrated_layers(tmp_path):
    checkpoint = write_model(tmp_path / "model")
    config, tokens = checkpoint.config, windows()
    layers = layers_of(checkpoint, tokens, reports_errors=True)
    exact = load(str(tmp_path / "model"), format="bf16", dtype="float32").params
    x = exact["embed_tokens"][tokens]
    for layer, dense in zip(layers, exact["layers"], strict=True):
        x, inputs = inputs_of(layer.arrays, x, config)
        expected, rounded = {}, {}
        for fused, members in fused_of(config, 0).items():
            rows = np.asarray(inputs[fused], np.float64).reshape(-1, inputs[fused].shape[-1])
            bounds = member_bounds(fused, config)
            nearest = quantize_nvfp4(np.split(np.asarray(dense[fused]), bounds))
            for errors, packed in ((expected, layer.arrays[fused]), (rounded, nearest)):
                found = relative_errors(dense[fused], packed, rows, bounds)
                errors |= dict(zip(members, found, strict=True))
        assert layer.errors == pytest.approx(expected, rel=1e-3)
        assert layer.rounded_errors == pytest.approx(rounded, rel=1e-3)
        assert tuple(layer.errors) == PROJECTIONS
        assert all(0 < layer.errors[name] < 0.9 * rounded[name] for name in PROJECTIONS)


def test_the_same_text_gives_the_same_bytes(tmp_path):
    checkpoint = write_model(tmp_path / "model")
    first = layers_of(checkpoint, windows())
    assert_equal_layers(first, layers_of(checkpoint, windows(), reports_errors=True))
    for options in ({"grow": False}, {"orders": False}, {"damping": 0.1}):
        other = layers_of(checkpoint, windows(), **options)
        codes = (layers[0].arrays["down_proj"].packed for layers in (first, other))
        assert not np.array_equal(*codes), options
    with pytest.raises(AssertionError):
        assert_equal_layers(first, layers_of(checkpoint, windows(seed=1)))


@pytest.mark.parametrize("shape", [(1, 1), (1, 24), (3, 8)])
def test_any_text_will_do(tmp_path, shape):
    checkpoint = write_model(tmp_path / "model")
    tokens = windows()[: shape[0], : shape[1]]
    layers = layers_of(checkpoint, tokens, reports_errors=True)
    for layer in layers:
        for name in PROJECTIONS:
            assert np.isfinite(layer.errors[name])
            assert layer.errors[name] < layer.rounded_errors[name]


def test_batches_leave_few_windows_out():
    assert [_batch_rows(count) for count in (1, 3, 7, 8, 160)] == [1, 3, 7, 8, 8]
    for count in range(1, 200):
        rows = _batch_rows(count)
        assert 1 <= rows <= 8
        assert count // rows * rows >= count - min(3, count // 8)


def not_finite(name):
    def change(tensors):
        tensors[name].reshape(-1)[3] = np.inf

    return change


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", "layer 1, gate_proj/up_proj"),
        ("model.layers.0.self_attn.o_proj.weight", "layer 0, o_proj"),
        ("model.layers.1.input_layernorm.weight", "layer 1, q_proj/k_proj/v_proj"),
    ],
)
def test_what_is_not_finite_is_named(tmp_path, name, named):
    checkpoint = write_model(tmp_path / "model", change=not_finite(name))
    refused(rf"{named}: the weights, or the .* are not finite", layers_of, checkpoint, windows())


def test_blocks_that_are_not_whole_are_refused(tmp_path):
    checkpoint = write_model(tmp_path / "model", mlp_dim=40)
    refused(r"a multiple of 16 inputs .*\(64, 40\)", layers_of, checkpoint, windows())


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_programs_that_are_compiled_ahead_give_the_same_bytes(tmp_path, monkeypatch, model_type):
    checkpoint = write_model(tmp_path / "model", model_type)
    expected, programs = layers_of(checkpoint, windows()), calibration._programs

    def ahead(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            return programs(*arguments)

    monkeypatch.setattr(calibration, "_programs", ahead)
    assert_equal_layers(layers_of(checkpoint, windows()), expected)


def inputs_of_experts(layer, h, config):
    """What the projections of each expert read, by the choice of the router in NumPy."""
    experts = config.experts
    logits = h @ np.asarray(layer["router"], np.float64).T
    routes = np.argsort(-logits, axis=1, kind="stable")[:, : experts.top_k]
    weights = np.exp(np.take_along_axis(logits, routes, axis=1) - logits.max(axis=1)[:, None])
    weights /= weights.sum(axis=1, keepdims=True)
    dense = np.asarray(dequantize(layer["experts_gate_up"], jnp.float32), np.float64)
    found = {"experts_gate_up": [], "experts_down": []}
    for number, rows in enumerate(np.split(dense, experts.count)):
        taken, column = np.nonzero(routes == number)
        gate, up = np.split(h[taken] @ rows.T, 2, axis=1)
        hidden = gate / (1 + np.exp(-gate)) * up
        found["experts_gate_up"].append(h[taken])
        found["experts_down"].append(hidden * weights[taken, column, None])
    return found


def by_moments(weight, moments):
    """A weight in NVFP4 by GPTQ on these moments."""
    moments = jnp.asarray(moments, jnp.float32)
    scales, divisor = block_scales(weight, jnp.diagonal(moments))
    codes, _ = gptq(weight, moments, scales, divisor)
    return QuantTensor(pack_codes(codes), scales, jnp.full(len(weight), divisor))


def assert_close_codes(actual, expected):
    """A code may differ where its weight is at the middle of two numbers."""
    assert np.mean(np.asarray(actual.packed) != np.asarray(expected.packed)) < 0.01
    np.testing.assert_allclose(actual.global_scale, expected.global_scale, rtol=1e-6)


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
def test_experts_are_calibrated_by_their_own_tokens(tmp_path, monkeypatch, model_type):
    """In parts of two experts; the down projections of some have too few tokens."""
    checkpoint = write_model(tmp_path / "model", model_type, embed_dim=32)
    config, tokens = checkpoint.config, windows(rows=4)[:, :11]
    monkeypatch.setattr(calibration, "_MOMENT_BYTES", 2 * 4 * 32**2)
    layers = layers_of(checkpoint, tokens, reports_errors=True)
    exact = load(str(tmp_path / "model"), format="bf16", dtype="float32").params
    x, few = exact["embed_tokens"][tokens], 0
    for number, (layer, dense) in enumerate(zip(layers, exact["layers"], strict=True)):
        x, inputs = inputs_of(layer.arrays, x, config, number)
        h = np.asarray(inputs["router"], np.float64).reshape(-1, config.embed_dim)
        for name, rows in inputs_of_experts(layer.arrays, h, config).items():
            is_down, squares = name == "experts_down", []
            own_load, members = layer.loads[name], kinds.STACKS[name].members
            assert own_load.tokens == list(map(len, rows))
            assert own_load.rounded == is_down * sum(len(own) < 16 for own in rows)
            leaves = dense[name], *jax.tree.leaves(layer.arrays[name])
            parts = (np.split(np.asarray(leaf), len(rows)) for leaf in leaves)
            for own, weight, *packed in zip(rows, *parts, strict=True):
                packed = QuantTensor(*packed)
                if is_down and len(own) < 16:
                    few += 1
                    trees.assert_equal(packed, quantize_nvfp4([weight]))
                else:
                    shared = 0 if is_down else 32 * h.T @ h / len(h)
                    assert_close_codes(packed, by_moments(weight, own.T @ own + shared))
                approximate = np.asarray(dequantize(packed, jnp.float32))
                outputs = own @ weight.T, own @ (approximate - weight).T
                squares.append([np.square(part).sum(axis=0) for part in outputs])
            sums = (np.split(part, len(members)) for part in np.sum(squares, axis=0))
            for member, output, error in zip(members, *sums, strict=True):
                ratio = np.sqrt(error.sum() / output.sum())
                assert layer.errors[f"experts.{member}"] == pytest.approx(ratio, rel=1e-3)
                assert ratio < 1.2 * layer.rounded_errors[f"experts.{member}"]
    assert 0 < few < config.num_layers * config.experts.count


def test_a_trained_mixture_is_closer_to_its_original_than_a_rounded_one(
    tmp_path, monkeypatch, capsys
):
    """It has experts that differ (generator: golden/make_trained_moe.py)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = pathlib.Path(__file__).parent / "golden" / "trained_moe"
    texts = (np.load(folder / f"{name}.npy") for name in ("calibration", "held_out"))
    text, held_out = (rows.astype(np.int32) for rows in texts)
    checkpoint = open_checkpoint(str(folder))
    facts = base._facts(checkpoint)
    entry = base._entry(checkpoint, facts, lambda: text)
    assert "layer 1, experts_down: 690 to 844 tokens an expert\n" in capsys.readouterr().out
    for layer in entry.record["experts"]:
        for found in layer.values():
            assert sum(found["tokens"]) == text.size * checkpoint.config.experts.top_k
            assert found["rounded"] == 0
    exact = load(str(folder), format="bf16", dtype="float32")
    calibrated = base.load_calibrated(entry, checkpoint, dtype="float32")
    rounded = load(str(folder), format="nvfp4", dtype="float32")
    kl = [window_divergences(exact, m, held_out).kl.mean() for m in (calibrated, rounded)]
    assert kl[0] <= 0.6 * kl[1], kl
    assert 0.01 < kl[1] < 0.1


def test_the_key_of_a_base_has_what_changes_it(tmp_path):
    """The choice for experts is a part of the key of mixtures alone."""
    keys = {
        model_type: base._facts(write_model(tmp_path / model_type, model_type))["options"].keys()
        for model_type in ("qwen3", "qwen3_moe")
    }
    assert keys["qwen3_moe"] - keys["qwen3"] == {"shared_tokens"}
    assert keys["qwen3"] == {"grow", "orders", "damping", "reports_errors"}
