"""Training step by step from Python, without a run folder.

    session = open_session(config, rewards={"correctness": (my_reward, 1.0)})
    for _ in range(10):
        session, result = train_step(session)

`loop.train` makes a run of the same steps: it logs, evaluates, saves and resumes.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from qerl_jax.compile.operation import Programs
from qerl_jax.config.fields import learns_from_text
from qerl_jax.data.problem_list import with_problems
from qerl_jax.errors import UserError
from qerl_jax.policy.trainable import Trainable
from qerl_jax.rewards.calls import announce_hosts
from qerl_jax.rewards.from_config import rewards_of
from qerl_jax.rewards.table import Rewards, table_of
from qerl_jax.training.begin import first_progress
from qerl_jax.training.compile import compile_programs
from qerl_jax.training.setup import Setup, prepare
from qerl_jax.training.step import Progress, StepResult, take_step
from qerl_jax.training.validate import validate


@dataclasses.dataclass(frozen=True)
class Session:
    """A training between two steps.

    Attributes:
        setup: model, prompts, options and programs of the rollout, which do not change.
        progress: number of steps, trained parameters, state of the optimizer, position in the data.
        programs: programs of the update.
    """

    setup: Setup
    progress: Progress
    programs: Programs

    def __repr__(self) -> str:
        steps = f"step {self.progress.step} of {self.setup.config.steps}"
        return f"Session({self.setup.model!r}, {steps})"

    @property
    def trainable(self) -> Trainable:
        """The trained parameters; `trainable.lora` is the adapter."""
        return self.progress.state.trainable


def open_session(
    config: ConfigDict,
    *,
    problems: Iterable[Mapping[str, Any]] | None = None,
    rewards: Rewards | None = None,
) -> Session:
    """Loads the model and the problems of a config, and compiles the programs of its steps.

    Args:
        config: the resolved config, see `qerl_jax/config/build.py`. Nothing is evaluated,
            saved or logged; problems are held out as in a run.
        problems: training problems, instead of those that the config names, as in `loop.train`.
        rewards: functions, or functions and weights by name, instead of the rewards that the config
            names, as in `loop.train`.

    Raises:
        UserError: the config asks for something that cannot be done, or for a beginning from
            another run.
    """
    config = with_problems(config, problems)
    validate(config)
    if config.init_from:
        raise UserError(
            f"init_from={config.init_from}: a session has no run folder to begin from another run; "
            "pass its adapter as lora.init, or use qerl_jax.train"
        )
    if learns_from_text(config):
        raise UserError(
            "sft.rows_per_step: the steps of a session sample; use qerl_jax.train to learn from "
            "text"
        )
    table = rewards_of(config, None if rewards is None else table_of(rewards))
    announce_hosts(reward for reward, _ in table.values())
    setup = prepare(config, table, schedule_steps=config.steps)
    progress = first_progress(setup)
    setup, programs = compile_programs(setup, progress.state, trains=True, evaluates=False)
    return Session(setup, progress, programs)


def train_step(session: Session) -> tuple[Session, StepResult]:
    """Takes one step: sample, score, update.

    Args:
        session: the training before the step. Its parameters are donated to the update: use the
            session that is returned.

    Returns:
        The training after the step; and the completions of the step with their rewards
        (`result.experience`), advantages, and metrics by name.

    Raises:
        UserError: no completion has a reward, or the session has taken its step.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(session.progress.state)):
        raise UserError("this session has taken its step: use the one that train_step returned")
    result = take_step(
        session.setup,
        session.progress,
        programs=session.programs,
        on_rollout=lambda rows, tokens: None,
        on_update=lambda: None,
        on_wait=lambda: None,
    )
    return dataclasses.replace(session, progress=result.progress), result
