"""Calibrated models, which all runs of this user share: made once, and found by key or by digest.

An entry is a checkpoint in NVFP4, the text that it was calibrated on, and calibration.json. Its key
says what it was made from: all bytes of the weights, the prompts, settings and versions. Its digest
says which bytes came out, and a run records it: the same weights and text give other bytes on
another kind of device.
"""

import contextlib
import hashlib
import io
import json
import math
import os
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qerl_jax.errors import UserError, first_line
from qerl_jax.system import json_file, paths
from qerl_jax.system.atomic import write_json
from qerl_jax.system.locks import InUseError, hold
from qerl_jax.system.safe_files import make_folder, open_to_write, read_bytes, sha256_of

TOKENS = "tokens.npy"
_RECORD = "calibration.json"
_DIGESTS = "digests.json"  # of files that were read before
_LARGEST_TOKENS_FILE = 1 << 27
_ID_DIGITS = 24


class Entry(NamedTuple):
    """A calibrated model."""

    path: Path  # its folder
    digest: str  # SHA-256 of its weights, in hex digits
    record: dict[str, Any]  # content of calibration.json

    @property
    def tokens(self) -> Path:
        """The text that it was calibrated on."""
        return self.path / TOKENS


def cache_folder() -> Path:
    """The folder of all entries, `$XDG_CACHE_HOME/qerl_jax/calibrated`."""
    return paths.cache_folder("calibrated")


def key_of(facts: Mapping[str, Any]) -> str:
    """The key of what a model is made from."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]


def weights_digest(path: Path) -> str:
    """SHA-256 in hex digits of all bytes of a .gguf file, or of the safetensors files of a folder.

    Digests are remembered by path, size and time of change, so that a file is read once where the
    cache can be written.
    """
    memory = cache_folder() / _DIGESTS
    try:
        known = json_file.read_object(memory)
    except UserError:  # It is missing, or damaged: all files are read again.
        known = {}
    digests, is_new = [], False
    for file in _weight_files(path):
        real = file.resolve()
        about = real.stat()
        version = [about.st_size, about.st_mtime_ns, about.st_ino]
        saved = known.get(str(real))
        if not (isinstance(saved, list) and len(saved) == 2 and saved[0] == version):
            saved = [version, sha256_of(real)]
            known[str(real)], is_new = saved, True
        digests.append(saved[1])
    if is_new:
        known = {name: value for name, value in known.items() if os.path.exists(name)}
        with contextlib.suppress(OSError):  # A folder that only others write is read the same way.
            write_json(memory, known, indent=0)
    return _digest_of_all(digests)


def _weight_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _digest_of_all(digests: Iterable[str]) -> str:
    """Returns the digest of the weights from those of their files, in their order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def entry_path(key: str) -> Path:
    """The folder of the entry with a key."""
    return cache_folder() / key


def open_entry(path: Path) -> Entry | None:
    """Opens an entry; None without an entry, or where its weights are not those it had."""
    if not (path / _RECORD).exists():
        return None
    try:
        record = json_file.read_object(path / _RECORD)
        intact = weights_digest(path) == record.get("digest") and (path / TOKENS).is_file()
    except (UserError, OSError):
        intact, record = False, {}
    if not intact:
        print(f"{path}: damaged; it is made again", flush=True)
        return None
    return Entry(path, record["digest"], record)


def find(digest: str) -> Entry | None:
    """Finds the entry with a digest; None without such an entry."""
    for path in sorted(cache_folder().glob(f"{'[0-9a-f]' * _ID_DIGITS}/{_RECORD}")):
        with contextlib.suppress(UserError):
            if json_file.read_object(path).get("digest") == digest:
                return open_entry(path.parent)
    return None


@contextlib.contextmanager
def lock(key: str) -> Generator[None]:
    """Holds the lock of a key; waits while another process makes the entry."""
    folder = cache_folder()
    path = folder / f"{key}.lock"
    with paths.needs_cache(folder, "round the weights: --config.model.calibration=none"):
        make_folder(folder)
        file = open_to_write(path, "a")
    remedy = "set XDG_CACHE_HOME to a folder"
    with file, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(file.fileno(), path, remedy=remedy, on_wait=_wait))
        except InUseError as error:
            raise UserError(
                f"{path} was removed while this run waited for it: run the same command again"
            ) from error
        yield


def _wait() -> None:
    print("waiting for another run, which calibrates the same model", flush=True)


def complete_entry(folder: Path, tokens: np.ndarray, record: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the text, int32 [B, T], and calibration.json to the checkpoint of a new entry.

    Returns:
        The content of calibration.json: `record`, what the model was made from, and its digest.
    """
    np.save(folder / TOKENS, tokens, allow_pickle=False)
    content = {**record, "digest": _digest_of_all(map(sha256_of, _weight_files(folder)))}
    write_json(folder / _RECORD, content)
    return content


def read_tokens(path: Path) -> np.ndarray:
    """Reads the windows of a text.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        if path.stat().st_size > _LARGEST_TOKENS_FILE:
            raise UserError(f"{path}: it is over {_LARGEST_TOKENS_FILE} bytes, and no text is")
        content = io.BytesIO(read_bytes(path))
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the text of the calibration: {error.strerror}"
        ) from error
    try:
        version = np.lib.format.read_magic(content)
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(content)
    # NumPy evaluates the header as Python, whose errors have no common class.
    except Exception as error:
        raise UserError(
            f"{path}: its header is not that of an array: {first_line(error):.200}; restore the "
            "file"
        ) from error
    data = content.read()
    sizes = len(shape) == 2 and min(shape) > 0 and math.prod(shape) * 4 == len(data)
    if version != (1, 0) or dtype != np.int32 or by_columns or not sizes:
        raise UserError(
            f"{path}: it is no text of int32 [B, T]: its header names the type {dtype!r:.100} and "
            f"the shape {shape!r:.100} for {len(data)} bytes; restore the file"
        )
    return np.frombuffer(data, dtype).reshape(shape)
