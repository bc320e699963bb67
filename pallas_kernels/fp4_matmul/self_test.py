"""The kernel's test of itself, for a version of jax or an edit that no tuned table has verified."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp4_matmul import e4m3, layout, reference, tiling
from pallas_kernels.fp4_matmul.epilogues import AddRmsNorm, Swiglu
from pallas_kernels.fp4_matmul.layout import Fp4Tiles
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig
from pallas_kernels.fp4_matmul.tiling import TileConfig

# A tile has more steps than the pipeline stages. The tilings have neither slices nor `ahead`, which
# few tuned tilings have: they take longer to lower.
_STREAM_K = TileConfig(8, warpgroups_n=2, stages=7, stream_k=True)
_CLUSTERS = dataclasses.replace(_STREAM_K, stream_k=False, split=2)
_M, _N, _K, _RANK = 8, 1470, 1024, 32  # N ends within a tile of 64 rows


class _Case(NamedTuple):
    """A product of `_Inputs.x`."""

    weight: Fp4Tiles  # packed weight
    config: TileConfig  # tiling
    num_sms: int  # number of SMs, for which the tiling covers what the case is for
    operands: dict[str, Any]  # further operands of the kernel
    expected: tuple[np.ndarray, ...]  # float64 results


class _Inputs(NamedTuple):
    """Random arguments of the products."""

    x: np.ndarray  # bfloat16 [M, K]
    weight: Fp4Tiles  # packed weight [N, K]
    even: Fp4Tiles  # the rows of `weight` in an even number of whole tiles
    a: np.ndarray  # bfloat16 [R, K]
    b: np.ndarray  # bfloat16 [N, 64], whose columns from R on are multiplied by zeros
    bias: np.ndarray  # bfloat16 [N]


def relative_error(matmul: Callable, form: str) -> float:
    """The largest relative error of small products with an adapter, see `_cases`.

    `matmul` is `sm90.matmul`, which uses an API of jax that may change, and `form` is the format of
    the weights, "nvfp4" or "mxfp4".
    """
    rng = np.random.default_rng(0)
    inputs = _inputs(rng, form)

    def lower(case):
        def run(x, weight, operands):
            return matmul(x, weight, config=case.config, num_sms=case.num_sms, **operands)

        return jax.jit(run).lower(inputs.x, case.weight, case.operands)

    # The caller may be tracing a program, of which other threads know nothing. One thread lowers,
    # as Python runs in one at a time; other threads compile what is lowered meanwhile.
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        dense = threads.submit(dequantized, inputs.weight).result()
        cases = _cases(inputs, dense, rng)

        def start():
            return {name: threads.submit(lower(case).compile) for name, case in cases.items()}

        programs = threads.submit(start).result()
        errors = []
        for name, case in cases.items():
            program = programs[name].result()
            actual = threads.submit(program, inputs.x, case.weight, case.operands).result()
            pairs = zip(jax.tree.leaves(actual), case.expected, strict=True)
            errors += [_error(np.asarray(y, np.float64), z) for y, z in pairs]
    return float(np.max(errors))


def relative_error_of_mma(matmul: Callable, form: str) -> float:
    """The largest relative error of small products with an adapter, by `mma.matmul`."""
    inputs = _inputs(np.random.default_rng(0), form)
    xa = inputs.x.astype(np.float32) @ inputs.a.astype(np.float32).T
    xa = np.pad(xa.astype(jnp.bfloat16), ((0, 0), (0, inputs.b.shape[1] - _RANK)))

    def run(config):
        product = jax.jit(functools.partial(matmul, config=config))
        y = product(inputs.x, inputs.weight, xa=xa, b=inputs.b, bias=inputs.bias)
        return np.asarray(y, np.float64)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:  # as in `relative_error`
        dense = threads.submit(dequantized, inputs.weight).result()
        expected = inputs.x.astype(np.float64) @ dense.T + inputs.bias.astype(np.float64)
        expected += xa.astype(np.float64) @ inputs.b.astype(np.float64).T
        # One has several parts of the columns, an odd number of tiles of rows, and several steps.
        configs = MmaConfig(64, 256, 3, split=2), MmaConfig(128, 128, 2)
        results = [threads.submit(run, config).result() for config in configs]
    return max(_error(y, expected) for y in results)


def relative_error_of_e4m3(matmul: Callable) -> float:
    """The largest relative error of small products of rows in e4m3, by `sm90.matmul`."""
    inputs = _inputs(np.random.default_rng(0), "nvfp4")
    x, weight = inputs.x.astype(jnp.float8_e4m3fn), inputs.weight
    xa = np.random.default_rng(1).normal(0, 1, (_M, inputs.b.shape[1])).astype(jnp.bfloat16)

    def run(config):
        def product(x, weight, **operands):
            pairs = e4m3.pairs(e4m3.in_register_order(x))
            return matmul(pairs, weight, config=config, num_sms=8, **operands)

        y = jax.jit(product)(x, weight, xa=xa, b=inputs.b, bias=inputs.bias)
        return np.asarray(y, np.float64)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:  # as in `relative_error`
        ones = np.ones_like(weight.divisor)
        dense = threads.submit(dequantized, dataclasses.replace(weight, divisor=ones)).result()
        dense = (dense / layout.E4M3_UNIT).astype(jnp.float8_e4m3fn).astype(np.float64)
        dense *= layout.E4M3_UNIT / weight.divisor.astype(np.float64)[:, None]
        expected = x.astype(np.float64) @ dense.T + inputs.bias.astype(np.float64)
        expected += xa.astype(np.float64) @ inputs.b.astype(np.float64).T
        config = TileConfig(16, warpgroups_n=2, stages=4, stream_k=True, e4m3=True)
        configs = config, dataclasses.replace(config, multicast=True)
        results = [threads.submit(run, config).result() for config in configs]
    return max(_error(y, expected) for y in results)


def _cases(inputs: _Inputs, dense: np.ndarray, rng: np.random.Generator) -> dict[str, _Case]:
    """The products by name: each has another epilogue, and another source of x A^T or tiling."""
    x, even, b = inputs.x, inputs.even.shape[0], inputs.b
    parts = (array.astype(np.float32).reshape(len(array), 4, -1) for array in (x, inputs.a))
    xa_partials = np.einsum("msk,rsk->smr", *parts)
    xa = xa_partials.sum(axis=0).astype(jnp.bfloat16).astype(np.float64)
    product = x.astype(np.float64) @ dense.T + xa @ b[:, :_RANK].astype(np.float64).T

    few = tiling.MIN_PARTIALS + 1  # the reducer reads four at a time
    squares = rng.uniform(0.5, 2, (few, _M)) * np.mean(product**2) / few
    squares = squares.astype(np.float32)
    factor = 1 / np.sqrt(squares.sum(axis=0, dtype=np.float64))[:, None]
    gate, up = (_rounded(half * factor) for half in np.split(product[:, :even], 2, axis=1))

    residual = rng.normal(0, 10, (_M, even)).astype(jnp.bfloat16)
    scale = rng.uniform(0.5, 2, even).astype(np.float32)
    total = _rounded(_rounded(product[:, :even]) + residual.astype(np.float64))

    given = {"xa_partials": xa_partials, "b": b[:even]}
    return {
        "split tiles, given partials, SwiGLU": _Case(
            inputs.even,
            _STREAM_K,
            5,
            given | {"epilogue": Swiglu(squares, eps=0.0)},
            (_rounded(gate / (1 + np.exp(-gate))) * up,),
        ),
        "split tiles, given partials, residual and RMSNorm": _Case(
            inputs.even,
            _STREAM_K,
            5,
            given | {"epilogue": AddRmsNorm(residual, scale)},
            (total, total * scale, np.mean(total**2, axis=1)),
        ),
        "clusters with a tile for each CTA and an odd one, LoRA shrink, bias": _Case(
            inputs.weight,
            _CLUSTERS,
            8,
            {"a": inputs.a, "b": b, "bias": inputs.bias},
            (product + inputs.bias.astype(np.float64),),
        ),
    }


def random_tiles(rng: np.random.Generator, n: int, k: int, form: str) -> Fp4Tiles:
    """A random weight [N, K] in tile order; K is a multiple of a tile's columns."""
    count = -(-n // tiling.TILE_ROWS), k // tiling.TILE_COLUMNS
    scales = rng.integers(32, 151, (*count, 4 * layout.SCALE_WORDS[form]), np.uint8)
    divisor = rng.uniform(1000, 3000, n).astype(np.float32)
    if form == "mxfp4":  # Its scales and divisors are powers of two.
        scales, divisor = scales & 0xF8, np.exp2(np.rint(np.log2(divisor)))
    scales = scales.view(np.uint32)
    return Fp4Tiles(
        codes=rng.integers(0, 2**32, (*count, layout.CODE_WORDS), np.uint32),
        scales=scales << 4 | scales >> 28,  # where `layout` has the four bytes of a word
        divisor=divisor,
        inputs=k,
        format=form,
    )


def _inputs(rng: np.random.Generator, form: str) -> _Inputs:
    weight = random_tiles(rng, _N, _K, form)
    whole = len(weight.codes) // 2 * 2
    even = dataclasses.replace(
        weight,
        codes=weight.codes[:whole],
        scales=weight.scales[:whole],
        divisor=weight.divisor[: whole * tiling.TILE_ROWS],
    )
    x, a, b, bias = (
        rng.normal(0, deviation, shape).astype(jnp.bfloat16)
        for deviation, shape in ((1, (_M, _K)), (0.05, (_RANK, _K)), (1, (_N, 64)), (1, (_N,)))
    )
    return _Inputs(x, weight, even, a, b, bias)


def dequantized(weight: Fp4Tiles) -> np.ndarray:
    """The weight [N, K] in float64."""

    @jax.jit
    def dequantize(weight):
        return reference.dequantize(layout.from_tiles(weight), jnp.float32)

    return np.asarray(dequantize(weight), np.float64)


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The relative error; partials are added up first."""
    if actual.ndim > expected.ndim:
        actual = actual.sum(axis=0)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)
