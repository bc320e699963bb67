"""Episodes of a taskset of verifiers 0.4, which are the episodes of an agent.

Only the interpreter that has verifiers imports this module, and nothing else of this project. The
process that forks imports it once: the taskset is loaded and the harness prepared before the first
episode. The environment variable `QERL_JAX_TASKSET` says what to load, see `_OPTIONS`.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers.v1 as vf
from renderers import RenderedTokens, create_renderer
from renderers.base import extract_message_tool_names, load_tokenizer, reject_assistant_in_extension
from renderers.configs import CustomRendererConfig, DefaultRendererConfig, config_from_name
from renderers.default import DefaultRenderer
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime
from verifiers.v1.serve import EnvClient
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

# taskset, harness: their ids; options: further fields of the environment, as in a file of
# verifiers; address: that of an env server, or ''; tasks: largest number of tasks; tokenizer: its
# folder; template_args: variables of the chat template; eos_ids: tokens that end a turn; tool_form:
# as in `tools.tool_format`, or ''.
_OPTIONS = json.loads(os.environ["QERL_JAX_TASKSET"])
# Renderers that keep thoughts of earlier turns, or parse calls, as `TemplateRenderer` does not.
_RENDERERS = ("qwen3", "qwen3.5", "qwen3.6", "llama-3")
_PARSERS = {"hermes": "qwen3", "xml": "qwen3.5"}  # of calls; their marks must be tokens
_USER = {"role": "user", "content": "One?"}
_CONVERSATIONS = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [_USER, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "Three?"}],
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_NO_ID = "000000000"  # of a call
_SERVER_SECONDS = 20.0  # in which a server must answer


class TemplateRenderer(DefaultRenderer):
    """Writes conversations with a chat template; what the policy sampled is never encoded again.

    A prompt begins with the ids of the last turn, and continues with what the template writes after
    a turn of a short conversation, as with `replies.ReplyWriter`.
    """

    config_class = DefaultRendererConfig

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Returns the next prompt; None where the template has no end of a turn."""
        if not new_messages or reject_assistant_in_extension(new_messages):
            return None
        names = [one.get("name") or "dummy" for one in new_messages if one["role"] == "tool"]
        opening = [_USER, _turn(names)]
        starts = [
            len(self._apply([*opening, *new_messages[:count]], tools=tools))
            for count in range(len(new_messages) + 1)
        ]
        before = self._apply(opening, tools=tools)
        ends = [i for i, token in enumerate(before) if token in _OPTIONS["eos_ids"]]
        after = self._apply([*opening, *new_messages], tools=tools, add_generation_prompt=True)
        if not ends or after[: ends[-1] + 1] != before[: ends[-1] + 1]:
            return None
        previous = [*previous_prompt_ids, *previous_completion_ids]
        if previous[-1] not in _OPTIONS["eos_ids"]:
            previous.append(before[ends[-1]])
        positions = range(ends[-1] + 1, len(after))
        owners = [sum(start <= position for start in starts) - 1 for position in positions]
        owners = [-1 if owner == len(new_messages) else owner for owner in owners]
        return RenderedTokens(
            token_ids=[*previous, *after[ends[-1] + 1 :]],
            message_indices=[*[-1] * len(previous), *owners],
            message_roles=[one["role"] for one in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )


def _turn(names: Sequence[str]) -> dict[str, Any]:
    """A turn of the policy that calls some tools, or that says something."""
    if not names:
        return {"role": "assistant", "content": "Two."}
    calls = [
        {"type": "function", "id": _NO_ID, "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _renderer() -> Any:
    """The config of a renderer that writes what the chat template of the model writes."""
    tokenizer, arguments = load_tokenizer(_OPTIONS["tokenizer"]), _OPTIONS["template_args"]
    marks = tokenizer.encode("<tool_call>", add_special_tokens=False)
    template = CustomRendererConfig(
        import_path=f"{__name__}:{TemplateRenderer.__name__}",
        tool_parser=_PARSERS.get(_OPTIONS["tool_form"]) if len(marks) == 1 else None,
        **arguments,
    )
    for name in _RENDERERS:
        try:
            config = type(config_from_name(name)).model_validate({"name": name, **arguments})
            if _writes_the_template(tokenizer, config, arguments):
                return config
        except Exception:  # It is for another model.
            continue
    if _OPTIONS["address"]:  # It has no module of this project.
        raise ValueError(
            f"environment.address={_OPTIONS['address']}: a server of verifiers writes chats as "
            f"{', '.join(_RENDERERS)}, and the chat template of the model is none of these: leave "
            "environment.address out"
        )
    return template


def _writes_the_template(tokenizer: Any, config: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a renderer writes some conversations as the chat template does."""
    renderer = create_renderer(tokenizer, config)
    for messages, tools in itertools.product(_CONVERSATIONS, (None, [_TOOL])):
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **arguments
        )
        ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        if list(ids) != tokenizer.encode(text, add_special_tokens=False):
            return False
    return True


def _make() -> Any:
    """The environment of the taskset; its agents are the policy, in processes of this machine."""
    identifier = _OPTIONS["taskset"]
    fields = env_config_type(identifier).model_fields
    roles = [name for name, field in fields.items() if isinstance(field.default, AgentConfig)]
    if len(roles) != 1:
        raise ValueError(f"it has the agents {', '.join(roles)}; one agent is trained")
    agent = {"runtime": {"type": "subprocess"}}
    if _OPTIONS["harness"]:
        agent["harness"] = {"id": _OPTIONS["harness"]}
    config = {"taskset": {"id": identifier}, roles[0]: agent}
    environment = load_environment(resolve_env_config(_merged(config, _OPTIONS["options"])))
    if _OPTIONS["address"]:
        asyncio.run(_find_server())
        return environment
    role = getattr(environment.config, roles[0])
    if isinstance(role.runtime, SubprocessConfig):
        (harness,) = environment._harnesses.values()
        # Scripts get their packages here, so that no episode waits for them.
        asyncio.run(_prepare(harness))
    return environment


async def _prepare(harness: Any) -> None:
    runtime = SubprocessRuntime(SubprocessConfig(), name=f"qerl-{os.getpid()}")
    await runtime.start()
    try:
        await harness.setup(runtime)
    finally:
        await runtime.teardown()


async def _find_server() -> None:
    try:
        server = EnvClient(_OPTIONS["address"])
        try:
            await server.wait_for_server_startup(_SERVER_SECONDS)
        finally:
            await server.close()
    except Exception as error:  # ZeroMQ has its own for what is no address.
        raise ValueError(
            f"environment.address={_OPTIONS['address']}: {error}: pass the address of an env "
            "server that runs, such as tcp://127.0.0.1:5000, or leave environment.address out"
        ) from error


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict with changes."""
    merged = {**base, **changes}
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            merged[name] = _merged(base[name], value)
    return merged


def rows() -> list[dict[str, Any]]:
    """Returns the tasks as rows of problems: what each asks, or its name, and its index.

    Questions differ, as problems of one question are either trained on or evaluated.
    """
    found, questions = [], set()
    for index, task in enumerate(TASKS):
        prompt = task.data.prompt
        if not isinstance(prompt, str):
            texts = [str(message.content) for message in prompt or ()]
            prompt = "\n\n".join(texts) or task.data.name or f"task {index}"
        question = f"{prompt} (task {index})" if prompt in questions else prompt
        questions.add(prompt)
        found.append({"question": question, "index": index})
    return found


async def solve(index: int, root_url: str, api_key: str) -> tuple[float, dict[str, Any]]:
    """Runs an episode of a task; its reward is that of its trace.

    Raises:
        RuntimeError: the episode has failed.
    """
    client = TrainClientConfig(
        base_url=f"{root_url}/v1",
        api_key_var="OPENAI_API_KEY",
        renderer=RENDERER,
        renderer_model_name=_OPTIONS["tokenizer"],
    )
    episode = await _run(TASKS[index], client, api_key)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "it is not ok"
        raise RuntimeError(" ".join(reason.split()))
    (trace,) = episode.traces
    rewards = {name: one.value for name, one in trace.rewards.items() if one is not None}
    facts = {**trace.metrics, **rewards, "stop_condition": trace.stop_condition}
    return trace.reward, facts


async def _run(task: Any, client: TrainClientConfig, api_key: str) -> Any:
    """An episode of a task, here or on an env server, whose variables lack the session's key."""
    sampling = vf.SamplingConfig()
    if not _OPTIONS["address"]:
        context = ModelContext(model="policy", client=client, sampling=sampling)
        async with ENVIRONMENT.serving():
            return await ENVIRONMENT.run_episode(task, context)
    client.headers["Authorization"] = f"Bearer {api_key}"
    server = EnvClient(_OPTIONS["address"])
    try:
        return await server.run(client, "policy", sampling, task.data.model_dump(mode="json"))
    finally:
        await server.close()


ENVIRONMENT = _make()
TASKS = list(itertools.islice(ENVIRONMENT.taskset, _OPTIONS["tasks"]))
if _OPTIONS["tokenizer"]:
    RENDERER = _renderer()
    # Every episode is a fork, and finds the renderer made.
    _pool = ElasticRendererPool(
        _OPTIONS["tokenizer"], RENDERER, multiplex=TrainClientConfig().multiplex
    )
    _made = create_renderer(load_tokenizer(_OPTIONS["tokenizer"]), RENDERER)
    _pool.renderers.append(RendererSlot(_made))
