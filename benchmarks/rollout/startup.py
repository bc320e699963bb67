"""How long rollouts take to begin: from the command to the first tokens, every program compiled."""

import time
from collections.abc import Callable
from typing import Any

import jax

from qerl_jax.policy.lora import Lora
from qerl_jax.rollout.aot import compile_rollout
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
    """Compiles all that rollouts of so many prompts can need, and samples.

    Args:
        began: `time.time()` when the command began.
        key: of the draws.
        params: the policy.
        lora: its adapter, or None.
        prompts: token ids.
        on_compiled: the `on_progress` of `compile_rollout`.
        **how: the keyword arguments that `generate_steps` and `compile_rollout` have in common.

    Returns:
        Seconds since the command began until the weights were there, until all was compiled and
        until the host saw the first tokens; the programs, and how many of them were kept by an
        earlier process.
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
