"""Computes the figures of an evaluated task, and the table that shows them."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.run.statistics import interval, majority, pass_at_k


def task_figures(
    rows: Sequence[Sequence[Mapping[str, Any]]], same: Callable[[str, str], bool] = operator.eq
) -> tuple[dict[str, Any], np.ndarray]:
    """Computes the figures of a task.

    A completion without a score counts neither as right nor as wrong; `not_judged` counts them. A
    problem without enough scores takes no part in a figure.

    Takes the completions of P problems with S samples each, and whether two extracted answers that
    are both wrong are one answer, see `same_answer`.

    Returns:
        The figures, as results.json holds them, and the fraction of correct samples of each
        problem, float64 [P], NaN for a problem without scores.
    """
    problems, samples = len(rows), len(rows[0])
    flat = [row for group in rows for row in group]
    correct, judged = _outcomes(rows, "correct")
    values = _fractions(correct, judged)
    figures: dict[str, Any] = {
        "problems": problems,
        "samples": samples,
        "accuracy": _estimate(values, judged),  # avg@k
    }
    for k in sorted({2**i for i in range(1, samples.bit_length())} | {samples} - {1}):
        chances = [
            pass_at_k(n, c, k) if n >= k else math.nan
            for n, c in zip(judged.tolist(), correct.tolist(), strict=True)
        ]
        figures[f"pass@{k}"] = _estimate(np.array(chances), judged)
    if samples > 1:
        votes = [_majority(group, same) for group in rows]
        figures[f"maj@{samples}"] = _estimate(np.array(votes), judged)
    if any(row["format"] is not None for row in flat):
        form, scored = _outcomes(rows, "format")
        figures["format"] = _estimate(_fractions(form, scored), scored)
    figures["finished"] = float(np.mean([row["finished"] for row in flat]))
    figures["mean_tokens"] = float(np.mean([row["tokens"] for row in flat]))
    figures["not_judged"] = len(flat) - int(judged.sum())
    return figures, values


def _outcomes(
    rows: Sequence[Sequence[Mapping[str, Any]]], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int [P] numbers of True, and of True and False, of an outcome per problem."""
    outcomes = [[row[name] for row in group] for group in rows]
    right = np.array([sum(value is True for value in group) for group in outcomes])
    return right, np.array([sum(value is not None for value in group) for group in outcomes])


def _fractions(right: np.ndarray, judged: np.ndarray) -> np.ndarray:
    return np.where(judged > 0, right / np.maximum(judged, 1), math.nan)


def _majority(group: Sequence[Mapping[str, Any]], same: Callable[[str, str], bool]) -> float:
    """Returns how correct the most frequent answer of a problem is, NaN without a score.

    All right answers equal the reference, so they are one answer, in whatever words.
    """
    judged = [row for row in group if row["correct"] is not None]
    answers: list[str | None] = []
    first: list[tuple[str, bool]] = []  # the first of each answer, and whether it is right
    for row in judged:
        text, right = row["extracted"], row["correct"]
        if text is None:
            answers.append(None)
            continue
        answer = next((a for a, _ in first if a == text), None) or next(
            (a for a, is_right in first if right is is_right and (right or same(text, a))), None
        )
        if answer is None:
            first.append((text, right))
        answers.append(answer or text)
    return majority(answers, [row["correct"] for row in judged]) if judged else math.nan


def _estimate(values: np.ndarray, judged: np.ndarray) -> dict[str, Any]:
    """Returns a mean over problems with its interval.

    A value that is NaN takes no part; `judged` [P] counts the samples with a score.
    """
    present = ~np.isnan(values)
    if not present.any():
        return {"value": None, "low": None, "high": None}
    values, samples = values[present], float(judged[present].mean())
    return bounds(float(values.mean()), *interval(values, samples=samples))


def bounds(value: float, low: float, high: float) -> dict[str, float]:
    """Returns a value and its interval as results.json holds them."""
    return {"value": value, "low": low, "high": high}


def format_table(
    table: Sequence[tuple[str, str, Mapping[str, Any]]], columns: int | None = None
) -> str:
    """Formats figures for the terminal, in percent with 95 % intervals.

    The table has rows (policy, task, figures). Figures are left out until it fits the columns;
    accuracy, and how many completions lack a score, always stay.
    """
    names = list(dict.fromkeys(key for *_, figures in table for key in figures))
    keys = [key for key in names if any(isinstance(f.get(key), Mapping) for *_, f in table)]
    samples = table[0][2]["samples"]
    average = "accuracy" if samples == 1 else f"avg@{samples}"
    titles = [average if key == "accuracy" else key for key in keys]
    lines = [["", "problems", *titles, "finished", "tokens"]]
    missing = any(figures["not_judged"] for *_, figures in table)
    lines[0] += ["without a score"] if missing else []
    for policy, task, figures in table:
        cells = [f"{policy} {task}".strip(), str(figures["problems"])]
        cells += [_cell(figures.get(key)) for key in keys]
        cells += [f"{100 * figures['finished']:.0f} %", f"{figures['mean_tokens']:.0f}"]
        lines.append(cells + ([str(figures["not_judged"])] if missing else []))
    others = [title for title in reversed(titles) if title not in (average, "difference")]
    unimportant = ["tokens", "finished", *others, "problems", "difference"]
    while True:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = (zip(line, widths, strict=True) for line in lines)
        texts = ["  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in rows]
        if columns is None or max(map(len, texts)) <= columns or not unimportant:
            return "\n".join(texts)
        title = unimportant.pop(0)
        kept = [number for number, other in enumerate(lines[0]) if other != title]
        lines = [[line[number] for number in kept] for line in lines]


def _cell(value: Mapping[str, Any] | None) -> str:
    if value is None or value["value"] is None:
        return "-"
    return f"{100 * value['value']:.1f} % [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
