"""Writes the model card of an export: README.md with front matter for the Hugging Face hub."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.export.merge import UpdateRetention
from qerl_jax.rewards.url import without_keys
from qerl_jax.run.provenance import without_folders
from qerl_jax.run.statistics import wilson_interval
from qerl_jax.system.command import command_name

FORMAT_NAMES = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "bf16": "bf16"}

_RELATIONS = {"peft": "adapter", "merged": "finetune", "nvfp4": "quantized"}
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank accepts
# Fields of the config that a reader of the card wants to know first.
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
    "dW is the update (scale * B A for a projection), and c is the change that it makes in the "
    "written weights, which are rounded. Kept is <c, dW> / <dW, dW>, and the error is "
    "|c - dW| / |dW|."
)
_NORMS = (
    "The trained norms are in float32, because bfloat16 loses small updates of numbers near 1. A "
    "program that loads the model in bfloat16 rounds them"
)
_DIVERGENCE = (
    "How far the trained policy is from other policies: KL(trained, other) on greedy completions "
    "of the trained policy."
)


@dataclasses.dataclass
class Card:
    """Describes an export for its model card.

    Attributes:
        name: name of the run or the adapter.
        format: format of the export: 'peft', 'merged' or 'nvfp4'.
        folder: folder of the export, or the repository of the hub that it is uploaded to.
        base: hub id or path of the base.
        base_format: format of the base's weights under the adapter; in a run also the format during
            the training.
        source: source from which `load` reads the base.
        served_base: model with exactly these weights that vLLM can read; '' without such a model.
        onto: weights that the update was merged into: 'trained' or 'bf16'.
        rank: rank of the adapter; 0 if all parameters were trained.
        trained_norms: whether the exported adapter contains norms.
        run: content of config.json of the run, or None.
        steps: number of steps of the run, or None if it is not finished.
        weights: which weights of the run these are, such as 'the best adapter, of step 4'.
        norms: dtype of the norms in the written model; '' is that of its other dense weights.
        problems: number of problems that the scores were measured on.
        scores: names of policies and their greedy pass@1.
        retention: measures of the kept update by projection; empty if nothing was rounded.
        divergences: names of policies and the KL of the trained policy to them in nats per token.
        evaluate: command that repeats the score of the export.
    """

    name: str
    format: str
    folder: str
    base: str
    base_format: str
    source: str
    served_base: str
    onto: str
    rank: int
    trained_norms: bool
    run: Mapping[str, Any] | None
    steps: int | None
    weights: str = ""
    norms: str = ""
    problems: int = 0
    scores: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    retention: dict[str, UpdateRetention] = dataclasses.field(default_factory=dict)
    divergences: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    evaluate: str = ""


def model_card(card: Card) -> str:
    """Returns the text of README.md."""
    parts = [_front_matter(card), f"# {card.name}", *_about(card)]
    parts += ["## Use", _code("bash", "\n".join(serve_lines(card))), _code("python", _python(card))]
    if card.scores:
        parts += [
            "## Scores",
            f"Greedy pass@1 on {card.problems} problems that the run held out:",
            _score_table(card),
            "Greedy means a temperature of 0 and no repetition penalty. This command repeats the "
            f"score of this {'adapter' if card.format == 'peft' else 'model'}, with the folder of "
            "the run and that of these files:",
            _code("bash", card.evaluate),
        ]
    if card.retention or card.norms or card.divergences:
        parts.append("## What is left of the update")
    if card.retention:
        parts += [_KEPT, retention_table(card.retention)]
    if card.norms:
        suffix = ", and keeps what the row `norms` says." if "norms" in card.retention else "."
        parts.append(_NORMS + suffix)
    if card.divergences:
        parts += [_DIVERGENCE, divergence_table(card.divergences)]
    if card.run is not None:
        parts += _training(card.run, card.steps, card.weights)
    return without_keys("\n\n".join(parts)) + "\n"


def base_card(card: Card) -> str:
    """Returns the text of README.md of a base that is written with its adapter."""
    text = (
        f"{card.base} in NVFP4: the weights that the adapter {card.folder} was trained on. On top "
        "of others the adapter is a different policy."
    )
    if card.norms:
        text += " The norms that were trained with the adapter are in these weights."
    matter = _front_matter(dataclasses.replace(card, format="nvfp4", run=None))
    parts = [matter, f"# {card.name}-base", text]
    return without_keys("\n\n".join(parts)) + "\n"


def serve_lines(card: Card) -> list[str]:
    """Returns the commands that serve an export with vLLM."""
    if card.format != "peft":
        return [f"vllm serve {shlex.quote(card.folder)}"]
    if card.base_format not in ("nvfp4", "bf16"):
        form = FORMAT_NAMES[card.base_format]
        return [f"# vLLM cannot serve this base in {form}: export with --format=merged"]
    base, lines = card.served_base, []
    if not base:
        base = f"{card.folder}-base"
        lines.append(f"{command_name('quantize')} {shlex.join([card.source, base])}")
    if card.trained_norms:
        reason = "vLLM accepts no adapter with norms: --with-base puts the norms into the base"
        return [*lines, f"# {reason}"]
    rank = str(vllm_rank(card.rank))
    serve = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", rank]
    # The sampling of the base, such as a repetition penalty, is not that of the scores.
    serve += ["--generation-config", "vllm"]
    # vLLM divides the form NAME=PATH at its equals signs, and takes one with a comma for JSON.
    module = json.dumps({"name": card.name, "path": card.folder})
    return [*lines, shlex.join([*serve, "--lora-modules", module])]


def vllm_rank(rank: int) -> int:
    """Returns the smallest --max-lora-rank of vLLM that accepts adapters of this rank."""
    return min((allowed for allowed in _VLLM_RANKS if allowed >= rank), default=rank)


def retention_table(retention: Mapping[str, UpdateRetention]) -> str:
    """Returns a table of what rounding keeps: a row per projection, and one for all together."""
    total = UpdateRetention()
    for part in retention.values():
        total.add((part.overlap, part.update, part.error))
    rows = [
        # Adding 0.0 makes -0.0 positive.
        (name, f"{round(100 * part.kept_fraction, 1) + 0.0} %", f"{part.relative_error:.3f}")
        for name, part in [*retention.items(), ("all", total)]
    ]
    return format_table(("projection", "kept", "error"), rows)


def divergence_table(divergences: Sequence[tuple[str, float]]) -> str:
    """Returns a table of the KL of the trained policy to other policies."""
    rows = [(name, f"{kl:.3g}") for name, kl in divergences]
    return format_table(("policy", "KL (nats per token)"), rows)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns, which is readable as plain text too."""
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
    tags = [] if card.run is None else ["qerl", "grpo", "reinforcement-learning"]
    tags += ["lora"] if card.format == "peft" else []
    trained_on = "" if card.run is None else card.base_format
    tags += ["nvfp4"] if "nvfp4" in (card.format, trained_on) else []
    matter: dict[str, Any] = {
        "library_name": "peft" if card.format == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    # The hub identifies models by id; a local path means nothing there.
    if not Path(card.base).is_absolute() and "/" in card.base:
        matter["base_model"] = card.base
        matter["base_model_relation"] = _RELATIONS[card.format]
    # Every JSON value is a YAML value.
    lines = [f"{key}: {json.dumps(value)}" for key, value in matter.items()]
    return "\n".join(["---", *lines, "---"])


def _about(card: Card) -> list[str]:
    form = FORMAT_NAMES[card.base_format]
    parameters = f"LoRA of rank {card.rank}" if card.rank else "all parameters"
    if card.run is None:
        return _about_foreign(card)
    lines = [
        f"{card.base}, trained with reinforcement learning on its weights in {form}: {parameters}."
    ]
    match card.format, card.onto:
        case "merged", _ if not card.rank:
            lines.append("These are the trained weights, in bfloat16.")
        case "nvfp4", _ if not card.rank:
            lines.append("These are the trained weights, rounded to NVFP4 as by llm-compressor.")
        case "peft", _ if card.base_format != "bf16":
            lines.append(
                f"The adapter belongs to these {form} weights: it was trained with their rounding "
                "errors. On top of the unquantized model it is a different policy."
            )
        case (("merged" | "nvfp4"), "bf16"):
            lines.append(
                f"The update was trained on {form} but is merged into the unquantized weights; the "
                f"sum is rounded to {FORMAT_NAMES.get(card.format, 'bf16')}."
            )
        case "merged", _:
            lines.append(
                "The update is merged in float32 into the weights that it was trained on and "
                "rounded to bfloat16 once."
            )
        case "nvfp4", _:
            lines.append(
                "The update is merged in float32 into the weights that it was trained on, and the "
                "sum is rounded to NVFP4 in the same way as by llm-compressor. Four bits keep only "
                "part of the update, as shown below."
            )
    data = card.run["config"]["data"]
    if data["system_prompt"]:
        lines.append(f"The system message was {json.dumps(data['system_prompt'])}.")
    if data["question_suffix"]:
        lines.append(f"Each question was followed by {json.dumps(data['question_suffix'])}.")
    if examples := data["examples"]:
        lines.append(f"Solved examples came before each question: {json.dumps(list(examples))}.")
    if arguments := data["chat_template_args"]:
        lines.append(
            f"The chat template was rendered with {json.dumps(arguments)}; vLLM takes it as "
            "`chat_template_kwargs` of a request."
        )
    if stop := card.run["config"]["rollout"]["stop"]:
        lines.append(f"Completions ended at the stop strings {json.dumps(stop)}.")
    return lines


def _about_foreign(card: Card) -> list[str]:
    """Describes the export of an adapter without a run, whose training is not known."""
    adapter = f"A LoRA adapter of rank {card.rank} for {card.base}"
    if card.format == "peft":
        return [f"{adapter}."]
    form = "bf16" if card.onto == "bf16" else FORMAT_NAMES[card.base_format]
    weight_format = {"merged": "bfloat16", "nvfp4": "NVFP4"}[card.format]
    return [
        f"{adapter}, merged in float32 into its weights in {form}; the sum is rounded to "
        f"{weight_format}."
    ]


def _python(card: Card) -> str:
    folder = json.dumps(card.folder)
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
        # The base has the sampling that its authors chose.
        names.append("GenerationConfig")
        lines.append(f"model.generation_config = GenerationConfig.from_pretrained({folder})")
    else:
        lines.append(f'model = AutoModelForCausalLM.from_pretrained({folder}, dtype="bfloat16")')
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({folder})")
    imports = ["from peft import PeftModel"] if card.format == "peft" else []
    imports.append(f"from transformers import {', '.join(names)}")
    return "\n".join(imports + lines)


def _training(run: Mapping[str, Any], steps: int | None, weights: str = "") -> list[str]:
    state = "Not finished yet" if steps is None else f"{steps} steps"
    state += f"; this is {weights}" if weights else ""
    facts = []
    if git := run.get("git"):
        facts.append(f"commit {git['commit']}" + (" with changes" if git.get("dirty") else ""))
    facts.append(str(run["device"]["kind"]))
    facts += [f"{name} {run['versions'][name]}" for name in ("jax", "python")]
    fields = {name: _lookup(run["config"], name) for name in _SUMMARY}
    if mixture := _lookup(run["config"], "data.mixture"):
        total = sum(source.get("weight", 1.0) for source in mixture.values())
        for name, source in mixture.items():
            origin = source.get("path") or source.get("source")
            share = source.get("weight", 1.0) / total
            fields[f"data.mixture.{name}"] = f"{origin}, {share:.1%} of the draws"
    if mixture or fields["data.path"]:
        del fields["data.source"]  # because the others replace it
    # Folders of the training machine mean nothing elsewhere.
    cells = {name: without_folders(_show(v)) for name, v in fields.items() if v not in (None, "")}
    return [
        "## Training",
        f"{state}: {', '.join(facts)}.",
        _code("bash", without_folders(run["command"])),
        format_table(("field", "value"), list(cells.items())),
        "<details><summary>Full config</summary>",
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
