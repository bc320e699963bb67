"""Log-probabilities of completions under a policy, without holding all logits at once."""

import jax
import jax.numpy as jnp

from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout.sampling import entropy

_CHUNK_BYTES = 256 << 20  # size of the float32 logits that are held at a time


def completion_logprobs(
    params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array,
    *,
    width: int,
    config: ModelConfig,
    temperature: float,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of each completion token and the entropy of its distribution.

    Args:
        params: parameters of the policy.
        lora: LoRA of the policy, or None.
        tokens: int32 [B, T] token ids, prompt and completion without a gap, padded on the right.
        prompt_lengths: int32 [B] prompt lengths in tokens, at least 1.
        lengths: int32 [B] lengths of prompt and completion together.
        width: number of columns C of the result, at least the length of the longest completion.
        config: architecture of the policy.
        temperature: sampling temperature; 0 counts as 1.
        remat: whether each layer is recomputed in the backward pass.

    Returns:
        float32 [B, C] log-probabilities and float32 [B, C] entropies, in nats. Column c belongs to
        completion token c; values past the end of a completion are finite and have no meaning.
        The entropies have no gradient.
    """
    hidden, ids = _completion_states(
        params, lora, tokens, prompt_lengths, lengths, width=width, config=config, remat=remat
    )

    def chosen_and_entropy(hidden, ids):
        logprobs = _log_softmax(params, hidden, temperature)
        chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
        return chosen, jax.lax.stop_gradient(entropy(logprobs))

    outputs = _map_rows(chosen_and_entropy, (hidden, ids.reshape(-1)), vocab_size=config.vocab_size)
    return tuple(x.reshape(ids.shape) for x in outputs)


def completion_kl(
    params: dict,
    other_params: dict,
    lora: Lora | None,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array,
    *,
    width: int,
    config: ModelConfig,
    temperature: float,
) -> jax.Array:
    """Returns KL(policy | other policy) of the next-token distributions at each completion token.

    The KL is exact: it sums over the whole vocabulary. Both policies use the same LoRA.

    Args:
        params: parameters of the policy.
        other_params: parameters of the other policy.
        lora: LoRA of both policies, or None.
        tokens: int32 [B, T] token ids, as in `completion_logprobs`.
        prompt_lengths: int32 [B] prompt lengths in tokens, at least 1.
        lengths: int32 [B] lengths of prompt and completion together.
        width: number of columns C of the result, at least the length of the longest completion.
        config: architecture of both policies.
        temperature: sampling temperature; 0 counts as 1.

    Returns:
        float32 [B, C] KL in nats; values past the end of a completion have no meaning.
    """
    hidden, other = (
        _completion_states(p, lora, tokens, prompt_lengths, lengths, width=width, config=config)[0]
        for p in (params, other_params)
    )

    def exact_kl(hidden, other):
        logprobs = _log_softmax(params, hidden, temperature)
        other_logprobs = _log_softmax(other_params, other, temperature)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - other_logprobs), axis=-1)

    kl = _map_rows(exact_kl, (hidden, other), vocab_size=config.vocab_size)
    return kl.reshape(tokens.shape[0], width)


def _completion_states(
    params, lora, tokens, prompt_lengths, lengths, *, width, config, remat=False
):
    """Returns the hidden states [B C, D] that predict the completion tokens, and the ids [B, C]."""
    hidden = transformer.hidden_states(params, lora, tokens, lengths, config=config, remat=remat)
    # Position t predicts token t + 1.
    targets = jnp.minimum(prompt_lengths[:, None] + jnp.arange(width), tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, targets[..., None] - 1, axis=1)
    return hidden.reshape(-1, hidden.shape[-1]), jnp.take_along_axis(tokens, targets, axis=1)


def _log_softmax(params, hidden, temperature):
    return jax.nn.log_softmax(transformer.logits(params, hidden) / (temperature or 1.0))


def _map_rows(function, args, *, vocab_size):
    """Applies `function` to arrays [M, ...] in chunks of rows, to bound the logits in memory.

    The backward pass recomputes the logits of a chunk instead of storing them.
    """
    function = jax.checkpoint(function)
    rows = args[0].shape[0]
    chunks = -(-rows // max(1, _CHUNK_BYTES // (4 * vocab_size)))
    if chunks == 1:
        return function(*args)
    size = -(-rows // chunks)

    def split(x):
        padding = ((0, chunks * size - rows),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    outputs = jax.lax.map(lambda args: function(*args), tuple(split(x) for x in args))
    return jax.tree.map(lambda x: x.reshape(-1)[:rows], outputs)
