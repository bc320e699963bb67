"""A checkpoint of random weights in the shapes of a model, written as fast as the disk takes it."""

import concurrent.futures
import itertools
import json
import math
import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.config import ModelConfig, to_hf_config
from qerl_jax.policy.layers.kinds import PACKED
from qerl_jax.system.staging import staged_folder
from qerl_jax.weights import names
from qerl_jax.weights.safetensors import INDEX_FILE
from qerl_jax.weights.save import QUANTIZATION_CONFIG, SHARD_BYTES

_POOL_BYTES = 32 << 20  # every tensor repeats the bytes of one pool of its kind
_SIZE = 0.02  # standard deviation of the weights
_THREADS = 8  # files that are written at a time


def write_random(
    folder: pathlib.Path, model_config: ModelConfig, *, packed: bool, shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes a model folder without a tokenizer, complete or not at all; returns its bytes.

    Tensors are in bfloat16; `packed` projections are in NVFP4, as compressed-tensors stores them.

    Raises:
        UserError: the folder exists or cannot be written, for example because the disk is full.
    """
    modules = [
        tensor.removesuffix(".weight")
        for layer in range(model_config.num_layers)
        for array, tensors in names.stored_tensors(model_config, layer).items()
        if array in PACKED
        for tensor in tensors
    ]
    shapes = names.expected_shapes(model_config, packed=modules if packed else ())
    hf = to_hf_config(model_config) | {"torch_dtype": "bfloat16"}
    if packed:
        ignored = [*QUANTIZATION_CONFIG["ignore"], *names.dense_modules(model_config)]
        hf["quantization_config"] = QUANTIZATION_CONFIG | {"ignore": ignored}
    pools, weight_map = _pools(), {}
    size = sum(_bytes(name, shape) for name, shape in shapes.items())
    shards = list(_shards(shapes, shard_bytes))
    files = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    with staged_folder(folder) as staged:
        # One thread copies about 1 GB/s into the page cache, which is less than most disks take.
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
            paths = [staged / file for file in files]
            list(threads.map(_write_shard, paths, shards, itertools.repeat(pools)))
        for file, shard in zip(files, shards, strict=True):
            weight_map |= dict.fromkeys(shard, file)
        (staged / "config.json").write_text(json.dumps(hf))
        # transformers requires the metadata.
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (staged / INDEX_FILE).write_text(json.dumps(index))
    return size


def model_folder(folder: pathlib.Path, model: str) -> pathlib.Path:
    """The folder of a bf16 checkpoint of a model with a tokenizer, written if missing.

    The tokenizer has a word for each token id, so that a prompt has as many tokens as words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = ARCHITECTURES[model]
    if not folder.exists():
        # Small files, so that many are written at a time.
        write_random(folder, config, packed=False, shard_bytes=1_000_000_000)
    if not (folder / "tokenizer.json").exists():
        words = {"<end>": 0} | {word(token): token for token in range(1, config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyrefly: ignore[read-only]
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
        ).save_pretrained(folder)
    return folder


def word(token: int) -> str:
    """The word of a token id above 0 in the tokenizer of `model_folder`."""
    return f"w{token}"


def _pools() -> dict[str, np.ndarray]:
    """Returns bytes to repeat, by the dtype of safetensors."""
    rng = np.random.default_rng(0)
    weights = _SIZE * rng.standard_normal(_POOL_BYTES // 2, np.float32)
    return {
        "BF16": weights.astype(ml_dtypes.bfloat16).view(np.uint8),
        "U8": rng.integers(0, 256, _POOL_BYTES, np.uint8),
        "F8_E4M3": rng.integers(80, 127, _POOL_BYTES, np.uint8),  # 8 to 448
        "F32": np.full(1, 180 / _SIZE, np.float32).view(np.uint8),
    }


def _dtype(name: str) -> tuple[str, int]:
    """Returns the dtype of a tensor in safetensors, and its bytes."""
    for suffix, dtype, size in (
        ("weight_packed", "U8", 1),
        ("weight_scale", "F8_E4M3", 1),
        ("weight_global_scale", "F32", 4),
    ):
        if name.endswith(suffix):
            return dtype, size
    return "BF16", 2


def _bytes(name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _dtype(name)[1]


def _shards(shapes: dict[str, tuple[int, ...]], limit: int) -> Iterator[dict]:
    """Yields the shapes by name of each file."""
    shard, total = {}, 0
    for name, shape in shapes.items():
        size = _bytes(name, shape)
        if shard and total + size > limit:
            yield shard
            shard, total = {}, 0
        shard[name] = shape
        total += size
    yield shard


def _write_shard(
    path: pathlib.Path, shard: dict[str, tuple[int, ...]], pools: dict[str, np.ndarray]
) -> None:
    header, end = {}, 0
    for name, shape in shard.items():
        begin, end = end, end + _bytes(name, shape)
        header[name] = {"dtype": _dtype(name)[0], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shard.items():
            pool = pools[_dtype(name)[0]]
            for first in range(0, size := _bytes(name, shape), len(pool)):
                file.write(memoryview(pool)[: size - first])
