"""Requests to the Hugging Face hub: reported on stderr, and stopped early if it is unreachable.

Left to themselves, the libraries try an unreachable hub again and again, for 35 seconds or more.
"""

import contextlib
import difflib
import pathlib
import sys
import threading
from collections.abc import Generator
from typing import Any

from qerl_jax.errors import visible

SECONDS = 5.0  # time limit for the first answer of the hub


@contextlib.contextmanager
def asking(name: str) -> Generator[None]:
    """Prints that the hub is asked; if it is unreachable, the block sees only its local cache.

    Raises:
        ConnectionError: the hub is unreachable, and the block failed without it.
    """
    from huggingface_hub import constants  # imported here because local sources do not need it

    if constants.HF_HUB_OFFLINE:
        yield
        return
    print(f"{visible(name)}: asking the Hugging Face hub", file=sys.stderr, flush=True)
    if _answers(constants.ENDPOINT):
        yield
        return
    switches: list[Any] = [constants]
    with contextlib.suppress(ImportError):
        import datasets

        switches.append(datasets.config)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    except Exception as error:
        raise ConnectionError(
            f"no answer from {constants.ENDPOINT} within {SECONDS:g} s, and no copy in the cache"
        ) from error
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def local_mistake(source: str) -> str:
    """Explains why a source that is no existing path is a path all the same; '' for a hub id.

    A source is a path if it begins as one, or if the folder that it names is there. A hub id whose
    files are in the hub's cache stays a hub id.
    """
    path = pathlib.Path(source)
    folder = path.parent.expanduser() if source.startswith("~/") else path.parent
    begins = source.startswith((".", "/", "~")) or source.count("/") > 1
    if not begins and (source.count("/") != 1 or not folder.is_dir()):
        return ""
    from huggingface_hub import try_to_load_from_cache

    if not begins and isinstance(try_to_load_from_cache(source, "config.json"), str):
        return ""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = [entry.name for entry in folder.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"the folder {folder} has no {path.name!r}" + (
        f" (did you mean {' or '.join(near)}?)" if near else ""
    )


def _answers(endpoint: str) -> bool:
    """Whether the hub answers anything in time; a thread bounds the look-up of its name, too."""
    has_answered = threading.Event()

    def request() -> None:
        from huggingface_hub.utils import get_session

        with contextlib.suppress(Exception):
            get_session().head(endpoint, timeout=SECONDS)
            has_answered.set()

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return has_answered.is_set()
