"""The programs of an update: the functions of `train_step` with their static arguments.

They are compiled ahead of the first step, beside the programs of a rollout (`operations`), or by
jit when they are first called (`jitted`).
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from pallas_kernels import device
from qerl_jax.policy import aqn, transformer
from qerl_jax.policy.lora import Lora
from qerl_jax.rl import data_parallel, train_step
from qerl_jax.rl.objectives import custom_loss_digest
from qerl_jax.rl.packing import empty_buffer
from qerl_jax.rl.train_step import TrainState, UpdateConfig
from qerl_jax.rollout.programs import (
    Executables,
    MissingProgramError,
    Operation,
    abstract,
    committed,
    dequantization,
    described,
)
from qerl_jax.system.import_path import names_function

_Program = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class UpdatePrograms:
    """The functions of `train_step` without their static arguments.

    Attributes:
        frozen_policy: function of the policy that returns it as the other programs take it: with
            dense weights on a CPU on which these become float32, otherwise as it is.
        zero_totals: as in `train_step`.
        add_gradient: as in `train_step`.
        apply_gradient: as in `train_step`.
        buffer_logprobs: as in `train_step`; its policy is the reference policy.
        buffer_kl: as in `train_step`.
    """

    frozen_policy: _Program
    zero_totals: _Program
    add_gradient: _Program
    apply_gradient: _Program
    buffer_logprobs: _Program
    buffer_kl: _Program


def _functions(
    config: UpdateConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The jitted functions and their static arguments by name."""
    if mesh is not None:
        found = data_parallel.functions(config, optimizer, mesh)
        return {name: (function, {}) for name, function in found.items()}
    update, policy = {"config": config}, {"config": config.model}
    return {
        "zero_totals": (train_step.zero_totals, update),
        "add_gradient": (train_step.add_gradient, update),
        "apply_gradient": (train_step.apply_gradient, {"optimizer": optimizer}),
        "buffer_logprobs": (train_step.buffer_logprobs, policy),
        "buffer_kl": (train_step.buffer_kl, policy),
    }


def jitted(
    config: UpdateConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> UpdatePrograms:
    """Returns programs that jit compiles when they are first called.

    Args:
        config: static options.
        optimizer: optimizer.
        mesh: mesh of the run, or None for one device.
    """
    return UpdatePrograms(
        frozen_policy=lambda params: params,
        **{
            name: functools.partial(function, **static)
            for name, (function, static) in _functions(config, optimizer, mesh).items()
        },
    )


def operations(
    state: TrainState,
    params: dict,
    *,
    reference: tuple[dict, Lora | None] | None,
    noise: aqn.Noise | None,
    measures_kl: bool,
    buffer_tokens: int,
    config: UpdateConfig,
    optimizer: optax.GradientTransformation,
    optimizer_key: Hashable,
    mesh: Mesh | None = None,
) -> dict[str, Operation]:
    """Returns the operations that the updates of a run need, by name.

    Args:
        state: state before the first update.
        params: parameters of the policy before training.
        reference: parameters and LoRA of the reference policy, or None if the loss has no KL.
        noise: noise under which the update runs, or None.
        measures_kl: whether steps measure the KL of the policy with noise.
        buffer_tokens: positions of a buffer.
        config: static options.
        optimizer: optimizer.
        optimizer_key: identity of the optimizer across processes.
        mesh: mesh of the run, on which all arrays lie, or None for one device.
    """
    state, params, noise, reference = abstract(committed((state, params, noise, reference)))
    dequantize = dequantization(params) if mesh is None and _widens(params) else None
    if dequantize is not None:
        dense = dequantize.function.eval_shape(*dequantize.arguments(), **dequantize.static)
        dense = abstract(dense, params["embed_tokens"].sharding)
        params = transformer.dequantize_params(params, lambda _: dense)
    buffer = empty_buffer(buffer_tokens)
    if reference is not None:
        buffer = dataclasses.replace(buffer, ref_logprobs=buffer.old_logprobs)
    if mesh is not None:
        buffer = data_parallel.abstract_buffer(buffer, mesh)
    bare = dataclasses.replace(buffer, ref_logprobs=None)
    functions, temperature = _functions(config, optimizer, mesh), np.float32(1)

    def totals() -> Any:
        function, static = functions["zero_totals"]
        found = function.eval_shape(state.trainable, **static)
        if mesh is not None:
            return data_parallel.abstract_totals(found, mesh)
        return abstract(found, state.skipped_in_a_row.sharding)

    arguments: dict[str, Callable[[], tuple]] = {
        "zero_totals": lambda: (state.trainable,),
        "add_gradient": lambda: (
            *(totals(), state.trainable, params, noise, buffer),
            *(np.bool_(True), temperature),
        ),
        "apply_gradient": lambda: (state, totals()),
    }
    if reference is not None:
        arguments["buffer_logprobs"] = lambda: (*reference, bare, temperature)
    if measures_kl:
        arguments["buffer_kl"] = lambda: (
            *(params, params, state.trainable.lora),
            *(bare, temperature),
        )
    identity: tuple = config, buffer_tokens, described((state, noise, reference))
    if names_function(config.loss.objective):
        identity = *identity, custom_loss_digest(config.loss.objective)
    if mesh is not None:
        identity = *identity, tuple(mesh.shape.items())
    keys = {name: (name, *identity) for name in arguments}
    # The others do not depend on it, so that runs of several learning rates share them.
    keys["apply_gradient"] += (optimizer_key,)
    table = {name: Operation(*functions[name], arguments[name], keys[name]) for name in arguments}
    return table if dequantize is None else table | {"frozen_policy": dequantize}


def compiled(table: dict[str, Operation], executables: Executables) -> UpdatePrograms:
    """Returns the compiled programs of `operations`; those that are missing raise when called."""

    def frozen_policy(params: dict) -> dict:
        if "frozen_policy" not in table:
            return params
        return transformer.dequantize_params(params, executables[table["frozen_policy"].key])

    def missing(name: str) -> _Program:
        def call(*_: Any) -> None:
            raise MissingProgramError(f"no program is compiled for the update operation {name!r}")

        return call

    names = {field.name for field in dataclasses.fields(UpdatePrograms)} - {"frozen_policy"}
    return UpdatePrograms(
        frozen_policy=frozen_policy,
        **{
            name: executables[table[name].key] if name in table else missing(name) for name in names
        },
    )


def _widens(params: dict) -> bool:
    """Whether dense weights are stored in float32, on a CPU that is slow in bfloat16."""
    dtype = params["embed_tokens"].dtype
    return device.product_dtype(dtype) != dtype
