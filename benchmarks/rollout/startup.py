"""Measures the start of rollouts: from the command to the first tokens, every program compiled."""

import time
from collections.abc import Callable
from typing import Any

import jax

from qerl_jax.compile.aot import compile_rollout
from qerl_jax.policy.lora import Lora
from qerl_jax.rollout.engine import generate_steps


def measure_startup(
    began: float,
    key: jax.Array,
    params: dict,
    lora: Lora | None,
    prompts: list[list[int]],
    *,
    on_compiled: Callable[[int, int], None] | None = None,
    **how: Any,
) -> dict:
    """Compiles every program that rollouts of these prompts can need, and samples.

    Args:
        began: `time.time()` when the command began.
        key: random key of the draws.
        params: parameters of the policy.
        lora: adapter of the policy, or None.
        prompts: token ids of each prompt.
        on_compiled: called with the number of compiled programs and of all programs.
        **how: keyword arguments that `generate_steps` and `compile_rollout` have in common.

    Returns:
        The seconds from the beginning of the command until the weights were made (`weights_s`),
        until all programs were compiled (`compiled_s`) and until the host received the first tokens
        (`first_tokens_s`); the number of `programs`, and how many were in the cache (`kept`).
    """
    row = {"weights_s": _since(began)}
    programs = compile_rollout(
        key, params, lora, prompts=len(prompts), on_progress=on_compiled, **how
    )
    row["compiled_s"] = _since(began)
    for _ in generate_steps(key, params, lora, prompts, executables=programs, **how):
        row.setdefault("first_tokens_s", _since(began))
    return row | {"programs": len(programs), "kept": len(programs) - len(programs.compiled)}


def _since(began: float) -> float:
    return round(time.time() - began, 2)
