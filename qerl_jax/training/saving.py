"""What a run saves on its way and at its end.

With each checkpoint it writes what other commands read: the adapter, and the picture of the curves.
So a run can be sampled, evaluated and exported while it trains, and after a signal has stopped it.
"""

import time
from pathlib import Path

import jax
from ml_collections import ConfigDict

from qerl_jax.run.folder import OpenRun
from qerl_jax.run.plots import plot_run
from qerl_jax.system.atomic import write_json
from qerl_jax.training.begin import Run, save_checkpoint
from qerl_jax.training.outputs import best_accuracy, save_trained, trained_folder
from qerl_jax.training.validate import how_to_train_on

# Seconds between two pictures of a run that goes on: drawing one takes a third of a second, which
# would be most of the time of a run with a checkpoint after each of its short steps.
PICTURE_SECONDS = 10.0


def save(run: Run, *, stops: bool = False) -> None:
    """Saves a checkpoint in the background, and writes the adapter and the curves beside it.

    All processes of a run save the checkpoint together, and one of them writes the rest.

    Args:
        run: the run; nothing is written twice for a step.
        stops: whether the run ends here. Then everything is on disk when the function returns, the
            checkpoint first, because a scheduler may not wait for the rest.

    Raises:
        UserError: a file could not be written.
    """
    step = run.progress.step
    save_checkpoint(run)
    if stops:
        run.checkpoints.wait()
    if run.log is None:
        return
    if run.written != step:
        save_trained(run.folder, run.setup, run.progress.state.trainable)
        run.written = step
    if stops or time.monotonic() - run.drawn >= PICTURE_SECONDS:
        _draw(run)


def finish(run: Run) -> None:
    """Writes what a finished run leaves, summary.json last, and says so."""
    run.checkpoints.wait()  # The adapter of a finished run never lies there without its checkpoint.
    if run.log is None:
        return
    if run.written != run.progress.step:
        save_trained(run.folder, run.setup, run.progress.state.trainable)
    _draw(run)
    memory = jax.local_devices()[0].memory_stats() or {}
    summary = {
        "steps": run.progress.step,
        "best_accuracy": best_so_far(run) if run.setup.eval_prompts else None,
        "peak_memory_bytes": memory.get("peak_bytes_in_use"),  # peak of this process
    }
    write_json(run.folder.summary, summary)
    announce_finished(run.folder, run.progress.step, run.setup.config)


def best_so_far(run: Run) -> float:
    """The accuracy of the best policy, which may belong to a step that the log does not hold.

    A run that ended between an evaluation and the next checkpoint has lost that step. It may take
    the step again without evaluating it, if the evaluation was due only at the run's earlier end.
    """
    return max([*run.evaluations.values(), best_accuracy(run.folder)])


def announce_finished(folder: OpenRun, steps: int, config: ConfigDict) -> None:
    """Prints where the results of a finished run lie, and how it could be trained on."""
    trained = trained_folder(folder, config)
    advice = how_to_train_on(
        config, steps, schedule_steps=folder.schedule_steps, workdir=folder.path, trained=trained
    )
    print(f"finished after step {steps}: {trained}, {folder.curves}; {advice}", flush=True)


def _draw(run: Run) -> Path | None:
    run.drawn = time.monotonic()
    return plot_run(run.folder.path) if run.folder.metrics.exists() else None
