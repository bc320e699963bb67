"""QeRL in JAX: reinforcement learning of large language models on a 4-bit policy.

    from qerl_jax import load, complete, train

docs/python.md shows how they work together. Public names are imported on first use, so importing
the package costs nothing.
"""

import importlib
from typing import Any

_PUBLIC = {
    "EngineConfig": "qerl_jax.rollout.config",
    "Lora": "qerl_jax.policy.lora",
    "LoraConfig": "qerl_jax.policy.lora",
    "ModelConfig": "qerl_jax.policy.config",
    "Policy": "qerl_jax.policy.policy",
    "QuantTensor": "qerl_jax.policy.quant",
    "SamplingConfig": "qerl_jax.rollout.config",
    "UserError": "qerl_jax.errors",
    "complete": "qerl_jax.evaluation.complete",
    "forward": "qerl_jax.policy.transformer",
    "generate": "qerl_jax.evaluation.complete",
    "load": "qerl_jax.weights.load",
    "numeric_answer": "qerl_jax.rewards.functions",
    "open_policy": "qerl_jax.evaluation.load_policy",
    "open_session": "qerl_jax.training.session",
    "perturb_norms": "qerl_jax.policy.aqn",
    "quantize": "qerl_jax.policy.quant",
    "score": "qerl_jax.rewards.score",
    "sigma_schedule": "qerl_jax.policy.aqn",
    "train": "qerl_jax.training.loop",
    "train_step": "qerl_jax.training.session",
}

__all__ = list(_PUBLIC)  # pyrefly: ignore


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
