"""Log-probabilities of completions under a policy, without ever holding all logits."""

import jax
import jax.numpy as jnp

from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout.sampling import entropy

_CHUNK_BYTES = 256 << 20  # float32 logits held at a time


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
    """Log-probability of each completion token, and the entropy of its distribution.

    Args:
        params: the policy.
        lora: its adapter, or None.
        tokens: int32 [B, T], prompt and completion without a gap, padded on the right.
        prompt_lengths: int32 [B].
        lengths: int32 [B], prompt and completion together.
        width: C, the longest completion.
        config: the architecture.
        temperature: of the sampling; 0 counts as 1.
        remat: recompute each layer in the backward pass.

    Returns:
        float32 [B, C] log-probabilities and entropies in nats, aligned with the completion;
        columns beyond a row's completion are finite and mean nothing.
    """
    hidden, ids = _completion_states(
        params, lora, tokens, prompt_lengths, lengths, width=width, config=config, remat=remat
    )

    def chunk(hidden, ids):
        logprobs = _log_softmax(params, hidden, temperature)
        chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
        return chosen, jax.lax.stop_gradient(entropy(logprobs))

    outputs = _map_rows(chunk, (hidden, ids.reshape(-1)), vocab_size=config.vocab_size)
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
    """KL(policy | other policy) of the next-token distributions at each completion token.

    Exact, over the whole vocabulary; the two policies share the adapter. The arguments are those of
    `completion_logprobs`.

    Returns:
        float32 [B, C] in nats.
    """
    hidden, other = (
        _completion_states(p, lora, tokens, prompt_lengths, lengths, width=width, config=config)[0]
        for p in (params, other_params)
    )

    def chunk(hidden, other):
        logprobs = _log_softmax(params, hidden, temperature)
        other_logprobs = _log_softmax(other_params, other, temperature)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - other_logprobs), axis=-1)

    kl = _map_rows(chunk, (hidden, other), vocab_size=config.vocab_size)
    return kl.reshape(tokens.shape[0], width)


def _completion_states(
    params, lora, tokens, prompt_lengths, lengths, *, width, config, remat=False
):
    """Hidden states [B C, D] that predict the completion tokens, and their ids [B, C]."""
    hidden = transformer.hidden_states(params, lora, tokens, lengths, config=config, remat=remat)
    # Position t predicts token t + 1.
    targets = jnp.minimum(prompt_lengths[:, None] + jnp.arange(width), tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, targets[..., None] - 1, axis=1)
    return hidden.reshape(-1, hidden.shape[-1]), jnp.take_along_axis(tokens, targets, axis=1)


def _log_softmax(params, hidden, temperature):
    return jax.nn.log_softmax(transformer.logits(params, hidden) / (temperature or 1.0))


def _map_rows(function, args, *, vocab_size):
    """function(*args) over leading rows [M, ...], in chunks whose logits are recomputed."""
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
