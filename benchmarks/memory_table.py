"""How many rows of a model fit which card, by the arithmetic of `qerl_jax.memory`."""

from collections.abc import Iterable
from typing import Any

from benchmarks.result_tables import markdown
from qerl_jax.config.experiments import grpo_gsm8k
from qerl_jax.memory import cards, report, run_plan
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.system.device_memory import pool_of

# Bytes of a card, and whether the Hopper kernel runs on it.
CARDS = {
    "24 GB (RTX 4090)": cards.CARDS["rtx-4090"],
    "48 GB (L40S)": (48 * 10**9, False),
    "80 GB (H100)": cards.CARDS["h100-80gb"],
}
STEP_ROWS = 128  # completions of a step in the preset's recipe
MODELS = (
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen2.5-72b",
)


def memory_table(measured: Iterable[dict[str, Any]]) -> str:
    """How many of a step's 128 rows decode together on each card; and the peak of a measured step.

    The rows have 1,024 new tokens, as in the recipe `first_run`.

    Args:
        measured: rows of step.json, at most one for each model.
    """
    steps = {row["model"]: row for row in measured}
    lines = []
    for model in MODELS:
        config = grpo_gsm8k.get_config(f"{model},first_run")
        shapes = ARCHITECTURES[model]
        cells, weights = [], 0.0
        for memory, hopper in CARDS.values():
            device = run_plan.Device(int(pool_of(1) * memory), run_plan.kernel_of(hopper=hopper))
            plan = run_plan.plan_run(config, shapes, device)
            weights = plan.weights / 1e9
            rows = report.largest_rows(plan, config, shapes) if plan.fits else 0
            cells.append(f"{min(rows, STEP_ROWS)}" if rows else "-")
        peak = f"{steps[model]['peak_gb']:.1f} GB" if model in steps else ""
        lines.append([model, f"{weights:.1f} GB", *cells, peak])
    header = ("model", "weights", *CARDS, "measured, 8 rows")
    return markdown(header, lines)
