"""The environments that a config names: their processes, and how a chat template writes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.data.agents import RunAgents
from qerl_jax.data.environments import RunEnvironments
from qerl_jax.data.prompt_rollout import AnyEnvironments
from qerl_jax.data.prompts import Problem, prompt_config
from qerl_jax.environments.agent_server import AgentServer
from qerl_jax.environments.chat import ChatWriter
from qerl_jax.environments.episodes import Contract, Environments, environment_of
from qerl_jax.environments.gateway import Gateway, Runner
from qerl_jax.environments.pool import CallError, Pool
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.environments.tools import tool_format
from qerl_jax.errors import UserError
from qerl_jax.weights.tokenizer import Tokenizer

_DESCRIBE_SECONDS = 120.0
_SESSION_SECONDS = 600.0
_WHOLE = "environment"  # the name where there is only one environment
_opened: dict[tuple[tuple[str, str], ...], tuple[Pool, dict[str, Contract]]] = {}


def environment_functions(config: ConfigDict) -> dict[str, str]:
    """Returns the import paths of the environments by name; {} where the run has none.

    Raises:
        UserError: the field is malformed.
    """
    text = config.environment.function
    if not text:
        return {}
    entries = [(_WHOLE, "=", text)]
    if "=" in text:
        entries = [entry.strip().partition("=") for entry in text.split(",")]
    functions = {name.strip(): path.strip() for name, _, path in entries}
    parts = [path.partition(":") for paths in functions.values() for path in paths.split(",")]
    well_formed = all(module.strip() and name.strip() for module, _, name in parts)
    if len(functions) != len(entries) or not all(functions) or not well_formed:
        raise UserError(
            f"environment.function={text!r}: write package.module:Class, functions such as "
            "'my:search, my:add', or several environments with the names that the column "
            "`environment` has, such as 'sums=my_env:Sums, game=my_env:Game'"
        )
    return functions


def _open(functions: Mapping[str, str]) -> tuple[Pool, dict[str, Contract]]:
    """Returns the processes of environments, which end with this process, and what they are.

    They are opened once, and again where a signal or an error has ended them.
    """
    key = tuple(functions.items())
    if key in _opened and _opened[key][0].is_open:
        return _opened[key]
    pool, contracts = Pool(functions), {}
    for name, path in key:
        try:
            answer = pool.ask({"op": "describe", "name": name}, limit=_DESCRIBE_SECONDS)
        except CallError as error:
            pool.close()
            reason = " ".join(str(error).split())
            raise UserError(
                f"environment.function={path}: {reason}; an environment has a method "
                "reset, and public methods with type hints and Google docstrings, or a "
                "method step, or it is functions with such hints and docstrings "
                "(docs/environments.md)"
            ) from error
        contracts[name] = Contract(answer["kind"], tuple(answer["tools"]), answer["rewards"])
    _opened[key] = pool, contracts
    return pool, contracts


def contracts_of(config: ConfigDict) -> dict[str, Contract]:
    """Returns what the environments of a run are, by name; {} where it has none.

    The first call starts their processes.

    Raises:
        UserError: one cannot be imported or made, or is no environment.
    """
    functions = environment_functions(config)
    return _open(functions)[1] if functions else {}


def check_problems(problems: Sequence[Problem], names: Sequence[str]) -> None:
    """Refuses problems whose column `environment` names no environment."""
    for problem in problems:
        if len(names) > 1 and environment_of(problem.columns, names) not in names:
            raise UserError(
                f"a problem has environment={problem.columns.get('environment')!r}; "
                f"environment.function names {', '.join(names)}: correct the column"
            )


def tools_of(contracts: Mapping[str, Contract]) -> Callable[[Problem], Any]:
    """Returns a function from a problem to the tools of its prompt, None for no tools."""

    def tools(problem: Problem) -> Any:
        if not contracts:
            return None
        return contracts[environment_of(problem.columns, list(contracts))].tools or None

    return tools


def make_environments(config: ConfigDict, tokenizer: Tokenizer) -> AnyEnvironments | None:
    """Makes the environments of a run; None where it has none.

    Raises:
        UserError: the chat template cannot write what they say.
    """
    if not config.environment.function:
        return None
    pool, contracts = _open(environment_functions(config))
    form, data = "", config.data
    arguments = data.chat_template_args.to_dict()
    with_tools = tokenizer.for_tools()
    if any(contract.kind == "tools" for contract in contracts.values()):
        form = tool_format(with_tools.chat_template or "", with_tools.template_source)
    writers = {}
    for name, contract in contracts.items():
        calls = contract.kind == "tools"
        writer = with_tools if calls else tokenizer
        writers[name] = ReplyWriter(writer, arguments, calls, data.system_prompt)
    for writer in writers.values():
        writer.check()
    options = config.environment
    environments = Environments(
        pool=pool,
        contracts=contracts,
        writers=writers,
        form=form,
        tokenizer=tokenizer,
        max_turns=options.max_turns,
        time_limit=options.time_limit or None,
        processes=options.processes,
    )
    return RunEnvironments(
        environments,
        tokenizer,
        prompt_config(data, chat_template_args=arguments, tools=tools_of(contracts)),
        data.max_prompt_tokens,
    )


def serve_agents(config: ConfigDict, tokenizer: Tokenizer, runner: Runner) -> RunAgents:
    """Starts the server of the agents of a run, which a runner starts.

    Raises:
        UserError: packages are missing, or the server does not start.
    """
    arguments, with_tools = config.data.chat_template_args.to_dict(), tokenizer.for_tools()
    try:
        form = tool_format(with_tools.chat_template or "")
    except UserError:  # Requests with tools are refused.
        form = ""
    writer = ChatWriter(tokenizer, with_tools, arguments, form)
    return RunAgents(
        AgentServer(Gateway(), writer),
        runner,
        tokenizer,
        prompt_config(config.data, chat_template_args=arguments),
        max_prompt_tokens=config.data.max_prompt_tokens,
        time_limit=config.environment.get("session_time_limit", _SESSION_SECONDS) or None,
    )
