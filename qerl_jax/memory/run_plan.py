"""The memory of a run by arithmetic: what fits is known before anything is loaded or compiled.

A run decides by this plan how many rows decode together and how large the buffers of an update are;
`qerl-plan` prints it for any card. It depends on the config, the architecture and the memory
alone, so a resumed run makes the same choices.
"""

import dataclasses
import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from pallas_kernels import fp4_matmul
from pallas_kernels.attention import HEAD_DIMS
from pallas_kernels.device import cuda_capability
from qerl_jax.config.fields import learns_from_text
from qerl_jax.errors import UserError
from qerl_jax.memory.update_plan import (
    Kernels,
    LongestRows,
    MemoryPlan,
    plan_update,
    recomputation,
)
from qerl_jax.policy import sizes
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.dequantize import DEQUANTIZE
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.policy.lora import LoraConfig
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.rollout.config import (
    EngineConfig,
    TurnConfig,
    completion_tokens,
    rollout_prompts,
    turn_config,
)
from qerl_jax.rollout.replicas import largest_share
from qerl_jax.rollout.shapes import (
    block_bytes,
    cache_dtype,
    draft_bytes,
    extend_bytes,
    fit_rows,
    history_bytes,
    kept_bytes,
    logits_bytes,
    moved_bytes,
    prefill_bytes,
    row_positions,
    state_bytes,
    uses_drafts,
    waiting_bytes,
)
from qerl_jax.system.device_memory import pool_of

# Part of the pool that a plan fills: the pool needs its free memory in one piece.
_USABLE = 0.95
# What packed weights take of the pool, by their bytes, after `layer_memory` copied the layers:
# 1.00 to 1.02 was measured with random NVFP4 weights of 1.5B to 72B in a pool of 78 GB. A pool that
# is hardly larger than the weights is copied in small batches, and loses a little more.
_PACKED_SPREAD = 1.02
_EVAL_PROBLEMS = 256  # problems of an evaluation that does not name their number, at most
_KERNEL_FORMATS = ("nvfp4", "mxfp4")  # formats that a kernel reads


@dataclasses.dataclass(frozen=True)
class Device:
    """What a plan needs to know of a device."""

    pool: int | None  # bytes that the run may use; None where they are unknown, as on a CPU
    kernel: str  # what multiplies packed weights, as in `fp4_matmul`: "mosaic", "mma" or "xla"
    capability: float  # compute capability of an NVIDIA GPU; 0 for any other device

    @property
    def usable(self) -> int | None:
        """Bytes of the pool that a plan fills."""
        return None if self.pool is None else int(_USABLE * self.pool)

    def layer_kernels(self, model: ModelConfig, dtype: jnp.dtype) -> Kernels:
        """Which of the kernels that every Hopper GPU has compute layers."""
        own = dtype == jnp.bfloat16 and self.kernel == "mosaic"
        return Kernels(attention=own and model.head_dim in HEAD_DIMS, layers=own)

    def buffer(self, model: ModelConfig, dtype: jnp.dtype) -> PlannedBuffer:
        """How it computes the layers of a rollout."""
        hopper = self.layer_kernels(model, dtype).layers
        return PlannedBuffer(dtype, hopper=hopper, capability=self.capability)


@dataclasses.dataclass(frozen=True)
class PlannedTeacher:
    """What a plan needs to know of a teacher."""

    model: ModelConfig  # its architecture
    adapter: LoraConfig | None = None  # its adapter, or None
    format: str = ""  # format of its own weights; '' where they are those of the policy


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """Bytes of a rollout or an evaluation besides what the run always holds, and its sizes."""

    policy_copy: int  # trained parameters in the dtype of the policy
    dense_copy: int  # dense copy of packed weights
    cache: int  # keys and values of the rows that decode together, and their recurrent states
    # Prompts in a prefill; or the logits of the rows, or an extension, copy or compaction of rows,
    # together with the prompts whose rows wait for a slot.
    temporary: int
    rows: int  # number of rows that decode together, 0 if not one fits
    all_rows: int  # number of all rows
    prefill_prompts: int  # number of prompts in one prefill
    positions: int  # cache positions of a row
    dequantize: str  # 'once' or 'step', as in `EngineConfig`
    state: int = 0  # bytes of the recurrent states of a row; they are a part of `cache`
    prefill: int = 0  # bytes of a prefill
    extension: int = 0  # bytes of an extension of rows by what environments wrote, 0 without them
    # Bytes of the host, pinned, for what rows keep that wait for an environment without a slot, of
    # all devices that hold the policy together.
    host: int = 0
    routes: int = 0  # bytes of the host for the experts of all tokens, where they are recorded

    @property
    def bytes(self) -> int:
        """Bytes at the peak of the rollout."""
        return self.policy_copy + self.dense_copy + self.cache + self.temporary

    def program_bytes(self, name: str) -> int:
        """Returns what the plan has for a program of `rollout.programs`, besides its arguments."""
        own = {DEQUANTIZE: self.dense_copy, "fuse_adapter": self.policy_copy}
        own |= {"prefill": self.prefill, "extend": self.extension}
        return own.get(name, self.temporary)

    def held_bytes(self, name: str, programs: Collection[str]) -> int:
        """Returns what a rollout of these programs holds while one of them runs."""
        made = {"fuse_adapter": self.policy_copy}
        # Where no program makes all weights dense, the copy is one of a program's own.
        made |= {DEQUANTIZE: self.dense_copy} if DEQUANTIZE in programs else {}
        return self.cache + sum(size for maker, size in made.items() if maker != name)


# Of a run that learns from text.
_NO_ROLLOUT = RolloutPlan(
    **dict.fromkeys(("policy_copy", "dense_copy", "cache", "temporary", "rows", "all_rows"), 0),
    prefill_prompts=0,
    positions=0,
    dequantize="step",
)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Bytes of a run on each of its devices, and the sizes that follow from them."""

    device: Device  # the device that the run is planned for
    longest: LongestRows  # the longest rows that a step may sample
    weights: int  # weights before training, with the copy of the head for rollouts
    training: int  # trained parameters in float32 and the state of the optimizer
    gradient: int  # gradient of an update, which is added up over buffers
    rollout: RolloutPlan  # a rollout of a step
    # A rollout of an evaluation, or None where the run does not evaluate.
    evaluation: RolloutPlan | None
    update: MemoryPlan  # an update on one buffer
    teacher: PlannedTeacher | None = None  # the teacher of the run
    teacher_weights: int = 0  # weights and adapter of the teacher, beyond those of the policy

    @property
    def held(self) -> int:
        """Bytes that the run always holds."""
        return self.weights + self.teacher_weights + self.training

    @property
    def rollout_peak(self) -> int:
        """Bytes at the peak of rollouts, those of evaluations included."""
        parts = [part.bytes for part in (self.rollout, self.evaluation) if part]
        return self.held + max(parts)

    @property
    def update_peak(self) -> int:
        """Bytes at the peak of an update."""
        return self.held + self.gradient + self.update.bytes

    def part(self, name: str) -> RolloutPlan:
        """Returns the plan of a 'rollout' or an 'evaluation'."""
        part = self.evaluation if name == "evaluation" else self.rollout
        assert part is not None
        return part

    def program_bytes(self, part: str, name: str) -> int:
        """Returns what the plan has for a program, besides its arguments.

        Args:
            part: 'rollout', 'evaluation' or 'update'.
            name: name of the program, without its sizes, as in `rollout.programs` and
                `rl.programs`.
        """
        if part == "update":
            return max(self.gradient, self.update.bytes)
        return self.part(part).program_bytes(name)

    def held_bytes(self, part: str, name: str, programs: Collection[str]) -> int:
        """Returns what a run holds while a program runs; its results are not a part of it.

        Args:
            part: as in `program_bytes`.
            name: name of the program.
            programs: names of all programs of the part.
        """
        held = self.held
        if part == "update":
            return held + (self.gradient if name != "zero_totals" else 0)
        return held + self.part(part).held_bytes(name, programs)

    @property
    def peak(self) -> int:
        """Bytes at the peak of the run."""
        return max(self.rollout_peak, self.update_peak)

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory of the device."""
        usable = self.device.usable
        parts = [part for part in (self.rollout, self.evaluation) if part and part.all_rows]
        return usable is None or (all(part.rows for part in parts) and self.peak <= usable)

    @property
    def buffer_tokens(self) -> int:
        """Positions of a buffer of the update."""
        return self.update.buffer_tokens


def this_device() -> Device:
    """Returns the default device of this process."""
    memory = jax.local_devices()[0].memory_stats() or {}
    return Device(memory.get("bytes_limit"), fp4_matmul.device_kernel(), cuda_capability())


def device_of(memory: int, capability: float, *, tensor: int = 1) -> Device:
    """Returns what `this_device` is on a card that is not there.

    Args:
        memory: bytes of the card as CUDA reports them.
        capability: its compute capability.
        tensor: number of cards that share the weights.
    """
    is_hopper = capability == 9.0
    kernel = fp4_matmul.chosen_kernel() or ("mosaic" if is_hopper else "mma")
    if kernel == "mosaic" and not is_hopper:  # It runs on Hopper GPUs alone.
        kernel = "xla"
    return Device(int(pool_of(tensor) * memory), kernel, capability)


def plan_run(
    config: ConfigDict,
    model: ModelConfig,
    device: Device,
    *,
    prompt: int = 0,
    rows: int = 0,
    weights: int = 0,
    teacher: PlannedTeacher | None = None,
) -> RunPlan:
    """Plans the memory of a run.

    Args:
        config: the resolved config.
        model: architecture of the policy; each device has its part of it, as config.mesh says.
        device: one of the devices that the run is planned for; config.mesh says how many there are.
        prompt: tokens of the longest prompt, or row of text; 0 takes data.max_prompt_tokens, or
            sft.max_tokens.
        rows: rows of the longest length that have as many tokens as a step of texts; 0 takes
            sft.rows_per_step.
        weights: bytes of the weights on a device; 0 computes them from model.format.
        teacher: the teacher of the run, if it has one.

    Returns:
        The plan. Where the run does not fit (`RunPlan.fits`), it is the plan that needs the least
        memory.

    Raises:
        UserError: a row is longer than train.buffer_tokens, it does not fit into
            rollout.kv_cache_bytes, or mesh.tensor does not divide the model.
    """
    compute, groups = jnp.dtype(config.model.dtype), config.mesh.data
    model = shard_of(model, config.mesh.tensor, format=config.model.format)
    lora = {
        "rank": config.lora.rank,
        "targets": tuple(config.lora.targets),
        "expert_rank": config.lora.expert_rank,
    }
    trained_numbers = sizes.trained_numbers(model, parameters=config.train.parameters, **lora)
    full = config.train.parameters == "full"
    if full:
        policy_copy = compute.itemsize * trained_numbers
    else:
        policy_copy = sizes.fused_adapter_bytes(model, **lora, itemsize=compute.itemsize)
    training = 3 * 4 * trained_numbers
    if (config.lora.init or config.init_from) and config.rl.kl_coef and not full:
        training += 4 * trained_numbers  # the adapter that the KL is measured to
    # Where all parameters are trained, the gradient of a buffer is held in addition to the total.
    gradient = 4 * trained_numbers * (2 if full else 1)
    weights = weights or sizes.weight_bytes(
        model, format=config.model.format, itemsize=compute.itemsize
    )
    weights += sizes.head_copy_bytes(model, config.rollout.head_format)
    weights += _spread_bytes(model, config.model.format, device)
    of_teacher, teacher_weights = _teacher_weights(config, teacher, device)
    held = weights + teacher_weights + training
    free = None if device.usable is None else device.usable - held
    longest = _longest_rows(config, prompt, rows)
    update = plan_update(
        model,
        longest,
        adapter=policy_copy,
        dtype=compute,
        buffer_tokens=config.train.buffer_tokens,
        recompute=recomputation(config.train.recompute),
        free=None if free is None else free - gradient,
        kernels=device.layer_kernels(model, compute),
        adapts_experts=config.lora.expert_rank > 0 and not full,
        teacher=of_teacher,
    )
    if learns_from_text(config):
        return RunPlan(device, longest, weights, training, gradient, _NO_ROLLOUT, None, update)
    plan = functools.partial(
        _plan_rollout, config, model, device, policy_copy=policy_copy, free=free
    )
    sampled = dataclasses.replace(longest, num_prompts=rollout_prompts(config))
    rollout = plan(sampled, max_rows=config.rollout.max_rows)
    if config.rl.routing_replay == "rollout":
        tokens = sampled.num_prompts * (longest.prompt + sampled.group_size * sampled.new_tokens)
        rollout = dataclasses.replace(rollout, routes=tokens * sizes.route_bytes(model))
    evaluation = None
    if config.eval.every:
        evaluation_rows = LongestRows(
            prompt=longest.prompt,
            new_tokens=completion_tokens(config, config.eval.max_new_tokens),
            group_size=1,
            num_prompts=config.eval.problems or _EVAL_PROBLEMS,
            devices=groups,
        )
        evaluation = plan(evaluation_rows, max_rows=max(1, rollout.rows))
    return RunPlan(
        *(device, longest, weights, training, gradient, rollout, evaluation, update),
        teacher=teacher,
        teacher_weights=teacher_weights,
    )


def _spread_bytes(model: ModelConfig, format: str, device: Device) -> int:
    """Bytes that packed weights take of a pool beyond their own."""
    if device.pool is None:
        return 0
    spread = _PACKED_SPREAD - 1
    if not model.packs_projections:
        # Widths of gpt-oss are no multiples of a tile, which those of other models hardly miss.
        spread += sizes.tile_padding(model) - 1
    return int(spread * sizes.packed_bytes(model, format))


def _teacher_weights(
    config: ConfigDict, teacher: PlannedTeacher | None, device: Device
) -> tuple[ModelConfig | None, int]:
    """The teacher's architecture on one device, and the bytes of its own weights and adapter."""
    if teacher is None:
        return None, 0
    form, size = teacher.format or config.model.format, 0
    try:
        model = shard_of(teacher.model, config.mesh.tensor, format=form)
    except UserError as error:
        raise UserError(f"the teacher, a {teacher.model.model_type}: {error}") from error
    if teacher.format:
        itemsize = jnp.dtype(config.model.dtype).itemsize
        size = sizes.weight_bytes(model, format=form, itemsize=itemsize)
        size += _spread_bytes(model, form, device)
    if (own := teacher.adapter) is not None:
        options = {"rank": own.rank, "targets": own.targets, "expert_rank": own.expert_rank}
        size += 4 * sizes.trained_numbers(model, parameters="lora", **options)
    return model, size


def _longest_rows(config: ConfigDict, prompt: int, rows: int) -> LongestRows:
    """The longest rows of a step; those of texts count as long completions."""
    if learns_from_text(config):
        count, tokens = rows or config.sft.rows_per_step, prompt or config.sft.max_tokens
        return LongestRows(1, tokens, count, 1, config.mesh.data)
    return LongestRows(
        prompt=prompt or config.data.max_prompt_tokens,
        new_tokens=completion_tokens(config, config.rollout.max_new_tokens),
        group_size=config.rollout.group_size,
        num_prompts=config.rollout.prompts_per_step,
        devices=config.mesh.data,
    )


def _plan_rollout(
    config: ConfigDict,
    model: ModelConfig,
    device: Device,
    longest: LongestRows,
    *,
    max_rows: int,
    policy_copy: int,
    free: int | None,
) -> RolloutPlan:
    """`plan_rollout` of a run."""
    most = longest.num_prompts * longest.group_size
    dequantize, dense_copy = _dequantize(config, model, device, min(max_rows or most, most))
    compute = jnp.dtype(config.model.dtype)
    engine = EngineConfig(
        drafts=config.rollout.get("drafts", "auto"),  # Runs of earlier versions lack it.
        max_rows=max_rows,
        kv_cache_bytes=config.rollout.kv_cache_bytes,
        kv_cache_dtype=config.rollout.kv_cache_dtype,
        dequantize=dequantize,
    )
    # Of a card that is not there.
    drafts = uses_drafts(engine, model, compute, on_gpu=device.pool is not None)
    engine = dataclasses.replace(engine, drafts="on" if drafts else "off")
    return plan_rollout(
        model,
        engine,
        longest,
        buffer=device.buffer(model, compute),
        turns=turn_config(config),
        copies=(policy_copy, dense_copy),
        free=free,
    )


def plan_rollout(
    model: ModelConfig,
    engine: EngineConfig,
    longest: LongestRows,
    *,
    buffer: PlannedBuffer,
    turns: TurnConfig | None,
    copies: tuple[int, int],
    free: int | None,
) -> RolloutPlan:
    """Plans the memory of a rollout.

    Args:
        model: architecture of one device.
        engine: bounds of rows and memory.
        longest: the longest rows.
        buffer: how layers are computed.
        turns: limits of conversations with an environment; None without one.
        copies: bytes of the trained parameters in the dtype of the policy, and of the dense copy of
            packed weights.
        free: bytes that weights and training state leave; None does not compare with the device.

    Returns:
        The largest rollout that fits; one of no rows, with the bytes of one, if none does.
    """
    policy_copy, dense_copy = copies
    dtype = cache_dtype(engine.kv_cache_dtype, buffer.dtype)
    width, positions = row_positions(longest.prompt, longest.new_tokens)
    num_prompts = largest_share(longest.num_prompts, longest.devices)
    rows, prefill = fit_rows(
        model,
        engine,
        num_prompts=num_prompts,
        group_size=longest.group_size,
        width=width,
        positions=positions,
        buffer=buffer,
        free=None if free is None else max(0, free - policy_copy - dense_copy),
        reply_tokens=turns.longest_reply if turns else 0,
    )
    prefilled = prefill_bytes(
        model,
        num_prompts=prefill,
        width=width,
        dtype=dtype,
        buffer=buffer,
        shared=engine.shared_tokens > 0,
    )
    row, all_rows = kept_bytes(model, positions, dtype), num_prompts * longest.group_size
    history = history_bytes(positions) if uses_drafts(engine, model, buffer.dtype) else 0
    sizes_of_rows = {
        "rows": max(1, rows),
        "reply_tokens": turns.longest_reply if turns else 0,
        "positions": positions,
        "dtype": dtype,
        "buffer": buffer,
    }
    moving = moved_bytes(model, **sizes_of_rows)
    sampling = max(1, rows) * logits_bytes(model)
    sampling += draft_bytes(model, engine, rows=max(1, rows), compute=buffer.dtype)
    decoding = max(moving, sampling, block_bytes(model, buffer))
    waiting = all_rows - rows
    if waiting:
        decoding += waiting_bytes(model, prefill, width=width, dtype=dtype)
    return RolloutPlan(
        policy_copy=policy_copy,
        dense_copy=dense_copy,
        cache=max(1, rows) * (row + history),
        temporary=max(prefilled, decoding),
        rows=rows,
        all_rows=all_rows,
        prefill_prompts=prefill,
        positions=positions,
        dequantize=engine.dequantize,
        state=state_bytes(model),
        prefill=prefilled,
        extension=extend_bytes(model, **sizes_of_rows) if turns else 0,
        host=min(turns.host_cache_bytes, waiting * row * model.shards) if turns else 0,
    )


def _dequantize(
    config: ConfigDict, model: ModelConfig, device: Device, rows: int
) -> tuple[str, int]:
    """How a rollout dequantizes weights that no kernel reads, and the bytes of its dense copy."""
    compute, format = jnp.dtype(config.model.dtype), config.model.format
    by_kernel = format in _KERNEL_FORMATS and compute == jnp.bfloat16
    if format == "bf16" or (by_kernel and device.kernel == "mosaic"):
        return "once", 0
    # The kernels read the tiles of experts in parts, however many rows there are.
    reads_stacks = by_kernel and device.kernel == "mma"
    dense = sizes.dense_layers_bytes(model, compute.itemsize, stacks=not reads_stacks)
    mode = config.rollout.dequantize
    if mode == "auto":
        mode = "once" if device.pool is None or 3 * dense <= device.pool else "step"
    packed = by_kernel and device.kernel == "mma" and rows <= fp4_matmul.MMA_ROWS
    # Of packed weights a prefill dequantizes one at a time.
    return mode, dense if mode == "once" and not packed else dense // model.num_layers
