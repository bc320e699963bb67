"""Mixtures of experts: the table, the grouped product, the router, and what is refused."""

import dataclasses
import functools
import types
import warnings

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp4_oracles import float64, random_weight
from jax.experimental.pallas import mosaic_gpu as plgpu
from refusal import refused
from tiny_checkpoints import model_config
from tiny_model import random_lora, random_tokens, tiny_policy

from benchmarks.rollout.random_policy import random_params
from pallas_kernels import device, experts, fp4_matmul
from pallas_kernels.experts import api, dense_sm90, mma, self_test
from pallas_kernels.experts.mma import GroupedConfig
from pallas_kernels.experts.table import tile_rows
from pallas_kernels.fp4_matmul import dispatch, sm90
from qerl_jax.policy import lora as lora_lib
from qerl_jax.policy import sizes, transformer
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.layers.part import Own
from qerl_jax.policy.quant import QuantTensor
from qerl_jax.policy.tensor_parallel import shard_of
from qerl_jax.policy.trainable import trained_params

KEPT_WIDE = {
    *("input_layernorm", "post_attention_layernorm", "norm"),
    *(name for name, array in kinds.ARRAYS.items() if array.is_wide),
}


def random_routes(tokens, top_k, count, *, seed=0):
    """Returns different experts for each token."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(count)[:top_k] for _ in range(tokens)]).astype(np.int32)


ROUTES = {
    "one token": (random_routes(1, 2, 4), 4),
    "few of many experts": (random_routes(16, 2, 64), 64),
    "several blocks of pairs": (random_routes(300, 4, 16), 16),
    "all to the same experts": (np.tile(np.arange(4, dtype=np.int32), (50, 1)), 16),
    "one expert more than once": (np.full((20, 3), 4, np.int32), 5),
    # 64 + 1 pairs for each: as many tiles as there can be.
    "the bound": (np.repeat(np.arange(4, dtype=np.int32), 65)[:, None], 4),
}


@pytest.mark.parametrize("case", ROUTES)
def test_table(case):
    routes, count = ROUTES[case]
    found = jax.tree.map(np.asarray, experts.table(jnp.asarray(routes), experts=count))
    rows = len(found.source) // len(found.owner)
    assert rows == tile_rows(routes.size, count)
    # Every pair has a row of its own, in a tile of its expert.
    assert len(set(found.place)) == routes.size
    np.testing.assert_array_equal(found.owner[found.place // rows], routes.reshape(-1))
    np.testing.assert_array_equal(found.source[found.place], np.arange(routes.size))
    assert (found.source == routes.size).sum() == len(found.source) - routes.size
    sizes_of = np.bincount(routes.reshape(-1), minlength=count)
    assert found.used == (-(-sizes_of // rows)).sum() <= len(found.owner)
    assert case != "the bound" or found.used == len(found.owner)


def test_tiles_of_the_hopper_kernel(simulated_hopper):
    assert [tile_rows(pairs, 256) for pairs in (8, 8191, 8192, 1 << 20)] == [8, 8, 64, 64]


def test_tiles_grow_with_the_pairs():
    assert [tile_rows(pairs, 256) for pairs in (8, 8191, 16384, 65536, 1 << 20)] == [
        *(8, 8, 32, 128, 128)
    ]


@pytest.mark.parametrize(
    ("tokens", "packed", "width", "tile"),
    [(255, True, 192, 8), (512, True, 192, 8), (513, True, 192, 64), (256, True, 200, 64),
     (256, False, 192, 64), (255, False, 192, 8)],
)  # fmt: skip
def test_tiles_of_a_step(tokens, packed, width, tile, monkeypatch):
    """Those of the kernel for packed weights, up to 64 rows an expert; else those of any table."""
    monkeypatch.setattr(api, "has_kernel", ["nvfp4"].count)
    monkeypatch.setattr(dispatch, "agrees_on_hopper", lambda *_: True)
    arrays = (32 * 2 * width, 320), (32 * 320, width)
    own = [h200.tiles(*shape) if packed else h200.array(*shape) for shape in arrays]
    x = h200.array(tokens, 320)
    assert experts.step_tile(x, experts.Gated(*own), top_k=4, width=width) == tile


@pytest.mark.parametrize(("form", "tile"), [("nvfp4", 8), ("mxfp4", 64)])
def test_a_kernel_has_weights_of_one_format(form, tile, monkeypatch):
    monkeypatch.setattr(api, "has_kernel", ["nvfp4", "mxfp4"].count)
    monkeypatch.setattr(dispatch, "agrees_on_hopper", lambda *_: True)
    own = experts.Gated(h200.tiles(32 * 384, 320), h200.tiles(32 * 320, 192, form))
    x, sizes = h200.array(512, 320), {"top_k": 4, "width": 192}
    assert experts.step_tile(x, own, **sizes) == tile
    shared = experts.Gated(h200.tiles(384, 320, form), h200.tiles(320, 192, form))
    routed = own._replace(down=h200.tiles(32 * 320, 192))
    assert experts.takes_shared(x, routed, shared, **sizes) == (form == "nvfp4")


@pytest.mark.parametrize("order", ["dense", "checkpoint", "tiles"])
@pytest.mark.parametrize("tiles_at_once", [1, 3, 1000])
@pytest.mark.parametrize(
    ("case", "outputs"),
    [("one token", 64), ("several blocks of pairs", 128), ("the bound", 64),
     ("one expert more than once", 48)],
)  # fmt: skip
def test_grouped_product_and_its_gradient(case, outputs, order, tiles_at_once, monkeypatch):
    """They are those of each pair with the whole dense weight of its expert."""
    (routes, count), inputs = ROUTES[case], 32
    rng = np.random.default_rng(1)
    monkeypatch.setattr(api, "DENSE_NUMBERS", tiles_at_once * outputs * inputs)
    scales = rng.integers(40, 60, (count * outputs, inputs // 16), np.uint8)
    packed = fp4_matmul.Fp4Weight(
        packed=jnp.asarray(rng.integers(0, 256, (count * outputs, inputs // 2), np.uint8)),
        scales=jax.lax.bitcast_convert_type(jnp.asarray(scales), jnp.float8_e4m3fn),
        global_scale=jnp.asarray(rng.uniform(1, 2, count * outputs).astype(np.float32)),
    )
    dense = fp4_matmul.dequantize(packed, jnp.float32)
    weights = {"dense": dense, "checkpoint": packed, "tiles": fp4_matmul.to_tiles(packed)}
    weight = weights[order]
    own_table = experts.table(jnp.asarray(routes), experts=count)
    x = jnp.asarray(rng.standard_normal((len(routes), inputs), np.float32))

    def grouped(x):
        rows = experts.to_rows(x, own_table)
        y = experts.grouped_matmul(rows, weight, own_table, outputs=outputs)
        return experts.to_pairs(y, own_table)

    def plain(x):
        pairs = jnp.repeat(x, routes.shape[1], axis=0)
        chosen = dense.reshape(count, outputs, inputs)[routes.reshape(-1)]
        return jnp.einsum("pk,pnk->pn", pairs, chosen)

    gradient = rng.standard_normal((routes.size, outputs)).astype(np.float32)
    y, vjp = jax.vjp(grouped, x)
    want, want_vjp = jax.vjp(plain, x)
    np.testing.assert_allclose(y, want, atol=1e-4)
    np.testing.assert_allclose(vjp(gradient)[0], want_vjp(gradient)[0], atol=1e-4)


@pytest.fixture
def simulated_hopper(monkeypatch):
    """The kernels of a Hopper GPU, simulated with a search for races, on two SMs."""
    how = plgpu.InterpretGPUParams(detect_races=True)
    for module, name in ((dense_sm90, "product"), (sm90, "dequantize")):
        kernel = functools.partial(getattr(module, name), interpret=how)
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(dispatch, "supports_device", lambda: True)
    monkeypatch.setattr(api.device, "num_sms", lambda: 2)


@pytest.mark.slow  # 6 s
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 128), (192, 192), (128, 64), (64, 320)])
def test_hopper_product_and_its_gradient(outputs, inputs, simulated_hopper, monkeypatch):
    """They are those of each pair with the whole dense weight of its expert.

    Of four experts, in two parts, one has no tile, one has one, and others have an odd number. Of
    gpt-oss both sizes are odd numbers of 64.
    """
    count = 4
    monkeypatch.setattr(api, "PART_NUMBERS", 2 * outputs * inputs)
    rng = np.random.default_rng(1)
    routes = rng.permutation(np.repeat([0, 2, 3], [30, 150, 70])).astype(np.int32)[:, None]
    own_table = experts.table(jnp.asarray(routes), experts=count)
    assert len(own_table.source) == 64 * len(own_table.owner)
    assert own_table.used == 1 + 3 + 2 < len(own_table.owner)
    scales = rng.integers(40, 60, (count * outputs, inputs // 16), np.uint8)
    packed = fp4_matmul.Fp4Weight(
        packed=jnp.asarray(rng.integers(0, 256, (count * outputs, inputs // 2), np.uint8)),
        scales=jax.lax.bitcast_convert_type(jnp.asarray(scales), jnp.float8_e4m3fn),
        global_scale=jnp.asarray(rng.uniform(1, 2, count * outputs).astype(np.float32)),
    )
    tiles = fp4_matmul.to_tiles(packed)
    exact, dense = (
        np.asarray(fp4_matmul.dequantize(packed, dtype), np.float64).reshape(
            count, outputs, inputs
        )[routes[:, 0]]
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    x, gradient = (
        jnp.asarray(rng.standard_normal((len(routes), width)), jnp.bfloat16)
        for width in (inputs, outputs)
    )

    def grouped(rows):
        return experts.grouped_matmul(rows, tiles, own_table, outputs=outputs)

    rows = experts.to_rows(x, own_table)
    y, pull = jax.vjp(grouped, rows)
    # What rows without a pair hold does not matter: the last tiles are zeros.
    back = pull(jnp.where((own_table.source < len(routes))[:, None],
                          experts.to_rows(gradient, own_table), jnp.nan))[0]  # fmt: skip
    wide = (np.asarray(array, np.float64) for array in (x, gradient))
    want, want_back = (
        np.einsum(equation, array, weight)
        for equation, array, weight in zip(
            ("pk,pnk->pn", "pn,pnk->pk"), wide, (exact, dense), strict=True
        )
    )
    for found, expected in ((y, want), (back, want_back)):
        pairs = np.asarray(experts.to_pairs(found, own_table), np.float64)
        error = np.linalg.norm(pairs - expected) / np.linalg.norm(expected)
        assert error < 2e-3  # that of rounding the results is 1.7e-3
        assert not found[64 * int(own_table.used) :].any()


@pytest.mark.parametrize("case", ["several blocks of pairs", "the bound"])
def test_units_have_the_tiles_of_an_expert_in_twos(case, simulated_hopper):
    routes, count = ROUTES[case]
    own_table = jax.jit(experts.table, static_argnames="experts")(routes, experts=count)
    work = jax.jit(dense_sm90.units, static_argnums=1)(own_table, count)
    work = jax.tree.map(np.asarray, work)
    owner, used = np.asarray(own_table.owner), int(own_table.used)
    tiles = [(int(e), index >= used) for index, e in enumerate(owner)]
    want = [index for index, tile in enumerate(tiles)
            if (index - tiles.index(tile)) % 2 == 0]  # fmt: skip
    assert work.first[: len(want)].tolist() == want
    assert work.ends.tolist() == [sum(owner[want] < e) for e in range(count + 1)]


@pytest.mark.parametrize(
    "case",
    [
        "several blocks of pairs",
        "one expert more than once",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ROUTES
            if name not in ("several blocks of pairs", "one expert more than once")
        ),
    ],
)
@pytest.mark.parametrize("at_once", [1, 200, 1 << 25])
def test_adapters_of_experts_and_their_gradients(case, at_once, monkeypatch):
    """They are those of each pair with the adapter of its expert, in parts of tiles as well."""
    (routes, count), (inputs, outputs, rank) = ROUTES[case], (16, 12, 3)
    monkeypatch.setattr(api, "PRODUCT_NUMBERS", at_once)
    rng = np.random.default_rng(0)
    x, a, b, gradient = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in (
            *((len(routes), inputs), (count, rank, inputs), (count, outputs, rank)),
            (routes.size, outputs),
        )
    )
    own_table = experts.table(jnp.asarray(routes), experts=count)

    def grouped(x, a, b):
        y = experts.grouped_lora(experts.to_rows(x, own_table), (a, b), own_table)
        return experts.to_pairs(y, own_table)

    def plain(x, a, b):
        pairs, expert = jnp.repeat(x, routes.shape[1], axis=0), routes.reshape(-1)
        return jnp.einsum("pk,prk,pnr->pn", pairs, a[expert], b[expert])

    y, vjp = jax.vjp(grouped, x, a, b)
    want, want_vjp = jax.vjp(plain, x, a, b)
    np.testing.assert_allclose(y, want, atol=1e-4)
    for found, expected in zip(vjp(gradient), want_vjp(gradient), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-3, rtol=1e-5)


SIMULATED = types.SimpleNamespace(
    GroupedConfig=GroupedConfig,
    gated_matmul=functools.partial(mma.gated_matmul, interpret=True),
    matmul=functools.partial(mma.matmul, interpret=True),
    Mixture=mma.Mixture,
    mlp=functools.partial(mma.mlp, interpret=True),
)
# In the first case one expert has 24 tokens, in two units, and another one more than a tile; in the
# second one ranks are those of two products of a warp. Those with a limit have biases, too; in the
# last one the products have kernels of their own.
MLP_CASES = [
    ((24, 6), (640, 64, 192), GroupedConfig(64, 128, 2, tiles=2), 3, 7.0),
    ((24, 6), (640, 64, 128), GroupedConfig(64, 128, 2, tiles=2), 3, 0.0),
    ((9, 3), (256, 64, 128), GroupedConfig(64, 256, 2), 24, 0.0),
    ((9, 3), (192, 64, 128), GroupedConfig(64, 128, 3), 0, 0.0),
    ((9, 3), (192, 64, 192), GroupedConfig(64, 128, 3), 0, 7.0),
    ((9, 3), (192, 64, 192), GroupedConfig(16, 512, 2), 0, 7.0),
]


@pytest.mark.parametrize(
    ("sizes", "shape", "config", "rank", "limit"),
    [MLP_CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in MLP_CASES[1:])],
)
def test_the_kernel_of_a_decode_step(sizes, shape, config, rank, limit, monkeypatch):
    """Simulated: what a caller gets on a GPU with the kernel is what it gets in float64."""
    (tokens, count), (inputs, width, outputs), top_k = sizes, shape, 2
    use_simulation(
        monkeypatch,
        choose=lambda *_, parts: config,
        choose_mlp=lambda *_: config,
        mlp_is_faster=lambda *_: config.columns < 512,
    )
    monkeypatch.setattr(device, "supports_warpgroup", lambda: True)
    rng = np.random.default_rng(tokens)
    routes = random_routes(tokens, top_k, count)
    if tokens == 24:
        routes[:, 0], routes[:, 1] = 0, 1 + np.arange(24) % 9 // 5 * 2
    gate_up = random_weight(rng, count * 2 * width, inputs)
    gate_up = gate_up._replace(global_scale=gate_up.global_scale * (50 if limit else 200))
    down = random_weight(rng, count * outputs, width)
    x = jnp.asarray(rng.standard_normal((tokens, inputs)), jnp.bfloat16)
    pair_weights = rng.uniform(0.1, 1, routes.size).astype(np.float32)
    own_table = experts.table(jnp.asarray(routes), experts=count)
    shapes = ((rank, inputs), (2 * width, rank)), ((rank, width), (outputs, rank))
    adapters = [
        tuple(jnp.asarray(rng.standard_normal((count, *shape)) / 8, jnp.bfloat16) for shape in own)
        for own in shapes
    ]

    biases = [
        jnp.asarray(limit * rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((count, 2, width), (count, outputs))
    ]
    packed = fp4_matmul.to_tiles(gate_up), fp4_matmul.to_tiles(down)
    routed = experts.Gated(
        *packed, tuple(adapters) if rank else (None, None), tuple(biases) if limit else None
    )
    shared = None
    if rank == 24:  # the first expert is one that all tokens have, too; its B has more columns
        first = tuple(
            (a[0], jnp.pad(b[0], ((0, 0), (0, 64 - rank)), constant_values=1)) for a, b in adapters
        )
        weights = (gate_up, 2 * width), (down, outputs)
        own = (
            fp4_matmul.to_tiles(jax.tree.map(lambda array, n=n: array[:n], weight))
            for weight, n in weights
        )
        shared = experts.Gated(*own, first)
        assert experts.takes_shared(x, routed, shared, top_k=top_k, width=width)
    options = {"width": width, "shared": shared, "limit": limit}
    found, everyone = experts.mlp(x, routed, own_table, jnp.asarray(pair_weights), **options)

    def wanted(x, chosen, pair_weights):
        def product(x, weight, adapter, bias):
            dense = float64(fp4_matmul.dequantize(weight, jnp.float32))
            y = np.einsum("pk,pnk->pn", x, dense.reshape(count, -1, x.shape[1])[chosen])
            a, b = (float64(matrix)[chosen] for matrix in adapter)
            return y + np.einsum("pk,prk,pnr->pn", x, a, b) + bias

        added, after = (float64(bias).reshape(count, -1)[chosen] for bias in biases)
        factors = pair_weights[:, None]
        gate, up = np.split(product(x, gate_up, adapters[0], added), 2, axis=1)
        if limit:
            assert all(some.any() for some in (gate > limit, up > limit, up < -limit))
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        slope = 1.702 if limit else 1
        hidden = gate / (1 + np.exp(-slope * gate)) * up * factors
        return product(hidden, down, adapters[1], factors * after)

    want = wanted(float64(x).repeat(top_k, axis=0), routes.reshape(-1), pair_weights)
    assert found.dtype == jnp.bfloat16
    assert relative_error(found[np.asarray(own_table.place)], want) < 5e-3
    assert (everyone is None) == (shared is None)
    if shared is not None:
        want = wanted(float64(x), np.zeros(tokens, int), np.ones(tokens))
        assert relative_error(everyone, want) < 5e-3


def use_simulation(monkeypatch, **functions):
    kernel = types.SimpleNamespace(**vars(SIMULATED), **functions)
    monkeypatch.setattr(api, "has_kernel", lambda _: True)
    monkeypatch.setattr(api, "kernel", lambda: kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [GroupedConfig(64, 128, 2, tiles=2), GroupedConfig(128, 128, 3)], ids=str
)
def test_the_kernel_of_a_product(config, monkeypatch):
    """Simulated, as above: without gate and up, for rows in the order of the table."""
    tokens, count, top_k = 16, 6, 2
    use_simulation(monkeypatch, choose=lambda *_, parts: config)
    rng = np.random.default_rng(tokens)
    routes = random_routes(tokens, top_k, count)
    weight = random_weight(rng, count * 128, 64)
    own_table = experts.table(jnp.asarray(routes), experts=count)
    place, empty = np.asarray(own_table.place), np.asarray(own_table.source) == routes.size
    rows = jnp.asarray(rng.standard_normal((len(empty), 64)), jnp.bfloat16)
    rows = jnp.where(empty[:, None], jnp.nan, rows)  # No product reads rows without a pair.
    y = experts.grouped_matmul(rows, fp4_matmul.to_tiles(weight), own_table, outputs=128)
    dense = float64(fp4_matmul.dequantize(weight, jnp.float32)).reshape(count, -1, 64)
    want = np.einsum("pk,pnk->pn", float64(rows[place]), dense[routes.reshape(-1)])
    assert relative_error(y[place], want) < 3e-3
    assert not y[empty].any()


def relative_error(found, want):
    return np.linalg.norm(float64(found) - want) / np.linalg.norm(want)


@pytest.mark.slow  # 15 s
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_the_kernel_agrees_with_the_definition(form):
    assert self_test.relative_error(SIMULATED, form) < 5e-3


@pytest.mark.parametrize(
    ("capability", "choice", "error", "expected"),
    [(8.0, None, 0.0, True), (9.0, "mosaic", 0.0, True), (8.9, "xla", 0.0, False),
     (7.5, None, 0.0, False), (0.0, None, 0.0, False), (9.0, None, 1.0, False)],
)  # fmt: skip
def test_which_devices_have_the_kernel(capability, choice, error, expected, monkeypatch):
    monkeypatch.setattr(device, "cuda_capability", lambda: capability)
    monkeypatch.setattr(self_test, "relative_error", lambda _, form: {"mxfp4": error}[form])
    monkeypatch.delenv(dispatch.KERNEL_VARIABLE, raising=False)
    if choice:
        monkeypatch.setenv(dispatch.KERNEL_VARIABLE, choice)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dispatch._warn_once.cache_clear()
        assert api.has_kernel.__wrapped__("mxfp4") == expected
    assert [str(w.message) for w in seen] == (
        ["the FP4 kernel is off by 1.0e+00, dequantizing instead"] if error else []
    )


def test_schedules_that_cannot_be():
    for config, outputs, parts, message in (
        (GroupedConfig(48), 128, 1, "rows is 48, expected 16 or a multiple of 64"),
        (GroupedConfig(128), 192, 2, "192 outputs, expected a multiple of 128"),
        (GroupedConfig(16, 256), 128, 2, "columns is 256, expected 128, 256 or 512, with 16 rows"),
        (GroupedConfig(wgmma=True), 128, 1, "columns is 256, expected 128 with wgmma"),
        (GroupedConfig(stages=1), 128, 1, "1 stages and 1 tiles, expected at least 2 and 1"),
        (GroupedConfig(64, 512, 3), 128, 2, "bytes of shared memory, limit 101376"),
    ):
        assert message in config.problem(outputs, parts)


def test_rows_without_a_pair_are_zeros():
    routes, count = ROUTES["several blocks of pairs"]
    own_table = experts.table(jnp.asarray(routes), experts=count)
    x = jnp.ones((len(routes), 8))
    rows = experts.to_rows(x, own_table)
    y = experts.grouped_matmul(rows, jnp.ones((count * 4, 8)), own_table, outputs=4)
    empty = np.asarray(own_table.source) == routes.size
    assert empty.any()
    assert not y[empty].any()
    assert (y[~empty] == 8).all()


def test_a_product_in_blocks_begins_with_zeros_of_its_own(monkeypatch):
    """XLA would make zeros that are equal in all layers once, and copy them for all at a time."""
    monkeypatch.setattr(api, "DENSE_NUMBERS", 1)
    routes, count = ROUTES["several blocks of pairs"]

    def product(x, routes):
        own_table = experts.table(routes, experts=count)
        rows = experts.to_rows(x, own_table)
        return experts.grouped_matmul(rows, jnp.ones((count * 4, 8)), own_table, outputs=4)

    program = jax.make_jaxpr(product)(jnp.ones((len(routes), 8)), routes).jaxpr
    calls = (e.params["call_jaxpr"] for e in program.eqns if "custom_vjp" in e.primitive.name)
    (eqns,) = (call.eqns for call in calls if "while" in map(str, (e.primitive for e in call.eqns)))
    (loop,) = (e for e in eqns if e.primitive.name == "while")
    filled = {e.outvars[0]: e.invars[0] for e in eqns if e.primitive.name == "broadcast_in_dim"}
    (zero,) = (
        filled[x]
        for x in loop.invars
        if not isinstance(x, jax.extend.core.Literal) and x in filled and x.aval.ndim == 3
    )
    assert not isinstance(zero, jax.extend.core.Literal)


def test_gradients_have_no_scatter_add():
    """Atomics would add in another order every time."""
    config, params = tiny_policy("qwen3_5_moe", quantized=True, num_layers=1, recurrent_layers=())
    lora = random_lora(config, expert_rank=2)
    mlp = kinds.layer_of(config, 0).mlp.mlp

    def added(x, lora):
        adapters = lora_lib.fuse(lora, config, jnp.float32)[0]
        return mlp(Own(params["layers"][0], adapters, config), x)[0].sum()

    program = str(jax.make_jaxpr(jax.grad(added, (0, 1)))(jnp.ones((2, 9, 32)), lora))
    assert "scatter" in program  # of the table, at rows of one pair each
    assert "scatter-add" not in program
    assert "scatter_add" not in program


def test_of_equal_logits_the_lower_experts_are_taken():
    config, params = tiny_policy("qwen3_moe")
    layer = params["layers"][0]
    shared_row = layer["router"][:1]
    layer = layer | {"router": jnp.concatenate([shared_row, -shared_row] * 3)}
    mlp = kinds.layer_of(config, 0).mlp.mlp
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, 32), np.float32))
    _, routes = jax.jit(lambda x: mlp(Own(layer, {}, config), x))(x)
    even = np.asarray(routes)[..., 0] % 2 == 0
    assert 0 < even.sum() < even.size
    np.testing.assert_array_equal(routes[even], np.broadcast_to([0, 2], (even.sum(), 2)))
    np.testing.assert_array_equal(routes[~even], np.broadcast_to([1, 3], ((~even).sum(), 2)))


@pytest.mark.parametrize(
    "family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "qwen3_5_moe"]
)
def test_bfloat16_and_adapters(family):
    """A mixture in bfloat16 with adapters computes about what it does in float32."""
    config, params = tiny_policy(family)
    lora, tokens = random_lora(config, expert_rank=3), random_tokens(2, 7)
    lengths = jnp.array([7, 3])
    want = transformer.forward(params, lora, tokens, lengths, config=config)
    plain = transformer.forward(params, None, tokens, lengths, config=config)
    assert abs(want - plain)[0].max() > 0.1
    narrow = jax.tree.map_with_path(
        lambda path, x: x if path[-1].key in KEPT_WIDE else x.astype(jnp.bfloat16), params
    )
    # A near tie may go to another expert: most numbers are near.
    actual = transformer.forward(narrow, lora, tokens, lengths, config=config)
    assert actual.dtype == jnp.float32
    assert np.median(abs(actual - want)[0]) < 0.1


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("qwen3_moe", "bf16"),
        pytest.param("qwen3_5_moe", "nvfp4", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "nvfp4", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "bf16", marks=pytest.mark.slow),
    ],
)
def test_sizes_are_those_of_a_random_policy(family, format):
    config = model_config(family, embed_dim=64, mlp_dim=64)
    made = random_params(jax.random.key(0), config, format=format, dtype=jnp.float32)
    size = sum(x.nbytes for x in jax.tree.leaves(made))
    assert size == sizes.weight_bytes(config, format=format, itemsize=4)
    packed = [x for x in jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, QuantTensor))
              if isinstance(x, QuantTensor)]  # fmt: skip
    found = sum(x.nbytes for x in jax.tree.leaves(packed))
    assert found == sizes.packed_bytes(config, format)
    targets = tuple(kinds.projection_shapes(config))
    lora = lora_lib.init(
        jax.random.key(0),
        config,
        lora_lib.LoraConfig(rank=2, alpha=2.0, targets=targets, expert_rank=3),
    )
    options = {"rank": 2, "targets": targets, "expert_rank": 3}
    trained = sizes.trained_numbers(config, parameters="lora", **options)
    assert trained == sum(x.size for x in jax.tree.leaves(lora))
    fused = sizes.fused_adapter_bytes(config, itemsize=4, **options)
    fused -= sizes.fused_adapter_bytes(config, itemsize=4, **options | {"expert_rank": 0})
    made_of = [layer[stack] for layer in lora.layers for stack in kinds.STACKS]
    assert 3 * fused == 8 * sum(x.nbytes for x in jax.tree.leaves(made_of))  # as kernels read it
    logits = transformer.forward(made, lora, random_tokens(1, 5), jnp.array([5]), config=config)
    assert np.isfinite(logits).all()


def test_what_mixtures_refuse():
    config, params = tiny_policy("qwen3_moe")
    refused("mesh.tensor=2: the experts of a qwen3_moe are not cut", shard_of, config, 2)
    full = {"parameters": "full", "rank": 0, "targets": ()}
    refused("train.parameters='full': the experts of a qwen3_moe", sizes.trained_numbers, config,
            **full)  # fmt: skip
    refused("train.parameters='full' trains the weights, but those of experts", trained_params,
            params, "full")  # fmt: skip
    words = "a qwen3_moe has no gate_proj: .*; lora.expert_rank adapts its routed experts"
    refused(words, lora_lib.check_targets, config, ("gate_proj",))
    words = "lora.expert_rank=2: a qwen3 has no routed experts; pass 0"
    refused(words, lora_lib.check_targets, model_config("qwen3"), ("q_proj",), 2)
    changed = {"count": 0}
    refused("count of the experts is 0", dataclasses.replace, config.experts, **changed)
