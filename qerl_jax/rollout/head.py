"""The head of a rollout in four bits: a quarter of the bytes that it costs every decode step."""

import concurrent.futures
import os

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.policy.quant import in_machine_order, quantize

HEAD_FORMATS = ("", "nvfp4")

_ROWS = 8192  # that are quantised at a time and share a global scale


def check_head_format(format: str) -> None:
    """Raises a UserError where there is no such format."""
    if format not in HEAD_FORMATS:
        raise UserError(f"head_format={format!r}: {' or '.join(map(repr, HEAD_FORMATS))}")


def rollout_head(params: dict, format: str) -> dict:
    """What takes the place of the policy's head while it samples, to be put over its parameters.

    The policy that samples is then another one than the trainer's, whose head stays as it is: the
    log-probabilities of tokens drawn at temperature 1 for GSM8K differ by 0.053 on average with
    Qwen2.5-Coder-1.5B (1536 tokens in float32; without it by 1e-6), and by 0.29 with SmolLM2-135M
    (3140 tokens).

    Args:
        params: the policy, whose head is not trained.
        format: '' leaves the head as it is, 'nvfp4' rounds it as `quant.quantize` does.

    Returns:
        {} or {'lm_head': a QuantTensor [V, D]}.

    Raises:
        UserError: there is no such format, or it does not fit the head.
    """
    check_head_format(format)
    if not format:
        return {}
    head = np.asarray(params.get("lm_head", params["embed_tokens"]))
    parts = [head[first : first + _ROWS] for first in range(0, len(head), _ROWS)]
    # Few, as each needs some copies of its part in float32.
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        packed = list(pool.map(lambda part: quantize([part], format=format), parts))
    weight = jax.tree.map(lambda *arrays: jnp.asarray(np.concatenate(arrays)), *packed)
    return in_machine_order({"lm_head": weight})
