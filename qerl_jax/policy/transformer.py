"""The policy: Qwen2, Qwen3, Qwen3.5 and Llama as pure functions of a parameter tree.

Parameters are plain dicts and lists (D embed, F mlp, N query heads, K kv heads, H head dim):

    embed_tokens [V, D]; lm_head [V, D], absent when tied; norm [D];
    layers: a list of
        input_layernorm [D], post_attention_layernorm [D]    float32
        qkv_proj [(N + 2 K) H, D], qkv_bias                  bias: Qwen2
        q_norm [H], k_norm [H]                               float32, Qwen3 and Qwen3.5
        o_proj [D, N H], gate_up_proj [2 F, D], down_proj [D, F]

    Qwen3.5's qkv_proj has 2 N + 2 K heads: each query is followed by its gate. Its recurrent layers
    (see `recurrent`) have in place of the projections of attention

        in_proj [channels + values + 2 heads, D], out_proj [D, values]
        conv [channels, 1, window]
        a_log [heads], dt_bias [heads], gated_norm [Dv]      float32

The projections and `lm_head` are dense arrays or `QuantTensor`s. The dtype of `embed_tokens` is the
dtype of the computation; norms, rotations and logits are float32.

Where weights are cut between devices, the functions run on each of them, see `tensor_parallel`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import decode, device, fp4_matmul
from pallas_kernels.attention import Segments, attend_packed
from pallas_kernels.decode import to_cache
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import recurrent
from qerl_jax.policy.attention import (
    KVCache,
    attend,
    attend_from,
    attend_to_cache,
    rotary_angles,
    rotate,
)
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.linear import linear
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor, dequantize, kernel_weight
from qerl_jax.policy.tensor_parallel import (
    BY_COLUMNS,
    TENSOR,
    embed,
    enter_shards,
    leave_shards,
    whole_vocabulary,
)

# The products of a layer whose results the backward pass reads, in the order of a layer. In a
# recurrent layer in_proj, the delta rule and out_proj have the first three names.
PRODUCTS = ("qkv_proj", "attention", "o_proj", "gate_up_proj")
ALIASES = {"in_proj": "qkv_proj", "out_proj": "o_proj"}


def forward(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
) -> jax.Array:
    """Computes the logits at every position.

    Args:
        params: the frozen policy.
        lora: the policy's adapter, or None.
        tokens: int32 [B, T] left-aligned rows, padded on the right with any tokens.
        lengths: int32 [B], number of tokens in each row.
        config: the architecture.

    Returns:
        float32 [B, T, V] logits, which are undefined after a row's end.
    """
    hidden = hidden_states(params, lora, tokens, lengths, config=config)
    return whole_vocabulary(logits(params, hidden), config)


def hidden_states(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
) -> jax.Array:
    """Computes the last layer's output after the final norm.

    Args:
        params: the frozen policy.
        lora: the policy's adapter, or None.
        tokens: int32 [B, T] rows, as in `forward`.
        lengths: int32 [B], number of tokens in each row.
        config: the architecture.

    Returns:
        [B, T, D] hidden states, which are undefined after a row's end.
    """
    x, _ = _run_layers(params, lora, tokens, lengths, config=config)
    return _rms_norm(enter_shards(x, config), params["norm"], config.norm_eps)


def packed_hidden_states(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    positions: jax.Array,
    segments: Segments,
    *,
    config: ModelConfig,
    recompute: tuple[str, ...] = (),
) -> jax.Array:
    """Computes the last layer's output after the final norm for a packed buffer.

    Args:
        params: the frozen policy.
        lora: the policy's adapter, or None.
        tokens: int32 [N] token ids.
        positions: int32 [N] positions for the rotary embedding.
        segments: which positions see each other.
        config: the architecture.
        recompute: names from `PRODUCTS`. The backward pass keeps the input of each layer and the
            results of its products, except these, which it computes again. Everything between the
            products (norms, rotations, activations) is always computed again.

    Returns:
        [N, D] hidden states.
    """
    keep = [name for name in PRODUCTS if name not in recompute]
    angles = rotary_angles(positions[None], config)

    # The adapter is fused inside of the checkpoint, so that the backward pass fuses it again and
    # nothing keeps that of all layers, which takes 1.4 GB with 72B.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*keep))
    def layer_fn(layer, lora, x):
        adapters = lora_lib.fuse(lora, config, x.dtype)[0]
        visible = segments if layout is None or "in_proj" not in layer else layout
        return _layer(layer, adapters, x, visible, angles, config=config)[0]

    layout = recurrent.layout_of(segments, config.recurrent) if config.recurrent else None
    x = embed(params["embed_tokens"], tokens[None], config)
    for number, layer in enumerate(params["layers"]):
        lora_of_layer = lora and Lora(layers=[lora.layers[number]], scale=lora.scale)
        x = layer_fn(layer, lora_of_layer, x)
    return _rms_norm(enter_shards(x[0], config), params["norm"], config.norm_eps)


@jax.named_scope("head")
def logits(params: dict, hidden: jax.Array) -> jax.Array:
    """Returns the float32 logits [..., V] of final hidden states [..., D].

    Where weights are cut, they are those of the vocabulary of this device.
    """
    head = params.get("lm_head", params["embed_tokens"])
    if isinstance(head, QuantTensor):
        return fp4_matmul.fp4_matmul(hidden, kernel_weight(head), dtype=jnp.float32)
    return _float32_product(hidden, head)


@jax.custom_vjp
def _float32_product(x, weight):
    """X [..., K] times a dense weight [N, K] in float32, whose gradient is rounded to x's dtype.

    Left to JAX, the products of the backward pass are in float32, with a float32 copy of the head:
    twice the time of a 1.5B model's head, and 10 % of its update.
    """
    return fp4_matmul.dot(x, weight, jnp.float32)


def _float32_product_fwd(x, weight):
    return _float32_product(x, weight), (x, weight)


def _float32_product_bwd(residuals, gradient):
    x, weight = residuals
    gradient = gradient.astype(x.dtype)
    rows = gradient.reshape(-1, gradient.shape[-1])
    dweight = fp4_matmul.dot(rows.T, x.reshape(-1, x.shape[-1]).T, jnp.float32)
    return fp4_matmul.dot(gradient, weight.T), dweight.astype(weight.dtype)


_float32_product.defvjp(_float32_product_fwd, _float32_product_bwd)


def prefill(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    cache_positions: int,
) -> tuple[jax.Array, KVCache]:
    """Runs the policy on prompts and keeps their keys and values.

    Args:
        params: the frozen policy.
        lora: the policy's adapter, or None.
        tokens: int32 [B, T] left-aligned prompts.
        lengths: int32 [B], number of tokens in each prompt, at least 1.
        config: the architecture.
        cache_positions: S >= T, number of positions of the cache.

    Returns:
        float32 logits [B, V] after each prompt's last token, and the cache.
    """
    x, (keys, values) = _run_layers(params, lora, tokens, lengths, config=config)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    padding = ((0, 0), (0, 0), (0, cache_positions - tokens.shape[1]), (0, 0))

    def padded(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            array if number in config.recurrent_layers else jnp.pad(array.swapaxes(1, 2), padding)
            for number, array in enumerate(arrays)
        ]

    cache = KVCache(keys=padded(keys), values=padded(values), lengths=lengths)
    last = logits(params, _rms_norm(last, params["norm"], config.norm_eps))
    return whole_vocabulary(last, config), cache


def decode_step(
    params: dict,
    lora_layers: list[dict],
    tokens: jax.Array,
    cache: KVCache,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, KVCache]:
    """Appends one token to every row.

    Args:
        params: the frozen policy.
        lora_layers: the policy's adapter as `lora.fuse` returns it, computed once before the
            decode loop.
        tokens: int32 [B] new tokens.
        cache: keys and values so far; every row has at least one position that is not filled.
        config: the architecture.

    Returns:
        float32 logits [B, V] after the token, and the cache with the token.
    """
    angles = rotary_angles(cache.lengths[:, None], config)
    x = embed(params["embed_tokens"], tokens, config)
    # The fused kernels know neither a state nor a gate.
    if config.recurrent is None and decode.supports_layer(x.dtype, cache.keys[0]):
        x, keys, values = _fused_layers(params, lora_layers, x, cache, angles, config=config)
        # A head for a few rows is slow in some libraries, and never faster than for 16.
        x = jnp.pad(x, ((0, max(0, 16 - len(tokens))), (0, 0)))
    else:
        x, keys, values = x[:, None], [], []
        layers = zip(params["layers"], lora_layers, cache.keys, cache.values, strict=True)
        for layer in layers:
            x, k, v = _decode_layer(*layer, x, cache.lengths, angles, config=config)
            keys.append(k)
            values.append(v)
        x = x[:, 0]
    x = _rms_norm(x, params["norm"], config.norm_eps)
    cache = KVCache(keys=keys, values=values, lengths=cache.lengths + 1)
    return whole_vocabulary(logits(params, x)[: len(tokens)], config), cache


def extend(
    params: dict,
    lora_layers: list[dict],
    tokens: jax.Array,
    positions: jax.Array,
    last: jax.Array,
    cache: KVCache,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, KVCache]:
    """Appends several tokens to every row of a cache.

    Args:
        params: the frozen policy.
        lora_layers: the policy's adapter as `lora.fuse` returns it.
        tokens: int32 [B, T] new tokens.
        positions: int32 [B, T], cache position of each token; S for padding, which is not written.
            With recurrent layers the first token of a row is its first one again, at position 0,
            which rows that do not decode overwrite; their state has it already.
        last: int32 [B], index of the last token of each row, after which the logits are wanted.
        cache: keys and values so far, of S positions; its lengths are not read.
        config: the architecture.

    Returns:
        float32 logits [B, V], and the cache with the tokens.
    """
    angles = rotary_angles(positions, config)
    x, keys, values = embed(params["embed_tokens"], tokens, config), [], []
    layers = zip(params["layers"], lora_layers, cache.keys, cache.values, strict=True)
    for layer in layers:
        x, k, v = _extend_layer(*layer, x, positions, last, angles, config=config)
        keys.append(k)
        values.append(v)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    x = logits(params, _rms_norm(x, params["norm"], config.norm_eps))
    cache = KVCache(keys=keys, values=values, lengths=cache.lengths)
    return whole_vocabulary(x, config), cache


def layer_with_inputs(
    layer: dict,
    x: jax.Array,
    lengths: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    *,
    config: ModelConfig,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes one layer without an adapter, and keeps what its projections read.

    Args:
        layer: one of `params["layers"]`.
        x: [B, T, D] input of the layer.
        lengths: int32 [B], number of tokens in each row.
        angles: cosines and sines of the positions, from `attention.rotary_angles`.
        config: the architecture.

    Returns:
        The layer's output [B, T, D], and the inputs [B, T, K] of its projections, which for a layer
        with attention are 'qkv_proj', 'o_proj', 'gate_up_proj' and 'down_proj'.
    """
    inputs = {}

    def project(layer, adapters, name, x, config):
        inputs[name] = x
        return _project(layer, adapters, name, x, config)

    if "in_proj" in layer:
        mixed, *_ = _recur(layer, {}, x, lengths, config, project)
    else:
        q, k, v, gate = _project_qkv(layer, {}, x, angles, config, project)
        mixed = _gated(attend(q, k, v, lengths), gate)
    return _finish_layer(layer, {}, x, mixed, config, project), inputs


def packed_weights(params: dict, *, rows: int = 0) -> list[QuantTensor | jax.Array]:
    """Returns the packed weights that no kernel reads.

    Where they become float32, a dense head follows, so that every product reads float32.

    Args:
        params: the policy.
        rows: number of rows of x in the products; a kernel may read weights for few rows only.
    """
    packed: list = [leaf for leaf in _leaves(params)[0] if _is_packed(leaf, rows)]
    head, dtype = params.get("lm_head", params["embed_tokens"]), params["embed_tokens"].dtype
    if packed and not isinstance(head, QuantTensor) and device.product_dtype(dtype) != dtype:
        packed.append(head)
    return packed


def dequantize_params(
    params: dict,
    dequantize_all: Callable[[list[QuantTensor | jax.Array]], list] | None = None,
    *,
    rows: int = 0,
) -> dict:
    """Dequantizes `packed_weights`, which trades memory for speed where there is no kernel.

    Args:
        params: the policy.
        dequantize_all: function from packed to dense weights; None uses `dense_weight`.
        rows: as in `packed_weights`.

    Returns:
        The policy with dense weights in place of packed ones.
    """
    if dequantize_all is None:
        dtype = params["embed_tokens"].dtype

        def dequantize_all(packed):
            return [dense_weight(weight, dtype) for weight in packed]

    leaves, treedef = _leaves(params)
    dense = iter(dequantize_all(packed_weights(params, rows=rows)))
    dequantized = treedef.unflatten(
        [next(dense) if _is_packed(leaf, rows) else leaf for leaf in leaves]
    )
    head = next(dense, None)
    return dequantized if head is None else dequantized | {"lm_head": head}


def dense_weight(weight: QuantTensor | jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the values [N, K] of a weight, rounded to `dtype`.

    They are stored in `device.product_dtype`: float32 on a CPU that is slow in bfloat16.
    """
    values = dequantize(weight, dtype) if isinstance(weight, QuantTensor) else weight
    return values.astype(device.product_dtype(dtype))


def _leaves(params):
    return jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))


def _is_packed(leaf, rows):
    if not isinstance(leaf, QuantTensor):
        return False
    return leaf.tiles is None or not fp4_matmul.reads_tiles(rows)


def _run_layers(params, lora, tokens, lengths, *, config):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    angles = rotary_angles(positions, config)
    x = embed(params["embed_tokens"], tokens, config)
    lora_layers = lora_lib.fuse(lora, config, x.dtype)
    keys, values = [], []
    for layer, adapters in zip(params["layers"], lora_layers, strict=True):
        x, k, v = _layer(layer, adapters, x, lengths, angles, config=config)
        keys.append(k)
        values.append(v)
    return x, (keys, values)


# One jit per layer function: the layers share a trace and a lowering.
@functools.partial(jax.jit, static_argnames="config")
def _layer(layer, adapters, x, visible, angles, *, config):
    """One block over whole rows, or over one packed buffer; also returns its keys and values.

    `visible` are the lengths of the rows, or the segments of the buffer, of which a recurrent layer
    takes the layout. It returns the state and the window after each row.
    """
    if "in_proj" in layer:
        mixed, state, window = _recur(layer, adapters, x, visible, config)
        return _finish_layer(layer, adapters, x, mixed, config), state, window
    q, k, v, gate = _project_qkv(layer, adapters, x, angles, config)
    with jax.named_scope("attention"):
        if isinstance(visible, Segments):
            attended = attend_packed(q[0], k[0], v[0], visible)[None]
        else:
            attended = attend(q, k, v, visible)
    return _finish_layer(layer, adapters, x, _gated(attended, gate), config), k, v


@functools.partial(jax.jit, static_argnames="config")
def _decode_layer(layer, adapters, keys, values, x, lengths, angles, *, config):
    """One block over one new token per row; returns the output and the extended cache."""
    if "in_proj" in layer:
        mixed, keys, values = _recur_step(layer, adapters, x, keys, values, lengths, config)
        return _finish_layer(layer, adapters, x, mixed, config), keys, values
    q, k, v, gate = _project_qkv(layer, adapters, x, angles, config)
    with jax.named_scope("attention"):
        rows, heads = jnp.ogrid[: keys.shape[0], : keys.shape[1]]
        position = rows, heads, lengths[:, None]
        keys = keys.at[position].set(to_cache(k[:, 0], keys.dtype), unique_indices=True)
        values = values.at[position].set(to_cache(v[:, 0], values.dtype), unique_indices=True)
        attended = attend_to_cache(q, keys.astype(q.dtype), values.astype(q.dtype), lengths + 1)
    return _finish_layer(layer, adapters, x, _gated(attended, gate), config), keys, values


@functools.partial(jax.jit, static_argnames="config")
def _extend_layer(layer, adapters, keys, values, x, positions, last, angles, *, config):
    """One block over several new tokens per row; returns the output and the extended cache."""
    if "in_proj" in layer:
        first, *_ = _recur(layer, adapters, x[:, :1], jnp.ones_like(last), config)
        others, *cache = _recur(layer, adapters, x[:, 1:], last, config, before=(keys, values))
        mixed = jnp.concatenate([first, others], axis=1)
        return _finish_layer(layer, adapters, x, mixed, config), *cache
    q, k, v, gate = _project_qkv(layer, adapters, x, angles, config)
    with jax.named_scope("attention"):
        rows, heads = jnp.ogrid[: keys.shape[0], : keys.shape[1]]
        place = rows[..., None], heads[..., None], positions[:, None, :]
        keys = keys.at[place].set(to_cache(k.swapaxes(1, 2), keys.dtype), mode="drop")
        values = values.at[place].set(to_cache(v.swapaxes(1, 2), values.dtype), mode="drop")
        attended = attend_from(q, keys.astype(q.dtype), values.astype(q.dtype), positions)
    return _finish_layer(layer, adapters, x, _gated(attended, gate), config), keys, values


def _fused_layers(params, lora_layers, x, cache, angles, *, config):
    """`_decode_layer` over all layers, by the fused kernels of `pallas_kernels.decode`.

    Roundings differ: the factor of an RMSNorm multiplies the result of a projection, not its input.
    """
    # The module uses an API of jax that may change, and is loaded when needed.
    from pallas_kernels.decode.layer import decode_layer

    residual = x, jnp.zeros_like(x)
    cosines, sines = (part[:, 0, 0] for part in angles)
    new_keys, new_values = [], []
    layers = zip(params["layers"], lora_layers, cache.keys, cache.values, strict=True)
    for layer, adapters, keys, values in layers:
        arrays = {
            name: kernel_weight(leaf) if isinstance(leaf, QuantTensor) else leaf
            for name, leaf in layer.items()
        }
        residual, keys, values = decode_layer(
            arrays,
            adapters,
            residual,
            keys,
            values,
            cache.lengths,
            (cosines, sines),
            eps=config.norm_eps,
            axis=TENSOR if config.shards > 1 else None,
        )
        new_keys.append(keys)
        new_values.append(values)
    return residual[0] + residual[1], new_keys, new_values


def _project(layer, adapters, name, x, config):
    bias = layer.get("qkv_bias") if name == "qkv_proj" else None
    y = linear(x, layer[name], adapter=adapters.get(name), bias=bias)
    # What the backward pass keeps is the sum, so that it does not add it up again.
    y = leave_shards(y, config) if name in BY_COLUMNS else y
    return checkpoint_name(y, ALIASES.get(name, name))


def _project_qkv(layer, adapters, x, angles, config, project=_project):
    batch, length, _ = x.shape
    h = _rms_norm(enter_shards(x, config), layer["input_layernorm"], config.norm_eps)
    qkv = project(layer, adapters, "qkv_proj", h, config)
    qkv = qkv.reshape(batch, length, -1, config.head_dim)
    heads = config.num_heads * (2 if config.gated_attention else 1)
    q, k, v = jnp.split(qkv, (heads, heads + config.num_kv_heads), axis=2)
    gate = None
    if config.gated_attention:
        q, gate = q[:, :, ::2], q[:, :, 1::2]
    if config.qk_norm:
        q = _rms_norm(q, layer["q_norm"], config.norm_eps)
        k = _rms_norm(k, layer["k_norm"], config.norm_eps)
    return rotate(q, angles), rotate(k, angles), v, gate


def _gated(attended, gate):
    """Returns what attention returns, times the sigmoid of the gates [B, T, N, H] if there are."""
    if gate is None:
        return attended
    return (attended * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


def _project_in(layer, adapters, x, config, project=_project):
    """Returns the inputs of the convolution, the output gate and the gates of a recurrent layer."""
    shapes = config.recurrent
    h = _rms_norm(enter_shards(x, config), layer["input_layernorm"], config.norm_eps)
    parts = project(layer, adapters, "in_proj", h, config)
    ends = shapes.channels, shapes.channels + shapes.values
    mixed, z, ba = jnp.split(parts, ends, axis=-1)
    return mixed, z, recurrent.gates(ba, layer)


def _recur(layer, adapters, x, visible, config, project=_project, before=(None, None)):
    """Returns [B, T, values] of a recurrent layer over rows or a packed buffer, state and window.

    `visible` are lengths or a layout; of a buffer the state and the window mean nothing. `before`
    are the state and the window that rows go on from, by default zeros.
    """
    state, window = before
    shapes = config.recurrent
    layout = visible if isinstance(visible, recurrent.Layout) else None
    mixed, z, gates = _project_in(layer, adapters, x, config, project)
    with jax.named_scope("recurrence"):
        if layout is None:
            # Tokens after a row's end leave its state as it is.
            is_token = (jnp.arange(x.shape[1]) < visible[:, None])[..., None]
            gates = jax.tree.map(lambda gate: jnp.where(is_token, gate, 0.0), gates)
        convolved = recurrent.convolve(mixed, layer["conv"], layout, window)
        inputs = recurrent.split_heads(convolved, shapes)
        out, state = recurrent.delta_rule(*inputs, gates, layout, state)
        out = checkpoint_name(_rounded(out, x.dtype), "attention")
        lengths = jnp.full(1, x.shape[1]) if layout is not None else visible
        window = recurrent.last_window(mixed, lengths, shapes.window, window).astype(jnp.float32)
    return _gated_norm(out, z, layer["gated_norm"], config.norm_eps), state, window


def _recur_step(layer, adapters, x, state, window, lengths, config):
    """Does what `_recur` does for one new token of each row [B, 1, D].

    A row of length 0 has ended or waits for an environment: its state and window stay as they are.
    """
    mixed, z, gates = _project_in(layer, adapters, x, config)
    with jax.named_scope("recurrence"):
        live = (lengths > 0)[:, None]
        mixed, moved = recurrent.convolve_step(mixed[:, 0], window, layer["conv"])
        window = jnp.where(live[..., None], moved, window)
        gates = jax.tree.map(lambda gate: jnp.where(live, gate[:, 0], 0.0), gates)
        inputs = recurrent.split_heads(mixed, config.recurrent)
        out, state = recurrent.delta_step(*inputs, gates, state)
    out = _rounded(out, x.dtype)[:, None]
    return _gated_norm(out, z, layer["gated_norm"], config.norm_eps), state, window


def _rounded(x, dtype):
    """Returns x in a narrower dtype, rounded in every program.

    XLA leaves out a conversion to bfloat16 whose result becomes float32 again, in the program of a
    decode step and not in that of rows: rollout and trainer then differ by this rounding.
    """
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _gated_norm(x, gate, scale, eps):
    """Normalizes each head of x [B, T, Kh, R, Dv] and multiplies it by SiLU of the gate."""
    out = _rms_norm(x, scale, eps).astype(jnp.float32).reshape(gate.shape)
    return (out * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def _finish_layer(layer, adapters, x, mixed, config, project=_project):
    """Adds what mixes tokens, [B, T, ...] of attention or recurrence, and the MLP, to x."""
    batch, length, _ = x.shape
    mixed = mixed.reshape(batch, length, -1)
    name = "out_proj" if "in_proj" in layer else "o_proj"
    x = x + project(layer, adapters, name, mixed, config)
    h = _rms_norm(enter_shards(x, config), layer["post_attention_layernorm"], config.norm_eps)
    gate, up = jnp.split(project(layer, adapters, "gate_up_proj", h, config), 2, axis=-1)
    with jax.named_scope("mlp"):
        hidden = jax.nn.silu(gate) * up
    return x + project(layer, adapters, "down_proj", hidden, config)


@jax.named_scope("norms")
def _rms_norm(x, scale, eps):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)
