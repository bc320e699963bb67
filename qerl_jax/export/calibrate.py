"""Activation-aware scaling before a weight is rounded to NVFP4 (AWQ).

AWQ (https://arxiv.org/abs/2306.00978) multiplies the columns of a weight by s and divides the
parameters that produce its inputs by s. The model computes the same, but columns with large inputs
keep more of their precision. Here s = mean|x|^alpha for each input channel, and alpha is the value
among 0, 1/20 ... 19/20 that changes the outputs of the projection least. The parameters that are
divided are, for each projection:

    q, k, v     the scale of input_layernorm
    o           the rows of v (the query heads of one key head share their scales)
    gate, up    the scale of post_attention_layernorm
    down        the rows of up

Then each block of 16 weights gets the FP8 scale that brings its outputs closest to the original
ones (`scale_search`). The result is a checkpoint like any other, but with other norm scales than
the original. Additive noise on the norms (AQN) of a given sigma therefore has another relative
strength in each channel; relative noise is not affected.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.export import scale_search
from qerl_jax.policy import transformer
from qerl_jax.policy.attention import rotary_angles
from qerl_jax.policy.lora import FUSED, member_bounds
from qerl_jax.policy.quant import BLOCK
from qerl_jax.weights import names
from qerl_jax.weights.checkpoint import Checkpoint
from qerl_jax.weights.load import DTYPES, each_layer, read_layer

_ALPHAS = tuple(i / 20 for i in range(20))
_ROWS = 8  # text windows that run through a layer together
_NORMS = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}


@dataclasses.dataclass(frozen=True)
class ScaledLayer:
    """A layer with its scales folded in.

    Attributes:
        arrays: the layer of the parameter tree, as NumPy arrays in float32. It computes the same
            outputs as the layer of the checkpoint.
        block_scales: FP8 scales [N, K/16] of each fused projection, to round it with.
        errors: relative error (ratio of root mean squares) that rounding causes in each
            projection's outputs on the text.
        rounded_errors: relative error in each projection's outputs when the original weights are
            rounded without scales.
    """

    arrays: dict
    block_scales: dict
    errors: dict[str, float]
    rounded_errors: dict[str, float]


def scaled_layers(checkpoint: Checkpoint, tokens: np.ndarray) -> Iterator[ScaledLayer]:
    """Folds activation-aware scales into the layers of a checkpoint, which can then be rounded.

    The device holds one layer at a time and the activations of the whole text.

    Args:
        checkpoint: the model, with weights that are not packed.
        tokens: int32 [B, T] token ids, one window of the text in each row.

    Yields:
        The layers in order.
    """
    config = checkpoint.config
    embedding = checkpoint.read(names.EMBED, DTYPES["bfloat16"])
    batches = [
        jnp.asarray(embedding[tokens[i : i + _ROWS]], jnp.float32)
        for i in range(0, len(tokens), _ROWS)
    ]
    del embedding
    read = functools.partial(read_layer, checkpoint, dtype=DTYPES["bfloat16"])
    for dense in each_layer(read, config.num_layers, label="calibrating"):
        layer = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), dense)
        inputs = None
        for i, batch in enumerate(batches):
            batches[i], found = _run_layer(layer, batch, config=config)
            inputs = found if inputs is None else jax.tree.map(jnp.add, inputs, found)
        found = _calibrate(layer, inputs, config=config)
        arrays, block_scales, errors, rounded_errors = jax.device_get(found)
        yield ScaledLayer(arrays, block_scales, _named(errors), _named(rounded_errors))


def _named(errors: dict) -> dict[str, float]:
    return {
        member: float(error)
        for fused, members in FUSED.items()
        for member, error in zip(members, errors[fused], strict=True)
    }


@functools.partial(jax.jit, static_argnames="config")
def _run_layer(layer, x, *, config):
    """Returns the layer's output, and sums over the rows x of each fused projection's input.

    The sums are |x| [K] and x x^T [K, K], by the name of the projection.
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    lengths = jnp.full(x.shape[:1], x.shape[1], jnp.int32)
    angles = rotary_angles(positions, config)
    y, inputs = transformer.layer_with_inputs(layer, x, lengths, angles, config=config)
    flat = {name: value.reshape(-1, value.shape[-1]) for name, value in inputs.items()}
    return y, {name: (jnp.abs(x).sum(axis=0), x.T @ x) for name, x in flat.items()}


@functools.partial(jax.jit, static_argnames="config")
def _calibrate(layer, inputs, *, config):
    """Returns the scaled layer, the scales of its blocks, and the output errors with and without.

    The errors are those of the scaled layer with these block scales, and of the original layer.
    """
    original, layer, scales = layer, dict(layer), {}
    for name, (size, moment) in inputs.items():
        size = jnp.maximum(size, 1e-6 * size.max())
        if name == "o_proj":
            size = _per_kv_head(size, config)
        scales[name] = _best_scale(layer[name], size, moment, member_bounds(name, config))
    for name, norm in _NORMS.items():
        # The norm is stored in bfloat16, so the columns are scaled by norm / rounded norm.
        rounded = (layer[norm] / scales[name]).astype(jnp.bfloat16).astype(jnp.float32)
        scales[name] = jnp.where(rounded == 0, 1.0, layer[norm] / rounded)
        layer[norm] = jnp.where(rounded == 0, layer[norm], rounded)
    for name in scales:
        layer[name] = layer[name] * scales[name]
    values = scales["o_proj"].reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)
    rows = {
        "qkv_proj": _last(values, layer["qkv_proj"]),
        "gate_up_proj": _last(scales["down_proj"], layer["gate_up_proj"]),
    }
    for name, divisors in rows.items():
        layer[name] = layer[name] / divisors[:, None]
    if config.attention_bias:
        layer["qkv_bias"] = layer["qkv_bias"] / rows["qkv_proj"]
    block_scales, errors, rounded_errors = {}, {}, {}
    for name, (_, moment) in inputs.items():
        s, bounds = scales[name], member_bounds(name, config)
        block_scales[name] = _block_scales(layer[name], moment / (s[:, None] * s), bounds)
        rounded = _round(layer[name], bounds, block_scales[name])
        undone = rounded / s * rows.get(name, jnp.ones(1))[:, None]
        measure = functools.partial(_errors, original[name], moment=moment, bounds=bounds)
        errors[name], rounded_errors[name] = (
            measure(undone),
            measure(_round(original[name], bounds)),
        )
    return layer, block_scales, errors, rounded_errors


def _per_kv_head(size, config):
    """Averages over the query heads that share a key head, and gives each of them the mean."""
    heads = size.reshape(config.num_kv_heads, -1, config.head_dim)
    return jnp.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def _last(scales, weight):
    """Returns scales for all rows of a weight: `scales` for the last rows, 1 for the others."""
    return jnp.concatenate([jnp.ones(len(weight) - len(scales)), scales])


def _errors(weight, rounded, *, moment, bounds):
    """Returns the relative output error of rounding for each member of a fused weight."""
    changed = rounded - weight
    parts = [jnp.split(jnp.sum((x @ moment) * x, axis=1), bounds) for x in (changed, weight)]
    return [jnp.sqrt(a.sum() / jnp.maximum(b.sum(), 1e-30)) for a, b in zip(*parts, strict=True)]


def _best_scale(weight, size, moment, bounds):
    """Returns size^alpha [K] for the alpha under which rounding changes the outputs least."""

    def scale(alpha):
        powers = size**alpha
        return powers / jnp.sqrt(powers.max() * powers.min())

    def error(alpha):
        s = scale(alpha)
        changed = _round(weight * s, bounds) / s - weight
        return jnp.sum((changed @ moment) * changed)

    alphas = jnp.array(_ALPHAS)
    return scale(alphas[jnp.argmin(jax.lax.map(error, alphas))])


def _block_scales(weight, moment, bounds):
    """Returns the scales of blocks [N, K/16] that change the outputs least."""
    count = weight.shape[1] // BLOCK
    moments = jnp.einsum("iaib->iab", moment.reshape(count, BLOCK, count, BLOCK))
    divisor = scale_search.global_scale(jnp.split(weight, bounds))
    return scale_search.best_scales(weight.reshape(len(weight), count, BLOCK), divisor, moments)


def _round(weight, bounds, scales=None):
    """Rounds a fused weight [N, K] with these scales of blocks, or as `quantize_nvfp4` does."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    divisor = scale_search.global_scale(jnp.split(weight, bounds))
    if scales is None:
        scales = scale_search.default_scales(blocks, divisor)
    return scale_search.round_blocks(blocks, scales, divisor).reshape(weight.shape)
