"""Reads the header of a GGUF file, its metadata and where its tensors are, and trusts none of it.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is little-endian: magic,
version, the number of tensors, the number of metadata pairs, the pairs, a record for every tensor,
then the tensors. The reader of the `gguf` package follows lengths beyond the end of the file and
does not return.
"""

import dataclasses
import math
import pathlib
from typing import Any

import gguf
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.system.safe_files import check_readable

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 32 << 20  # the vocabularies of current models take 5 to 15 million bytes
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_U32, _U64 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.UINT64
_STRING, _ARRAY = int(gguf.GGUFValueType.STRING), int(gguf.GGUFValueType.ARRAY)
_SCALARS = {
    int(gguf.GGUFValueType.UINT8): np.dtype("<u1"),
    int(gguf.GGUFValueType.INT8): np.dtype("<i1"),
    int(gguf.GGUFValueType.UINT16): np.dtype("<u2"),
    int(gguf.GGUFValueType.INT16): np.dtype("<i2"),
    int(gguf.GGUFValueType.UINT32): np.dtype("<u4"),
    int(gguf.GGUFValueType.INT32): np.dtype("<i4"),
    int(gguf.GGUFValueType.FLOAT32): np.dtype("<f4"),
    int(gguf.GGUFValueType.BOOL): np.dtype("?"),
    int(gguf.GGUFValueType.UINT64): np.dtype("<u8"),
    int(gguf.GGUFValueType.INT64): np.dtype("<i8"),
    int(gguf.GGUFValueType.FLOAT64): np.dtype("<f8"),
}
_DTYPES = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    `data` is a view of the file: the values where NumPy has the number format, otherwise uint8 with
    the bytes of a row in the last axis.
    """

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # in Hugging Face's order, outputs first
    data: np.ndarray
    # Float32 by which the values are divided, one of each expert of a stack; None for 1.
    divisors: np.ndarray | None = None


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Reads the metadata of a file, and maps its tensors by name as read-only views.

    Raises:
        UserError: the file is missing, truncated or malformed.
    """
    try:
        check_readable(path)
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: truncated or not a GGUF file ({error})") from error
    try:
        return _parse(data)
    except _MalformedError as error:
        raise UserError(f"{path}: truncated or not a GGUF file ({error})") from error


class _MalformedError(Exception):
    """An error in the header, which the message describes."""


class _Cursor:
    """Reads a header from front to back, but never beyond its end."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.position = 0

    def take(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns the next `count` numbers."""
        end = self.position + count * dtype.itemsize
        if end > min(self.data.size, _MAX_HEADER_BYTES):
            raise _MalformedError(
                f"the header reaches byte {end}; the file ends at {self.data.size}, headers at "
                f"{_MAX_HEADER_BYTES}"
            )
        content = self.data[self.position : end]
        self.position = end
        return np.frombuffer(content.tobytes(), dtype)

    def integer(self, kind: gguf.GGUFValueType) -> int:
        return int(self.take(1, _SCALARS[int(kind)])[0])

    def string(self) -> str:
        text = self.take(self.integer(_U64), np.dtype(np.uint8)).tobytes()
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise _MalformedError(f"a string is not UTF-8: {error}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.integer(_U32), self.integer(_U64)
            if item == _STRING:
                return [self.string() for _ in range(count)]
            return self.take(count, _scalar(item)).tolist()
        return self.take(1, _scalar(kind)).tolist()[0]


def _scalar(kind: int) -> np.dtype:
    if kind not in _SCALARS:
        raise _MalformedError(f"{kind} is not a value type")
    return _SCALARS[kind]


def _parse(data: np.ndarray) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(data)
    if cursor.take(4, np.dtype(np.uint8)).tobytes() != _MAGIC:
        raise _MalformedError(f"it does not begin with {_MAGIC.decode()}")
    version = cursor.integer(_U32)
    if version not in _VERSIONS:
        raise _MalformedError(f"version {version}; supported: {_VERSIONS}")
    num_tensors, num_pairs = cursor.integer(_U64), cursor.integer(_U64)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise _MalformedError(f"the metadata {key!r:.50} occurs twice")
        metadata[key] = cursor.value(cursor.integer(_U32))
    records = [_record(cursor) for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise _MalformedError(f"{_ALIGNMENT} is {alignment!r:.50}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    free = start  # first byte that no tensor uses yet: tensors do not overlap
    for name, kind, shape, offset in sorted(records, key=lambda record: record[3]):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        *outer, inputs = shape
        if inputs % block or not all(shape):
            raise _MalformedError(f"{name!r:.200} has the shape {shape} in blocks of {block}")
        row_bytes = inputs // block * size
        begin = start + offset
        end = begin + math.prod(outer) * row_bytes
        if begin < free or end > data.size or name in tensors:
            raise _MalformedError(
                f"{name!r:.200} is at bytes {begin} to {end}; the tensor before it ends at "
                f"{free}, the file at {data.size}"
            )
        free = end
        dtype = _DTYPES.get(kind, np.dtype(np.uint8))
        row = row_bytes // dtype.itemsize
        tensors[name] = GgufTensor(
            name=name, kind=kind, shape=shape, data=data[begin:end].view(dtype).reshape(*outer, row)
        )
    return metadata, tensors


def _record(
    cursor: _Cursor,
) -> tuple[str, gguf.GGMLQuantizationType, tuple[int, ...], int]:
    """Reads the name, number format, shape and offset of the next tensor."""
    name = cursor.string()
    dimensions = cursor.integer(_U32)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _MalformedError(f"{name!r:.200} has {dimensions} dimensions")
    shape = tuple(reversed(cursor.take(dimensions, _SCALARS[int(_U64)]).tolist()))
    kind = cursor.integer(_U32)
    if kind not in gguf.GGML_QUANT_SIZES:
        raise _MalformedError(f"{name!r:.200} has the unknown type {kind}")
    return name, gguf.GGMLQuantizationType(kind), shape, cursor.integer(_U64)
