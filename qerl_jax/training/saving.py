"""A run while it trains, and what it saves on its way and at its end.

With each checkpoint it writes what other commands read: the adapter, and the picture of the curves.
So a run can be sampled, evaluated and exported while it trains, and after a signal has stopped it.
"""

import dataclasses
import json
import math
import shlex
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qerl_jax.compile.count import Compilations
from qerl_jax.config.fields import learns_from_text
from qerl_jax.data.order import Order
from qerl_jax.environments.episodes import Episode
from qerl_jax.environments.roles import ENDINGS
from qerl_jax.policy.trainable import Trainable, checksum, current_policy
from qerl_jax.rewards.from_config import PYTHON_REWARDS
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.folder import OpenRun, RunFolder, read_run
from qerl_jax.run.lines import format_answers, format_completion, line_columns
from qerl_jax.run.metrics import MetricsLog, read_answers, read_losses
from qerl_jax.run.plots import plot_run
from qerl_jax.system.atomic import write_atomic, write_json
from qerl_jax.system.command import command_name
from qerl_jax.system.jsonl import read_number
from qerl_jax.system.live_line import LiveLine
from qerl_jax.training.experience import Experience
from qerl_jax.training.setup import Setup
from qerl_jax.training.step import Progress, StepResult
from qerl_jax.training.validate import how_to_train_on
from qerl_jax.weights.names import interleaves
from qerl_jax.weights.peft import save_peft_adapter
from qerl_jax.weights.save import checkpoint_tensors, companion_files, write_checkpoint
from qerl_jax.weights.tokenizer import Tokenizer

# Seconds between two pictures of a run while it trains: drawing one takes a third of a second,
# which would be most of the time of a run with a checkpoint after each of its short steps.
PICTURE_SECONDS = 10.0


@dataclasses.dataclass
class Run:
    """A run while it trains."""

    setup: Setup  # the parts that do not change
    folder: OpenRun  # the open run folder
    checkpoints: Checkpoints  # saves `progress`
    log: MetricsLog | None  # writes the rows of metrics; None in a process that writes nothing
    progress: Progress  # the part that the steps change
    # Greedy accuracy by step, as logged, None where scores are missing; step 0 is before training.
    evaluations: dict[int, float | None]
    problem_digests: dict[str, str]  # digests of the training and the held-out problems
    prompts_digest: str  # digest of their prompts as token ids
    compilations: Compilations  # what was compiled since the last row of metrics
    # The line of progress on the terminal.
    live: LiveLine = dataclasses.field(default_factory=LiveLine)
    # Step of the adapter that this process wrote last, -1 before the first one.
    adapter_step: int = -1
    # When the curves were drawn last, or the run began, by `time.monotonic`.
    picture_time: float = dataclasses.field(default_factory=time.monotonic)

    def stop_if_asked(self) -> None:
        """Raises a StoppedError once a signal has arrived, in any process of the run."""
        self.setup.processes.stop_if_asked()


def save(run: Run, *, stops: bool = False) -> None:
    """Saves a checkpoint in the background, and writes the adapter and the curves.

    All processes of a run save the checkpoint together, and one of them writes the rest. Nothing is
    written twice for a step. Where the run ends here (`stops`), everything is on disk when the
    function returns, the checkpoint first, because a scheduler may not wait for the rest. A policy
    without any checkpoint is one whose checkpoints are gone, so the first one waits as well.
    """
    step = run.progress.step
    waits = stops or not run.setup.processes.has_checkpoint
    save_checkpoint(run)
    if waits:
        run.checkpoints.wait()
    if run.log is None:
        return
    if run.adapter_step != step:
        save_policy(run.folder, run.setup, run.progress.state.trainable)
        run.adapter_step = step
    if stops or time.monotonic() - run.picture_time >= PICTURE_SECONDS:
        _draw(run)


def save_checkpoint(run: Run) -> None:
    """Saves a checkpoint of a run in the background."""
    if run.log is not None:
        run.log.sync()
    run.checkpoints.save(
        run.progress.step,
        run.progress.state,
        {
            "cursor": run.progress.cursor.to_json(),
            "noise": dataclasses.asdict(run.progress.noise),
            "fingerprint": run.setup.model.fingerprint,
            "architecture": run.setup.model.config.digest,
            "end_ids": list(run.setup.model.tokenizer.eos_ids),
            "reference": run.setup.reference_digest,
            "teacher": run.setup.teacher_digest,
            "problems": run.problem_digests,
            "prompts": run.prompts_digest,
        },
    )
    run.setup.processes.has_checkpoint = True
    if run.setup.kept is not None:
        run.setup.kept.forget(min(run.checkpoints.steps))


def finish(run: Run) -> None:
    """Writes what a finished run leaves, summary.json last, and says so."""
    run.checkpoints.wait()  # A finished run never has an adapter without its checkpoint.
    if run.setup.kept is not None:
        run.setup.kept.forget(None)
    if run.log is None:
        return
    if run.adapter_step != run.progress.step:
        save_policy(run.folder, run.setup, run.progress.state.trainable)
    _draw(run)
    memory = jax.local_devices()[0].memory_stats() or {}
    if learns_from_text(run.setup.config):
        loss = lowest_loss(run.folder)
        best = {"best_loss": loss if loss < math.inf else None}
    else:
        best = {"best_accuracy": accuracy if (accuracy := best_so_far(run)) >= 0 else None}
    summary = {
        "steps": run.progress.step,
        **best,
        "peak_memory_bytes": memory.get("peak_bytes_in_use"),  # peak of this process
    }
    write_json(run.folder.summary, summary)
    announce_finished(run.folder, run.progress.step, run.setup.config)


def best_so_far(run: Run) -> float:
    """The accuracy of the best policy, -1 without one; the log may not hold its step.

    A run that ended between an evaluation and the next checkpoint has lost that step. It may take
    the step again without evaluating it, if the evaluation was due only at the run's earlier end.
    """
    accuracies = (accuracy for accuracy in run.evaluations.values() if accuracy is not None)
    return max([*accuracies, best_accuracy(run.folder)])


def announce_finished(folder: OpenRun, steps: int, config: ConfigDict) -> None:
    """Prints answers before and after a run, what to do with it, and how to train on."""
    answers = read_answers(folder.metrics) if folder.metrics.exists() else {}
    for line in format_answers(answers.get(0, []), answers.get(steps, []), line_columns()):
        print(line, flush=True)
    target = policy_folder(folder, config)
    saved = read_run(folder.config) or {}
    advice = how_to_train_on(
        config,
        steps,
        schedule_steps=folder.schedule_steps,
        workdir=folder.path,
        target=target,
        python_rewards=bool(saved.get(PYTHON_REWARDS)),
    )
    run = shlex.quote(str(folder.path))
    form = "merged" if config.train.parameters == "full" else "peft --with-base"
    for command, does in (
        (f"{command_name('show')} {run}", "shows its curves and completions"),
        (f"{command_name('sample')} {run} QUESTION", "asks the policy before and after"),
        (f"{command_name('export')} {run} --format={form}", "writes it for vLLM and transformers"),
    ):
        print(f"{command}  # {does}", flush=True)
    print(f"finished after step {steps}: {target}, {folder.curves}; {advice}", flush=True)


def _draw(run: Run) -> Path | None:
    run.picture_time = time.monotonic()
    return plot_run(run.folder.path) if run.folder.metrics.exists() else None


def sample_rows(
    result: StepResult,
    group_size: int,
    count: int,
    order: Order | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> list[dict[str, Any]]:
    """The `count` completions of a step to show, as completions.jsonl has them.

    The tokenizer tells what the policy said besides its answer.
    """
    experience, prompts = result.experience, result.experience.row_prompts
    lengths, finished = experience.lengths, experience.finished
    by_agents = experience.owners is not None  # They write the prompts, see the conversation.
    return [
        {
            "prompt": prompts[row].problem.question if by_agents else prompts[row].text,
            "completion": experience.texts[row],
            "answer": prompts[row].problem.answer,
            "reward": float(experience.scores.total[row]),
            **{f"reward/{name}": float(v[row]) for name, v in experience.scores.parts.items()},
            "advantage": float(result.advantages[row]),
            "tokens": int(lengths[row]),
            "finished": bool(finished[row]),
            **(
                _conversation(experience.episodes[row])
                if experience.episodes
                else _reasoning(experience, row, tokenizer)
            ),
        }
        for row in _rows_to_show(result, group_size, count, order)
    ]


def sample_lines(
    result: StepResult, group_size: int, count: int, order: Order, columns: int | None
) -> list[str]:
    """The lines of the `count` completions of a step to show."""
    experience, prompts = result.experience, result.experience.row_prompts
    return [
        line
        for row in _rows_to_show(result, group_size, count, order)
        for line in format_completion(
            prompts[row].problem.question,
            experience.texts[row],
            experience.scores.total[row],
            finished=bool(experience.finished[row]),
            columns=columns,
        )
    ]


def _rows_to_show(
    result: StepResult, group_size: int, count: int, order: Order | None
) -> list[int]:
    """The indices of the `count` completions of a step to show.

    They are the first of each group, then the second, and so on. In a mixture the sources take
    turns, in an order that changes with the step, so that fewer completions than sources show all.
    """
    experience = result.experience
    rows = np.arange(len(experience.texts)).reshape(-1, group_size).T.reshape(-1)
    if order is not None and len(order.sources) > 1:
        numbers = order.sources_of(experience.places)[rows // group_size]
        ranks = np.zeros(len(rows), int)  # of the rows within their sources
        for number in np.unique(numbers):
            ranks[numbers == number] = np.arange(np.sum(numbers == number))
        turns = np.random.default_rng(result.progress.step).permutation(len(order.sources))
        rows = rows[np.lexsort((turns[numbers], ranks))]
    return rows[:count].tolist()


def _conversation(episode: Episode) -> dict[str, Any]:
    """What completions.jsonl has of a conversation, besides its last turn."""
    turns = [{"role": role, "text": text} for role, text in episode.parts]
    values = {"conversation": turns, "ending": ENDINGS[episode.ending], "calls": episode.calls}
    return values | ({"error": episode.error} if episode.error else {})


def _reasoning(experience: Experience, row: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What completions.jsonl has of a row whose text is not all that the policy said."""
    if tokenizer is None:
        return {}
    rollout = experience.rollout
    said = tokenizer.reasoning(rollout.tokens[row, : rollout.lengths[row]].tolist())
    parts = [(f"assistant {name}", text) for name, text in said]
    parts.append(("assistant", experience.texts[row]))
    return {"conversation": [{"role": r, "text": text} for r, text in parts]} if said else {}


def save_policy(
    folder: RunFolder, setup: Setup, trainable: Trainable, *, best: bool = False
) -> None:
    """Writes a PEFT adapter, or the whole model where all parameters are trained.

    What is read back is the policy itself: the norms of a model stay in float32, as small updates
    of numbers around 1 vanish in bfloat16.
    """
    path, model = policy_folder(folder, setup.config, best=best), setup.model
    if trainable.lora is not None:
        options = {"base_model": model.source, "interleaved": interleaves(model.config)}
        save_peft_adapter(path, trainable, setup.method.lora_config, **options)
        return
    dtype = setup.config.model.dtype
    policy = current_policy(model.params, trainable)
    write_checkpoint(
        path,
        checkpoint_tensors(policy, model.config, dtype=dtype, norms="float32"),
        files=companion_files(model, packed=False, dtype=dtype, trained=True),
        replace=True,
    )


def save_best(
    folder: RunFolder, setup: Setup, trainable: Trainable, *, step: int, score: dict[str, float]
) -> None:
    """Writes the policy of a step as the best one, and then records its step and score.

    The score is an accuracy, or the loss of held-out rows of text.

    With an adapter the record has its checksum, as another run may read both in between.
    """
    save_policy(folder, setup, trainable, best=True)
    record: dict[str, Any] = {"step": step} | score
    if trainable.lora is not None:
        record["checksum"] = checksum(trainable)
    write_atomic(folder.best, json.dumps(record) + "\n")


def best_accuracy(folder: RunFolder) -> float:
    """The recorded accuracy of the best policy; -1 if no policy is recorded."""
    if not folder.best.exists():
        return -1.0
    return read_number(folder.best, "accuracy")


def lowest_loss(folder: RunFolder) -> float:
    """The lowest loss of held-out rows that is logged or recorded, infinity without one."""
    losses = [*read_losses(folder.metrics).values()] if folder.metrics.exists() else []
    if folder.best.exists():
        losses.append(read_number(folder.best, "loss"))
    return min(losses, default=math.inf)


def policy_folder(folder: RunFolder, config: ConfigDict, *, best: bool = False) -> Path:
    """The folder that `save_policy` writes."""
    if config.train.parameters == "full":
        return folder.model(best=best)
    return folder.adapter(best=best)
