"""QeRL in JAX: reinforcement learning of large language models on a 4-bit policy.

    from qerl_jax import load, complete, train

docs/python.md shows how they work together. Public names are imported on first use, so importing
the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Where each name lives, as `module`, or `module:name` where the module has another name for it.
_PUBLIC = {
    "CardPlan": "qerl_jax.training.card_plan",
    "EngineConfig": "qerl_jax.rollout.config",
    "EvaluateConfig": "qerl_jax.evaluation.results_folder",
    "ExportConfig": "qerl_jax.export.write",
    "LoadedModel": "qerl_jax.weights.load",
    "LoadedPolicy": "qerl_jax.evaluation.load_policy",
    "Lora": "qerl_jax.policy.lora",
    "LoraConfig": "qerl_jax.policy.lora",
    "ModelConfig": "qerl_jax.policy.config",
    "Policy": "qerl_jax.policy.policy",
    "QuantTensor": "qerl_jax.policy.quant",
    "Rollout": "qerl_jax.rollout.completions",
    "SamplingConfig": "qerl_jax.rollout.config",
    "Scores": "qerl_jax.rewards.scored",
    "Session": "qerl_jax.training.session",
    "StepResult": "qerl_jax.training.step",
    "TrainBatch": "qerl_jax.rl.batch",
    "UserError": "qerl_jax.errors",
    "complete": "qerl_jax.evaluation.complete",
    "completion_logprobs": "qerl_jax.rl.logprobs",
    "detokenize": "qerl_jax.rollout.completions",
    "evaluate": "qerl_jax.evaluation.evaluate",
    "export_policy": "qerl_jax.export.write:export",
    "forward": "qerl_jax.policy.transformer",
    "gdpo_advantages": "qerl_jax.rl.advantages",
    "generate": "qerl_jax.evaluation.complete",
    "get_config": "qerl_jax.config.named",
    "group_advantages": "qerl_jax.rl.advantages",
    "init_lora": "qerl_jax.policy.lora:init",
    "load": "qerl_jax.weights.load",
    "make_batch": "qerl_jax.rl.batch",
    "numeric_answer": "qerl_jax.rewards.functions",
    "open_policy": "qerl_jax.evaluation.load_policy",
    "open_session": "qerl_jax.training.session",
    "perturb_norms": "qerl_jax.policy.aqn",
    "plan": "qerl_jax.training.card_plan",
    "quantize": "qerl_jax.policy.quant",
    "score": "qerl_jax.rewards.score",
    "show_runs": "qerl_jax.show.runs",
    "sigma_schedule": "qerl_jax.policy.aqn",
    "train": "qerl_jax.training.loop",
    "train_step": "qerl_jax.training.session",
}

# A type checker sees the imports and the list, a program the table.
if TYPE_CHECKING:
    from qerl_jax.config.named import get_config
    from qerl_jax.errors import UserError
    from qerl_jax.evaluation.complete import complete, generate
    from qerl_jax.evaluation.evaluate import evaluate
    from qerl_jax.evaluation.load_policy import LoadedPolicy, open_policy
    from qerl_jax.evaluation.results_folder import EvaluateConfig
    from qerl_jax.export.write import ExportConfig
    from qerl_jax.export.write import export as export_policy
    from qerl_jax.policy.aqn import perturb_norms, sigma_schedule
    from qerl_jax.policy.config import ModelConfig
    from qerl_jax.policy.lora import Lora, LoraConfig
    from qerl_jax.policy.lora import init as init_lora
    from qerl_jax.policy.policy import Policy
    from qerl_jax.policy.quant import QuantTensor, quantize
    from qerl_jax.policy.transformer import forward
    from qerl_jax.rewards.functions import numeric_answer
    from qerl_jax.rewards.score import score
    from qerl_jax.rewards.scored import Scores
    from qerl_jax.rl.advantages import gdpo_advantages, group_advantages
    from qerl_jax.rl.batch import TrainBatch, make_batch
    from qerl_jax.rl.logprobs import completion_logprobs
    from qerl_jax.rollout.completions import Rollout, detokenize
    from qerl_jax.rollout.config import EngineConfig, SamplingConfig
    from qerl_jax.show.runs import show_runs
    from qerl_jax.training.card_plan import CardPlan, plan
    from qerl_jax.training.loop import train
    from qerl_jax.training.session import Session, open_session, train_step
    from qerl_jax.training.step import StepResult
    from qerl_jax.weights.load import LoadedModel, load

    __all__ = [
        "CardPlan",
        "EngineConfig",
        "EvaluateConfig",
        "ExportConfig",
        "LoadedModel",
        "LoadedPolicy",
        "Lora",
        "LoraConfig",
        "ModelConfig",
        "Policy",
        "QuantTensor",
        "Rollout",
        "SamplingConfig",
        "Scores",
        "Session",
        "StepResult",
        "TrainBatch",
        "UserError",
        "complete",
        "completion_logprobs",
        "detokenize",
        "evaluate",
        "export_policy",
        "forward",
        "gdpo_advantages",
        "generate",
        "get_config",
        "group_advantages",
        "init_lora",
        "load",
        "make_batch",
        "numeric_answer",
        "open_policy",
        "open_session",
        "perturb_norms",
        "plan",
        "quantize",
        "score",
        "show_runs",
        "sigma_schedule",
        "train",
        "train_step",
    ]
else:
    __all__ = list(_PUBLIC)

    def __getattr__(name):
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _PUBLIC[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)

    def __dir__():
        return sorted([*globals(), *_PUBLIC])
