"""Tables of what was measured on several GPUs, made of rows of benchmarks/results/."""

from collections.abc import Iterable

from benchmarks.result_tables import STEPS, rows_of, table


def scaling_table(rows: Iterable[dict]) -> str:
    """Completions per second of a step on several GPUs, against one GPU with the same batch.

    Args:
        rows: rows of step.json; those that were compared with one GPU are in the table.
    """
    columns = {
        "model": "{model}",
        "GPUs": "{devices} x {device}",
        "mesh": "{mesh}",
        "processes": "{processes}",
        "completions": "{batch} x {prompt} + {new_tokens}",
        "rollout s": "{rollout_s:.2f}",
        "step s": "{step_s:.2f}",
        "completions/s": "{samples_per_s:.2f}",
        "against one GPU": lambda row: f"{row['samples_per_s'] / row['samples_per_s_of_one']:.2f}",
        "commit": "{commit:.8}",
    }
    return table(columns, (row for row in rows if row.get("samples_per_s_of_one")))


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
