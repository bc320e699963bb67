"""The curves of a run, or of the runs of a sweep, as one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_evaluations, read_steps
from qerl_jax.run.statistics import half_interval
from qerl_jax.system.atomic import replace_file
from qerl_jax.system.jsonl import is_number

# Label, keys with the style of each, and scale of a panel of a run.
_Panel = tuple[str, tuple[tuple[str, str], ...], str]
_PANELS: tuple[_Panel, ...] = (
    ("reward", (("reward", "-"), ("accuracy", "-"), ("eval_accuracy", "o")), "linear"),
    ("entropy (nats)", (("entropy", "-"),), "linear"),
    ("noise", (("sigma", "-"), ("noise_kl", ".")), "symlog"),
)


def plot_run(folder: str | Path) -> Path | None:
    """Draws `metrics.jsonl` of a run folder into `curves.png`.

    Three panels over the steps: reward and accuracy (evaluations as points), entropy, sigma with
    the KL between the noisy and the clean policy. Where a run has several rewards, each has a panel
    of its own after the first. A quantity that was not logged is left out.

    Returns:
        The path of the picture; None when there is nothing to draw.

    Raises:
        UserError: `metrics.jsonl` is missing or damaged.
    """
    run = RunFolder(Path(folder))
    series = _all_series(run)
    panels = [
        (label, curves, scale)
        for label, keys, scale in _panels(series)
        if (curves := [(key, style) for key, style in keys if len(series[key][0])])
    ]
    if not panels:
        return None

    figure, all_axes = _make_axes(len(panels))
    for axes, (label, keys, scale) in zip(all_axes, panels, strict=True):
        positive = []
        for key, style in keys:
            steps, values = series[key]
            axes.plot(steps, values, style, markersize=4, linewidth=1.3, label=key)
            positive += [v for v in values if v > 0]
        if scale == "symlog":
            _symlog(axes, positive)
        axes.set_ylabel(label)
        axes.legend(loc="best", frameon=False, fontsize="small")
    all_axes[0].set_title(run.path.resolve().name, fontsize="medium")
    _save(figure, run.curves)
    return run.curves


def plot_sweep(settings: Mapping[str, Sequence[str | Path]], path: str | Path) -> bool:
    """Draws the runs of a sweep: reward, entropy, sigma and noise KL over the steps.

    Each setting has one line, the mean over its runs, with a band of the 95 % interval where there
    are several runs. The axes fit the lines and may cut a band: the band of two runs is wide.

    Args:
        settings: the run folders of each setting, by the name of the setting.
        path: path of the picture.

    Returns:
        Whether there was anything to draw.

    Raises:
        UserError: the `metrics.jsonl` of a run is missing or damaged.
    """
    rows = {
        name: [read_steps(RunFolder(Path(folder)).metrics) for folder in folders]
        for name, folders in settings.items()
        if folders
    }
    if not rows:
        return False
    panels = [
        ("reward", "reward"),
        ("entropy", "entropy (nats)"),
        ("sigma", "sigma"),
        ("noise_kl", "KL(noisy, clean)"),
    ]
    figure, all_axes = _make_axes(len(panels))
    for axes, (key, label) in zip(all_axes, panels, strict=True):
        means: list[float] = []
        for name, runs in rows.items():
            steps, mean, half = _over_runs(runs, key)
            (line,) = axes.plot(steps, mean, linewidth=1.3, label=name)
            axes.fill_between(
                steps, mean - half, mean + half, color=line.get_color(), alpha=0.15, linewidth=0
            )
            means += mean.tolist()
        low, high = min(means, default=0.0), max(means, default=0.0)
        if key in ("sigma", "noise_kl"):
            _symlog(axes, [mean for mean in means if mean > 0])
            axes.set_ylim(0.0, 2.0 * high or 1.0)
        else:
            margin = 0.1 * (high - low) or 0.1
            axes.set_ylim(low - margin, high + margin)
        axes.set_ylabel(label)
    all_axes[0].legend(loc="best", frameon=False, fontsize="small")
    _save(figure, Path(path))
    return True


def _over_runs(
    runs: Sequence[Sequence[dict[str, Any]]], key: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean over the runs with a value there, and half of the 95 % interval (0 for 1 run)."""
    values_by_step: dict[float, list[float]] = {}
    for rows in runs:
        for step, value in zip(*_series(rows, key), strict=True):
            values_by_step.setdefault(step, []).append(value)
    steps = sorted(values_by_step)
    values = [np.array(values_by_step[step]) for step in steps]
    half = [half_interval(v) if len(v) > 1 else 0.0 for v in values]
    return np.array(steps), np.array([v.mean() for v in values]), np.array(half)


def _save(figure: Any, path: Path) -> None:
    with replace_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _make_axes(count: int):
    """A figure and its axes: panels below each other that share the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.4 * count + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("step")
    return figure, all_axes


def _symlog(axes, positive: Sequence[float]) -> None:
    """Sets a scale for values that start at zero and fall over decades, such as sigma."""
    axes.set_yscale("symlog", linthresh=min(positive, default=1e-4))


def _panels(series: Mapping[str, Any]) -> list[_Panel]:
    """The panels of a run, with one for each reward where there are several."""
    rewards = [key for key in series if key.startswith("reward/")]
    if len(rewards) < 2:
        return list(_PANELS)
    first, *others = _PANELS
    return [first, *((key, ((key, "-"),), "linear") for key in rewards), *others]


def _all_series(run: RunFolder) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values of each key of `_PANELS`, and of each reward."""
    rows = read_steps(run.metrics)
    keys = [key for _, keys, _ in _PANELS for key, _ in keys]
    keys += sorted({key for row in rows for key in row if key.startswith("reward/")})
    series = {key: _series(rows, key) for key in keys}
    evaluations = {step: v for step, v in read_evaluations(run.metrics).items() if step}
    return series | {
        "eval_accuracy": (np.array(list(evaluations)), np.array(list(evaluations.values())))
    }


def _series(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a key, without the rows that lack it or hold no number."""
    points = [
        (row["step"], row[key])
        for row in rows
        if is_number(row.get("step")) and is_number(row.get(key))
    ]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, np.float64), np.array(values, np.float64)
