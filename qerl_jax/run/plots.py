"""The curves of a run, or of the runs of a sweep, as one picture."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.run.folder import RunFolder
from qerl_jax.run.metrics import read_evaluations, read_losses, read_steps
from qerl_jax.run.statistics import half_interval
from qerl_jax.system.atomic import replace_file
from qerl_jax.system.jsonl import is_number

# Label, keys with the style and the name of each, and scale of a panel of a run.
_Panel = tuple[str, tuple[tuple[str, str, str], ...], str]
_COLUMNS = 90  # characters of a line below the panels
_NOISE = "sigma", "noise_kl"  # metrics
_REWARD: _Panel = ("reward", (("reward", "-", "sampled"),), "linear")
_ACCURACY: _Panel = (
    "accuracy",
    (("accuracy", "-", "sampled"), ("eval_accuracy", "o--", "greedy, held-out problems")),
    "linear",
)
_LOSS: _Panel = (
    "loss (nats per token)",
    (("loss", "-", "training rows"), ("eval_loss", "o--", "held-out rows")),
    "linear",
)
_OTHERS: tuple[_Panel, ...] = (
    ("entropy (nats)", (("entropy", "-", "entropy"),), "linear"),
    ("sigma of the noise", (("sigma", "-", "sigma"),), "symlog"),
    ("KL(noisy, clean)", (("noise_kl", ".-", "KL"),), "symlog"),
    ("KL(policy, teacher)", (("teacher/reverse_kl", "-", "KL"),), "linear"),
)


def plot_run(folder: str | Path) -> Path | None:
    """Draws `metrics.jsonl` of a run folder into `curves.png`.

    A panel each over the steps for the reward, the accuracy (with the evaluations as points, that
    before the first step at 0), the entropy, sigma, and the KL between the noisy and the clean
    policy, and to a teacher. Where the accuracy is the reward in every step, the two share a panel
    and a curve. Where a run has several rewards, each has a panel of its own after the first, but
    for that which is the accuracy. A quantity that was not logged is left out, and one with the
    same value in all steps is named below the panels.

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
        if (curves := [curve for curve in keys if len(series[curve[0]][0])])
    ]
    if not panels:
        return None
    unchanged = [
        panel for panel in panels if all(_is_flat(key, [series[key][1]]) for key, _, _ in panel[1])
    ]
    if len(unchanged) < len(panels):
        panels = [panel for panel in panels if panel not in unchanged]

    figure, all_axes = _make_axes(len(panels))
    for axes, (label, curves, scale) in zip(all_axes, panels, strict=True):
        positive = []
        for number, (key, style, name) in enumerate(curves):
            steps, values = series[key]
            single = "o" if len(steps) == 1 else style
            axes.plot(
                steps, values, single, color=f"C{number}", markersize=4, linewidth=1.3, label=name
            )
            positive += [v for v in values if v > 0]
        if scale == "symlog":
            _symlog(axes, positive)
        axes.set_ylabel(label)
        if len(curves) > 1:
            _legend_above(axes, len(curves))
    values = [f"{label} {series[curves[0][0]][1][0]:.3g}" for label, curves, _ in unchanged]
    if values:
        text = textwrap.fill(f"unchanged: {', '.join(values)}", _COLUMNS)
        all_axes[-1].set_xlabel(f"step\n{text}")
    all_axes[0].set_title(run.path.resolve().name, fontsize="medium", loc="left")
    figure.align_ylabels()
    _save(figure, run.curves)
    return run.curves


def _is_flat(key: str, series: Sequence[np.ndarray]) -> bool:
    """Whether runs logged a metric several times, always with the same value.

    For one of the noise a single 0 is enough.
    """
    values = np.concatenate(series)
    without_noise = key in _NOISE and not values.any()
    return values.min() == values.max() and (max(map(len, series)) > 1 or without_noise)


def plot_sweep(settings: Mapping[str, Sequence[str | Path]], path: str | Path) -> bool:
    """Draws the runs of a sweep by setting: reward, entropy, sigma and noise KL over the steps.

    Each setting has one line, the mean over its runs, with a band of the 95 % interval where there
    are several runs. The axes fit the lines and may cut a band: the band of two runs is wide. What
    no run logged, or what is the same in all steps of all runs, is left out.

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
    changing = []
    for key, label in panels:
        series = [_series(run, key)[1] for runs in rows.values() for run in runs]
        if any(map(len, series)) and not _is_flat(key, series):
            changing.append((key, label))
    panels = changing or panels[:1]
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
        if key in _NOISE:
            _symlog(axes, [mean for mean in means if mean > 0])
            axes.set_ylim(0.0, 2.0 * high or 1.0)
        else:
            margin = 0.1 * (high - low) or 0.1
            axes.set_ylim(low - margin, high + margin)
        axes.set_ylabel(label)
    _legend_above(all_axes[0], 2)
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
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 2.1 * count + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("step")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure, all_axes


def _symlog(axes, positive: Sequence[float]) -> None:
    """Sets a scale for values that start at zero and fall over decades, such as sigma."""
    axes.set_yscale("symlog", linthresh=min(positive, default=1e-4))


def _legend_above(axes, columns: int) -> None:
    """Names the curves above the panel, where no text covers a curve."""
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=columns,
        frameon=False, fontsize="small",
    )  # fmt: skip


def _panels(series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> list[_Panel]:
    """The panels of a run, with one for each reward where there are several."""
    rewards = [key for key in series if key.startswith("reward/")]
    first = [_REWARD, _ACCURACY]

    def is_accuracy(key: str) -> bool:
        return all(
            np.array_equal(*pair) for pair in zip(series[key], series["accuracy"], strict=True)
        )

    if len(series["reward"][0]) and is_accuracy("reward"):
        first = [("reward = accuracy", _ACCURACY[1], "linear")]
    others = [key for key in rewards if len(rewards) > 1 and not is_accuracy(key)]
    parts = [(key, ((key, "-", key),), "linear") for key in others]
    of_text = [] if len(series["entropy"][0]) else [_LOSS]  # A run that samples may lack rewards.
    return [*first, *parts, *of_text, *_OTHERS]


def _all_series(run: RunFolder) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values of each key of the panels, and of each reward."""
    rows = read_steps(run.metrics)
    keys = [key for _, curves, _ in (_REWARD, _ACCURACY, _LOSS, *_OTHERS) for key, _, _ in curves]
    keys += sorted({key for row in rows for key in row if key.startswith("reward/")})
    series = {key: _series(rows, key) for key in keys}
    for key, read in (("eval_accuracy", read_evaluations), ("eval_loss", read_losses)):
        points = np.array(sorted(read(run.metrics).items()), np.float64).reshape(-1, 2)
        series[key] = points[:, 0], points[:, 1]
    return series


def _series(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a key, without the rows that lack it or hold no number."""
    points = [
        (row["step"], row[key])
        for row in rows
        if is_number(row.get("step")) and is_number(row.get(key))
    ]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, np.float64), np.array(values, np.float64)
