"""The runs in a folder of runs, a line for each, the one with the latest row first."""

import math
from collections.abc import Iterable
from pathlib import Path

from qerl_jax.errors import UserError, visible
from qerl_jax.run.folder import RunFolder
from qerl_jax.show.view import View, open_views
from qerl_jax.system.paths import user_path

_LATEST = 10  # rows whose mean reward is shown


def runs_in(path: str) -> list[str]:
    """Returns the run folders directly inside a folder; [] for a run folder and anything else."""
    folder = user_path(path)
    if not folder.is_dir() or RunFolder(folder).config.exists():
        return []
    return [str(Path(path) / one.name) for one in sorted(folder.iterdir()) if _is_run(one)]


def list_runs(paths: Iterable[str]) -> list[str]:
    """Returns a line for each run: its name, how far it is, its reward and its accuracy.

    A run that cannot be read has a line that says so.
    """
    views, lines = list[View](), list[str]()
    for path in paths:
        try:
            views += open_views([path], completions=False)
        except UserError as error:
            lines.append(visible(f"{Path(path).name}  cannot be read: {error}"))
    views.sort(key=lambda view: math.inf if view.age is None else view.age)
    cells = [(visible(v.name), visible(v.state), _reward(v), _accuracy(v)) for v in views]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return [row.rstrip() for row in rows] + lines


def _is_run(path: Path) -> bool:
    folder = RunFolder(path)  # A model has a config.json, too.
    return folder.config.exists() and (folder.metrics.exists() or folder.lock.exists())


def _reward(view: View) -> str:
    for name in ("reward", "loss"):  # the latter of a run that learns from text
        if values := [value for _, value in view.series(name)][-_LATEST:]:
            return f"{name} {sum(values) / len(values):.3f}"
    return ""


def _accuracy(view: View) -> str:
    values = [value for _, value in view.series("eval_accuracy")]
    ends = values[:1] + values[1:][-1:]
    return f"greedy accuracy {' -> '.join(f'{value:.3f}' for value in ends)}" if ends else ""
