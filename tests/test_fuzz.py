"""Broken files of every kind load or raise an error of one line, and allocate little memory.

Each case is a valid small file with a few seeded changes; a failure names its seed.
"""

import copy
import functools
import json
import pathlib
import random
import shutil
import tracemalloc

import numpy as np
import pytest
from tiny_checkpoints import model_config, random_tensors, write_folder, write_gguf, write_packed

from qerl_jax.errors import UserError
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.lora import init as init_lora
from qerl_jax.policy.trainable import Trainable
from qerl_jax.weights import load, peft, safetensors
from qerl_jax.weights.checkpoint import open_checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden"
MAX_BYTES = 48 << 20  # the files have some ten thousand bytes
JUNK = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**53 + 1,
    2**64,
    10**40,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "F32",
    "BF16",
    "U8",
    "true",
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "a\nb",
    "\ud800",
    "long" * 1000,
    [],
    [0],
    [-1, 5],
    [2**62, 2**62],
    [[[]]],
    ["a", 1],
    {},
    {"a": 1},
    {"content": 3},
    {"weight": "x"},
]
GGUF_KEYS = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
]
GGUF_VALUES = [None, 0, 1, 3, 8, 2**31, 2**32 - 1, 0.5, -1.0, float("inf"), float("nan"), "x"]


def changed_bytes(content, rng):
    """Flips, overwrites, removes or repeats a few bytes."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        # The first bytes hold the lengths and the header.
        reach = rng.choice((16, 64, 1024, len(content)))
        at = rng.randrange(min(reach, len(content)) or 1)
        kind = rng.randrange(6)
        if kind == 0 and content:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, rng.randbytes(8)))
        elif kind == 2:
            del content[at:]
        elif kind == 3:
            del content[at : at + rng.randint(1, 16)]
        elif kind == 4:
            content[at:at] = content[at : at + rng.randint(1, 64)]
        else:
            content += rng.randbytes(rng.randint(1, 64))
    return bytes(content)


def places(value, path=()):
    """Returns the paths of everything inside a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children):
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


def changed_json(value, rng):
    """Replaces, removes, renames or copies a few fields."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        found = list(places(value))
        if not found:
            break
        *path, key = rng.choice(found)
        parent = functools.reduce(lambda inside, step: inside[step], path, value)
        kind = rng.randrange(6)
        if kind < 3:
            parent[key] = copy.deepcopy(rng.choice(JUNK))  # which a later change may change
        elif kind == 3:
            del parent[key]
        elif kind == 4 and isinstance(parent, dict):
            parent[f"{key}{rng.choice(('_2', '.weight', ''))}"] = parent.pop(key)
        else:
            *other_path, other = rng.choice(found)
            try:
                source = functools.reduce(lambda inside, step: inside[step], other_path, value)
                parent[key] = json.loads(json.dumps(source[other]))
            except (KeyError, IndexError, TypeError):  # an earlier change removed it
                parent[key] = []
    return value


def changed_text(content, rng):
    """Changes the fields or the bytes of a JSON file."""
    if rng.random() < 0.2:
        return changed_bytes(content, rng)
    return json.dumps(changed_json(json.loads(content), rng)).encode("utf-8", "surrogatepass")


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
        header = json.dumps(changed_json(json.loads(header), rng)).encode("utf-8", "surrogatepass")
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


def write_sharded(folder):
    config = model_config("qwen2")
    write_folder(folder, config, random_tensors(config))
    tensors = safetensors.read_file(folder / "model.safetensors")
    weight_map = {}
    from safetensors.numpy import save_file

    for part in (0, 1):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        shard = {name: np.array(tensors[name]) for name in sorted(tensors)[part::2]}
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors").unlink()
    (folder / safetensors.INDEX_FILE).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def write_source(kind, folder):
    """Writes a valid model or adapter; returns its path and the function that reads it."""
    config = model_config()
    if kind == "dense":
        write_folder(folder, config, random_tensors(config))
    elif kind == "sharded":
        write_sharded(folder)
    elif kind == "compressed-tensors":
        groups = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}
        write_packed(folder, config, random_tensors(config), config_groups=groups)
    elif kind == "modelopt":
        shutil.copytree(GOLDEN / "modelopt_qwen3", folder)
        (folder / "expected.safetensors").unlink()
    elif kind.startswith("gguf"):
        folder.mkdir()
        tensors = random_tensors(config, dtype=np.float32)
        return write_gguf(folder / "model.gguf", config, tensors), read_model
    else:
        import jax

        options = LoraConfig(rank=2, alpha=4)
        lora = init_lora(jax.random.key(0), config, options)
        peft.save_peft_adapter(folder, Trainable(lora=lora, params={}), options, base_model="x")
        return folder, read_adapter
    return folder, read_model


@pytest.mark.timeout(120)
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("dense", 60),
        ("sharded", 40),
        ("compressed-tensors", 50),
        ("modelopt", 30),
        ("gguf", 80),
        ("gguf settings", 8),
        ("adapter", 60),
    ],
)
def test_broken_files(tmp_path, kind, cases, times):
    cases *= times
    source, read = write_source(kind, tmp_path / "model")
    read(source)
    files = [source] if source.is_file() else sorted(source.iterdir())
    whole = {path: path.read_bytes() for path in files}
    refused = 0
    tracemalloc.start()
    try:
        for case in range(cases):
            rng = random.Random(f"{kind} {case}")
            path = rng.choice(files)
            content = changes_of(path, kind)(whole[path], rng)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read(source)
            except UserError as error:
                message = str(error)
            except BaseException as error:  # some errors of tokenizers are not an Exception
                error.add_note(f"case {case} of {kind}: {path.name}")
                raise
            else:
                message = ""
            refused += bool(message)
            assert "\n" not in message, f"case {case} of {kind}: {path.name}"
            assert len(message) < 1000, f"case {case} of {kind}: {path.name}"
            used = tracemalloc.get_traced_memory()[1] - before
            assert used < MAX_BYTES, f"case {case} of {kind}: {path.name} took {used} bytes"
            path.write_bytes(whole[path])
    finally:
        tracemalloc.stop()
    assert refused > cases // 3
