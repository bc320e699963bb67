"""The safetensors reader: the files that it reads, and the files that it refuses."""

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import save_file

from qerl_jax.errors import UserError
from qerl_jax.weights import safetensors


def write_raw(path, header, data=b""):
    """Writes a file with any header, given as a dict or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_shards(folder, shards, weight_map=None):
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / safetensors.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.uint8, np.int64, np.bool_, ml_dtypes.bfloat16]
)
def test_files_of_the_safetensors_package_are_read(tmp_path, dtype):
    tensors = {
        "matrix": np.arange(6).reshape(2, 3).astype(dtype),
        "scalar": np.array(1).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = safetensors.read_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        np.testing.assert_array_equal(read[name], tensor)


def test_fp8_and_a_header_of_odd_length(tmp_path):
    values = np.array([0.125, 448.0, -1.5], ml_dtypes.float8_e4m3fn)
    wide = np.array([1.5, -2.0], np.float32)
    header = {"a": entry("F8_E4M3", (3,), (0, 3)), "b": entry(offsets=(3, 11))}
    path = write_raw(tmp_path / "x.safetensors", header, values.tobytes() + wide.tobytes())
    read = safetensors.read_file(path)
    np.testing.assert_array_equal(read["a"], values)
    np.testing.assert_array_equal(read["b"] + 1, wide + 1)


def test_tensors_are_read_only_views(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    tensor = safetensors.read_file(tmp_path / "x.safetensors")["a"]
    assert isinstance(tensor, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1


@pytest.mark.parametrize(
    ("header", "data", "named"),
    [
        (b"", b"", "JSON"),
        (b"[1]", b"", "object"),
        (b"\xff\xfe", b"", "JSON"),
        (b"[" * 100_000, b"", "JSON"),
        (b'{"a":{},"a":{}}', b"", "twice"),
        ({"a": entry()}, b"1234", "truncated: 'a' ends at"),
        ({"a": entry()}, bytes(12), "last tensor"),
        ({"a": entry(offsets=(0, 12))}, bytes(12), "spans 12 bytes"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), "spans -8 bytes"),
        ({"a": entry(offsets=(-8, 0))}, bytes(8), "data_offsets"),
        ({"a": entry(offsets=(0, 4, 8))}, bytes(8), "data_offsets"),
        ({"a": entry(offsets=(0.0, 8))}, bytes(8), "data_offsets"),
        ({"a": entry(shape=(True,), offsets=(0, 4))}, bytes(4), "shape"),
        ({"a": entry(shape=(2**62, 2**62, 0), offsets=(0, 0))}, b"", "shape"),
        ({"a": entry("F4")}, bytes(8), "F4"),
        ({"a": entry(["F32"])}, bytes(8), "dtype"),
        ({"a": entry(shape=(1,) * 9, offsets=(0, 4))}, bytes(4), "shape"),
        ({"a": entry(shape=(10**17,) * 10**5)}, bytes(8), "shape"),
        ({"a": entry(shape=(10**4000,) * 8)}, bytes(8), "shape"),
        ({"a": entry(), "__metadata__": {"format": 3}}, bytes(8), "__metadata__"),
        ({"a": entry(), "__metadata__": ["pt"]}, bytes(8), "__metadata__"),
        ({"a\n\ud800": entry()}, bytes(8), "JSON"),
        ({"a\nb": entry("F4")}, bytes(8), r"'a\\nb' has the dtype"),
        ({"a": {"dtype": "F32"}}, b"", "lacks"),
        ({"a": 3}, b"", "lacks"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "'b' overlaps"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "'b' leaves a gap"),
    ],
)
def test_a_false_header_is_an_error_of_one_line(tmp_path, header, data, named):
    path = write_raw(tmp_path / "x.safetensors", header, data)
    said = refused(named, safetensors.read_file, path)
    assert str(path) in said


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "cannot be read"),
        (b"1234", "truncated"),
        (struct.pack("<Q", 10) + b"{}", "truncated"),
        (struct.pack("<Q", 2**63), "header would be"),
        (b"version https://git-lfs.github.com/spec/v1", "header would be"),
    ],
)
def test_files_of_another_format(tmp_path, content, named):
    (tmp_path / "x.safetensors").write_bytes(content)
    refused(named, safetensors.read_file, tmp_path / "x.safetensors")


@pytest.mark.parametrize("length", [10**10, 9 << 20])
def test_a_large_header_is_not_read(tmp_path, length):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(8 + length)  # a sparse file, which takes no space on the disk
    tracemalloc.start()
    refused(f"its header would be {length} bytes long", safetensors.read_file, path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_large_index_is_not_read(tmp_path):
    with (tmp_path / safetensors.INDEX_FILE).open("wb") as file:
        file.truncate(10**10)
    refused("10000000000 bytes; at most", safetensors.read_folder, tmp_path)


def test_a_missing_file():
    refused("no-such-file", safetensors.read_file, "no-such-file")


def test_every_truncation_is_found(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float16)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError):
            safetensors.read_file(path)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "1.safetensors"}, "'b' is not listed for '1.safetensors'"),
        ({"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors"}, "'c' is not in"),
        ({"a": "2.safetensors"}, "'2.safetensors' named by .* is missing"),
        ({"a": "../1.safetensors"}, "outside the folder"),
        ({"a": "/etc/1.safetensors"}, "outside the folder"),
        ({"a": "a\0.safetensors"}, "is missing"),
        ({"a": "a" * 300}, "is missing"),
        ({"a": 1}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_does_not_describe_its_shards(tmp_path, weight_map, named):
    tensors = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    write_shards(tmp_path, {"1.safetensors": tensors}, weight_map)
    refused(named, safetensors.read_folder, tmp_path)


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused("only safetensors", safetensors.read_folder, tmp_path)
