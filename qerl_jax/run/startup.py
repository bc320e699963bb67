"""How long rollouts take to begin: from the command to the first tokens, every program compiled."""

import collections
import time
from typing import Any

import jax

from qerl_jax.policy.lora import Lora
from qerl_jax.rollout.engine import compile_ahead, generate

_CACHE_EVENTS = "/jax/compilation_cache/"


def measure_startup(
    began: float, params: dict, lora: Lora | None, prompts: list[list[int]], **how: Any
) -> dict:
    """Compiles all that rollouts of so many prompts can need, and samples.

    Args:
        began: `time.time()` when the command began.
        params: the policy.
        lora: its adapter, or None.
        prompts: token ids.
        **how: the arguments of `generate` that `compile_ahead` wants too.

    Returns:
        Seconds since the command began until the weights were there, until all was compiled and
        until the host saw the first chunk of tokens; the programs, and how often JAX's cache of
        compiled ones had one or had it not.
    """
    row = {"weights_s": _since(began)}
    counts: collections.Counter[str] = collections.Counter()

    def count(event: str, **_: Any) -> None:
        counts[event] += 1

    def note_programs(_: int, total: int) -> None:
        row["programs"] = total

    def look(_: Any, tokens: int) -> None:
        if tokens:
            row.setdefault("first_tokens_s", _since(began))

    key = jax.random.key(0)
    how["prompt_width"] = max(map(len, prompts))
    jax.monitoring.register_event_listener(count)
    try:
        compile_ahead(
            key,
            params,
            lora,
            prompts=len(prompts),
            on_progress=note_programs,
            **how,
        )
    finally:
        jax.monitoring.unregister_event_listener(count)
    row["compiled_s"] = _since(began)
    generate(
        key,
        params,
        lora,
        prompts,
        pad_id=0,
        compiled=True,
        on_progress=look,
        **how,
    )
    return row | {
        "cache_hits": counts[_CACHE_EVENTS + "cache_hits"],
        "cache_misses": counts[_CACHE_EVENTS + "cache_misses"],
    }


def _since(began: float) -> float:
    return round(time.time() - began, 2)
