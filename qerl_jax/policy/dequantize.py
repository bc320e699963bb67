"""The program that makes packed weights dense, where no kernel reads them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import device
from pallas_kernels.fp4_matmul import fp8
from qerl_jax.policy import transformer
from qerl_jax.policy.quant import EVERY, QuantTensor, to_fp8
from qerl_jax.policy.sharding import COLUMNS, ROWS, WHOLE, mesh_of, on_mesh

DEQUANTIZE = "dequantize"  # name of the program


class Dequantization(NamedTuple):
    """A jitted function and its arguments, which make the packed weights of a policy dense."""

    function: Any  # the jitted function
    static: dict[str, Any]  # its static arguments
    packed: list[Any]  # its other argument, the packed weights as shapes


def dequantization(params: dict, *, rows: int = 0) -> Dequantization | None:
    """Returns how weights become dense, or None if `params` have none to dequantize.

    Args:
        params: the policy, as shapes with shardings.
        rows: as in `transformer.packed_weights`.
    """
    packed = transformer.packed_weights(params, rows=rows)
    if not packed:
        return None
    mesh, static = mesh_of(params), {"dtype": params["embed_tokens"].dtype}
    if rows == EVERY:
        return Dequantization(to_fp8_weights, static, packed)
    if mesh is None:
        return Dequantization(dequantize, static, packed)
    specs = (jax.tree.leaves(weight)[0].sharding.spec for weight in packed)
    columns = tuple(spec == COLUMNS for spec in specs)
    return Dequantization(_on_shards(mesh), static | {"columns": columns}, packed)


def dequantized(params: dict, programs: Mapping[Any, Callable[..., Any]], *, rows: int = 0) -> dict:
    """Returns the policy with dense weights, or as it is without a program for it.

    Args:
        params: the policy.
        programs: programs by name, among them perhaps 'dequantize'.
        rows: as in `transformer.packed_weights`.
    """
    if DEQUANTIZE not in programs:
        return params
    return transformer.dequantize_params(params, programs[DEQUANTIZE], rows=rows)


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize(packed: list[QuantTensor | jax.Array], *, dtype: jnp.dtype) -> list[jax.Array]:
    """Returns the dense weights [N, K] of `transformer.packed_weights`."""
    return [transformer.dense_weight(weight, dtype) for weight in packed]


@functools.partial(jax.jit, static_argnames="dtype")
def to_fp8_weights(packed: list[QuantTensor], *, dtype: jnp.dtype) -> list[fp8.Fp8Weight]:
    """Returns the weights [N, K] of `transformer.packed_weights`, rounded to e4m3."""
    return [to_fp8(weight, device.product_dtype(dtype)) for weight in packed]


@functools.cache
def _on_shards(mesh: Mesh) -> Callable[..., list[jax.Array]]:
    """Returns `dequantize` of weights of which `columns` says whether they are cut by columns."""

    def dequantize_shards(packed: list, *, dtype: jnp.dtype, columns: tuple[bool, ...]) -> list:
        del columns
        return dequantize(packed, dtype=dtype)

    def cut(columns: tuple[bool, ...]) -> list:
        return [COLUMNS if by_columns else ROWS for by_columns in columns]

    def in_specs(packed: list, *, dtype: jnp.dtype, columns: tuple[bool, ...]) -> tuple:
        del dtype
        # The divisor of a row is the same in all of its columns.
        weight_specs = [
            jax.tree.map(lambda x, spec=spec: spec if x.ndim >= len(spec) else WHOLE, weight)
            for weight, spec in zip(packed, cut(columns), strict=True)
        ]
        return (weight_specs,)

    return on_mesh(
        dequantize_shards,
        mesh,
        in_specs=in_specs,
        out_specs=lambda _, *, dtype, columns: cut(columns),
        static=("dtype", "columns"),
    )
