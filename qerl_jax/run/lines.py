"""What a run prints on the terminal: a line per row of metrics."""

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, TypeGuard

from qerl_jax.errors import visible
from qerl_jax.system.jsonl import is_number
from qerl_jax.system.streams import is_terminal

_LONGEST = 160  # characters of a question or an answer


def line_columns(stream: TextIO | None = None) -> int | None:
    """The columns that a line of a stream may have: those of a terminal, or None without a limit.

    Args:
        stream: where the line is written; stdout when None.
    """
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def format_row(row: Mapping[str, Any], total_steps: int, columns: int | None = None) -> str:
    """One readable line for a row of metrics; missing keys are left out.

    Args:
        row: the row of a step or of an evaluation, as `metrics.MetricsLog` describes them.
        total_steps: number of steps of the whole run.
        columns: width of the line. What does not fit is left out, the least important number
            first. None is no limit.
    """
    if "eval_seconds" in row:
        head, parts = _evaluation_parts(row)
    else:
        width = len(str(total_steps))
        head, parts = f"step {row['step']:{width}d}/{total_steps}", _step_parts(row)
    parts = [part for part in parts if part[1]]

    def line() -> str:
        return "  ".join([head, *(text for _, text in parts)])

    while columns is not None and len(line()) > columns and parts:
        parts.remove(max(parts, key=lambda part: part[0]))
    return line()


def _step_parts(row: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The parts of the line of a step: 0 or how soon a part is left out, and its text or ''."""

    def number(label: str, key: str, spec: str) -> str:
        return f"{label} {_number(row[key], spec)}" if key in row else ""

    rates = [
        f"{label} {_rate(row[key])}"
        for label, key in (
            ("rollout", "rollout_tokens_per_second"),
            ("train", "train_tokens_per_second"),
        )
        if key in row
    ]
    remaining = row.get("remaining_seconds")
    return [
        (1, number("reward", "reward", "6.3f")),
        (1, number("loss", "loss", ".4f") if "reward" not in row else ""),
        (3, number("acc", "accuracy", ".2f")),
        (2, number("teacher KL", "teacher/reverse_kl", ".4f")),
        (6, number("format", "format" if "format" in row else "reward/format", ".2f")),
        (4, number("len", "length", "5.1f")),
        (5, number("entropy", "entropy", ".3f")),
        (7, number("sigma", "sigma", ".1e") if row.get("sigma") else ""),
        (8, number("grad", "grad_norm", ".3g")),
        (9, " ".join(rates) + " tok/s" if rates else ""),
        (2, f"left {_duration(remaining)}" if "remaining_seconds" in row else ""),
        (0, "UPDATE SKIPPED" if row.get("update_skipped") else ""),
    ]


def _evaluation_parts(row: Mapping[str, Any]) -> tuple[str, list[tuple[int, str]]]:
    """The head of the line of an evaluation, and its other parts, as in `_step_parts`."""
    moment = f"after step {row['step']}" if row["step"] else "before training"
    if "eval_loss" in row:
        return f"held-out loss {moment}: {_number(row['eval_loss'], '.4f')}", []
    accuracy = row.get("eval_accuracy", row.get("eval_accuracy_before"))
    cut = row.get("eval_truncated")
    cut = cut if is_number(cut) else 0.0
    missing = row.get("eval_missing")
    return f"greedy accuracy {moment}: {_number(accuracy, '.3f')}", [
        (2, f"cut off {100 * cut:.0f} %" if cut else ""),
        # An evaluation without all scores is compared with no other.
        (1, f"no score {missing}: not compared" if missing else ""),
    ]


def format_answers(
    before: Sequence[Any], after: Sequence[Any], columns: int | None = None
) -> list[str]:
    """Lines with the answers of two `greedy.GreedyScore`s to the same questions, before and after.

    A question that `before` lacks is left out. Of a text that is longer than the columns, as in
    `format_row`, the end is kept.
    """
    width = 2 * _LONGEST if columns is None else columns
    first = {answer.get("question"): answer for answer in before}
    lines = []
    for answer in after:
        question = answer.get("question")
        if question in first:
            lines += [
                _line(question, width),
                _answer("  before: ", first[question], width),
                _answer("  after:  ", answer, width),
            ]
    return lines


def format_completion(
    question: str, completion: str, reward: float, *, finished: bool, columns: int | None = None
) -> list[str]:
    """Two lines of a sampled completion; the end of a long text is kept, as in `format_answers`."""
    width = 2 * _LONGEST if columns is None else columns
    label, end = f"  reward {_number(reward, '.3f')}: ", "" if finished else " (cut off)"
    return [
        _line(question, width),
        f"{label}{_line(completion, width - len(label) - len(end))}{end}",
    ]


def _answer(label: str, answer: Mapping[str, Any], width: int) -> str:
    correct = answer.get("correct")
    verdict = "no score" if not isinstance(correct, bool) else "right" if correct else "wrong"
    cut = "" if answer.get("finished") else ", cut off"
    verdict = f" ({verdict}{cut})"
    text = _line(answer.get("completion"), width - len(label) - len(verdict))
    return f"{label}{text}{verdict}"


def _line(text: Any, width: int) -> str:
    """A text as one line, with the end of a long one, where its answer stands."""
    line, longest = visible(" ".join(str(text).split())), max(4, min(_LONGEST, width))
    return line if len(line) <= longest else f"...{line[3 - longest :]}"


def _number(value: Any, spec: str) -> str:
    return format(float(value), spec) if _is_finite(value) else "-"


def _is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a number of Python, NumPy or JAX, and finite."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _rate(value: Any) -> str:
    if not _is_finite(value):
        return "-"
    return f"{value:.0f}" if value < 9999.5 else f"{value / 1000:.1f}k"


def _duration(seconds: Any) -> str:
    if not _is_finite(seconds):
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
