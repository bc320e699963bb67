"""The policy: Qwen2, Qwen3, Qwen3.5, Llama and gpt-oss as pure functions of a parameter tree.

Parameters are plain dicts and lists (V vocabulary, D embed):

    embed_tokens [V, D]; lm_head [V, D], absent when tied; norm [D];
    layers: a list of
        input_layernorm [D], post_attention_layernorm [D]    float32
        the arrays of its mixer and its MLP                  see the modules of `layers`

The projections and `lm_head` are dense arrays or `QuantTensor`s. The dtype of `embed_tokens` is the
dtype of the computation; norms, rotations and logits are float32.

This module iterates over layers: what a layer is, `layers.kinds` knows. Where weights are cut
between devices, the functions run on each of them, see `tensor_parallel`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import decode, device, fp4_matmul
from pallas_kernels.attention import Segments
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy.collectives import TENSOR, embed, enter_shards, whole_vocabulary
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.attention import rotary_angles
from qerl_jax.policy.layers.kinds import Layer
from qerl_jax.policy.layers.linear import PRODUCTS, ROUTES, rms_norm
from qerl_jax.policy.layers.part import Kept, NewTokens, Own
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor, dequantize, kernel_weight


@struct.dataclass
class Cache:
    """What rows keep of their tokens so far."""

    # What they keep in every layer, of the type `KEPT` of its mixer: keys and values.
    layers: list[Kept]
    lengths: jax.Array  # int32 [B], number of tokens of each row


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
    x, _, _ = _run_layers(params, lora, tokens, lengths, config=config)
    return rms_norm(enter_shards(x, config), params["norm"], config.norm_eps)


def packed_hidden_states(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    positions: jax.Array,
    segments: Segments,
    *,
    config: ModelConfig,
    recompute: tuple[str, ...] = (),
    routes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
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
        routes: int32 [L, N, k], the experts of each token in every layer, as a rollout returned
            them; at padding any. None for those that the routers choose.

    Returns:
        [N, D] hidden states, and the experts that the routers choose, int32 [L, N, k] or None,
        whatever `routes` are.
    """
    keep = [*(name for name in PRODUCTS if name not in recompute), ROUTES]
    angles = rotary_angles(positions[None], config)

    # The adapter is fused inside of the checkpoint, so that the backward pass fuses it again and
    # nothing keeps that of all layers, which takes 1.4 GB with 72B.
    @functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names(*keep),
        static_argnums=(0, 1),
    )
    def layer_fn(kind, own_config, layer, lora, x, routes):
        adapters = lora_lib.fuse(lora, config, x.dtype)[0]
        layout = layouts[kind.mixer]
        arrays = layer, adapters, x, layout, angles, routes
        x, _, chosen = _layer(*arrays, kind=kind, config=own_config)
        return x, None if chosen is None else chosen[0]

    layouts = {
        mixer: mixer.layout_of(segments, positions, config) for mixer in kinds.mixers_of(config)
    }
    x, found = embed(params["embed_tokens"], tokens[None], config), []
    for number, (kind, own_config, layer) in enumerate(_layers(params, config)):
        lora_of_layer = lora and Lora(layers=[lora.layers[number]], scale=lora.scale)
        own_routes = None if routes is None else routes[number, None]
        x, chosen = layer_fn(kind, own_config, layer, lora_of_layer, x, own_routes)
        found.append(chosen)
    x = rms_norm(enter_shards(x[0], config), params["norm"], config.norm_eps)
    return x, _stacked(found)


@jax.named_scope("head")
def logits(params: dict, hidden: jax.Array) -> jax.Array:
    """Returns the float32 logits [..., V] of final hidden states [..., D].

    Where weights are cut, they are those of the vocabulary of this device.
    """
    head = params.get("lm_head", params["embed_tokens"])
    if isinstance(head, QuantTensor):
        return fp4_matmul.fp4_matmul(hidden, kernel_weight(head), dtype=jnp.float32)
    if hidden.ndim > 1 and hidden.size == hidden.shape[-1]:
        # For one row XLA would convert the head to float32: 2.2 GB of Qwen2.5-7B.
        return _float32_product(jnp.concatenate([hidden, hidden]), head)[:1]
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
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Runs the policy on prompts and keeps what their rows continue from.

    Args:
        params: the frozen policy.
        lora: the policy's adapter, or None.
        tokens: int32 [B, T] left-aligned prompts.
        lengths: int32 [B], number of tokens in each prompt, at least 1.
        config: the architecture.
        cache_positions: S >= T, number of positions of the cache.

    Returns:
        float32 logits [B, V] after each prompt's last token, the cache, and the experts that the
        tokens were routed to, int32 [L, B, T, k] or None.
    """
    x, layers, routes = _run_layers(params, lora, tokens, lengths, config=config)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    pairs = zip(kinds.layers_of(config), layers, strict=True)
    layers = [kind.mixer.in_cache(kept, cache_positions) for kind, kept in pairs]
    last = logits(params, rms_norm(last, params["norm"], config.norm_eps))
    return whole_vocabulary(last, config), Cache(layers=layers, lengths=lengths), routes


def decode_step(
    params: dict,
    lora_layers: list[dict],
    tokens: jax.Array,
    cache: Cache,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Appends one token to every row.

    Args:
        params: the frozen policy.
        lora_layers: the policy's adapter as `lora.fuse` returns it, computed once before the
            decode loop.
        tokens: int32 [B] new tokens.
        cache: what the rows keep; every row has at least one position that is not filled.
        config: the architecture.

    Returns:
        float32 logits [B, V] after the token, the cache with the token, and the experts that the
        tokens were routed to, int32 [L, B, k] or None.
    """
    angles = rotary_angles(cache.lengths[:, None], config)
    x = embed(params["embed_tokens"], tokens, config)
    if _is_fused(config, x.dtype, cache):
        x, layers, routes = _fused_layers(params, lora_layers, x, cache, angles, config=config)
        # A head for a few rows is slow in some libraries, and never faster than for 16.
        x = jnp.pad(x, ((0, max(0, 16 - len(tokens))), (0, 0)))
    else:
        x, layers, routes = x[:, None], [], []
        parts = zip(_layers(params, config), lora_layers, cache.layers, strict=True)
        for (kind, own_config, layer), adapters, kept in parts:
            arrays = layer, adapters, kept, x, cache.lengths, angles
            x, kept, chosen = _decode_layer(*arrays, kind=kind, config=own_config)
            layers.append(kept)
            routes.append(None if chosen is None else chosen[:, 0])
        x = x[:, 0]
    x = rms_norm(x, params["norm"], config.norm_eps)
    cache = Cache(layers=layers, lengths=cache.lengths + 1)
    logits_of = whole_vocabulary(logits(params, x)[: len(tokens)], config)
    return logits_of, cache, _stacked(routes)


def extend(
    params: dict,
    lora_layers: list[dict],
    tokens: jax.Array,
    new: NewTokens,
    cache: Cache,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Appends several tokens to N rows of a cache.

    Args:
        params: the frozen policy.
        lora_layers: the policy's adapter as `lora.fuse` returns it.
        tokens: int32 [N, T] new tokens.
        new: where they go. Unless all mixers rewind, the first token of a row is its first one
            again, at position 0, which rows that do not decode overwrite; a state has it already.
        cache: what the rows keep, of S positions; its lengths are not read.
        config: the architecture.

    Returns:
        float32 logits [N, V] after the last token of each row, the cache with the tokens, and the
        experts that the tokens were routed to, int32 [L, N, T, k] or None.
    """
    x, cache, routes = _extended(params, lora_layers, tokens, new, cache, config=config)
    x = jnp.take_along_axis(x, new.last[:, None, None], axis=1)[:, 0]
    x = logits(params, rms_norm(x, params["norm"], config.norm_eps))
    return whole_vocabulary(x, config), cache, _stacked(routes)


def decode_positions(
    params: dict,
    lora_layers: list[dict],
    tokens: jax.Array,
    cache: Cache,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Computes what follows each of several new tokens of every row.

    A row's tokens see each other in order, and which of them stay is decided afterwards: the
    lengths of the cache stay as they are. All mixers must rewind.

    Args:
        params: the frozen policy.
        lora_layers: the policy's adapter as `lora.fuse` returns it.
        tokens: int32 [B, T] tokens at the first T positions that are not filled. Those after the
            last position of the cache are not kept, and their logits are undefined.
        cache: what the rows keep. A row of length 0 has ended, or waits: it keeps the first token.
        config: the architecture.

    Returns:
        float32 logits [B, T, V] after each token, the cache with the tokens, and the experts that
        the tokens were routed to, int32 [L, B, T, k] or None.
    """
    count, lengths = tokens.shape[1], cache.lengths[:, None]
    offsets = jnp.arange(count)
    written = (lengths > 0) | (offsets == 0)
    positions = jnp.where(written, lengths + offsets, jnp.iinfo(jnp.int32).max)
    if not _is_fused(config, params["embed_tokens"].dtype, cache, count):
        new = NewTokens(positions, jnp.full(len(tokens), count - 1))
        x, cache, routes = _extended(params, lora_layers, tokens, new, cache, config=config)
        x = logits(params, rms_norm(x, params["norm"], config.norm_eps))
        return whole_vocabulary(x, config), cache, _stacked(routes)
    angles = rotary_angles(positions.reshape(-1, 1), config)
    x = embed(params["embed_tokens"], tokens.reshape(-1), config)
    x, layers, routes = _fused_layers(params, lora_layers, x, cache, angles, config=config)
    x = jnp.pad(x, ((0, max(0, 16 - len(x))), (0, 0)))  # as in `decode_step`
    x = logits(params, rms_norm(x, params["norm"], config.norm_eps))
    x = whole_vocabulary(x[: tokens.size], config).reshape(*tokens.shape, -1)
    routes = _stacked(routes)
    if routes is not None:
        routes = routes.reshape(len(routes), *tokens.shape, -1)
    return x, Cache(layers=layers, lengths=cache.lengths), routes


def layer_with_inputs(
    kind: Layer,
    layer: dict,
    x: jax.Array,
    lengths: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    *,
    config: ModelConfig,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes one layer without an adapter, and keeps what its projections read.

    Args:
        kind: what `kinds.layer_of` says of the layer.
        layer: one of `params["layers"]`.
        x: [B, T, D] input of the layer.
        lengths: int32 [B], number of tokens in each row.
        angles: cosines and sines of the positions, from `attention.rotary_angles`.
        config: the architecture, as `ModelConfig.of_layer` returns it.

    Returns:
        The layer's output [B, T, D], and the inputs [B, T, K] of its weights by their names, which
        for a layer with attention are 'qkv_proj', 'o_proj', 'gate_up_proj' and 'down_proj'.
    """
    own = Own(layer, {}, config, inputs={})
    mixed, _ = kind.mixer.mix(own, x, lengths, angles)
    return _add(kind, own, x, mixed)[0], own.inputs or {}


def packed_weights(params: dict, *, rows: int = 0) -> list[QuantTensor | jax.Array]:
    """Returns the packed weights that no kernel reads.

    Where they become float32, a dense head follows, so that every product reads float32.

    Args:
        params: the policy.
        rows: number of rows of x in the products; a kernel may read weights for few rows only.
    """
    packed: list = [leaf for path, leaf in _leaves(params)[0] if _is_packed(path, leaf, rows)]
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
        [next(dense) if _is_packed(path, leaf, rows) else leaf for path, leaf in leaves]
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
    return jax.tree.flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))


def _is_packed(path, leaf, rows):
    if not isinstance(leaf, QuantTensor):
        return False
    # A grouped product reads the tiles of experts a part at a time, however many rows it has.
    reads_tiles = fp4_matmul.reads_tiles(rows) or path[-1].key in kinds.STACKS
    return leaf.tiles is None or not reads_tiles


def _layers(params, config):
    """Returns the kinds, the architecture and the arrays of each layer."""
    configs = map(config.of_layer, range(config.num_layers))
    return zip(kinds.layers_of(config), configs, params["layers"], strict=True)


def _run_layers(params, lora, tokens, lengths, *, config):
    """Returns the states [B, T, D] after the layers, what the rows keep in each, and the routes."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    angles = rotary_angles(positions, config)
    x, layers, routes = embed(params["embed_tokens"], tokens, config), [], []
    lora_layers = lora_lib.fuse(lora, config, x.dtype)
    parts = zip(_layers(params, config), lora_layers, strict=True)
    for (kind, own_config, layer), adapters in parts:
        x, kept, chosen = _layer(layer, adapters, x, lengths, angles, kind=kind, config=own_config)
        layers.append(kept)
        routes.append(chosen)
    return x, layers, _stacked(routes)


def _extended(params, lora_layers, tokens, new, cache, *, config):
    """Returns new tokens [N, T, D] after the layers, the cache, and the routes of each layer."""
    angles = rotary_angles(new.positions, config)
    x, layers, routes = embed(params["embed_tokens"], tokens, config), [], []
    parts = zip(_layers(params, config), lora_layers, cache.layers, strict=True)
    for (kind, own_config, layer), adapters, kept in parts:
        arrays = layer, adapters, kept, x, new, angles
        x, kept, chosen = _extend_layer(*arrays, kind=kind, config=own_config)
        layers.append(kept)
        routes.append(chosen)
    return x, Cache(layers=layers, lengths=cache.lengths), routes


def _stacked(routes):
    """The routes of the layers [L, ...], or None for a model without experts."""
    return None if any(chosen is None for chosen in routes) else jnp.stack(routes)


# One jit per layer function: the layers of a kind share a trace and a lowering.
@functools.partial(jax.jit, static_argnames=("kind", "config"))
def _layer(layer, adapters, x, visible, angles, routes=None, *, kind, config):
    """One layer over whole rows, or over one packed buffer; see `part.Mixer.mix`."""
    own = Own(layer, adapters, config)
    mixed, kept = kind.mixer.mix(own, x, visible, angles)
    x, routes = _add(kind, own, x, mixed, routes)
    return x, kept, routes


@functools.partial(jax.jit, static_argnames=("kind", "config"))
def _decode_layer(layer, adapters, kept, x, lengths, angles, *, kind, config):
    """One layer over one new token per row; see `part.Mixer.mix_step`."""
    own = Own(layer, adapters, config)
    mixed, kept = kind.mixer.mix_step(own, x, kept, lengths, angles)
    x, routes = _add(kind, own, x, mixed)
    return x, kept, routes


@functools.partial(jax.jit, static_argnames=("kind", "config"))
def _extend_layer(layer, adapters, kept, x, new, angles, *, kind, config):
    """One layer over several new tokens per row; see `part.Mixer.mix_extend`."""
    own = Own(layer, adapters, config)
    mixed, kept = kind.mixer.mix_extend(own, x, kept, new, angles)
    x, routes = _add(kind, own, x, mixed)
    return x, kept, routes


def _add(kind, own, x, mixed, routes=None):
    """Adds what the mixer and the MLP return to x; returns the routes of the MLP, too."""
    x = x + mixed
    added, routes = kind.mlp.mlp(own, x, routes)
    return x + added, routes


def _is_fused(config, dtype, cache, count=1):
    """Whether the kernels of `pallas_kernels.decode` compute all layers of a decode step.

    Of several tokens of a row they compute plain attention alone, and no more than eight.
    """
    several = {"attention"} if 1 < count <= decode.MAX_TOKENS else set()
    return all(
        (mixer := kind.mixer.fuses(config, dtype, kept)) and (count == 1 or mixer in several)
        for kind, kept in zip(kinds.layers_of(config), cache.layers, strict=True)
    )


def _fused_layers(params, lora_layers, x, cache, angles, *, config):
    """`_decode_layer` over all layers, by the fused kernels of `pallas_kernels.decode`.

    Roundings differ: the factor of an RMSNorm multiplies the result of a projection, not its input.
    """
    # The module uses an API of jax that may change, and is loaded when needed.
    from pallas_kernels.decode.layer import Experts, Kind, decode_layer, total

    residual = x, jnp.zeros_like(x)
    cosines, sines = (part[:, 0, 0] for part in angles)
    layers, routes = [], []
    parts = zip(_layers(params, config), lora_layers, cache.layers, strict=True)
    for (kind, own_config, layer), adapters, kept in parts:
        mixer = kind.mixer.fuses(own_config, x.dtype, kept)
        shapes = kind.mlp.fused_shapes(own_config)
        arrays = {
            name: kernel_weight(leaf) if isinstance(leaf, QuantTensor) else leaf
            for name, leaf in layer.items()
        }
        leaves, tree = jax.tree.flatten(kept)
        residual, leaves, chosen = decode_layer(
            arrays,
            adapters,
            residual,
            tuple(leaves),
            cache.lengths,
            (cosines, sines),
            eps=config.norm_eps,
            kind=Kind(mixer, None if shapes is None else Experts(*shapes), own_config.window),
            axis=TENSOR if config.shards > 1 else None,
        )
        layers.append(tree.unflatten(leaves))
        routes.append(chosen)
    return total(residual), layers, routes
