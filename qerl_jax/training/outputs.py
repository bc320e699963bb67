"""The outputs of a run: completions to read, and the trained parameters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qerl_jax.policy.trainable import Trainable, current_policy
from qerl_jax.run.folder import RunFolder
from qerl_jax.system.atomic import write_atomic
from qerl_jax.system.safe_files import read_bytes
from qerl_jax.training.setup import Setup
from qerl_jax.training.step import StepResult
from qerl_jax.weights.peft import save_peft_adapter
from qerl_jax.weights.save import checkpoint_tensors, companion_files, write_checkpoint


def sample_rows(result: StepResult, group_size: int, count: int) -> list[dict[str, Any]]:
    """The first `count` completions to show: the first of each group, then the second, ..."""
    made = result.experience
    order = np.arange(len(made.texts)).reshape(-1, group_size).T.reshape(-1)[:count]
    return [
        {
            "prompt": made.prompts[row].text,
            "completion": made.texts[row],
            "answer": made.prompts[row].problem.answer,
            "reward": float(made.scores.total[row]),
            **{f"reward/{name}": float(v[row]) for name, v in made.scores.parts.items()},
            "advantage": float(result.advantages[row]),
            "tokens": int(made.rollout.lengths[row]),
            "finished": bool(made.rollout.finished[row]),
        }
        for row in order.tolist()
    ]


def save_trained(
    folder: RunFolder, setup: Setup, trainable: Trainable, *, best: bool = False
) -> None:
    """Writes a PEFT adapter, or the whole model where all parameters are trained.

    What is read back is the policy itself: the norms of a model stay in float32, as small updates
    of numbers around 1 vanish in bfloat16.

    Args:
        folder: the run folder.
        setup: model and options of the run.
        trainable: the trained parameters.
        best: write the best policy instead of the last one.
    """
    path, model = trained_folder(folder, setup.config, best=best), setup.model
    if trainable.lora is not None:
        save_peft_adapter(path, trainable, setup.lora_config, base_model=model.source)
        return
    dtype = setup.config.model.dtype
    policy = current_policy(model.params, trainable)
    write_checkpoint(
        path,
        checkpoint_tensors(policy, model.config, dtype=dtype, norms="float32"),
        files=companion_files(model, packed=False, dtype=dtype),
        replace=True,
    )


def save_best(
    folder: RunFolder, setup: Setup, trainable: Trainable, *, step: int, accuracy: float
) -> None:
    """Writes the policy of a step as the best one, and records its accuracy."""
    save_trained(folder, setup, trainable, best=True)
    write_atomic(folder.best, json.dumps({"step": step, "accuracy": accuracy}) + "\n")


def best_accuracy(folder: RunFolder) -> float:
    """The recorded accuracy of the best policy; -1 if no policy is recorded."""
    if not folder.best.exists():
        return -1.0
    return json.loads(read_bytes(folder.best))["accuracy"]


def trained_folder(folder: RunFolder, config: ConfigDict, *, best: bool = False) -> Path:
    """The folder that `save_trained` writes."""
    if config.train.parameters == "full":
        return folder.model(best=best)
    return folder.adapter(best=best)
