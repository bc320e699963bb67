"""Computes the figures of an evaluated task, and the table that shows them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.run.statistics import interval, majority, pass_at_k


def task_figures(rows: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[dict[str, Any], np.ndarray]:
    """Computes the figures of a task.

    Args:
        rows: completions of P problems with S samples each, as they are saved.

    Returns:
        The figures, as results.json holds them, and the fraction of correct samples of each
        problem, float64 [P].
    """
    correct = np.array([[row["correct"] is True for row in group] for group in rows])
    form = np.array([[row["format"] is True for row in group] for group in rows])
    problems, samples = correct.shape
    flat = [row for group in rows for row in group]
    values = correct.mean(axis=1)
    figures = {
        "problems": problems,
        "samples": samples,
        "accuracy": _estimate(values, samples),  # avg@k
    }
    for k in sorted({2**i for i in range(1, samples.bit_length())} | {samples} - {1}):
        chances = np.array([pass_at_k(samples, c, k) for c in correct.sum(axis=1).tolist()])
        figures[f"pass@{k}"] = _estimate(chances, samples)
    if samples > 1:
        votes = [
            majority([row["extracted"] for row in group], scores)
            for group, scores in zip(rows, correct.tolist(), strict=True)
        ]
        figures[f"maj@{samples}"] = _estimate(np.array(votes), samples)
    if any(row["format"] is not None for row in flat):
        figures["format"] = _estimate(form.mean(axis=1), samples)
    figures["finished"] = float(np.mean([row["finished"] for row in flat]))
    figures["mean_tokens"] = float(np.mean([row["tokens"] for row in flat]))
    figures["not_judged"] = sum(row["correct"] is None for row in flat)
    return figures, values


def _estimate(values: np.ndarray, samples: int) -> dict[str, float]:
    return bounds(float(values.mean()), *interval(values, samples=samples))


def bounds(value: float, low: float, high: float) -> dict[str, float]:
    """Returns a value and its interval as results.json holds them."""
    return {"value": value, "low": low, "high": high}


def format_table(table: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Formats figures for the terminal, in percent with 95 % intervals.

    Args:
        table: rows (policy, task, figures).
    """
    names = list(dict.fromkeys(key for *_, figures in table for key in figures))
    keys = [key for key in names if any(isinstance(f.get(key), Mapping) for *_, f in table)]
    samples = table[0][2]["samples"]
    average = "accuracy" if samples == 1 else f"avg@{samples}"
    titles = [average if key == "accuracy" else key for key in keys]
    lines = [["", "problems", *titles, "finished", "tokens"]]
    for policy, task, figures in table:
        cells = [f"{policy} {task}".strip(), str(figures["problems"])]
        cells += [_cell(figures.get(key)) for key in keys]
        cells += [f"{100 * figures['finished']:.0f} %", f"{figures['mean_tokens']:.0f}"]
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value['value']:.1f} % [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
