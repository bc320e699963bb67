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

_SEEN_SECONDS = 30.0  # a network file system may show a new file late


@contextlib.contextmanager
def open_run_together(
    path: str | Path | None, config: ConfigDict, processes: Processes
) -> Generator[OpenRun]:
    """Opens a run folder as `run.folder.open_run` does, in process 0, and shows it to the others.

    Args:
        path: as in `open_run`; that of process 0 counts.
        config: as in `open_run`.
        processes: the processes of the run.

    Yields:
        The run folder.

    Raises:
        UserError: as in `open_run`, or a process does not see the folder.
    """
    if processes.count == 1:
        with open_run(path, config) as folder:
            yield folder
        return
    with contextlib.ExitStack() as stack:
        found, mark = None, None
        if processes.writes:
            folder = stack.enter_context(open_run(path, config))
            mark = folder.path / f"lock.{secrets.token_hex(8)}"
            mark.touch()
            found = {
                "mark": str(mark.absolute()),
                "schedule_steps": folder.schedule_steps,
                "resumed": folder.resumed,
                "moved": folder.moved,
            }
        found = processes.of_first(found)
        mark = Path(found.pop("mark"))
        unseen = [i for i, sees in enumerate(processes.exchange_json(_sees(mark))) if not sees]
        if processes.writes:
            mark.unlink()
        if unseen:
            names = " and ".join(processes.names[number] for number in unseen)
            raise UserError(
                f"the run folder {mark.parent} of {processes.names[0]} is not seen by {names}: "
                "pass a --workdir on a file system that all hosts share"
            )
        yield OpenRun(mark.parent, **found | {"moved": tuple(found["moved"])})


def _sees(path: Path) -> bool:
    ends = time.monotonic() + _SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > ends:
            return False
        time.sleep(0.5)
    return True
