"""A step of supervised fine-tuning, and the loss of held-out rows.

The loss is the mean over the learned tokens of all rows of a step of -log p: that of TRL's
SFTTrainer, however the rows are dealt out to buffers and devices. It is the loss of CISPO with an
advantage of 1, whose ratio is 1 in the one update of a step.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qerl_jax.compile.operation import Programs
from qerl_jax.data.order import draw_turns, take_turns
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.roles import ENVIRONMENT, SAMPLED
from qerl_jax.policy.dequantize import dequantized
from qerl_jax.policy.trainable import current_policy
from qerl_jax.rl.batch import TrainBatch, make_batch
from qerl_jax.rl.data_parallel import deal_buffers
from qerl_jax.rl.losses import LossConfig, loss_config
from qerl_jax.rl.packing import pack, packing_metrics
from qerl_jax.training.step import Progress, StepSetup, update

TEXT_LOSS: LossConfig = loss_config(
    "cispo",
    clip_low=1.0,
    clip_high=1.0,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.0,
    kl_coef=0.0,
    kl_grad="k3",
    entropy_coef=0.0,
)
_ROWS_AT_ONCE = 64  # held-out rows whose buffers are on the host together
# Of the metrics of an update, those that say something where nothing was sampled.
_METRICS = ("loss", "grad_norm", "update_skipped", "train_entropy", "expert_load_max")


class TextResult(NamedTuple):
    """The run after a step, and values to log by name."""

    progress: Progress
    metrics: dict[str, Any]


@dataclasses.dataclass
class _Texts:
    """B rows as what a rollout gives a batch, see `batch.SampledRows`."""

    tokens: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    logprobs: np.ndarray
    roles: np.ndarray | None
    routes: Any = None
    prompt_routes: Any = None


def text_batch(prompts: Sequence[Prompt], pad_id: int) -> TrainBatch:
    """Returns the rows of texts as a batch whose weights are one over the learned tokens."""
    rows = [row for prompt in prompts for row in prompt.rows]
    lengths = np.array([len(row.completion) for row in rows], np.int32)
    shape = len(rows), int(lengths.max())
    tokens, roles = np.full(shape, pad_id, np.int32), np.zeros(shape, np.int8)
    for number, row in enumerate(rows):
        tokens[number, : lengths[number]] = row.completion
        roles[number, : lengths[number]] = np.where(row.learned, SAMPLED, ENVIRONMENT)
    unknown, finished = np.full(shape, np.nan, np.float32), np.ones(len(rows), bool)
    return make_batch(
        [row.prompt for row in rows],
        _Texts(tokens, lengths, finished, unknown, roles),
        np.ones(len(rows), np.float32),
        mask_truncated=False,
        aggregation=TEXT_LOSS.aggregation,
        pad_id=pad_id,
    )


def take_text_step(
    setup: StepSetup,
    progress: Progress,
    *,
    programs: Programs,
    on_update: Callable[[], None],
) -> TextResult:
    """Takes one step: draws rows, and one optimizer step on them; as `step.take_step`."""
    order, count = setup.collect.order, setup.config.sft.rows_per_step
    turns, cursor = take_turns(order, progress.cursor, count)
    places, cursor = draw_turns(order, cursor, turns)
    on_update()
    began = time.perf_counter()
    batch = _batch(setup, [setup.train_prompts[place] for place in places])
    packed = pack(batch, batch.lengths > 0, buffer_tokens=setup.buffer_tokens)
    state, updates, _ = update(
        progress.state,
        dequantized(setup.params, programs),
        [deal_buffers(packed, setup.mesh)],
        None,
        np.float32(1),
        programs=programs,
        number=1,
    )
    seconds = time.perf_counter() - began
    packing = packing_metrics(batch, packed)
    metrics: dict[str, Any] = {name: updates[name] for name in _METRICS if name in updates}
    metrics |= {name: packing[name] for name in ("packed_tokens", "update_buffers")} | {
        "learned_tokens": int(batch.sampled.sum()),
        "epoch": _epoch(setup, cursor),
        "train_seconds": seconds,
        "train_tokens_per_second": packing["packed_tokens"] / seconds,
    }
    step = progress.step + 1
    return TextResult(dataclasses.replace(progress, step=step, state=state, cursor=cursor), metrics)


def held_out_loss(
    setup: StepSetup,
    progress: Progress,
    prompts: Sequence[Prompt],
    *,
    programs: Programs,
    on_progress: Callable[[int, int], None],
) -> float:
    """The mean of -log p over the learned tokens of held-out rows, in nats.

    `on_progress` is called with the numbers of measured rows and tokens.
    """
    params, trainable = dequantized(setup.params, programs), progress.state.trainable
    loss = functools.partial(
        programs["buffer_loss"], current_policy(params, trainable), trainable.lora
    )
    total, tokens = 0.0, 0
    for start in range(0, len(prompts), _ROWS_AT_ONCE):
        part = prompts[start : start + _ROWS_AT_ONCE]
        batch = _batch(setup, part)
        packed = pack(batch, batch.lengths > 0, buffer_tokens=setup.buffer_tokens)
        sums = [loss(buffer, np.float32(1)) for buffer in deal_buffers(packed, setup.mesh)]
        total += sum(float(np.asarray(one).sum()) for one in sums)
        tokens += int(batch.sampled.sum())
        on_progress(start + len(part), tokens)
    return total / tokens


def _batch(setup: StepSetup, prompts: Sequence[Prompt]) -> TrainBatch:
    return text_batch(prompts, setup.collect.sampler.tokenizer.pad_id)


def _epoch(setup: StepSetup, cursor: Any) -> float:
    """How many times the rows have been drawn; of a mixture, the source drawn most often."""
    positions = ((source, cursor.position(source)) for source in setup.collect.order.sources)
    return max(position.epoch + position.index / source.size for source, position in positions)
