"""What a run prints on the terminal: a line per row of metrics."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from qerl_jax.system.jsonl import is_number


def format_row(row: Mapping[str, Any], total_steps: int) -> str:
    """One readable line for a row of metrics; missing keys are left out.

    Args:
        row: the row of a step or of an evaluation, as `metrics.MetricsLog` describes them.
        total_steps: number of steps of the whole run.
    """
    if "eval_seconds" in row:
        return _format_evaluation(row)
    width = len(str(total_steps))
    parts = [f"step {row['step']:{width}d}/{total_steps}"]

    def add(label: str, key: str, spec: str) -> None:
        if key in row:
            parts.append(f"{label} {_number(row[key], spec)}")

    add("reward", "reward", "6.3f")
    add("acc", "accuracy", ".2f")
    add("format", "format" if "format" in row else "reward/format", ".2f")
    add("len", "length", "5.1f")
    add("entropy", "entropy", ".3f")
    add("sigma", "sigma", ".1e")
    add("grad", "grad_norm", ".3g")
    rates = [
        f"{label} {_rate(row[key])}"
        for label, key in (
            ("rollout", "rollout_tokens_per_second"),
            ("train", "train_tokens_per_second"),
        )
        if key in row
    ]
    if rates:
        parts.append(" ".join(rates) + " tok/s")
    if "remaining_seconds" in row:
        parts.append(f"left {_duration(row['remaining_seconds'])}")
    if row.get("update_skipped"):
        parts.append("UPDATE SKIPPED")
    return "  ".join(parts)


def _format_evaluation(row: Mapping[str, Any]) -> str:
    moment = f"after step {row['step']}" if row["step"] else "before training"
    accuracy = row.get("eval_accuracy", row.get("eval_accuracy_before"))
    cut = row.get("eval_truncated")
    cut = cut if is_number(cut) else 0.0
    note = f" ({100 * cut:.0f} % of the completions were cut off)" if cut else ""
    if missing := row.get("eval_missing"):
        note += f" ({missing} completions have no score, so it does not choose the best policy)"
    return f"greedy accuracy {moment}: {_number(accuracy, '.3f')}{note}"


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
