"""Gated DeltaNet: a kind of layer that keeps a state in place of keys and values; see `delta`.

Its arrays are

    in_proj [channels + values + 2 heads, D], out_proj [D, values]
    conv [channels, 1, window]
    a_log [heads], dt_bias [heads], gated_norm [Dv]      float32
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import decode
from pallas_kernels.attention import Segments
from qerl_jax.policy.collectives import divided
from qerl_jax.policy.config import ModelConfig, RecurrentConfig
from qerl_jax.policy.layers import delta
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
    with_rows,
)


def _members(config: ModelConfig) -> tuple[int, ...]:
    """Returns the channels of the queries, of the keys and of the values."""
    return _shapes(config).members


# Formats of 4 bits leave the projections in 16, as llm-compressor does.
_IN = Weight(
    "in_proj",
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "qkv_proj",
    by_rows=True,
    packed=False,
    stacked=(("in_proj_qkv", _members),),
)
_OUT = Weight("out_proj", ("out_proj",), "o_proj", by_rows=False, packed=False)

MODULE: str = "linear_attn"
WEIGHTS: tuple[Weight, ...] = (_IN, _OUT)
ARRAYS: dict[str, Array] = {
    "conv": Array(("conv1d.weight",), by_rows=True, parts=_members),
    "a_log": Array(("A_log",), is_wide=True, by_rows=True),
    "dt_bias": Array(("dt_bias",), is_wide=True, by_rows=True),
    "gated_norm": Array(("norm.weight",), is_wide=True),
}
STACKS: tuple[Stack, ...] = ()
REWINDS: bool = False
# Without a kernel XLA packs what the layers keep, but for gate_up_proj, less tightly. Compiled for
# an H200, 4, 8, 16 and 64 layers of Qwen3.5-27B take 2.40, 3.66, 6.16 and 21.19 GB (4,352 tokens,
# gate_up_proj computed again), and 8 of 4B 6.87 GB (8,704 tokens, nothing computed again).
_SPREAD = 1.14


@struct.dataclass
class RowState:
    """What a row keeps of its tokens in a layer, in float32, whatever their number."""

    state: jax.Array  # [B, N, Dk, Dv] states of the delta rule
    window: jax.Array  # [B, channels, W - 1] last inputs of the convolution


KEPT: type = RowState


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """As in `part.Part`."""
    shapes = _shapes(config)
    return {
        "in_proj_qkv": (shapes.channels, config.embed_dim),
        "in_proj_z": (shapes.values, config.embed_dim),
        "in_proj_b": (shapes.value_heads, config.embed_dim),
        "in_proj_a": (shapes.value_heads, config.embed_dim),
        "out_proj": (config.embed_dim, shapes.values),
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """As in `part.Part`."""
    shapes = _shapes(config)
    return {
        "conv1d.weight": (shapes.channels, 1, shapes.window),
        "A_log": (shapes.value_heads,),
        "dt_bias": (shapes.value_heads,),
        "norm.weight": (shapes.value_dim,),
    }


def shard(config: ModelConfig, shards: int) -> dict[str, Any]:
    """As in `part.Part`: key heads with their value heads, states and channels."""
    shapes = _shapes(config)
    key_heads = divided(shapes.key_heads, shards, "key heads of the recurrent layers")
    value_heads = shapes.value_heads // shards
    return {"recurrent": dataclasses.replace(shapes, key_heads=key_heads, value_heads=value_heads)}


def memory(config: ModelConfig, buffer: PlannedBuffer) -> Memory:
    """As in `part.Part`.

    The backward pass has the arrays of the chunks: what the loop reads and returns, and the two
    states in front of each chunk. With the kernel, queries, keys and their gradients are there as
    well: compiled for an H200, 4 and 12 layers of Qwen3.5-27B take 3.54 and 8.22 GB (4,352 tokens),
    of Qwen3.6-35B-A3B 3.90 and 8.12 GB (8,448 tokens, nothing computed again). What is computed
    again of the MLP is there, too: 4 and 8 layers of 27B take 2.89 and 4.01 GB then. Without a
    kernel XLA has the arrays before the gradients of adapters of experts are there. A prefill has
    what the loop reads, and the products before it.
    """
    shapes, chunk = _shapes(config), delta.CHUNK
    has_kernel = delta.has_kernel(jnp.bfloat16, shapes.key_dim, shapes.value_dim, buffer.hopper)
    values, keys = (
        (shapes.key_dim + shapes.value_dim, 8) if has_kernel else (3 * shapes.value_dim, 2)
    )
    heads = 2 * chunk + values + 2 * shapes.key_dim * shapes.value_dim // chunk
    width = shapes.value_heads * heads + keys * shapes.key_heads * shapes.key_dim + shapes.channels
    backward = 4 * buffer.tokens * width
    if has_kernel and "gate_up_proj" in buffer.recompute:
        backward += buffer.itemsize * buffer.tokens * (2 * config.mlp_dim + 4 * config.embed_dim)
    read = shapes.values * 2 + shapes.value_heads * (3 * chunk + 4 * shapes.key_dim)
    return Memory(
        kept={
            "qkv_proj": shapes.channels + shapes.values + 2 * shapes.value_heads,
            "attention": shapes.values,
            "o_proj": config.embed_dim,
        },
        backward=backward,
        adapter=0 if has_kernel else 4 * buffer.tokens * width,
        prefill=4 * read + buffer.itemsize * 2 * shapes.channels,
        spread=1.01 if has_kernel else _SPREAD,
    )


def layout_of(segments: Segments, positions: jax.Array, config: ModelConfig) -> delta.Layout:
    """As in `part.Mixer`."""
    return delta.layout_of(segments, _shapes(config))


def mix(
    own: Own, x: jax.Array, visible: jax.Array | delta.Layout, angles: Angles
) -> tuple[jax.Array, RowState]:
    """As in `part.Mixer`."""
    mixed, kept = _recur(own, x, visible, None)
    return project(own, _OUT, mixed), kept


def mix_step(
    own: Own, x: jax.Array, kept: RowState, lengths: jax.Array, angles: Angles
) -> tuple[jax.Array, RowState]:
    """As in `part.Mixer`: the state and the window of a row of length 0 stay as they are."""
    mixed, z, gates = _project_in(own, x)
    with jax.named_scope("recurrence"):
        live = (lengths > 0)[:, None]
        mixed, moved = delta.convolve_step(mixed[:, 0], kept.window, own.layer["conv"])
        window = jnp.where(live[..., None], moved, kept.window)
        gates = jax.tree.map(lambda gate: jnp.where(live, gate[:, 0], 0.0), gates)
        inputs = delta.split_heads(mixed, _shapes(own.config))
        out, state = delta.delta_step(*inputs, gates, kept.state)
    out = _gated_norm(own, _rounded(out, x.dtype)[:, None], z)
    return project(own, _OUT, out), RowState(state, window)


def mix_extend(
    own: Own,
    x: jax.Array,
    kept: RowState,
    new: NewTokens,
    angles: Angles,
) -> tuple[jax.Array, RowState]:
    """As in `part.Mixer`: the state has the first token of a row already."""
    first, _ = _recur(own, x[:, :1], jnp.ones_like(new.last), None)
    others, mine = _recur(own, x[:, 1:], new.last, rows_of(kept, new))
    others, kept = jax.lax.optimization_barrier((others, with_rows(kept, mine, new)))
    return project(own, _OUT, jnp.concatenate([first, others], axis=1)), kept


def seen_bytes(
    config: ModelConfig,
    buffer: PlannedBuffer,
    sizes: tuple[int, int, int],
    cache: tuple[int, jnp.dtype] | None,
) -> int:
    """As in `part.Mixer`: the states of the rows."""
    shapes = _shapes(config)
    return 4 * sizes[0] * shapes.value_heads * shapes.key_dim * shapes.value_dim


def fuses(config: ModelConfig, dtype: jnp.dtype, kept: RowState) -> str:
    """As in `part.Mixer`."""
    return "recurrence" if decode.supports_state(dtype, kept.state) else ""


def in_cache(kept: RowState, positions: int) -> RowState:
    """As in `part.Mixer`."""
    return kept


def row_shapes(config: ModelConfig, positions: int, dtype: jnp.dtype) -> Any:
    """As in `part.Mixer`: in float32, whatever the dtype of keys."""
    shapes = _shapes(config)
    state = (shapes.value_heads, shapes.key_dim, shapes.value_dim)
    window = (shapes.channels, shapes.window - 1)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (state, window))
    return RowState(*arrays)  # pyrefly: ignore[bad-argument-type]


def _shapes(config: ModelConfig) -> RecurrentConfig:
    assert config.recurrent is not None
    return config.recurrent


def _project_in(own: Own, x: jax.Array) -> tuple[jax.Array, jax.Array, delta.Gates]:
    """Returns the inputs of the convolution, the output gate and the gates of the rule."""
    shapes = _shapes(own.config)
    parts = project(own, _IN, normed(own, "input_layernorm", x))
    ends = shapes.channels, shapes.channels + shapes.values
    mixed, z, ba = jnp.split(parts, ends, axis=-1)
    return mixed, z, delta.gates(ba, own.layer)


def _recur(
    own: Own, x: jax.Array, visible: jax.Array | delta.Layout, before: RowState | None
) -> tuple[jax.Array, RowState]:
    """Returns [B, T, values] over rows or a packed buffer, and what rows keep.

    `visible` are lengths or a layout; of a buffer what rows keep means nothing. `before` is what
    they had kept before; None for zeros.
    """
    shapes = _shapes(own.config)
    layout = visible if isinstance(visible, delta.Layout) else None
    state, window = (None, None) if before is None else (before.state, before.window)
    mixed, z, gates = _project_in(own, x)
    with jax.named_scope("recurrence"):
        if not isinstance(visible, delta.Layout):
            # Tokens after a row's end leave its state as it is.
            is_token = (jnp.arange(x.shape[1]) < visible[:, None])[..., None]
            gates = jax.tree.map(lambda gate: jnp.where(is_token, gate, 0.0), gates)
        convolved = delta.convolve(mixed, own.layer["conv"], layout, window)
        inputs = delta.split_heads(convolved, shapes)
        out, state = delta.delta_rule(*inputs, gates, layout, state, dtype=x.dtype)
        out = checkpoint_name(_rounded(out, x.dtype), "attention")
        lengths = jnp.full(1, x.shape[1]) if isinstance(visible, delta.Layout) else visible
        window = delta.last_window(mixed, lengths, shapes.window, window).astype(jnp.float32)
        if layout is None:
            # XLA computes the window at the end of the program, and keeps its inputs of all layers.
            out, state, window = jax.lax.optimization_barrier((out, state, window))
    return _gated_norm(own, out, z), RowState(state, window)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x in a narrower dtype, rounded in every program.

    XLA leaves out a conversion to bfloat16 whose result becomes float32 again, in the program of a
    decode step and not in that of rows: rollout and trainer then differ by this rounding.
    """
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _gated_norm(own: Own, x: jax.Array, gate: jax.Array) -> jax.Array:
    """Normalizes each head of x [B, T, Kh, R, Dv] and multiplies it by SiLU of the gate."""
    out = rms_norm(x, own.layer["gated_norm"], own.config.norm_eps)
    out = out.astype(jnp.float32).reshape(gate.shape)
    return (out * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
