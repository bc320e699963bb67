"""Gated DeltaNet (https://arxiv.org/abs/2412.06464): a state instead of keys and values.

A head has a state S [Dk, Dv], which a token with query q, key k and value v changes by

    S <- e^g S;    S <- S + k (beta (v - S^T k))^T;    o = S^T q,

with a decay g <= 0 and a rate beta in (0, 1) that follow from the token. Queries, keys and values
come from a causal convolution of each channel, and queries and keys have length 1. All of it is
computed in float32.

A decode step runs these equations. Whole rows and packed buffers run in chunks of `CHUNK` tokens: a
chunk is one triangular system, and only the states between chunks are sequential. With the sums c
of g from the start of the chunk, what the tokens of a chunk write, u = beta (v - S^T k), solves

    u_i + sum over j < i of beta_i e^(c_i - c_j) (k_i k_j) u_j = beta_i (v_i - e^c_i S0^T k_i).

In a packed buffer the tokens before a token are those that it sees: its own completion and the
prompt of its group. So sums and decays run along them, the system has zeros elsewhere, and the
state S0 in front of the chunk is that of the completion, that of the prompt, or zero. Nothing is
added up in an order that a GPU chooses.

Letters besides those of the design page: n chunks, C tokens of a chunk, S states, Kh key heads, R
value heads of each, Dk and Dv widths of a key and of a value.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention import PADDING, PART_BITS, Segments
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.policy.config import RecurrentConfig

CHUNK = 64
_LENGTH_EPS = 1e-6  # under the root of the length of queries and keys
_BEFORE = jnp.iinfo(jnp.int32).min  # the segment in front of the first token


class Gates(NamedTuple):
    """What decides how much of the state a token keeps and writes."""

    decay: jax.Array  # float32 [B, T, N] logarithm g of the factor of the state
    rate: jax.Array  # float32 [B, T, N] part beta of the new value that is written


def gates(ba: jax.Array, layer: dict) -> Gates:
    """Returns the gates of tokens from their projections [B, T, 2 N] by in_proj_b and in_proj_a."""
    b, a = jnp.split(ba, 2, axis=-1)
    step = jax.nn.softplus(a.astype(jnp.float32) + layer["dt_bias"])
    return Gates(-jnp.exp(layer["a_log"]) * step, jax.nn.sigmoid(b.astype(jnp.float32)))


def split_heads(x: jax.Array, shapes: RecurrentConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries and keys [..., Kh, Dk] of length 1 and values [..., Kh, R, Dv], in float32.

    x [..., channels] are results of the convolution. Queries are divided by sqrt(Dk), too.
    """
    keys = shapes.key_heads * shapes.key_dim
    q, k, v = jnp.split(x.astype(jnp.float32), (keys, 2 * keys), axis=-1)
    q, k = (part.reshape(*part.shape[:-1], shapes.key_heads, -1) for part in (q, k))
    q, k = (
        part * jax.lax.rsqrt(jnp.sum(jnp.square(part), axis=-1, keepdims=True) + _LENGTH_EPS)
        for part in (q, k)
    )
    ratio = shapes.value_heads // shapes.key_heads
    v = v.reshape(*v.shape[:-1], shapes.key_heads, ratio, shapes.value_dim)
    return q * shapes.key_dim**-0.5, k, v


def convolve(
    x: jax.Array,
    weight: jax.Array,
    layout: "Layout | None" = None,
    window: jax.Array | None = None,
) -> jax.Array:
    """Convolves each channel with the tokens that a token sees, and applies SiLU, in x's dtype.

    x is [B, T, channels], and weight [channels, 1, W] has the newest token last. `layout` is that
    of a packed buffer, of which B is 1; None for rows. `window` [B, channels, W - 1] has the inputs
    before those of rows; None for zeros.
    """
    taps = weight.astype(jnp.float32)[:, 0]
    width = taps.shape[1]
    if layout is None:
        earlier = _with_window(x, window, width)
        shifts = (earlier[:, i : i + x.shape[1]] for i in range(width))
    else:
        shifts = (part[None] for part in _earlier_tokens(x[0], layout.sources))
    total = sum(part.astype(jnp.float32) * taps[:, i] for i, part in enumerate(shifts))
    return jax.nn.silu(total).astype(x.dtype)


def convolve_step(
    x: jax.Array, window: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolves one token [B, channels] of each row.

    Returns the results, and the window [B, channels, W - 1] of earlier inputs with the new ones. It
    is zero before the first.
    """
    whole = jnp.concatenate([window, x[..., None].astype(window.dtype)], axis=-1)
    total = jnp.sum(whole.astype(jnp.float32) * weight.astype(jnp.float32)[:, 0], axis=-1)
    return jax.nn.silu(total).astype(x.dtype), whole[..., 1:]


def last_window(
    x: jax.Array, lengths: jax.Array, width: int, window: jax.Array | None = None
) -> jax.Array:
    """Returns the window [B, channels, W - 1] after rows of inputs x [B, T, channels].

    The rows have int32 [B] lengths, and W is `width`. `window` is that before them; None for zeros.
    """
    padded = _with_window(x, window, width)
    index = lengths[:, None, None] + jnp.arange(width - 1)[:, None]
    return jnp.take_along_axis(padded, index, axis=1).swapaxes(1, 2)


def _with_window(x: jax.Array, window: jax.Array | None, width: int) -> jax.Array:
    """Returns inputs [B, W - 1 + T, channels] with the W - 1 before them."""
    if window is None:
        return jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return jnp.concatenate([window.swapaxes(1, 2).astype(x.dtype), x], axis=1)


def delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Applies the rule to one token of each row.

    Queries and keys are [B, Kh, Dk], values [B, Kh, R, Dv], gates [B, N] and states [B, N, Dk, Dv].
    The state is read for the old value and the output at once, and once more to be written. Returns
    outputs like the values in float32, and the new state in its dtype.
    """
    old = state.astype(jnp.float32).reshape(*v.shape[:3], *state.shape[2:])
    decay = jnp.exp(gates.decay).reshape(*v.shape[:3], 1)
    rate = gates.rate.reshape(*v.shape[:3], 1)
    keys, queries = k[:, :, None, :, None], q[:, :, None, :, None]
    read = decay * jnp.sum(old * keys, axis=-2)
    written = rate * (v - read)
    own = jnp.sum(q * k, axis=-1)[:, :, None, None]
    out = decay * jnp.sum(old * queries, axis=-2) + own * written
    new = decay[..., None] * old + keys * written[..., None, :]
    return out, new.reshape(state.shape).astype(state.dtype)


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    layout: "Layout | None" = None,
    state: jax.Array | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Applies the rule to rows, or to a packed buffer with a layout, of which B is 1.

    Queries and keys are [B, T, Kh, Dk], values [B, T, Kh, R, Dv] and gates [B, T, N], in float32. A
    token whose decay and rate are 0 leaves the state as it is. `state` [B, N, Dk, Dv] is that
    before rows; None for zeros. `dtype` is that of the layer: in bfloat16 a Hopper GPU multiplies
    in the kernel of `chunks_sm90`, which keeps the states in float32, too. Returns outputs like the
    values, and the last state of each row.
    """
    if has_kernel(dtype, k.shape[-1], v.shape[-1]):
        # What it keeps for its backward pass, XLA would otherwise compute before that of the MLP.
        return jax.checkpoint(functools.partial(_rule, run=_run_kernel))(
            q, k, v, gates, layout, state
        )
    return _rule(q, k, v, gates, layout, state, run=_run_chunks)


def _rule(q, k, v, gates, layout, state, *, run):
    batch, length = q.shape[:2]
    heads = v.shape[2:4]
    decay, rate = (x.reshape(*x.shape[:2], *heads) for x in gates)
    chunks = tuple(_chunks(x) for x in (q, k, v, decay, rate))
    visibility = _visibility(length) if layout is None else layout.visibility
    parts = jax.vmap(_prepare, in_axes=(1, 0))(chunks, visibility)
    shape = parts.sees.shape[1], batch, *heads, k.shape[-1], v.shape[-1]
    begin = _unlike_others(shape, parts.rates)
    if state is not None:
        begin += state.reshape(shape[1:])
    states, out = run(begin, parts)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, *v.shape[2:])[:, :length]
    return out, states[0].reshape(batch, -1, *shape[-2:])


def _chunks(x: jax.Array) -> jax.Array:
    """Returns x [B, T, ...] as [B, n, C, ...], with zeros at its end."""
    padding = [(0, 0), (0, -x.shape[1] % CHUNK), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding).reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


class _Borders(NamedTuple):
    """How the segments of a packed buffer lie in a chunk."""

    # float32 [n, 2, C], 1 where a token sees the state of the last token before the chunk, and
    # where it sees that of the prompt of this last token alone. No token has both, and a token sees
    # no other one of its chunk with another state.
    starts: jax.Array
    # bool [n, C], whether a token is of the prompt that the chunk's last token sees.
    prompt: jax.Array
    goes_on: jax.Array  # float32 [n], 1 where the group of the last token began before the chunk


class _Visibility(NamedTuple):
    """Which tokens of a chunk see each other, and which states in front of it they see."""

    # bool [n, C, C], whether a token sees another one of its chunk, itself included.
    seen: jax.Array
    # The borders of segments; None for rows, in which a token sees all before it.
    borders: _Borders | None


def _visibility(length: int) -> _Visibility:
    """Returns which tokens of rows of `length` tokens see each other."""
    shape = -(-length // CHUNK), CHUNK, CHUNK
    return _Visibility(jnp.broadcast_to(jnp.tril(jnp.ones(shape[1:], bool)), shape), None)


def _visibility_of(ids: jax.Array) -> _Visibility:
    """Returns which tokens of a packed buffer of int32 segments [n C] see each other."""
    ids = ids.reshape(-1, CHUNK)
    before = jnp.concatenate([jnp.full(1, _BEFORE, jnp.int32), ids[:-1, -1]])[:, None]
    group, is_prompt = ids >> PART_BITS, (ids & ((1 << PART_BITS) - 1)) == 0
    in_group = group == before >> PART_BITS
    shares = (group[:, :, None] == group[:, None]) & is_prompt[:, None]
    # At the end of a prompt both states are equal.
    ends_prompt = before & ((1 << PART_BITS) - 1) == 0
    runs = in_group & ((ids == before) | ends_prompt)
    starts = jnp.stack([runs, in_group & ~runs], axis=1)
    borders = _Borders(
        starts=starts.astype(jnp.float32),
        prompt=(group == group[:, -1:]) & is_prompt,
        goes_on=in_group[:, -1].astype(jnp.float32),
    )
    seen = (ids[:, :, None] == ids[:, None]) | shares
    return _Visibility(seen & jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), borders)


class _Sources(NamedTuple):
    """Where the tokens of a packed buffer find the `W - 1` tokens that they see before them."""

    # int32 [W - 1, n C], the token at the distances W - 1, ..., 1 before each token; one past the
    # end where it sees none.
    earlier: jax.Array
    # int32 [n, W - 1] places of the last tokens of a prompt for the first of the chunks that need
    # them; places past the end, each another one, elsewhere.
    tails: jax.Array
    readers: jax.Array  # bool [n, n], the chunk that gathers the tails of a chunk
    # bool [n, W - 1, C, 2 (W - 1) + C], for the distances W - 1, ..., 1 the source of each token: a
    # tail, the end of the chunk before, or its chunk.
    selected: jax.Array


class Layout(NamedTuple):
    """What recurrent layers read of the segments of a packed buffer: the same in every layer."""

    visibility: _Visibility
    sources: _Sources


def layout_of(segments: Segments, shapes: RecurrentConfig) -> Layout:
    """Returns the layout of a packed buffer."""
    ids = jnp.pad(segments.ids, (0, -len(segments.ids) % CHUNK), constant_values=PADDING)
    return Layout(_visibility_of(ids), _sources_of(ids, shapes.window))


class _Part(NamedTuple):
    """A chunk as the scan over chunks reads it, in float32; the dots are B, Kh and R.

    Of rows there is S = 1 state, of a packed buffer two: the running one and that of its prompt.
    """

    queries: jax.Array  # [.., C, Dk], of which R is 1
    keys: jax.Array  # [.., C, Dk], of which R is 1
    values: jax.Array  # [.., C, Dv], times the rate
    rates: jax.Array  # [.., C]
    inverse: jax.Array  # [.., C, C] inverse of the triangular system
    # [.., C, C] products of queries with the keys that they see, and the decay between.
    scores: jax.Array
    sees: jax.Array  # [S, .., C] decay since a state, or 0 for a token that does not see it
    # [S, .., C] decay until the end of a state, or 0 for a token that is not in it.
    writes: jax.Array
    keeps: jax.Array  # [S, S, ..] factors of the old states in each new state


def _prepare(chunk: tuple[jax.Array, ...], visibility: _Visibility) -> _Part:
    """Computes of one chunk what does not depend on the states.

    The chunk has queries and keys [B, C, Kh, Dk], values [B, C, Kh, R, Dv], decays and rates
    [B, C, Kh, R]. Sums of decays are taken in the chunk alone, so that none is much larger than a
    difference.
    """
    q, k = (jnp.moveaxis(x, 1, 2)[:, :, None] for x in chunk[:2])
    v, decay, rate = (jnp.moveaxis(x, 1, 3) for x in chunk[2:])
    # XLA would add up the gradient of the rates with the layout of the tokens: six times slower.
    rate = jax.lax.optimization_barrier(rate)
    seen = visibility.seen
    # In full precision, because the exponential of the sums follows.
    sums = jnp.einsum("ij,bkrj->bkri", seen.astype(jnp.float32), decay, precision="highest")
    between = jnp.exp(jnp.where(seen, sums[..., :, None] - sums[..., None, :], -jnp.inf))
    since, writes = jnp.exp(sums), between[None, ..., -1, :]
    sees, keeps = since[None], since[None, None, ..., -1]
    if (borders := visibility.borders) is not None:
        sees = borders.starts[:, None, None, None] * since
        # The state of the prompt ends with the last token of the prompt.
        total = jnp.sum(jnp.where(borders.prompt, decay, 0.0), axis=-1)
        after = jnp.where(borders.prompt, total[..., None] - sums, -jnp.inf)
        writes = jnp.concatenate([writes, jnp.exp(after)[None]])
        of_prompt = jnp.stack([jnp.zeros_like(total), jnp.exp(total) * borders.goes_on])
        keeps = jnp.stack([sees[..., -1], of_prompt])
    products, scores = (jnp.einsum("bkxid,bkxjd->bkxij", x, k) * between for x in (k, q))
    inverse = _inverse(rate[..., None] * products)
    return _Part(
        queries=q,
        keys=k,
        values=rate[..., None] * v,
        rates=rate,
        inverse=inverse,
        scores=scores,
        sees=sees,
        writes=writes,
        keeps=keeps,
    )


@jax.custom_vjp
def _inverse(matrix: jax.Array) -> jax.Array:
    """Returns the inverses of lower triangular matrices [.., C, C] whose diagonal is 1.

    What the arguments hold on the diagonal and above it is not read.
    """
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    return jax.lax.linalg.triangular_solve(
        matrix, identity, left_side=True, lower=True, unit_diagonal=True
    )


def _inverse_fwd(matrix):
    inverse = _inverse(matrix)
    return inverse, inverse


def _inverse_bwd(inverse, gradient):
    half = jnp.einsum("...ji,...jk->...ik", inverse, gradient)
    return (jnp.tril(-jnp.einsum("...ij,...kj->...ik", half, inverse), -1),)


_inverse.defvjp(_inverse_fwd, _inverse_bwd)


def _advance(states: jax.Array, part: _Part) -> tuple[jax.Array, jax.Array]:
    """Takes the states [S, B, Kh, R, Dk, Dv] through a chunk; returns its outputs, too."""

    def read(rows: jax.Array) -> jax.Array:
        parts = jnp.einsum("bkxid,sbkrdv->sbkriv", rows, states)
        return jnp.sum(part.sees[..., None] * parts, axis=0)

    missing = part.values - part.rates[..., None] * read(part.keys)
    written = jnp.einsum("...ij,...jv->...iv", part.inverse, missing)
    out = read(part.queries) + jnp.einsum("...ij,...jv->...iv", part.scores, written)
    new = jnp.einsum("bkxid,sbkriv->sbkrdv", part.keys, part.writes[..., None] * written)
    new = new + jnp.sum(part.keeps[..., None, None] * states, axis=1)
    return new, jnp.moveaxis(out, 3, 1)


@jax.custom_vjp
def _run_chunks(states: jax.Array, parts: _Part) -> tuple[jax.Array, jax.Array]:
    """Takes the states through n chunks; returns the last ones, and the outputs [n, ...].

    The backward pass keeps the states in front of the chunks, computes the rest of a chunk again,
    and writes its gradient over the chunk. A scan would begin with arrays of zeros. XLA makes equal
    arrays of all layers once and copies them at the same time, so that the copies of all layers
    exist at the same time: 0.9 GB for each layer of 27B and 4,352 tokens of an update, and 0.2 GB
    for 8,192 tokens of a prefill.
    """

    def advance(index, carry):
        states, out = carry
        states, outputs = _advance(states, jax.tree.map(lambda x: x[index], parts))
        return states, out.at[index].set(outputs)

    outputs = jax.eval_shape(_advance, states, jax.tree.map(lambda x: x[0], parts))[1]
    count = len(parts.rates)
    out = _unlike_others((count, *outputs.shape), parts.rates)
    return jax.lax.fori_loop(0, count, advance, (states, out))


def _run_chunks_fwd(states, parts):
    count = len(parts.rates)

    def advance(index, carry):
        states, before, out = carry
        before = before.at[index].set(states)
        states, outputs = _advance(states, jax.tree.map(lambda x: x[index], parts))
        return states, before, out.at[index].set(outputs)

    outputs = jax.eval_shape(_advance, states, jax.tree.map(lambda x: x[0], parts))[1]
    before = _unlike_others((count, *states.shape), parts.rates)
    carry = states, before, _unlike_others((count, *outputs.shape), parts.rates)
    states, before, out = jax.lax.fori_loop(0, count, advance, carry)
    return (states, out), (before, parts)


def _run_chunks_bwd(saved, gradients):
    before, parts = saved
    d_states, d_out = gradients
    count = len(parts.rates)

    def retreat(step, carry):
        d_states, parts = carry
        index = count - 1 - step
        part = jax.tree.map(lambda x: x[index], parts)
        _, pull = jax.vjp(_advance, before[index], part)
        d_states, d_part = pull((d_states, d_out[index]))
        return d_states, jax.tree.map(lambda x, new: x.at[index].set(new), parts, d_part)

    return jax.lax.fori_loop(0, count, retreat, (d_states, parts))


_run_chunks.defvjp(_run_chunks_fwd, _run_chunks_bwd)


def has_kernel(dtype: DTypeLike, key_dim: int, value_dim: int, hopper: bool | None = None) -> bool:
    """Whether a device has a kernel for whole rows and buffers of a layer in `dtype`.

    `hopper` says whether it has the kernels of Hopper GPUs; None asks the default device.
    """
    if dtype != jnp.bfloat16 or key_dim != 128 or value_dim % 64:
        return False
    if hopper is not None:
        return hopper
    what = "the kernel of recurrent layers"
    return dispatch.agrees_on_hopper(_kernel_error, what, "multiplying in float32 instead")


def _kernel_error():
    # Mosaic GPU takes seconds to import, and only a Hopper GPU needs it.
    from pallas_kernels import chunks_sm90

    return chunks_sm90.relative_error()


def _run_kernel(states: jax.Array, parts: _Part) -> tuple[jax.Array, jax.Array]:
    """Does what `_run_chunks` does in one kernel, with products of bfloat16."""
    begin = jnp.moveaxis(states, 0, 3)
    # Computed again, its products do not exist while the kernel of the backward pass runs.
    end, out = _run_matrices(_flat(begin, -3), jax.checkpoint(jax.vmap(_matrices))(parts))
    return jnp.moveaxis(end.reshape(begin.shape), 3, 0), jnp.moveaxis(out, 4, 2)


class _Matrices(NamedTuple):
    """A chunk as the kernel reads it: the dots are B, Kh and R.

    What the tokens of a chunk write, and after it their outputs, are `products S0` of the states
    S0 [S Dk, Dv] in front of it, and what is added to these: `written` and `out`.
    """

    products: jax.Array  # bfloat16 [.., 2 C, S Dk]
    written: jax.Array  # float32 [.., C, Dv]
    out: jax.Array  # float32 [.., C, Dv]
    # bfloat16 [.., C, S Dk], times the decay until the end of a state, or 0 for a token that is not
    # in it.
    keys: jax.Array
    keeps: jax.Array  # float32 [.., S, S] factors of the old states in each new state


def _matrices(part: _Part) -> _Matrices:
    """Multiplies the parts of a chunk that do not depend on the states."""
    sees, writes = (jnp.moveaxis(x, 0, -1)[..., None] for x in (part.sees, part.writes))
    # A token, and all that it sees of its chunk, have one state.
    since = jnp.sum(part.sees, axis=0)[..., None]
    written = part.inverse @ part.values
    taken = part.inverse @ (part.rates[..., None] * since * part.keys)
    reads = since * part.queries - part.scores @ taken
    products = jnp.concatenate([-taken, reads], axis=-2)[..., None, :]
    is_seen = jnp.concatenate([sees, sees], axis=-3) > 0
    narrow = jnp.bfloat16
    return _Matrices(
        products=_flat(jnp.where(is_seen, products, 0.0), -2).astype(narrow),
        written=written,
        out=part.scores @ written,
        keys=_flat(writes * part.keys[..., None, :], -2).astype(narrow),
        keeps=jnp.moveaxis(part.keeps, (0, 1), (-2, -1)),
    )


def _flat(x: jax.Array, axis: int) -> jax.Array:
    """Returns x with a negative axis and the one after it as one."""
    end = x.ndim + axis
    return x.reshape(*x.shape[:end], -1, *x.shape[end + 2 :])


@jax.custom_vjp
def _run_matrices(states: jax.Array, chunks: _Matrices) -> tuple[jax.Array, jax.Array]:
    """Takes states [B, Kh, R, S Dk, Dv] through n chunks; returns the outputs [n, .., C, Dv], too.

    The backward pass keeps the states in front of the chunks, and what the tokens write.
    """
    return _run_matrices_fwd(states, chunks)[0]


def _run_matrices_fwd(states, chunks):
    from pallas_kernels import chunks_sm90

    reads, *given, keys, keeps = map(_by_heads, chunks)
    begin, writes = _by_heads(states[None])[0], jnp.swapaxes(keys, 2, 3)
    end, before, both = chunks_sm90.run(begin, reads, writes, keeps, given)
    out = both[:, :, CHUNK:].astype(jnp.float32).reshape(chunks.out.shape)
    saved = before, both[:, :, :CHUNK], reads, keys, keeps
    return (end.reshape(states.shape), out), saved


def _by_heads(x: jax.Array) -> jax.Array:
    """Returns [n, B, Kh, R, ..] as [n, heads, ..]."""
    return x.reshape(len(x), -1, *x.shape[4:])


def _run_matrices_bwd(saved, gradients):
    from pallas_kernels import chunks_sm90

    before, written, reads, keys, keeps = saved
    d_states, d_out = gradients
    shape, given = d_out.shape[:-2], _by_heads(d_out)
    begin, writes = _by_heads(d_states[None])[0], jnp.swapaxes(reads, 2, 3)
    turned = jnp.swapaxes(keeps, 2, 3)
    end, after, d_written = chunks_sm90.run(begin, keys, writes, turned, [given], reverse=True)
    d_both = jnp.concatenate([d_written, given.astype(jnp.bfloat16)], axis=2)
    dot = functools.partial(jnp.einsum, "nhcv,nhkv->nhck", preferred_element_type=jnp.float32)
    d_chunks = _Matrices(
        products=dot(d_both, before).astype(jnp.bfloat16),
        written=d_written.astype(jnp.float32),
        out=given,
        keys=dot(written, after).astype(jnp.bfloat16),
        keeps=_inner_products(after, before, keeps.shape[-1]),
    )
    d_chunks = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[2:]), d_chunks)
    return end.reshape(d_states.shape), d_chunks


_run_matrices.defvjp(_run_matrices_fwd, _run_matrices_bwd)


def _inner_products(x: jax.Array, y: jax.Array, kept: int) -> jax.Array:
    """Returns the inner products float32 [n, heads, S, S] of S states [n, heads, S Dk, Dv] each.

    As a product of matrices of S rows they take four times as long.
    """
    x, y = (a.reshape(*a.shape[:2], kept, -1).astype(jnp.float32) for a in (x, y))
    rows = [[jnp.sum(x[:, :, t] * y[:, :, s], axis=-1) for s in range(kept)] for t in range(kept)]
    return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def _unlike_others(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Returns zeros that are no array of another layer: they depend on rates x, at most 1."""
    return jnp.broadcast_to((x.ravel()[0] > 1).astype(x.dtype), shape)


def _sources_of(ids: jax.Array, width: int) -> _Sources:
    """Returns where the tokens of segments int32 [n C] find the W - 1 = width - 1 before them."""
    tail, count = width - 1, len(ids) // CHUNK
    largest = jnp.iinfo(jnp.int32).max
    order = jnp.where(ids < 0, largest, ids)
    prompts = jnp.where(ids < 0, largest, ids >> PART_BITS << PART_BITS)
    start = jnp.searchsorted(order, order).astype(jnp.int32)
    first = jnp.searchsorted(order, prompts).astype(jnp.int32)
    end = jnp.searchsorted(order, prompts, side="right").astype(jnp.int32)
    position = jnp.arange(len(ids), dtype=jnp.int32)
    block_start = position[::CHUNK, None]
    near = block_start - tail + jnp.arange(tail + CHUNK)
    # The places of the last tokens of the prompt that ended before a chunk; -1 for no token.
    before = block_start[:, 0] - 1
    far = end[before][:, None] - tail + jnp.arange(tail)
    is_over = (before >= 0) & (end[before] <= before) & (end[before] > first[before])
    far = jnp.where(is_over[:, None] & (far >= first[before][:, None]), far, -1)
    # The first of the chunks that need the same tokens gathers them.
    key = jnp.where(is_over, end[before], -1)
    readers = jnp.argmax(key[:, None] == key, axis=1)
    reads = (far >= 0) & (readers == jnp.arange(count))[:, None]
    nowhere = len(ids) + jnp.arange(far.size).reshape(far.shape)
    places = jnp.concatenate([jnp.where(far < near[:, :1], far, -1), near], axis=1)
    earlier, selected = [], []
    for distance in range(tail, 0, -1):
        inside = position - distance
        shared = jnp.where(start < end, -1, end - (distance - (position - start)))
        shared = jnp.where(shared >= first, shared, -1)
        wanted = jnp.where(inside >= start, inside, shared)
        earlier.append(jnp.where(wanted < 0, len(ids), wanted))
        wanted = wanted.reshape(count, CHUNK, 1)
        selected.append((wanted == places[:, None]) & (wanted >= 0))
    return _Sources(
        earlier=jnp.stack(earlier),
        tails=jnp.where(reads, far, nowhere),
        readers=readers[:, None] == jnp.arange(count),
        selected=jnp.stack(selected, axis=1),
    )


@jax.custom_vjp
def _earlier_tokens(x: jax.Array, sources: _Sources) -> list[jax.Array]:
    """Returns for each token of a buffer [T, channels] the `W - 1` tokens that it sees before it.

    The W arrays [T, channels] have the tokens at the distances W - 1, ..., 1, 0; zeros where a
    token sees fewer. A completion's first tokens see the last ones of its prompt. The gradient of
    a gather would add up the completions of a group in the order that a GPU chooses: it is that of
    `_selected_tokens`, which are the same.
    """
    places = sources.earlier[:, : len(x)]
    return [*(x.at[index].get(mode="fill", fill_value=0) for index in places), x]


def _earlier_tokens_fwd(x, sources):
    return _earlier_tokens(x, sources), (sources, x[:0])


def _earlier_tokens_bwd(saved, gradients):
    sources, like = saved
    *gradients, last = gradients
    x = jax.ShapeDtypeStruct(last.shape, like.dtype)
    transposed = jax.linear_transpose(functools.partial(_selected_tokens, sources=sources), x)
    return transposed(gradients)[0] + last, None


_earlier_tokens.defvjp(_earlier_tokens_fwd, _earlier_tokens_bwd)


def _selected_tokens(x: jax.Array, sources: _Sources) -> list[jax.Array]:
    """Returns the tokens at the distances W - 1, ..., 1, by products with zeros and ones.

    A chunk takes them from the chunk, the end of the chunk before it, and the end of the prompt of
    the last token before it. These ends are gathered once for each prompt, and given to the chunks
    by one more product.
    """
    (count, tail), length = sources.tails.shape, len(x)
    x = jnp.pad(x, ((0, count * CHUNK - length), (0, 0)))
    tails = x.at[sources.tails].get(mode="fill", fill_value=0, unique_indices=True)
    tails = _select(sources.readers, tails.reshape(count, -1)).reshape(tails.shape)
    blocks = x.reshape(count, CHUNK, -1)
    ends = jnp.pad(blocks[:-1, CHUNK - tail :], ((1, 0), (0, 0), (0, 0)))
    near = jnp.concatenate([tails, ends, blocks], axis=1)
    shifts = _select(sources.selected.reshape(count, tail * CHUNK, -1), near)
    shifts = jnp.moveaxis(shifts.reshape(count, tail, CHUNK, -1), 1, 0)
    return list(shifts.reshape(tail, len(x), -1)[:, :length])


def _select(selected: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a product with zeros and ones, of which each row has one 1 at most: exact."""
    precision = "highest" if rows.dtype == jnp.float32 else None
    return jnp.matmul(selected.astype(rows.dtype), rows, precision=precision)
