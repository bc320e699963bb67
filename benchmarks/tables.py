"""Writes the tables of the README from benchmarks/results/.

uv run python -m benchmarks.tables
"""

import bisect
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.rollout.profile import PARTS
from benchmarks.rollout.results import by_policy, numbers_of
from pallas_kernels.fp4_matmul import benchmark, cases

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
# Implementations of the kernel's benchmark, as the table names them.
_KERNELS = {
    "nvfp4": "NVFP4",
    "nvfp4_lora32": "NVFP4 + LoRA",
    "bf16": "bf16",
    "nf4": "NF4",
    "dx": "NVFP4, gradient",
    "dx_bf16": "bf16, gradient",
}
_BETWEEN = (40, 96, 160, 384)  # tokens that have no column
# What the rollouts of the tables have in common.
_SAME = {"chunk_steps": 16, "dequantize": "once"}
_STEPS = _SAME | {"weights": "random", "prompt": 256, "new_tokens": 144}
_BEGIN, _END = "<!-- tables: python -m benchmarks.tables -->", "<!-- end of tables -->"


def learning_table(result: dict) -> str:
    """Does the default run learn?"""
    lines = []
    for name, label in (("learning", "as it is"), ("control", "learning rate 0")):
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
        "run", "seeds x steps", "reward, first fifth", "last fifth", "Welch's t",
        "greedy pass@1 before", "after", "minutes",
    )  # fmt: skip
    return _markdown(header, lines)


def run_table(result: dict) -> str:
    """What a step costs on a GPU."""
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
        "steps", "mean reward", "s per step, median", "fastest", "rollout tok/s", "train tok/s",
        "peak memory",
    )  # fmt: skip
    return _markdown(header, [line])


def kernel_table(result: dict) -> str:
    """The FP4 kernel beside others, a line for each layer and implementation, by tokens."""
    rows = {(row["layer"], row["m"], row["impl"]): row for row in result["rows"]}
    counts = sorted({m for _, m, impl in rows if impl == "nvfp4" and m not in _BETWEEN})
    lines = []

    def cell(layer: str, m: int, impl: str) -> str:
        row, own = (rows.get((layer, m, name)) for name in (impl, "nvfp4"))
        if row is None:
            return ""
        if impl == "nvfp4":
            return f"{row['device_us']:.1f} ({100 * row['floor_us'] / row['device_us']:.0f} %)"
        compared = own and own["commit"] == row["commit"] and impl in ("bf16", "nf4")
        times = f" ({row['device_us'] / own['device_us']:.2f}x)" if compared and own else ""
        return f"{row['device_us']:.1f}{times}"

    measured = {layer for layer, *_ in rows}
    for layer in (layer for layer in benchmark.shapes(",".join(cases.MODELS)) if layer in measured):
        for impl, name in _KERNELS.items():
            cells = [cell(layer, m, impl) for m in counts]
            if any(cells):
                lines.append(["" if impl != "nvfp4" else layer, name, *cells])
    return _markdown(["layer", "", *map(str, counts)], lines)


def between_columns(result: dict) -> str:
    """What the kernel takes between two columns, by the next one, at most: "40 (0.99)"."""
    times = {
        (row["layer"], row["m"]): row["device_us"]
        for row in result["rows"]
        if row["impl"] == "nvfp4"
    }
    columns = sorted({m for _, m in times if m not in _BETWEEN})
    largest: dict[int, float] = {}
    for (layer, m), time in sorted(times.items(), key=lambda item: item[0][1]):
        if m in _BETWEEN:
            share = time / times[layer, columns[bisect.bisect(columns, m)]]
            largest[m] = max(share, largest.get(m, 0.0))
    return ", ".join(f"{m} ({share:.2f})" for m, share in largest.items())


def rollout_table(result: dict) -> str:
    """Milliseconds of a decode step and tokens per second, a line for each policy and commit."""
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
    """Where the time of a decode step goes."""
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
    header = ["model", "weights", "rows", "step", *names, "kernels of a layer", "commit"]
    return _markdown(header, lines)


def problems_table(result: dict) -> str:
    """Whole rollouts of problems by a real model."""
    lines = [
        [
            row["model"],
            numbers_of(row),
            f"{row['prompts']} x {row['group']}",
            f"{row['tokens']:,}, {row['max_new_tokens']} each",
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
        "model", "weights", "prompts x completions", "tokens, at most", "seconds", "tokens/s",
        "of a completion", "compiling", "peak memory", "commit",
    )  # fmt: skip
    return _markdown(header, lines)


def startup_table(result: dict) -> str:
    """Seconds from a command to the first tokens."""
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
        "model", "weights", "prompts x completions", "programs", "kept by an earlier process",
        "weights there", "compiled", "first tokens", "commit",
    )  # fmt: skip
    return _markdown(header, lines)


def agreement_table(result: dict) -> str:
    """How far the engine is from the forward pass that trains."""
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
        "model", "weights", "sampled tokens", "difference of log-probabilities, mean", "99 %",
        "greedy tokens", "not the likeliest", "their logit lower by at most", "commit",
    )  # fmt: skip
    return _markdown(header, lines)


def accuracy_table(results: list[dict]) -> str:
    """What a model solves in each format."""
    lines = []
    for result in results:
        task = result["tasks"]["gsm8k"]
        share = task["accuracy"]
        lines.append(
            [
                result["settings"]["format"],
                str(task["problems"]),
                f"{100 * share['value']:.1f} % "
                f"[{100 * share['low']:.1f}, {100 * share['high']:.1f}]",
                f"{100 * task['format']['value']:.1f} %",
                f"{task['mean_tokens']:.0f}",
            ]
        )
    header = "weights", "problems", "greedy accuracy, 95 % interval", "answer in a box", "tokens"
    return _markdown(header, lines)


def _rows(result: dict, kind: str, same: Mapping[str, Any]) -> list[dict]:
    """The rows of a kind that have these fields."""
    same = {"kind": kind, **same}
    return [row for row in result["rows"] if same.items() <= row.items()]


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def provenance(result: dict) -> str:
    """Commit and device of a result."""
    commit = (result["git"] or {}).get("commit", "unknown")[:8]
    return f"commit {commit}, {result['device']['kind']}, jax {result['versions']['jax']}"


def _read(name: str) -> dict:
    return json.loads((_RESULTS / name).read_text(encoding="utf-8"))


def main() -> None:
    """Replaces what stands between the markers."""
    learning = _read("learning_smollm2-135m.json")
    gpu = _read("grpo_qwen2.5-coder-1.5b_h200.json")
    accuracies = [_read(f"gsm8k_qwen2.5-coder-1.5b_{form}_h200.json") for form in ("bf16", "nvfp4")]
    kernel, rollout = _read("kernel.json"), _read("rollout.json")
    commits = ", ".join(sorted({row["commit"][:8] for row in kernel["rows"]}))
    text = "\n\n".join(
        [
            "The default command, SmolLM2-135M in NVFP4 on one-digit sums "
            f"({provenance(learning['learning'])}, `benchmarks/learning.py`):",
            learning_table(learning),
            "    uv run python -m experiments.grpo_gsm8k --config.seed=SEED "
            "--workdir=runs/learn-SEED\n"
            "    uv run python -m experiments.grpo_gsm8k --config.seed=SEED "
            "--workdir=runs/control-SEED --config.optimizer.learning_rate=0.0\n"
            "    uv run python -m benchmarks.learning runs/learn-* --control runs/control-* "
            "--out=benchmarks/results/learning_smollm2-135m.json",
            "Qwen2.5-Coder-1.5B-Instruct (a Q4_K_M GGUF, quantised to NVFP4 at load) on GSM8K, 128 "
            "completions of at most 512 tokens and 4 updates a step, killed in the sixth "
            f"step and resumed ({provenance(gpu)}, `benchmarks/run_summary.py`):",
            run_table(gpu),
            "    " + gpu["command"].replace("python3", "uv run --extra cuda python"),
            "The same model on the first 256 test problems, at most 320 new tokens, "
            f"`experiments/evaluate.py` ({provenance(accuracies[0])}):",
            accuracy_table(accuracies),
            *(
                "    " + result["command"].replace("python3", "uv run --extra cuda python")
                for result in accuracies
            ),
            "A decode step in milliseconds, and tokens per second, by the rows that decode "
            f"together: 256 prompt tokens, 144 new ones, random weights ({rollout['device']}, jax "
            f"{rollout['rows'][0]['versions']['jax']}, `experiments/benchmark_rollout.py`). A line "
            "is of the commit it names:",
            rollout_table(rollout),
            "Where its milliseconds go (`--parts`, of another run), summed over the layers; gaps "
            "are what no kernel fills:",
            parts_table(rollout),
            "Whole rollouts of GSM8K problems, with an adapter of rank 32 (`--data`); what was "
            "decoded and belongs to no completion is of rows that had ended:",
            problems_table(rollout),
            "The engine against the forward pass that trains, on prompts of GSM8K, at temperature "
            "1 and at 0 (`benchmarks/agreement.py`):",
            agreement_table(rollout),
            "From the command to the first tokens, every program compiled (`--startup`). Programs "
            "of an earlier process are in JAX_COMPILATION_CACHE_DIR; a run keeps them in its "
            "folder:",
            startup_table(rollout),
            "The FP4 kernel on the fused projections of Qwen2.5, device time in microseconds by "
            f"the number of tokens (commit {commits}, {kernel['device']}, jax "
            f"{kernel['rows'][0]['versions']['jax']}, `pallas_kernels/fp4_matmul/benchmark.py`). "
            "Behind NVFP4 stands its share of the floor, which is what the bytes or the operations "
            "take at 4.29 TB/s as measured and at 790 TFLOP/s; behind the others how many times as "
            "long they take. The adapter has rank 32 for each projection, and x A^T is counted. "
            "bf16 is cuBLAS, for one token `pallas_kernels/matvec.py`; NF4 is bitsandbytes; a "
            "gradient is that by x:",
            kernel_table(kernel),
            "Between these numbers of tokens the kernel takes at most so many times as long as at "
            f"the next of them: {between_columns(kernel)}.",
        ]
    )
    readme = _ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    readme.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
