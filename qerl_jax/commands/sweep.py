r"""Trains every run of a sweep, one or several at a time, and makes one table and one picture.

    qerl-sweep --config=aqn_ablation

    --config=FILE.py[:PRESET]     config file with `get_config()` and `get_sweep()`
    --config.steps=10             field of the config, for all runs
    --workdir=DIR                 folder of the sweep (default: runs/FILE)
    --gpus=4                      four runs at a time, one on each GPU
    --only=2/4                    every fourth run, starting with the second: a part per machine
    --table                       only the table of the finished runs

As a job array of SLURM, whose elements share the folder:

    sbatch --array=1-8 --gres=gpu:1 --wrap="qerl-sweep \
        --config=aqn_ablation:qwen2.5-3b --only=\$SLURM_ARRAY_TASK_ID/8"

The same command continues where it was stopped: finished runs are skipped, an interrupted run is
resumed. A run that fails does not stop the others; it is named at the end, and the exit code is 1.
`qerl_jax/config/sweep.py` explains how to write `get_sweep()`. The folder of the sweep holds

    table.json, table.md    mean and interval over the seeds of each setting
    curves.png              reward, entropy, sigma, noise KL over the steps
    commands.sh             command of the sweep, and the command of each run alone
    RUN/, logs/RUN.log      run folder, and the output of its process
"""

import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from qerl_jax.commands import cli
from qerl_jax.config.describe import as_flag
from qerl_jax.config.experiments import config_file, installed_file
from qerl_jax.config.overrides import check_overrides
from qerl_jax.config.sweep import ConfigOverrides
from qerl_jax.errors import UserError, visible
from qerl_jax.run.folder import config_dict, config_digest, flatten
from qerl_jax.run.jobs import devices_of
from qerl_jax.run.plots import plot_sweep
from qerl_jax.run.sweep_folder import (
    Run,
    format_table,
    is_finished,
    make_table,
    settings,
    train_all,
)
from qerl_jax.system.atomic import TEMPORARY, write_atomic, write_json
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import check_folder, check_tree, read_text

_WHOLE = re.compile(r"python -m \S+\.sweep ")  # the command of the whole sweep in commands.sh
_LONGEST_NAME = 100

_ONLY = flags.DEFINE_string(
    "only", None, "part of the runs, I/N: every N-th run, starting with the I-th"
)
_GPUS = flags.DEFINE_integer("gpus", 0, "runs at a time, one on each GPU; 0: one run")
_TABLE = flags.DEFINE_bool("table", False, "only make the table of the finished runs")


def run(config: ConfigDict, workdir: str | None) -> None:
    """Trains the unfinished runs, and writes the table."""
    del config  # Each run has its own config, with the overrides of the sweep.
    flag = flags.FLAGS["config"]
    file = _relative_path(config_flags.get_config_filename(flag))
    common = config_flags.get_override_values(flag)
    stem, _, preset = file.partition(":")
    folder = user_path(workdir or "-".join(["runs/" + Path(stem).stem, *filter(None, [preset])]))
    runs = plan(file, common, folder)
    part = _part(runs, _ONLY.value)
    devices = devices_of(_GPUS.value, os.environ)

    if _TABLE.value and not folder.is_dir():
        raise UserError(f"--table: {folder} is not there, and holds no run of this sweep")
    _make_folder(folder)
    for member in runs:
        check_folder(member.folder)
    sweep_command = ["-m", "qerl_jax.commands.sweep", f"--config={file}", *_as_flags(common)]
    sweep_command.append(f"--workdir={folder}")
    commands = [
        shlex.join(["python", *part]) for part in (sweep_command, *(run.command for run in runs))
    ]
    write_atomic(folder / "commands.sh", "# " + "\n".join(commands) + "\n")
    failures = {} if _TABLE.value else train_all(part, folder, devices)
    _write_results(runs, folder)
    for name, reason in failures.items():
        print(visible(f"FAILED {name}: {reason}"), file=sys.stderr)
    if failures:
        print(
            f"{len(failures)} of {len(part)} runs failed; the same command tries them again",
            file=sys.stderr,
        )
        sys.exit(1)


def _make_folder(folder: Path) -> None:
    """Makes the folder of a sweep; refuses one that holds other things."""
    commands = folder / "commands.sh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Another task of the same sweep may be writing its first file: the files are listed first.
        others = sorted(p.name for p in folder.iterdir() if not p.name.endswith(TEMPORARY))
        is_sweep = commands.exists() and _WHOLE.search(read_text(commands, errors="replace"))
    except OSError as error:
        raise UserError(f"cannot use {folder} as the folder of a sweep: {error}") from error
    check_folder(folder / "logs")
    for programs in folder.glob("programs-*"):
        check_tree(programs)  # JAX writes through links in it.
    if others and not is_sweep:
        raise UserError(
            f"{folder} is not the folder of a sweep: it holds {others[0]} but no commands.sh of "
            "one; pass a new or empty folder as --workdir"
        )


# --- From a config file to runs ---------------------------------------------------------------


def plan(file: str, common: ConfigOverrides, folder: Path) -> list[Run]:
    """The runs of a sweep, each with the config that its command line gives.

    `common` has the fields that the command line sets for all runs.

    Raises:
        UserError: the file has no sweep; a run sets a field that does not exist, that the run
            ignores, or that `common` sets; two runs have the same settings.
    """
    runs: dict[str, Run] = {}
    file = config_file(file)
    sweep = _load_sweep(file)
    sweep_fields = set().union(*sweep)
    for overrides in sweep:
        if conflicts := sorted(overrides.keys() & common.keys()):
            raise UserError(f"the sweep sets {', '.join(conflicts)} itself: leave out the flag")
        text = ", ".join(f"{field}={value}" for field, value in overrides.items())
        arguments = [f"--config={file}", *_as_flags(common | overrides)]
        try:
            config = _parse(arguments)
            check_overrides(config, common | overrides)
        except UserError as error:
            raise UserError(f"the run with {text or 'no overrides'}: {error}") from error
        fields = config_dict(config)
        # Fields that may change in a run count only where the sweep itself varies them.
        varied_fields = {k: v for k, v in flatten(fields).items() if k in sweep_fields}
        settings = [config_digest(config), varied_fields | {"steps": config.steps}]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        if digest in runs:
            raise UserError(
                f"two runs have the same settings: {runs[digest].overrides} and {overrides}"
            )
        name = re.sub(r"[^\w.,=+-]+", "_", text.replace(", ", ","))[:_LONGEST_NAME]
        name = f"{name}-{digest}".lstrip("-")
        command = ("-m", "qerl_jax.commands.train", *arguments, f"--workdir={folder / name}")
        runs[digest] = Run(name, overrides, fields, folder / name, command)
    return list(runs.values())


def _load_sweep(file: str) -> list[ConfigOverrides]:
    """Calls `get_sweep` of a config file, with the preset if the file names one."""
    path, colon, preset = file.partition(":")
    spec = importlib.util.spec_from_file_location("sweep_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with cli.config_errors():
        spec.loader.exec_module(module)
        if not hasattr(module, "get_sweep"):
            example = "qerl_jax/config/experiments/aqn_ablation.py shows one"
            raise UserError(f"{path} has no get_sweep(): {example}")
        sweep = module.get_sweep(preset) if colon else module.get_sweep()
    if not sweep:
        raise UserError(f"get_sweep() of {path} returns no runs")
    if not isinstance(sweep, list) or not all(isinstance(run, dict) for run in sweep):
        raise UserError(
            f"get_sweep() of {path} must return a list of overrides, such as "
            "[{'aqn.schedule': 'off', 'seed': 0}]; qerl_jax.config.sweep.product makes one"
        )
    return sweep


def _parse(arguments: Sequence[str]) -> ConfigDict:
    """The config of a command line with these arguments."""
    argv, values = ["", *cli.with_files(arguments)], flags.FlagValues()
    with cli.config_errors():
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
        cli.take_names(values["config"], argv)
        values(argv)
        return values.config.lock()


def _as_flags(overrides: ConfigOverrides) -> list[str]:
    return [f"--config.{field}={as_flag(field, value)}" for field, value in overrides.items()]


def _relative_path(file: str) -> str:
    """A path below the working directory as a relative one."""
    path, colon, preset = file.partition(":")
    if Path(path).is_relative_to(Path.cwd()):
        path = str(Path(path).relative_to(Path.cwd()))
    return f"{path}{colon}{preset}"


def _part(runs: list[Run], only: str | None) -> list[Run]:
    if only is None:
        return runs
    match = re.fullmatch(r"(\d+)/(\d+)", only)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--only={only}: write it as I/N with I from 1 to N")
    return runs[int(match[1]) - 1 :: int(match[2])]


def _write_results(runs: list[Run], folder: Path) -> None:
    table = make_table(runs)
    text = format_table(table)
    write_json(folder / "table.json", table)
    write_atomic(folder / "table.md", text)
    groups = {
        name: [run.folder for run in group if is_finished(run)]
        for name, group in settings(runs).items()
    }
    picture = plot_sweep(groups, folder / "curves.png")
    files = ["table.json", "table.md", "commands.sh", *(["curves.png"] if picture else [])]
    print(f"\n{text}\n{folder}: {', '.join(files)}", flush=True)


def main() -> None:
    """Parses the flags and runs the sweep."""
    cli.main(run, installed_file("aqn_ablation"), trains=False, description=__doc__)


if __name__ == "__main__":
    main()
