"""Shapes [N, K] of the fused projections of known models, and random operands, to measure with."""

import argparse
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import timing
from pallas_kernels.fp4_matmul import layout, reference, tiling

ROTATED_BYTES = 512e6  # of different weights: a single one would stay in the L2


def _layers(embed: int, mlp: int, heads: int, kv_heads: int) -> dict[str, tuple[int, int]]:
    """The four products of a layer; a head has 128 dimensions."""
    return {
        "qkv": (128 * (heads + 2 * kv_heads), embed),
        "o": (embed, 128 * heads),
        "gate_up": (2 * mlp, embed),
        "down": (embed, mlp),
    }


MODELS = {
    "1.5b": _layers(1536, 8960, 12, 2),  # Qwen2.5
    "3b": _layers(2048, 11008, 16, 2),
    "7b": _layers(3584, 18944, 28, 4),
    "14b": _layers(5120, 13824, 40, 8),
    "32b": _layers(5120, 27648, 40, 8),
    "72b": _layers(8192, 29568, 64, 8),
    "llama8b": _layers(4096, 14336, 32, 8),
    "qwen3.5-4b": {  # with gates of the queries
        "qkv": (10240, 2560),
        "o": (2560, 4096),
        "gate_up": (18432, 2560),
        "down": (2560, 9216),
    },
    # What each of 2 or 4 devices has of a layer that is cut between them.
    "32b/2": _layers(5120, 13824, 20, 4),
    "72b/2": _layers(8192, 14784, 32, 4),
    "72b/4": _layers(8192, 7424, 16, 2),
}


def shapes(names: str) -> dict[str, tuple[int, int]]:
    """The named layers [N, K] of a comma-separated list; a model's name stands for all of it."""
    found = {}
    for name in names.split(","):
        model, _, layer = (name, "", "") if name in MODELS else name.rpartition(".")
        layers = MODELS.get(model, {})
        chosen = [layer] if layer else list(layers)
        if not layers or any(part not in layers for part in chosen):
            known = ", ".join(MODELS)
            raise ValueError(f"no layer {name!r}; models: {known}; layers: qkv, o, gate_up, down")
        found |= {f"{model}.{part}": layers[part] for part in chosen}
    return found


def rank_of(layer: str, rank: int) -> int:
    """The rank of the stacked adapters of a fused projection, as "qkv" or "7b.qkv"."""
    return rank * {"qkv": 3, "gate_up": 2}.get(layer.rpartition(".")[2], 1)


def parser(description: str | None, *, m: str) -> argparse.ArgumentParser:
    """A command's parser with the options that `products` reads; `m` is the default of --m."""
    command = timing.parser(description)
    command.add_argument("--layers", default="7b", help="models and layers, as 7b.gate_up,14b")
    command.add_argument("--m", default=m, help="numbers of tokens")
    return command


def products(args: argparse.Namespace) -> Iterator[tuple[str, int, int, int]]:
    """Yields the layer, M, N and K of each product that a command measures."""
    for layer, (n, k) in shapes(args.layers).items():
        for m in map(int, args.m.split(",")):
            yield layer, m, n, k


def rotated(count_bytes: float) -> int:
    """Number of weights of this size to rotate through."""
    return max(2, math.ceil(ROTATED_BYTES / count_bytes))


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_weight(key: jax.Array, n: int, k: int) -> reference.Fp4Weight:
    """Random codes under scales of the size that a quantizer finds."""
    codes, scales = jax.random.split(key)
    scales = jax.random.randint(scales, (n, k // 16), 80, 127).astype(jnp.uint8)
    return reference.Fp4Weight(
        packed=jax.random.bits(codes, (n, k // 2), jnp.uint8),
        scales=jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn),
        global_scale=jnp.full(n, 1e4, jnp.float32),
    )


def random_tiles(key: jax.Array, n: int, k: int) -> layout.Fp4Tiles:
    """A `random_weight` in tile order."""
    return layout.to_tiles(random_weight(key, n, k))


def random_operands(
    m: int,
    n: int,
    k: int,
    *,
    make: Callable = random_tiles,
    bits: float = 4.5,
    transposed: bool = False,
) -> list[list]:
    """Tokens [M, K] for each of the weights `make(key, n, k)` to rotate through, and the weights.

    Each number of a weight has some bits. With `transposed` the tokens are [M, N].
    """
    count = rotated(n * k * bits / 8)
    weights = [make(key, n, k) for key in jax.random.split(jax.random.key(0), count)]
    keys, shape = jax.random.split(jax.random.key(1), count), (m, n if transposed else k)
    return [[jax.random.normal(key, shape, jnp.bfloat16) for key in keys], weights]


def random_adapters(count: int, rank: int, n: int, k: int) -> list[tuple[jax.Array, jax.Array]]:
    """A [R, K] and B [N, R'], with all columns that the kernel reads, for each weight.

    XLA would compute one x A^T for calls with the same A.
    """
    keys = jax.random.split(jax.random.key(2), (count, 2))
    return [
        (
            0.02 * jax.random.normal(a, (rank, k), jnp.bfloat16),
            0.02 * jax.random.normal(b, (n, tiling.padded_rank(rank)), jnp.bfloat16),
        )
        for a, b in keys
    ]


def random_xa_partials(m: int, k: int, rank: int) -> jax.Array:
    """Partials [S, M, R'] of x A^T as in a decode step."""
    columns = -(-rank // tiling.PARTIAL_COLUMNS) * tiling.PARTIAL_COLUMNS
    return jax.random.normal(jax.random.key(3), (-(-k // 128), m, columns))
