"""Full attention: a kind of layer that keeps the keys and values of its tokens.

N query heads and K kv heads of width H have the arrays

    qkv_proj [(N + 2 K) H, D], qkv_bias                  bias: Qwen2
    q_norm [H], k_norm [H]                               float32, Qwen3 and Qwen3.5
    o_proj [D, N H], o_bias [D]                          bias: gpt-oss
    sinks [N]                                            gpt-oss

A sink is a score without a value, with which the softmax of a query head begins. Qwen3.5's
qkv_proj has 2 N + 2 K heads: each query is followed by its gate.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pallas_kernels import decode
from pallas_kernels.attention import (
    PART_BITS,
    Segments,
    attend_packed,
    segments,
    supports_attention,
)
from pallas_kernels.attention.dense import MAX_SCORES, softmax
from pallas_kernels.decode import to_cache
from pallas_kernels.device import cuda_capability
from qerl_jax.policy.collectives import divided
from qerl_jax.policy.config import ModelConfig, YarnScaling
from qerl_jax.policy.layers.linear import normed, project, rms_norm
from qerl_jax.policy.layers.part import (
    Angles,
    Array,
    Memory,
    NewTokens,
    Own,
    PlannedBuffer,
    Stack,
    Weight,
    rows_of,
)


def _qkv_rows(config: ModelConfig) -> tuple[int, ...]:
    """Returns the numbers of outputs of q, k and v."""
    shapes = projection_shapes(config)
    return tuple(shapes[name][0] for name in _QKV.members)


_QKV = Weight("qkv_proj", ("q_proj", "k_proj", "v_proj"), "qkv_proj", by_rows=True, bias="qkv_bias")
_OUT = Weight("o_proj", ("o_proj",), "o_proj", by_rows=False, bias="o_bias")

MODULE: str = "self_attn"
WEIGHTS: tuple[Weight, ...] = (_QKV, _OUT)
ARRAYS: dict[str, Array] = {
    "q_norm": Array(("q_norm.weight",), is_wide=True, may_be_centered=True),
    "k_norm": Array(("k_norm.weight",), is_wide=True, may_be_centered=True),
    "qkv_bias": Array(("q_proj.bias", "k_proj.bias", "v_proj.bias"), by_rows=True, parts=_qkv_rows),
    "o_bias": Array(("o_proj.bias",)),
    "sinks": Array(("sinks",), by_rows=True),
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
    if config.other_biases:
        shapes["o_proj.bias"] = (config.embed_dim,)
    if config.sinks:
        shapes["sinks"] = (config.num_heads,)
    return shapes


def shard(config: ModelConfig, shards: int) -> dict[str, Any]:
    """As in `part.Part`."""
    return {
        "num_heads": divided(config.num_heads, shards, "query heads"),
        "num_kv_heads": divided(config.num_kv_heads, shards, "kv heads"),
    }


def memory(config: ModelConfig, buffer: PlannedBuffer) -> Memory:
    """As in `part.Part`: with a kernel nothing is temporary next to the MLP.

    Without it scores, weights and their gradients are, in float32 and as the values are.
    """
    # With the log-sum-exp of a query in float32.
    attention = config.num_heads * config.head_dim + 4 * config.num_heads // buffer.itemsize
    kept = {"qkv_proj": sum(_qkv_rows(config)), "attention": attention}
    scores = (3 * 4 + buffer.itemsize) * min(MAX_SCORES, config.num_heads * buffer.tokens**2)
    return Memory(kept | {"o_proj": config.embed_dim}, scores=scores)


def layout_of(segments: Segments, positions: jax.Array, config: ModelConfig) -> Segments:
    """As in `part.Mixer`."""
    return segments._replace(positions=positions) if config.window else segments


def mix(
    own: Own, x: jax.Array, visible: jax.Array | Segments, angles: Angles
) -> tuple[jax.Array, KeysValues]:
    """As in `part.Mixer`."""
    q, k, v, gate = _project_qkv(own, x, angles)
    with jax.named_scope("attention"):
        if isinstance(visible, Segments):
            attended = attend_packed(q[0], k[0], v[0], visible, **_limits(own))[None]
        else:
            attended = attend(q, k, v, visible, **_limits(own))
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
        attended = attend_to_cache(
            q, keys.astype(q.dtype), values.astype(q.dtype), lengths + 1, **_limits(own)
        )
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

            place = new.positions, new.rows
            attended = layer.attend_from(q, keys, values, *place, **_limits(own))
        else:
            mine = rows_of(kept, new)
            seen = mine.keys.astype(q.dtype), mine.values.astype(q.dtype), new.positions
            attended = attend_from(q, *seen, **_limits(own))
    return _project_out(own, attended, gate), kept


def _limits(own: Own) -> dict[str, Any]:
    """Returns what changes attention of the layer: its sinks and its window, where it has them."""
    limits: dict[str, Any] = {"sinks": own.layer["sinks"]} if own.config.sinks else {}
    return limits | ({"window": own.config.window} if own.config.window else {})


def seen_bytes(
    config: ModelConfig,
    buffer: PlannedBuffer,
    sizes: tuple[int, int, int],
    cache: tuple[int, jnp.dtype] | None,
) -> int:
    """As in `part.Mixer`: scores, their weights, and the keys and values that they are made of."""
    (rows, tokens, positions), itemsize = sizes, buffer.itemsize
    plain = not config.sinks and not config.window  # cuDNN has neither.
    if cache is None and itemsize == 2 and config.head_dim <= _CUDNN_DIM and plain:
        return 0
    scores = min(_SCORES, 4 * rows * tokens * config.num_heads * positions)
    own = rows * tokens * (sum(_qkv_rows(config)) + config.num_heads * config.head_dim)
    seen = 0
    if cache is not None:
        all_rows, dtype = cache
        shape = all_rows, config.num_kv_heads, positions, config.head_dim
        keys = jax.ShapeDtypeStruct(shape, dtype)
        if decode.supports_layer(buffer.dtype, keys, buffer.capability):
            # The queries in another order, and their results in float32.
            return rows * tokens * config.num_heads * 6 * config.head_dim + itemsize * own
        # The keys and values of the rows; and again as they are stored, with half of the bits at
        # most where that differs.
        seen = 3 * rows * positions * config.num_kv_heads * config.head_dim
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

    Llama 3 and YaRN scale them.
    """
    rotated = config.rotary_dim or config.head_dim
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / rotated
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(frequencies, scaling, config.rope_theta)
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


def _yarn_frequencies(frequencies: np.ndarray, scaling: YarnScaling, theta: float) -> np.ndarray:
    """Divides the frequencies with few rotations in the original context, as transformers does."""
    rotated = 2 * len(frequencies)

    def dimension(rotations: float) -> float:
        wavelengths = scaling.original_max_position / (rotations * 2 * math.pi)
        return rotated * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high += 0.001 if low == high else 0
    divided = np.clip((np.arange(len(frequencies), dtype=np.float32) - low) / (high - low), 0, 1)
    scaled = frequencies / scaling.factor * divided + frequencies * (1 - divided)
    return scaled.astype(np.float32)


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines, float32 [B, T, 1, H/2], of int32 positions [B, T].

    YaRN multiplies them by a factor, which so is squared in the scores.
    """
    angles = positions[..., None, None].astype(jnp.float32) * rotary_frequencies(config)
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    if isinstance(config.rope_scaling, YarnScaling):
        factor = config.rope_scaling.attention_factor
        return factor * cosines, factor * sines
    return cosines, sines


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


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """Causal attention of queries [B, T, N, H] over right-padded rows, without a gradient on a GPU.

    cuDNN adds up the gradients of the queries in any order; training uses `attend_packed`. Results
    after a row's end are finite but undefined. Sinks [N] and a window are as in `attend_packed`;
    with them the kernel of packed buffers computes it, or where that does not run XLA, in blocks.
    """
    batch, tokens, heads, head_dim = queries.shape
    limited = sinks is not None or window > 0
    if _use_cudnn(queries) and not limited:
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
    one_buffer = jax.ShapeDtypeStruct((batch * tokens, heads, head_dim), queries.dtype)
    if limited and supports_attention(one_buffer):
        return _attend_rows(queries, keys, values, sinks=sinks, window=window)
    if limited or 4 * batch * heads * tokens**2 > _SCORES:
        positions = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
        cache = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        return attend_from(queries, *cache, positions, sinks=sinks, window=window)
    return jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation="xla")


def _attend_rows(queries, keys, values, *, sinks, window):
    """Causal attention of rows [B, T, N, H], each of which is a group of a packed buffer."""
    batch, tokens = queries.shape[:2]
    layout = segments(np.repeat(np.arange(batch, dtype=np.int32) << PART_BITS, tokens))
    if window:
        layout = layout._replace(positions=np.tile(np.arange(tokens, dtype=np.int32), batch))
    layout = jax.tree.map(jnp.asarray, layout)
    q, k, v = (x.reshape(batch * tokens, *x.shape[2:]) for x in (queries, keys, values))
    attended = attend_packed(q, k, v, layout, sinks=sinks, window=window)
    return attended.reshape(queries.shape)


def attend_to_cache(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """Attention of one token per row, queries [B, 1, N, H], to the filled part of a cache.

    It consists of two products and a softmax of XLA, which always round alike; cuDNN does not.
    """
    batch, kv_heads, positions, head_dim = keys.shape
    grouped = queries.reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    valid = jnp.arange(positions) < lengths[:, None, None, None]
    if window:
        valid &= jnp.arange(positions) >= lengths[:, None, None, None] - window
    of_heads = None if sinks is None else sinks.reshape(kv_heads, -1)
    weights = softmax(jnp.where(valid, head_dim**-0.5 * scores, -jnp.inf), of_heads)
    out = jnp.einsum("bkgs,bksh->bkgh", weights.astype(values.dtype), values)
    return out.reshape(queries.shape)


def attend_from(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """Attention of queries [B, T, N, H] to a cache that holds their keys at int32 positions [B, T].

    A token sees the positions up to its own, of which a window has the last ones. Where the scores
    of all tokens would be over `_SCORES` bytes, blocks of tokens follow each other.
    """
    batch, tokens, heads, _ = queries.shape
    block = max(1, _SCORES // (4 * batch * heads * keys.shape[2]))
    if tokens <= block:
        return _attend_block(queries, keys, values, positions, (sinks, window))
    blocks = -(-tokens // block)
    size = -(-tokens // blocks)
    padding = ((0, 0), (0, blocks * size - tokens))
    positions = jnp.pad(positions, padding)

    def attend_next(number, x):
        """Replaces the queries of a block by its results; arrays of zeros exist for all layers."""
        part, seen = (
            jax.lax.dynamic_slice_in_dim(y, number * size, size, axis=1) for y in (x, positions)
        )
        out = _attend_block(part, keys, values, seen, (sinks, window))
        return jax.lax.dynamic_update_slice_in_dim(x, out, number * size, axis=1)

    queries = jnp.pad(queries, (*padding, (0, 0), (0, 0)))
    return jax.lax.fori_loop(0, blocks, attend_next, queries)[:, :tokens]


def _attend_block(queries, keys, values, positions, limits):
    sinks, window = limits
    batch, tokens, _, head_dim = queries.shape
    grouped = queries.reshape(batch, tokens, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[2]) <= positions[:, None, None, :, None]
    if window:
        seen &= jnp.arange(keys.shape[2]) > positions[:, None, None, :, None] - window
    of_heads = None if sinks is None else sinks.reshape(keys.shape[1], -1, 1)
    weights = softmax(jnp.where(seen, head_dim**-0.5 * scores, -jnp.inf), of_heads)
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
