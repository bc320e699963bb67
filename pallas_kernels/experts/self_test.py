"""A small product with experts by the kernel of `mma`, compared with its definition in float64."""

import concurrent.futures
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from pallas_kernels import device
from pallas_kernels.experts.table import table
from pallas_kernels.fp4_matmul import self_test

_EXPERTS, _TOKENS, _INPUTS, _WIDTH, _RANK = 3, 11, 640, 128, 8
_LIMIT = 1.0  # of gate and up in the kernel of both products, which has biases, too


def relative_error(kernel: ModuleType, form: str) -> float:
    """The largest relative error of gate and up, of down, and of both with adapters.

    `form` is the format of the weights, "nvfp4" or "mxfp4".
    """
    rng = np.random.default_rng(0)
    gate_up = self_test.random_tiles(rng, _EXPERTS * 2 * _WIDTH, _INPUTS, form)
    down, after = (
        self_test.random_tiles(rng, _EXPERTS * 2 * _WIDTH, columns, form)
        for columns in (2 * _WIDTH, _WIDTH)
    )
    x, rows = (
        rng.standard_normal(shape).astype(jnp.bfloat16)
        for shape in ((_TOKENS, _INPUTS), (16 * 5, 2 * _WIDTH))
    )
    routes = np.stack([rng.permutation(_EXPERTS)[:2] for _ in range(_TOKENS)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, routes.size).astype(np.float32)
    adapters = [
        [(rng.standard_normal((_EXPERTS, *shape)) / 16).astype(jnp.bfloat16) for shape in shapes]
        for shapes in (
            ((_RANK, _INPUTS), (2 * _WIDTH, _RANK)),
            ((_RANK, _WIDTH), (2 * _WIDTH, _RANK)),
        )
    ]

    biases = [
        rng.standard_normal(shape).astype(jnp.bfloat16)
        for shape in ((_EXPERTS, 2, _WIDTH), (_EXPERTS, 2 * _WIDTH))
    ]

    def run():
        own = table(jnp.asarray(routes), experts=_EXPERTS)
        config = kernel.GroupedConfig(16, 512, 2)
        found = [kernel.gated_matmul(x, gate_up, own, weights, width=_WIDTH, config=config)]
        given = rows[: len(own.source)]
        config = kernel.GroupedConfig(128, 128, 2, tiles=2)
        found.append(kernel.matmul(given, down, own, outputs=2 * _WIDTH, config=config))
        hopper = device.cuda_capability() == 9.0
        config = kernel.GroupedConfig(64, 128, 2, tiles=2, wgmma=hopper)
        both = tuple(map(tuple, adapters)), tuple(biases)
        mixture = kernel.Mixture(gate_up, after, own, weights, *both)
        found += kernel.mlp(x, [mixture], width=_WIDTH, config=config, limit=_LIMIT)
        place = own.place
        return [np.asarray(y[place], np.float64) for y in found], np.asarray(
            given[np.asarray(place)]
        )

    # The caller may be tracing a program. Tracing belongs to a thread, so another thread computes.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        dense = [
            thread.submit(self_test.dequantized, weight).result().reshape(_EXPERTS, 2 * _WIDTH, -1)
            for weight in (gate_up, down, after)
        ]
        (gated, product, both), given = thread.submit(run).result()
    owner = routes.reshape(-1)
    a, b = (
        [np.asarray(matrix, np.float64)[owner] for matrix in matrices]
        for matrices in zip(*adapters, strict=True)
    )

    def multiply(x, number, adapter=None):
        y = np.einsum("pk,pnk->pn", x, dense[number][owner])
        if adapter is None:
            return y
        bias = biases[adapter].astype(np.float64).reshape(_EXPERTS, -1)[owner]
        bias *= weights[:, None] if adapter else 1
        return y + np.einsum("pk,prk,pnr->pn", x, a[adapter], b[adapter]) + bias

    def hidden(y, slope=1.0, limit=np.inf, more=0.0):
        gate, up = np.split(y, 2, axis=1)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + more
        return gate / (1 + np.exp(-slope * gate)) * up * weights[:, None]

    pairs = np.repeat(x, 2, axis=0).astype(np.float64)
    wanted = (
        *(hidden(multiply(pairs, 0)), multiply(given.astype(np.float64), 1)),
        multiply(hidden(multiply(pairs, 0, 0), 1.702, _LIMIT, 1.0), 2, 1),
    )
    return max(
        float(np.linalg.norm(y - want) / np.linalg.norm(want))
        for y, want in zip((gated, product, both), wanted, strict=True)
    )
