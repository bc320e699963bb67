"""Tables of what was measured on several GPUs, made of rows of benchmarks/results/."""

from collections.abc import Iterable

from benchmarks.result_tables import STEPS, markdown, rows_of
from benchmarks.step import KEYS

# What a step on several GPUs has in common with the step on one that it is compared with.
_FIXED = tuple(key for key in KEYS if key not in ("batch", "mesh", "processes"))


def scaling_table(rows: Iterable[dict]) -> str:
    """Completions per second of a step on several GPUs, against one GPU with the same batch.

    Args:
        rows: rows of step.json; one on several GPUs needs that of one GPU to be in the table.
    """
    rows = list(rows)
    one = {_setting(row): row for row in rows if row["devices"] == 1}
    lines = [
        [
            row["model"],
            f"{row['devices']} x {row['device']}",
            row["mesh"],
            str(row.get("processes", 1)),
            f"{row['batch']} x {row['prompt']} + {row['new_tokens']}",
            *(f"{row[name]:.2f}" for name in ("rollout_s", "step_s")),
            f"{row['samples_per_s']:.2f}",
            f"{row['samples_per_s'] / one[_setting(row)]['samples_per_s']:.2f}",
            row["commit"][:8],
        ]
        for row in rows
        if row["devices"] > 1 and _setting(row) in one
    ]
    sizes = "GPUs", "mesh", "processes", "completions"
    measured = "rollout s", "step s", "completions/s", "against one GPU"
    return markdown(("model", *sizes, *measured, "commit"), lines)


def _setting(row: dict) -> tuple:
    """What rows that are compared have in common, with the completions of one GPU."""
    return *(row[key] for key in _FIXED), row["batch"] // row["devices"]


def tensor_ratios(result: dict) -> str:
    """Time of a decode step on two GPUs that share the weights, divided by that on one.

    Args:
        result: decode rows of both, as `benchmarks.rollout` writes them.
    """
    times = {
        (row["model"], row["batch"], row["tensor"]): row["ms_per_step"]
        for row in rows_of(result, "decode", STEPS | {"format": "nvfp4"})
    }
    found: dict[str, list[str]] = {}
    for (model, batch, tensor), time in times.items():
        if tensor == 2 and (model, batch, 1) in times:
            rows = f"{batch} {'row' if batch == 1 else 'rows'}"
            found.setdefault(model, []).append(f"{time / times[model, batch, 1]:.2f} at {rows}")
    return "; ".join(f"{model} {', '.join(ratios)}" for model, ratios in found.items())
