"""The curves of a run as one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.run.metrics import read_metrics


def plot_run(folder: str | Path) -> Path | None:
    """Draws `metrics.jsonl` of a run folder into `curves.png`.

    Three panels over the steps: reward and accuracy (evaluations as points), entropy, sigma with
    the KL between the noisy and the clean policy. A quantity that was not logged is left out.

    Returns:
        The path of the picture; None when there is nothing to draw.

    Raises:
        UserError: `metrics.jsonl` is missing or damaged.
    """
    folder = Path(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    panels = [
        ("reward", [("reward", "-"), ("accuracy", "-"), ("eval_accuracy", "o")], "linear"),
        ("entropy (nats)", [("entropy", "-")], "linear"),
        ("noise", [("sigma", "-"), ("noise_kl", ".")], "symlog"),
    ]
    panels = [
        (label, present, scale)
        for label, keys, scale in panels
        if (present := [(k, style) for k, style in keys if np.isfinite(_series(rows, k)[1]).any()])
    ]
    if not panels:
        return None

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.4 * len(panels) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, keys, scale) in zip(all_axes, panels, strict=True):
        positive = []
        for key, style in keys:
            steps, values = _series(rows, key)
            finite = np.isfinite(values)
            axes.plot(steps[finite], values[finite], style, markersize=4, linewidth=1.3, label=key)
            positive += [v for v in values[finite] if v > 0]
        if scale == "symlog":
            # Sigma falls over decades and starts at zero.
            axes.set_yscale("symlog", linthresh=min(positive, default=1e-4))
        axes.set_ylabel(label)
        axes.legend(loc="best", frameon=False, fontsize="small")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_title(folder.resolve().name, fontsize="medium")
    all_axes[-1].set_xlabel("step")
    path = folder / "curves.png"
    figure.savefig(path, dpi=150)
    return path


def _series(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a key; NaN where a row lacks it or holds null."""
    steps = np.array([row["step"] for row in rows], np.float64)
    values = [row.get(key) for row in rows]
    return steps, np.array([np.nan if v is None else v for v in values], np.float64)
