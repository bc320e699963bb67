"""The fields of a saved run that other commands read, and what they hold.

config.json may come from another person, or from a later version, so it may hold anything.
"""

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

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
    """Refuses the content of a config.json that no run wrote; a field may be absent.

    Args:
        path: the file, for the message.
        saved: its content, which has an object 'config'.

    Raises:
        UserError: a field that commands read has another type, or is out of its range.
    """
    if not is_shallow(saved):
        raise UserError(f"{path}: not the config of a run: it nests over {_DEEPEST} deep")
    for name, (what, holds) in _FIELDS.items():
        value: Any = saved
        for part in name.split("."):
            if value is _ABSENT:
                break
            if not isinstance(value, Mapping):
                raise UserError(f"{path}: not the config of a run: {name} is not in an object")
            value = value.get(part, _ABSENT)
        if value is None and "." not in name:  # such as the commit of a copy without git
            continue
        if value is not _ABSENT and not holds(value):
            raise UserError(
                f"{path}: not the config of a run: {name} is {value!r:.60} and not {what}"
            )


def require(run: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses a run without a field that is read.

    Args:
        run: content of a config.json, or a part of it.
        names: fields, such as 'data.system_prompt'.

    Raises:
        UserError: a field is absent or null.
    """
    for name in names:
        value: Any = run
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            raise UserError(f"the config.json of the run lacks {name}, which every run has")


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < math.inf


def is_time(value: Any) -> TypeGuard[str]:
    """Returns whether a value is a time as runs write it, or '' for an unknown one."""
    try:
        # An earlier time has no zone; years of four digits are those that every platform formats.
        return bool(re.match(r"[12]\d{3}-", value) and datetime.datetime.strptime(value, CREATED))
    except (TypeError, ValueError, OverflowError):
        return value == ""


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
    return _is_object(value) and all(one is None or _is_text(one) for one in value.values())


def _is_commit(value: Any) -> bool:
    return _is_object(value) and _is_text(value.get("commit"))


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


def _are_rewards(value: Any) -> bool:
    return _is_object(value) and all(map(_is_reward, value.values()))


def _is_reward(value: Any) -> bool:
    if not _is_object(value) or not value.keys() <= _REWARD or not _is_text(value.get("function")):
        return False
    numbers = [value.get(name, 0) for name in ("weight", "time_limit")]
    return (
        all(map(_is_number, numbers))
        and numbers[1] >= 0
        and _is_text(value.get("token_env", ""))
        and _is_count(value.get("retries", 0))
    )


_Field = tuple[str, Callable[[Any], bool]]
_TEXT: _Field = "a text", _is_text
_OBJECT: _Field = "an object", _is_object
_COUNT: _Field = f"a whole number from 0 to {_MOST - 1}", _is_count
_LIMIT: _Field = "a number that is not negative", lambda value: _is_number(value) and value >= 0
_NAMES: _Field = "an object of texts", _are_names
_REWARDS: _Field = f"an object of rewards, which have {', '.join(sorted(_REWARD))}", _are_rewards

_FIELDS: dict[str, _Field] = {
    "calibration": ("an object with a digest", _has_digest),
    "calibration.digest": ("64 hex digits", _is_digest),
    "command": _TEXT,
    "created": (f"a time of the form {CREATED}", is_time),
    "device": _OBJECT,
    "git": ("an object with a commit", _is_commit),
    "python_rewards": _REWARDS,
    "trackers": ("an object with the texts name and folder", _is_tracker),
    "versions": ("an object of versions", _are_versions),
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
    "config.environment.function": _TEXT,
    "config.environment.max_turns": _COUNT,
    "config.environment.processes": _COUNT,
    "config.environment.reply_tokens": _COUNT,
    "config.environment.time_limit": _LIMIT,
    "config.environment.turn_tokens": _COUNT,
    "config.eval": _OBJECT,
    "config.eval.every": _COUNT,
    "config.eval.max_new_tokens": _COUNT,
    "config.eval.problems": _COUNT,
    "config.model": _OBJECT,
    "config.model.dtype": _TEXT,
    "config.model.format": _TEXT,
    "config.model.source": _TEXT,
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
}
