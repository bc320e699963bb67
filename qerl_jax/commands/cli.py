"""What all command lines share: flags, and errors on one line.

Experiments that train take

    --config=FILE.py[:PRESET]     config file (default: the experiment's own)
    --config=NAME[:PRESET]        a config that is installed, such as grpo_gsm8k:qwen2.5-7b
    --config.aqn.form=relative    any field of the config; a field that the run ignores is an error
    --workdir=DIR                 run folder (default: named after the config); without --config
                                  the run in it is resumed with the config that it saved
    --print_config                print the resolved config, one field per line, and exit
    --explain=rl.clip_high        explain a field, a section or all, and exit
    --dry_run                     also count the data, render a prompt and plan the memory, and exit
    --trust                       adopt a run that is not yours: execute and call what it names

and the other commands define their own arguments (`run_command`).

Exit codes: 0 done; 1 another process of the run failed or is lost, which one line on stderr names;
2 bad input, where one line on stderr says what to change; 128 + N stopped by signal N, such as 130
by Ctrl-C; 141 the reader of stdout or stderr has ended, as by `| head`. A standard stream that the
shell has closed, as by `2>&-`, is /dev/null. A character that a stream cannot encode is shown as
`?`, or as the handler of PYTHONIOENCODING has it.
"""

import argparse
import contextlib
import difflib
import functools
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from logging import getLogger
from typing import Any, NoReturn, TextIO

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from qerl_jax.config import models
from qerl_jax.config.describe import (
    SECTIONS,
    describe_config,
    explain,
    similar_fields,
    why_left_out,
)
from qerl_jax.config.experiments import NAMES, config_file, is_installed
from qerl_jax.config.overrides import check_overrides
from qerl_jax.config.recipes import RECIPES
from qerl_jax.data.mixture import name_sources
from qerl_jax.errors import UserError, check_unicode, first_line, user_text, visible
from qerl_jax.rewards.from_config import name_rewards
from qerl_jax.system.command import command_name, name_commands
from qerl_jax.system.device_memory import take_memory
from qerl_jax.system.import_path import allow_working_directory
from qerl_jax.system.live_line import waiting
from qerl_jax.system.paths import user_path
from qerl_jax.system.signals import StoppedError
from qerl_jax.system.streams import drop_unwritten, open_standard_streams

_PRESETS = (
    f"PRESET of the configs here is MODEL or MODEL,RECIPE. Models: {', '.join(models.MODELS)}. "
    f"Recipes: {', '.join(RECIPES)}. --explain=FIELD says what a field means and may be, and "
    "--print_config prints all values."
)
# The module names under which ml_collections imports the file of --config, and `sweep` its file.
_CONFIG_MODULES = "config_config", "sweep_config"
_SAVED = "\0saved:"  # begins what stands for the config of a run, which no file is named
# Packages whose exits have said why.
_MAY_EXIT = re.compile("qerl_jax|experiments|benchmarks|argparse|absl|__main__")
# What the second error for an unreadable config file begins with.
_EARLIER_FAILURE = "Configuration is not available because of an earlier failure to load: "


def main(
    run: Callable[..., None],
    default_config: str,
    *,
    trains: bool = True,
    description: str | None = None,
) -> None:
    """Parses the flags, calls `run(config, workdir)` and exits.

    Args:
        run: the experiment; `config` is locked, `workdir` is None when the flag is not given. One
            that trains also takes `trust`.
            Import JAX inside it, so that `--help` and mistyped flags answer at once.
        default_config: the config file used without --config, `FILE.py` or `FILE.py:PRESET`.
        trains: whether the experiment trains with exactly this config. Then setting a field that
            the run ignores is an error.
        description: what --help says first; by default the docstring of the main module, which an
            installed command lacks.
    """
    if description:
        sys.modules["__main__"].__doc__ = name_commands(description)
    sys.excepthook = _print_traceback

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            with _one_line_errors():
                _check_arguments(argv[1:])
                with config_errors(argv):
                    rest = _parse_flags(argv, default_config, module=run.__module__, trains=trains)
                    if trains:
                        overrides = config_flags.get_override_values(flags.FLAGS["config"])
                        check_overrides(flags.FLAGS.config, overrides)
                    return rest
        except SystemExit as stopped:
            wants_help = any(
                argument.lstrip("-").startswith(("help", "?")) for argument in argv[1:]
            )
            # absl exits with 1 after its help
            sys.exit(0 if wants_help and stopped.code == 1 else stopped.code)

    def execute(argv: Sequence[str]) -> None:
        del argv
        if not flags.FLAGS["verbosity"].present:
            _silence_libraries()
        with _one_line_errors():
            if flags.FLAGS.explain is not None:
                print(explain(flags.FLAGS.explain, flags.FLAGS.config), end="")
            elif trains and (flags.FLAGS.print_config or flags.FLAGS.dry_run):
                _tell(flags.FLAGS.config, flags.FLAGS.workdir)
            elif flags.FLAGS.print_config:
                print(describe_config(flags.FLAGS.config), end="")
            elif trains and flags.FLAGS.trust:
                run(flags.FLAGS.config, flags.FLAGS.workdir, trust=True)
            else:
                run(flags.FLAGS.config, flags.FLAGS.workdir)

    app.run(execute, flags_parser=parse)


def _tell(config: ConfigDict, workdir: str | None) -> None:
    """Prints what --print_config or --dry_run asks for, and refuses what the run would refuse."""
    from qerl_jax.training.dry_run import check_start, dry_run

    if flags.FLAGS.print_config:
        check_start(config, workdir=workdir, reads_rows=False)
        print(describe_config(config), end="")
        return
    take_memory(config.mesh.tensor)
    flag = flags.FLAGS["config"]
    preset = flag.parser.parse(config_flags.get_config_filename(flag))
    dry_run(config, workdir=workdir, preset=preset)


@contextlib.contextmanager
def config_errors(argv: Sequence[str] = ()) -> Generator[None]:
    """Turns the exceptions of a bad config file or flag into a UserError.

    `argv` is the command line, whose flags of fields the message of an absent field names in full.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) or user_text(error):
            raise  # absl could not write its help
        raise UserError(_config_message(error, argv)) from error


def _config_message(error: BaseException, argv: Sequence[str]) -> str:
    text = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {text}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") in _CONFIG_MODULES:
            return f"{frame.f_code.co_filename}:{line}: {text}"
    if isinstance(error, OSError):
        # The flag's error for an unreadable config file ends with the system's message.
        text = str(error).strip().splitlines()[-1].strip()
        return f"cannot read the config: {text.removeprefix(_EARLIER_FAILURE)}"
    if isinstance(error, AttributeError) and error.name == "get_config":
        example = "qerl_jax/config/experiments/grpo_gsm8k.py"
        return f"the config file has no get_config(): {example} has one"
    if isinstance(error, AttributeError | KeyError):
        key = _key_message(error)
        return f"the config has no such field: {key}{_field_hint(key, argv)}"
    if isinstance(error, flags.UnrecognizedFlagError):
        return f"{error}{_flag_hint(error)}"
    if isinstance(error, flags.Error):
        return _plain_flag_message(str(error))
    raise error


def _plain_flag_message(text: str) -> str:
    """Returns absl's error for a value of a flag, without the words of Python's conversions."""
    for pattern, expected in (
        (r"invalid literal for int\(\) with base 10: .*", "a whole number"),
        (r"could not convert string to float: .*", "a number"),
        (r"Failed to parse '.*' as a ConfigDict: .*", "a table, such as {} or {'difficulty': 1.0}"),
        (r"\('Non-boolean argument to boolean flag', .*\)", "true or false"),
    ):
        text = re.sub(f"{pattern}$", f"it must be {expected}", text)
    return text


def _field_hint(key: str, argv: Sequence[str]) -> str:
    """Returns the end of a sentence that names fields in place of an absent one."""
    name = key.strip("'\"")
    if "Did you mean" in key or not re.fullmatch(r"\w+", name):
        return ""
    matches = (re.match(r"--?config\.([^=]+)", argument) for argument in argv)
    absent = next((m[1] for m in matches if m and name in m[1].split(".")), name)
    if reason := why_left_out(absent):
        return f": {reason}"
    names = similar_fields(absent)
    hint = f"; did you mean --config.{' or --config.'.join(names)}?" if names else ";"
    section = absent.rpartition(".")[0]
    known = section and section in SECTIONS
    return f"{hint} --explain={section if known else 'all'} lists the fields"


def _flag_hint(error: flags.UnrecognizedFlagError) -> str:
    """Returns the end of a sentence that names the flag of a field, such as --config.steps."""
    if reason := why_left_out(error.flagname):
        return f": {reason}"
    names = similar_fields(error.flagname)
    if not names or "Did you mean" in str(error):
        return ""
    _, equals, value = str(error.flagvalue or "").partition("=")
    options = " or ".join(f"--config.{name}={value if equals else 'VALUE'}" for name in names)
    return f"; a field of the config is set like {options}"


def new_parser(command: str, text: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a command, whose --help begins with a text."""
    return argparse.ArgumentParser(
        prog=command_name(command),
        description=name_commands(text or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None = None,
    *,
    tensor_of: Callable[[argparse.Namespace], int] = lambda _: 1,
) -> None:
    """Parses the arguments, calls `run(arguments)`, and exits with an error code if it fails.

    Args:
        parser: the parser of the arguments.
        run: the command. Import JAX inside it, so that `--help` and mistyped arguments answer at
            once. Before it begins, this process takes its part of the GPU's memory.
        argv: the arguments; None takes the arguments of the process.
        tensor_of: number of GPUs that share the weights, by the arguments.
    """
    _silence_libraries()
    sys.excepthook = _print_traceback
    with _one_line_errors():
        given = list(sys.argv[1:] if argv is None else argv)
        _check_arguments(given)
        parser.error = functools.partial(_refuse, parser, given)
        arguments = parser.parse_args(given)
        take_memory(tensor_of(arguments))
        run(arguments)


def _refuse(parser: argparse.ArgumentParser, argv: Sequence[str], message: str) -> NoReturn:
    """Says in one line what is wrong with arguments; first of all, which flag does not exist."""
    known = list(dict.fromkeys(re.findall(r"(?<!\S)\[?(--[\w-]+)", parser.format_help())))
    end = "; --help lists all arguments"
    for flag in (argument.partition("=")[0] for argument in argv):
        if re.fullmatch(r"--[\w-]+", flag) and not any(name.startswith(flag) for name in known):
            for name in difflib.get_close_matches(flag, known, n=1):
                end = f"; did you mean {name}? --help lists all arguments"
            raise UserError(f"{flag}: there is no such flag{end}")
    raise UserError(f"{message}{end}")


def importing() -> contextlib.AbstractContextManager[Any]:
    """Says that JAX and the package are imported, which takes long on a slow file system."""
    return waiting("importing JAX and the package")


def _silence_libraries() -> None:
    """Hides the log messages of libraries; warnings of Python and JAX stay."""
    # Orbax logs an error with its traceback, several times, and raises it.
    logging.get_absl_logger().setLevel("CRITICAL")
    getLogger().setLevel("ERROR")  # the level of all other libraries, such as matplotlib
    getLogger("jax").setLevel("WARNING")
    getLogger("datasets").setLevel("ERROR")
    # These libraries set their levels at import. The hub logs each of its retries, twice.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")


@contextlib.contextmanager
def _one_line_errors() -> Generator[None]:
    """Ends the process on bad input, a full disk, a signal, or streams closed as by `| head`.

    A bug keeps its traceback.
    """
    open_standard_streams()
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()  # the help
            raise
        sys.stdout.flush()
    except UserError as error:
        _fail(error)
    except BrokenPipeError:
        if not (_has_no_reader(sys.stdout) or _has_no_reader(sys.stderr)):
            raise
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if not (text := user_text(error)):
            raise
        _fail(text)
    except StoppedError as stopped:
        sys.exit(stopped.exit_code)
    except SystemExit as stopped:
        _report_exit(stopped)
        raise
    except KeyboardInterrupt:
        _interrupted()
    finally:
        drop_unwritten(sys.stdout)
        drop_unwritten(sys.stderr)


def _report_exit(stopped: SystemExit) -> None:
    """Ends the process with one line if the user's code exits, such as a config or an optimizer."""
    frames = [
        (frame.f_globals.get("__name__", ""), f"{frame.f_code.co_filename}:{line}")
        for frame, line in traceback.walk_tb(stopped.__traceback__)
    ]
    module, place = [frame for frame in frames if frame[0] != "_sitebuiltins"][-1]
    if _MAY_EXIT.fullmatch(module.partition(".")[0]):
        return
    line = visible(f"{place}: SystemExit: {stopped.code}; it must return, or raise another error")
    print(f"error: {line}", file=sys.stderr)
    code = stopped.code % 256 if isinstance(stopped.code, int) else 0  # as the system cuts it
    sys.exit(code or 2)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuses arguments that are not UTF-8, which could be neither tokenized nor printed."""
    for number, argument in enumerate(arguments, 1):
        check_unicode(argument, f"argument {number}, {ascii(argument)[1:-1][:60]}")


def _parse_flags(
    argv: Sequence[str], default_config: str, *, module: str, trains: bool
) -> list[str]:
    config_flags.DEFINE_config_file(
        "config",
        None,
        "config file, FILE.py or FILE.py:PRESET, or the name of an installed config, NAME or "
        f"NAME:PRESET ({', '.join(NAMES)}); --config.FIELD=VALUE sets a field of it. "
        f"{_PRESETS}",
    )
    take_names(flags.FLAGS["config"], argv)
    flags.FLAGS.set_default("config", (trains and _saved_run(argv)) or default_config)
    run_folder = "run folder (default: runs/EXPERIMENT-PRESET-HASH)"
    other_folder = "folder to write, for a command that writes one; see above"
    flags.DEFINE_string("workdir", None, run_folder if trains else other_folder)
    flags.DEFINE_bool("print_config", False, "print the resolved config and exit")
    flags.DEFINE_string("explain", None, "a field, a section or all: say what it means, and exit")
    names = ["config", "workdir", "print_config", "explain"]
    if trains:
        flags.DEFINE_bool("dry_run", False, "say what the run would do, and exit")
        help_text = "adopt a run of another person: execute its programs, call what it names"
        flags.DEFINE_bool("trust", False, help_text)
        names += ["dry_run", "trust"]
    names += [flag.name for flag in flags.FLAGS.get_flags_for_module(module)]
    for name in names:
        flags.FLAGS.register_key_flag_for_module(argv[0], flags.FLAGS[name])
    rest = flags.FLAGS(with_files(argv))
    if len(rest) > 1:
        raise UserError(
            f"unexpected argument {rest[1]!r}; a config field is set like --config.steps=10"
        )
    flags.FLAGS.config.lock()  # raises OSError when the file could not be read
    if flags.FLAGS.workdir == "":  # as --workdir=$UNSET, which would be the working directory
        raise UserError("--workdir is empty: pass a folder, or leave out the flag")
    return rest


def _saved_run(argv: Sequence[str]) -> str:
    """Returns what stands for the config of a run that --workdir names without --config, or ''."""
    workdir = ""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if re.match(r"--?config(=|$)", argument):
            return ""
        if match := re.fullmatch(r"--?workdir(?:=(.*))?", argument, re.DOTALL):
            workdir = following if match[1] is None else match[1]
    if not workdir or not (user_path(workdir) / "config.json").is_file():
        return ""
    from qerl_jax.run.saved_config import is_saved_run

    if not is_saved_run(user_path(workdir)):
        return ""
    trust = any(re.fullmatch(r"--?trust(=(t|true|1))?", one, re.IGNORECASE) for one in argv)
    return f"{_SAVED}{int(trust)}:{workdir}"


def _read_saved(argument: str) -> ConfigDict:
    from qerl_jax.run.saved_config import saved_config

    trust, _, workdir = argument.removeprefix(_SAVED).partition(":")
    return saved_config(user_path(workdir), trust=trust == "1")


def take_names(config_flag: flags.Flag, argv: Sequence[str]) -> None:
    """Lets the flag of a config file take rewards and sources that the file does not name.

    Flags of the command line such as --config.rewards.short.function=a:b name them.
    """
    matches = (re.match(r"--?config\.([^=]+)", argument) for argument in argv)
    config_flag.parser = _ConfigParser(config_flag.parser, [match[1] for match in matches if match])


class _ConfigParser(flags.ArgumentParser):
    """Reads the config file as another parser does, and adds the names that flags set."""

    def __init__(self, parser: flags.ArgumentParser, fields: Sequence[str]):
        self._parser, self._fields = parser, fields

    def parse(self, argument: str) -> Any:
        """Returns the config of a file, FILE.py or FILE.py:PRESET."""
        if argument.startswith(_SAVED):
            return _read_saved(argument)
        if not is_installed(argument):
            allow_working_directory()  # The file may import what is there.
        try:
            config = self._parser.parse(argument)
        except (TypeError, ValueError) as error:
            # ml_collections raises it a second time, with the traceback of the first as its text.
            cause = error.__context__ or error
            raise UserError(_config_message(cause, ())) from cause
        if config is None or isinstance(config, dict):
            raise UserError(
                f"{argument}: get_config() returned a {type(config).__name__}: return a ConfigDict"
                ", such as that of qerl_jax.get_config, with the fields that you change"
            )
        if isinstance(config, ConfigDict):  # else the file could not be read
            name_rewards(config, self._fields)
            name_sources(config, self._fields)
        return config


def with_files(argv: Sequence[str]) -> list[str]:
    """The arguments, where the value of --config is the path of a file instead of a name."""
    arguments = []
    for argument in argv:
        if arguments and arguments[-1] in ("--config", "-config"):
            argument = config_file(argument)
        elif match := re.fullmatch(r"(--?config=)(.+)", argument, re.DOTALL):
            argument = f"{match[1]}{config_file(match[2])}"
        arguments.append(argument)
    return arguments


def _fail(error: Exception | str) -> NoReturn:
    """Prints one line and exits with code 2."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    _end(f"error: {visible(' '.join(lines))}", 2)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints the traceback of a bug, of which a user's function may have made the message."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(visible(text), end="", file=sys.stderr, flush=True)


def _interrupted() -> NoReturn:
    """Prints one line and exits with code 130, that of SIGINT."""
    _end("interrupted", 128 + signal.SIGINT)


def _end(line: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # Its reader has ended.
        print(line, file=sys.stderr, flush=True)
    sys.exit(code)


def _key_message(error: BaseException) -> str:
    """The text inside ml_collections' nested AttributeError(KeyError(text))."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = str(error.args[0]) if error.args else type(error).__name__
    key, _, hint = text.partition("\n")
    match = re.match(r"(Did you mean .*) instead of ", hint)
    return f"{key} ({match[1]}?)" if match else text
