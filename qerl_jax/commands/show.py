"""Shows runs: their curves so far, and prompts, completions and rewards step by step.

    qerl-show runs                               # a line for each run
    qerl-show RUN                                # the last step
    qerl-show RUN --step=1:20 --where='correctness<1'
    qerl-show RUN OTHER_RUN --step=10            # side by side
    qerl-show RUN OTHER_RUN --html=runs.html     # a page for a browser

It only reads, so a run may train meanwhile. A step shows the completions that the run logged:
--config.log.completions=N logs more in a new or resumed run. --where compares a number
of a completion, such as reward, tokens, advantage or the name of a reward; several must all hold.

The page of --html is one file of at most 20 MB that needs no network. Its steps and its filter are
chosen in the browser.
"""

import argparse

from qerl_jax.commands import cli


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = cli.new_parser("show", __doc__)
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
    from qerl_jax.show.runs import show_runs

    if path := show_runs(**vars(arguments)):
        print(f"{path}: complete; open it in a browser")


def main() -> None:
    """Parses the arguments and runs."""
    cli.run_command(make_parser(), run)


if __name__ == "__main__":
    main()
