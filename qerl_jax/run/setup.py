"""From a config to everything that a run needs and that does not change while it runs."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from qerl_jax.data import Prompt, encode_prompts, load_problems
from qerl_jax.errors import UserError
from qerl_jax.policy import aqn
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.rl.losses import LossConfig, loss_config
from qerl_jax.rl.rewards import Reward
from qerl_jax.rl.train_step import make_optimizer
from qerl_jax.rollout.budget import cache_dtype, make_plan
from qerl_jax.rollout.engine import SamplingConfig
from qerl_jax.rollout.head import check_head_format, rollout_head
from qerl_jax.run.collect import CollectConfig
from qerl_jax.weights.load import LoadedModel, load

CORRECTIONS = ("none", "tis", "noisy_forward")

_WIDEST_SEQUENCE_CLIP = 0.1


@dataclasses.dataclass(frozen=True)
class Setup:
    """What does not change during a run.

    A rollout's policy is the trained one | `rollout_head`.
    """

    config: ConfigDict
    model: LoadedModel
    rollout_head: dict
    lora_config: LoraConfig
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]
    collect: CollectConfig
    eval_sampling: SamplingConfig
    loss: LossConfig
    optimizer: optax.GradientTransformation
    sigma: optax.Schedule
    key: jax.Array


def check(config: ConfigDict) -> None:
    """Refuses what would fail after minutes, or never be noticed."""
    limits = {
        "steps": (config.steps, 1),
        "rollout.prompts_per_step": (config.rollout.prompts_per_step, 1),
        "rollout.group_size": (config.rollout.group_size, 2),
        "rollout.max_new_tokens": (config.rollout.max_new_tokens, 1),
        "rollout.chunk_steps": (config.rollout.chunk_steps, 1),
        "rollout.temperature": (config.rollout.temperature, 1e-6),
        "rl.updates_per_rollout": (config.rl.updates_per_rollout, 1),
        "rl.dynamic_sampling_rounds": (config.rl.dynamic_sampling_rounds, 1),
        "train.micro_batch_rows": (config.train.micro_batch_rows, 1),
        "checkpoint.every": (config.checkpoint.every, 1),
        "aqn.kl_rows": (config.aqn.kl_rows, 1),
        "eval.every": (config.eval.every, 0),
        "eval.max_new_tokens": (config.eval.max_new_tokens, 1),
        "rollout.max_rows": (config.rollout.max_rows, 0),
        "rollout.kv_cache_bytes": (config.rollout.kv_cache_bytes, 0),
        "rollout.top_k": (config.rollout.top_k, 0),
        "rollout.top_p": (config.rollout.top_p, 1e-6),
        "rl.overlong_buffer": (config.rl.overlong_buffer, 0),
        "optimizer.final_fraction": (config.optimizer.final_fraction, 0),
        "data.max_question_chars": (config.data.max_question_chars, 0),
        "optimizer.max_grad_norm": (config.optimizer.max_grad_norm, 1e-9),
    }
    if config.rl.overlong_buffer > config.rollout.max_new_tokens:
        raise UserError(
            f"rl.overlong_buffer={config.rl.overlong_buffer} is more than "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: every completion is punished"
        )
    for name, (value, least) in limits.items():
        if not value >= least:  # nor NaN
            raise UserError(f"{name}={value}: it must be at least {least}")
    if config.aqn.correction not in CORRECTIONS:
        raise UserError(
            f"unknown aqn.correction {config.aqn.correction!r}: choose from "
            f"{', '.join(CORRECTIONS)}"
        )
    if config.rl.loss == "dr_grpo" and config.rl.advantage_scale != "none":
        raise UserError(
            f"rl.loss='dr_grpo' with rl.advantage_scale={config.rl.advantage_scale!r}: Dr. GRPO "
            "divides by no standard deviation, pass rl.advantage_scale=none; or, for its "
            "denominator alone, rl.loss=grpo with rl.aggregation=constant"
        )
    clip = max(config.rl.clip_low, config.rl.clip_high)
    clips = config.rl.updates_per_rollout > 1  # The ratio of the first update is 1.
    if clips and config.rl.loss == "gspo" and clip > _WIDEST_SEQUENCE_CLIP:
        raise UserError(
            f"rl.loss='gspo' with rl.clip_low={config.rl.clip_low}, "
            f"rl.clip_high={config.rl.clip_high}: the ratio of a whole sequence stays so close to "
            f"1 that nothing beyond {_WIDEST_SEQUENCE_CLIP} is ever clipped; the paper has "
            "rl.clip_low=3e-4, rl.clip_high=4e-4"
        )
    if config.rollout.dequantize not in ("once", "step"):
        raise UserError(f"rollout.dequantize={config.rollout.dequantize!r}: 'once' or 'step'")
    cache_dtype(config.rollout.kv_cache_dtype, jnp.dtype(config.model.dtype))
    check_head_format(config.rollout.head_format)
    if config.rollout.head_format and config.train.parameters == "full":
        raise UserError(
            f"rollout.head_format={config.rollout.head_format!r} with train.parameters='full': the "
            "head changes with every update, leave the first out"
        )
    if any(not isinstance(text, str) or not text for text in config.rollout.stop):
        raise UserError(
            f"rollout.stop={config.rollout.stop!r}: a tuple of strings that are not empty, such as "
            "('</answer>',)"
        )
    if config.optimizer.warmup_steps >= config.steps:
        raise UserError(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} with steps={config.steps}: "
            "the learning rate never gets to its value, lower the warm-up"
        )
    start, stop = config.profile.start, config.profile.stop
    if (start, stop) != (0, 0) and not 1 <= start <= stop:
        raise UserError(f"profile.start={start}, profile.stop={stop}: 1 <= start <= stop, or 0, 0")


def loss_from(config: ConfigDict) -> LossConfig:
    """The loss that a config asks for.

    Raises:
        UserError: there is no such loss, or a value is out of range.
    """
    return loss_config(
        config.rl.loss,
        aggregation=config.rl.aggregation,
        clip_low=config.rl.clip_low,
        clip_high=config.rl.clip_high,
        dual_clip=config.rl.dual_clip or None,
        kl_coef=config.rl.kl_coef,
        kl_grad=config.rl.kl_grad,
        tis_cap=config.aqn.tis_cap if config.aqn.correction == "tis" else None,
    )


def prepare(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]], *, schedule_steps: int
) -> Setup:
    """Loads the model and the problems and builds the rest from the config.

    Args:
        config: the resolved config.
        rewards: function and weight by name.
        schedule_steps: the steps that the schedules of noise and learning rate span.

    Raises:
        UserError: something asked for cannot be done.
    """
    lora_config = LoraConfig(
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        rslora=config.lora.rslora,
        targets=tuple(config.lora.targets),
    )
    sigma = aqn.sigma_schedule(
        config.aqn.schedule,
        sigma_start=config.aqn.sigma_start,
        sigma_end=config.aqn.sigma_end,
        stages=config.aqn.stages,
        total_steps=schedule_steps,
    )
    loss = loss_from(config)
    updates = config.rl.updates_per_rollout
    optimizer = make_optimizer(
        learning_rate=config.optimizer.learning_rate,
        schedule=config.optimizer.schedule,
        final_fraction=config.optimizer.final_fraction,
        warmup_updates=config.optimizer.warmup_steps * updates,
        total_updates=schedule_steps * updates,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
    )
    problems = {
        split: load_problems(
            config.data.source,
            path=config.data.path,
            eval_source=config.data.eval_source,
            eval_path=config.data.eval_path,
            split=split,
            eval_size=config.eval.problems if config.eval.every else 0,
            levels=tuple(config.data.levels),
            max_question_chars=config.data.max_question_chars,
            options=config.data.options.to_dict(),
        )
        for split in (("train", "eval") if config.eval.every else ("train",))
    }
    if problems.get("eval") and "correctness" not in rewards:
        raise UserError("an evaluation needs a reward named 'correctness'; or pass eval.every=0")
    device = jax.devices()[0]
    print(
        f"loading {config.model.source} as {config.model.format} on {device.device_kind}",
        flush=True,
    )
    model = load(config.model.source, format=config.model.format, dtype=config.model.dtype)
    for part in ("rollout", "eval") if config.eval.every else ("rollout",):
        longest = config.data.max_prompt_tokens + config[part].max_new_tokens
        if longest > model.config.max_position:
            raise UserError(
                f"data.max_prompt_tokens + {part}.max_new_tokens = {longest}, the model knows "
                f"{model.config.max_position} positions: lower one of them"
            )
    prompts = {
        split: encode_prompts(
            found,
            model.tokenizer,
            system_prompt=config.data.system_prompt,
            question_suffix=config.data.question_suffix,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        for split, found in problems.items()
    }
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    print(
        f"{model.config.num_layers} layers, {size / 1e9:.2f} GB of weights; "
        f"{len(prompts['train'])} training prompts, {len(prompts.get('eval', []))} held out",
        flush=True,
    )
    sampling = SamplingConfig(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        stop=tuple(config.rollout.stop),
        chunk_steps=config.rollout.chunk_steps,
        max_rows=config.rollout.max_rows,
        kv_cache_bytes=config.rollout.kv_cache_bytes,
        kv_cache_dtype=config.rollout.kv_cache_dtype,
        dequantize=config.rollout.dequantize,
    )
    prompt_width = max(len(prompt.ids) for found in prompts.values() for prompt in found)
    head = rollout_head(model.params, config.rollout.head_format)
    # Decided once, with nothing but the weights in memory: a resumed run decides the same.
    plan = make_plan(
        model.params | head,
        prompts=config.rollout.prompts_per_step,
        longest=prompt_width,
        group_size=config.rollout.group_size,
        config=model.config,
        sampling=sampling,
    )
    sampling = dataclasses.replace(sampling, max_rows=plan.batches[0])
    return Setup(
        config=config,
        model=model,
        rollout_head=head,
        lora_config=lora_config,
        train_prompts=prompts["train"],
        eval_prompts=prompts.get("eval", []),
        collect=CollectConfig(
            prompts_per_step=config.rollout.prompts_per_step,
            group_size=config.rollout.group_size,
            sampling=sampling,
            rewards=rewards,
            time_limit=config.reward_time_limit,
            overlong_buffer=config.rl.overlong_buffer,
            overlong_weight=config.rl.overlong_penalty,
            advantage_scale=config.rl.advantage_scale,
            advantage_eps=config.rl.advantage_eps,
            rounds=config.rl.dynamic_sampling_rounds if config.rl.dynamic_sampling else 1,
            prompt_width=prompt_width,
            data_seed=config.seed,
        ),
        eval_sampling=dataclasses.replace(sampling, max_new_tokens=config.eval.max_new_tokens),
        loss=loss,
        optimizer=optimizer,
        sigma=sigma,
        key=jax.random.key(config.seed, impl="threefry2x32"),
    )
