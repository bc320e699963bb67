"""A layer of a decode step: which kernels compute it. Arrays in, arrays out.

A layer has six steps. In each step the first line is taken whose conditions hold:

    step       kernels                    conditions
    norm       add_rmsnorm                none
    qkv        qkv_proj                   none
    attention  attention_sm90             unsplit, Hopper GPU, bfloat16 cache, heads of 128
               attend_whole               unsplit, without sinks and a window
               attend, merge_parts        none
    output     o_proj+RMSNorm             M <= 64, o_proj FP4 and adapted, gate_up_proj+SwiGLU next,
                                          one device
               o_proj, add_rmsnorm        none
    mlp        gate_up_proj+SwiGLU        M <= 256, gate_up_proj FP4 and adapted, down_proj not FP4
                                          or its tiling has a reducer
               gate_up_proj, swiglu       none
    down       down_proj                  none; the norm of the next layer adds its result

A mixture of experts has these steps after attention:

    step       kernels                    conditions
    output     o_proj, add_rmsnorm        none; the norm also multiplies by the router
    route      route_experts              M <= 256
    experts    experts_mlp                FP4 in tiles of eight rows (`experts.api`); the norm of
                                          the next layer adds the pairs of each token up
               two grouped products       none
    shared     experts_mlp                if all tokens have an expert, too, of the same width, FP4
                                          and with few ranks: the same kernel; the norm of the
                                          next layer adds it
               gate_up_proj, swiglu,      as mlp and down
               down_proj

A weight is "FP4" if it is in tile order (`Fp4Tiles`) and the Hopper kernel runs; the two epilogues
"+RMSNorm" and "+SwiGLU" need rows in multiples of eight. Attention is "unsplit" if M <= 256, o_proj
is FP4 and its tiling has a reducer, and the M K heads of keys occupy all SMs. Without an adapter no
reducer is needed; up to 128 rows and stacked ranks of 128 all tilings have one. Where another
kernel multiplies weights in tile order (`fp4_matmul.mma`), no weight is FP4.

An adapted product needs x A^T. Every kernel in front of a product computes partial sums of it, but
for unsplit attention and the FP4 kernel. After these, the product computes x A^T itself, or the
kernel `lora_shrink` runs before it where the tiling has no space for that.

A dense product takes its adapter and its bias inside for one token (`matvec`), and for up to 16
with weights and ranks of some sizes (`fp4_matmul.mma.dense`). For others XLA computes them
afterwards.

Where rows have several new tokens, attention is

    attention  write_tokens,              none
               attend_queries_sm90,       Hopper GPU, bfloat16 cache, heads of 128
               or attend_queries,         none
               merge_parts                none

of which the last three also extend rows by longer texts (`attend_from`).

Where several devices have a layer together, an all-reduce follows o_proj and down_proj.

For Qwen2.5-7B on an H200 this gives:

    M          weights               kernels of a layer, in order
    any        dense or Fp4Weight    add_rmsnorm, qkv_proj, attend, merge_parts, o_proj,
                                     add_rmsnorm, gate_up_proj, swiglu, down_proj
    1 to 7     Fp4Tiles and adapters the same
    8, 16      Fp4Tiles and adapters add_rmsnorm, qkv_proj, attend, merge_parts, o_proj+RMSNorm,
                                     gate_up_proj+SwiGLU, down_proj
    32 to 64   Fp4Tiles and adapters add_rmsnorm, qkv_proj, attention_sm90, o_proj+RMSNorm,
                                     gate_up_proj+SwiGLU, down_proj
    72 to 128  Fp4Tiles and adapters add_rmsnorm, qkv_proj, attention_sm90, [lora_shrink,] o_proj,
                                     add_rmsnorm, gate_up_proj+SwiGLU, [lora_shrink,] down_proj
    200 to 256 Fp4Tiles and adapters the same
    136 to 192 Fp4Tiles and adapters the same up to gate_up_proj, swiglu, down_proj
    264, ...   Fp4Tiles and adapters as with dense weights

A recurrent layer has in_proj and `delta_step` in place of q, k, v and attention, and out_proj in
place of o_proj. Attention with gates has `split_gates` before `attend`, and `merge_parts` after it
even if rows are not split.

The module uses an API of jax that may change (Pallas's Mosaic GPU backend): import it when it is
needed, after `decode.supports_layer`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import fp4_matmul, matvec
from pallas_kernels.decode import (
    attention,
    attention_queries,
    delta,
    gated_attention,
    norms,
    self_test,
)
from pallas_kernels.decode.attention import AttentionInputs
from pallas_kernels.decode.attention_queries import Queries
from pallas_kernels.decode.delta import DeltaInputs
from pallas_kernels.decode.norms import DeferredNorm
from pallas_kernels.decode.row import QUERIES
from pallas_kernels.device import num_sms
from pallas_kernels.experts import Gated, combine, mlp, route, step_tile, takes_shared
from pallas_kernels.experts.combine import ExpertSums
from pallas_kernels.fp4_matmul import (
    AddRmsNorm,
    Epilogue,
    Fp4Tiles,
    Fp4Weight,
    Swiglu,
    dispatch,
)
from pallas_kernels.fp4_matmul.mma import dense

Adapter = tuple[jax.Array, jax.Array]


class Activations(NamedTuple):
    """The input of a product."""

    x: jax.Array  # bfloat16 [M, K]
    # float32 [P, M, R'] whose sum over P is x A^T of the product's adapter, or None where the
    # product has no adapter or is to compute x A^T itself.
    xa_partials: jax.Array | None = None


class Projection(NamedTuple):
    """A linear map x W^T + (x A^T) B^T."""

    weight: jax.Array | Fp4Weight | Fp4Tiles  # W [N, K], dense or in 4 bits
    adapter: Adapter | None  # A [R, K] with the LoRA scale inside and B [N, R''], or None

    @property
    def a(self) -> jax.Array | None:
        """A of the adapter, or None."""
        return None if self.adapter is None else self.adapter[0]


class Own(NamedTuple):
    """What the parts of a layer compute with."""

    layer: dict[str, Any]  # the arrays of the layer by name
    adapters: dict[str, Adapter]  # (A, B) of the projections that have an adapter, by name
    eps: float  # epsilon of the norms
    axis: str | None  # axis of a mesh whose devices have the layer together
    window: int  # number of positions that a token sees, 0 for all

    def projection(self, name: str) -> Projection:
        """A projection of the layer."""
        return Projection(self.layer[name], self.adapters.get(name))


class Mixed(NamedTuple):
    """What a mixer leaves for the MLP of the layer, whose norm is computed with the last product.

    The product of `activations` with `output` is still to be added to the residual.
    """

    residual: jax.Array  # bfloat16 [M, D]
    activations: Activations  # what the output projection reads
    output: Projection


class Experts(NamedTuple):
    """The shapes of a mixture of experts."""

    count: int  # number E of experts
    top_k: int  # experts of a token
    width: int  # width F of an expert
    normalized: bool  # whether the weights are a softmax over a token's experts, or over all
    limit: float = 0.0  # of gate and up, see `experts.activated`; 0 for silu(gate) up


class Kind(NamedTuple):
    """What a layer is, besides its arrays."""

    mixer: str = "attention"  # of `MIXERS`
    experts: Experts | None = None  # shapes of a mixture of experts; None for a layer with one MLP
    window: int = 0  # number of positions that a token sees, its own included; 0 for all


_PLAIN = Kind()
# The residual and what is still to be added to it: the first kernel of a layer adds the last
# product of the layer before, or what its experts computed.
Residual = tuple[jax.Array, jax.Array | ExpertSums]


# One jit: the layers share a trace and a lowering.
@functools.partial(jax.jit, static_argnames=("eps", "kind", "axis"))
def decode_layer(
    layer: dict[str, Any],
    adapters: dict[str, Adapter],
    residual: Residual,
    kept: tuple[jax.Array, ...],
    lengths: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    *,
    eps: float,
    kind: Kind = _PLAIN,
    axis: str | None = None,
) -> tuple[Residual, tuple[jax.Array, ...], jax.Array | None]:
    """One transformer layer over new tokens of rows, where `decode.supports_layer`.

    A layer with plain attention may have up to `decode.MAX_TOKENS` tokens of each row,
    M = R T, those of a row one after the other; else M = R.

    Args:
        layer: weights by name: 'qkv_proj' [(N + 2 K) H, D], 'o_proj' [D, N H], 'gate_up_proj'
            [2 F, D] and 'down_proj' [D, F], each a bfloat16 array, an Fp4Weight or an Fp4Tiles;
            float32 scales of the norms 'input_layernorm' and 'post_attention_layernorm' [D] and,
            if queries and keys have norms, 'q_norm' and 'k_norm' [H]; 'qkv_bias', if there is one.
            A mixture of experts has in place of the last two products 'router' bfloat16 [E, D],
            'experts_gate_up' [E 2F, D], 'experts_down' [E D, F] and, if a shared expert of width S
            is there, 'shared_gate_up' [2 S, D], 'shared_down' [D, S] and 'shared_gate' [1, D].
            It may have 'sinks' [N], 'o_bias' [D], 'router_bias' [E], 'experts_gate_up_bias'
            [E, 2, F] and 'experts_down_bias' [E, D].
        adapters: (A, B) of the projections that have an adapter, by the name of the projection.
        residual: bfloat16 [M, D] twice, the residual and what is still to be added to it.
        kept: what rows keep of their tokens: cached keys and values [R, K, S, H], bfloat16 or
            float8_e4m3fn; donated.
        lengths: int32 [R], number of filled cache positions of each row, less than S.
        angles: float32 [M, H/2] twice, cosines and sines of the rotation at the new positions.
        eps: epsilon of the norms.
        kind: what the layer is, besides its arrays.
        axis: axis of a mesh whose devices have the layer together: the results of o_proj and of
            down_proj, adapters included, are parts that are added up along it. None on one device.

    Returns:
        The residual and what is still to be added to it, what the rows keep, and the experts of
        the tokens, int32 [M, k] or None.
    """
    own = Own(layer, adapters, eps, axis, kind.window)
    mixed, kept = MIXERS[kind.mixer](own, residual, kept, lengths, angles)
    if kind.experts is None:
        return _gated_mlp(own, mixed), kept, None
    residual, routes = _mixture(own, mixed, kind.experts)
    return residual, kept, routes


def _mix_by_recurrence(
    own: Own,
    residual: Residual,
    kept: tuple[jax.Array, ...],
    lengths: jax.Array,
    angles: tuple[jax.Array, jax.Array],
) -> tuple[Mixed, tuple[jax.Array, ...]]:
    """The mixer of a recurrent layer, and the updated states and windows."""
    layer, projection, out = own.layer, own.projection("in_proj"), own.projection("out_proj")
    norm = _norm(*residual, layer["input_layernorm"], projection)
    inputs = DeltaInputs(
        # In float32, as the norm's factor is still to come: rounded before and after it, a rollout
        # is less exact than one without the fused kernels.
        parts=_project(Activations(norm.scaled, norm.xa_partials), projection, dtype=jnp.float32),
        square_partials=norm.square_partials,
        lengths=lengths,
        conv=layer["conv"],
        a_log=layer["a_log"],
        dt_bias=layer["dt_bias"],
        scale=layer["gated_norm"],
        state=kept[0],
        window=kept[1],
    )
    with jax.named_scope("recurrence"):
        x, xa_partials, state, window = delta.step(inputs, out.a, eps=own.eps)
    return Mixed(norm.residual, Activations(x, xa_partials), out), (state, window)


def _mix_by_attention(
    own: Own,
    residual: Residual,
    kept: tuple[jax.Array, ...],
    lengths: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    *,
    gated: bool = False,
) -> tuple[Mixed, tuple[jax.Array, ...]]:
    """The mixer of a layer with attention, and the updated keys and values."""
    keys, values = kept
    layer, qkv, o = own.layer, own.projection("qkv_proj"), own.projection("o_proj")
    norm = _norm(*residual, layer["input_layernorm"], qkv)
    inputs = AttentionInputs(
        qkv=_project(Activations(norm.scaled, norm.xa_partials), qkv),
        square_partials=norm.square_partials,
        cosines=angles[0],
        sines=angles[1],
        lengths=lengths,
        bias=layer.get("qkv_bias"),
        q_norm=layer.get("q_norm"),
        k_norm=layer.get("k_norm"),
        keys=keys,
        values=values,
    )
    attended, keys, values = (_gated_attention if gated else _attention)(inputs, o, own)
    return Mixed(norm.residual, attended, o), (keys, values)


MIXERS: dict[str, Callable] = {
    "attention": _mix_by_attention,
    # Each query is followed by its gate, and the rotation may be that of the first dimensions.
    "gated_attention": functools.partial(_mix_by_attention, gated=True),
    "recurrence": _mix_by_recurrence,
}


def _gated_mlp(own: Own, mixed: Mixed) -> tuple[jax.Array, jax.Array]:
    """The MLP of a layer without experts: the residual and what is still to be added to it."""
    gate_up, down = own.projection("gate_up_proj"), own.projection("down_proj")
    norm = _output(own, mixed, gate_up)
    hidden = _mlp(norm, gate_up, down, own.eps)
    return norm.residual, _sum(_project(hidden, down), own.axis)


def _mixture(own: Own, mixed: Mixed, experts: Experts) -> tuple[Residual, jax.Array]:
    """The MLP of a layer with experts, and the experts of the tokens, int32 [M, k]."""
    layer = own.layer
    product = _project(mixed.activations, mixed.output, bias=layer.get("o_bias"))
    scale = layer["post_attention_layernorm"]
    routed, shared = _gated(own, "experts_gate_up", "experts_down"), None
    adapted = own.projection("shared_gate_up") if "shared_gate_up" in layer else None
    sizes = {"top_k": experts.top_k, "width": experts.width}
    if adapted is not None:
        shared = _gated(own, "shared_gate_up", "shared_down")
        if takes_shared(mixed.residual, routed, shared, **sizes) and _experts_agree():
            adapted = None
        else:
            shared = None
    norm = _norm(mixed.residual, product, scale, adapted, layer["router"])
    tile = step_tile(mixed.residual, routed, **sizes)
    router = route.Router(experts.count, experts.top_k, experts.normalized, own.eps, tile)
    routing = _route(norm, layer, router)
    rows, y = mlp(
        *(routing.states, routed, routing.table, routing.weights),
        width=experts.width,
        shared=shared,
        limit=experts.limit,
    )
    if adapted is not None:
        down = own.projection("shared_down")
        y = _project(_mlp(norm, adapted, down, own.eps), down)
    sums = ExpertSums(rows, routing.table.place.reshape(routing.routes.shape), y, routing.opened)
    return (norm.residual, sums if _experts_agree() else combine.total(sums)), routing.routes


def _gated(own: Own, gate_up: str, down: str) -> Gated:
    """Gated MLPs of the layer by the names of their weights."""
    adapters = own.adapters.get(gate_up), own.adapters.get(down)
    biases = None
    if f"{down}_bias" in own.layer:
        biases = own.layer[f"{gate_up}_bias"], own.layer[f"{down}_bias"]
    return Gated(own.layer[gate_up], own.layer[down], adapters, biases)


def _route(norm: DeferredNorm, layer: dict[str, Any], router: route.Router) -> route.Routing:
    """The experts of the tokens after a norm."""
    assert norm.logit_partials is not None, "the norm has the router's product"
    gate, bias = layer.get("shared_gate"), layer.get("router_bias")
    scores = route.Scores(norm.scaled, norm.square_partials, norm.logit_partials, gate, bias)
    with jax.named_scope("router"):
        if route.supports(scores, router) and _experts_agree():
            return route.route(scores, router)
        return route.reference(scores, router)


def total(residual: Residual) -> jax.Array:
    """Returns the residual [M, D] with all that is to be added to it."""
    x, y = residual
    return x + (combine.total(y) if isinstance(y, ExpertSums) else y)


def _sum(x: jax.Array, axis: str | None) -> jax.Array:
    with jax.named_scope("sums"):
        return x if axis is None else jax.lax.psum(x, axis)


def _norm(
    x: jax.Array,
    y: jax.Array | ExpertSums,
    scale: jax.Array,
    reader: Projection | None,
    router: jax.Array | None = None,
) -> DeferredNorm:
    """The norm of x + y, which a projection reads, or a router, or both."""
    a = None if reader is None else reader.a
    with jax.named_scope("norms"):
        if router is None:
            return norms.add_rmsnorm(x, y, scale, a)
        return norms.add_rmsnorm(x, y, scale, a, router=router)


def _project(
    activations: Activations,
    projection: Projection,
    epilogue: Epilogue | None = None,
    *,
    bias: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> Any:
    """A product, with its adapter and its bias if it has them, and what an epilogue makes of it.

    The dtype is that of a product with a dense weight; None for that of x.
    """
    x, xa_partials = activations
    weight, adapter = projection
    with jax.named_scope("linears"):
        if isinstance(weight, Fp4Weight | Fp4Tiles):
            return fp4_matmul.fp4_matmul(
                x, weight, lora=adapter, xa_partials=xa_partials, bias=bias, epilogue=epilogue
            )
        if xa_partials is not None and adapter is not None:
            b = adapter[1]
            options: dict[str, Any] = {"bias": bias, "dtype": dtype or x.dtype}
            if dense.supports(x, weight, xa_partials.shape[-1]):
                return dense.matmul(x, weight, lora=(xa_partials, b), **options)
            if matvec.adds_lora(x, weight, b):
                # Without most columns that B has for the FP4 kernel alone.
                xa = fp4_matmul.sum_xa_partials(xa_partials, x, b[:, : matvec.ranks_of(adapter[0])])
                return matvec.matvec(x, weight, lora=(xa, b), **options)
        y = matvec.matmul(x, weight, dtype)
    if adapter is not None:
        with jax.named_scope("lora"):
            y = y + fp4_matmul.lora_product(x, adapter, xa_partials)
    return y if bias is None else y + bias


def _supports(activations: Activations, projection: Projection, epilogue: Epilogue) -> bool:
    """Whether a product ends with an epilogue."""
    x, xa_partials = activations
    weight, adapter = projection
    return fp4_matmul.supports(x, weight, lora=adapter, xa_partials=xa_partials, epilogue=epilogue)


def _adds_xa_partials(projection: Projection, shape: tuple[int, int]) -> bool:
    """Whether a product of x [M, K] wants no partials of the kernel before it."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return fp4_matmul.adds_xa_partials(x, *projection)


def _attention(
    inputs: AttentionInputs, o: Projection, own: Own
) -> tuple[Activations, jax.Array, jax.Array]:
    """Attention, and the updated keys and values; the output projection reads the former."""
    if len(inputs.qkv) > len(inputs.lengths):
        return _attention_of_several(inputs, o, own)
    options = {"eps": own.eps, "num_sms": num_sms()}
    sinks, window = own.layer.get("sinks"), own.window
    # The Hopper kernel makes x A^T too: after attention in one part nothing is left to do.
    unsplit = (
        _adds_xa_partials(o, (len(inputs.qkv), inputs.num_heads * inputs.keys.shape[-1]))
        and attention.num_parts(inputs.keys, num_sms()) == 1
        and sinks is None
        and not window
    )
    with jax.named_scope("attention"):
        if not unsplit:
            parts, keys, values = attention.attend(inputs, window=window, **options)
            merged = attention.merge_parts(parts, o.a, dtype=inputs.qkv.dtype, sinks=sinks)
            return Activations(*merged), keys, values
        if supports_sm90_attention(inputs.keys, inputs.num_heads):
            from pallas_kernels.decode import attention_sm90

            attended, keys, values = attention_sm90.attend(inputs, **options)
        else:
            attended, keys, values = attention.attend_whole(inputs, **options)
        return Activations(attended), keys, values


def _attention_of_several(
    inputs: AttentionInputs, o: Projection, own: Own
) -> tuple[Activations, jax.Array, jax.Array]:
    """As `_attention`, for several new tokens of each row."""
    with jax.named_scope("attention"):
        written = attention_queries.write(inputs, eps=own.eps)
        count = len(inputs.qkv) // len(inputs.lengths)
        limits = {"sinks": own.layer.get("sinks"), "window": own.window}
        merged = _attend_queries(written, count, inputs.num_heads, o.a, **limits)
        return Activations(*merged), written.keys, written.values


def _attend_queries(
    inputs: Queries,
    count: int,
    num_heads: int,
    a: jax.Array | None,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of some tokens of each row [M, N H], and partials of x A^T or None."""
    attend = attention_queries.attend
    if window:
        attend = functools.partial(attend, window=window)
    elif supports_sm90_attention(inputs.keys, num_heads) and _sm90_queries_agree():
        from pallas_kernels.decode import attention_sm90

        attend = attention_sm90.attend_queries
    parts = attend(inputs, count=count, num_sms=num_sms())
    options = {"dtype": inputs.queries.dtype, "heads": num_heads}
    return attention.merge_parts(parts, a, sinks=sinks, **options)


def attend_from(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    rows: jax.Array | None,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """Attention of tokens to a live cache that has their keys, where `decode.supports_layer`.

    Args:
        queries: bfloat16 [R, T, N, H], rotated.
        keys: [B, K, S, H] cached keys.
        values: [B, K, S, H] cached values.
        positions: int32 [R, T] cache positions of the tokens, ascending, and S for padding after
            them. A token sees the positions up to its own; results of padding are undefined.
        rows: int32 [R], the row of the cache, B for one that is not there; None for all in order.
        sinks: [N], a score of each head without a value; None for none.
        window: number of positions that a token sees, its own included; 0 for all.

    Returns:
        bfloat16 [R, T, N, H].
    """
    (count, tokens, heads, head_dim), kv_heads = queries.shape, keys.shape[1]
    group = heads // kv_heads
    multiple = QUERIES // math.gcd(tokens, QUERIES)
    padding = -group % multiple
    grouped = queries.reshape(count, tokens, kv_heads, group, head_dim).swapaxes(1, 2)
    grouped = jnp.pad(grouped, (*[(0, 0)] * 3, (0, padding), (0, 0)))
    newest = jax.lax.cummax(jnp.where(positions < keys.shape[2], positions, 0), axis=1)
    inputs = Queries.of(
        grouped.reshape(count, kv_heads, -1, head_dim),
        newest,
        None if rows is None else jnp.minimum(rows, len(keys) - 1),
        keys,
        values,
    )
    limits = {"sinks": sinks, "window": window}
    return _attend_queries(inputs, tokens, heads, None, **limits)[0].reshape(queries.shape)


def _gated_attention(
    inputs: AttentionInputs, o: Projection, own: Own
) -> tuple[Activations, jax.Array, jax.Array]:
    """As `_attention`, where each query has a gate and the rotation may be partial."""
    with jax.named_scope("attention"):
        inputs, gates = gated_attention.split(inputs, eps=own.eps)
        parts, keys, values = attention.attend(inputs, eps=own.eps, num_sms=num_sms())
        merged = attention.merge_parts(parts, o.a, dtype=gates.dtype, gates=gates)
        return Activations(*merged), keys, values


def _output(own: Own, mixed: Mixed, gate_up: Projection) -> DeferredNorm:
    """The output projection of a mixer added to the residual, and the norm of the sum.

    The projection begins the norm only before a product of gate and up that computes x A^T itself
    and ends with SwiGLU: with a kernel for x A^T nothing would be saved.
    """
    residual, attended, o = mixed
    scale = own.layer["post_attention_layernorm"]
    if own.axis is not None:
        # The sum lies between the product and the norm, which one kernel would compute.
        return _norm(residual, _sum(_project(attended, o), own.axis), scale, gate_up)
    epilogue = AddRmsNorm(residual, scale)
    fused = _supports(attended, o, epilogue) and _supports(
        # The scaled sum has the size of the residual.
        Activations(residual),
        gate_up,
        Swiglu(None, own.eps),
    )
    if not fused:
        return _norm(residual, _project(attended, o), scale, gate_up)
    residual, scaled, square_partials = _project(attended, o, epilogue)
    return DeferredNorm(residual, scaled, None, square_partials)


def _mlp(norm: DeferredNorm, gate_up: Projection, down: Projection, eps: float) -> Activations:
    """SwiGLU of the product of gate and up, which the down projection reads."""
    activations = Activations(norm.scaled, norm.xa_partials)
    epilogue = Swiglu(norm.square_partials, eps)
    if isinstance(gate_up.weight, Fp4Tiles) and _supports(activations, gate_up, epilogue):
        hidden = len(norm.scaled), gate_up.weight.shape[0] // 2
        if not isinstance(down.weight, Fp4Tiles) or _adds_xa_partials(down, hidden):
            return Activations(_project(activations, gate_up, epilogue))
    y = _project(activations, gate_up)
    with jax.named_scope("mlp"):
        return Activations(*norms.swiglu(y, norm.square_partials, down.a, eps=eps))


def supports_sm90_attention(keys: jax.Array | jax.ShapeDtypeStruct, num_heads: int) -> bool:
    """Whether `attention_sm90` computes attention to keys [M, K, S, H] on the default device."""
    if fp4_matmul.device_kernel() != "mosaic" or not _sm90_attention_agrees():
        return False
    from pallas_kernels.decode import attention_sm90

    return attention_sm90.supports_attention(keys, num_heads)


@functools.cache
def _sm90_attention_agrees() -> bool:
    """Whether `attention_sm90` loads and agrees with the definition.

    It uses an API of jax that may change.
    """

    def relative_error():
        from pallas_kernels.decode import attention_sm90

        return self_test.relative_error(attention_sm90.attend)

    what = "the kernel of attention for Hopper GPUs"
    return dispatch.agrees(relative_error, what, "attending without it")


@functools.cache
def _sm90_queries_agree() -> bool:
    """Whether `attention_sm90.attend_queries` loads and agrees with the definition."""

    def relative_error():
        from pallas_kernels.decode import attention_sm90

        return self_test.queries_error(attention_sm90.attend_queries)

    what = "the kernel of attention of several tokens for Hopper GPUs"
    return dispatch.agrees(relative_error, what, "attending without it")


@functools.cache
def _experts_agree() -> bool:
    """Whether the kernels that route tokens and add their experts up agree with the definition."""
    what = "the kernel that routes tokens"
    return dispatch.agrees(self_test.routing_error, what, "computing experts without it")


@functools.cache
def delta_agrees() -> bool:
    """Whether the kernel of the delta rule loads and agrees with the definition."""
    what = "the kernel of the delta rule"
    return dispatch.agrees(self_test.delta_error, what, "computing recurrent layers without it")
