"""Writes a trained policy as a folder for other tools.

    peft      the adapter, for PEFT and vLLM, on top of its base
    merged    one bfloat16 model: the dequantized weights of the base plus the update
    nvfp4     the same model rounded to 4 bits again, which keeps only part of the update
    gguf      for llama.cpp: the adapter and its base, or one merged model; see `gguf_files`

Norms that were trained stay in float32 in both: bfloat16 loses small updates of numbers near 1.

An adapter that was trained on a quantized base belongs to that base, because it was trained with
the rounding errors of the base. An export therefore states its base, the scores of the policy on
the base and on the unquantized weights, and the command that serves it.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from qerl_jax.errors import UserError, check_limits, check_unicode, visible
from qerl_jax.evaluation.load_policy import LoadedPolicy, open_policy, read_run, trusts_run
from qerl_jax.evaluation.scorers import check_scorers, run_scorers
from qerl_jax.evaluation.tasks import TaskOverrides
from qerl_jax.export import gguf_files
from qerl_jax.export.card_scores import (
    HeldOutSet,
    Probe,
    add_divergence,
    add_score,
    add_trained_scores,
    make_probe,
    open_held_out_set,
)
from qerl_jax.export.gguf_files import DENSE
from qerl_jax.export.merge import (
    calibrated_merge,
    calibration_windows,
    merged_layers,
    norm_retention,
)
from qerl_jax.export.model_card import (
    FORMAT_NAMES,
    Card,
    base_card,
    divergence_table,
    model_card,
    retention_table,
    serve_lines,
)
from qerl_jax.export.push import check_name, check_names_no_folder, check_push, push
from qerl_jax.policy.layers.kinds import PACKED
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.trainable import checksum
from qerl_jax.run.folder import RunFolder
from qerl_jax.system import json_file
from qerl_jax.system.command import command_name
from qerl_jax.system.jsonl import read_number
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import check_folder, check_inside
from qerl_jax.system.staging import check_free, scratch_of, staged_folder
from qerl_jax.weights import names, peft
from qerl_jax.weights.load import LoadedModel, load
from qerl_jax.weights.model_source import base_name
from qerl_jax.weights.save import (
    checkpoint_tensors,
    companion_files,
    fill_checkpoint,
    is_nested,
    write_files,
)
from qerl_jax.weights.save_gguf import KINDS

FORMATS = ("peft", "merged", "nvfp4", "gguf")
ONTO = ("trained", "bf16")
CALIBRATION = ("none", "gptq")


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """What to export, and how.

    Attributes:
        source: run folder or PEFT adapter folder.
        format: format of the export: 'peft', 'merged', 'nvfp4' or 'gguf'.
        out: folder to write; '' is RUN/exports/FORMAT.
        adapter: adapter to export, as in `open_policy`.
        base: model to load instead of the one that the source names, as in `open_policy`.
        base_format: format of the base under the adapter, as `format` of `open_policy`.
        onto: weights that the update is merged into. 'trained' are the weights that the adapter was
            trained on; 'bf16' are the weights of the same model before quantization. '' is
            'trained' for the format 'merged' and with `calibration`; for 4 bits it is else 'bf16'
            if such weights exist.
        merge: number format of one merged GGUF file: 'q8_0', 'bf16', 'mxfp4' or 'nvfp4'. '' writes
            the adapter and its base instead.
        dense: number format, 'q8_0' or 'bf16', of the weights of a GGUF file that are in no other:
            the embedding, the head, and what llama.cpp cannot run in NVFP4.
        calibration: 'gptq' rounds the merged model to NVFP4 by GPTQ, on completions of training
            prompts by the trained policy; 'none' rounds to the nearest.
        with_base: whether the NVFP4 base is also written, next to the adapter, as OUT-base.
        score_problems: number of held-out problems of the run to score on; None is all of them, if
            there are any; 0 runs no policy at all.
        base_name: hub id under which others get the base, where this machine has it as a folder;
            '' is the name of the base.
        push: repository of the Hugging Face hub to upload to, USER/NAME; '' uploads nothing. A base
            goes to USER/NAME-base.
        public: whether everyone may see the repository.
        judge: import path or URL of the reward that scores, instead of the run's.
        token_env: names of environment variables with the token for a URL, as in `TaskOverrides`.
        trust: whether the reward that a run of another person names is called, and its folder
            becomes the user's own.
    """

    source: str
    format: str
    out: str = ""
    adapter: str = ""
    base: str = ""
    base_format: str = ""
    onto: str = ""
    merge: str = ""
    dense: str = "q8_0"
    calibration: str = "none"
    with_base: bool = False
    score_problems: int | None = None
    base_name: str = ""
    push: str = ""
    public: bool = False
    judge: str = ""
    token_env: Sequence[str] = ()
    trust: bool = False


def export(config: ExportConfig) -> Path:
    """Writes an export; its folder appears complete or not at all.

    Args:
        config: what to export, and how.

    Returns:
        The folder.

    Raises:
        UserError: a setting is invalid, the policy cannot be loaded or exported in this format, or
            the folder exists.
    """
    _validate(config)
    _check_source(config)
    out = _out_folder(config)
    base_out = out.with_name(f"{out.name}-base") if config.with_base else None
    for folder in (user_path(config.source).resolve(), out):  # The files of an export name them.
        check_unicode(str(folder), ascii(str(folder)))
    for folder in filter(None, (out, base_out)):
        check_inside(user_path(config.source), folder)
        check_free(folder)
        check_folder(scratch_of(folder))
    repositories = [config.push, *([_base_name(config.push)] if base_out else [])]
    if config.push:
        check_push(repositories, public=config.public)
    config = _with_trust(config)
    policy = _open(config, config.base_format)
    _check_policy(config, policy)
    if config.format == "peft":
        card = _export_adapter(config, policy, out, base_out)
    elif config.format == "gguf" and not config.merge:
        card = _export_gguf_pair(config, policy, out)
    else:
        card = _export_model(config, policy, out)
    if card.retention:
        print(
            f"the part of the update that rounding keeps:\n{retention_table(card.retention)}",
            flush=True,
        )
    if card.divergences:
        print(f"KL of the trained policy to:\n{divergence_table(card.divergences)}", flush=True)
    print(visible(f"{out}: complete" if base_out is None else f"{out}, {base_out}: complete"))
    if config.push:
        local_folders = [user_path(config.source), policy.base.path, out]
        for folder, name in zip(filter(None, (out, base_out)), repositories, strict=True):
            check_names_no_folder(folder, name, local_folders)
        if base_out is not None:
            print(push(base_out, _base_name(config.push), public=config.public), flush=True)
        print(push(out, config.push, public=config.public), flush=True)
    print(visible("\n".join(serve_lines(card))), flush=True)
    return out


def _with_trust(config: ExportConfig) -> ExportConfig:
    """Returns the config with `trust` for a run that is the user's own, or is adopted.

    Raises:
        UserError: the run names a reward or a token that the command does not allow.
    """
    source = user_path(config.source)
    run = read_run(source)
    trusted = trusts_run(source, run, trust=config.trust)
    if run is not None and config.score_problems != 0:
        overrides = {"token_env": ",".join(config.token_env), "format_scorer": ""}
        overrides |= {"scorer": config.judge} if config.judge else {}
        try:
            check_scorers(run_scorers(run["config"]), overrides, trusted=trusted)
        except UserError as error:
            raise UserError(f"{error}; --score-problems=0 exports without scores") from error
    return dataclasses.replace(config, trust=trusted)


def _open_held_out(config: ExportConfig, policy: LoadedPolicy) -> HeldOutSet | None:
    overrides = TaskOverrides(
        scorer=(config.judge,) if config.judge else (),
        format_scorer=("",),
        token_env=config.token_env,
    )
    return open_held_out_set(
        policy,
        config.score_problems,
        user_path(config.source),
        overrides=overrides,
        trusted=config.trust,
    )


def _base_name(name: str) -> str:
    """The repository of the base of an adapter that is uploaded as `name`."""
    return f"{name}-base"


def _validate(config: ExportConfig) -> None:
    if config.format not in FORMATS:
        raise UserError(f"--format={config.format}: must be one of {', '.join(FORMATS)}")
    if config.onto not in ("", *ONTO):
        raise UserError(f"--onto={config.onto}: must be one of {', '.join(ONTO)}")
    if config.score_problems is not None:
        check_limits({"--score-problems": (config.score_problems, 0)})
    if config.base_name:
        check_name("--base-name", config.base_name)
    if config.public and not config.push:
        raise UserError("--public: nothing is uploaded without --push=USER/NAME")
    in_gguf = config.format == "gguf"
    merges = config.merge if in_gguf else config.format != "peft"
    if config.onto and not merges:
        raise UserError(
            f"--onto={config.onto}: --format={config.format} merges nothing; leave it out"
        )
    for option, value, choices in (
        ("merge", config.merge, ("", *KINDS)),
        ("dense", config.dense, DENSE),
        ("calibration", config.calibration, CALIBRATION),
    ):
        if value not in choices:
            others = "; llama-quantize makes others of bf16" if option == "merge" else ""
            raise UserError(
                f"--{option}={value}: must be one of {', '.join(filter(None, choices))}{others}"
            )
    if config.merge and not in_gguf:
        raise UserError(f"--merge={config.merge}: it is a form of --format=gguf; leave it out")
    if config.dense != DENSE[0] and not in_gguf:
        raise UserError(f"--dense={config.dense}: it is a form of --format=gguf; leave it out")
    if config.calibration != "none" and number_format(config) != "nvfp4":
        raise UserError(
            f"--calibration={config.calibration}: it merges into 4 bits; pass --format=nvfp4, or "
            "--format=gguf --merge=nvfp4"
        )
    if config.format != "peft" and config.with_base:
        raise UserError(f"--with-base: --format={config.format} needs no base; leave it out")


def _check_source(config: ExportConfig) -> None:
    folder = user_path(config.source)
    is_model = (folder / "config.json").exists()  # refused later, with what exports it
    if folder.is_dir() and not is_model and not (folder / peft.CONFIG_FILE).exists():
        raise UserError(f"{config.source} is neither a run nor a PEFT adapter; pass one of them")


def _out_folder(config: ExportConfig) -> Path:
    if config.out:
        return user_path(config.out)
    run = RunFolder(user_path(config.source))
    if not run.path.exists():
        raise UserError(f"{config.source}: there is no such folder; pass a run or a PEFT adapter")
    if read_run(run.path) is None:  # Other trainers make folders of checkpoints, too.
        raise UserError(f"{config.source} is not a run folder: say where to write, --out=FOLDER")
    form = f"-{config.merge}" if config.merge else ""
    form += "-gptq" if config.calibration == "gptq" else ""
    return run.exports / f"{config.format}{form}"


def number_format(config: ExportConfig) -> str:
    """The number format of a merged model; '' for an export that merges nothing."""
    return {"merged": "bf16", "nvfp4": "nvfp4", "gguf": config.merge}.get(config.format, "")


def _check_policy(config: ExportConfig, policy: LoadedPolicy) -> None:
    if names.interleaves(policy.base.config) and number_format(config) not in ("", "bf16"):
        raise UserError(
            f"--format={config.format}: a {policy.base.config.model_type} is exported by "
            "--format=peft, or by --format=merged, where experts in MXFP4 keep their bytes"
        )
    trains_all = _trains_all(policy) and config.adapter != "none"
    if policy.lora is None and not trains_all:
        raise UserError(
            f"{config.source}: there is no adapter to export; to write a model in NVFP4, use "
            f"{command_name('quantize')} MODEL FOLDER"
        )
    if trains_all and not number_format(config):
        raise UserError(
            f"{config.source}: all parameters were trained and there is no adapter: export the "
            "model with --format=merged or --format=nvfp4"
        )
    if config.calibration == "gptq":
        reasons = (
            ("all its parameters were trained", trains_all),
            ("it is no run with prompts", policy.run is None),
            ("its adapter changes routed experts, which GPTQ leaves", _adapts_experts(policy)),
        )
        reason = next((reason for reason, applies in reasons if applies), "")
        if reason:
            raise UserError(
                f"--calibration=gptq: {config.source}: {reason}; export it with --format=merged, "
                f"and calibrate that: {command_name('quantize')} FOLDER OUT --calibrate=TEXT"
            )
    base = policy.base
    if config.with_base and base.format != "nvfp4":
        raise UserError(
            f"--with-base: the base is {base.source} in {FORMAT_NAMES[base.format]}; "
            "there is no NVFP4 base to write; leave it out"
        )
    local = Path(base.source).is_absolute() and not config.base_name
    if config.push and config.format == "peft" and local and not config.with_base:
        raise UserError(
            f"--push={config.push}: the base of the adapter is {base.source}, a path of this "
            "machine; pass the hub id that it has, --base-name=USER/NAME, or upload it too, "
            "--with-base"
        )
    if config.push and config.format == "peft" and base.calibrated and not config.with_base:
        raise UserError(
            f"--push={config.push}: the adapter belongs to the calibrated weights in "
            f"{base.calibrated}, which no hub has; upload them too, --with-base"
        )
    if config.onto == "bf16" and base.packed:
        raise UserError(
            f"--onto=bf16: {base.path} holds {FORMAT_NAMES[base.format]} weights; leave it out, "
            "or pass the unquantized model as --base=MODEL"
        )


def _trains_all(policy: LoadedPolicy) -> bool:
    """Whether it is of a run that trained all parameters, and so has no adapter."""
    settings = {} if policy.run is None else policy.run["config"].get("train", {})
    return settings.get("parameters") == "full"


def _adapts_experts(policy: LoadedPolicy) -> bool:
    return policy.lora_config is not None and policy.lora_config.expert_rank > 0


def _export_adapter(
    config: ExportConfig, policy: LoadedPolicy, out: Path, base_out: Path | None
) -> Card:
    assert policy.lora_config is not None
    base, trainable = policy.base, policy.trainable
    assert trainable is not None
    base_model = config.base_name or base.source
    if base_out is not None:
        # The trained norms go into the base, so that vLLM accepts the adapter.
        trainable = dataclasses.replace(trainable, params={})
        base_model = _base_name(config.push) if config.push else str(base_out.resolve())
    card = _make_card(config, policy, out, base_out, trained_norms=bool(trainable.params))
    if base_out is not None:
        card.norms = _norms(policy)
        card.retention |= norm_retention(base.params, policy.model.params)
    held_out = _open_held_out(config, policy)
    if held_out is not None:
        add_trained_scores(card, held_out, policy)
        for format in ("nvfp4", "bf16"):
            if format != base.format and not base.packed:
                other = _open(config, format)
                name = f"{FORMAT_NAMES[format]} base + adapter"
                add_score(card, held_out, name, other.model, other.lora)
    base_files = _base_files(base)
    # transformers loads an adapter folder with a config.json as a whole model.
    files = {name: text for name, text in base_files.items() if name != "config.json"}
    files["README.md"] = model_card(card).encode()
    with contextlib.ExitStack() as folders:
        staged = folders.enter_context(staged_folder(out))
        if base_out is not None:
            fill_checkpoint(
                folders.enter_context(staged_folder(base_out)),
                checkpoint_tensors(policy.model.params, base.config, norms=card.norms),
                files=base_files | {"README.md": base_card(card).encode()},
            )
        # A base that is written here is the text model alone.
        nested = base_out is None and is_nested(base.path)
        peft.fill_peft_adapter(
            staged,
            trainable,
            policy.lora_config,
            base_model=base_model,
            nested=nested,
            stacked=card.stacked_experts,
            interleaved=names.interleaves(base.config),
        )
        written = peft.load_peft_adapter(staged, base.config, policy.lora_config)
        if checksum(written) != checksum(trainable):
            raise UserError(
                f"{out}: the adapter that was written is not the one that was to be exported; "
                "check the disk, and export it again"
            )
        write_files(staged, files)
    return card


def _export_gguf_pair(config: ExportConfig, policy: LoadedPolicy, out: Path) -> Card:
    """Writes the adapter and its base for llama.cpp; the trained norms go into the base."""
    card = _make_card(config, policy, out, None)
    card.norms = _norms(policy)
    card.retention |= norm_retention(policy.base.params, policy.model.params)
    held_out = _open_held_out(config, policy)
    if held_out is not None:
        add_trained_scores(card, held_out, policy)
    probe = make_probe(policy, held_out) if config.score_problems != 0 else None
    with staged_folder(out) as staged:
        files = gguf_files.fill_pair(staged, policy, dense=config.dense, name=card.name)
        card.files, card.notes = files.names, files.notes
        if probe is not None:
            written = load(str(staged / files.names[0]), format="stored")
            add_divergence(card, probe, "these files", written, policy.lora)
            if held_out is not None:
                add_score(card, held_out, "these files", written, policy.lora)
        (staged / "README.md").write_text(model_card(card), encoding="utf-8")
    return card


def _export_model(config: ExportConfig, policy: LoadedPolicy, out: Path) -> Card:
    form, calibrates = number_format(config), config.calibration == "gptq"
    packed = form in ("nvfp4", "mxfp4")
    # Weights on the 4-bit grid would be rounded back to their old values.
    rounds_back = packed and not calibrates and not policy.base.packed
    onto = config.onto or ("bf16" if rounds_back else "trained")
    card = _make_card(config, policy, out, None, onto=onto)
    card.norms = _norms(policy)
    tokens = calibration_windows(policy, trusted=config.trust) if calibrates else None
    held_out = _open_held_out(config, policy)
    if held_out is not None:
        add_trained_scores(card, held_out, policy)
    probe = make_probe(policy, held_out) if config.score_problems != 0 else None
    target = policy
    if onto == "bf16" and policy.base.format != "bf16":
        target = _open(config, "bf16")
        if held_out is not None:
            add_score(card, held_out, "bf16 base + adapter", target.model, target.lora)
    card.retention |= norm_retention(target.base.params, target.model.params)
    if tokens is None:
        layers = merged_layers(target.model, policy.lora, format=form, retention=card.retention)
    else:
        assert policy.lora is not None
        layers = calibrated_merge(target.model, policy.lora, tokens, retention=card.retention)
    params = {**target.model.params, "layers": layers}
    with staged_folder(out) as staged:
        written = staged
        if config.format == "gguf":
            files = gguf_files.fill_merged(
                staged, params, policy, merge=config.merge, dense=config.dense, name=card.name
            )
            card.files, card.notes = files.names, files.notes
            written = staged / files.names[0]
        else:
            fill_checkpoint(
                staged,
                checkpoint_tensors(params, target.model.config, norms=card.norms),
                files=companion_files(
                    target.base, packed=packed, trained=True, blocks=_keeps_blocks(policy)
                ),
            )
        if probe is not None:
            _add_export_scores(card, written, policy, held_out, probe)
        (staged / "README.md").write_text(model_card(card), encoding="utf-8")
    return card


def _keeps_blocks(policy: LoadedPolicy) -> bool:
    """Whether a merged model keeps the experts of its base as they are, in MXFP4."""
    in_blocks = names.interleaves(policy.base.config) and policy.base.format == "mxfp4"
    return in_blocks and not _adapts_experts(policy)


def _norms(policy: LoadedPolicy) -> str:
    """Returns the dtype of the norms in a written model: float32 where they were trained."""
    # Without an adapter, all parameters were trained.
    are_trained = policy.trainable is None or policy.trainable.params
    return "float32" if are_trained else ""


def _add_export_scores(
    card: Card, folder: Path, policy: LoadedPolicy, held_out: HeldOutSet | None, probe: Probe
) -> None:
    """Adds the score of the written model, and the KL of the trained policy to it, to the card."""
    exported = load(str(folder), format="stored")
    if held_out is not None:
        add_score(card, held_out, "this model", exported, None)
    if policy.lora is not None:
        add_divergence(card, probe, f"{FORMAT_NAMES[policy.base.format]} base", policy.base)
    add_divergence(card, probe, "this model", exported)


def _make_card(
    config: ExportConfig,
    policy: LoadedPolicy,
    out: Path,
    base_out: Path | None,
    *,
    onto: str = "trained",
    trained_norms: bool = False,
) -> Card:
    source, base, steps = user_path(config.source), policy.base, None
    folder, weights = RunFolder(source), ""
    if folder.summary.exists():
        steps = json_file.read_object(folder.summary).get("steps")
    elif policy.run is not None:
        print(f"{config.source}: the run is not finished; this is what it has so far")
    if policy.run is not None:
        weights = _weights(policy, folder)
        print(visible(f"{config.source}: exporting {weights}"), flush=True)
    source_name = base.source if policy.run is None else policy.run["config"]["model"]["source"]
    # The base of a policy whose parameters were all trained is that policy itself.
    origin = base_name(source_name) if _trains_all(policy) else base.source
    # A card that is uploaded names no folder of this machine.
    hides = config.push and Path(origin).is_absolute()
    public = config.base_name or (Path(origin).name if hides else origin)
    served = public if base.format == "bf16" or base.packed else str(base.calibrated or "")
    if base_out is not None:
        served = _base_name(config.push) if config.push else str(base_out)
    read_from = config.base or source_name
    return Card(
        name=source.resolve().name,
        format=config.format,
        folder=config.push or str(out),
        base=public,
        base_format=base.format,
        source=public if hides or config.base_name else read_from,
        served_base=served,
        onto=onto,
        rank=0 if policy.lora_config is None else policy.lora_config.rank,
        expert_rank=0 if policy.lora_config is None else policy.lora_config.expert_rank,
        stacked_experts=names.stacks_experts(base.config),
        trained_norms=trained_norms,
        run=policy.run,
        steps=steps,
        weights=weights,
        evaluate=_evaluate_command(config, out, base_out),
        number_format=number_format(config),
        calibrated=config.calibration == "gptq",
        uploaded=bool(config.push),
    )


def _weights(policy: LoadedPolicy, folder: RunFolder) -> str:
    """Says which weights of a run are exported: 'the best adapter, of step 4'."""
    kind = "model" if policy.adapter is None else "adapter"
    path = policy.adapter or policy.model.path
    if path in (folder.adapter(best=True), folder.model(best=True)):
        step = f", of step {read_number(folder.best, 'step'):g}" if folder.best.exists() else ""
        return f"the best {kind}{step}"
    if path in (folder.adapter(), folder.model()):
        return f"the last {kind}"
    return f"the {kind} {path.name}"


def _evaluate_command(config: ExportConfig, out: Path, base_out: Path | None) -> str:
    """Returns the command that repeats the score of an export of a run."""
    if config.format == "gguf":
        return ""  # The problems are those of a run, whose model no file replaces.
    # A card that is uploaded names no folder of this machine.
    run, folder, base = ("RUN", "FOLDER", "BASE") if config.push else (config.source, out, base_out)
    flags = [f"--adapter={folder}"]
    if config.format != "peft":
        flags += ["--format=stored", "--dtype=bfloat16"]
    elif base_out is not None:
        flags += [f"--base={base}"]
    flags += [f"--judge={config.judge}"] if config.judge else []
    flags += [f"--limit={config.score_problems}"] if config.score_problems else []
    return f"{command_name('evaluate')} {shlex.join([str(run), *flags])}"


def _open(config: ExportConfig, format: str) -> LoadedPolicy:
    return open_policy(config.source, adapter=config.adapter, base=config.base, format=format)


def _base_files(base: LoadedModel) -> dict[str, bytes]:
    """Returns the companion files of a base for the format that it has."""
    packed = base.format == "nvfp4"
    dense = [
        tensor.removesuffix(".weight")
        for number, layer in enumerate(base.params["layers"])
        for array, tensors in names.stored_tensors(base.config, number).items()
        if array in PACKED and not isinstance(layer[array], QuantTensor)
        for tensor in tensors
    ]
    return companion_files(base, packed=packed, ignore=dense if packed else (), trained=True)
