"""A trained policy as a folder for other tools.

    peft      the adapter, for PEFT and vLLM, over its base
    merged    one bfloat16 model: the weights that were trained on, dequantised, plus the update
    nvfp4     the same rounded to 4 bits again, which keeps only part of the update

An adapter that was trained on a quantised base belongs to that base: it was trained with its
rounding errors. So an export says which base that is, how the policy scores on it and on the
unquantised weights, and how to serve it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from qerl_jax.data import Problem, Prompt, encode_prompts
from qerl_jax.errors import UserError, check_limits
from qerl_jax.evaluation.evaluate import greedy_accuracy
from qerl_jax.evaluation.load_policy import Policy, open_policy
from qerl_jax.evaluation.tasks import Overrides, make_tasks
from qerl_jax.export.merge import completion_logprobs, mean_kl, merged_layers, norms_kept
from qerl_jax.export.model_card import (
    FORMAT_NAMES,
    Card,
    divergence_table,
    kept_table,
    model_card,
    serve_lines,
)
from qerl_jax.policy.lora import FUSED, Lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.rl.rewards import resolve
from qerl_jax.rollout.engine import SamplingConfig, generate
from qerl_jax.run.folder import RunFolder
from qerl_jax.run.terminal import LiveLine
from qerl_jax.weights import json_file, names, peft
from qerl_jax.weights.load import LoadedModel, load
from qerl_jax.weights.save import checkpoint_tensors, companion_files, fill_checkpoint
from qerl_jax.weights.staging import check_free, staged_folder

FORMATS = ("peft", "merged", "nvfp4")
ONTO = ("trained", "bf16")

_PROBES = 8
_PROBE_TOKENS = 64
# Asked where there are no problems of a run.
_QUESTIONS = (
    "What is 17 + 25?",
    "Tom has 12 apples and gives 5 of them to Ann. How many are left?",
    "A train goes 60 miles in an hour. How far does it go in three and a half hours?",
    "What is the capital of France?",
)


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """What to export.

    Attributes:
        source: a run folder or a PEFT adapter folder.
        format: 'peft', 'merged' or 'nvfp4'.
        out: the folder to write; '' is RUN/exports/FORMAT.
        adapter: see `restore.open_policy`.
        base: see `restore.open_policy`.
        base_format: what the base was in while the adapter was trained, see `restore.open_policy`.
        onto: what the update is merged into: 'trained', the weights as they were trained on;
            'bf16', those of the same model before they were quantised; or '', the first for
            'merged', and for 'nvfp4' the second where there are such weights.
        with_base: write the NVFP4 base beside the adapter too, as OUT-base.
        score_problems: how many of the problems that the run held out to score on; None is all of
            them, where there are any; with 0 no policy is run at all.
    """

    source: str
    format: str
    out: str = ""
    adapter: str = ""
    base: str = ""
    base_format: str = ""
    onto: str = ""
    with_base: bool = False
    score_problems: int | None = None


@dataclasses.dataclass(frozen=True)
class _Exam:
    """Problems that a run held out, and `accuracy(model, lora, on_progress=...)` on them."""

    prompts: list[Prompt]
    accuracy: Callable[..., float]


@dataclasses.dataclass(frozen=True)
class _Probe:
    """Greedy completions of the trained policy, and its log-probabilities [C, V] there."""

    prompts: list[Sequence[int]]
    completions: list[list[int]]
    logprobs: list[np.ndarray]


def export(config: ExportConfig) -> Path:
    """Writes an export; its folder appears complete or not at all.

    Returns:
        The folder.

    Raises:
        UserError: something asked for cannot be done.
    """
    _check(config)
    out = _out_folder(config)
    base_out = out.with_name(f"{out.name}-base") if config.with_base else None
    for folder in filter(None, (out, base_out)):
        check_free(folder)
    policy = _open(config, config.base_format)
    _check_policy(config, policy)
    if config.format == "peft":
        card = _export_adapter(config, policy, out, base_out)
    else:
        card = _export_model(config, policy, out)
    if card.kept:
        print(f"what rounding keeps of the update:\n{kept_table(card.kept)}", flush=True)
    if card.divergences:
        print(f"KL of the trained policy to:\n{divergence_table(card.divergences)}", flush=True)
    print(f"{out}: complete" if base_out is None else f"{out}, {base_out}: complete")
    print("\n".join(serve_lines(card)), flush=True)
    return out


def _check(config: ExportConfig) -> None:
    if config.format not in FORMATS:
        raise UserError(f"--format={config.format}: must be one of {', '.join(FORMATS)}")
    if config.onto not in ("", *ONTO):
        raise UserError(f"--onto={config.onto}: must be one of {', '.join(ONTO)}")
    if config.score_problems is not None:
        check_limits({"--score-problems": (config.score_problems, 0)})
    if config.format == "peft" and config.onto:
        raise UserError(f"--onto={config.onto}: --format=peft merges nothing; leave it out")
    if config.format != "peft" and config.with_base:
        raise UserError(f"--with-base: --format={config.format} needs no base; leave it out")


def _out_folder(config: ExportConfig) -> Path:
    if config.out:
        return Path(config.out).expanduser()
    run = RunFolder(Path(config.source).expanduser())
    if not run.checkpoints.is_dir():
        raise UserError(f"{config.source} is no run folder: say where to write, --out=FOLDER")
    return run.exports / config.format


def _check_policy(config: ExportConfig, policy: Policy) -> None:
    all_trained = policy.lora is None and policy.run is not None and config.adapter != "none"
    if policy.lora is None and not all_trained:
        raise UserError(
            f"{config.source}: there is no adapter to export; to write a model in NVFP4 use "
            "python -m experiments.quantize MODEL FOLDER"
        )
    if all_trained and config.format == "peft":
        raise UserError(
            f"{config.source}: all parameters were trained, there is no adapter: export the model "
            "with --format=merged or --format=nvfp4"
        )
    base = policy.base
    if config.with_base and base.format != "nvfp4":
        raise UserError(
            f"--with-base: the policy was trained on {base.source} in {FORMAT_NAMES[base.format]}, "
            "there is no NVFP4 base to write; leave it out"
        )
    if config.onto == "bf16" and base.packed:
        raise UserError(
            f"--onto=bf16: {base.path} holds NVFP4 weights alone; leave it out, or name the "
            "unquantised model with --base=MODEL"
        )


def _export_adapter(config: ExportConfig, policy: Policy, out: Path, base_out: Path | None) -> Card:
    assert policy.adapter is not None
    assert policy.lora_config is not None
    base = policy.base
    trained = peft.load_peft_adapter(policy.adapter, base.config, policy.lora_config)
    base_model = base.source
    if base_out is not None:
        # The base has the trained norms then, and the adapter is one that vLLM takes.
        trained = dataclasses.replace(trained, params={})
        base_model = str(base_out.resolve())
    card = _new_card(config, policy, out, base_out, trained_norms=bool(trained.params))
    if base_out is not None:
        card.kept |= norms_kept(base.params, policy.model.params)
    exam = _exam(config, policy)
    if exam is not None:
        _score_trained(card, exam, policy)
        for format in ("nvfp4", "bf16"):
            if format != base.format and not (format == "bf16" and base.packed):
                other = _open(config, format)
                name = f"{FORMAT_NAMES[format]} base + adapter"
                _score(card, exam, name, other.model, other.lora)
    base_files = _base_files(base)
    # transformers takes an adapter folder with a config.json for a whole model.
    files = {name: text for name, text in base_files.items() if name != "config.json"}
    files["README.md"] = model_card(card).encode()
    with contextlib.ExitStack() as folders:
        staged = folders.enter_context(staged_folder(out))
        if base_out is not None:
            fill_checkpoint(
                folders.enter_context(staged_folder(base_out)),
                checkpoint_tensors(policy.model.params, base.config),
                files=base_files,
            )
        peft.fill_peft_adapter(staged, trained, policy.lora_config, base_model=base_model)
        for name, content in files.items():
            (staged / name).write_bytes(content)
    return card


def _export_model(config: ExportConfig, policy: Policy, out: Path) -> Card:
    packed = config.format == "nvfp4"
    # Weights that lie on the 4-bit grid are rounded back to where they were.
    onto = config.onto or ("bf16" if packed and not policy.base.packed else "trained")
    card = _new_card(config, policy, out, None, onto=onto)
    exam = _exam(config, policy)
    if exam is not None:
        _score_trained(card, exam, policy)
    probe = _probe(policy, exam) if config.score_problems != 0 else None
    target = policy
    if onto == "bf16" and policy.base.format != "bf16":
        target = _open(config, "bf16")
        if exam is not None:
            _score(card, exam, "bf16 base + adapter", target.model, target.lora)
    card.kept |= norms_kept(target.base.params, target.model.params)
    layers = merged_layers(target.model, policy.lora, packed=packed, kept=card.kept)
    with staged_folder(out) as staged:
        fill_checkpoint(
            staged,
            checkpoint_tensors({**target.model.params, "layers": layers}, target.model.config),
            files=companion_files(target.base, packed=packed),
        )
        if probe is not None:
            _judge_files(card, staged, policy, exam, probe)
        (staged / "README.md").write_text(model_card(card), encoding="utf-8")
    return card


def _judge_files(
    card: Card, folder: Path, policy: Policy, exam: _Exam | None, probe: _Probe
) -> None:
    """Scores what was just written, and how far it is from the trained policy."""
    exported = load(str(folder), format="stored")
    if exam is not None:
        _score(card, exam, "this model", exported, None)
    if policy.lora is not None:
        _diverge(card, probe, f"{FORMAT_NAMES[policy.base.format]} base", policy.base)
    _diverge(card, probe, "this model", exported)


def _new_card(
    config: ExportConfig,
    policy: Policy,
    out: Path,
    base_out: Path | None,
    *,
    onto: str = "trained",
    trained_norms: bool = False,
) -> Card:
    source, base, steps = Path(config.source).expanduser(), policy.base, None
    if (summary := RunFolder(source).summary).exists():
        steps = json_file.read_object(summary)["steps"]
    elif policy.run is not None:
        print(f"{config.source}: the run is not finished, this is its best adapter so far")
    served = base.source if base.format == "bf16" or base.packed else ""
    named = policy.base.source if policy.run is None else policy.run["config"]["model"]["source"]
    return Card(
        name=source.resolve().name,
        format=config.format,
        folder=out,
        base=base.source,
        base_format=base.format,
        source=config.base or named,
        served_base=served if base_out is None else str(base_out),
        onto=onto,
        rank=0 if policy.lora_config is None else policy.lora_config.rank,
        trained_norms=trained_norms,
        run=policy.run,
        steps=steps,
    )


def _open(config: ExportConfig, format: str) -> Policy:
    return open_policy(config.source, adapter=config.adapter, base=config.base, format=format)


def _base_files(base: LoadedModel) -> dict[str, bytes]:
    """The companions of a base in the format that it has."""
    packed = base.format == "nvfp4"
    dense = [
        names.layer_module(number, member)
        for number, layer in enumerate(base.params["layers"])
        for fused, members in FUSED.items()
        for member in members
        if not isinstance(layer[fused], QuantTensor)
    ]
    return companion_files(base, packed=packed, ignore=dense if packed else ())


# --- What the policies can do ---------------------------------------------------------------------


def _exam(config: ExportConfig, policy: Policy) -> _Exam | None:
    """What to score on; None where nothing was held out, which is said."""
    if config.score_problems == 0:
        return None
    run = None if policy.run is None else policy.run["config"]
    try:
        (task,) = make_tasks(["run"], run=run, overrides=Overrides())
    except UserError as error:
        if config.score_problems is not None:
            raise
        print(f"not scored: {error} of python -m experiments.evaluate", flush=True)
        return None
    assert run is not None
    prompts = encode_prompts(
        task.problems[: config.score_problems],
        policy.model.tokenizer,
        system_prompt=task.system_prompt,
        question_suffix=task.question_suffix,
        max_prompt_tokens=run["data"]["max_prompt_tokens"],
    )
    rollout = run["rollout"]
    accuracy = functools.partial(
        greedy_accuracy,
        problems=prompts,
        correctness=resolve(task.judge),
        time_limit=run["reward_time_limit"],
        sampling=SamplingConfig(
            max_new_tokens=task.max_new_tokens,
            max_rows=rollout["max_rows"] or rollout["prompts_per_step"] * rollout["group_size"],
            chunk_steps=rollout["chunk_steps"],
            dequantize=rollout["dequantize"],
        ),
    )
    return _Exam(prompts=prompts, accuracy=accuracy)


def _score_trained(card: Card, exam: _Exam, policy: Policy) -> None:
    name = f"{FORMAT_NAMES[policy.base.format]} base"
    if policy.lora is None:
        _score(card, exam, "the policy as trained", policy.model, None)
        return
    _score(card, exam, name, policy.base, None)
    _score(card, exam, f"{name} + adapter", policy.model, policy.lora)


def _score(card: Card, exam: _Exam, name: str, model: LoadedModel, lora: Lora | None) -> None:
    live, total = LiveLine(), len(exam.prompts)

    def on_progress(done: int, tokens: int) -> None:
        del tokens
        live.update(f"scoring {name}: {done}/{total}")

    accuracy = exam.accuracy(model, lora, on_progress=on_progress)
    live.clear()
    print(f"pass@1 {accuracy:.3f} on {total} held-out problems: {name}", flush=True)
    card.problems = total
    card.scores.append((name, accuracy))


def _probe(policy: Policy, exam: _Exam | None) -> _Probe:
    model, prompts = policy.model, _probe_prompts(policy, exam)
    rollout = generate(
        jax.random.key(0),
        model.params,
        policy.lora,
        prompts,
        config=model.config,
        sampling=SamplingConfig(max_new_tokens=_PROBE_TOKENS, temperature=0.0),
        eos_ids=model.tokenizer.eos_ids,
        pad_id=model.tokenizer.pad_id,
    )
    rows = zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)
    completions = [tokens[:length] for tokens, length in rows]
    logprobs = completion_logprobs(model, policy.lora, prompts, completions)
    return _Probe(prompts=prompts, completions=completions, logprobs=logprobs)


def _probe_prompts(policy: Policy, exam: _Exam | None) -> list[Sequence[int]]:
    if exam is not None:
        return [prompt.ids for prompt in exam.prompts[:_PROBES]]
    tokenizer = policy.model.tokenizer
    if tokenizer.chat_template is None:
        return [tokenizer.encode(question) for question in _QUESTIONS]
    data = {} if policy.run is None else policy.run["config"]["data"]
    prompts = encode_prompts(
        [Problem(question, "") for question in _QUESTIONS],
        tokenizer,
        system_prompt=data.get("system_prompt", ""),
        question_suffix=data.get("question_suffix", ""),
        max_prompt_tokens=policy.model.config.max_position,
    )
    return [prompt.ids for prompt in prompts]


def _diverge(card: Card, probe: _Probe, name: str, model: LoadedModel) -> None:
    others = completion_logprobs(model, None, probe.prompts, probe.completions)
    card.divergences.append((name, mean_kl(probe.logprobs, others)))
