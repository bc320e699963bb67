"""Configs that are installed, each a table of differences: --config=NAME finds them by name."""

from pathlib import Path

from qerl_jax.config.models import SOURCES
from qerl_jax.errors import UserError
from qerl_jax.system.paths import user_path

_FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("[!_]*.py")))


def installed_file(name: str) -> str:
    """The path of an installed config, such as grpo_gsm8k."""
    return str(_FOLDER / f"{name}.py")


def is_installed(text: str) -> bool:
    """Whether a config file, FILE.py or FILE.py:PRESET, is that of an installed config."""
    return Path(text.partition(":")[0]).parent == _FOLDER


def config_file(text: str) -> str:
    """The config file that a text names, with the preset if the text has one.

    The text is FILE.py or FILE.py:PRESET, where the file may be in the home folder (~); or NAME or
    NAME:PRESET with the name of an installed config, such as grpo_gsm8k:qwen2.5-7b, which is found
    from any directory.

    Raises:
        UserError: there is neither a file nor a config of this name.
    """
    name, colon, preset = text.partition(":")
    path = user_path(name)
    if name in NAMES and not path.exists():
        return f"{installed_file(name)}{colon}{preset}"
    if not path.exists() and text.partition(",")[0] in SOURCES:
        raise UserError(
            f"--config={text}: {text} is a preset, which follows the name of a config: write "
            f"--config=grpo_gsm8k:{text}"
        )
    if name and not path.suffix and not path.exists():
        raise UserError(
            f"--config={text}: there is no such file, and the configs by name are "
            f"{', '.join(NAMES)}"
        )
    return f"{path if name else name}{colon}{preset}"
