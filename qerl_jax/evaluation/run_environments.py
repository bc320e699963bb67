"""Evaluations and answers of a run whose policy talks to an environment."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from qerl_jax.data.environment_config import make_environments
from qerl_jax.data.prompt_rollout import AnyEnvironments
from qerl_jax.errors import UserError
from qerl_jax.rollout.config import TurnConfig, has_turns, turn_config
from qerl_jax.run.ownership import unless_own
from qerl_jax.weights.tokenizer import Tokenizer


def has_environment(run: Mapping[str, Any] | None) -> bool:
    """Returns whether a run's config names an environment."""
    return run is not None and has_turns(ConfigDict(run["config"]))


def environments_of(
    run: Mapping[str, Any] | None, tokenizer: Tokenizer, *, trusted: bool
) -> AnyEnvironments | None:
    """Makes the environments of a run; None where it has none.

    Raises:
        UserError: the run is that of another person, or an environment cannot be made.
    """
    if run is None or not has_environment(run):
        return None
    check_trusted(run, trusted=trusted)
    config = ConfigDict(run["config"])
    config.mesh.data = 1  # One group of devices samples here, however many the run has.
    return make_environments(config, tokenizer)


def check_trusted(run: Mapping[str, Any] | None, *, trusted: bool) -> None:
    """Refuses the environment of a run of another person.

    Raises:
        UserError: the run has one, and is not trusted.
    """
    if run is not None and has_environment(run) and not trusted:
        raise UserError(
            f"the environment {_name(run)!r} is named by the folder "
            "of a run that is not yours, so it is not imported: evaluate the run with --trust if "
            f"you trust all that the folder names ({unless_own()})"
        )


def _name(run: Mapping[str, Any]) -> str:
    options = run["config"]["environment"]
    return options["function"] or options.get("agent") or options.get("verifiers")


def turns_of(run: Mapping[str, Any], max_new_tokens: int) -> TurnConfig | None:
    """Returns the limits of the conversations of a run, with a limit on their sampled tokens."""
    return turn_config(ConfigDict(run["config"]), max_new_tokens=max_new_tokens)
