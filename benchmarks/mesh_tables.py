"""Tables of what was measured on several GPUs, made of rows of benchmarks/results/."""

from collections.abc import Iterable

from benchmarks.result_tables import STEPS, markdown, rows_of


def scaling_table(rows: Iterable[dict]) -> str:
    """Completions per second of a step on several GPUs, against one GPU with the same batch.

    Args:
        rows: rows of step.json; those that were compared with one GPU are in the table.
    """
    lines = [
        [
            row["model"],
            f"{row['devices']} x {row['device']}",
            row["mesh"],
            str(row["processes"]),
            f"{row['batch']} x {row['prompt']} + {row['new_tokens']}",
            *(f"{row[name]:.2f}" for name in ("rollout_s", "step_s")),
            f"{row['samples_per_s']:.2f}",
            f"{row['samples_per_s'] / row['samples_per_s_of_one']:.2f}",
            row["commit"][:8],
        ]
        for row in rows
        if row.get("samples_per_s_of_one")
    ]
    sizes = "GPUs", "mesh", "processes", "completions"
    measured = "rollout s", "step s", "completions/s", "against one GPU"
    return markdown(("model", *sizes, *measured, "commit"), lines)


def scaling_sentence(rows: Iterable[dict]) -> str:
    """The largest number of completions per second on several GPUs against one, by model.

    Args:
        rows: rows of step.json; those that were compared with one GPU count.
    """
    best: dict[str, tuple[int, float]] = {}
    for row in rows:
        if single_rate := row.get("samples_per_s_of_one"):
            scaling = row["devices"], row["samples_per_s"] / single_rate
            best[row["model"]] = max(scaling, best.get(row["model"], scaling))
    times = (f"{ratio:.2f} on {n} GPUs ({model})" for model, (n, ratio) in best.items())
    return f"Completions per second against one GPU: {', '.join(times)}."


def tensor_ratios(result: dict) -> str:
    """Time of a decode step on GPUs that share the weights, divided by that on one of them.

    Args:
        result: decode rows of both, as `benchmarks.rollout` writes them.
    """
    times = {
        (row["tensor"], row["model"], row["batch"]): row["ms_per_step"]
        for row in rows_of(result, "decode", STEPS | {"format": "nvfp4"})
    }
    texts: dict[tuple[int, str], list[str]] = {}
    for (tensor, model, batch), time in sorted(times.items()):
        if tensor > 1 and (1, model, batch) in times:
            rows = f"{batch} {'row' if batch == 1 else 'rows'}"
            ratio = f"{time / times[1, model, batch]:.2f} at {rows}"
            texts.setdefault((tensor, model), []).append(ratio)
    lines = (f"{model} on {n} GPUs {', '.join(ratios)}" for (n, model), ratios in texts.items())
    return "; ".join(lines)
