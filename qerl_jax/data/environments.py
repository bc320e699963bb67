"""The environments that a config names: what they are, their prompts, and their limits."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from qerl_jax.data.prompts import Problem, Prompt, encode_prompts
from qerl_jax.environments.episodes import Contract, Environments, Episodes, environment_of
from qerl_jax.environments.pool import CallError, Pool
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.environments.tools import tool_format
from qerl_jax.errors import UserError
from qerl_jax.rollout.config import TurnConfig
from qerl_jax.weights.tokenizer import Tokenizer

_DESCRIBE_SECONDS = 120.0
_WHOLE = "environment"  # the name where there is only one environment


def environment_functions(config: ConfigDict) -> dict[str, str]:
    """Returns the import paths of the environments by name; {} where the run has none.

    Raises:
        UserError: the field is malformed.
    """
    text = config.environment.function
    if not text:
        return {}
    if "=" not in text:
        return {_WHOLE: text.strip()}
    entries = [entry.strip().partition("=") for entry in text.split(",")]
    functions = {name.strip(): path.strip() for name, _, path in entries}
    if len(functions) != len(entries) or not all(functions) or not all(functions.values()):
        raise UserError(
            f"environment.function={text!r}: write package.module:Class, or several with the names "
            "that the column `environment` has, such as 'sums=my_env:Sums, game=my_env:Game'"
        )
    return functions


def turn_config(config: ConfigDict, *, max_new_tokens: int = 0) -> TurnConfig | None:
    """Returns the limits of conversations; None where the run has no environment.

    Args:
        config: the resolved config.
        max_new_tokens: sampled tokens of a conversation; 0 is rollout.max_new_tokens.
    """
    if not config.environment.function:
        return None
    options, sampled = config.environment, max_new_tokens or config.rollout.max_new_tokens
    replies = (options.max_turns - 1) * options.reply_tokens
    return TurnConfig(
        max_turns=options.max_turns,
        turn_tokens=options.turn_tokens,
        reply_tokens=options.reply_tokens,
        context_tokens=options.context_tokens or sampled + replies,
    )


def completion_tokens(config: ConfigDict, max_new_tokens: int) -> int:
    """Returns the largest number of tokens of a completion, those of environments included."""
    turns = turn_config(config, max_new_tokens=max_new_tokens)
    return max_new_tokens if turns is None else turns.context_tokens


def describe(config: ConfigDict, pool: Pool | None) -> dict[str, Contract]:
    """Asks the environments what they are.

    Args:
        config: the resolved config.
        pool: the processes of the environments; None without an environment.

    Raises:
        UserError: one cannot be made, or is no environment.
    """
    contracts = {}
    for name, path in pool.functions.items() if pool else ():
        try:
            answer = pool.ask({"op": "describe", "name": name}, limit=_DESCRIBE_SECONDS)
        except (CallError, EOFError, TimeoutError) as error:
            reason = str(error) or "its process ended, or did not answer"
            raise UserError(
                f"environment.function={path}: {' '.join(reason.split())}; an environment has a "
                "method reset, and public methods with type hints and Google docstrings, or a "
                "method step (docs/environments.md)"
            ) from error
        contracts[name] = Contract(answer["kind"], tuple(answer["tools"]), answer["rewards"])
    return contracts


def check_problems(problems: Sequence[Problem], names: Sequence[str]) -> None:
    """Refuses problems whose column `environment` names no environment.

    Raises:
        UserError: one does.
    """
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


def make_environments(
    config: ConfigDict, pool: Pool | None, contracts: Mapping[str, Contract], tokenizer: Tokenizer
) -> "RunEnvironments | None":
    """Makes the environments of a run; None where it has none.

    Raises:
        UserError: the chat template cannot write what they say.
    """
    if pool is None:
        return None
    form, data = "", config.data
    arguments = data.chat_template_args.to_dict()
    if any(contract.kind == "tools" for contract in contracts.values()):
        form = tool_format(tokenizer.chat_template or "", tokenizer.template_source)
    writers = {
        name: ReplyWriter(tokenizer, arguments, contract.kind == "tools", data.system_prompt)
        for name, contract in contracts.items()
    }
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
        time_limit=options.time_limit,
        processes=options.processes,
    )
    return RunEnvironments(
        environments,
        tokenizer,
        {
            "system_prompt": data.system_prompt,
            "question_suffix": data.question_suffix,
            "chat_template_args": arguments,
            "tools": tools_of(contracts),
        },
        data.max_prompt_tokens,
    )


@dataclasses.dataclass(frozen=True)
class RunEnvironments:
    """The environments of a run, and how their prompts are written.

    Attributes:
        environments: the environments.
        tokenizer: tokenizer of the policy.
        prompts: how prompts are written, as `prompts.encode_prompts` takes it.
        max_prompt_tokens: largest number of tokens of a prompt.
    """

    environments: Environments
    tokenizer: Tokenizer
    prompts: Mapping[str, Any]
    max_prompt_tokens: int

    def begin(
        self,
        key: jax.Array,
        prompts: Sequence[Prompt],
        group_size: int,
        on_wait: Callable[[], None] | None = None,
    ) -> tuple[list[Prompt], Episodes]:
        """Begins the episodes of a rollout.

        Args:
            key: PRNG key; the environments of a group have one seed, which follows from it.
            prompts: P prompts.
            group_size: G, number of rows of each prompt.
            on_wait: as in `Environments.resets`.

        Returns:
            The prompts with what the environments say at their reset, and the episodes of all rows.
        """
        seeds = [environment_seed(key, number) for number in range(len(prompts))]
        columns = [columns_of(prompt.problem) for prompt in prompts]
        texts = self.environments.resets(columns, seeds, on_wait)
        prompts = [
            self._with_text(prompt, text) if text else prompt
            for prompt, text in zip(prompts, texts, strict=True)
        ]

        def rows(values: Sequence[Any]) -> list[Any]:
            return [value for value in values for _ in range(group_size)]

        return prompts, Episodes(
            self.environments,
            rows(columns),
            rows(seeds),
            rows(texts),
            in_reasoning=rows([prompt.text.rstrip().endswith("<think>") for prompt in prompts]),
        )

    def _with_text(self, prompt: Prompt, text: str) -> Prompt:
        (changed,) = encode_prompts(
            [prompt.problem],
            self.tokenizer,
            **self.prompts,
            observation=text,
            max_prompt_tokens=self.max_prompt_tokens,
            what="prompts with what environment.function says at its reset",
        )
        return changed


def environment_seed(key: jax.Array, number: int) -> int:
    """Returns the seed of the environment of a prompt, from 0 to 2^31 - 1.

    Args:
        key: PRNG key of the rollout.
        number: number of the prompt.
    """
    data = jax.device_get(jax.random.key_data(key)).tobytes() + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "little") >> 1


def columns_of(problem: Problem) -> dict[str, Any]:
    """Returns what an environment gets of a problem: its row, its question and its answer."""
    return {"question": problem.question, "answer": problem.answer} | dict(problem.columns)
