"""The policy loss of whole rows [B, C], as peers and their goldens state it, and its config."""

import jax.numpy as jnp

from qerl_jax.config.fields import ROWS
from qerl_jax.rl import losses

DEFAULTS = {
    name: ROWS[f"rl.{name}"].default
    for name in (
        *("clip_low", "clip_high", "sapo_temperature_pos", "sapo_temperature_neg"),
        *("kl_coef", "kl_grad", "entropy_coef"),
    )
}


def loss_config(name, **options):
    """A named loss with the defaults of the config's fields."""
    return losses.loss_config(name, **DEFAULTS | options)


def row_loss(logprobs, *, config, advantages, mask, weights, **others):
    """`losses.policy_loss` for arrays [B, C] and advantages [B]."""
    rows, columns = jnp.shape(logprobs)
    flat = {"mask": mask, "weights": weights, **others}
    flat = {name: None if x is None else jnp.reshape(x, -1) for name, x in flat.items()}
    entropies = flat.pop("entropies", None)
    tokens = losses.LossTokens(
        advantages=jnp.repeat(advantages, columns),
        rows=jnp.repeat(jnp.arange(rows), columns),
        **flat,
    )
    return losses.policy_loss(logprobs.reshape(-1), tokens, config=config, entropies=entropies)
