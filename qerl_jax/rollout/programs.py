"""The operations of a rollout: one table from name to function, static and abstract arguments.

`Sampler.compiled` compiles every operation of the table ahead of time; without that, jit compiles
an operation when it is first called.

A rollout of a 7B model with 64 prompts of 256 tokens and 16 completions each, all of which decode
together, has 42 programs: 19 batch sizes, 18 compactions, 3 prompt widths, one insertion and one
fusion of the adapter. With 256 rows that decode together it has 28, as slots are refilled in 3
sizes. An insertion for each prompt width, and a compaction program for each kind of array, would
make 80 and 54 of them. So prefill pads keys and values to one width, and compaction leaves the
state of the slots as it is.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from qerl_jax.compile.operation import Operation, Programs, abstract, digest
from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.dequantize import DEQUANTIZE, dequantization
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.part import NewTokens
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import EVERY, rounds_to_fp8
from qerl_jax.policy.sharding import abstract_on, head_sharding, mesh_of
from qerl_jax.rollout import decode, tensor_parallel
from qerl_jax.rollout.decode import DecodeConfig
from qerl_jax.rollout.shapes import RolloutShapes, gathered_arrays


class RolloutPrograms(NamedTuple):
    """The programs of a rollout, and what they are made for."""

    shapes: RolloutShapes  # shapes of the rollout
    config: DecodeConfig  # static arguments
    programs: Programs  # the programs by name


def operations(
    key: Any, policy: Policy, shapes: RolloutShapes, config: DecodeConfig
) -> dict[Any, Operation]:
    """Returns all operations of a rollout by name; a name with sizes is a tuple: ("prefill", 256).

    Args:
        key: PRNG key like that of the rollout.
        policy: the policy as committed arrays, or as their shapes with shardings. Where weights
            are cut between devices, the key is replicated on their mesh.
        shapes: shapes of the rollout.
        config: static arguments.
    """
    # The table refers to itself, so it would hold arrays until Python collects its garbage.
    key, (params, lora) = abstract((key, policy))
    model, dtype, steps = config.model, shapes.dtype, shapes.chunk_steps
    num_prompts, widest = shapes.prefill_batch, shapes.prompt_widths[-1]
    compute, sharding, mesh = params["embed_tokens"].dtype, key.sharding, mesh_of(params)
    recorded = {"records_routes": config.records_routes}

    def on_devices(tree: Any) -> Any:
        return abstract(tree, sharding) if mesh is None else abstract_on(tree, mesh)

    functions = decode if mesh is None else tensor_parallel.functions(mesh)
    rows = EVERY if rounds_to_fp8(config.dequantize) else shapes.batch_sizes[0]
    dense_weights = None if config.dequantize == "step" else dequantization(params, rows=rows)
    cache = shapes.batch_sizes[0], shapes.cache_positions, dtype
    histories = shapes.histories or ()
    # A run samples with a head in 4 bits and evaluates without: the same keys, other programs.
    structure = digest((params, lora))
    table: dict[Any, Operation] = {}

    def add(name, sizes, function, static, arguments, *, others=(), of_any_policy=False):
        """Adds an operation in all its sizes; its programs also depend on `others`."""
        for size in sizes:
            key = (name, *size, *others, *static.values())
            key = key if of_any_policy else (*key, structure)
            arguments_of_size = functools.partial(arguments, *size)
            operation = Operation(function, static, arguments_of_size, key, of_any_policy)
            table[(name, *size) if size else name] = operation

    @functools.cache
    def result(name: Any) -> Any:
        return table[name].eval_shape()

    def dense() -> dict:
        if dense_weights is None:
            return params
        dense = transformer.dequantize_params(params, lambda _: result(DEQUANTIZE), rows=rows)
        return on_devices(dense)

    def state(rows: int) -> decode.DecodeState:
        return on_devices(_state_shapes(rows, shapes, config))

    if dense_weights is not None:
        table[DEQUANTIZE] = Operation.of_shapes(DEQUANTIZE, *dense_weights)
    add(
        "prefill",
        [(width,) for width in shapes.prompt_widths],
        functions.prefill,
        {"model_config": model, "dtype": dtype, "width": widest, "shared": shapes.shared_tokens}
        | recorded,
        lambda width: (dense(), lora, _int32(num_prompts, width), _int32(num_prompts)),
        others=(num_prompts, config.dequantize),
    )
    add(
        "insert",
        [(count,) for count in shapes.insert_sizes],
        functions.insert_rows,
        {"config": config},
        lambda count: (
            *(key, state(shapes.batch_sizes[0]), on_devices(result(("prefill", widest)))),
            *(_int32(count), _int32(count), _int32(count), np.float32(1)),
        ),
        others=(*cache, num_prompts, widest, str(key.dtype), *histories),
        of_any_policy=True,
    )
    if not steps:
        return table
    add(
        "fuse_adapter",
        [()],
        functions.fuse_adapter,
        {"model_config": model, "dtype": compute},
        lambda: (lora,),
    )

    def chunk(rows: int) -> tuple:
        arguments = key, dense(), on_devices(result("fuse_adapter")), state(rows)
        return *arguments, _cache_rows(rows, shapes), np.float32(1)

    _add_chunks(add, functions, shapes, config, chunk, state)
    _add_compactions(add, functions.gather_rows, shapes, model, state)

    def made(name: Any) -> Any:
        return on_devices(result(name))

    _add_extensions(add, functions, shapes, config, key, dense, state, made)
    return table


def _add_chunks(
    add: Callable[..., None],
    functions: Any,
    shapes: RolloutShapes,
    config: DecodeConfig,
    chunk: Callable[[int], tuple],
    state: Callable[[int], decode.DecodeState],
) -> None:
    """Adds the chunks without drafts and with them, and what brings tokens to the device."""
    own = shapes.cache_positions, *(shapes.histories or ())
    others = shapes.batch_sizes[0], shapes.dtype, *own
    add(
        "decode",
        [(rows,) for rows in shapes.batch_sizes],
        functions.decode_chunk,
        {"config": config, "steps": shapes.chunk_steps},
        chunk,
        others=others,
    )
    if not shapes.histories:
        return
    for size in shapes.drafts:
        add(
            "draft",
            [size],
            functions.draft_chunk,
            {"config": config, "steps": shapes.draft_steps, "positions": size[1]},
            lambda rows, _: chunk(rows),
            others=others,
        )
    widths = [(count, shapes.prompt_widths[-1]) for count in shapes.insert_sizes]
    widths += [(count, shapes.cache_positions) for count in dict(shapes.extensions)]
    add(
        "begin",
        list(dict.fromkeys(widths)),
        functions.begin_rows,
        {},
        lambda count, width: (state(1).history, _int32(count), _int32(count, width)),
        others=own,
        of_any_policy=True,
    )


def compactions(model: ModelConfig, shapes: RolloutShapes) -> list[tuple[str, tuple[int, ...]]]:
    """Returns which arrays of a state are gathered at a time, by the name of the program.

    They have one shape, as all keys and values have, and each shape has one program.
    """
    rows = jax.tree.leaves(kinds.row_shapes(model, shapes.cache_positions, shapes.dtype))
    together = gathered_arrays(model, shapes.cache_positions, shapes.dtype)
    numbers = collections.defaultdict[Any, list[int]](list)
    for number, row in enumerate(rows):
        numbers[row.shape, row.dtype].append(number)
    names = ["compact", *(f"compact_{number}" for number in range(1, len(numbers)))]
    return [
        (name, batch)
        for name, own in zip(names, numbers.values(), strict=True)
        for batch in itertools.batched(own, together)
    ]


def _add_compactions(
    add: Callable[..., None],
    gather_rows: Callable[..., list[jax.Array]],
    shapes: RolloutShapes,
    model: ModelConfig,
    state: Callable[[int], decode.DecodeState],
) -> None:
    """Adds the programs of `compactions`; each gathers the rows of some arrays of a state."""

    def arguments(numbers: tuple[int, ...], rows: int, fewer: int) -> tuple[Any, np.ndarray]:
        arrays = jax.tree.leaves(state(rows).layers)
        return [arrays[number] for number in numbers], _int32(fewer)

    for name, numbers in dict(compactions(model, shapes)).items():
        add(
            name,
            itertools.pairwise(shapes.all_batches),
            gather_rows,
            {},
            functools.partial(arguments, numbers),
            others=(shapes.cache_positions, shapes.dtype, model),
            of_any_policy=True,
        )


def _add_extensions(
    add: Callable[..., None],
    functions: Any,
    shapes: RolloutShapes,
    config: DecodeConfig,
    key: Any,
    dense: Callable[[], dict],
    state: Callable[[int], decode.DecodeState],
    made: Callable[[Any], Any],
) -> None:
    """Adds what rows need that talk to environments, if any.

    They are extended by what an environment wrote and resumed, and a row that waits for long is
    taken out of the cache and put into it again.
    """
    rows, cache = shapes.batch_sizes[0], (shapes.cache_positions, shapes.dtype)
    if not shapes.extensions:
        return
    layers, width_of = state(rows).layers, dict(shapes.extensions)
    for positions in shapes.kept_positions:
        add(
            "take",
            [(positions,)],
            functions.take_row,
            {"model_config": config.model, "positions": positions},
            lambda _: (layers, np.int32(0)),
            others=(rows, *cache),
            of_any_policy=True,
        )
    add(
        "put",
        [(positions,) for positions in shapes.kept_positions],
        functions.put_row,
        {},
        lambda positions: (
            *(layers, abstract(made(("take", positions)), head_sharding(key.sharding))),
            np.int32(0),
        ),
        others=(rows, *cache, config.model),
        of_any_policy=True,
    )
    add(
        "extend",
        shapes.extensions,
        functions.extend_rows,
        {"model_config": config.model, "records_routes": config.records_routes},
        lambda count, width: (
            *(dense(), made("fuse_adapter"), layers, _int32(count, width)),
            # pyrefly: ignore[bad-argument-type]
            NewTokens(_int32(count, width), _int32(count), _int32(count)),
        ),
        others=(rows, *cache, config.dequantize),
    )
    add(
        "resume",
        [(count,) for count in width_of],
        functions.resume_rows,
        {"config": config},
        lambda count: (
            *(key, dataclasses.replace(state(1), layers=[])),
            made(("extend", count, width_of[count]))[0],
            decode.NextTurns(*(_int32(count) for _ in range(5))),
            np.float32(1),
        ),
        others=(rows, str(key.dtype), *(shapes.histories or ())),
        of_any_policy=True,
    )


def _state_shapes(rows: int, shapes: RolloutShapes, config: DecodeConfig) -> decode.DecodeState:
    """Returns the shapes of a state with some cache rows, in which all slots have their state."""
    full, part = (
        jax.eval_shape(
            functools.partial(
                decode.empty_state,
                size,
                shapes.cache_positions,
                model_config=config.model,
                dtype=shapes.dtype,
                has_turns=config.turn_limit is not None,
                histories=shapes.histories,
            )
        )
        for size in (shapes.batch_sizes[0], rows)
    )
    return dataclasses.replace(full, layers=part.layers)


def _cache_rows(rows: int, shapes: RolloutShapes) -> decode.CacheRows:
    places = _int32(rows) if shapes.histories else None
    return decode.CacheRows(_int32(rows), np.zeros(rows, bool), places)


def _int32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
