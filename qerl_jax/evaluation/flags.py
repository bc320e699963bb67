"""The flags that a single answer and an evaluation have in common."""

import json
from typing import Any

from qerl_jax.errors import UserError, check_limits


def check_sampling(temperature: float, *, top_p: float, seed: int) -> None:
    """Refuses settings of the sampler that are out of range, or that greedy decoding ignores.

    Raises:
        UserError: a setting is invalid.
    """
    check_limits(
        {
            "--temperature": (temperature, 0.0),
            "--top-p": (top_p, 1e-6, 1),
            "--seed": (seed, 0, 2**32 - 1),
        }
    )
    for flag, value, default in (("--top-p", top_p, 1.0), ("--seed", seed, 0)):
        if temperature == 0 and value != default:
            raise UserError(
                f"{flag}={value} with greedy decoding, which draws nothing: leave it out, or pass "
                "--temperature=1"
            )


def template_arguments(text: str) -> dict[str, Any]:
    """Reads the arguments of a chat template from the command line.

    Raises:
        UserError: the text is no JSON object.
    """
    return json_object("--chat-template-args", text, '{"enable_thinking": false}')


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """Reads a JSON object from the command line.

    The message of the error has the flag and an example.

    Raises:
        UserError: the text is no JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{flag}={text}: a JSON object is needed, such as '{example}'")
    return value
