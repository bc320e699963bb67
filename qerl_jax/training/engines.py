"""How many rows the rollouts of a run decode together."""

import dataclasses

from ml_collections import ConfigDict

from qerl_jax.rollout.config import EngineConfig, SamplingConfig
from qerl_jax.rollout.shapes import plan_shapes
from qerl_jax.weights.load import LoadedModel


def fit_engines(
    config: ConfigDict,
    model: LoadedModel,
    head: dict,
    *,
    sampling: SamplingConfig,
    eval_sampling: SamplingConfig,
    prompt_width: int,
    evaluates: bool,
    training_bytes: int,
) -> tuple[EngineConfig, EngineConfig]:
    """Returns the options of the engine in steps and in evaluations.

    Their rows fit the memory of a device. They are decided once, while it holds only the weights: a
    resumed run decides the same.

    Args:
        config: the resolved config.
        model: the model before training.
        head: parameters that replace those of the policy in rollouts.
        sampling: options of the completions of a step.
        eval_sampling: options of the completions of an evaluation.
        prompt_width: tokens of the longest prompt of all.
        evaluates: whether the run has held-out prompts.
        training_bytes: bytes of the device that training takes during a rollout.

    Raises:
        UserError: the device has no memory for one row.
    """
    engine = EngineConfig(
        chunk_steps=config.rollout.chunk_steps,
        max_rows=config.rollout.max_rows,
        kv_cache_bytes=config.rollout.kv_cache_bytes,
        kv_cache_dtype=config.rollout.kv_cache_dtype,
        dequantize=config.rollout.dequantize,
        prompt_width=prompt_width,
    )

    def fitting_rows(sampling: SamplingConfig) -> int:
        shapes = plan_shapes(
            model.params | head,
            prompts=-(-config.rollout.prompts_per_step // config.mesh.data),
            longest=prompt_width,
            group_size=config.rollout.group_size,
            config=model.config,
            sampling=sampling,
            engine=engine,
            reserve=training_bytes,
        )
        return shapes.batch_sizes[0]

    rows = eval_rows = fitting_rows(sampling)
    if evaluates and eval_sampling.max_new_tokens > sampling.max_new_tokens:
        eval_rows = min(rows, fitting_rows(eval_sampling))
    return (
        dataclasses.replace(engine, max_rows=rows),
        dataclasses.replace(engine, max_rows=eval_rows, compact="once"),
    )
