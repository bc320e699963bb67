"""Problems that a program passes as a list, written to a file that a run can read again."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qerl_jax.data.environment_config import taskset_of
from qerl_jax.errors import UserError, check_unicode, first_line
from qerl_jax.system.atomic import write_atomic
from qerl_jax.system.paths import cache_folder, needs_cache
from qerl_jax.system.safe_files import make_folder

_DIGITS = 24


def with_problems(config: ConfigDict, problems: Iterable[Mapping[str, Any]] | None) -> ConfigDict:
    """Returns a config whose training problems are those of a list, or the tasks of a taskset.

    They are written to a file of the cache that is named after their content, so that a resumed
    run, an evaluation and an export read the same problems.

    Args:
        config: the resolved config, which stays as it is.
        problems: a dict for each problem, with `question` (a text or a list of chat messages), and
            `answer` if a reward compares with one; other columns reach the rewards by name. With
            None they are the tasks of `environment.verifiers`, where the config names no file and
            no mixture; without a taskset the config is returned.

    Raises:
        UserError: the config is a text; the list is empty, or an entry is no dict, or not what JSON
            can hold; the taskset cannot be loaded; or the cache cannot be written.
    """
    if isinstance(config, str):
        raise UserError(
            f"config is {config!r:.60}: pass what get_config returns, as get_config('qwen2.5-7b')"
        )
    taskset = taskset_of(config)
    if problems is None and taskset and not (config.data.path or config.data.mixture):
        problems = taskset.rows()
    if problems is None:
        return config
    if isinstance(problems, str | bytes | Mapping):
        raise UserError(
            f"problems is {problems!r:.60}: pass a list of dicts with question and answer, or a "
            "file as config.data.path"
        )
    lines = [_line(number, problem) for number, problem in enumerate(problems)]
    if not lines:
        raise UserError("the list of problems is empty")
    text = "".join(lines)
    folder = cache_folder("problems")
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}.jsonl"
    with needs_cache(folder, "write the problems to a file and pass it as config.data.path"):
        if not path.exists():
            make_folder(folder)
            write_atomic(path, text)
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.data.mixture = ConfigDict()
        config.data.path = str(path)
    return config


def _without_numpy(value: Any) -> Any:
    """A number of NumPy, as a table's rows have it, as one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no type of JSON")


def _line(number: int, problem: Any) -> str:
    if not isinstance(problem, Mapping):
        raise UserError(f"problem {number} is {problem!r:.60}, not a dict with question and answer")
    try:
        line = json.dumps(
            dict(problem), ensure_ascii=False, allow_nan=False, default=_without_numpy
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"problem {number}: a column is not what JSON can hold: {first_line(error)}"
        ) from error
    check_unicode(line, f"problem {number}")
    return line + "\n"
