"""Reads safetensors files through a memory map, without trusting their headers.

The format (https://huggingface.co/docs/safetensors) is eight bytes of header length, a JSON header
with the dtype, shape and byte range of every tensor, then the bytes. The NumPy reader of the
`safetensors` package does not support FP8; this module reads every dtype that ml_dtypes provides,
and reads no tensor before it is used.
"""

import io
import math
import os
import pathlib
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.system import json_file
from qerl_jax.system.safe_files import check_readable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CHUNK_BYTES = 64 << 20  # of a tensor that is read in chunks
_MAX_HEADER_BYTES = 8 << 20  # the headers of large models take some hundred thousand bytes
_MAX_DIMENSIONS = 8
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}


def read_file(path: pathlib.Path | str) -> dict[str, np.ndarray]:
    """Maps the tensors of a file: read-only views by name, in the order of their bytes.

    Raises:
        UserError: the file is missing, truncated or malformed; the error comes before any memory
            is allocated for a tensor.
    """
    path = pathlib.Path(path)
    try:
        check_readable(path)
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    entries, start = _header(path, data)
    views = {}
    for name, (dtype, shape, begin, end) in entries.items():
        try:
            views[name] = data[start + begin : start + end].view(dtype).reshape(shape)
        except (OverflowError, ValueError) as error:
            raise UserError(f"{path}: malformed header: {name!r:.200} has shape {shape}") from error
    return views


def read_folder(folder: pathlib.Path | str) -> dict[str, np.ndarray]:
    """Maps the tensors of a Hugging Face folder by name, from one file or shards with an index.

    Raises:
        UserError: a file is missing, malformed or outside the folder, or the index does not
            describe the shards.
    """
    folder = pathlib.Path(folder)
    if (folder / SINGLE_FILE).exists():
        return read_file(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).exists():
        raise UserError(
            f"{folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "only safetensors checkpoints can be read"
        )
    return _read_shards(folder)


def row_chunks(tensor: np.ndarray, memory: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the rows of a tensor in chunks of `CHUNK_BYTES` at most, a mapped one from its file.

    Reading is faster than copying from the memory map where the pages are not in memory, and pages
    of a file that were mapped count as memory of the process. A chunk holds what `memory` returns,
    at least as many bytes as asked for, until the next chunk is asked for.

    Raises:
        UserError: the file cannot be read, or is shorter than when it was mapped.
    """
    rows = max(1, CHUNK_BYTES // max(1, tensor[:1].nbytes))
    mapped = _file_range(tensor)
    if mapped is None:
        yield from (tensor[row : row + rows] for row in range(0, len(tensor), rows))
        return
    path, start = mapped
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            for row in range(0, len(tensor), rows):
                shape = (min(rows, len(tensor) - row), *tensor.shape[1:])
                size = math.prod(shape) * tensor.itemsize
                chunk = memory(size)[:size]
                _fill(file, chunk)
                yield chunk.view(tensor.dtype).reshape(shape)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _file_range(tensor: np.ndarray) -> tuple[str, int] | None:
    """Returns the file and the first byte of a view of a memory map; None for another array.

    None is also returned for a view whose bytes do not follow one another.
    """
    if not tensor.flags.c_contiguous:
        return None
    root = tensor
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None:
        return None
    return root.filename, root.offset + tensor.ctypes.data - root.ctypes.data


def _fill(file: io.FileIO, chunk: np.ndarray) -> None:
    view = memoryview(chunk)
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError("the file is shorter than it was")
        view = view[count:]


def _header(path: pathlib.Path, data: np.ndarray) -> tuple[dict[str, tuple], int]:
    """Returns validated entries {name: (dtype, shape, begin, end)} and the first tensor byte."""
    if data.size < 8:
        raise UserError(f"{path}: truncated: {data.size} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > _MAX_HEADER_BYTES:
        raise UserError(
            f"{path}: not a safetensors file: its header would be {length} bytes long, "
            f"at most {_MAX_HEADER_BYTES} are allowed"
        )
    start = 8 + length
    if start > data.size:
        raise UserError(
            f"{path}: truncated: the header ends at byte {start}, the file at {data.size}"
        )
    header = json_file.parse_object(path, data[8:start].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UserError(f"{path}: malformed header: __metadata__ must map names to strings")
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
    position = 0
    for name, (_, _, begin, end) in entries.items():
        if start + end > data.size:
            raise UserError(
                f"{path}: truncated: {name!r:.200} ends at byte {start + end}, the file at "
                f"{data.size}"
            )
        if begin != position:
            kind = "overlaps the one before" if begin < position else "leaves a gap before it"
            raise UserError(f"{path}: malformed header: {name!r:.200} {kind}")
        position = end
    if start + position != data.size:
        raise UserError(
            f"{path}: malformed: the last tensor ends at byte {start + position}, "
            f"the file at {data.size}"
        )
    return entries, start


def _entry(path: pathlib.Path, name: str, value: object) -> tuple:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise UserError(
            f"{path}: malformed header: {name!r:.200} lacks a dtype, shape or data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UserError(
            f"{path}: {name!r:.200} has the dtype {dtype!r:.50}; known: {', '.join(_DTYPES)}"
        )
    if (
        not _are_sizes(shape)
        or len(shape) > _MAX_DIMENSIONS
        or not _are_sizes(offsets)
        or len(offsets) != 2
    ):
        raise UserError(
            f"{path}: malformed header: {name!r:.200} has shape {shape!r:.100} and data_offsets "
            f"{offsets!r:.100}"
        )
    begin, end = offsets
    size = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if end - begin != size:
        raise UserError(
            f"{path}: malformed header: {name!r:.200} spans {end - begin} bytes, "
            f"its shape {shape} and dtype {dtype} need {size}"
        )
    return np.dtype(_DTYPES[dtype]), tuple(shape), begin, end


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _read_shards(folder: pathlib.Path) -> dict[str, np.ndarray]:
    path = folder / INDEX_FILE
    weight_map = json_file.read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(f"{path}: malformed: 'weight_map' must map tensor names to file names")
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(weight_map.values())):
        # Names are checked as written and links are not resolved, because the files of a hub cache
        # are links to another folder.
        if pathlib.PurePath(file).is_absolute() or ".." in pathlib.PurePath(file).parts:
            raise UserError(f"{path}: the shard {file!r:.200} lies outside the folder")
        if not os.path.exists(folder / file):
            raise UserError(f"{folder}: the shard {file!r:.200} named by {INDEX_FILE} is missing")
        shard = read_file(folder / file)
        indexed_names = {name for name, shard_file in weight_map.items() if shard_file == file}
        if indexed_names != shard.keys():
            name = sorted(indexed_names ^ shard.keys())[0]
            mismatch = "is not in" if name in indexed_names else "is not listed for"
            raise UserError(
                f"{path}: does not describe its shards: {name!r:.200} {mismatch} {file!r:.200}"
            )
        tensors |= shard
    return tensors
