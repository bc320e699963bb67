"""Functions that a config names by import path, `package.module:function`."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

from qerl_jax.errors import UserError, first_line


def names_function(text: str) -> bool:
    """Whether a name in a config is the import path of a function, and not one of our names."""
    return ":" in text


def allow_working_directory() -> None:
    """Lets an installed command import from the working directory, as `python -m` does.

    This is done when a function of the user is imported and not before: JAX and other libraries
    import optional packages by name, and the working directory may come from another person.
    """
    with contextlib.suppress(FileNotFoundError):  # a working directory that was removed
        if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())


def import_function(path: str, *, what: str) -> Callable[..., Any]:
    """Imports a function.

    Args:
        path: import path of the function, `package.module:function`.
        what: kind of the function in messages, for example 'reward'.

    Raises:
        UserError: the module cannot be imported, or has no such function.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise UserError(f"{what} {path!r}: write it as package.module:function")
    if "/" in module_name or module_name.endswith(".py"):
        stem = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UserError(
            f"{what} {path!r}: a file path is not an import path; write {stem}:{name}, and start "
            "in the folder that holds it or add the folder to PYTHONPATH"
        )
    allow_working_directory()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{what} {path!r}: cannot import {module_name}: {_reason(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{what} {path!r}: {module_name} has no function {name!r}")
    return function


def path_of(function: Callable[..., Any]) -> str:
    """Returns the import path by which other commands find a function, '' where they cannot.

    The main script has another name in other commands, and a lambda has no name at all.
    """
    module, name = (getattr(function, key, None) for key in ("__module__", "__name__"))
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return ""
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is function else ""


def source_of(function: Callable[..., Any]) -> str:
    """Returns the source of a function; '' of a callable object, or without a file."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


@contextlib.contextmanager
def user_errors(what: str, usage: str) -> Generator[None]:
    """Turns every exception of a user function, an exit included, into a UserError.

    It names the function and the occasion, such as "noise schedule 'a:b' at step 3", and by
    `usage` how such a function is called and what it returns.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} failed: {_reason(error)}; {usage}") from error


def _reason(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, first_line(error))))
