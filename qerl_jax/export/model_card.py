"""The model card of an export: README.md, with the front matter that the Hugging Face hub reads."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.export.merge import Kept
from qerl_jax.run.provenance import without_folders
from qerl_jax.statistics import wilson_interval

FORMAT_NAMES = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "bf16": "bf16"}

_RELATIONS = {"peft": "adapter", "merged": "finetune", "nvfp4": "quantized"}
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank can be
# Of the config, what a reader wants to know first.
_SUMMARY = (
    "model.source",
    "model.format",
    "lora.rank",
    "lora.alpha",
    "lora.rslora",
    "lora.targets",
    "train.parameters",
    "data.source",
    "data.path",
    "rl.loss",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "optimizer.learning_rate",
    "aqn.schedule",
    "aqn.sigma_start",
    "aqn.sigma_end",
    "seed",
)
_KEPT = (
    "dW is the update, of a projection scale * B A, and c what it changes in the weights that are "
    "written, which are rounded. Kept is <c, dW> / <dW, dW>, the error |c - dW| / |dW|."
)
_DIVERGENCE = (
    "How far the trained policy is from others: KL(trained, other) on greedy completions of it."
)


@dataclasses.dataclass
class Card:
    """An export, as its card describes it.

    Attributes:
        name: of the run or the adapter.
        format: 'peft', 'merged' or 'nvfp4'.
        folder: where the export lies.
        base: hub id or path of the base.
        base_format: what its weights were in while it was trained.
        source: what `load` reads the base from.
        served_base: a model of these very weights that vLLM can read; '' where there is none.
        onto: what was merged into, 'trained' or 'bf16'.
        rank: of the adapter; 0 where all parameters were trained.
        trained_norms: the exported adapter holds norms too.
        run: config.json of the run, or None.
        steps: how many steps it has, or None where it is not finished.
        problems: how many problems the scores are of.
        scores: policies and their greedy pass@1.
        kept: what rounding keeps of the update, by projection; empty where nothing was rounded.
        divergences: policies and the KL of the trained policy to them, in nats a token.
    """

    name: str
    format: str
    folder: Path
    base: str
    base_format: str
    source: str
    served_base: str
    onto: str
    rank: int
    trained_norms: bool
    run: Mapping[str, Any] | None
    steps: int | None
    problems: int = 0
    scores: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    kept: dict[str, Kept] = dataclasses.field(default_factory=dict)
    divergences: list[tuple[str, float]] = dataclasses.field(default_factory=list)


def model_card(card: Card) -> str:
    """The text of README.md."""
    parts = [_front_matter(card), f"# {card.name}", *_about(card)]
    parts += ["## Use", _code("bash", "\n".join(serve_lines(card))), _code("python", _python(card))]
    if card.scores:
        parts += [
            "## Scores",
            f"Greedy pass@1 on {card.problems} problems that the run held out:",
            _score_table(card),
        ]
    if card.kept or card.divergences:
        parts.append("## What is left of the update")
    if card.kept:
        parts += [_KEPT, kept_table(card.kept)]
    if card.divergences:
        parts += [_DIVERGENCE, divergence_table(card.divergences)]
    if card.run is not None:
        parts += _training(card.run, card.steps)
    return "\n\n".join(parts) + "\n"


def serve_lines(card: Card) -> list[str]:
    """The commands that serve an export with vLLM."""
    if card.format != "peft":
        return [f"vllm serve {shlex.quote(str(card.folder))}"]
    if card.base_format not in ("nvfp4", "bf16"):
        form = FORMAT_NAMES[card.base_format]
        return [f"# vLLM cannot serve this base in {form}: export with --format=merged"]
    if card.trained_norms:
        return ["# vLLM takes no adapter with norms: export with --with-base, it has them then"]
    base, lines = card.served_base, []
    if not base:
        base = f"{card.folder}-base"
        lines.append(shlex.join(["python", "-m", "experiments.quantize", card.source, base]))
    rank = str(vllm_rank(card.rank))
    serve = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", rank]
    return [*lines, shlex.join([*serve, "--lora-modules", f"{card.name}={card.folder}"])]


def vllm_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM for adapters of this rank."""
    return min((allowed for allowed in _VLLM_RANKS if allowed >= rank), default=rank)


def kept_table(kept: Mapping[str, Kept]) -> str:
    """What rounding keeps, a row a projection and one for all of them."""
    total = Kept()
    for part in kept.values():
        total.add((part.overlap, part.update, part.error))
    rows = [
        # Adding 0.0 makes -0.0 positive.
        (name, f"{round(100 * part.share, 1) + 0.0} %", f"{part.relative_error:.3f}")
        for name, part in [*kept.items(), ("all", total)]
    ]
    return format_table(("projection", "kept", "error"), rows)


def divergence_table(divergences: Sequence[tuple[str, float]]) -> str:
    """The KL of the trained policy to others."""
    rows = [(name, f"{kl:.3g}") for name, kl in divergences]
    return format_table(("policy", "KL, nats a token"), rows)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so that it reads well as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def _score_table(card: Card) -> str:
    rows = []
    for name, score in card.scores:
        low, high = wilson_interval(score, card.problems)
        rows.append((name, f"{score:.3f}", f"{low:.3f} to {high:.3f}"))
    return format_table(("policy", "pass@1", "95 % interval"), rows)


def _front_matter(card: Card) -> str:
    tags = ["qerl", "grpo", "reinforcement-learning"]
    tags += ["lora"] if card.format == "peft" else []
    tags += ["nvfp4"] if "nvfp4" in (card.format, card.base_format) else []
    matter: dict[str, Any] = {
        "library_name": "peft" if card.format == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    # The hub knows models by id; a path means nothing to it.
    if not Path(card.base).is_absolute():
        matter["base_model"] = card.base
        matter["base_model_relation"] = _RELATIONS[card.format]
    # JSON is YAML.
    lines = [f"{key}: {json.dumps(value)}" for key, value in matter.items()]
    return "\n".join(["---", *lines, "---"])


def _about(card: Card) -> list[str]:
    form = FORMAT_NAMES[card.base_format]
    what = f"LoRA of rank {card.rank}" if card.rank else "all parameters"
    lines = [f"{card.base}, trained with reinforcement learning on its weights in {form}: {what}."]
    match card.format, card.onto:
        case "peft", _ if card.base_format != "bf16":
            lines.append(
                f"The adapter belongs to these {form} weights: it was trained with their rounding "
                "errors. Over the unquantised model it is another policy."
            )
        case (("merged" | "nvfp4"), "bf16"):
            lines.append(
                f"The update is merged into the weights before they were quantised, though it was "
                f"trained on {form}; the sum is rounded to {FORMAT_NAMES.get(card.format, 'bf16')}."
            )
        case "merged", _:
            lines.append(
                "The update is merged in float32 into the weights that it was trained on and "
                "rounded to bfloat16 once."
            )
        case "nvfp4", _:
            lines.append(
                "The update is merged in float32 into the weights that it was trained on, and the "
                "sum is rounded to NVFP4, as llm-compressor does it. Four bits keep "
                "only part of the update, see below."
            )
    data = {} if card.run is None else card.run["config"]["data"]
    if data.get("system_prompt"):
        lines.append(f"The system message was {json.dumps(data['system_prompt'])}.")
    if data.get("question_suffix"):
        lines.append(f"Behind each question stood {json.dumps(data['question_suffix'])}.")
    return lines


def _python(card: Card) -> str:
    folder = json.dumps(str(card.folder))
    names = ["AutoModelForCausalLM", "AutoTokenizer"]
    lines = [""]
    if card.format == "peft":
        base = json.dumps(card.served_base or f"{card.folder}-base")
        options = 'dtype="bfloat16"'
        if card.base_format == "nvfp4":
            # PEFT wraps dense layers.
            names.append("CompressedTensorsConfig")
            lines.append("config = CompressedTensorsConfig(dequantize=True)")
            options += ", quantization_config=config"
        lines.append(f"base = AutoModelForCausalLM.from_pretrained({base}, {options})")
        lines.append(f"model = PeftModel.from_pretrained(base, {folder})")
    else:
        lines.append(f'model = AutoModelForCausalLM.from_pretrained({folder}, dtype="bfloat16")')
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({folder})")
    imports = ["from peft import PeftModel"] if card.format == "peft" else []
    imports.append(f"from transformers import {', '.join(names)}")
    return "\n".join(imports + lines)


def _training(run: Mapping[str, Any], steps: int | None) -> list[str]:
    done = "Not finished yet" if steps is None else f"{steps} steps"
    facts = []
    if git := run.get("git"):
        facts.append(f"commit {git['commit']}" + (" with changes" if git.get("dirty") else ""))
    facts.append(str(run["device"]["kind"]))
    facts += [f"{name} {run['versions'][name]}" for name in ("jax", "python")]
    found = {name: _lookup(run["config"], name) for name in _SUMMARY}
    if found["data.path"]:
        del found["data.source"]  # which it replaced
    # Folders of the machine that trained mean nothing elsewhere.
    shown = {name: without_folders(_show(v)) for name, v in found.items() if v not in (None, "")}
    return [
        "## Training",
        f"{done}: {', '.join(facts)}.",
        _code("bash", without_folders(run["command"])),
        format_table(("field", "value"), list(shown.items())),
        "<details><summary>The whole config</summary>",
        _code("json", without_folders(json.dumps(run["config"], indent=2))),
        "</details>",
    ]


def _lookup(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
