"""The scored sessions of the steps since the last checkpoint, for a run that is resumed.

When the requests of agents arrive depends on the time, so a step that is sampled again may be
another one. A step whose sessions are scored is therefore kept in the run folder until a checkpoint
has it. Nothing else in the folder could restore it, and steps without agents need no such file.
"""

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.data.order import Cursor, read_cursor
from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.episodes import Episode
from qerl_jax.errors import UserError
from qerl_jax.processes.group import ALONE
from qerl_jax.rewards.scored import Scores
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.progress import Statistics
from qerl_jax.system.atomic import replace_file
from qerl_jax.system.safe_files import read_bytes
from qerl_jax.training.experience import Experience, Peers, routes_of, split_routes
from qerl_jax.training.step import Collected

_ROLLOUT = "tokens", "lengths", "finished", "logprobs", "entropies", "roles", "endings"
_ROUTES = {"routes": "lengths", "prompt_routes": "prompt_lengths"}  # arrays and how long each is
_PART = "part/"  # of the names of rewards
_DAMAGED = KeyError, TypeError, ValueError, IndexError, EOFError, zipfile.BadZipFile


@dataclasses.dataclass(frozen=True)
class KeptSessions:
    """The files of steps in a folder, which process 0 reads and writes."""

    folder: Path
    prompts: Sequence[Prompt]  # the training prompts
    processes: Peers = ALONE

    def collect(self, step: int, sample: Callable[[], Collected]) -> Collected:
        """Returns what was collected for a step, or collects it now and keeps it.

        `step` is the number of steps before it, and `sample` is `training.collect.collect`.

        Raises:
            UserError: the file of the step is damaged.
        """
        path, writes = self._path(step), self.processes.index == 0
        try:
            arrays = _read(path) if writes and path.exists() else {}
            if arrays := self.processes.exchange(arrays)[0]:
                return self._collected(arrays)
        except _DAMAGED as error:
            raise UserError(
                f"{path} is damaged: remove it, and the sessions of its step are sampled again"
            ) from error
        collected = sample()
        if writes:
            self.folder.mkdir(exist_ok=True)
            with replace_file(path) as temporary, temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **_arrays(*collected))
        return collected

    def steps(self) -> list[int]:
        """Returns the numbers of steps before those that are kept."""
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.npz"))

    def forget(self, first: int | None) -> None:
        """Removes steps before `first`, the oldest checkpoint; None removes all."""
        for step in self.steps() if self.processes.index == 0 else ():
            if first is None or step < first:
                self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step}.npz"

    def _collected(self, arrays: Mapping[str, Any]) -> Collected:
        """What a step has collected, from the arrays of its file."""
        facts = json.loads(str(arrays["facts"]))
        ends = np.cumsum(arrays["prompt_lengths"])[:-1]
        own_prompts = np.split(arrays["own_prompts"], ends) if len(arrays["prompt_lengths"]) else []
        parts = {
            name.removeprefix(_PART): values
            for name, values in arrays.items()
            if name.startswith(_PART)
        }
        routes = {
            name: split_routes(arrays[name], arrays[lengths])
            for name, lengths in _ROUTES.items()
            if name in arrays
        }
        experience = Experience(
            prompts=[self.prompts[place] for place in facts["places"]],
            places=facts["places"],
            texts=facts["texts"],
            rollout=Rollout(**{name: arrays[name] for name in _ROLLOUT}, **routes),
            scores=Scores(arrays["total"], parts, facts["errors"], facts["reward_seconds"]),
            statistics=[Statistics(**work) for work in facts["statistics"]],
            seconds=facts["seconds"],
            episodes=[_episode(values) for values in facts["episodes"]],
            owners=arrays["owners"],
            own_prompts=[tuple(ids.tolist()) for ids in own_prompts],
        )
        return experience, facts["metrics"], read_cursor(facts["cursor"])


def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as file:
        return dict(file)


def _arrays(
    experience: Experience, metrics: dict[str, float], cursor: Cursor
) -> dict[str, np.ndarray]:
    """What a file holds, without objects that NumPy would have to unpickle."""
    scores = experience.scores
    facts = {
        "places": [int(place) for place in experience.places],
        "texts": experience.texts,
        "errors": scores.errors,
        "reward_seconds": scores.seconds,
        "statistics": [dataclasses.asdict(work) for work in experience.statistics],
        "seconds": experience.seconds,
        "episodes": [dataclasses.asdict(episode) for episode in experience.episodes],
        "metrics": metrics,
        "cursor": cursor.to_json(),
    }
    assert experience.owners is not None
    ids = [np.array(prompt, np.int32) for prompt in experience.own_prompts]
    return {
        **{name: getattr(experience.rollout, name) for name in _ROLLOUT},
        **routes_of(experience.rollout),
        "owners": experience.owners,
        "own_prompts": np.concatenate([np.zeros(0, np.int32), *ids]),
        "prompt_lengths": np.array([len(prompt) for prompt in ids], int),
        "total": scores.total,
        **{_PART + name: values for name, values in scores.parts.items()},
        "facts": np.array(json.dumps(facts)),
    }


def _episode(values: dict[str, Any]) -> Episode:
    return Episode(**values | {"parts": [(role, text) for role, text in values["parts"]]})
