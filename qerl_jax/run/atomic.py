"""Files that hold their old content or the new one, whenever the process dies."""

import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Replaces the content of a file by `text`, through a temporary file that is renamed."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
