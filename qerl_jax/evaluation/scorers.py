"""Which scorers an evaluation may call, and with which tokens.

Scorers come from the command line or from the run. A run of another person is data: of what its
folder names, only the built-in rewards are called, until the user names the others again or trusts
the folder. A token is sent only if the command names its variable, whosever the folder is.
"""

from collections.abc import Mapping
from typing import Any

from qerl_jax.errors import UserError
from qerl_jax.rewards.calls import is_built_in
from qerl_jax.rewards.functions import Reward
from qerl_jax.rewards.url import UrlReward, is_url
from qerl_jax.run.ownership import unless_own
from qerl_jax.system.import_path import import_function

# The fields of a task with a scorer: their rewards in a run, and their flags on a command line.
FIELDS = {"scorer": "correctness", "format_scorer": "format"}
FLAGS = {"scorer": "--judge", "format_scorer": "--format-judge"}


def run_scorers(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scorers of a run as settings of a task: their names, and `options` of each."""
    rewards = {field: run["rewards"].get(name, {}) for field, name in FIELDS.items()}
    names: dict[str, Any] = {field: reward.get("function", "") for field, reward in rewards.items()}
    options = {
        field: {key: reward[key] for key in reward if key not in ("function", "weight")}
        for field, reward in rewards.items()
    }
    return names | {"options": options}


def check_scorers(
    settings: Mapping[str, Any], overrides: Mapping[str, str], *, trusted: bool
) -> dict[str, dict[str, Any]]:
    """Refuses scorers that the folder of another person names, and tokens that no command names.

    Args:
        settings: the scorers of a task; its `options` are those of the run's scorers.
        overrides: settings of the command line, which take precedence: its `token_env` holds names
            of variables, separated by commas. A reward of the run gets the variable that it names;
            a name that no reward of the run has is that of all other URLs.
        trusted: whether the run is the user's own, or its folder is trusted.

    Returns:
        The options of `calls.resolve` by field.

    Raises:
        UserError: a scorer must not be called, or a name of a variable is missing or not used.
    """
    options: dict[str, dict[str, Any]] = {}
    for field in FIELDS:
        function = overrides.get(field, settings.get(field, ""))
        from_run = field not in overrides and field in settings.get("options", {})
        if from_run and function and not trusted and not is_built_in(function):
            raise UserError(
                f"the reward {function!r} is named by the folder of a run that is not yours, so it "
                f"is neither imported nor asked: name it by {FLAGS[field]} to call it, or pass "
                f"--trust if you trust all that the folder names ({unless_own()})"
            )
        options[field] = dict(settings["options"][field]) if from_run else {}
    urls = {
        field: options[field].get("token_env", "")
        for field in FIELDS
        if is_url(overrides.get(field, settings.get(field, "")))
    }
    names = [name for name in overrides.get("token_env", "").split(",") if name]
    if names and not urls:
        raise UserError(f"--token-env={','.join(names)}: no scorer is a URL; leave it out")
    spare = [name for name in names if name not in urls.values()]
    if len(spare) > 1:
        raise UserError(
            f"--token-env={','.join(names)}: no reward names {spare[0]!r}; leave it out"
        )
    for field, variable in urls.items():
        if variable and variable in names:
            continue
        if spare or (field in overrides and len(names) == 1):
            options[field]["token_env"] = (spare or names)[0]
        elif variable:
            raise UserError(
                f"the reward {settings[field]!r} of the run asks for the token in the variable "
                f"{variable!r}, which is sent only if the command names it: name it by "
                f"--token-env, or another reward by {FLAGS[field]}"
            )
    return options


def reader(scorer: str, *, imports: bool = True) -> Reward:
    """Returns a scorer, or where it cannot be imported a function that may need any answer.

    The scorers that are called are imported again, which raises the error.
    """
    if is_url(scorer):
        return UrlReward(scorer)
    try:
        if imports:
            return import_function(scorer, what="reward")
    except UserError:
        pass
    return lambda *row: None
