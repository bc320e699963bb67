"""Configs of the experiments; `defaults` explains every field."""

from pathlib import Path

from qerl_jax.errors import UserError
from qerl_jax.system.paths import user_path

_FOLDER = Path(__file__).parent
_TABLES = ("__init__", "defaults", "recipes")  # These are no configs.
NAMES = tuple(sorted(p.stem for p in _FOLDER.glob("*.py") if p.stem not in _TABLES))


def config_file(text: str) -> str:
    """The config file that a text names, with the preset if the text has one.

    Args:
        text: FILE.py or FILE.py:PRESET, where the file may lie in the home folder (~); or NAME or
            NAME:PRESET with the name of a config of this package, such as grpo_gsm8k:qwen2.5-7b,
            which is found from any directory.

    Raises:
        UserError: there is neither a file nor a config of this name.
    """
    name, colon, preset = text.partition(":")
    path = user_path(name)
    if name in NAMES and not path.exists():
        path = _FOLDER / f"{name}.py"
    elif name and not path.suffix and not path.exists():
        raise UserError(
            f"--config={text}: there is no such file, and the configs by name are "
            f"{', '.join(NAMES)}"
        )
    return f"{path if name else name}{colon}{preset}"
