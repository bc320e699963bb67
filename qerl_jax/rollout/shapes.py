"""Rows that decode together, and the few shapes of a rollout, from the memory of the device."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import device
from qerl_jax.errors import UserError
from qerl_jax.policy import transformer
from qerl_jax.policy.collectives import TENSOR
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.part import PlannedBuffer
from qerl_jax.policy.sharding import mesh_of
from qerl_jax.rollout.config import EngineConfig, SamplingConfig, TurnConfig
from qerl_jax.rollout.drafts import lengths_of

_NARROWEST = 64  # tokens; a narrower row takes as much time
# Cache positions of a row are a multiple of 8, as attention on a Hopper GPU requires.
_POSITIONS_MULTIPLE = 8
# Tokens, padding included, in one prefill of prompts, or in one extension of rows.
_PREFILL_TOKENS = 8192
_PREFILL_DIVISOR = 8  # prefilled prompts take at most this part of kv_cache_bytes
# Below these rows a smaller batch saves nothing, as reading the weights takes the time. On a GPU
# kernel launches add to that, and each batch size is one more program to compile.
_FEWEST_ROWS, _FEWEST_ROWS_ON_GPU = 4, 32
# Rows of the smaller batch, where there is only one: long completions are few and end late.
_ONCE_DIVISOR = 4
_MANY_ROWS = 1 << 20  # more than a kernel for few rows takes
# Part of the rows that are extended together by what environments wrote; and of the widths of such
# extensions, that of each to the next wider one.
_EXTEND_DIVISOR = 4
# What rows keep on the host has this part of their positions at least, or a half of it, and so on.
_KEPT_DIVISORS = (1, 2, 4, 8)
_FINE_FROM = 64  # rows; from here on an inactive slot costs as much time as an active one
_FREE_FRACTION = 0.9  # part of a device's memory; the rest is for temporaries of the programs
_DRAFT_DIVISOR = 2  # steps of a chunk by those of a chunk with drafts
# Rows of the batches that only drafts make of use; of these one alone where there are few programs.
_DRAFT_BATCHES = 16, 8, 4
_HISTORIES = 4  # rows whose tokens are kept for drafts, for each one that decodes
_LOGITS = 4  # copies of the logits that sampling with top-k and top-p holds
# XLA starts at most 32 programs before the first one has ended. With more of them after a chunk in
# flight, a compaction would wait for it, and then the device for the host.
_COMPACTION_CALLS = 16
_CACHE_DTYPES = {"bfloat16": jnp.bfloat16, "float8": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class RolloutShapes:
    """The shapes of a rollout, few enough to compile all of its programs ahead of time."""

    cache_positions: int  # S, tokens of the widest prompt and the longest completion, rounded up
    # R, numbers of rows that decode together. The first is the full batch, each is at most 1.5
    # times the next one, and 1.25 times where the next one has 64 rows or more. With
    # `compact='once'` there are two at most: the second is a quarter of the first. There is only
    # one where rows end too late for a smaller batch to be of use.
    batch_sizes: tuple[int, ...]
    chunk_steps: int  # decode steps of a chunk
    prefill_batch: int  # P, number of prompts in one prefill
    prompt_widths: tuple[int, ...]  # T, numbers of tokens that prompts are padded to, ascending
    insert_sizes: tuple[int, ...]  # N, numbers of rows that are inserted together, ascending
    dtype: jnp.dtype  # dtype of the cache
    shared_tokens: int = 0  # number of tokens that all prompts begin with, less than every T
    # (N, T) of the extensions of rows by what environments wrote: how many rows are extended
    # together, and the number of tokens that they are padded to, ascending; () without
    # environments.
    extensions: tuple[tuple[int, int], ...] = ()
    # Numbers of positions of which rows that wait keep what they have on the host, ascending; ()
    # without environments.
    kept_positions: tuple[int, ...] = ()
    # R, numbers of rows of batches that are smaller than `batch_sizes`, where drafts make them of
    # use: all of their steps check drafts.
    draft_batches: tuple[int, ...] = ()
    # (R, T) of the steps that check drafts: rows and positions of each; () without drafts.
    drafts: tuple[tuple[int, int], ...] = ()
    draft_steps: int = 0  # decode steps of a chunk with drafts, each of which may have more tokens
    # Numbers of groups and of their rows whose tokens are kept for drafts; None without drafts.
    histories: tuple[int, int] | None = None

    @property
    def all_batches(self) -> tuple[int, ...]:
        """The numbers of rows of all batches, descending."""
        return self.batch_sizes + self.draft_batches

    def positions(self, rows: int) -> list[int]:
        """Returns the numbers of positions that a row may have in a step of some rows."""
        checked = [positions for size, positions in self.drafts if size == rows]
        return [1, *checked] if rows in self.batch_sizes else checked

    def extension(self, tokens: int) -> tuple[int, int]:
        """Returns the (N, T) of an extension of a row by a number of tokens.

        It depends on the row alone, so the row has the same numbers whatever the others do.
        """
        return next(size for size in self.extensions if size[1] >= tokens)

    def kept(self, positions: int) -> int:
        """Returns of how many positions a row is kept that has filled some."""
        return next(size for size in self.kept_positions if size >= positions)


def plan_shapes(
    params: dict,
    *,
    num_prompts: int,
    longest: int,
    group_size: int,
    model_config: ModelConfig,
    sampling: SamplingConfig,
    engine: EngineConfig,
    turns: TurnConfig | None = None,
) -> RolloutShapes:
    """Decides on the shapes of a rollout.

    Args:
        params: the policy.
        num_prompts: number of prompts.
        longest: number of tokens of the longest prompt.
        group_size: number of completions of each prompt.
        model_config: the architecture of one device.
        sampling: length of the completions.
        engine: bounds of rows and memory.
        turns: limits of conversations with an environment; None without one.

    Raises:
        UserError: a row is longer than the model's positions, or one row does not fit into the
            memory that is allowed or into the device, or stop strings end turns of a model whose
            layers do not all rewind.
    """
    rewinds = all(mixer.REWINDS for mixer in kinds.mixers_of(model_config))
    if turns is not None and sampling.stop and not rewinds:
        raise UserError(
            f"rollout.stop={sampling.stop}: the device does not see where a stop string ends a "
            f"turn, and the recurrent layers of a {model_config.model_type} cannot go back to it: "
            "leave out rollout.stop or environment.function"
        )
    new_tokens = sampling.max_new_tokens if turns is None else turns.context_tokens
    if longest + new_tokens > model_config.max_position:
        limit = "max_new_tokens" if turns is None else "environment.context_tokens"
        raise UserError(
            f"a prompt of {longest} tokens and {new_tokens} new ones are over the model's "
            f"{model_config.max_position} positions: shorten the prompt or lower {limit}"
        )
    num_prompts = max(num_prompts, engine.num_prompts)
    # Other rows are extended by what follows a turn only, see `transformer.extend`.
    shared = engine.shared_tokens if rewinds else 0
    width, positions = row_positions(longest, new_tokens)
    widths = width_buckets(width)
    if shared:  # Only the rest of a prompt is padded.
        widths = (min(width, shared + bucket(longest - shared)),)
    compute = params["embed_tokens"].dtype
    rows = num_prompts * group_size
    measures = not engine.max_rows and not engine.kv_cache_bytes
    max_rows, prefill = fit_rows(
        model_config,
        engine,
        num_prompts=num_prompts,
        group_size=group_size,
        width=width,
        positions=positions,
        buffer=PlannedBuffer(compute),
        free=bytes_left(params, engine=engine) if measures else None,
        reply_tokens=turns.longest_reply if turns else 0,
    )
    if not max_rows:
        raise UserError(
            f"the device has no memory for the policy and one row of {positions} positions: "
            "lower max_new_tokens, store the cache in 'float8', or take a smaller model"
        )
    # Chunks have equal lengths. The first token of a row is sampled from its prefill.
    chunks = -(-(sampling.max_new_tokens - 1) // engine.chunk_steps)
    steps = -(-(sampling.max_new_tokens - 1) // chunks) if chunks else 0
    if turns is not None and turns.sessions:  # Few requests come at the same time.
        prefill = min(prefill, -(-max_rows // _EXTEND_DIVISOR))
    # Each prefill has the same number of prompts.
    prefill = -(-num_prompts // -(-num_prompts // prefill))
    # The host sees which rows ended in the first chunk while the second one runs.
    smaller = _smaller_batches(max_rows, engine.compact) if chunks > 2 and not turns else ()
    batch_sizes, draft_batches, drafts = (max_rows, *smaller), (), ()
    if steps and not (turns and turns.sessions) and uses_drafts(engine, model_config, compute):
        if chunks > 2 and not turns:
            draft_batches = _batches_to_draft(batch_sizes[-1], engine.compact)
        drafts = draft_sizes(batch_sizes + draft_batches)
    inserts = _insert_sizes(min(max_rows, prefill * group_size), refills=max_rows < rows)
    return RolloutShapes(
        cache_positions=positions,
        batch_sizes=batch_sizes,
        chunk_steps=steps,
        prefill_batch=prefill,
        prompt_widths=widths,
        shared_tokens=shared,
        # Where environments are waited for, all batches have one size, see `turns`.
        insert_sizes=inserts[-1:] if turns else inserts,
        dtype=cache_dtype(engine.kv_cache_dtype, compute),
        extensions=extensions(max_rows, turns.longest_reply) if turns else (),
        kept_positions=kept_positions(positions) if turns else (),
        draft_batches=draft_batches,
        drafts=drafts,
        draft_steps=-(-steps // _DRAFT_DIVISOR),
        histories=_histories(num_prompts, group_size, max_rows, turns) if drafts else None,
    )


def uses_drafts(
    engine: EngineConfig,
    model_config: ModelConfig,
    compute: jnp.dtype,
    *,
    on_gpu: bool | None = None,
) -> bool:
    """Returns whether rollouts draft, see `EngineConfig.drafts`.

    Args:
        engine: settings of the engine.
        model_config: the architecture.
        compute: dtype of the computation.
        on_gpu: whether the device is a GPU; None for the default device.

    Raises:
        UserError: drafts are on, and the model has layers that cannot go back.
    """
    rewinds = all(mixer.REWINDS for mixer in kinds.mixers_of(model_config))
    if engine.drafts == "on" and not rewinds:
        raise UserError(
            f"rollout.drafts='on': the recurrent layers of a {model_config.model_type} cannot go "
            "back where a draft is wrong: pass 'auto' or 'off'"
        )
    if engine.drafts != "auto":
        return engine.drafts == "on"
    on_gpu = jax.default_backend() == "gpu" if on_gpu is None else on_gpu
    pays = rewinds and not kinds.has_experts(model_config)
    return on_gpu and pays and compute == jnp.bfloat16


def gathered_arrays(model_config: ModelConfig, positions: int, dtype: jnp.dtype) -> int:
    """Returns how many arrays of the cache a compaction gathers at a time.

    They take no more memory than the logits of the rows. Their number divides the numbers of arrays
    of each shape, so that each shape has one program.
    """
    arrays = jax.tree.leaves(kinds.row_shapes(model_config, positions, dtype))
    fits = logits_bytes(model_config) // max(x.size * x.dtype.itemsize for x in arrays)
    most = max(1, min(-(-len(arrays) // _COMPACTION_CALLS), fits))
    common = math.gcd(*collections.Counter((x.shape, x.dtype) for x in arrays).values())
    return max(number for number in range(1, most + 1) if common % number == 0)


def draft_sizes(batch_sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the `RolloutShapes.drafts` of some numbers of rows."""
    return tuple((rows, positions) for rows in batch_sizes for positions in lengths_of(rows))


def _histories(
    num_prompts: int, group_size: int, max_rows: int, turns: TurnConfig | None
) -> tuple[int, int]:
    """Returns the `RolloutShapes.histories`; later groups take the place of earlier ones.

    What other rows have written depends on the time of environments, and so would the last bits of
    the numbers of a row. So a row that talks to one is alone: there is one history for each slot.
    """
    if turns is not None:
        return max_rows, 1
    return min(num_prompts, -(-_HISTORIES * max_rows // group_size)), group_size


def extensions(rows: int, reply_tokens: int) -> tuple[tuple[int, int], ...]:
    """Returns the (N, T) of `RolloutShapes.extensions`.

    Args:
        rows: number of rows that decode together.
        reply_tokens: largest number of tokens of what an environment writes after a turn.
    """
    # The first token of the row and the last of the turn are fed with the environment's.
    widths = [bucket(reply_tokens + 2)]
    while (width := bucket(widths[0] // _EXTEND_DIVISOR)) >= _NARROWEST and width < widths[0]:
        widths.insert(0, width)
    most = -(-rows // _EXTEND_DIVISOR)
    return tuple((max(1, min(most, _PREFILL_TOKENS // width)), width) for width in widths)


def kept_positions(positions: int) -> tuple[int, ...]:
    """Returns the `RolloutShapes.kept_positions` of rows of some positions."""
    return tuple(
        sorted({bucket(-(-positions // divisor), limit=positions) for divisor in _KEPT_DIVISORS})
    )


def row_positions(longest: int, max_new_tokens: int) -> tuple[int, int]:
    """Returns the width that prompts are padded to, and the cache positions of a row.

    Args:
        longest: number of tokens of the longest prompt.
        max_new_tokens: largest number of tokens of a completion.
    """
    width, multiple = bucket(longest), _POSITIONS_MULTIPLE
    return width, -(-(width + max_new_tokens) // multiple) * multiple


def fit_rows(
    model_config: ModelConfig,
    engine: EngineConfig,
    *,
    num_prompts: int,
    group_size: int,
    width: int,
    positions: int,
    buffer: PlannedBuffer,
    free: int | None,
    reply_tokens: int = 0,
) -> tuple[int, int]:
    """Decides how many rows decode together, and how many prompts are in one prefill.

    Args:
        model_config: the architecture.
        engine: bounds of rows and memory, and dtype of the cache.
        num_prompts: number of prompts of the rollout.
        group_size: number of completions of each prompt.
        width: number of tokens that prompts are padded to.
        positions: cache positions of a row.
        buffer: how layers are computed.
        free: bytes of the device that a rollout may take; None does not compare with the device.
        reply_tokens: largest number of tokens of what an environment writes to rows; 0 without one.

    Returns:
        The two numbers; the first is 0 where a prefill of one prompt leaves no memory for a row.

    Raises:
        UserError: one row does not fit into kv_cache_bytes.
    """
    dtype, rows = cache_dtype(engine.kv_cache_dtype, buffer.dtype), num_prompts * group_size
    per_position, state = position_bytes(model_config, dtype), state_bytes(model_config)
    of_prompt, of_row = width * per_position + state, positions * per_position + state
    prefill = min(num_prompts, engine.prefill_prompts or num_prompts)
    prefill = min(prefill, max(1, _PREFILL_TOKENS // width))
    max_rows = min(rows, engine.max_rows or rows)
    if budget := engine.kv_cache_bytes:
        prefill = min(prefill, max(1, budget // (_PREFILL_DIVISOR * of_prompt)))
        if of_row + prefill * of_prompt > budget:
            prefill = 1
        fitting = (budget - prefill * of_prompt) // of_row
        if fitting < 1:
            raise UserError(
                f"kv_cache_bytes={budget}: one row of {positions} positions and its prompt take "
                f"{of_row + of_prompt} bytes; raise it or lower max_new_tokens"
            )
        max_rows = min(max_rows, round_down(fitting))
    if free is None:
        return max_rows, prefill
    row = row_bytes(model_config, positions=positions, dtype=dtype)
    if uses_drafts(engine, model_config, buffer.dtype):
        row += history_bytes(positions)
    for size in (prefill, 1):
        prompt_bytes = prefill_bytes(
            model_config,
            num_prompts=size,
            width=width,
            dtype=dtype,
            buffer=buffer,
            shared=engine.shared_tokens > 0,
        )
        fitting = (free - prompt_bytes) // row
        while fitting > 0:
            fitting = min(max_rows, round_down(fitting))
            moving = moved_bytes(
                model_config,
                rows=fitting,
                reply_tokens=reply_tokens,
                positions=positions,
                dtype=dtype,
                buffer=buffer,
            )
            drafting = draft_bytes(model_config, engine, rows=fitting, compute=buffer.dtype)
            decoding = max(moving, drafting)
            if fitting < rows:
                decoding += waiting_bytes(model_config, size, width=width, dtype=dtype)
            if fitting * row + max(prompt_bytes, decoding) <= free:
                return fitting, size
            fitting -= 1
    return 0, 1


def cache_dtype(name: str, compute: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of keys and values: '' is the policy's, or 'bfloat16', or 'float8' (E4M3).

    'float8' takes half the memory of bfloat16. It rounds keys and values to 4 significant bits and
    clips them at 448, without scales, so the policy that samples differs from the trainer's. With
    SmolLM2-135M in NVFP4, whose largest key is 22 and largest value 12, the log-probabilities of
    3200 tokens at temperature 1 differ by 0.091 on average in a float32 policy (by 5e-6 in its own
    dtype, by 0.005 in 'bfloat16'), and by 0.101 in a bfloat16 policy (by 0.029 in its own dtype).

    Raises:
        UserError: there is no such dtype.
    """
    if name and name not in _CACHE_DTYPES:
        raise UserError(f"kv_cache_dtype={name!r}: '', {', '.join(map(repr, _CACHE_DTYPES))}")
    return jnp.dtype(_CACHE_DTYPES.get(name, compute))


def position_bytes(model_config: ModelConfig, dtype: jnp.dtype) -> int:
    """Returns the bytes that a row keeps for each of its tokens."""
    return kept_bytes(model_config, 1, dtype) - state_bytes(model_config)


def state_bytes(model_config: ModelConfig) -> int:
    """Returns the bytes that a row keeps whatever its length."""
    return kept_bytes(model_config, 0, jnp.dtype(jnp.float32))


def kept_bytes(model_config: ModelConfig, positions: int, dtype: jnp.dtype) -> int:
    """Returns the bytes that a row keeps of some positions."""
    rows = jax.tree.leaves(kinds.row_shapes(model_config, positions, dtype))
    return sum(row.size * row.dtype.itemsize for row in rows)


def logits_bytes(model_config: ModelConfig) -> int:
    """Returns the bytes of the copies of its logits that a row has while it is sampled."""
    return _LOGITS * 4 * model_config.shards * model_config.vocab_size


def row_bytes(model_config: ModelConfig, *, positions: int, dtype: jnp.dtype) -> int:
    """Returns the bytes of a row that decodes: what it keeps of its tokens, and of its logits."""
    kept = positions * position_bytes(model_config, dtype) + state_bytes(model_config)
    return kept + logits_bytes(model_config)


def history_bytes(positions: int) -> int:
    """Returns the bytes of the tokens that are kept for drafts for each row that decodes."""
    return 4 * _HISTORIES * positions


def draft_bytes(
    model_config: ModelConfig, engine: EngineConfig, *, rows: int, compute: jnp.dtype
) -> int:
    """Returns the bytes of the logits of a draft, besides those of the rows; 0 without drafts."""
    if not uses_drafts(engine, model_config, compute):
        return 0
    checked = max(size * count for size, count in draft_sizes(range(1, rows + 1)))
    return max(0, checked - rows) * logits_bytes(model_config)


def waiting_bytes(
    model_config: ModelConfig, num_prompts: int, *, width: int, dtype: jnp.dtype
) -> int:
    """Returns the bytes of prefilled prompts whose rows wait for a slot: as a prefill returns them.

    Args:
        model_config: the architecture.
        num_prompts: number of prompts in one prefill.
        width: number of tokens that prompts are padded to.
        dtype: dtype of the cache.
    """
    kept = kept_bytes(model_config, width, dtype)
    return num_prompts * (kept + _vocabulary_bytes(model_config))


def prefill_bytes(
    model_config: ModelConfig,
    *,
    num_prompts: int,
    width: int,
    dtype: jnp.dtype,
    buffer: PlannedBuffer,
    shared: bool = False,
) -> int:
    """Returns the bytes of one prefill, as they were measured to 1 % from 128 rows on.

    Args:
        model_config: the architecture.
        num_prompts: number of prompts.
        width: number of tokens that prompts are padded to.
        dtype: dtype of the cache.
        buffer: how layers are computed.
        shared: whether prompts are extended from tokens that they share.
    """
    stored, computed = (position_bytes(model_config, each) for each in (dtype, buffer.dtype))
    cache = (num_prompts, buffer.dtype) if shared else None
    layer = _layer_bytes(model_config, (num_prompts, width, width), buffer, cache)
    kept = num_prompts * (width * (stored + computed) + state_bytes(model_config))
    return kept + layer + num_prompts * _vocabulary_bytes(model_config)


def moved_bytes(
    model_config: ModelConfig,
    *,
    rows: int,
    reply_tokens: int,
    positions: int,
    dtype: jnp.dtype,
    buffer: PlannedBuffer,
) -> int:
    """Returns the bytes of the largest change of the cache between two chunks.

    Without environments arrays of the cache are gathered for a smaller batch: one at a time, or
    several that take no more than the logits, which are planned anyway. With environments rows are
    extended, or one of them is copied to the host.

    Args:
        model_config: the architecture.
        rows: number of rows that decode together.
        reply_tokens: largest number of tokens of what an environment writes; 0 without one.
        positions: cache positions of a row.
        dtype: dtype of the cache.
        buffer: how layers are computed.
    """
    if not reply_tokens:
        arrays = jax.tree.leaves(kinds.row_shapes(model_config, positions, dtype))
        return rows * max(array.size * array.dtype.itemsize for array in arrays)
    extending = extend_bytes(
        model_config,
        rows=rows,
        reply_tokens=reply_tokens,
        positions=positions,
        dtype=dtype,
        buffer=buffer,
    )
    return max(extending, kept_bytes(model_config, positions, dtype))


def extend_bytes(
    model_config: ModelConfig,
    *,
    rows: int,
    reply_tokens: int,
    positions: int,
    dtype: jnp.dtype,
    buffer: PlannedBuffer,
) -> int:
    """Returns the bytes of the largest extension of rows by what environments wrote.

    Compiled for an H200 it takes up to a quarter less. Weights that no kernel reads are not counted
    where they are dequantized one at a time: a plan has them as the dense copy.

    Args:
        model_config: the architecture.
        rows: number of rows that decode together.
        reply_tokens: largest number of tokens of what an environment writes.
        positions: cache positions of a row.
        dtype: dtype of the cache.
        buffer: how layers are computed.
    """
    return max(
        _layer_bytes(model_config, (count, width, positions), buffer, (rows, dtype))
        + count * _vocabulary_bytes(model_config)
        for count, width in extensions(rows, reply_tokens)
    )


def _layer_bytes(
    model_config: ModelConfig,
    sizes: tuple[int, int, int],
    buffer: PlannedBuffer,
    cache: tuple[int, jnp.dtype] | None,
) -> int:
    """Bytes of the temporary arrays of a layer; arguments as of `part.Mixer.seen_bytes`."""
    rows, tokens, _ = sizes
    parts = [part.memory(model_config, buffer) for part in kinds.parts_of(model_config)]
    of_tokens = sum(part.prefill for part in parts)
    seen = max(
        mixer.seen_bytes(model_config, buffer, sizes, cache)
        for mixer in kinds.mixers_of(model_config)
    )
    capability = buffer.capability
    if capability is None:
        capability = device.cuda_capability()
    # Before Hopper GPUs, which add in bfloat16, XLA keeps summands of the residual stream in place
    # of their sum: compiled for an RTX 4090, two more arrays.
    summed = buffer.itemsize > 2 or capability >= 9.0
    states = rows * tokens * buffer.itemsize * (4 if summed else 6) * model_config.embed_dim
    block = max(part.block for part in parts)
    return states + max(rows * tokens * of_tokens, seen) + block


def block_bytes(model_config: ModelConfig, buffer: PlannedBuffer) -> int:
    """Returns the bytes of the temporary arrays of a layer whatever the number of its tokens."""
    return max(part.memory(model_config, buffer).block for part in kinds.parts_of(model_config))


def _vocabulary_bytes(model_config: ModelConfig) -> int:
    return 4 * model_config.shards * model_config.vocab_size


def bytes_left(params: dict, *, engine: EngineConfig) -> int | None:
    """Returns the bytes of the device that a rollout may take; None where they are unknown.

    The dense copy of packed weights, where the engine makes one, is subtracted.
    """
    memory = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return None
    free = int(_FREE_FRACTION * memory["bytes_limit"]) - memory["bytes_in_use"]
    return max(0, free - (dense_bytes(params) if engine.dequantize != "step" else 0))


def dequantize_mode(params: dict, mode: str = "auto") -> str:
    """Returns how a rollout outside a run dequantizes, as `EngineConfig.dequantize`.

    Args:
        params: the policy.
        mode: 'once' or 'step', which is returned; or 'auto': 'once' where a dense copy of the
            layers takes at most a third of the memory of the device, else 'step'.
    """
    if mode != "auto":
        return mode
    memory = jax.local_devices()[0].memory_stats() or {}
    fits = 3 * dense_bytes(params) <= memory.get("bytes_limit", math.inf)
    return "once" if fits else "step"


def dense_bytes(params: dict) -> int:
    """Returns the bytes that `dequantize_params` makes dense for many rows, of one device."""
    packed, mesh = transformer.packed_weights(params, rows=_MANY_ROWS), mesh_of(params)
    numbers = sum(math.prod(leaf.shape) for leaf in packed)
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    return numbers // shards * device.product_dtype(params["embed_tokens"].dtype).itemsize


def round_down(rows: int) -> int:
    """Returns the largest of 1, 2, 3, 4, 6, 8, ..., 48, 64, 80, 96, 112, 128, 160, ... <= rows."""
    power = 1 << (rows.bit_length() - 1)
    step = max(1, power // (4 if power >= _FINE_FROM else 2))
    return rows // step * step


def _batches_to_draft(rows: int, compact: str) -> tuple[int, ...]:
    """Returns the sizes that a batch of this many rows is compacted to in addition, with drafts."""
    few = _DRAFT_BATCHES if compact == "often" else _DRAFT_BATCHES[1:2]
    return tuple(size for size in few if size < rows)


def _smaller_batches(rows: int, compact: str) -> list[int]:
    """Returns the sizes that a batch of this many rows is compacted to, one after the other."""
    fewest = _FEWEST_ROWS_ON_GPU if jax.default_backend() == "gpu" else _FEWEST_ROWS
    if compact == "once":
        return [round_down(max(fewest, rows // _ONCE_DIVISOR))] if rows > fewest else []
    sizes = []
    while rows > fewest:
        rows = round_down(rows - 1)
        sizes.append(rows)
    return sizes


def _insert_sizes(rows: int, *, refills: bool) -> tuple[int, ...]:
    """Returns the number of all rows and, where slots are refilled, a quarter of it, and so on.

    Log-probabilities of first tokens depend on the size in their last bit, so a change of the sizes
    changes the results of a run.
    """
    sizes = [rows]
    while refills and sizes[-1] > 16:
        sizes.append(-(-sizes[-1] // 4))
    return tuple(sorted(sizes))


def bucket(length: int, *, limit: int | None = None) -> int:
    """Returns the smallest of 8, 16, 24, 32, 48, 64, 96, 128, ... that is at least `length`.

    Args:
        length: number of tokens that must fit.
        limit: longest possible length; the result is at most this, rounded up to a multiple of 8.
    """
    step = max(8, 1 << max(length - 1, 1).bit_length() >> 2)
    width = max(1, -(-length // step)) * step
    return width if limit is None else min(width, -(-limit // 8) * 8)


def width_buckets(width: int) -> tuple[int, ...]:
    """Returns a width and the buckets of its half and quarter, ascending, for shorter rows."""
    smaller = {bucket(part) for part in (width // 2, width // 4) if part >= _NARROWEST}
    return tuple(sorted({width} | smaller))
