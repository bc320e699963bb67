"""How many rows decode together, and in which few shapes: the memory arithmetic of a rollout."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from qerl_jax.buckets import bucket, narrower
from qerl_jax.errors import UserError
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.rollout.sampling import SamplingConfig

_SLOTS = 8  # of a row, or a multiple: attention on a Hopper GPU wants them so
_READ_TOKENS = 8192  # prompt tokens, padding included, that are read together
_READ_SHARE = 8  # the part of the memory that prompts which were read take at most
# Below, a smaller batch saves nothing: the weights are what is read. On a GPU the launches come to
# that, and each batch is a program to compile.
_FEWEST_ROWS, _FEWEST_ROWS_ON_GPU = 4, 32
_FINE_FROM = 64  # rows; from here on a seat that nobody needs costs what one in use does
_FREE_SHARE = 0.9  # of a device's memory; the rest is for what the programs need between
_LOGITS = 4  # copies of the logits that sampling holds, with top-k and top-p
_CACHE_DTYPES = {"bfloat16": jnp.bfloat16, "float8": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shapes of a rollout, few enough to compile all of them.

    Attributes:
        slots: S of the cache: the widest prompt and the longest completion, rounded up.
        batches: numbers of seats, the first that of the full batch, each at most 1.5 times the
            next, and 1.25 times where that has 64 or more. One alone where rows end too late for a
            smaller batch to be of use.
        steps: of a chunk.
        prompts: P, prompts that are read together.
        widths: T of prompts that are read together, ascending.
        seatings: N, rows that take seats together, ascending.
        dtype: of the cache.
    """

    slots: int
    batches: tuple[int, ...]
    steps: int
    prompts: int
    widths: tuple[int, ...]
    seatings: tuple[int, ...]
    dtype: jnp.dtype


def make_plan(
    params: dict,
    *,
    prompts: int,
    longest: int,
    group_size: int,
    config: ModelConfig,
    sampling: SamplingConfig,
    reserve: int = 0,
) -> Plan:
    """Decides on the shapes.

    Args:
        params: the policy.
        prompts: number of prompts.
        longest: tokens of the longest prompt.
        group_size: completions of each prompt.
        config: the architecture.
        sampling: lengths, and the bounds of rows and memory.
        reserve: bytes of the device that something else will take.

    Raises:
        UserError: a row is longer than the model's positions, or one row does not fit into the
            budget or the device.
    """
    if longest + sampling.max_new_tokens > config.max_position:
        raise UserError(
            f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones are over the "
            f"model's {config.max_position} positions: shorten the prompt or lower max_new_tokens"
        )
    width = bucket(longest)
    slots = -(-(width + sampling.max_new_tokens) // _SLOTS) * _SLOTS
    dtype = cache_dtype(sampling.kv_cache_dtype, params["embed_tokens"].dtype)
    position = position_bytes(config, dtype)
    read = min(prompts, max(1, _READ_TOKENS // width))
    budget = sampling.kv_cache_bytes
    if budget:
        read = min(read, max(1, budget // (_READ_SHARE * width * position)))
        if (slots + read * width) * position > budget:
            read = 1
    rows = prompts * group_size
    most = min(rows, sampling.max_rows or rows)
    if budget:
        fitting = (budget - read * width * position) // (slots * position)
        if fitting < 1:
            raise UserError(
                f"kv_cache_bytes={budget}: one row of {slots} positions and its prompt take "
                f"{(slots + width) * position} bytes; raise it or lower max_new_tokens"
            )
        most = min(most, _rounded_down(fitting))
    elif not sampling.max_rows:
        left = functools.partial(rows_left, params, slots=slots, config=config, sampling=sampling)
        fitting = left(reserve=reserve + read * width * position)
        if fitting == 0:
            read, fitting = 1, left(reserve=reserve + width * position)
        if fitting == 0:
            policy = "the policy and what trains it" if reserve else "the policy"
            raise UserError(
                f"beside {policy} the device has no memory for one row of {slots} positions: "
                "lower max_new_tokens, store the cache in 'float8', or take a smaller model"
            )
        most = most if fitting is None else min(most, _rounded_down(fitting))
    # Equal chunks: the first token comes with the prompt.
    chunks = -(-(sampling.max_new_tokens - 1) // sampling.chunk_steps)
    steps = -(-(sampling.max_new_tokens - 1) // chunks) if chunks else 0
    # As many prompts each time.
    read = -(-prompts // -(-prompts // read))
    # The first chunk's ends are known when the second one runs.
    batches = (most, *_smaller_batches(most)) if chunks > 2 else (most,)
    return Plan(
        slots=slots,
        batches=batches,
        steps=steps,
        prompts=read,
        widths=narrower(width),
        seatings=_seatings(min(most, read * group_size), refills=most < rows),
        dtype=dtype,
    )


def cache_dtype(name: str, compute: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values: '' is the policy's, or 'bfloat16', or 'float8' (E4M3).

    'float8' halves the memory of bfloat16. Keys and values are rounded to 4 significant bits and
    cut off at 448, without scales, and the policy that samples is another one than the trainer's
    by that much: SmolLM2-135M in NVFP4, whose largest key is 22 and largest value 12, has 3200
    tokens of temperature 1 whose log-probabilities differ by 0.091 on average in a float32 policy
    (without it by 5e-6, with 'bfloat16' by 0.005) and by 0.101 in a bfloat16 one (0.029).

    Raises:
        UserError: there is no such dtype.
    """
    if name and name not in _CACHE_DTYPES:
        raise UserError(f"kv_cache_dtype={name!r}: '', {', '.join(map(repr, _CACHE_DTYPES))}")
    return jnp.dtype(_CACHE_DTYPES.get(name, compute))


def position_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def rows_left(
    params: dict, *, slots: int, config: ModelConfig, sampling: SamplingConfig, reserve: int = 0
) -> int | None:
    """Rows that fit into what the device has left; None where it does not say.

    A row has its slots of the cache and a few copies of its logits; the dense copy of packed
    weights, where there is one, comes before them, and so do `reserve` bytes.
    """
    memory = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return None
    free = int(_FREE_SHARE * memory["bytes_limit"]) - memory["bytes_in_use"]
    if sampling.dequantize != "step":
        free -= dense_bytes(params)
    dtype = cache_dtype(sampling.kv_cache_dtype, params["embed_tokens"].dtype)
    row = slots * position_bytes(config, dtype) + _LOGITS * 4 * config.vocab_size
    return max(0, int(free - reserve) // row)


def dense_bytes(params: dict) -> int:
    """Bytes of what `transformer.dequantize_params` makes; 0 where no weight is packed."""
    packed = transformer.packed_weights(params)
    return sum(math.prod(leaf.shape) for leaf in packed) * params["embed_tokens"].dtype.itemsize


def _rounded_down(rows: int) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, ..., 48, 64, 80, 96, 112, 128, 160, ... up to `rows`."""
    power = 1 << (rows.bit_length() - 1)
    step = max(1, power // (4 if power >= _FINE_FROM else 2))
    return rows // step * step


def _smaller_batches(rows: int) -> list[int]:
    """The batches that a batch of this many rows shrinks to, one after the other."""
    batches = []
    fewest = _FEWEST_ROWS_ON_GPU if jax.default_backend() == "gpu" else _FEWEST_ROWS
    while rows > fewest:
        rows = _rounded_down(rows - 1)
        batches.append(rows)
    return batches


def _seatings(rows: int, *, refills: bool) -> tuple[int, ...]:
    """All rows, and where seats are given away again a quarter, a sixteenth, ... of them."""
    sizes = [rows]
    while refills and sizes[-1] > 16:
        sizes.append(-(-sizes[-1] // 4))
    return tuple(sorted(sizes))
