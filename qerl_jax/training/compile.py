"""Compiles the programs of a run before its first step: rollouts, evaluations and updates."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from qerl_jax.compile.aot import compile_operations, program_bytes
from qerl_jax.compile.operation import Executables, Operation, Programs, commit
from qerl_jax.config.fields import learns_from_text
from qerl_jax.memory.report import check_programs
from qerl_jax.policy import aqn, sharding
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import current_policy
from qerl_jax.rl import programs as rl_programs
from qerl_jax.rl.train_step import TrainState
from qerl_jax.training.setup import Setup
from qerl_jax.training.step import frozen_policies


def compile_programs(
    setup: Setup,
    state: TrainState,
    *,
    trains: bool,
    evaluates: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Setup, Programs]:
    """Compiles every program that the rest of a run can need, or loads it from the cache.

    Args:
        setup: the parts of the run that do not change.
        state: state of the run, committed to its device.
        trains: whether the run takes steps.
        evaluates: whether the run evaluates.
        on_progress: called with the number of programs that are ready and the number of all.

    Returns:
        The setup, whose samplers have the programs of rollouts and evaluations, with those of the
        other groups of a mesh as `replicas`; and the programs of updates.
    """
    policy = Policy(current_policy(setup.params, state.trainable), state.trainable.lora)
    is_text = learns_from_text(setup.config)
    updates = {}
    if trains or (evaluates and is_text):
        updates = _update_operations(setup, state, evaluates_text=evaluates and is_text)
    trains, evaluates = trains and not is_text, evaluates and not is_text
    groups = sharding.groups_of(setup.params)  # those of this process
    arrays = setup.key, *policy, setup.rollout_head
    local = commit(sharding.take_group(arrays, groups[0]))
    parts = _rollout_operations(setup, local, trains=trains, evaluates=evaluates)
    rollouts = [operation for part in parts.values() for operation in part]
    parts = parts | {"update": list(updates.values())}
    if setup.mesh is None:
        executables = compile_operations(local, [*updates.values(), *rollouts], on_progress)
        _compare_with_plan(setup, executables, parts)
        return _with_executables(setup, executables), Programs(updates, executables)
    # The updates run on the whole mesh, and each group has rollouts of its own.
    total = len(updates) + len({operation.key for operation in rollouts})

    def offset_progress(number: int) -> Callable[[int, int], None] | None:
        return on_progress and (lambda count, _: on_progress(number + count, total))

    on_mesh = compile_operations(commit(arrays), updates.values(), offset_progress(0))
    executables = compile_operations(
        local, rollouts, offset_progress(len(updates)), others=groups[1:]
    )
    executables.compiled += on_mesh.compiled
    executables.update(on_mesh)
    _compare_with_plan(setup, executables, parts)
    return _with_executables(setup, executables), Programs(updates, executables)


def _compare_with_plan(
    setup: Setup, executables: Executables, parts: Mapping[str, Sequence[Operation]]
) -> None:
    """Refuses programs that do not fit, and prints a line for each that may not; see the report."""
    if setup.memory.device.pool is None:
        return
    sizes = {part: program_bytes(executables, operations) for part, operations in parts.items()}
    for line in check_programs(setup.memory, sizes):
        print(f"warning: {line}", file=sys.stderr, flush=True)


def _with_executables(setup: Setup, executables: Executables) -> Setup:
    sampler, evaluation = (
        dataclasses.replace(one, executables=executables)
        for one in (setup.collect.sampler, setup.eval_sampler)
    )
    collect = dataclasses.replace(setup.collect, sampler=sampler)
    return dataclasses.replace(setup, collect=collect, eval_sampler=evaluation)


def _rollout_operations(
    setup: Setup, local: tuple[jax.Array, dict, Lora | None, dict], *, trains: bool, evaluates: bool
) -> dict[str, list[Operation]]:
    """The operations of rollouts and of evaluations on one group of devices.

    `local` has the key, parameters, adapter and head for rollouts as the group holds them; the head
    is for the rollouts of steps (`trains`), not of evaluations (`evaluates`).
    """
    key, params, lora, head = local
    parts = {}
    if trains:
        parts["rollout"] = setup.collect.sampler, Policy(params | head, lora)
    if evaluates:
        parts["evaluation"] = setup.eval_sampler, Policy(params, lora)
    return {
        part: sampler.operations(key, policy, num_prompts=sampler.engine.num_prompts)
        for part, (sampler, policy) in parts.items()
    }


def _update_operations(
    setup: Setup, state: TrainState, *, evaluates_text: bool
) -> dict[str, Operation]:
    config, noise = setup.config, None
    if config.aqn.correction == "noisy_forward":
        noise = aqn.Noise(
            key=setup.key,
            sigma=jnp.float32(0),
            form=config.aqn.form,
            final_norm=config.aqn.final_norm,
        )
        if setup.mesh is not None:
            noise = sharding.shard(noise, setup.mesh)
    needed = {
        "old_logprobs": config.rl.mini_batches > 1,
        "buffer_kl": config.aqn.kl_every > 0 and config.aqn.schedule != "off",
        "buffer_loss": evaluates_text,
        "own_routes_difference": config.rl.routing_check_every > 0,
    }
    of_policy = dict.fromkeys(name for name, is_needed in needed.items() if is_needed)
    return rl_programs.operations(
        state,
        setup.params,
        passes=frozen_policies(setup) | of_policy,
        noise=noise,
        buffer_tokens=setup.buffer_tokens,
        update_config=setup.update,
        optimizer=setup.method.optimizer_config,
        mesh=setup.mesh,
        fp8=config.rollout.get("dequantize") == "fp8_both",
    )
