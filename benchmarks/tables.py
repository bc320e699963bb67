"""Writes what is generated of the pages, and the pictures.

    uv run python -m benchmarks.tables

The pages are Markdown in which marks surround what this command writes. A part that `PARTS` names:

    <!-- NAME: python -m benchmarks.tables -->
    | ... |
    <!-- end of NAME -->

and within a paragraph, but not at the start of a line, a part by its name, or figures in a form:

    took <!-- learning_sums/learning {minutes:.1f} -->10.6<!-- / --> minutes

Figures come from the files under benchmarks/results/: the form has fields of what lies at the path
in FILE.json, and the form `origin` is commit, device and version of jax. The list of folders in
CONTRIBUTING.md is made of the first docstring line of each package (`benchmarks/source_tree.py`),
docs/config.md of the rows of `qerl_jax/config/fields.py`.
"""

import json
import pathlib
import re
import statistics
from typing import Any

from benchmarks import card_tables, pictures, result_tables, source_tree, step_tables
from benchmarks.config_page import config_fields
from benchmarks.result_tables import SAME, filled, rows_of, share_of_bf16
from qerl_jax.config import models

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in (
            *("agents", "benchmarks", "config", "environments", "evidence", "examples"),
            *("export", "several_gpus"),
        )
    ),
)
_GPU_RUN = "grpo_qwen2.5-coder-1.5b_h100"
_FORMATS = [f"gsm8k_qwen2.5-coder-1.5b_{form}_h200" for form in ("bf16", "nvfp4")]
_ORIGIN = "commit {git[commit]:.8}, {device[kind]}, jax {versions[jax]}"
_MARKED = re.compile(
    r"(<!-- ([^\n]+?)(?:: python -m benchmarks\.tables)? -->\n?)((?:(?!<!--).)*?)"
    r"(\n?<!-- (?:end of \2|/) -->)",
    re.DOTALL,
)


def value_at(path: str) -> Any:
    """What lies at a path of keys in a file of results, as step/rows/0 in step.json."""
    file, *keys = path.split("/")
    value = json.loads((_RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    for key in keys:
        value = value[int(key) if key.isdecimal() else key]
    return value


# --- Parts that need more than one call ---------------------------------------------------------


def _preset_steps() -> dict[str, dict]:
    """For each model with a measured step of 8 rows in its format the row that counts, by model."""
    rows = [
        row for row in value_at("step/rows")
        if row["format"] == models.format_of(row["model"]) and row["batch"] == 8
        and row["updates"] == 1 and not row["mean_length"]
    ]  # fmt: skip
    # The last row of a model counts: the one on the fewest cards, if possible on a card of 80 GB,
    # with the longest rows, and then in the least memory.
    rows.sort(
        key=lambda row: (
            -row["devices"], "80GB" in row["device"], row["new_tokens"], row["prompt"],
            -row["peak_gb"],
        )
    )  # fmt: skip
    steps = {row["model"]: row for row in rows}
    return {model: steps[model] for model in models.MODELS if model in steps}


def _not_run() -> str:
    """The presets that neither table of presets has."""
    known = {models.STAND_IN, "qwen2.5-coder-1.5b", *_preset_steps()}
    return ", ".join(f"`{model}`" for model in models.MODELS if model not in known)


def _jax_versions(rows: list[dict]) -> str:
    return "jax " + " and ".join(sorted({row["versions"]["jax"] for row in rows}))


def _commands(*results: dict) -> str:
    """The commands of results, below their table."""
    lines = (
        result["command"].replace("python3", "uv run --extra cuda python") for result in results
    )
    return "\n\n".join(f"    {line}" for line in lines)


def _tokens_per_second(rollout: dict) -> str:
    (row,) = rows_of(rollout, "gsm8k", SAME | {"lora_rank": 32})
    return f"{row['tokens_per_s']:,.0f}"


def _first_calls(by_step: list[list[float]]) -> str:
    return f"{100 * statistics.fmean(steps[0] for steps in by_step):.0f} %"


_FEW, _MANY = range(65), range(65, 10**6)  # rows
# Name of a part -> the function that writes it, and the paths of its arguments.
PARTS: dict[str, tuple] = {
    # README.md and CONTRIBUTING.md
    "speed": (step_tables.short_steps_table, "peers/rows", "step/rows"),
    "memory": (lambda: card_tables.memory_table(_preset_steps().values()),),
    "folders": (lambda: source_tree.source_tree(_ROOT),),
    # docs/agents.md, docs/config.md, docs/environments.md, docs/evidence.md
    "fields": (config_fields,),
    "guessing game": (
        lambda result: result_tables.environment_table(result, "replies", "won"),
        "environments/learning/guessing_game",
    ),
    "calculator": (
        lambda result: result_tables.environment_table(result, "calculator", "right"),
        "environments/learning/calculator",
    ),
    "environments on several GPUs": (step_tables.environment_scaling_table, "environments/step"),
    "agents": (result_tables.agents_table, "environments/learning"),
    "rows that calculate first": (
        _first_calls, "environments/learning/calculator/runs/calls_by_step",
    ),
    "arms": (result_tables.arms_table, "gsm8k"),
    "routes flipped": (result_tables.router_noise_table, "router_noise/rows"),
    # docs/export.md
    "merges": (result_tables.merges_table, "merges/rows"),
    # docs/benchmarks.md
    "Qwen2.5 up to 64 rows": (lambda r: share_of_bf16(r, "qwen2.5", _FEW), "rollout"),
    "Qwen2.5 beyond": (lambda r: share_of_bf16(r, "qwen2.5", _MANY), "rollout"),
    "Qwen3.5 up to 64 rows": (lambda r: share_of_bf16(r, "qwen3.5", _FEW), "rollout"),
    "GSM8K tokens per second": (_tokens_per_second, "rollout"),
    "scaling": (step_tables.largest_scaling, "step/rows"),
    "seconds of a step": (
        lambda learning: f"{60 * learning['minutes'] / learning['steps']:.0f} s",
        "learning_sums/learning",
    ),
    "memory of the training": (lambda run: f"{run['peak_memory_bytes'] / 1e9:.1f} GB", _GPU_RUN),
    "measured presets": (lambda: step_tables.preset_table(_preset_steps().values()),),
    "presets not run": (_not_run,),
    "learning": (result_tables.learning_table, "learning_sums"),
    "training": (result_tables.run_table, _GPU_RUN),
    "command of the training": (_commands, _GPU_RUN),
    "steps": (step_tables.step_table, "step/rows"),
    "versions of steps": (_jax_versions, "step/rows"),
    "versions of decode steps": (_jax_versions, "rollout/rows"),
    "several GPUs": (step_tables.scaling_table, "step/rows"),
    "steps of peers": (step_tables.peer_steps_table, "peers/rows", "step/rows"),
    "packages of peers": (step_tables.peer_packages, "peers/rows"),
    "seconds of adapters": (step_tables.adapter_seconds, "peers/rows"),
    "parts of peers": (step_tables.peer_parts_table, "peers/rows"),
    "decode of vLLM": (step_tables.decode_of_vllm_table, "vllm/decode"),
    "long rows": (step_tables.long_rows_table, "long_rows/rows", "published/rows"),
    "loading": (result_tables.loading_table, "loading/rows"),
    "accuracy": (result_tables.accuracy_table, *_FORMATS),
    "commands of the accuracy": (_commands, *_FORMATS),
    "decode": (result_tables.rollout_table, "rollout"),
    "decode on an H100": (result_tables.rollout_table, "rollout_h100"),
    "time on several GPUs": (result_tables.tensor_ratios, "rollout_h100"),
    "parts of a step": (result_tables.parts_table, "rollout"),
    "rollouts": (result_tables.problems_table, "rollout"),
    "drafts": (result_tables.drafts_table, "drafts"),
    "agreement": (result_tables.agreement_table, "rollout"),
    "startup": (result_tables.startup_table, "rollout"),
    "kernel": (result_tables.kernel_part, "kernel"),
    "kernel on an H100": (result_tables.kernel_part, "kernel_h100"),
    # docs/several_gpus.md
    "meshes of two hosts": (card_tables.mesh_table,),
    "two hosts on paper": (
        lambda rows: card_tables.network_table(_preset_steps(), rows), "exchange/rows",
    ),
    # docs/benchmarks.md
    "cards": (card_tables.card_table,),
    "kernels of other cards": (card_tables.paths_table, "rollout"),
}  # fmt: skip


# --- Pages --------------------------------------------------------------------------------------


def part(name: str) -> str:
    """What stands between the marks of this name.

    Raises:
        ValueError: it is neither a part nor a form with a path.
    """
    if name in PARTS:
        function, *paths = PARTS[name]
        return function(*map(value_at, paths))
    path, _, form = name.partition(" ")
    if not form:
        raise ValueError(f"{name!r} is no part")
    return filled(_ORIGIN if form == "origin" else form, value_at(path))


def generated(pages: dict[str, str]) -> dict[str, str]:
    """The pages, text by name, with all that is generated.

    Raises:
        ValueError: a mark names no part or is not closed, or no page has the marks of a part.
    """
    missing = set(PARTS)

    def fill(match: re.Match[str]) -> str:
        missing.discard(match[2])
        return f"{match[1]}{part(match[2])}{match[4]}"

    filled_pages = {}
    for name, text in pages.items():
        filled_pages[name], count = _MARKED.subn(fill, text)
        if text.count("<!--") != 2 * count:
            raise ValueError(f"{name}: a mark is not closed")
    if missing:
        raise ValueError(f"no page has marks of: {', '.join(sorted(missing))}")
    return filled_pages


def read_pages() -> dict[str, str]:
    """The text of the pages by name."""
    return {name: (_ROOT / name).read_text(encoding="utf-8") for name in PAGES}


def main() -> None:
    """Writes all pages and pictures."""
    for name, text in generated(read_pages()).items():
        (_ROOT / name).write_text(text, encoding="utf-8")
    pictures.draw_pictures(_ROOT / "docs")


if __name__ == "__main__":
    main()
