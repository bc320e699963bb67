"""The operations of an update: the functions of `train_step` by name.

They are compiled ahead of the first step, with the programs of a rollout (`operations`), or by
jit when they are first called (`functions`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from pallas_kernels import device
from qerl_jax.compile.operation import Operation, abstract, commit, tree_signature
from qerl_jax.policy import aqn, transformer
from qerl_jax.policy.dequantize import DEQUANTIZE, dequantization
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import EVERY
from qerl_jax.rl import data_parallel, train_step
from qerl_jax.rl.losses import custom_loss_digest
from qerl_jax.rl.packing import PackedBuffer, empty_buffer
from qerl_jax.rl.train_step import (
    OptimizerConfig,
    TrainState,
    UpdateConfig,
    custom_optimizer_digest,
    make_optimizer,
)
from qerl_jax.system.import_path import names_function


def functions(
    update_config: UpdateConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> dict[str, Operation]:
    """Returns the functions of an update with their static arguments, which jit compiles.

    Args:
        update_config: static options.
        optimizer: optimizer.
        mesh: mesh of the run, or None for one device.

    Returns:
        zero_totals, add_gradient, old_logprobs, apply_gradient, buffer_logprobs (whose policy is
        the reference policy), teacher_logprobs where there is a teacher, buffer_kl, buffer_loss
        and own_routes_difference, as in `train_step`.
    """
    if mesh is not None:
        on_mesh = data_parallel.functions(update_config, optimizer, mesh)
        return {name: Operation(function, {}) for name, function in on_mesh.items()}
    update, policy = {"update_config": update_config}, {"model_config": update_config.model}
    teacher = {"model_config": update_config.teacher}
    return {
        "zero_totals": Operation(train_step.zero_totals, update),
        "add_gradient": Operation(train_step.add_gradient, update),
        "old_logprobs": Operation(train_step.old_logprobs, update),
        "apply_gradient": Operation(train_step.apply_gradient, {"optimizer": optimizer}),
        "buffer_logprobs": Operation(train_step.buffer_logprobs, policy),
        "teacher_logprobs": Operation(train_step.teacher_logprobs, teacher),
        "buffer_kl": Operation(train_step.buffer_kl, policy),
        "buffer_loss": Operation(train_step.buffer_loss, policy),
        "own_routes_difference": Operation(train_step.own_routes_difference, policy),
    }


def operations(
    state: TrainState,
    params: dict,
    *,
    passes: Mapping[str, Policy | None],
    noise: aqn.Noise | None,
    buffer_tokens: int,
    update_config: UpdateConfig,
    optimizer: OptimizerConfig,
    mesh: Mesh | None = None,
    fp8: bool = False,
) -> dict[str, Operation]:
    """Returns the operations that the updates of a run need, by name.

    Besides those of `functions` there is 'dequantize' where the frozen weights become dense once:
    on a CPU on which dense weights become float32.

    Args:
        state: state before the first update.
        params: parameters of the policy before training.
        passes: forward passes of the run by the name of their function, each with the frozen
            policy that it computes, or None for the policy that is trained.
        noise: noise under which the update runs, or None.
        buffer_tokens: positions of a buffer.
        update_config: static options.
        optimizer: options of the optimizer.
        mesh: mesh of the run, which holds all arrays, or None for one device.
        fp8: whether products round weights and activations to e4m3.
    """
    frozen = {name: policy for name, policy in passes.items() if policy is not None}
    state, params, noise, frozen = abstract(commit((state, params, noise, frozen)))
    rows = EVERY if fp8 else 0
    widens = fp8 or (mesh is None and _widens(params))
    dequantize = dequantization(params, rows=rows) if widens else None
    table = {}
    if dequantize is not None:
        table[DEQUANTIZE] = Operation.of_shapes(DEQUANTIZE, *dequantize)
        dense = abstract(table[DEQUANTIZE].eval_shape(), params["embed_tokens"].sharding)
        params = transformer.dequantize_params(params, lambda _: dense, rows=rows)
    buffer, bare = _buffers(
        buffer_tokens, mesh, update_config, has_reference="buffer_logprobs" in passes
    )
    jitted = functions(update_config, make_optimizer(optimizer), mesh)
    temperature = np.float32(1)

    def totals() -> Any:
        zeros = jitted["zero_totals"]
        shapes = zeros.function.eval_shape(state.trainable, **zeros.static)
        if mesh is not None:
            return data_parallel.abstract_totals(shapes, mesh)
        return abstract(shapes, state.skipped_in_a_row.sharding)

    lora = state.trainable.lora
    of_policy: dict[str, Callable[[], tuple]] = {
        "old_logprobs": lambda: (state.trainable, params, noise, buffer, temperature),
        "buffer_kl": lambda: (params, params, lora, bare, temperature),
        "buffer_loss": lambda: (params, lora, bare, temperature),
        "own_routes_difference": lambda: (params, lora, bare, temperature),
    }
    arguments: dict[str, Callable[[], tuple]] = {
        "zero_totals": lambda: (state.trainable,),
        "add_gradient": lambda: (
            totals(),
            state.trainable,
            params,
            noise,
            buffer,
            np.bool_(True),
            temperature,
        ),
        "apply_gradient": lambda: (state, totals()),
    }
    for name, policy in frozen.items():
        arguments[name] = lambda policy=policy: (*policy, bare, temperature)
    arguments |= {name: of_policy[name] for name in passes if name not in frozen}
    identity: tuple = update_config, buffer_tokens, tree_signature((state, noise, frozen))
    if names_function(update_config.loss.objective):
        identity = *identity, custom_loss_digest(update_config.loss.objective, buffer_tokens)
    if fp8:
        identity = *identity, "fp8"
    if mesh is not None:
        identity = *identity, tuple(mesh.shape.items())
    keys = {name: (name, *identity) for name in arguments}
    # The others do not depend on it, so that runs of several learning rates share them.
    keys["apply_gradient"] += (optimizer,)
    if names_function(optimizer.name):
        transformation = make_optimizer(optimizer)
        keys["apply_gradient"] += (custom_optimizer_digest(optimizer, transformation, state),)
    return table | {
        name: jitted[name]._replace(arguments=arguments[name], key=keys[name]) for name in arguments
    }


def _buffers(
    buffer_tokens: int, mesh: Mesh | None, update_config: UpdateConfig, *, has_reference: bool
) -> tuple[PackedBuffer, PackedBuffer]:
    """Returns a buffer of an update, and one before frozen policies gave their log-probs."""
    buffer = empty_buffer(buffer_tokens)
    if update_config.replays_routes:
        buffer = dataclasses.replace(buffer, routes=update_config.model.empty_routes(buffer_tokens))
    if has_reference:
        buffer = dataclasses.replace(buffer, ref_logprobs=buffer.old_logprobs)
    if update_config.teacher is not None:
        buffer = dataclasses.replace(buffer, teacher_logprobs=buffer.old_logprobs)
    if mesh is not None:
        buffer = data_parallel.abstract_buffer(buffer, mesh)
    return buffer, dataclasses.replace(buffer, ref_logprobs=None, teacher_logprobs=None)


def _widens(params: dict) -> bool:
    """Whether dense weights are stored in float32, on a CPU that is slow in bfloat16."""
    dtype = params["embed_tokens"].dtype
    return device.product_dtype(dtype) != dtype
