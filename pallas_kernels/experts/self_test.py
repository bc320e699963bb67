"""A small product with experts by the kernel of `mma`, compared with its definition in float64."""

import concurrent.futures
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts.table import table
from pallas_kernels.fp4_matmul import self_test

_EXPERTS, _TOKENS, _INPUTS, _WIDTH = 3, 11, 1152, 64


def relative_error(kernel: ModuleType) -> float:
    """The largest relative error of gate and up, and of down, in each kind of schedule."""
    rng = np.random.default_rng(0)
    gate_up = self_test.random_tiles(rng, _EXPERTS * 2 * _WIDTH, _INPUTS)
    down = self_test.random_tiles(rng, _EXPERTS * 2 * _WIDTH, 2 * _WIDTH)
    x, rows = (
        rng.standard_normal(shape).astype(jnp.bfloat16)
        for shape in ((_TOKENS, _INPUTS), (16 * 5, 2 * _WIDTH))
    )
    routes = np.stack([rng.permutation(_EXPERTS)[:2] for _ in range(_TOKENS)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, routes.size).astype(np.float32)

    def run():
        own = table(jnp.asarray(routes), experts=_EXPERTS)
        found = [
            kernel.gated_matmul(x, gate_up, own, weights, width=_WIDTH, config=config)
            for config in (kernel.GroupedConfig(16, 512, 2), kernel.GroupedConfig(64, 128, 3))
        ]
        given = rows[: len(own.source)]
        config = kernel.GroupedConfig(128, 128, 2, tiles=2)
        found.append(kernel.matmul(given, down, own, outputs=2 * _WIDTH, config=config))
        place = own.place
        return [np.asarray(y[place], np.float64) for y in found], np.asarray(
            given[np.asarray(place)]
        )

    # The caller may be tracing a program. Tracing belongs to a thread, so another thread computes.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        dense = [
            thread.submit(self_test.dequantized, weight).result().reshape(_EXPERTS, 2 * _WIDTH, -1)
            for weight in (gate_up, down)
        ]
        (*gated, product), given = thread.submit(run).result()
    owner = routes.reshape(-1)
    gate, up = np.split(
        np.einsum("pk,pnk->pn", np.repeat(x, 2, axis=0).astype(np.float64), dense[0][owner]),
        2,
        axis=1,
    )
    hidden = gate / (1 + np.exp(-gate)) * up * weights[:, None]
    pairs = [
        *((y, hidden) for y in gated),
        (product, np.einsum("pk,pnk->pn", given.astype(np.float64), dense[1][owner])),
    ]
    return max(float(np.linalg.norm(y - want) / np.linalg.norm(want)) for y, want in pairs)
