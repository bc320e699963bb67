"""Machine code for an H200 on a machine without a GPU: no spills, no serialized products.

    uv run --group aot pytest -n 0 -m aot

The group brings the CUDA plugin of jax and NVIDIA's compilers, 1.25 GB.
"""

import functools
import itertools
import re

import h200
import jax
import jax.numpy as jnp
import kernel_code
import numpy as np
import pytest
from h200 import array, tiles

from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import api, autotune, cases, layout, sm90, tiling, timeline
from pallas_kernels.fp4_matmul.tiling import TileConfig

pytestmark = pytest.mark.aot


def configs():
    """Every tuned tiling, and the tilings of the named shapes without a table, once each."""
    found = {}
    for name, table in tiling._tables().items():
        for entry in table["entries"]:
            shape = entry["m"], entry["n"], entry["k"], 64
            found.setdefault(TileConfig.from_json(entry["config"]), (name, *shape))
    for model, layers in cases.MODELS.items():
        for layer, (n, k) in layers.items():
            for m in (1, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 256, 2048):
                rank = -(-cases.rank_of(layer, 32) // 64) * 64
                config = tiling.choose(m, n, k, rank=rank)
                found.setdefault(config, (f"{model}.{layer}", m, n, k, rank))
    return {f"{where[0]}-{where[1]}-{i}": (c, where) for i, (c, where) in enumerate(found.items())}


CONFIGS = configs()
# Partials are for few rows.
CASES = [
    (name, adapter)
    for name, (_, (_, m, *_)) in CONFIGS.items()
    for adapter in ("none", "product", "xa_partials", "inside")
    if adapter not in ("xa_partials", "inside")
    or (m <= tiling.MAX_ROWS_OF_PARTIALS and tiling.supports_xa_partials(CONFIGS[name][0]))
]


def shapes_of(layer):
    """The distinct shapes (n, k) of a layer: the compiler reports on equal programs once."""
    models = {}
    for model, layers in cases.MODELS.items():
        models.setdefault(layers[layer], model)
    return [pytest.param(n, k, id=model) for (n, k), model in models.items()]


@pytest.fixture(scope="module")
def compile_for_h200():
    with h200.compiler() as compiled:
        yield compiled


@pytest.fixture
def build(compile_for_h200, capfd):
    """A function that compiles like `compile_for_h200` and checks the report of ptxas."""

    def built(function, *args, warpgroups=0, helpers=1):
        compiled = compile_for_h200(function, *args)
        report = "".join(capfd.readouterr())
        if warpgroups:  # A CTA that asks for more registers than it has waits for ever.
            started = int(re.search(r"Used (\d+) registers", report)[1]) * (warpgroups + helpers)
            wanted = warpgroups * tiling.compute_registers(warpgroups, helpers)
            wanted += helpers * tiling.helper_registers(warpgroups, helpers)
            assert wanted <= started
        spills = re.findall(r"(\d+) bytes spill stores", report)
        assert spills, report
        assert set(spills) == {"0"}, report
        assert "Potential Performance Loss" not in report, report
        return compiled

    return built


@pytest.fixture
def build_product(build):
    """A function that builds a product in a tiling, with further arguments of `sm90.matmul`."""

    def built(config, m, n, k, extra, form="nvfp4"):
        function, (x, _, arrays) = kernel_code.product(config, m, n, k, extra)
        args = x, tiles(n, k, form), arrays
        helpers = tiling.helper_warpgroups("a" in extra or "xa_partials" in extra)
        build(function, *args, warpgroups=config.warpgroups, helpers=helpers)

    return built


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_config(name, adapter, build_product):
    config, (_, m, n, k, rank) = CONFIGS[name]
    extra = {}
    if adapter == "product":
        extra = {"xa": array(m, rank), "b": array(n, rank), "bias": array(n)}
    elif adapter == "xa_partials":
        xa_partials = array(-(-k // 128), m, rank - 32, dtype=jnp.float32)
        extra = {"xa_partials": xa_partials, "b": array(n, rank)}
    elif adapter == "inside":
        if not sm90.make_schedule(config, m, -(-n // 64), k, 132).supports_lora_shrink(
            rank - 32, k
        ):
            pytest.skip("another kernel computes x A^T")
        extra = {"a": array(rank - 32, k), "b": array(n, rank)}

    build_product(config, m, n, k, extra)


@pytest.mark.parametrize("m", [8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(("n", "k"), shapes_of("gate_up"))
@pytest.mark.parametrize("inside", [False, True])
def test_swiglu(inside, n, k, m, build_product):
    config = tiling.choose(m, n, k, rank=64)
    if not tiling.supports_xa_partials(config):
        pytest.skip("another kernel computes SwiGLU")
    # As many partial mean squares as the product with a residual leaves, or a kernel.
    count = k // (16 if inside else tiling.TILE_COLUMNS)
    extra = {"b": array(n, 64), "epilogue": fp4.Swiglu(array(count, m, dtype=jnp.float32), 0.0)}
    if inside:
        schedule = sm90.make_schedule(config, m, n // tiling.TILE_ROWS, k, 132, paired=True)
        if not schedule.supports_lora_shrink(64, k):
            pytest.skip("another kernel computes x A^T")
        extra["a"] = array(64, k)
    else:
        extra["xa_partials"] = array(count, m, 64, dtype=jnp.float32)

    build_product(config, m, n, k, extra)


@pytest.mark.parametrize("m", [8, 16, 24, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(("n", "k"), shapes_of("o"))
@pytest.mark.parametrize("adapter", ["product", "xa_partials", "inside"])
def test_add_rmsnorm(adapter, n, k, m, build_product):
    config = tiling.choose(m, n, k, rank=64)
    schedule = sm90.make_schedule(config, m, n // tiling.TILE_ROWS, k, 132)
    if not schedule.supports_add_residual(m):
        pytest.skip("another kernel begins the norm")
    epilogue = fp4.AddRmsNorm(array(m, n), array(n, dtype=jnp.float32))
    extra = {"b": array(n, 64), "epilogue": epilogue}
    if adapter == "product":
        extra["xa"] = array(m, 64)
    elif adapter == "xa_partials":
        extra["xa_partials"] = array(k // tiling.TILE_COLUMNS, m, 32, dtype=jnp.float32)
    elif schedule.supports_lora_shrink(32, k):
        extra["a"] = array(32, k)
    else:
        pytest.skip("another kernel computes x A^T")

    build_product(config, m, n, k, extra)


def test_the_tuner_sees_spills(compile_for_h200, monkeypatch):
    """The tuner sees the spills of a tiling that `candidates` leaves out."""
    lowered = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, **_: lowered.append(self))
    for config in (TileConfig(16), TileConfig(96, warpgroups_n=5, stages=2)):
        product = functools.partial(sm90.matmul, config=config, num_sms=132)
        compile_for_h200(product, array(192, 1024), tiles(1024, 1024))
    monkeypatch.undo()
    with autotune.compiler_reports() as spilled_bytes:
        fits, spills = map(spilled_bytes, lowered)
    assert fits == 0
    assert spills > 0


def test_partials_with_full_shared_memory(build_product):
    config = max(tiling.candidates(32, 3584, 3584, rank=64), key=TileConfig.smem_bytes)
    assert config.smem_bytes() > 0.99 * tiling.SMEM_LIMIT
    extra = {"xa_partials": array(28, 32, 32, dtype=jnp.float32), "b": array(3584, 64)}

    build_product(config, 32, 3584, 3584, extra)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(8, 3584, 3584), (16, 3584, 3584), (64, 3584, 18944), (8, 37888, 3584), (8, 4608, 3584)],
)
@pytest.mark.parametrize("inside", [True, False])
def test_trace(m, n, k, inside, build_product, monkeypatch):
    monkeypatch.setattr(jax.debug, "callback", lambda *_: None)  # which needs a GPU
    config = timeline.traceable(tiling.choose(m, n, k, rank=64))
    extra = {"xa_partials": array(-(-k // 128), m, 32, dtype=jnp.float32), "b": array(n, 64)}
    if inside:
        assert sm90.make_schedule(config, m, -(-n // 64), k, 132).supports_lora_shrink(32, k)
        extra = {"a": array(32, k), "b": array(n, 64)}

    build_product(config, m, n, k, extra | {"trace": "folder"})


@pytest.mark.parametrize("m", [1, 64, 512])
def test_float32(m, build_product):
    n, k = 152064, 3584
    build_product(tiling.choose(m, n, k), m, n, k, {"dtype": jnp.dtype("float32")})


@pytest.mark.parametrize("m", [8, 64])
def test_swiglu_of_weights_in_mxfp4(m, build_product):
    n, k = cases.MODELS["7b"]["gate_up"]
    swiglu = fp4.Swiglu(array(28, m, dtype=jnp.float32), 0.0)
    xa_partials = array(28, m, 64, dtype=jnp.float32)
    extra = {"b": array(n, 64), "xa_partials": xa_partials, "epilogue": swiglu}
    build_product(tiling.choose(m, n, k, rank=64), m, n, k, extra, "mxfp4")


def test_sizes_that_fill_no_tile(build_product):
    build_product(TileConfig(40), 33, 136, 176, {})


def operands_of_wgmma(ptx, codes, scales, rows):
    """The operands of the 8 wgmma instructions of a tile in every thread, [8, 128, 4].

    Runs the generated instructions from the loads of codes and scales on, on arrays of 128 threads,
    which have two `rows` each.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    first = next(i for i, line in enumerate(lines) if "wgmma.mma_async" in line)
    # Two loads of codes; those before them are of x A^T and of mean squares.
    start = [i for i in range(first) if lines[i].startswith("ld.shared.v4")][-2]
    memory = {
        4: [codes.reshape(64, 4, 4)[row, np.arange(128) % 4] for row in rows],
        len(scales) // 64: [scales.reshape(64, -1)[row] for row in rows],
    }
    opaque = re.compile(r"{ \.reg \.b32 all; activemask\.b32 all; and\.b32 (\S+), all, (\d+); }")
    registers = {target: np.uint32(int(value)) for target, value in opaque.findall(ptx)}
    moved = re.compile(r"mov\.b32 (%\S+), (\d+);")
    registers |= {target: np.uint32(int(value)) for target, value in moved.findall(ptx)}

    def value(name):
        return registers[name] if name in registers else np.uint32(int(name) % 2**32)

    functions = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "shl": np.left_shift,
    }
    operands = []
    for line in lines[start:]:
        if load := re.match(r"ld\.shared(?:\.v\d)?\.b32\s+{?([^}]*?)}?, \[", line):
            names = load[1].split(", ")
            registers |= dict(zip(names, memory[len(names)].pop(0).T, strict=True))
        elif product := re.match(
            r"{.*mov\.b32 {low, high}, (\S+);.*{(\w+), \w+};.*mul\.rn\.bf16x2 (\S+), (\S+), scale",
            line,
        ):
            source, half, target, factor = product.groups()
            scale = registers[source] >> (16 if half == "high" else 0) & 0xFFFF
            parts = [
                (registers[factor] >> shift << 16).view(np.float32) * (scale << 16).view(np.float32)
                for shift in (0, 16)
            ]
            low, high = (part.view(np.uint32) >> 16 for part in parts)
            registers[target] = low | high << 16
        elif shift := re.match(r"shf\.l\.wrap\.b32 (\S+), (\S+), (\S+), (\d+);", line):
            target, word, _, left = shift.groups()
            word, left = registers[word], int(left)
            registers[target] = word << left | word >> (32 - left)
        elif simple := re.match(r"(and|or|xor|shl)\.b32\s+(\S+), (\S+), (\S+);", line):
            operation, target, a, b = simple.groups()
            if a in registers:
                registers[target] = functions[operation](value(a), value(b)).astype(np.uint32)
        for words in re.findall(r"wgmma\.mma_async\S+ {[^}]*}, {([^}]*)}, ", line):
            operands.append(np.stack([registers[name] for name in words.split(", ")], axis=-1))
        if len(operands) == 8:
            return np.stack(operands)
    raise AssertionError(f"found {len(operands)} products")


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("paired", [False, True])
def test_the_generated_dequantization_is_exact(
    paired, form, compile_for_h200, tmp_path, monkeypatch
):
    """A paired tile has 32 rows of each half of the weight: here those of one tile."""
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(0, 256, (64, 64), np.uint8))
    if form == "nvfp4":
        scales = rng.integers(1, 127, (64, 8), np.uint8).view(jnp.float8_e4m3fn)
        weight = fp4.Fp4Weight(codes, jnp.asarray(scales), jnp.ones(64))
    else:
        scales = rng.integers(118, 128, (64, 4), np.uint8)
        scales[:, 0] = 128  # the largest of each row, so that all rows have one divisor
        weight = fp4.Fp4Weight(codes, jnp.asarray(scales.view(jnp.float8_e8m0fnu)))
    packed = fp4.to_tiles(weight)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    product = functools.partial(sm90.matmul, config=TileConfig(16, warpgroups_n=1), num_sms=132)
    extra = {}
    if paired:
        partials = {"xa_partials": array(8, 16, 32, dtype=jnp.float32), "b": array(1024, 64)}
        extra = partials | {"epilogue": fp4.Swiglu(array(8, 16, dtype=jnp.float32), 0.0)}
    compile_for_h200(
        lambda x, weight, extra: product(x, weight, **extra),
        *(array(16, 1024), tiles(1024, 1024, form), extra),
    )
    (ptx,) = tmp_path.glob("*.ptx")
    # a0..a3 of step j: rows r, r + 8 of columns 16 j + 2 c, + 1; then the same of 16 j + 8 + 2 c.
    thread = np.arange(128)
    eight = thread // 32 * (8 if paired else 16) + thread % 32 // 4
    rows = eight, eight + (32 if paired else 8)
    with np.errstate(under="ignore"):
        words = (np.asarray(array)[0, 0] for array in (packed.codes, packed.scales))
        operands = operands_of_wgmma(ptx.read_text(), *words, rows)
    expected = np.asarray(fp4.dequantize(weight, jnp.float32)) / layout.UNIT
    expected *= np.asarray(packed.divisor)[:, None]
    for step, part, odd in itertools.product(range(8), range(4), range(2)):
        columns = 16 * step + 8 * (part // 2) + thread % 4 * 2 + odd
        bits = operands[step, :, part] >> 16 * odd & 0xFFFF
        actual = (bits.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(actual, expected[rows[part % 2], columns])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 1024), (2499, 4000), (2501, 4000), (3584, 3584), (37888, 3584), (37888, 64)]
)
def test_a_dense_product_rounds_its_result_only(rows, n, k, compile_for_h200, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    text = compile_for_h200(fp4.dot, array(rows, k), array(n, k)).as_text()
    assert not re.search(r"= bf16\S* multiply\(", text)
    if rows > 1 or n * k > 10**7:  # no float32 weight, and no result that another kernel rounds
        assert f"f32[{n},{k}]" not in text
        assert f"f32[{n},{rows}]" not in text


@pytest.mark.parametrize(("n", "k"), [(136, 176), (37888, 3584)])
def test_dequantize(n, k, build):
    build(functools.partial(sm90.dequantize, inputs=k, num_sms=132), tiles(n, k))


def test_a_list_of_layers_copies_no_weight(build):
    """Decode steps over unrolled layers: no copy of a weight, and one set of locks."""
    n, k, depth, steps = 4096, 4096, 3, 4
    config = TileConfig(16, warpgroups_n=2, stream_k=True)
    layers = [tiles(n, k) for _ in range(depth)]

    def decode(x, layers):
        def step(_, x):
            for weight in layers:
                x = jnp.tanh(api.fp4_matmul(x, weight, implementation="mosaic", config=config))
            return x

        return jax.lax.fori_loop(0, steps, step, x)

    compiled = build(decode, array(16, k), layers)
    weight_bytes = n * k * 9 // 16
    # Partial sums: two of [rows, 64, 16] floats for each SM.
    partial = 2 * 132 * config.warpgroups_n * 64 * 16 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < partial * depth + weight_bytes // 4


def test_the_backward_pass_holds_one_dense_weight(build):
    n, k, depth = 4096, 4096, 4
    layers = [tiles(n, k) for _ in range(depth)]

    def loss(x, layers):
        for weight in layers:
            x = jnp.tanh(api.fp4_matmul(x, weight, implementation="mosaic"))
        return x.astype(jnp.float32).sum()

    compiled = build(jax.grad(loss), array(512, k), layers)
    activations = (depth + 4) * 512 * k * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2 * n * k + activations
