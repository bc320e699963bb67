"""The environments that a config names: their processes, and how a chat template writes them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from qerl_jax.data.agents import RunAgents
from qerl_jax.data.environments import RunEnvironments
from qerl_jax.data.prompt_rollout import AnyEnvironments
from qerl_jax.data.prompts import Problem, prompt_config
from qerl_jax.environments.agent_server import AgentServer
from qerl_jax.environments.chat import ChatWriter
from qerl_jax.environments.episodes import Contract, Environments, environment_of
from qerl_jax.environments.gateway import Gateway, Runner
from qerl_jax.environments.harmony import is_harmony
from qerl_jax.environments.pool import CallError, Pool
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.environments.runners import ProcessRunner, Taskset, TasksetRunner, agent_runner
from qerl_jax.environments.tools import tool_format
from qerl_jax.errors import UserError
from qerl_jax.rollout.config import has_agents
from qerl_jax.weights.tokenizer import Tokenizer, to_files

_DESCRIBE_SECONDS = 120.0
_WHOLE = "environment"  # the name where there is only one environment
_opened: dict[tuple[tuple[str, str], ...], tuple[Pool, dict[str, Contract]]] = {}


def environment_functions(config: ConfigDict, name: str = "function") -> dict[str, str]:
    """Returns the import paths of the environments, or agents, by name; {} without any.

    `name` is that of the field, `function` or `agent`.

    Raises:
        UserError: the field is malformed.
    """
    text = config.environment[name]
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
            f"environment.{name}={text!r}: write package.module:Class, functions such as "
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


def check_problems(problems: Sequence[Problem], config: ConfigDict) -> None:
    """Refuses problems whose column `environment` names no environment, or no agent."""
    field, functions = "function", contracts_of(config)
    if has_agents(config):
        field, functions = "agent", environment_functions(config, "agent")
    names = list(functions)
    for problem in problems:
        if len(names) > 1 and environment_of(problem.columns, names) not in names:
            raise UserError(
                f"a problem has environment={problem.columns.get('environment')!r}; "
                f"environment.{field} names {', '.join(names)}: correct the column"
            )


def tools_of(contracts: Mapping[str, Contract]) -> Callable[[Problem], Any]:
    """Returns a function from a problem to the tools of its prompt, None for no tools."""

    def tools(problem: Problem) -> Any:
        if not contracts:
            return None
        return contracts[environment_of(problem.columns, list(contracts))].tools or None

    return tools


def taskset_of(config: ConfigDict) -> Taskset | None:
    """Returns the taskset of verifiers whose tasks a run has; None for none."""
    options = config.environment
    taskset = Taskset(
        name=options.verifiers,
        python=options.python,
        harness=options.harness,
        options=options.options.to_dict(),
        address=options.address,
        tasks=options.tasks,
    )
    return taskset if taskset.name else None


def make_runner(config: ConfigDict, tokenizer: Tokenizer) -> ProcessRunner:
    """Makes what starts the episodes of a run's agents; its first processes are started.

    Raises:
        UserError: an agent or a taskset cannot be imported, or is none.
    """
    options = config.environment
    # Of a run of several processes, each has a server and starts the episodes of its own devices.
    processes = options.processes * max(1, config.mesh.data // jax.process_count())
    if taskset := taskset_of(config):
        with_tools = tokenizer.for_tools()
        if is_harmony(with_tools.chat_template or ""):
            raise UserError(
                f"environment.verifiers={taskset.name}: no renderer of verifiers was tried with "
                "the channels of gpt-oss: take environment.agent, or another model"
            )
        try:
            form = tool_format(with_tools.chat_template or "")
        except UserError:  # Its conversations have no tools.
            form = ""
        tokens = {
            "template_args": config.data.chat_template_args.to_dict(),
            "eos_ids": list(tokenizer.eos_ids),
            "tool_form": form,
        }
        files = to_files(tokenizer)
        return TasksetRunner(taskset, tokens, files, processes=processes)
    functions = environment_functions(config, "agent")
    return agent_runner(functions, python=options.python, processes=processes)


def make_environments(config: ConfigDict, tokenizer: Tokenizer) -> AnyEnvironments | None:
    """Makes the environments of a run; None where it has none.

    Raises:
        UserError: the chat template cannot write what they say; or agents cannot be started.
    """
    if has_agents(config):
        runner = make_runner(config, tokenizer)
        try:
            return serve_agents(config, tokenizer, runner, gives_rewards=runner.gives_rewards)
        except BaseException:
            runner.close()
            raise
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
        writers[name] = _reply_writer(writer, arguments, calls=calls, system=data.system_prompt)
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


def _reply_writer(
    tokenizer: Tokenizer, arguments: dict[str, Any], *, calls: bool, system: str
) -> ReplyWriter:
    """Returns what writes replies; of gpt-oss with a template that keeps earlier turns, if needed.

    Raises:
        UserError: the chat template changes earlier turns.
    """
    writer = ReplyWriter(tokenizer, arguments, calls, system)
    try:
        writer.check()
    except UserError:
        keeping = tokenizer.keeping_history()
        if keeping.chat_template == tokenizer.chat_template:
            raise
        writer = dataclasses.replace(writer, tokenizer=keeping)
        writer.check()
        where = f"{tokenizer.template_source}: " if tokenizer.template_source else ""
        print(f"{where}the reasoning of earlier turns stays, which this template drops", flush=True)
    return writer


def serve_agents(
    config: ConfigDict, tokenizer: Tokenizer, runner: Runner, *, gives_rewards: bool = True
) -> RunAgents:
    """Starts the server of the agents of a run, which a runner starts.

    `gives_rewards` says whether an agent may return a reward.

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
        time_limit=config.environment.session_time_limit or None,
        gives_rewards=gives_rewards,
    )
