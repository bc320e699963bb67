"""Temporary: products of e4m3 tokens beside bfloat16 ones. fp8_bench.py compile|time FOLDER [M,...]"""
import concurrent.futures, dataclasses, functools, json, os, pathlib, pickle, sys, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable
from pallas_kernels import timing
from pallas_kernels import fp4_matmul as fp4
from pallas_kernels.fp4_matmul import autotune, cases, layout, sm90, tiling
from pallas_kernels.fp4_matmul import e4m3 as codes
from pallas_kernels.fp4_matmul.tiling import TileConfig

phase, folder = sys.argv[1], pathlib.Path(sys.argv[2])
MS = [int(m) for m in (sys.argv[3] if len(sys.argv) > 3 else "64,128,256").split(",")]
folder.mkdir(parents=True, exist_ok=True)
LAYERS = {l: s for l, s in cases.MODELS["7b"].items() if l in os.environ.get("ONLY", "qkv,o,gate_up,down").split(",")}
start = time.time()
def say(*a): print(f"{time.time()-start:6.1f}", *a, flush=True)

def operands(layer, m, n, k):
    rank = cases.rank_of(layer, 32)
    xs, ws = cases.random_operands(m, n, k)
    count = len(xs)
    lora = cases.random_adapters(count, rank, n, k)
    if m <= 128 and not os.environ.get('MULTI'):
        part = cases.random_xa_partials(m, k, rank)
        xa = [{"xa_partials": part + i} for i in range(count)]
    else:
        xa = [{"xa": jax.random.normal(jax.random.key(i), (m, tiling.padded_rank(rank)), jnp.bfloat16)} for i in range(count)]
    x8 = [jax.jit(lambda x: codes.pairs(codes.in_register_order(x.astype(jnp.float8_e4m3fn))))(x) for x in xs]
    return xs, x8, ws, [b for _, b in lora], xa

def product(config, swiglu, x, w, b, xa):
    ep = {}
    if swiglu:
        ep = {"epilogue": fp4.Swiglu(jnp.full((28, x.shape[0]), 1/28, jnp.float32), 1e-6)}
    return sm90.matmul(x, w, config=config, num_sms=132, b=b, **xa, **ep)

def configs_of(layer, m, n, k):
    rank = tiling.padded_rank(cases.rank_of(layer, 32))
    out = [("bf16", tiling.choose(m, n, k, rank=rank), False)]
    ranked = sorted(tiling.candidates(m, n, k, rank=rank, e4m3=True), key=lambda c: tiling.cost(c, m, n, k, 132))
    cut = lambda c: dataclasses.replace(c, in_flight=0, ahead=False)
    kinds = list(dict.fromkeys(map(cut, ranked)))
    lowest = tiling.cost(kinds[0], m, n, k, 132)
    kinds = [c for c in kinds if tiling.cost(c, m, n, k, 132) < 1.3 * lowest][:3]
    for i, c in enumerate(kinds):
        depths = [d for d in ranked if cut(d) == c]
        keep = [d for d in depths if (d.in_flight, d.ahead) in (((0, False), (1, False), (1, True)) if i < 1 else ((1, False),))] or depths[:1]
        out += [("e4m3", d, False) for d in keep]
    # the bfloat16 tiling with more stages
    b = out[0][1]
    t = dataclasses.replace(b, e4m3=True)
    if t.most_ranks >= rank and t.products == b.products:
        t = dataclasses.replace(t, stages=1)
        t = dataclasses.replace(t, stages=tiling._stages(t))
        out.append(("e4m3", t, False))
    if "gate_up" in layer and m <= 128:
        out += [(kind, c, True) for kind, c, _ in out if c.tile_m >= m][:3]
    return list(dict.fromkeys(out))

@jax.jit
def reference(x, w, b, xa):
    plain = layout.from_tiles(w)
    plain = plain._replace(global_scale=jnp.ones_like(plain.global_scale))
    dense = jax.lax.reduce_precision(fp4.dequantize(plain, jnp.float32) / 128, 5, 3)
    y = jnp.dot(x, dense.T, precision="highest") * 128 / w.divisor
    x_a = xa["xa"] if "xa" in xa else xa["xa_partials"].sum(axis=0).astype(jnp.bfloat16)
    r = min(x_a.shape[1], b.shape[1])
    return y + jnp.dot(x_a[:, :r].astype(jnp.float32), b[:, :r].astype(jnp.float32).T, precision="highest")


def wide_of(layer, m, n, k):
    out = [("bf16", tiling.choose(m, n, k, rank=64), False)]
    for tile_m in {256: (128, 256), 128: (64, 128), 64: (64,)}[m]:
        for wgn in (2, 3, 4, 5, 6):
            for block_k in (128, 256):
                for stream, split in ((True, 1), (False, 1), (False, 2)):
                    base = TileConfig(tile_m, wgn, 1, block_k, 1, stream, 0, split, False, True)
                    c = dataclasses.replace(base, stages=max(1, tiling._stages(base)))
                    if split > 1 and (m == 256 or not tiling.clusters_of(-(-m // tile_m) * -(-n // 64 // wgn), split, 132)): continue
                    if c.problem() or c.stages < 2 or c.registers() > 24 + tiling.compute_registers(wgn, 1 if m > 128 else 2): continue
                    if m <= 128 and not tiling.supports_xa_partials(c): continue
                    out.append(("e4m3", c, False))
                    if block_k == 256 and wgn > 3: out.append(("e4m3", dataclasses.replace(c, in_flight=1), False))
    return out
if os.environ.get("WIDE"): configs_of = wide_of

def multi_of(layer, m, n, k):
    layer = layer.rpartition(".")[2]
    rank = tiling.padded_rank(cases.rank_of(layer, 32))
    out = [("bf16", tiling.choose(m, n, k, rank=rank), False)]
    def add(tile_m, wgn, block_k, stream, e4m3=True, multicast=True):
        base = TileConfig(tile_m, wgn, 1, block_k, 1, stream, 1 if block_k > 128 else 0, 1, False, e4m3, multicast)
        c = dataclasses.replace(base, stages=max(1, tiling._stages(base)))
        if c.problem() or c.stages < 2 or c.most_ranks < rank: return
        out.append(("e4m3" if e4m3 else "bf16", c, False))
    if m == 256:
        if layer == "gate_up":
            add(128, 3, 256, False, True, False)
            for c in ((256, 2, 128, True), (128, 3, 256, False), (128, 3, 256, True), (128, 3, 128, False), (128, 4, 128, True), (256, 1, 256, True)): add(*c)
            for c in ((128, 3, 128, False), (128, 3, 128, True), (256, 2, 128, True), (256, 2, 128, False), (128, 4, 128, True), (256, 1, 128, True)): add(*c, False)
        if layer == "down":
            add(256, 2, 128, True, True, False)
            for c in ((256, 2, 128, True), (128, 3, 256, True), (128, 2, 256, True), (128, 4, 128, True), (256, 1, 256, True)): add(*c)
            for c in ((128, 2, 128, True), (128, 3, 128, True), (256, 2, 128, True), (256, 1, 128, True)): add(*c, False)
        if layer == "qkv":
            for c in ((256, 1, 256, True), (128, 1, 512, True), (128, 1, 512, False), (128, 2, 256, True), (96, 2, 256, False)): add(*c)
            for c in ((128, 1, 256, True), (96, 2, 256, False), (256, 1, 128, True), (128, 2, 128, True)): add(*c, False)
        if layer == "o":
            for c in ((256, 1, 256, True), (128, 1, 512, False), (128, 1, 256, False), (128, 2, 256, False), (64, 2, 512, False)): add(*c)
            for c in ((128, 1, 256, False), (64, 2, 512, False), (256, 1, 128, True), (128, 2, 128, True)): add(*c, False)
    if m == 128 and layer in ("gate_up", "down"):
        add(128, 2, 256, True, True, False)
        for c in ((128, 2, 256, True), (128, 3, 256, True), (128, 4, 128, True)): add(*c)
        for c in ((128, 3, 128, True), (128, 3, 128, False), (128, 4, 128, True), (128, 2, 256, True)): add(*c, False)
    if m == 128 and layer in ("qkv", "o"):
        for c in ((128, 1, 256, True), (64, 2, 256, False), (128, 2, 128, True)): add(*c, False)
    if m == 64 and layer in ("gate_up", "down"):
        for c in ((64, 3, 256, True), (64, 4, 256, True)):
            add(*c, True, False); add(*c); add(*c, False)
    return out
if os.environ.get("MULTI"): configs_of = multi_of

def name_of(layer, m, i): return folder / f"{layer}-{m}-{i}.pickle"

if phase == "check":
    n, k = 3584, 3584
    for m in (256, 200):
        args = operands("7b.o", m, n, k)
        xs, x8, ws, bs, xa = (a[0] for a in args)
        expected = reference(jnp.asarray(np.asarray(xs).astype(jnp.float8_e4m3fn).astype(np.float32)), ws, bs, xa)
        exact = reference(xs.astype(jnp.float32), ws, bs, xa)
        for c in (TileConfig(128, 2, 1, 256, 3, False, 1, e4m3=True, multicast=True), TileConfig(256, 2, 1, 128, 3, True, 0, e4m3=True, multicast=True),
                  TileConfig(128, 3, 1, 256, 3, True, 1, e4m3=True, multicast=True), TileConfig(128, 3, 1, 128, 3, True, e4m3=False, multicast=True), TileConfig(128, 3, 1, 256, 3, True, 1, e4m3=True)):
            f = jax.jit(functools.partial(product, c, False))
            ys = [np.asarray(f(x8 if c.e4m3 else xs, ws, bs, xa).astype(jnp.float32)) for _ in range(3)]
            e = np.asarray(expected if c.e4m3 else exact)
            say(m, c, "error", float(np.linalg.norm(ys[0] - e) / np.linalg.norm(e)), "same", all((y == ys[0]).all() for y in ys))
elif phase == "compile":
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for layer, (n, k) in LAYERS.items():
            for m in MS:
                args = operands(layer, m, n, k)
                first = [a[0] for a in args]
                jax.block_until_ready(reference(first[0].astype(jnp.float32), *first[2:]))
                shape = lambda t: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), t)
                args, first = shape(args), shape(first)
                for i, (kind, config, swiglu) in enumerate(configs_of(layer, m, n, k)):
                    def make(layer=layer, m=m, i=i, kind=kind, config=config, swiglu=swiglu, args=args, first=first):
                        pick = (lambda a: (a[1] if kind == "e4m3" else a[0], *a[2:]))
                        f = functools.partial(product, config, swiglu)
                        c = timing.repeated(f).lower(*pick(args)).compile()
                        name_of(layer, m, i).write_bytes(pickle.dumps((kind, config, swiglu, serialize_executable.serialize(c))))
                        return "ok"
                    jobs.append(((layer, m, i, kind, config, swiglu), pool.submit(make)))
        for what, job in jobs:
            try: r = job.result()
            except Exception as e: r = f"{type(e).__name__}: {e}"[:300]
            say(*what, r)
else:
    rows, best = [], {}
    tiling.verified = lambda *a: True
    fp4.load_kernel()
    for m in MS:
        for layer, (n, k) in LAYERS.items():
            files = sorted(folder.glob(f"{layer}-{m}-*.pickle"), key=lambda p: int(p.stem.split("-")[-1]))
            if not files: continue
            xs, x8, ws, bs, xa = operands(layer, m, n, k)
            expected = reference(jnp.asarray(np.asarray(xs[0]).astype(jnp.float8_e4m3fn).astype(np.float32)), ws[0], bs[0], xa[0])
            for path in files:
                kind, config, swiglu, blob = pickle.loads(path.read_bytes())
                program = serialize_executable.deserialize_and_load(*blob)
                args = (x8 if kind == "e4m3" else xs, ws, bs, xa)
                y = program(*args)[0].astype(jnp.float32)
                e = expected
                if swiglu:
                    g, u = jnp.split(e, 2, axis=1); e = jax.nn.silu(g) * u
                error = float(jnp.linalg.norm(y - e) / jnp.linalg.norm(e))
                us = 1e6 * min(autotune.seconds_of(program, args) for _ in range(2))
                key = m, layer, kind, swiglu
                best[key] = min(best.get(key, (1e9,)), (us, error, config), key=lambda t: t[0])
                rows.append({"m": m, "layer": layer, "kind": kind, "swiglu": swiglu, "us": round(us, 2), "error": error, "config": config.to_json()})
                say(m, layer, kind, "SwiGLU" if swiglu else "", f"{us:.2f} us error {error:.1e}", str(config)[10:])
                (folder / "rows.json").write_text(json.dumps(rows, indent=1))
                if os.environ.get("RESULT"): (pathlib.Path(os.environ["RESULT"]) / "rows.json").write_text(json.dumps(rows, indent=1))
        for kind in ("bf16", "e4m3"):
            found = [best.get((m, layer, kind, False)) for layer in LAYERS]
            if all(found): say(m, kind, "four products", round(sum(f[0] for f in found), 1), [round(f[0], 1) for f in found])
