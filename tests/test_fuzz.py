"""Broken files of every kind load or raise an error of one line, and allocate little memory.

Each case is a valid small file with a few seeded changes; a failure names its seed.
"""

import json
import pathlib
import random
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
from odd_places import changed, dumps
from safetensors.numpy import save_file
from tiny_checkpoints import model_config, random_tensors, write_folder, write_gguf, write_packed

from qerl_jax.errors import UserError
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.lora import init as init_lora
from qerl_jax.policy.trainable import Trainable
from qerl_jax.weights import load, peft, safetensors
from qerl_jax.weights.checkpoint import open_checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden"
MAX_BYTES = 48 << 20  # the files have some ten thousand bytes
GGUF_KEYS = [
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "attention.sliding_window", "block_count"),
    *("context_length", "embedding_length", "expert_count", "feed_forward_length"),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type"),
]
GGUF_VALUES = [None, 0, 1, 3, 8, 2**31, 2**32 - 1, 0.5, -1.0, float("inf"), float("nan"), "x"]


def changed_bytes(content, rng):
    """Flips, overwrites, removes or repeats a few bytes."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        # The first bytes hold the lengths and the header.
        reach = rng.choice((16, 64, 1024, len(content)))
        at, count = rng.randrange(min(reach, len(content)) or 1), rng.randint(1, 64)
        new = (b"\xff" * 8, b"\0" * 8, rng.randbytes(8), bytes([1 << rng.randrange(8)]))
        match rng.randrange(5):
            case 0:
                content[at : at + 8] = rng.choice(new)
            case 1:
                del content[at:]
            case 2:
                del content[at : at + count // 4]
            case 3:
                content[at:at] = content[at : at + count]
            case _:
                content += rng.randbytes(count)
    return bytes(content)


def changed_text(content, rng):
    """Changes the fields or the bytes of a JSON file."""
    if rng.random() < 0.2:
        return changed_bytes(content, rng)
    return dumps(changed(json.loads(content), rng))


def changed_tensors(content, rng):
    """Changes the header fields, the bytes or the header length of a safetensors file."""
    kind = rng.randrange(4)
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if kind == 0:
        return changed_bytes(content, rng)
    if kind == 1:
        data = bytearray(data)
        for _ in range(8):
            data[rng.randrange(len(data))] = rng.choice((0x7F, 0x80, 0xFF, rng.randrange(256)))
    else:
        header = dumps(changed(json.loads(header), rng))
        length = len(header)
        if rng.random() < 0.1:
            length = rng.choice((0, 1, length - 1, length + 1, 10**10, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + bytes(header) + bytes(data)


def changed_settings(rng, path):
    """Writes a GGUF file again with other values in its metadata."""
    config = model_config(rng.choice(("llama", "qwen2", "qwen3")))
    metadata = {rng.choice(GGUF_KEYS): rng.choice(GGUF_VALUES) for _ in range(rng.randint(1, 2))}
    scaling = rng.choice((None, None, [1.0, 8.0, 8.0, np.inf], [1.0, np.nan, 8.0, 8.0], [8.0]))
    write_gguf(
        path,
        config,
        random_tensors(config, dtype=np.float32),
        metadata=metadata,
        rope_freqs=None if scaling is None else np.array(scaling, np.float32),
    )
    return path.read_bytes()


def changes_of(path, kind):
    if kind == "gguf settings":
        return lambda content, rng: changed_settings(rng, path)
    if path.suffix == ".safetensors":
        return changed_tensors
    return changed_text if path.suffix == ".json" else changed_bytes


def read_model(path):
    """Reads a whole model."""
    checkpoint = open_checkpoint(str(path))
    load.read_params(checkpoint, format="nvfp4", dtype=load.DTYPES["bfloat16"])


def read_adapter(path):
    lora_config, _ = peft.read_peft_config(path)
    peft.load_peft_adapter(path, model_config(), lora_config)


def write_source(kind, folder):
    """Writes a valid model or adapter; returns its path and the function that reads it."""
    config = model_config("qwen2" if kind == "sharded" else "llama")
    tensors = random_tensors(config, **({"dtype": np.float32} if "gguf" in kind else {}))
    match kind:
        case "dense":
            write_folder(folder, config, tensors)
        case "sharded":
            write_folder(folder, config, tensors)
            write_shards(folder)
        case "compressed-tensors":
            groups = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}
            write_packed(folder, config, tensors, config_groups=groups)
        case "modelopt":
            shutil.copytree(GOLDEN / "modelopt_qwen3", folder)
            (folder / "expected.safetensors").unlink()
        case "adapter":
            options = LoraConfig(rank=2, alpha=4)
            lora = init_lora(jax.random.key(0), config, options)
            trainable = Trainable(lora=lora, params={})
            peft.save_peft_adapter(folder, trainable, options, base_model="x")
            return folder, read_adapter
        case _:
            folder.mkdir()
            return write_gguf(folder / "model.gguf", config, tensors), read_model
    return folder, read_model


def write_shards(folder):
    """Divides the tensors of a model among two files."""
    tensors = safetensors.read_file(folder / "model.safetensors")
    weight_map = {}
    for part in (0, 1):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        shard = {name: np.array(tensors[name]) for name in sorted(tensors)[part::2]}
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / safetensors.INDEX_FILE).write_bytes(dumps(index))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("dense", 20),
        ("sharded", 13),
        ("compressed-tensors", 17),
        ("modelopt", 10),
        ("gguf", 40),
        ("gguf settings", 3),
        ("adapter", 20),
    ],
)
def test_broken_files(tmp_path, kind, cases, times):
    source, read = write_source(kind, tmp_path / "model")
    read(source)
    files = [source] if source.is_file() else sorted(source.iterdir())
    whole = {path: path.read_bytes() for path in files}
    refused = 0
    tracemalloc.start()
    try:
        for case in range(cases * times):
            rng = random.Random(f"{kind} {case}")
            path = rng.choice(files)
            what = f"case {case} of {kind}: {path.name}"
            path.write_bytes(changes_of(path, kind)(whole[path], rng))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            message = ""
            try:
                read(source)
            except UserError as error:
                message = str(error)
            except BaseException as error:  # some errors of tokenizers are not an Exception
                error.add_note(what)
                raise
            refused += bool(message)
            assert "\n" not in message, what
            assert len(message) < 1000, what
            used = tracemalloc.get_traced_memory()[1] - before
            assert used < MAX_BYTES, f"{what} took {used} bytes"
            path.write_bytes(whole[path])
    finally:
        tracemalloc.stop()
    assert refused > cases * times // 3
