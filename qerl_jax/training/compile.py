"""Compiles the programs of a run before its first step: rollouts, evaluations and updates."""

from collections.abc import Callable

import jax.numpy as jnp

from qerl_jax.compile.aot import compile_operations, rollout_operations
from qerl_jax.evaluation.greedy import greedy
from qerl_jax.policy import aqn, sharding
from qerl_jax.policy.trainable import current_policy
from qerl_jax.rl import programs as rl_programs
from qerl_jax.rl.programs import UpdatePrograms
from qerl_jax.rl.train_step import TrainState
from qerl_jax.rollout.programs import Executables, Operation, committed
from qerl_jax.rollout.replicas import most_prompts
from qerl_jax.training.setup import Setup


def compile_programs(
    setup: Setup,
    state: TrainState,
    *,
    trains: bool,
    evaluates: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Executables, UpdatePrograms]:
    """Compiles every program that the rest of a run can need, or loads it from the cache.

    Args:
        setup: the parts of the run that do not change.
        state: state of the run, committed to its device.
        trains: whether the run takes steps.
        evaluates: whether the run evaluates.
        on_progress: called with the number of programs that are ready and the number of all.

    Returns:
        The programs of rollouts and evaluations, with those of the other groups of a mesh as
        `replicas`, and the programs of updates.
    """
    trainable = state.trainable
    policy = setup.key, current_policy(setup.model.params, trainable), trainable.lora
    updates = _update_operations(setup, state) if trains else {}
    groups = sharding.groups_of(setup.model.params)  # those of this process
    count = len(groups) * setup.processes.count
    local, head = sharding.on_group((policy, setup.rollout_head), groups[0])
    rollouts = _rollout_operations(setup, local, head, count) if trains else []
    if evaluates:
        rollouts += _evaluation_operations(setup, local, count)
    arrays = committed((*local, head))
    if setup.mesh is None:
        executables = compile_operations(arrays, [*updates.values(), *rollouts], on_progress)
        return executables, rl_programs.compiled(updates, executables)
    # The updates run on the whole mesh, and each group has rollouts of its own.
    total = len(updates) + len({operation.key for operation in rollouts})

    def after(number: int) -> Callable[[int, int], None] | None:
        return on_progress and (lambda done, _: on_progress(number + done, total))

    everywhere = committed((*policy, setup.rollout_head))
    found = compile_operations(everywhere, updates.values(), after(0))
    executables = compile_operations(arrays, rollouts, after(len(updates)), others=groups[1:])
    executables.compiled += found.compiled
    executables.update(found)
    return executables, rl_programs.compiled(updates, executables)


def _rollout_operations(setup: Setup, policy: tuple, head: dict, groups: int) -> list[Operation]:
    key, params, lora = policy
    return rollout_operations(
        key,
        params | head,
        lora,
        prompts=most_prompts(setup.collect.prompts_per_step, groups),
        config=setup.model.config,
        sampling=setup.collect.sampling,
        tokenizer=setup.model.tokenizer,
        engine=setup.collect.engine,
        group_size=setup.collect.group_size,
    )


def _evaluation_operations(setup: Setup, policy: tuple, groups: int) -> list[Operation]:
    return rollout_operations(
        *policy,
        prompts=most_prompts(len(setup.eval_prompts), groups),
        config=setup.model.config,
        sampling=greedy(setup.eval_sampling),
        tokenizer=setup.model.tokenizer,
        engine=setup.eval_engine,
    )


def _update_operations(setup: Setup, state: TrainState) -> dict[str, Operation]:
    config, noise = setup.config, None
    if config.aqn.correction == "noisy_forward":
        noise = aqn.Noise(
            key=setup.key,
            sigma=jnp.float32(0),
            form=config.aqn.form,
            final_norm=config.aqn.final_norm,
        )
        if setup.mesh is not None:
            noise = sharding.placed(noise, setup.mesh)
    return rl_programs.operations(
        state,
        setup.model.params,
        reference=setup.reference if setup.update.loss.kl_coef else None,
        noise=noise,
        measures_kl=bool(config.aqn.kl_every) and config.aqn.schedule != "off",
        buffer_tokens=setup.memory.buffer_tokens,
        config=setup.update,
        optimizer=setup.method.optimizer,
        optimizer_key=setup.method.optimizer_key,
        mesh=setup.mesh,
    )
