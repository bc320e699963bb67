"""The programs of a rollout: one table from operation to function, static and abstract arguments.

`operations` is the table, and `Executables` hold the program of each of its keys. There are two
ways to make them: `aot.compile_rollout` compiles every operation ahead of time, and `jitted` lets
jit compile an operation when it is first called.

A rollout of a 7B model with 64 prompts of 256 tokens and 16 completions each, all of which decode
together, has 42 programs: 19 batch sizes, 18 compactions, 3 prompt widths, one insertion and one
fusion of the adapter. With 256 rows that decode together it has 28, as slots are refilled in 3
sizes. An insertion for each prompt width, and a compaction program for each kind of array, would
make 80 and 54 of them. So prefill pads keys and values to one width, and compaction leaves the
state of the slots in place.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from qerl_jax.policy import transformer
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.sharding import COLUMNS, located, mesh_of
from qerl_jax.rollout import decode, tensor_parallel
from qerl_jax.rollout.decode import DecodeConfig
from qerl_jax.rollout.shapes import RolloutShapes


class Operation(NamedTuple):
    """A jitted function for one set of shapes.

    Attributes:
        function: the jitted function.
        static: its static arguments.
        arguments: a function that returns its other arguments, abstract ones for device arrays.
        key: identity of the program among all programs of a policy.
        of_any_policy: whether the key alone tells the shapes of the arguments, so that the same
            program serves another policy, such as the base without the adapter.
    """

    function: Any
    static: dict[str, Any]
    arguments: Callable[[], tuple[Any, ...]]
    key: Hashable
    of_any_policy: bool = False

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers the function for its arguments."""
        return self.function.lower(*self.arguments(), **self.static)


class MissingProgramError(RuntimeError):
    """A program that should have been compiled ahead of time is missing."""


# The operations of a rollout by their names, which end with their sizes: ("prefill", 256).
Table = Mapping[tuple[Any, ...], Operation]


class Executables(dict[Hashable, Callable[..., Any]]):
    """Programs of one policy by the key of their operation, to be called without static arguments.

    Attributes:
        compiled: keys of the programs that were compiled and not loaded from a cache.
        replicas: the same programs on the other devices of a policy that several devices hold.
    """

    def __init__(self, programs: Any = (), compiled: Iterable[Hashable] = ()) -> None:
        super().__init__(programs)
        self.compiled = list(compiled)
        self.replicas: list[Executables] = []

    def __missing__(self, key: Hashable) -> Callable[..., Any]:
        raise MissingProgramError(
            f"no program is compiled for the rollout operation {key}: call compile_rollout with "
            "the shapes and settings of this rollout"
        )


def jitted(table: Table) -> Executables:
    """Returns executables that jit compiles when they are first called."""
    return Executables(
        {op.key: functools.partial(op.function, **op.static) for op in table.values()}
    )


def dequantized(params: dict, table: Table, executables: Executables) -> dict:
    """Returns the policy with dense weights where the rollout dequantizes them once."""
    if ("dequantize",) not in table:
        return params
    return transformer.dequantize_params(params, executables[table["dequantize",].key])


def dequantization(params: dict) -> Operation | None:
    """Returns the operation that makes weights dense, or None if `params` have none to dequantize.

    Args:
        params: the policy, as shapes with shardings.
    """
    packed = transformer.packed_weights(params)
    if not packed:
        return None
    mesh, static = mesh_of(params), {"dtype": params["embed_tokens"].dtype}
    functions = decode if mesh is None else tensor_parallel.functions(mesh)
    if mesh is not None:
        specs = (jax.tree.leaves(weight)[0].sharding.spec for weight in packed)
        static["columns"] = tuple(spec == COLUMNS for spec in specs)
    key = "dequantize", *static.values(), _digest(packed)
    return Operation(functions.dequantize, static, lambda: (packed,), key, True)


def operations(
    key: Any, params: dict, lora: Lora | None, shapes: RolloutShapes, config: DecodeConfig
) -> Table:
    """Returns all operations of a rollout.

    Args:
        key: PRNG key like that of the rollout.
        params: the policy as committed arrays, or as their shapes with shardings. Where weights
            are cut between devices, the key is replicated on their mesh.
        lora: its adapter, or None.
        shapes: shapes of the rollout.
        config: static arguments.
    """
    # The table refers to itself, so it would hold arrays until Python collects its garbage.
    key, params, lora = abstract((key, params, lora))
    model, dtype, steps = config.model, shapes.dtype, shapes.chunk_steps
    prompts, widest = shapes.prefill_batch, shapes.prompt_widths[-1]
    compute, sharding = params["embed_tokens"].dtype, key.sharding
    mesh = mesh_of(params)
    placed = functools.partial(_placed, mesh, sharding)
    functions = decode if mesh is None else tensor_parallel.functions(mesh)
    dequantize = None if config.dequantize == "step" else dequantization(params)
    cache = shapes.batch_sizes[0], shapes.cache_positions, dtype
    # A run samples with a head in 4 bits and evaluates without: the same keys, other programs.
    structure = _digest((params, lora))
    table: dict[tuple[Any, ...], Operation] = {}

    def add(name, sizes, function, static, arguments, *others, of_any_policy=False):
        """Adds an operation in all its sizes; its programs also depend on `others`."""
        for size in sizes:
            key = (name, *size, *others, *static.values())
            key = key if of_any_policy else (*key, structure)
            made = functools.partial(arguments, *size)
            table[name, *size] = Operation(function, static, made, key, of_any_policy)

    @functools.cache
    def result(*name: Any) -> Any:
        operation = table[name]
        return operation.function.eval_shape(*operation.arguments(), **operation.static)

    def dense() -> dict:
        if dequantize is None:
            return params
        return placed(transformer.dequantize_params(params, lambda _: result("dequantize")))

    def state(rows: int) -> decode.DecodeState:
        return placed(_state_shapes(rows, shapes, model))

    if dequantize is not None:
        table["dequantize",] = dequantize
    add(
        "prefill",
        [(width,) for width in shapes.prompt_widths],
        functions.prefill,
        {"config": model, "dtype": dtype, "width": widest},
        lambda width: (dense(), lora, _int32(prompts, width), _int32(prompts)),
        *(prompts, config.dequantize),
    )
    add(
        "insert",
        [(count,) for count in shapes.insert_sizes],
        functions.insert_rows,
        {"config": config},
        lambda count: (
            *(key, state(shapes.batch_sizes[0]), placed(result("prefill", widest))),
            *(_int32(count), _int32(count), _int32(count), np.float32(1)),
        ),
        *(*cache, prompts, widest, str(key.dtype)),
        of_any_policy=True,
    )
    if not steps:
        return table
    add(
        "fuse_adapter",
        [()],
        functions.fuse_adapter,
        {"config": model, "dtype": compute},
        lambda: (lora,),
    )
    add(
        "decode",
        [(rows,) for rows in shapes.batch_sizes],
        functions.decode_chunk,
        {"config": config, "steps": steps},
        lambda rows: (
            *(key, dense(), placed(result("fuse_adapter")), state(rows)),
            *(_int32(rows), np.zeros(rows, bool), np.float32(1)),
        ),
        *cache,
    )
    add(
        "compact",
        itertools.pairwise(shapes.batch_sizes),
        functions.gather_rows,
        {},
        lambda rows, fewer: (state(rows).keys[0], _int32(fewer)),
        *(shapes.cache_positions, dtype, model),
        of_any_policy=True,
    )
    return table


def _digest(tree: Any) -> str:
    """Returns a short identity of the structure, the shapes and the dtypes of a tree."""
    return hashlib.sha256(described(tree).encode()).hexdigest()[:8]


def described(tree: Any) -> str:
    """Returns the structure, the shapes and the dtypes of a tree as text."""
    leaves, treedef = jax.tree.flatten(tree)
    return f"{treedef} {[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}"


def abstract(tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """Returns the shapes of a tree, with its own shardings or with one sharding for all arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree
    )


def _placed(mesh: Mesh | None, sharding: jax.sharding.Sharding, tree: Any) -> Any:
    """Returns the shapes of a tree on a mesh, or with one sharding for all arrays."""
    return abstract(tree, sharding) if mesh is None else located(tree, mesh)


def _state_shapes(rows: int, shapes: RolloutShapes, model: ModelConfig) -> decode.DecodeState:
    """Returns the shapes of a state with some cache rows, in which all slots have their state."""
    full, part = (
        jax.eval_shape(
            functools.partial(
                decode.empty_state,
                size,
                shapes.cache_positions,
                config=model,
                dtype=shapes.dtype,
            )
        )
        for size in (shapes.batch_sizes[0], rows)
    )
    return dataclasses.replace(full, keys=part.keys, values=part.values)


def committed(tree: Any) -> Any:
    """Returns a tree with its arrays committed to their devices.

    Committed and uncommitted arrays would compile to two programs.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # For the hundreds of arrays of a policy device_put takes milliseconds, even if it does nothing.
    rest = {i: x for i, x in enumerate(leaves) if not getattr(x, "committed", False)}
    shardings = [getattr(x, "sharding", None) for x in rest.values()]
    for i, x in zip(rest, jax.device_put(list(rest.values()), shardings), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _int32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
