"""Measures the start of rollouts: from the command to the first tokens, every program compiled."""

import time
from collections.abc import Callable

import jax

from qerl_jax.policy.policy import Policy
from qerl_jax.rollout.sampler import Sampler


def measure_startup(
    began: float,
    sampler: Sampler,
    key: jax.Array,
    policy: Policy,
    prompts: list[list[int]],
    *,
    on_compiled: Callable[[int, int], None] | None = None,
) -> dict:
    """Compiles every program that rollouts of these prompts can need, and samples.

    Args:
        began: `time.time()` when the command began.
        sampler: the sampler, without programs.
        key: random key of the draws.
        policy: the policy.
        prompts: token ids of each prompt.
        on_compiled: called with the number of compiled programs and of all programs.

    Returns:
        The seconds from the beginning of the command until the weights were made (`weights_s`),
        until all programs were compiled (`compiled_s`) and until the host received the first tokens
        (`first_tokens_s`); the number of `programs`, and how many were in the cache (`kept`).
    """
    row = {"weights_s": _since(began)}
    sampler = sampler.compiled(key, policy, num_prompts=len(prompts), on_progress=on_compiled)
    row["compiled_s"] = _since(began)
    programs = sampler.executables
    assert programs is not None
    for _ in sampler.steps(key, policy, prompts):
        row.setdefault("first_tokens_s", _since(began))
    return row | {"programs": len(programs), "kept": len(programs) - len(programs.compiled)}


def _since(began: float) -> float:
    return round(time.time() - began, 2)
