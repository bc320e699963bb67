"""Validates a config: rejects at the start what would fail minutes later, or silently."""

import functools
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qerl_jax.config.fields import (
    ROWS,
    SPLIT_LOSS,
    TEACHER,
    Field,
    keys_of,
    learns_from_rewards,
    learns_from_text,
)
from qerl_jax.config.models import published_format
from qerl_jax.data.environment_config import environment_functions
from qerl_jax.data.from_config import mixture_of
from qerl_jax.errors import UserError, check_limits, check_unicode
from qerl_jax.memory.update_plan import recomputation
from qerl_jax.policy import kl_control
from qerl_jax.policy.sharding import check_mesh
from qerl_jax.rewards.from_config import check_rewards
from qerl_jax.rollout.config import has_agents, rollout_prompts
from qerl_jax.system.command import command_name
from qerl_jax.system.import_path import names_function

_WIDEST_SEQUENCE_CLIP = 0.1


def validate(config: ConfigDict) -> None:
    """Validates every value that needs no model and no data.

    Raises:
        UserError: a value is out of range, or contradicts another value.
    """
    _check_texts(config.to_dict(), "")
    rows = [row for name, row in ROWS.items() if ".NAME." not in name]
    check_limits({row.name: (_value(config, row.name), *row.limits) for row in rows if row.limits})
    if not (is_text := learns_from_text(config)):
        check_rewards(config)
    check_limits(
        {
            f"rewards.{name}.{key}": (reward[key], *row.limits)
            for name, reward in config.rewards.items()
            for key, row in keys_of("rewards").items()
            if row.limits and key in reward
        }
    )
    mixture_of(config)
    for row in rows:
        if row.choices:
            _check_choice(row, _value(config, row.name))
    if config.aqn.schedule == kl_control.SCHEDULE:
        _check_measurements(config)
    if config.rl.overlong_buffer > config.rollout.max_new_tokens:
        raise UserError(
            f"rl.overlong_buffer={config.rl.overlong_buffer} is more than "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: every completion is penalized"
        )
    if config.rl.loss == "dr_grpo" and config.rl.advantage_scale != "none":
        raise UserError(
            f"rl.loss='dr_grpo' with rl.advantage_scale={config.rl.advantage_scale!r}: Dr. GRPO "
            "does not divide by the standard deviation, pass rl.advantage_scale=none; or, for its "
            "denominator alone, rl.loss=grpo with rl.aggregation=constant"
        )
    if config.rl.loss == "dr_grpo" and config.rl.advantage == "gdpo":
        raise UserError(
            "rl.loss='dr_grpo' with rl.advantage='gdpo', which divides by standard deviations: "
            "pass rl.loss=grpo with rl.aggregation=constant for the denominator of Dr. GRPO"
        )
    clip = max(config.rl.clip_low, config.rl.clip_high)
    # The ratio of the first update is 1.
    clips = config.rl.updates_per_rollout > 1 or config.rl.mini_batches > 1
    if clips and config.rl.loss in ("gspo", "gspo_token") and clip > _WIDEST_SEQUENCE_CLIP:
        raise UserError(
            f"rl.loss={config.rl.loss!r} with rl.clip_low={config.rl.clip_low}, "
            f"rl.clip_high={config.rl.clip_high}: the ratio of a whole sequence stays so close to "
            f"1 that nothing beyond {_WIDEST_SEQUENCE_CLIP} is ever clipped; the paper has "
            "rl.clip_low=3e-4, rl.clip_high=4e-4"
        )
    if config.init_from and config.lora.init:
        raise UserError(
            f"init_from={config.init_from} with lora.init={config.lora.init}: both are where the "
            "adapter comes from, leave out one"
        )
    of_samples = (_check_teacher, _check_mini_batches, _check_environment)
    for check in (_check_text,) if is_text else of_samples:
        check(config)
    recomputation(config.train.recompute)
    least, prompts = config.rollout.prompts_per_step, rollout_prompts(config)
    # Buffers of texts are dealt out to any number of groups.
    check_mesh(config.mesh.data, prompts=config.mesh.data if is_text else least)
    if not is_text and (prompts < least or prompts % config.mesh.data):
        remedy = -(-max(prompts, least) // config.mesh.data) * config.mesh.data
        raise UserError(
            f"rl.dynamic_sampling_prompts={prompts} with rollout.prompts_per_step={least} and "
            f"mesh.data={config.mesh.data}: a rollout has at least the prompts of a step, and "
            f"every group of devices takes the same number, pass {remedy}"
        )
    if config.mesh.tensor > 1 and config.train.parameters == "full":
        raise UserError(
            f"mesh.tensor={config.mesh.tensor} with train.parameters='full': a trained weight that "
            "is cut between devices cannot be saved, pass mesh.tensor=1 or train.parameters=lora"
        )
    _check_format(config)
    if config.rollout.head_format and config.train.parameters == "full":
        raise UserError(
            f"rollout.head_format={config.rollout.head_format!r} with train.parameters='full': the "
            "head changes with every update, leave out rollout.head_format"
        )
    if any(not isinstance(text, str) or not text for text in config.rollout.stop):
        raise UserError(
            f"rollout.stop={config.rollout.stop!r}: pass a tuple of non-empty strings, such as "
            "('</answer>',)"
        )
    if not (is_text and config.sft.epochs):  # They give the number of steps later.
        check_warmup(config)
    start, stop = config.profile.start, config.profile.stop
    if (start, stop) != (0, 0) and not 1 <= start <= stop:
        raise UserError(f"profile.start={start}, profile.stop={stop}: 1 <= start <= stop, or 0, 0")


def check_warmup(config: ConfigDict) -> None:
    """Refuses a warm-up that takes all steps."""
    if config.optimizer.warmup_steps >= config.steps:
        raise UserError(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} with steps={config.steps}: "
            "the learning rate never reaches its value, lower the warm-up"
        )


def _check_measurements(config: ConfigDict) -> None:
    """Refuses a schedule that follows the KL where none of a noisy step is measured."""
    if not config.aqn.kl_every:
        raise UserError(
            "aqn.schedule='kl' with aqn.kl_every=0: sigma follows the measured KL, pass "
            "aqn.kl_every=1"
        )
    if 1 < config.steps <= config.aqn.kl_every:
        raise UserError(
            f"aqn.schedule='kl' with aqn.kl_every={config.aqn.kl_every} and steps={config.steps}: "
            "only the first step, which has no noise, is measured; pass aqn.kl_every=1"
        )


def _check_text(config: ConfigDict) -> None:
    """Refuses what does not work where a run learns from rows of text."""
    given = [f"environment.{name}" for name in ("function", "agent", "verifiers")]
    given += ["teacher.source", "teacher.adapter"]
    given = [name for name in given if _value(config, name)]
    if config.sft.completions_of:
        given += [name for name in ("data.path", "data.mixture") if _value(config, name)]
    if given:
        what = "sft.completions_of" if config.sft.completions_of else "sft.rows_per_step"
        raise UserError(
            f"{what}={config.sft[what.removeprefix('sft.')]} with {' and '.join(given)}: the run "
            "samples nothing and has one source of rows, leave out one of the two"
        )


def _check_teacher(config: ConfigDict) -> None:
    """Refuses what does not work with a teacher, or without one."""
    alone = not learns_from_rewards(config)
    if config.rollout.group_size == 1 and not alone:
        raise UserError(
            "rollout.group_size=1: it must be at least 2, as rewards are compared within a group; "
            "1 is for a teacher alone, teacher.rewards=false"
        )
    if config.rollout.group_size == 1 and config.data.curriculum != "off":
        raise UserError(
            f"data.curriculum={config.data.curriculum!r} with rollout.group_size=1: no problem is "
            "solved in a part of one attempt; leave out one"
        )
    if not TEACHER.holds(config):
        return
    if config.rl.loss == "gspo":
        raise UserError(
            "rl.loss='gspo' with a teacher: one ratio for a completion has no advantages of its "
            "tokens; pass rl.loss=gspo_token"
        )
    if config.rl.dynamic_sampling and alone:
        raise UserError(
            "rl.dynamic_sampling=true with teacher.rewards=false: it chooses groups by rewards "
            "that are not learned from; leave out one"
        )


def _check_mini_batches(config: ConfigDict) -> None:
    """Refuses mini-batches of different sizes, whose losses would have different weights."""
    parts = config.rl.mini_batches
    unit = config.train.micro_batch_rows if SPLIT_LOSS.holds(config) else 1
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    if parts > 1 and rows % (parts * unit):
        micro = f" of train.micro_batch_rows={unit}" if unit > 1 else ""
        raise UserError(
            f"rl.mini_batches={parts} does not divide the {rows} rows of a step{micro} "
            "(rollout.prompts_per_step * rollout.group_size): pass a divisor"
        )


def _check_environment(config: ConfigDict) -> None:
    """Refuses what does not work with an environment, or with agents."""
    if not environment_functions(config) and not has_agents(config):
        return
    _check_agents(config)
    if config.rollout.max_new_tokens < 2 or config.eval.max_new_tokens < 2:
        raise UserError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} and eval.max_new_tokens="
            f"{config.eval.max_new_tokens}: environments and agents need at least 2 of each"
        )
    context = config.environment.context_tokens
    if 0 < context < config.environment.turn_tokens:
        raise UserError(
            f"environment.context_tokens={context} is less than "
            f"environment.turn_tokens={config.environment.turn_tokens}: raise it, or 0"
        )


def _check_agents(config: ConfigDict) -> None:
    """Refuses what does not work with agents."""
    if not has_agents(config):
        return
    names = "function", "agent", "verifiers"
    given = [f"environment.{name}" for name in names if config.environment[name]]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: a run has one of them, leave out the others")
    if config.environment.verifiers and not config.environment.python:
        raise UserError(
            f"environment.verifiers={config.environment.verifiers} without environment.python, the "
            "interpreter that has verifiers: uv venv vf --python 3.12 && uv pip install --python "
            "vf/bin/python verifiers==0.4.0, and pass environment.python=vf/bin/python"
        )
    if SPLIT_LOSS.holds(config):
        raise UserError(
            f"{given[0]} with the denominators of micro-batches, rl.loss='bnpo' or "
            "rl.aggregation='micro_batch': the rows of agents have no fixed number; take another "
            "loss, such as 'dapo'"
        )


def _check_format(config: ConfigDict) -> None:
    """Refuses a format that the weights, or what is trained, cannot have."""
    packed = published_format(config.model.source)
    if packed and config.model.format != packed:
        raise UserError(
            f"model.format={config.model.format!r}: {config.model.source} holds {packed.upper()} "
            f"weights, which are read as they are; pass model.format={packed}, or the folder of a "
            "checkpoint with 16 bits in model.source"
        )
    if config.train.parameters == "full" and config.model.format != "bf16":
        raise UserError(
            f"train.parameters='full' with model.format={config.model.format!r}: packed weights "
            "have no gradient, pass model.format=bf16 or train.parameters=lora"
        )


def check_extension(config: ConfigDict, *, schedule_steps: int, target: Path) -> None:
    """Refuses steps after the end of a schedule that brings the learning rate to 0.

    `target` is the folder of the adapter or model that the run writes when it is finished.
    """
    if config.steps <= schedule_steps or not _decays_to_zero(config):
        return
    raise UserError(
        f"steps={config.steps} is more than the {schedule_steps} steps in which the learning rate "
        f"of this run decays to 0 (optimizer.schedule={config.optimizer.schedule!r}, "
        f"optimizer.final_fraction={config.optimizer.final_fraction}), and later steps would train "
        f"nothing: finish the run with --config.steps={schedule_steps}; then, to train on, begin a "
        f"new run with {_begin_from(config, target)}"
    )


def how_to_train_on(
    config: ConfigDict,
    steps: int,
    *,
    schedule_steps: int,
    workdir: Path,
    target: Path,
    python_rewards: bool = False,
) -> str:
    """Returns the advice that a finished run prints, as part of a sentence.

    `python_rewards` says that its rewards were given in Python, so that no command has them.
    """
    more_steps = 2 * steps
    if _decays_to_zero(config):
        more_steps = min(more_steps, schedule_steps)
    if more_steps > steps and python_rewards:
        call = f"train(config, workdir={str(workdir)!r}, rewards=...)"
        return f"to train on: the same {call} with steps={more_steps} in the config"
    if more_steps > steps:
        return f"to train on: {command_to_go_on(workdir, steps=more_steps)}"
    options = _begin_from(config, target)
    return f"its learning rate has decayed to 0; to train on, begin a new run with {options}"


def command_to_go_on(workdir: Path, *, steps: int) -> str:
    """Returns the whole command that resumes a run with the config that it saved."""
    folder = shlex.quote(str(workdir))
    return f"{command_name('train')} --workdir={folder} --config.steps={steps}"


def _decays_to_zero(config: ConfigDict) -> bool:
    """Whether the learning rate is above 0 and the end of its schedule brings it to 0."""
    rate, fraction = config.optimizer.learning_rate, config.optimizer.final_fraction
    last = rate if config.optimizer.schedule == "constant" else rate * fraction
    smallest = np.finfo(np.float32).tiny  # XLA for CPUs rounds smaller numbers to 0.
    return last < smallest <= rate


def _begin_from(config: ConfigDict, target: Path) -> str:
    """The options of a new run that begins where another one ended."""
    name = "model.source" if config.train.parameters == "full" else "lora.init"
    return f"--config.{name}={shlex.quote(str(target))} and another --workdir"


def _check_texts(value: Any, name: str) -> None:
    if isinstance(value, str):
        check_unicode(value, name)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_texts(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_texts(inner, f"{name}[{index}]")


def _value(config: ConfigDict, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), config)


def _check_choice(row: Field, value: Any) -> None:
    """Refuses a value, or an item of a tuple, that is not one of the choices of a field."""
    for item in value if isinstance(value, tuple | list) else (value,):
        if item in row.choices or (row.function and names_function(item)):
            continue
        choices = ", ".join(choice or "''" for choice in row.choices)
        function = ", or 'package.module:function'" if row.function else ""
        raise UserError(f"unknown {row.name} {item!r}: choose from {choices}{function}")
