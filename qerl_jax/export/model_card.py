"""The model card of an export, README.md: its facts, which model_card.md.jinja renders."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.config.fields import learns_from_text
from qerl_jax.export.merge import UpdateRetention
from qerl_jax.rewards.url import without_keys
from qerl_jax.run.provenance import without_folders
from qerl_jax.run.statistics import wilson_interval
from qerl_jax.system.command import command_name

FORMAT_NAMES = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "bf16": "bf16"}

_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
_RELATIONS = {"peft": "adapter", "merged": "finetune", "nvfp4": "quantized", "gguf": "quantized"}
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank accepts
# Fields of the config that a reader of the card wants to know first.
_SUMMARY = (
    "model.source", "model.format", "lora.rank", "lora.alpha", "lora.rslora", "lora.targets",
    "train.parameters", "data.source", "data.path", "rl.loss", "rollout.prompts_per_step",
    "rollout.group_size", "rollout.max_new_tokens", "optimizer.learning_rate", "aqn.schedule",
    "aqn.sigma_start", "aqn.sigma_end", "seed",
)  # fmt: skip


@dataclasses.dataclass
class Card:
    """Describes an export for its model card."""

    name: str  # of the run or the adapter
    format: str  # of the export: 'peft', 'merged', 'nvfp4' or 'gguf'
    folder: str  # of the export, or the repository of the hub that it is uploaded to
    base: str  # hub id or path
    base_format: str  # of the weights under the adapter; in a run also during the training
    source: str  # from which `load` reads the base
    served_base: str  # model with exactly these weights that vLLM can read; '' without one
    onto: str  # weights that the update was merged into: 'trained' or 'bf16'
    rank: int  # of the adapter; 0 if all parameters were trained
    trained_norms: bool  # whether the exported adapter contains norms
    run: Mapping[str, Any] | None  # content of config.json of the run
    steps: int | None  # of the run; None if it is not finished
    weights: str = ""  # which ones of the run, such as 'the best adapter, of step 4'
    expert_rank: int = 0  # of the adapters of routed experts; 0 without
    stacked_experts: bool = False  # whether the adapters of all experts are in one pair of matrices
    norms: str = ""  # dtype of the written norms; '' is that of the other dense weights
    problems: int = 0  # that the scores were measured on
    scores: list[tuple[str, float]] = dataclasses.field(default_factory=list)  # policy, pass@1
    # By projection; empty if nothing was rounded.
    retention: dict[str, UpdateRetention] = dataclasses.field(default_factory=dict)
    # Other policies, the KL of the trained policy to them in nats per token, and the fraction of
    # the tokens at which both find the same one the likeliest.
    divergences: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    evaluate: str = ""  # command that repeats the score of the export
    number_format: str = "bf16"  # of the weights of a merged model
    calibrated: bool = False  # whether GPTQ rounded them
    uploaded: bool = False  # whether the folder is a repository of the hub
    files: list[str] = dataclasses.field(default_factory=list)  # .gguf files, the model first
    notes: list[str] = dataclasses.field(default_factory=list)  # about their number formats


def model_card(card: Card) -> str:
    """Returns the text of README.md."""
    from huggingface_hub import ModelCard  # needed only here

    facts = {} if card.run is None else _training(card.run)
    is_text = card.run is not None and learns_from_text(card.run["config"])
    rendered = ModelCard.from_template(
        _card_data(card),
        str(_TEMPLATE),
        card=card,
        run=card.run,
        names=FORMAT_NAMES,
        json=json.dumps,
        serve="\n".join(serve_lines(card)),
        scores=_score_table(card),
        retention=retention_table(card.retention) if card.retention else "",
        divergences=divergence_table(card.divergences),
        method="supervised fine-tuning" if is_text else "reinforcement learning",
        **facts,
    )
    return without_keys(str(rendered)) + "\n"


def base_card(card: Card) -> str:
    """Returns the text of README.md of a base that is written with its adapter."""
    text = (
        f"{card.base} in NVFP4: the weights that the adapter {card.folder} was trained on. On top "
        "of others the adapter is a different policy."
    )
    if card.norms:
        text += " The norms that were trained with the adapter are in these weights."
    matter = _card_data(dataclasses.replace(card, format="nvfp4", run=None)).to_yaml()
    return without_keys(f"---\n{matter}\n---\n\n# {card.name}-base\n\n{text}\n")


def serve_lines(card: Card) -> list[str]:
    """Returns the commands that serve an export with vLLM, or with llama.cpp and Ollama."""
    if card.format == "gguf":
        return _llama_lines(card)
    if card.format != "peft":
        return [f"vllm serve {shlex.quote(card.folder)}"]
    # A folder in MXFP4 is that of gpt-oss, as it is published.
    is_published = bool(card.served_base) and not card.served_base.endswith(".gguf")
    if card.base_format not in ("nvfp4", "bf16", *(("mxfp4",) if is_published else ())):
        form = FORMAT_NAMES[card.base_format]
        return [f"# vLLM cannot serve this base in {form}: export with --format=merged"]
    base, lines = card.served_base, []
    if not base:
        base = f"{card.folder}-base"
        lines.append(f"{command_name('quantize')} {shlex.join([card.source, base])}")
    if card.trained_norms:
        reason = "vLLM accepts no adapter with norms: --with-base puts the norms into the base"
        return [*lines, f"# {reason}"]
    rank = str(vllm_rank(max(card.rank, card.expert_rank)))
    serve = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", rank]
    # The sampling of the base, such as a repetition penalty, is not that of the scores.
    serve += ["--generation-config", "vllm"]
    # vLLM divides the form NAME=PATH at its equals signs, and takes one with a comma for JSON.
    module: dict[str, Any] = {"name": card.name, "path": card.folder}
    if card.expert_rank and card.stacked_experts:
        # vLLM does not see the layout of a file, and a text model expects the other one.
        serve += ["--enable-mixed-moe-lora-format"]
        module["is_3d_lora_weight"] = True
    return [*lines, shlex.join([*serve, "--lora-modules", json.dumps(module)])]


def _llama_lines(card: Card) -> list[str]:
    """Returns the commands that run GGUF files, and one that makes K-quants of a model in BF16."""
    # The folder of an upload is a repository, which is fetched first.
    folder, lines = card.folder, []
    if not Path(folder).is_absolute() and card.uploaded:
        lines.append(shlex.join(["hf", "download", folder, "--local-dir", Path(folder).name]))
        folder = Path(folder).name
    model, *adapters = [f"{folder}/{file}" for file in card.files]
    options = [part for path in adapters for part in ("--lora", path)]
    command = ["-m", model, *options, "--temp", "0"]
    lines += [shlex.join(["llama-cli", *command]), shlex.join(["llama-server", *command])]
    if card.number_format in ("bf16", "q8_0") and not adapters:
        name = re.sub(r"[^a-z0-9._-]+", "-", card.name.lower()).strip("-._") or "policy"
        lines.append(shlex.join(["ollama", "create", name, "-f", f"{folder}/Modelfile"]))
    if card.number_format == "bf16" and not adapters:
        small = model.replace("-BF16", "-Q4_K_M")
        lines.append(shlex.join(["llama-quantize", model, small, "Q4_K_M"]))
    return lines


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


def divergence_table(divergences: Sequence[tuple[str, float, float]]) -> str:
    """Returns a table of the KL of the trained policy to other policies, and their agreement."""
    rows = [(name, f"{kl:.3g}", f"{100 * same:.1f} %") for name, kl, same in divergences]
    return format_table(("policy", "KL (nats per token)", "same likeliest token"), rows)


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


def _card_data(card: Card) -> Any:
    """Returns the front matter."""
    from huggingface_hub import ModelCardData

    tags = [] if card.run is None else ["qerl", "grpo", "reinforcement-learning"]
    if card.run is not None and learns_from_text(card.run["config"]):
        tags = ["qerl", "sft"]
    tags += ["lora"] if card.format == "peft" else []
    trained_on = "" if card.run is None else card.base_format
    tags += ["nvfp4"] if "nvfp4" in (card.format, trained_on) else []
    tags += ["gguf", "llama.cpp"] if card.format == "gguf" else []
    # The hub identifies models by id; a local path means nothing there.
    on_hub = not Path(card.base).is_absolute() and "/" in card.base
    libraries = {"peft": "peft", "gguf": "gguf"}
    return ModelCardData(
        library_name=libraries.get(card.format, "transformers"),
        pipeline_tag="text-generation",
        tags=tags,
        base_model=card.base if on_hub else None,
        base_model_relation=_RELATIONS[card.format] if on_hub else None,
    )


def _training(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the card says of the training: facts, command, fields and config."""
    git = run.get("git")
    facts = (
        [f"commit {git['commit']}" + (" with changes" if git.get("dirty") else "")] if git else []
    )
    facts.append(str(run["device"]["kind"]))
    facts += [f"{name} {run['versions'][name]}" for name in ("jax", "python")]
    fields = {name: _lookup(run["config"], name) for name in _SUMMARY}
    if learns_from_text(run["config"]):
        of_samples = ("rl.", "rollout.", "aqn.")
        fields = {name: v for name, v in fields.items() if not name.startswith(of_samples)}
        fields |= {name: _lookup(run["config"], name) for name in ("sft.rows_per_step", "steps")}
    if mixture := _lookup(run["config"], "data.mixture"):
        total = sum(source.get("weight", 1.0) for source in mixture.values())
        for name, source in mixture.items():
            origin = source.get("path") or source.get("source")
            share = source.get("weight", 1.0) / total
            fields[f"data.mixture.{name}"] = f"{origin}, {share:.1%} of the draws"
    if mixture or fields["data.path"]:
        del fields["data.source"]  # because the others replace it
    # Folders of the training machine mean nothing elsewhere.
    cells = [(k, without_folders(_show(v))) for k, v in fields.items() if v not in (None, "")]
    return {
        "facts": facts,
        "command": without_folders(run["command"]),
        "fields": format_table(("field", "value"), cells),
        "config": without_folders(json.dumps(run["config"], indent=2)),
    }


def _lookup(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
