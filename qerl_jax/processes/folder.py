"""One run folder for all processes: process 0 opens and writes it, the others read."""

import contextlib
import secrets
import time
from collections.abc import Generator
from pathlib import Path

from ml_collections import ConfigDict

from qerl_jax.errors import UserError
from qerl_jax.processes.group import Processes
from qerl_jax.run.folder import OpenRun, open_run
from qerl_jax.system.safe_files import open_to_write, remove_tree

_SEEN_SECONDS = 30.0  # a network file system may show a new file late
_MARKS = f"lock.{'[0-9a-f]' * 16}"


@contextlib.contextmanager
def open_run_together(
    path: str | Path | None, config: ConfigDict, processes: Processes
) -> Generator[OpenRun]:
    """Opens a run folder as `run.folder.open_run` does, in process 0, and shows it to the others.

    The path of process 0 counts.

    Raises:
        UserError: as in `open_run`, or a process does not see the folder.
    """
    marks = contextlib.ExitStack()
    with contextlib.ExitStack() as stack:
        facts = None
        if processes.writes:
            folder = stack.enter_context(open_run(path, config))
            _remove_marks(folder.path)  # those of starts that were killed: this one has the lock
            if processes.count == 1:
                yield folder
                return
            stack.enter_context(marks).callback(_remove_marks, folder.path)
            mark = folder.path.absolute() / f"lock.{secrets.token_hex(8)}"
            open_to_write(mark, "x").close()
            facts = {
                "mark": str(mark),
                "schedule_steps": folder.schedule_steps,
                "resumed": folder.resumed,
                "moved": folder.moved,
            }
        facts = processes.broadcast_from_first(facts)
        mark = Path(facts.pop("mark"))
        visibility = processes.exchange_json(_sees(mark))
        marks.close()
        blind = [number for number, is_seen in enumerate(visibility) if not is_seen]
        if blind:
            names = " and ".join(processes.names[number] for number in blind)
            raise UserError(
                f"the run folder {mark.parent} of {processes.names[0]} is not seen by {names}: "
                "pass a --workdir on a file system that all hosts share"
            )
        yield OpenRun(mark.parent, **facts | {"moved": tuple(facts["moved"])})


def _remove_marks(folder: Path) -> None:
    """Removes the files by which other processes see the folder; this process holds its lock."""
    for mark in folder.glob(_MARKS):
        remove_tree(mark)


def _sees(path: Path) -> bool:
    ends = time.monotonic() + _SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > ends:
            return False
        time.sleep(0.5)
    return True
