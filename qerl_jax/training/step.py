"""One step of the method: QeRL's algorithm (arXiv 2510.11696), from sigma to the updated adapter.

    1. sigma of the step                    the schedule of the adaptive quantization noise
    2. noise on the norm scales             theta~ = theta + noise(sigma)
    3. sample and score                     G completions of each of P prompts from theta~
    4. advantages                           A = (r - mean(r)) / std(r) within a group
    5. batch                                tokens, masks and loss weights
    6. old and reference log-probabilities  where the loss needs them
    7. optimizer steps                      gradients of the loss in the trained parameters

Everything random follows from the seed and the step: the key of step n is fold_in(run's key, n),
and each use folds in an integer with a name.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.data import Cursor
from qerl_jax.errors import UserError
from qerl_jax.policy import aqn
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.trainable import current_policy
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.batch import TrainBatch, longest_first, make_batch, micro_batches
from qerl_jax.rl.train_step import TrainState, batch_logprobs, mean_kl, train_step
from qerl_jax.rollout.programs import Executables
from qerl_jax.training.collect import Experience, collect
from qerl_jax.training.setup import Setup

KEY_NOISE, KEY_ROLLOUT = 0, 1  # folded into the key of a step


@dataclasses.dataclass(frozen=True)
class Progress:
    """The part of a run that a step changes.

    Attributes:
        step: number of finished steps.
        state: trained parameters and optimizer state.
        cursor: position of the next training prompt.
    """

    step: int
    state: TrainState
    cursor: Cursor


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step made.

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
    setup: Setup,
    progress: Progress,
    *,
    programs: Executables,
    on_rollout: Callable[[int, int], None],
    on_update: Callable[[], None],
) -> StepResult:
    """Takes one step.

    Args:
        setup: model, prompts and options of the run.
        progress: the run before the step; the buffers of its state are donated to the update.
        programs: compiled rollout programs, as in `engine.generate_steps`.
        on_rollout: called during the rollout with the numbers of finished rows and tokens.
        on_update: called when the rollout is done and the update begins.

    Raises:
        UserError: the noise is rounded away, or no completion has a reward.
    """
    config, trainable = setup.config, progress.state.trainable
    key = jax.random.fold_in(setup.key, progress.step)
    tokenizer = setup.model.tokenizer

    # --- 1. Sigma of the step -------------------------------------------------------------------
    sigma = float(np.asarray(setup.sigma(progress.step)))

    # --- 2. Noise on the norm scales ------------------------------------------------------------
    noise = aqn.Noise(
        key=jax.random.fold_in(key, KEY_NOISE),
        sigma=jnp.float32(sigma),
        form=config.aqn.form,
        final_norm=config.aqn.final_norm,
    )
    clean = current_policy(setup.model.params, trainable)
    noisy = aqn.add_noise(clean, noise)
    perturbed = aqn.count_perturbed(clean, noisy)
    if sigma > 0 and not perturbed:
        raise UserError(f"the noise of sigma={sigma} changed no norm: float32 rounds it away")

    # --- 3. Sample and score --------------------------------------------------------------------
    experience, cursor = collect(
        jax.random.fold_in(key, KEY_ROLLOUT),
        setup.model,
        noisy | setup.rollout_head,
        trainable.lora,
        setup.train_prompts,
        progress.cursor,
        config=setup.collect,
        executables=programs,
        on_progress=on_rollout,
    )
    on_update()
    began = time.perf_counter()

    # --- 4. Advantages --------------------------------------------------------------------------
    advantages = group_advantages(
        experience.scores.total.reshape(-1, config.rollout.group_size),
        scale=config.rl.advantage_scale,
        eps=config.rl.advantage_eps,
    ).reshape(-1)

    # --- 5. Batch -------------------------------------------------------------------------------
    batch = make_batch(
        [prompt.ids for prompt in experience.prompts],
        experience.rollout.tokens,
        experience.rollout.lengths,
        experience.rollout.finished,
        advantages,
        experience.rollout.logprobs,
        mask_truncated=config.rl.mask_truncated,
        aggregation=setup.loss.aggregation,
        pad_id=tokenizer.pad_id,
        micro_batch_rows=config.train.micro_batch_rows,
        max_prompt=setup.collect.engine.prompt_width,
    )
    metrics: dict[str, Any] = {"sigma": sigma, "perturbed_norms": perturbed}
    if config.aqn.kl_every and progress.step % config.aqn.kl_every == 0:
        metrics["noise_kl"] = _noise_kl(setup, noisy, clean, trainable.lora, batch)

    # --- 6. Old and reference log-probabilities -------------------------------------------------
    under_noise = config.aqn.correction == "noisy_forward"
    batches = _with_logprobs(setup, noisy if under_noise else clean, trainable.lora, batch)

    # --- 7. Optimizer steps ---------------------------------------------------------------------
    state, updates = _update(setup, progress.state, batches, noise if under_noise else None)
    seconds = time.perf_counter() - began

    metrics |= experience.metrics | updates
    metrics["train_seconds"] = seconds
    metrics["train_tokens_per_second"] = (
        float(batch.lengths.sum()) * config.rl.updates_per_rollout / seconds
    )
    progress = Progress(step=progress.step + 1, state=state, cursor=cursor)
    return StepResult(progress, experience, advantages, metrics)


def _with_logprobs(
    setup: Setup, policy: dict, lora: Lora | None, batch: TrainBatch
) -> list[TrainBatch]:
    """Micro-batches, with the log-probabilities under the frozen policies that the loss needs.

    Args:
        setup: model and options; its parameters without an adapter are the reference.
        policy: the policy before the first optimizer step, with noise if the update has noise.
        lora: the adapter before the first optimizer step, or None.
        batch: all rows of the step.
    """
    config = setup.config
    if setup.loss.aggregation != "micro_batch":  # That loss depends on the rows of a micro-batch.
        batch = longest_first(batch)
    batches = micro_batches(batch, config.train.micro_batch_rows)

    def scored(params: dict, adapter: Lora | None, field: str) -> list[TrainBatch]:
        found = batch_logprobs(
            params,
            adapter,
            batches,
            config=setup.model.config,
            temperature=config.rollout.temperature,
        )
        return [dataclasses.replace(m, **{field: x}) for m, x in zip(batches, found, strict=True)]

    if setup.loss.kl_coef:
        batches = scored(setup.model.params, None, "ref_logprobs")
    if config.rl.updates_per_rollout > 1:
        batches = scored(policy, lora, "old_logprobs")
    return batches


def _update(
    setup: Setup, state: TrainState, batches: list[TrainBatch], noise: aqn.Noise | None
) -> tuple[TrainState, dict[str, float]]:
    """The optimizer steps on one rollout; returns the state and metrics as Python numbers."""
    config, history = setup.config, []
    for _ in range(config.rl.updates_per_rollout):
        state, metrics = train_step(
            state,
            setup.model.params,
            batches,
            loss=setup.loss,
            optimizer=setup.optimizer,
            remat=config.train.remat,
            noise=noise,
            config=setup.model.config,
            temperature=config.rollout.temperature,
        )
        history.append(jax.device_get(metrics))
        if history[-1]["update_skipped"]:
            break  # The same rollout would give the same gradient.
    combine = {"update_skipped": np.sum, "ratio_max": np.max, "logprob_diff_max": np.max}
    return state, {
        name: combine.get(name, np.mean)([metrics[name] for metrics in history]).item()
        for name in history[0]
    }


def _noise_kl(
    setup: Setup, noisy: dict, clean: dict, lora: Lora | None, batch: TrainBatch
) -> float:
    """KL of the noisy against the clean policy, on rows spread over the whole batch."""
    count = setup.config.aqn.kl_rows
    stride = max(1, len(batch.lengths) // count)
    rows = jax.tree.map(lambda x: x[::stride][:count], batch)
    kl = mean_kl(
        noisy,
        clean,
        lora,
        rows,
        config=setup.model.config,
        temperature=setup.config.rollout.temperature,
    )
    return float(kl)
