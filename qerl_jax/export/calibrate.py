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

Then each block of 16 weights may be clipped, where clipping brings the outputs closer to the
original ones. The result is a checkpoint like any other, but with other norm scales than the
original. Additive noise on the norms (AQN) of a given sigma therefore has another relative strength
in each channel; relative noise is not affected.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.export.scale_search import round_blocks
from qerl_jax.policy import transformer
from qerl_jax.policy.attention import rotary_angles
from qerl_jax.policy.lora import FUSED, member_bounds
from qerl_jax.policy.quant import BLOCK
from qerl_jax.weights import names
from qerl_jax.weights.checkpoint import Checkpoint
from qerl_jax.weights.load import DTYPES, each_layer, read_layer

_ALPHAS = tuple(i / 20 for i in range(20))
_CLIPS = tuple(1 - i / 20 for i in range(10))
_ROWS = 8  # text windows that run through a layer together
_NORMS = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}


@dataclasses.dataclass(frozen=True)
class ScaledLayer:
    """A layer with its scales folded in.

    Attributes:
        arrays: the layer of the parameter tree, as NumPy arrays in float32.
        errors: relative error (ratio of root mean squares) that rounding causes in each
            projection's outputs on the text.
        rounded_errors: relative error in each projection's outputs when the original weights are
            rounded without scales.
    """

    arrays: dict
    errors: dict[str, float]
    rounded_errors: dict[str, float]


def scaled_layers(
    checkpoint: Checkpoint, tokens: np.ndarray, *, clip: bool = True
) -> Iterator[ScaledLayer]:
    """Folds activation-aware scales into the layers of a checkpoint, which can then be rounded.

    The device holds one layer at a time and the activations of the whole text.

    Args:
        checkpoint: the model, with weights that are not packed.
        tokens: int32 [B, T] token ids, one window of the text in each row.
        clip: whether to clip blocks of weights, too. Without clipping, the layers compute the same
            outputs as the layers of the checkpoint.

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
            batches[i], sums = _run_layer(layer, batch, config=config)
            inputs = sums if inputs is None else jax.tree.map(jnp.add, inputs, sums)
        calibrated = _calibrate(layer, inputs, config=config, clip=clip)
        arrays, errors, rounded_errors = jax.device_get(calibrated)
        yield ScaledLayer(arrays, _by_projection(errors), _by_projection(rounded_errors))


def _by_projection(errors: dict) -> dict[str, float]:
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


@functools.partial(jax.jit, static_argnames=("config", "clip"))
def _calibrate(layer, inputs, *, config, clip):
    """Returns the scaled and clipped layer, and the output errors with and without scales."""
    original, layer, scales = layer, dict(layer), {}
    for name, (size, moment) in inputs.items():
        size = jnp.maximum(size, 1e-6 * size.max())
        if name == "o_proj":
            size = _per_kv_head(size, config)
        scales[name] = _best_scale(layer[name], size, moment)
    for name, norm in _NORMS.items():
        # The norm is stored in bfloat16, so the columns are scaled by norm / rounded norm.
        rounded = (layer[norm] / scales[name]).astype(jnp.bfloat16).astype(jnp.float32)
        scales[name] = jnp.where(rounded == 0, 1.0, layer[norm] / rounded)
        layer[norm] = jnp.where(rounded == 0, layer[norm], rounded)
    for name in scales:
        layer[name] = layer[name] * scales[name]
    values = scales["o_proj"].reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)
    rows = {
        "qkv_proj": _scale_last_rows(values, layer["qkv_proj"]),
        "gate_up_proj": _scale_last_rows(scales["down_proj"], layer["gate_up_proj"]),
    }
    for name, divisors in rows.items():
        layer[name] = layer[name] / divisors[:, None]
    if config.attention_bias:
        layer["qkv_bias"] = layer["qkv_bias"] / rows["qkv_proj"]
    errors, rounded_errors = {}, {}
    for name, (_, moment) in inputs.items():
        s = scales[name]
        if clip:
            layer[name] = _clip(layer[name], moment / (s[:, None] * s))
        restored = _round(layer[name]) / s * rows.get(name, jnp.ones(1))[:, None]
        measure = functools.partial(
            _errors, original[name], moment=moment, name=name, config=config
        )
        errors[name], rounded_errors[name] = measure(restored), measure(_round(original[name]))
    return layer, errors, rounded_errors


def _per_kv_head(size, config):
    """Averages over the query heads that share a key head, and gives each of them the mean."""
    heads = size.reshape(config.num_kv_heads, -1, config.head_dim)
    return jnp.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def _scale_last_rows(scales, weight):
    """Returns scales for all rows of a weight: `scales` for the last rows, 1 for the others."""
    return jnp.concatenate([jnp.ones(len(weight) - len(scales)), scales])


def _errors(weight, rounded, *, moment, name, config):
    """Returns the relative output error of rounding for each member of a fused weight."""
    difference, bounds = rounded - weight, member_bounds(name, config)
    parts = [jnp.split(jnp.sum((x @ moment) * x, axis=1), bounds) for x in (difference, weight)]
    return [jnp.sqrt(a.sum() / jnp.maximum(b.sum(), 1e-30)) for a, b in zip(*parts, strict=True)]


def _best_scale(weight, size, moment):
    """Returns size^alpha [K] for the alpha under which rounding changes the outputs least."""

    def scale(alpha):
        powers = size**alpha
        return powers / jnp.sqrt(powers.max() * powers.min())

    def error(alpha):
        s = scale(alpha)
        difference = _round(weight * s) / s - weight
        return jnp.sum((difference @ moment) * difference)

    alphas = jnp.array(_ALPHAS)
    return scale(alphas[jnp.argmin(jax.lax.map(error, alphas))])


def _clip(weight, moment):
    """Clips each block to the fraction of its largest weight that changes the outputs least."""
    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs, -1, BLOCK)
    square = moment.reshape(inputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    moments = jnp.einsum("iaib->iab", square)
    amax = jnp.abs(blocks).max(axis=-1, keepdims=True)
    global_scale = _global_scale(weight)

    def clip_to(fraction):
        return jnp.clip(blocks, -fraction * amax, fraction * amax)

    def error(fraction):
        difference = _round_blocks(clip_to(fraction), global_scale) - blocks
        return jnp.einsum("nia,iab,nib->ni", difference, moments, difference)

    fractions = jnp.array(_CLIPS)
    best = fractions[jnp.argmin(jax.lax.map(error, fractions), axis=0)]
    return clip_to(best[..., None]).reshape(outputs, inputs)


def _round(weight):
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    return _round_blocks(blocks, _global_scale(weight)).reshape(weight.shape)


def _global_scale(weight):
    return 2688.0 / jnp.maximum(jnp.abs(weight).max(), 1e-30)


def _round_blocks(blocks, global_scale):
    """Rounds blocks [N, K/16, 16] as `quantize_nvfp4` does, but for the rounding of its scales.

    `quantize_nvfp4` computes its scales in bfloat16, and this function in float32.
    """
    amax = jnp.abs(blocks).max(axis=-1)
    scales = (amax / 6.0 * global_scale).astype(jnp.float8_e4m3fn)
    scales = jnp.where(scales == 0, jnp.float8_e4m3fn(0.125), scales)
    return round_blocks(blocks, scales, global_scale)
