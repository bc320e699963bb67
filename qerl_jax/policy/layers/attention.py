"""Full attention: a kind of layer that keeps the keys and values of its tokens.

N query heads and K kv heads of width H have the arrays

    qkv_proj [(N + 2 K) H, D], qkv_bias                  bias: Qwen2
    q_norm [H], k_norm [H]                               float32, Qwen3 and Qwen3.5
    o_proj [D, N H]

Qwen3.5's qkv_proj has 2 N + 2 K heads: each query is followed by its gate.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pallas_kernels import decode
from pallas_kernels.attention import Segments, attend_packed
from pallas_kernels.attention.dense import MAX_SCORES
from pallas_kernels.decode import to_cache
from pallas_kernels.device import cuda_capability
from qerl_jax.policy.collectives import divided
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.linear import normed, project, rms_norm
from qerl_jax.policy.layers.part import (
    Angles,
    Array,
    Memory,
    NewTokens,
    Own,
    Stack,
    Weight,
    rows_of,
)


def _qkv_rows(config: ModelConfig) -> tuple[int, ...]:
    """Returns the numbers of outputs of q, k and v."""
    shapes = projection_shapes(config)
    return tuple(shapes[name][0] for name in _QKV.members)


_QKV = Weight("qkv_proj", ("q_proj", "k_proj", "v_proj"), "qkv_proj", by_rows=True, bias="qkv_bias")
_OUT = Weight("o_proj", ("o_proj",), "o_proj", by_rows=False)

MODULE: str = "self_attn"
WEIGHTS: tuple[Weight, ...] = (_QKV, _OUT)
ARRAYS: dict[str, Array] = {
    "q_norm": Array(("q_norm.weight",), is_wide=True, may_be_centered=True),
    "k_norm": Array(("k_norm.weight",), is_wide=True, may_be_centered=True),
    "qkv_bias": Array(("q_proj.bias", "k_proj.bias", "v_proj.bias"), by_rows=True, parts=_qkv_rows),
}
STACKS: tuple[Stack, ...] = ()
REWINDS: bool = True

# Bytes of the float32 scores that exist at the same time, where no kernel computes attention. Up to
# here one block is one product.
_SCORES = 2**29
_CUDNN_DIM = 128  # largest head_dim whose attention cuDNN computes


@struct.dataclass
class KeysValues:
    """Keys and values of the tokens so far, left-aligned; keys after the rotation.

    They may be stored in another dtype than the dtype of the computation, see `decode.to_cache`.
    """

    keys: jax.Array  # [B, K, S, H]; [B, T, K, H] as `mix` returns them
    values: jax.Array  # the same


KEPT: type = KeysValues


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """As in `part.Part`."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": (2 * heads if config.gated_attention else heads, config.embed_dim),
        "k_proj": (kv_heads, config.embed_dim),
        "v_proj": (kv_heads, config.embed_dim),
        "o_proj": (config.embed_dim, heads),
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """As in `part.Part`."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    if config.attention_bias:
        rows = zip(_QKV.members, _qkv_rows(config), strict=True)
        shapes |= {f"{name}.bias": (count,) for name, count in rows}
    return shapes


def shard(config: ModelConfig, shards: int) -> dict[str, Any]:
    """As in `part.Part`."""
    return {
        "num_heads": divided(config.num_heads, shards, "query heads"),
        "num_kv_heads": divided(config.num_kv_heads, shards, "kv heads"),
    }


def memory(config: ModelConfig, itemsize: int, tokens: int, recompute: tuple[str, ...]) -> Memory:
    """As in `part.Part`: with a kernel nothing is temporary beside the MLP.

    Without it scores, weights and their gradients are, in float32 and as the values are.
    """
    # With the log-sum-exp of a query in float32.
    attention = config.num_heads * config.head_dim + 4 * config.num_heads // itemsize
    kept = {"qkv_proj": sum(_qkv_rows(config)), "attention": attention}
    scores = (3 * 4 + itemsize) * min(MAX_SCORES, config.num_heads * tokens**2)
    return Memory(kept | {"o_proj": config.embed_dim}, scores=scores)


def layout_of(segments: Segments, config: ModelConfig) -> Segments:
    """As in `part.Mixer`."""
    return segments


def mix(
    own: Own, x: jax.Array, visible: jax.Array | Segments, angles: Angles
) -> tuple[jax.Array, KeysValues]:
    """As in `part.Mixer`."""
    q, k, v, gate = _project_qkv(own, x, angles)
    with jax.named_scope("attention"):
        if isinstance(visible, Segments):
            attended = attend_packed(q[0], k[0], v[0], visible)[None]
        else:
            attended = attend(q, k, v, visible)
    return _project_out(own, attended, gate), KeysValues(k, v)


def mix_step(
    own: Own, x: jax.Array, kept: KeysValues, lengths: jax.Array, angles: Angles
) -> tuple[jax.Array, KeysValues]:
    """As in `part.Mixer`: the step of a row of length 0 overwrites its first position."""
    keys, values = kept.keys, kept.values
    q, k, v, gate = _project_qkv(own, x, angles)
    with jax.named_scope("attention"):
        rows, heads = jnp.ogrid[: keys.shape[0], : keys.shape[1]]
        position = rows, heads, lengths[:, None]
        keys = keys.at[position].set(to_cache(k[:, 0], keys.dtype), unique_indices=True)
        values = values.at[position].set(to_cache(v[:, 0], values.dtype), unique_indices=True)
        attended = attend_to_cache(q, keys.astype(q.dtype), values.astype(q.dtype), lengths + 1)
    return _project_out(own, attended, gate), KeysValues(keys, values)


def mix_extend(
    own: Own,
    x: jax.Array,
    kept: KeysValues,
    new: NewTokens,
    angles: Angles,
) -> tuple[jax.Array, KeysValues]:
    """As in `part.Mixer`.

    The new tokens are written to the cache first, and then the rows are read: of one layer after
    the other. XLA copies rows that are read first for all layers at once.
    """
    keys, values = kept.keys, kept.values
    q, k, v, gate = _project_qkv(own, x, angles)
    with jax.named_scope("attention"):
        rows, heads = jnp.ogrid[: x.shape[0], : keys.shape[1]]
        rows = rows if new.rows is None else new.rows[:, None]
        index = rows[..., None], heads[..., None], new.positions[:, None, :]
        keys = keys.at[index].set(to_cache(k.swapaxes(1, 2), keys.dtype), mode="drop")
        values = values.at[index].set(to_cache(v.swapaxes(1, 2), values.dtype), mode="drop")
        kept = KeysValues(keys, values)
        if decode.supports_layer(x.dtype, keys):
            # The module uses an API of jax that may change, and is loaded when needed.
            from pallas_kernels.decode import layer

            attended = layer.attend_from(q, keys, values, new.positions, new.rows)
        else:
            mine = rows_of(kept, new)
            attended = attend_from(
                q, mine.keys.astype(q.dtype), mine.values.astype(q.dtype), new.positions
            )
    return _project_out(own, attended, gate), kept


def seen_bytes(
    config: ModelConfig, itemsize: int, sizes: tuple[int, int, int], *, extends: bool
) -> int:
    """As in `part.Mixer`: scores, their weights, and the keys and values that they are made of."""
    rows, tokens, positions = sizes
    if not extends and itemsize == 2 and config.head_dim <= _CUDNN_DIM:
        return 0
    scores = min(_SCORES, 4 * rows * tokens * config.num_heads * positions)
    own = rows * tokens * (sum(_qkv_rows(config)) + config.num_heads * config.head_dim)
    # Whatever the dtype of the cache is: float8 needs the newest device.
    shape = rows, config.num_kv_heads, positions, config.head_dim
    cache = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
    if extends and itemsize == 2 and decode.supports_layer(jnp.dtype(jnp.bfloat16), cache):
        # The queries in another order, and their results in float32.
        return rows * tokens * config.num_heads * 6 * config.head_dim + itemsize * own
    # The keys and values of the rows; and again as they are stored, with half of the bits at most
    # where that differs.
    seen = 3 * rows * positions * config.num_kv_heads * config.head_dim if extends else 0
    return scores * (4 + itemsize) // 4 + itemsize * (own + seen)


def fuses(config: ModelConfig, dtype: jnp.dtype, kept: KeysValues) -> str:
    """As in `part.Mixer`."""
    rotated = config.rotary_dim or config.head_dim
    if config.gated_attention:
        fits = rotated % (2 * decode.ANGLES) == config.head_dim % (2 * decode.ANGLES) == 0
        fits = fits and config.qk_norm and not config.attention_bias
    else:
        fits = rotated == config.head_dim
    if not fits or not decode.supports_layer(dtype, kept.keys):
        return ""
    return "gated_attention" if config.gated_attention else "attention"


def in_cache(kept: KeysValues, positions: int) -> KeysValues:
    """As in `part.Mixer`."""
    padding = ((0, 0), (0, 0), (0, positions - kept.keys.shape[1]), (0, 0))
    return jax.tree.map(lambda x: jnp.pad(x.swapaxes(1, 2), padding), kept)


def row_shapes(config: ModelConfig, positions: int, dtype: jnp.dtype) -> Any:
    """As in `part.Mixer`."""
    shape = jax.ShapeDtypeStruct((config.num_kv_heads, positions, config.head_dim), dtype)
    return KeysValues(shape, shape)  # pyrefly: ignore[bad-argument-type]


def _project_qkv(own: Own, x: jax.Array, angles: Angles) -> tuple:
    """Returns queries, keys and values [B, T, ., H], and the gates of the queries or None."""
    config = own.config
    batch, length, _ = x.shape
    qkv = project(own, _QKV, normed(own, "input_layernorm", x))
    qkv = qkv.reshape(batch, length, -1, config.head_dim)
    heads = config.num_heads * (2 if config.gated_attention else 1)
    q, k, v = jnp.split(qkv, (heads, heads + config.num_kv_heads), axis=2)
    gate = None
    if config.gated_attention:
        q, gate = q[:, :, ::2], q[:, :, 1::2]
    if config.qk_norm:
        q = rms_norm(q, own.layer["q_norm"], config.norm_eps)
        k = rms_norm(k, own.layer["k_norm"], config.norm_eps)
    return rotate(q, angles), rotate(k, angles), v, gate


def _project_out(own: Own, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Returns the output projection of [B, T, N, H], times the sigmoid of the gates if any."""
    if gate is not None:
        attended = (attended * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)
    return project(own, _OUT, attended.reshape(*attended.shape[:2], -1))


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the angle per position of each pair of rotated dimensions, float32 [H/2].

    Llama 3 scales them.
    """
    rotated = config.rotary_dim or config.head_dim
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / rotated
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = np.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= low) & (wavelengths >= high)
    return np.where(between, blended, scaled).astype(np.float32)


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines, float32 [B, T, 1, H/2], of int32 positions [B, T]."""
    angles = positions[..., None, None].astype(jnp.float32) * rotary_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [B, T, N, H] in the planes (i, i + H/2), the convention of Hugging Face.

    Angles of fewer planes rotate the first dimensions alone.
    """
    cos, sin = angles
    if (rotated_dim := 2 * cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :rotated_dim], angles)
        return jnp.concatenate([turned, x[..., rotated_dim:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> jax.Array:
    """Causal attention of queries [B, T, N, H] over right-padded rows, without a gradient on a GPU.

    cuDNN adds up the gradients of the queries in any order; training uses `attend_packed`. Results
    after a row's end are finite but undefined.
    """
    batch, tokens, heads, _ = queries.shape
    if _use_cudnn(queries):
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    # With right padding a causal mask already hides the padding from every valid query.
    if 4 * batch * heads * tokens**2 > _SCORES:
        positions = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
        return attend_from(queries, keys.swapaxes(1, 2), values.swapaxes(1, 2), positions)
    return jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation="xla")


def attend_to_cache(
    queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Attention of one token per row, queries [B, 1, N, H], to the filled part of a cache.

    It consists of two products and a softmax of XLA, which always round alike; cuDNN does not.
    """
    batch, kv_heads, positions, head_dim = keys.shape
    grouped = queries.reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    valid = jnp.arange(positions) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(valid, head_dim**-0.5 * scores, -jnp.inf))
    out = jnp.einsum("bkgs,bksh->bkgh", weights.astype(values.dtype), values)
    return out.reshape(queries.shape)


def attend_from(
    queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """Attention of queries [B, T, N, H] to a cache that holds their keys at int32 positions [B, T].

    A token sees the positions up to its own. Where the scores of all tokens would be over
    `_SCORES` bytes, blocks of tokens follow each other.
    """
    batch, tokens, heads, _ = queries.shape
    block = max(1, _SCORES // (4 * batch * heads * keys.shape[2]))
    if tokens <= block:
        return _attend_block(queries, keys, values, positions)
    blocks = -(-tokens // block)
    size = -(-tokens // blocks)
    padding = ((0, 0), (0, blocks * size - tokens))
    positions = jnp.pad(positions, padding)

    def attend_next(number, x):
        """Replaces the queries of a block by its results; arrays of zeros exist for all layers."""
        part, seen = (
            jax.lax.dynamic_slice_in_dim(y, number * size, size, axis=1) for y in (x, positions)
        )
        out = _attend_block(part, keys, values, seen)
        return jax.lax.dynamic_update_slice_in_dim(x, out, number * size, axis=1)

    queries = jnp.pad(queries, (*padding, (0, 0), (0, 0)))
    return jax.lax.fori_loop(0, blocks, attend_next, queries)[:, :tokens]


def _attend_block(queries, keys, values, positions):
    batch, tokens, _, head_dim = queries.shape
    grouped = queries.reshape(batch, tokens, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[2]) <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(seen, head_dim**-0.5 * scores, -jnp.inf))
    out = jnp.einsum("bkgts,bksh->btkgh", weights.astype(values.dtype), values)
    return out.reshape(queries.shape)


def _use_cudnn(queries: jax.Array) -> bool:
    head_dim = queries.shape[-1]
    return (
        queries.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= _CUDNN_DIM
        and cuda_capability() >= 8.0
    )
