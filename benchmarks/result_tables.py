"""The tables of the pages, as Markdown: one function for each table."""

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_kernels.fp4_matmul import cases
from qerl_jax.run.statistics import half_interval

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
_COMMIT = ("commit", "{commit:.8}")

Cell = str | Callable[[Any], str]


# --- What all tables share ----------------------------------------------------------------------


def table(columns: Sequence[tuple[str, Cell]], rows: Iterable[Any]) -> str:
    """A table in Markdown with a line for each row.

    A column has a header and a cell: a form for `filled`, or a function of a row.
    """
    lines = [[filled(cell, row) for _, cell in columns] for row in rows]
    lines = [[header for header, _ in columns], ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(cell: Cell, row: Any) -> str:
    """A form such as '{seconds:.1f} s' or '{share:.0%}' with the fields of a row, or its value."""
    if not isinstance(cell, str):
        return cell(row)
    return re.sub(r"(?<=\d)%", " %", cell.format_map(row))


def rows_of(result: dict, kind: str, values: Mapping[str, Any]) -> list[dict]:
    """The rows of one kind with these values."""
    values = {"kind": kind, **values}
    return [row for row in result["rows"] if values.items() <= row.items()]


def short_name(device: str) -> str:
    """The name of a card without its maker and memory, such as H100."""
    return device.removeprefix("NVIDIA ").partition(" ")[0]


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


# --- Training -----------------------------------------------------------------------------------


def learning_table(result: dict) -> str:
    """Reward and accuracy of the default run and of its control."""

    def by_seed(part: dict) -> str:
        values = part["eval_accuracy"]["by_seed"]["after"]
        return f"{min(values):.3f} to {max(values):.3f}"

    columns = [
        ("run", "{name}"),
        ("seeds x steps", "{runs} x {steps}"),
        ("mean reward, first fifth of the steps", "{reward[first_fifth]:.3f}"),
        ("last fifth", "{reward[last_fifth]:.3f}"),
        ("Welch's t", "{reward[welch_t]:.1f}"),
        ("greedy accuracy before", "{eval_accuracy[before]:.3f}"),
        ("after", "{eval_accuracy[after]:.3f}"),
        ("by seed", by_seed),
        ("cut off before", "{eval_truncated[before]:.0%}"),
        ("after", "{eval_truncated[after]:.0%}"),
        ("minutes of steps", "{minutes:.1f}"),
    ]
    names = {"learning": "default", "control": "learning rate 0"}
    return table(columns, [result[key] | {"name": name} for key, name in names.items()])


def environment_table(result: dict, label: str, accuracy: str) -> str:
    """Accuracy and time of the runs with an environment and of its control, a line for each run.

    `label` and `accuracy` are what the runs and the share of right answers are called.
    """
    columns = [
        ("run", "{name}"),
        ("steps", "{steps}"),
        (f"{accuracy} before", "{before:.2f}"),
        (f"{accuracy} after", "{after:.2f}"),
        ("minutes", "{minutes:.0f}"),
    ]
    rows = [
        {"name": name, "steps": part["steps"], "minutes": seconds / 60} | values
        for name, part in ((label, result["runs"]), ("control", result["control"]))
        for values, seconds in zip(part["eval_accuracy"], part["seconds"], strict=True)
    ]
    return table(columns, rows)


def agents_table(learning: dict[str, dict]) -> str:
    """What agents had right in the first and the last fifth of the steps, and in their controls.

    The reward of a control is tossed, so the share of right answers is compared where it is known.
    """
    columns = [
        ("agent", "{agent}"),
        ("model", "{model}"),
        ("device", "{device}"),
        ("steps", "{steps}"),
        ("first fifth", "{runs[first]:.2f}"),
        ("last fifth", "{runs[last]:.2f}"),
        ("control, first fifth", "{control[first]:.2f}"),
        ("last fifth", "{control[last]:.2f}"),
        ("commit", "{commit:.8}"),
    ]
    rows = []
    for result in learning.values():
        config, run = result["runs"]["run"]["config"], result["runs"]["run"]
        if not (config["environment"].get("verifiers") or config["environment"].get("agent")):
            continue
        name = "accuracy" if result["runs"]["last"].get("agent/right") is None else "agent/right"
        parts = {
            part: {when: result[part][when][name] for when in ("first", "last")}
            for part in ("runs", "control")
        }
        taskset = config["environment"]["verifiers"]
        rows.append(
            parts
            | {
                "agent": f"`{taskset}` of verifiers" if taskset else "chat agent with a calculator",
                "model": f"`{config['preset'].removesuffix('-paper')}`",
                "device": short_name(run["device"]["kind"]),
                "steps": _distinct(str(result[part]["steps"]) for part in parts),
                "commit": run["git"]["commit"],
            }
        )
    return table(columns, rows)


def run_table(result: dict) -> str:
    """Cost of a training step on a GPU."""
    columns = [
        ("steps", "{steps}"),
        ("mean reward", "{reward_mean:.3f}"),
        ("seconds a step, median", "{median[step_seconds]:.1f}"),
        ("fastest", "{fastest_step_seconds:.1f}"),
        ("rollout tokens/s", "{median[rollout_tokens_per_second]:.0f}"),
        ("training tokens/s", "{median[train_tokens_per_second]:.0f}"),
        ("peak memory", lambda run: f"{run['peak_memory_bytes'] / 1e9:.1f} GB"),
    ]
    return table(columns, [result])


def arms_table(result: dict) -> str:
    """What each arm of gsm8k.json reaches, as means over its seeds."""
    arms: dict[str, list[dict]] = {}
    for row in result["rows"]:
        about = result["runs"][f"{row['arm']}-s{row['seed']}"]
        arms.setdefault(row["arm"], []).append(row | about | about["evaluations"])

    def mean(form: str, values: Iterable[float | None]) -> str:
        known = [value for value in values if value is not None]
        return form.format(np.mean(known)) if known else "-"

    def mean_of(name: str, form: str = "{:.1f}") -> Cell:
        return lambda rows: mean(form, (row[name] for row in rows))

    def after(rows: list[dict]) -> str:
        ends = np.array([row["pass1_end"] for row in rows])
        return f"{ends.mean():.1f}" + (f" ± {half_interval(ends):.1f}" if len(ends) > 2 else "")

    def formed(name: str) -> Cell:
        """A share of the answers of the right form, before and after training."""
        return lambda rows: " -> ".join(
            mean("{:.1f}", (row[when]["well_formed"][name] for row in rows))
            for when in ("start", "end")
        )

    def mismatch(rows: list[dict]) -> str:
        values = [row["largest_mismatch_without_noise"] for row in rows]
        return mean("{:.4f}", [max(filter(None, values), default=None)])

    def minutes(rows: list[dict]) -> str:
        cards = {short_name(row["device"]["kind"]) for row in rows}
        return ", ".join(
            mean("{:.1f}", (row["device_minutes"] for row in rows if card in row["device"]["kind"]))
            + f" ({card})"
            for card in sorted(cards)
        )

    columns = [
        ("arm", lambda rows: f"`{rows[0]['arm']}`" + (" (main)" if rows[0]["main"] else "")),
        ("seeds", lambda rows: ", ".join(str(row["seed"]) for row in rows)),
        ("learning rate", lambda rows: f"{rows[0]['learning_rate']:.0e}"),
        ("pass@1 before", mean_of("pass1_start")),
        ("after", after),
        ("± problems", mean_of("ci95")),
        ("right form", formed("share")),
        ("accuracy of the right form", formed("accuracy")),
        ("tokens", lambda rows: mean("{:.0f}", (row["end"]["mean_tokens"] for row in rows))),
        ("largest mismatch", mismatch),
        ("minutes", minutes),
    ]
    return table(columns, arms.values())


def accuracy_table(*results: dict) -> str:
    """Greedy accuracy of a model by weight format."""
    columns = [
        ("weights", "{form}"),
        ("problems", "{problems}"),
        (
            "greedy accuracy, 95 % interval",
            lambda row: "{value:.1f} % [{low:.1f}, {high:.1f}]".format_map(
                {name: 100 * value for name, value in row["accuracy"].items()}
            ),
        ),
        ("boxed answers", "{format[value]:.1%}"),
        ("mean tokens", "{mean_tokens:.0f}"),
    ]
    rows = [result["tasks"]["gsm8k"] | {"form": result["settings"]["format"]} for result in results]
    return table(columns, rows)


def loading_table(rows: Iterable[dict]) -> str:
    """Seconds of loading by model, format and cache."""
    columns = [
        ("model", "{model}"),
        ("stored as", "{stored}"),
        ("loaded as", "{format}"),
        ("cache", "{cache}"),
        ("GB", "{gb:.1f}"),
        ("seconds", "{seconds:.1f}"),
        ("GB/s", lambda row: f"{row['gb'] / row['seconds']:.1f}"),
        ("read", "{read_s:.1f}"),
        ("transfer", "{transfer_s:.1f}"),
        ("quantize", "{quantize_s:.1f}"),
        ("rest", "{rest_s:.1f}"),
        ("largest file, GB", "{shard_gb:.1f}"),
        ("host peak, GB", "{host_peak_gb:.1f}"),
        _COMMIT,
    ]
    return table(columns, rows)


def router_noise_table(rows: Iterable[dict]) -> str:
    """Routes that additive noise flips, by its sigma."""
    columns = [
        ("sigma", "{sigma:g}"),
        ("routers with other experts", "{routers:.2%}"),
        ("tokens with such a router", "{tokens:.2%}"),
        ("KL, nats a token", "{kl:.1e}"),
        ("KL with the same routes", "{kl_same_routes:.1e}"),
        _COMMIT,
    ]
    return table(columns, (row for row in rows if row["form"] == "additive"))


def merges_table(rows: Iterable[dict]) -> str:
    """What merges into four bits keep of a policy, by seed."""

    def known(cell: str, field: str) -> Cell:
        return lambda row: filled(cell, row) if field in row else ""

    columns = [
        ("seed", "{seed}"),
        ("weights", "{form}"),
        ("KL, nats a token", known("{kl:.4f} ± {kl_interval:.4f}", "kl")),
        ("same likeliest token", known("{top1:.1%}", "top1")),
        ("kept", known("{kept:.0%}", "kept")),
        ("accuracy", known("{accuracy:.1%} ± {accuracy_interval:.1%}", "accuracy")),
        ("less the policy's", known("{difference:+.1%} ± {difference_interval:.1%}", "accuracy")),
        ("samples of a problem", known("{samples}", "samples")),
        _COMMIT,
    ]
    return table(columns, rows)


# --- The FP4 kernel -----------------------------------------------------------------------------


def kernel_part(result: dict) -> str:
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
    return "\n\n".join(paragraphs)


def kernel_table(result: dict) -> str:
    """The FP4 kernel beside other kernels: a row for each shape and implementation."""
    rows = {(row["layer"], row["m"], row["impl"]): row for row in result["rows"]}
    counts = sorted({m for _, m, impl in rows if impl == "nvfp4" and m not in _BETWEEN})

    def cell(layer: str, m: int, impl: str) -> str:
        row, nvfp4 = (rows.get((layer, m, name)) for name in (impl, "nvfp4"))
        if row is None:
            return ""
        if impl == "nvfp4":
            return f"{row['device_us']:.1f} ({100 * row['floor_us'] / row['device_us']:.0f} %)"
        compared = nvfp4 and nvfp4["commit"] == row["commit"] and impl in ("bf16", "nf4")
        times = f" ({row['device_us'] / nvfp4['device_us']:.2f}x)" if compared and nvfp4 else ""
        return f"{row['device_us']:.1f}{times}"

    lines = [
        (names, impl)
        for names in _equal_shapes({layer for layer, *_ in rows})
        for impl in _KERNELS
        if any((names[0], m, impl) in rows for m in counts)
    ]
    columns = [
        ("layer", lambda line: " = ".join(line[0]) if line[1] == "nvfp4" else ""),
        ("", lambda line: _KERNELS[line[1]]),
        *((f"{m}", lambda line, m=m: cell(line[0][0], m, line[1])) for m in counts),
    ]
    return table(columns, lines)


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


# --- Rollouts -----------------------------------------------------------------------------------


def _weights(row: dict) -> str:
    """How a row's policy is stored: 'nvfp4', or 'nvfp4, float8 cache, tensor=2'."""
    return _distinct(
        [
            row["format"],
            row["head_format"] and f"{row['head_format']} head",
            "float8 cache" if row["kv_cache_dtype"].startswith("float8") else "",
            f"tensor={row['tensor']}" if row["tensor"] > 1 else "",
        ]
    )


def rollout_table(result: dict) -> str:
    """Milliseconds of a decode step and tokens per second: a row for each policy."""
    policies: dict[tuple, dict[int, dict]] = {}
    for row in rows_of(result, "decode", STEPS):
        policy = row["model"], _weights(row), row["lora_rank"]
        policies.setdefault(policy, {})[row["batch"]] = row
    batches = sorted({batch for by_batch in policies.values() for batch in by_batch})
    step = "{ms_per_step:.2f} ({tokens_per_s:,.0f})"

    def commits(line: tuple[tuple, dict[int, dict]]) -> str:
        return _distinct(line[1][batch]["commit"][:8] for batch in batches if batch in line[1])

    columns = [
        ("model", lambda line: line[0][0]),
        ("weights", lambda line: line[0][1]),
        ("adapter", lambda line: f"LoRA rank {line[0][2]}" if line[0][2] else "merged"),
        *(
            (f"{n}", lambda line, n=n: filled(step, line[1][n]) if n in line[1] else "")
            for n in batches
        ),
        ("commits", commits),
    ]
    order = sorted(policies.items(), key=lambda line: (*line[0][:2], not line[0][2]))
    return table(columns, order)


def parts_table(result: dict) -> str:
    """Milliseconds of a decode step by part of the model."""
    rows = rows_of(result, "parts", STEPS)
    most = max((list(row["parts"]) for row in rows), key=len)
    names = [name for name in most if any(row["parts"].get(name) for row in rows)]
    names.remove("kernels_per_layer")
    columns = [
        ("model", "{model}"),
        ("weights", _weights),
        ("batch", "{batch}"),
        ("step", "{ms_per_step:.2f}"),
        *((name, lambda row, name=name: f"{row['parts'].get(name, 0.0):.2f}") for name in names),
        ("kernels per layer", "{parts[kernels_per_layer]:.0f}"),
        _COMMIT,
    ]
    return table(columns, rows)


def problems_table(result: dict) -> str:
    """Whole rollouts of math problems by a real model."""
    columns = [
        ("model", "{model}"),
        ("weights", _weights),
        ("prompts x completions", "{prompts} x {group}"),
        ("tokens in all, limit", "{tokens:,}, {max_new_tokens}"),
        ("seconds", "{seconds:.1f}"),
        ("tokens/s", "**{tokens_per_s:,.0f}**"),
        ("useful", "{live_share:.1%}"),
        ("compiling", "{compile_seconds:.0f} s"),
        ("peak memory", "{peak_gb:.1f} GB"),
        _COMMIT,
    ]
    return table(columns, rows_of(result, "gsm8k", SAME | {"lora_rank": 32}))


def drafts_table(result: dict) -> str:
    """Rollouts with drafts and without."""

    def rate(way: str) -> Cell:
        return lambda row: f"{row[f'tokens_{way}'] / row[f'seconds_{way}']:,.0f}"

    columns = [
        ("problems, limit", "{data}, {max_new_tokens:,}"),
        ("prompts x completions", "{prompts} x {group}"),
        ("rollouts", "{num_rollouts}"),
        ("tokens/s without", rate("off")),
        ("with drafts", rate("on")),
        ("faster", "**{faster:.2f}x** ({lowest:.2f} to {highest:.2f})"),
        ("tokens of a row in a step", "{tokens_per_row_step:.2f}"),
        ("guesses that were right", "{acceptance:.0%}"),
        ("equal tokens", "{equal:.0%}"),
        _COMMIT,
    ]
    return table(columns, result["rows"])


def startup_table(result: dict) -> str:
    """Seconds from the command to the first tokens."""
    columns = [
        ("model", "{model}"),
        ("weights", _weights),
        ("prompts x completions", "{prompts} x {group}"),
        ("programs", "{programs}"),
        ("found in the cache", "{kept}"),
        ("weights made", "{weights_s:.1f} s"),
        ("programs ready", "{compiled_s:.1f} s"),
        ("first tokens", "**{first_tokens_s:.1f} s**"),
        _COMMIT,
    ]
    return table(columns, rows_of(result, "startup", SAME))


def agreement_table(result: dict) -> str:
    """How far the rollout engine is from the trainer's forward pass."""
    columns = [
        ("model", "{model}"),
        ("weights", "{format}"),
        ("sampled tokens", "{sampled_tokens:,}"),
        ("mean log-prob difference", "{logprob_diff_mean:.4f}"),
        ("99th percentile", "{logprob_diff_p99:.3f}"),
        ("greedy tokens", "{greedy_tokens:,}"),
        ("different argmax", "{greedy_differ}"),
        ("largest logit gap", "{greedy_largest_gap:.2f}"),
        _COMMIT,
    ]
    return table(columns, rows_of(result, "agreement", {}))


def share_of_bf16(result: dict, family: str, batches: range) -> str:
    """Lowest and highest time of a decode step in NVFP4 as a share of that in bf16."""
    options = STEPS | {"lora_rank": 32, "head_format": "", "tensor": 1}
    times = {
        (row["format"], row["model"], row["batch"]): row["ms_per_step"]
        for row in rows_of(result, "decode", options)
        if row["model"].startswith(family) and row["batch"] in batches
    }
    shares = [
        100 * times["nvfp4", *key] / time
        for (form, *key), time in times.items()
        if form == "bf16" and ("nvfp4", *key) in times
    ]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


def tensor_ratios(result: dict) -> str:
    """Time of a decode step on GPUs that share the weights, divided by that on one of them."""
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
