"""What there is to see in run folders: rows, curves and completions.

Nothing is written and no lock is taken, so a run may train in the meantime.
"""

import dataclasses
import json
import math
import operator
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from qerl_jax.errors import UserError, first_line
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_evaluations, read_losses, read_steps
from qerl_jax.system.jsonl import is_number, read_jsonl
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import read_bytes

# What the curves after that of the reward begin with: its parts, and those of a run's data.
_PARTS = ("reward/", "source/", "curriculum/")
# The other curves, in their order.
_CURVES = (
    "accuracy",
    "eval_accuracy",
    "entropy",
    "length",
    "finished",
    "environment/turns",
    "environment/calls",
    "sigma",
    "noise_kl",
    "kl",
    "teacher/reverse_kl",
    "loss",
    "eval_loss",
    "grad_norm",
    "logprob_diff_mean",
    "teacher_seconds",
    "step_seconds",
    "rollout_tokens_per_second",
    "rollout_tokens_per_row_step",
)
_COMPARISONS = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
LAST_STEP = 10**18  # more than any run takes
_CONDITION = re.compile(r"(.+?)(<=|>=|<|>|=)(.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class View:
    """What a run folder shows at one moment."""

    name: str  # of the folder, or its path where several folders have the same name
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]  # of the steps
    evaluations: Mapping[int, float]  # greedy accuracy by step; step 0 is before training
    completions: Sequence[Mapping[str, Any]]  # logged ones, in the order of the steps
    losses: Mapping[int, float]  # of held-out rows of text by step
    finished: bool  # whether the run has taken its steps
    age: float | None  # seconds since the last row was written; None before the first one

    @property
    def state(self) -> str:
        """How far the run is, such as '12 of 30 steps, last row 8 s ago'."""
        last_step, total = _last_step(self.rows), self.setting("steps", "?")
        if self.finished:
            return f"finished after step {last_step}"
        # A run that is extended keeps the number of its first start.
        extended = is_number(total) and last_step > total
        text = f"{last_step} steps" if extended else f"{last_step} of {total} steps"
        return text if self.age is None else f"{text}, last row {_ago(self.age)} ago"

    @property
    def sampled(self) -> int | None:
        """Number of completions that a step samples at least; None where the config lacks it."""
        counts = [self.setting(f"rollout.{name}") for name in ("prompts_per_step", "group_size")]
        if not all(type(count) is int and is_number(count) for count in counts):
            return None
        return math.prod(counts)

    @property
    def logged(self) -> Any:
        """Number of completions of a step that the run logs; None where the config lacks it."""
        count, sampled = self.setting("log.completions"), self.sampled
        return count if sampled is None or not is_number(count) else min(count, sampled)

    def setting(self, name: str, default: Any = None) -> Any:
        """A field of the config, such as 'model.source', where it is a text or a number."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value if isinstance(value, str) or is_number(value) else default

    def series(self, key: str) -> list[tuple[int, float]]:
        """Step and value of a metric, where it was logged and is a finite number."""
        own = {"eval_accuracy": self.evaluations, "eval_loss": self.losses}
        if key in own:
            pairs: Iterable[tuple[int, Any]] = sorted(own[key].items())
        else:
            pairs = ((row["step"], row.get(key)) for row in self.rows)
        return [(step, float(value)) for step, value in pairs if is_number(value)]

    def steps(self) -> list[int]:
        """The steps with logged completions."""
        return sorted({sample["step"] for sample in self.completions})


def open_views(paths: Iterable[str], *, completions: bool = True) -> list[View]:
    """Reads run folders, and their completions, which may be many.

    Raises:
        UserError: a path is not a run folder, or a file in it is damaged.
    """
    folders = [RunFolder(user_path(path)) for path in paths]
    names = [_name(folder) for folder in folders]
    return [
        _open(folder, name if names.count(name) == 1 else str(folder.path), completions)
        for folder, name in zip(folders, names, strict=True)
    ]


def _name(folder: RunFolder) -> str:
    try:
        return folder.path.resolve().name
    except (OSError, RuntimeError) as error:  # a circle of links
        raise UserError(f"{folder.path} cannot be read: {first_line(error)}") from error


def _open(folder: RunFolder, name: str, reads_completions: bool) -> View:
    try:
        saved = json.loads(read_bytes(folder.config))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder.path} is not a run folder: {folder.config.name} cannot be read"
        ) from error
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        raise UserError(f"{folder.path} is not a run folder: no run wrote {folder.config.name}")
    has_metrics = folder.metrics.exists()
    has_completions = reads_completions and folder.completions.exists()
    rows = _valid_rows(read_steps(folder.metrics)) if has_metrics else []
    evaluations = read_evaluations(folder.metrics) if has_metrics else {}
    losses = read_losses(folder.metrics) if has_metrics else {}
    return View(
        name=name,
        config=saved["config"],
        rows=rows,
        evaluations={step: value for step, value in evaluations.items() if _is_step(step)},
        losses={step: value for step, value in losses.items() if _is_step(step)},
        completions=_valid_rows(read_jsonl(folder.completions)) if has_completions else [],
        finished=_finished_steps(folder) >= _last_step(rows),
        age=time.time() - folder.metrics.stat().st_mtime if has_metrics else None,
    )


def _finished_steps(folder: RunFolder) -> int:
    """Number of steps of a finished run; -1 while it is not finished, or with a damaged file."""
    try:
        steps = folder.finished_steps()
    except UserError:
        return -1
    return -1 if steps is None else steps


def _last_step(rows: Sequence[Mapping[str, Any]]) -> int:
    return max((row["step"] for row in rows), default=0)


def _valid_rows(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """The rows in the order of their steps, without what no run writes."""
    valid = [row for row in rows if isinstance(row, dict) and _is_step(row.get("step"))]
    return sorted(valid, key=lambda row: row["step"])


def _is_step(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= LAST_STEP


def curves(views: Sequence[View]) -> tuple[list[str], dict[str, float]]:
    """The metrics of which a run has a value, in the order in which they are shown.

    Returns:
        The names of those that have a curve; and by name the value of those that are the same in
        all steps of all runs.
    """
    logged = dict.fromkeys(key for view in views for row in view.rows for key in row)
    parts = [key for key in logged if key.startswith(_PARTS)]
    names = ("reward", *parts, *_CURVES)
    series = {key: [view.series(key) for view in views] for key in names}
    values = {key: [value for curve in series[key] for _, value in curve] for key in names}
    same = {
        key: found[0]
        for key, found in values.items()
        if max(map(len, series[key]), default=0) > 1 and min(found) == max(found)
    }
    return [key for key in names if values[key] and key not in same], same


def parts_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The rewards of a completion by name, without the weighted sum `reward`."""
    return {
        key.removeprefix("reward/"): value
        for key, value in sample.items()
        if key.startswith("reward/")
    }


def conversation_of(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The roles and texts of a conversation with an environment; [] of a completion of one turn."""
    turns = sample.get("conversation")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return []
    return [(str(turn.get("role", "")), str(turn.get("text", ""))) for turn in turns]


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on completions."""

    name: str  # 'reward', the name of a reward, or another number such as 'tokens'
    comparison: str  # a key of `_COMPARISONS`
    value: float

    def holds(self, sample: Mapping[str, Any]) -> bool:
        """Whether a completion fulfills it; one without the number does not."""
        number = (parts_of(sample) | dict(sample)).get(self.name)
        return is_number(number) and _COMPARISONS[self.comparison](float(number), self.value)


def read_condition(text: str, views: Sequence[View]) -> Condition:
    """Reads a condition such as 'correctness<1'.

    Raises:
        UserError: it has another form, or no completion has a number of this name.
    """
    match = _CONDITION.fullmatch(text)
    name = match[1].strip() if match else ""
    try:
        value = float(match[3]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or math.isnan(value):
        raise UserError(
            f"--where={text}: write a name, a comparison and a number, such as "
            "--where='correctness<1' or --where='reward>=0.5'"
        )
    names = dict.fromkeys(
        name
        for view in views
        for sample in view.completions
        for name, number in (dict(sample) | parts_of(sample)).items()
        if is_number(number) and not name.startswith("reward/")
    )
    if names and name not in names:
        raise UserError(
            f"--where={text}: completions have no number {name!r}; they have {', '.join(names)}"
        )
    return Condition(name, match[2], value)


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
