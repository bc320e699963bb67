"""One step of the method: QeRL's algorithm (arXiv 2510.11696), from sigma to the updated adapter.

    1. sigma of the step                    the schedule of the adaptive quantization noise
    2. noise on the norm scales             theta~ = theta + noise(sigma)
    3. sample and score                     G completions of each of P prompts from theta~
    4. advantages                           A = (r - mean(r)) / std(r) within a group
    5. batch                                masks, loss weights, packed buffers
    6. frozen log-probabilities             of the reference and the teacher, where the loss needs
                                            them
    7. optimizer steps                      gradients of the loss in the trained parameters, on the
                                            rollout or on one mini-batch after the other

Everything random follows from the seed and the step: the key of step n is fold_in(run's key, n),
and each use folds in an integer with a name.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qerl_jax.compile.operation import Programs
from qerl_jax.data.order import Cursor
from qerl_jax.data.prompts import Prompt
from qerl_jax.errors import UserError
from qerl_jax.policy import aqn, kl_control
from qerl_jax.policy.dequantize import dequantized
from qerl_jax.policy.kl_control import KlTarget, SigmaState
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import EVERY
from qerl_jax.policy.trainable import Trainable, current_policy
from qerl_jax.rewards.scored import Scores
from qerl_jax.rl.advantages import custom_advantages, gdpo_advantages, group_advantages
from qerl_jax.rl.batch import TrainBatch, draw_mini_batches, make_batch
from qerl_jax.rl.data_parallel import deal_buffers
from qerl_jax.rl.losses import LossConfig
from qerl_jax.rl.packing import PackedBuffer, pack, packing_metrics, rows_that_teach
from qerl_jax.rl.train_step import OptimizerConfig, TrainState, UpdateConfig
from qerl_jax.system.import_path import names_function
from qerl_jax.training.collect import CollectConfig, collect
from qerl_jax.training.experience import Experience, Peers

KEY_NOISE, KEY_ROLLOUT, KEY_MINI_BATCHES = 0, 1, 2  # folded into the key of a step


type Collected = tuple[Experience, dict[str, float], Cursor]


class Kept(Protocol):
    """The part of `kept_sessions.KeptSessions` that steps use."""

    def collect(self, step: int, sample: Callable[[], Collected], /) -> Collected:
        """Returns what was collected for a step, or collects it now."""
        ...

    def forget(self, first: int | None, /) -> None:
        """Removes what is before the step `first`; None removes all."""
        ...


class Method(NamedTuple):
    """The parts of a run that need no model.

    `sigma` is that of the noise by step, or the KL that it should cause.
    """

    lora_config: LoraConfig
    sigma: optax.Schedule | KlTarget
    temperature: Callable[[int], float]
    loss: LossConfig
    optimizer: optax.GradientTransformation
    optimizer_config: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class StepSetup:
    """What all steps of a run have in common."""

    config: ConfigDict  # the resolved config
    method: Method  # noise, temperature, loss and optimizer
    key: jax.Array  # key of the run
    params: dict  # parameters of the policy before training
    rollout_head: dict  # parameters that replace those of the policy in rollouts
    reference: Policy  # the policy that the KL of the loss is measured to
    train_prompts: list[Prompt]  # prompts that the steps draw from, of all sources
    collect: CollectConfig  # options of a step's completions, with the sampler and its programs
    update: UpdateConfig  # static options of the update, with its loss
    buffer_tokens: int  # positions of a buffer of the update
    mesh: Mesh | None  # devices of the run; None for one device
    processes: Peers  # processes of the run
    # The policy whose log-probabilities of the samples are learned; None without one.
    teacher: Policy | None = dataclasses.field(default=None, kw_only=True)
    # The sessions of agents that a run before it was resumed has scored; None without agents.
    kept: Kept | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The part of a run that a step changes."""

    step: int  # number of finished steps
    state: TrainState  # trained parameters and optimizer state
    cursor: Cursor  # position in the training prompts
    noise: SigmaState = kl_control.NOTHING_MEASURED  # what the control of the noise remembers


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        progress: the run after the step.
        experience: the scored completions that the step trained on.
        advantages: float32 [B], advantages of the completions.
        metrics: values to log, by name.
    """

    progress: Progress
    experience: Experience
    advantages: np.ndarray
    metrics: dict[str, Any]


def take_step(
    setup: StepSetup,
    progress: Progress,
    *,
    programs: Programs,
    on_rollout: Callable[[int, int], None],
    on_update: Callable[[], None],
    on_wait: Callable[[], None] | None = None,
) -> StepResult:
    """Takes one step.

    Args:
        setup: policy, prompts and options of the run.
        progress: the run before the step; the buffers of its state are donated to the update.
        programs: programs of the update, as `rl.programs` names them.
        on_rollout: called during the rollout with the numbers of finished rows and tokens.
        on_update: called when the rollout is done and the update begins.
        on_wait: called while rewards work, as in `score.Scoring`.

    Raises:
        UserError: the noise is rounded away, or a user function fails.
        NoRewardError: no completion has a reward.
    """
    config, trainable = setup.config, progress.state.trainable
    key = jax.random.fold_in(setup.key, progress.step)

    # --- 1. Sigma of the step -------------------------------------------------------------------
    sigma = kl_control.sigma_of_step(setup.method.sigma, progress.noise, progress.step)

    # --- 2. Noise on the norm scales ------------------------------------------------------------
    noise, noisy, perturbed_norms = _add_noise(setup, trainable, progress.step, sigma)

    # --- 3. Sample and score --------------------------------------------------------------------
    temperature = setup.method.temperature(progress.step)
    sampler = setup.collect.sampler.at_temperature(temperature)
    sample = functools.partial(
        collect,
        jax.random.fold_in(key, KEY_ROLLOUT),
        Policy(noisy | setup.rollout_head, trainable.lora),
        setup.train_prompts,
        progress.cursor,
        options=dataclasses.replace(setup.collect, sampler=sampler),
        processes=setup.processes,
        on_progress=on_rollout,
        on_wait=on_wait,
    )
    experience, sampling_metrics, cursor = (
        sample() if setup.kept is None else setup.kept.collect(progress.step, sample)
    )
    on_update()
    began = time.perf_counter()

    # --- 4. Advantages --------------------------------------------------------------------------
    advantages = _advantages(setup, experience.scores)

    # --- 5. Batch -------------------------------------------------------------------------------
    batch = _batch(setup, experience, advantages)
    packed = _pack_mini_batches(setup, batch, jax.random.fold_in(key, KEY_MINI_BATCHES))
    mini_batches = [deal_buffers(buffers, setup.mesh) for buffers in packed]
    divisor = np.float32(temperature)  # of the logits, an argument of every program
    rows = EVERY if config.rollout.dequantize == "fp8_both" else 0
    params = dequantized(setup.params, programs, rows=rows)
    kl = functools.partial(_noise_kl, setup, trainable, programs, params, batch, divisor, noise)
    noise_state, metrics = _measure_noise(setup, progress, kl, sigma=sigma)
    train_noise = noise if config.aqn.correction == "noisy_forward" else None
    metrics |= _measure_replay(
        setup, progress, programs, params, mini_batches[0], divisor, noise=train_noise
    )

    # --- 6. Frozen log-probabilities ------------------------------------------------------------
    mini_batches, frozen_metrics = _frozen_logprobs(setup, programs, mini_batches, divisor)

    # --- 7. Optimizer steps ---------------------------------------------------------------------
    state, updates, count = update(
        progress.state,
        params,
        mini_batches,
        train_noise,
        divisor,
        programs=programs,
        number=config.rl.updates_per_rollout,
    )
    seconds = time.perf_counter() - began
    packing = packing_metrics(batch, [buffer for buffers in packed for buffer in buffers])
    tokens = packing["packed_tokens"] * count / len(packed)
    metrics |= sampling_metrics | updates | packing | frozen_metrics
    metrics |= {
        "perturbed_norms": perturbed_norms,
        "temperature": temperature,
        "train_seconds": seconds,
        "train_tokens_per_second": tokens / seconds if tokens else float("nan"),
    }
    progress = Progress(step=progress.step + 1, state=state, cursor=cursor, noise=noise_state)
    return StepResult(progress, experience, advantages, metrics)


def check_noise(setup: StepSetup, progress: Progress) -> None:
    """Refuses a schedule whose smallest noise is rounded away, before the first step.

    Raises:
        UserError: the noise is rounded away, or a user function fails.
    """
    if isinstance(setup.method.sigma, KlTarget):
        return
    sigmas = {
        step: kl_control.sigma_of_step(setup.method.sigma, progress.noise, step)
        for step in range(progress.step, setup.config.steps)
    }
    noisy_steps = [step for step, sigma in sigmas.items() if sigma > 0]
    if noisy_steps:
        step = min(noisy_steps, key=sigmas.__getitem__)
        _add_noise(setup, progress.state.trainable, step, sigmas[step])


def _add_noise(
    setup: StepSetup, trainable: Trainable, step: int, sigma: float
) -> tuple[aqn.Noise, dict, int]:
    """The noise after `step` steps, the parameters with it, and how many norms it changes."""
    noise = aqn.Noise(
        key=jax.random.fold_in(jax.random.fold_in(setup.key, step), KEY_NOISE),
        sigma=jnp.float32(sigma),
        form=setup.config.aqn.form,
        final_norm=setup.config.aqn.final_norm,
    )
    clean = current_policy(setup.params, trainable)
    noisy = aqn.add_noise(clean, noise)
    perturbed_norms = aqn.count_perturbed(clean, noisy)
    if sigma > 0 and not perturbed_norms:
        raise UserError(
            f"the noise of sigma={sigma} in step {step + 1} changed no norm: float32 rounds it "
            "away; raise aqn.sigma_end, or use a schedule that is 0 there"
        )
    return noise, noisy, perturbed_norms


def _advantages(setup: StepSetup, scores: Scores) -> np.ndarray:
    """The advantages [B] of the completions of a step."""
    if not setup.collect.needs_rewards:
        return np.zeros(len(scores.total), np.float32)
    rl, group_size = setup.config.rl, setup.config.rollout.group_size
    total, parts = scores.total.reshape(-1, group_size), scores.parts_of_groups(group_size)
    if rl.advantage == "gdpo":
        return gdpo_advantages(parts, setup.collect.weights, eps=rl.advantage_eps).reshape(-1)
    if names_function(rl.advantage):
        return custom_advantages(rl.advantage, total, parts).reshape(-1)
    return group_advantages(total, scale=rl.advantage_scale, eps=rl.advantage_eps).reshape(-1)


def _batch(setup: StepSetup, experience: Experience, advantages: np.ndarray) -> TrainBatch:
    rollout, config = experience.rollout, setup.config
    return make_batch(
        experience.prompt_ids,
        rollout,
        experience.of_rows(advantages),
        mask_truncated=config.rl.mask_truncated,
        aggregation=setup.update.loss.aggregation,
        pad_id=setup.collect.sampler.tokenizer.pad_id,
        micro_batch_rows=config.train.micro_batch_rows,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def _pack_mini_batches(
    setup: StepSetup, batch: TrainBatch, key: jax.Array
) -> list[list[PackedBuffer]]:
    """The buffers of each mini-batch of a step.

    The weights of a mini-batch of n are n times those of all rows, as in TRL, so that the mean of
    the gradients at one policy is the gradient of the rollout.
    """
    config, loss = setup.config, setup.update.loss
    count = config.rl.mini_batches
    batch = dataclasses.replace(batch, weights=batch.weights * np.float32(count))
    parts = draw_mini_batches(
        len(batch.lengths),
        count,
        # The rows of a denominator stay together.
        unit=config.train.micro_batch_rows if loss.aggregation == "micro_batch" else 1,
        rng=np.random.default_rng(np.asarray(jax.random.key_data(key))),
    )
    rows = rows_that_teach(batch, loss)
    return [pack(batch, rows & part, buffer_tokens=setup.buffer_tokens) for part in parts]


def frozen_policies(setup: StepSetup) -> dict[str, Policy]:
    """Returns the frozen policies of a run by the program of their log-probabilities."""
    policies = {"buffer_logprobs": setup.reference} if setup.update.loss.kl_coef else {}
    return policies | ({} if setup.teacher is None else {"teacher_logprobs": setup.teacher})


def _frozen_logprobs(
    setup: StepSetup,
    programs: Programs,
    mini_batches: list[list[PackedBuffer]],
    temperature: np.float32,
) -> tuple[list[list[PackedBuffer]], dict[str, float]]:
    """The buffers with the log-probabilities of frozen policies, and the seconds of the teacher."""
    fields, metrics = {"buffer_logprobs": "ref_logprobs"}, {}
    for name, policy in frozen_policies(setup).items():
        began, field = time.perf_counter(), fields.get(name, name)

        def scored(buffer: PackedBuffer, name=name, policy=policy, field=field) -> PackedBuffer:
            bare = dataclasses.replace(buffer, ref_logprobs=None, teacher_logprobs=None)
            logprobs = programs[name](*policy, bare, temperature)
            return dataclasses.replace(buffer, **{field: logprobs})

        mini_batches = [[scored(buffer) for buffer in buffers] for buffers in mini_batches]
        if name == "teacher_logprobs":
            jax.block_until_ready([[x.teacher_logprobs for x in part] for part in mini_batches])
            metrics["teacher_seconds"] = time.perf_counter() - began
    return mini_batches, metrics


def update(
    state: TrainState,
    params: dict,
    mini_batches: Sequence[list[PackedBuffer]],
    noise: aqn.Noise | None,
    temperature: np.float32,
    *,
    programs: Programs,
    number: int,
) -> tuple[TrainState, dict[str, float], int]:
    """Takes the optimizer steps on one rollout: `number` times one on each mini-batch.

    Returns:
        The state, metrics, and how many steps there were: an update that is skipped is the last.
    """
    for buffers in mini_batches[1:]:
        for i, buffer in enumerate(buffers):
            logprobs = programs["old_logprobs"](state.trainable, params, noise, buffer, temperature)
            buffers[i] = dataclasses.replace(buffer, old_logprobs=logprobs)
    history = []
    for index, buffers in enumerate(number * list(mini_batches)):
        totals, first = programs["zero_totals"](state.trainable), np.bool_(index == 0)
        for i, buffer in enumerate(buffers):
            totals, old_logprobs = programs["add_gradient"](
                totals, state.trainable, params, noise, buffer, first, temperature
            )
            buffers[i] = dataclasses.replace(buffer, old_logprobs=old_logprobs)
        state, metrics = programs["apply_gradient"](state, totals)
        history.append(jax.device_get(metrics))
        if history[-1]["update_skipped"]:
            break  # The same rows would give the same gradient.
    combine = {"update_skipped": np.sum, "ratio_max": np.max, "logprob_diff_max": np.max}
    means = {
        name: combine.get(name, np.mean)([metrics[name] for metrics in history]).item()
        for name in history[0]
    }
    return state, means, len(history)


def _measure_noise(
    setup: StepSetup, progress: Progress, noise_kl: Callable[[], float], *, sigma: float
) -> tuple[SigmaState, dict[str, Any]]:
    """Measures the KL that the noise of a step causes, every `aqn.kl_every` steps.

    `noise_kl` measures it in nats per token. Returns what the control of the noise remembers from
    now on, and metrics.
    """
    every, state = setup.config.aqn.kl_every, progress.noise
    metrics: dict[str, Any] = {"sigma": sigma}
    if every and progress.step % every == 0:
        metrics["noise_kl"] = kl = noise_kl() if sigma > 0 else 0.0
        state = kl_control.update_state(setup.method.sigma, state, sigma=sigma, kl=kl)
    return state, metrics | kl_control.control_metrics(
        setup.method.sigma, state, sigma=sigma, step=progress.step
    )


def _measure_replay(
    setup: StepSetup,
    progress: Progress,
    programs: Programs,
    params: dict,
    buffers: list[PackedBuffer],
    temperature: np.float32,
    *,
    noise: aqn.Noise | None,
) -> dict[str, float]:
    """Measures on one buffer what replay prevents, every `rl.routing_check_every` steps."""
    every = setup.config.rl.routing_check_every
    if not (every and buffers and progress.step % every == 0):
        return {}
    trainable = progress.state.trainable
    policy = current_policy(params, trainable, noise), trainable.lora
    sums = programs["own_routes_difference"](*policy, buffers[0], temperature)
    total, count = (float(np.asarray(part).sum()) for part in sums)
    return {"logprob_diff_own_routes": total / count if count else float("nan")}


def _noise_kl(
    setup: StepSetup,
    trainable: Trainable,
    programs: Programs,
    params: dict,
    batch: TrainBatch,
    temperature: np.float32,
    noise: aqn.Noise,
) -> float:
    """Mean KL of the noisy against the clean policy on rows spread over the batch, per token."""
    clean = current_policy(params, trainable)
    policies = aqn.add_noise(clean, noise), clean, trainable.lora
    count = setup.config.aqn.kl_rows
    stride = max(1, len(batch.lengths) // count)
    rows = np.zeros(len(batch.lengths), bool)
    rows[::stride][:count] = True
    buffers = pack(batch, rows, buffer_tokens=setup.buffer_tokens)
    shards = deal_buffers(buffers, setup.mesh)
    total = sum(
        float(np.asarray(programs["buffer_kl"](*policies, x, temperature)).sum()) for x in shards
    )
    return total / max(1.0, sum(float(buffer.mask.sum()) for buffer in buffers))
