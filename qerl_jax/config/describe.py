"""A config as text: a line per field, which the command line reads again, or what fields mean."""

import difflib
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.config.fields import FIELDS, Field, LinkedDefault, ModelDefault, Section, row_of
from qerl_jax.errors import UserError
from qerl_jax.system.command import name_commands

_TABLES = ("data.options", "data.chat_template_args")
_COLUMNS = 100
SECTIONS = frozenset(row.name for row in FIELDS if isinstance(row, Section))
# What happens to a field when a run is resumed, see `fields.Field`.
_RESUME = {
    "memory": "A resumed run may have another value: it moves only memory or time.",
    "source": "A resumed run may have another value, for the same weights and problems.",
    "free": "A resumed run may have another value.",
}
# What TRL and transformers call a field, where the name is not like that of the field.
_OTHER_NAMES = {
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adam_epsilon": "optimizer.eps",
    "beta": "rl.kl_coef",
    "bf16": "model.dtype",
    "dataset_name": "data.source",
    "delta": "rl.dual_clip",
    "epsilon": "rl.clip_low",
    "eval_steps": "eval.every",
    "generation_batch_size": "rollout.prompts_per_step",
    "generation_kwargs": "rollout.stop",
    "gradient_checkpointing": "train.recompute",
    "importance_sampling_level": "rl.loss",
    "lr_scheduler_type": "optimizer.schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "steps",
    "max_tool_calling_iterations": "environment.max_turns",
    "model_init_kwargs": "model.dtype",
    "model_name_or_path": "model.source",
    "multi_objective_aggregation": "rl.advantage",
    "num_generations": "rollout.group_size",
    "num_iterations": "rl.updates_per_rollout",
    "num_train_epochs": "steps",
    "optim": "optimizer.name",
    "optimizers": "optimizer.name",
    "pad_to_multiple_of": "train.buffer_tokens",
    "peft_config": "lora.rank",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "quantization_config": "model.format",
    "report_to": "log.wandb",
    "reward_funcs": "rewards.NAME.function",
    "reward_weights": "rewards.NAME.weight",
    "rollout_func": "environment.function",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "rl.advantage_scale",
    "steps_per_generation": "rl.mini_batches",
    "teacher_model_name_or_path": "teacher.source",
    "tools": "environment.function",
    "train_dataset": "data.path",
    "use_bias_correction_kl": "rl.kl_grad",
    "vllm_gpu_memory_utilization": "rollout.kv_cache_bytes",
    "vllm_importance_sampling_cap": "aqn.tis_cap",
    "vllm_importance_sampling_clip_max": "aqn.tis_cap",
    "vllm_importance_sampling_correction": "aqn.correction",
    "vllm_importance_sampling_mode": "aqn.correction",
    "vllm_tensor_parallel_size": "mesh.tensor",
}
# Fields of TRL that no field here stands for, and why.
_LEFT_OUT = {
    "repetition_penalty": "it changes a token's probability by what was sampled before, which an "
    "update does not repeat, so that it would train another policy than the one that sampled; "
    "rollout.min_p, rollout.top_p and rollout.top_k leave unlikely tokens out",
}


def describe_config(config: ConfigDict) -> str:
    """The fields of a config as sorted lines `name = value`.

    A value is written as a flag takes it: `aqn.form = additive` is --config.aqn.form=additive. A
    table of `_TABLES` is one line, as its keys depend on the task or the model.
    """
    fields = sorted(_fields(config.to_dict(), ""))
    return "".join(f"{name} = {as_flag(name, value)}\n" for name, value in fields)


def describe_changes(config: ConfigDict, preset: ConfigDict) -> str:
    """The fields in which a config differs from its preset, as lines `name = value`.

    `preset` is the config without what the command line sets.
    """
    before = dict(_fields(preset.to_dict(), ""))
    fields = sorted(_fields(config.to_dict(), ""))
    lines = [
        f"{name} = {as_flag(name, value)}"
        + (f" (preset: {as_flag(name, before[name])})" if name in before else "")
        for name, value in fields
        if name not in before or before[name] != value
    ]
    same = len(fields) - len(lines)
    lines.append(f"{same} fields as in the preset, which --print_config prints")
    return "".join(f"{line}\n" for line in lines)


def as_flag(field: str, value: Any) -> str:
    """A value in the form in which --config.FIELD=VALUE takes it.

    Raises:
        UserError: the command line has no form for such a value.
    """
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value
        case float():
            return repr(float(value))
        case int() | dict():
            return repr(value)
        case tuple() | list():
            return repr(tuple(value))
    raise UserError(f"{field}={value!r}: a {type(value).__name__} cannot be a flag")


def explain(name: str, config: ConfigDict) -> str:
    """What a field means and may be, with its value in a config.

    `name` is that of a field or of a section, or 'all'.

    Raises:
        UserError: there is no such field.
    """
    rows = [row for row in FIELDS if name == "all" or f"{row.name}.".startswith(f"{name}.")]
    if not rows and (row := row_of(name)):  # the key of an entry, such as 'rewards.short.weight'
        rows = [row]
    if not rows:
        if reason := why_left_out(name):
            raise UserError(f"--explain={name}: there is no such field: {reason}")
        matches = similar_fields(name)
        hint = f"did you mean {', '.join(matches)}? " if matches else ""
        raise UserError(
            f"--explain={name}: there is no such field; {hint}--explain=all lists all fields, "
            "docs/from_trl.md has those of TRL"
        )
    return name_commands("\n".join(_explain_row(row, config) for row in rows))


def why_left_out(name: str) -> str:
    """Returns why there is no such field, for one that users of TRL look for; else ''."""
    return _LEFT_OUT.get(name.rpartition(".")[2], "")


def similar_fields(name: str) -> list[str]:
    """Returns at most three fields that a text may mean, the likeliest first.

    Args:
        name: a text such as 'optimizer.lr', 'lr' or 'rl.clip_hgh': the beginnings of the words of a
            field stand for it, and so does its name in TRL, such as 'num_generations'.
    """
    section, _, last = name.rpartition(".")
    if last in _OTHER_NAMES:
        return [_OTHER_NAMES[last]]
    fields = [row.name for row in FIELDS if isinstance(row, Field) and "NAME" not in row.name]
    ends = {field: field.rpartition(".")[2] for field in fields}
    same = [field for field in fields if ends[field] == last]
    short = [field for field in fields if "".join(w[0] for w in ends[field].split("_")) == last]
    inside = [field for field in fields if field.rpartition(".")[0] == section]
    close = difflib.get_close_matches(name, fields, cutoff=0.5)
    words = difflib.get_close_matches(last, [ends[field] for field in inside], cutoff=0.5)
    close += [field for field in inside if ends[field] in words]
    first, others = [*same, *short], close
    if section and any(field in inside for field in first):
        first = [field for field in first if field in inside]
    return list(dict.fromkeys(first or others))[:3]


def _explain_row(row: Section | Field, config: ConfigDict) -> str:
    if isinstance(row, Section):
        title, lines = f"{row.name}:", [row.help]
    else:
        title, lines = row.name, [row.help, *describe_row(row)]
        value: Any = config
        for part in row.name.split("."):
            value = value.get(part) if isinstance(value, ConfigDict) else None
        if value is not None and not (isinstance(value, ConfigDict) and row.name not in _TABLES):
            value = value.to_dict() if isinstance(value, ConfigDict) else value
            title = f"{row.name} = {as_flag(row.name, value)}"
    indent = {"initial_indent": "    ", "subsequent_indent": "    "}
    texts = [textwrap.fill(line, _COLUMNS, **indent) for line in lines if line]
    return "\n".join([title, *texts, ""])


def describe_row(row: Field) -> list[str]:
    """What a field may be, when it is read and whether a resumed run may change it."""
    lines = [f"Default: {describe_default(row)}."]
    if row.choices:
        choices = ", ".join(map(repr, row.choices))
        each = "Items: " if isinstance(row.default, tuple) else "One of "
        lines.append(f"{each}{choices}{', or a function' if row.function else ''}.")
    if row.limits:
        lower, *upper = row.limits
        has_upper = upper and upper[0] < math.inf
        lines.append(f"From {lower:,} to {upper[0]:,}." if has_upper else f"At least {lower:,}.")
    if row.read_if:
        lines.append(f"Needs {row.read_if.text}.")
    if row.resume != "fixed" and not row.fixed_if:
        lines.append(_RESUME[row.resume])
    return lines


def describe_default(row: Field) -> str:
    """The default of a field in words."""
    match row.default:
        case ModelDefault():
            return row.default.text
        case LinkedDefault():
            return f"the value of {row.default.field}"
        case dict() if not row.default:
            return "no entry"
        case _:
            return repr(row.default)


def _fields(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        path = prefix + name
        if isinstance(value, dict) and path not in _TABLES:
            yield from _fields(value, f"{path}.")
        else:
            yield path, value
