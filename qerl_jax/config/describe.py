"""A config as text: one line per field, which the command line reads again."""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.errors import UserError

_TABLES = ("data.options", "data.chat_template_args")


def describe_config(config: ConfigDict) -> str:
    """The fields of a config as sorted lines `name = value`.

    A value is written as a flag takes it: `aqn.form = additive` is --config.aqn.form=additive. A
    table of `_TABLES` is one line, as its keys depend on the task or the model.
    """
    fields = sorted(_fields(config.to_dict(), ""))
    return "".join(f"{name} = {as_flag(name, value)}\n" for name, value in fields)


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


def _fields(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        path = prefix + name
        if isinstance(value, dict) and path not in _TABLES:
            yield from _fields(value, f"{path}.")
        else:
            yield path, value
