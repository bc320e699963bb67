"""What tells the rows of the rollout benchmarks apart."""

_POLICY = (
    "kind", "model", "format", "weights", "lora_rank", "kv_cache_dtype", "head_format",
    "chunk_steps", "dequantize", "implementation", "tensor",
)  # fmt: skip
_STEPS = (*_POLICY, "batch", "prompt", "new_tokens")
_ROLLOUTS = (*_POLICY, "prompts", "group", "max_new_tokens")
KEYS = {
    "decode": _STEPS,
    "parts": _STEPS,
    "gsm8k": (*_ROLLOUTS, "rows"),
    "startup": (*_ROLLOUTS, "max_rows", "warm"),
    "agreement": ("kind", "model", "format", "lora_rank", "prompts", "max_new_tokens", "seed"),
}
# What the kind of a row ends with where routed experts have adapters, whose rank is one more key.
EXPERTS = ", adapters of experts"
KEYS |= {f"{kind}{EXPERTS}": (*keys, "expert_rank") for kind, keys in KEYS.items()}
