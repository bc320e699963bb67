"""Batches from arrays of sampled rows, which are not a rollout."""

import types

from qerl_jax.rl.batch import make_batch


def row_batch(prompts, tokens, lengths, finished, advantages, logprobs, roles=None, **options):
    """`batch.make_batch` for arrays [B, M] and [B]."""
    sampled = types.SimpleNamespace(
        tokens=tokens, lengths=lengths, finished=finished, logprobs=logprobs, roles=roles
    )
    return make_batch(prompts, sampled, advantages, **options)
