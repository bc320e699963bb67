"""The fields of a saved run that other commands read, and what they hold.

config.json may come from another person, so it may hold anything.
"""

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from qerl_jax.config.fields import LONGEST_LIMIT
from qerl_jax.errors import UserError

CREATED = "%Y-%m-%dT%H:%M:%S%z"  # form of the time at which a run began
_MOST = 2**31
_DEEPEST = 20  # objects and lists inside of each other; runs write fewer than ten
_ABSENT = object()
_REWARD = {"function", "weight", "time_limit", "retries", "token_env"}


def is_shallow(value: Any) -> bool:
    """Returns whether a value of JSON is no deeper than what a run writes.

    Functions that call themselves fail on a deeper one.
    """
    level = [value]
    for _ in range(_DEEPEST):
        level = [inside for part in level for inside in _inside(part)]
    return not level


def check_run(path: Path, saved: Mapping[str, Any]) -> None:
    """Refuses the content of a config.json, named in the message, that no run wrote.

    Raises:
        UserError: a field that commands read is absent, has another type, or is out of its range.
    """
    if not is_shallow(saved):
        raise UserError(f"{path}: not the config of a run: it nests over {_DEEPEST} deep")
    for name, (what, holds) in _FIELDS.items():
        value: Any = saved
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is _ABSENT and name in _OPTIONAL:
            continue
        if value is _ABSENT or not holds(value):
            text = "absent" if value is _ABSENT else f"{value!r:.60}"
            raise UserError(
                f"{path}: not the config of a run: {name} is {text} and not {what}; restore the "
                "file, or name another folder"
            )


def check_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    """Refuses what was saved with the arrays of a checkpoint and was written by no run.

    Raises:
        UserError: a field is absent, or has another type; it names the folder of the checkpoints.
    """
    noise = meta.get("noise")
    if not (
        _is_text(meta.get("fingerprint"))
        and _is_text(meta.get("prompts"))
        and isinstance(meta.get("reference", _ABSENT), str | None)
        and _are_names(meta.get("problems"))
        and _is_object(meta.get("cursor"))
        and isinstance(noise, Mapping)
        and noise.keys() == {"sigma", "kl", "not_finite"}
        and all(value is None or _is_number(value) for value in noise.values())
    ):
        raise UserError(
            f"{folder}: no run wrote what the newest checkpoint holds besides its arrays; pass "
            "another --workdir, or the run that wrote it"
        )


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _are_bytes(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < math.inf


def is_time(value: Any) -> TypeGuard[str]:
    """Returns whether a value is a time as runs write it."""
    try:
        # An earlier time has no zone; years of four digits are those that every platform formats.
        return bool(re.match(r"[12]\d{3}-", value) and datetime.datetime.strptime(value, CREATED))
    except (TypeError, ValueError, OverflowError):
        return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_levels(value: Any) -> bool:
    return isinstance(value, list) and all(_is_text(one) or _is_number(one) for one in value)


def _are_names(value: Any) -> bool:
    return _is_object(value) and all(map(_is_text, value.values()))


def _is_tracker(value: Any) -> bool:
    return _are_names(value) and value.keys() == {"name", "folder"}


def _are_versions(value: Any) -> bool:
    # A package that is not installed has no version, such as the project itself in a clone.
    return (
        _is_object(value)
        and {"jax", "python"} <= value.keys()
        and all(one is None or _is_text(one) for one in value.values())
    )


def _is_commit(value: Any) -> bool:
    return value is None or (_is_object(value) and _is_text(value.get("commit")))


def _has_digest(value: Any) -> bool:
    return _is_object(value) and "digest" in value


def _is_digest(value: Any) -> bool:
    return _is_text(value) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _are_sources(value: Any) -> bool:
    return _is_object(value) and all(
        _is_object(source)
        and _is_number(weight := source.get("weight", 1.0))
        and weight > 0
        and all(_is_text(source.get(name, "")) for name in ("path", "source"))
        for source in value.values()
    )


def _is_limit(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= LONGEST_LIMIT


def _are_rewards(value: Any) -> bool:
    return _is_object(value) and all(map(_is_reward, value.values()))


def _is_reward(value: Any) -> bool:
    if not _is_object(value) or not value.keys() <= _REWARD or not _is_text(value.get("function")):
        return False
    return (
        _is_number(value.get("weight", 0))
        and _is_limit(value.get("time_limit", 0))
        and _is_text(value.get("token_env", ""))
        and _is_count(value.get("retries", 0))
    )


_Field = tuple[str, Callable[[Any], bool]]
_TEXT: _Field = "a text", _is_text
_OBJECT: _Field = "an object", _is_object
_COUNT: _Field = f"a whole number from 0 to {_MOST - 1}", _is_count
_BYTES: _Field = "a whole number that is not negative", _are_bytes
_LIMIT: _Field = f"a number from 0 to {LONGEST_LIMIT}", _is_limit
_NAMES: _Field = "an object of texts", _are_names
_REWARDS: _Field = f"an object of rewards, which have {', '.join(sorted(_REWARD))}", _are_rewards

_FIELDS: dict[str, _Field] = {
    "calibration": ("an object with a digest", _has_digest),
    "calibration.digest": ("64 hex digits", _is_digest),
    "teacher_calibration": ("an object with a digest", _has_digest),
    "teacher_calibration.digest": ("64 hex digits", _is_digest),
    "command": _TEXT,
    "created": (f"a time of the form {CREATED}", is_time),
    "device.kind": _TEXT,
    "git": ("an object with a commit, or null", _is_commit),
    "python_rewards": _REWARDS,
    "trackers": ("an object with the texts name and folder", _is_tracker),
    "versions": ("an object with the versions of jax and python", _are_versions),
    "config.data": _OBJECT,
    "config.data.chat_template_args": _OBJECT,
    "config.data.eval_path": _TEXT,
    "config.data.eval_source": _TEXT,
    "config.data.examples": ("a list of texts", _are_texts),
    "config.data.fields": _NAMES,
    "config.data.levels": ("a list of numbers or texts", _are_levels),
    "config.data.max_prompt_tokens": _COUNT,
    "config.data.max_question_chars": _COUNT,
    "config.data.mixture": ("an object of sources with positive weights", _are_sources),
    "config.data.options": _OBJECT,
    "config.data.path": _TEXT,
    "config.data.question_suffix": _TEXT,
    "config.data.source": _TEXT,
    "config.data.system_prompt": _TEXT,
    "config.environment": _OBJECT,
    "config.environment.context_tokens": _COUNT,
    "config.environment.host_cache_bytes": _BYTES,
    "config.environment.agent": _TEXT,
    "config.environment.function": _TEXT,
    "config.environment.harness": _TEXT,
    "config.environment.max_turns": _COUNT,
    "config.environment.options": _OBJECT,
    "config.environment.processes": _COUNT,
    "config.environment.python": _TEXT,
    "config.environment.reply_tokens": _COUNT,
    "config.environment.session_time_limit": _LIMIT,
    "config.environment.tasks": _COUNT,
    "config.environment.time_limit": _LIMIT,
    "config.environment.turn_tokens": _COUNT,
    "config.environment.verifiers": _TEXT,
    "config.eval": _OBJECT,
    "config.eval.every": _COUNT,
    "config.eval.max_new_tokens": _COUNT,
    "config.eval.problems": _COUNT,
    "config.model": _OBJECT,
    "config.model.dtype": _TEXT,
    "config.model.format": _TEXT,
    "config.model.source": _TEXT,
    "config.optimizer": _OBJECT,
    "config.reward_time_limit": _LIMIT,
    "config.rewards": _REWARDS,
    "config.rollout": _OBJECT,
    "config.rollout.chunk_steps": _COUNT,
    "config.rollout.dequantize": _TEXT,
    "config.rollout.group_size": _COUNT,
    "config.rollout.kv_cache_dtype": _TEXT,
    "config.rollout.max_rows": _COUNT,
    "config.rollout.prompts_per_step": _COUNT,
    "config.rollout.stop": ("a list of texts", _are_texts),
    "config.sft": _OBJECT,
    "config.sft.completions_of": _TEXT,
    "config.sft.min_reward": ("a number", _is_number),
    "config.sft.rows_per_step": _COUNT,
    "config.seed": ("a whole number", lambda value: type(value) is int),
    "config.steps": _COUNT,
    "config.train": _OBJECT,
    "config.train.parameters": _TEXT,
}
# Facts that only some runs have: a calibrated base, rewards in Python, a run that has begun; and
# fields that runs of earlier versions lack.
_OPTIONAL = {"calibration", "calibration.digest", "python_rewards", "trackers"}
_OPTIONAL |= {"config.sft", *(name for name in _FIELDS if name.startswith("config.sft."))}
_OPTIONAL |= {"teacher_calibration", "teacher_calibration.digest"}
_OPTIONAL |= {"config.train", "config.train.parameters"}
_OPTIONAL |= {
    f"config.environment.{name}"
    for name in (
        *("agent", "harness", "host_cache_bytes", "options", "python", "session_time_limit"),
        *("tasks", "verifiers"),
    )
}
