"""Writes docs/benchmarks.md, and the generated parts of the README.

    uv run python -m benchmarks.tables

Every figure comes from a JSON file under benchmarks/results/. The list of folders in the README is
made of the first docstring line of each package (`benchmarks/source_tree.py`).
"""

import bisect
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.rollout.profile import PARTS
from benchmarks.rollout.results import by_policy, numbers_of
from benchmarks.source_tree import source_tree
from experiments.configs import defaults
from pallas_kernels.fp4_matmul import benchmark, cases

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
# The name in the table of each implementation of the kernel benchmark.
_KERNELS = {
    "nvfp4": "NVFP4",
    "nvfp4_lora32": "NVFP4 + LoRA",
    "bf16": "bf16",
    "nf4": "NF4",
    "dx": "NVFP4, gradient",
    "dx_bf16": "bf16, gradient",
}
_BETWEEN = (40, 96, 160, 384)  # token counts that have no column of their own
# Options that all rows of the rollout tables share.
_SAME = {"chunk_steps": 16, "dequantize": "once"}
_STEPS = _SAME | {"weights": "random", "prompt": 256, "new_tokens": 144}
# The decode rows that stand for presets that have not trained yet.
_DECODE_OF_PRESETS = {
    "format": "nvfp4",
    "lora_rank": 32,
    "head_format": "",
    "kv_cache_dtype": "bfloat16",
    "batch": 256,
}
_GPU_RUN = "grpo_qwen2.5-coder-1.5b_h200.json"


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
                f"{part['minutes']:.1f}",
            ]
        )
    header = (
        "run", "seeds x steps", "mean reward, first fifth of the steps", "last fifth", "Welch's t",
        "greedy accuracy before", "after", "minutes",
    )  # fmt: skip
    return _markdown(header, lines)


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
    return _markdown(header, [line])


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
    return _markdown(["layer", "", *map(str, counts)], lines)


def _equal_shapes(measured: set[str]) -> list[list[str]]:
    """The measured layers in the order of the models; layers of one shape are listed together."""
    found: dict[tuple, list[str]] = {}
    for layer, shape in benchmark.shapes(",".join(cases.MODELS)).items():
        if layer in measured:
            found.setdefault((*shape, cases.rank_of(layer, 1)), []).append(layer)
    return list(found.values())


def between_columns(result: dict) -> str:
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
    """Milliseconds of a decode step and tokens per second: a row for each policy and commit."""
    batches, policies = by_policy(
        _rows(result, "decode", _STEPS),
        lambda row: f"{row['ms_per_step']:.2f} ({row['tokens_per_s']:,.0f})",
        fields=("commit",),
    )
    lines = sorted(
        [model, numbers, f"LoRA rank {rank}" if rank else "merged", *cells, commit[:8]]
        for (model, numbers, rank, commit), cells in policies.items()
    )
    return _markdown(["model", "weights", "adapter", *map(str, batches), "commit"], lines)


def parts_table(result: dict) -> str:
    """Milliseconds of a decode step by part of the model."""
    rows = _rows(result, "parts", _STEPS)
    names = [name for name in (*PARTS, "gaps") if any(row["parts"][name] for row in rows)]
    lines = [
        [
            row["model"],
            numbers_of(row),
            str(row["batch"]),
            f"{row['ms_per_step']:.2f}",
            *(f"{row['parts'][name]:.2f}" for name in names),
            f"{row['parts']['kernels_per_layer']:.0f}",
            row["commit"][:8],
        ]
        for row in rows
    ]
    header = ["model", "weights", "batch", "step", *names, "kernels per layer", "commit"]
    return _markdown(header, lines)


def problems_table(result: dict) -> str:
    """Whole rollouts of math problems by a real model."""
    lines = [
        [
            row["model"],
            numbers_of(row),
            f"{row['prompts']} x {row['group']}",
            f"{row['tokens']:,}, {row['max_new_tokens']}",
            f"{row['seconds']:.1f}",
            f"**{row['tokens_per_s']:,.0f}**",
            f"{100 * row['live_share']:.1f} %",
            f"{row['compile_seconds']:.0f} s",
            f"{row['peak_gb']:.1f} GB",
            row["commit"][:8],
        ]
        for row in _rows(result, "gsm8k", _SAME | {"lora_rank": 32})
    ]
    header = (
        "model", "weights", "prompts x completions", "tokens in all, limit", "seconds", "tokens/s",
        "useful", "compiling", "peak memory", "commit",
    )  # fmt: skip
    return _markdown(header, lines)


def startup_table(result: dict) -> str:
    """Seconds from the command to the first tokens."""
    lines = [
        [
            row["model"],
            numbers_of(row),
            f"{row['prompts']} x {row['group']}",
            str(row["programs"]),
            str(row["kept"]),
            f"{row['weights_s']:.1f} s",
            f"{row['compiled_s']:.1f} s",
            f"**{row['first_tokens_s']:.1f} s**",
            row["commit"][:8],
        ]
        for row in _rows(result, "startup", _SAME)
    ]
    header = (
        "model", "weights", "prompts x completions", "programs", "found in the cache",
        "weights made", "programs ready", "first tokens", "commit",
    )  # fmt: skip
    return _markdown(header, lines)


def agreement_table(result: dict) -> str:
    """How far the rollout engine is from the trainer's forward pass."""
    lines = [
        [
            row["model"],
            row["format"],
            f"{row['sampled_tokens']:,}",
            f"{row['logprob_diff_mean']:.4f}",
            f"{row['logprob_diff_p99']:.3f}",
            f"{row['greedy_tokens']:,}",
            str(row["greedy_differ"]),
            f"{row['greedy_largest_gap']:.2f}",
            row["commit"][:8],
        ]
        for row in _rows(result, "agreement", {})
    ]
    header = (
        "model", "weights", "sampled tokens", "mean log-prob difference", "99th percentile",
        "greedy tokens", "different argmax", "largest logit gap", "commit",
    )  # fmt: skip
    return _markdown(header, lines)


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
    return _markdown(header, lines)


def _rows(result: dict, kind: str, same: Mapping[str, Any]) -> list[dict]:
    """The rows of one kind with these values."""
    same = {"kind": kind, **same}
    return [row for row in result["rows"] if same.items() <= row.items()]


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def provenance(result: dict) -> str:
    """Commit, device and jax version of a result."""
    commit = (result["git"] or {}).get("commit", "unknown")[:8]
    return f"commit {commit}, {result['device']['kind']}, jax {result['versions']['jax']}"


def _read(name: str) -> dict:
    return json.loads((_RESULTS / name).read_text(encoding="utf-8"))


def preset_table() -> str:
    """What is known of each preset: hardware, memory, seconds a step, result."""
    learning, run = _read("learning_smollm2-135m.json")["learning"], _read(_GPU_RUN)
    accuracy = learning["eval_accuracy"]
    known = {
        defaults.STAND_IN: (
            "two CPU cores",
            "not recorded",
            f"{60 * learning['minutes'] / learning['steps']:.0f} s",
            f"greedy accuracy {accuracy['before']:.2f} -> {accuracy['after']:.2f} on one-digit "
            f"sums, {learning['steps']} steps, seeds: {learning['runs']}",
        ),
        "qwen2.5-coder-1.5b": (
            run["device"]["kind"],
            f"{run['peak_memory_bytes'] / 1e9:.1f} GB",
            f"{run['median']['step_seconds']:.1f} s",
            f"ran {run['steps']} steps of GSM8K (512 new tokens), mean reward "
            f"{run['reward_mean']:.2f}; no full run yet",
        ),
    }
    decode = {
        row["model"]: row
        for row in _rows(_read("rollout.json"), "decode", _STEPS | _DECODE_OF_PRESETS)
    }
    rest, lines = [], []
    for model in defaults.MODELS:
        if model in known:
            lines.append([f"`{model}`", *known[model]])
        elif model in decode:
            row = decode[model]
            lines.append(
                [
                    f"`{model}`",
                    row["device"],
                    f"{row['peak_gb']:.1f} GB to decode {row['batch']} rows",
                    "not run yet",
                    f"training not run yet; decodes {row['tokens_per_s']:,.0f} tokens/s "
                    f"({row['batch']} rows, random weights)",
                ]
            )
        else:
            rest.append(f"`{model}`")
    lines.append([", ".join(rest), "", "not run yet", "not run yet", "not run yet"])
    return _markdown(("preset", "measured on", "peak memory", "a step", "result"), lines)


def speed_text() -> str:
    """What the README states about the speed of rollouts."""
    rollout = _read("rollout.json")
    times: dict[tuple, float] = {}
    for row in _rows(rollout, "decode", _STEPS | {"lora_rank": 32, "head_format": ""}):
        times[row["model"], row["batch"], row["format"]] = row["ms_per_step"]
    fractions = {
        (model, batch): times[model, batch, "nvfp4"] / time
        for (model, batch, form), time in times.items()
        if form == "bf16" and (model, batch, "nvfp4") in times
    }
    few = [fraction for (_, batch), fraction in fractions.items() if batch <= 64]
    many = [fraction for (_, batch), fraction in fractions.items() if batch > 64]
    (problems,) = _rows(rollout, "gsm8k", _SAME | {"lora_rank": 32})
    return (
        f"In 4 bits a decode step takes {100 * min(few):.0f} to {100 * max(few):.0f} % of the time "
        f"of bf16 up to 64 rows, and\n{100 * min(many):.0f} to {100 * max(many):.0f} % beyond "
        "(7B, 14B and 32B, random weights). GSM8K rollouts of a 1.5B model reach\n"
        f"{problems['tokens_per_s']:,.0f} tokens per second on one {rollout['device']}. "
        "`docs/benchmarks.md` has all figures.\nNot reproduced yet: the accuracies of the paper."
    )


def _learning_section() -> str:
    learning = _read("learning_smollm2-135m.json")
    commands = (
        "uv run python -m experiments.grpo_gsm8k --config.seed=SEED --workdir=runs/learn-SEED",
        "uv run python -m experiments.grpo_gsm8k --config.seed=SEED --workdir=runs/control-SEED "
        "--config.optimizer.learning_rate=0.0",
        "uv run python -m benchmarks.learning runs/learn-* --control runs/control-* "
        "--out=benchmarks/results/learning_smollm2-135m.json",
    )
    return _section(
        "Does the default run learn?",
        "The default command trains SmolLM2-135M in NVFP4 on one-digit sums "
        f"({provenance(learning['learning'])}, `benchmarks/learning.py`). Welch's t compares the "
        "rewards of the last fifth of the steps with those of the first fifth: above 3 the run "
        "learns, and a control with a learning rate of 0 stays below 2.",
        learning_table(learning),
        "\n".join(f"    {command}" for command in commands),
    )


def _training_section() -> str:
    run = _read(_GPU_RUN)
    return _section(
        "Training on a GPU",
        "Qwen2.5-Coder-1.5B-Instruct on GSM8K, read from a Q4_K_M GGUF and quantized to NVFP4 at "
        "load. A step has 128 completions of at most 512 tokens and 4 updates. The run was killed "
        f"in its sixth step and resumed ({provenance(run)}, `benchmarks/run_summary.py`).",
        run_table(run),
        _command(run),
    )


def _accuracy_section() -> str:
    results = [_read(f"gsm8k_qwen2.5-coder-1.5b_{form}_h200.json") for form in ("bf16", "nvfp4")]
    return _section(
        "Accuracy by weight format",
        "The same model on the first 256 problems of GSM8K's test set, at most 320 new tokens "
        f"({provenance(results[0])}, `experiments/evaluate.py`).",
        accuracy_table(results),
        *map(_command, results),
    )


def _rollout_sections() -> list[str]:
    rollout = _read("rollout.json")
    versions = f"{rollout['device']}, jax {rollout['rows'][0]['versions']['jax']}"
    return [
        _section(
            "Decode step",
            "Decode step time in milliseconds, and tokens per second in brackets, by batch size: "
            f"256 prompt tokens, 144 new tokens, random weights ({versions}, "
            "`benchmarks/rollout`). Each row was measured at the commit in its last column.",
            rollout_table(rollout),
        ),
        _section(
            "Parts of a decode step",
            "Milliseconds by part, summed over the layers, from separate profiled runs "
            "(`--parts`). 'gaps' is the time in which no kernel runs; it is negative where "
            "kernels overlap. Parts that are fused into another kernel count there.",
            parts_table(rollout),
        ),
        _section(
            "Whole rollouts",
            "GSM8K problems with an adapter of rank 32 (`--data`). 'useful' is the fraction of "
            "decoded tokens that end up in a completion; the rest is decoded after a row has "
            "ended.",
            problems_table(rollout),
        ),
        _section(
            "Agreement of sampler and trainer",
            "The rollout engine against the trainer's forward pass on prompts of GSM8K. At "
            "temperature 1 the log-probabilities of the sampled tokens are compared. At "
            "temperature 0 a token counts as different where the forward pass prefers another "
            "one, and the gap is between the two logits (`benchmarks/agreement.py`).",
            agreement_table(rollout),
        ),
        _section(
            "Startup",
            "Seconds from the command to the first tokens, with every program of the rollout "
            "compiled (`--startup`). Executables of an earlier process are found in "
            "JAX_COMPILATION_CACHE_DIR; a training run keeps its own in the run folder. The start "
            "with 80 programs and an empty cache compiled in several processes, which the code no "
            "longer does.",
            startup_table(rollout),
        ),
    ]


def _kernel_section() -> str:
    kernel = _read("kernel.json")
    commits = ", ".join(sorted({row["commit"][:8] for row in kernel["rows"]}))
    return _section(
        "The FP4 kernel",
        "Device time in microseconds on the fused projections of Qwen2.5, by number of tokens "
        f"(commits {commits}; {kernel['device']}, jax {kernel['rows'][0]['versions']['jax']}, "
        "`pallas_kernels/fp4_matmul/benchmark.py`). In brackets: for NVFP4 the fraction of the "
        "roofline (4.29 TB/s as measured, 790 TFLOP/s), for bf16 and NF4 the slowdown against "
        "NVFP4. The adapter has rank 32 per projection, and its x A^T is included. bf16 is "
        "cuBLAS, for one token `pallas_kernels/matvec.py`; NF4 is bitsandbytes. 'gradient' is the "
        "gradient with respect to the activations. Layers of equal shape share their rows.",
        kernel_table(kernel),
        "Token counts between the columns are never slower than the next column: "
        f"{between_columns(kernel)}.",
    )


def _section(title: str, *paragraphs: str) -> str:
    return "\n\n".join([f"## {title}", *paragraphs])


def _command(result: dict) -> str:
    return "    " + result["command"].replace("python3", "uv run --extra cuda python")


def benchmarks_page() -> str:
    """The text of docs/benchmarks.md."""
    return "\n\n".join(
        [
            "# Benchmarks",
            "`uv run python -m benchmarks.tables` writes this page from the JSON files under "
            "`benchmarks/results/`. Each file holds the command, commit, device and versions of "
            "its figures. Not reproduced yet: the GSM8K accuracies of the QeRL paper.",
            _learning_section(),
            _training_section(),
            _accuracy_section(),
            *_rollout_sections(),
            _kernel_section(),
        ]
    )


def with_generated_parts(readme: str) -> str:
    """A README whose generated parts are up to date.

    Raises:
        ValueError: the README lacks the marks of a part.
    """
    parts = {"speed": speed_text(), "presets": preset_table(), "folders": source_tree(_ROOT)}
    for name, text in parts.items():
        begin, end = f"<!-- {name}: python -m benchmarks.tables -->", f"<!-- end of {name} -->"
        before, found, rest = readme.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"README.md has no lines {begin!r} and {end!r}")
        readme = f"{before}{begin}\n{text}\n{end}{after}"
    return readme


def main() -> None:
    """Writes the page, and replaces the generated parts of the README."""
    page, readme = _ROOT / "docs" / "benchmarks.md", _ROOT / "README.md"
    page.write_text(benchmarks_page() + "\n", encoding="utf-8")
    text = with_generated_parts(readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
