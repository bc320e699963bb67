"""Shows runs on a terminal or in a page: what the command does, as a function."""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from qerl_jax.errors import UserError, check_limits
from qerl_jax.show.html import write_page
from qerl_jax.show.listing import list_runs, runs_in
from qerl_jax.show.terminal import BLOCKS, show
from qerl_jax.show.view import LAST_STEP, open_views, read_condition
from qerl_jax.system.streams import encodable


def show_runs(
    runs: str | Path | Sequence[str | Path],
    *,
    step: str = "",
    where: Sequence[str] = (),
    completions: int = 0,
    html: str = "",
) -> Path | None:
    """Prints the curves and the completions of runs side by side, or writes them into a page.

    Args:
        runs: run folders, or one. Of a folder of runs each run gets a line, or is shown where a
            step, a condition or a page is asked for.
        step: 'N', 'FROM:TO' or 'all'; '' is the last step, and all steps in a page.
        where: conditions on a completion, such as 'reward>=0.5', which must all hold.
        completions: largest number of completions of a step; 0 shows all that are logged.
        html: path of the page; '' prints on the terminal.

    Returns:
        The page, or None.

    Raises:
        UserError: a folder holds no run, or an argument is malformed.
    """
    check_limits({"--completions": (completions, 0)})
    steps = read_steps_option(step)
    paths = [str(path) for path in ([runs] if isinstance(runs, str | Path) else runs)]
    inside = {path: runs_in(path) for path in paths}
    folders = [run for path in paths for run in inside[path] or [path]]

    def write(line: str) -> None:
        print(encodable(line, sys.stdout))

    if any(inside.values()) and not (html or step or where):
        for line in list_runs(folders):
            write(line)
        return None
    views = open_views(folders)
    conditions = [read_condition(text, views) for text in where]
    if html:
        return write_page(html, views, conditions=conditions, steps=steps, limit=completions)
    show(
        views,
        write,
        steps=steps,
        conditions=conditions,
        limit=completions,
        columns=shutil.get_terminal_size().columns,
        unicode=encodable(BLOCKS, sys.stdout) == BLOCKS,
    )
    return None


def read_steps_option(text: str) -> tuple[int, int] | None:
    """The first and the last step of --step; None where it is not given."""
    if not text:
        return None
    if text == "all":
        return 0, LAST_STEP
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if not match:
        raise UserError(f"--step={text}: write a step, a range such as 1:20, or all")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UserError(f"--step={text}: the range ends before it begins, write {last}:{first}")
    return first, last
