"""Shows runs on a terminal or in a page: what the command does, as a function."""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from qerl_jax.errors import UserError, check_limits
from qerl_jax.show.html import write_page
from qerl_jax.show.terminal import show
from qerl_jax.show.view import LAST_STEP, open_views, read_condition


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
        runs: run folders, or one.
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
    folders = [runs] if isinstance(runs, str | Path) else runs
    views = open_views(map(str, folders))
    conditions = [read_condition(text, views) for text in where]
    if html:
        return write_page(html, views, conditions=conditions, steps=steps, limit=completions)
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    show(
        views,
        lambda line: print(line.encode(encoding or "ascii", "replace").decode(encoding or "ascii")),
        steps=steps,
        conditions=conditions,
        limit=completions,
        columns=shutil.get_terminal_size().columns,
        unicode=encoding == "utf8",
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
