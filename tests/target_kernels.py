"""Compiles the kernels of one warpgroup for a GPU that is not there, and runs the code.

    uv run --group aot python tests/target_kernels.py 80
    uv run --group aot python tests/target_kernels.py 80 packed

Prints a line of JSON for each case: its registers, the bytes that it spills, and the relative
errors of its results. Mosaic GPU keeps the options of the first target for which it compiles, so a
process has one target. `ptx` runs the code, and Pallas's interpreter says what it must compute.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import sys

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # they ask a driver
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}

import h200
import jax
import jax.numpy as jnp
import numpy as np
import ptx
import sass
from jax.sharding import AbstractDevice
from kernel_code import standard_output
from simulated_kernel import random_weight

from pallas_kernels import experts, fp4_matmul, matvec, warpgroup
from pallas_kernels.decode import attention, attention_queries, delta, gated_attention, norms
from pallas_kernels.experts import mma as experts_mma
from pallas_kernels.experts import route
from pallas_kernels.experts.combine import ExpertSums
from pallas_kernels.experts.mma import GroupedConfig
from pallas_kernels.experts.route import Router, Scores
from pallas_kernels.fp4_matmul import e4m3, lora_shrink, mma
from pallas_kernels.fp4_matmul.mma import dense
from pallas_kernels.fp4_matmul.mma_schedule import MmaConfig

NAMES = {
    80: "NVIDIA A100-SXM4-80GB",
    86: "NVIDIA GeForce RTX 3090",
    89: "NVIDIA GeForce RTX 4090",
    90: "NVIDIA H200",
    120: "NVIDIA GeForce RTX 5090",
}
FLOAT32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Device(AbstractDevice):
    """An abstract device that knows its compute capability; Mosaic GPU takes others for a 9.0."""

    compute_capability: str = "9.0"


def compiled_code(target, function, args):
    """The PTX of a function's kernel for a target, and what ptxas reports."""
    major, minor = divmod(target, 10)
    extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    config = h200.CONFIG.replace("major: 9", f"major: {major} minor: {minor}{extension}")
    if target != 90:  # The shared memory of the smallest of them, an RTX 3090.
        config = re.sub(r"(per_block_optin): \d+", r"\1: 101376", config)
        config = re.sub(r"(memory_per_core): \d+", r"\1: 102400", config)
    config = config.replace("NVIDIA H200", NAMES[target])
    device = Device(NAMES[target], 132, "gpu", f"{major}.{minor}")
    args = jax.tree.map(lambda x: h200.array(*x.shape, dtype=x.dtype), args)
    with h200.compiler(config=config, device=device) as compiled, standard_output() as read:
        compiled(function, *args)
        return read()


def parameters(function, args):
    """Indices of a kernel's references in the order of its parameters: that of their first use."""
    (call,) = equations(jax.make_jaxpr(function)(*args).jaxpr, "mpmd_map")
    (kernel,) = call.params["jaxprs"]
    order, pointers = [], []  # what inline code takes whole comes after everything else

    def visit(jaxpr, known):
        for equation in jaxpr.eqns:
            inputs = [None if hasattr(x, "val") else known.get(x) for x in equation.invars]
            inner = list(inner_jaxprs(equation, inputs))
            if not inner:
                whole = whole_arguments(equation)
                for place, i in enumerate(inputs):
                    found = pointers if place in whole else order
                    if i is not None and i not in found:
                        found.append(i)
            for body, names in inner:
                visit(body, names)

    visit(kernel, {x: i for i, x in enumerate(kernel.invars)})
    return order + [i for i in pointers if i not in order]


def whole_arguments(equation):
    """Places of the references that inline code takes whole, without an index."""
    if equation.primitive.name != "inline_mgpu":
        return []
    tree = equation.params["pytree_ref_transforms"]
    transforms = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [place for place, indices in enumerate(transforms) if indices == ()]


def inner_jaxprs(equation, inputs):
    """Yields the bodies of an equation, and the references that their variables are."""
    name, params = equation.primitive.name, equation.params
    bodies = []
    if name == "scan" or name == "jit":
        bodies = [(params["jaxpr"].jaxpr, inputs)]
    elif name == "while":
        tests, bodies_consts = params["cond_nconsts"], params["body_nconsts"]
        start = tests + bodies_consts
        bodies = [
            (params["cond_jaxpr"].jaxpr, inputs[:tests] + inputs[start:]),
            (params["body_jaxpr"].jaxpr, inputs[tests:]),
        ]
    elif name == "cond":
        *others, last = params["branches"]  # the last one is the default, which comes first
        bodies = [(branch.jaxpr, inputs[1:]) for branch in (last, *others)]
    for body, values in bodies:
        yield body, dict(zip(body.invars, values, strict=True))
    if name == "run_scoped":
        yield params["jaxpr"], dict(zip(params["jaxpr"].constvars, inputs, strict=True))


def equations(jaxpr, name):
    """Finds the equations of a primitive, also in the functions that a program calls."""
    found = [equation for equation in jaxpr.eqns if equation.primitive.name == name]
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += equations(inner, name)
    return found


def check(target, function, *args):
    """Compares the code of the one kernel that a function runs with the interpreter."""
    calls = []

    def record(*args, **options):
        calls.append((args, options))
        return run(*args, **options)

    run, warpgroup.run = warpgroup.run, record
    try:
        function(*args, interpret=True)
    finally:
        warpgroup.run = run
    (((body, name, grid, operands, results), options),) = calls
    updated = options.pop("updated", ())
    options.pop("interpret")

    def kernel(operands, updated):
        return run(body, name, grid, operands, results, updated=updated, **options)

    report = compiled_code(target, kernel, (operands, updated))
    products = [count for count, product in sass.loops(report) if product]
    inputs = [np.asarray(x) for x in (*jax.tree.leaves(operands), *updated)]
    count = len(inputs) - len(updated)
    outputs = [(x.shape, x.dtype) for x in jax.tree.leaves(results)]
    order = parameters(kernel, (operands, updated))
    with np.errstate(all="ignore"):
        found, changed = ptx.run(
            report, inputs, outputs, grid, aliases=range(count, len(inputs)), order=order
        )
    options["interpret"] = True
    expected = jax.tree.leaves(kernel(operands, updated))
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spills": max(map(int, re.findall(r"(\d+) bytes spill stores", report))),
        "loop": max(products, default=0),
        "errors": [relative_error(x, y) for x, y in zip([*found, *changed], expected, strict=True)],
    }


def relative_error(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    expected = np.nan_to_num(
        expected
    )  # What no kernel writes is NaN in one, and zero in the other.
    return float(np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1.0))


def cases(target):
    """Yields the name and the arguments of `check` for cases of every branch of the kernels."""
    numbers = itertools.count()

    def normal(*shape, dtype=jnp.bfloat16):
        key = jax.random.fold_in(jax.random.key(0), next(numbers))
        return jax.random.normal(key, shape, FLOAT32).astype(dtype)

    for n, k in ((8, 1024), (7, 1104)):
        yield f"matvec {n} {k}", matvec.matvec, normal(1, k), normal(n, k)

    def with_lora(x, weight, *lora, **options):
        return matvec.matvec(x, weight, lora=lora, **options)

    shapes = (1, 512), (258, 512), (1, 64), (258, 64)
    yield "matvec with an adapter", with_lora, *(normal(*shape) for shape in shapes)
    for m, k, rank in ((1, 256, 32), (19, 328, 40), (130, 128, 16)):
        yield f"shrink {m} {k} {rank}", lora_shrink.shrink, normal(m, k), normal(rank, k)
    for m, k, rank in ((5, 200, 96), (33, 256, 32)):
        scale, a = normal(k, dtype=FLOAT32), normal(rank, k)
        yield f"add_rmsnorm {m} {k}", norms.add_rmsnorm, normal(m, k), normal(m, k), scale, a
    for m, k, rank in ((1, 256, 0), (5, 200, 24)):  # experts are added up, a router multiplies
        sums = ExpertSums(
            normal(5 * m, k),
            jax.random.permutation(jax.random.key(m), 5 * m)[: 3 * m].reshape(m, 3),
            *((normal(m, k), jnp.linspace(0, 1, m)) if rank else ()),
        )
        arguments = normal(m, k), sums, normal(k, dtype=FLOAT32), normal(rank, k) if rank else None
        yield f"add_rmsnorm of experts {m} {k}", add_rmsnorm_of_experts, *arguments, normal(40, k)
    for m, k, top_k, count, partials in (
        *((1, 256, 8, 128, 16), (8, 96, 3, 256, 3), (37, 288, 2, 40, 70)),
        *((256, 64, 8, 128, 1), (3, 64, 1, 6, 2)),
    ):
        gate = (normal(1, k),) if m % 8 else ()
        squares = jnp.abs(normal(partials, m, dtype=FLOAT32))
        logits = normal(partials, m, -(-count // 32) * 32, dtype=FLOAT32)
        router = Router(count, top_k, normalized=m != 3, eps=1e-6)
        run = functools.partial(routed, router=router)
        yield f"route {m} {k} {top_k} {count}", run, Scores(normal(m, k), squares, logits, *gate)
    for m, k, partials in ((1, 264, 3), (6, 512, 28), (18, 256, 70)):
        squares = jnp.abs(normal(partials, m, dtype=FLOAT32))
        run = functools.partial(norms.swiglu, eps=1e-6)
        yield f"swiglu {m} {k}", run, normal(m, 2 * k), squares, normal(32, k)
    if target >= 89:
        yield from rounding_cases(normal)
    for count, m, heads, head_dim in (
        (2, 3, 2, 128),
        (3, 17, 2, 64),
        (1, 9, 3, 32),
        (8, 1, 1, 256),
    ):
        shape = count, m, heads
        numbers_of = [normal(*shape, dtype=FLOAT32) for _ in range(2)]
        parts = attention.AttentionParts(
            normal(*shape, head_dim, dtype=FLOAT32), jnp.abs(numbers_of[0]), numbers_of[1]
        )
        run = functools.partial(attention.merge_parts, dtype=jnp.bfloat16)
        yield f"merge_parts {shape} {head_dim}", run, parts, normal(24, heads * head_dim)
        if m == 3:
            run = functools.partial(run, gates=normal(m, heads * head_dim))
            yield "merge_parts with gates", run, parts, normal(24, heads * head_dim)
    for whole, kv_heads, group, positions, head_dim, lengths, partials, norm, dtype in (
        (False, 2, 7, 200, 128, (0, 150), 28, False, jnp.bfloat16),
        (True, 1, 3, 133, 64, (132, 70), 3, True, jnp.bfloat16),
        (False, 1, 5, 70, 32, (63, 64), 70, True, jnp.bfloat16),
        (False, 1, 17, 64, 64, (40,), 3, False, jnp.bfloat16),
        (True, 2, 12, 200, 128, (130,), 33, False, jnp.bfloat16),
        (False, 1, 4, 600, 128, (599,), 3, True, jnp.float8_e4m3fn),
    ):
        if dtype == jnp.float8_e4m3fn and target < 89:
            continue
        m, outputs = len(lengths), kv_heads * (group + 2) * head_dim
        angle = normal(m, head_dim // 2, dtype=FLOAT32)
        scales = [normal(head_dim, dtype=FLOAT32) if norm else None for _ in range(2)]
        caches = [normal(m, kv_heads, positions, head_dim).astype(dtype) for _ in range(2)]
        inputs = attention.AttentionInputs(
            normal(m, outputs),
            jnp.abs(normal(partials, m, dtype=FLOAT32)) / partials,
            jnp.cos(angle),
            jnp.sin(angle),
            jnp.asarray(lengths, jnp.int32),
            None if norm else normal(outputs),
            *scales,
            *caches,
        )
        attend = attention.attend_whole if whole else attention.attend
        name = f"attend {group} {positions} {head_dim} {jnp.dtype(dtype)}"
        yield name, functools.partial(attend, eps=1e-6, num_sms=132), inputs


def rounding_cases(normal):
    """As `cases`, of the kernels that round rows to e4m3."""
    m, k = 37, 384
    a = normal(40, k)
    yield "round_rows", lora_shrink.round_rows, normal(m, k), a
    product = e4m3.Scaled(normal(m, k), jnp.exp2(jnp.arange(m, dtype=FLOAT32) % 5))
    run = functools.partial(norms.add_rmsnorm, rounded_eps=1e-2)
    yield "add_rmsnorm, rounded", run, normal(m, k), product, normal(k, dtype=FLOAT32), a
    run = functools.partial(norms.swiglu, eps=1e-6, rounds=True)
    squares = jnp.abs(normal(3, m, dtype=FLOAT32))
    yield "swiglu, rounded", run, normal(m, 2 * k), squares, a
    shape = 2, m, 3
    weights, largest = (normal(*shape, dtype=FLOAT32) for _ in range(2))
    parts = attention.AttentionParts(normal(*shape, 128, dtype=FLOAT32), jnp.abs(weights), largest)
    run = functools.partial(attention.merge_parts, dtype=jnp.bfloat16, rounds=True)
    yield "merge_parts, rounded", run, parts, a


def several_cases(target):
    """As `cases`, of the kernels of several tokens of each row."""
    numbers = itertools.count()

    def normal(*shape, dtype=jnp.bfloat16):
        key = jax.random.fold_in(jax.random.key(2), next(numbers))
        return jax.random.normal(key, shape, FLOAT32).astype(dtype)

    for count, kv_heads, group, positions, head_dim, lengths, norm, dtype in (
        (8, 2, 7, 200, 128, (0, 150), False, jnp.bfloat16),
        (3, 1, 2, 133, 64, (132, 62), True, jnp.bfloat16),
        (2, 1, 9, 130, 256, (127,), True, jnp.bfloat16),
        (4, 1, 5, 200, 128, (198,), False, jnp.float8_e4m3fn),
    ):
        if dtype == jnp.float8_e4m3fn and target < 89:
            continue
        rows, outputs = len(lengths), kv_heads * (group + 2) * head_dim
        m = rows * count
        caches = [normal(rows, kv_heads, positions, head_dim).astype(dtype) for _ in range(2)]
        scales = [normal(head_dim, dtype=FLOAT32) if norm else None for _ in range(2)]
        inputs = attention.AttentionInputs(
            normal(m, outputs),
            jnp.abs(normal(35, m, dtype=FLOAT32)) / 35,
            *(normal(m, head_dim // 2, dtype=FLOAT32) for _ in range(2)),
            jnp.asarray(lengths, jnp.int32),
            None if norm else normal(outputs),
            *scales,
            *caches,
        )
        name = f"{count} {group} {positions} {head_dim} {jnp.dtype(dtype)}"
        yield f"write {name}", functools.partial(attention_queries.write, eps=1e-6), inputs
        queries = normal(rows, kv_heads, count * -(-group // 8) * 8, head_dim)
        newest = inputs.lengths[:, None] + jnp.arange(count)
        order = jnp.arange(rows, dtype=jnp.int32)[::-1]
        queries = attention_queries.Queries.of(queries, newest, order, *caches)
        run = functools.partial(attention_queries.attend, count=count, num_sms=132)
        yield f"attend_queries {name}", run, queries


def hybrid_cases():
    """As `cases`, of the kernels of recurrent layers and of attention with gates."""
    numbers = itertools.count()

    def normal(*shape, dtype=jnp.bfloat16):
        key = jax.random.fold_in(jax.random.key(1), next(numbers))
        return jax.random.normal(key, shape, FLOAT32).astype(dtype)

    for m, kv_heads, heads, head_dim, angles, partials in (
        (2, 1, 2, 256, 32, 20),
        (1, 2, 2, 128, 64, 3),
    ):
        inputs = attention.AttentionInputs(
            qkv=normal(m, 2 * (heads + kv_heads) * head_dim),
            square_partials=jnp.abs(normal(partials, m, dtype=FLOAT32)) / partials,
            cosines=normal(m, angles, dtype=FLOAT32),
            sines=normal(m, angles, dtype=FLOAT32),
            lengths=jnp.zeros(m, jnp.int32),
            bias=None,
            q_norm=normal(head_dim, dtype=FLOAT32),
            k_norm=normal(head_dim, dtype=FLOAT32),
            keys=normal(m, kv_heads, 64, head_dim),
            values=normal(m, kv_heads, 64, head_dim),
        )
        yield (
            f"split {head_dim} {angles}",
            functools.partial(gated_attention.split, eps=1e-6),
            inputs,
        )
    for m, ratio, window, partials, rank in ((2, 3, 4, 20, 40), (1, 2, 2, 33, 0), (1, 1, 4, 3, 32)):
        heads, width = 2 * ratio, delta.HEAD
        channels = (4 + heads) * width
        inputs = delta.DeltaInputs(
            parts=normal(m, channels + heads * (width + 2), dtype=FLOAT32),
            square_partials=jnp.abs(normal(partials, m, dtype=FLOAT32)) / partials,
            lengths=jnp.arange(m, dtype=jnp.int32),  # the first row stays as it is
            conv=normal(channels, 1, window),
            a_log=normal(heads, dtype=FLOAT32),
            dt_bias=normal(heads, dtype=FLOAT32),
            scale=normal(width, dtype=FLOAT32),
            state=normal(m, heads, width, width, dtype=FLOAT32),
            window=normal(m, channels, window - 1, dtype=FLOAT32),
        )
        a = normal(rank, heads * width) if rank else None
        yield f"delta_step {ratio} {window}", functools.partial(delta.step, eps=1e-6), inputs, a


def add_rmsnorm_of_experts(x, sums, scale, a, router, *, interpret):
    return norms.add_rmsnorm(x, sums, scale, a, router=router, interpret=interpret)


def routed(scores, *, router, interpret):
    return route.route(scores, router, interpret=interpret)


def packed_cases(target):
    """As `cases`, of the kernels that read weights in tile order, which every target has."""
    numbers = itertools.count()

    def normal(*shape):
        return jax.random.normal(jax.random.key(next(numbers)), shape, jnp.bfloat16)

    def multiply(x, weight, adapter, *, config, dtype, interpret):
        options = {"config": config, "dtype": dtype, "interpret": interpret}
        return mma.matmul(x, weight, **adapter, **options)

    def dequantize(weight, *, inputs, interpret):
        return mma.dequantize(weight, inputs=inputs, interpret=interpret)

    for (m, n, k), config, rank, form, dtype in (
        ((8, 192, 1280), MmaConfig(128, 128, 3), 64, "nvfp4", jnp.bfloat16),
        ((7, 64, 1280), MmaConfig(64, 128, 3, split=2), 32, "nvfp4", jnp.bfloat16),
        ((11, 136, 480), MmaConfig(64, 256, 2, split=2), 96, "nvfp4", jnp.bfloat16),
        ((1, 200, 1056), MmaConfig(64, 512, 2, split=2), 0, "mxfp4", jnp.bfloat16),
        ((32, 200, 640), MmaConfig(128, 128, 3, split=2), 32, "nvfp4", jnp.float32),
        ((64, 64, 384), MmaConfig(64, 128, 2, split=3), 32, "mxfp4", jnp.bfloat16),
    ):
        adapter = {}
        if rank:
            adapter = {"xa": normal(m, rank), "b": normal(n, rank), "bias": normal(n)}
        weight = fp4_matmul.to_tiles(random_weight(n, k, form))
        run = functools.partial(multiply, config=config, dtype=jnp.dtype(dtype))
        yield f"mma {m} {n} {k} {config}", run, normal(m, k), weight, adapter
    for (m, n, k), rank, split in (
        ((8, 128, 720), 96, 2),
        ((3, 64, 328), 32, 3),
        ((16, 64, 264), 384, 1),
    ):
        lora = normal(5, m, rank).astype(FLOAT32), normal(n, max(128, rank))
        arguments = normal(m, k), normal(n, k), *lora, normal(n)
        yield f"dense {m} {n} {k}", functools.partial(multiply_dense, split=split), *arguments
    weight = fp4_matmul.to_tiles(random_weight(136, 192))
    yield "mma dequantize", functools.partial(dequantize, inputs=192), weight
    yield from grouped_cases(normal, target)


def multiply_dense(x, weight, xa, b, bias, **options):
    return dense.matmul(x, weight, lora=(xa, b), bias=bias, **options)


def grouped_cases(normal, target):
    """As `cases`, of the products of a mixture of experts."""

    def gated(x, weight, table, factors, **options):
        return experts_mma.gated_matmul(x, weight, table, factors, **options)

    def matmul(rows, weight, table, **options):
        return experts_mma.matmul(rows, weight, table, **options)

    for tokens, inputs, width, config in (
        (2, 1152, 64, GroupedConfig(16, 512, 3)),
        (9, 384, 128, GroupedConfig(64, 128, 2)),
        (12, 256, 128, GroupedConfig(64, 128, 2, tiles=2)),
        *([(40, 320, 64, GroupedConfig(64, 128, 2, tiles=5, wgmma=True))] * (target == 90)),
    ):
        routes = np.random.default_rng(tokens).integers(0, 3, (tokens, 2), np.int32)
        table = experts.table(jnp.asarray(routes), experts=3)
        pairs = jnp.abs(normal(2 * tokens)).astype(FLOAT32)
        options = {"config": config, "width": width}
        weight = fp4_matmul.to_tiles(random_weight(6 * width, inputs))
        run = functools.partial(gated, **options)
        yield f"gated {tokens} {config}", run, normal(tokens, inputs), weight, table, pairs
        config = dataclasses.replace(config, rows=64, columns=128)
        run = functools.partial(matmul, config=config, outputs=2 * width)
        rows = normal(len(table.source), inputs)
        yield f"grouped {tokens} {config}", run, rows, weight, table
    for tokens, inputs, width, rank, config in (
        (9, 640, 64, 24, GroupedConfig(64, 128, 2)),
        (30, 256, 128, 8, GroupedConfig(64, 128, 2, tiles=2)),
        (3, 256, 64, 0, GroupedConfig(64, 256, 2)),
    ):
        routes = np.random.default_rng(tokens).integers(0, 3, (tokens, 2), np.int32)
        table = experts.table(jnp.asarray(routes), experts=3)
        pairs = jnp.abs(normal(2 * tokens)).astype(FLOAT32)
        weights = [
            fp4_matmul.to_tiles(random_weight(3 * outputs, columns))
            for outputs, columns in ((2 * width, inputs), (128, width))
        ]
        weights += [
            fp4_matmul.to_tiles(random_weight(*shape))
            for shape in ((2 * width, inputs), (128, width))
        ]
        shapes = (rank, inputs), (2 * width, rank), (rank, width), (128, rank)
        arrays = [normal(3, *shape) / 8 for shape in shapes]
        adapters = (arrays[:2], arrays[2:]) if rank else (None, None)
        mixtures = [(*weights[:2], table, pairs, adapters)]
        if tokens == 9:  # and one that all tokens have
            everyone = experts.table(jnp.zeros((tokens, 1), jnp.int32), experts=1)
            own = [jnp.pad(array[:1], ((0, 0), (0, 0), (0, 8))) for array in arrays[1::2]]
            adapters = tuple(zip((array[:1] for array in arrays[::2]), own, strict=True))
            mixtures.append((*weights[2:], everyone, jnp.ones(tokens), adapters))
        run = functools.partial(experts_mlp, config=config, width=width)
        yield f"experts {tokens} {rank}", run, normal(tokens, inputs), mixtures


def experts_mlp(x, mixtures, **options):
    return experts_mma.mlp(x, [experts_mma.Mixture(*own) for own in mixtures], **options)


def main():
    target = int(sys.argv[1])
    dense = itertools.chain(cases(target), several_cases(target), hybrid_cases())
    for name, *arguments in packed_cases(target) if "packed" in sys.argv else dense:
        print(json.dumps({"case": name} | check(target, *arguments)), flush=True)


if __name__ == "__main__":
    main()
