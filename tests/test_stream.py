"""Loading in a stream: equal bytes in chunks of any size, bounded memory, errors of threads."""

import dataclasses
import math
import pathlib
import subprocess
import sys
import threading

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import model_config, random_tensors, write_folder, write_gguf, write_packed

from benchmarks.random_checkpoint import write_random
from qerl_jax.errors import UserError
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.policy.layers.kinds import FUSED
from qerl_jax.policy.quant import QuantTensor, checkpoint_order, quantize
from qerl_jax.system.threads import run_within
from qerl_jax.weights import load, names, safetensors
from qerl_jax.weights.checkpoint import Checkpoint, open_checkpoint
from qerl_jax.weights.stream import Meter

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROOT = pathlib.Path(__file__).parents[1]


def read_whole(checkpoint, format):
    """The parameter tree by whole tensors in NumPy, one after the other."""

    def array(name, tensors):
        modules = [tensor.removesuffix(".weight") for tensor in tensors]
        if modules[0] in checkpoint.packed:
            parts = [
                [checkpoint.tensors[f"{module}.weight_{part}"] for module in modules]
                for part in ("packed", "scale", "global_scale")
            ]
            rows = [len(part) for part in parts[0]]
            packed, scales, divisors = map(np.concatenate, parts)
            return QuantTensor(packed, scales, np.repeat(divisors, rows))
        dtype = np.dtype(np.float32) if name.endswith("norm") else BFLOAT16
        dense = [checkpoint.read(tensor, dtype) for tensor in tensors]
        if name in FUSED and format != "bf16" and not checkpoint.packed:
            return quantize(dense, format=format)
        return np.concatenate(dense)

    def arrays(layer):
        stored = names.stored_tensors(checkpoint.config, layer)
        return {name: array(name, tensors) for name, tensors in stored.items()}

    return arrays(-1) | {"layers": [arrays(i) for i in range(checkpoint.config.num_layers)]}


def assert_same_bytes(params, expected):
    params = jax.tree.map(
        lambda leaf: checkpoint_order(leaf) if isinstance(leaf, QuantTensor) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantTensor),
    )
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(
            np.asarray(found).view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8)
        )


def write_source(folder, kind):
    config = model_config("qwen3" if kind == "q8_0" else "qwen2", num_layers=3, mlp_dim=64)
    tensors = random_tensors(config, dtype=np.float32 if kind in ("f32", "q8_0") else BFLOAT16)
    if kind == "packed":
        return write_packed(folder, config, tensors, dense=("1.mlp.down_proj",))
    if kind == "q8_0":
        return write_gguf(
            folder / "x.gguf", config, tensors, quantization=gguf.GGMLQuantizationType.Q8_0
        )
    return write_folder(folder, config, tensors)


def check_chunks(folder, monkeypatch, kind, format):
    # A row has 16 to 256 bytes: chunks are some rows of a tensor, or a row that is too large.
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", 200)
    checkpoint = open_checkpoint(str(write_source(folder, kind)))
    params = load.read_params(checkpoint, format=format, dtype=BFLOAT16)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert_same_bytes(params, read_whole(checkpoint, format))


@pytest.mark.parametrize(
    ("kind", "format"),
    [("bf16", "bf16"), ("bf16", "nvfp4"), ("f32", "mxfp4"), ("packed", "nvfp4"), ("q8_0", "nvfp4")],
)
def test_chunks_give_the_bytes_of_whole_tensors(tmp_path, monkeypatch, kind, format):
    check_chunks(tmp_path, monkeypatch, kind, format)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_memory_that_is_used_again_is_not_overwritten_too_early(tmp_path, monkeypatch, format):
    check_chunks(tmp_path, monkeypatch, "bf16", format)


def test_a_thread_uses_its_memory_again(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    config = model_config()
    write_folder(tmp_path / "x", config, random_tensors(config))
    tensor = safetensors.read_folder(tmp_path / "x")[names.EMBED]
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", 5 * tensor[:1].nbytes)
    memory = np.empty(5 * tensor[:1].nbytes, np.uint8)
    copies = []
    for chunk in safetensors.row_chunks(tensor, lambda size: memory):
        assert np.shares_memory(chunk, memory)
        copies.append(chunk.copy())
    assert [len(copy) for copy in copies] == [5] * 9 + [3]
    np.testing.assert_array_equal(np.concatenate(copies), tensor)


class Held:
    """Counts the bytes that are held at the same time."""

    def __init__(self):
        self.lock = threading.Lock()
        self.now = self.most = 0

    def take(self, size):
        with self.lock:
            self.now += size
            self.most = max(self.most, self.now)

    def give(self, size):
        with self.lock:
            self.now -= size


def test_items_at_work_stay_within_the_limit():
    held, two_at_work = Held(), threading.Barrier(2, timeout=60)

    def work(size):
        held.take(size)
        if size == 50:  # Both of them fit together.
            two_at_work.wait()
        held.give(size)
        return -size

    sizes = [50, 50, 100, 250, 1, 60, 39, 40]
    found = dict(run_within(work, sizes, size=lambda size: size, limit=100, threads=8))
    assert found == {size: -size for size in sizes}
    assert held.most == 250


def test_many_shards_of_small_tensors_are_read_within_the_limit(tmp_path, monkeypatch):
    config = model_config("qwen2", num_layers=24)
    size = write_random(tmp_path / "x", config, packed=False, shard_bytes=20_000)
    assert len(list((tmp_path / "x").glob("model-*.safetensors"))) > 10
    checkpoint, held, read_part = open_checkpoint(str(tmp_path / "x")), Held(), load._read_part

    def counted(checkpoint, part, **options):
        held.take(part.bytes)
        try:
            return read_part(checkpoint, part, **options)
        finally:
            held.give(part.bytes)

    largest = 2 * 2 * config.mlp_dim * config.embed_dim
    limit = 2 * largest
    monkeypatch.setattr(load, "_read_part", counted)
    monkeypatch.setattr(load, "_BYTES_IN_FLIGHT", limit)
    states = []
    params = load.read_params(
        checkpoint,
        format="nvfp4",
        dtype=BFLOAT16,
        on_progress=lambda meter: states.append((meter.bytes, meter.total_bytes, meter.done)),
    )
    assert largest <= held.most <= limit
    assert_same_bytes(params, read_whole(checkpoint, "nvfp4"))
    assert [done for _, _, done in states].index(True) == len(states) - 1
    assert states[-1] == (size, size, True)
    assert [count for count, _, _ in states] == sorted(count for count, _, _ in states)


@pytest.mark.parametrize("model", ["qwen2.5-32b", "qwen2.5-72b"])
def test_large_models_hold_a_few_gigabytes(model):
    config = ARCHITECTURES[model]
    # Arrays without memory of their own.
    stored = {
        name: np.broadcast_to(np.zeros((), BFLOAT16), shape)
        for name, shape in names.expected_shapes(config).items()
    }
    checkpoint = Checkpoint(
        path=pathlib.Path("x"),
        source="x",
        config=config,
        tokenizer=None,
        tensors=stored,
        shapes={name: array.shape for name, array in stored.items()},
        packed=frozenset(),
        unpack=lambda name: {},
        read=lambda name, dtype: stored[name],
        chunks=lambda name, dtype, memory: iter(()),
    )
    parts = [
        part
        for layer in range(-1, config.num_layers)
        for part in load._parts(checkpoint, layer, BFLOAT16)
    ]
    total = sum(math.prod(array.shape) for array in stored.values())
    assert sum(part.stored_bytes for part in parts) == 2 * total
    assert max(part.bytes for part in parts) < load._BYTES_IN_FLIGHT < 4e9
    assert load._THREADS * safetensors.CHUNK_BYTES < 2e9


def test_the_error_of_a_thread_stops_the_others():
    started = []

    def work(item):
        started.append(item)
        if item == 1:
            raise UserError("item 1: broken")

    with pytest.raises(UserError, match=r"^item 1: broken$"):
        list(run_within(work, range(1000), size=lambda item: 1, limit=3, threads=2))
    assert len(started) < 1000


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    config = model_config()
    folder = write_folder(tmp_path, config, random_tensors(config))
    checkpoint = open_checkpoint(str(folder))
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read: .*shorter") as caught:
        load.read_params(checkpoint, format="bf16", dtype=BFLOAT16)
    assert "\n" not in str(caught.value)


def test_the_meter_counts_time_that_threads_share_once():
    meter = Meter(7_600_000_000, 15_200_000_000, lambda meter: None)
    meter._spans = [("read", 1.0, 3.0), ("send", 2.0, 5.0), ("read", 2.5, 2.7), ("read", 7.0, 8.0)]
    assert meter.busy_seconds("read") == pytest.approx(3.0)
    assert meter.busy_seconds("read", "send") == pytest.approx(5.0)
    assert meter.busy_seconds("quantize") == 0
    meter.add(9_300_000_000)
    assert meter.text == "loading 7.6B parameters: 9.3 of 15.2 GB, 0 s"
    with meter.running():
        assert not meter.done
    meter._began, meter._ended = 0.0, 760.0
    assert meter.text == "loaded 7.6B parameters: 15.2 GB in 760.0 s, 0.02 GB/s"


def test_a_load_that_fails_ends_without_a_line():
    states = []
    meter = Meter(10, 20, lambda meter: states.append((meter.done, meter.text)))
    with pytest.raises(UserError, match="broken"), meter.running():
        raise UserError("broken")
    assert states == [(True, "")]


_LOAD = """
import pathlib, sys
import jax
from qerl_jax.weights import load, safetensors
from qerl_jax.weights.checkpoint import open_checkpoint

MB = 1 << 20
safetensors.CHUNK_BYTES, load._BYTES_IN_FLIGHT, load._THREADS = 2 * MB, 24 * MB, 2
status = pathlib.Path("/proc/self/status")

def anonymous():
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def read(folder, seen):
    params = load.read_params(
        open_checkpoint(folder), format="nvfp4", dtype=load.DTYPES["bfloat16"],
        on_progress=lambda meter: seen.append(anonymous()),
    )
    return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(params))), params

read(sys.argv[1], [])  # compiles
before, seen = anonymous(), []
size, params = read(sys.argv[2], seen)
print(len(seen), size, max(*seen, anonymous()) - before)
"""


@pytest.mark.slow  # 8 s
def test_the_memory_of_a_process_that_loads_bf16_shards(tmp_path):
    config = model_config(
        "qwen2", embed_dim=512, mlp_dim=2048, head_dim=64, num_heads=8, num_kv_heads=8
    )
    shard = 32 << 20
    write_random(tmp_path / "one", dataclasses.replace(config, num_layers=1), packed=False)
    many = dataclasses.replace(config, num_layers=40)
    size = write_random(tmp_path / "many", many, packed=False, shard_bytes=shard)
    assert size > 10 * shard
    command = [sys.executable, "-c", _LOAD, tmp_path / "one", tmp_path / "many"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    reports, held, grown = map(int, result.stdout.splitlines()[-1].split())
    assert reports > 20
    assert held < size / 3
    # A CPU holds the parameters in the same memory.
    assert grown - held < 2 * shard, (size, held, grown)
