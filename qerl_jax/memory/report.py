"""What follows from the plan of a run: whether it fits, what would, and the plan as text."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from qerl_jax.compile.aot import program_bytes
from qerl_jax.config.fields import learns_from_text
from qerl_jax.errors import UserError
from qerl_jax.memory.run_plan import (
    Device,
    PlannedTeacher,
    RunPlan,
    plan_rollout,
    plan_run,
    this_device,
)
from qerl_jax.memory.update_plan import LongestRows, plan_update
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.policy.lora import fuse
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.rollout.config import completion_tokens
from qerl_jax.rollout.sampler import Sampler
from qerl_jax.rollout.shapes import cache_dtype, dense_bytes, round_down, row_bytes

_LESS = 0.9  # part of the bytes of an update that the next smaller one may take


def check_fits(plan: RunPlan, config: ConfigDict, model: ModelConfig) -> None:
    """Refuses a run that does not fit into the memory of its device.

    Raises:
        UserError: the run does not fit; the message says what would.
    """
    if plan.fits:
        return
    assert plan.device.pool is not None
    assert plan.device.usable is not None
    need = f"this run takes {_gb(plan.peak)} GB, {_gb(plan.weights)} GB of it weights"
    if plan.teacher_weights:
        need += f" and {_gb(plan.teacher_weights)} GB the teacher"
    longest = largest_length(config, model, plan.device, plan.teacher)
    if longest:
        name = "sft.max_tokens" if learns_from_text(config) else "rollout.max_new_tokens"
        remedy = f"--config.{name}={longest} fits"
    elif config.train.buffer_tokens or config.train.recompute != "auto":
        remedy = "leave out train.buffer_tokens and train.recompute, or take a smaller model"
    elif config.train.parameters == "full":
        nvfp4 = "--config.train.parameters=lora with --config.model.format=nvfp4"
        remedy = f"pass {nvfp4}, or take a smaller model"
    elif config.model.format == "bf16":
        remedy = "pass --config.model.format=nvfp4, or take a smaller model"
    else:
        smaller = "teacher, model" if plan.teacher_weights else "model"
        remedy = f"take a smaller {smaller} or a larger card"
    raise UserError(
        f"{need}, and may take {_gb(plan.device.usable)} GB of the {_gb(plan.device.pool)} GB that "
        f"JAX has: {remedy}"
    )


def check_programs(plan: RunPlan, programs: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Compares compiled programs with the plan of a run, before the first step.

    Args:
        plan: the plan of the run.
        programs: by 'rollout', 'evaluation' and 'update' the bytes of each program by its name:
            of its results and temporary arrays, without its arguments.

    Returns:
        A line for each program that takes more than the plan has for it, and more than the plan
        leaves free.

    Raises:
        UserError: a program does not fit into the memory that JAX has.
    """
    lines = []
    for part, sizes in programs.items():
        if part == "update":
            remedy = f"--config.train.buffer_tokens (now {plan.buffer_tokens})"
        else:
            remedy = f"--config.rollout.max_rows (now {plan.part(part).rows})"
        for name, size in sizes.items():
            planned, held = plan.program_bytes(part, name), plan.held_bytes(part, name, sizes)
            title = f"the program {name!r} of the {part}"
            lines += _compare(plan.device, title, size, planned=planned, held=held, remedy=remedy)
    return lines


def check_sampler(sampler: Sampler, key: jax.Array, policy: Policy, *, remedy: str) -> list[str]:
    """Compares the compiled programs of rollouts outside of a run with their plan.

    Args:
        sampler: the sampler with its programs, whose engine has the longest prompt and their
            number, and a bound of the rows that decode together.
        key: PRNG key like those of the rollouts.
        policy: the policy, on one device.
        remedy: what to lower where a program does not fit.

    Returns:
        A line for each program, as `check_programs`.

    Raises:
        UserError: a program does not fit into the memory that JAX has.
    """
    device = this_device()
    if device.pool is None:
        return []
    assert sampler.executables is not None
    model, engine, turns = sampler.model_config, sampler.engine, sampler.turns
    compute = policy.params["embed_tokens"].dtype
    adapter = jax.eval_shape(lambda lora: fuse(lora, model, compute), policy.lora)
    dense = dense_bytes(policy.params)
    plan = plan_rollout(
        model,
        engine,
        LongestRows(
            prompt=engine.prompt_width,
            new_tokens=turns.context_tokens if turns else sampler.sampling.max_new_tokens,
            group_size=sampler.group_size,
            num_prompts=engine.num_prompts,
        ),
        buffer=PlannedBuffer(compute),
        turns=turns,
        copies=(
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(adapter)),
            dense if engine.dequantize == "once" else dense // model.num_layers,
        ),
        free=None,
    )
    operations = sampler.operations(key, policy, num_prompts=engine.num_prompts)
    sizes = program_bytes(sampler.executables, operations)
    in_use = (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    lines = []
    for name, size in sizes.items():
        planned, held = plan.program_bytes(name), in_use + plan.held_bytes(name, sizes)
        title = f"the program {name!r}"
        lines += _compare(device, title, size, planned=planned, held=held, remedy=remedy)
    return lines


def _compare(
    device: Device, title: str, size: int, *, planned: int, held: int, remedy: str
) -> list[str]:
    """A line where a program takes more than was planned and is free; see `check_programs`."""
    if device.pool is None or device.usable is None:
        return []
    need = (
        f"{title} takes {_gb(size)} GB, where the plan has {_gb(planned)} GB, and what is held "
        f"meanwhile takes {_gb(held)} GB: together {_gb(held + size)} GB, more than the "
    )
    pool = f"{_gb(device.pool)} GB that JAX has; lower {remedy}"
    if held + size > device.pool:
        raise UserError(need + pool)
    if size <= planned or held + size <= device.usable:
        return []
    return [f"{need}{_gb(device.usable)} GB that a plan fills of the {pool}"]


def out_of_memory(plan: RunPlan, config: ConfigDict, model: ModelConfig) -> str:
    """Returns what to lower where a run that fits by its plan is out of memory all the same."""
    tokens, again = plan.update.buffer_tokens, plan.update.recompute
    smaller = None
    if plan.device.pool is not None:
        smaller = plan_update(
            shard_of(model, config.mesh.tensor),
            plan.longest,
            adapter=plan.rollout.policy_copy,
            dtype=jnp.dtype(config.model.dtype),
            buffer_tokens=0,
            recompute=None,
            free=int(_LESS * plan.update.bytes),
            adapts_experts=config.lora.expert_rank > 0,
            teacher=None
            if plan.teacher is None
            else shard_of(plan.teacher.model, config.mesh.tensor),
        )
    buffer = "lower --config.train.buffer_tokens"
    if smaller and smaller.bytes < plan.update.bytes:
        buffer = f"pass --config.train.buffer_tokens={smaller.buffer_tokens} (now {tokens})"
        if smaller.recompute != again:
            names = ",".join(smaller.recompute) or "none"
            buffer += f" with --config.train.recompute={names}"
    if rows := plan.rollout.rows:  # A run that learns from text has none.
        fewer = f"={max(1, 3 * rows // 4)} (now {rows})"
        buffer += f"; or, if it was the rollout that did not fit, --config.rollout.max_rows{fewer}"
    return f"{buffer}; a run that has begun resumes with the new value"


def largest_length(
    config: ConfigDict, model: ModelConfig, device: Device, teacher: PlannedTeacher | None = None
) -> int:
    """Returns the largest rollout.max_new_tokens, or sft.max_tokens, that fits, 0 if none does.

    Rows that do not decode together wait, so the length is bounded by one row and one buffer.
    """
    is_text = learns_from_text(config)

    def fits(new_tokens: int) -> bool:
        other = config.copy_and_resolve_references()
        with other.unlocked():
            # The smallest buffer that holds a row, or that of the user.
            if is_text:
                other.sft.max_tokens = row = new_tokens
            else:
                other.rollout.max_new_tokens = other.eval.max_new_tokens = new_tokens
                row = config.data.max_prompt_tokens - 1 + completion_tokens(other, new_tokens)
            other.train.buffer_tokens = config.train.buffer_tokens or row
        if row > other.train.buffer_tokens:
            return False
        return plan_run(other, model, device, teacher=teacher).fits

    prompt = 0 if is_text else config.data.max_prompt_tokens
    return _largest(fits, model.max_position - prompt)


def largest_rows(plan: RunPlan, config: ConfigDict, model: ModelConfig) -> int | None:
    """Returns how many rows could decode together, as a run chooses; None if that is unknown."""
    usable = plan.device.usable
    if usable is None or learns_from_text(config):
        return None
    rollout = plan.rollout
    free = usable - plan.held - rollout.policy_copy - rollout.dense_copy
    free -= rollout.temporary
    dtype = cache_dtype(config.rollout.kv_cache_dtype, jnp.dtype(config.model.dtype))
    model = shard_of(model, config.mesh.tensor)
    rows = free // row_bytes(model, positions=rollout.positions, dtype=dtype)
    return round_down(rows) if rows > 0 else 0


def format_plan(plan: RunPlan, config: ConfigDict) -> str:
    """Returns a plan as lines of text."""
    rollout, update = plan.rollout, plan.update
    states = f" and a state of {rollout.state / 1e6:.1f} MB" if rollout.state else ""
    again = ", ".join(update.recompute) or "none"
    sampling = f"rollout {_gb(plan.rollout_peak)}, " if rollout.all_rows else ""
    rows = [
        ("weights", plan.weights, config.model.format),
        ("adapter and optimizer", plan.training, f"train.parameters={config.train.parameters}"),
        (
            "keys, values, states" if states else "keys and values",
            rollout.cache,
            f"{rollout.rows} of {rollout.all_rows} rows decode together, {rollout.positions} "
            f"positions each{states}",
        ),
        (
            "rest of a rollout",
            rollout.bytes - rollout.cache,
            f"prefill of {rollout.prefill_prompts} prompts, logits, copies of what is trained"
            + (
                f"; {_gb(rollout.extension)} GB extend rows by replies" if rollout.extension else ""
            ),
        ),
        ("gradient", plan.gradient, ""),
        (
            "one update buffer",
            update.activations + max(0, update.layer - update.head),
            f"{update.buffer_tokens} tokens; recompute: {again}",
        ),
        ("head chunk", update.head, ""),
        ("peak", plan.peak, f"{sampling}update {_gb(plan.update_peak)}"),
    ]
    if not rollout.all_rows:  # It learns from text.
        rows = [row for row in rows if row[1]]
    if rollout.host:
        waiting = rollout.all_rows - rollout.rows
        group = " for each group of devices," if config.mesh.data > 1 else ""
        note = f"{group} keys and values of {waiting} rows, while they wait for an environment;"
        rows.append(("on the host, pinned", rollout.host, f"{note.strip()} not a part of the peak"))
    if rollout.routes:
        note = "the experts of every token, for updates; not a part of the peak"
        rows.append(("on the host, routes", rollout.routes, note))
    if plan.teacher is not None:
        weights = plan.teacher.format or "the weights of the policy"
        note = f"{weights}; its pass over a buffer takes {_gb(update.teacher)} GB"
        rows.insert(1, ("teacher", plan.teacher_weights, note))
    lines = [f"{name:<22}{_gb(size):>7} GB  {note}".rstrip() for name, size, note in rows]
    if plan.device.usable is not None:
        verdict = "fits into" if plan.fits else "does not fit into"
        lines.append(
            f"{verdict} {_gb(plan.device.usable)} GB, of the {_gb(plan.device.pool or 0)} GB that "
            "JAX has"
        )
    return "\n".join(lines) + "\n"


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to a limit that fits, if all smaller ones do; 0 if none does."""
    lower, upper = 0, max(0, limit)
    while lower < upper:
        middle = (lower + upper + 1) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle - 1)
    return lower


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
