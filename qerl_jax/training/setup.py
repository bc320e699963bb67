"""From a config to the parts of a run that stay the same while it runs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qerl_jax.config.fields import TEACHER, learns_from_rewards, learns_from_text
from qerl_jax.data.agents import RunAgents
from qerl_jax.data.environment_config import contracts_of, make_environments
from qerl_jax.data.from_config import EVAL, load_problems, order_of, training_prompts
from qerl_jax.data.order import Order
from qerl_jax.data.prompt_rollout import AnyEnvironments
from qerl_jax.data.prompts import Problem, Prompt
from qerl_jax.errors import UserError
from qerl_jax.evaluation.greedy import tokens_of_examples
from qerl_jax.memory.report import check_fits
from qerl_jax.memory.run_plan import RunPlan, plan_run, this_device
from qerl_jax.policy import kl_control
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.kl_control import noise_level
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.sharding import abstract_on, bytes_per_device, make_mesh, shard, shard_params
from qerl_jax.processes.group import ALONE, Processes
from qerl_jax.rewards.calls import call_of
from qerl_jax.rewards.functions import CONVERSATION_COLUMNS, Reward, overlong_penalty
from qerl_jax.rewards.score import Scoring
from qerl_jax.rl.advantages import check_custom_advantages
from qerl_jax.rl.losses import LossConfig, check_custom_weights, loss_config
from qerl_jax.rl.train_step import (
    OptimizerConfig,
    TrainState,
    UpdateConfig,
    init_state,
    make_optimizer,
)
from qerl_jax.rollout.config import (
    EngineConfig,
    SamplingConfig,
    has_turns,
    rollout_prompts,
    turn_config,
)
from qerl_jax.rollout.head import rollout_head
from qerl_jax.rollout.replicas import largest_share
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.run.folder import RunFolder
from qerl_jax.system.import_path import names_function
from qerl_jax.training.collect import CollectConfig, dynamic_sampling_metric
from qerl_jax.training.first_policy import (
    first_trainable,
    load_base,
    reference_digest,
    reference_policy,
)
from qerl_jax.training.step import Method, StepSetup
from qerl_jax.training.teacher import Teacher, load_teacher_model, make_teacher, plan_teacher
from qerl_jax.training.text_step import TEXT_LOSS
from qerl_jax.training.validate import check_warmup
from qerl_jax.weights.checkpoint import read_architecture
from qerl_jax.weights.load import LoadedModel
from qerl_jax.weights.peft import read_peft_config

# What a run that learns from text has no use for.
_WITHOUT_SAMPLES = {
    "aqn.schedule": "off",
    "aqn.correction": "none",
    "data.curriculum": "off",
    "rl.kl_coef": 0.0,
    "rl.updates_per_rollout": 1,
    "rl.mini_batches": 1,
    "rl.routing_replay": "none",
    "rl.routing_check_every": 0,
    "rl.overlong_buffer": 0,
}
# From the start of a temperature, 0, to its end, 1.
CURVES: dict[str, Callable[[float], float]] = {
    "constant": lambda u: 0.0,
    "linear": lambda u: u,
    "cosine": lambda u: (1.0 - float(np.cos(np.pi * u))) / 2.0,
}


@dataclasses.dataclass(frozen=True)
class Setup(StepSetup):
    """The parts of a run that do not change: those of its steps, and those of its evaluations."""

    processes: Processes  # processes of the run
    rewards: Mapping[str, tuple[Reward, float]]  # function and weight by name
    model: LoadedModel  # architecture, parameters before training and tokenizer
    reference_digest: str | None  # identity of `reference` if it is not the model itself, else None
    teacher_digest: str | None  # identity of `teacher`, or None without one
    eval_prompts: list[Prompt]  # held-out prompts; empty without evaluations
    eval_sampler: Sampler  # samples the completions of an evaluation, greedily
    # The plan of the memory: how many rows decode together, the size of the buffers.
    memory: RunPlan
    state_shapes: TrainState  # shapes and dtypes of the state that the steps change


def prepare(
    config: ConfigDict,
    rewards: Mapping[str, tuple[Reward, float]],
    *,
    schedule_steps: int,
    processes: Processes = ALONE,
    folder: RunFolder | None = None,
    problems: Mapping[str, list[Problem]] | None = None,
) -> Setup:
    """Loads the model and the problems, and makes the other parts from the config.

    `schedule_steps` is the number of steps that the schedules of noise and learning rate span.
    `problems` are those of `load_problems`, where they are known already.
    """
    method = check_method(config, rewards, schedule_steps=schedule_steps)
    mesh = make_mesh(config.mesh.data, config.mesh.tensor)
    problems = problems or load_problems(config, rewards)
    device = this_device()
    # A model that does not fit, or that mesh.tensor does not divide, is refused before it is read.
    if device.pool is not None or config.mesh.tensor > 1:
        architecture = read_architecture(config.model.source)
        teacher = plan_teacher(config, architecture, read_architecture)
        check_fits(plan_run(config, architecture, device, teacher=teacher), config, architecture)
    teacher_model = load_teacher_model(
        config, problems, mesh=mesh, processes=processes, folder=folder
    )
    model, prompts = load_base(config, problems, mesh=mesh, processes=processes, folder=folder)
    _announce(config, model, prompts)
    teacher = make_teacher(config, model, teacher_model)
    setup = assemble(config, rewards, model, prompts, method=method, mesh=mesh, teacher=teacher)
    key = shard(setup.key, mesh) if mesh is not None and processes.count > 1 else setup.key
    return dataclasses.replace(setup, processes=processes, key=key)


def check_method(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]], *, schedule_steps: int
) -> Method:
    """Makes what needs no model, and refuses bad options before one is loaded.

    A custom schedule is called for every step now, because it could fail at one that is hours away,
    such as a step of an extended run.
    """
    if learns_from_text(config):
        return _check_files(config, make_method(config, schedule_steps))
    _metric(config, rewards)
    _check_environment_rewards(config, rewards)
    method = make_method(config, schedule_steps)
    if names_function(config.rl.aggregation):
        rows = config.rollout.prompts_per_step * config.rollout.group_size
        check_custom_weights(config.rl.aggregation, rows)
    if names_function(config.rl.advantage):
        check_custom_advantages(
            config.rl.advantage,
            groups=config.rollout.prompts_per_step,
            group_size=config.rollout.group_size,
            names=[*rewards, *(["overlong"] if config.rl.overlong_buffer else [])],
        )
    if names_function(config.aqn.schedule):
        for step in range(config.steps):
            kl_control.sigma_of_step(method.sigma, kl_control.NOTHING_MEASURED, step)
    return _check_files(config, method)


def _check_files(config: ConfigDict, method: Method) -> Method:
    """Refuses an adapter to start from that cannot be read."""
    if config.lora.init and config.train.parameters != "full":
        read_peft_config(config.lora.init)
    return method


def settle_text(config: ConfigDict) -> tuple[ConfigDict, Mapping[str, list[Problem]] | None]:
    """Returns the config of a run that learns from text without noise, KL and several updates.

    It has the number of steps that `sft.epochs` asks for, and no epochs: a run has steps, which may
    be extended. The problems are returned where they had to be read. A run whose policy samples has
    its config unchanged.
    """
    if not learns_from_text(config):
        return config, None
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(_WITHOUT_SAMPLES)
    if not (epochs := config.sft.epochs):
        return config, None
    problems = load_problems(config, {})
    rows = sum(len(part) for split, part in problems.items() if split != EVAL)
    with config.unlocked():
        config.steps = max(1, math.ceil(epochs * rows / config.sft.rows_per_step))
        config.sft.epochs = 0.0
    check_warmup(config)
    print(
        f"sft.epochs={epochs:g} of {rows} training rows: {config.steps} steps of "
        f"{config.sft.rows_per_step} rows",
        flush=True,
    )
    return config, problems


def _check_environment_rewards(
    config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]]
) -> None:
    """Refuses an environment that gives rewards which no reward of the run reads."""
    if any(contract.rewards for contract in contracts_of(config).values()):
        _check_read(f"environment.function={config.environment.function}", rewards)


def check_agent_rewards(
    config: ConfigDict,
    environments: AnyEnvironments | None,
    rewards: Mapping[str, tuple[Reward, float]],
) -> None:
    """Refuses agents that return rewards which no reward of the run reads.

    Raises:
        UserError: there are such.
    """
    if isinstance(environments, RunAgents) and environments.gives_rewards:
        names = (f"{name}={config.environment[name]}" for name in ("agent", "verifiers"))
        name = next(name for name in names if not name.endswith("="))
        _check_read(f"environment.{name}", rewards, "; or annotate an agent without one, -> None")


def _check_read(
    given: str, rewards: Mapping[str, tuple[Reward, float]], otherwise: str = ""
) -> None:
    needed = {name for reward, _ in rewards.values() for name in call_of(reward).needed}
    if not needed & set(CONVERSATION_COLUMNS):
        raise UserError(
            f"{given} gives rewards that no reward of the run reads: pass --config.rewards."
            f"correctness.function=qerl_jax.rewards.functions:environment_reward{otherwise}"
        )


def _metric(config: ConfigDict, rewards: Mapping[str, tuple[Reward, float]]) -> str:
    return dynamic_sampling_metric(
        config.rl.dynamic_sampling_metric,
        {name: weight for name, (_, weight) in rewards.items()},
        has_length_penalty=config.rl.overlong_buffer > 0,
    )


def assemble(
    config: ConfigDict,
    rewards: Mapping[str, tuple[Reward, float]],
    model: LoadedModel,
    prompts: Mapping[str, list[Prompt]],
    *,
    method: Method,
    mesh: Mesh | None,
    teacher: Teacher | None = None,
) -> Setup:
    """Makes the parts of a run around a loaded model and encoded prompts.

    `prompts` are by split, as `data.from_config.load_problems` names them. If the mesh cuts
    weights, those of the model and of the teacher are on it already.

    Raises:
        UserError: the config asks for something that cannot be done.
    """
    lora_config, optimizer = method.lora_config, method.optimizer
    replays = _replays_routes(config, model.config)
    put = functools.partial(shard_params, config=model.config, mesh=mesh)
    head = rollout_head(model.params, config.rollout.head_format, put)
    key = jax.random.key(config.seed, impl="threefry2x32")
    state_shapes = jax.eval_shape(
        lambda: init_state(first_trainable(config, model, lora_config, key), optimizer)
    )
    reference = reference_policy(config, model, lora_config, key)
    taught = teacher.policy if teacher else None
    if mesh is not None:
        params, head, reference, taught = shard((model.params, head, reference, taught), mesh)
        model = dataclasses.replace(model, params=params)
        state_shapes = abstract_on(state_shapes, mesh)
    size = bytes_per_device(model.params)
    plan = plan_run(
        config,
        model.config,
        this_device(),
        prompt=longest_prompt(config, prompts),
        rows=rows_of_step(config, prompts),
        weights=size,
        teacher=teacher.planned if teacher else None,
    )
    check_fits(plan, config, model.config)
    sampler, eval_sampler = _samplers(config, model, plan, prompts)
    environments = None
    if not learns_from_text(config):
        environments = make_environments(config, model.tokenizer)
        check_agent_rewards(config, environments, rewards)
    return Setup(
        config=config,
        method=method,
        key=key,
        params=model.params,
        rollout_head=head,
        reference=reference,
        train_prompts=training_prompts(prompts),
        collect=_collect_config(
            config,
            rewards,
            sampler,
            order_of(config, prompts),
            environments,
        ),
        update=UpdateConfig(
            model=model.config,
            loss=method.loss,
            recompute=plan.update.recompute,
            replays_routes=replays,
            teacher=teacher.planned.model if teacher else None,
        ),
        buffer_tokens=plan.buffer_tokens,
        mesh=mesh,
        processes=ALONE,
        rewards=rewards,
        model=model,
        reference_digest=reference_digest(config, reference),
        teacher=taught,
        teacher_digest=teacher.digest if teacher else None,
        eval_prompts=prompts.get(EVAL, []),
        eval_sampler=eval_sampler,
        memory=plan,
        state_shapes=state_shapes,
    )


def _collect_config(
    config: ConfigDict,
    rewards: Mapping[str, tuple[Reward, float]],
    sampler: Sampler,
    order: Order,
    environments: AnyEnvironments | None,
) -> CollectConfig:
    """Options of a step's completions."""
    penalty, buffer = None, config.rl.overlong_buffer
    if buffer:
        limit = sampler.sampling.max_new_tokens
        penalty = functools.partial(overlong_penalty, max_tokens=limit, buffer=buffer)
    return CollectConfig(
        prompts_per_step=config.rollout.prompts_per_step,
        prompts_per_rollout=rollout_prompts(config),
        sampler=sampler,
        scoring=functools.partial(Scoring, rewards, time_limit=config.reward_time_limit),
        reward_weights={name: weight for name, (_, weight) in rewards.items()},
        length_penalty=penalty,
        length_penalty_weight=config.rl.overlong_penalty,
        rounds=config.rl.dynamic_sampling_rounds if config.rl.dynamic_sampling else 1,
        metric=_metric(config, rewards) if rewards else "",
        order=order,
        advantage=config.rl.advantage,
        advantage_eps=config.rl.advantage_eps,
        environments=environments,
        needs_rewards=learns_from_rewards(config),
    )


def _replays_routes(config: ConfigDict, architecture: ModelConfig) -> bool:
    """Whether updates take the routes of the rollout."""
    replays = config.rl.routing_replay == "rollout" and architecture.experts is not None
    if (every := config.rl.routing_check_every) and not replays:
        reason = f"rl.routing_replay={config.rl.routing_replay}"
        if architecture.experts is None:
            reason = f"a {architecture.model_type} has no experts"
        raise UserError(
            f"rl.routing_check_every={every}, but no routes are replayed: {reason}; pass "
            "rl.routing_check_every=0"
        )
    return replays


def _announce(config: ConfigDict, model: LoadedModel, prompts: Mapping[str, list[Prompt]]) -> None:
    """Prints the size of the model and the numbers of prompts."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    held_out = f"{len(prompts.get('eval', []))} held out"
    kind = "rows" if learns_from_text(config) else "prompts"
    if config.eval.every and not config.eval.problems:
        held_out += " (at most 256 and a tenth; --config.eval.problems=N changes it)"
    print(
        f"{model.config.num_layers} layers, {size / 1e9:.2f} GB of weights; "
        f"{len(training_prompts(prompts))} training {kind}, {held_out}",
        flush=True,
    )


def _samplers(
    config: ConfigDict, model: LoadedModel, plan: RunPlan, prompts: Mapping[str, list[Prompt]]
) -> tuple[Sampler, Sampler]:
    """Samplers of the steps and of evaluations, with numbers of rows that fit the memory.

    The rows are decided once, by the plan: a resumed run decides the same.
    """
    sampling = _from_section(SamplingConfig, config.rollout)
    engine = _from_section(
        EngineConfig,
        config.rollout,
        max_rows=plan.rollout.rows,
        prefill_prompts=plan.rollout.prefill_prompts,
        dequantize=plan.rollout.dequantize,
        prompt_width=longest_prompt(config, prompts),
        num_prompts=largest_share(rollout_prompts(config), config.mesh.data),
        records_routes=config.rl.routing_replay == "rollout",
    )
    size, turns = config.rollout.group_size, turn_config(config)
    steps = Sampler(model.config, model.tokenizer, sampling, engine, size, turns=turns)
    if plan.evaluation:
        engine = dataclasses.replace(
            engine,
            max_rows=plan.evaluation.rows,
            prefill_prompts=plan.evaluation.prefill_prompts,
            compact="once",
        )
    # What an environment says at its reset changes the prompts.
    examples = () if has_turns(config) else config.data.examples
    evaluation = dataclasses.replace(
        steps,
        sampling=dataclasses.replace(sampling, max_new_tokens=config.eval.max_new_tokens),
        engine=dataclasses.replace(
            engine,
            records_routes=False,
            num_prompts=largest_share(len(prompts.get(EVAL, [])), config.mesh.data),
            shared_tokens=tokens_of_examples(prompts.get(EVAL, []), examples),
        ),
        group_size=1,
        turns=turn_config(config, max_new_tokens=config.eval.max_new_tokens),
    )
    return steps, evaluation.greedy()


def longest_prompt(config: ConfigDict, prompts: Mapping[str, Sequence[Prompt]]) -> int:
    """How many tokens of a prompt, or of a row of text, the memory is planned for."""
    if learns_from_text(config):
        return max(_text_lengths(prompts))
    if has_turns(config):
        return config.data.max_prompt_tokens  # An environment may say something at its reset.
    return max(len(prompt.ids) for split_prompts in prompts.values() for prompt in split_prompts)


def rows_of_step(config: ConfigDict, prompts: Mapping[str, Sequence[Prompt]]) -> int:
    """How many rows of the longest length have the tokens of a step of texts; else 0."""
    if not learns_from_text(config):
        return 0
    lengths = _text_lengths(prompts)
    return math.ceil(config.sft.rows_per_step * float(np.mean(lengths)) / max(lengths))


def _text_lengths(prompts: Mapping[str, Sequence[Prompt]]) -> list[int]:
    rows = (row for part in prompts.values() for prompt in part for row in prompt.rows)
    return [len(row.prompt) + len(row.completion) for row in rows]


def make_method(config: ConfigDict, schedule_steps: int) -> Method:
    """Makes the parts of a run that need no model.

    `schedule_steps` is the number of steps that the schedules of noise and learning rate span.

    Raises:
        UserError: an option is out of range.
    """
    updates = config.rl.updates_per_rollout * config.rl.mini_batches
    optimizer_config = _from_section(
        OptimizerConfig,
        config.optimizer,
        warmup_updates=config.optimizer.warmup_steps * updates,
        total_updates=schedule_steps * updates,
    )
    return Method(
        lora_config=_from_section(LoraConfig, config.lora),
        sigma=noise_level(
            config.aqn.schedule,
            sigma_start=config.aqn.sigma_start,
            sigma_end=config.aqn.sigma_end,
            sigma_max=config.aqn.sigma_max,
            kl_target_start=config.aqn.kl_target_start,
            kl_target_end=config.aqn.kl_target_end,
            stages=config.aqn.stages,
            total_steps=schedule_steps,
        ),
        temperature=functools.partial(_temperature, config.rollout, schedule_steps),
        loss=loss_from(config),
        optimizer=make_optimizer(optimizer_config),
        optimizer_config=optimizer_config,
    )


def loss_from(config: ConfigDict) -> LossConfig:
    """The loss that a config names."""
    if learns_from_text(config):
        return TEXT_LOSS
    options = _values_of(LossConfig, config.rl) | {
        "dual_clip": config.rl.dual_clip or None,
        "off_policy_delta": config.rl.off_policy_delta or None,
        "tis_cap": config.aqn.tis_cap if config.aqn.correction == "tis" else None,
        "teacher_coef": config.teacher.coef * TEACHER.holds(config),
    }
    return loss_config(config.rl.loss, **options)


def _from_section[T](kind: type[T], section: ConfigDict, **others: Any) -> T:
    """Makes a dataclass of the values of a section of the config, and of others."""
    return kind(**_values_of(kind, section) | others)


def _values_of(kind: Any, section: ConfigDict) -> dict[str, Any]:
    """The values of a section whose names are those of a dataclass's fields."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in section]
    values = {name: section[name] for name in names}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _temperature(rollout: ConfigDict, total_steps: int, step: int) -> float:
    """The sampling temperature of a step, from 0 on.

    With u from 0 in the first step to 1 in the last one, and 1 in steps after that, T0 =
    `temperature` and T1 = `temperature_end`:

    * constant: T0
    * linear: T0 + (T1 - T0) u
    * cosine: T1 + (T0 - T1) (1 + cos(pi u)) / 2
    """
    u = CURVES[rollout.temperature_schedule](min(step / max(total_steps - 1, 1), 1.0))
    return rollout.temperature + (rollout.temperature_end - rollout.temperature) * u
