"""Log-probabilities of completions under a policy, without holding all logits at once.

Where weights are cut between devices, each has the logits of its part of the vocabulary. Maxima and
sums over the vocabulary are then those of all devices, a number for each token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from qerl_jax.policy import transformer
from qerl_jax.policy.collectives import over_vocabulary, own_tokens
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rl.packing import PackedBuffer

_CHUNK_BYTES = 256 << 20  # size of the float32 logits that are held at a time


def packed_logprobs(
    params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    *,
    model_config: ModelConfig,
    temperature: float | jax.Array,
    recompute: tuple[str, ...] = (),
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the log-probability of each predicted token and the entropy of its distribution.

    A mixture of experts takes the routes of the buffer, if it has them.

    The backward pass computes the products `recompute` of a layer again, as in
    `transformer.packed_hidden_states`. With `entropy_gradient` the entropies have a gradient, which
    costs one more pass over the logits. The temperature is above 0.

    Returns:
        float32 [N] log-probabilities and float32 [N] entropies, in nats, in the order of
        `buffer.targets`. Both are finite and have no meaning outside the mask. Of a mixture also
        the experts that the routers would choose, int32 [L, N, k] in the order of the positions.
    """
    hidden, chosen = _predicting_states(
        params, lora, buffer, model_config=model_config, recompute=recompute
    )
    count = buffer.mask.sum(dtype=jnp.int32)
    logprobs, entropies = _logprobs_and_entropies(
        _head(params), hidden, buffer.targets, count, temperature, model_config, entropy_gradient
    )
    return logprobs, entropies, chosen


def packed_kl(
    params: dict,
    other_params: dict,
    lora: Lora | None,
    buffer: PackedBuffer,
    *,
    model_config: ModelConfig,
    temperature: float | jax.Array,
) -> jax.Array:
    """Returns the sum of KL(policy | other policy) over the predicted tokens of a buffer.

    The KL is exact: it sums over the whole vocabulary. Both policies use the same LoRA, and of a
    mixture of experts the routers of each choose for themselves.

    Returns:
        float32 scalar, in nats.
    """
    buffer = dataclasses.replace(buffer, routes=None)
    hidden, other = (
        _predicting_states(p, lora, buffer, model_config=model_config)[0]
        for p in (params, other_params)
    )

    def exact_kl(_, hidden, other):
        logprobs = _log_softmax(_head(params), hidden, temperature, model_config)
        other_logprobs = _log_softmax(_head(other_params), other, temperature, model_config)
        return None, _exact_kl(logprobs, other_logprobs, model_config)

    count = buffer.mask.sum(dtype=jnp.int32)
    _, kl = _scan_chunks(
        exact_kl, None, (hidden, other), count=count, vocab_size=model_config.vocab_size
    )
    return jnp.sum(jnp.where(buffer.mask > 0, kl, 0.0))


def completion_logprobs(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array,
    *,
    width: int,
    model_config: ModelConfig,
    temperature: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `packed_logprobs` returns, for rows that are not packed.

    Args:
        params: parameters of the policy.
        lora: LoRA of the policy, or None.
        tokens: int32 [B, T] token ids, prompt and completion without a gap, padded on the right.
        prompt_lengths: int32 [B] prompt lengths in tokens, at least 1.
        lengths: int32 [B] lengths of prompt and completion together.
        width: number of columns C of the result, at least the length of the longest completion.
        model_config: architecture of the policy.
        temperature: sampling temperature, above 0.

    Returns:
        float32 [B, C] log-probabilities and float32 [B, C] entropies, in nats. Column c belongs to
        completion token c; values past the end of a completion are finite and have no meaning.
        The entropies have no gradient.
    """
    hidden = transformer.hidden_states(params, lora, tokens, lengths, config=model_config)
    # Position t predicts token t + 1.
    targets = jnp.minimum(prompt_lengths[:, None] + jnp.arange(width), tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, targets[..., None] - 1, axis=1)
    ids = jnp.take_along_axis(tokens, targets, axis=1)
    rows = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1), jnp.int32(ids.size)
    logprobs, entropies = _logprobs_and_entropies(
        _head(params), *rows, temperature, model_config, False
    )
    return logprobs.reshape(ids.shape), entropies.reshape(ids.shape)


def row_divergences(
    params: dict, other_params: dict, tokens: jax.Array, *, model_config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares two policies at each token of a text, at temperature 1.

    Args:
        params: parameters of the policy, on one device.
        other_params: parameters of the other policy.
        tokens: int32 [B, T] rows of text without padding.
        model_config: architecture of both policies.

    Returns:
        float32 [B, T - 1] log-probabilities of the tokens from the second on under the other
        policy, float32 [B, T - 1] exact KL(policy | other policy) of their distributions, in nats,
        and bool [B, T - 1], whether both policies find the same token the likeliest.
    """
    assert model_config.shards == 1
    lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    hidden, other = (
        transformer.hidden_states(p, None, tokens, lengths, config=model_config)[:, :-1]
        for p in (params, other_params)
    )
    ids = tokens[:, 1:]

    def compare(_, hidden, other, ids):
        logprobs = _log_softmax(_head(params), hidden, 1.0, model_config)
        other_logprobs = _log_softmax(_head(other_params), other, 1.0, model_config)
        token_logprobs = jnp.take_along_axis(other_logprobs, ids[:, None], axis=-1)[:, 0]
        agrees = logprobs.argmax(axis=-1) == other_logprobs.argmax(axis=-1)
        return None, (token_logprobs, _exact_kl(logprobs, other_logprobs, model_config), agrees)

    states = (h.reshape(-1, h.shape[-1]) for h in (hidden, other))
    _, results = _scan_chunks(
        compare,
        None,
        (*states, ids.reshape(-1)),
        count=jnp.int32(ids.size),
        vocab_size=model_config.vocab_size,
    )
    return tuple(result.reshape(ids.shape) for result in results)


def _predicting_states(params, lora, buffer, *, model_config, recompute=()):
    """Returns the hidden states [N, D] of a buffer in the order of its predicted tokens.

    And the experts [L, N, k] that the routers choose, or None.
    """
    routes = buffer.routes
    hidden, chosen = transformer.packed_hidden_states(
        params,
        lora,
        buffer.tokens,
        buffer.positions,
        buffer.segments,
        config=model_config,
        recompute=recompute,
        routes=None if routes is None else jnp.moveaxis(routes, 1, 0).astype(jnp.int32),
    )
    # The order is a permutation, so the gradient adds nothing up.
    return hidden.at[buffer.order].get(unique_indices=True, mode="promise_in_bounds"), chosen


def _logprobs_and_entropies(head, hidden, ids, count, temperature, model_config, entropy_gradient):
    """Log-probabilities [M] of ids after states [M, D], and entropies [M].

    The entropies have a gradient only with `entropy_gradient`. Where the logits are held in several
    chunks, the results from `count` on are of no use, and those of whole chunks are zeros.
    """
    if _number_of_chunks(len(ids), model_config.vocab_size) == 1:
        logits = _tempered_logits(head, hidden, temperature)
        return _token_logprobs(logits, ids, model_config, entropy_gradient)
    arguments = head, hidden, ids, count, temperature, model_config, entropy_gradient
    return _token_logprobs_in_chunks(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _token_logprobs(logits, ids, model_config, entropy_gradient):
    """Log-probabilities [M] of ids under logits [M, V], and entropies [M].

    Few passes over the logits: one for the maxima, one for both sums, and one backward.
    """
    return _token_logprobs_fwd(logits, ids, model_config, entropy_gradient)[0]


def _token_logprobs_fwd(logits, ids, model_config, entropy_gradient):
    del entropy_gradient
    logprobs, entropies, normalizers = _statistics(logits, ids, model_config)
    return (logprobs, entropies), (logits, ids, normalizers, entropies)


def _token_logprobs_bwd(model_config, entropy_gradient, residuals, gradients):
    return _logits_gradient(
        *residuals, *gradients, model_config=model_config, entropy_gradient=entropy_gradient
    ), None


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _token_logprobs_in_chunks(
    head, hidden, ids, count, temperature, model_config, entropy_gradient
):
    """`_token_logprobs` for states in place of logits.

    The logits are computed once: while they are held, the forward pass makes the gradient of each
    log-probability by its state, which the backward pass multiplies by a number. Only for a
    gradient of the entropies, or of the head, are they computed again.

    Left to JAX, a chunk that may be skipped hands all that its gradient reads from one conditional
    to another, and XLA copies the head: 1.6 GB for 32B. The temperature has no gradient.
    """
    del entropy_gradient

    def statistics(_, hidden, ids):
        return None, _statistics(_tempered_logits(head, hidden, temperature), ids, model_config)[:2]

    return _scan_chunks(
        statistics, None, (hidden, ids), count=count, vocab_size=model_config.vocab_size
    )[1]


def _token_logprobs_in_chunks_fwd(
    head, hidden, ids, count, temperature, model_config, entropy_gradient
):
    """The residuals have the gradient of each log-probability by its state, or None."""
    arguments = head, hidden, ids, count, temperature
    recomputes = entropy_gradient or any(leaf.perturbed for leaf in jax.tree.leaves(head))
    head, hidden, ids, count, temperature = jax.tree.map(lambda leaf: leaf.value, arguments)

    def statistics(_, hidden, ids):
        logits, pull_back = jax.vjp(lambda x: transformer.logits(head, x), hidden)
        # Otherwise XLA divides by the temperature in a kernel that writes the logits once more.
        logits = _tempered(jax.lax.optimization_barrier(logits), temperature)
        found = _statistics(logits, ids, model_config)
        if recomputes:
            return None, (*found, None)
        logprobs, entropies, normalizers = found
        ones = jnp.ones_like(logprobs), jnp.zeros_like(entropies)
        dlogits = _logits_gradient(
            *(logits, ids, normalizers, entropies, *ones),
            model_config=model_config,
            entropy_gradient=False,
        )
        return None, (*found, *pull_back(dlogits))

    _, (logprobs, entropies, normalizers, slopes) = _scan_chunks(
        statistics, None, (hidden, ids), count=count, vocab_size=model_config.vocab_size
    )
    residuals = head, hidden, ids, count, temperature, normalizers, entropies, slopes
    return (logprobs, entropies), residuals


def _token_logprobs_in_chunks_bwd(model_config, entropy_gradient, residuals, gradients):
    head, hidden, ids, count, temperature, normalizers, entropies, slopes = residuals
    zeros = jnp.zeros_like(entropies)
    gradients = [zeros if isinstance(one, SymbolicZero) else one for one in gradients]
    if slopes is not None:
        # Slopes are without the temperature: bfloat16 has 1, but not 1 / 0.9.
        dhidden = (_tempered(gradients[0], temperature)[:, None] * slopes).astype(hidden.dtype)
        return jax.tree.map(jnp.zeros_like, head), dhidden, None, None, None

    def add_gradient(dhead, hidden, *rest):
        logits, pull_back = jax.vjp(
            lambda head, hidden: _tempered_logits(head, hidden, temperature), head, hidden
        )
        dlogits = _logits_gradient(
            logits, *rest, model_config=model_config, entropy_gradient=entropy_gradient
        )
        dhead_of_chunk, dhidden = pull_back(dlogits)
        return jax.tree.map(jnp.add, dhead, dhead_of_chunk), dhidden

    # XLA removes the gradient of a frozen head, which nothing reads.
    dhead, dhidden = _scan_chunks(
        add_gradient,
        jax.tree.map(jnp.zeros_like, head),
        (hidden, ids, normalizers, entropies, *gradients),
        count=count,
        vocab_size=model_config.vocab_size,
    )
    return dhead, dhidden, None, None, None


_token_logprobs_in_chunks.defvjp(
    _token_logprobs_in_chunks_fwd, _token_logprobs_in_chunks_bwd, symbolic_zeros=True
)


def _statistics(logits, ids, model_config):
    """Log-probabilities of ids, entropies, and log-normalizers of logits [M, V]; [M] each."""
    highest = over_vocabulary(jax.lax.pmax, logits.max(axis=-1), model_config)
    weights = jnp.exp(logits - highest[:, None])
    total = over_vocabulary(jax.lax.psum, weights.sum(axis=-1), model_config)
    normalizer = highest + jnp.log(total)
    index, is_own = own_tokens(ids, model_config)
    token_logits = jnp.take_along_axis(logits, index[:, None], axis=-1)[:, 0]
    if model_config.shards > 1:
        token_logits = over_vocabulary(
            jax.lax.psum, jnp.where(is_own, token_logits, 0.0), model_config
        )
    # A token of probability 0 adds nothing: its logit may be -inf.
    moments = jnp.where(weights > 0, weights * logits, 0.0).sum(axis=-1)
    mean = over_vocabulary(jax.lax.psum, moments, model_config) / total
    return token_logits - normalizer, normalizer - mean, normalizer


def _logits_gradient(
    logits, ids, normalizers, entropies, dlogprobs, dentropies, *, model_config, entropy_gradient
):
    """Gradient of logits [M, V], given those of the log-probabilities [M] and the entropies [M]."""
    logprobs = logits - normalizers[:, None]
    probabilities = jnp.exp(logprobs)
    index, is_own = own_tokens(ids, model_config)
    is_chosen = jnp.arange(logits.shape[-1]) == index[:, None]
    if model_config.shards > 1:
        is_chosen &= is_own[:, None]
    result = dlogprobs[:, None] * (is_chosen - probabilities)
    if entropy_gradient:
        # dH/dz = -p (log p + H). A token of probability 0 adds nothing: its logit may be -inf.
        above = jnp.where(probabilities > 0, logprobs + entropies[:, None], 0.0)
        result -= dentropies[:, None] * probabilities * above
    return result


def _log_softmax(head, hidden, temperature, model_config):
    logits = _tempered_logits(head, hidden, temperature)
    if model_config.shards == 1:
        return jax.nn.log_softmax(logits)
    highest = over_vocabulary(jax.lax.pmax, logits.max(axis=-1, keepdims=True), model_config)
    below = logits - highest
    total = jnp.exp(below).sum(axis=-1, keepdims=True)
    return below - jnp.log(over_vocabulary(jax.lax.psum, total, model_config))


def _exact_kl(logprobs, other_logprobs, model_config):
    """KL [M] between distributions, given all log-probabilities [M, V]."""
    partial_kl = jnp.sum(jnp.exp(logprobs) * (logprobs - other_logprobs), axis=-1)
    return over_vocabulary(jax.lax.psum, partial_kl, model_config)


def _head(params):
    """The head alone, as the tree that `transformer.logits` reads it from."""
    return {"embed_tokens": params.get("lm_head", params["embed_tokens"])}


def _tempered_logits(head, hidden, temperature):
    return _tempered(transformer.logits(head, hidden), temperature)


def _tempered(logits, temperature):
    # As in the sampler, to the bit.
    return logits * (1.0 / temperature)


def logits_chunk(vocab_size: int) -> int:
    """Returns how many tokens have their logits in memory at a time."""
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


def _number_of_chunks(tokens, vocab_size):
    return -(-tokens // logits_chunk(vocab_size))


def _scan_chunks(function, carry, args, *, count, vocab_size):
    """Applies `function` to a carry and arrays [M, ...] in chunks, to bound the logits in memory.

    Of several chunks, those that begin at `count` or later are not computed: the carry stays as it
    is, and their results are zeros.

    Returns:
        The last carry and the results [M, ...].
    """
    total = len(args[0])
    chunks = _number_of_chunks(total, vocab_size)
    if chunks == 1:
        return function(carry, *args)
    size = -(-total // chunks)

    def split(x):
        padding = ((0, chunks * size - total),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    def skip(carry, *args):
        _, shapes = jax.eval_shape(function, carry, *args)
        return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def chunk(carry, part):
        first, *args = part
        return jax.lax.cond(first < count, function, skip, carry, *args)

    parts = size * jnp.arange(chunks), *(split(x) for x in args)
    carry, outputs = jax.lax.scan(chunk, carry, parts)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:total], outputs)
