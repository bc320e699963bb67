"""Shows runs: their curves so far, and prompts, completions and rewards step by step.

    qerl-show runs                               # a line for each run
    qerl-show RUN                                # the last step
    qerl-show RUN --step=1:20 --where='correctness<1'
    qerl-show RUN OTHER_RUN --step=10            # side by side
    qerl-show RUN OTHER_RUN --html=runs.html     # a page for a browser

It only reads, so a run may train meanwhile. A step shows the completions that the run logged:
--config.log.completions=N logs more in a new run, or when a run goes on. --where compares a number
of a completion, such as reward, tokens, advantage or the name of a reward; several must all hold.

The page of --html is one file of at most 20 MB that needs no network. Its steps and its filter are
chosen in the browser.
"""

import argparse
import re
import shutil
import sys

from qerl_jax.commands import cli
from qerl_jax.system.command import command_name, name_commands


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog=command_name("show"),
        description=name_commands(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="run folder, or a folder of runs")
    add("--step", default="", help="N, FROM:TO or all (default: the last; with --html all)")
    add(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only these completions, such as 'reward>=0.5' or 'correctness<1'",
    )
    add(
        "--completions",
        type=int,
        default=0,
        metavar="N",
        help="largest number of completions of a step (default: 0, all that are logged)",
    )
    add("--html", default="", metavar="FILE", help="write a page for a browser instead")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Shows."""
    from qerl_jax.errors import check_limits
    from qerl_jax.show.html import write_page
    from qerl_jax.show.listing import list_runs, runs_in
    from qerl_jax.show.terminal import show
    from qerl_jax.show.view import open_views, read_condition

    check_limits({"--completions": (arguments.completions, 0)})
    steps = _steps(arguments.step)
    folders = {path: runs_in(path) for path in arguments.runs}
    runs = [run for path in arguments.runs for run in folders[path] or [path]]
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")

    def write(line: str) -> None:
        print(line.encode(encoding or "ascii", "replace").decode(encoding or "ascii"))

    if any(folders.values()) and not (arguments.html or arguments.step or arguments.where):
        for line in list_runs(runs):
            write(line)
        return
    views = open_views(runs)
    conditions = [read_condition(text, views) for text in arguments.where]
    if arguments.html:
        path = write_page(
            arguments.html,
            views,
            conditions=conditions,
            steps=steps,
            limit=arguments.completions,
        )
        print(f"{path}: complete; open it in a browser")
        return
    show(
        views,
        write,
        steps=steps,
        conditions=conditions,
        limit=arguments.completions,
        columns=shutil.get_terminal_size().columns,
        unicode=encoding == "utf8",
    )


def _steps(text: str) -> tuple[int, int] | None:
    """The first and the last step of --step; None where it is not given."""
    from qerl_jax.errors import UserError
    from qerl_jax.show.view import LAST_STEP

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


def main() -> None:
    """Parses the arguments and runs."""
    cli.run_command(make_parser(), run)


if __name__ == "__main__":
    main()
