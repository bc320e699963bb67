"""The functions of `decode` for a policy whose weights are cut between devices.

Each is a `shard_map` over all devices of the mesh, in which a device runs the function of `decode`
on its shards, with the architecture of one device (`tensor_parallel.shard_of`). The devices have
equal logits, keys and rows, so they sample equal tokens. The arguments are those of `decode`.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from qerl_jax.policy.attention import KVCache
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.sharding import COLUMNS, HEADS, ROWS, WHOLE, shardings, specs
from qerl_jax.policy.tensor_parallel import TENSOR
from qerl_jax.rollout import decode
from qerl_jax.rollout.decode import UNTUNED, DecodeState, Prefilled

_STATE = DecodeState(
    keys=HEADS,  # pyrefly: ignore[bad-argument-type]  A spec in place of a list of arrays.
    values=HEADS,  # pyrefly: ignore[bad-argument-type]
    lengths=WHOLE,  # pyrefly: ignore[bad-argument-type]
    rows=WHOLE,  # pyrefly: ignore[bad-argument-type]
    counts=WHOLE,  # pyrefly: ignore[bad-argument-type]
    last=WHOLE,  # pyrefly: ignore[bad-argument-type]
    done=WHOLE,  # pyrefly: ignore[bad-argument-type]
)


@functools.cache
def functions(mesh: Mesh) -> types.SimpleNamespace:
    """Returns the jitted functions of `decode` by their names.

    Args:
        mesh: devices that hold the policy together.
    """
    on = functools.partial(_on_mesh, mesh)
    cache = KVCache(keys=HEADS, values=HEADS, lengths=WHOLE)  # pyrefly: ignore[bad-argument-type]
    return types.SimpleNamespace(
        dequantize=jax.jit(
            functools.partial(_dequantize, mesh), static_argnames=("dtype", "columns")
        ),
        prefill=on(
            decode.prefill,
            # pyrefly: ignore[bad-argument-type]  Specs in place of arrays.
            lambda *_, **__: Prefilled(logits=WHOLE, cache=cache),
            static=("config", "dtype", "width"),
            compiler_options=UNTUNED,
        ),
        insert_rows=on(
            decode.insert_rows, lambda *_, **__: (_STATE, WHOLE), static=("config",), donated=1
        ),
        fuse_adapter=on(
            decode.fuse_adapter,
            functools.partial(_specs_of_fused, mesh),
            static=("config", "dtype"),
        ),
        decode_chunk=on(
            decode.decode_chunk,
            lambda *_, **__: (_STATE, WHOLE),
            static=("config", "steps"),
            donated=3,
            compiler_options=UNTUNED,
        ),
        gather_rows=jax.jit(
            jax.shard_map(decode.gather_rows, mesh=mesh, in_specs=(HEADS, WHOLE), out_specs=HEADS)
        ),
    )


def _on_mesh(
    mesh: Mesh,
    function: Any,
    results: Callable[..., Any],
    *,
    static: tuple[str, ...],
    donated: int | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Returns a function of `decode` as a `shard_map`, whose arguments lie by the rules.

    Args:
        mesh: devices that hold the policy together.
        function: the jitted function.
        results: function from the arguments to the specs of the results.
        static: names of the static arguments.
        donated: number of the argument that is donated.
        compiler_options: options of XLA.
    """

    def on_mesh(*arguments: Any, **options: Any) -> Any:
        return jax.shard_map(
            functools.partial(function.__wrapped__, **options),
            mesh=mesh,
            in_specs=tuple(specs(argument, mesh.shape[TENSOR]) for argument in arguments),
            out_specs=results(*arguments, **options),
            check_vma=False,
        )(*arguments)

    on_mesh.__name__ = function.__name__
    return jax.jit(
        on_mesh,
        static_argnames=static,
        donate_argnums=donated,
        compiler_options=compiler_options,
    )


def _specs_of_fused(mesh: Mesh, lora: Lora | None, **static: Any) -> Any:
    """The specs of what `decode.fuse_adapter` makes of a device's part of an adapter."""
    own = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(where.shard_shape(x.shape), x.dtype),
        lora,
        shardings(lora, mesh),
    )
    fused = jax.eval_shape(functools.partial(decode.fuse_adapter, **static), own)
    return specs(fused, mesh.shape[TENSOR])


def _dequantize(
    mesh: Mesh, packed: list[QuantTensor], *, dtype: Any, columns: tuple[bool, ...]
) -> list[jax.Array]:
    """`decode.dequantize` of weights; `columns` says which of them are cut by columns."""
    cut = [COLUMNS if by_columns else ROWS for by_columns in columns]
    # The divisor of a row is the same in all of its columns.
    own = [
        jax.tree.map(lambda x, spec=spec: spec if x.ndim >= len(spec) else WHOLE, weight)
        for weight, spec in zip(packed, cut, strict=True)
    ]
    return jax.shard_map(
        functools.partial(decode.dequantize, dtype=dtype),
        mesh=mesh,
        in_specs=(own,),
        out_specs=cut,
        check_vma=False,
    )(packed)
