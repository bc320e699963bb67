"""Whole NVFP4 checkpoints: llm-compressor's bytes, and the output of the command."""

import json
import os
import pathlib
import signal
import tracemalloc
import types

import finished_run
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from refusal import refused
from tiny_checkpoints import (
    model_config,
    random_tensors,
    write_folder,
    write_gguf,
    write_golden_source,
)
from tiny_model import assert_transformers_agrees

from qerl_jax.commands import export
from qerl_jax.commands import quantize as command
from qerl_jax.compile import run_cache
from qerl_jax.errors import UserError
from qerl_jax.evaluation.perplexity import window_divergences, window_losses
from qerl_jax.policy.quant import QuantTensor, dequantize
from qerl_jax.quantization.calibration import calibrated_layers
from qerl_jax.quantization.rounding import fill_packed, round_layers
from qerl_jax.system.staging import staged_folder
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import load
from qerl_jax.weights.safetensors import read_file
from qerl_jax.weights.save import QUANTIZATION_CONFIG

GOLDEN = pathlib.Path(__file__).parent / "golden"
MODELS = ("qwen2", "qwen3", "llama")
MIXTURES = ("qwen3_moe", "qwen3_5_moe")


def quantized(source, out, *, layers=round_layers, **options):
    checkpoint = open_checkpoint(str(source))
    with staged_folder(out) as folder:
        return fill_packed(folder, checkpoint, layers(checkpoint), **options)


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
def test_the_file_equals_that_of_llm_compressor(tmp_path, name):
    quantized(write_golden_source(tmp_path / "source", name), tmp_path / "out")
    golden = GOLDEN / f"nvfp4_{name}"
    ours, theirs = (folder / "model.safetensors" for folder in (tmp_path / "out", golden))
    if name == "qwen3_5_moe":
        ours, theirs = map(read_file, (ours, theirs))
        assert ours.keys() == theirs.keys()
        for tensor in ours:  # llm-compressor adds 1 to norms in bfloat16 and subtracts it again.
            if not tensor.endswith("norm.weight"):
                assert ours[tensor].tobytes() == theirs[tensor].tobytes(), tensor
    else:
        assert ours.read_bytes() == theirs.read_bytes()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((golden / "config.json").read_text())
    # The rest is as in `test_export`.
    ours = written.pop("quantization_config")
    assert sorted(ours.pop("ignore")) == sorted(theirs.pop("quantization_config")["ignore"])
    assert ours.items() <= QUANTIZATION_CONFIG.items()
    assert written == theirs


@pytest.mark.parametrize("model_type", [*MODELS, "qwen3_5_moe"])
def test_a_written_checkpoint_equals_what_loading_quantizes(tmp_path, model_type):
    config = model_config(model_type, tie_embeddings=model_type == "llama")
    tensors = {name: t.astype(np.float32) for name, t in random_tensors(config).items()}
    source = write_gguf(tmp_path / "x.gguf", config, tensors)
    quantized(source, tmp_path / "out")
    loaded = load(str(tmp_path / "out"))
    assert loaded.format == "nvfp4"
    assert loaded.config == config
    trees.assert_equal(loaded.params, load(str(source)).params)


def test_errors_are_those_of_the_weights(tmp_path):
    config = model_config("qwen3")
    tensors = random_tensors(config)
    source = write_folder(tmp_path / "source", config, tensors)
    errors = quantized(source, tmp_path / "out")
    layers = load(str(tmp_path / "out")).params["layers"]
    rounded = np.asarray(dequantize(layers[1]["gate_up_proj"], jnp.float32))
    for rows, name in ((slice(0, 48), "gate_proj"), (slice(48, 96), "up_proj")):
        weight = tensors[f"model.layers.1.mlp.{name}.weight"].astype(np.float32)
        expected = np.linalg.norm(rounded[rows] - weight) / np.linalg.norm(weight)
        assert errors[1][name] == pytest.approx(expected, rel=1e-4)
        assert 0.05 < expected < 0.15
    assert len(errors) == 2
    assert len(errors[0]) == 7


def test_the_model_is_never_in_memory_as_a_whole(tmp_path):
    config = model_config(num_layers=24, embed_dim=128, mlp_dim=256, head_dim=32)
    source = write_folder(tmp_path / "source", config, random_tensors(config))
    size = (source / "model.safetensors").stat().st_size
    quantized(source, tmp_path / "warm")
    tracemalloc.start()
    quantized(source, tmp_path / "out", max_shard_bytes=size // 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The temporary arrays of the quantizer take several times the memory of a layer.
    assert peak < size
    assert size > 6e6


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", "layer 1, gate_proj/up_proj"),
        ("model.layers.1.post_attention_layernorm.weight", "layer 1, post_attention_layernorm"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_a_tensor_that_is_not_finite_is_named_and_nothing_is_left(tmp_path, name, named):
    config = model_config()
    tensors = random_tensors(config)
    tensors[name].reshape(-1)[3] = np.inf
    source = write_folder(tmp_path / "source", config, tensors)
    refused(rf"{named}: .*not finite", quantized, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def options(**changes):
    given = {"format": "nvfp4", "calibrate": "", "perplexity": "", "windows": None, "width": None}
    if "calibrate" in changes or "perplexity" in changes:
        given |= {"windows": 2, "width": 16}
    return types.SimpleNamespace(**(given | changes))


@pytest.fixture
def source(tmp_path):
    config = model_config()
    tensors = random_tensors(config)
    # With small weights the perplexity is in the range of a real model.
    tensors = {
        name: tensor if "norm" in name else (tensor.astype(np.float32) / 8).astype(tensor.dtype)
        for name, tensor in tensors.items()
    }
    return write_folder(tmp_path / "source", config, tensors)


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    lines = [
        {"question": " ".join(f"t{i}" for i in rng.integers(40, size=30)), "answer": "t1 t2"}
        for _ in range(8)
    ]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_the_command_prints_errors_sizes_and_perplexities(tmp_path, capsys, source, text):
    out = str(tmp_path / "out")
    command.run(options(model=str(source), out=out, perplexity=text))
    printed = capsys.readouterr().out
    assert printed.startswith("relative rounding error of the weights")
    assert printed.splitlines()[1].split() == [
        *("layer", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    assert "the largest error: layer " in printed
    assert f"{out}: " in printed
    lines = printed.partition("\n32 tokens in 2 windows\n")[2].splitlines()
    assert lines[0].split() == ["loss", "perplexity", "above", "bfloat16", "KL", "top-1"]
    assert [line.split("  ")[1] for line in lines[1:]] == ["bfloat16", "nvfp4, rounded"]
    assert isinstance(load(out).params["layers"][0]["o_proj"], QuantTensor)


@pytest.mark.parametrize("part", [command, export])
def test_the_command_keeps_its_programs(part, monkeypatch, tmp_path):
    kept, keep = [], run_cache.keep_programs
    monkeypatch.setattr(run_cache, "keep_programs", lambda: (kept.append(part), keep())[1])
    absent = str(tmp_path / "absent")
    if part is export:
        arguments = part.make_parser().parse_args([absent, "--format=peft"])
    else:
        arguments = options(model=absent, out=str(tmp_path / "out"))
    with pytest.raises(UserError):
        part.run(arguments)
    assert kept == [part]


@pytest.mark.parametrize("recurrent", [(0, 1), (1, 2)])
def test_the_table_of_a_model_with_recurrent_layers(tmp_path, capsys, recurrent):
    config = model_config("qwen3_5", recurrent_layers=recurrent)
    source = write_folder(tmp_path / "source", config, random_tensors(config))
    command.run(options(model=str(source), out=str(tmp_path / "out")))
    lines = capsys.readouterr().out.splitlines()[1:6]
    _, *layers, mean = cells = [line.split()[1:] for line in lines]
    assert {len(row) for row in cells} == {7}
    for layer, row in enumerate(layers):
        assert row[:4].count("-") == (4 if layer in recurrent else 0)
    (attention,) = {0, 1, 2} - set(recurrent)
    assert mean[:4] == layers[attention][:4]
    assert float(mean[4]) == pytest.approx(np.mean([float(row[4]) for row in layers]), abs=1e-4)


@pytest.mark.parametrize("same", ["", "text.jsonl", "source/../text.jsonl"])
def test_the_command_calibrates(tmp_path, capsys, source, text, same):
    out = str(tmp_path / "out")
    measured = f"{tmp_path}/{same}" if same else ""
    command.run(options(model=str(source), out=out, calibrate=text, perplexity=measured))
    printed = capsys.readouterr().out
    assert printed.startswith("relative rounding error of the outputs")
    mean, rounded = (
        [float(value) for value in line.split()[-7:]]
        for line in printed.splitlines()
        if line.strip().startswith(("mean", "if rounded"))
    )
    assert all(0 < a < b for a, b in zip(mean, rounded, strict=True))
    lines = printed.partition("\n32 held-out tokens in 2 windows\n")[2].splitlines()
    named = ["bfloat16", "nvfp4, rounded", "nvfp4, calibrated"]
    assert [line[2:20].strip() for line in lines[1:]] == named
    exact = load(str(source), format="bf16", dtype="float32")
    calibrated = load(out, dtype="float32")
    # The second half of the documents, of 32 words each.
    lines_of_text = pathlib.Path(text).read_text().splitlines()
    documents = [" ".join(json.loads(line).values()) for line in lines_of_text][4:]
    tokens = np.array(exact.tokenizer.encode(" ".join(documents))[:32], np.int32).reshape(2, 16)
    found = window_divergences(exact, calibrated, tokens)
    loss, exact_loss = found.losses.mean(), window_losses(exact, None, tokens).mean()
    words = lines[3][20:].replace("+-", "").replace("%", "").split()
    expected = loss, np.exp(loss), loss - exact_loss, found.kl.mean(), 100 * found.agreement.mean()
    means = [float(word) for word in (*words[:3], words[4], words[6])]
    np.testing.assert_allclose(means, expected, atol=1e-3, rtol=1e-4)
    assert len(words) == 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "nf4"}, "only nvfp4"),
        ({"windows": 2}, "--windows=2: it needs --calibrate=TEXT"),
        ({"width": 16}, "--width=16: it needs --calibrate=TEXT"),
        ({"out": "source"}, "exists already"),
        ({"calibrate": "absent.jsonl"}, "absent.jsonl"),
        ({"perplexity": "text.jsonl", "width": 1000}, "128 positions"),
        ({"perplexity": "text.jsonl", "windows": 0}, "--windows=0"),
        ({"perplexity": "short.txt"}, "only 2 tokens"),
        ({"calibrate": "short.txt"}, "--calibrate=short.txt: it is one document"),
    ],
)
def test_the_command_refuses(tmp_path, monkeypatch, source, text, changes, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("t1 t2")
    refused(named, command.run, options(model="source", **({"out": "out"} | changes)))
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_packed_and_unreadable_sources(tiny, tmp_path, source, text):
    packed = str(GOLDEN / "nvfp4_llama")
    refused("in NVFP4 already", command.run, options(model=packed, out=str(tmp_path / "out")))
    for name, words in (("gpt_oss_mxfp4", "in MXFP4 already"), ("gpt_oss", "not written in NVFP4")):
        refused(words, command.run, options(model=str(GOLDEN / name), out=str(tmp_path / "out")))
    run = finished_run.write_run(tmp_path / "run", tiny)
    with pytest.raises(UserError, match=r"is a run, .* experiments.export .*--format=nvfp4"):
        command.run(options(model=str(run), out=str(tmp_path / "out")))
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="needs a tokenizer"):
        command.run(options(model=str(source), out=str(tmp_path / "out"), calibrate=text))
    command.run(options(model=str(source), out=str(tmp_path / "out")))


def test_the_command_line(tmp_path, monkeypatch, capsys, source):
    out = str(tmp_path / "out")
    monkeypatch.setattr("sys.argv", ["quantize", str(source), out, "--format=nvfp4"])
    command.main()
    assert load(out).format == "nvfp4"
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["quantize", "no-such-model", out + "2"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1


def test_a_signal_leaves_no_unfinished_folder(tmp_path, monkeypatch, source):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.pause()

    monkeypatch.setattr("qerl_jax.quantization.rounding.fill_packed", interrupted)
    with pytest.raises(SystemExit) as stopped:
        command.run(options(model=str(source), out=str(tmp_path / "out")))
    assert stopped.value.code == 128 + signal.SIGUSR1
    assert list(tmp_path.iterdir()) == [source]


def calibrated(checkpoint):
    return calibrated_layers(checkpoint, np.arange(64, dtype=np.int32).reshape(4, 16))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [round_layers, calibrated])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(tmp_path, name, layers):
    """Requires torch and compressed-tensors: uv run --with torch --with compressed-tensors."""
    quantized(write_golden_source(tmp_path / "source", name), tmp_path / "out", layers=layers)
    assert_transformers_agrees(tmp_path / "out")
