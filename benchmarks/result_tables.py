"""The tables of the pages, as Markdown: one function for each table."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.rollout.profile import PARTS
from benchmarks.rollout.results import by_policy, numbers_of
from pallas_kernels.fp4_matmul import cases

# The name in the table of each implementation of the kernel benchmark.
_KERNELS = {
    "nvfp4": "NVFP4",
    "nvfp4_lora32": "NVFP4 + LoRA",
    "mma": "NVFP4, for every GPU",
    "mma_lora32": "NVFP4 + LoRA, for every GPU",
    "bf16": "bf16",
    "nf4": "NF4",
    "dx": "NVFP4, gradient",
    "dx_bf16": "bf16, gradient",
}
_BETWEEN = (40, 96, 160, 384)  # token counts that have no column of their own
# Options that all rows of the rollout tables share; the kernel is the best one of the device.
SAME = {"chunk_steps": 16, "dequantize": "once", "implementation": ""}
STEPS = SAME | {"weights": "random", "prompt": 256, "new_tokens": 144}


def learning_table(result: dict) -> str:
    """Reward and accuracy of the default run and of its control."""
    lines = []
    for name, label in (("learning", "default"), ("control", "learning rate 0")):
        part = result[name]
        reward, evaluated = part["reward"], part["eval_accuracy"]
        lines.append(
            [
                label,
                f"{part['runs']} x {part['steps']}",
                f"{reward['first_fifth']:.3f}",
                f"{reward['last_fifth']:.3f}",
                f"{reward['welch_t']:.1f}",
                f"{evaluated['before']:.3f}",
                f"{evaluated['after']:.3f}",
                f"{_range(evaluated['by_seed']['after'])}",
                f"{100 * part['eval_truncated']['before']:.0f} %",
                f"{100 * part['eval_truncated']['after']:.0f} %",
                f"{part['minutes']:.1f}",
            ]
        )
    header = (
        "run", "seeds x steps", "mean reward, first fifth of the steps", "last fifth", "Welch's t",
        "greedy accuracy before", "after", "by seed", "cut off before", "after",
        "minutes of steps",
    )  # fmt: skip
    return markdown(header, lines)


def environment_table(result: dict, label: str, accuracy: str) -> str:
    """Accuracy and time of the runs with an environment and of its control, a line for each run.

    Args:
        result: a comparison of environments.json.
        label: what the runs that are no control are called.
        accuracy: what the share of right answers is called.
    """
    lines = [
        [
            name,
            f"{part['steps']}",
            f"{values['before']:.2f}",
            f"{values['after']:.2f}",
            f"{seconds / 60:.0f}",
        ]
        for name, part in ((label, result["runs"]), ("control", result["control"]))
        for values, seconds in zip(part["eval_accuracy"], part["seconds"], strict=True)
    ]
    return markdown(("run", "steps", f"{accuracy} before", f"{accuracy} after", "minutes"), lines)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def run_table(result: dict) -> str:
    """Cost of a training step on a GPU."""
    median = result["median"]
    line = [
        str(result["steps"]),
        f"{result['reward_mean']:.3f}",
        f"{median['step_seconds']:.1f}",
        f"{result['fastest_step_seconds']:.1f}",
        f"{median['rollout_tokens_per_second']:.0f}",
        f"{median['train_tokens_per_second']:.0f}",
        f"{result['peak_memory_bytes'] / 1e9:.1f} GB",
    ]
    header = (
        "steps", "mean reward", "seconds a step, median", "fastest", "rollout tokens/s",
        "training tokens/s", "peak memory",
    )  # fmt: skip
    return markdown(header, [line])


def step_text(row: dict) -> str:
    """What a row of `benchmarks.step` measured, in words."""
    products = row["recompute"].replace(",", ", ")
    suffix = "" if products == "none" else f"; recomputed: {products}"
    return (
        f"a step of {row['batch']} rows, {row['prompt']} + {row['new_tokens']:,} tokens each, "
        f"random weights: rollout {row['rollout_s']:.1f} s, update {row['update_s']:.1f} s{suffix}"
    )


def kernel_part(result: dict) -> list[str]:
    """What is shown of the FP4 kernel on one device: its heading, its table, and what follows."""
    rows = result["rows"]
    commits = ", ".join(sorted({row["commit"][:8] for row in rows}))
    heading = (
        f"On one {result['device']}, which copies {rows[0]['bandwidth'] / 1e12:.2f} TB/s "
        f"(commits {commits}, jax {rows[0]['versions']['jax']}):"
    )
    paragraphs = [heading, kernel_table(result)]
    if between := slowest_between_columns(result):
        paragraphs.append(f"Token counts between the columns, against the next column: {between}.")
    return paragraphs


def kernel_table(result: dict) -> str:
    """The FP4 kernel beside other kernels: a row for each shape and implementation."""
    rows = {(row["layer"], row["m"], row["impl"]): row for row in result["rows"]}
    counts = sorted({m for _, m, impl in rows if impl == "nvfp4" and m not in _BETWEEN})
    lines = []

    def cell(layer: str, m: int, impl: str) -> str:
        row, nvfp4 = (rows.get((layer, m, name)) for name in (impl, "nvfp4"))
        if row is None:
            return ""
        if impl == "nvfp4":
            return f"{row['device_us']:.1f} ({100 * row['floor_us'] / row['device_us']:.0f} %)"
        compared = nvfp4 and nvfp4["commit"] == row["commit"] and impl in ("bf16", "nf4")
        times = f" ({row['device_us'] / nvfp4['device_us']:.2f}x)" if compared and nvfp4 else ""
        return f"{row['device_us']:.1f}{times}"

    measured = {layer for layer, *_ in rows}
    for names in _equal_shapes(measured):
        for impl, name in _KERNELS.items():
            cells = [cell(names[0], m, impl) for m in counts]
            if any(cells):
                lines.append(["" if impl != "nvfp4" else " = ".join(names), name, *cells])
    return markdown(["layer", "", *map(str, counts)], lines)


def _equal_shapes(measured: set[str]) -> list[list[str]]:
    """The measured layers in the order of the models; layers of one shape are listed together."""
    groups: dict[tuple, list[str]] = {}
    for layer, shape in cases.shapes(",".join(cases.MODELS)).items():
        if layer in measured:
            groups.setdefault((*shape, cases.rank_of(layer, 1)), []).append(layer)
    return list(groups.values())


def slowest_between_columns(result: dict) -> str:
    """How the token counts between two columns compare with the next column."""
    times = {
        (row["layer"], row["m"]): row["device_us"]
        for row in result["rows"]
        if row["impl"] == "nvfp4"
    }
    columns = sorted({m for _, m in times if m not in _BETWEEN})
    largest: dict[int, float] = {}
    for (layer, m), time in sorted(times.items(), key=lambda item: item[0][1]):
        if m in _BETWEEN:
            fraction = time / times[layer, columns[bisect.bisect(columns, m)]]
            largest[m] = max(fraction, largest.get(m, 0.0))
    return ", ".join(
        f"{m} tokens take at most {fraction:.2f}x of {columns[bisect.bisect(columns, m)]}"
        for m, fraction in largest.items()
    )


def rollout_table(result: dict) -> str:
    """Milliseconds of a decode step and tokens per second: a row for each policy."""
    rows = rows_of(result, "decode", STEPS)
    batches, policies = by_policy(
        rows, lambda row: f"{row['ms_per_step']:.2f} ({row['tokens_per_s']:,.0f})"
    )
    _, commits = by_policy(rows, lambda row: row["commit"][:8])
    lines = sorted(
        [model, numbers, f"LoRA rank {rank}" if rank else "merged", *cells,
         ", ".join(dict.fromkeys(filter(None, commits[model, numbers, rank])))]
        for (model, numbers, rank), cells in policies.items()
    )  # fmt: skip
    return markdown(["model", "weights", "adapter", *map(str, batches), "commits"], lines)


def parts_table(result: dict) -> str:
    """Milliseconds of a decode step by part of the model."""
    rows = rows_of(result, "parts", STEPS)
    names = [name for name in (*PARTS, "gaps") if any(row["parts"].get(name) for row in rows)]
    lines = [
        [
            row["model"],
            numbers_of(row),
            str(row["batch"]),
            f"{row['ms_per_step']:.2f}",
            *(f"{row['parts'].get(name, 0.0):.2f}" for name in names),
            f"{row['parts']['kernels_per_layer']:.0f}",
            row["commit"][:8],
        ]
        for row in rows
    ]
    header = ["model", "weights", "batch", "step", *names, "kernels per layer", "commit"]
    return markdown(header, lines)


def problems_table(result: dict) -> str:
    """Whole rollouts of math problems by a real model."""
    columns = {
        "model": "{model}",
        "weights": numbers_of,
        "prompts x completions": "{prompts} x {group}",
        "tokens in all, limit": "{tokens:,}, {max_new_tokens}",
        "seconds": "{seconds:.1f}",
        "tokens/s": "**{tokens_per_s:,.0f}**",
        "useful": lambda row: f"{100 * row['live_share']:.1f} %",
        "compiling": "{compile_seconds:.0f} s",
        "peak memory": "{peak_gb:.1f} GB",
        "commit": "{commit:.8}",
    }
    return table(columns, rows_of(result, "gsm8k", SAME | {"lora_rank": 32}))


def startup_table(result: dict) -> str:
    """Seconds from the command to the first tokens."""
    columns = {
        "model": "{model}",
        "weights": numbers_of,
        "prompts x completions": "{prompts} x {group}",
        "programs": "{programs}",
        "found in the cache": "{kept}",
        "weights made": "{weights_s:.1f} s",
        "programs ready": "{compiled_s:.1f} s",
        "first tokens": "**{first_tokens_s:.1f} s**",
        "commit": "{commit:.8}",
    }
    return table(columns, rows_of(result, "startup", SAME))


def agreement_table(result: dict) -> str:
    """How far the rollout engine is from the trainer's forward pass."""
    columns = {
        "model": "{model}",
        "weights": "{format}",
        "sampled tokens": "{sampled_tokens:,}",
        "mean log-prob difference": "{logprob_diff_mean:.4f}",
        "99th percentile": "{logprob_diff_p99:.3f}",
        "greedy tokens": "{greedy_tokens:,}",
        "different argmax": "{greedy_differ}",
        "largest logit gap": "{greedy_largest_gap:.2f}",
        "commit": "{commit:.8}",
    }
    return table(columns, rows_of(result, "agreement", {}))


def accuracy_table(results: list[dict]) -> str:
    """Greedy accuracy of a model by weight format."""
    lines = []
    for result in results:
        task = result["tasks"]["gsm8k"]
        accuracy = task["accuracy"]
        lines.append(
            [
                result["settings"]["format"],
                str(task["problems"]),
                f"{100 * accuracy['value']:.1f} % "
                f"[{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]",
                f"{100 * task['format']['value']:.1f} %",
                f"{task['mean_tokens']:.0f}",
            ]
        )
    header = "weights", "problems", "greedy accuracy, 95 % interval", "boxed answers", "mean tokens"
    return markdown(header, lines)


def loading_table(rows: Iterable[dict]) -> str:
    """Seconds of loading by model, format and cache."""
    columns = {
        "model": "{model}",
        "stored as": "{stored}",
        "loaded as": "{format}",
        "cache": "{cache}",
        "GB": "{gb:.1f}",
        "seconds": "{seconds:.1f}",
        "GB/s": lambda row: f"{row['gb'] / row['seconds']:.1f}",
        "read": "{read_s:.1f}",
        "transfer": "{transfer_s:.1f}",
        "quantize": "{quantize_s:.1f}",
        "rest": "{rest_s:.1f}",
        "largest file, GB": "{shard_gb:.1f}",
        "host peak, GB": "{host_peak_gb:.1f}",
        "commit": "{commit:.8}",
    }
    return table(columns, rows)


def rows_of(result: dict, kind: str, values: Mapping[str, Any]) -> list[dict]:
    """The rows of one kind with these values."""
    values = {"kind": kind, **values}
    return [row for row in result["rows"] if values.items() <= row.items()]


def table(columns: Mapping[str, str | Callable[[dict], str]], rows: Iterable[dict]) -> str:
    """A table in Markdown with a line for each row.

    Args:
        columns: title of each column, and its cell: a form with fields of a row, such as
            '{seconds:.1f} s', or a function of a row.
        rows: the rows.
    """
    cells = columns.values()
    lines = [[c.format_map(row) if isinstance(c, str) else c(row) for c in cells] for row in rows]
    return markdown(list(columns), lines)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: a header and lines of cells."""
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def replace_part(text: str, name: str, part: str, *, page: str) -> str:
    """Replaces a generated part of a page, between two marks.

    Args:
        text: the page.
        name: name of the part in the marks.
        part: the new part.
        page: name of the page in the error.

    Raises:
        ValueError: the page lacks the marks.
    """
    begin, end = f"<!-- {name}: python -m benchmarks.tables -->", f"<!-- end of {name} -->"
    before, mark, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not mark or not closed:
        raise ValueError(f"{page} has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def provenance(result: dict) -> str:
    """Commit, device and jax version of a result."""
    commit = (result["git"] or {}).get("commit", "unknown")[:8]
    return f"commit {commit}, {result['device']['kind']}, jax {result['versions']['jax']}"
